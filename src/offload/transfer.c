/* SPDX-License-Identifier: Apache-2.0 */
/* transfer.c -- the legs of a move: which stream, which memory, in which order. */
#include "offload/transfer.h"

#include "device/model.h"

bl_status bl_mover_open(bl_mover *mover)
{
    return bl_event_create(mover->device, &mover->internal.between);
}

void bl_mover_close(bl_mover *mover)
{
    bl_event_destroy(mover->internal.between);
    mover->internal.between = NULL;
}

bool bl_transfer_is_simulated(const bl_device *device)
{
    return bl_device_model(device) != NULL;
}

bl_status bl_transfer_open_reader(const bl_device *device, const bl_reader_options *options,
                                  bl_io_files *files, bl_reader **out)
{
    *out = NULL;
    return bl_transfer_is_simulated(device) ? BL_OK : bl_reader_create(options, files, out);
}

bl_tier bl_transfer_reach(bl_device_kind kind, bl_tier tier)
{
    return tier == BL_TIER_DEVICE && kind == BL_DEVICE_CPU ? BL_TIER_HOST : tier;
}

/* ---- which way ---- */

/* The legs of a move: NULL streams have none. */
typedef struct legs {
    bl_stream *host, *copy;
    void *copy_from, *copy_to;
    bool is_write; /* the copy is before the host's leg */
    bl_stream *first, *last;
} legs;

void *bl_transfer_host_memory(const bl_move *t)
{
    if (t->through) return t->through;
    return t->from.tier == BL_TIER_DISK ? t->to.memory : t->from.memory;
}

static bl_stream *host_stream(const bl_mover *m)
{
    return m->disk ? m->disk : m->in;
}

static bl_stream *copy_stream(const bl_mover *m, const bl_place *to)
{
    return to->tier == BL_TIER_DEVICE ? m->in : m->out;
}

static legs legs_of(const bl_mover *m, const bl_move *t)
{
    bool is_read = t->from.tier == BL_TIER_DISK, is_write = t->to.tier == BL_TIER_DISK;
    legs l = {.copy_from = is_read ? bl_transfer_host_memory(t) : t->from.memory,
              .copy_to = is_write ? bl_transfer_host_memory(t) : t->to.memory,
              .is_write = is_write};

    if (is_read || is_write || t->is_checked) l.host = host_stream(m);
    if (l.copy_from != l.copy_to) l.copy = copy_stream(m, &t->to);
    l.first = is_write || !l.host ? l.copy : l.host;
    l.last = is_write || !l.copy ? l.host : l.copy;
    if (!l.first) l.first = l.last;
    return l;
}

/* ---- the host's leg ---- */

/* Begins a read or write of n_bytes; `memory` is the host's. */
static bl_status submit(const bl_mover *m, const bl_place *from, const bl_place *to, void *memory,
                        size_t n_bytes, bl_io_read *io, bl_reader **reader)
{
    bool is_write = to->tier == BL_TIER_DISK;
    const bl_place *disk = is_write ? to : from;

    *reader = m->reader[disk->file];
    *io = (bl_io_read){.offset_bytes = disk->offset_bytes, .n_bytes = n_bytes, .dst = memory};
    return is_write ? bl_reader_submit_write(*reader, io) : bl_reader_submit(*reader, io);
}

typedef struct leg_args {
    bl_mover *mover;
    int slot;
    bl_move move;
} leg_args;
_Static_assert(sizeof(leg_args) <= BL_STREAM_ARGS_BYTES, "arguments of a task");

/* IDLE -> BEGUN */
static bl_status submit_task(bl_stream *stream, const void *args)
{
    const leg_args *a = args;
    const bl_move *t = &a->move;

    (void)stream;
    return submit(a->mover, &t->from, &t->to, bl_transfer_host_memory(t), t->n_bytes,
                  &a->mover->internal.io[a->slot], &a->mover->internal.reader[a->slot]);
}

/* A move from host memory has no read or write: only `arrived` checks it. */
static bl_status check_task(bl_stream *stream, const void *args)
{
    const leg_args *a = args;
    (void)stream;
    return a->mover->arrived ? a->mover->arrived(a->mover->user, &a->move, BL_OK) : BL_OK;
}

/* BEGUN -> IDLE */
static bl_status arrive_task(bl_stream *stream, const void *args)
{
    const leg_args *a = args;
    bl_mover *m = a->mover;
    bl_status st = bl_reader_wait(m->internal.reader[a->slot], &m->internal.io[a->slot]);

    (void)stream;
    return m->arrived ? m->arrived(m->user, &a->move, st) : st;
}

static bl_status write_task(bl_stream *stream, const void *args)
{
    BL_TRY(submit_task(stream, args));
    return arrive_task(stream, args);
}

static bl_status queue_host(bl_mover *m, int slot, const bl_move *t, const legs *l)
{
    const leg_args args = {m, slot, *t};
    bl_timeline *timeline = t->name ? m->timeline : NULL;
    int span;

    if (!l->host) return BL_OK;
    BL_TRY(bl_timeline_begin(timeline, BL_LANE_DISK, t->name, t->unit, t->item, l->host, &span));
    if (l->is_write && bl_transfer_is_simulated(m->device))
        BL_TRY(bl_model_stream_write(l->host, t->n_bytes));
    else if (t->from.tier == BL_TIER_DISK)
        BL_TRY(bl_stream_end_read(l->host, slot, arrive_task, &args, sizeof args));
    else
        BL_TRY(bl_stream_call(l->host, l->is_write ? write_task : check_task, &args, sizeof args));
    return bl_timeline_end(timeline, span, l->host, (int64_t)t->n_bytes);
}

/* ---- queued ---- */

bl_status bl_transfer_order(bl_stream *stream, bl_stream *before, bl_event *event)
{
    BL_TRY(bl_event_record(event, before));
    return bl_stream_wait(stream, event);
}

static bl_status queue_copy(bl_mover *m, const bl_move *t, const legs *l)
{
    bl_timeline *timeline = t->name ? m->timeline : NULL;
    int span;

    if (!l->copy) return BL_OK;
    BL_TRY(bl_timeline_begin(timeline, t->lane, t->name, t->unit, t->item, l->copy, &span));
    BL_TRY(bl_stream_copy(l->copy, l->copy_to, l->copy_from, t->n_bytes));
    return bl_timeline_end(timeline, span, l->copy, (int64_t)t->n_bytes);
}

bl_status bl_transfer_begin(bl_mover *m, int slot, const bl_move *t)
{
    const leg_args args = {m, slot, *t};

    if (t->from.tier != BL_TIER_DISK) return BL_OK;
    return bl_stream_begin_read(host_stream(m), slot, t->n_bytes, submit_task, &args, sizeof args);
}

bl_status bl_transfer_finish(bl_mover *m, int slot, const bl_move *t)
{
    const legs l = legs_of(m, t);

    BL_TRY(l.is_write ? queue_copy(m, t, &l) : queue_host(m, slot, t, &l));
    if (l.first != l.last) BL_TRY(bl_transfer_order(l.last, l.first, m->internal.between));
    return l.is_write ? queue_host(m, slot, t, &l) : queue_copy(m, t, &l);
}

bl_status bl_transfer_queue(bl_mover *m, const bl_move *t, bl_stream *before, bl_event *event)
{
    const legs l = legs_of(m, t);

    if (before) BL_TRY(bl_transfer_order(l.first, before, event));
    BL_TRY(bl_transfer_begin(m, 0, t));
    BL_TRY(bl_transfer_finish(m, 0, t));
    return bl_event_record(event, l.last);
}

/* ---- in a task of a host stream ---- */

bl_status bl_transfer_add(bl_mover *m, bl_transfer_batch *batch, const bl_place *from,
                          const bl_place *to, size_t n_bytes)
{
    bool is_write = to->tier == BL_TIER_DISK;

    if (!is_write && from->tier != BL_TIER_DISK) {
        batch->copying = copy_stream(m, to);
        BL_TRY(bl_stream_copy(batch->copying, to->memory, from->memory, n_bytes));
        return batch->copied ? bl_event_record(batch->copied, batch->copying) : BL_OK;
    }
    if (batch->n == BL_BATCH_MOVES)
        return BL_FAIL(BL_EINTERNAL, "more than %d moves at once", BL_BATCH_MOVES);
    BL_TRY(submit(m, from, to, is_write ? from->memory : to->memory, n_bytes, &batch->io[batch->n],
                  &batch->reader[batch->n]));
    batch->n++;
    return BL_OK;
}

bl_status bl_transfer_wait(bl_transfer_batch *batch)
{
    bl_status st = !batch->copying ? BL_OK
                   : batch->copied ? bl_event_synchronize(batch->copied)
                                   : bl_stream_synchronize(batch->copying);

    for (int i = 0; i < batch->n; i++) {
        bl_status ended = bl_reader_wait(batch->reader[i], &batch->io[i]);
        if (st == BL_OK) st = ended;
    }
    batch->copying = NULL;
    batch->n = 0;
    return st;
}

bl_status bl_transfer_now(bl_mover *m, const bl_place *from, const bl_place *to, size_t n_bytes)
{
    bl_transfer_batch batch = {0};

    BL_TRY(bl_transfer_add(m, &batch, from, to, n_bytes));
    return bl_transfer_wait(&batch);
}
