/* SPDX-License-Identifier: Apache-2.0 */
/* staging.h -- how the host gives bytes to a device and takes them back: through pinned host
 * memory, by copies in stream order. Host code reads and writes BL_SPACE_DEVICE memory in no other
 * way, on a CPU as on a GPU; guard.h proves it. One exception: where bl_device_host_writes, frozen
 * weights are read straight into it.
 *
 *   bl_twin      a small block that is copied in both directions again and again (token batches,
 *                counters): device memory, and pinned host memory of the same size. Its copies are
 *                queued.
 *
 *   bl_staging   a pinned buffer of bounded size through which any number of bytes is copied piece
 *                by piece, to and from device memory of others (weights, checkpoints). Its calls
 *                return when the bytes have arrived. */
#ifndef BALLAST_DEVICE_STAGING_H
#define BALLAST_DEVICE_STAGING_H

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bl_twin {
    bl_device *device;
    size_t n_bytes;
    void *memory; /* BL_SPACE_DEVICE: tasks' */
    void *host;   /* BL_SPACE_HOST: the host's, except while a copy is queued */
} bl_twin;

/* Both zero. BL_ENOMEM names `what`. The device is borrowed; destroy when no copy is queued, NULL
 * is fine. */
bl_status bl_twin_create(bl_device *device, size_t n_bytes, const char *what, bl_twin **out);
void bl_twin_destroy(bl_twin *twin);

/* Queue a copy of bytes [offset, offset + n_bytes) from host to memory, or back, and return. Until
 * it has run (an event, or synchronizing the stream), the host may not write that range of `host`,
 * nor after a download read it. Ordered against other streams by the caller. BL_EINTERNAL: outside
 * the twin. */
bl_status bl_twin_upload(bl_twin *twin, bl_stream *stream, size_t offset, size_t n_bytes);
bl_status bl_twin_download(bl_twin *twin, bl_stream *stream, size_t offset, size_t n_bytes);

enum { BL_STAGING_BYTES = 1 << 20 }; /* a piece that keeps a copy busy and is soon there */

typedef struct bl_staging {
    bl_device *device;
    bl_stream *stream; /* its own: it does not see failures of the caller's streams */
    size_t n_bytes;
    void *bytes; /* [n_bytes], BL_SPACE_HOST: the caller's between two calls */
} bl_staging;

/* n_bytes >= 1. The device is borrowed. BL_ENOMEM names `what`; BL_ELIMIT: no more streams. NULL is
 * fine. */
bl_status bl_staging_create(bl_device *device, size_t n_bytes, const char *what, bl_staging **out);
void bl_staging_destroy(bl_staging *staging);

/* Copy n_bytes, any number, from host memory to device memory or back. Other streams' work on that
 * device memory must have ended. The host memory may be a part of `bytes`: what was made there, or
 * is to be looked at there, is copied once. An error is the stream's: the first one stays. */
bl_status bl_staging_upload(bl_staging *staging, void *memory, const void *host, size_t n_bytes);
bl_status bl_staging_download(bl_staging *staging, void *host, const void *memory, size_t n_bytes);

#ifdef __cplusplus
}
#endif

#endif
