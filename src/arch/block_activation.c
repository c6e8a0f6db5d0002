/* SPDX-License-Identifier: Apache-2.0 */
/* block_activation.c -- what an MLP computes between its matrices. */
#include "arch/block_internal.h"
#include "ops/elementwise.h"

static bl_gelu_form form_of(const bl_block_dims *dims)
{
    return dims->activation == BL_GELU ? BL_GELU_ERF : BL_GELU_TANH;
}

bl_status arch_activate(bl_stream *stream, const bl_block_dims *dims, int64_t inter, int64_t n_rows,
                        bl_row_range range, bl_tensor gate_up, bl_tensor h, bl_quantized quantized)
{
    if (dims->activation == BL_SWIGLU_CLAMPED)
        return bl_swiglu_clamped_forward(
            stream, &(bl_swiglu_clamped_forward_args){.T = n_rows,
                                                      .I = inter,
                                                      .alpha = dims->swiglu_alpha,
                                                      .limit = dims->swiglu_limit,
                                                      .gate_up = gate_up,
                                                      .h = h,
                                                      .range = range});
    if (dims->activation == BL_SWIGLU)
        return bl_swiglu_forward(stream, &(bl_swiglu_forward_args){.T = n_rows,
                                                                   .I = inter,
                                                                   .gate_up = gate_up,
                                                                   .h = h,
                                                                   .quantized = quantized,
                                                                   .range = range});
    return bl_gelu_forward(
        stream,
        &(bl_gelu_forward_args){.n = n_rows * inter, .form = form_of(dims), .u = gate_up, .h = h});
}

bl_status arch_activate_backward(bl_stream *stream, const bl_block_dims *dims, int64_t inter,
                                 int64_t n_rows, bl_row_range range, bl_tensor dh,
                                 bl_tensor gate_up)
{
    if (dims->activation == BL_SWIGLU_CLAMPED)
        return bl_swiglu_clamped_backward(
            stream, &(bl_swiglu_clamped_backward_args){.T = n_rows,
                                                       .I = inter,
                                                       .alpha = dims->swiglu_alpha,
                                                       .limit = dims->swiglu_limit,
                                                       .gate_up = gate_up,
                                                       .dh = dh,
                                                       .d_gate_up = gate_up,
                                                       .range = range});
    if (dims->activation == BL_SWIGLU)
        return bl_swiglu_backward(stream, &(bl_swiglu_backward_args){.T = n_rows,
                                                                     .I = inter,
                                                                     .gate_up = gate_up,
                                                                     .dh = dh,
                                                                     .d_gate_up = gate_up,
                                                                     .range = range});
    return bl_gelu_backward(
        stream,
        &(bl_gelu_backward_args){
            .n = n_rows * inter, .form = form_of(dims), .u = gate_up, .dh = dh, .du = gate_up});
}
