/* SPDX-License-Identifier: Apache-2.0 */
/* Failures between GPUs in processes. The ranks end as those of a training do: nccl_ranks.c. */
#include <unistd.h>

#include "base/clock.h"
#include "nccl_cases.h"

enum { BYTES = 4096, N_ROUNDS = 30 };

static const double PATIENCE_S = 60; /* for all ranks to come */

/* Where copy engines are asked for it is a window, and is freed as a window after whatever
 * happened. */
typedef struct room {
    char *memory;
} room;

static bl_status room_open(nccl_self *self, room *r)
{
    return bl_comm_alloc(self->comm, self->device, (size_t)NCCL_RANKS_MAX * BYTES, "room",
                         (void **)&r->memory);
}

/* After a failure other ranks, and the stream, may still use the memory: the job is aborted before
 * it is freed. */
static bl_status room_close(nccl_self *self, room *r, bl_status st)
{
    bl_error error;

    bl_error_save(&error, st);
    if (st != BL_OK) bl_comm_abort(self->comm, &error);
    (void)bl_stream_synchronize(self->stream);
    bl_comm_free(self->comm, self->device, r->memory);
    return bl_error_restore(&error);
}

static bl_status gather(nccl_self *self, bl_comm *comm, bl_stream *stream, const room *r,
                        size_t bytes)
{
    return bl_comm_all_gather(comm, stream, r->memory + (size_t)self->rank * bytes, r->memory,
                              bytes);
}

/* A wait that an abort ends must not look well. */
static bl_status finish(nccl_self *self, bl_status st)
{
    return st == BL_OK ? bl_stream_synchronize(self->stream) : st;
}

bl_status nccl_fail_other_kind(nccl_self *self)
{
    room r;
    BL_TRY(room_open(self, &r));
    bl_status st = self->rank == 1 ? bl_comm_broadcast(self->comm, self->stream, r.memory, BYTES,
                                                       self->n_ranks - 1)
                                   : gather(self, self->comm, self->stream, &r, BYTES);
    return room_close(self, &r, finish(self, st));
}

bl_status nccl_fail_other_size(nccl_self *self)
{
    room r;
    BL_TRY(room_open(self, &r));
    bl_status st = gather(self, self->comm, self->stream, &r, self->rank == 1 ? BYTES - 1 : BYTES);
    return room_close(self, &r, finish(self, st));
}

bl_status nccl_fail_other_label(nccl_self *self)
{
    room r;
    BL_TRY(room_open(self, &r));
    bl_comm_set_label(self->comm, "layer", self->rank);
    bl_status st = gather(self, self->comm, self->stream, &r, BYTES);
    return room_close(self, &r, finish(self, st));
}

bl_status nccl_fail_other_comm(nccl_self *self)
{
    bl_comm *other;
    bl_error error;
    room r;

    BL_TRY(bl_comm_split(self->comm, 0, &other));
    BL_TRY(room_open(self, &r));
    bl_comm *first = self->rank == 1 ? other : self->comm;
    bl_comm *second = self->rank == 1 ? self->comm : other;
    bl_status st = gather(self, first, self->stream, &r, BYTES);
    if (st == BL_OK) st = gather(self, second, self->stream, &r, BYTES);
    st = room_close(self, &r, finish(self, st));
    bl_error_save(&error, st);
    bl_comm_destroy(other);
    return bl_error_restore(&error);
}

bl_status nccl_fail_other_trust(nccl_self *self)
{
    room r;
    BL_TRY(room_open(self, &r));
    bl_status st = BL_OK;
    if (self->rank != 1) st = gather(self, self->comm, self->stream, &r, BYTES);
    if (st == BL_OK) st = bl_comm_trust_order(self->comm);
    return room_close(self, &r, finish(self, st));
}

static void wait_for_failure(nccl_self *self)
{
    bl_error failure = {.status = BL_OK};
    while (failure.status == BL_OK) {
        usleep(1000);
        bl_comm_first_error(self->comm, &failure);
    }
}

bl_status nccl_fail_away(nccl_self *self)
{
    room r;
    BL_TRY(room_open(self, &r));
    bl_status st = BL_OK;
    bl_comm_set_label(self->comm, "layer", 7);
    if (self->rank == 1)
        wait_for_failure(self);
    else
        st = gather(self, self->comm, self->stream, &r, BYTES);
    st = finish(self, st);
    if (self->rank != 1 && st == BL_OK) nccl_mark(self, 2); /* lost data passes for good */
    return room_close(self, &r, st);
}

/* Rank 3 does not come to the gather of its pair; the pair of ranks 0 and 1 goes on to what all do,
 * and waits there for rank 2. */
bl_status nccl_fail_away_in_pair(nccl_self *self)
{
    bl_comm *pair;
    bl_error error;
    room r;

    BL_TRY(bl_comm_split(self->comm, self->rank / 2, &pair));
    BL_TRY(room_open(self, &r));
    bl_status st = BL_OK;
    bl_comm_set_label(pair, "layer", 7);
    if (self->rank == 3)
        wait_for_failure(self);
    else
        st = bl_comm_all_gather(pair, self->stream, r.memory + (size_t)(self->rank % 2) * BYTES,
                                r.memory, BYTES);
    if (self->rank != 3 && st == BL_OK) st = bl_comm_barrier(self->comm, self->stream);
    st = room_close(self, &r, finish(self, st));
    bl_error_save(&error, st);
    bl_comm_destroy(pair);
    return bl_error_restore(&error);
}

bl_status nccl_fail_own(nccl_self *self)
{
    room r;
    BL_TRY(room_open(self, &r));
    bl_status st;
    if (self->rank == 1) {
        nccl_await_mark(self, 0, self->n_ranks - 1);
        st = BL_FAIL(BL_ENUMERIC, "a loss of nan");
    } else {
        st = gather(self, self->comm, self->stream, &r, BYTES);
        nccl_mark(self, 0);
    }
    return room_close(self, &r, finish(self, st));
}

bl_status nccl_fail_idle(nccl_self *self)
{
    nccl_mark(self, 0);
    wait_for_failure(self);
    return finish(self, BL_OK);
}

bl_status nccl_fail_own_idle(nccl_self *self)
{
    if (self->rank != 1) return nccl_fail_idle(self);
    nccl_await_mark(self, 1, 1);
    return BL_FAIL(BL_ENUMERIC, "a loss of nan");
}

bl_status nccl_rounds(nccl_self *self)
{
    room r;
    BL_TRY(room_open(self, &r));
    bl_status st = BL_OK;
    nccl_mark(self, 0);
    for (int i = 0; i < N_ROUNDS && st == BL_OK; i++) {
        st = gather(self, self->comm, self->stream, &r, BYTES);
        if (st == BL_OK)
            st = bl_comm_reduce_scatter_f32(self->comm, self->stream, (float *)(void *)r.memory,
                                            (float *)(void *)(r.memory + 7 * BYTES), 100);
        if (st == BL_OK && i % 3 == 0)
            st = bl_comm_all_reduce_f32(self->comm, self->stream, (float *)(void *)r.memory, 3);
        if (st == BL_OK && i % 4 == 0) st = bl_stream_synchronize(self->stream);
    }
    return room_close(self, &r, finish(self, st));
}

bl_status nccl_rounds_late(nccl_self *self)
{
    nccl_await_mark(self, 1, 1);
    return nccl_rounds(self);
}

bl_status nccl_rounds_of_two(nccl_self *self)
{
    bl_comm *other;
    bl_stream *beside;
    bl_error error;
    room r;

    BL_TRY(bl_comm_split(self->comm, 0, &other));
    BL_TRY(bl_stream_create(self->device, "beside", &beside));
    BL_TRY(room_open(self, &r));
    room aside = {.memory = r.memory + (size_t)NCCL_RANKS_MAX / 2 * BYTES}; /* for up to 4 ranks */
    bl_status st = BL_OK;
    for (int i = 0; i < N_ROUNDS && st == BL_OK; i++) {
        st = gather(self, self->comm, self->stream, &r, BYTES);
        if (st == BL_OK) st = gather(self, other, self->stream, &r, BYTES);
        if (st == BL_OK && i % 4 == 0) st = bl_stream_synchronize(self->stream);
        if (st == BL_OK) st = gather(self, other, beside, &aside, BYTES);
        if (st == BL_OK && i % 4 == 0) st = bl_stream_synchronize(beside);
    }
    st = finish(self, st);
    bl_error_save(&error, st);
    if (st != BL_OK) bl_comm_abort(self->comm, &error);
    bl_stream_destroy(beside);
    st = room_close(self, &r, bl_error_restore(&error));
    bl_error_save(&error, st);
    bl_comm_destroy(other);
    return bl_error_restore(&error);
}

bl_status nccl_pause(nccl_self *self)
{
    room r;
    BL_TRY(room_open(self, &r));
    bl_status st = BL_OK;
    if (self->rank == 0) nccl_await_mark(self, 1, 1);
    st = gather(self, self->comm, self->stream, &r, BYTES);
    nccl_mark(self, 0);
    return room_close(self, &r, finish(self, st));
}

/* ---- more launches under way than a watch has room for at its start ---- */

typedef struct crowd {
    room r;
    bl_stream *beside; /* a stream's queue alone would not hold them all */
    nccl_self *self;
    int n; /* launches of this rank */
    bool is_slow;
    bool is_held_on; /* by all ranks, until the job fails */
} crowd;

/* Until all ranks have launched all that they launch, or the job fails. */
static bl_status hold_task(bl_stream *stream, const void *args)
{
    const crowd *c = *(crowd *const *)args;
    const nccl_self *self = c->self;
    bl_error failure = {.status = BL_OK};
    double end_s = bl_now_s() + PATIENCE_S;

    (void)stream;
    while (failure.status == BL_OK &&
           (c->is_held_on || atomic_load(&self->board->marks[0]) < self->n_ranks)) {
        if (bl_now_s() > end_s) return BL_FAIL(BL_EINTERNAL, "not all ranks have launched");
        usleep(1000);
        bl_comm_first_error(self->comm, &failure);
    }
    return bl_error_restore(&failure);
}

static bl_status pause_task(bl_stream *stream, const void *args)
{
    (void)stream;
    usleep(*(const unsigned *)args);
    return BL_OK;
}

/* Launches the rest of them behind a stream that is held up, so that all are under way at once. */
static bl_status launch_crowd(nccl_self *self, crowd *c)
{
    const unsigned pause_us = 1000 * NCCL_CROWD_PAUSE_MS;
    room aside = {.memory = c->r.memory + (size_t)NCCL_RANKS_MAX / 2 * BYTES}; /* for up to 4 */

    for (int i = 0; i < c->n; i++) {
        bool is_held = i < NCCL_CROWD_FIRST + NCCL_CROWD_HELD;
        if (i == NCCL_CROWD_FIRST) {
            BL_TRY(bl_stream_synchronize(self->stream)); /* the ring does not begin at its start */
            BL_TRY(bl_stream_call(self->stream, hold_task, &c, sizeof c));
        }
        if (c->is_slow && i >= NCCL_CROWD - NCCL_CROWD_PAUSES)
            BL_TRY(bl_stream_call(c->beside, pause_task, &pause_us, sizeof pause_us));
        bl_comm_set_label(self->comm, "layer", i);
        BL_TRY(gather(self, self->comm, is_held ? self->stream : c->beside,
                      is_held ? &c->r : &aside, BYTES));
    }
    nccl_mark(self, 0);
    return BL_OK;
}

static bl_status run_crowd(crowd *c)
{
    nccl_self *self = c->self;
    bl_error error;

    BL_TRY(bl_stream_create(self->device, "beside", &c->beside));
    bl_status st = room_open(self, &c->r);
    if (st == BL_OK) st = launch_crowd(self, c);
    if (st == BL_OK && c->n < NCCL_CROWD) wait_for_failure(self);
    if (st == BL_OK) st = bl_stream_synchronize(c->beside);
    st = finish(self, st);
    if (!c->is_slow && c->n == NCCL_CROWD && st == BL_OK)
        nccl_mark(self, 2); /* lost data passes for good */
    bl_error_save(&error, st);
    if (st != BL_OK) bl_comm_abort(self->comm, &error);
    bl_stream_destroy(c->beside);
    return room_close(self, &c->r, bl_error_restore(&error));
}

bl_status nccl_crowd_slow(nccl_self *self)
{
    return run_crowd(&(crowd){.self = self, .n = NCCL_CROWD, .is_slow = true});
}

bl_status nccl_fail_crowd_first(nccl_self *self)
{
    return run_crowd(&(crowd){.self = self, .n = NCCL_CROWD, .is_held_on = true});
}

bl_status nccl_fail_crowd_last(nccl_self *self)
{
    return run_crowd(&(crowd){.self = self, .n = NCCL_CROWD - (self->rank == 1)});
}
