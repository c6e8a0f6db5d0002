/* SPDX-License-Identifier: Apache-2.0 */
/* input.c -- the trainings over a base as a list: the input's own, then the others. */
#include "plan/input.h"

#include "base/sizes.h"

bl_plan_run bl_plan_run_at(const bl_plan_input *in, int i)
{
    if (i > 0) return in->others[i - 1];
    bl_plan_run own = {.config = in->config,
                       .lora = in->lora,
                       .longest_train_row = in->longest_train_row,
                       .longest_validation_row = in->longest_validation_row,
                       .n_validation_rows = in->n_validation_rows,
                       .data_bytes = in->data_bytes,
                       .tokenizer_bytes = in->tokenizer_bytes,
                       .rows = in->rows};
    for (int k = 0; k < in->n_others; k++) {
        own.data_bytes -= in->others[k].data_bytes;
        own.tokenizer_bytes -= in->others[k].tokenizer_bytes;
    }
    return own;
}

void bl_plan_add_run(bl_plan_input *in, bl_plan_run *others, const bl_plan_run *run)
{
    bool is_known = run->rows.largest > 0 && in->rows.largest > 0;

    others[in->n_others++] = *run;
    in->others = others;
    in->rows.largest = is_known ? bl_max_i64(in->rows.largest, run->rows.largest) : 0;
    in->data_bytes += run->data_bytes;
    in->tokenizer_bytes += run->tokenizer_bytes;
}

bl_plan_input bl_plan_alone(const bl_plan_input *in, int i)
{
    bl_plan_run run = bl_plan_run_at(in, i);
    bl_plan_input alone = *in;

    alone.config = run.config;
    alone.lora = run.lora;
    alone.longest_train_row = run.longest_train_row;
    alone.longest_validation_row = run.longest_validation_row;
    alone.n_validation_rows = run.n_validation_rows;
    alone.data_bytes = run.data_bytes;
    alone.tokenizer_bytes = run.tokenizer_bytes;
    alone.rows = run.rows;
    alone.others = NULL;
    alone.n_others = 0;
    return alone;
}

bl_losses bl_plan_losses_of(const bl_train_config *config)
{
    bl_losses losses = {0};
    (void)bl_train_config_losses(config, &losses);
    return losses;
}
