/* SPDX-License-Identifier: Apache-2.0 */
/* rungs.h -- successive halving of the runs of a job: of those that reach a rung, the best go on
 * (Jamieson and Talwalkar 2016, arXiv:1502.07943; synchronous).
 *
 *   rung k     grace_period reduction_factor^k steps, k = 0, 1, ...
 *   competes   a run that has more steps than the rung, and was neither stopped at an earlier one
 *              nor early, and has not failed
 *   kept       of n that compete the ceil(n / reduction_factor) with the lowest validation loss
 *              after the rung's steps, of equal ones the first
 *
 * A rung is decided once all that compete have been evaluated there; a run that is there waits for
 * them. So a decision depends on losses alone, and a resumed job, whose runs may be at different
 * steps, decides the same. */
#ifndef BALLAST_TRAIN_RANK_RUNGS_H
#define BALLAST_TRAIN_RANK_RUNGS_H

#include "train/rank/trainer.h"

/* Whether `step` is a rung of the run's, before its last step. */
bool bl_trainer_has_rung(const bl_trainer *trainer, int64_t step);
/* Takes the validation loss of `step` into trainer->rungs, if that is a rung. */
void bl_trainer_note_rung(bl_trainer *trainer, int64_t step, double loss);
/* Whether it is at a rung that is not decided. */
bool bl_trainer_waits(const bl_trainer *trainer);

/* Decides the rungs that all of trainers[n] have come to: rungs.stopped_at of those that do not go
 * on. The same on all ranks, without communication. */
void bl_rungs_decide(bl_trainer **trainers, int n);

#endif
