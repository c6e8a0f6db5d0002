/* SPDX-License-Identifier: Apache-2.0 */
/* experts.h -- the MLP of a mixture: each token is computed by the top_k of n_experts MLPs that its
 * router scores highest.
 *
 * Shazeer et al. 2017, arXiv:1701.06538; Fedus et al. 2021, arXiv:2101.03961:
 *   p = softmax(x W^T + b)          W (n_experts, H), b (n_experts): the router, frozen
 *   w_j = p_j, or p_j / sum of the chosen p (is_normed), of the top_k largest p; of equal ones the
 *   lower index
 * or as DeepSeek-V3 (2024, arXiv:2412.19437, eq. 14 to 16): p = sigmoid(x W^T) (is_sigmoid); chosen
 * are the largest p + c, c being a correction, of the top_groups of n_groups groups of experts
 * whose two largest p + c have the largest sums; and w times a factor `scale`.
 *   y = sum_j w_j expert_j(x), in the order of the experts
 *
 * The T top_k pairs of a token and an expert are rows, sorted by expert and then by token. Their
 * number does not depend on the routing, so buffers are sized before it; n_rows = T top_k. A group
 * is some neighboring experts, computed apart from the others: its rows are neighbors, too, at most
 * T min(top_k, its experts). On GPUs there are no kernels: BL_ELIMIT. */
#ifndef BALLAST_OPS_EXPERTS_H
#define BALLAST_OPS_EXPERTS_H

#include "ops/ops.h"
#include "ops/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Where tokens go, in device memory: made by bl_route, read by the other ops. Of a group
 * (bl_routing_of_group) n_experts are the group's and rows are counted from its first. */
typedef struct bl_routing {
    int64_t T, n_experts, top_k;
    int32_t n_all, first_expert; /* the layer's experts; the first of these that is the group's */
    int32_t *expert;             /* (T, top_k): a token's experts, ascending */
    int32_t *row;                /* (T, top_k): the row of each */
    int32_t *token;              /* (T top_k): the token of each row */
    int32_t *first;  /* (n_experts + 1): the rows of expert e are [first[e], first[e + 1]) */
    float *weight;   /* (T, top_k): w */
    float *d_weight; /* (T, top_k): its gradient; NULL: forward only */
    float *score;    /* (T, n_experts): p */
} bl_routing;

/* Bytes of a routing's arrays, each from a multiple of 256 on; and their places at `memory`. */
size_t bl_routing_bytes(int64_t T, int64_t n_experts, int64_t top_k);
void bl_routing_place(bl_routing *routing, void *memory);
/* The routing of experts [first, first + n) of `all`, for the ops after bl_route. */
bl_routing bl_routing_of_group(const bl_routing *all, int64_t first, int64_t n);
/* Which of all rows are the group's. */
bl_row_range bl_routing_range(const bl_routing *group);

/* Overwrites the routing's arrays except d_weight. x (T,H). Logits are sums of products in fp32,
 * whatever x's dtype. */
typedef struct bl_route_args {
    bl_routing routing;
    int64_t H;
    bool is_normed, is_sigmoid;
    int64_t n_groups, top_groups; /* n_groups divides n_experts; 0 or 1: no groups */
    float scale;                  /* 0: 1 */
    const float *router;          /* (n_experts, H) */
    const float *bias;            /* (n_experts); NULL: 0 */
    const float *correction;      /* (n_experts); NULL: 0 */
    bl_tensor x;
} bl_route_args;
bl_status bl_route(bl_stream *stream, const bl_route_args *args);

/* dx (T,H) += the gradient through the weights, of routing.d_weight:
 *   dz = p (dp - sum p dp), dp the gradient of p: that of w, or is_normed; dx += dz W
 * with is_sigmoid dz = p (1 - p) dp. */
typedef struct bl_route_backward_args {
    bl_routing routing;
    int64_t H;
    bool is_normed, is_sigmoid;
    float scale; /* 0: 1 */
    const float *router;
    bl_tensor dx;
} bl_route_backward_args;
bl_status bl_route_backward(bl_stream *stream, const bl_route_backward_args *args);

/* rows (n_rows, C), overwritten: row i is that of its token in x (T,C). */
typedef struct bl_permute_args {
    bl_routing routing;
    int64_t C;
    bl_tensor x, rows;
} bl_permute_args;
bl_status bl_permute(bl_stream *stream, const bl_permute_args *args);

/* y (T,C) = z + sum over a token's experts, ascending, of its rows, each times its weight with
 * is_weighted. z (T,C): y itself or apart from it; none: 0. The sum is in fp32, z is added last.
 * With groups in ascending order, a call each, the sum is kept in `sum` in between and y gets a
 * token in the call of the group of its last expert: the same bits. */
typedef struct bl_combine_args {
    bl_routing routing;
    int64_t C;
    bool is_weighted;
    bl_tensor rows, z, y;
    float *sum; /* (T,C); NULL: one call has all experts */
} bl_combine_args;
bl_status bl_combine(bl_stream *stream, const bl_combine_args *args);

/* rows (n_rows, N) += bias (n_experts, N) of each row's expert. */
typedef struct bl_add_expert_bias_args {
    bl_routing routing;
    int64_t N;
    const float *bias;
    bl_tensor rows;
} bl_add_expert_bias_args;
bl_status bl_add_expert_bias(bl_stream *stream, const bl_add_expert_bias_args *args);

/* Of y = sum w_j (h_j W_j^T + b_j): h (n_rows, C), d (n_rows, C) = dy W of each row's expert.
 * routing.d_weight = h . d + dy . b, a sum in double; d is replaced by w d, the gradient of h. bias
 * (n_experts, N) and dy (n_rows, N), the row's; or NULL and none: b is 0. */
typedef struct bl_weigh_backward_args {
    bl_routing routing;
    int64_t C, N;
    bl_tensor h, d, dy;
    const float *bias;
} bl_weigh_backward_args;
bl_status bl_weigh_backward(bl_stream *stream, const bl_weigh_backward_args *args);

/* The products of each row with its expert's matrix: `weight` has those of all experts below one
 * another in one segment, (n_experts N, K); out is overwritten, or added to with is_added.
 *   forward: out (n_rows, N) = in (n_rows, K) W^T;   else out (n_rows, K) = in (n_rows, N) W
 * An expert's product is that of bl_matmul_weight. BL_EINTERNAL: a matrix of several segments, or
 * one that is cut inside a group of scales. */
typedef struct bl_grouped_matmul_args {
    bl_routing routing;
    bool forward;
    bl_tensor in, out;
    bl_weight weight;
    bool is_added;
} bl_grouped_matmul_args;
bl_status bl_grouped_matmul(bl_stream *stream, const bl_grouped_matmul_args *args);

/* x (n_rows, C), in place: each row times scale, and times its weight with is_weighted. */
typedef struct bl_weigh_rows_args {
    bl_routing routing;
    int64_t C;
    float scale;
    bool is_weighted;
    bl_tensor x;
} bl_weigh_rows_args;
bl_status bl_weigh_rows(bl_stream *stream, const bl_weigh_rows_args *args);

/* gradient (n_experts, M, N), fp32, overwritten: of expert e left^T right over its rows, in the
 * order of tokens; 0 without a row. left (n_rows, M), right (n_rows, N). */
typedef struct bl_grouped_gradient_args {
    bl_routing routing;
    int64_t M, N;
    bl_tensor left, right;
    float *gradient;
} bl_grouped_gradient_args;
bl_status bl_grouped_gradient(bl_stream *stream, const bl_grouped_gradient_args *args);

/* gpt-oss' gate, OpenAI 2025, arXiv:2508.10925, section 2.2:
 *   h = (u' + 1) g' sigma(alpha g'),  g' = min(g, limit),  u' = u clamped to [-limit, limit]
 * gate_up (T, 2I): g in even columns, u in odd ones; h (T, I) overwritten. */
typedef struct bl_swiglu_clamped_forward_args {
    int64_t T, I;
    float alpha, limit;
    bl_tensor gate_up, h;
    bl_row_range range; /* as of bl_swiglu_forward */
} bl_swiglu_clamped_forward_args;
bl_status bl_swiglu_clamped_forward(bl_stream *stream, const bl_swiglu_clamped_forward_args *args);

/* With s = sigma(alpha g'): dg = dh (u' + 1) s (1 + alpha g' (1 - s)), du = dh g' s, and 0 beyond
 * the limits. d_gate_up (T, 2I) overwritten; may be gate_up itself. */
typedef struct bl_swiglu_clamped_backward_args {
    int64_t T, I;
    float alpha, limit;
    bl_tensor gate_up, dh, d_gate_up;
    bl_row_range range;
} bl_swiglu_clamped_backward_args;
bl_status bl_swiglu_clamped_backward(bl_stream *stream,
                                     const bl_swiglu_clamped_backward_args *args);

/* all (T top_k, C): the group's rows there = rows (n_rows, C); else the reverse. */
typedef struct bl_move_rows_args {
    bl_routing routing;
    int64_t C;
    bool to_all;
    bl_tensor rows, all;
} bl_move_rows_args;
bl_status bl_move_rows(bl_stream *stream, const bl_move_rows_args *args);

#ifdef __cplusplus
}
#endif

#endif
