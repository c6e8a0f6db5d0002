/* SPDX-License-Identifier: Apache-2.0 */
/* layer_plan.c -- a stack of layers before memory is allocated: which options make sense, where
 * each layer is stored, and how many bytes that takes. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "fp8/packed.h"
#include "linear/base_paged.h"
#include "linear/layer_internal.h"
#include "offload/arena.h"
#include "ops/gemm.h"

enum {
    FLOAT_ALIGN = 64, /* tensors start on 256-byte boundaries */
    DEFAULT_RING_DEPTH = 2,
    MAX_RING_DEPTH = 1024,
    MAX_R = 1 << 20
};

static bl_status check_options(const bl_linear_options *o, int64_t n_layers,
                               const bl_linear_spec *specs)
{
    if (!o) return BL_FAIL(BL_EUSAGE, "linear stack: options is NULL");
    if (!o->device) return BL_FAIL(BL_EUSAGE, "linear stack: device is NULL");
    if (!specs) return BL_FAIL(BL_EUSAGE, "linear stack: specs is NULL");
    if (n_layers < 1 || n_layers > INT32_MAX)
        return BL_FAIL(BL_EUSAGE, "linear stack: %" PRId64 " layers", n_layers);
    if (!(o->ratio >= 0 && o->ratio <= 1))
        return BL_FAIL(BL_EUSAGE, "linear stack: ratio %g is not in [0, 1]", o->ratio);
    if (o->tier == BL_TIER_DISK && o->ratio > 0 && !o->dir)
        return BL_FAIL(BL_EUSAGE, "linear stack: the disk tier needs a directory (dir)");
    if (o->ring_depth < 0 || o->ring_depth > MAX_RING_DEPTH)
        return BL_FAIL(BL_EUSAGE, "linear stack: ring_depth %d is not in [0, %d]", o->ring_depth,
                       MAX_RING_DEPTH);
    if (o->max_tokens < 0 || o->max_tokens > BL_LINEAR_MAX_TOKENS)
        return BL_FAIL(BL_EUSAGE, "linear stack: max_tokens %" PRId64 " is not in [0, 2^30]",
                       o->max_tokens);
    return BL_OK;
}

static bl_status check_spec(const bl_linear_spec *s, int64_t layer)
{
    if (s->rows < 1 || s->cols < 1)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": a weight of %" PRId64 " x %" PRId64, layer,
                       s->rows, s->cols);
    if ((int)s->format < 0 || s->format >= BL_FORMAT_COUNT)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": unknown format %d", layer, (int)s->format);
    if (!bl_packed_fits(s->format, s->cols))
        return BL_FAIL(BL_EINPUT,
                       "layer %" PRId64 ": rows of %" PRId64 " weights are not whole groups of %s",
                       layer, s->cols, bl_format_name(s->format));
    if (s->dtype != BL_F32 && s->dtype != BL_F16 && s->dtype != BL_BF16)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": rows are F32, F16 or BF16, not %s", layer,
                       (int)s->dtype >= 0 && s->dtype < BL_DTYPE_COUNT ? bl_dtype_name(s->dtype)
                                                                       : "of an unknown dtype");
    if (s->mode != BL_MATMUL_BF16 && s->mode != BL_MATMUL_FP8)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": unknown mode %d", layer, (int)s->mode);
    if (!s->weight && !s->read_rows)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": neither weight nor read_rows", layer);
    if (s->lora.r < 0 || s->lora.r > MAX_R)
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": LoRA rank %" PRId64 " is not in [0, 2^20]",
                       layer, s->lora.r);
    if (s->lora.r > 0 && !(s->lora.dropout >= 0 && s->lora.dropout < 1))
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": dropout %g is not in [0, 1)", layer,
                       s->lora.dropout);
    if (s->lora.r > 0 && !isfinite(s->lora.alpha))
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": alpha %g is not finite", layer,
                       s->lora.alpha);
    return BL_OK;
}

static bl_status too_large(int64_t layer)
{
    return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": its LoRA weights or activations are too large",
                   layer);
}

/* Before any size is made of them: (r + T) (rows + cols) with room for a few factors below 2^63. */
static bl_status check_sizes(const bl_linear_options *o, const bl_linear_spec *s, int64_t layer)
{
    int64_t sum, product, T = o->max_tokens > 0 ? o->max_tokens : BL_LINEAR_MAX_TOKENS;

    if (__builtin_add_overflow(s->rows, s->cols, &sum) ||
        bl_mul_i64_overflows(sum, 64 * (s->lora.r + T), &product))
        return too_large(layer);
    return BL_OK;
}

static bl_status place_lora(bl_linear_stack *stack, bl_linear_layer *layer, const bl_linear_spec *s)
{
    double r = (double)s->lora.r;
    int64_t end;

    if (s->lora.r == 0) return BL_OK;
    layer->r = s->lora.r;
    layer->is_external = s->lora.is_external;
    layer->scale = (float)(s->lora.alpha / (s->lora.use_rslora ? sqrt(r) : r));
    layer->dropout = stack->options.forward_only ? 0.0f : (float)s->lora.dropout;
    stack->has_dropout = stack->has_dropout || layer->dropout > 0;
    layer->a_offset = layer->is_external ? 0 : stack->n_floats;
    layer->b_offset = layer->a_offset + bl_round_up(s->lora.r * s->cols, FLOAT_ALIGN);
    if (__builtin_add_overflow(layer->b_offset, bl_round_up(s->lora.r * s->rows, FLOAT_ALIGN),
                               &end) ||
        end > INT64_MAX / 64)
        return too_large(layer->index);
    if (layer->is_external)
        stack->n_external = bl_max_i64(stack->n_external, end);
    else
        stack->n_floats = end;
    return BL_OK;
}

static bl_status place_layer(bl_linear_stack *stack, int64_t i)
{
    const bl_linear_spec *s = &stack->specs[i];
    bl_linear_layer *layer = &stack->layers[i];
    bl_base_unit *unit = &stack->layout.units[i];
    size_t code_bytes, n_scales;

    BL_TRY(check_spec(s, i));
    BL_TRY(check_sizes(&stack->options, s, i));
    unit->n_matrices = 1;
    unit->matrix[0].weight = (bl_weight){.rows = s->rows,
                                         .cols = s->cols,
                                         .n_segments = 1,
                                         .segment = {{.format = s->format, .rows = s->rows}}};
    if (!bl_format_sizes(s->format, s->rows, s->cols, &code_bytes, &n_scales))
        return BL_FAIL(BL_EUSAGE, "layer %" PRId64 ": its weight is too large", i);
    if (bl_format_describe(s->format)->home != BL_SCALES_WHOLE) n_scales = 0;
    *layer = (bl_linear_layer){.stack = stack,
                               .index = i,
                               .mode = s->mode,
                               .scale_offset = stack->n_scales,
                               .n_scales = (int64_t)n_scales,
                               .bias_offset = s->bias ? stack->n_biases : -1};
    stack->n_scales += (int64_t)n_scales;
    if (s->bias) stack->n_biases += bl_round_up(s->rows, FLOAT_ALIGN);
    return place_lora(stack, layer, s);
}

/* Whole layers go to a tier. */
static bl_status place_tiers(bl_linear_stack *stack)
{
    const bl_linear_options *o = &stack->options;
    bl_linear_memory *m = &stack->memory;
    bl_base_paged_bytes n;

    stack->tiers = calloc((size_t)bl_base_part_count(&stack->layout), sizeof *stack->tiers);
    if (!stack->tiers)
        return BL_FAIL(BL_ENOMEM, "linear stack of %" PRId64 " layers", stack->n_layers);
    BL_TRY(bl_base_assign_tiers(&stack->layout, o->tier, o->ratio, 0, stack->tiers));
    BL_TRY(bl_base_paged_measure(&stack->layout, stack->tiers, stack->ring_depth,
                                 !bl_device_host_writes(o->device), 0, &n));
    for (bl_base_walk at = {.layout = &stack->layout}; bl_base_next(&at);)
        stack->layers[at.idx_unit].tier = stack->tiers[at.index];
    if (n.ring == SIZE_MAX || n.reader == SIZE_MAX)
        return BL_FAIL(BL_EUSAGE, "linear stack: a ring of %d layers is too large",
                       stack->ring_depth);
    *m = (bl_linear_memory){
        .frozen = n.device, .host = n.host, .disk = n.disk, .ring = n.ring, .reader = n.reader};
    if (m->disk > 0) m->disk += bl_arena_piece_bytes((size_t)stack->n_scales * sizeof(float));
    return BL_OK;
}

bl_lora_linear bl_linear_layer_outline(const bl_linear_layer *layer)
{
    const bl_weight *w = &layer->stack->layout.units[layer->index].matrix[0].weight;
    bl_lora_linear lora = {.weight = *w, .mode = layer->mode, .dropout = {.p = layer->dropout}};

    if (layer->r == 0) return lora;
    lora.n_parts = 1;
    lora.part[0] = (bl_lora_part){.r = layer->r, .rows = w->rows, .scale = layer->scale};
    return lora;
}

bool bl_linear_stack_multiplies_bf16(const bl_linear_stack *stack)
{
    return bl_device_act(stack->options.device) == BL_BF16 || bl_cpu_gemm_has_bf16();
}

size_t bl_linear_stack_work_bytes(const bl_linear_stack *stack, int64_t T)
{
    bl_device_kind kind = bl_device_get_kind(stack->options.device);
    bl_dtype act = bl_device_act(stack->options.device);
    size_t most = 0;

    for (int64_t i = 0; i < stack->n_layers; i++) {
        bl_lora_linear lora = bl_linear_layer_outline(&stack->layers[i]);
        size_t n_bytes = bl_lora_linear_workspace_bytes(kind, act, &lora, T),
               n_halves = bl_linear_stack_multiplies_bf16(stack)
                              ? bl_lora_linear_workspace_bytes(kind, BL_BF16, &lora, T)
                              : 0;
        n_bytes = n_halves > n_bytes ? n_halves : n_bytes; /* few tokens: for their alignment */
        if (n_bytes > most) most = n_bytes;
    }
    return most;
}

size_t bl_linear_stack_call_bytes(const bl_linear_stack *stack, int64_t T)
{
    bl_dtype act = bl_device_act(stack->options.device);
    size_t per_token = (stack->has_dropout ? sizeof(int64_t) + sizeof(int32_t) : 0) +
                       (stack->n_biases > 0 ? bl_dtype_bytes(act) : 0);

    return bl_linear_stack_work_bytes(stack, T) + (size_t)T * per_token;
}

static void count_memory(bl_linear_stack *stack)
{
    const bl_linear_options *o = &stack->options;
    bl_dtype act = bl_device_act(o->device);
    size_t vectors = o->forward_only ? 1 : 2, act_bytes = bl_dtype_bytes(act);

    stack->memory.work = o->max_tokens > 0 ? bl_linear_stack_call_bytes(stack, o->max_tokens) : 0;
    stack->memory.lora =
        (size_t)stack->n_floats * vectors * sizeof(float) + (size_t)stack->n_biases * act_bytes;
    if (act != BL_F32)
        stack->memory.lora += (size_t)(stack->n_floats + stack->n_external) * act_bytes;
    stack->memory.scales = (size_t)stack->n_scales * sizeof(float);
}

bl_status bl_linear_stack_outline(bl_linear_stack *stack, const bl_linear_options *options,
                                  int64_t n_layers, const bl_linear_spec *specs)
{
    BL_TRY(check_options(options, n_layers, specs));
    stack->options = *options;
    stack->specs = specs;
    stack->n_layers = n_layers;
    stack->n_ranks = options->comm ? bl_comm_size(options->comm) : 1;
    stack->rank = options->comm ? bl_comm_rank(options->comm) : 0;
    stack->ring_depth = options->ring_depth > 0 ? options->ring_depth : DEFAULT_RING_DEPTH;
    stack->last_layer = -1;
    stack->direction = 1;
    stack->layers = calloc((size_t)n_layers, sizeof *stack->layers);
    stack->held = calloc((size_t)stack->ring_depth, sizeof *stack->held);
    stack->wanted = calloc((size_t)stack->ring_depth, sizeof *stack->wanted);
    stack->layout =
        (bl_base_layout){.n_shards = stack->n_ranks,
                         .n_units = n_layers,
                         .units = calloc((size_t)n_layers, sizeof *stack->layout.units)};
    if (!stack->layers || !stack->held || !stack->wanted || !stack->layout.units)
        return BL_FAIL(BL_ENOMEM, "linear stack of %" PRId64 " layers", n_layers);
    for (int64_t i = 0; i < n_layers; i++) BL_TRY(place_layer(stack, i));
    for (int64_t i = 0; i < n_layers; i++) /* their copies follow the stack's */
        if (stack->layers[i].is_external) {
            stack->layers[i].a_offset += stack->n_floats;
            stack->layers[i].b_offset += stack->n_floats;
        }
    BL_TRY(bl_base_layout_finish(&stack->layout));
    BL_TRY(place_tiers(stack));
    count_memory(stack);
    return BL_OK;
}
