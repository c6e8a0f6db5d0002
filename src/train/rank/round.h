/* SPDX-License-Identifier: Apache-2.0 */
/* round.h -- the training loop of one rank. */
#ifndef BALLAST_TRAIN_RANK_ROUND_H
#define BALLAST_TRAIN_RANK_ROUND_H

#include "train/rank/trainer.h"

/* Runs that come and go between rounds. */
typedef struct bl_round_source {
    void *user;
    /* Of trainers[*n], the lead's first, takes out and frees those that have ended, and adds *n_new
     * at the end, which are set up; lead->micro has room for a round of all. *is_over: no more
     * come. Collective over the ranks of the job, with the same changes on all. */
    bl_status (*change)(void *user, bl_trainer **trainers, int *n, int *n_new, bool *is_over);
    int room; /* trainers at most */
} bl_round_source;

/* Trains the runs of one rank over its base to their ends, round by round: one step of each, the
 * micro-batches of all in the same visits. trainers[n], of one rank, the lead's first; all are set
 * up. Collective over the ranks of the job.
 *
 * Each run's adapter and checkpoints have the bits that it has alone. BL_ESTOPPED: a signal; a
 * checkpoint of each run that was not done is saved. BL_ENUMERIC: a loss that is not finite; of
 * several runs the others have ended first. BL_EINPUT: rows that changed or cannot be used. Else
 * the error of a device, a file or another rank.
 *
 * source: NULL, or where runs come from: trainers[source->room] then has the base's alone, which
 * trains nothing (bl_trainer_setup_base), and the end comes after the last run's. */
bl_status bl_round_run(bl_trainer **trainers, int n, const bl_round_source *source);

#endif
