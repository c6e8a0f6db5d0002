/* SPDX-License-Identifier: Apache-2.0 */
/* device_internal.h -- the interface that each kind of device implements. device.c has the code of
 * all kinds: dispatch, memory account and argument checks. An object of a kind begins with the
 * struct declared here. */
#ifndef BALLAST_DEVICE_DEVICE_INTERNAL_H
#define BALLAST_DEVICE_DEVICE_INTERNAL_H

#include <pthread.h>
#include <stdbool.h>

#include "device/device.h"

/* What a kind of stream implements: where its tasks run. A device may have several. */
typedef struct bl_stream_backend {
    void (*destroy)(bl_stream *stream);
    bl_status (*call)(bl_stream *stream, bl_stream_fn fn, const void *args, size_t args_bytes);
    /* A model's reader; NULL: the tasks are called. */
    bl_status (*begin_read)(bl_stream *stream, int slot, size_t n_bytes);
    bl_status (*end_read)(bl_stream *stream, int slot);
    bl_status (*copy)(bl_stream *stream, void *dst, const void *src, size_t size_bytes);
    bl_status (*copy_rows)(bl_stream *stream, const bl_row_copy *copy);
    bl_status (*zero)(bl_stream *stream, void *dst, size_t size_bytes);
    bl_status (*wait)(bl_stream *stream, bl_event *event);
    bl_status (*synchronize)(bl_stream *stream);
    bl_status (*status)(bl_stream *stream);
    bl_status (*record)(bl_stream *stream, bl_event *event);
    bl_status (*stamp)(bl_stream *stream, bl_stamp *stamp);
} bl_stream_backend;

typedef struct bl_device_backend {
    bl_device_kind kind;
    bool is_model; /* models the kind and computes nothing (device/model.h) */
    void (*destroy)(bl_device *device);
    /* A kind whose devices have workers from create on; NULL: bl_device_start_workers gives them
     * some. */
    bl_pool *(*pool)(bl_device *device);
    bool (*host_writes)(const bl_device *device);

    /* Zero-filled and aligned, size_bytes >= 1; NULL when out of memory. free gets the same size
     * again. */
    void *(*alloc)(bl_device *device, bl_space space, size_t size_bytes);
    void (*free)(bl_device *device, bl_space space, void *memory, size_t size_bytes);

    bl_status (*pin)(bl_device *device, void *memory, size_t size_bytes);
    void (*unpin)(bl_device *device, void *memory, size_t size_bytes);

    bl_status (*stream_create)(bl_device *device, const char *name, bool is_urgent,
                               bl_stream **out);
    bl_status (*host_stream_create)(bl_device *device, const char *name, bl_stream **out);
    bl_status (*inline_stream_create)(bl_device *device, bl_stream **out); /* NULL: unsupported */

    bl_status (*event_create)(bl_device *device, bl_event **out);
    void (*event_destroy)(bl_event *event);
    bl_status (*event_synchronize)(bl_event *event);

    bl_status (*stamp_create)(bl_device *device, bl_stamp **out);
    void (*stamp_destroy)(bl_stamp *stamp);
    double (*stamp_seconds)(const bl_stamp *stamp);
    double (*stamp_elapsed_s)(const bl_stamp *begin, const bl_stamp *end);
} bl_device_backend;

typedef struct bl_device_block {
    void *memory;
    size_t size_bytes;
    bl_space space;
} bl_device_block;

struct bl_device {
    const bl_device_backend *backend;
    bl_dtype act;
    pthread_mutex_t lock; /* guards what follows */
    bl_device_block *blocks;
    size_t n_blocks, max_blocks;
    size_t space_bytes[BL_SPACES], peak_bytes[BL_SPACES];
    int64_t n_allocations;
    bl_pool *workers; /* start_workers's; NULL */
};

struct bl_stream {
    bl_device *device;
    const bl_stream_backend *backend;
};

struct bl_event {
    bl_device *device;
};

struct bl_stamp {
    bl_device *device;
};

/* environment.c. Raises CUDA_DEVICE_MAX_CONNECTIONS; false: it is high enough. was: its value, ""
 * if it was not set. log_queues warns that a value has been replaced. */
enum { DEVICE_QUEUES_TEXT_BYTES = 16 };
bool device_raise_queues(char was[DEVICE_QUEUES_TEXT_BYTES]);
void device_log_queues(const char *was);

/* For create and destroy of a kind. */
void bl_device_base_init(bl_device *device, const bl_device_backend *backend);
void bl_device_base_close(bl_device *device);

#endif
