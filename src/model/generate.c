/* SPDX-License-Identifier: Apache-2.0 */
/* generate.c -- prefill and decode over a key-value cache: the layers of a pass, without gradients.
 */
#include "model/generate.h"

#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "device/staging.h"
#include "model/feed_internal.h"
#include "model/table_terms_internal.h"
#include "ops/matmul.h"
#include "ops/norm.h"

enum { CHUNK = 512 }; /* tokens of a prompt that go through the layers together */

struct bl_generator {
    bl_device *device;
    bl_stream *stream;
    const bl_model_weights *weights;
    /* With RoPE's tables of `capacity` tokens: keys in the cache keep theirs. */
    bl_block_dims dims[BL_LAYER_KINDS];
    bl_base *base;
    const bl_lora_layout *lora;
    bl_tensor lora_weights;
    int64_t capacity, n_past;
    bl_tensor caches; /* [n_layers][k, v][capacity * kv_width] */
    char *memory;     /* x (CHUNK, H) | normed (H) | workspace | feed | scratch of the head */
    bl_tensor x, normed;
    bl_feed *feed;
    void *head_scratch; /* NULL: the head's product needs none */
    size_t head_scratch_bytes;
    bl_twin *tokens;                              /* int32_t: ids (CHUNK) | cu_seqlens (2) */
    bl_twin *logits;                              /* (V), of the activations' dtype */
    float *values;                                /* (V), host: the logits */
    bl_block_workspace workspace[BL_LAYER_KINDS]; /* in the same memory */
    bl_pass_adapter adapter;                      /* its terms; the other members are not used */
    model_term_space terms;                       /* of CHUNK tokens */
    void *terms_memory;
    bl_micro_batch batch;
};

/* What of `memory` each part takes, bytes: multiples of 256. */
typedef struct memory_size {
    int64_t rows, workspace, feed, head_scratch;
} memory_size;

static bl_block_dims dims_of(const bl_model_weights *weights, int kind)
{
    return bl_block_dims_of(&weights->model->config, (bl_layer_kind)kind, weights->dims.kind,
                            weights->dims.act);
}

static memory_size measure(const bl_model_weights *weights, int64_t r)
{
    enum { ALIGNMENT_BYTES = 256 };
    const bl_model_config *c = &weights->model->config;
    const bl_block_dims *dims = &weights->dims;
    bl_tensor none = bl_tensor_of(NULL, dims->act);
    bl_matmul_weight_args head = {.forward = true, .T = 1, .weight = weights->tied_head};

    int64_t workspace = 0;

    if (head.weight.rows == 0) head.weight = weights->layout.units[c->n_layers].matrix[0].weight;
    for (int k = 0; k < BL_LAYER_KINDS; k++) {
        bl_block_dims of_kind = dims_of(weights, k);
        if (bl_model_layers_of(c, (bl_layer_kind)k) > 0)
            workspace =
                bl_max_i64(workspace, bl_block_workspace_bytes(&of_kind, CHUNK, r, false, false));
    }
    return (memory_size){
        bl_round_up((int64_t)bl_tensor_bytes(none, (CHUNK + 1) * c->hidden_size), ALIGNMENT_BYTES),
        bl_round_up(workspace, ALIGNMENT_BYTES),
        bl_round_up(bl_feed_measure(dims, false, CHUNK, 1).device_bytes, ALIGNMENT_BYTES),
        (int64_t)bl_matmul_weight_scratch_bytes(dims->kind, &head)};
}

static bl_status take_memory(bl_generator *g)
{
    const bl_block_dims *dims = &g->weights->dims;
    int64_t H = dims->hidden, r = bl_lora_largest_r(g->lora);
    memory_size n = measure(g->weights, r);

    BL_TRY(bl_device_alloc(g->device, BL_SPACE_DEVICE,
                           (size_t)(n.rows + n.workspace + n.feed + n.head_scratch), "activations",
                           (void **)&g->memory));
    char *feed = g->memory + n.rows + n.workspace;
    g->x = bl_tensor_of(g->memory, dims->act);
    g->normed = bl_tensor_at(g->x, CHUNK * H);
    for (int k = 0; k < BL_LAYER_KINDS; k++)
        bl_block_place_workspace(&g->dims[k], CHUNK, r, false, false, g->memory + n.rows,
                                 &g->workspace[k]);
    g->head_scratch = n.head_scratch > 0 ? feed + n.feed : NULL;
    g->head_scratch_bytes = (size_t)n.head_scratch;
    return bl_feed_create(g->device, g->weights, CHUNK, 1, feed, &g->feed);
}

bl_status bl_generator_create(bl_device *device, bl_stream *stream, const bl_model_weights *weights,
                              bl_base *base, const bl_lora_layout *lora, bl_tensor lora_weights,
                              int64_t capacity, bl_generator **out)
{
    const bl_model_config *c = &weights->model->config;
    const bl_block_dims *dims = &weights->dims;
    int64_t V = c->vocab_size;
    bl_tensor none = bl_tensor_of(NULL, dims->act);
    size_t cache_bytes = bl_tensor_bytes(none, c->n_layers * 2 * capacity * dims->kv_width);
    bl_status st = BL_OK;

    *out = NULL;
    if (capacity > weights->model->n_positions)
        return BL_FAIL(BL_EUSAGE, "a cache of %lld tokens over a model opened for %lld positions",
                       (long long)capacity, (long long)weights->model->n_positions);
    bl_generator *g = calloc(1, sizeof *g);
    if (!g) return BL_FAIL(BL_ENOMEM, "a generator");
    *g = (bl_generator){.device = device,
                        .stream = stream,
                        .weights = weights,
                        .base = base,
                        .lora = lora,
                        .lora_weights = lora_weights,
                        .capacity = capacity,
                        .caches = none};
    for (int k = 0; k < BL_LAYER_KINDS; k++) {
        g->dims[k] = dims_of(weights, k);
        g->dims[k].rope = bl_block_rope_of_document(&dims->rope, capacity);
    }
    BL_TRY_GOTO(
        st, done,
        bl_device_alloc(device, BL_SPACE_DEVICE, cache_bytes, "key/value cache", &g->caches.data));
    BL_TRY_GOTO(st, done, take_memory(g));
    BL_TRY_GOTO(st, done,
                bl_twin_create(device, (CHUNK + 2) * sizeof(int32_t), "tokens", &g->tokens));
    BL_TRY_GOTO(st, done, bl_twin_create(device, bl_tensor_bytes(none, V), "logits", &g->logits));
    if (!(g->values = calloc((size_t)V, sizeof *g->values))) {
        st = BL_FAIL(BL_ENOMEM, "the logits");
        goto done;
    }
    int32_t *ids = g->tokens->memory;
    g->batch = (bl_micro_batch){
        .n_documents = 1, .ids = ids, .cu_seqlens = ids + CHUNK, .host_ids = g->tokens->host};
    *out = g;
    g = NULL;
done:
    bl_generator_destroy(g);
    return st;
}

bl_status bl_generator_use_terms(bl_generator *g, const bl_table_term *terms)
{
    int64_t H = g->weights->dims.hidden,
            r = bl_max_i64(terms[BL_TABLE_EMBEDDING].r, terms[BL_TABLE_HEAD].r);
    size_t n_bytes = (size_t)model_term_space_bytes(g->x.dtype, CHUNK, r, H, false);

    if (n_bytes == 0) return BL_OK;
    BL_TRY(bl_device_alloc(g->device, BL_SPACE_DEVICE, n_bytes, "LoRA terms of the embedding",
                           &g->terms_memory));
    model_term_space_place(g->x.dtype, CHUNK, r, false, g->terms_memory, &g->terms);
    g->adapter.terms = terms;
    return BL_OK;
}

void bl_generator_destroy(bl_generator *g)
{
    if (!g) return;
    /* After a failed extend tasks may still use the memory. */
    (void)bl_stream_synchronize(g->stream);
    bl_feed_destroy(g->feed);
    bl_device_free(g->device, BL_SPACE_DEVICE, g->caches.data);
    bl_device_free(g->device, BL_SPACE_DEVICE, g->memory);
    bl_device_free(g->device, BL_SPACE_DEVICE, g->terms_memory);
    bl_twin_destroy(g->tokens);
    bl_twin_destroy(g->logits);
    free(g->values);
    free(g);
}

static bl_status embed(bl_generator *g)
{
    double multiplier = g->weights->model->config.embedding_multiplier;
    const bl_table_term *term = model_table_term(&g->adapter, BL_TABLE_EMBEDDING);

    BL_TRY(bl_feed_begin(g->feed));
    BL_TRY(bl_feed_embed(g->feed, g->stream, &g->batch, 0, g->x));
    if (!term) return BL_OK;
    return model_term_embed(g->stream, term, multiplier != 0 ? multiplier : 1.0, g->batch.T,
                            g->weights->dims.hidden, g->batch.ids, &g->terms, g->x);
}

/* The layer's experts. */
static bl_status extend_groups(bl_generator *g, const bl_block *block)
{
    const bl_block_tensors none = {.lse = NULL};
    const bl_block_workspace *ws = &g->workspace[block->dims->layer_kind];
    int64_t n = block->dims->n_expert_groups;

    for (int64_t i = 0; i < n; i++) {
        int64_t unit = bl_base_group(g->base, block->layer, i);
        BL_TRY(bl_base_prefetch(g->base, unit));
        if (i + 1 < n)
            BL_TRY(bl_base_prefetch(g->base, bl_base_group(g->base, block->layer, i + 1)));
        BL_TRY(bl_block_forward_group(g->stream, block, &g->batch, &none, ws, i, g->x));
        BL_TRY(bl_base_release(g->base, unit, g->stream));
    }
    return BL_OK;
}

static bl_status extend_layers(bl_generator *g)
{
    const bl_model *model = g->weights->model;
    int64_t cache = g->capacity * g->weights->dims.kv_width;

    BL_TRY(embed(g));
    for (int64_t l = 0; l < model->config.n_layers; l++) {
        bl_layer_kind kind = bl_model_kind(&model->config, l);
        bl_block block = {.dims = &g->dims[kind],
                          .base = g->base,
                          .layer = l,
                          .vectors = bl_model_layer_vectors(g->weights, l),
                          .lora = g->lora,
                          .lora_weights =
                              bl_tensor_at(g->lora_weights, bl_lora_floats_before(g->lora, l))};
        bl_tensor k = bl_tensor_at(g->caches, 2 * l * cache), v = bl_tensor_at(k, cache);
        BL_TRY(bl_base_prefetch(g->base, l));
        BL_TRY(bl_block_extend(g->stream, &block, &g->batch, g->n_past, k, v, &g->workspace[kind],
                               g->x));
        BL_TRY(extend_groups(g, &block));
        BL_TRY(bl_base_release(g->base, l, g->stream));
    }
    return BL_OK;
}

/* logits (1, V) += s u B^T */
static bl_status add_head_term(bl_generator *g, bl_tensor logits)
{
    const bl_table_term *term = model_table_term(&g->adapter, BL_TABLE_HEAD);
    bl_lora_dropout none = {.p = 0};
    bl_loss_head_term head;
    int64_t V = g->weights->model->config.vocab_size, H = g->weights->dims.hidden;

    if (!term) return BL_OK;
    BL_TRY(model_term_head(g->stream, term, &none, 1, H, g->normed, &g->terms, NULL, &head));
    return bl_matmul(g->stream, &(bl_matmul_args){.transpose_b = true,
                                                  .M = 1,
                                                  .N = V,
                                                  .K = head.r,
                                                  .lda = head.r,
                                                  .ldb = head.r,
                                                  .ldc = V,
                                                  .alpha = head.scale,
                                                  .beta = 1.0f,
                                                  .a = head.u,
                                                  .b = head.B,
                                                  .c = logits});
}

static bl_status last_logits(bl_generator *g)
{
    const bl_model_config *c = &g->weights->model->config;
    bl_tensor logits = bl_tensor_of(g->logits->memory, g->x.dtype);
    int64_t H = c->hidden_size;
    bl_weight head = g->weights->tied_head;

    if (head.rows == 0) BL_TRY(bl_base_acquire(g->base, c->n_layers, 0, g->stream, &head));
    bl_block_norm norm = {.T = 1,
                          .w = bl_model_layer_vectors(g->weights, c->n_layers),
                          .x = bl_tensor_at(g->x, (g->batch.T - 1) * H)};
    BL_TRY(bl_block_norm_forward(g->stream, &g->weights->dims, &norm, g->normed));
    BL_TRY(bl_matmul_weight(g->stream,
                            &(bl_matmul_weight_args){.forward = true,
                                                     .T = 1,
                                                     .in = g->normed,
                                                     .out = logits,
                                                     .weight = head,
                                                     .scratch = g->head_scratch,
                                                     .scratch_bytes = g->head_scratch_bytes}));
    BL_TRY(add_head_term(g, logits));
    BL_TRY(bl_base_release(g->base, c->n_layers, g->stream));
    BL_TRY(bl_twin_download(g->logits, g->stream, 0, g->logits->n_bytes));
    BL_TRY(bl_stream_synchronize(g->stream));
    bl_dtype_to_f32(logits.dtype, g->logits->host, g->values, (size_t)c->vocab_size);
    for (int64_t i = 0; i < c->vocab_size; i++)
        if (!isfinite(g->values[i]))
            return BL_FAIL(BL_ENUMERIC, "the logit of token %lld is not finite", (long long)i);
    return BL_OK;
}

bl_status bl_generator_extend(bl_generator *g, const int32_t *ids, int64_t n, const float **logits)
{
    int64_t vocab = g->weights->model->config.vocab_size;
    int32_t *host_ids = g->tokens->host, *ends = host_ids + CHUNK;

    if (n < 1 || g->n_past + n > g->capacity)
        return BL_FAIL(BL_EUSAGE, "%lld tokens after %lld do not fit a cache of %lld", (long long)n,
                       (long long)g->n_past, (long long)g->capacity);
    for (int64_t i = 0; i < n; i++)
        if (ids[i] < 0 || ids[i] >= vocab)
            return BL_FAIL(BL_EINPUT, "token %d is not in a vocabulary of %lld", ids[i],
                           (long long)vocab);
    for (int64_t done = 0; done < n; done += g->batch.T) {
        g->batch.T = bl_min_i64(CHUNK, n - done);
        for (int64_t i = 0; i < g->batch.T; i++) host_ids[i] = ids[done + i];
        ends[1] = (int32_t)g->batch.T;
        BL_TRY(bl_twin_upload(g->tokens, g->stream, 0, g->tokens->n_bytes));
        BL_TRY(extend_layers(g));
        BL_TRY(bl_stream_synchronize(g->stream)); /* ids are about to change */
        g->n_past += g->batch.T;
    }
    BL_TRY(last_logits(g));
    *logits = g->values;
    return BL_OK;
}

void bl_generator_shorten(bl_generator *g, int64_t n)
{
    g->n_past = bl_min_i64(g->n_past, n);
}
