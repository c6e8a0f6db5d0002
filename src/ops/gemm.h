/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.h -- matrix products on the CPU, as plain functions on a worker pool.
 *
 * Row-major fp32, host memory; leading dimensions are strides between stored rows, in elements.
 * Outputs overlap no input. With beta 0 the output is overwritten, whatever it held. Any size may
 * be zero; with an inner size of zero the product is zero. Each element is summed in one order: the
 * bits of a row of the output depend on that row of the left side, on the right side and on the
 * inner size alone (ops/cpu/f32_kernels.h). Products allocate nothing.
 * Errors: BL_EINTERNAL for sizes that make no sense, BL_ELIMIT for a dimension past INT_MAX. */
#ifndef BALLAST_OPS_GEMM_H
#define BALLAST_OPS_GEMM_H

#include <stdbool.h>
#include <stdint.h>

#include "base/pool.h"
#include "base/status.h"
#include "ops/weight.h"

#ifdef __cplusplus
extern "C" {
#endif

/* C (M,N) = alpha op(A) op(B) + beta C; op(A) (M,K), op(B) (K,N); op transposes when asked. */
bl_status bl_cpu_gemm_f32(bl_pool *pool, bool trans_a, bool trans_b, int64_t M, int64_t N,
                          int64_t K, float alpha, const float *A, int64_t lda, const float *B,
                          int64_t ldb, float beta, float *C, int64_t ldc);

/* The frozen matrix W (N,K) = w (rows, cols) is decoded piece by piece into the workers' scratch;
 * no fp32 copy of it exists. */

/* y (T,N) = x (T,K) W^T + beta y */
bl_status bl_cpu_gemm_weight_nt(bl_pool *pool, int64_t T, const float *x, int64_t ldx,
                                const bl_weight *w, float beta, float *y, int64_t ldy);

/* dx (T,K) = dy (T,N) W + beta dx */
bl_status bl_cpu_gemm_weight_nn(bl_pool *pool, int64_t T, const float *dy, int64_t lddy,
                                const bl_weight *w, float beta, float *dx, int64_t lddx);

/* Rows [first[g], first[g + 1]) of `out`, counted from first[0], = those of `in` times matrix g of
 * the n_groups of equal size that are below one another in w: in W_g^T forward, else in W_g; with
 * is_added they are added to those of `out`. Dense rows. The bits of a row depend on it and its
 * matrix alone. first: n_groups + 1 ascending numbers. */
bl_status bl_cpu_gemm_grouped(bl_pool *pool, bool forward, bool is_added, int64_t n_groups,
                              const int32_t *first, const float *in, const bl_weight *w,
                              float *out);

/* ---- bf16: products of two bf16 numbers, which fp32 holds exactly, summed in fp32 in one order:
 * the bits of a row of the output depend on that row of the left side, on the right side and on the
 * shapes N and K alone. C, y, dx are bf16 or fp32, rounded once to it from alpha times the sum plus
 * beta times what was there. Subnormal numbers may count as zero. These products allocate
 * nothing. ---- */

/* C (M,N) = alpha op(A) op(B) + beta C, A and B bf16; c_dtype: BL_BF16 or BL_F32, else
 * BL_EINTERNAL. */
bl_status bl_cpu_gemm_bf16(bl_pool *pool, bool trans_a, bool trans_b, int64_t M, int64_t N,
                           int64_t K, float alpha, const uint16_t *A, int64_t lda,
                           const uint16_t *B, int64_t ldb, float beta, bl_dtype c_dtype, void *C,
                           int64_t ldc);

/* y (T,N) = x (T,K) W^T + beta y. FP8 codes are multiplied as they are, since bf16 holds them
 * exactly; the scale of a row or block multiplies fp32 sums of at most 640 or 128 products. Weights
 * of other formats are rounded to bf16. */
bl_status bl_cpu_gemm_bf16_weight_nt(bl_pool *pool, int64_t T, const uint16_t *x, int64_t ldx,
                                     const bl_weight *w, float beta, bl_dtype y_dtype, void *y,
                                     int64_t ldy);

/* dx (T,K) = dy (T,N) W + beta dx. fp8_block: as above. fp8_row: the sum runs over rows of
 * different scales, so dy[t][n] scale[n] is rounded to bf16 first: an error of at most 2^-8 of each
 * term, as if W were rounded to bf16. */
bl_status bl_cpu_gemm_bf16_weight_nn(bl_pool *pool, int64_t T, const uint16_t *dy, int64_t lddy,
                                     const bl_weight *w, float beta, bl_dtype dx_dtype, void *dx,
                                     int64_t lddx);

/* Whether this processor has instructions for it; otherwise the functions above compute the bits of
 * AVX512-BF16, slower than fp32. The environment variable BALLAST_CPU_BF16, read once, selects
 * "amx_bf16", "avx512_bf16" or "emulated"; an unsupported one is replaced, with a warning. */
bool bl_cpu_gemm_has_bf16(void);

/* Their implementation, as bl_cpu_gemm_describe: "ballast avx512_bf16", "ballast amx_bf16", which
 * has other bits, or "ballast emulated". */
enum { BL_CPU_GEMM_TEXT_BYTES = 64 };
void bl_cpu_gemm_describe_bf16(char text[BL_CPU_GEMM_TEXT_BYTES]);

/* "ballast fp32 fma", or "ballast fp32 no fma" on processors without fused multiply-adds, whose
 * products have other bits: checkpoints store it. The environment variable BALLAST_CPU_F32, read
 * once, selects "avx512", "avx2" or "portable"; an unsupported one is replaced, with a warning. */
void bl_cpu_gemm_describe(char text[BL_CPU_GEMM_TEXT_BYTES]);

/* The same of GPU number `gpu`: "cuBLASLt 13.1.0 on NVIDIA H200 (9.0)". Errors: those of
 * bl_device_find_cuda. */
enum { BL_CUDA_GEMM_TEXT_BYTES = 320 };
bl_status bl_cuda_gemm_describe(int gpu, char text[BL_CUDA_GEMM_TEXT_BYTES]);

#ifdef __cplusplus
}
#endif

#endif
