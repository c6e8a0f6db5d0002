/* SPDX-License-Identifier: Apache-2.0 */
/* matmul.h -- matrix products on a stream. */
#ifndef BALLAST_OPS_MATMUL_H
#define BALLAST_OPS_MATMUL_H

#include <stdbool.h>

#include "ops/ops.h"
#include "ops/weight.h"

/* C = alpha op(A) op(B) + beta C, row-major fp32: op(A) (M,K), op(B) (K,N), C (M,N); op transposes when asked. Leading dimensions
 * are the strides between stored rows. With beta 0 C is overwritten, whatever it held. C overlaps neither A nor B. */
typedef struct bl_matmul_args {
    bool transpose_a, transpose_b;
    int64_t M, N, K, lda, ldb, ldc;
    float alpha, beta;
    const float *a, *b;
    float *c;
} bl_matmul_args;
bl_status bl_matmul(bl_stream *stream, const bl_matmul_args *args);

/* forward:  y (T,N) = x (T,K) W^T + beta y;   otherwise the input gradient:  dx (T,K) = dy (T,N) W + beta dx.
 * `in` and `out` are dense rows; W = weight (N,K), in any format, decoded on the fly: no fp32 copy of it is made. */
typedef struct bl_matmul_weight_args {
    bool forward;
    int64_t T;
    float beta;
    const float *in;
    float *out;
    bl_weight weight;
} bl_matmul_weight_args;
bl_status bl_matmul_weight(bl_stream *stream, const bl_matmul_weight_args *args);

#endif
