/* SPDX-License-Identifier: Apache-2.0 */
/* step_model.c -- a whole step on a model of random weights, on a CPU or a GPU. */
#include "step_model.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "arch/rope.h"
#include "ops/rope.h"
#include "test_ranks.h" /* test_value */
#include "trained/internal.h"

enum { R = 4, GAP_BYTES = 256 };

static const float FP8_SCALE = 0.03125f;

const step_batch step_batches[STEP_MICROS] = {{.n_tokens = 150, .first_document = 60},
                                              {.n_tokens = 0},
                                              {.n_tokens = 128, .first_id = 5},
                                              {.n_tokens = 37, .first_document = 1, .first_id = 9}};

static const bl_model_config step_config = {.arch = &bl_arch_llama,
                                            .vocab_size = STEP_VOCAB,
                                            .hidden_size = STEP_HIDDEN,
                                            .intermediate_size = STEP_INTER,
                                            .n_layers = STEP_LAYERS,
                                            .n_heads = STEP_HEADS,
                                            .n_kv_heads = STEP_KV_HEADS,
                                            .head_dim = STEP_HEAD_DIM,
                                            .rms_norm_eps = 1e-5,
                                            .rope_theta = 1000.0};

bool step_has_gpu(void)
{
    bl_gpu_info gpu;
    if (bl_device_find_cuda(0, &gpu) == BL_OK) return true;
    printf("skip: no GPU: %s\n", bl_error_text());
    return false;
}

/* Uniform in [-size, size), a number that bf16 holds. */
static uint16_t half_value(int which, int64_t index, double size)
{
    return bl_f32_to_bf16((float)(size * (double)test_value(which, index, 1)));
}

static float float_value(int which, int64_t index, double size)
{
    return bl_bf16_to_f32(half_value(which, index, size));
}

static bl_status to_device(step_model *m, const void *host, size_t n_bytes, void **out)
{
    BL_TRY(bl_device_alloc(m->device, BL_SPACE_DEVICE, n_bytes, "a test's", out));
    return bl_staging_upload(m->staging, *out, host, n_bytes);
}

/* ---- the frozen model ---- */

/* Element i of a matrix of `cols` columns, as its format has it. Sums over a row stay about 1. */
static void fill_codes(bl_format format, int which, int64_t cols, int64_t n, void *codes)
{
    for (int64_t i = 0; i < n; i++)
        if (format == BL_FORMAT_BF16)
            ((uint16_t *)codes)[i] = half_value(which, i, sqrt(3.0 / (double)cols));
        else /* magnitudes up to 7.5 */
            ((uint8_t *)codes)[i] =
                (uint8_t)((unsigned)(1e6f + 1e6f * test_value(which, i, 2)) % 0x50u |
                          (test_value(which, i, 3) < 0 ? 0x80u : 0u));
}

static bl_status write_page(step_model *m, const bl_base_walk *at)
{
    const bl_base_part *part = at->part;
    bool is_head = at->idx_unit == STEP_LAYERS;
    void *codes;

    BL_TRY(bl_device_alloc(m->device, BL_SPACE_HOST, part->shard_bytes, "a test's", &codes));
    if (is_head && m->kind.is_tied)
        memcpy(codes, m->model.embedding, part->shard_bytes);
    else
        fill_codes(is_head ? BL_FORMAT_BF16 : m->kind.format,
                   (int)(at->idx_unit * 8 + at->idx_matrix), at->matrix->weight.cols,
                   part->rows * at->matrix->weight.cols, codes);
    bl_status st = bl_pages_write(m->weights.pages, at->index, 0, codes, part->shard_bytes);
    bl_device_free(m->device, BL_SPACE_HOST, codes);
    return st;
}

static bl_status make_pages(step_model *m, bl_tier tier)
{
    bl_model_weights *w = &m->weights;
    bl_pages_options options = {.device = m->device, .pin = true, .node = -1, .n_shards = 1};
    int64_t n_pages = bl_base_part_count(&w->layout);
    bl_page_spec specs[STEP_LAYERS * BL_LAYER_MATRICES + 1];
    char names[STEP_LAYERS * BL_LAYER_MATRICES + 1][BL_PAGE_NAME_BYTES];

    TEST_CHECK(n_pages <= (int64_t)BL_COUNT(specs));
    for (bl_base_walk at = {.layout = &w->layout}; bl_base_next(&at);) {
        bl_model_page_name(&step_config, &at, names[at.index]);
        specs[at.index] = (bl_page_spec){names[at.index], at.part->shard_bytes, tier};
    }
    BL_TRY(bl_pages_create(&options, n_pages, specs, &w->pages));
    for (bl_base_walk at = {.layout = &w->layout}; bl_base_next(&at);) BL_TRY(write_page(m, &at));
    return bl_pages_seal(w->pages);
}

/* One scale for all. */
static bl_status make_scales(step_model *m)
{
    bl_model_weights *w = &m->weights;
    enum { MOST = 2 * STEP_INTER + 4 * STEP_HIDDEN };
    float scales[MOST];

    for (int i = 0; i < MOST; i++) scales[i] = FP8_SCALE;
    BL_TRY(to_device(m, scales, sizeof scales, (void **)&w->scales));
    for (int64_t u = 0; u < STEP_LAYERS; u++)
        for (int i = 0; i < BL_LAYER_MATRICES; i++)
            for (int s = 0; s < w->layout.units[u].matrix[i].weight.n_segments; s++)
                w->layout.units[u].matrix[i].weight.segment[s].scales =
                    m->kind.format == BL_FORMAT_FP8_ROW ? w->scales : NULL;
    return BL_OK;
}

static bl_status make_tables(step_model *m)
{
    enum { ROWS = 256, HALF = STEP_HEAD_DIM / 2, N_NORMS = (2 * STEP_LAYERS + 1) * STEP_HIDDEN };
    bl_model_weights *w = &m->weights;
    float norms[N_NORMS], tables[2 * ROWS * HALF];
    double inverse[HALF];
    int64_t n = bl_model_table_positions(m->kind.device, m->model.n_positions);

    TEST_CHECK(n <= ROWS);
    for (int i = 0; i < N_NORMS; i++) norms[i] = 1.0f + float_value(900, i, 0.25);
    BL_TRY(to_device(m, norms, sizeof norms, (void **)&w->vectors));
    bl_model_rope_inv_freq(&step_config, false, inverse);
    bl_rope_fill_tables(0, n, HALF, inverse, 1.0, tables, tables + n * HALF);
    BL_TRY(to_device(m, tables, (size_t)(2 * n * HALF) * sizeof *tables, (void **)&w->rope_tables));
    w->dims.rope.cos_table = w->rope_tables;
    w->dims.rope.sin_table = w->rope_tables + n * HALF;
    return BL_OK;
}

static bl_status make_base(step_model *m, const step_choice *choice)
{
    bl_model_weights *w = &m->weights;
    uint16_t *embedding = malloc(STEP_VOCAB * STEP_HIDDEN * sizeof *embedding);

    for (int64_t i = 0; i < STEP_VOCAB * STEP_HIDDEN; i++) embedding[i] = half_value(901, i, 1.0);
    for (int i = 0; i < STEP_HIDDEN && !m->kind.is_tied; i++)
        embedding[STEP_POISON_ID * STEP_HIDDEN + i] = 0x7fc0; /* NaN */
    for (int i = 0; i < STEP_LAYERS * BL_PROJECTIONS; i++) m->formats[i] = m->kind.format;
    m->model = (bl_model){.config = step_config,
                          .formats = m->formats,
                          .embedding = embedding,
                          .embedding_dtype = BL_BF16,
                          .head_dtype = BL_BF16,
                          .n_positions = 128};
    m->model.config.tie_word_embeddings = m->kind.is_tied;
    *w = (bl_model_weights){.model = &m->model,
                            .device = m->device,
                            .dims = bl_block_dims_of(&step_config, BL_LAYER_DENSE, m->kind.device,
                                                     bl_device_act(m->device))};
    BL_TRY(bl_model_layout(&m->model.config, m->formats, BL_BF16, m->kind.device, 1, &w->layout));
    if (bl_model_head_is_table(&m->model.config, m->kind.device))
        w->tied_head = (bl_weight){
            .rows = STEP_VOCAB,
            .cols = STEP_HIDDEN,
            .n_segments = 1,
            .segment = {{.format = BL_FORMAT_BF16, .codes = embedding, .rows = STEP_VOCAB}}};
    BL_TRY(make_scales(m));
    BL_TRY(make_tables(m));
    BL_TRY(make_pages(m, choice->tier));
    return bl_model_base_create(w,
                                &(bl_model_base_options){.shard_group = m->comm,
                                                         .copy = m->copy,
                                                         .gather = m->gather,
                                                         .ring_depth = choice->depth},
                                &m->base);
}

/* ---- the adapter ---- */

/* Calls fn for each factor of each layer: its place in the plain order and in this model's. */
typedef void (*factor_fn)(float *plain, float *own, int64_t n, int which);

static void for_factors(const bl_lora_layout *own, float *plain_floats, float *own_floats,
                        factor_fn fn)
{
    bl_lora_layout plain = *own;
    int64_t r = own->options.r;

    bl_lora_layout_stack(&plain, false);
    for (int l = 0; l < STEP_LAYERS; l++)
        for (int p = 0; p < BL_PROJECTIONS; p++) {
            float *to = plain_floats + l * own->n_floats, *from = own_floats + l * own->n_floats;
            fn(to + plain.a_offset[p], from + own->a_offset[p], r * own->a_cols[p],
               1000 + 20 * l + p);
            fn(to + plain.b_offset[p], from + own->b_offset[p], r * own->b_rows[p],
               1010 + 20 * l + p);
        }
}

static void make_factor(float *plain, float *own, int64_t n, int which)
{
    for (int64_t i = 0; i < n; i++) own[i] = plain[i] = float_value(which, i, 0.25);
}

static void copy_factor(float *plain, float *own, int64_t n, int which)
{
    (void)which;
    memcpy(plain, own, (size_t)n * sizeof *own);
}

static bl_status make_adapter(step_model *m, const step_choice *choice)
{
    bl_lora_options options = {.r = R,
                               .alpha = 2 * R,
                               .dropout = m->kind.dropout,
                               .target = {true, true, true, true, true, true, true}};

    bl_lora_layout_init(&step_config, &options, &m->layout);
    bl_lora_layout_stack(&m->layout, m->kind.device == BL_DEVICE_CUDA);
    bl_trained_context context = {m->device, m->comm, m->compute, m->communication, NULL};
    BL_TRY(bl_trained_state_create(&context, &m->layout, STEP_LAYERS, choice->depth, &m->state));
    m->adapter = bl_trained_state_adapter(m->state);
    m->adapter.dropout = (bl_lora_dropout){.p = m->kind.dropout, .seed = 3, .step = 4};
    int64_t n = STEP_LAYERS * m->layout.n_floats;
    float *plain = malloc((size_t)n * sizeof *plain), *own = malloc((size_t)n * sizeof *own);
    for_factors(&m->layout, plain, own, make_factor);
    bl_status st = bl_staging_upload(m->staging, m->state->w, own, (size_t)n * sizeof *own);
    free(plain), free(own);
    return st == BL_OK ? bl_trained_state_publish(m->state) : st;
}

/* Of the state's w or grad. */
static bl_status fetch(step_model *m, const float *memory, float **out)
{
    int64_t n = STEP_LAYERS * m->layout.n_floats;
    float *own = malloc((size_t)n * sizeof *own);

    *out = malloc((size_t)n * sizeof **out);
    bl_status st = bl_staging_download(m->staging, own, memory, (size_t)n * sizeof *own);
    if (st == BL_OK) for_factors(&m->layout, *out, own, copy_factor);
    free(own);
    return st;
}

/* ---- micro-batches ---- */

/* n elements of `size` bytes at *at, and a gap behind them. */
static void *take(char **at, int64_t n, size_t size)
{
    void *taken = *at;
    *at += bl_round_up(n * (int64_t)size + GAP_BYTES, 8);
    return taken;
}

/* Host arrays of b, which must be in host memory. */
static void fill_batch(const step_batch *batch, bl_micro_batch *b)
{
    int64_t n = batch->n_tokens, first = batch->first_document;

    b->T = n + batch->n_behind;
    for (int64_t t = 0; t < b->T; t++) {
        bool counts = t < n && t % 5 != 3;
        b->ids[t] = (int32_t)((t * 7 + batch->first_id) % (STEP_VOCAB - 1));
        b->targets[t] = counts ? (int32_t)((t * 5 + 1) % STEP_VOCAB) : -100;
        b->weights[t] = counts ? (t % 3 == 0 ? 0.5f : 1.0f) : 0.0f;
        b->position[t] = (int32_t)t;
        b->sample[t] = 1 + batch->first_id;
    }
    b->cu_seqlens[0] = 0;
    if (first > 0) b->cu_seqlens[++b->n_documents] = (int32_t)first;
    if (n > first) b->cu_seqlens[++b->n_documents] = (int32_t)n;
    if (batch->n_behind > 0) b->cu_seqlens[++b->n_documents] = (int32_t)b->T;
}

static int64_t place_batch(char *memory, bl_micro_batch *b)
{
    char *at = memory;

    b->sample = take(&at, STEP_T_MAX, sizeof *b->sample);
    b->ids = take(&at, STEP_T_MAX, sizeof *b->ids);
    b->targets = take(&at, STEP_T_MAX, sizeof *b->targets);
    b->weights = take(&at, STEP_T_MAX, sizeof *b->weights);
    b->position = take(&at, STEP_T_MAX, sizeof *b->position);
    b->cu_seqlens = take(&at, STEP_T_MAX + 1, sizeof *b->cu_seqlens);
    return at - memory;
}

bl_status step_set_batch(step_model *m, int index, const step_batch *batch, int behind)
{
    static char anywhere[8 * (STEP_T_MAX + 1) * 8 + 8 * GAP_BYTES];
    bl_micro_batch host = {0}, *b = &m->micro[index];
    size_t n_bytes = (size_t)place_batch(anywhere, &host);

    BL_TRY(bl_stream_synchronize(m->compute));
    if (!m->batches[index])
        BL_TRY(bl_twin_create(m->device, n_bytes, "a test's", &m->batches[index]));
    memset(m->batches[index]->host, behind, n_bytes);
    host = (bl_micro_batch){0};
    *b = (bl_micro_batch){0};
    place_batch(m->batches[index]->host, &host);
    place_batch(m->batches[index]->memory, b);
    fill_batch(batch, &host);
    b->T = host.T;
    b->n_documents = host.n_documents;
    b->host_ids = host.ids;
    BL_TRY(bl_twin_upload(m->batches[index], m->compute, 0, n_bytes));
    return bl_stream_synchronize(m->compute);
}

/* ---- open, run, close ---- */

static bl_status make_pass(step_model *m, const step_choice *choice)
{
    bl_pass_options options = {.kind = m->kind.device,
                               .act = bl_device_act(m->device),
                               .mode = m->kind.mode,
                               .is_dense = m->kind.format == BL_FORMAT_BF16,
                               .T_max = STEP_T_MAX,
                               .max_group = choice->group,
                               .ring_depth = choice->depth,
                               .save = choice->save,
                               .training = true,
                               .offload_activations = choice->offload,
                               .pin = true,
                               .lora_r = R,
                               .lora_dropout = m->kind.dropout > 0,
                               .activations = choice->offload ? m->activations : NULL};
    size_t before = bl_device_bytes(m->device);

    if (choice->prepares)
        bl_linear_prepared_measure(m->kind.device, &m->weights.layout, STEP_LAYERS, m->kind.mode,
                                   NULL, &options.prepared);
    BL_TRY(bl_pass_create(m->device, &m->weights, m->base, m->compute, &options, &m->pass));
    bl_pass_bytes n = bl_pass_measure(&step_config, &options);
    TEST_CHECK((int64_t)(bl_device_bytes(m->device) - before) == n.inputs + n.saved + n.boundary +
                                                                     n.logits + n.workspace +
                                                                     n.feed + n.host_embeddings);
    return BL_OK;
}

bl_status step_open(const step_kind *kind, const step_choice *choice, step_model *m)
{
    *m = (step_model){.kind = *kind};
    if (kind->device == BL_DEVICE_CPU)
        BL_TRY(bl_device_create_cpu(1, &m->device));
    else
        BL_TRY(bl_device_create_cuda(0, &m->device));
    BL_TRY(bl_comm_create_local(1, 0.0, &m->comm));
    BL_TRY(bl_stream_create(m->device, "compute", &m->compute));
    BL_TRY(bl_stream_create(m->device, "comm", &m->communication));
    BL_TRY(bl_stream_create(m->device, "gather", &m->gather));
    BL_TRY(bl_stream_create(m->device, "copy", &m->copy));
    BL_TRY(bl_stream_create(m->device, "activations", &m->activations));
    BL_TRY(bl_staging_create(m->device, BL_STAGING_BYTES, "a test's staging", &m->staging));
    BL_TRY(make_base(m, choice));
    BL_TRY(make_adapter(m, choice));
    BL_TRY(make_pass(m, choice));
    for (int i = 0; i < STEP_MICROS; i++) BL_TRY(step_set_batch(m, i, &step_batches[i], 0xff));
    return BL_OK;
}

void step_close(step_model *m)
{
    bl_stream *const streams[] = {m->compute, m->communication, m->gather, m->copy, m->activations};
    for (size_t i = 0; i < BL_COUNT(streams); i++)
        if (streams[i]) (void)bl_stream_synchronize(streams[i]);
    bl_pass_destroy(m->pass);
    bl_trained_state_destroy(m->state);
    bl_base_destroy(m->base);
    bl_pages_destroy(m->weights.pages);
    bl_base_layout_free(&m->weights.layout);
    for (int i = 0; i < STEP_MICROS; i++) bl_twin_destroy(m->batches[i]);
    if (m->device) {
        bl_device_free(m->device, BL_SPACE_DEVICE, m->weights.scales);
        bl_device_free(m->device, BL_SPACE_DEVICE, m->weights.vectors);
        bl_device_free(m->device, BL_SPACE_DEVICE, m->weights.rope_tables);
    }
    bl_staging_destroy(m->staging);
    bl_comm_destroy(m->comm);
    for (size_t i = 0; i < BL_COUNT(streams); i++) bl_stream_destroy(streams[i]);
    bl_device_destroy(m->device);
    free(m->model.embedding);
}

bl_status step_run(step_model *m, const step_choice *choice, step_result *out)
{
    bl_pass_micro micro[STEP_MICROS];
    bl_lane_totals lanes[BL_N_LANES] = {0};
    double norm;

    *out = (step_result){.n = STEP_LAYERS * m->layout.n_floats};
    for (int first = 0; first < STEP_MICROS; first += choice->group) {
        int n = (int)bl_min_i64(choice->group, STEP_MICROS - first);
        for (int i = 0; i < n; i++)
            micro[i] = (bl_pass_micro){.batch = &m->micro[first + i],
                                       .adapter = &m->adapter,
                                       .loss_sum = bl_trained_state_loss_sum(m->state),
                                       .gradients = bl_trained_state_sink(m->state),
                                       .loss_scale = 1.0 / 64};
        BL_TRY(bl_pass_run(m->pass, &(bl_pass_input){.n_micro = n, .micro = micro}));
        BL_TRY(bl_pass_validate(m->pass));
    }
    BL_TRY(bl_trained_state_join(m->state));
    BL_TRY(fetch(m, m->state->grad, &out->gradients));
    BL_TRY(bl_trained_state_reduce(m->state, &out->loss, &norm, lanes));
    BL_TRY(bl_trained_state_update(m->state, 1, 0.01, 0.9, 0.99, 1e-8, 0.0, 1.0));
    BL_TRY(bl_stream_synchronize(m->compute));
    return fetch(m, m->state->w, &out->weights);
}

bl_status step_evaluate(step_model *m, int index, double *loss)
{
    double *sum = bl_trained_state_loss_sum(m->state);
    bl_pass_micro micro = {.batch = &m->micro[index], .adapter = &m->adapter, .loss_sum = sum};

    BL_TRY(bl_stream_zero(m->compute, sum, sizeof *sum));
    BL_TRY(bl_pass_run(m->pass, &(bl_pass_input){.n_micro = 1, .micro = &micro}));
    BL_TRY(bl_stream_synchronize(m->compute));
    BL_TRY(bl_staging_download(m->staging, loss, sum, sizeof *loss));
    BL_TRY(bl_stream_zero(m->compute, sum, sizeof *sum));
    return bl_stream_synchronize(m->compute);
}

void step_free(step_result *result)
{
    free(result->gradients), free(result->weights);
    *result = (step_result){0};
}

double step_distance(const float *a, const float *b, int64_t n)
{
    double difference = 0, size = 0;

    for (int64_t i = 0; i < n; i++) {
        difference += ((double)a[i] - (double)b[i]) * ((double)a[i] - (double)b[i]);
        size += (double)b[i] * (double)b[i];
    }
    return sqrt(difference / size);
}
