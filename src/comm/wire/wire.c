/* SPDX-License-Identifier: Apache-2.0 */
/* The side of the wire that other threads see. */
#include "comm/wire/internal.h"

#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/clock.h"
#include "base/thread.h"

enum { LEAVE_S = 5 }; /* how long a thread that hangs is waited for after an abort */

void bl_wire_note_word(bl_wire *w, const bl_word *what)
{
    pthread_mutex_lock(&w->lock);
    if (w->first.error.status == BL_OK) w->first = *what;
    w->transport->wake(w);
    pthread_mutex_unlock(&w->lock);
}

void bl_wire_abort(bl_wire *w, const bl_error *error)
{
    bl_word own = {.origin = w->rank, .error = *error};
    bl_wire_note_word(w, &own);
}

void bl_wire_first_error(bl_wire *w, bl_error *out)
{
    pthread_mutex_lock(&w->lock);
    *out = w->first.error;
    pthread_mutex_unlock(&w->lock);
}

/* ---- the wire ---- */

/* Its waits end by CLOCK_MONOTONIC. */
static void init_condition(pthread_cond_t *condition)
{
    pthread_condattr_t attributes;
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC);
    pthread_cond_init(condition, &attributes);
    pthread_condattr_destroy(&attributes);
}

static void wire_free(bl_wire *w)
{
    pthread_cond_destroy(&w->ready);
    pthread_mutex_destroy(&w->lock);
    w->transport->free(w->state);
    free(w->heard);
    free(w);
}

bl_status bl_wire_open(const bl_wire_transport *transport, void *state, int rank, int n_processes,
                       bl_wire_report report_error, bl_wire **out)
{
    bl_wire *w = calloc(1, sizeof *w);

    *out = NULL;
    if (!w) {
        transport->free(state);
        return BL_FAIL(BL_ENOMEM, "a job of %d processes", n_processes);
    }
    w->rank = rank;
    w->size = n_processes;
    w->report = report_error;
    w->transport = transport;
    w->state = state;
    w->next_group = 1;
    pthread_mutex_init(&w->lock, NULL);
    init_condition(&w->ready);
    w->heard = calloc((size_t)n_processes, sizeof *w->heard);
    if (!w->heard || bl_thread_create(&w->thread, bl_wire_main, w) != 0) {
        bl_status st = w->heard ? BL_ELIMIT : BL_ENOMEM;
        wire_free(w);
        return BL_FAIL(st, "a job of %d processes%s", n_processes,
                       st == BL_ELIMIT ? ": no more threads" : "");
    }
    pthread_mutex_lock(&w->lock);
    while (!w->is_ready) pthread_cond_wait(&w->ready, &w->lock);
    pthread_mutex_unlock(&w->lock);
    if (w->start_error.status != BL_OK) {
        bl_error error = w->start_error;
        pthread_join(w->thread, NULL);
        wire_free(w);
        return bl_error_restore(&error);
    }
    *out = w;
    return BL_OK;
}

/* ---- whoever waits for the wire's thread watches it ---- */

typedef struct thread_watch {
    uint_fast64_t n_rounds;
    double since_s, looked_s;
} thread_watch;

static void begin_watch(const bl_wire *w, thread_watch *watch)
{
    watch->n_rounds = atomic_load(&w->n_rounds);
    watch->since_s = watch->looked_s = bl_now_s();
}

/* The thread makes rounds twenty times per second, whatever it waits for. Of a process that was stopped no thread did anything. */
static bool is_stuck(const bl_wire *w, thread_watch *watch)
{
    static const double ABSENT_S = 2.0, SLACK_S = 2.0;
    double now_s = bl_now_s();
    uint_fast64_t n_rounds = atomic_load(&w->n_rounds);

    if (n_rounds != watch->n_rounds || now_s - watch->looked_s > ABSENT_S) watch->since_s = now_s;
    watch->n_rounds = n_rounds;
    watch->looked_s = now_s;
    return w->deadline_s > 0 && now_s - watch->since_s > w->deadline_s + SLACK_S;
}

/* Under the lock, which it gives back meanwhile. */
static void give_up(bl_wire *w)
{
    bool is_first = w->first.error.status == BL_OK;

    if (is_first) {
        w->first = (bl_word){.origin = w->rank};
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

/* Waits on the condition for a second at most. Under the lock. */
static void wait_a_while(bl_wire *w, pthread_cond_t *condition)
{
    struct timespec until;

    clock_gettime(CLOCK_MONOTONIC, &until);
    until.tv_sec++;
    (void)pthread_cond_timedwait(condition, &w->lock, &until);
}

/* By a clock that nobody sets: one that jumps would have the process leave before its word is out. */
static bool ends_in_time(bl_wire *w)
{
    struct timespec limit;
    int code = 0;

    clock_gettime(CLOCK_MONOTONIC, &limit);
    limit.tv_sec += LEAVE_S;
    pthread_mutex_lock(&w->lock);
    while (!w->is_over && code == 0) code = pthread_cond_timedwait(&w->ready, &w->lock, &limit);
    bool is_over = w->is_over;
    pthread_mutex_unlock(&w->lock);
    return is_over;
}

/* False: the thread hangs. */
static bool wait_for_end(bl_wire *w)
{
    bool hangs = false;
    thread_watch watch;

    begin_watch(w, &watch);
    pthread_mutex_lock(&w->lock);
    while (!w->is_over && !hangs) {
        wait_a_while(w, &w->ready);
        if ((hangs = !w->is_over && is_stuck(w, &watch))) give_up(w);
    }
    pthread_mutex_unlock(&w->lock);
    return !hangs;
}

bl_status bl_wire_end(bl_wire *w)
{
    pthread_mutex_lock(&w->lock);
    w->is_closing = true;
    w->transport->wake(w);
    bl_status first = w->first.error.status;
    pthread_mutex_unlock(&w->lock);
    if (first != BL_OK && !ends_in_time(w))
        return first; /* it hangs and still uses the wire; the process is about to exit */
    if (!wait_for_end(w)) return BL_ERANK;
    pthread_join(w->thread, NULL);
    w->is_joined = true;
    return w->is_down ? w->verdict.error.status : BL_OK;
}

bl_status bl_wire_close(bl_wire *w)
{
    bl_status st = bl_wire_end(w);
    if (w->is_joined) wire_free(w);
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
    init_condition(&channel->ended);
    channel->wire = w;
    channel->size = size;
    channel->requests = w->transport->requests_create(2 * size);
    channel->finished = calloc(n, sizeof *channel->finished);
    channel->state = calloc(n, sizeof *channel->state);
    channel->job_ranks = calloc((size_t)size, sizeof *channel->job_ranks);
    if (!channel->requests || !channel->finished || !channel->state || !channel->job_ranks) {
        bl_wire_channel_destroy(channel);
        return BL_FAIL(BL_ENOMEM, "a channel of %d ranks", size);
    }
    memcpy(channel->job_ranks, job_ranks, (size_t)size * sizeof *job_ranks);
    if (group > w->max_tag / BL_WIRE_CHANNELS - 1) {
        bl_wire_channel_destroy(channel);
        return BL_FAIL(BL_ELIMIT, "more than %d communicators", w->max_tag / BL_WIRE_CHANNELS - 1);
    }
    channel->tag = BL_WIRE_TAG_CONTROL + group * BL_WIRE_CHANNELS + channel_idx;
    *out = channel;
    return BL_OK;
}

void bl_wire_channel_destroy(bl_wire_channel *channel)
{
    if (!channel) return;
    pthread_cond_destroy(&channel->ended);
    channel->wire->transport->requests_free(channel->requests);
    free(channel->finished);
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
    channel->is_begun = channel->is_done = false;
    channel->is_under_way = true;
    channel->error.status = BL_OK;
    channel->wire->transport->wake(channel->wire);
}

bl_status bl_wire_channel_exchange(bl_wire_channel *channel, const bl_comm_call *call,
                                   bool is_meeting, const bl_transfer *transfers, int n_transfers)
{
    bl_wire *w = channel->wire;
    bool hangs = false;
    thread_watch watch;

    pthread_mutex_lock(&w->lock);
    bool is_well = w->first.error.status == BL_OK;
    if (is_well && n_transfers > 0) {
        channel->call = call;
        channel->is_meeting = is_meeting;
        channel->step = is_meeting ? 0 : channel->step + 1;
        channel->transfers = transfers;
        channel->n_transfers = n_transfers;
        give_exchange(channel);
        begin_watch(w, &watch);
        while (channel->is_under_way && !hangs) {
            wait_a_while(w, &channel->ended);
            if ((hangs = channel->is_under_way && is_stuck(w, &watch))) give_up(w);
        }
        is_well = channel->is_done;
    }
    bl_error first = w->first.error;
    pthread_mutex_unlock(&w->lock);
    if (is_well) return BL_OK;
    if (hangs) return bl_error_restore(&first);
    if (n_transfers > 0 && channel->error.status != BL_OK) return bl_error_restore(&channel->error);
    return BL_FAIL(BL_ECANCELLED, "cancelled: %s", first.text);
}
