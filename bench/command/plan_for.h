/* SPDX-License-Identifier: Apache-2.0 */
/* plan_for.h -- what a measurement would take on a GPU that need not be there (--plan_for): its
 * memory, by the sizes that it allocates, and its time, by the rates of the machine's preset. */
#ifndef BALLAST_BENCH_COMMAND_PLAN_FOR_H
#define BALLAST_BENCH_COMMAND_PLAN_FOR_H

#include "plan/hardware.h"

/* host_available 0: host memory is not looked at. */
typedef struct bl_bench_needs {
    int64_t gpu, gpu_available, host, host_available; /* bytes */
    double seconds;                                   /* of the whole command */
} bl_bench_needs;

/* Seconds before a measurement begins: the program's start, a context, kernels that are loaded.
 * Assumed. */
extern const double bl_bench_start_s;

/* `name`: a preset's GPU, or "here"; *gpu_available is what its driver leaves to one process.
 * BL_EUSAGE. */
bl_status bl_bench_plan_gpu(const char *name, bl_hardware *out, int64_t *gpu_available);

/* Completes a measurement's JSON object, whose other fields are printed, with plan_for, the needs
 * and whether they fit. BL_ENOMEM, of `bench`: they do not. */
bl_status bl_bench_plan_end(const char *bench, const char *plan_for, const bl_bench_needs *needs);

#endif
