/* SPDX-License-Identifier: Apache-2.0 */
/* block_experts.c -- the products of a layer with its routed experts, in place of those with
 * W_gate_up and W_down:
 *
 *   forward   route(n2);  g|u of each row = n2 of its token W_gate_up^T of its expert
 *             mid + sum of w (h W_down^T) over a token's rows
 *   backward  dh = d of the row's token W_down;  dw = h . dh;  dh *= w
 *             dn2 = sum of (dg|du W_gate_up) over a token's rows + the router's part, from dw
 *
 * The outputs h W_down^T are not needed again: dw = d . (h W_down^T) = h . (d W_down). */
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

bl_status arch_experts_route(bl_stream *stream, const bl_block *block, int64_t T,
                             const bl_block_workspace *ws, bl_tensor x)
{
    return bl_route(stream, &(bl_route_args){.routing = routing_of(block, T, ws),
                                             .H = block->dims->hidden,
                                             .is_normed = block->dims->is_top_k_normed,
                                             .router = router_of(block),
                                             .x = x});
}

/* out = in times each row's matrix. */
static bl_status multiply(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                          const bl_routing *routing, bool forward, bl_tensor in, bl_tensor out)
{
    bl_grouped_matmul_args product = {
        .routing = *routing, .forward = forward, .in = in, .out = out};

    BL_TRY(bl_base_acquire(block->base, block->layer, (int)matrix, stream, &product.weight));
    return bl_grouped_matmul(stream, &product);
}

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
                               int64_t T, const bl_block_workspace *ws, bl_tensor x,
                               bl_tensor residual, bl_tensor y)
{
    bl_routing routing = routing_of(block, T, ws);

    if (matrix == BL_GATE_UP) {
        BL_TRY(arch_experts_route(stream, block, T, ws, x));
        BL_TRY(permute(stream, block, &routing, ws, x));
        return multiply(stream, block, matrix, &routing, true, ws->rows, y);
    }
    BL_TRY(multiply(stream, block, matrix, &routing, true, x, ws->rows));
    return combine(stream, block, &routing, ws, true, residual, y);
}

bl_status arch_experts_backward(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                                int64_t T, const bl_block_workspace *ws, bl_tensor x, bl_tensor dy,
                                bl_tensor dx)
{
    bl_routing routing = routing_of(block, T, ws);

    if (matrix == BL_MLP_DOWN) {
        BL_TRY(permute(stream, block, &routing, ws, dy));
        BL_TRY(multiply(stream, block, matrix, &routing, false, ws->rows, dx));
        return bl_weigh_backward(stream,
                                 &(bl_weigh_backward_args){
                                     .routing = routing, .C = block->dims->inter, .h = x, .d = dx});
    }
    BL_TRY(multiply(stream, block, matrix, &routing, false, dy, ws->rows));
    BL_TRY(combine(stream, block, &routing, ws, false, (bl_tensor){0}, dx));
    return bl_route_backward(stream,
                             &(bl_route_backward_args){.routing = routing,
                                                       .H = block->dims->hidden,
                                                       .is_normed = block->dims->is_top_k_normed,
                                                       .router = router_of(block),
                                                       .dx = dx});
}
