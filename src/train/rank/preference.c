/* SPDX-License-Identifier: Apache-2.0 */
/* preference.c -- companions of n micro-batches and their order: n of the reference, unless its
 * sums are known, and, for kto, n mismatched ones of the policy and n of the reference, likewise.
 * While sums are collected: kto's mismatched ones of the reference. */
#include "train/rank/preference.h"

#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "train/data/sampler.h"

enum { SUMS_AT_ONCE = 1 << 20 };

struct bl_preference {
    bl_rank *rank;
    bl_losses losses;
    bl_trained_state *state; /* of a reference with an adapter */
    bl_pass_adapter adapter; /* its; or unused */
    bl_preference_sums sums[BL_PREFERENCE_PURPOSES];
    double *divergence; /* [2 * micro-batches of a pass]: sums over ranks, and numbers of them */
    bl_reference_sums *known; /* NULL: the reference goes through the layers in each pass */
    double *document_sums;    /* [documents of a micro-batch]: of known ones */
    bool collects;
    int64_t first_position; /* of the step under way */
};

/* ---- known sums ---- */

/* Row of the data set that document i of the micro-batch belongs to. *position: of the row in the
 * run; of an evaluation the same. */
static int64_t row_of(const bl_preference *p, const bl_group_part *part, const bl_batch_view *view,
                      int64_t i, int64_t *position)
{
    const bl_job *job = p->rank->job;
    bl_sampler sampler = {job->data.train.n, (uint64_t)job->config->seed, job->config->shuffle};
    int64_t sample = view->samples[view->ends[i]];

    *position = sample;
    if (part->purpose == BL_PREFERENCE_EVALUATION) return sample;
    *position += p->first_position;
    return bl_sampler_row(&sampler, *position);
}

/* Where the sum of document i is; NULL: it is not kept, since the row's is that of the first
 * epoch. */
static double *sum_at(const bl_preference *p, const bl_group_part *part, const bl_batch_view *view,
                      int64_t i, bool is_mismatched)
{
    const bl_reference_sums *known = p->known;
    bool is_step = part->purpose == BL_PREFERENCE_STEP;
    int64_t position, row = row_of(p, part, view, i, &position);

    if (is_mismatched)
        return (is_step ? known->mismatched : known->validation_mismatched) + position;
    if (p->collects && is_step && position >= known->size.n_rows) return NULL;
    return (is_step ? known->train : known->validation) +
           (p->losses.is_unpaired ? row : 2 * row + i % 2);
}

/* Those of micro-batch i of the part, into document_sums. */
static const double *known_sums(const bl_preference *p, const bl_group_part *part, int i,
                                bool is_mismatched)
{
    const bl_batch_view view = bl_batches_view(part->batches, part->first + i);

    for (int64_t d = 0; d < part->batches->micro[part->first + i].n_documents; d++)
        p->document_sums[d] = *sum_at(p, part, &view, d, is_mismatched);
    return p->document_sums;
}

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
    return part->companions_at + (part->preference->known ? 0 : part->n);
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
        if (p->known)
            m.reference_sums = known_sums(p, part, i, true);
        else
            m.reference = values[mismatched_reference_at(part) + i];
        count[i] = m.n_documents > 0;
        sum[i] = m.n_documents > 0 ? bl_preference_divergence(&m) : 0;
    }
    BL_TRY(bl_host_comm_sum_real(&p->rank->host_comm, p->divergence, 2 * part->n));
    for (int i = 0; i < part->n; i++) sum[i] = count[i] > 0 ? fmax(0, sum[i] / count[i]) : 0;
    return BL_OK;
}

/* Of the reference's log-probabilities from `at` on. */
static void collect(const bl_preference *p, const bl_group_part *part, float *const *values, int at,
                    bool is_mismatched)
{
    const bl_batches *batches = is_mismatched ? part->mismatched : part->batches;

    for (int i = 0; i < part->n; i++) {
        const bl_batch_view view = bl_batches_view(part->batches, part->first + i);
        bl_preference_micro m = micro_of(batches, part->first + i);
        m.reference = values[at + i];
        bl_preference_sum_reference(&p->losses, &m, p->document_sums);
        for (int64_t d = 0; d < m.n_documents; d++) {
            double *to = sum_at(p, part, &view, d, is_mismatched);
            if (to) *to = p->document_sums[d];
        }
    }
}

/* Past the first epoch only kto's mismatched answers are new. */
static bool collects_rows(const bl_preference *p, bl_preference_purpose purpose)
{
    return purpose == BL_PREFERENCE_EVALUATION || p->first_position < p->known->size.n_rows;
}

static void collect_part(const bl_group_part *part, float *const *values)
{
    const bl_preference *p = part->preference;
    bool has_rows = collects_rows(p, part->purpose);

    if (has_rows) collect(p, part, values, part->at, false);
    if (part->mismatched) collect(p, part, values, has_rows ? part->companions_at : part->at, true);
}

static bl_status weigh_part(const bl_group_part *part, float *const *values)
{
    bl_preference *p = part->preference;

    if (p->collects) {
        collect_part(part, values);
        return BL_OK;
    }
    if (part->mismatched) BL_TRY(estimate_divergence(p, part, values));
    for (int i = 0; i < part->n; i++) {
        bl_preference_micro m = micro_of(part->batches, part->first + i);
        m.policy = m.weights = values[part->at + i];
        if (p->known)
            m.reference_sums = known_sums(p, part, i, false);
        else if (p->losses.has_reference)
            m.reference = values[reference_at(part) + i];
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

/* The adapter that the reference is, if it is one. */
static bl_status read_reference(bl_preference *p)
{
    bl_rank *r = p->rank;
    const bl_job *job = r->job;

    bool is_continued = job->plan.pass.training && job->config->init_adapter;
    if (!p->losses.has_reference || !is_continued) return BL_OK;
    bl_trained_context context = bl_rank_context(r);
    BL_TRY(bl_trained_state_create_frozen(&context, &job->lora, job->model->config.n_layers,
                                          (int)job->config->ring_depth, &p->state));
    p->adapter = bl_trained_state_adapter(p->state);
    return bl_trained_state_read_peft(p->state, &job->model->config, job->config->init_adapter);
}

bl_reference_size bl_preference_size(const bl_job *job)
{
    const bl_train_config *c = job->config;
    int64_t n_rows = job->data.train.n;
    bl_losses losses = {0};

    (void)bl_train_config_losses(c, &losses); /* was validated */
    if (!c->precompute_ref_log_probs) return (bl_reference_size){0};
    return (bl_reference_size){
        .n_rows = n_rows,
        .n_validation = job->data.validation.n,
        .n_positions =
            losses.is_unpaired ? bl_train_position(c, n_rows, bl_train_total_steps(c, n_rows)) : 0,
        .is_unpaired = losses.is_unpaired};
}

static bl_status create_known(bl_preference *p)
{
    const bl_train_config *c = p->rank->job->config;
    int64_t n_documents =
        2 * bl_max_i64(c->per_device_train_batch_size, c->per_device_eval_batch_size);
    bl_reference_size size = bl_preference_size(p->rank->job);

    p->document_sums = calloc((size_t)n_documents, sizeof *p->document_sums);
    if (!p->document_sums) return BL_FAIL(BL_ENOMEM, "sums of a micro-batch");
    return bl_reference_sums_create(&size, &p->known);
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
    /* Micro-batches of a pass: at most those of a step, or those of overlapped evaluations. */
    int64_t n = bl_max_i64(bl_max_i64(1, rank->job->config->gradient_accumulation_steps),
                           rank->job->plan.n_overlapped);
    p->divergence = calloc(2 * (size_t)n, sizeof *p->divergence);
    bool is_known = rank->job->plan.pass.training && rank->job->config->precompute_ref_log_probs;
    bl_status st = p->divergence ? BL_OK : BL_FAIL(BL_ENOMEM, "divergences of micro-batches");
    if (st == BL_OK) st = is_known ? create_known(p) : read_reference(p);
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
    bl_trained_state_destroy(p->state);
    bl_reference_sums_destroy(p->known);
    free(p->document_sums);
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

void bl_preference_begin(bl_preference *p, bl_preference_purpose purpose, int64_t first_position)
{
    p->sums[purpose] = (bl_preference_sums){0};
    if (purpose == BL_PREFERENCE_STEP) p->first_position = first_position;
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

/* The part's micro-batches become the reference's. */
static bl_status join_collecting(bl_preference *p, const bl_group_part *part, bl_group *group)
{
    const bl_pass_adapter *reference = p->state ? &p->adapter : NULL;
    bool has_rows = collects_rows(p, part->purpose);

    for (int i = 0; i < part->n; i++) {
        const bl_pass_micro *given = &group->micro[part->at + i];
        const bl_batches *batches = has_rows ? part->batches : part->mismatched;
        group->micro[part->at + i] = (bl_pass_micro){.batch = batches->micro + part->first + i,
                                                     .adapter = reference,
                                                     .is_companion = given->is_companion,
                                                     .is_weighed = true};
    }
    if (!part->mismatched || !has_rows) return BL_OK;
    return add_companions(group, part->mismatched, part->first, part->n, reference);
}

bl_status bl_preference_join(bl_preference *p, bl_preference_purpose purpose,
                             const bl_batches *batches, const bl_batches *mismatched, int first,
                             int n, int at, bl_group *group)
{
    const bl_pass_adapter *policy = group->micro[at].adapter,
                          *reference = p->state ? &p->adapter : NULL;

    group->weigher = (bl_pass_weigher){group, weigh};
    group->part[group->n_parts++] = (bl_group_part){.preference = p,
                                                    .purpose = purpose,
                                                    .sums = &p->sums[purpose],
                                                    .batches = batches,
                                                    .mismatched = mismatched,
                                                    .first = first,
                                                    .n = n,
                                                    .at = at,
                                                    .companions_at = group->n_micro};
    if (p->collects) return join_collecting(p, &group->part[group->n_parts - 1], group);
    for (int i = at; i < at + n; i++) {
        group->micro[i].loss_sum = NULL;
        group->micro[i].is_weighed = true;
    }
    bool has_companion = p->losses.has_reference && !p->known;
    if (has_companion) BL_TRY(add_companions(group, batches, first, n, reference));
    if (!mismatched) return BL_OK;
    BL_TRY(add_companions(group, mismatched, first, n, policy));
    if (!has_companion) return BL_OK;
    return add_companions(group, mismatched, first, n, reference);
}

/* ---- the known sums, collected ---- */

bl_reference_sums *bl_preference_known(const bl_preference *p)
{
    return p ? p->known : NULL;
}

bl_status bl_preference_begin_collecting(bl_preference *p)
{
    p->collects = true;
    return read_reference(p);
}

/* A sum is one rank's, 0 on the others. */
static bl_status share_sums(bl_preference *p)
{
    bl_reference_sums *known = p->known;

    for (int64_t first = 0; first < known->n; first += SUMS_AT_ONCE)
        BL_TRY(bl_host_comm_sum_real(&p->rank->host_comm, known->train + first,
                                     bl_min_i64(SUMS_AT_ONCE, known->n - first)));
    for (int64_t i = 0; i < known->n; i++)
        if (!isfinite(known->train[i]))
            return BL_FAIL(BL_ENUMERIC, "precompute_ref_log_probs: log-probabilities of the "
                                        "reference are not finite");
    return BL_OK;
}

bl_status bl_preference_end_collecting(bl_preference *p)
{
    p->collects = false;
    /* Gathers for the next pass may be under way. */
    bl_rank_drain(p->rank);
    bl_status st = share_sums(p);
    bl_trained_state_destroy(p->state);
    p->state = NULL;
    return st;
}

bl_status bl_preference_end(bl_preference *p, bl_preference_purpose purpose,
                            bl_preference_metrics *out)
{
    _Static_assert(sizeof(bl_preference_sums) == BL_PREFERENCE_N_SUMS * sizeof(double),
                   "sums are doubles");
    bl_preference_sums *sums = &p->sums[purpose];

    BL_TRY(bl_host_comm_sum_real(&p->rank->host_comm, (double *)sums, BL_PREFERENCE_N_SUMS));
    *out = bl_preference_summarize(&p->losses, sums);
    return BL_OK;
}
