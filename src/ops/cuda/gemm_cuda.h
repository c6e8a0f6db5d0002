/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_cuda.h -- one matrix product on a CUDA stream through cuBLASLt, whose algorithms are chosen
 * once for each shape and kept with the device. Internal to ops/, and for measurements.
 *
 * As BLAS has it, column-major: D (m,n) = alpha op(A) op(B) + beta C; op(A) (m,k), op(B) (k,n); op
 * transposes when asked; ld: elements from column to column. C is D, or other memory of D's shape,
 * dtype and ld. Sums are fp32 and rounded once into D.
 * Partial sums are combined through memory where `may_split_sums` allows it and the result is too
 * small to fill a GPU: they are in fp32, and a separate kernel adds them in a fixed order. So the
 * bits are the same every time.
 *
 * The kinds and their requirements:
 *   BF16        A, B bf16; D bf16 or fp32.
 *   FP8_ROW     A, B E4M3, both with k along memory (transpose_a, not transpose_b); a_scale (m),
 *               b_scale (n): D_ij is scaled by both.
 *   FP8_BLOCK   the same operands; a_scale: one for 128 x 128, [ceil(m/128)] rows of ceil(k/128)
 *               rounded up to a multiple of 4; b_scale: one for 128 along k, [ceil(k/128)] rows of
 *               n, a multiple of 4.
 *   FP8_TENSOR  the same operands; a_scale, b_scale: one each. The plain FP8 product, with which
 *               the layer's are compared; no layer uses it.
 *
 * FP8 needs m and k to be multiples of 16, 16-byte aligned pointers, those of scales too, and a GPU
 * of capability 9.0; D is bf16. */
#ifndef BALLAST_OPS_CUDA_GEMM_CUDA_H
#define BALLAST_OPS_CUDA_GEMM_CUDA_H

#include <stdbool.h>

#include "ops/matmul.h"

typedef enum ops_gemm_kind {
    OPS_GEMM_BF16,
    OPS_GEMM_FP8_ROW,
    OPS_GEMM_FP8_BLOCK,
    OPS_GEMM_FP8_TENSOR,
    OPS_N_GEMM_KINDS
} ops_gemm_kind;

typedef struct ops_gemm {
    ops_gemm_kind kind;
    bool transpose_a, transpose_b;
    bool fast_sums;      /* FP8: sums that are rounded to fewer bits than fp32 has on their way */
    bool may_split_sums; /* bf16, with a workspace */
    bl_dtype d_type;
    float alpha, beta;
    int64_t m, n, k, lda, ldb, ldd;
    const void *a, *b;
    const float *a_scale, *b_scale; /* FP8 */
    const void *c;                  /* NULL: d */
    void *d;
    void *workspace; /* 256-byte aligned; NULL for none */
    size_t workspace_bytes;
} ops_gemm;

/* Queues the product. BL_ELIMIT when cuBLASLt has no algorithm for it. m, n, k >= 1. */
bl_status ops_cuda_gemm(bl_stream *stream, const ops_gemm *gemm);

/* As ops_cuda_gemm, but without an algorithm nothing is queued and *is_served = false. */
bl_status ops_cuda_gemm_try(bl_stream *stream, const ops_gemm *gemm, bool *is_served);

/* *out: whether ops_cuda_gemm would serve these arguments, as far as is known before it is called:
 * cuBLASLt may refuse then what its heuristic offered. Every later answer is right. */
bl_status ops_cuda_gemm_is_served(bl_stream *stream, const ops_gemm *gemm, bool *out);

/* Counts a product that falls back to bf16 and logs the first of each reason. */
bl_status ops_cuda_gemm_count_fallback(bl_stream *stream, bl_matmul_fallback reason,
                                       const bl_matmul_weight_args *args);

/* Which of the algorithms that cuBLASLt offers for a shape the device's products take from now on:
 * the one it offers first, which is the default, or the fastest. The fastest is found by running
 * them all on the first product of a shape: that waits for the stream and leaves garbage in a D of
 * beta != 0. Which one it is, and so the last bits of D, may differ between two processes; between
 * products of one device it does not. */
bl_status ops_cuda_gemm_choose_by_time(bl_stream *stream, bool by_time);

#endif
