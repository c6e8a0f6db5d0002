/* SPDX-License-Identifier: Apache-2.0 */
/* bench.h -- what `ballast bench NAME` measures: one file a measurement, listed in bench.c. */
#ifndef BALLAST_CLI_BENCH_H
#define BALLAST_CLI_BENCH_H

#include "cli/cli.h"

typedef struct bl_bench {
    const char *name;
    const bl_option *table; /* its options; .group = "bench NAME" */
    size_t n_options;
    size_t values_bytes; /* of the struct they fill */
    const char *details; /* a paragraph for --help; lines end in \n */
    /* `values`: the struct, filled. Results go to stdout; the caller reports a failure. */
    bl_status (*run)(const void *values);
} bl_bench;

extern const bl_bench bl_bench_linear;

#endif
