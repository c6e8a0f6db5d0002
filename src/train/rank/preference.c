/* SPDX-License-Identifier: Apache-2.0 */
/* preference.c -- companions of a group and their order: for n micro-batches, n of the reference
 * and, for kto, n mismatched ones of the policy and n of the reference. */
#include "train/rank/preference.h"

#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"

enum { POLICY, REFERENCE, MISMATCHED, MISMATCHED_REFERENCE };

struct bl_preference {
    bl_rank *rank;
    bl_losses losses;
    bl_adapter_state *state; /* of a reference with an adapter */
    bl_pass_adapter adapter; /* its; or unused */
    bl_preference_sums sums;
    double *divergence; /* [2 * max_group]: sums over ranks, and numbers of them */
    bl_pass_weigher weigher;
    /* Of the pass under way. */
    const bl_batches *batches, *mismatched;
    int first, n;
};

/* ---- weights ---- */

static bl_preference_micro micro_of(const bl_batches *batches, int index)
{
    bl_batch_view view = bl_batches_view(batches, index);

    return (bl_preference_micro){
        .n_documents = batches->micro[index].n_documents, .ends = view.ends, .marks = view.marks};
}

/* kl of each micro-batch, into divergence[i]: the mean over the ranks that have rows for it, and at
 * least 0. */
static bl_status estimate_divergence(bl_preference *p, float *const *values)
{
    double *sum = p->divergence, *count = sum + p->n;

    for (int i = 0; i < p->n; i++) {
        bl_preference_micro m = micro_of(p->mismatched, p->first + i);
        m.policy = values[MISMATCHED * p->n + i];
        m.reference = values[MISMATCHED_REFERENCE * p->n + i];
        count[i] = m.n_documents > 0;
        sum[i] = m.n_documents > 0 ? bl_preference_divergence(&m) : 0;
    }
    BL_TRY(bl_talk_sum_real(&p->rank->talk, p->divergence, 2 * p->n));
    for (int i = 0; i < p->n; i++) sum[i] = count[i] > 0 ? fmax(0, sum[i] / count[i]) : 0;
    return BL_OK;
}

/* bl_pass_weigher. */
static bl_status weigh(void *user, float *const *values)
{
    bl_preference *p = user;

    if (p->mismatched) BL_TRY(estimate_divergence(p, values));
    for (int i = 0; i < p->n; i++) {
        bl_preference_micro m = micro_of(p->batches, p->first + i);
        m.policy = m.weights = values[i];
        if (p->losses.has_reference) m.reference = values[REFERENCE * p->n + i];
        if (p->mismatched) m.kl = p->divergence[i];
        bl_preference_weigh(&p->losses, &m, &p->sums);
    }
    return BL_OK;
}

/* ---- set-up ---- */

static bl_status create_reference(bl_preference *p)
{
    bl_rank *r = p->rank;
    const bl_job *job = r->job;

    bool is_continued = job->plan.pass.training && job->config->init_adapter;
    if (!p->losses.has_reference || !is_continued) return BL_OK;
    BL_TRY(bl_adapter_state_create_frozen(r->device, r->world, r->compute, r->communication,
                                          r->timeline, &job->lora, job->model->config.n_layers,
                                          (int)job->config->ring_depth, &p->state));
    p->adapter = bl_adapter_state_adapter(p->state);
    return bl_adapter_state_read_peft(p->state, &job->model->config, job->config->init_adapter);
}

bl_status bl_preference_create(bl_rank *rank, bl_preference **out)
{
    bl_losses losses;

    *out = NULL;
    BL_TRY(bl_train_config_losses(rank->job->config, &losses));
    if (!losses.is_preference) return BL_OK;
    bl_preference *p = calloc(1, sizeof *p);
    if (!p) return BL_FAIL(BL_ENOMEM, "preferences");
    *p = (bl_preference){.rank = rank, .losses = losses, .weigher = {p, weigh}};
    p->divergence = calloc(2 * (size_t)rank->job->plan.pass.max_group, sizeof *p->divergence);
    bl_status st =
        p->divergence ? create_reference(p) : BL_FAIL(BL_ENOMEM, "divergences of micro-batches");
    if (st != BL_OK) {
        bl_preference_destroy(p);
        return st;
    }
    *out = p;
    return BL_OK;
}

void bl_preference_destroy(bl_preference *p)
{
    if (!p) return;
    bl_adapter_state_destroy(p->state);
    free(p->divergence);
    free(p);
}

bl_status bl_preference_prepare(const bl_preference *p, bl_batches *batches,
                                bl_batches **mismatched)
{
    *mismatched = NULL;
    if (!p) return BL_OK;
    BL_TRY(bl_batches_keep_marks(batches, p->losses.learns_prompt));
    if (!p->losses.is_unpaired) return BL_OK;
    BL_TRY(bl_batches_create(p->rank->device, batches->n_micro, batches->T_max, mismatched));
    return bl_batches_keep_marks(*mismatched, false);
}

bl_status bl_preference_mismatch(const bl_preference *p, const bl_batches *batches,
                                 bl_batches *mismatched)
{
    if (!mismatched) return BL_OK;
    bl_batches_clear(mismatched);
    for (int i = 0; i < batches->n_micro; i++)
        bl_batches_mismatch(batches, i, p->rank->job->config->max_seq_length, mismatched);
    return bl_batches_upload(mismatched, p->rank->compute);
}

/* ---- passes ---- */

void bl_preference_begin(bl_preference *p)
{
    p->sums = (bl_preference_sums){0};
}

void bl_preference_join(bl_preference *p, const bl_batches *batches, const bl_batches *mismatched,
                        int first, bl_pass_micro *micro, bl_pass_input *input)
{
    const bl_pass_adapter *reference = p->state ? &p->adapter : NULL;
    int n = input->n_micro;

    p->batches = batches;
    p->mismatched = mismatched;
    p->first = first;
    p->n = n;
    for (int i = 0; i < n; i++) {
        bl_pass_micro companion = {
            .batch = micro[i].batch, .adapter = reference, .is_companion = true};
        micro[i].loss_sum = NULL;
        if (p->losses.has_reference) micro[REFERENCE * n + i] = companion;
        if (!mismatched) continue;
        companion.batch = mismatched->micro + first + i;
        micro[MISMATCHED_REFERENCE * n + i] = companion;
        companion.adapter = micro[i].adapter;
        micro[MISMATCHED * n + i] = companion;
    }
    input->n_micro = n * (1 + p->rank->job->plan.pass.n_companions);
    input->weigher = &p->weigher;
}

bl_status bl_preference_end(bl_preference *p, bl_preference_metrics *out)
{
    _Static_assert(sizeof(bl_preference_sums) == BL_PREFERENCE_N_SUMS * sizeof(double),
                   "sums are doubles");
    BL_TRY(bl_talk_sum_real(&p->rank->talk, (double *)&p->sums, BL_PREFERENCE_N_SUMS));
    *out = bl_preference_summarize(&p->losses, &p->sums);
    return BL_OK;
}
