/* SPDX-License-Identifier: Apache-2.0 */
/* group.c -- meetings of the ranks of one process, with a deadline and an abort. Locks: job before
 * meeting. A thread that waits holds its meeting's lock only, and drops it before it touches the
 * job. */
#include "comm/local/group.h"

#include <math.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/pause.h"
#include "base/sizes.h"
#include "base/thread.h"

typedef struct local_job {
    pthread_mutex_t lock;
    bl_error first_error;
    comm_local_group *groups; /* a list: all that are alive */
    atomic_bool is_aborted;   /* set under `lock`, after first_error */
} local_job;

struct comm_local_meeting {
    comm_local_group *group;
    /* Guards what follows; n_turns is changed under it and peeked at without. */
    pthread_mutex_t lock;
    pthread_cond_t turned;
    atomic_ulong n_turns; /* how many times all ranks have arrived */
    int n_arrived;
    bool *has_arrived;
    bl_error overdue; /* a deadline has passed; no rank meets any more */
    comm_local_call *calls;
};

struct comm_local_group {
    local_job *job;
    comm_local_group *next;
    int size;
    atomic_int n_references;
    double deadline_s;
    int *job_ranks;
    comm_local_meeting collectives, splits;
    unsigned char *scratch;
};

static bool meeting_init(comm_local_meeting *meeting, comm_local_group *group)
{
    meeting->group = group;
    meeting->has_arrived = calloc((size_t)group->size, sizeof *meeting->has_arrived);
    meeting->calls = calloc((size_t)group->size, sizeof *meeting->calls);
    pthread_mutex_init(&meeting->lock, NULL);
    bl_condition_init(&meeting->turned);
    return meeting->has_arrived && meeting->calls;
}

static void meeting_close(comm_local_meeting *meeting)
{
    pthread_cond_destroy(&meeting->turned);
    pthread_mutex_destroy(&meeting->lock);
    free(meeting->calls);
    free(meeting->has_arrived);
}

static void group_free(comm_local_group *group)
{
    meeting_close(&group->collectives);
    meeting_close(&group->splits);
    free(group->scratch);
    free(group->job_ranks);
    free(group);
}

/* A group whose caller fills in job_ranks. Joins the job's list. */
static bl_status group_create(local_job *job, int size, double deadline_s, comm_local_group **out)
{
    comm_local_group *group = calloc(1, sizeof *group);

    *out = NULL;
    if (!group) return BL_FAIL(BL_ENOMEM, "a communicator of %d ranks", size);
    group->job = job;
    group->size = size;
    group->deadline_s = deadline_s;
    atomic_init(&group->n_references, size);
    group->job_ranks = calloc((size_t)size, sizeof *group->job_ranks);
    group->scratch = aligned_alloc(64, 2 * COMM_LOCAL_SCRATCH_BYTES);
    bool is_complete = group->job_ranks && group->scratch;
    is_complete &= meeting_init(&group->collectives, group);
    is_complete &= meeting_init(&group->splits, group);
    if (!is_complete) {
        group_free(group);
        return BL_FAIL(BL_ENOMEM, "a communicator of %d ranks", size);
    }
    pthread_mutex_lock(&job->lock);
    group->next = job->groups;
    job->groups = group;
    pthread_mutex_unlock(&job->lock);
    *out = group;
    return BL_OK;
}

static void job_destroy(local_job *job)
{
    pthread_mutex_destroy(&job->lock);
    free(job);
}

bl_status comm_local_group_create_job(int size, double deadline_s, comm_local_group **out)
{
    local_job *job = calloc(1, sizeof *job);

    *out = NULL;
    if (!job) return BL_FAIL(BL_ENOMEM, "a job of %d ranks", size);
    pthread_mutex_init(&job->lock, NULL);
    bl_status st = group_create(job, size, deadline_s, out);
    if (st != BL_OK) {
        job_destroy(job);
        return st;
    }
    for (int i = 0; i < size; i++) (*out)->job_ranks[i] = i;
    return BL_OK;
}

bl_status comm_local_group_create(comm_local_group *parent, int size, const int *parent_ranks,
                                  comm_local_group **out)
{
    BL_TRY(group_create(parent->job, size, parent->deadline_s, out));
    for (int i = 0; i < size; i++) (*out)->job_ranks[i] = parent->job_ranks[parent_ranks[i]];
    return BL_OK;
}

void comm_local_group_release(comm_local_group *group)
{
    local_job *job = group->job;

    if (atomic_fetch_sub_explicit(&group->n_references, 1, memory_order_acq_rel) != 1) return;
    pthread_mutex_lock(&job->lock);
    comm_local_group **link = &job->groups;
    while (*link != group) link = &(*link)->next;
    *link = group->next;
    bool was_last = !job->groups;
    pthread_mutex_unlock(&job->lock);
    group_free(group);
    if (was_last) job_destroy(job);
}

unsigned char *comm_local_group_scratch(comm_local_group *group, int half)
{
    return group->scratch + (size_t)half * COMM_LOCAL_SCRATCH_BYTES;
}

comm_local_meeting *comm_local_collectives(comm_local_group *group)
{
    return &group->collectives;
}

comm_local_meeting *comm_local_splits(comm_local_group *group)
{
    return &group->splits;
}

comm_local_call *comm_local_call_of(comm_local_meeting *meeting, int rank)
{
    return &meeting->calls[rank];
}

/* ---- waiting ---- */

static unsigned long count_turns(comm_local_meeting *meeting)
{
    return atomic_load_explicit(&meeting->n_turns, memory_order_relaxed);
}

static bool is_aborted(comm_local_meeting *meeting)
{
    return atomic_load_explicit(&meeting->group->job->is_aborted, memory_order_relaxed);
}

/* Under the lock: waits for a turn, at most `most_s`. Returns the seconds that passed, but never
 * much more than were asked for: a process that was stopped (Ctrl-Z) and continues has not waited
 * for the others meanwhile. */
static double wait_a_while(comm_local_meeting *meeting, double most_s)
{
    double start = bl_now_s();

    (void)bl_condition_wait(&meeting->turned, &meeting->lock, most_s);
    return fmin(bl_now_s() - start, 1.5 * most_s);
}

/* Under the lock. True when this rank was the last to arrive. */
static bool arrive(comm_local_meeting *meeting, int rank)
{
    int size = meeting->group->size;

    meeting->has_arrived[rank] = true;
    if (++meeting->n_arrived < size) return false;
    memset(meeting->has_arrived, 0, (size_t)size * sizeof *meeting->has_arrived);
    meeting->n_arrived = 0;
    atomic_fetch_add_explicit(&meeting->n_turns, 1, memory_order_relaxed);
    pthread_cond_broadcast(&meeting->turned);
    return true;
}

/* Looks for the turn after `turn` for a few microseconds without the lock; returns with it. */
static void look_briefly(comm_local_meeting *meeting, unsigned long turn)
{
    pthread_mutex_unlock(&meeting->lock);
    for (int i = 0; i < BL_SPIN_ROUNDS && count_turns(meeting) == turn; i++) bl_cpu_pause();
    pthread_mutex_lock(&meeting->lock);
}

/* Under the lock: writes "rank 3" or "ranks 1, 3" for those that have not arrived. */
static void name_missing(comm_local_meeting *meeting, char *text, size_t text_bytes)
{
    int size = meeting->group->size;
    bool is_one = size - meeting->n_arrived == 1;
    size_t length = (size_t)snprintf(text, text_bytes, is_one ? "rank" : "ranks");
    const char *separator = " ";

    for (int i = 0; i < size && length < text_bytes; i++) {
        if (meeting->has_arrived[i]) continue;
        length += (size_t)snprintf(text + length, text_bytes - length, "%s%d", separator,
                                   meeting->group->job_ranks[i]);
        separator = ", ";
    }
}

/* Under the lock: ends the wait for missing ranks. */
static void give_up(comm_local_meeting *meeting, const bl_comm_call *call)
{
    char missing[256], name[BL_COMM_CALL_TEXT_BYTES];
    name_missing(meeting, missing, sizeof missing);
    bl_error_save(&meeting->overdue,
                  BL_FAIL(BL_ERANK, "%s did not reach %s within %.1f s", missing,
                          bl_comm_call_name(call, name), meeting->group->deadline_s));
}

/* Under the lock. Returns when the meeting has turned, or when it never will: aborted or
 * overdue. */
static void wait_turn(comm_local_meeting *meeting, unsigned long turn, const bl_comm_call *call)
{
    double left_s = meeting->group->deadline_s, slice_s = fmin(left_s / 4, 1.0);
    bool is_patient = left_s <= 0;

    while (count_turns(meeting) == turn && !is_aborted(meeting) &&
           meeting->overdue.status == BL_OK) {
        if (is_patient)
            pthread_cond_wait(&meeting->turned, &meeting->lock);
        else if (left_s <= 0)
            give_up(meeting, call);
        else
            left_s -= wait_a_while(meeting, fmin(left_s, slice_s) + 1e-4);
    }
}

/* The error that ended the meetings here. Without the lock. */
static bl_status report_end(comm_local_meeting *meeting)
{
    bl_error error;

    pthread_mutex_lock(&meeting->lock);
    error = meeting->overdue;
    pthread_mutex_unlock(&meeting->lock);
    if (error.status != BL_OK) {
        comm_local_abort(meeting->group, &error);
        return bl_error_restore(&error);
    }
    comm_local_first_error(meeting->group, &error);
    return BL_FAIL(BL_ECANCELED, "canceled: %s", error.text);
}

/* All ranks reach the same verdict: each compares every call with rank 0's. */
static bl_status verify_calls(comm_local_meeting *meeting)
{
    const int *ranks = meeting->group->job_ranks;
    for (int i = 1; i < meeting->group->size; i++)
        BL_TRY(bl_comm_verify_calls(ranks[0], &meeting->calls[0].what, ranks[i],
                                    &meeting->calls[i].what));
    return BL_OK;
}

bl_status comm_local_meet(comm_local_meeting *meeting, int rank, const comm_local_call *call)
{
    pthread_mutex_lock(&meeting->lock);
    unsigned long turn = count_turns(meeting);
    if (!is_aborted(meeting) && meeting->overdue.status == BL_OK) {
        meeting->calls[rank] = *call;
        if (!arrive(meeting, rank)) {
            look_briefly(meeting, turn);
            wait_turn(meeting, turn, &call->what);
        }
    }
    bool has_turned = count_turns(meeting) != turn;
    pthread_mutex_unlock(&meeting->lock);
    if (!has_turned) return report_end(meeting);

    bl_status st = verify_calls(meeting);
    if (st == BL_OK) return BL_OK;
    bl_error error;
    bl_error_save(&error, st);
    comm_local_part(meeting, rank); /* the others still read the calls */
    comm_local_abort(meeting->group, &error);
    return bl_error_restore(&error);
}

void comm_local_part(comm_local_meeting *meeting, int rank)
{
    pthread_mutex_lock(&meeting->lock);
    unsigned long turn = count_turns(meeting);
    if (!arrive(meeting, rank)) {
        look_briefly(meeting, turn);
        while (count_turns(meeting) == turn) pthread_cond_wait(&meeting->turned, &meeting->lock);
    }
    pthread_mutex_unlock(&meeting->lock);
}

/* ---- errors ---- */

static void wake_meeting(comm_local_meeting *meeting)
{
    pthread_mutex_lock(&meeting->lock);
    pthread_cond_broadcast(&meeting->turned);
    pthread_mutex_unlock(&meeting->lock);
}

void comm_local_abort(comm_local_group *group, const bl_error *error)
{
    local_job *job = group->job;

    pthread_mutex_lock(&job->lock);
    if (job->first_error.status == BL_OK) {
        job->first_error = *error;
        atomic_store_explicit(&job->is_aborted, true, memory_order_relaxed);
        for (comm_local_group *g = job->groups; g; g = g->next) {
            wake_meeting(&g->collectives);
            wake_meeting(&g->splits);
        }
    }
    pthread_mutex_unlock(&job->lock);
}

void comm_local_first_error(comm_local_group *group, bl_error *out)
{
    pthread_mutex_lock(&group->job->lock);
    *out = group->job->first_error;
    pthread_mutex_unlock(&group->job->lock);
}
