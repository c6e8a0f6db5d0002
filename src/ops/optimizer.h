/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer.h -- AdamW (Loshchilov & Hutter 2019, arXiv:1711.05101, algorithm 2, as
 * torch.optim.AdamW orders it) and norms. */
#ifndef BALLAST_OPS_OPTIMIZER_H
#define BALLAST_OPS_OPTIMIZER_H

#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* With g = grad_i * grad_scale (clipping):
 *   w -= lr weight_decay w;  m = b1 m + (1-b1) g;  v = b2 v + (1-b2) g^2;
 *   w -= lr (m / (1 - b1^step)) / (sqrt(v / (1 - b2^step)) + eps)
 * step counts from 1. In fp32, like torch's fused AdamW, in forms that keep their digits:
 * m += (1 - b1) (g - m), v alike, and what is taken from w is summed first. Factors are computed
 * in double. w, m, v (n) updated; grad (n) read; grad_scale: one double in device memory (made on
 * the stream before), or NULL for 1.
 *
 * m and v are both fp32, or both bf16. bf16 stores them after w has moved, rounded stochastically
 * (rounding_internal.h): E[stored] is the fp32 value. Element i of the arrays is element first + i
 * of `tensor`, so splitting a tensor into calls changes no bit. Other dtypes: BL_EINTERNAL. */
typedef struct bl_adamw_args {
    int64_t n, step;
    double lr, beta1, beta2, eps, weight_decay;
    const double *grad_scale;
    const float *grad;
    float *w;
    bl_tensor m, v;
    uint64_t seed; /* of the rounding, as tensor and first; unused for fp32 */
    int64_t tensor, first;
} bl_adamw_args;
BL_API bl_status bl_adamw(bl_stream *stream, const bl_adamw_args *args);
/* The same bits, from and to host memory, grad_scale too: computed on the calling thread and the
 * workers of the stream's device (bl_device_pool), and done when it returns. Nothing is queued:
 * `stream` names the device. BL_EINTERNAL: a device without workers. */
bl_status bl_adamw_on_host(bl_stream *stream, const bl_adamw_args *args);

/* *sum += sum_i x_i^2, in double, in an order that depends on n alone. */
typedef struct bl_sum_squares_args {
    int64_t n;
    const float *x;
    double *sum;
} bl_sum_squares_args;
BL_API bl_status bl_sum_squares(bl_stream *stream, const bl_sum_squares_args *args);

/* *sum += sum_i sums_i (n), in an order that depends on n alone: sums of squares of several arrays.
 * Both in device memory. */
typedef struct bl_add_sums_args {
    int64_t n;
    const double *sums;
    double *sum;
} bl_add_sums_args;
BL_API bl_status bl_add_sums(bl_stream *stream, const bl_add_sums_args *args);

/* torch.nn.utils.clip_grad_norm_: norm = sqrt(*sum_squares); *grad_scale = min(1, max_norm / (norm
 * + 1e-6)); max_norm 0 = no clipping (1). */
typedef struct bl_clip_scale_args {
    double max_norm;
    const double *sum_squares;
    double *norm, *grad_scale;
} bl_clip_scale_args;
BL_API bl_status bl_clip_scale(bl_stream *stream, const bl_clip_scale_args *args);

#ifdef __cplusplus
}
#endif

#endif
