/* SPDX-License-Identifier: Apache-2.0 */
/* blas.h -- the library under every CPU GEMM, on the calling thread only. Internal to ops/: it runs
 * inside pool items.
 *
 * One of blas_onednn.c and blas_openblas.c is built (CMake: BALLAST_CPU_BLAS). The bits of C depend
 * on the arguments' values and shapes alone, never on addresses or on what other threads do. */
#ifndef BALLAST_OPS_CPU_BLAS_H
#define BALLAST_OPS_CPU_BLAS_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* C (M,N) = alpha op(A) op(B) + beta C, row-major fp32; op(A) (M,K), op(B) (K,N), M, N, K >= 1,
 * sizes and leading dimensions <= INT_MAX. beta 0 overwrites C, whatever it held. False: the
 * library found no memory for its buffers. */
bool ops_blas_sgemm(bool trans_a, bool trans_b, int64_t M, int64_t N, int64_t K, float alpha,
                    const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                    int64_t ldc);

/* Allocates the library's permanent memory, which the first product does otherwise: later ones find
 * it, or fail as above. BL_ENOMEM; BL_ELIMIT where the system lets no memory be executed. */
bl_status ops_blas_prepare(void);

const char *ops_blas_name(void);

/* Name, version and instruction set: the bits of a product depend on these and its arguments.
 * n_bytes >= 64. */
void ops_blas_describe(char *text, size_t n_bytes);

#endif
