/* SPDX-License-Identifier: Apache-2.0 */
/* block_internal.h -- for block.c: the norms of q and k in block_norm.c, the MLP's activation
 * function in block_activation.c, routed experts in block_experts.c, and the gradients of a layer's
 * own weights in block_weights.c. */
#ifndef BALLAST_ARCH_BLOCK_INTERNAL_H
#define BALLAST_ARCH_BLOCK_INTERNAL_H

#include "arch/block.h"

/* norm: BL_Q_NORM or BL_K_NORM. */

/* ws->qk = norm of q's or k's rows in qkv, of T tokens. */
bl_status arch_norm_heads(bl_stream *stream, const bl_block *block, int64_t T, bl_layer_vector norm,
                          bl_tensor qkv, const bl_block_workspace *ws);

/* d = gradient of q's or k's rows in qkv, d being that of their norm. */
bl_status arch_norm_heads_backward(bl_stream *stream, const bl_block *block, int64_t T,
                                   bl_layer_vector norm, bl_tensor qkv,
                                   const bl_block_workspace *ws, bl_tensor d);

/* h (n_rows, I) = the MLP's activation function of gate_up, of SwiGLU also in E4M3 where
 * `quantized` is. Backward: gate_up = its gradient, dh being that of h. range (ops/elementwise.h):
 * not of GELU. */
bl_status arch_activate(bl_stream *stream, const bl_block_dims *dims, int64_t inter, int64_t n_rows,
                        bl_row_range range, bl_tensor gate_up, bl_tensor h, bl_quantized quantized);
bl_status arch_activate_backward(bl_stream *stream, const bl_block_dims *dims, int64_t inter,
                                 int64_t n_rows, bl_row_range range, bl_tensor dh,
                                 bl_tensor gate_up);

/* ws->mlp_input = norm2 of mid (T,H), and its routing. */
bl_status arch_experts_route(bl_stream *stream, const bl_block *block, int64_t T,
                             const bl_block_workspace *ws, bl_tensor mid);

/* Bytes of ws->lora that LoRA terms of routed experts need for T tokens. */
size_t arch_experts_term_bytes(const bl_block_dims *dims, int64_t T, int64_t r);

/* Of bl_block_backward: dx (T,H), the gradient of ws->mlp_input through the groups, += that through
 * their weights, which backward_group has left in the routing. */
bl_status arch_experts_route_backward(bl_stream *stream, const bl_block *block, int64_t T,
                                      const bl_block_workspace *ws, bl_tensor dx);

/* One fused matrix with its adapters. */
bl_linear_use arch_use_matrix(const bl_block *block, const bl_micro_batch *batch,
                              const bl_block_workspace *ws, bl_layer_matrix matrix,
                              float *gradients);

/* Of block->is_last: whether no trained tensor and no LoRA term needs the gradient of what W_qkv
 * reads; and of attention's output. */
bool arch_ends_at_qkv(const bl_block *block);
bool arch_ends_at_mlp(const bl_block *block);

/* Of block->trained, if there is one, for T rows. Of a matrix with input x and output gradient dy:
 * dW += dy^T x of its trained rows, and the trained elements of its bias; both sums over the
 * micro-batch; scratch: that of LoRA's products, which have been queued. Of the vector `which`, a
 * weight, that `norm` has computed with, and of the bias behind it. */
bl_status arch_add_matrix_gradient(bl_stream *stream, const bl_block *block, bl_layer_matrix matrix,
                                   int64_t T, bl_tensor x, bl_tensor dy,
                                   const bl_block_workspace *ws);
bl_status arch_add_norm_gradient(bl_stream *stream, const bl_block *block, bl_layer_vector which,
                                 const bl_block_norm *norm, bl_tensor dy);

#endif
