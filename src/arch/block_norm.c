/* SPDX-License-Identifier: Apache-2.0 */
/* block_norm.c -- the norm of a family over the hidden channels, RMSNorm or LayerNorm, and the
 * norms of q and k. */
#include "arch/block.h"
#include "arch/block_internal.h"
#include "ops/norm.h"

bl_status bl_block_norm_forward(bl_stream *stream, const bl_block_dims *dims,
                                const bl_block_norm *norm, bl_tensor y)
{
    if (dims->has_layer_norm)
        return bl_layernorm_forward(stream,
                                    &(bl_layernorm_forward_args){.T = norm->T,
                                                                 .H = dims->hidden,
                                                                 .eps = dims->eps,
                                                                 .x = norm->x,
                                                                 .y = y,
                                                                 .w = norm->w,
                                                                 .b = norm->w + dims->hidden,
                                                                 .mean = norm->mean,
                                                                 .rstd = norm->rstd});
    return bl_rmsnorm_forward(stream, &(bl_rmsnorm_forward_args){.T = norm->T,
                                                                 .H = dims->hidden,
                                                                 .eps = dims->eps,
                                                                 .x = norm->x,
                                                                 .w = norm->w,
                                                                 .y = y,
                                                                 .rstd = norm->rstd,
                                                                 .quantized = norm->quantized});
}

bl_status bl_block_norm_backward(bl_stream *stream, const bl_block_dims *dims,
                                 const bl_block_norm *norm, bool accumulate, bl_tensor dy,
                                 bl_tensor dx)
{
    if (dims->has_layer_norm)
        return bl_layernorm_backward(stream, &(bl_layernorm_backward_args){.T = norm->T,
                                                                           .H = dims->hidden,
                                                                           .accumulate = accumulate,
                                                                           .x = norm->x,
                                                                           .w = norm->w,
                                                                           .mean = norm->mean,
                                                                           .rstd = norm->rstd,
                                                                           .dy = dy,
                                                                           .dx = dx});
    return bl_rmsnorm_backward(stream, &(bl_rmsnorm_backward_args){.T = norm->T,
                                                                   .H = dims->hidden,
                                                                   .accumulate = accumulate,
                                                                   .x = norm->x,
                                                                   .w = norm->w,
                                                                   .rstd = norm->rstd,
                                                                   .dy = dy,
                                                                   .dx = dx});
}

bl_status bl_block_norm_gradients(bl_stream *stream, const bl_block_dims *dims,
                                  const bl_block_norm *norm, bl_tensor dy, unsigned vectors,
                                  bl_layer_vector weight, float *dw)
{
    bool has_mean = dims->has_layer_norm, has_weight = vectors >> weight & 1,
         has_bias = has_mean && (vectors >> (weight + 1) & 1);

    if (!has_weight && !has_bias) return BL_OK;
    return bl_norm_gradients(stream,
                             &(bl_norm_gradients_args){.T = norm->T,
                                                       .H = dims->hidden,
                                                       .x = norm->x,
                                                       .dy = dy,
                                                       .mean = has_mean ? norm->mean : NULL,
                                                       .rstd = norm->rstd,
                                                       .dw = has_weight ? dw : NULL,
                                                       .db = has_bias ? dw + dims->hidden : NULL});
}

/* ---- q and k ---- */

/* The rows of q, or of k, as a norm sees them, of a head each or of all: their number per token,
 * width, first column and place in head_rstd. */
typedef struct head_rows {
    bl_layer_vector norm;
    int64_t n_rows, width, column;
    float *rstd;
} head_rows;

static head_rows heads_of(const bl_block_dims *dims, int64_t T, const bl_block_workspace *ws,
                          bl_layer_vector norm)
{
    int64_t width = norm == BL_Q_NORM ? dims->q_norm_width : dims->k_norm_width;

    if (norm == BL_Q_NORM) return (head_rows){norm, dims->q_width / width, width, 0, ws->head_rstd};
    return (head_rows){norm, dims->kv_width / width, width, dims->q_width,
                       ws->head_rstd + T * dims->n_heads};
}

bl_status arch_norm_heads(bl_stream *stream, const bl_block *block, int64_t T, bl_layer_vector norm,
                          bl_tensor qkv, const bl_block_workspace *ws)
{
    const bl_block_dims *dims = block->dims;
    head_rows heads = heads_of(dims, T, ws, norm);

    return bl_rmsnorm_forward(
        stream, &(bl_rmsnorm_forward_args){.T = T,
                                           .H = heads.width,
                                           .eps = dims->eps,
                                           .x = bl_tensor_at(qkv, heads.column),
                                           .y = bl_tensor_at(ws->qk, heads.column),
                                           .w = block->vectors + dims->vector_offset[norm],
                                           .rstd = heads.rstd,
                                           .n_heads = heads.n_rows,
                                           .row_stride = dims->qkv_width});
}

bl_status arch_norm_heads_backward(bl_stream *stream, const bl_block *block, int64_t T,
                                   bl_layer_vector norm, bl_tensor qkv,
                                   const bl_block_workspace *ws, bl_tensor d)
{
    const bl_block_dims *dims = block->dims;
    head_rows heads = heads_of(dims, T, ws, norm);

    if (block->trained && (block->trained->trained->vectors >> norm & 1))
        BL_TRY(bl_norm_gradients(
            stream,
            &(bl_norm_gradients_args){.T = T,
                                      .H = heads.width,
                                      .x = bl_tensor_at(qkv, heads.column),
                                      .dy = bl_tensor_at(d, heads.column),
                                      .rstd = heads.rstd,
                                      .dw = block->trained->vectors + dims->vector_offset[norm],
                                      .n_heads = heads.n_rows,
                                      .row_stride = dims->qkv_width}));
    return bl_rmsnorm_backward(
        stream, &(bl_rmsnorm_backward_args){.T = T,
                                            .H = heads.width,
                                            .x = bl_tensor_at(qkv, heads.column),
                                            .dy = bl_tensor_at(d, heads.column),
                                            .dx = bl_tensor_at(d, heads.column),
                                            .w = block->vectors + dims->vector_offset[norm],
                                            .rstd = heads.rstd,
                                            .n_heads = heads.n_rows,
                                            .row_stride = dims->qkv_width});
}
