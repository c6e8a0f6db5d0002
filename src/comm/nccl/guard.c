/* SPDX-License-Identifier: Apache-2.0 */
/* guard.c -- a rank's last-resort watchdog: a thread that ends the process when no other of it can.
 * It calls neither CUDA nor NCCL, waits for no thread that does, and checks, four times per second,
 * whether
 *   - an abort, a watch's last round, has not ended (watch.c),
 *   - a communicator's watch makes no rounds: it asks CUDA and NCCL, and a call of the driver's
 *     can wait for a lock that another thread of the process holds, in a launch that waits for the
 *     GPU. Until the deadline the other ranks may still arrive; a job that has failed elsewhere
 *     already waits no longer than for an abort.
 *
 * As a watch does, it starts its clocks again when it comes back from an absence: the process was
 * stopped, watches and all. */
#include <stdio.h>
#include <sys/prctl.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/host_name.h"
#include "base/thread.h"
#include "comm/nccl/internal.h"

enum { HOST_BYTES = 64 };

static const double POLL_S = 0.25;

/* ---- the watches ---- */

void comm_nccl_guard_add(comm_nccl *c)
{
    comm_nccl_job *job = c->job;

    pthread_mutex_lock(&job->lock);
    c->watch.next = job->watched;
    job->watched = c;
    pthread_mutex_unlock(&job->lock);
}

void comm_nccl_guard_remove(comm_nccl *c)
{
    comm_nccl_job *job = c->job;

    pthread_mutex_lock(&job->lock);
    for (comm_nccl **at = &job->watched; *at; at = &(*at)->watch.next)
        if (*at == c) {
            *at = c->watch.next;
            break;
        }
    pthread_mutex_unlock(&job->lock);
}

/* ---- looking; under the job's lock ---- */

static void tell(comm_nccl *c, double silent_s)
{
    char host[HOST_BYTES];
    bl_error error;

    bl_host_name(host, sizeof host);
    bl_error_save(&error, BL_FAIL(BL_ERANK,
                                  "rank %d on %s hangs in CUDA or NCCL: the watch of %s has not "
                                  "come back from a call for %.1f s",
                                  c->job_ranks[c->base.rank], host, c->name, silent_s));
    bl_comm_abort(c->host, &error);
}

/* Whether the process has to end; then the job knows why. */
static bool is_watch_late(comm_nccl *c, double now_s)
{
    comm_nccl_job *job = c->job;
    double round_s = atomic_load(&c->watch.round_s);
    bl_error first;

    bl_comm_first_error(c->host, &first);
    comm_nccl_lateness lateness = comm_nccl_guard_judge(&job->clock, round_s, first.status != BL_OK,
                                                        atomic_load(&job->deadline_s), now_s);
    if (lateness == COMM_NCCL_HANGS)
        tell(c, now_s - (round_s > job->clock.back_s ? round_s : job->clock.back_s));
    return lateness != COMM_NCCL_IN_TIME;
}

static bool is_late(comm_nccl_job *job, double now_s)
{
    bool is = false;

    for (comm_nccl *c = job->watched; c && !is; c = c->watch.next) is = is_watch_late(c, now_s);
    return is;
}

/* ---- the thread ---- */

static void *guard_main(void *argument)
{
    comm_nccl_job *job = argument;
    bool has_to_leave = false;

    job->clock.back_s = job->clock.failed_s = BL_NEVER_S;
    job->clock.round.at_s = bl_now_s();
    prctl(PR_SET_NAME, "nccl guard");
    pthread_mutex_lock(&job->lock);
    while (!job->is_ending && !has_to_leave) {
        (void)bl_condition_wait(&job->wake, &job->lock, POLL_S);
        double now_s = bl_now_s(); /* an absence after this makes no watch late */
        comm_nccl_guard_begin_round(&job->clock, now_s);
        has_to_leave = !job->is_ending && is_late(job, now_s);
    }
    pthread_mutex_unlock(&job->lock);
    if (has_to_leave && job->options.leave) job->options.leave(job->options.leave_user);
    return NULL;
}

bl_status comm_nccl_guard_open(comm_nccl_job *job)
{
    pthread_mutex_init(&job->lock, NULL);
    bl_condition_init(&job->wake);
    BL_TRY(comm_nccl_start_thread(&job->guard, guard_main, job));
    job->has_guard = true;
    return BL_OK;
}

void comm_nccl_guard_close(comm_nccl_job *job)
{
    if (job->has_guard) {
        pthread_mutex_lock(&job->lock);
        job->is_ending = true;
        pthread_cond_signal(&job->wake);
        pthread_mutex_unlock(&job->lock);
        pthread_join(job->guard, NULL);
    }
    pthread_cond_destroy(&job->wake);
    pthread_mutex_destroy(&job->lock);
}
