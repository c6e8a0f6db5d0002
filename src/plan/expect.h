/* SPDX-License-Identifier: Apache-2.0 */
/* expect.h -- the expected sizes and times of a run whose rows are known (input.h: bl_plan_rows).
 * The plan itself has the bound: every micro-batch is as long as the longest row allows. */
#ifndef BALLAST_PLAN_EXPECT_H
#define BALLAST_PLAN_EXPECT_H

#include <jansson.h>
#include <stdio.h>

#include "plan/plan.h"
#include "plan/time.h"

typedef struct bl_plan_expectation {
    bl_memory_ledger memory;
    bl_time_estimate time; /* of the mean step */
    double evaluation_s;   /* of one; 0: no validation rows */
    double run_s;          /* of all steps and evaluations */
} bl_plan_expectation;

/* Needs input->rows and input->hardware. Errors as bl_plan_estimate's. */
bl_status bl_plan_expect(const bl_plan_input *input, const bl_plan *plan, bl_plan_expectation *out);

/* A few lines below a plan's: expected, and the bound. */
void bl_plan_expectation_print(const bl_plan_input *input, const bl_plan *plan,
                               const bl_time_estimate *bound, const bl_plan_expectation *expected,
                               FILE *out);

/* The same as an object. The caller's to json_decref; BL_ENOMEM. */
bl_status bl_plan_expectation_describe(const bl_plan_input *input,
                                       const bl_plan_expectation *expected, json_t **out);

#endif
