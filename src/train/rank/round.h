/* SPDX-License-Identifier: Apache-2.0 */
/* round.h -- the training loop of one rank. */
#ifndef BALLAST_TRAIN_RANK_ROUND_H
#define BALLAST_TRAIN_RANK_ROUND_H

#include "train/rank/trainer.h"

/* Runs that join and leave between rounds. */
typedef struct bl_round_source {
    void *user;
    /* Removes and frees those of trainers[*n] that have ended, and appends *n_new that are set up.
     * The lead stays first, and lead->micro has room for a round of all. *is_over: no more runs
     * will join. Collective over the ranks of the job, with the same changes on all. */
    bl_status (*change)(void *user, bl_trainer **trainers, int *n, int *n_new, bool *is_over);
    int room; /* the most trainers */
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
 * source: NULL, or the source of runs that join later. Then trainers[source->room] begins with only
 * the base's trainer, which trains nothing (bl_trainer_setup_base); returns when no more runs join
 * and the last has ended. */
bl_status bl_round_run(bl_trainer **trainers, int n, const bl_round_source *source);

#endif
