/* SPDX-License-Identifier: Apache-2.0 */
/* list.h -- the list of ops. Of it are made the table that a kind of device implements
 * (ops_internal.h), the entries of each such table, and the declarations of costs (cost.h). */
#ifndef BALLAST_OPS_LIST_H
#define BALLAST_OPS_LIST_H

/* X(op), which takes const bl_<op>_args *. bl_accumulate is an add. */
#define BL_OPS_LIST(X)                                                                             \
    X(rmsnorm_forward)                                                                             \
    X(rmsnorm_backward)                                                                            \
    X(layernorm_forward)                                                                           \
    X(layernorm_backward)                                                                          \
    X(rope)                                                                                        \
    X(attention_forward)                                                                           \
    X(attention_backward)                                                                          \
    X(swiglu_forward)                                                                              \
    X(swiglu_backward)                                                                             \
    X(gelu_forward)                                                                                \
    X(gelu_backward)                                                                               \
    X(add)                                                                                         \
    X(add_bias)                                                                                    \
    X(scale)                                                                                       \
    X(cast)                                                                                        \
    X(dropout)                                                                                     \
    X(embedding)                                                                                   \
    X(norm_gradients)                                                                              \
    X(embedding_backward)                                                                          \
    X(loss_head)                                                                                   \
    X(adamw)                                                                                       \
    X(sum_squares)                                                                                 \
    X(add_sums)                                                                                    \
    X(clip_scale)                                                                                  \
    X(matmul)                                                                                      \
    X(matmul_weight)

#endif
