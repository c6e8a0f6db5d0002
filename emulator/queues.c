/* SPDX-License-Identifier: Apache-2.0 */
/* queues.c -- the hardware queues of a GPU: streams share them in turns, by the order in which they
 * were created. A queue holds the entries of its streams in the order of the calls. An entry leaves
 * it when it starts, which needs the end of its stream's last entry; a wait, for an event or a
 * value, and a host function leave it when they are over. Until then nothing behind them in the
 * queue starts, whatever its stream.
 *
 * Each stream keeps its thread (bl_stream): the thread waits for the entry's turn in the queue.
 * Without queues, and in the strict mode, whose calls wait on the caller's thread, there are no
 * turns. */
#include <pthread.h>
#include <stdio.h>
#include <string.h>

#include "base/counter.h"
#include "counts.h"
#include "queue.h"
#include "runtime.h"

struct emulated_fifo {
    _Atomic uint64_t n_given;
    bl_counter left; /* entries that have left the queue */
};

static emulated_fifo fifos[EMULATED_MAX_DEVICES][EMULATED_MAX_QUEUES];
static atomic_int n_streams[EMULATED_MAX_DEVICES];
static int n_queues;

void emulated_open_queues(void)
{
    char name[32];
    int n_connections;

    n_queues = emulated_read_queues(&n_connections);
    snprintf(name, sizeof name, "connections:%d", n_connections);
    emulated_count(name, 0);
    for (int d = 0; d < EMULATED_MAX_DEVICES; d++)
        for (int q = 0; q < EMULATED_MAX_QUEUES; q++) bl_counter_init(&fifos[d][q].left);
}

emulated_fifo *emulated_take_fifo(int device)
{
    if (n_queues == 0 || emulated_settings_get()->is_strict) return NULL;
    return &fifos[device][atomic_fetch_add(&n_streams[device], 1) % n_queues];
}

/* An entry's work, at most as long as is left of a task's arguments. */
typedef struct entry {
    emulated_fifo *fifo;
    uint64_t number;
    bool blocks;
    bl_stream_fn fn;
    _Alignas(16) unsigned char args[EMULATED_ENTRY_BYTES];
} entry;
_Static_assert(sizeof(entry) <= BL_STREAM_ARGS_BYTES, "an entry is a task");

static bl_status run_entry(bl_stream *stream, const void *args)
{
    const entry *e = args;

    bl_counter_wait(&e->fifo->left, e->number);
    if (!e->blocks) bl_counter_advance(&e->fifo->left, e->number + 1);
    bl_status st = e->fn(stream, e->args);
    if (e->blocks) bl_counter_advance(&e->fifo->left, e->number + 1);
    return st;
}

void emulated_give(cudaStream_t stream, bool blocks, bl_stream_fn fn, const void *args,
                   size_t n_bytes)
{
    emulated_fifo *fifo = stream->fifo;
    entry e = {.fifo = fifo, .blocks = blocks, .fn = fn};

    if (!fifo) {
        (void)bl_stream_call(stream->stream, fn, args, n_bytes);
        return;
    }
    if (n_bytes > sizeof e.args) emulated_fatal("an entry of %zu bytes", n_bytes);
    memcpy(e.args, args, n_bytes);
    e.number = atomic_fetch_add(&fifo->n_given, 1);
    (void)bl_stream_call(stream->stream, run_entry, &e, sizeof e);
}

/* ---- waits for events: the CPU stream's own, between two entries of which neither is one ---- */

static bl_status come_to_turn(bl_stream *stream, const void *args)
{
    const entry *e = args;
    (void)stream;
    bl_counter_wait(&e->fifo->left, e->number);
    return BL_OK;
}

static bl_status end_turn(bl_stream *stream, const void *args)
{
    const entry *e = args;
    (void)stream;
    bl_counter_advance(&e->fifo->left, e->number + 1);
    return BL_OK;
}

void emulated_give_wait(cudaStream_t stream, bl_event *event)
{
    entry e = {.fifo = stream->fifo};

    if (e.fifo) {
        e.number = atomic_fetch_add(&e.fifo->n_given, 1);
        (void)bl_stream_call(stream->stream, come_to_turn, &e, sizeof e);
    }
    (void)bl_stream_wait(stream->stream, event);
    if (e.fifo) (void)bl_stream_call(stream->stream, end_turn, &e, sizeof e);
}
