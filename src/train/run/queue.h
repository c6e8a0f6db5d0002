/* SPDX-License-Identifier: Apache-2.0 */
/* queue.h -- runs that come from a directory (spool.h) to a base that stays loaded, at the
 * boundaries of rounds. Rank 0 looks at the directory and decides; all ranks follow in the same
 * round.
 *
 *   slot    a job is there when                                        the file is in
 *   FREE    -                                                          DIR
 *   OPEN    its configuration and rows are read, and it waits for      DIR, or running/ after a
 *           memory; one at most                                        kill
 *   LIVE    it trains                                                  running/
 *
 *   FREE -> OPEN: open_job; OPEN -> LIVE: admit; LIVE -> FREE: retire, to done/ or failed/;
 *   OPEN -> FREE: to rejected/, or a queue that stops leaves the file. */
#ifndef BALLAST_TRAIN_RUN_QUEUE_H
#define BALLAST_TRAIN_RUN_QUEUE_H

#include <pthread.h>
#include <stdatomic.h>

#include "train/rank/round.h"
#include "train/run/runs.h"
#include "train/run/spool.h"

/* Jobs at once. */
enum { BL_QUEUE_ROOM = 64 };

typedef enum bl_queue_slot_state { BL_SLOT_FREE, BL_SLOT_OPEN, BL_SLOT_LIVE } bl_queue_slot_state;

typedef struct bl_queue_slot {
    atomic_int state;        /* bl_queue_slot_state; any thread reads it */
    char *name;              /* of the file */
    char *label;             /* of the run: the name without its end */
    bool has_run;            /* the file is in running/ */
    bool says_wait;          /* that it waits for memory was logged */
    bl_train_config *config; /* owned */
} bl_queue_slot;

typedef struct bl_queue {
    bl_train_run_state *runs; /* [1 + BL_QUEUE_ROOM], of the slots; runs[0]: the base */
    bl_queue_slot slot[1 + BL_QUEUE_ROOM];
    bl_spool *spool;                              /* NULL but in rank 0's process */
    int64_t available_bytes, gpu_available_bytes; /* before the base was loaded */
    bl_plan planned;                              /* for the runs that are there with one more */
    bl_memory_ledger expected;
    int open;        /* the slot that is OPEN; 0: none */
    bool has_change; /* rank 0's: a run has ended since the open one was planned */
    /* Held while slots change; the thread that takes signals reads runs under it. */
    pthread_mutex_t changing;

    /* The supervisor's (stop.c): trainers[run * n_here + rank here], made by create_trainers. */
    struct bl_trainer *trainers;
    int n_here;
    void (*create_trainers)(void *user, int run);
    void *user;
} bl_queue;

/* bl_round_source.change, with the queue as `user`. */
bl_status bl_queue_change(void *queue, bl_trainer **trainers, int *n, int *n_new, bool *is_over);
/* Frees the run of a slot and what it has open; ranks do not have it any more. */
void bl_queue_free_slot(bl_queue *queue, int run);

#endif
