/* SPDX-License-Identifier: Apache-2.0 */
/* sampler.h -- which row of the data set is trained when; and the learning rate of a step.
 *
 * A run sees an endless sequence of rows: epoch after epoch, each a permutation of the data set
 * (the identity without shuffling). A step takes the next B positions, B = per_device x
 * accumulation x ranks: micro-batch by micro-batch, rank by rank within one. With epoch_end
 * short_step it takes no position of the next epoch: an epoch has ceil(n_rows / B) steps, and its
 * last one the rows that are left, as transformers' Trainer has it. The permutation is computed,
 * not stored: a Feistel network over the next power of four, walked until it lands inside (Black &
 * Rogaway 2002, "Ciphers with arbitrary finite domains"), keyed by (seed, epoch). */
#ifndef BALLAST_TRAIN_DATA_SAMPLER_H
#define BALLAST_TRAIN_DATA_SAMPLER_H

#include <stdbool.h>
#include <stdint.h>

#include "config/config.h"

typedef struct bl_sampler {
    int64_t n_rows; /* >= 1 */
    uint64_t seed;
    bool shuffle;
} bl_sampler;

/* The row at `position` >= 0 of the endless sequence. */
int64_t bl_sampler_row(const bl_sampler *sampler, int64_t position);

/* B. */
int64_t bl_train_batch_rows(const bl_train_config *config);
/* Positions that the first `step` steps take: step `step` (from 0) takes those up to that of step +
 * 1. */
int64_t bl_train_position(const bl_train_config *config, int64_t n_rows, int64_t step);
/* Steps of the whole run: max_steps, or num_train_epochs rounded up to whole steps. */
int64_t bl_train_total_steps(const bl_train_config *config, int64_t n_rows);

/* The learning rate of step `step` (from 0) as transformers' get_scheduler gives it: the first step
 * of a warm-up has rate 0. warm-up = warmup_steps, or ceil(warmup_ratio * total_steps) when that is
 * 0. */
double bl_train_learning_rate(const bl_train_config *config, int64_t step, int64_t total_steps);

#endif
