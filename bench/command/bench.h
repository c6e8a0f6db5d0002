/* SPDX-License-Identifier: Apache-2.0 */
/* bench.h -- the measurements of `ballast bench NAME`, one file each, listed in bench.c; and the
 * functions that several of them need. */
#ifndef BALLAST_BENCH_COMMAND_BENCH_H
#define BALLAST_BENCH_COMMAND_BENCH_H

#include <stdbool.h>
#include <stdint.h>

#include "cli/cli.h"

typedef struct bl_bench {
    const char *name;
    const bl_option *table; /* its options; .group = "bench NAME" */
    size_t n_options;
    size_t values_bytes; /* of the struct they fill */
    const char *details; /* a paragraph for --help; lines end in \n */
    /* `values`: the struct, filled. Results go to stdout; the caller reports a failure. */
    bl_status (*run)(const void *values);
    /* Or this, for one that starts processes of this program: argv are the command's words. */
    bl_status (*run_ranks)(const void *values, int argc, char *const *argv);
} bl_bench;

extern const bl_bench bl_bench_linear, bl_bench_io, bl_bench_pager, bl_bench_hardware,
    bl_bench_step, bl_bench_attention, bl_bench_plan, bl_bench_gather, bl_bench_gemm,
    bl_bench_optimizer;

enum { BL_BENCH_MAX_RUNS = 1000 };

/* The fastest run and the median (of an even number: the mean of the middle two). */
typedef struct bl_bench_times {
    double best_s, median_s;
} bl_bench_times;
bl_bench_times bl_bench_summarize(double *seconds, int64_t n); /* n >= 1; sorts */

/* "4GiB", "512MiB", "64KiB" or plain bytes: a multiple of multiple_bytes, not 0. BL_EUSAGE names
 * the key. */
bl_status bl_bench_parse_bytes(const char *key, const char *text, int64_t multiple_bytes,
                               int64_t *n_bytes);

#endif
