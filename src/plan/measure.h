/* SPDX-License-Identifier: Apache-2.0 */
/* measure.h -- the rates that a plan's time model needs, measured on this host's processor at the
 * shapes of a run. */
#ifndef BALLAST_PLAN_MEASURE_H
#define BALLAST_PLAN_MEASURE_H

#include "plan/input.h"
#include "plan/time.h"

typedef struct bl_plan_measure_options {
    const bl_model_config *model; /* its shapes; borrowed */
    bl_dtype act;                 /* of activations */
    int64_t lora_r, tokens;
    /* Of the layers' matrices: fp8_row for all FP8 formats, or a format without FP8. */
    bl_format format;
    bool is_trained; /* products for the gradients of the matrices are among those measured */
    int64_t document_tokens; /* 1..tokens: attention's documents */
    int n_ranks, threads;    /* 1..16 ranks, all measuring at once */
    /* Limits the rows of the matrices, so that the products of a layer, and that of the head, take
     * about this many FLOPs; 0: all rows. */
    double flops_max;
    int64_t runs, queued; /* the fewest runs of each operation; repetitions in a run */
    double seconds;       /* the least time of all runs */
    /* A second is one of the processor's for each thread, which other jobs of the machine do not
     * lengthen. */
    bool in_cpu_time;
    bool measures_head; /* else head_flops_per_s stays 0 */
} bl_plan_measure_options;

/* Of one of the ranks: products with the layers' matrices, attention and the other operations of a
 * layer. Rates of links are 0. BL_EUSAGE, BL_ENOMEM, BL_ELIMIT. */
bl_status bl_plan_measure_rates(const bl_plan_measure_options *options, bl_rates *out);

/* Rates, how far three rounds of them lay apart, and when that was. */
typedef struct bl_plan_measured {
    bl_rates rates;
    double scatter; /* of products: (highest - lowest) / mean */
    char date[24];  /* "2026-11-23 14:05 UTC" */
    bool is_cached;
} bl_plan_measured;

/* Of the run that `input` describes, for a few seconds; or as this host measured them before with
 * the same processor, build, ranks, threads and shapes: kept in $XDG_CACHE_HOME/ballast, or
 * ~/.cache/ballast. What a cache holds is used when all of it is plausible, and measured again
 * otherwise, or when `again` asks. A cache that cannot be written is warned of. */
bl_status bl_plan_measure(const bl_plan_input *input, bool again, bl_plan_measured *out);

/* The layers whose rates are measured. */
bl_layer_kind bl_plan_measured_kind(const bl_model_config *config);
/* False: more ranks, or larger matrices, than a few seconds suffice for. */
bool bl_plan_can_measure(const bl_plan_input *input);

#endif
