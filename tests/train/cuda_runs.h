/* SPDX-License-Identifier: Apache-2.0 */
/* cuda_runs.h -- the standard run (runs.h) on a GPU, real or emulated, and its variants. */
#ifndef BALLAST_TESTS_TRAIN_CUDA_RUNS_H
#define BALLAST_TESTS_TRAIN_CUDA_RUNS_H

#include "runs.h"

enum { CUDA_SKIPPED = 77, CUDA_STEPS = 2 };

/* False, having said why, when there is no GPU: main returns CUDA_SKIPPED. */
bool cuda_runs_have_gpu(void);

/* Skips the test on a machine with fewer GPUs. Emulated: programs that it starts from now on have
 * n_gpus. */
void cuda_runs_take_gpus(int n_gpus);
void cuda_runs_give_back_gpus(void);

/* Whether the emulated GPU runs one operation at a time (strict), or under ThreadSanitizer, which
 * takes long: fewer cases. */
bool cuda_runs_are_slow(void);

/* The keys of the standard run on the GPU: two steps, one if strict, a checkpoint at the end, no
 * evaluation. */
void cuda_runs_standard(golden_args *args, const char *output, int ranks);

/* Sets the keys of "key value key value ...". In a value %s becomes the scratch directory. */
void cuda_runs_set_all(golden_args *args, const char *keys);

/* Trains the standard run with these keys into runs_path(name). Errors end the test. */
void cuda_runs_train(const char *name, int ranks, const char *keys);

#endif
