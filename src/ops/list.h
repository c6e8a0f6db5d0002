/* SPDX-License-Identifier: Apache-2.0 */
/* list.h -- the list of ops. It makes the table that a kind of device implements (ops_internal.h),
 * the entries of each such table, the public functions (ops.c), and the declarations of costs
 * (cost.h). */
#ifndef BALLAST_OPS_LIST_H
#define BALLAST_OPS_LIST_H

/* X(op, check, dtypes, tensors...): bl_<op> takes const bl_<op>_args *args.
 *   check    what every device checks of the arguments, after the dtypes: a function of ops.c
 *   dtypes   of `tensors`; those that are present have one dtype: acts, the device's dtypes of
 *            activations, or acts_or_f32
 * bl_accumulate is an add. */
#define BL_OPS_LIST(X)                                                                             \
    X(rmsnorm_forward, check_rmsnorm, acts, args->x, args->y)                                      \
    X(rmsnorm_backward, check_nothing, acts, args->x, args->dy, args->dx)                          \
    X(layernorm_forward, check_nothing, acts, args->x, args->y)                                    \
    X(layernorm_backward, check_nothing, acts, args->x, args->dy, args->dx)                        \
    X(rope, check_rope, acts, args->x)                                                             \
    X(attention_forward, check_attention, acts, args->q, args->k, args->v, args->o)                \
    X(attention_backward, check_attention_backward, acts, args->q, args->k, args->v, args->o,      \
      args->do_, args->dq, args->dk, args->dv)                                                     \
    X(swiglu_forward, check_swiglu, acts, args->gate_up, args->h)                                  \
    X(swiglu_backward, check_nothing, acts, args->gate_up, args->dh, args->d_gate_up)              \
    X(gelu_forward, check_nothing, acts, args->u, args->h)                                         \
    X(gelu_backward, check_nothing, acts, args->u, args->dh, args->du)                             \
    X(add, check_nothing, acts_or_f32, args->a, args->b, args->y)                                  \
    X(add_bias, check_nothing, acts, args->y)                                                      \
    X(scale, check_nothing, acts, args->x, args->y)                                                \
    X(cast, check_cast, acts)                                                                      \
    X(dropout, check_dropout, acts_or_f32, args->x, args->y)                                       \
    X(embedding, check_embedding, acts, args->y)                                                   \
    X(norm_gradients, check_nothing, acts, args->x, args->dy)                                      \
    X(embedding_backward, check_nothing, acts, args->dy)                                           \
    X(loss_head, check_loss_head, acts, args->x, args->dx)                                         \
    X(adamw, check_adamw, acts)                                                                    \
    X(sum_squares, check_nothing, acts)                                                            \
    X(add_sums, check_nothing, acts)                                                               \
    X(clip_scale, check_nothing, acts)                                                             \
    X(matmul, check_matmul, acts, args->a, args->b)                                                \
    X(matmul_weight, check_nothing, acts, args->in, args->out, args->addend)                       \
    X(route, check_route, acts, args->x)                                                           \
    X(route_backward, check_nothing, acts, args->dx)                                               \
    X(permute, check_nothing, acts, args->x, args->rows)                                           \
    X(combine, check_nothing, acts, args->rows, args->z, args->y)                                  \
    X(add_expert_bias, check_nothing, acts, args->rows)                                            \
    X(weigh_backward, check_nothing, acts, args->h, args->d, args->dy)                             \
    X(swiglu_clamped_forward, check_nothing, acts, args->gate_up, args->h)                         \
    X(swiglu_clamped_backward, check_nothing, acts, args->gate_up, args->dh, args->d_gate_up)      \
    X(grouped_matmul, check_grouped_matmul, acts, args->in, args->out)                             \
    X(weigh_rows, check_nothing, acts, args->x)                                                    \
    X(grouped_gradient, check_nothing, acts, args->left, args->right)                              \
    X(move_rows, check_nothing, acts, args->rows, args->all)

#endif
