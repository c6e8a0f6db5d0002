/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.c -- starts a thread per rank; after a failure, which of several errors is the cause is
 * decided by weight. */
#include "train/rank/ranks.h"

#include <stdlib.h>

#include "base/memory.h"
#include "base/sizes.h"

/* Waits for the gathers of a pass that does not follow: a rank whose gather has failed must report
 * it, or the others wait for that rank. */
static bl_status end_gathers(bl_rank *r, bl_status st)
{
    if (st == BL_OK || st == BL_ESTOPPED) BL_TRY(bl_stream_synchronize(r->gather));
    return st;
}

static void *thread_main(void *argument)
{
    bl_rank_thread *t = argument;

    t->status = end_gathers(t->rank, t->ranks->main(t->rank, t->ranks->user));
    if (t->status != BL_OK) bl_error_save(&t->error, t->status);
    if (t->status != BL_OK && t->status != BL_ESTOPPED)
        bl_comm_abort(t->rank->host_world, &t->error); /* to stop is agreed on */
    atomic_fetch_sub(&t->ranks->n_running, 1);
    return NULL;
}

static bl_status create_local(const bl_job *job, bl_comm **comms)
{
    BL_TRY(bl_comm_create_local(job->topology.n_ranks, job->config->step_deadline_s, comms));
    for (int i = 0; i < job->topology.n_ranks; i++)
        BL_TRY(bl_comm_set_sum_block(comms[i], (int)job->config->sum_block));
    return BL_OK;
}

static bl_status create_comms(bl_job *job, bl_comm **comms)
{
    if (!job->launch) return create_local(job, comms);
    comms[0] = job->host_world;
    job->host_world = NULL;
    return BL_OK;
}

bl_status bl_ranks_create(bl_job *job, bl_ranks *ranks)
{
    int n = job->topology.n_here;
    bl_comm **comms = calloc((size_t)n, sizeof *comms);

    *ranks = (bl_ranks){.rank = calloc((size_t)n, sizeof *ranks->rank),
                        .thread = calloc((size_t)n, sizeof *ranks->thread),
                        .n_here = n,
                        .launch = job->launch};
    bl_status st =
        comms && ranks->rank && ranks->thread ? BL_OK : BL_FAIL(BL_ENOMEM, "%d ranks", n);
    if (st == BL_OK) st = create_comms(job, comms);
    for (int i = 0; st == BL_OK && i < n; i++) {
        ranks->rank[i] =
            (bl_rank){.job = job, .index = job->topology.first_here + i, .host_world = comms[i]};
        ranks->thread[i] = (bl_rank_thread){.ranks = ranks, .rank = &ranks->rank[i]};
    }
    free(comms);
    return st;
}

bl_status bl_ranks_start(bl_ranks *ranks, bl_rank_main main, void *user)
{
    bl_status st = BL_OK;

    ranks->main = main;
    ranks->user = user;
    for (int i = 0; st == BL_OK && i < ranks->n_here; i++) {
        bl_rank_thread *t = &ranks->thread[i];
        atomic_fetch_add(&ranks->n_running, 1);
        t->started = pthread_create(&t->id, NULL, thread_main, t) == 0;
        if (t->started) continue;
        atomic_fetch_sub(&ranks->n_running, 1);
        st = BL_FAIL(BL_ELIMIT, "the thread of rank %d could not be started", t->rank->index);
        bl_error error;
        bl_error_save(&error, st);
        bl_comm_abort(ranks->rank[0].host_world, &error);
    }
    return st;
}

bool bl_ranks_wait(bl_ranks *ranks, const sigset_t *signals, int *signal_number)
{
    const struct timespec tick = {0, 20 * 1000 * 1000};
    sigset_t none;

    sigemptyset(&none);
    if (atomic_load(&ranks->n_running) == 0) return false;
    if (bl_launch_should_leave(ranks->launch) && !ranks->is_cleaning_up)
        bl_launch_leave(ranks->launch);
    int came = sigtimedwait(signals ? signals : &none, NULL, &tick);
    if (signal_number) *signal_number = came;
    atomic_store(&ranks->peak_bytes,
                 bl_max_i64(atomic_load(&ranks->peak_bytes), bl_memory_anonymous_bytes()));
    return true;
}

/* Severity of a rank's error. A canceled rank has another's; of the ranks whose loss is not finite,
 * some have the cause. */
static int failure_weight(const bl_rank_thread *t)
{
    return t->status == BL_OK ? 0 : t->status == BL_ECANCELED ? 1 : t->rank->is_at_fault ? 3 : 2;
}

/* The error that started it. */
static bl_status first_failure(const bl_ranks *ranks)
{
    const bl_rank_thread *best = &ranks->thread[0];
    for (int i = 1; i < ranks->n_here; i++)
        if (failure_weight(&ranks->thread[i]) > failure_weight(best)) best = &ranks->thread[i];
    if (best->status == BL_OK) return BL_OK;
    bl_status st = bl_error_restore(&best->error);
    if (ranks->n_here > 1 && st != BL_ESTOPPED && st != BL_EINPUT)
        bl_error_prefix(st, "rank %d", best->rank->index);
    return st;
}

bl_status bl_ranks_join(bl_ranks *ranks, bl_status started)
{
    for (int i = 0; i < ranks->n_here; i++)
        if (ranks->thread[i].started) pthread_join(ranks->thread[i].id, NULL);
    return started == BL_OK ? first_failure(ranks) : started;
}

void bl_ranks_free(bl_ranks *ranks)
{
    for (int i = 0; ranks->rank && i < ranks->n_here; i++)
        bl_rank_drain(&ranks->rank[i]); /* on a GPU a rank's copies read the others' memory */
    for (int i = 0; ranks->rank && i < ranks->n_here; i++) bl_rank_close(&ranks->rank[i]);
    free(ranks->rank);
    free(ranks->thread);
    *ranks = (bl_ranks){0};
}
