/* SPDX-License-Identifier: Apache-2.0 */
/* block_experts.c -- the products of a layer with its routed experts, in place of those with
 * W_gate_up and W_down:
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

static bl_routing routing_of(const bl_block *block, int64_t T, const bl_block_workspace *ws)
{
    bl_routing routing = {.T = T, .n_experts = block->dims->n_experts, .top_k = block->dims->top_k};

    bl_routing_place(&routing, ws->routing);
    return routing;
}

static const float *router_of(const bl_block *block)
{
    return block->vectors + block->dims->vector_offset[BL_ROUTER];
}

static const float *router_bias_of(const bl_block *block)
{
    if (!block->dims->has_router_bias) return NULL;
    return block->vectors + block->dims->vector_offset[BL_ROUTER_BIAS];
}

/* (n_experts, output channels); NULL: none. */
static const float *bias_of(const bl_block *block, bl_layer_matrix matrix)
{
    int64_t offset = block->dims->bias_offset[matrix];
    return offset < 0 ? NULL : block->vectors + offset;
}

bl_status arch_experts_route(bl_stream *stream, const bl_block *block, int64_t T,
                             const bl_block_workspace *ws, bl_tensor x)
{
    return bl_route(stream, &(bl_route_args){.routing = routing_of(block, T, ws),
                                             .H = block->dims->hidden,
                                             .is_normed = block->dims->is_top_k_normed,
                                             .router = router_of(block),
                                             .bias = router_bias_of(block),
                                             .x = x});
}

/* out = in times each row's matrix; forward with its bias. */
static bl_status multiply(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                          const bl_routing *routing, bool forward, bl_tensor in, bl_tensor out)
{
    bl_grouped_matmul_args product = {
        .routing = *routing, .forward = forward, .in = in, .out = out};

    BL_TRY(bl_base_acquire(block->base, block->layer, (int)matrix, stream, &product.weight));
    BL_TRY(bl_grouped_matmul(stream, &product));
    if (!forward || !bias_of(block, matrix)) return BL_OK;
    return bl_add_expert_bias(
        stream,
        &(bl_add_expert_bias_args){.routing = *routing,
                                   .N = block->dims->matrix[matrix].rows / block->dims->n_experts,
                                   .bias = bias_of(block, matrix),
                                   .rows = out});
}

/* ---- LoRA terms ---- */

/* Those of a call's rows; u and du (n_rows, r) are in ws->lora. */
typedef struct terms {
    bl_stream *stream;
    const bl_routing *routing;
    const bl_lora_part *part; /* its rows are those of all experts */
    int64_t K;
    bl_tensor u, du;
} terms;

/* False: the matrix has none. */
static bool find_terms(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                       const bl_routing *routing, const bl_lora_linear *lora,
                       const bl_block_workspace *ws, terms *out)
{
    bl_dtype act = block->dims->act;

    if (lora->n_parts == 0) return false;
    size_t n_bytes = arch_experts_term_bytes(block->dims, routing->T, lora->part[0].r) / 2;
    *out = (terms){.stream = stream,
                   .routing = routing,
                   .part = &lora->part[0],
                   .K = block->dims->matrix[matrix].cols,
                   .u = bl_tensor_of(ws->lora, act),
                   .du = bl_tensor_of((char *)ws->lora + n_bytes, act)};
    return true;
}

/* out = in times each row's factor: forward, its transpose. */
static bl_status multiply_factor(const terms *t, bl_peft_factor factor, bool forward, bool is_added,
                                 bl_tensor in, bl_tensor out)
{
    bool is_a = factor == BL_PEFT_A;
    bl_tensor values = is_a ? t->part->A : t->part->B;
    int64_t rows = is_a ? t->routing->n_experts * t->part->r : t->part->rows;
    bl_format format = values.dtype == BL_F32 ? BL_FORMAT_F32 : BL_FORMAT_BF16;
    bl_weight weight = {.rows = rows,
                        .cols = is_a ? t->K : t->part->r,
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
                                                          .C = t->part->r,
                                                          .scale = scale,
                                                          .is_weighted = is_weighted,
                                                          .x = x});
}

/* y += the terms of x */
static bl_status add_terms(const terms *t, bl_tensor x, bl_tensor y)
{
    BL_TRY(multiply_factor(t, BL_PEFT_A, true, false, x, t->u));
    BL_TRY(weigh(t, t->part->scale, false, t->u));
    return multiply_factor(t, BL_PEFT_B, true, true, t->u, y);
}

/* dB, and du of dy. is_weighted: dy is that of rows which are weighted. */
static bl_status pull_up(const terms *t, bool is_weighted, bl_tensor x, bl_tensor dy)
{
    BL_TRY(multiply_factor(t, BL_PEFT_A, true, false, x, t->u));
    BL_TRY(weigh(t, t->part->scale, is_weighted, t->u));
    BL_TRY(bl_grouped_gradient(
        t->stream, &(bl_grouped_gradient_args){.routing = *t->routing,
                                               .M = t->part->rows / t->routing->n_experts,
                                               .N = t->part->r,
                                               .left = dy,
                                               .right = t->u,
                                               .gradient = t->part->dB}));
    BL_TRY(multiply_factor(t, BL_PEFT_B, false, false, dy, t->du));
    return weigh(t, t->part->scale, false, t->du);
}

/* dA, of du and x */
static bl_status pull_down(const terms *t, bl_tensor x)
{
    return bl_grouped_gradient(t->stream, &(bl_grouped_gradient_args){.routing = *t->routing,
                                                                      .M = t->part->r,
                                                                      .N = t->K,
                                                                      .left = t->du,
                                                                      .right = x,
                                                                      .gradient = t->part->dA});
}

/* dx += du A */
static bl_status pull_back(const terms *t, bl_tensor dx)
{
    return multiply_factor(t, BL_PEFT_A, false, true, t->du, dx);
}

/* ---- a matrix ---- */

/* ws->rows = the rows of x (T,H) */
static bl_status permute(bl_stream *stream, const bl_block *block, const bl_routing *routing,
                         const bl_block_workspace *ws, bl_tensor x)
{
    return bl_permute(stream,
                      &(bl_permute_args){
                          .routing = *routing, .C = block->dims->hidden, .x = x, .rows = ws->rows});
}

/* y (T,H) = z + the sums of ws->rows */
static bl_status combine(bl_stream *stream, const bl_block *block, const bl_routing *routing,
                         const bl_block_workspace *ws, bool is_weighted, bl_tensor z, bl_tensor y)
{
    return bl_combine(stream, &(bl_combine_args){.routing = *routing,
                                                 .C = block->dims->hidden,
                                                 .is_weighted = is_weighted,
                                                 .rows = ws->rows,
                                                 .z = z,
                                                 .y = y});
}

bl_status arch_experts_forward(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                               int64_t T, const bl_block_workspace *ws, const bl_lora_linear *lora,
                               bl_tensor x, bl_tensor residual, bl_tensor y)
{
    bl_routing routing = routing_of(block, T, ws);
    bool is_first = matrix == BL_GATE_UP;
    bl_tensor in = is_first ? ws->rows : x, out = is_first ? y : ws->rows;
    terms t;

    if (is_first) {
        BL_TRY(arch_experts_route(stream, block, T, ws, x));
        BL_TRY(permute(stream, block, &routing, ws, x));
    }
    BL_TRY(multiply(stream, block, matrix, &routing, true, in, out));
    if (find_terms(stream, block, matrix, &routing, lora, ws, &t)) BL_TRY(add_terms(&t, in, out));
    return is_first ? BL_OK : combine(stream, block, &routing, ws, true, residual, y);
}

/* dx (n_rows, I), of x before it is weighted; dy (T,H) */
static bl_status pull_back_down(bl_stream *stream, const bl_block *block, const bl_routing *routing,
                                const bl_block_workspace *ws, const bl_lora_linear *lora,
                                bl_tensor x, bl_tensor dy, bl_tensor dx)
{
    terms t;

    BL_TRY(permute(stream, block, routing, ws, dy));
    BL_TRY(multiply(stream, block, BL_MLP_DOWN, routing, false, ws->rows, dx));
    if (!find_terms(stream, block, BL_MLP_DOWN, routing, lora, ws, &t)) return BL_OK;
    BL_TRY(pull_up(&t, true, x, ws->rows));
    BL_TRY(pull_back(&t, dx));
    BL_TRY(weigh(&t, 1, true, t.du));
    return pull_down(&t, x);
}

/* ws->rows = the gradient of the rows of x (T,H); dy (n_rows, 2I) */
static bl_status pull_back_gate_up(bl_stream *stream, const bl_block *block,
                                   const bl_routing *routing, const bl_block_workspace *ws,
                                   const bl_lora_linear *lora, bl_tensor x, bl_tensor dy)
{
    terms t;
    bool has_terms = find_terms(stream, block, BL_GATE_UP, routing, lora, ws, &t);

    if (has_terms) {
        BL_TRY(permute(stream, block, routing, ws, x));
        BL_TRY(pull_up(&t, false, ws->rows, dy));
        BL_TRY(pull_down(&t, ws->rows));
    }
    BL_TRY(multiply(stream, block, BL_GATE_UP, routing, false, dy, ws->rows));
    return has_terms ? pull_back(&t, ws->rows) : BL_OK;
}

bl_status arch_experts_backward(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                                int64_t T, const bl_block_workspace *ws, const bl_lora_linear *lora,
                                bl_tensor x, bl_tensor dy, bl_tensor dx)
{
    bl_routing routing = routing_of(block, T, ws);

    if (matrix == BL_MLP_DOWN) {
        BL_TRY(pull_back_down(stream, block, &routing, ws, lora, x, dy, dx));
        return bl_weigh_backward(stream, &(bl_weigh_backward_args){.routing = routing,
                                                                   .C = block->dims->inter,
                                                                   .N = block->dims->hidden,
                                                                   .h = x,
                                                                   .d = dx,
                                                                   .dy = ws->rows,
                                                                   .bias = bias_of(block, matrix)});
    }
    BL_TRY(pull_back_gate_up(stream, block, &routing, ws, lora, x, dy));
    BL_TRY(combine(stream, block, &routing, ws, false, (bl_tensor){0}, dx));
    return bl_route_backward(stream,
                             &(bl_route_backward_args){.routing = routing,
                                                       .H = block->dims->hidden,
                                                       .is_normed = block->dims->is_top_k_normed,
                                                       .router = router_of(block),
                                                       .dx = dx});
}
