/* SPDX-License-Identifier: Apache-2.0 */
/* elementwise.h -- SwiGLU, GELU, residual additions, biases, dropout, token embedding. */
#ifndef BALLAST_OPS_ELEMENTWISE_H
#define BALLAST_OPS_ELEMENTWISE_H

#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* SwiGLU, Shazeer 2020, arXiv:2002.05202, eq. 6 (SiLU gate): h = silu(g) u, silu(g) = g / (1 +
 * exp(-g)). gate_up (T, 2I): g in columns [0, I), u in [I, 2I); h (T, I) overwritten. quantized: h,
 * rounded as it is stored, in E4M3, too; overwritten, or none. On a GPU alone: else
 * BL_EINTERNAL. range (bl_routing_range), on a CPU alone: of how many rows, T is an average. */
typedef struct bl_swiglu_forward_args {
    int64_t T, I;
    bl_tensor gate_up, h;
    bl_quantized quantized;
    bl_row_range range; /* none: T rows */
} bl_swiglu_forward_args;
BL_API bl_status bl_swiglu_forward(bl_stream *stream, const bl_swiglu_forward_args *args);

/* dg = dh u sigma(g) (1 + g (1 - sigma(g))), du = dh silu(g). d_gate_up (T, 2I) overwritten; may be
 * gate_up itself. */
typedef struct bl_swiglu_backward_args {
    int64_t T, I;
    bl_tensor gate_up, dh, d_gate_up;
    bl_row_range range; /* as of forward */
} bl_swiglu_backward_args;
BL_API bl_status bl_swiglu_backward(bl_stream *stream, const bl_swiglu_backward_args *args);

/* GELU, Hendrycks & Gimpel 2016, arXiv:1606.08415, section 2, without a gate. Phi is the normal
 * distribution's function, phi its density.
 *   BL_GELU_ERF   h = u Phi(u) = u (1 + erf(u / sqrt(2))) / 2; transformers' "gelu"
 *   BL_GELU_TANH  h = u (1 + tanh(c)) / 2 = u sigma(2 c), c = sqrt(2 / pi) (u + 0.044715 u^3);
 *                 transformers' "gelu_new", "gelu_pytorch_tanh" */
typedef enum bl_gelu_form { BL_GELU_ERF, BL_GELU_TANH } bl_gelu_form;

/* h_i = gelu(u_i) for i < n, overwritten; h may be u. */
typedef struct bl_gelu_forward_args {
    int64_t n;
    bl_gelu_form form;
    bl_tensor u, h;
} bl_gelu_forward_args;
BL_API bl_status bl_gelu_forward(bl_stream *stream, const bl_gelu_forward_args *args);

/* du_i = dh_i gelu'(u_i), overwritten; may be u or dh. gelu' is Phi(u) + u phi(u), or s + u s (1 -
 * s) 2 c', s = sigma(2 c). */
typedef struct bl_gelu_backward_args {
    int64_t n;
    bl_gelu_form form;
    bl_tensor u, dh, du;
} bl_gelu_backward_args;
BL_API bl_status bl_gelu_backward(bl_stream *stream, const bl_gelu_backward_args *args);

/* y_i = a_i + b_i for i < n; y may be a or b. All are of one dtype; CUDA: fp32
 * or bf16. */
typedef struct bl_add_args {
    int64_t n;
    bl_tensor a, b, y;
    /* CPU: the stream's own thread does it all. For streams other than the one that computes, to
     * which the rank's workers belong. Ignored on CUDA; the result is the same. */
    bool without_workers;
} bl_add_args;
BL_API bl_status bl_add(bl_stream *stream, const bl_add_args *args);

/* y_tn += bias_n, y (T, N), the sum in fp32. Its backward is the identity; that of a bias
 * is norm.h's. */
typedef struct bl_add_bias_args {
    int64_t T, N;
    const float *bias;
    bl_tensor y;
} bl_add_bias_args;
BL_API bl_status bl_add_bias(bl_stream *stream, const bl_add_bias_args *args);

/* y_i = scale x_i for i < n; y may be x. The product is in fp32. */
typedef struct bl_scale_args {
    int64_t n;
    float scale;
    bl_tensor x, y;
} bl_scale_args;
BL_API bl_status bl_scale(bl_stream *stream, const bl_scale_args *args);

/* y_i += x_i for i < n. Both are of one dtype; CUDA: fp32 or bf16. */
typedef struct bl_accumulate_args {
    int64_t n;
    bl_tensor x, y;
    bool without_workers; /* as of bl_add */
} bl_accumulate_args;
BL_API bl_status bl_accumulate(bl_stream *stream, const bl_accumulate_args *args);

/* y_i = x_i for i < n, from one dtype to another (the compute copies of LoRA weights), rounded to
 * nearest even. Every device: fp32 or bf16 on either side. y does not overlap x. */
typedef struct bl_cast_args {
    int64_t n;
    bl_tensor x, y;
} bl_cast_args;
BL_API bl_status bl_cast(bl_stream *stream, const bl_cast_args *args);
/* The same from and to host memory, as bl_adamw_on_host (optimizer.h). */
bl_status bl_cast_on_host(bl_stream *stream, const bl_cast_args *args);

/* Dropout with a counter-based mask: element (t, c) is kept with probability 1 - p and scaled by 1
 * / (1 - p). The random number is a function (Philox 4x32-10, Salmon et al. 2011) of (seed, step,
 * sample[t], position[t], layer, matrix, c) alone, so forward, recompute and backward agree, and
 * micro-batching does not matter; philox.h defines the counters, and every device draws the same
 * bits. Applying it to a gradient is its own backward.
 *
 * y (T, C) = mask(x); y may be x. sample, position (T): the sample's number in the step and the
 * token's index in the sample. BL_EUSAGE: p outside [0, 1). x and y are of one dtype; CUDA: fp32 or
 * bf16, which is scaled in fp32 and rounded once. */
typedef struct bl_dropout_args {
    int64_t T, C;
    float p; /* in [0, 1); 0 copies */
    uint64_t seed, step;
    int32_t layer, matrix;
    const int64_t *sample;
    const int32_t *position;
    bl_tensor x, y;
} bl_dropout_args;
BL_API bl_status bl_dropout(bl_stream *stream, const bl_dropout_args *args);

/* y (T, H) = rows ids[t] of table (V, H), converted from its dtype (F32, F16, BF16). The ids are <
 * V: the caller has checked. The table may be in host memory. */
typedef struct bl_embedding_args {
    int64_t T, H;
    const int32_t *ids;
    bl_tensor table, y;
} bl_embedding_args;
BL_API bl_status bl_embedding(bl_stream *stream, const bl_embedding_args *args);

/* Row ids[t] of table (V, H) += scale dy_t, for t = 0, 1, ... in this order, in fp32: the same bits
 * on every device. dy (T, H) read; table fp32. The ids are < V. CUDA compares the ids of all pairs
 * of tokens. */
typedef struct bl_embedding_backward_args {
    int64_t T, H;
    float scale;
    const int32_t *ids;
    bl_tensor dy;
    float *table;
} bl_embedding_backward_args;
BL_API bl_status bl_embedding_backward(bl_stream *stream, const bl_embedding_backward_args *args);

#ifdef __cplusplus
}
#endif

#endif
