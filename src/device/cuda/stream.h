/* SPDX-License-Identifier: Apache-2.0 */
/* stream.h -- for code that queues CUDA work itself: the handle under a stream, and one way to
 * report a failure. For the .cu files and the callers of cuBLASLt and NCCL; no CUDA type appears,
 * so any C file may include it. */
#ifndef BALLAST_DEVICE_CUDA_STREAM_H
#define BALLAST_DEVICE_CUDA_STREAM_H

#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "device/device.h"

/* The CUDA stream under a stream of a CUDA device; its device is made the calling thread's current
 * one. */
void *bl_cuda_stream_handle(bl_stream *stream);

/* BL_CUDA_STREAM_SCRATCH_BYTES of device memory, 256-byte aligned, that belong to the stream: for
 * data between the kernels of one call. Calls queued later on the same stream may reuse it. */
enum { BL_CUDA_STREAM_SCRATCH_BYTES = 8192 };
void *bl_cuda_stream_scratch(bl_stream *stream);

/* To be called after a kernel launch: BL_OK, or the error that cudaGetLastError reports, with
 * `what` (the op) in its text. */
bl_status bl_cuda_launched(const char *what);

/* The failure of a CUDA runtime call: `cuda_error` is its error code, `what` names the call.
 * BL_ENOMEM for memory, BL_ELIMIT for a GPU or a driver that is missing, broken or taken,
 * BL_EINTERNAL for the rest. The runtime's last error is cleared. */
bl_status bl_cuda_fail(const char *what, int cuda_error);

/* From now on every stream and event of the device has failed with `error` (not BL_OK): for work
 * that ends at an unknown time and loses its results, such as an aborted collective. Call it before
 * that work can end: no synchronization that the work held up then returns BL_OK. Any thread; the
 * first error counts. */
void bl_cuda_device_fail(bl_device *device, const bl_error *error);

/* What of the device a launcher needs to know. */
typedef struct bl_cuda_properties {
    int index;      /* CUDA's number of the device */
    int capability; /* 10 * major + minor: 90 on Hopper */
    int n_multiprocessors;
    size_t total_bytes;
} bl_cuda_properties;
const bl_cuda_properties *bl_cuda_device_properties(const bl_device *device);

/* A place in the device for the one object that keeps state between GEMMs (handles, chosen
 * algorithms). `create` is called once, under a lock, at the first request; `destroy` with the
 * device. */
typedef bl_status (*bl_cuda_extension_create)(bl_device *device, void **out);
typedef void (*bl_cuda_extension_destroy)(void *extension);
bl_status bl_cuda_device_extension(bl_device *device, bl_cuda_extension_create create,
                                   bl_cuda_extension_destroy destroy, void **out);

#ifdef __cplusplus
}
#endif

#endif
