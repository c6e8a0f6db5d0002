/* SPDX-License-Identifier: Apache-2.0 */
/* stream.c -- streams and events of the CPU device.
 *
 * A stream is a thread, a ring of tasks and two counters: tasks given and tasks done. An inline
 * stream has no thread: its giver runs each task, and all tasks given are done. An event is a
 * stream and a number of tasks: recording it notes how many the stream had been given, waiting for
 * it waits until so many are done. Nothing is signaled for an event, recording it again cannot
 * disturb a wait for the earlier record, and the order between threads is exactly the contract's:
 * from the thread that queues to the task, and from the task to the thread that waits for it.
 *
 * Invariants
 *   - n_given - done <= BL_STREAM_DEPTH; slot i of the ring belongs to the giver until given > i,
 *     then to the thread until done > i.
 *   - `error` is written once, by the thread, before it sets failed_task and before done passes the
 *     failed task; a thread that saw either may read it.
 *   - A wait runs on a failed stream too: an event recorded after it must not fire before the work
 *     that it waits for ends, or buffers still in use might be freed. Waits refer to earlier
 *     records, so they end.
 *   - An event and a queued wait hold a reference to the stream they refer to: destroying a stream
 *     leaves its events valid. */
#include "device/cpu/stream.h"

#include <stdalign.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/counter.h"
#include "base/thread.h"

enum { THREAD_NAME_BYTES = 16 }; /* pthread_setname_np's limit, terminator included */

typedef struct task {
    bl_stream_fn fn; /* NULL ends the thread */
    bool runs_after_failure;
    alignas(max_align_t) unsigned char args[BL_STREAM_ARGS_BYTES];
} task;

typedef struct cpu_stream {
    bl_stream base;
    bool is_inline; /* without a thread */
    pthread_t thread;
    atomic_int n_references;
    bl_cpu_guard *guard; /* the device's; NULL: none */
    uint64_t n_given;    /* the giver's copy of `given` */
    bl_counter given, done;
    _Atomic uint64_t failed_task; /* index of the first task that failed; UINT64_MAX: none */
    bl_error error;
    task ring[BL_STREAM_DEPTH];
} cpu_stream;

/* The first n_tasks tasks of a stream; NULL stream: nothing to wait for. */
typedef struct stream_point {
    cpu_stream *stream;
    uint64_t n_tasks;
} stream_point;

typedef struct cpu_event {
    bl_event base;
    stream_point recorded;
} cpu_event;

typedef struct cpu_stamp {
    bl_stamp base;
    _Atomic double reached_s; /* BL_NEVER_S: not yet */
} cpu_stamp;

typedef struct move_args {
    void *dst;
    const void *src;
    size_t size_bytes;
} move_args;

static cpu_stream *stream_retain(cpu_stream *stream)
{
    if (stream) atomic_fetch_add_explicit(&stream->n_references, 1, memory_order_relaxed);
    return stream;
}

static void stream_release(cpu_stream *stream)
{
    if (!stream || atomic_fetch_sub_explicit(&stream->n_references, 1, memory_order_release) != 1)
        return;
    (void)atomic_load_explicit(&stream->n_references,
                               memory_order_acquire); /* only the last one is ordered */
    free(stream);
}

static bl_status wait_for_point(const stream_point *point)
{
    cpu_stream *stream = point->stream;
    if (!stream) return BL_OK;
    bl_counter_wait(&stream->done, point->n_tasks);
    if (atomic_load_explicit(&stream->failed_task, memory_order_relaxed) >= point->n_tasks)
        return BL_OK;
    return bl_error_restore(&stream->error);
}

static void run_task(cpu_stream *self, uint64_t index, bl_stream_fn fn, bool runs_after_failure,
                     const void *args)
{
    bool failed = self->error.status != BL_OK;

    if (!failed || runs_after_failure) {
        bl_status st = bl_cpu_guard_open(self->guard);
        if (st == BL_OK || runs_after_failure) {
            bl_status ran = fn(&self->base, args);
            if (st == BL_OK) st = ran;
        }
        bl_cpu_guard_close(self->guard);
        if (st != BL_OK && !failed) {
            bl_error_save(&self->error, st);
            atomic_store_explicit(&self->failed_task, index, memory_order_release);
        }
    }
    bl_counter_advance(&self->done, index + 1);
}

static void *stream_main(void *argument)
{
    cpu_stream *self = argument;

    for (uint64_t index = 0;; index++) {
        bl_counter_wait(&self->given, index + 1);
        task *t = &self->ring[index % BL_STREAM_DEPTH];
        if (!t->fn) return NULL;
        run_task(self, index, t->fn, t->runs_after_failure, t->args);
    }
}

static void give_task(cpu_stream *stream, bl_stream_fn fn, bool runs_after_failure,
                      const void *args, size_t args_bytes)
{
    if (stream->is_inline) {
        run_task(stream, stream->n_given++, fn, runs_after_failure, args);
        return;
    }
    if (stream->n_given >= BL_STREAM_DEPTH)
        bl_counter_wait(&stream->done, stream->n_given + 1 - BL_STREAM_DEPTH);
    task *t = &stream->ring[stream->n_given % BL_STREAM_DEPTH];
    t->fn = fn;
    t->runs_after_failure = runs_after_failure;
    if (args_bytes) memcpy(t->args, args, args_bytes);
    bl_counter_advance(&stream->given, ++stream->n_given);
    if (stream->guard && fn) bl_counter_wait(&stream->done, stream->n_given);
}

static void stream_destroy(bl_stream *stream)
{
    cpu_stream *self = (cpu_stream *)stream;
    if (!self->is_inline) {
        give_task(self, NULL, true, NULL, 0);
        pthread_join(self->thread, NULL);
    }
    stream_release(self);
}

static bl_status stream_call(bl_stream *stream, bl_stream_fn fn, const void *args,
                             size_t args_bytes)
{
    give_task((cpu_stream *)stream, fn, false, args, args_bytes);
    return BL_OK;
}

static bl_status copy_task(bl_stream *stream, const void *args)
{
    const move_args *a = args;
    (void)stream;
    memcpy(a->dst, a->src, a->size_bytes);
    return BL_OK;
}

static bl_status copy_rows_task(bl_stream *stream, const void *args)
{
    const bl_row_copy *c = args;
    (void)stream;
    for (size_t row = 0; row < c->n_rows; row++)
        memcpy((char *)c->dst + row * c->dst_stride, (const char *)c->src + row * c->src_stride,
               c->row_bytes);
    return BL_OK;
}

static bl_status zero_task(bl_stream *stream, const void *args)
{
    const move_args *a = args;
    (void)stream;
    memset(a->dst, 0, a->size_bytes);
    return BL_OK;
}

static bl_status stream_copy(bl_stream *stream, void *dst, const void *src, size_t size_bytes)
{
    move_args args = {.dst = dst, .src = src, .size_bytes = size_bytes};
    return stream_call(stream, copy_task, &args, sizeof args);
}

static bl_status stream_copy_rows(bl_stream *stream, const bl_row_copy *copy)
{
    return stream_call(stream, copy_rows_task, copy, sizeof *copy);
}

static bl_status stream_zero(bl_stream *stream, void *dst, size_t size_bytes)
{
    move_args args = {.dst = dst, .size_bytes = size_bytes};
    return stream_call(stream, zero_task, &args, sizeof args);
}

static bl_status wait_task(bl_stream *stream, const void *args)
{
    const stream_point *point = args;
    (void)stream;
    bl_status st = wait_for_point(point);
    stream_release(point->stream);
    return st;
}

static bl_status stream_wait(bl_stream *stream, bl_event *event)
{
    stream_point point = ((cpu_event *)event)->recorded;
    if (!stream_retain(point.stream)) return BL_OK;
    give_task((cpu_stream *)stream, wait_task, true, &point, sizeof point);
    return BL_OK;
}

static bl_status stream_synchronize(bl_stream *stream)
{
    cpu_stream *self = (cpu_stream *)stream;
    return wait_for_point(&(stream_point){.stream = self, .n_tasks = self->n_given});
}

static bl_status stream_status(bl_stream *stream)
{
    cpu_stream *self = (cpu_stream *)stream;
    if (atomic_load_explicit(&self->failed_task, memory_order_acquire) == UINT64_MAX) return BL_OK;
    return bl_error_restore(&self->error);
}

bl_status bl_cpu_event_create(bl_device *device, bl_event **out)
{
    cpu_event *event = calloc(1, sizeof *event);
    if (!event) {
        *out = NULL;
        return BL_FAIL(BL_ENOMEM, "an event");
    }
    event->base.device = device;
    *out = &event->base;
    return BL_OK;
}

void bl_cpu_event_destroy(bl_event *event)
{
    cpu_event *self = (cpu_event *)event;
    stream_release(self->recorded.stream);
    free(self);
}

static bl_status stream_record(bl_stream *stream, bl_event *event)
{
    cpu_event *self = (cpu_event *)event;
    cpu_stream *recorded = stream_retain((cpu_stream *)stream);
    stream_release(self->recorded.stream);
    self->recorded = (stream_point){.stream = recorded, .n_tasks = recorded->n_given};
    return BL_OK;
}

bl_status bl_cpu_event_synchronize(bl_event *event)
{
    return wait_for_point(&((cpu_event *)event)->recorded);
}

bl_status bl_cpu_stamp_create(bl_device *device, bl_stamp **out)
{
    cpu_stamp *stamp = calloc(1, sizeof *stamp);
    if (!stamp) {
        *out = NULL;
        return BL_FAIL(BL_ENOMEM, "a stamp");
    }
    stamp->base.device = device;
    atomic_init(&stamp->reached_s, BL_NEVER_S);
    *out = &stamp->base;
    return BL_OK;
}

void bl_cpu_stamp_destroy(bl_stamp *stamp)
{
    free(stamp);
}

static bl_status stamp_task(bl_stream *stream, const void *args)
{
    cpu_stamp *stamp = *(cpu_stamp *const *)args;

    (void)stream;
    /* Relaxed: a stamp tells the time and orders nothing. */
    atomic_store_explicit(&stamp->reached_s, bl_now_s(), memory_order_relaxed);
    return BL_OK;
}

static bl_status stream_stamp(bl_stream *stream, bl_stamp *stamp)
{
    atomic_store_explicit(&((cpu_stamp *)stamp)->reached_s, BL_NEVER_S, memory_order_relaxed);
    give_task((cpu_stream *)stream, stamp_task, true, &stamp, sizeof stamp);
    return BL_OK;
}

double bl_cpu_stamp_seconds(const bl_stamp *stamp)
{
    return atomic_load_explicit(&((const cpu_stamp *)stamp)->reached_s, memory_order_relaxed);
}

double bl_cpu_stamp_elapsed_s(const bl_stamp *begin, const bl_stamp *end)
{
    double from_s = bl_cpu_stamp_seconds(begin), to_s = bl_cpu_stamp_seconds(end);
    return from_s > BL_NEVER_S && to_s > BL_NEVER_S ? to_s - from_s : 0;
}

/* ---- creation ---- */

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

static bl_status take_stream(bl_device *device, const char *name, bool is_inline, cpu_stream **out)
{
    *out = NULL;
    cpu_stream *stream = calloc(1, sizeof *stream);
    if (!stream) return BL_FAIL(BL_ENOMEM, "stream %s", name);
    stream->base = (bl_stream){.device = device, .backend = &stream_backend};
    stream->is_inline = is_inline;
    stream->guard = bl_cpu_device_guard(device);
    atomic_init(&stream->n_references, 1);
    atomic_init(&stream->failed_task, UINT64_MAX);
    bl_counter_init(&stream->given);
    bl_counter_init(&stream->done);
    *out = stream;
    return BL_OK;
}

bl_status bl_cpu_stream_create_inline(bl_device *device, bl_stream **out)
{
    cpu_stream *stream;

    *out = NULL;
    BL_TRY(take_stream(device, "inline", true, &stream));
    *out = &stream->base;
    return BL_OK;
}

bl_status bl_cpu_stream_create(bl_device *device, const char *name, bl_stream **out)
{
    cpu_stream *stream;

    *out = NULL;
    BL_TRY(take_stream(device, name, false, &stream));
    if (bl_thread_create(&stream->thread, stream_main, stream) != 0) {
        free(stream);
        return BL_FAIL(BL_ELIMIT, "stream %s: no more threads", name);
    }
    char thread_name[THREAD_NAME_BYTES] = {0};
    strncpy(thread_name, name, sizeof thread_name - 1);
    pthread_setname_np(stream->thread, thread_name);
    *out = &stream->base;
    return BL_OK;
}
