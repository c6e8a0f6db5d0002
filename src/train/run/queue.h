/* SPDX-License-Identifier: Apache-2.0 */
/* queue.h -- jobs from a directory (spool.h) that join a loaded base between rounds. Rank 0 reads
 * the directory and decides; all ranks follow in the same round.
 *
 *   slot    its job                                             the job's file is in
 *   FREE    none
 *   OPEN    configuration and rows are being read, or it        DIR; running/ if it was started by
 *           waits for memory; at most one slot                  an earlier process
 *   LIVE    trains                                              running/
 *
 *   FREE -> OPEN: take. OPEN -> LIVE: join. LIVE -> FREE: retire, to done/ or failed/.
 *   OPEN -> FREE: turn_away, to rejected/ (failed/ if it was started); or DROP, when the queue
 *   stops (the file stays) or the file was removed. */
#ifndef BALLAST_TRAIN_RUN_QUEUE_H
#define BALLAST_TRAIN_RUN_QUEUE_H

#include <pthread.h>
#include <stdatomic.h>

#include "train/rank/round.h"
#include "train/run/runs.h"
#include "train/run/spool.h"

/* The most jobs at the same time. */
enum { BL_QUEUE_ROOM = 64 };

typedef enum bl_queue_slot_state { BL_SLOT_FREE, BL_SLOT_OPEN, BL_SLOT_LIVE } bl_queue_slot_state;

typedef struct bl_queue_slot {
    atomic_int state;        /* bl_queue_slot_state; any thread reads it */
    char *name;              /* of the file */
    char *label;             /* of the run: the name without .yaml or .yml */
    bool has_run;            /* the file is in running/ */
    bool says_wait;          /* the log says that it waits for memory */
    bl_train_config *config; /* owned */
} bl_queue_slot;

typedef struct bl_queue {
    bl_train_run_state *runs; /* [1 + BL_QUEUE_ROOM], a run per slot; runs[0]: the base */
    bl_queue_slot slot[1 + BL_QUEUE_ROOM];
    bl_spool *spool;                              /* NULL except in rank 0's process */
    int64_t available_bytes, gpu_available_bytes; /* before the base was loaded */
    bl_plan planned;                              /* for the LIVE runs and the OPEN one */
    bl_memory_ledger expected;
    int open;        /* the OPEN slot; 0: none */
    bool has_change; /* of rank 0: a run has ended since the OPEN one was planned */
    /* Held while slots change; the signal thread holds it while it reads runs and trainers. */
    pthread_mutex_t changing;

    /* Of the supervisor (stop.c): trainers[run * n_here + local rank], made by create_trainers. */
    struct bl_trainer *trainers;
    int n_here;
    void (*create_trainers)(void *user, int run);
    void *user;
} bl_queue;

/* bl_round_source.change, with the queue as `user`. */
bl_status bl_queue_change(void *queue, bl_trainer **trainers, int *n, int *n_new, bool *is_over);
/* Frees the run of a slot and closes its files, after all ranks have freed its trainers. */
void bl_queue_free_slot(bl_queue *queue, int run);

#endif
