/* SPDX-License-Identifier: Apache-2.0 */
/* offload_runs.h -- runs whose base is placed somewhere, and the same run in memory. */
#ifndef BALLAST_TESTS_TRAIN_OFFLOAD_RUNS_H
#define BALLAST_TESTS_TRAIN_OFFLOAD_RUNS_H

#include "golden.h"

enum { STEPS = 3, MAX_RANKS = 8 };

/* The standard run of STEPS steps, without a placement. */
void offload_args(golden_args *args, const char *output, int ranks);
/* The run with everything in device memory, made when first asked for. */
const char *plain_run(int ranks);
/* The folder of page files that runs of so many ranks share. */
const char *pages_dir(int ranks);

void assert_error_has(const char *text);

#endif
