/* SPDX-License-Identifier: Apache-2.0 */
/* The side of the wire that other threads see. */
#include "comm/wire/internal.h"

#include <signal.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { LEAVE_S = 5 }; /* how long a thread that hangs in MPI is waited for after an abort */

void bl_wire_note_word(bl_wire *w, const bl_word *what)
{
    pthread_mutex_lock(&w->lock);
    if (w->first.error.status == BL_OK) w->first = *what;
    pthread_cond_signal(&w->wake);
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
    pthread_cond_destroy(&w->wake);
    pthread_cond_destroy(&w->ready);
    pthread_mutex_destroy(&w->lock);
    bl_mpi_free(w->mpi);
    free(w->heard);
    free(w);
}

/* Signals are for the threads that expect them. */
static int start_thread(bl_wire *w)
{
    sigset_t all, old;
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &old);
    int code = pthread_create(&w->thread, NULL, bl_mpi_main, w);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return code;
}

bl_status bl_wire_open(int rank, int n_processes, bl_wire_report report_error, bl_wire **out)
{
    bl_wire *w = calloc(1, sizeof *w);

    *out = NULL;
    if (!w) return BL_FAIL(BL_ENOMEM, "a job of %d processes", n_processes);
    w->rank = rank;
    w->size = n_processes;
    w->report = report_error;
    w->next_group = 1;
    pthread_mutex_init(&w->lock, NULL);
    init_condition(&w->wake);
    init_condition(&w->ready);
    w->mpi = bl_mpi_create(n_processes);
    w->heard = calloc((size_t)n_processes, sizeof *w->heard);
    /* A rank that waits yields its core: a matrix product beside one that does not takes twice as long. */
    setenv("OMPI_MCA_mpi_yield_when_idle", "1", 0);
    if (!w->mpi || !w->heard || start_thread(w) != 0) {
        wire_free(w);
        return BL_FAIL(BL_ENOMEM, "a job of %d processes", n_processes);
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

bl_status bl_wire_close(bl_wire *w)
{
    struct timespec limit;

    pthread_mutex_lock(&w->lock);
    w->is_closing = true;
    pthread_cond_signal(&w->wake);
    bl_status first = w->first.error.status;
    pthread_mutex_unlock(&w->lock);
    clock_gettime(CLOCK_REALTIME, &limit);
    limit.tv_sec += LEAVE_S;
    if (first == BL_OK)
        pthread_join(w->thread, NULL);
    else if (pthread_timedjoin_np(w->thread, NULL, &limit) != 0)
        return first; /* it hangs in MPI and still uses the wire; the process is about to exit */
    bl_status st = w->is_down ? w->verdict.error.status : BL_OK;
    wire_free(w);
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
    channel->requests = bl_mpi_requests_create(2 * size);
    channel->state = calloc(n, sizeof *channel->state);
    channel->job_ranks = calloc((size_t)size, sizeof *channel->job_ranks);
    if (!channel->requests || !channel->state || !channel->job_ranks) {
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
    bl_mpi_requests_free(channel->requests);
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
    pthread_cond_signal(&channel->wire->wake);
}

bl_status bl_wire_channel_exchange(bl_wire_channel *channel, bl_comm_kind kind, bool is_meeting,
                                   const bl_transfer *transfers, int n_transfers)
{
    bl_wire *w = channel->wire;

    pthread_mutex_lock(&w->lock);
    bool is_well = w->first.error.status == BL_OK;
    if (is_well && n_transfers > 0) {
        channel->kind = kind;
        channel->is_meeting = is_meeting;
        channel->transfers = transfers;
        channel->n_transfers = n_transfers;
        give_exchange(channel);
        while (channel->is_under_way) pthread_cond_wait(&channel->ended, &w->lock);
        is_well = channel->is_done;
    }
    bl_error first = w->first.error;
    pthread_mutex_unlock(&w->lock);
    if (is_well) return BL_OK;
    if (n_transfers > 0 && channel->error.status != BL_OK) return bl_error_restore(&channel->error);
    return BL_FAIL(BL_ECANCELLED, "cancelled: %s", first.text);
}
