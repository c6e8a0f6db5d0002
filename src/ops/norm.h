/* SPDX-License-Identifier: Apache-2.0 */
/* norm.h -- RMSNorm. Zhang & Sennrich 2019, arXiv:1910.07467, eq. 4, with epsilon inside the root
 * as Llama has it. LayerNorm. Ba, Kiros & Hinton 2016, arXiv:1607.06450, eq. 3 and 4, with epsilon
 * inside the root and the variance of all H channels, as torch.nn.LayerNorm has them. */
#ifndef BALLAST_OPS_NORM_H
#define BALLAST_OPS_NORM_H

#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* rstd_t = 1 / sqrt(mean_h x_th^2 + eps);  y_th = x_th rstd_t w_h. The mean is summed in double.
 * x (T,H) read; w (H) read; y (T,H) overwritten, may be x; rstd (T) overwritten, or NULL.
 * n_heads > 0: a norm per head. Token t has n_heads rows of H channels, from t * row_stride on in x
 * and in y, which are parts of a wider matrix; rstd (T, n_heads).
 * quantized: y, rounded as it is stored, in E4M3, too; overwritten, or none. On a GPU alone, and
 * not of heads: else BL_EINTERNAL. */
typedef struct bl_rmsnorm_forward_args {
    int64_t T, H;
    double eps;
    bl_tensor x, y;
    const float *w;
    float *rstd;
    int64_t n_heads, row_stride;
    bl_quantized quantized;
} bl_rmsnorm_forward_args;
BL_API bl_status bl_rmsnorm_forward(bl_stream *stream, const bl_rmsnorm_forward_args *args);

/* dx_th (+)= rstd_t (dy_th w_h - x_th rstd_t^2 mean_k(dy_tk w_k x_tk)). dw is
 * bl_norm_gradients'. x (T,H), w (H), rstd (T) of the forward, dy (T,H) read; dx (T,H)
 * overwritten when accumulate is 0, else added to; dx may be dy when accumulate is 0. n_heads > 0:
 * as in the forward, for x, dy and dx. */
typedef struct bl_rmsnorm_backward_args {
    int64_t T, H;
    int accumulate;
    bl_tensor x, dy, dx;
    const float *w, *rstd;
    int64_t n_heads, row_stride;
} bl_rmsnorm_backward_args;
BL_API bl_status bl_rmsnorm_backward(bl_stream *stream, const bl_rmsnorm_backward_args *args);

/* mean_t = mean_h x_th;  rstd_t = 1 / sqrt(mean_h (x_th - mean_t)^2 + eps);
 * y_th = (x_th - mean_t) rstd_t w_h + b_h. Means are summed in double; mean_t is rounded to fp32
 * before it is used.
 * x (T,H) read; w, b (H) read, b may be NULL; y (T,H) overwritten, may be x; mean, rstd (T)
 * overwritten, or both NULL. */
typedef struct bl_layernorm_forward_args {
    int64_t T, H;
    double eps;
    bl_tensor x, y;
    const float *w, *b;
    float *mean, *rstd;
} bl_layernorm_forward_args;
BL_API bl_status bl_layernorm_forward(bl_stream *stream, const bl_layernorm_forward_args *args);

/* dx_th (+)= rstd_t (dy_th w_h - mean_k(dy_tk w_k)
 *                    - (x_th - mean_t) rstd_t^2 mean_k(dy_tk w_k (x_tk - mean_t)))
 * dw, db: bl_norm_gradients. x (T,H), w (H), mean and rstd (T) of the forward, dy
 * (T,H) read; dx (T,H) overwritten when accumulate is 0, else added to; dx may be dy when
 * accumulate is 0. */
typedef struct bl_layernorm_backward_args {
    int64_t T, H;
    int accumulate;
    bl_tensor x, dy, dx;
    const float *w, *mean, *rstd;
} bl_layernorm_backward_args;
BL_API bl_status bl_layernorm_backward(bl_stream *stream, const bl_layernorm_backward_args *args);

/* Gradients of the weights of a norm, or of a bias that was added to its rows:
 *   dw_h += sum_t dy_th (x_th - mean_t) rstd_t;   db_h += sum_t dy_th
 * each sum in double, and added to fp32 once: on the CPU in the order of t (of its heads, with
 * n_heads), on CUDA in an order that depends on the number of rows alone. x, dy (T,H) read; mean
 * (T): LayerNorm's, NULL: 0; rstd (T) of the forward; dw (H) added to, or NULL: then x, mean and
 * rstd are not read; db (H) added to, or NULL. n_heads > 0: as in bl_rmsnorm_forward, for x and
 * dy. */
typedef struct bl_norm_gradients_args {
    int64_t T, H;
    bl_tensor x, dy;
    const float *mean, *rstd;
    float *dw, *db;
    int64_t n_heads, row_stride;
} bl_norm_gradients_args;
BL_API bl_status bl_norm_gradients(bl_stream *stream, const bl_norm_gradients_args *args);

#ifdef __cplusplus
}
#endif

#endif
