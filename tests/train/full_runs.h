/* SPDX-License-Identifier: Apache-2.0 */
/* full_runs.h -- trainings of every weight on the cases of tests/golden/full, for their bits. */
#ifndef BALLAST_TESTS_TRAIN_FULL_RUNS_H
#define BALLAST_TESTS_TRAIN_FULL_RUNS_H

#include "arch/trained.h"
#include "runs.h"

enum { FULL_RUNS_STEPS = 20, FULL_RUNS_CASES = 3 };

/* Cases for bits: a tied head, norms of heads, a LayerNorm in a parallel layer. */
extern const char *const full_runs_cases[FULL_RUNS_CASES];

/* The keys of a case, on one thread. */
void full_runs_fill(const json_t *golden, const json_t *topology, const char *model,
                    const char *output, golden_args *args);

/* Trains a case on n_ranks ranks with three rows per rank in a step, into the scratch directory.
 * extra: keys and values, NULL behind them; NULL: none. */
bl_status full_runs_try(const char *name, int n_ranks, const char *output, const char *const *extra,
                        const struct bl_pager_hooks *hooks); /* of page files; may be NULL */
void full_runs_train(const char *name, int n_ranks, const char *output, const char *const *extra);

/* The keys of a run with a checkpoint after each step. */
void full_runs_kill_args(int n_ranks, const char *output, golden_args *args);

/* Such a run with the keys `extra`, killed at random moments, `most` times, and resumed until it
 * ends: state and model are those of a run with the keys `plain` that was left alone. How often it
 * was killed. */
int full_runs_kill(int n_ranks, int most, const char *const *plain, const char *const *extra);

/* Fails unless both runs have the same state of all ranks after step `step`; two files the same
 * bytes. */
void full_runs_assert_same(int step, const char *a, const char *b, int n_ranks, const char *what);
void full_runs_assert_same_file(const char *a, const char *b);

/* Trains the cases that a list of tests/golden/full names on all their topologies, and compares
 * them with their float64 references.
 *
 * Limits: first loss 1e-6, losses of 20 steps 1e-5, relative; first gradients 1e-4 of each tensor's
 * norm. The final weights are compared relative to how far training moved them: AdamW divides by
 * sqrt(v), so a gradient's relative error of 1e-4 may move by as much. */
void full_runs_check(const char *list);

/* The tensors that a case trains; free them. */
void full_runs_choose(const json_t *golden, const bl_model_config *model, bl_trained_set *out);

#endif
