/* SPDX-License-Identifier: Apache-2.0 */
/* rungs.h -- successive halving of several runs: the best of the runs that reach a rung continue
 * (Jamieson and Talwalkar 2016, arXiv:1502.07943; synchronous).
 *
 *   rung k     grace_period reduction_factor^k steps, k = 0, 1, ...
 *   competes   a run with more steps than the rung that can continue after it: not one that was
 *              stopped at an earlier rung, failed before this rung, or ended by its
 *              early_stopping_patience, at this rung or before
 *   kept       of n competing runs, the ceil(n / reduction_factor) with the lowest validation loss
 *              after the rung's steps; on a tie, the earlier run
 *
 * A rung is decided when all competing runs have been evaluated there; until then a run waits. So a
 * decision depends only on losses, and a resumed training, whose runs may be at different steps,
 * makes the same decisions. */
#ifndef BALLAST_TRAIN_RANK_RUNGS_H
#define BALLAST_TRAIN_RANK_RUNGS_H

#include "train/rank/trainer.h"

/* Whether `step` is a rung of the run, before its last step. */
bool bl_trainer_has_rung(const bl_trainer *trainer, int64_t step);
/* Stores the validation loss of `step` in trainer->rungs, if `step` is a rung. */
void bl_trainer_note_rung(bl_trainer *trainer, int64_t step, double loss);
/* Whether the run is at a rung that is not decided yet. */
bool bl_trainer_waits(const bl_trainer *trainer);

/* Decides each rung that all competing runs of trainers[n] have reached: sets rungs.stopped_at of
 * the runs that stop. The same on all ranks, without communication. */
void bl_rungs_decide(bl_trainer **trainers, int n);

#endif
