/* SPDX-License-Identifier: Apache-2.0 */
/* A stream of a GPU's device whose tasks run on a thread of the host. It has a lane in the device's
 * clocks as all others have, so that errors travel the same way (stream.c); each of its tasks
 * counts there, waits too.
 *
 *   - The device's pinned host_done has the number of each lane's tasks that are done. Threads wait
 *     for it as for any counter; a CUDA stream waits for its low word with the driver's
 *     cuStreamWaitValue32 (cyclic, so 2^31 tasks may be under way), which holds a hardware queue
 *     and no thread. host_done lives as long as the device, and a lane's numbers never shrink: an
 *     event outlives its stream.
 *   - To wait for an event of a CUDA stream, the caller's side makes a separate CUDA stream, the
 *     relay, wait for it, and records there an event of the task's slot of the ring; the thread
 *     waits for that one. So the wait is for the record before the call, even if the caller's event
 *     is recorded again meanwhile. The relay keeps this stream's order: it adds no waits.
 *   - A task is skipped when a failure comes before it by its clock, as a host function is; waits,
 *     stamps and the end are not. */
#include <cuda.h>
#include <cuda_runtime_api.h>
#include <pthread.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/thread.h"
#include "device/cuda/device.h"

#define CHECK(call) device_cuda_check((int)(call), #call)

enum {
    THREAD_NAME_BYTES = 16,
    WAIT_VALUE_SINCE = 11070 /* the version of the function that we take */
};

typedef enum task_kind {
    TASK_CALL,
    TASK_WAIT_DEVICE,
    TASK_WAIT_HOST,
    TASK_STAMP,
    TASK_END
} task_kind;

typedef struct host_task {
    task_kind kind;
    bl_stream_fn fn;
    cuda_clock before;
    cudaEvent_t reached; /* WAIT_DEVICE: of this slot, made by its first wait */
    bl_counter *counter; /* WAIT_HOST: until it is `target` */
    uint64_t target;
    cuda_stamp *stamp;
    alignas(max_align_t) unsigned char args[BL_STREAM_ARGS_BYTES];
} host_task;

typedef struct host_stream {
    cuda_stream_base common;
    pthread_t thread;
    bl_counter given;
    bl_counter *done; /* the lane's */
    cudaStream_t relay;
    host_task ring[BL_STREAM_DEPTH];
} host_stream;

static cuda_device *device_of(const host_stream *stream)
{
    return (cuda_device *)stream->common.base.device;
}

static uint64_t n_given(const host_stream *stream)
{
    return stream->common.clock.n_tasks[stream->common.lane];
}

/* ---- the thread ---- */

static bl_status wait_for_device(host_stream *stream, const host_task *t)
{
    BL_TRY(device_cuda_enter(stream->common.base.device));
    return CHECK(cudaEventSynchronize(t->reached));
}

static bl_status run(host_stream *stream, host_task *t)
{
    switch (t->kind) {
    case TASK_CALL:
        if (device_cuda_find_failure(device_of(stream), &t->before)) return BL_OK;
        return t->fn(&stream->common.base, t->args);
    case TASK_WAIT_DEVICE:
        return wait_for_device(stream, t);
    case TASK_WAIT_HOST:
        bl_counter_wait(t->counter, t->target);
        return BL_OK;
    case TASK_STAMP:
        atomic_store_explicit(&t->stamp->reached_s, bl_now_s(), memory_order_relaxed);
        return BL_OK;
    case TASK_END:
        break;
    }
    return BL_OK;
}

static void *host_stream_main(void *argument)
{
    host_stream *self = argument;
    uint64_t number = atomic_load_explicit(&self->done->value, memory_order_relaxed);

    for (;; number++) {
        bl_counter_wait(&self->given, number + 1);
        host_task *t = &self->ring[number % BL_STREAM_DEPTH];
        bool is_end = t->kind == TASK_END;
        bl_status st = run(self, t);
        if (st != BL_OK) device_cuda_lane_fail(device_of(self), self->common.lane, number, st);
        bl_counter_advance(self->done, number + 1);
        if (is_end) return NULL;
    }
}

/* ---- the caller's side ---- */

/* The slot of the next task, with its clock; free. */
static host_task *next_slot(host_stream *stream, task_kind kind)
{
    uint64_t number = n_given(stream);
    host_task *t = &stream->ring[number % BL_STREAM_DEPTH];

    if (number >= BL_STREAM_DEPTH) bl_counter_wait(stream->done, number + 1 - BL_STREAM_DEPTH);
    t->kind = kind;
    t->before = stream->common.clock;
    return t;
}

static void give(host_stream *stream)
{
    bl_counter_advance(&stream->given, ++stream->common.clock.n_tasks[stream->common.lane]);
}

static bl_status host_call(bl_stream *stream, bl_stream_fn fn, const void *args, size_t args_bytes)
{
    host_stream *self = (host_stream *)stream;
    host_task *t = next_slot(self, TASK_CALL);

    t->fn = fn;
    if (args_bytes) memcpy(t->args, args, args_bytes);
    give(self);
    return BL_OK;
}

static bl_status host_copy(bl_stream *stream, void *dst, const void *src, size_t size_bytes)
{
    (void)stream, (void)dst, (void)src;
    return BL_FAIL(BL_EINTERNAL, "a copy of %zu bytes on a host stream of a GPU", size_bytes);
}

static bl_status host_copy_rows(bl_stream *stream, const bl_row_copy *copy)
{
    (void)stream;
    return BL_FAIL(BL_EINTERNAL, "a copy of %zu rows on a host stream of a GPU", copy->n_rows);
}

static bl_status host_zero(bl_stream *stream, void *dst, size_t size_bytes)
{
    (void)stream, (void)dst;
    return BL_FAIL(BL_EINTERNAL, "zeroing %zu bytes on a host stream of a GPU", size_bytes);
}

static bl_status wait_on_relay(host_stream *stream, host_task *t, const cuda_event *event)
{
    BL_TRY(device_cuda_enter(stream->common.base.device));
    if (!t->reached)
        BL_TRY(CHECK(
            cudaEventCreateWithFlags(&t->reached, cudaEventDisableTiming | cudaEventBlockingSync)));
    BL_TRY(CHECK(cudaStreamWaitEvent(stream->relay, event->handle, 0)));
    return CHECK(cudaEventRecord(t->reached, stream->relay));
}

static bl_status host_wait(bl_stream *stream, bl_event *event)
{
    host_stream *self = (host_stream *)stream;
    const cuda_event *what = (const cuda_event *)event;
    const cuda_device *owner = (const cuda_device *)event->device;

    if (what->place == CUDA_NEVER) return BL_OK;
    host_task *t = next_slot(self, what->place == CUDA_ON_HOST ? TASK_WAIT_HOST : TASK_WAIT_DEVICE);
    if (what->place == CUDA_ON_HOST) {
        t->counter = &owner->host_done[what->host_lane];
        t->target = what->clock.n_tasks[what->host_lane];
    } else {
        BL_TRY(wait_on_relay(self, t, what)); /* the slot stays the next one */
    }
    give(self);
    if (event->device == stream->device) device_cuda_join_clocks(&self->common.clock, &what->clock);
    return BL_OK;
}

static bl_status host_synchronize(bl_stream *stream)
{
    host_stream *self = (host_stream *)stream;

    bl_counter_wait(self->done, n_given(self));
    return device_cuda_status_at(device_of(self), &self->common.clock);
}

static bl_status host_status(bl_stream *stream)
{
    const host_stream *self = (const host_stream *)stream;
    return device_cuda_status_at(device_of(self), &self->common.clock);
}

static bl_status host_record(bl_stream *stream, bl_event *event)
{
    cuda_event *what = (cuda_event *)event;

    what->place = CUDA_ON_HOST;
    what->host_lane = ((host_stream *)stream)->common.lane;
    what->clock = ((host_stream *)stream)->common.clock;
    return BL_OK;
}

static bl_status host_stamp(bl_stream *stream, bl_stamp *stamp)
{
    cuda_stamp *what = (cuda_stamp *)stamp;

    what->place = CUDA_ON_HOST;
    atomic_store_explicit(&what->reached_s, BL_NEVER_S, memory_order_relaxed);
    next_slot((host_stream *)stream, TASK_STAMP)->stamp = what;
    give((host_stream *)stream);
    return BL_OK;
}

/* ---- CUDA streams that wait for it ---- */

typedef CUresult (*wait_value_fn)(CUstream stream, CUdeviceptr address, cuuint32_t value,
                                  unsigned int flags);

bl_status device_cuda_wait_for_host(void *handle, const cuda_event *event)
{
    const cuda_device *owner = (const cuda_device *)event->base.device;
    uint64_t target = event->clock.n_tasks[event->host_lane];
    enum cudaDriverEntryPointQueryResult found;
    void *entry = NULL;
    wait_value_fn wait_value;

    /* Reached: an event of long ago would look like one to come, by its low word. */
    if (atomic_load_explicit(&owner->host_done[event->host_lane].value, memory_order_acquire) >=
        target)
        return BL_OK;
    BL_TRY(CHECK(cudaGetDriverEntryPointByVersion("cuStreamWaitValue32", &entry, WAIT_VALUE_SINCE,
                                                  cudaEnableDefault, &found)));
    if (!entry || found != cudaDriverEntryPointSuccess)
        return BL_FAIL(BL_ELIMIT, "CUDA: the driver has no cuStreamWaitValue32");
    memcpy(&wait_value, &entry, sizeof wait_value);
    /* The low word comes first on every machine that has GPUs. */
    const char *low_word = owner->host_done_on_device +
                           (size_t)event->host_lane * sizeof(bl_counter) +
                           offsetof(bl_counter, value);
    CUresult result = wait_value(handle, (CUdeviceptr)(uintptr_t)low_word, (cuuint32_t)target,
                                 CU_STREAM_WAIT_VALUE_GEQ);
    if (result == CUDA_SUCCESS) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "cuStreamWaitValue32: error %d of the driver", (int)result);
}

/* ---- creation ---- */

static void host_destroy(bl_stream *stream)
{
    host_stream *self = (host_stream *)stream;

    (void)next_slot(self, TASK_END);
    give(self);
    pthread_join(self->thread, NULL);
    device_cuda_lane_leave(device_of(self), self->common.lane, n_given(self));
    if (device_cuda_enter(stream->device) == BL_OK) {
        for (int i = 0; i < BL_STREAM_DEPTH; i++)
            if (self->ring[i].reached) cudaEventDestroy(self->ring[i].reached);
        cudaStreamDestroy(self->relay);
    }
    (void)cudaGetLastError();
    free(self);
}

static const bl_stream_backend host_backend = {
    .destroy = host_destroy,
    .call = host_call,
    .copy = host_copy,
    .copy_rows = host_copy_rows,
    .zero = host_zero,
    .wait = host_wait,
    .synchronize = host_synchronize,
    .status = host_status,
    .record = host_record,
    .stamp = host_stamp,
};

/* The counters of all lanes, with the device's first host stream. Under the device's lock. */
static bl_status make_counters(cuda_device *device)
{
    size_t size_bytes = CUDA_LANES * sizeof *device->host_done;
    void *on_device;

    if (device->host_done) return BL_OK;
    bl_counter *counters = device_cuda_alloc_host(size_bytes);
    if (!counters) return BL_FAIL(BL_ENOMEM, "counters of host streams");
    bl_status st = CHECK(cudaHostGetDevicePointer(&on_device, counters, 0));
    if (st != BL_OK) {
        device_cuda_free_host(counters, size_bytes);
        return st;
    }
    for (int i = 0; i < CUDA_LANES; i++) bl_counter_init(&counters[i]);
    device->host_done_on_device = on_device;
    device->host_done = counters;
    return BL_OK;
}

/* Starts the thread; the lane is taken. */
static bl_status start(host_stream *stream, const char *name)
{
    cuda_device *device = device_of(stream);
    uint64_t n_before = device->lanes[stream->common.lane].n_tasks_before;
    char thread_name[THREAD_NAME_BYTES] = {0};

    stream->done = &device->host_done[stream->common.lane];
    stream->common.clock.n_tasks[stream->common.lane] = n_before;
    bl_counter_init(&stream->given);
    bl_counter_advance(&stream->given, n_before);
    bl_counter_advance(stream->done, n_before); /* other streams may have had the lane */
    if (bl_thread_create(&stream->thread, host_stream_main, stream) != 0)
        return BL_FAIL(BL_ELIMIT, "stream %s: no more threads", name);
    strncpy(thread_name, name, sizeof thread_name - 1);
    pthread_setname_np(stream->thread, thread_name);
    return BL_OK;
}

bl_status device_cuda_host_stream_create(bl_device *device, const char *name, bl_stream **out)
{
    cuda_device *owner = (cuda_device *)device;
    host_stream *stream = calloc(1, sizeof *stream);
    bl_status st;

    *out = NULL;
    if (!stream) return BL_FAIL(BL_ENOMEM, "stream %s", name);
    stream->common.base = (bl_stream){.device = device, .backend = &host_backend};
    BL_TRY_GOTO(st, no_relay, device_cuda_enter(device));
    pthread_mutex_lock(&owner->lock);
    st = make_counters(owner);
    pthread_mutex_unlock(&owner->lock);
    if (st != BL_OK) goto no_relay;
    BL_TRY_GOTO(st, no_relay,
                CHECK(cudaStreamCreateWithFlags(&stream->relay, cudaStreamNonBlocking)));
    BL_TRY_GOTO(st, no_lane, device_cuda_lane_take(owner, name, &stream->common.lane));
    BL_TRY_GOTO(st, no_thread, start(stream, name));
    *out = &stream->common.base;
    return BL_OK;

no_thread:
    device_cuda_lane_leave(owner, stream->common.lane, n_given(stream));
no_lane:
    cudaStreamDestroy(stream->relay);
no_relay:
    free(stream);
    return st;
}
