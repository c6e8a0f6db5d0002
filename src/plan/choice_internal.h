/* SPDX-License-Identifier: Apache-2.0 */
/* choice_internal.h -- options are given one after the other; for search.c only. */
#ifndef BALLAST_PLAN_CHOICE_INTERNAL_H
#define BALLAST_PLAN_CHOICE_INTERNAL_H

#include "plan/search.h"

/* Options of which none is as fast as another and takes as little of the host. */
typedef struct plan_frontier {
    bl_plan_option *option; /* [room], the caller's to free */
    int n, room;
} plan_frontier;

/* Less of a GPU's memory, or as much and less of the host's. */
bool plan_option_is_less(const bl_plan_option *a, const bl_plan_option *b);

/* One that fits. BL_ENOMEM. */
bl_status plan_choice_keep(bl_plan_objective objective, plan_frontier *frontier,
                           const bl_plan_option *option, bl_plan_choice *choice);
/* By speed, after the last one. host_bytes: the most that a process may take. */
void plan_choice_finish(const plan_frontier *frontier, int64_t host_bytes, bl_plan_choice *choice);

#endif
