/* SPDX-License-Identifier: Apache-2.0 */
#include "ops/blas.h"

#include <oneapi/dnnl/dnnl.h>
#include <omp.h>

/* oneDNN takes as many threads as OpenMP offers the caller. That number belongs to the calling thread, which
 * may be somebody else's and gets it back. */
bool ops_blas_sgemm(bool trans_a, bool trans_b, int64_t M, int64_t N, int64_t K, float alpha, const float *A,
                    int64_t lda, const float *B, int64_t ldb, float beta, float *C, int64_t ldc)
{
    int n_threads = omp_get_max_threads();
    if (n_threads != 1) omp_set_num_threads(1);
    dnnl_status_t status =
        dnnl_sgemm(trans_a ? 'T' : 'N', trans_b ? 'T' : 'N', M, N, K, alpha, A, lda, B, ldb, beta, C, ldc);
    if (n_threads != 1) omp_set_num_threads(n_threads);
    return status == dnnl_success;
}

const char *ops_blas_name(void)
{
    return "onednn";
}
