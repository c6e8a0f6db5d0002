/* SPDX-License-Identifier: Apache-2.0 */
/* generate_runs.h -- generation with an adapter on a GPU, real or emulated. */
#ifndef BALLAST_TESTS_TRAIN_GENERATE_RUNS_H
#define BALLAST_TESTS_TRAIN_GENERATE_RUNS_H

/* Fails unless the logits after a text of ten tokens, as a part of the largest one, are those of
 * the CPU within 0.03: bf16 logits, 2^-9 each, after a few layers of as much. So are those after
 * the same text in pieces of three tokens. Another text must have other logits. */
void generate_runs_check(const char *model, const char *adapter);

#endif
