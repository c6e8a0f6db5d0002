/* SPDX-License-Identifier: Apache-2.0 */
/* rows.c -- the rows of a call: checked, made into micro-batches, and their results. */
#include <inttypes.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "chat/template.h"
#include "model/batch.h"
#include "train/session/session_internal.h"

bool train_session_token_counts(const bl_session_row *row, int64_t t)
{
    return row->targets[t] != BL_LABEL_MASKED && (!row->weights || row->weights[t] != 0.0f);
}

bool train_session_is_weighed(const session_visit *v)
{
    return v->loss && v->loss->kind != BL_SESSION_CROSS_ENTROPY;
}

/* ---- checks, on the thread of the caller ---- */

static bl_status check_ids(const char *name, int64_t i, const int32_t *ids, int64_t n,
                           int64_t vocab, bool may_be_masked)
{
    if (!ids) return BL_FAIL(BL_EUSAGE, "rows[%" PRId64 "].%s is not given", i, name);
    for (int64_t t = 0; t < n; t++)
        if ((ids[t] < 0 || ids[t] >= vocab) && !(may_be_masked && ids[t] == BL_LABEL_MASKED))
            return BL_FAIL(BL_EUSAGE,
                           "rows[%" PRId64 "].%s[%" PRId64 "]: %d is not in [0, %" PRId64 ")%s", i,
                           name, t, ids[t], vocab, may_be_masked ? " and is not -100" : "");
    return BL_OK;
}

static bl_status check_reals(const char *name, int64_t i, const float *x, int64_t n, bool required)
{
    if (!x && required) return BL_FAIL(BL_EUSAGE, "rows[%" PRId64 "].%s is not given", i, name);
    for (int64_t t = 0; x && t < n; t++)
        if (!isfinite(x[t]))
            return BL_FAIL(BL_EUSAGE, "rows[%" PRId64 "].%s[%" PRId64 "] is not finite", i, name,
                           t);
    return BL_OK;
}

static bl_status check_unused(const char *name, int64_t i, const float *x)
{
    if (!x) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "rows[%" PRId64 "].%s: only of the loss importance_sampling", i,
                   name);
}

static bl_status check_row(const bl_session *s, const session_visit *v, int64_t i)
{
    const bl_session_row *row = &v->rows[i];
    int64_t vocab = s->job.model->config.vocab_size;
    bool samples = v->loss && v->loss->kind == BL_SESSION_IMPORTANCE_SAMPLING;

    if (row->n < 1 || row->n > s->config->max_seq_length)
        return BL_FAIL(BL_EUSAGE,
                       "rows[%" PRId64 "]: %" PRId64 " tokens; a session with max_seq_length "
                       "%" PRId64 " takes 1 to as many",
                       i, row->n, s->config->max_seq_length);
    BL_TRY(check_ids("input_ids", i, row->input_ids, row->n, vocab, false));
    BL_TRY(check_ids("targets", i, row->targets, row->n, vocab, true));
    BL_TRY(check_reals("weights", i, row->weights, row->n, false));
    if (!samples) BL_TRY(check_unused("logprobs", i, row->logprobs));
    if (!samples) return check_unused("advantages", i, row->advantages);
    BL_TRY(check_reals("logprobs", i, row->logprobs, row->n, true));
    return check_reals("advantages", i, row->advantages, row->n, true);
}

static bl_status check_loss(const session_visit *v)
{
    const bl_session_loss *loss = v->loss;

    if (!loss) return BL_OK;
    if ((unsigned)loss->kind > BL_SESSION_CUSTOM)
        return BL_FAIL(BL_EUSAGE, "loss: %d is not one", (int)loss->kind);
    if (loss->kind == BL_SESSION_CUSTOM && !loss->fn)
        return BL_FAIL(BL_EUSAGE, "fn is not given: a custom loss needs it");
    if (v->result.n_targets > 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "rows: none has a target with a weight other than 0");
}

/* Places of the rows, and the sums of their weights. */
static bl_status place_rows(const bl_session *s, session_visit *v)
{
    int64_t b = s->config->per_device_train_batch_size;

    v->n_micro = bl_ceil_div(v->n_rows, b);
    v->at = calloc((size_t)v->n_rows, sizeof *v->at);
    if (!v->at) return BL_FAIL(BL_ENOMEM, "%lld rows", (long long)v->n_rows);
    for (int64_t i = 0, T = 0; i < v->n_rows; i++) {
        if (i % b == 0) T = 0;
        v->at[i] = T;
        T += v->rows[i].n;
        v->T_max = bl_max_i64(v->T_max, T);
        for (int64_t t = 0; t < v->rows[i].n; t++) {
            if (!train_session_token_counts(&v->rows[i], t)) continue;
            v->result.n_targets++;
            v->result.weight_sum += v->rows[i].weights ? (double)v->rows[i].weights[t] : 1.0;
        }
    }
    for (int64_t i = 0; i < v->n_rows; i++) v->at[i] += i / b * v->T_max;
    return BL_OK;
}

bl_status train_session_check_visit(const bl_session *s, session_visit *v)
{
    enum { MOST_ROWS = 1 << 20 };

    if (!v->rows || v->n_rows < 1 || v->n_rows > MOST_ROWS)
        return BL_FAIL(BL_EUSAGE, "rows: %lld of them; a call takes 1 to %d", (long long)v->n_rows,
                       MOST_ROWS);
    for (int64_t i = 0; i < v->n_rows; i++) BL_TRY(check_row(s, v, i));
    BL_TRY(place_rows(s, v));
    BL_TRY(check_loss(v));
    if (v->loss && v->loss->kind == BL_SESSION_CUSTOM && v->n_micro > s->job.plan.pass.max_group)
        return BL_FAIL(BL_ELIMIT,
                       "rows: %lld micro-batches of a custom loss go through the layers together, "
                       "and visit_tokens %lld of the session has room for %d",
                       (long long)v->n_micro, (long long)s->config->visit_tokens,
                       s->job.plan.pass.max_group);
    return BL_OK;
}

/* ---- micro-batches, on the session's thread ---- */

static bl_status fill_rows(bl_session_adapter *a, session_visit *v)
{
    int64_t b = a->config->per_device_train_batch_size;

    bl_batches_clear(v->batches);
    for (int64_t i = 0; i < v->n_rows; i++) {
        const bl_session_row *row = &v->rows[i];
        const bl_batch_row tokens = {.n = row->n,
                                     .ids = row->input_ids,
                                     .targets = row->targets,
                                     .weights = row->weights,
                                     .is_marked = train_session_is_weighed(v)};
        BL_TRY(bl_batches_append_row(v->batches, (int)(i / b), &tokens, a->n_samples + i));
    }
    return bl_batches_upload(v->batches, a->rank.compute);
}

bl_status train_session_begin_visit(bl_session_adapter *a, session_visit *v)
{
    bl_device *device = a->rank.device;
    size_t n_values = (size_t)(v->n_micro * v->T_max);

    v->divisor = v->loss && !v->loss->is_sum ? (double)v->result.n_targets : 1.0;
    if (v->loss && v->loss->kind == BL_SESSION_CUSTOM) {
        v->divisor = 1.0;
        v->gradient = calloc(n_values, sizeof *v->gradient);
        if (!v->gradient) return BL_FAIL(BL_ENOMEM, "gradients of %zu tokens", n_values);
    }
    BL_TRY(bl_batches_create(device, (int)v->n_micro, v->T_max, &v->batches));
    BL_TRY(bl_twin_create(device, sizeof(double), "loss of a call", &v->sum));
    BL_TRY(bl_twin_create(device, n_values * sizeof(float), "log-probabilities of a call",
                          &v->values));
    return fill_rows(a, v);
}

static bl_status download(bl_session_adapter *a, session_visit *v)
{
    BL_TRY(bl_twin_download(v->sum, a->rank.compute, 0, v->sum->n_bytes));
    if (!train_session_is_weighed(v))
        BL_TRY(bl_twin_download(v->values, a->rank.compute, 0, v->values->n_bytes));
    return bl_stream_synchronize(a->rank.compute);
}

/* As `ballast train`: the sum is divided, not each term. */
static double loss_of(const session_visit *v)
{
    double sum = train_session_is_weighed(v) ? v->weighed : *(const double *)v->sum->host;
    return sum / v->divisor;
}

bl_status train_session_end_visit(bl_session_adapter *a, session_visit *v)
{
    BL_TRY(download(a, v));
    for (int64_t i = 0; v->logp && i < v->n_rows; i++)
        memcpy(v->logp[i], (const float *)v->values->host + v->at[i],
               (size_t)v->rows[i].n * sizeof(float));
    if (!v->loss) return BL_OK;
    v->result.loss = loss_of(v);
    if (isfinite(v->result.loss)) return BL_OK;
    return BL_FAIL(BL_ENUMERIC, "loss: %g, of %lld rows", v->result.loss, (long long)v->n_rows);
}

void train_session_free_visit(session_visit *v)
{
    bl_batches_destroy(v->batches);
    bl_twin_destroy(v->sum);
    bl_twin_destroy(v->values);
    free(v->gradient);
    free(v->at);
    v->batches = NULL;
    v->sum = v->values = NULL;
    v->gradient = NULL;
    v->at = NULL;
}
