/* SPDX-License-Identifier: Apache-2.0 */
/* plan_rates.h -- the rates that a plan's time model wants, measured on this host at the shapes of
 * a run. */
#ifndef BALLAST_BENCH_COMMAND_PLAN_RATES_H
#define BALLAST_BENCH_COMMAND_PLAN_RATES_H

#include "arch/config.h"
#include "plan/time.h"

/* Of one of n_ranks (1..16) ranks with `threads` threads each, all measuring at once: products,
 * attention and the other operations of a layer on `tokens` tokens, rank lora_r, a base in fp8_row;
 * copies and gathers of one matrix's shard. At least `runs` runs of each. */
/* in_cpu_time: a second is one of the processor's for each thread, which other jobs of the machine
 * do not lengthen. */
bl_status bl_bench_plan_rates(const bl_model_config *model, int64_t lora_r, int64_t tokens,
                              int n_ranks, int threads, int64_t runs, bool in_cpu_time,
                              bl_rates *out);

#endif
