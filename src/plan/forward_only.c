/* SPDX-License-Identifier: Apache-2.0 */
/* forward_only.c -- a round with and without references, and evaluations. */
#include "plan/forward_only_internal.h"

#include "base/sizes.h"
#include "plan/report_internal.h"

static bl_time_preference *preference_of(bl_plan_time *time, int i)
{
    return i > 0 ? &time->others[i - 1].preference : &time->input.preference;
}

static bl_status estimate_reference(bl_plan_time *time, int i, double *seconds)
{
    bl_time_preference *preference = preference_of(time, i), whole = *preference;
    bl_time_estimate with, without;

    *seconds = 0;
    if (!whole.has_reference) return BL_OK;
    BL_TRY(bl_time_predict(&time->input, &with));
    preference->has_reference = preference->has_mismatched = false;
    bl_status st = bl_time_predict(&time->input, &without);
    *preference = whole;
    if (st == BL_OK) *seconds = with.step_s - without.step_s;
    return st;
}

bl_status bl_plan_estimate_forward_only(const bl_plan_input *in, const bl_plan *plan, int i,
                                        bl_plan_forward_only *out)
{
    bl_plan_time time;

    *out = (bl_plan_forward_only){.reference_s = 0};
    BL_TRY(bl_plan_time_open(in, plan, &time));
    out->n_evaluation_micro =
        i > 0 ? time.others[i - 1].evaluation.n_micro : time.input.evaluation.n_micro;
    bl_status st = estimate_reference(&time, i, &out->reference_s);
    if (st == BL_OK) st = bl_time_predict_evaluation(&time.input, i, &out->evaluation);
    bl_plan_time_close(&time);
    return st;
}

/* Of a training's time. */
static void print_share(const bl_train_config *c, double seconds, double round_s, FILE *out)
{
    if (c->eval_strategy == BL_EVAL_STEPS)
        fprintf(out, "; every %lld steps, %.2g %% of the time", (long long)c->eval_steps,
                100 * seconds / (seconds + (double)c->eval_steps * round_s));
    else
        fputs(c->eval_strategy == BL_EVAL_EPOCH ? "; once per epoch"
                                                : "; before the first step and after the last",
              out);
}

void bl_plan_forward_only_print(const bl_plan_input *in, int i, const char *name, double round_s,
                                const bl_plan_forward_only *b, FILE *out)
{
    const bl_train_config *c = bl_plan_run_at(in, i).config;
    bl_losses losses = bl_plan_losses_of(c);
    const char *colon = name ? ": " : "";
    char first[PLAN_NUMBER_BYTES], second[PLAN_NUMBER_BYTES];

    if (!name) name = "";
    if (b->reference_s > 0)
        fprintf(out, "Loss     %.32s%s%s compares with %s%s: %s of %s s\n", name, colon,
                bl_loss_name(losses.term[0].loss), c->init_adapter ? "init_adapter" : "the base",
                losses.is_unpaired ? " and other answers" : "",
                plan_predicted(b->reference_s, first), plan_predicted(round_s, second));
    if (b->n_evaluation_micro == 0) return;
    fprintf(out, "Eval     %.32s%s%lld micro-batch%s: %s s", name, colon,
            (long long)b->n_evaluation_micro, b->n_evaluation_micro == 1 ? "" : "es",
            plan_predicted(b->evaluation.seconds, first));
    if (b->evaluation.seconds != b->evaluation.apart_s)
        fprintf(out, " in the next step's visits, %s s in separate passes",
                plan_predicted(b->evaluation.apart_s, first));
    print_share(c, b->evaluation.seconds, round_s, out);
    fputs("\n", out);
}

json_t *bl_plan_forward_only_describe(const bl_plan_input *in, int i, const bl_plan_forward_only *b)
{
    const bl_train_config *c = bl_plan_run_at(in, i).config;

    return json_pack("{s:f, s:I, s:f, s:f, s:b}", "reference_seconds", b->reference_s,
                     "evaluation_micro_batches", (json_int_t)b->n_evaluation_micro,
                     "evaluation_seconds", b->evaluation.seconds, "evaluation_seconds_apart",
                     b->evaluation.apart_s, "eval_overlap", (int)c->eval_overlap);
}
