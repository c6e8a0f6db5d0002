/* SPDX-License-Identifier: Apache-2.0 */
/* step_internal.h -- declarations shared by the files of `ballast bench step`. */
#ifndef BALLAST_BENCH_COMMAND_STEP_INTERNAL_H
#define BALLAST_BENCH_COMMAND_STEP_INTERNAL_H

#include "bench/command/arguments.h"

typedef struct step_options {
    char *model, *as_rank, *dir, *plan_for;
    int64_t layers, distinct_layers, tokens, micro_batches, visit_tokens, lora_r, ring_depth,
        expert_group, threads, steps;
    bl_base_format base_format;
    char *device, *compute_dtype, *activation_checkpointing;
    bool activation_offload;
    double offload_ratio, link_gb_per_s, plan_host_gb;
} step_options;

/* The keys of the training that the options describe, without files. */
void bl_bench_step_add_keys(const step_options *options, int n_ranks, bl_bench_arguments *out);

/* The options and the values derived from them, as the beginning of a JSON object. */
typedef struct step_case {
    const char *device;
    int64_t n_layers, n_distinct;
    int visit_micro;
} step_case;
void bl_bench_step_print_case(const step_options *options, const step_case *what);

/* --plan_for: prints the memory that the options need on that GPU, of which nothing need be there.
 * BL_ENOMEM: it does not fit. */
bl_status bl_bench_step_plan(const step_options *options, int rank, int n_ranks);

#endif
