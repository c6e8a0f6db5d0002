/* SPDX-License-Identifier: Apache-2.0 */
/* block_experts.c -- the products of a layer with its routed experts, in place of those with
 * W_gate_up and W_down, or after them, group by group:
 *
 *   forward   route(n2);  g|u of each row = n2 of its token W_gate_up^T of its expert
 *             mid + sum of w (h W_down^T + b) over a token's rows
 *   backward  dh = d of the row's token W_down;  dw = h . dh + d . b;  dh *= w
 *             dn2 = sum of (dg|du W_gate_up) over a token's rows + the router's part, from dw
 *
 * Products have their expert's bias, if there is one. The outputs h W_down^T are not needed again:
 * d . (h W_down^T) = h . (d W_down).
 *
 * With LoRA terms each W is W + s B A of its expert (Hu et al. 2021, arXiv:2106.09685, eq. 3), gate
 * and up with one A. Of rows x with output gradients dy:
 *
 *   u = s x A^T;  y += u B^T;   dB = dy^T u;  du = s dy B;  dA = du^T x;  dx += du A
 *
 * where of W_down dy is d, dB is of w u and dA of w du. In bf16 u, du and y are rounded when they
 * are stored. */
#include "arch/block_internal.h"
#include "base/sizes.h"
#include "ops/elementwise.h"

static bl_routing routing_of(const bl_block *block, int64_t T, const bl_block_workspace *ws)
{
    bl_routing routing = {.T = T, .n_experts = block->dims->n_experts, .top_k = block->dims->top_k};

    bl_routing_place(&routing, ws->routing);
    return routing;
}

/* NULL: the family has no such vector. */
static const float *vector_of(const bl_block *block, bl_layer_vector vector)
{
    const bl_block_dims *dims = block->dims;
    bool is_absent = (vector == BL_ROUTER_BIAS && !dims->has_router_bias) ||
                     (vector == BL_ROUTER_CORRECTION && !dims->has_correction);
    return is_absent ? NULL : block->vectors + dims->vector_offset[vector];
}

/* A group of the layer's experts: its rows of the call's tokens, its unit of the base. */
typedef struct group_call {
    bl_stream *stream;
    const bl_block *block;
    const bl_block_workspace *ws;
    bl_routing routing;
    int64_t unit;
} group_call;

static group_call call_of(bl_stream *stream, const bl_block *block, int64_t T,
                          const bl_block_workspace *ws, int64_t group)
{
    const bl_block_dims *dims = block->dims;
    bl_routing all = routing_of(block, T, ws);
    int64_t first = group * dims->expert_group,
            n = bl_min_i64(dims->expert_group, dims->n_experts - first);

    return (group_call){.stream = stream,
                        .block = block,
                        .ws = ws,
                        .routing = bl_routing_of_group(&all, first, n),
                        .unit = bl_base_group(block->base, block->layer, group)};
}

/* Of an expert's matrix. */
static int64_t rows_of(const group_call *c, bl_layer_matrix matrix)
{
    return c->block->dims->matrix[matrix].rows / c->block->dims->n_experts;
}

/* (experts of the group, output channels); NULL: none. */
static const float *bias_of(const group_call *c, bl_layer_matrix matrix)
{
    int64_t offset = c->block->dims->bias_offset[matrix];
    if (offset < 0) return NULL;
    return c->block->vectors + offset + c->routing.first_expert * rows_of(c, matrix);
}

bl_status arch_experts_route(bl_stream *stream, const bl_block *block, int64_t T,
                             const bl_block_workspace *ws, bl_tensor mid)
{
    const bl_block_dims *dims = block->dims;
    bl_block_norm norm = {.T = T,
                          .w = block->vectors + dims->vector_offset[dims->mlp_norm],
                          .x = mid,
                          .rstd = ws->rstd,
                          .mean = ws->mean};

    BL_TRY(bl_block_norm_forward(stream, dims, &norm, ws->mlp_input));
    return bl_route(stream, &(bl_route_args){.routing = routing_of(block, T, ws),
                                             .H = dims->hidden,
                                             .is_normed = dims->is_top_k_normed,
                                             .is_sigmoid = dims->is_router_sigmoid,
                                             .n_groups = dims->n_router_groups,
                                             .top_groups = dims->top_router_groups,
                                             .scale = dims->routed_scale,
                                             .router = vector_of(block, BL_ROUTER),
                                             .bias = vector_of(block, BL_ROUTER_BIAS),
                                             .correction = vector_of(block, BL_ROUTER_CORRECTION),
                                             .x = ws->mlp_input});
}

/* out = in times each row's matrix; forward with its bias. */
static bl_status multiply(const group_call *c, bl_layer_matrix matrix, bool forward, bl_tensor in,
                          bl_tensor out)
{
    bl_grouped_matmul_args product = {
        .routing = c->routing, .forward = forward, .in = in, .out = out};

    BL_TRY(bl_base_acquire(c->block->base, c->unit, (int)matrix, c->stream, &product.weight));
    BL_TRY(bl_grouped_matmul(c->stream, &product));
    if (!forward || !bias_of(c, matrix)) return BL_OK;
    return bl_add_expert_bias(c->stream, &(bl_add_expert_bias_args){.routing = c->routing,
                                                                    .N = rows_of(c, matrix),
                                                                    .bias = bias_of(c, matrix),
                                                                    .rows = out});
}

/* ---- LoRA terms ---- */

/* Those of a call's rows; u and du (n_rows, r) are in ws->lora. */
typedef struct terms {
    bl_stream *stream;
    const bl_routing *routing;
    bl_lora_part part; /* its rows are those of the group */
    int64_t K;
    bl_tensor u, du;
} terms;

/* False: the matrix has none. */
static bool find_terms(const group_call *c, bl_layer_matrix matrix, const bl_lora_linear *lora,
                       terms *out)
{
    const bl_block_dims *dims = c->block->dims;
    bl_lora_part part = lora->part[0];
    int64_t K = dims->matrix[matrix].cols, before_a = c->routing.first_expert * part.r * K,
            before_b = c->routing.first_expert * rows_of(c, matrix) * part.r;

    if (lora->n_parts == 0) return false;
    part.rows = c->routing.n_experts * rows_of(c, matrix);
    part.A = bl_tensor_at(part.A, before_a);
    part.B = bl_tensor_at(part.B, before_b);
    if (part.dA) part.dA += before_a, part.dB += before_b;
    size_t n_bytes = arch_experts_term_bytes(dims, c->routing.T, part.r) / 2;
    *out = (terms){.stream = c->stream,
                   .routing = &c->routing,
                   .part = part,
                   .K = K,
                   .u = bl_tensor_of(c->ws->lora, dims->act),
                   .du = bl_tensor_of((char *)c->ws->lora + n_bytes, dims->act)};
    return true;
}

/* out = in times each row's factor: forward, its transpose. */
static bl_status multiply_factor(const terms *t, bl_peft_factor factor, bool forward, bool is_added,
                                 bl_tensor in, bl_tensor out)
{
    bool is_a = factor == BL_PEFT_A;
    bl_tensor values = is_a ? t->part.A : t->part.B;
    int64_t rows = is_a ? t->routing->n_experts * t->part.r : t->part.rows;
    bl_format format = values.dtype == BL_F32 ? BL_FORMAT_F32 : BL_FORMAT_BF16;
    bl_weight weight = {.rows = rows,
                        .cols = is_a ? t->K : t->part.r,
                        .n_segments = 1,
                        .segment = {{.format = format, .codes = values.data, .rows = rows}}};

    return bl_grouped_matmul(t->stream, &(bl_grouped_matmul_args){.routing = *t->routing,
                                                                  .forward = forward,
                                                                  .is_added = is_added,
                                                                  .in = in,
                                                                  .out = out,
                                                                  .weight = weight});
}

static bl_status weigh(const terms *t, float scale, bool is_weighted, bl_tensor x)
{
    return bl_weigh_rows(t->stream, &(bl_weigh_rows_args){.routing = *t->routing,
                                                          .C = t->part.r,
                                                          .scale = scale,
                                                          .is_weighted = is_weighted,
                                                          .x = x});
}

/* y += the terms of x */
static bl_status add_terms(const terms *t, bl_tensor x, bl_tensor y)
{
    BL_TRY(multiply_factor(t, BL_PEFT_A, true, false, x, t->u));
    BL_TRY(weigh(t, t->part.scale, false, t->u));
    return multiply_factor(t, BL_PEFT_B, true, true, t->u, y);
}

/* dB, and du of dy. is_weighted: dy is that of rows which are weighted. */
static bl_status pull_up(const terms *t, bool is_weighted, bl_tensor x, bl_tensor dy)
{
    BL_TRY(multiply_factor(t, BL_PEFT_A, true, false, x, t->u));
    BL_TRY(weigh(t, t->part.scale, is_weighted, t->u));
    BL_TRY(bl_grouped_gradient(
        t->stream, &(bl_grouped_gradient_args){.routing = *t->routing,
                                               .M = t->part.rows / t->routing->n_experts,
                                               .N = t->part.r,
                                               .left = dy,
                                               .right = t->u,
                                               .gradient = t->part.dB}));
    BL_TRY(multiply_factor(t, BL_PEFT_B, false, false, dy, t->du));
    return weigh(t, t->part.scale, false, t->du);
}

/* dA, of du and x */
static bl_status pull_down(const terms *t, bl_tensor x)
{
    return bl_grouped_gradient(t->stream, &(bl_grouped_gradient_args){.routing = *t->routing,
                                                                      .M = t->part.r,
                                                                      .N = t->K,
                                                                      .left = t->du,
                                                                      .right = x,
                                                                      .gradient = t->part.dA});
}

/* dx += du A */
static bl_status pull_back(const terms *t, bl_tensor dx)
{
    return multiply_factor(t, BL_PEFT_A, false, true, t->du, dx);
}

/* ---- a group ---- */

/* ws->rows = the rows of x (T,H) */
static bl_status permute(const group_call *c, bl_tensor x)
{
    return bl_permute(c->stream, &(bl_permute_args){.routing = c->routing,
                                                    .C = c->block->dims->hidden,
                                                    .x = x,
                                                    .rows = c->ws->rows});
}

/* y (T,H) = z + the sums of ws->rows, of tokens whose last group it is */
static bl_status combine(const group_call *c, bool is_weighted, bl_tensor z, bl_tensor y)
{
    return bl_combine(c->stream, &(bl_combine_args){.routing = c->routing,
                                                    .C = c->block->dims->hidden,
                                                    .is_weighted = is_weighted,
                                                    .rows = c->ws->rows,
                                                    .z = z,
                                                    .y = y,
                                                    .sum = c->ws->sum});
}

/* ws->tensors.expert_gate_up = the group's rows, from or to those of all groups */
static bl_status move_gate_up(const group_call *c, bool to_all, bl_tensor all)
{
    return bl_move_rows(c->stream, &(bl_move_rows_args){.routing = c->routing,
                                                        .C = 2 * c->block->dims->expert_inter,
                                                        .to_all = to_all,
                                                        .rows = c->ws->tensors.expert_gate_up,
                                                        .all = all});
}

/* ws->tensors.expert_gate_up of x (T,H) */
static bl_status compute_gate_up(const group_call *c, const bl_lora_linear *lora, bl_tensor x)
{
    bl_tensor gate_up = c->ws->tensors.expert_gate_up;
    terms t;

    BL_TRY(permute(c, x));
    BL_TRY(multiply(c, BL_EXPERTS_GATE_UP, true, c->ws->rows, gate_up));
    return find_terms(c, BL_EXPERTS_GATE_UP, lora, &t) ? add_terms(&t, c->ws->rows, gate_up)
                                                       : BL_OK;
}

/* On average: how many there are is known on the device. */
static int64_t mean_rows(const group_call *c)
{
    return bl_ceil_div(c->routing.T * c->routing.top_k * c->routing.n_experts, c->routing.n_all);
}

/* ws->h of ws->tensors.expert_gate_up */
static bl_status activate(const group_call *c)
{
    return arch_activate(c->stream, c->block->dims, c->block->dims->expert_inter, mean_rows(c),
                         bl_routing_range(&c->routing), c->ws->tensors.expert_gate_up, c->ws->h,
                         (bl_quantized){0});
}

/* y *= the residual multiplier, if there is one; then += mid */
static bl_status join(const group_call *c, bl_tensor mid, bl_tensor y)
{
    const bl_block_dims *dims = c->block->dims;
    int64_t n = c->routing.T * dims->hidden;

    if (dims->residual_multiplier > 0)
        BL_TRY(
            bl_scale(c->stream,
                     &(bl_scale_args){.n = n, .scale = dims->residual_multiplier, .x = y, .y = y}));
    return bl_add(c->stream, &(bl_add_args){.n = n, .a = mid, .b = y, .y = y});
}

bl_status bl_block_forward_group(bl_stream *stream, const bl_block *block,
                                 const bl_micro_batch *batch, const bl_block_tensors *tensors,
                                 const bl_block_workspace *ws, int64_t group, bl_tensor out)
{
    group_call call = call_of(stream, block, batch->T, ws, group);
    const group_call *c = &call;
    bool adds = bl_block_adds_in_product(block->dims, BL_EXPERTS_DOWN);
    bl_tensor mid = bl_block_effective_tensors(tensors, ws).mid;
    bl_linear_use gate_up = arch_use_matrix(block, batch, ws, BL_EXPERTS_GATE_UP, NULL),
                  down = arch_use_matrix(block, batch, ws, BL_EXPERTS_DOWN, NULL);
    terms t;

    BL_TRY(compute_gate_up(c, &gate_up.lora, ws->mlp_input));
    if (bl_tensor_is_there(tensors->expert_gate_up))
        BL_TRY(move_gate_up(c, true, tensors->expert_gate_up));
    BL_TRY(activate(c));
    BL_TRY(multiply(c, BL_EXPERTS_DOWN, true, ws->h, ws->rows));
    if (find_terms(c, BL_EXPERTS_DOWN, &down.lora, &t)) BL_TRY(add_terms(&t, ws->h, ws->rows));
    /* With a shared expert `out` is mid and that. */
    BL_TRY(combine(c, true, block->dims->inter > 0 ? out : adds ? mid : (bl_tensor){0}, out));
    return adds || group + 1 < block->dims->n_expert_groups ? BL_OK : join(c, mid, out);
}

/* ws->dh, of ws->h and weighted, and the gradients of the weights; dy (T,H) */
static bl_status pull_back_down(const group_call *c, const bl_lora_linear *lora, bl_tensor dy)
{
    const bl_block_workspace *ws = c->ws;
    terms t;

    BL_TRY(permute(c, dy));
    BL_TRY(multiply(c, BL_EXPERTS_DOWN, false, ws->rows, ws->dh));
    if (find_terms(c, BL_EXPERTS_DOWN, lora, &t)) {
        BL_TRY(pull_up(&t, true, ws->h, ws->rows));
        BL_TRY(pull_back(&t, ws->dh));
        BL_TRY(weigh(&t, 1, true, t.du));
        BL_TRY(pull_down(&t, ws->h));
    }
    return bl_weigh_backward(c->stream,
                             &(bl_weigh_backward_args){.routing = c->routing,
                                                       .C = c->block->dims->expert_inter,
                                                       .N = c->block->dims->hidden,
                                                       .h = ws->h,
                                                       .d = ws->dh,
                                                       .dy = ws->rows,
                                                       .bias = bias_of(c, BL_EXPERTS_DOWN)});
}

/* ws->rows = the gradient of the rows of x (T,H), ws->tensors.expert_gate_up being that of the
 * products */
static bl_status pull_back_gate_up(const group_call *c, const bl_lora_linear *lora, bl_tensor x)
{
    bl_tensor dy = c->ws->tensors.expert_gate_up;
    terms t;
    bool has_terms = find_terms(c, BL_EXPERTS_GATE_UP, lora, &t);

    if (has_terms) {
        BL_TRY(permute(c, x));
        BL_TRY(pull_up(&t, false, c->ws->rows, dy));
        BL_TRY(pull_down(&t, c->ws->rows));
    }
    BL_TRY(multiply(c, BL_EXPERTS_GATE_UP, false, dy, c->ws->rows));
    return has_terms ? pull_back(&t, c->ws->rows) : BL_OK;
}

bl_status bl_block_backward_group(bl_stream *stream, const bl_block *block,
                                  const bl_micro_batch *batch, const bl_block_tensors *tensors,
                                  const bl_block_workspace *ws, int64_t group, bl_tensor d,
                                  float *gradients)
{
    const bl_block_dims *dims = block->dims;
    group_call call = call_of(stream, block, batch->T, ws, group);
    const group_call *c = &call;
    bl_linear_use gate_up = arch_use_matrix(block, batch, ws, BL_EXPERTS_GATE_UP, gradients),
                  down = arch_use_matrix(block, batch, ws, BL_EXPERTS_DOWN, gradients);
    bl_scale_args scaled = {
        .n = batch->T * dims->hidden, .scale = dims->residual_multiplier, .x = d, .y = ws->norm};

    if (scaled.scale > 0) BL_TRY(bl_scale(stream, &scaled));
    BL_TRY(bl_tensor_is_there(tensors->expert_gate_up)
               ? move_gate_up(c, false, tensors->expert_gate_up)
               : compute_gate_up(c, &gate_up.lora, ws->mlp_input));
    BL_TRY(activate(c));
    BL_TRY(pull_back_down(c, &down.lora, scaled.scale > 0 ? ws->norm : d));
    BL_TRY(arch_activate_backward(stream, dims, dims->expert_inter, mean_rows(c),
                                  bl_routing_range(&c->routing), ws->dh,
                                  ws->tensors.expert_gate_up));
    BL_TRY(pull_back_gate_up(c, &gate_up.lora, ws->mlp_input));
    return combine(c, false, (bl_tensor){0}, ws->d_norm);
}

bl_status arch_experts_route_backward(bl_stream *stream, const bl_block *block, int64_t T,
                                      const bl_block_workspace *ws, bl_tensor dx)
{
    return bl_route_backward(stream,
                             &(bl_route_backward_args){.routing = routing_of(block, T, ws),
                                                       .H = block->dims->hidden,
                                                       .is_normed = block->dims->is_top_k_normed,
                                                       .is_sigmoid = block->dims->is_router_sigmoid,
                                                       .scale = block->dims->routed_scale,
                                                       .router = vector_of(block, BL_ROUTER),
                                                       .dx = dx});
}
