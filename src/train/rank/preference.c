/* SPDX-License-Identifier: Apache-2.0 */
/* preference.c -- companions of n micro-batches and their order: n of the reference and, for kto, n
 * mismatched ones of the policy and n of the reference. */
#include "train/rank/preference.h"

#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"

struct bl_preference {
    bl_rank *rank;
    bl_losses losses;
    bl_adapter_state *state; /* of a reference with an adapter */
    bl_pass_adapter adapter; /* its; or unused */
    bl_preference_sums sums[BL_PREFERENCE_PURPOSES];
    double *divergence; /* [2 * micro-batches of a pass]: sums over ranks, and numbers of them */
};

/* ---- weights ---- */

static bl_preference_micro micro_of(const bl_batches *batches, int index)
{
    bl_batch_view view = bl_batches_view(batches, index);

    return (bl_preference_micro){
        .n_documents = batches->micro[index].n_documents, .ends = view.ends, .marks = view.marks};
}

/* Where the part's companions of a kind are in the group. */
static int reference_at(const bl_group_part *part)
{
    return part->companions_at;
}

static int mismatched_at(const bl_group_part *part)
{
    return part->companions_at + part->n;
}

static int mismatched_reference_at(const bl_group_part *part)
{
    return part->companions_at + 2 * part->n;
}

/* kl of each micro-batch, into divergence[i]: the mean over the ranks that have rows for it, and at
 * least 0. */
static bl_status estimate_divergence(bl_preference *p, const bl_group_part *part,
                                     float *const *values)
{
    double *sum = p->divergence, *count = sum + part->n;

    for (int i = 0; i < part->n; i++) {
        bl_preference_micro m = micro_of(part->mismatched, part->first + i);
        m.policy = values[mismatched_at(part) + i];
        m.reference = values[mismatched_reference_at(part) + i];
        count[i] = m.n_documents > 0;
        sum[i] = m.n_documents > 0 ? bl_preference_divergence(&m) : 0;
    }
    BL_TRY(bl_talk_sum_real(&p->rank->talk, p->divergence, 2 * part->n));
    for (int i = 0; i < part->n; i++) sum[i] = count[i] > 0 ? fmax(0, sum[i] / count[i]) : 0;
    return BL_OK;
}

static bl_status weigh_part(const bl_group_part *part, float *const *values)
{
    bl_preference *p = part->preference;

    if (part->mismatched) BL_TRY(estimate_divergence(p, part, values));
    for (int i = 0; i < part->n; i++) {
        bl_preference_micro m = micro_of(part->batches, part->first + i);
        m.policy = m.weights = values[part->at + i];
        if (p->losses.has_reference) m.reference = values[reference_at(part) + i];
        if (part->mismatched) m.kl = p->divergence[i];
        bl_preference_weigh(&p->losses, &m, part->sums);
    }
    return BL_OK;
}

/* bl_pass_weigher of a group. */
static bl_status weigh(void *user, float *const *values)
{
    const bl_group *group = user;

    for (int i = 0; i < group->n_parts; i++) BL_TRY(weigh_part(&group->part[i], values));
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
    *p = (bl_preference){.rank = rank, .losses = losses};
    /* Of a pass: never more than a step's, or an evaluation's riders. */
    int64_t n = bl_max_i64(bl_max_i64(1, rank->job->config->gradient_accumulation_steps),
                           rank->job->plan.n_riders);
    p->divergence = calloc(2 * (size_t)n, sizeof *p->divergence);
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

void bl_preference_begin(bl_preference *p, bl_preference_purpose purpose)
{
    p->sums[purpose] = (bl_preference_sums){0};
}

static bl_status add_companions(bl_group *group, const bl_batches *batches, int first, int n,
                                const bl_pass_adapter *adapter)
{
    int at;

    for (int i = 0; i < n; i++) {
        bl_pass_micro companion = {.batch = batches->micro + first + i,
                                   .adapter = adapter,
                                   .is_companion = true,
                                   .is_weighed = true};
        BL_TRY(bl_group_add(group, &companion, 1, &at));
    }
    return BL_OK;
}

bl_status bl_preference_join(bl_preference *p, bl_preference_purpose purpose,
                             const bl_batches *batches, const bl_batches *mismatched, int first,
                             int n, int at, bl_group *group)
{
    const bl_pass_adapter *policy = group->micro[at].adapter,
                          *reference = p->state ? &p->adapter : NULL;

    group->weigher = (bl_pass_weigher){group, weigh};
    group->part[group->n_parts++] = (bl_group_part){.preference = p,
                                                    .sums = &p->sums[purpose],
                                                    .batches = batches,
                                                    .mismatched = mismatched,
                                                    .first = first,
                                                    .n = n,
                                                    .at = at,
                                                    .companions_at = group->n_micro};
    for (int i = at; i < at + n; i++) {
        group->micro[i].loss_sum = NULL;
        group->micro[i].is_weighed = true;
    }
    if (p->losses.has_reference) BL_TRY(add_companions(group, batches, first, n, reference));
    if (!mismatched) return BL_OK;
    BL_TRY(add_companions(group, mismatched, first, n, policy));
    return add_companions(group, mismatched, first, n, reference);
}

bl_status bl_preference_end(bl_preference *p, bl_preference_purpose purpose,
                            bl_preference_metrics *out)
{
    _Static_assert(sizeof(bl_preference_sums) == BL_PREFERENCE_N_SUMS * sizeof(double),
                   "sums are doubles");
    bl_preference_sums *sums = &p->sums[purpose];

    BL_TRY(bl_talk_sum_real(&p->rank->talk, (double *)sums, BL_PREFERENCE_N_SUMS));
    *out = bl_preference_summarize(&p->losses, sums);
    return BL_OK;
}
