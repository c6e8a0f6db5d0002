/* SPDX-License-Identifier: Apache-2.0 */
/* wire.c -- what other threads call of a wire: opening and closing it, channels, and exchanges,
 * which the wire's thread (thread.c) carries out. */
#include "comm/wire/internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/thread.h"

static const double LEAVE_S = 5.0; /* how long a thread that hangs is waited for after an abort */
static const double LOOK_S = 1.0;

enum { MAX_GROUP = INT32_MAX / COMM_WIRE_CHANNELS - 1 };

void comm_wire_note_word(bl_wire *w, const comm_word *what)
{
    pthread_mutex_lock(&w->lock);
    if (w->first.error.status == BL_OK) w->first = *what;
    comm_sockets_wake(w->sockets);
    pthread_mutex_unlock(&w->lock);
}

void bl_wire_abort(bl_wire *w, const bl_error *error)
{
    comm_word own = {.origin = w->rank, .error = *error};
    comm_wire_note_word(w, &own);
}

void bl_wire_first_error(bl_wire *w, bl_error *out)
{
    pthread_mutex_lock(&w->lock);
    *out = w->first.error;
    pthread_mutex_unlock(&w->lock);
}

/* ---- the wire ---- */

static void wire_free(bl_wire *w)
{
    pthread_cond_destroy(&w->ended);
    pthread_mutex_destroy(&w->lock);
    comm_sockets_close(w->sockets);
    free(w->heard);
    free(w);
}

bl_status bl_wire_open(comm_sockets *sockets, int rank, int n_processes,
                       bl_wire_report report_error, bl_wire **out)
{
    bl_wire *w = calloc(1, sizeof *w);

    *out = NULL;
    if (!w) {
        comm_sockets_close(sockets);
        return BL_FAIL(BL_ENOMEM, "a job of %d processes", n_processes);
    }
    w->rank = rank;
    w->size = n_processes;
    w->report = report_error;
    w->sockets = sockets;
    w->next_group = 1;
    pthread_mutex_init(&w->lock, NULL);
    bl_condition_init(&w->ended);
    w->heard = calloc((size_t)n_processes, sizeof *w->heard);
    if (!w->heard || bl_thread_create(&w->thread, comm_wire_main, w) != 0) {
        bl_status st = w->heard ? BL_ELIMIT : BL_ENOMEM;
        wire_free(w);
        return BL_FAIL(st, "a job of %d processes%s", n_processes,
                       st == BL_ELIMIT ? ": no more threads" : "");
    }
    *out = w;
    return BL_OK;
}

/* ---- threads that wait for the wire's thread watch it ---- */

typedef struct thread_watch {
    uint_fast64_t n_rounds;
    double since_s;
    comm_round round;
} thread_watch;

static void begin_watch(const bl_wire *w, thread_watch *watch)
{
    watch->n_rounds = atomic_load(&w->n_rounds);
    watch->since_s = watch->round.at_s = bl_now_s();
}

/* The thread makes rounds twenty times per second, whatever it waits for. Of a process that was
 * stopped no thread did anything. */
static bool is_stuck(const bl_wire *w, thread_watch *watch)
{
    static const double SLACK_S = 2.0;
    double now_s = bl_now_s();
    uint_fast64_t n_rounds = atomic_load(&w->n_rounds);

    if (comm_round_begin(&watch->round, now_s) || n_rounds != watch->n_rounds)
        watch->since_s = now_s;
    watch->n_rounds = n_rounds;
    return w->deadline_s > 0 && now_s - watch->since_s > w->deadline_s + SLACK_S;
}

/* Under the lock, which it gives back meanwhile. */
static void give_up(bl_wire *w)
{
    bool is_first = w->first.error.status == BL_OK;

    if (is_first) {
        w->first = (comm_word){.origin = w->rank};
        bl_error_save(
            &w->first.error,
            BL_FAIL(BL_ERANK,
                    "rank %d: the thread that talks to the others has hung for more than %.1f s",
                    w->rank, w->deadline_s));
    }
    bl_error error = w->first.error;
    pthread_mutex_unlock(&w->lock);
    if (is_first) w->report(&error); /* or it hangs in that */
    if (w->leave) w->leave(error.status);
    pthread_mutex_lock(&w->lock);
}

static bool is_over(const bl_wire *w)
{
    return w->stage >= COMM_WIRE_DOWN;
}

/* By a monotonic clock: one that jumps would have the process leave before its word is sent. */
static bool ends_in_time(bl_wire *w)
{
    double until_s = bl_now_s() + LEAVE_S, left_s;

    pthread_mutex_lock(&w->lock);
    while (!is_over(w) && (left_s = until_s - bl_now_s()) > 0)
        (void)bl_condition_wait(&w->ended, &w->lock, left_s);
    bool is_in_time = is_over(w);
    pthread_mutex_unlock(&w->lock);
    return is_in_time;
}

/* False: the thread hangs. */
static bool wait_for_end(bl_wire *w)
{
    bool hangs = false;
    thread_watch watch;

    begin_watch(w, &watch);
    pthread_mutex_lock(&w->lock);
    while (!is_over(w) && !hangs) {
        (void)bl_condition_wait(&w->ended, &w->lock, LOOK_S);
        if ((hangs = !is_over(w) && is_stuck(w, &watch))) give_up(w);
    }
    pthread_mutex_unlock(&w->lock);
    return !hangs;
}

/* *is_joined: the thread is gone, and the wire may be freed. */
static bl_status end_wire(bl_wire *w, bool *is_joined)
{
    *is_joined = false;
    pthread_mutex_lock(&w->lock);
    w->is_closing = true;
    comm_sockets_wake(w->sockets);
    bl_status first = w->first.error.status;
    pthread_mutex_unlock(&w->lock);
    if (first != BL_OK && !ends_in_time(w))
        return first; /* it hangs and still uses the wire; the process is about to exit */
    if (!wait_for_end(w)) return BL_ERANK;
    pthread_join(w->thread, NULL);
    *is_joined = true;
    return w->stage == COMM_WIRE_DOWN ? w->verdict.error.status : BL_OK;
}

bl_status bl_wire_end(bl_wire *w)
{
    bool is_joined;
    return end_wire(w, &is_joined);
}

bl_status bl_wire_close(bl_wire *w)
{
    bool is_joined;
    bl_status st = end_wire(w, &is_joined);
    if (is_joined) wire_free(w);
    return st;
}

int bl_wire_rank(const bl_wire *w)
{
    return w->rank;
}

int bl_wire_size(const bl_wire *w)
{
    return w->size;
}

void bl_wire_set_deadline(bl_wire *w, double deadline_s)
{
    pthread_mutex_lock(&w->lock);
    w->deadline_s = deadline_s;
    pthread_mutex_unlock(&w->lock);
}

void bl_wire_set_leave(bl_wire *w, void (*leave)(bl_status st))
{
    pthread_mutex_lock(&w->lock);
    w->leave = leave;
    pthread_mutex_unlock(&w->lock);
}

int bl_wire_propose_group(bl_wire *w)
{
    pthread_mutex_lock(&w->lock);
    int group = w->next_group;
    pthread_mutex_unlock(&w->lock);
    return group;
}

void bl_wire_take_group(bl_wire *w, int group)
{
    pthread_mutex_lock(&w->lock);
    w->next_group = group + 1;
    pthread_mutex_unlock(&w->lock);
}

uint64_t bl_wire_next_call(bl_wire *w)
{
    pthread_mutex_lock(&w->lock);
    uint64_t number = ++w->n_calls;
    pthread_mutex_unlock(&w->lock);
    return number;
}

/* ---- channels ---- */

bl_status bl_wire_channel_create(bl_wire *w, int group, int channel_idx, int size,
                                 const int *job_ranks, bl_wire_channel **out)
{
    bl_wire_channel *channel = calloc(1, sizeof *channel);
    size_t n = 2 * (size_t)size;

    *out = NULL;
    if (!channel) return BL_FAIL(BL_ENOMEM, "a channel of %d ranks", size);
    bl_condition_init(&channel->ended);
    channel->wire = w;
    channel->size = size;
    channel->state = calloc(n, sizeof *channel->state);
    channel->job_ranks = calloc((size_t)size, sizeof *channel->job_ranks);
    if (!channel->state || !channel->job_ranks) {
        bl_wire_channel_destroy(channel);
        return BL_FAIL(BL_ENOMEM, "a channel of %d ranks", size);
    }
    memcpy(channel->job_ranks, job_ranks, (size_t)size * sizeof *job_ranks);
    if (group > MAX_GROUP) {
        bl_wire_channel_destroy(channel);
        return BL_FAIL(BL_ELIMIT, "more than %d communicators", MAX_GROUP);
    }
    channel->tag = COMM_WIRE_TAG_CONTROL + group * COMM_WIRE_CHANNELS + channel_idx;
    *out = channel;
    return BL_OK;
}

void bl_wire_channel_destroy(bl_wire_channel *channel)
{
    if (!channel) return;
    pthread_cond_destroy(&channel->ended);
    free(channel->state);
    free(channel->job_ranks);
    free(channel);
}

/* Under the lock. */
static void give_exchange(bl_wire_channel *channel)
{
    bl_wire_channel **end = &channel->wire->given;
    while (*end) end = &(*end)->next;
    *end = channel;
    channel->next = NULL;
    channel->n_left = channel->n_transfers;
    channel->is_begun = channel->is_done = channel->has_moved = false;
    channel->is_under_way = true;
    channel->error.status = BL_OK;
    comm_sockets_wake(channel->wire->sockets);
}

bl_status bl_wire_channel_exchange(bl_wire_channel *channel, const bl_comm_call *call,
                                   bool is_meeting, const bl_transfer *transfers, int n_transfers)
{
    bl_wire *w = channel->wire;
    bool hangs = false;
    thread_watch watch;

    pthread_mutex_lock(&w->lock);
    bool is_well = w->first.error.status == BL_OK;
    channel->step = is_meeting ? 0 : channel->step + 1; /* alike on all ranks: comm_wait */
    if (is_well && n_transfers > 0) {
        channel->call = call;
        channel->is_meeting = is_meeting;
        channel->transfers = transfers;
        channel->n_transfers = n_transfers;
        give_exchange(channel);
        begin_watch(w, &watch);
        while (channel->is_under_way && !hangs) {
            (void)bl_condition_wait(&channel->ended, &w->lock, LOOK_S);
            if ((hangs = channel->is_under_way && is_stuck(w, &watch))) give_up(w);
        }
        is_well = channel->is_done;
    }
    bl_error first = w->first.error;
    pthread_mutex_unlock(&w->lock);
    if (is_well) return BL_OK;
    if (hangs) return bl_error_restore(&first);
    if (n_transfers > 0 && channel->error.status != BL_OK) return bl_error_restore(&channel->error);
    return BL_FAIL(BL_ECANCELED, "canceled: %s", first.text);
}
