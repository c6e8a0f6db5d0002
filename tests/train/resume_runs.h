/* SPDX-License-Identifier: Apache-2.0 */
/* resume_runs.h -- an uninterrupted run, and what interruptions leave of it. */
#ifndef BALLAST_TESTS_TRAIN_RESUME_RUNS_H
#define BALLAST_TESTS_TRAIN_RESUME_RUNS_H

#include "golden.h"

enum { STEPS = 8 };

/* The standard run without interruption, made once for each number of ranks. */
const char *whole_run(int ranks);
/* What a crash after `step` steps, and the half of another, would have left of `whole`. */
const char *crashed_run(const char *whole, int64_t step, const char *name);
/* Resumes the standard run, with one other key unless that is NULL. */
bl_status resume(const char *output, int ranks, const char *key, const char *value);

void assert_error_has(const char *text);

#endif
