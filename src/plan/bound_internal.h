/* SPDX-License-Identifier: Apache-2.0 */
/* bound_internal.h -- a bound of a step's time: for each direction of a pass the longest of
 * compute, links, disk and network, as if they overlapped fully. A search ranks its options by it
 * and runs the best. */
#ifndef BALLAST_PLAN_BOUND_INTERNAL_H
#define BALLAST_PLAN_BOUND_INTERNAL_H

#include "plan/time.h"

/* Compute times of visits. A pass without transfers measures them once per division of a step, way
 * of saving and decodes_each_use. Apart from these, all inputs of a plan_bounds differ only in
 * tiers, shards and the ring. */
typedef struct plan_bounds plan_bounds;
bl_status plan_bounds_create(plan_bounds **out);
void plan_bounds_destroy(plan_bounds *bounds); /* NULL is fine */

/* Seconds of a step. BL_ENOMEM; errors of bl_time_predict. */
bl_status plan_bound(plan_bounds *bounds, const bl_time_input *input, double *step_s);

#endif
