/* SPDX-License-Identifier: Apache-2.0 */
/* run_pass_internal.h -- the program on a device made of rates (device/model.h): the objects of one
 * rank, without weights, queue the passes of a round as a training does. */
#ifndef BALLAST_PLAN_RUN_PASS_INTERNAL_H
#define BALLAST_PLAN_RUN_PASS_INTERNAL_H

#include "device/simulation.h"
#include "plan/time_internal.h"

typedef struct plan_rank plan_rank;

/* Rank 0 of the input, which is borrowed. sink receives the spans of its timeline; NULL: none.
 * with_evaluations: passes may have micro-batches of evaluations. BL_ENOMEM. */
bl_status plan_rank_create(const bl_time_input *input, bool with_evaluations, bl_span_sink sink,
                           void *user, plan_rank **out);
void plan_rank_destroy(plan_rank *rank); /* NULL is fine */

/* Each returns when compute has done its work; prefetches for the next pass continue. */
bl_status plan_rank_run(plan_rank *rank, const plan_round *round); /* a pass */
/* After the last pass of a round: join waits for the gradients of each training, then update sums
 * and updates. */
bl_status plan_rank_join(plan_rank *rank);
bl_status plan_rank_update(plan_rank *rank);
/* Waits for all streams; the sink has all spans. */
bl_status plan_rank_drain(plan_rank *rank);

/* Its streams in simulated time, and the lane of one of their operations. */
const bl_simulation *plan_rank_simulation(const plan_rank *rank);
bl_lane plan_rank_lane(const plan_rank *rank, const bl_sim_op *op);
bl_device *plan_rank_device(const plan_rank *rank); /* for tests */

/* A kernel of a layer's visit. */
typedef struct plan_kernel {
    bool is_backward;
    const char *op; /* "matmul_weight" */
    int rate;       /* bl_cost_rate */
    double flops, bytes, seconds;
} plan_kernel;
typedef void (*plan_kernel_sink)(void *user, const plan_kernel *kernel);
/* The first run, or the longest of the other kind of layers if that is longer. */
const bl_time_run *plan_longest_run(const bl_time_input *input);

/* The kernels of compute in both visits of one layer of the kind of plan_longest_run, for all
 * micro-batches of a group of the first training, in order. Errors of plan_rank_create. */
bl_status plan_run_kernels(const bl_time_input *input, plan_kernel_sink sink, void *user);

/* ---- run_step.c: bl_time_predict, bl_time_predict_evaluation and bl_time_trace by the program */

bl_status plan_run_predict(const bl_time_input *input, bl_time_estimate *out);
bl_status plan_run_evaluation(const bl_time_input *input, int training,
                              bl_time_evaluation_estimate *out);
bl_status plan_run_trace(const bl_time_input *input, bl_time_passes passes, bl_time_before before,
                         bl_span_sink sink, void *user);

#endif
