/* SPDX-License-Identifier: Apache-2.0 */
/* rates.h -- the rates of this host for the parts of a training step. Each measurement allocates
 * its memory, runs once, verifies the result (BL_EINTERNAL), and runs `runs`
 * (1..BL_BENCH_MAX_RUNS) more times against the clock. */
#ifndef BALLAST_BENCH_COMMAND_RATES_H
#define BALLAST_BENCH_COMMAND_RATES_H

#include <stdbool.h>

#include "device/device.h"
#include "fp8/fp8.h"
#include "ops/ops.h"

/* Per second: of the fastest run, and of the median one. */
typedef struct bl_rate {
    double best, median;
} bl_rate;

/* Bytes copied (each is read once and written once) by n_threads in pieces of 4 MiB. Threads run,
 * and memory is allocated, where the calling thread may run. */
bl_status bl_rate_memory_copy(int n_threads, size_t n_bytes, int64_t runs, bl_rate *out);

/* Bytes that each of n_devices copies from BL_SPACE_HOST to BL_SPACE_DEVICE, or the other way, by
 * one stream, all at the same time: together they may be bound by the host's memory or its links
 * rather than by their own. At most BL_RATE_MAX_DEVICES. */
enum { BL_RATE_MAX_DEVICES = 16 };
bl_status bl_rate_device_copy(bl_device *const *devices, int n_devices, bool to_device,
                              size_t n_bytes, int64_t runs, bl_rate *out);

/* Bytes that a rank of the local communicator receives from the others: (n_ranks - 1) *
 * bytes_per_rank a gather; the slowest rank counts. */
bl_status bl_rate_all_gather(int n_ranks, size_t bytes_per_rank, int64_t runs, bl_rate *out);

/* 2 n^3 floating-point operations a product of matrices of n rows and columns, of the type act (a
 * CPU has fp32, a GPU bf16), with an fp32 result. */
bl_status bl_rate_gemm(bl_device *device, bl_dtype dtype, int64_t n, int64_t runs, bl_rate *out);

/* Weights converted between fp32 and the format, one of the two FP8 ones, in a matrix of rows x
 * cols; a CPU device. */
bl_status bl_rate_fp8_quantize(bl_device *device, bl_format format, int64_t rows, int64_t cols,
                               int64_t runs, bl_rate *out);
bl_status bl_rate_fp8_dequantize(bl_device *device, bl_format format, int64_t rows, int64_t cols,
                                 int64_t runs, bl_rate *out);

#endif
