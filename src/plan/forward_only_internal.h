/* SPDX-License-Identifier: Apache-2.0 */
/* forward_only_internal.h -- the time of passes without gradients: references of preference losses,
 * which are part of a step, and evaluations, which are not. */
#ifndef BALLAST_PLAN_FORWARD_ONLY_INTERNAL_H
#define BALLAST_PLAN_FORWARD_ONLY_INTERNAL_H

#include <jansson.h>
#include <stdio.h>

#include "plan/estimate.h"

/* Of one training. */
typedef struct bl_plan_forward_only {
    /* Seconds by which a round is longer than without the reference and, with kto, mismatched
     * answers; 0: the loss has none. */
    double reference_s;
    int64_t n_evaluation_micro; /* of a rank; 0: no validation rows, or their number is not known */
    bl_time_evaluation_estimate evaluation;
} bl_plan_forward_only;

/* Of training i (bl_plan_run_at). Errors of bl_plan_estimate. */
bl_status bl_plan_estimate_forward_only(const bl_plan_input *input, const bl_plan *plan, int i,
                                        bl_plan_forward_only *out);

/* Prints the forward-only passes of training i. name: the training's, or NULL for the only one.
 * round_s: the time of a round. */
void bl_plan_forward_only_print(const bl_plan_input *input, int i, const char *name, double round_s,
                                const bl_plan_forward_only *passes, FILE *out);
/* The same as an object. The caller's to json_decref; NULL: out of memory. */
json_t *bl_plan_forward_only_describe(const bl_plan_input *input, int i,
                                      const bl_plan_forward_only *passes);

#endif
