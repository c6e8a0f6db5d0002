/* SPDX-License-Identifier: Apache-2.0 */
/* file_work.c -- long work on files of some ranks, in which no rank is missing. The work has a
 * separate thread; the rank's thread meets the other ranks meanwhile. A rank that is gone or
 * stopped misses the next meeting; a disk that hangs is seen in the progress of the thread. */
#include <pthread.h>

#include "base/thread.h"
#include "train/rank/trainer.h"

static const double POLL_S = 0.02;

typedef struct file_work {
    const bl_trainer *trainer;
    bl_trainer_work_fn fn;
    void *user;
    bl_file_progress progress;
    pthread_mutex_t lock; /* of the next one */
    bool is_done;
    pthread_cond_t done;
    bl_error error; /* the thread's, until it is joined */
} file_work;

bl_status bl_trainer_check_files(const bl_trainer *t, const bl_file_progress *progress)
{
    double limit_s = t->config->step_deadline_s, idle_s;

    if (limit_s <= 0 || !bl_file_hangs(progress, limit_s, &idle_s)) return BL_OK;
    return BL_FAIL(BL_EIO,
                   "%s: rank %d has read and written nothing for %.0f s (step_deadline_s %g): the "
                   "disk is slow or hangs",
                   t->config->output_dir, t->rank->index, idle_s, limit_s);
}

static void *thread_main(void *argument)
{
    file_work *w = argument;

    bl_file_note_progress(&w->progress);
    bl_error_save(&w->error, w->fn(w->user));
    pthread_mutex_lock(&w->lock);
    w->is_done = true;
    pthread_cond_signal(&w->done);
    pthread_mutex_unlock(&w->lock);
    return NULL;
}

/* bl_host_comm_is_busy_fn */
static bl_status look(void *user, bool *is_busy)
{
    file_work *w = user;

    pthread_mutex_lock(&w->lock);
    if (!w->is_done) (void)bl_condition_wait(&w->done, &w->lock, POLL_S);
    *is_busy = !w->is_done;
    pthread_mutex_unlock(&w->lock);
    return *is_busy ? bl_trainer_check_files(w->trainer, &w->progress) : BL_OK;
}

/* The thread ends before this returns. The others hear of a disk that hangs before that: this
 * process, one of several, then leaves. */
static bl_status work_and_meet(const bl_trainer *t, file_work *w)
{
    pthread_t thread;
    bl_error error;

    if (w->fn && bl_thread_create(&thread, thread_main, w) != 0)
        return BL_FAIL(BL_ELIMIT, "rank %d: a thread to write files could not be started",
                       t->rank->index);
    bl_status st = bl_host_comm_wait(&t->rank->host_comm, look, w);
    bl_error_save(&error, st);
    if (st != BL_OK) bl_comm_abort(t->rank->host_world, &error);
    if (w->fn) pthread_join(thread, NULL);
    if (w->error.status != BL_OK && (st == BL_OK || st == BL_ECANCELED)) error = w->error;
    return error.status == BL_OK ? BL_OK : bl_error_restore(&error);
}

bl_status bl_trainer_work_on_files(const bl_trainer *t, bl_trainer_work_fn fn, void *user)
{
    file_work w = {.trainer = t, .fn = fn, .user = user, .is_done = !fn};

    if (t->job->topology.n_ranks == 1) return fn ? fn(user) : BL_OK;
    pthread_mutex_init(&w.lock, NULL);
    bl_condition_init(&w.done);
    bl_status st = work_and_meet(t, &w);
    pthread_cond_destroy(&w.done);
    pthread_mutex_destroy(&w.lock);
    return st;
}
