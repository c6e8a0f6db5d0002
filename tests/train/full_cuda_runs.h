/* SPDX-License-Identifier: Apache-2.0 */
/* full_cuda_runs.h -- full fine-tuning on a GPU, real or emulated, on cases of
 * tests/golden/full. */
#ifndef BALLAST_TESTS_TRAIN_FULL_CUDA_RUNS_H
#define BALLAST_TESTS_TRAIN_FULL_CUDA_RUNS_H

#include "cuda_runs.h"
#include "full_runs.h"

enum { FULL_CUDA_STEPS = 3 };

#define FULL_CUDA_CASE(name) "../../full/cases/" name

/* Keys for weights, moments and gradients in a tier; %s: the scratch directory. */
#define FULL_CUDA_ON_HOST                                                                          \
    "optimizer_tier host offload_tier host offload_ratio 1 offload_compute_copy false"
#define FULL_CUDA_ON_DISK                                                                          \
    "optimizer_tier disk offload_tier disk offload_ratio 1 offload_compute_copy false "            \
    "offload_dir %s/pages"

/* Sets the keys of a case with two rows per rank and step, then `keys` in the form of
 * cuda_runs_set_all. The caller frees args. */
void full_cuda_runs_fill(const char *name, int n_ranks, const char *output, const char *keys,
                         golden_args *args);
/* Trains with these keys for FULL_CUDA_STEPS steps, into an empty directory. */
bl_status full_cuda_runs_try(const char *name, int n_ranks, const char *output, const char *keys);
void full_cuda_runs_train(const char *name, int n_ranks, const char *output, const char *keys);

/* Trains for FULL_CUDA_STEPS steps on two emulated GPUs, a process each: one step, then, in another
 * run, the others. Fails if anything is new after the warm-up. */
void full_cuda_runs_train_in_parts(const char *name, const char *output, const char *keys);

/* Trains all steps of a case, its batch in `accumulation` micro-batches. Fails if a loss differs
 * from float64 by more than 1e-2, relative, the limit of bf16 on the CPU (test_train_full_bf16.c),
 * or if all differ by less than 1e-6, as in fp32. */
void full_cuda_runs_check_losses(const char *name, int n_ranks, int accumulation, const char *keys);

/* Fails unless the GPU memory of a run of one step equals the prediction, except counters and sums,
 * which are less than 16 KiB per rank. */
void full_cuda_runs_check_memory(const char *name, int n_ranks, const char *keys);

#endif
