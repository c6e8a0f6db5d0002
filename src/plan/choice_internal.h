/* SPDX-License-Identifier: Apache-2.0 */
/* choice_internal.h -- keeps the options of a search that may be chosen, and chooses one. For
 * search.c only. */
#ifndef BALLAST_PLAN_CHOICE_INTERNAL_H
#define BALLAST_PLAN_CHOICE_INTERNAL_H

#include "plan/search.h"

/* Options of which none is as fast as another and takes as little of the host. */
typedef struct plan_frontier {
    bl_plan_option *option; /* [room], the caller's to free */
    int n, room;
} plan_frontier;

/* All options that fit. */
typedef struct plan_options {
    bl_plan_option *option; /* [room], the caller's to free */
    int n, room;
} plan_options;
bl_status plan_options_add(plan_options *all, const bl_plan_option *option); /* BL_ENOMEM */
/* By speed, of options whose times are bounds: calls `run` with those that may be chosen: the
 * fastest; of the nearly as fast those that take the least host memory; and some that are not alike
 * to the best. *tokens_per_s: of the run, in the unit of the bounds. BL_ENOMEM; errors of run. */
typedef bl_status (*bl_plan_option_fn)(void *user, const bl_plan_option *option,
                                       double *tokens_per_s);
bl_status plan_options_select(plan_options *all, int64_t host_bytes, bl_plan_option_fn run,
                              void *user);

/* Less of a GPU's memory, or as much and less of the host's. */
bool plan_option_is_less(const bl_plan_option *a, const bl_plan_option *b);

/* One that fits. BL_ENOMEM. */
bl_status plan_choice_keep(bl_plan_objective objective, plan_frontier *frontier,
                           const bl_plan_option *option, bl_plan_choice *choice);
/* By speed, after the last one. host_bytes: the most that a process may take. */
void plan_choice_finish(const plan_frontier *frontier, int64_t host_bytes, bl_plan_choice *choice);

/* search.c: whether anything fits; computes no times. */
bl_status plan_search_memory(const bl_plan_input *input, unsigned free_keys, bl_plan_choice *out);
/* Keys of which only the default is supported. */
unsigned plan_fixed_keys(const bl_train_config *config);
/* As bl_plan_search by speed, with all options run. */
bl_status plan_search_by_runs(const bl_plan_input *input, unsigned free_keys, bl_plan_choice *out);

#endif
