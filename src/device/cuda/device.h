/* SPDX-License-Identifier: Apache-2.0 */
/* device.h -- types and functions shared by the files of device/cuda; for them only. CUDA's handles
 * are pointers, void * in this file. */
#ifndef BALLAST_DEVICE_CUDA_DEVICE_H
#define BALLAST_DEVICE_CUDA_DEVICE_H

#include <stdatomic.h>

#include "base/counter.h"
#include "device/cuda/stream.h"
#include "device/device_internal.h"

enum { CUDA_LANES = 32 }; /* streams of a device at a time; a failed one counts permanently */

/* What a stream has seen to its end: for each lane, how many of its host tasks come before. */
typedef struct cuda_clock {
    uint64_t n_tasks[CUDA_LANES];
} cuda_clock;

/* A stream's place in the clocks. Numbers of tasks go on growing when another stream takes the lane
 * over, so that events of the earlier one stay valid; a lane that saw a failure keeps it and is
 * never taken over. */
typedef struct cuda_lane {
    bool is_taken;
    uint64_t n_tasks_before;      /* of the streams that had the lane earlier */
    _Atomic uint64_t failed_task; /* number of the first task that failed; UINT64_MAX: none */
    /* how many lanes had failed before: the lowest is the first error; written with `error` */
    int failure;
    bl_error error; /* written before failed_task */
} cuda_lane;

/* An event whose time on the host's clock is known. */
typedef struct cuda_time_base {
    void *event;
    double at_s; /* CLOCK_MONOTONIC */
} cuda_time_base;

/* What every stream of a GPU begins with, those on threads of the host too. */
typedef struct cuda_stream_base {
    bl_stream base;
    int lane;
    cuda_clock clock; /* of the stream's end; the own lane's entry is the number of tasks given */
} cuda_stream_base;

/* Where an event was last recorded. */
typedef enum cuda_event_place { CUDA_NEVER, CUDA_ON_DEVICE, CUDA_ON_HOST } cuda_event_place;

typedef struct cuda_event {
    bl_event base;
    void *handle;
    cuda_event_place place;
    int host_lane; /* ON_HOST: fires when that lane has done as many tasks as the clock says */
    cuda_clock clock;
} cuda_event;

typedef struct cuda_stamp {
    bl_stamp base;
    void *handle;
    cuda_event_place place;
    _Atomic double reached_s; /* ON_HOST: BL_NEVER_S until then */
} cuda_stamp;

typedef struct cuda_device {
    bl_device base;
    bl_cuda_properties properties;
    void *own_stream; /* zeroes new memory, records time bases */
    pthread_mutex_t
        lock; /* guards is_taken and n_tasks_before of lanes, time, extension, making host_done */
    cuda_lane lanes[CUDA_LANES];
    atomic_int n_failures;
    cuda_lane whole;        /* bl_cuda_device_fail: failed_task 0 when it was called */
    atomic_flag is_failing; /* its first caller writes */
    /* [CUDA_LANES], pinned: what streams on threads of the host have done, for all who wait; NULL
     * before the first of them. A GPU reads the low word of a value at host_done_on_device. */
    bl_counter *host_done;
    char *host_done_on_device;
    cuda_time_base time[2]; /* older, newer */
    void *extension;
    bl_cuda_extension_destroy destroy_extension;
} cuda_device;

/* BL_OK, or BL_FAIL with what cuda_error means; makes `device` the thread's current one first where
 * that is asked. */
bl_status device_cuda_check(int cuda_error, const char *call);
bl_status device_cuda_enter(const bl_device *device);

/* Copies to and from the host stay within one piece of registered memory: pieces end where
 * addresses are multiples of this. */
#define CUDA_PIECE_BYTES ((size_t)1 << 30)

/* Pinned and mapped host memory, as BL_SPACE_HOST. */
void *device_cuda_alloc_host(size_t size_bytes);
void device_cuda_free_host(void *memory, size_t size_bytes);

/* lanes.c */
bl_status device_cuda_lane_take(cuda_device *device, const char *name, int *lane);
/* n_tasks: as many as the stream was given, in the lane's count. */
void device_cuda_lane_leave(cuda_device *device, int lane, uint64_t n_tasks);
/* Notes that task number `task` failed with `st`, by the calling thread's error text; a lane's
 * first failure alone counts. */
void device_cuda_lane_fail(cuda_device *device, int lane, uint64_t task, bl_status st);
/* The first error that comes before a point, or NULL; and as a status, with its text. */
const cuda_lane *device_cuda_find_failure(const cuda_device *device, const cuda_clock *clock);
bl_status device_cuda_status_at(const cuda_device *device, const cuda_clock *clock);
void device_cuda_join_clocks(cuda_clock *clock, const cuda_clock *other);

/* The device's streams, events and stamps: stream.c; streams on threads of the host:
 * host_stream.c. */
bl_status device_cuda_stream_create(bl_device *device, const char *name, bool is_urgent,
                                    bl_stream **out);
bl_status device_cuda_host_stream_create(bl_device *device, const char *name, bl_stream **out);

/* Makes the CUDA stream `handle` wait for an event recorded on a host stream. */
bl_status device_cuda_wait_for_host(void *handle, const cuda_event *event);

bl_status device_cuda_event_create(bl_device *device, bl_event **out);
void device_cuda_event_destroy(bl_event *event);
bl_status device_cuda_event_synchronize(bl_event *event);

bl_status device_cuda_stamp_create(bl_device *device, bl_stamp **out);
void device_cuda_stamp_destroy(bl_stamp *stamp);
double device_cuda_stamp_seconds(const bl_stamp *stamp);
double device_cuda_stamp_elapsed_s(const bl_stamp *begin, const bl_stamp *end);

bl_status device_cuda_time_open(cuda_device *device);
void device_cuda_time_close(cuda_device *device);

#endif
