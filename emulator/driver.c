/* SPDX-License-Identifier: Apache-2.0 */
/* driver.c -- functions of the driver that the program asks the runtime for: a stream's wait for a
 * value in host memory, and whether there is a context. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <stdatomic.h>
#include <string.h>
#include <time.h>

#include "runtime.h"

/* Another address than the host's, as a GPU may have: only what gives it back reads through it. */
enum { DEVICE_SHIFT = 1 << 20 };

cudaError_t cudaHostGetDevicePointer(void **out, void *pointer, unsigned int flags)
{
    cudaError_t error = emulated_enter();

    if (error != cudaSuccess) return error;
    if (flags != 0 || !emulated_registered_end(pointer)) return cudaErrorInvalidValue;
    *out = (char *)pointer + DEVICE_SHIFT;
    return cudaSuccess;
}

typedef struct value_wait {
    const _Atomic uint32_t *at;
    uint32_t value;
} value_wait;

static void wait_until(const value_wait *w)
{
    static const struct timespec nap = {.tv_nsec = 10000};
    while ((int32_t)(atomic_load_explicit(w->at, memory_order_acquire) - w->value) < 0)
        nanosleep(&nap, NULL);
}

static bl_status wait_for_value(bl_stream *stream, const void *args)
{
    (void)stream;
    wait_until(args);
    return BL_OK;
}

static CUresult stream_wait_value(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                  unsigned int flags)
{
    const char *at = (const char *)(uintptr_t)address - DEVICE_SHIFT;
    if (emulated_enter_stream(stream) != cudaSuccess) return CUDA_ERROR_INVALID_HANDLE;
    if (flags != CU_STREAM_WAIT_VALUE_GEQ || address % 4 || !emulated_registered_end(at))
        return CUDA_ERROR_INVALID_VALUE;
    value_wait w = {(const _Atomic uint32_t *)(const void *)at, value};
    if (emulated_settings_get()->is_strict)
        wait_until(&w); /* in a task, device memory would be open meanwhile */
    else
        emulated_give(stream, true, wait_for_value, &w, sizeof w);
    return CUDA_SUCCESS;
}

static CUresult get_primary_context(CUdevice device, unsigned int *flags, int *is_active)
{
    (void)device;
    *flags = 0;
    *is_active = emulated_has_context();
    return CUDA_SUCCESS;
}

cudaError_t cudaGetDriverEntryPointByVersion(const char *symbol, void **out, unsigned int version,
                                             unsigned long long flags,
                                             enum cudaDriverEntryPointQueryResult *found)
{
    CUresult (*wait_value)(CUstream, CUdeviceptr, cuuint32_t, unsigned int) = stream_wait_value;
    CUresult (*get_context)(CUdevice, unsigned int *, int *) = get_primary_context;
    cudaError_t error = emulated_enter();

    if (error != cudaSuccess) return error;
    if (flags != cudaEnableDefault) return cudaErrorInvalidValue;
    if (strcmp(symbol, "cuStreamWaitValue32") == 0 && version >= 11070)
        memcpy(out, &wait_value, sizeof *out);
    else if (strcmp(symbol, "cuDevicePrimaryCtxGetState") == 0 && version >= 7000)
        memcpy(out, &get_context, sizeof *out);
    else
        return cudaErrorInvalidValue;
    *found = cudaDriverEntryPointSuccess;
    return cudaSuccess;
}
