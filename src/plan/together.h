/* SPDX-License-Identifier: Apache-2.0 */
/* together.h -- trainings over one base, compared with each of them alone. */
#ifndef BALLAST_PLAN_TOGETHER_H
#define BALLAST_PLAN_TOGETHER_H

#include <jansson.h>
#include <stdio.h>

#include "plan/estimate.h"

/* A training alone over the base. */
typedef struct bl_plan_single {
    bl_plan plan;
    bl_time_estimate time;
    double expected_s; /* of a step with its rows (expect.h); 0: they are not known */
} bl_plan_single;

typedef struct bl_plan_together {
    const bl_plan_input *input; /* of all; borrowed, as are the configurations */
    const bl_train_configs *configs;
    int n;
    bl_plan_single *alone; /* [n] */
} bl_plan_together;

/* Plans each training of the input alone, with the choices of bl_plan_choose, and logs these.
 * Errors of bl_plan_choose and bl_plan_estimate. Free after a failure, too. */
bl_status bl_plan_compare_alone(const bl_plan_input *input, const bl_train_configs *configs,
                                bl_plan_together *out);
void bl_plan_together_free(bl_plan_together *together);

const char *bl_plan_together_name(const bl_plan_together *together, int i);

/* A line per training, and the speedup; `all` is the time of a round. */
void bl_plan_together_print(const bl_plan_together *together, const bl_time_estimate *all,
                            FILE *out);
/* The speedup with the rows of the data, if those of all are known. */
void bl_plan_together_print_expected(const bl_plan_together *together,
                                     const bl_time_estimate *expected, FILE *out);
/* The same as an object. The caller's to json_decref; NULL: out of memory. */
json_t *bl_plan_together_describe(const bl_plan_together *together, const bl_time_estimate *all);

#endif
