/* SPDX-License-Identifier: Apache-2.0 */
/* time_internal.h -- the passes of a round (time_round.c), for the files that run them. */
#ifndef BALLAST_PLAN_TIME_INTERNAL_H
#define BALLAST_PLAN_TIME_INTERNAL_H

#include "plan/time.h"

/* Kinds of micro-batches of a training. */
typedef enum plan_kind {
    PLAN_OF_STEP,
    PLAN_OF_STEP_ALONE, /* the same rows without gradients */
    PLAN_OF_STEP_REFERENCE,
    PLAN_OF_EVALUATION,
    PLAN_OF_EVALUATION_REFERENCE
} plan_kind;

typedef struct plan_micro {
    int training;
    plan_kind kind;
    bool has_adapter, has_gradient, is_companion, is_weighed; /* as bl_pass_micro's */
} plan_micro;

typedef struct plan_round {
    const bl_time_input *input;
    int n_trainings;
    int64_t *left;     /* [n_trainings]: micro-batches of an overlapped evaluation */
    plan_micro *micro; /* of the current pass */
    int n_micro, room;
} plan_round;

/* BL_ENOMEM. Free it after a failure, too. */
bl_status plan_round_create(const bl_time_input *input, plan_round *out);
void plan_round_free(plan_round *round);

/* The input as if training i were alone. */
bl_time_input plan_training_of(const bl_time_input *input, int i);

/* A pass: round->micro [n_micro], valid for the call. is_last: of a round. */
typedef bl_status (*plan_pass_sink)(void *user, const plan_round *round, bool is_last);

/* All passes of a round, in order, with the evaluation of training i in them if left[i] > 0. */
bl_status plan_round_each(plan_round *round, plan_pass_sink sink, void *user);
/* Of an evaluation in separate passes of at most n_most micro-batches. */
bl_status plan_evaluation_each(plan_round *round, int training, int n_most, plan_pass_sink sink,
                               void *user);

/* Of a step, all ranks: bl_time_estimate.model_flops. */
double plan_model_flops(const bl_time_input *input);

#endif
