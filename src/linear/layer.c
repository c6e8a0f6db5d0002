/* SPDX-License-Identifier: Apache-2.0 */
/* layer.c -- stacks of layers: creation, the order in which weights are gathered, and calls.
 *
 * Which units the ring holds is decided at each call from the calls so far: those that the calls to
 * come are expected to need, beginning with its own. The others are released, by the stream of this
 * call, which comes after their last use. */
#include "linear/layer.h"

#include <inttypes.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "base/xxh3.h"
#include "linear/base_paged.h"
#include "linear/layer_internal.h"
#include "ops/elementwise.h"

/* ---- the order of gathers ---- */

/* The layer expected after `unit`: up and down, or around. */
static int64_t next_unit(const bl_linear_stack *stack, int64_t unit, int *direction)
{
    if (stack->options.forward_only) return (unit + 1) % stack->n_layers;
    if (unit + *direction < 0 || unit + *direction >= stack->n_layers) *direction = -*direction;
    return bl_min_i64(bl_max_i64(unit + *direction, 0), stack->n_layers - 1);
}

static bool is_among(const int64_t *units, int64_t n, int64_t unit)
{
    for (int64_t i = 0; i < n; i++)
        if (units[i] == unit) return true;
    return false;
}

/* The next n distinct units, from `unit` on. Turning at one end, n units are met within 2 n steps;
 * when turning at both, all of them. */
static int64_t expect(const bl_linear_stack *stack, int64_t unit, int64_t n, int64_t *units)
{
    int direction = stack->direction;
    int64_t n_units = 0;

    for (int64_t step = 0; step < 2 * n && n_units < n; step++) {
        if (!is_among(units, n_units, unit)) units[n_units++] = unit;
        unit = next_unit(stack, unit, &direction);
    }
    return n_units;
}

/* Has the ring hold what is expected from `layer` on. */
static bl_status turn_ring(bl_linear_stack *stack, int64_t layer, bl_stream *stream)
{
    int64_t n = bl_min_i64(stack->ring_depth, stack->n_layers), *wanted = stack->wanted, *held;

    if (stack->last_layer >= 0 && layer != stack->last_layer)
        stack->direction = layer > stack->last_layer ? 1 : -1;
    stack->last_layer = layer;
    n = expect(stack, layer, n, wanted);
    for (int64_t i = 0; i < stack->n_held; i++)
        if (!is_among(wanted, n, stack->held[i]))
            BL_TRY(bl_base_release(stack->base, stack->held[i], stream));
    for (int64_t i = 0; i < n; i++) BL_TRY(bl_base_prefetch(stack->base, wanted[i]));
    held = stack->held;
    stack->held = wanted;
    stack->wanted = held;
    stack->n_held = n;
    return BL_OK;
}

/* ---- calls ---- */

bl_linear_use bl_linear_layer_use(const bl_linear_layer *layer)
{
    const bl_linear_stack *stack = layer->stack;
    bl_linear_use use = {.base = stack->base,
                         .unit = layer->index,
                         .lora = {.mode = layer->mode,
                                  .workspace = stack->work,
                                  .workspace_bytes = stack->work_bytes}};

    if (layer->r == 0) return use;
    bl_linear_lora_view view = bl_linear_layer_lora(layer);
    use.lora.n_parts = 1;
    use.lora.part[0] =
        (bl_lora_part){.r = layer->r,
                       .rows = stack->layout.units[layer->index].matrix[0].weight.rows,
                       .scale = layer->scale,
                       .A = bl_tensor_f32(view.A),
                       .B = bl_tensor_f32(view.B),
                       .dA = view.dA,
                       .dB = view.dB};
    if (bl_tensor_is_there(stack->copies)) {
        use.lora.part[0].A = bl_tensor_at(stack->copies, layer->a_offset);
        use.lora.part[0].B = bl_tensor_at(stack->copies, layer->b_offset);
    }
    use.lora.dropout =
        (bl_lora_dropout){.p = layer->dropout,
                          .seed = stack->options.seed,
                          .step = stack->step,
                          .sample = stack->sample ? stack->sample : stack->no_sample,
                          .position = stack->position ? stack->position : stack->token};
    return use;
}

static bl_status null_argument(const char *call, const char *name)
{
    return BL_FAIL(BL_EUSAGE, "%s: %s is NULL", call, name);
}

/* What a call has of activations; `is_optional`: it may be none. */
static bl_status check_tensor(const bl_linear_layer *layer, const char *name, int64_t T,
                              bl_tensor tensor, bool is_optional)
{
    bl_dtype want = bl_act_dtype(bl_device_get_kind(layer->stack->options.device));

    if (!bl_tensor_is_there(tensor)) {
        if (is_optional || T == 0) return BL_OK;
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": %s is NULL", layer->index, name);
    }
    if (tensor.dtype == want) return BL_OK;
    return BL_FAIL(
        BL_EUSAGE, "layer %" PRId64 ": %s is %s, this device takes %s", layer->index, name,
        (int)tensor.dtype >= 0 && tensor.dtype < BL_DTYPE_COUNT ? bl_dtype_name(tensor.dtype)
                                                                : "of an unknown dtype",
        bl_dtype_name(want));
}

static bl_status begin_call(const bl_linear_layer *layer, bl_stream *stream, int64_t T)
{
    bl_linear_stack *stack = layer->stack;

    if (T < 0 || T > stack->options.max_tokens)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": %" PRId64 " tokens, max_tokens is %" PRId64,
                       layer->index, T, stack->options.max_tokens);
    BL_TRY(turn_ring(stack, layer->index, stream));
    if (layer->r == 0 || !bl_tensor_is_there(stack->copies)) return BL_OK;
    int64_t n = layer->b_offset - layer->a_offset +
                layer->r * stack->layout.units[layer->index].matrix[0].weight.rows;
    return bl_cast(stream, &(bl_cast_args){.n = n,
                                           .x = bl_tensor_f32(stack->weights + layer->a_offset),
                                           .y = bl_tensor_at(stack->copies, layer->a_offset)});
}

bl_status bl_linear_layer_forward(bl_linear_layer *layer, bl_stream *stream, int64_t T, bl_tensor x,
                                  bl_tensor y)
{
    if (!layer) return null_argument("bl_linear_layer_forward", "layer");
    if (!stream) return null_argument("bl_linear_layer_forward", "stream");
    BL_TRY(check_tensor(layer, "x", T, x, false));
    BL_TRY(check_tensor(layer, "y", T, y, false));
    BL_TRY(begin_call(layer, stream, T));
    bl_linear_use use = bl_linear_layer_use(layer);
    return bl_linear_apply(stream, &use, T, x, y);
}

bl_status bl_linear_layer_backward(bl_linear_layer *layer, bl_stream *stream, int64_t T,
                                   bl_tensor x, bl_tensor dy, bl_tensor dx)
{
    if (!layer) return null_argument("bl_linear_layer_backward", "layer");
    if (!stream) return null_argument("bl_linear_layer_backward", "stream");
    if (layer->stack->options.forward_only)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": backward of a forward_only stack",
                       layer->index);
    BL_TRY(check_tensor(layer, "x", T, x, layer->r == 0));
    BL_TRY(check_tensor(layer, "dy", T, dy, false));
    BL_TRY(check_tensor(layer, "dx", T, dx, true));
    BL_TRY(begin_call(layer, stream, T));
    bl_linear_use use = bl_linear_layer_use(layer);
    return bl_linear_pull_back(stream, &use, T, x, dy, dx);
}

/* ---- what a stack has ---- */

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

    if (layer->r == 0) return (bl_linear_lora_view){0};
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

/* What has to be equal on all ranks. */
static uint64_t hash_stack(const bl_linear_stack *stack)
{
    const bl_linear_options *o = &stack->options;
    int64_t common[] = {stack->n_layers, stack->ring_depth, o->forward_only, (int64_t)o->seed};
    uint64_t hash = XXH3_64bits(common, sizeof common);

    for (int64_t i = 0; i < stack->n_layers; i++) {
        const bl_linear_spec *s = &stack->specs[i];
        const bl_linear_layer *layer = &stack->layers[i];
        int64_t shape[] = {s->rows, s->cols, s->format, layer->r};
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

static bl_status take_memory(bl_linear_stack *stack)
{
    size_t n_floats = (size_t)stack->n_floats, T = (size_t)stack->options.max_tokens;
    bl_tensor copies = {NULL, bl_act_dtype(bl_device_get_kind(stack->options.device))};

    BL_TRY(take(stack, stack->memory.scales, "scales", (void **)&stack->scales));
    for (int64_t i = 0; i < stack->n_layers; i++)
        if (stack->layers[i].n_scales > 0)
            stack->layout.units[i].matrix[0].weight.segment[0].scales =
                stack->scales + stack->layers[i].scale_offset;
    BL_TRY(take(stack, n_floats * sizeof(float), "LoRA weights", (void **)&stack->weights));
    if (!stack->options.forward_only)
        BL_TRY(take(stack, n_floats * sizeof(float), "LoRA gradients", (void **)&stack->gradients));
    if (copies.dtype != BL_F32)
        BL_TRY(take(stack, bl_tensor_bytes(copies, stack->n_floats), "LoRA copies", &copies.data));
    stack->copies = copies;
    BL_TRY(take(stack, stack->work_bytes, "linear workspace", &stack->work));
    if (!stack->has_dropout) return BL_OK;
    BL_TRY(take(stack, T * sizeof(int64_t), "dropout keys", (void **)&stack->no_sample));
    return take(stack, T * sizeof(int32_t), "dropout keys", (void **)&stack->token);
}

/* A's first values and the tokens' numbers. */
static bl_status fill_memory(const bl_linear_stack *stack, bl_staging *staging)
{
    size_t n_weights = (size_t)stack->n_floats * sizeof(float),
           n_tokens = stack->token ? (size_t)stack->options.max_tokens * sizeof(int32_t) : 0;
    float *weights = calloc(1, n_weights + 1);
    int32_t *token = calloc(1, n_tokens + 1);
    bl_status st = weights && token ? BL_OK : BL_FAIL(BL_ENOMEM, "LoRA weights");

    for (int64_t i = 0; st == BL_OK && i < stack->n_layers; i++) {
        int64_t cols = stack->layout.units[i].matrix[0].weight.cols;
        bl_lora_initialize(stack->options.seed, i, 0, cols, 0, stack->layers[i].r * cols,
                           weights + stack->layers[i].a_offset);
    }
    for (int64_t t = 0; st == BL_OK && n_tokens > 0 && t < stack->options.max_tokens; t++)
        token[t] = (int32_t)t;
    if (st == BL_OK) st = bl_staging_upload(staging, stack->weights, weights, n_weights);
    if (st == BL_OK) st = bl_staging_upload(staging, stack->token, token, n_tokens);
    free(token);
    free(weights);
    return st;
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
    BL_TRY(bl_stream_create(options->device, "linear gather", &stack->gather));
    BL_TRY(bl_stream_create(options->device, "linear copy", &stack->copy));
    if (stack->n_ranks > 1) {
        BL_TRY(bl_comm_split(options->comm, 0, &stack->comm));
        BL_TRY(compare_ranks(stack));
    }
    BL_TRY(take_memory(stack));
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
    bl_device *device = stack->options.device;
    void *const memory[] = {stack->scales, stack->weights,   stack->gradients, stack->copies.data,
                            stack->work,   stack->no_sample, stack->token};

    if (stack->gather) (void)bl_stream_synchronize(stack->gather);
    if (stack->copy) (void)bl_stream_synchronize(stack->copy);
    bl_base_destroy(stack->base);
    bl_pages_destroy(stack->pages);
    bl_stream_destroy(stack->copy);
    bl_stream_destroy(stack->gather);
    bl_comm_destroy(stack->comm);
    for (size_t i = 0; i < BL_COUNT(memory); i++)
        if (memory[i]) bl_device_free(device, BL_SPACE_DEVICE, memory[i]);
    free(stack->layout.units);
    free(stack->wanted);
    free(stack->held);
    free(stack->tiers);
    free(stack->layers);
    free(stack);
}
