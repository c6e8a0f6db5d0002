/* SPDX-License-Identifier: Apache-2.0 */
/* generate_runs.h -- generation with an adapter on a GPU, real or emulated. */
#ifndef BALLAST_TESTS_TRAIN_GENERATE_RUNS_H
#define BALLAST_TESTS_TRAIN_GENERATE_RUNS_H

/* Generates after a text of ten tokens, whole and in pieces of three tokens. Fails if a logit
 * differs from the CPU's by more than 0.03 of the largest one (bf16: 2^-9 per rounding, over a few
 * layers), or if another text has the same logits. */
void generate_runs_check(const char *model, const char *adapter);

#endif
