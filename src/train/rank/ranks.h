/* SPDX-License-Identifier: Apache-2.0 */
/* ranks.h -- the ranks of this process: a thread each, and which failure was the first. */
#ifndef BALLAST_TRAIN_RANK_RANKS_H
#define BALLAST_TRAIN_RANK_RANKS_H

#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>

#include "train/rank.h"

/* The main function of a rank, on its thread. `user` is that of bl_ranks_start. */
typedef bl_status (*bl_rank_main)(bl_rank *rank, void *user);

struct bl_ranks;
typedef struct bl_rank_thread {
    struct bl_ranks *ranks;
    bl_rank *rank;
    pthread_t id;
    bool started;
    bl_status status;
    bl_error error;
} bl_rank_thread;

typedef struct bl_ranks {
    bl_rank *rank; /* [n_here], in the order of their indices */
    int n_here;
    bl_launch *launch;
    bl_rank_main main;
    void *user;
    bl_rank_thread *thread; /* [n_here] */
    /* The ranks end by themselves and remove incomplete files: the process does not exit before
     * that. */
    bool is_cleaning_up;
    atomic_int n_running;
    _Atomic int64_t peak_bytes; /* the largest RssAnon seen */
} bl_ranks;

/* The ranks of the job, not started. Takes job->host. Free after a failure, too. */
bl_status bl_ranks_create(bl_job *job, bl_ranks *ranks);
/* After a failure those that did start are canceled: wait and join. */
bl_status bl_ranks_start(bl_ranks *ranks, bl_rank_main main, void *user);
/* Waits 20 ms, or until one of `signals` comes: then *signal_number is > 0. Both may be NULL.
 * false: no rank runs any more. */
bool bl_ranks_wait(bl_ranks *ranks, const sigset_t *signals, int *signal_number);
/* After the last wait. The failure that came first: `started`, which bl_ranks_start returned, or a
 * rank's. */
bl_status bl_ranks_join(bl_ranks *ranks, bl_status started);
void bl_ranks_free(bl_ranks *ranks); /* closes the ranks */

#endif
