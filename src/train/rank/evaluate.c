/* SPDX-License-Identifier: Apache-2.0 */
/* evaluate.c -- the loss over the validation rows. */
#include "train/rank/evaluate.h"

#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "train/rank/preference.h"

int bl_evaluation_capacity(const bl_evaluation *e)
{
    return (int)bl_max_i64(1, bl_min_i64(e->n_overlapped, e->rank->job->plan.n_overlapped));
}

static bl_status create_parts(bl_evaluation *e)
{
    bl_rank *r = e->rank;

    for (int i = 0; i < 2; i++) {
        BL_TRY(bl_batches_create(r->device, bl_evaluation_capacity(e), r->job->plan.pass.T_max,
                                 &e->batches[i]));
        BL_TRY(bl_preference_prepare(r->preference, e->batches[i], &e->mismatched[i]));
    }
    return bl_twin_create(r->device, 2 * sizeof(double), "sums of an evaluation", &e->sums);
}

bl_status bl_evaluation_create(bl_rank *r, bl_evaluation **out)
{
    *out = NULL;
    bl_evaluation *e = calloc(1, sizeof *e);
    if (!e) return BL_FAIL(BL_ENOMEM, "an evaluation");
    *e = (bl_evaluation){
        .rank = r, .n_overlapped = r->job->config->eval_overlap ? r->job->plan.n_overlapped : 0};
    bl_status st = create_parts(e);
    if (st != BL_OK) {
        bl_evaluation_destroy(e);
        return st;
    }
    *out = e;
    return BL_OK;
}

void bl_evaluation_destroy(bl_evaluation *e)
{
    if (!e) return;
    for (int i = 0; i < 2; i++) {
        bl_batches_destroy(e->batches[i]);
        bl_batches_destroy(e->mismatched[i]);
    }
    bl_twin_destroy(e->sums);
    free(e);
}

void bl_evaluation_begin(bl_evaluation *e)
{
    const bl_job *job = e->rank->job;
    int64_t per_visit = job->config->per_device_eval_batch_size * job->topology.n_ranks;

    e->next = 0;
    e->n_micro = bl_ceil_div(job->data.validation.n, per_visit);
    e->n_labels = 0;
    if (e->rank->preference) bl_preference_begin(e->rank->preference, BL_PREFERENCE_EVALUATION, 0);
}

int64_t bl_evaluation_left(const bl_evaluation *e)
{
    return e->n_micro - e->next;
}

/* The rows of micro-batch `micro` of the validation data, as micro-batch `index` of the batches. */
static bl_status fill(const bl_evaluation *e, bl_batches *batches, int index, int64_t micro)
{
    const bl_job *job = e->rank->job;
    int64_t b = job->config->per_device_eval_batch_size,
            first = (micro * job->topology.n_ranks + e->rank->index) * b;

    for (int64_t row = first; row < bl_min_i64(first + b, job->data.validation.n); row++)
        BL_TRY(bl_batches_append(batches, index, job->data.validation.set,
                                 job->data.validation.first + row, row));
    return BL_OK;
}

static bl_status fill_all(bl_evaluation *e, int n, bl_batches *batches, bl_batches *mismatched)
{
    bl_rank *r = e->rank;

    bl_batches_clear(batches);
    for (int i = 0; i < n; i++) BL_TRY(fill(e, batches, i, e->next + i));
    if (r->preference) BL_TRY(bl_preference_mismatch(r->preference, batches, mismatched));
    e->n_labels += (double)batches->n_labels;
    return bl_batches_upload(batches, r->compute);
}

bl_status bl_evaluation_join(bl_evaluation *e, int n, bl_group *group)
{
    bl_rank *r = e->rank;
    int turn = e->turn ^= 1, at = 0, first = group->n_micro;
    double *sums = e->sums->memory;

    if (e->next == 0) BL_TRY(bl_stream_zero(r->compute, sums, 2 * sizeof *sums));
    BL_TRY(fill_all(e, n, e->batches[turn], e->mismatched[turn]));
    for (int i = 0; i < n; i++) {
        bl_pass_micro micro = {.batch = e->batches[turn]->micro + i,
                               .adapter = bl_rank_adapter(r),
                               .loss_sum = &sums[0],
                               .is_companion = e->n_overlapped > 0};
        BL_TRY(bl_group_add(group, &micro, 1, &at));
    }
    e->next += n;
    if (!r->preference) return BL_OK;
    return bl_preference_join(r->preference, BL_PREFERENCE_EVALUATION, e->batches[turn],
                              e->mismatched[turn], 0, n, first, group);
}

bl_status bl_evaluation_run(bl_evaluation *e)
{
    bl_rank *r = e->rank;

    while (bl_evaluation_left(e) > 0) {
        bl_group_clear(r->group);
        int n = (int)bl_min_i64(bl_evaluation_capacity(e), bl_evaluation_left(e));
        BL_TRY(bl_evaluation_join(e, n, r->group));
        bl_pass_input input = bl_group_input(r->group);
        input.stop = r->stop;
        input.stop_user = r->stop_user;
        input.updates = bl_trained_full_updates(r->state);
        BL_TRY(bl_pass_run(r->pass, &input));
    }
    return BL_OK;
}

bl_status bl_evaluation_end(bl_evaluation *e, bl_eval_result *out)
{
    bl_rank *r = e->rank;
    double *sums = e->sums->memory, *result = e->sums->host;

    BL_TRY(bl_evaluation_run(e));
    BL_TRY(bl_stream_synchronize(r->compute));
    result[1] = e->n_labels;
    BL_TRY(bl_twin_upload(e->sums, r->compute, sizeof *result, sizeof *result));
    BL_TRY(bl_stream_synchronize(r->compute));
    BL_TRY(bl_comm_all_reduce_f64(r->world, r->communication, sums, 2));
    BL_TRY(bl_twin_download(e->sums, r->communication, 0, e->sums->n_bytes));
    BL_TRY(bl_stream_synchronize(r->communication));
    if (result[1] == 0.0)
        return BL_FAIL(BL_EINPUT, "no row of the validation data has a label that carries loss");
    *out = (bl_eval_result){.loss = result[0] / result[1],
                            .label_tokens = (int64_t)result[1],
                            .rows = r->job->data.validation.n};
    if (r->preference) {
        BL_TRY(bl_preference_end(r->preference, BL_PREFERENCE_EVALUATION, &out->preference));
        out->loss = out->preference.evaluation_loss;
    }
    if (!isfinite(out->loss)) return BL_FAIL(BL_ENUMERIC, "the validation loss is not finite");
    return BL_OK;
}

bl_status bl_rank_evaluate(bl_rank *r, bl_eval_result *out)
{
    bl_evaluation_begin(r->evaluation);
    return bl_evaluation_end(r->evaluation, out);
}
