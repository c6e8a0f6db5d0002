/* SPDX-License-Identifier: Apache-2.0 */
/* time_layer_internal.h -- the costs of a decoder layer's ops, summed by segment and by group. */
#ifndef BALLAST_PLAN_TIME_LAYER_INTERNAL_H
#define BALLAST_PLAN_TIME_LAYER_INTERNAL_H

#include "ops/cost.h"
#include "plan/time_internal.h"

typedef enum plan_group {
    PLAN_OF_PRODUCTS, /* with the frozen matrices */
    PLAN_OF_ATTENTION,
    PLAN_OF_LORA,
    PLAN_OF_GRADIENTS, /* of the matrices, where they are trained */
    PLAN_OF_QUANTIZE,  /* their other operand */
    PLAN_OF_PREPARE,   /* frozen matrices dequantized or transposed */
    PLAN_OF_ACTIVATION,
    PLAN_OF_ELEMENTWISE,
    PLAN_N_GROUPS
} plan_group;
_Static_assert((int)PLAN_N_GROUPS <= (int)BL_TIME_BUDGET_LINES, "bl_time_budget.line");

typedef struct plan_group_sum {
    double seconds, bytes, flops;
} plan_group_sum;

/* Sums of operations; the current segment, if there is one. */
typedef struct plan_tally {
    const bl_time_input *in;
    const bl_time_run *run;
    bl_block_dims dims;
    bl_cost_setting setting;
    int64_t T;   /* tokens of a micro-batch */
    bl_tensor x; /* an activation; only its dtype counts */
    double seconds, bytes;
    /* Weights prepared in this visit, which only its first micro-batch pays for. */
    double prepared_s, prepared_bytes;
    bl_matmul_prepared prepared[BL_LAYER_MATRICES];
    plan_segments *segments;
    plan_group_sum group[PLAN_N_GROUPS]; /* of all segments */
} plan_tally;

/* run: NULL for work outside of layers. */
plan_tally plan_tally_of(const bl_time_input *input, const bl_time_run *run);
void plan_tally_add(plan_tally *t, plan_group group, bl_cost cost);
bl_work plan_work_of(const bl_time_input *input, double seconds, double bytes);

void plan_norm_forward(plan_tally *t);
void plan_norm_backward(plan_tally *t);

/* One micro-batch. has: the bl_save of what backward finds; it recomputes the rest. */
void plan_block_forward(plan_tally *t, plan_segments *out);
void plan_block_backward(plan_tally *t, unsigned has, plan_segments *out);

typedef struct plan_matrix {
    bl_weight weight;
    double stored_bytes;       /* of its codes */
    bl_matmul_mode mode;       /* of products with it, as asked for */
    bl_matmul_fallback reason; /* why that is not FP8 */
    bool is_fp8;               /* its products are made in FP8 */
    int n_parts;               /* with LoRA */
    int64_t part_rows[3], r;   /* rows of each; LoRA's rank */
} plan_matrix;
plan_matrix plan_matrix_of(const bl_time_input *input, const bl_time_run *run, int matrix);

#endif
