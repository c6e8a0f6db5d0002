/* SPDX-License-Identifier: Apache-2.0 */
/* matmul.h -- matrix products on a stream. */
#ifndef BALLAST_OPS_MATMUL_H
#define BALLAST_OPS_MATMUL_H

#include <stdbool.h>

#include "ops/ops.h"
#include "ops/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* C = alpha op(A) op(B) + beta C, row-major: op(A) (M,K), op(B) (K,N), C (M,N); op transposes when asked. Leading dimensions
 * are the strides between stored rows. With beta 0 C is overwritten, whatever it held. C overlaps neither A nor B.
 * CPU: all fp32. CUDA: A and B are bf16, C is bf16 or fp32; sums are fp32, rounded once.
 * scratch: BL_MATMUL_SCRATCH_BYTES or nothing (slower for some shapes); not looked at on the CPU. 256-byte aligned. */
enum { BL_MATMUL_SCRATCH_BYTES = 32 << 20 };
typedef struct bl_matmul_args {
    bool transpose_a, transpose_b;
    int64_t M, N, K, lda, ldb, ldc;
    float alpha, beta;
    bl_tensor a, b, c;
    void *scratch;
    size_t scratch_bytes;
} bl_matmul_args;
bl_status bl_matmul(bl_stream *stream, const bl_matmul_args *args);

/* How a product with a frozen matrix is made on CUDA; the CPU's is fp32 always.
 * BF16: the matrix is decoded to bf16 in scratch. The reference.
 * FP8: the codes are multiplied as they are with `in` quantised to E4M3 on the fly, a scale a token for fp8_row and a scale a token and
 * 128 channels for fp8_block. BF16 all the same: segments of different
 * formats or with gaps between them; rows or cols that are no multiples of 16; for fp8_block segments that end inside a block, and T that is
 * no multiple of 4; a GPU without FP8 products of the kind. */
typedef enum bl_matmul_mode { BL_MATMUL_BF16, BL_MATMUL_FP8 } bl_matmul_mode;

/* forward:  y (T,N) = x (T,K) W^T + beta y;   otherwise the input gradient:  dx (T,K) = dy (T,N) W + beta dx.
 * With beta 0 `out` is overwritten, whatever it held; it overlaps neither `in` nor the weight. Both are dense rows; W = weight (N,K), in any format, decoded on the fly: no fp32 copy of it is made.
 * scratch: bl_matmul_weight_scratch_bytes of the same arguments, or of ones with a larger T; 256-byte aligned. None on the CPU. */
typedef struct bl_matmul_weight_args {
    bool forward;
    bl_matmul_mode mode;
    float beta;
    int64_t T;
    bl_tensor in, out;
    bl_weight weight;
    void *scratch;
    size_t scratch_bytes;
} bl_matmul_weight_args;
bl_status bl_matmul_weight(bl_stream *stream, const bl_matmul_weight_args *args);

/* forward, mode, T and the weight's shape and formats are read, pointers are not. Does not shrink as T grows. */
size_t bl_matmul_weight_scratch_bytes(bl_device_kind kind, const bl_matmul_weight_args *args);

#ifdef __cplusplus
}
#endif

#endif
