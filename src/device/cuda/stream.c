/* SPDX-License-Identifier: Apache-2.0 */
/* Streams, events and stamps of a GPU. A stream is a CUDA stream; device work is queued on it
 * directly, by this file and by the ops. A host task runs in a host function of the stream
 * (cudaLaunchHostFunc), which may not call CUDA, so that all about errors is decided with numbers
 * that both sides can read:
 *
 *   - The host tasks of a stream are counted. A stream has a lane in its device's clocks
 *     (device.h); a clock says for each lane how many of its tasks come before a point of a stream.
 *     A stream carries the clock of its end; recording an event copies it, and waiting for an event
 *     joins the event's clock into the stream's. All of this happens on the caller's side, as calls
 *     are made.
 *   - A host task that fails notes its number in its lane, once. A point has failed when some
 *     lane's failed task comes before it by its clock. A host task carries the clock of its point
 *     and is skipped when that has failed by the time it runs: whatever comes before it has ended
 *     then, so the answer does not depend on timing.
 *   - synchronize and event_synchronize wait through CUDA, then ask the same question; the lowest
 *     failure number is the first error. A stream that waited for an event that carries an error
 *     thus fails with it, and so do those that wait for that stream's events.
 *   - Copies, zeroing and kernels behind a failed task do run: on memory that is valid, with
 *     results that are not used, because every way to wait for them returns the error. Events and
 *     stamps always fire.
 *   - CUDA's own errors (an address out of bounds, a lost GPU) are sticky: every later call returns
 *     them, with the call's name. Host functions do not run any more then, so that nothing here
 *     waits for one without asking CUDA whether the stream is alive.
 *   - Errors do not travel through events to streams of another device; a communicator's failure
 *     reaches its ranks by itself.
 *
 * A host task's arguments are in the stream's ring until it has run. Its slot is free when n_given
 * - done < BL_STREAM_DEPTH; only host tasks take slots. Host functions of several streams may run
 * one after the other on one thread of the driver: a task must not wait for a task of another
 * stream.
 *
 * A GPU's queue of launches holds about a thousand. A launch that finds it full waits in the driver
 * and may hold the driver's lock, so that no other thread can ask CUDA for anything: a thread that
 * queues work waits before that, outside of the driver's lock, for work LAUNCHES to 2 LAUNCHES
 * back. */
#include <assert.h>
#include <cuda_runtime_api.h>
#include <stdalign.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/counter.h"
#include "device/cuda/device.h"

#define CHECK(call) device_cuda_check((int)(call), #call)

/* Calls between two waits. A call launches at most five kernels, on average fewer than two. */
enum { LAUNCHES = 200 };

struct cuda_stream;

typedef struct task {
    struct cuda_stream *stream;
    bl_stream_fn fn;
    uint64_t number;
    cuda_clock before;
    alignas(max_align_t) unsigned char args[BL_STREAM_ARGS_BYTES];
} task;

typedef struct cuda_stream {
    cuda_stream_base common;
    cudaStream_t handle;
    bool is_owned;
    void *scratch;    /* BL_CUDA_STREAM_SCRATCH_BYTES of device memory */
    cudaEvent_t end;  /* for synchronize: a thread sleeps on an event, but spins on a stream */
    int n_launches;   /* calls that may launch, since the last mark */
    cudaEvent_t mark; /* after the last LAUNCHES calls; owned streams */
    bl_counter done;  /* tasks that have run or been skipped */
    task ring[BL_STREAM_DEPTH];
} cuda_stream;

typedef struct zero_args {
    void *dst;
    size_t size_bytes;
} zero_args;

static cuda_device *device_of(const bl_stream *stream)
{
    return (cuda_device *)stream->device;
}

/* ---- streams ---- */

static const bl_stream_backend stream_backend;

static void release(cuda_stream *stream)
{
    if (stream->end) cudaEventDestroy(stream->end);
    if (stream->mark) cudaEventDestroy(stream->mark);
    if (stream->scratch) cudaFree(stream->scratch);
    if (stream->is_owned) cudaStreamDestroy(stream->handle);
    free(stream);
}

/* On failure an owned handle is destroyed. */
static bl_status make_stream(bl_device *device, const char *name, cudaStream_t handle,
                             bool is_owned, bl_stream **out)
{
    cuda_device *owner = (cuda_device *)device;
    cuda_stream *stream = calloc(1, sizeof *stream);

    if (!stream) {
        if (is_owned) cudaStreamDestroy(handle);
        return BL_FAIL(BL_ENOMEM, "stream %s", name);
    }
    stream->common.base = (bl_stream){.device = device, .backend = &stream_backend};
    stream->handle = handle;
    stream->is_owned = is_owned;
    bl_status st = CHECK(
        cudaEventCreateWithFlags(&stream->end, cudaEventDisableTiming | cudaEventBlockingSync));
    if (st == BL_OK && is_owned)
        st = CHECK(cudaEventCreateWithFlags(&stream->mark,
                                            cudaEventDisableTiming | cudaEventBlockingSync));
    if (st == BL_OK) st = CHECK(cudaMalloc(&stream->scratch, BL_CUDA_STREAM_SCRATCH_BYTES));
    if (st == BL_OK) st = device_cuda_lane_take(owner, name, &stream->common.lane);
    if (st != BL_OK) {
        release(stream);
        return st;
    }
    stream->common.clock.n_tasks[stream->common.lane] =
        owner->lanes[stream->common.lane].n_tasks_before;
    bl_counter_init(&stream->done);
    bl_counter_advance(&stream->done, stream->common.clock.n_tasks[stream->common.lane]);
    for (int i = 0; i < BL_STREAM_DEPTH; i++) stream->ring[i].stream = stream;
    *out = &stream->common.base;
    return BL_OK;
}

bl_status device_cuda_stream_create(bl_device *device, const char *name, bool is_urgent,
                                    bl_stream **out)
{
    cudaStream_t handle;
    int least, greatest;

    *out = NULL;
    BL_TRY(device_cuda_enter(device));
    BL_TRY(CHECK(cudaDeviceGetStreamPriorityRange(&least, &greatest)));
    BL_TRY(CHECK(cudaStreamCreateWithPriority(&handle, cudaStreamNonBlocking,
                                              is_urgent ? greatest : least)));
    return make_stream(device, name, handle, true, out);
}

bl_status bl_stream_wrap_cuda(bl_device *device, void *handle, bl_stream **out)
{
    *out = NULL;
    if (bl_device_get_kind(device) != BL_DEVICE_CUDA)
        return BL_FAIL(BL_EUSAGE, "a CUDA stream can be wrapped for a CUDA device only");
    BL_TRY(device_cuda_enter(device));
    return make_stream(device, "wrapped", handle, false, out);
}

static void stream_destroy(bl_stream *stream)
{
    cuda_stream *self = (cuda_stream *)stream;

    if (device_cuda_enter(stream->device) == BL_OK)
        /* An error says that its host functions will not run any more: as good. */
        (void)cudaStreamSynchronize(self->handle);
    device_cuda_lane_leave(device_of(stream), self->common.lane,
                           self->common.clock.n_tasks[self->common.lane]);
    release(self);
    (void)cudaGetLastError();
}

/* Before a call that may launch. A caller's stream is the caller's to bound: it may be recorded
 * into a graph, where nothing may wait for it. */
static bl_status bound_launches(cuda_stream *stream)
{
    if (!stream->is_owned || ++stream->n_launches < LAUNCHES) return BL_OK;
    stream->n_launches = 0;
    BL_TRY(CHECK(cudaEventSynchronize(stream->mark)));
    return CHECK(cudaEventRecord(stream->mark, stream->handle));
}

void *bl_cuda_stream_handle(bl_stream *stream)
{
    assert(stream->backend == &stream_backend && "kernels do not run on a host stream");
    /* A failure shows at the launch. */
    if (device_cuda_enter(stream->device) == BL_OK) (void)bound_launches((cuda_stream *)stream);
    return ((cuda_stream *)stream)->handle;
}

void *bl_cuda_stream_scratch(bl_stream *stream)
{
    assert(stream->backend == &stream_backend && "kernels do not run on a host stream");
    return ((cuda_stream *)stream)->scratch;
}

static void run_task(void *argument)
{
    task *t = argument;
    cuda_stream *stream = t->stream;
    cuda_device *device = device_of(&stream->common.base);

    if (!device_cuda_find_failure(device, &t->before)) {
        bl_status st = t->fn(&stream->common.base, t->args);
        if (st != BL_OK) device_cuda_lane_fail(device, stream->common.lane, t->number, st);
    }
    bl_counter_advance(&stream->done, t->number + 1);
}

/* Until the ring has a slot for task `number`; a stream that CUDA has given up on never gets
 * one. */
static bl_status wait_for_slot(cuda_stream *stream, uint64_t number)
{
    static const struct timespec nap = {.tv_nsec = 20000};

    while (number - atomic_load_explicit(&stream->done.value, memory_order_acquire) >=
           BL_STREAM_DEPTH) {
        cudaError_t error = cudaStreamQuery(stream->handle);
        if (error != cudaSuccess && error != cudaErrorNotReady)
            return bl_cuda_fail("cudaStreamQuery", (int)error);
        /* "not ready" is an answer, and must not look like a launch's error */
        (void)cudaGetLastError();
        nanosleep(&nap, NULL);
    }
    return BL_OK;
}

static bl_status stream_call(bl_stream *stream, bl_stream_fn fn, const void *args,
                             size_t args_bytes)
{
    cuda_stream *self = (cuda_stream *)stream;
    uint64_t number = self->common.clock.n_tasks[self->common.lane];
    task *t = &self->ring[number % BL_STREAM_DEPTH];

    BL_TRY(device_cuda_enter(stream->device));
    BL_TRY(bound_launches((cuda_stream *)stream));
    BL_TRY(wait_for_slot(self, number));
    t->fn = fn;
    t->number = number;
    t->before = self->common.clock;
    if (args_bytes) memcpy(t->args, args, args_bytes);
    BL_TRY(CHECK(cudaLaunchHostFunc(self->handle, run_task, t)));
    self->common.clock.n_tasks[self->common.lane] = number + 1;
    return BL_OK;
}

/* The most that a copy at these addresses may take so that it stays within one piece of each. */
static size_t copy_bytes(const void *dst, const void *src, size_t size_bytes)
{
    size_t dst_rest = CUDA_PIECE_BYTES - (size_t)((uintptr_t)dst % CUDA_PIECE_BYTES);
    size_t src_rest = CUDA_PIECE_BYTES - (size_t)((uintptr_t)src % CUDA_PIECE_BYTES);
    size_t rest = dst_rest < src_rest ? dst_rest : src_rest;
    return rest < size_bytes ? rest : size_bytes;
}

static bl_status stream_copy(bl_stream *stream, void *dst, const void *src, size_t size_bytes)
{
    cuda_stream *self = (cuda_stream *)stream;

    BL_TRY(device_cuda_enter(stream->device));
    BL_TRY(bound_launches((cuda_stream *)stream));
    for (size_t done = 0, bytes; done < size_bytes; done += bytes) {
        char *to = (char *)dst + done;
        const char *from = (const char *)src + done;
        bytes = copy_bytes(to, from, size_bytes - done);
        BL_TRY(CHECK(cudaMemcpyAsync(to, from, bytes, cudaMemcpyDefault, self->handle)));
    }
    return BL_OK;
}

static bl_status stream_copy_rows(bl_stream *stream, const bl_row_copy *c)
{
    BL_TRY(device_cuda_enter(stream->device));
    BL_TRY(bound_launches((cuda_stream *)stream));
    return CHECK(cudaMemcpy2DAsync(c->dst, c->dst_stride, c->src, c->src_stride, c->row_bytes,
                                   c->n_rows, cudaMemcpyDefault, ((cuda_stream *)stream)->handle));
}

static bl_status zero_task(bl_stream *stream, const void *args)
{
    const zero_args *a = args;
    (void)stream;
    memset(a->dst, 0, a->size_bytes);
    return BL_OK;
}

static bl_status stream_zero(bl_stream *stream, void *dst, size_t size_bytes)
{
    struct cudaPointerAttributes where;

    BL_TRY(device_cuda_enter(stream->device));
    BL_TRY(bound_launches((cuda_stream *)stream));
    BL_TRY(CHECK(cudaPointerGetAttributes(&where, dst)));
    if (where.type == cudaMemoryTypeDevice || where.type == cudaMemoryTypeManaged)
        return CHECK(cudaMemsetAsync(dst, 0, size_bytes, ((cuda_stream *)stream)->handle));
    return stream_call(stream, zero_task, &(zero_args){dst, size_bytes}, sizeof(zero_args));
}

static bl_status stream_synchronize(bl_stream *stream)
{
    cuda_stream *self = (cuda_stream *)stream;

    BL_TRY(device_cuda_enter(stream->device));
    BL_TRY(CHECK(cudaEventRecord(self->end, self->handle)));
    BL_TRY(CHECK(cudaEventSynchronize(self->end)));
    return device_cuda_status_at(device_of(stream), &self->common.clock);
}

static bl_status stream_status(bl_stream *stream)
{
    return device_cuda_status_at(device_of(stream), &((const cuda_stream_base *)stream)->clock);
}

/* ---- events ---- */

bl_status device_cuda_event_create(bl_device *device, bl_event **out)
{
    cuda_event *event = calloc(1, sizeof *event);
    bl_status st = event ? device_cuda_enter(device) : BL_FAIL(BL_ENOMEM, "an event");

    *out = NULL;
    if (st == BL_OK)
        st = CHECK(cudaEventCreateWithFlags((cudaEvent_t *)&event->handle,
                                            cudaEventDisableTiming | cudaEventBlockingSync));
    if (st != BL_OK) {
        free(event);
        return st;
    }
    event->base.device = device;
    *out = &event->base;
    return BL_OK;
}

void device_cuda_event_destroy(bl_event *event)
{
    if (device_cuda_enter(event->device) == BL_OK &&
        cudaEventDestroy(((cuda_event *)event)->handle) != cudaSuccess)
        (void)cudaGetLastError();
    free(event);
}

static bl_status stream_record(bl_stream *stream, bl_event *event)
{
    cuda_event *self = (cuda_event *)event;

    BL_TRY(device_cuda_enter(stream->device));
    BL_TRY(bound_launches((cuda_stream *)stream));
    BL_TRY(CHECK(cudaEventRecord(self->handle, ((cuda_stream *)stream)->handle)));
    self->clock = ((cuda_stream *)stream)->common.clock;
    self->place = CUDA_ON_DEVICE;
    return BL_OK;
}

static bl_status stream_wait(bl_stream *stream, bl_event *event)
{
    cuda_stream *self = (cuda_stream *)stream;
    const cuda_event *what = (const cuda_event *)event;

    if (what->place == CUDA_NEVER) return BL_OK;
    BL_TRY(device_cuda_enter(stream->device));
    BL_TRY(bound_launches((cuda_stream *)stream));
    if (what->place == CUDA_ON_HOST)
        BL_TRY(device_cuda_wait_for_host(self->handle, what));
    else
        BL_TRY(CHECK(cudaStreamWaitEvent(self->handle, what->handle, 0)));
    if (event->device == stream->device) device_cuda_join_clocks(&self->common.clock, &what->clock);
    return BL_OK;
}

bl_status device_cuda_event_synchronize(bl_event *event)
{
    const cuda_event *self = (const cuda_event *)event;
    const cuda_device *device = (const cuda_device *)event->device;

    if (self->place == CUDA_NEVER) return BL_OK;
    if (self->place == CUDA_ON_HOST) {
        bl_counter_wait(&device->host_done[self->host_lane], self->clock.n_tasks[self->host_lane]);
    } else {
        BL_TRY(device_cuda_enter(event->device));
        BL_TRY(CHECK(cudaEventSynchronize(self->handle)));
    }
    return device_cuda_status_at(device, &self->clock);
}

/* ---- stamps: events with times, laid onto the host's clock by a base event whose time is known
 * ---- */

/* CUDA reports the time between two events as milliseconds in fp32, whose precision is 4
 * microseconds a minute after the base and 8 milliseconds a day after it. So two bases take turns:
 * times are measured from the older one, at most two periods back. */
static const double BASE_PERIOD_S = 30;

static bl_status set_base(const cuda_device *device, cuda_time_base *base)
{
    double before_s = bl_now_s();
    BL_TRY(CHECK(cudaEventRecord(base->event, device->own_stream)));
    BL_TRY(CHECK(cudaEventSynchronize(base->event)));
    base->at_s = 0.5 * (before_s + bl_now_s());
    return BL_OK;
}

bl_status device_cuda_time_open(cuda_device *device)
{
    for (int i = 0; i < 2; i++) {
        cudaEvent_t event;
        BL_TRY(CHECK(cudaEventCreateWithFlags(&event, cudaEventDefault)));
        device->time[i].event = event;
        BL_TRY(set_base(device, &device->time[i]));
    }
    return BL_OK;
}

void device_cuda_time_close(cuda_device *device)
{
    for (int i = 0; i < 2; i++)
        if (device->time[i].event) cudaEventDestroy(device->time[i].event);
}

bl_status device_cuda_stamp_create(bl_device *device, bl_stamp **out)
{
    cuda_stamp *stamp = calloc(1, sizeof *stamp);
    bl_status st = stamp ? device_cuda_enter(device) : BL_FAIL(BL_ENOMEM, "a stamp");

    *out = NULL;
    if (st == BL_OK)
        st = CHECK(cudaEventCreateWithFlags((cudaEvent_t *)&stamp->handle, cudaEventDefault));
    if (st != BL_OK) {
        free(stamp);
        return st;
    }
    stamp->base.device = device;
    *out = &stamp->base;
    return BL_OK;
}

void device_cuda_stamp_destroy(bl_stamp *stamp)
{
    if (device_cuda_enter(stamp->device) == BL_OK &&
        cudaEventDestroy(((cuda_stamp *)stamp)->handle) != cudaSuccess)
        (void)cudaGetLastError();
    free(stamp);
}

static bl_status stream_stamp(bl_stream *stream, bl_stamp *stamp)
{
    cuda_stamp *self = (cuda_stamp *)stamp;

    BL_TRY(device_cuda_enter(stream->device));
    BL_TRY(bound_launches((cuda_stream *)stream));
    BL_TRY(CHECK(cudaEventRecord(self->handle, ((cuda_stream *)stream)->handle)));
    self->place = CUDA_ON_DEVICE;
    return BL_OK;
}

double device_cuda_stamp_seconds(const bl_stamp *stamp)
{
    const cuda_stamp *self = (const cuda_stamp *)stamp;
    cuda_device *device = (cuda_device *)stamp->device;
    double at_s = BL_NEVER_S;
    float ms;

    if (self->place == CUDA_ON_HOST)
        return atomic_load_explicit(&self->reached_s, memory_order_relaxed);
    if (self->place == CUDA_NEVER || device_cuda_enter(stamp->device) != BL_OK) return BL_NEVER_S;
    pthread_mutex_lock(&device->lock);
    if (cudaEventQuery(self->handle) == cudaSuccess &&
        cudaEventElapsedTime(&ms, device->time[0].event, self->handle) == cudaSuccess)
        at_s = device->time[0].at_s + 1e-3 * (double)ms;
    else
        (void)cudaGetLastError(); /* "not ready", or a dead device: no time either way */
    if (bl_now_s() - device->time[1].at_s > BASE_PERIOD_S) {
        cuda_time_base newer = device->time[0];
        if (set_base(device, &newer) == BL_OK) {
            device->time[0] = device->time[1];
            device->time[1] = newer;
        }
    }
    pthread_mutex_unlock(&device->lock);
    return at_s;
}

double device_cuda_stamp_elapsed_s(const bl_stamp *begin, const bl_stamp *end)
{
    const cuda_stamp *from = (const cuda_stamp *)begin, *to = (const cuda_stamp *)end;
    float ms;

    if (from->place == CUDA_ON_HOST || to->place == CUDA_ON_HOST) {
        double from_s = device_cuda_stamp_seconds(begin), to_s = device_cuda_stamp_seconds(end);
        return from_s > BL_NEVER_S && to_s > BL_NEVER_S ? to_s - from_s : 0;
    }
    if (from->place == CUDA_NEVER || to->place == CUDA_NEVER ||
        device_cuda_enter(begin->device) != BL_OK)
        return 0;
    if (cudaEventElapsedTime(&ms, from->handle, to->handle) == cudaSuccess)
        return 1e-3 * (double)ms;
    (void)cudaGetLastError(); /* "not ready", or a dead device */
    return 0;
}

/* ---- the table ---- */

static const bl_stream_backend stream_backend = {
    .destroy = stream_destroy,
    .call = stream_call,
    .copy = stream_copy,
    .copy_rows = stream_copy_rows,
    .zero = stream_zero,
    .wait = stream_wait,
    .synchronize = stream_synchronize,
    .status = stream_status,
    .record = stream_record,
    .stamp = stream_stamp,
};
