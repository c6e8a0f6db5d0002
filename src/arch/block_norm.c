/* SPDX-License-Identifier: Apache-2.0 */
/* block_norm.c -- the norm of a family over the hidden channels: RMSNorm or LayerNorm. */
#include "arch/block.h"
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
                                                                 .rstd = norm->rstd});
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
