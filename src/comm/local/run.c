/* SPDX-License-Identifier: Apache-2.0 */
/* run.c -- a function as the ranks of this process. */
#include <pthread.h>
#include <stdlib.h>

#include "comm/comm.h"

typedef struct rank_thread {
    bl_comm *comm;
    bl_rank_fn fn;
    void *user;
    pthread_t thread;
} rank_thread;

static void abort_with(bl_comm *comm, bl_status st)
{
    bl_error error;
    bl_error_save(&error, st);
    bl_comm_abort(comm, &error);
}

static void *rank_main(void *argument)
{
    rank_thread *t = argument;
    bl_status st = t->fn(t->comm, t->user);
    if (st != BL_OK) abort_with(t->comm, st);
    return NULL;
}

bl_status bl_comm_run_local(int n_ranks, double deadline_s, bl_rank_fn fn, void *user)
{
    rank_thread *threads = calloc((size_t)n_ranks, sizeof *threads);
    bl_comm **comms = calloc((size_t)n_ranks, sizeof *comms);
    bl_error first = {.status = BL_OK};
    int n_started = 0;
    bl_status st = threads && comms ? BL_OK : BL_FAIL(BL_ENOMEM, "%d ranks", n_ranks);

    if (st == BL_OK) st = bl_comm_create_local(n_ranks, deadline_s, comms);
    if (st != BL_OK) goto done;
    for (; n_started < n_ranks; n_started++) {
        rank_thread *t = &threads[n_started];
        *t = (rank_thread){.comm = comms[n_started], .fn = fn, .user = user};
        if (pthread_create(&t->thread, NULL, rank_main, t) == 0) continue;
        abort_with(comms[0],
                   BL_FAIL(BL_ELIMIT, "the thread of rank %d could not be started", n_started));
        break;
    }
    for (int i = 0; i < n_started; i++) pthread_join(threads[i].thread, NULL);
    bl_comm_first_error(comms[0], &first);
    st = first.status == BL_OK ? BL_OK : bl_error_restore(&first);
    for (int i = 0; i < n_ranks; i++) bl_comm_destroy(comms[i]);
done:
    free(comms);
    free(threads);
    return st;
}
