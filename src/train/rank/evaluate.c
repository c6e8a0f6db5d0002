/* SPDX-License-Identifier: Apache-2.0 */
/* evaluate.c -- the loss over the validation rows: rank r of n takes rows (k n + r) b ... of
 * micro-batch k, b = per_device_eval_batch_size. All ranks visit equally often; one without rows
 * left visits with no tokens. */
#include <math.h>

#include "base/sizes.h"
#include "train/rank.h"
#include "train/rank/preference.h"

static bl_status fill(bl_rank *r, int64_t micro)
{
    const bl_job *job = r->job;
    int64_t b = job->config->per_device_eval_batch_size,
            first = (micro * job->topology.n_ranks + r->index) * b;
    bl_batches *batches = r->evaluation;

    bl_batches_clear(batches);
    for (int64_t row = first; row < bl_min_i64(first + b, job->data.validation.n); row++)
        BL_TRY(bl_batches_append(batches, 0, job->data.validation.set,
                                 job->data.validation.first + row, row));
    if (r->preference) BL_TRY(bl_preference_mismatch(r->preference, batches, r->mismatched));
    return bl_batches_upload(batches, r->compute);
}

/* The validation rows of micro-batch `micro` of all ranks. */
static bl_status run_micro(bl_rank *r, int64_t micro, double *loss_sum)
{
    enum { MAX_COMPANIONS = 3 };
    bl_pass_micro micros[1 + MAX_COMPANIONS] = {{.batch = r->evaluation->micro,
                                                 .adapter = r->state ? &r->adapter : NULL,
                                                 .loss_sum = loss_sum}};
    bl_pass_input input = {.n_micro = 1, .micro = micros};

    BL_TRY(fill(r, micro));
    if (r->preference)
        bl_preference_join(r->preference, r->evaluation, r->mismatched, 0, micros, &input);
    BL_TRY(bl_pass_run(r->pass, &input));
    return bl_stream_synchronize(r->compute); /* the batch is about to be filled again */
}

bl_status bl_rank_evaluate(bl_rank *r, bl_eval_result *out)
{
    const bl_job *job = r->job;
    int64_t per_visit = job->config->per_device_eval_batch_size * job->topology.n_ranks;
    double *sums = r->sums->memory; /* loss, labels: exact in a double */
    double *result = r->sums->host, labels = 0.0;

    if (r->preference) bl_preference_begin(r->preference);
    BL_TRY(bl_stream_zero(r->compute, sums, 2 * sizeof *sums));
    for (int64_t micro = 0; micro < bl_ceil_div(job->data.validation.n, per_visit); micro++) {
        BL_TRY(run_micro(r, micro, &sums[0]));
        labels += (double)r->evaluation->n_labels;
    }
    result[1] = labels;
    BL_TRY(bl_twin_upload(r->sums, r->compute, sizeof labels, sizeof labels));
    BL_TRY(bl_stream_synchronize(r->compute));
    BL_TRY(bl_comm_all_reduce_f64(r->world, r->communication, sums, 2));
    BL_TRY(bl_twin_download(r->sums, r->communication, 0, r->sums->n_bytes));
    BL_TRY(bl_stream_synchronize(r->communication));
    if (result[1] == 0.0)
        return BL_FAIL(BL_EINPUT, "no row of the validation data has a label that carries loss");
    *out = (bl_eval_result){.loss = result[0] / result[1],
                            .label_tokens = (int64_t)result[1],
                            .rows = job->data.validation.n};
    if (r->preference) {
        BL_TRY(bl_preference_end(r->preference, &out->preference));
        out->loss = out->preference.evaluation_loss;
    }
    if (!isfinite(out->loss)) return BL_FAIL(BL_ENUMERIC, "the validation loss is not finite");
    return BL_OK;
}
