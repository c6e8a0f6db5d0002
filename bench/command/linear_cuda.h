/* SPDX-License-Identifier: Apache-2.0 */
/* linear_cuda.h -- ballast bench linear on a GPU, one case: built with CUDA, or rejected. */
#ifndef BALLAST_BENCH_COMMAND_LINEAR_CUDA_H
#define BALLAST_BENCH_COMMAND_LINEAR_CUDA_H

#include "linear/lora_linear.h"
#include "plan/hardware.h"

/* linear: the weight's rows and cols and the parts' r, row_begin, rows and scale; no memory. */
typedef struct bl_linear_case {
    const char *model, *matrix;
    bl_format format;
    int64_t T, runs, micro_batches;
    bool time_algorithms; /* false: the first one offered is measured in place of the fastest */
    bl_lora_linear linear;
} bl_linear_case;

/* linear_plan.c, for any build: bytes that a case allocates on the GPU, in all and of the pieces
 * with separate sizes; and its seconds, by the GPU's rates. BL_EUSAGE: too large. */
typedef struct bl_linear_sizes {
    int64_t all, input_scales, workspace, prepared;
} bl_linear_sizes;
bl_status bl_bench_linear_sizes(const bl_linear_case *shape, bl_linear_sizes *out);
double bl_bench_linear_seconds(const bl_linear_case *shape, const bl_hardware *gpu);

/* JSON lines for both passes, decoded to bf16 and, for an FP8 format, multiplied as FP8. BL_ELIMIT
 * in a build without CUDA. */
bl_status bl_bench_linear_cuda(bl_device *device, bl_stream *stream, const bl_linear_case *shape);

#endif
