/* SPDX-License-Identifier: Apache-2.0 */
/* bench_gpu_context: GPU memory in use, and seconds, after this process has its context, a handle
 * of cuBLASLt, and a first product: what plans leave to CUDA. A JSON line for each. The variable
 * CUDA_MODULE_LOADING (LAZY or EAGER) decides when kernels are loaded. Nothing else should use the
 * GPU.
 *
 * Ends with 77 and the driver's text without a GPU: the quickest test that there is one. */
#include <stdio.h>
#include <stdlib.h>

#include <cublasLt.h>
#include <cuda_runtime_api.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "ops/cuda/gemm_cuda.h"

enum { SKIPPED = 77, N = 256, MATRIX_BYTES = N * N * 2 };

static double start_s;

static bl_status tell(const char *after)
{
    const char *loading = getenv("CUDA_MODULE_LOADING");
    size_t free_bytes, total_bytes;

    BL_TRY(bl_device_measure_cuda(0, &free_bytes, &total_bytes));
    printf("{\"bench\":\"gpu_context\",\"module_loading\":\"%s\",\"after\":\"%s\",\"used_gb\":%.3f,"
           "\"total_gb\":%.3f,\"seconds\":%.2f}\n",
           loading ? loading : "", after, 1e-9 * (double)(total_bytes - free_bytes),
           1e-9 * (double)total_bytes, bl_now_s() - start_s);
    fflush(stdout);
    return BL_OK;
}

static bl_status first_product(bl_device *device, bl_stream *stream)
{
    char *memory;
    bl_status st;

    BL_TRY(
        bl_device_alloc(device, BL_SPACE_DEVICE, 3 * MATRIX_BYTES, "a product", (void **)&memory));
    st = ops_cuda_gemm(stream, &(ops_gemm){.kind = OPS_GEMM_BF16,
                                           .d_type = BL_BF16,
                                           .alpha = 1,
                                           .m = N,
                                           .n = N,
                                           .k = N,
                                           .lda = N,
                                           .ldb = N,
                                           .ldd = N,
                                           .a = memory,
                                           .b = memory + MATRIX_BYTES,
                                           .d = memory + 2 * MATRIX_BYTES});
    if (st == BL_OK) st = bl_stream_synchronize(stream);
    if (st == BL_OK) st = tell("product");
    bl_device_free(device, BL_SPACE_DEVICE, memory);
    return st;
}

static bl_status measure(bl_device *device)
{
    bl_stream *stream = NULL;
    cublasLtHandle_t handle;

    BL_TRY(tell("context"));
    cublasStatus_t status = cublasLtCreate(&handle);
    if (status != CUBLAS_STATUS_SUCCESS)
        return BL_FAIL(BL_ELIMIT, "cublasLtCreate: %s", cublasLtGetStatusString(status));
    bl_status st = tell("cublasLtCreate");
    if (st == BL_OK) st = bl_stream_create(device, "bench", &stream);
    if (st == BL_OK) st = first_product(device, stream);
    bl_stream_destroy(stream);
    cublasLtDestroy(handle);
    return st;
}

int main(void)
{
    bl_device *device;

    start_s = bl_now_s();
    if (bl_device_create_cuda(0, &device) != BL_OK) {
        fprintf(stderr, "skip: no GPU: %s\n", bl_error_text());
        return SKIPPED;
    }
    bl_status st = measure(device);
    if (st != BL_OK) fprintf(stderr, "bench_gpu_context: %s\n", bl_error_text());
    bl_device_destroy(device);
    return st != BL_OK;
}
