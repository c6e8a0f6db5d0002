/* SPDX-License-Identifier: Apache-2.0 */
/* device.h -- what the files of device/cuda share; for them only. CUDA's handles are pointers, and void
 * * here. */
#ifndef BALLAST_DEVICE_CUDA_DEVICE_H
#define BALLAST_DEVICE_CUDA_DEVICE_H

#include <stdatomic.h>

#include "device/cuda/stream.h"
#include "device/device_internal.h"

enum { CUDA_LANES = 32 }; /* streams of a device at a time, those that failed counted for ever */

/* What a stream has seen to its end: for each lane, how many of its host tasks come before. */
typedef struct cuda_clock {
    uint64_t n_tasks[CUDA_LANES];
} cuda_clock;

/* A stream's place in the clocks. Numbers of tasks go on growing when another stream takes the lane over, so
 * that events of the earlier one stay valid; a lane that saw a failure keeps it and is never taken over. */
typedef struct cuda_lane {
    bool is_taken;
    uint64_t n_tasks_before;      /* of the streams that had the lane earlier */
    _Atomic uint64_t failed_task; /* number of the first task that failed; UINT64_MAX: none */
    int failure; /* how many lanes had failed before: the lowest is the first error; written with `error` */
    bl_error error; /* written before failed_task */
} cuda_lane;

/* An event whose time on the host's clock is known. */
typedef struct cuda_time_base {
    void *event;
    double at_s; /* CLOCK_MONOTONIC */
} cuda_time_base;

typedef struct cuda_device {
    bl_device base;
    bl_cuda_properties properties;
    void *own_stream;     /* zeroes new memory, records time bases */
    pthread_mutex_t lock; /* guards is_taken and n_tasks_before of lanes, time, extension */
    cuda_lane lanes[CUDA_LANES];
    atomic_int n_failures;
    cuda_time_base time[2]; /* older, newer */
    void *extension;
    bl_cuda_extension_destroy destroy_extension;
} cuda_device;

/* BL_OK, or BL_FAIL with what cuda_error means; makes `device` the thread's current one first where that is
 * asked. */
bl_status cuda_check(int cuda_error, const char *call);
bl_status cuda_enter(const bl_device *device);

/* Copies to and from the host stay within one piece of registered memory: pieces end where addresses are
 * multiples of this. */
#define CUDA_PIECE_BYTES ((size_t)1 << 30)

/* The vtable's streams, events and stamps: stream.c. */
bl_status cuda_stream_create(bl_device *device, const char *name, bl_stream **out);
void cuda_stream_destroy(bl_stream *stream);
bl_status cuda_stream_call(bl_stream *stream, bl_stream_fn fn, const void *args, size_t args_bytes);
bl_status cuda_stream_copy(bl_stream *stream, void *dst, const void *src, size_t size_bytes);
bl_status cuda_stream_zero(bl_stream *stream, void *dst, size_t size_bytes);
bl_status cuda_stream_wait(bl_stream *stream, bl_event *event);
bl_status cuda_stream_synchronize(bl_stream *stream);
bl_status cuda_stream_status(bl_stream *stream);

bl_status cuda_event_create(bl_device *device, bl_event **out);
void cuda_event_destroy(bl_event *event);
bl_status cuda_event_record(bl_event *event, bl_stream *stream);
bl_status cuda_event_synchronize(bl_event *event);

bl_status cuda_stamp_create(bl_device *device, bl_stamp **out);
void cuda_stamp_destroy(bl_stamp *stamp);
bl_status cuda_stamp_record(bl_stamp *stamp, bl_stream *stream);
double cuda_stamp_seconds(const bl_stamp *stamp);
double cuda_stamp_elapsed_s(const bl_stamp *begin, const bl_stamp *end);

bl_status cuda_time_open(cuda_device *device);
void cuda_time_close(cuda_device *device);

#endif
