/* SPDX-License-Identifier: Apache-2.0 */
/* The versions and hardware that products on a GPU depend on, in words. */
#include <cublasLt.h>
#include <stdio.h>

#include "device/device.h"
#include "ops/gemm.h"

bl_status bl_cuda_gemm_describe(int index, char text[BL_CUDA_GEMM_TEXT_BYTES])
{
    size_t version = cublasLtGetVersion(); /* 10000 major + 100 minor + patch */
    bl_gpu_info gpu;

    BL_TRY(bl_device_find_cuda(index, &gpu));
    snprintf(text, BL_CUDA_GEMM_TEXT_BYTES, "cuBLASLt %zu.%zu.%zu on %s (%d.%d)", version / 10000,
             version / 100 % 100, version % 100, gpu.name, gpu.capability / 10,
             gpu.capability % 10);
    return BL_OK;
}
