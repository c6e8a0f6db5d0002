/* SPDX-License-Identifier: Apache-2.0 */
/* round.h -- the training loop of one rank. */
#ifndef BALLAST_TRAIN_RANK_ROUND_H
#define BALLAST_TRAIN_RANK_ROUND_H

#include "train/rank/trainer.h"

/* Trains the runs of one rank over its base to their ends, round by round: one step of each, the
 * micro-batches of all in the same visits. trainers[n], of one rank, the lead's first; all are set
 * up. Collective over the ranks of the job.
 *
 * Each run's adapter and checkpoints have the bits that it has alone. BL_ESTOPPED: a signal; a
 * checkpoint of each run that was not done is saved. BL_ENUMERIC: a loss that is not finite; of
 * several runs the others have ended first. BL_EINPUT: rows that changed or cannot be used. Else
 * the error of a device, a file or another rank. */
bl_status bl_round_run(bl_trainer **trainers, int n);

#endif
