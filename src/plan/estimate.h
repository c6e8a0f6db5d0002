/* SPDX-License-Identifier: Apache-2.0 */
/* estimate.h -- the time of a plan (time.h), of all trainings over its base. */
#ifndef BALLAST_PLAN_ESTIMATE_H
#define BALLAST_PLAN_ESTIMATE_H

#include "plan/plan.h"
#include "plan/time.h"

/* Of any input and plan, on a CPU, too; every micro-batch is full. Needs input->hardware. Errors of
 * bl_time_predict; BL_EINTERNAL: above the peak of the machine. */
bl_status bl_plan_estimate(const bl_plan_input *input, const bl_plan *plan, bl_time_estimate *out);

/* The input of the time model, which borrows the rest from the plan's input. */
typedef struct bl_plan_time {
    bl_time_input input;
    bl_time_run *runs;        /* [model's layers] */
    bl_time_training *others; /* [n_others] */
} bl_plan_time;
/* BL_ENOMEM: nothing to close. */
bl_status bl_plan_time_open(const bl_plan_input *input, const bl_plan *plan, bl_plan_time *out);
void bl_plan_time_close(bl_plan_time *time);

#endif
