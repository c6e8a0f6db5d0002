/* SPDX-License-Identifier: Apache-2.0 */
/* time_case.h -- a job to predict, whole in one struct: Llama 3.1 405B in FP8 on eight H100. */
#ifndef BALLAST_TESTS_PLAN_TIME_CASE_H
#define BALLAST_TESTS_PLAN_TIME_CASE_H

#include "arch/llama.h"
#include "plan/time.h"

typedef struct time_case {
    bl_model_config model;
    bl_lora_layout lora;
    bl_time_run run;
    bl_time_input input; /* points into the case */
} time_case;

/* LoRA of rank 16 on all projections, one micro-batch of 4096 tokens, everything resident, FP8
 * products; rates as one node of eight H100 is known to reach: 700 and 1300 TFLOP/s, 343 GB/s
 * between GPUs, 50 GB/s from host memory. */
void time_case_init(time_case *c, const char *model);

/* As above, attention at the rates that cuDNN reaches with documents of `tokens`. */
void time_case_set_tokens(time_case *c, int64_t tokens);

#endif
