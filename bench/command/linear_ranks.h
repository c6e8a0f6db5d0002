/* SPDX-License-Identifier: Apache-2.0 */
/* linear_ranks.h -- ballast bench linear on the CPU, one case: a stack of layers on several
 * ranks. */
#ifndef BALLAST_BENCH_COMMAND_LINEAR_RANKS_H
#define BALLAST_BENCH_COMMAND_LINEAR_RANKS_H

#include "linear/layer.h"

typedef struct bl_linear_ranks_case {
    const char *matrix;
    bl_linear_spec spec; /* rows, cols, format, lora.r; of all layers */
    int64_t T, layers, runs;
    int ranks, shard_size, threads, ring_depth; /* threads: of a rank */
    double ratio;
    bl_tier tier;
    const char *dir; /* of page files; a new directory */
    uint64_t key;    /* one per case that shares dir */
} bl_linear_ranks_case;

/* JSON lines for both passes. In each run every rank multiplies plain fp32 matrices, passes a
 * resident stack and, where shard_size, ratio or both ask for it, a sharded and offloaded one. */
bl_status bl_bench_linear_ranks(const bl_linear_ranks_case *c);

#endif
