/* SPDX-License-Identifier: Apache-2.0 */
/* expect.c -- known rows refine the plan's bound: mean row, padding, steps and hours. */
#include "plan/expect.h"

#include <math.h>

#include "base/json.h"
#include "base/sizes.h"
#include "plan/estimate.h"
#include "plan/forward_only_internal.h"
#include "plan/report_internal.h"

static const double GB = 1e9;

/* n_micro 0: the rows are not known. */
static void take_rows(const bl_plan_rows *rows, int64_t *micro_tokens, double *document_tokens,
                      double *label_part)
{
    if (rows->n_micro == 0) return;
    *micro_tokens = bl_max_i64(1, (int64_t)llround(rows->mean));
    *document_tokens = rows->document_tokens;
    *label_part = rows->label_part;
}

bl_status bl_plan_expect(const bl_plan_input *in, const bl_plan *plan, bl_plan_expectation *out)
{
    bl_plan_time time;
    bl_time_input *t = &time.input;

    BL_TRY(
        bl_plan_expect_memory(in, &plan->placement, &plan->optimizer, &plan->pass, &out->memory));
    BL_TRY(bl_plan_time_open(in, plan, &time));
    take_rows(&in->rows, &t->micro_tokens, &t->document_tokens, &t->label_part);
    for (int i = 0; i < in->n_others; i++) {
        bl_time_training *other = &time.others[i];
        take_rows(&in->others[i].rows, &other->micro_tokens, &other->document_tokens,
                  &other->label_part);
    }
    bl_status st = bl_time_predict(t, &out->time);
    bl_plan_time_close(&time);
    BL_TRY(st);
    bl_plan_forward_only passes;
    BL_TRY(bl_plan_estimate_forward_only(in, plan, 0, &passes));
    out->evaluation_s = passes.evaluation.seconds;
    out->run_s = (double)in->rows.n_steps * out->time.step_s +
                 (double)in->rows.n_evaluations * out->evaluation_s;
    return BL_OK;
}

static double host_gb(const bl_plan_input *in, const bl_memory_ledger *m)
{
    return (double)m->total * (double)bl_plan_processes_on_host(&in->topology) / GB;
}

void bl_plan_expectation_print(const bl_plan_input *in, const bl_plan *plan,
                               const bl_time_estimate *bound, const bl_plan_expectation *e,
                               FILE *out)
{
    const bl_plan_rows *rows = &in->rows;
    long long full = (long long)(in->config->per_device_train_batch_size * in->longest_train_row);
    bool is_gpu = plan->pass.kind == BL_DEVICE_CUDA;
    char a[PLAN_NUMBER_BYTES], b[PLAN_NUMBER_BYTES];

    fprintf(out,
            "Data     micro-batches of %.0f tokens on average, %lld at most; the bound has %lld\n",
            rows->mean, (long long)rows->largest, full);
    fprintf(out, "         expected: %s tokens/s, %s s per step, %.2f GB of memory per host\n",
            plan_predicted(e->time.tokens_per_s, a), plan_predicted(e->time.step_s, b),
            host_gb(in, &e->memory));
    fprintf(out, "         bound:    %s tokens/s, %s s per step, %.2f GB%s\n",
            plan_predicted(bound->tokens_per_s, a), plan_predicted(bound->step_s, b),
            host_gb(in, &plan->memory), is_gpu ? "; GPU memory is allocated for the bound" : "");
}

bl_status bl_plan_expectation_describe(const bl_plan_input *in, const bl_plan_expectation *e,
                                       json_t **out)
{
    const bl_plan_rows *rows = &in->rows;

    bl_json_watch_memory();
    *out = json_pack("{s:f, s:I, s:f, s:f, s:f, s:f, s:I}", "micro_batch_tokens", rows->mean,
                     "largest_micro_batch_tokens", (json_int_t)rows->largest, "document_tokens",
                     rows->document_tokens, "label_part", rows->label_part, "tokens_per_s",
                     e->time.tokens_per_s, "step_s", e->time.step_s, "memory_bytes_per_process",
                     (json_int_t)e->memory.total);
    if (*out && !bl_json_ran_out()) return BL_OK;
    json_decref(*out);
    *out = NULL;
    return BL_FAIL(BL_ENOMEM, "out of memory: the expectation of a plan");
}
