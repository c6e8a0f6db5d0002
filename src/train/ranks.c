/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.c -- the ranks of this process: a thread each, signals while they run, and which failure was the first. */
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/sizes.h"
#include "train/job.h"

/* Waits for the gathers of a pass that does not come: a rank whose own has failed must say so, or the others wait for it. */
static bl_status end_gathers(bl_rank *r, bl_status st)
{
    if (st == BL_OK || st == BL_ESTOPPED) BL_TRY(bl_stream_synchronize(r->gather));
    return st;
}

static void *rank_main(void *argument)
{
    bl_rank *r = argument;
    bl_job *job = r->job;

    r->status = bl_rank_setup(r);
    if (r->status == BL_OK && job->evaluate_only) {
        bl_eval_result result;
        r->status = bl_rank_evaluate(r, &result);
        if (r->status == BL_OK && r->index == 0) job->output.outcome.trained = result;
    } else if (r->status == BL_OK) {
        r->status = bl_rank_train(r);
    }
    r->status = end_gathers(r, r->status);
    if (r->status != BL_OK) bl_error_save(&r->error, r->status);
    if (r->status != BL_OK && r->status != BL_ESTOPPED)
        bl_comm_abort(r->world, &r->error); /* to stop is agreed on */
    atomic_fetch_sub(&job->control.n_running, 1);
    return NULL;
}

/* Ends the ranks inside their step: those that compute at their next visit, those that wait for others at once. */
static void abandon(bl_job *job)
{
    bl_error error = {.status = BL_ESTOPPED};
    snprintf(error.text, sizeof error.text,
             "stopped inside a step; the newest checkpoint in %s stands", job->checkpoint_dir);
    atomic_store(&job->control.abandon, 1);
    bl_comm_abort(job->ranks[0].world, &error);
}

static const int stop_signals[] = {SIGTERM, SIGINT, SIGUSR1, SIGXCPU, SIGHUP};

/* A terminal that closes sends SIGHUP, and so does its shell; the limit of CPU time sends SIGXCPU each second. */
static bool repeats_itself(int signal_number)
{
    return signal_number == SIGXCPU || signal_number == SIGHUP;
}

/* A blocked signal waits to be taken, also one that the process ignores: nohup's SIGHUP stays ignored. */
static void list_signals(sigset_t *signals)
{
    struct sigaction action;

    sigemptyset(signals);
    for (size_t i = 0; i < BL_COUNT(stop_signals); i++) {
        int number = stop_signals[i];
        bool is_ignored = sigaction(number, NULL, &action) == 0 && action.sa_handler == SIG_IGN;
        if (number != SIGHUP || !is_ignored) sigaddset(signals, number);
    }
}

/* Those that came again, and would end the process before it has said why it ends. */
static void swallow_repeated(const sigset_t *signals)
{
    const struct timespec now = {0};
    sigset_t repeated;

    sigemptyset(&repeated);
    for (size_t i = 0; i < BL_COUNT(stop_signals); i++)
        if (repeats_itself(stop_signals[i]) && sigismember(signals, stop_signals[i]))
            sigaddset(&repeated, stop_signals[i]);
    while (sigtimedwait(&repeated, NULL, &now) > 0) continue;
}

/* The second signal is the process's own again: its handler or, without one, its end. No file on disk minds. */
static void give_back(const sigset_t *signals, int signal_number)
{
    pthread_sigmask(SIG_UNBLOCK, signals, NULL);
    raise(signal_number);
    pthread_sigmask(SIG_BLOCK, signals, NULL);
}

/* Waits for the ranks. The first signal asks them to stop after their step, and inside it once grace_s is over; a second one goes
 * to the process. Returns the largest RssAnon seen. */
static int64_t watch(bl_job *job, const sigset_t *signals)
{
    const struct timespec tick = {0, 20 * 1000 * 1000};
    double asked = 0.0;
    int64_t peak = 0;

    while (atomic_load(&job->control.n_running) > 0) {
        if (bl_launch_should_leave(job->launch)) bl_launch_leave(job->launch);
        int signal_number = sigtimedwait(signals, NULL, &tick);
        peak = bl_max_i64(peak, bl_memory_anonymous_bytes());
        if (signal_number > 0 && !(asked > 0.0 && repeats_itself(signal_number))) {
            if (asked > 0.0) give_back(signals, signal_number);
            asked = bl_now_s();
            if (signal_number == SIGINT) bl_log_note_echo();
            bl_log_info("%s: stopping after this step (at most %.0f s); once more to leave at once",
                        strsignal(signal_number), job->config->grace_s);
            atomic_store(&job->control.stop, 1);
        }
        if (asked > 0.0 && bl_now_s() - asked > job->config->grace_s &&
            !atomic_load(&job->control.abandon))
            abandon(job);
    }
    return peak;
}

static bl_status create_comms(bl_job *job, bl_comm **comms)
{
    if (!job->launch)
        return bl_comm_create_local(job->topology.n_ranks, job->config->step_deadline_s, comms);
    comms[0] = job->world;
    job->world = NULL;
    return BL_OK;
}

static bl_status start_ranks(bl_job *job)
{
    bl_comm **comms = calloc((size_t)job->topology.n_here, sizeof *comms);
    job->ranks = calloc((size_t)job->topology.n_here, sizeof *job->ranks);
    bl_status st =
        comms && job->ranks ? BL_OK : BL_FAIL(BL_ENOMEM, "%d ranks", job->topology.n_here);

    if (st == BL_OK) st = create_comms(job, comms);
    for (int i = 0; st == BL_OK && i < job->topology.n_here; i++) {
        job->ranks[i].job = job;
        job->ranks[i].index = job->topology.first_here + i;
        job->ranks[i].world = comms[i];
    }
    for (int i = 0; st == BL_OK && i < job->topology.n_here; i++) {
        atomic_fetch_add(&job->control.n_running, 1);
        job->ranks[i].started =
            pthread_create(&job->ranks[i].thread, NULL, rank_main, &job->ranks[i]) == 0;
        if (job->ranks[i].started) continue;
        atomic_fetch_sub(&job->control.n_running, 1);
        st = BL_FAIL(BL_ELIMIT, "the thread of rank %d could not be started",
                     job->topology.first_here + i);
        bl_error error;
        bl_error_save(&error, st);
        bl_comm_abort(comms[0], &error);
    }
    free(comms);
    return st;
}

/* How much a rank's failure says: cancelled ranks only heard of it; of those that see a loss that is not finite, some know why. */
static int failure_weight(const bl_rank *r)
{
    return r->status == BL_OK ? 0 : r->status == BL_ECANCELLED ? 1 : r->is_at_fault ? 3 : 2;
}

/* The error that started it. */
static bl_status first_failure(const bl_job *job)
{
    const bl_rank *best = &job->ranks[0];
    for (int i = 1; i < job->topology.n_here; i++)
        if (failure_weight(&job->ranks[i]) > failure_weight(best)) best = &job->ranks[i];
    if (best->status == BL_OK) return BL_OK;
    bl_status st = bl_error_restore(&best->error);
    if (job->topology.n_here > 1 && st != BL_ESTOPPED && st != BL_EINPUT)
        bl_error_prefix(st, "rank %d", best->index);
    return st;
}

/* After the grace was over: the state of the last completed step, if all ranks agree which one that is. Processes cannot agree on
 * anything any more: their communicator went with the step. */
static bl_status save_abandoned(bl_job *job)
{
    int64_t step = job->ranks[0].steps_done;
    bool agreed = !job->launch;

    for (int i = 0; agreed && i < job->topology.n_ranks; i++)
        agreed = job->ranks[i].state && job->ranks[i].pass && job->ranks[i].steps_done == step;
    if (!agreed)
        return BL_FAIL(BL_ESTOPPED,
                       "stopped on request inside a step, which is lost; the newest checkpoint in "
                       "%s stands: resume with "
                       "--resume_from_checkpoint true",
                       job->checkpoint_dir);
    for (int i = 0; i < job->topology.n_ranks; i++) {
        const bl_rank *r = &job->ranks[i];
        /* Its error is the abandoned step's; AdamW of `step` ran before it. */
        (void)bl_stream_synchronize(r->compute);
    }
    bl_job_abort_saving(job); /* one that was under way when the grace ended */
    if (job->ranks[0].saved_step != step) BL_TRY(bl_job_save_all(job, step));
    return BL_FAIL(BL_ESTOPPED,
                   "stopped on request inside step %lld; saved after step %lld: resume with "
                   "--resume_from_checkpoint true",
                   (long long)step + 1, (long long)step);
}

bl_status bl_job_run_ranks(bl_job *job, int64_t *peak_bytes)
{
    sigset_t signals, old;

    sigemptyset(&signals);
    if (!job->evaluate_only) list_signals(&signals);
    pthread_sigmask(SIG_BLOCK, &signals, &old); /* before the threads, which inherit it */
    bl_status st = start_ranks(job);
    *peak_bytes = job->ranks ? watch(job, &signals) : 0;
    for (int i = 0; job->ranks && i < job->topology.n_here; i++)
        if (job->ranks[i].started) pthread_join(job->ranks[i].thread, NULL);
    if (st == BL_OK) st = first_failure(job);
    if (st != BL_OK && atomic_load(&job->control.abandon) &&
        (st == BL_ESTOPPED || st == BL_ECANCELLED))
        st = save_abandoned(job);
    bl_error error; /* freeing meets the streams' own errors */
    bl_error_save(&error, st);
    for (int i = 0; job->ranks && i < job->topology.n_here; i++) bl_rank_free(&job->ranks[i]);
    free(job->ranks);
    job->ranks = NULL;
    swallow_repeated(&signals);
    pthread_sigmask(SIG_SETMASK, &old, NULL);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}
