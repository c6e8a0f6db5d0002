/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_tests.h -- all_gather_perf of NVIDIA's nccl-tests, as another measurement of the same
 * gathers. */
#ifndef BALLAST_BENCH_COMMAND_NCCL_TESTS_H
#define BALLAST_BENCH_COMMAND_NCCL_TESTS_H

#include <stdbool.h>
#include <stdint.h>

/* Gathers n_bytes in all, in place, on n_gpus GPUs of this process; *bus_bytes_per_s is its busbw.
 * False: it is not installed, or fails. */
bool bl_nccl_tests_gather(int n_gpus, int64_t n_bytes, int64_t runs, double *bus_bytes_per_s);

/* The same from the output of all_gather_perf. */
bool bl_nccl_tests_parse(const char *text, int64_t n_bytes, double *bus_bytes_per_s);

#endif
