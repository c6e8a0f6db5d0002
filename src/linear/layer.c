/* SPDX-License-Identifier: Apache-2.0 */
/* layer.c -- stacks of layers: creation, and the memory of a stack. */
#include "linear/layer.h"

#include <stdlib.h>

#include "base/sizes.h"
#include "base/xxh3.h"
#include "linear/base_paged.h"
#include "linear/layer_internal.h"

static bl_status null_argument(const char *call, const char *name)
{
    return BL_FAIL(BL_EUSAGE, "%s: %s is NULL", call, name);
}

/* ---- a stack's members ---- */

bl_linear_layer *bl_linear_stack_layer(bl_linear_stack *stack, int64_t layer)
{
    return stack && layer >= 0 && layer < stack->n_layers ? &stack->layers[layer] : NULL;
}

float *bl_linear_stack_weights(bl_linear_stack *stack, int64_t *n_floats)
{
    if (n_floats) *n_floats = stack->n_floats;
    return stack->weights;
}

float *bl_linear_stack_gradients(bl_linear_stack *stack, int64_t *n_floats)
{
    if (n_floats) *n_floats = stack->n_floats;
    return stack->gradients;
}

bl_linear_lora_view bl_linear_layer_lora(const bl_linear_layer *layer)
{
    float *w = layer->stack->weights, *g = layer->stack->gradients;

    if (layer->r == 0 || layer->is_external) return (bl_linear_lora_view){0};
    return (bl_linear_lora_view){.r = layer->r,
                                 .A = w ? w + layer->a_offset : NULL,
                                 .B = w ? w + layer->b_offset : NULL,
                                 .dA = g ? g + layer->a_offset : NULL,
                                 .dB = g ? g + layer->b_offset : NULL};
}

void bl_linear_stack_set_dropout(bl_linear_stack *stack, uint64_t step, const int64_t *sample,
                                 const int32_t *position)
{
    stack->step = step;
    stack->sample = sample;
    stack->position = position;
}

bl_status bl_linear_stack_verify(bl_linear_stack *stack)
{
    if (!stack) return null_argument("bl_linear_stack_verify", "stack");
    /* A call may have asked for the next layers. */
    if (stack->copy) BL_TRY(bl_stream_synchronize(stack->copy));
    if (stack->gather) BL_TRY(bl_stream_synchronize(stack->gather));
    return bl_base_verify(stack->base);
}

/* ---- creation ---- */

/* A hash of the values that must be equal on all ranks. */
static uint64_t hash_stack(const bl_linear_stack *stack)
{
    const bl_linear_options *o = &stack->options;
    int64_t common[] = {stack->n_layers, stack->ring_depth, o->forward_only, (int64_t)o->seed};
    uint64_t hash = XXH3_64bits(common, sizeof common);

    for (int64_t i = 0; i < stack->n_layers; i++) {
        const bl_linear_spec *s = &stack->specs[i];
        const bl_linear_layer *layer = &stack->layers[i];
        int64_t shape[] = {s->rows,           s->cols, s->format, layer->r, layer->is_external,
                           layer->bias_offset};
        float factors[] = {layer->scale, layer->dropout};
        hash = XXH3_64bits_withSeed(shape, sizeof shape, hash);
        hash = XXH3_64bits_withSeed(factors, sizeof factors, hash);
    }
    return hash;
}

/* BL_EUSAGE names the first rank whose layers differ from rank 0's. */
static bl_status compare_ranks(const bl_linear_stack *stack)
{
    size_t n_bytes = (size_t)stack->n_ranks * sizeof(uint64_t);
    bl_twin *twin;
    bl_status st;

    BL_TRY(bl_twin_create(stack->options.device, n_bytes, "linear stack", &twin));
    uint64_t *all = twin->memory, *host = twin->host;
    host[stack->rank] = hash_stack(stack);
    BL_TRY_GOTO(st, done, bl_twin_upload(twin, stack->gather, 0, n_bytes));
    BL_TRY_GOTO(
        st, done,
        bl_comm_all_gather(stack->comm, stack->gather, all + stack->rank, all, sizeof *all));
    BL_TRY_GOTO(st, done, bl_twin_download(twin, stack->gather, 0, n_bytes));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(stack->gather));
    for (int r = 1; r < stack->n_ranks && st == BL_OK; r++)
        if (host[r] != host[0])
            st = BL_FAIL(BL_EUSAGE,
                         "linear stack: layers or options of rank %d differ from rank 0's", r);
done:
    if (st != BL_OK) (void)bl_stream_synchronize(stack->gather);
    bl_twin_destroy(twin);
    return st;
}

static bl_status take(const bl_linear_stack *stack, size_t n_bytes, const char *what, void **out)
{
    if (n_bytes == 0) return BL_OK;
    return bl_device_alloc(stack->options.device, BL_SPACE_DEVICE, n_bytes, what, out);
}

/* `bias` in the dtype of `out`, host memory. */
static void fill_bias(const float *bias, int64_t n, bl_tensor out)
{
    for (int64_t i = 0; i < n; i++) {
        if (out.dtype == BL_F32)
            ((float *)out.data)[i] = bias[i];
        else
            ((uint16_t *)out.data)[i] = bl_f32_to_bf16(bias[i]);
    }
}

static void give_back(const bl_linear_stack *stack, void *memory)
{
    if (memory) bl_device_free(stack->options.device, BL_SPACE_DEVICE, memory);
}

static bl_status take_memory(bl_linear_stack *stack)
{
    size_t n_floats = (size_t)stack->n_floats;
    bl_tensor copies = {NULL, bl_device_act(stack->options.device)}, biases = copies;

    BL_TRY(take(stack, stack->memory.scales, "scales", (void **)&stack->scales));
    for (int64_t i = 0; i < stack->n_layers; i++)
        if (stack->layers[i].n_scales > 0)
            stack->layout.units[i].matrix[0].weight.segment[0].scales =
                stack->scales + stack->layers[i].scale_offset;
    BL_TRY(take(stack, n_floats * sizeof(float), "LoRA weights", (void **)&stack->weights));
    if (!stack->options.forward_only)
        BL_TRY(take(stack, n_floats * sizeof(float), "LoRA gradients", (void **)&stack->gradients));
    if (copies.dtype != BL_F32)
        BL_TRY(take(stack, bl_tensor_bytes(copies, stack->n_floats + stack->n_external),
                    "LoRA copies", &copies.data));
    stack->copies = copies;
    BL_TRY(take(stack, bl_tensor_bytes(biases, stack->n_biases), "biases", &biases.data));
    stack->biases = biases;
    return BL_OK;
}

/* A's first values and the biases. */
static bl_status fill_memory(const bl_linear_stack *stack, bl_staging *staging)
{
    size_t n_weights = (size_t)stack->n_floats * sizeof(float),
           n_biases = bl_tensor_bytes(stack->biases, stack->n_biases);
    float *weights = calloc(1, n_weights + 1);
    char *biases = calloc(1, n_biases + 1);
    bl_status st = weights && biases ? BL_OK : BL_FAIL(BL_ENOMEM, "LoRA weights");

    for (int64_t i = 0; st == BL_OK && i < stack->n_layers; i++) {
        const bl_linear_layer *layer = &stack->layers[i];
        const bl_weight *w = &stack->layout.units[i].matrix[0].weight;
        if (layer->r > 0 && !layer->is_external)
            bl_lora_initialize(stack->options.seed, i, 0, w->cols, 0, layer->r * w->cols,
                               weights + layer->a_offset);
        if (layer->bias_offset >= 0)
            fill_bias(stack->specs[i].bias, w->rows,
                      bl_tensor_at(bl_tensor_of(biases, stack->biases.dtype), layer->bias_offset));
    }
    if (st == BL_OK) st = bl_staging_upload(staging, stack->weights, weights, n_weights);
    if (st == BL_OK) st = bl_staging_upload(staging, stack->biases.data, biases, n_biases);
    free(biases);
    free(weights);
    return st;
}

/* ---- memory for a call of T tokens ---- */

static bl_status upload_tokens(const bl_linear_stack *stack, int64_t T)
{
    size_t n_bytes = (size_t)T * sizeof(int32_t);
    int32_t *token = malloc(n_bytes);
    float *ones = calloc((size_t)T, sizeof(float)); /* in the biases' dtype: as large or smaller */
    bl_staging *staging = NULL;
    bl_status st = token && ones ? BL_OK : BL_FAIL(BL_ENOMEM, "numbers of tokens");

    for (int64_t t = 0; st == BL_OK && t < T; t++) {
        float one = 1;
        token[t] = (int32_t)t;
        fill_bias(&one, 1, bl_tensor_at(bl_tensor_of(ones, stack->ones.dtype), t));
    }
    if (st == BL_OK)
        st = bl_staging_create(stack->options.device, BL_STAGING_BYTES, "linear stack", &staging);
    if (st == BL_OK && stack->token) st = bl_staging_upload(staging, stack->token, token, n_bytes);
    if (st == BL_OK && stack->ones.data)
        st = bl_staging_upload(staging, stack->ones.data, ones, bl_tensor_bytes(stack->ones, T));
    bl_staging_destroy(staging);
    free(ones);
    free(token);
    return st;
}

bl_status bl_linear_stack_reserve(bl_linear_stack *stack, int64_t T)
{
    void *const old[] = {stack->work, stack->no_sample, stack->token, stack->ones.data};

    for (size_t i = 0; i < BL_COUNT(old); i++) give_back(stack, old[i]);
    stack->work = stack->no_sample = NULL;
    stack->token = NULL;
    stack->ones = bl_tensor_of(NULL, stack->biases.dtype);
    stack->n_tokens = 0;
    stack->work_bytes = bl_linear_stack_work_bytes(stack, T);
    stack->memory.work = bl_linear_stack_call_bytes(stack, T);
    BL_TRY(take(stack, stack->work_bytes, "linear workspace", &stack->work));
    if (stack->has_dropout) {
        BL_TRY(
            take(stack, (size_t)T * sizeof(int64_t), "dropout keys", (void **)&stack->no_sample));
        BL_TRY(take(stack, (size_t)T * sizeof(int32_t), "dropout keys", (void **)&stack->token));
    }
    if (stack->n_biases > 0)
        BL_TRY(take(stack, bl_tensor_bytes(stack->ones, T), "ones of a bias", &stack->ones.data));
    if (stack->token || stack->ones.data) BL_TRY(upload_tokens(stack, T));
    stack->n_tokens = T;
    return BL_OK;
}

static bl_status create_base(bl_linear_stack *stack)
{
    bl_pager_options options = {.device = stack->options.device,
                                .comm = stack->comm,
                                .copy = stack->copy,
                                .gather = stack->gather,
                                .ring_depth = stack->ring_depth};

    return bl_base_create_paged(&stack->layout, stack->pages, &options, &stack->base);
}

static bl_status create(bl_linear_stack *stack, const bl_linear_options *options, int64_t n_layers,
                        const bl_linear_spec *specs)
{
    bl_staging *staging;

    BL_TRY(bl_linear_stack_outline(stack, options, n_layers, specs));
    BL_TRY(bl_stream_create_urgent(options->device, "linear gather", &stack->gather));
    BL_TRY(bl_stream_create_urgent(options->device, "linear copy", &stack->copy));
    if (stack->n_ranks > 1) {
        BL_TRY(bl_comm_split(options->comm, 0, &stack->comm));
        BL_TRY(compare_ranks(stack));
    }
    BL_TRY(take_memory(stack));
    if (options->max_tokens > 0) BL_TRY(bl_linear_stack_reserve(stack, options->max_tokens));
    BL_TRY(bl_stamp_create(options->device, &stack->begin_wait));
    BL_TRY(bl_stamp_create(options->device, &stack->end_wait));
    BL_TRY(bl_linear_order_create(&stack->order, n_layers));
    BL_TRY(bl_staging_create(options->device, BL_STAGING_BYTES, "linear stack", &staging));
    bl_status st = fill_memory(stack, staging);
    if (st == BL_OK) st = bl_linear_stack_load(stack, staging);
    bl_staging_destroy(staging);
    stack->specs = NULL;
    return st == BL_OK ? create_base(stack) : st;
}

bl_status bl_linear_stack_plan(const bl_linear_options *options, int64_t n_layers,
                               const bl_linear_spec *specs, bl_linear_memory *out)
{
    if (!out) return null_argument("bl_linear_stack_plan", "out");
    bl_linear_stack *stack = calloc(1, sizeof *stack);

    *out = (bl_linear_memory){0};
    if (!stack) return BL_FAIL(BL_ENOMEM, "linear stack");
    bl_status st = bl_linear_stack_outline(stack, options, n_layers, specs);
    if (st == BL_OK) *out = stack->memory;
    bl_linear_stack_destroy(stack);
    return st;
}

bl_status bl_linear_stack_create(const bl_linear_options *options, int64_t n_layers,
                                 const bl_linear_spec *specs, bl_linear_stack **out)
{
    if (!out) return null_argument("bl_linear_stack_create", "out");
    bl_linear_stack *stack = calloc(1, sizeof *stack);
    bl_error error;

    *out = NULL;
    bl_status st =
        stack ? create(stack, options, n_layers, specs) : BL_FAIL(BL_ENOMEM, "linear stack");
    if (st == BL_OK) {
        *out = stack;
        return BL_OK;
    }
    bl_error_save(&error, st);
    if (options && options->comm && bl_comm_size(options->comm) > 1)
        bl_comm_abort(options->comm, &error);
    bl_linear_stack_destroy(stack);
    return bl_error_restore(&error);
}

void bl_linear_stack_destroy(bl_linear_stack *stack)
{
    if (!stack) return;
    void *const memory[] = {stack->scales,      stack->weights,     stack->gradients,  stack->work,
                            stack->copies.data, stack->biases.data, stack->no_sample,  stack->token,
                            stack->ones.data,   stack->panel,       stack->halves.data};

    if (stack->gather) (void)bl_stream_synchronize(stack->gather);
    if (stack->copy) (void)bl_stream_synchronize(stack->copy);
    bl_base_destroy(stack->base);
    bl_pages_destroy(stack->pages);
    bl_stream_destroy(stack->copy);
    bl_stream_destroy(stack->gather);
    bl_comm_destroy(stack->comm);
    for (size_t i = 0; i < BL_COUNT(memory); i++) give_back(stack, memory[i]);
    bl_stamp_destroy(stack->begin_wait);
    bl_stamp_destroy(stack->end_wait);
    free(stack->order.calls);
    free(stack->layout.units);
    free(stack->wanted);
    free(stack->held);
    free(stack->tiers);
    free(stack->layers);
    free(stack);
}
