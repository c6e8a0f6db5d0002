/* SPDX-License-Identifier: Apache-2.0 */
/* visit.c -- requests of different adapters through the layers, in passes of at most max_group
 * micro-batches; and the weights of losses that are functions of log-probabilities.
 *
 * Micro-batches do not mix, and those of a request keep their order: their bits do not depend on
 * how they are grouped (model/pass.h). */
#include <math.h>
#include <string.h>

#include "train/session/session_internal.h"

static bool is_custom(const session_visit *v)
{
    return v->loss && v->loss->kind == BL_SESSION_CUSTOM;
}

/* ---- weights ---- */

/* dL/d log p_t = -w_t exp(log p_t - q_t) A_t: that of the head with a weight of opposite sign. */
static void weigh_sampling(session_visit *v, int64_t row, float *values)
{
    const bl_session_row *r = &v->rows[row];

    for (int64_t t = 0; t < r->n; t++) {
        if (!train_session_token_counts(r, t)) continue;
        double w = r->weights ? (double)r->weights[t] : 1.0,
               term =
                   w * exp((double)values[t] - (double)r->logprobs[t]) * (double)r->advantages[t];
        v->weighed -= term;
        values[t] = (float)term;
    }
}

static void weigh_custom(const session_visit *v, int64_t row, float *values)
{
    const bl_session_row *r = &v->rows[row];

    for (int64_t t = 0; t < r->n; t++)
        if (train_session_token_counts(r, t)) values[t] = -v->gradient[v->at[row] + t];
}

static void clear_weights(const bl_session_row *row, float *values)
{
    memset(values, 0, (size_t)row->n * sizeof *values);
}

/* Gradients that are not finite must not reach the adapter. */
static bl_status check_gradients(const session_visit *v)
{
    for (int64_t i = 0; i < v->n_rows; i++)
        for (int64_t t = 0; t < v->rows[i].n; t++)
            if (!isfinite(v->gradient[v->at[i] + t]))
                return BL_FAIL(BL_ENUMERIC, "fn: gradient[%lld][%lld] is not finite", (long long)i,
                               (long long)t);
    return BL_OK;
}

/* Log-probabilities of the part's rows, for the caller and fn. values: of the group. */
static void weigh_part(const session_part *part, float *const *values)
{
    session_request *r = part->request;
    session_visit *v = r->visit;
    int64_t b = r->adapter->config->per_device_train_batch_size, first = part->first * b,
            end = first + part->n * b < v->n_rows ? first + part->n * b : v->n_rows;
    bl_status st = BL_OK;

    for (int pass = 0; pass < 2; pass++) {
        for (int64_t i = first; i < end; i++) {
            float *at = values[part->at + i / b - part->first] + v->at[i] % v->T_max;
            if (pass == 0)
                memcpy((float *)v->values->host + v->at[i], at, (size_t)v->rows[i].n * sizeof *at);
            else if (st != BL_OK)
                clear_weights(&v->rows[i], at);
            else if (is_custom(v))
                weigh_custom(v, i, at);
            else
                weigh_sampling(v, i, at);
        }
        if (pass == 0 && is_custom(v)) {
            st = train_session_call(r);
            if (st == BL_OK) st = check_gradients(v);
            bl_error_save(&r->error, st);
        }
    }
}

/* bl_pass_weigher */
static bl_status weigh(void *user, float *const *values)
{
    const bl_session *s = user;

    for (int i = 0; i < s->n_parts; i++)
        if (train_session_is_weighed(s->part[i].request->visit)) weigh_part(&s->part[i], values);
    return BL_OK;
}

/* ---- passes ---- */

static bl_pass_micro make_micro(const session_request *r, int64_t m)
{
    const bl_session_adapter *a = r->adapter;
    session_visit *v = r->visit;
    bool is_weighed = train_session_is_weighed(v);
    bl_pass_micro micro = {.batch = v->batches->micro + m, .adapter = bl_rank_adapter(&a->rank)};

    if (v->loss)
        micro = bl_rank_train_micro(&a->rank, micro.batch, v->sum->memory, 1.0 / v->divisor);
    micro.is_weighed = is_weighed;
    if (is_weighed)
        micro.loss_sum = NULL;
    else
        micro.logp = (float *)v->values->memory + m * v->T_max;
    return micro;
}

static bl_status run_pass(bl_session *s)
{
    const bl_pass_weigher weigher = {s, weigh};
    bl_pass_input input = {.n_micro = s->n_micro, .micro = s->micro};

    if (s->n_micro == 0) return BL_OK;
    for (int m = 0; m < s->n_micro; m++)
        if (s->micro[m].is_weighed) input.weigher = &weigher;
    pthread_mutex_lock(&s->mutex);
    s->n_passes++;
    pthread_mutex_unlock(&s->mutex);
    bl_status st = bl_pass_run(s->rank->pass, &input);
    s->n_micro = s->n_parts = 0;
    return st;
}

/* Adds the request's micro-batches to passes, and runs those that are full. Those of a custom loss
 * are in one. */
static bl_status add_request(bl_session *s, session_request *r)
{
    int room = s->job.plan.pass.max_group, n_all = (int)r->visit->n_micro;

    if (is_custom(r->visit) && s->n_micro + n_all > room) BL_TRY(run_pass(s));
    for (int first = 0; first < n_all;) {
        if (s->n_micro == room) BL_TRY(run_pass(s));
        int n = room - s->n_micro < n_all - first ? room - s->n_micro : n_all - first;
        s->part[s->n_parts++] = (session_part){r, first, n, s->n_micro};
        for (int i = 0; i < n; i++) s->micro[s->n_micro++] = make_micro(r, first + i);
        first += n;
    }
    return BL_OK;
}

static void begin(session_request *r)
{
    bl_session_adapter *a = r->adapter;

    bl_status st = train_session_begin_visit(a, r->visit);
    r->visit->has_begun = st == BL_OK;
    bl_error_save(&r->error, st);
    a->rank.adapter.dropout = (bl_lora_dropout){.p = (float)a->job.lora.options.dropout,
                                                .seed = (uint64_t)a->config->seed,
                                                .step = (uint64_t)a->n_updates};
}

/* Of a request that went through the layers. */
static bl_status end(session_request *r)
{
    bl_session_adapter *a = r->adapter;
    session_visit *v = r->visit;
    bool has_failed = r->error.status != BL_OK; /* its fn has: it added no gradient */

    BL_TRY(v->loss ? bl_trained_state_join(a->rank.state) : bl_stream_synchronize(a->rank.compute));
    bl_status st = has_failed ? BL_OK : train_session_end_visit(a, v);
    if (st == BL_ENUMERIC) {
        bl_error_save(&r->error, st);
        return train_session_drop_gradients(a);
    }
    if (st == BL_OK && v->loss && !has_failed) {
        a->n_calls++;
        a->n_samples += v->n_rows;
    }
    return st;
}

bl_status train_session_run_visits(bl_session *s, session_request **requests, int n)
{
    bl_status st = BL_OK;
    bl_error error;

    s->n_micro = s->n_parts = 0;
    for (int i = 0; i < n; i++) begin(requests[i]);
    for (int i = 0; i < n && st == BL_OK; i++)
        if (requests[i]->visit->has_begun) st = add_request(s, requests[i]);
    if (st == BL_OK) st = run_pass(s);
    for (int i = 0; i < n && st == BL_OK; i++)
        if (requests[i]->visit->has_begun) st = end(requests[i]);
    bl_error_save(&error, st);
    if (st != BL_OK) bl_rank_drain(s->rank);
    for (int i = 0; i < n; i++) {
        if (st != BL_OK && requests[i]->error.status == BL_OK) requests[i]->error = error;
        train_session_free_visit(requests[i]->visit);
    }
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}
