/* SPDX-License-Identifier: Apache-2.0 */
/* together.c -- plans each of several trainings alone, and compares their times with a round. */
#include "plan/together.h"

#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/sizes.h"
#include "plan/expect.h"
#include "plan/report_internal.h"

const char *bl_plan_together_name(const bl_plan_together *t, int i)
{
    return bl_train_config_name((const bl_train_config *const *)t->configs->run, t->n, i);
}

static bl_status plan_alone(const bl_plan_input *in, bl_plan_single *out)
{
    bl_plan_expectation expected;

    BL_TRY(bl_plan_choose(in, &out->plan));
    BL_TRY(bl_plan_estimate(in, &out->plan, &out->time));
    if (in->rows.n_micro == 0) return BL_OK;
    BL_TRY(bl_plan_expect(in, &out->plan, &expected));
    out->expected_s = expected.time.step_s;
    return BL_OK;
}

bl_status bl_plan_compare_alone(const bl_plan_input *in, const bl_train_configs *configs,
                                bl_plan_together *out)
{
    bl_status st = BL_OK;

    *out = (bl_plan_together){.input = in, .configs = configs, .n = configs->n};
    out->alone = calloc((size_t)out->n, sizeof *out->alone);
    if (!out->alone) return BL_FAIL(BL_ENOMEM, "out of memory: plans of %d runs", out->n);
    for (int i = 0; st == BL_OK && i < out->n; i++) {
        char label[128];
        bl_plan_input alone = bl_plan_alone(in, i);
        snprintf(label, sizeof label, "%s alone", bl_plan_together_name(out, i));
        bl_log_set_label(label);
        st = plan_alone(&alone, &out->alone[i]);
        bl_log_set_label(NULL);
    }
    return st;
}

void bl_plan_together_free(bl_plan_together *t)
{
    free(t->alone);
    *t = (bl_plan_together){.n = 0};
}

/* Seconds of a step of each, one after the other; expected: with their rows, 0 where not all are
 * known. */
static double alone_s_of(const bl_plan_together *t, bool expected)
{
    double seconds = 0;

    for (int i = 0; i < t->n; i++) {
        if (expected && t->alone[i].expected_s == 0) return 0;
        seconds += expected ? t->alone[i].expected_s : t->alone[i].time.step_s;
    }
    return seconds;
}

static double host_bytes(const bl_plan_together *t, const bl_plan *plan)
{
    return (double)plan->memory.total * bl_plan_processes_on_host(&t->input->topology);
}

static double parameters_of(const bl_plan_together *t, const bl_plan_run *run)
{
    return (double)bl_lora_n_weights(run->lora, t->input->model->n_layers);
}

void bl_plan_together_print(const bl_plan_together *t, const bl_time_estimate *all, FILE *out)
{
    double alone_s = alone_s_of(t, false);
    char a[PLAN_NUMBER_BYTES], b[PLAN_NUMBER_BYTES];
    int width = 0;

    for (int i = 0; i < t->n; i++)
        width = (int)bl_max_i64(width, (int64_t)strlen(bl_plan_together_name(t, i)));
    width = (int)bl_min_i64(width, 32);
    for (int i = 0; i < t->n; i++) {
        bl_plan_run run = bl_plan_run_at(t->input, i);
        fprintf(out, "%s%-*.*s LoRA r %-3lld %.4g M, %lld x %lld tokens; alone %s s, %.3g GB\n",
                i == 0 ? "Runs     " : "         ", width, width, bl_plan_together_name(t, i),
                (long long)run.lora->options.r, parameters_of(t, &run) * 1e-6,
                (long long)(run.config->per_device_train_batch_size *
                            run.config->gradient_accumulation_steps),
                (long long)run.longest_train_row, plan_predicted(t->alone[i].time.step_s, a),
                host_bytes(t, &t->alone[i].plan) / PLAN_GB);
    }
    fprintf(out, "Together %s s for a step of each; one after the other %s s: %.2f times as fast\n",
            plan_predicted(all->step_s, a), plan_predicted(alone_s, b), alone_s / all->step_s);
}

void bl_plan_together_print_expected(const bl_plan_together *t, const bl_time_estimate *expected,
                                     FILE *out)
{
    double alone_s = alone_s_of(t, true);
    char a[PLAN_NUMBER_BYTES];

    if (alone_s > 0)
        fprintf(out, "         expected one after the other: %s s: %.2f times as fast together\n",
                plan_predicted(alone_s, a), alone_s / expected->step_s);
}

static json_t *describe_run(const bl_plan_together *t, int i)
{
    bl_plan_run run = bl_plan_run_at(t->input, i);
    const bl_plan_single *alone = &t->alone[i];

    return json_pack(
        "{s:s, s:I, s:I, s:I, s:I, s:I, s:{s:f, s:I, s:I}}", "output_dir", run.config->output_dir,
        "lora_r", (json_int_t)run.lora->options.r, "lora_parameters",
        (json_int_t)bl_lora_n_weights(run.lora, t->input->model->n_layers), "row_tokens",
        (json_int_t)run.longest_train_row, "per_device_train_batch_size",
        (json_int_t)run.config->per_device_train_batch_size, "gradient_accumulation_steps",
        (json_int_t)run.config->gradient_accumulation_steps, "alone", "step_seconds",
        alone->time.step_s, "bytes_per_process", (json_int_t)alone->plan.memory.total,
        "device_bytes_per_rank", (json_int_t)alone->plan.memory.device);
}

json_t *bl_plan_together_describe(const bl_plan_together *t, const bl_time_estimate *all)
{
    double alone_s = alone_s_of(t, false);
    json_t *runs = json_array();

    for (int i = 0; i < t->n; i++) json_array_append_new(runs, describe_run(t, i));
    return json_pack("{s:f, s:f, s:f, s:o}", "round_seconds", all->step_s, "alone_seconds", alone_s,
                     "speedup", alone_s / all->step_s, "runs", runs);
}
