/* SPDX-License-Identifier: Apache-2.0 */
/* blas_openblas.c -- OpenBLAS under the CPU's GEMMs, on one thread per worker: parallelism is the
 * pool's. */
#include "ops/cpu/blas.h"

#include <pthread.h>
#include <stdio.h>

#include <cblas.h>

/* The number of threads is the library's own global; it is set once, before its first use here. */
static pthread_once_t single_threaded = PTHREAD_ONCE_INIT;

static void make_single_threaded(void)
{
    openblas_set_num_threads(1);
}

bool ops_blas_sgemm(bool trans_a, bool trans_b, int64_t M, int64_t N, int64_t K, float alpha,
                    const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                    int64_t ldc)
{
    pthread_once(&single_threaded, make_single_threaded);
    cblas_sgemm(CblasRowMajor, trans_a ? CblasTrans : CblasNoTrans,
                trans_b ? CblasTrans : CblasNoTrans, (int)M, (int)N, (int)K, alpha, A, (int)lda, B,
                (int)ldb, beta, C, (int)ldc);
    return true;
}

/* It takes its buffers when it is loaded and when they are first used, and has no way to say that
 * there are none. */
bl_status ops_blas_prepare(void)
{
    pthread_once(&single_threaded, make_single_threaded);
    return BL_OK;
}

const char *ops_blas_name(void)
{
    return "openblas";
}

/* openblas_get_config: "OpenBLAS 0.3.21 DYNAMIC_ARCH ... SkylakeX ..." */
void ops_blas_describe(char *text, size_t n_bytes)
{
    char version[16] = "";
    (void)sscanf(openblas_get_config(), "OpenBLAS %15s", version);
    snprintf(text, n_bytes, "openblas %s %.32s", version, openblas_get_corename());
}
