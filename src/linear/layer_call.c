/* SPDX-License-Identifier: Apache-2.0 */
/* layer_call.c -- forward and backward of a stack's layers: the checks, the caller's or the stack's
 * LoRA weights, bf16 tensors on the CPU, and the account of calls. bf16 tensors are multiplied as
 * they are where the processor has instructions for it, else in fp32 panels of tokens. */
#include "linear/layer.h"

#include <inttypes.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "linear/layer_internal.h"
#include "ops/elementwise.h"
#include "ops/gemm.h"

enum { PANEL_TOKENS = 512 }; /* decoding W once per panel costs a tenth of the panel's products */

static bl_status null_argument(const char *call, const char *name)
{
    return BL_FAIL(BL_EUSAGE, "%s: %s is NULL", call, name);
}

/* ---- checks ---- */

static bool is_known(bl_dtype dtype)
{
    return (int)dtype >= 0 && dtype < BL_DTYPE_COUNT;
}

static bool is_cpu(const bl_linear_stack *stack)
{
    return bl_device_get_kind(stack->options.device) == BL_DEVICE_CPU;
}

/* A tensor of a call; *dtype: of those before it, BL_DTYPE_COUNT for the first. */
static bl_status check_tensor(const bl_linear_layer *layer, const char *name, int64_t T,
                              bl_tensor tensor, bool is_optional, bl_dtype *dtype)
{
    bool cpu = is_cpu(layer->stack);

    if (!bl_tensor_is_there(tensor)) {
        if (is_optional || T == 0) return BL_OK;
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": %s is NULL", layer->index, name);
    }
    if (tensor.dtype != BL_BF16 && !(cpu && tensor.dtype == BL_F32))
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": %s is %s, this device takes %s", layer->index,
                       name,
                       is_known(tensor.dtype) ? bl_dtype_name(tensor.dtype) : "of an unknown dtype",
                       cpu ? "F32 and BF16" : "BF16");
    if (*dtype != BL_DTYPE_COUNT && tensor.dtype != *dtype)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": %s is %s, the tensors before it are %s",
                       layer->index, name, bl_dtype_name(tensor.dtype), bl_dtype_name(*dtype));
    *dtype = tensor.dtype;
    return BL_OK;
}

static bl_status check_shape(const bl_linear_layer *layer, const bl_linear_call *call)
{
    const bl_linear_stack *stack = layer->stack;
    const bl_weight *w = &stack->layout.units[layer->index].matrix[0].weight;
    int64_t most = stack->options.max_tokens > 0 ? stack->options.max_tokens : BL_LINEAR_MAX_TOKENS;

    if ((call->rows != 0 && call->rows != w->rows) || (call->cols != 0 && call->cols != w->cols))
        return BL_FAIL(BL_EUSAGE,
                       "layer %" PRId64 ": a call of %" PRId64 " x %" PRId64
                       ", the weight is %" PRId64 " x %" PRId64,
                       layer->index, call->rows, call->cols, w->rows, w->cols);
    if (call->T < 0 || call->T > most)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": %" PRId64 " tokens, max_tokens is %" PRId64,
                       layer->index, call->T, most);
    return BL_OK;
}

static bl_status check_lora(const bl_linear_layer *layer, const bl_linear_call *call,
                            bool is_backward)
{
    const char *missing = !call->A                   ? "A"
                          : !call->B                 ? "B"
                          : is_backward && !call->dA ? "dA"
                          : is_backward && !call->dB ? "dB"
                                                     : NULL;

    if (!layer->is_external || !missing) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": %s is NULL", layer->index, missing);
}

static bl_status check_call(const bl_linear_layer *layer, bl_stream *stream,
                            const bl_linear_call *call, bool is_backward, bl_dtype *dtype)
{
    const char *name = is_backward ? "linear backward" : "linear forward";

    if (!layer) return null_argument(name, "layer");
    if (!stream) return null_argument(name, "stream");
    if (!call) return null_argument(name, "call");
    if (call->size_bytes != sizeof *call)
        return BL_FAIL(BL_EUSAGE, "%s: a call of %zu bytes, this library has %zu", name,
                       call->size_bytes, sizeof *call);
    if (is_backward && layer->stack->options.forward_only)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": backward of a forward_only stack",
                       layer->index);
    *dtype = BL_DTYPE_COUNT;
    BL_TRY(check_shape(layer, call));
    BL_TRY(check_tensor(layer, "x", call->T, call->x, is_backward && layer->r == 0, dtype));
    if (is_backward) {
        BL_TRY(check_tensor(layer, "dy", call->T, call->dy, false, dtype));
        BL_TRY(check_tensor(layer, "dx", call->T, call->dx, true, dtype));
    } else {
        BL_TRY(check_tensor(layer, "y", call->T, call->y, false, dtype));
    }
    return check_lora(layer, call, is_backward);
}

/* ---- the LoRA terms of a call ---- */

static bl_linear_lora_view weights_of(const bl_linear_layer *layer, const bl_linear_call *call)
{
    if (!layer->is_external) return bl_linear_layer_lora(layer);
    return (bl_linear_lora_view){.r = layer->r,
                                 .A = (float *)call->A,
                                 .B = (float *)call->B,
                                 .dA = call->dA,
                                 .dB = call->dB};
}

/* Compute copies of A and B; none: they are used as they are. */
typedef struct lora_copies {
    bl_tensor A, B;
} lora_copies;

static lora_copies copies_of(const bl_linear_layer *layer, bl_dtype dtype)
{
    const bl_linear_stack *stack = layer->stack;
    int64_t cols = stack->layout.units[layer->index].matrix[0].weight.cols;

    if (layer->r == 0) return (lora_copies){.A = bl_tensor_f32(NULL)};
    if (bl_tensor_is_there(stack->copies))
        return (lora_copies){bl_tensor_at(stack->copies, layer->a_offset),
                             bl_tensor_at(stack->copies, layer->b_offset)};
    if (dtype != BL_BF16 || !bl_tensor_is_there(stack->halves))
        return (lora_copies){.A = bl_tensor_f32(NULL)};
    return (lora_copies){stack->halves, bl_tensor_at(stack->halves, layer->r * cols)};
}

/* The part of a call that is the same for all of its tokens. */
static bl_linear_use bind_call(const bl_linear_layer *layer, const bl_linear_call *call,
                               lora_copies copies)
{
    bl_linear_stack *stack = layer->stack;
    bl_linear_use use = {
        .base = stack->base, .unit = layer->index, .lora = bl_linear_layer_outline(layer)};

    use.lora.workspace = stack->work;
    use.lora.workspace_bytes = stack->work_bytes;
    if (layer->r == 0) return use;
    bl_linear_lora_view view = weights_of(layer, call);
    bl_lora_part *part = &use.lora.part[0];
    part->A = bl_tensor_f32(view.A);
    part->B = bl_tensor_f32(view.B);
    part->dA = view.dA;
    part->dB = view.dB;
    if (bl_tensor_is_there(copies.A)) {
        part->A = copies.A;
        part->B = copies.B;
    }
    if (call->skip_dropout) use.lora.dropout.p = 0;
    const int64_t *sample = call->has_keys ? call->sample : stack->sample;
    const int32_t *position = call->has_keys ? call->position : stack->position;
    use.lora.dropout.seed = stack->options.seed;
    use.lora.dropout.step = call->has_keys ? call->step : stack->step;
    use.lora.dropout.sample = sample ? sample : stack->no_sample;
    use.lora.dropout.position = position ? position : stack->token;
    return use;
}

static bl_status copy_weights(const bl_linear_layer *layer, bl_stream *stream,
                              const bl_linear_call *call, lora_copies copies)
{
    const bl_weight *w = &layer->stack->layout.units[layer->index].matrix[0].weight;

    if (!bl_tensor_is_there(copies.A)) return BL_OK;
    bl_linear_lora_view view = weights_of(layer, call);
    BL_TRY(bl_cast(
        stream,
        &(bl_cast_args){.n = layer->r * w->cols, .x = bl_tensor_f32(view.A), .y = copies.A}));
    return bl_cast(stream, &(bl_cast_args){
                               .n = layer->r * w->rows, .x = bl_tensor_f32(view.B), .y = copies.B});
}

/* ---- time ---- */

static void read_stamps(bl_linear_stack *stack)
{
    if (!stack->is_timing || bl_stamp_seconds(stack->end_wait) == BL_NEVER_S) return;
    double wait_s = bl_stamp_elapsed_s(stack->begin_wait, stack->end_wait);
    stack->wait_s += wait_s > 0 ? wait_s : 0;
    stack->n_timed++;
    stack->is_timing = false;
}

/* Has the stream wait for the layer's weight, between two stamps if those of an earlier call have
 * been reached. */
static bl_status await_weight(const bl_linear_layer *layer, bl_stream *stream)
{
    bl_linear_stack *stack = layer->stack;
    bl_weight weight;

    read_stamps(stack);
    if (stack->is_timing) return BL_OK;
    BL_TRY(bl_stamp_record(stack->begin_wait, stream));
    stack->is_timing = true;
    BL_TRY(bl_base_acquire(stack->base, layer->index, 0, stream, &weight));
    return bl_stamp_record(stack->end_wait, stream);
}

/* ---- calls ---- */

static bl_status add_bias(const bl_linear_layer *layer, bl_stream *stream, int64_t T, bl_tensor y)
{
    const bl_linear_stack *stack = layer->stack;
    int64_t rows = stack->layout.units[layer->index].matrix[0].weight.rows;

    if (layer->bias_offset < 0 || T == 0) return BL_OK;
    if (y.dtype != stack->biases.dtype) {
        const bl_tensor bias = bl_tensor_at(stack->biases, layer->bias_offset);
        return bl_add_bias(stream,
                           &(bl_add_bias_args){.T = T, .N = rows, .bias = bias.data, .y = y});
    }
    return bl_matmul(stream, &(bl_matmul_args){.M = T,
                                               .N = rows,
                                               .K = 1,
                                               .lda = 1,
                                               .ldb = rows,
                                               .ldc = rows,
                                               .alpha = 1,
                                               .beta = 1,
                                               .a = stack->ones,
                                               .b = bl_tensor_at(stack->biases, layer->bias_offset),
                                               .c = y});
}

static bl_status run(const bl_linear_layer *layer, bl_stream *stream, const bl_linear_use *use,
                     const bl_linear_call *call, bool is_backward)
{
    if (is_backward) return bl_linear_pull_back(stream, use, call->T, call->x, call->dy, call->dx);
    BL_TRY(bl_linear_apply(stream, use, call->T, call->x, call->y));
    return call->skip_bias ? BL_OK : add_bias(layer, stream, call->T, call->y);
}

/* Copies of the largest layer's A and B. */
static bl_status take_halves(bl_linear_stack *stack)
{
    int64_t most = 0;
    void *memory;

    for (int64_t i = 0; i < stack->n_layers; i++) {
        const bl_weight *w = &stack->layout.units[i].matrix[0].weight;
        most = bl_max_i64(most, stack->layers[i].r * (w->rows + w->cols));
    }
    if (most == 0 || bl_tensor_is_there(stack->halves)) return BL_OK;
    BL_TRY(bl_device_alloc(stack->options.device, BL_SPACE_DEVICE,
                           (size_t)most * bl_dtype_bytes(BL_BF16), "LoRA copies", &memory));
    stack->halves = bl_tensor_of(memory, BL_BF16);
    return BL_OK;
}

static bl_status take_panel(bl_linear_stack *stack)
{
    int64_t widest = 0;

    if (stack->panel) return BL_OK;
    for (int64_t i = 0; i < stack->n_layers; i++) {
        const bl_weight *w = &stack->layout.units[i].matrix[0].weight;
        widest = bl_max_i64(widest, 2 * w->cols + w->rows);
    }
    return bl_device_alloc(stack->options.device, BL_SPACE_DEVICE,
                           (size_t)widest * PANEL_TOKENS * sizeof(float), "linear panel",
                           (void **)&stack->panel);
}

/* `n` elements from one dtype to the other; none: nothing. */
static bl_status cast(bl_stream *stream, int64_t n, bl_tensor from, bl_tensor to)
{
    if (!bl_tensor_is_there(from) || !bl_tensor_is_there(to) || n == 0) return BL_OK;
    return bl_cast(stream, &(bl_cast_args){.n = n, .x = from, .y = to});
}

/* The tokens of `call` from `begin` on, at most a panel of them, in fp32. */
static bl_status run_panel(const bl_linear_layer *layer, bl_stream *stream,
                           const bl_linear_use *use, const bl_linear_call *call, bool is_backward,
                           int64_t begin)
{
    bl_linear_stack *stack = layer->stack;
    const bl_weight *w = &stack->layout.units[layer->index].matrix[0].weight;
    int64_t n = bl_min_i64(PANEL_TOKENS, call->T - begin), cols = n * w->cols, rows = n * w->rows;
    bl_tensor x = bl_tensor_f32(stack->panel), dx = bl_tensor_at(x, cols),
              y = bl_tensor_at(dx, cols);
    bl_linear_use mine = *use;
    bl_linear_call part = {.T = n, .x = x, .y = y, .dy = y, .skip_bias = call->skip_bias};

    if (mine.lora.dropout.sample) mine.lora.dropout.sample += begin;
    if (mine.lora.dropout.position) mine.lora.dropout.position += begin;
    if (begin > 0) mine.lora.part[0].accumulate = true;
    if (bl_tensor_is_there(call->dx)) part.dx = dx;
    BL_TRY(cast(stream, cols, bl_tensor_at(call->x, begin * w->cols), x));
    BL_TRY(cast(stream, rows, bl_tensor_at(call->dy, begin * w->rows), y));
    BL_TRY(run(layer, stream, &mine, &part, is_backward));
    if (is_backward) return cast(stream, cols, part.dx, bl_tensor_at(call->dx, begin * w->cols));
    return cast(stream, rows, y, bl_tensor_at(call->y, begin * w->rows));
}

static bl_status run_call(bl_linear_layer *layer, bl_stream *stream, const bl_linear_call *call,
                          bool is_backward, bl_dtype dtype)
{
    bl_linear_stack *stack = layer->stack;
    bool is_half = is_cpu(stack) && dtype == BL_BF16,
         has_products = bl_linear_stack_multiplies_bf16(stack);

    if (is_half) BL_TRY(has_products ? take_halves(stack) : take_panel(stack));
    if (call->T > stack->n_tokens) {
        BL_TRY(bl_stream_synchronize(stream));
        BL_TRY(bl_linear_stack_reserve(stack, call->T));
    }
    BL_TRY(bl_linear_order_turn(stack, layer->index, is_backward, stream));
    BL_TRY(await_weight(layer, stream));
    lora_copies copies = copies_of(layer, dtype);
    BL_TRY(copy_weights(layer, stream, call, copies));
    *(is_backward ? &stack->n_backward : &stack->n_forward) += 1;
    bl_linear_use use = bind_call(layer, call, copies);
    use.lora.part[0].accumulate = call->accumulate;
    if (!is_half || has_products) return run(layer, stream, &use, call, is_backward);
    int64_t begin = 0;
    do { /* once without tokens, too: backward clears dA and dB */
        BL_TRY(run_panel(layer, stream, &use, call, is_backward, begin));
        begin += PANEL_TOKENS;
    } while (begin < call->T);
    return BL_OK;
}

static bl_status guard_call(bl_linear_layer *layer, bl_stream *stream, const bl_linear_call *call,
                            bool is_backward)
{
    bl_dtype dtype;

    BL_TRY(check_call(layer, stream, call, is_backward, &dtype));
    if (__atomic_exchange_n(&layer->stack->is_in_call, true, __ATOMIC_ACQUIRE))
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": its stack is in a call of another thread",
                       layer->index);
    bl_status st = run_call(layer, stream, call, is_backward, dtype);
    __atomic_store_n(&layer->stack->is_in_call, false, __ATOMIC_RELEASE);
    return st;
}

bl_status bl_linear_call_forward(bl_linear_layer *layer, bl_stream *stream,
                                 const bl_linear_call *call)
{
    return guard_call(layer, stream, call, false);
}

bl_status bl_linear_call_backward(bl_linear_layer *layer, bl_stream *stream,
                                  const bl_linear_call *call)
{
    return guard_call(layer, stream, call, true);
}

bl_status bl_linear_layer_forward(bl_linear_layer *layer, bl_stream *stream, int64_t T, bl_tensor x,
                                  bl_tensor y)
{
    bl_linear_call call = {.size_bytes = sizeof call, .T = T, .x = x, .y = y};
    return guard_call(layer, stream, &call, false);
}

bl_status bl_linear_layer_backward(bl_linear_layer *layer, bl_stream *stream, int64_t T,
                                   bl_tensor x, bl_tensor dy, bl_tensor dx)
{
    bl_linear_call call = {.size_bytes = sizeof call, .T = T, .x = x, .dy = dy, .dx = dx};
    return guard_call(layer, stream, &call, true);
}

bl_status bl_linear_stack_get_stats(bl_linear_stack *stack, bl_linear_stats *out)
{
    if (!stack) return null_argument("bl_linear_stack_get_stats", "stack");
    if (!out) return null_argument("bl_linear_stack_get_stats", "out");
    if (out->size_bytes != sizeof *out)
        return BL_FAIL(BL_EUSAGE, "linear stats: %zu bytes, this library has %zu", out->size_bytes,
                       sizeof *out);
    read_stamps(stack);
    *out = (bl_linear_stats){.size_bytes = sizeof *out,
                             .memory = stack->memory,
                             .n_forward = stack->n_forward,
                             .n_backward = stack->n_backward,
                             .n_gathers = stack->order.n_gathers,
                             .gathered_bytes = stack->order.gathered_bytes,
                             .n_on_demand = stack->order.n_on_demand,
                             .n_strays = stack->order.n_strays,
                             .n_timed = stack->n_timed,
                             .wait_s = stack->wait_s};
    return BL_OK;
}
