/* SPDX-License-Identifier: Apache-2.0 */
/* session.c -- a session from open to close, and its thread, which is a job's only rank: it takes
 * the requests that wait, and runs those of different adapters that go through the layers
 * together. */
#include <math.h>
#include <stdlib.h>
#include <time.h>
#include <unistd.h>

#include "base/clock.h"
#include "train/rank/group.h"
#include "train/session/session_internal.h"

/* Of the thread that runs the function of a custom loss. */
static _Thread_local bool is_in_call;

/* ---- requests, on the threads of callers ---- */

bl_status train_session_check_caller(const bl_session *s)
{
    if (s->pid != getpid())
        return BL_FAIL(BL_EUSAGE,
                       "session: process %lld opened it before a fork: open one in this process",
                       (long long)s->pid);
    if (!is_in_call) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "session: called by the function of a custom loss, for which the "
                              "session waits");
}

static bl_status run_fn(session_visit *v)
{
    const float **logp = calloc((size_t)v->n_rows, sizeof *logp);
    float **gradient = calloc((size_t)v->n_rows, sizeof *gradient);
    bl_status st = logp && gradient ? BL_OK : BL_FAIL(BL_ENOMEM, "%lld rows", (long long)v->n_rows);

    for (int64_t i = 0; st == BL_OK && i < v->n_rows; i++) {
        logp[i] = (const float *)v->values->host + v->at[i];
        gradient[i] = v->gradient + v->at[i];
    }
    is_in_call = true;
    if (st == BL_OK) st = v->loss->fn(v->loss->user, logp, gradient, &v->weighed);
    is_in_call = false;
    free(logp);
    free(gradient);
    return st;
}

/* The mutex is held, and released while fn runs. */
static void answer_call(bl_session *s, session_request *r)
{
    pthread_mutex_unlock(&s->mutex);
    bl_status st = run_fn(r->visit);
    bl_error_save(&r->called, st);
    pthread_mutex_lock(&s->mutex);
    r->call = SESSION_CALLED;
    pthread_cond_broadcast(&s->changed);
}

bl_status train_session_submit(bl_session *s, session_request *r)
{
    session_request **last;

    BL_TRY(train_session_check_caller(s));
    r->session = s;
    pthread_mutex_lock(&s->mutex);
    for (last = &s->waiting; *last; last = &(*last)->next) continue;
    *last = r;
    pthread_cond_broadcast(&s->changed);
    while (!r->is_done) {
        if (r->call == SESSION_WANTS_CALL)
            answer_call(s, r);
        else
            pthread_cond_wait(&s->changed, &s->mutex);
    }
    pthread_mutex_unlock(&s->mutex);
    return r->error.status == BL_OK ? BL_OK : bl_error_restore(&r->error);
}

bl_status train_session_call(session_request *r)
{
    bl_session *s = r->session;

    pthread_mutex_lock(&s->mutex);
    r->call = SESSION_WANTS_CALL;
    pthread_cond_broadcast(&s->changed);
    while (r->call != SESSION_CALLED) pthread_cond_wait(&s->changed, &s->mutex);
    r->call = SESSION_NO_CALL;
    pthread_mutex_unlock(&s->mutex);
    return r->called.status == BL_OK ? BL_OK : bl_error_restore(&r->called);
}

/* ---- the session's thread ---- */

static bool is_first_of_adapter(const session_request *list, const session_request *r)
{
    for (; list != r; list = list->next)
        if (list->adapter == r->adapter) return false;
    return true;
}

/* The mutex is held. Of the requests that are the first of their adapter: one that runs alone, or
 * else all that go through the layers. They leave the list; *n of them in taken. */
static void take(bl_session *s, session_request **taken, int room, int *n)
{
    session_request *alone = NULL;

    *n = 0;
    for (session_request *r = s->waiting; r && !alone; r = r->next)
        if (r->run && is_first_of_adapter(s->waiting, r)) alone = r;
    for (session_request *r = s->waiting; r && *n < room; r = r->next)
        if (alone ? r == alone : is_first_of_adapter(s->waiting, r)) taken[(*n)++] = r;
    for (int i = 0; i < *n; i++) {
        session_request **at = &s->waiting;
        while (*at != taken[i]) at = &(*at)->next;
        *at = taken[i]->next;
        taken[i]->next = NULL;
    }
}

static void run_taken(bl_session *s, session_request **taken, int n)
{
    bl_error broken = s->broken;

    if (broken.status != BL_OK) {
        for (int i = 0; i < n; i++) taken[i]->error = broken;
    } else if (taken[0]->run) {
        bl_status st = taken[0]->run(taken[0]);
        bl_error_save(&taken[0]->error, st);
    } else {
        double begun_s = bl_now_s();
        s->n_visits++;
        for (int i = 0; i < n; i++) taken[i]->adapter->last_visit = s->n_visits;
        bl_status st = train_session_run_visits(s, taken, n);
        s->visit_s = bl_now_s() - begun_s;
        if (st != BL_OK) bl_error_save(&s->broken, st);
    }
}

static bool has_waiting(const bl_session *s, const bl_session_adapter *a)
{
    for (const session_request *r = s->waiting; r; r = r->next)
        if (r->adapter == a) return true;
    return false;
}

/* Adapters of the last two visits without a request: their loops are about to make one. */
static bool expects_more(const bl_session *s)
{
    for (const bl_session_adapter *a = s->adapters; a; a = a->next)
        if (a->last_visit > 0 && a->last_visit >= s->n_visits - 1 && !has_waiting(s, a))
            return true;
    return false;
}

static bool has_alone(const bl_session *s)
{
    for (const session_request *r = s->waiting; r; r = r->next)
        if (r->run) return true;
    return false;
}

/* The mutex is held. Adapters whose loops have one rhythm would each take a visit: a visit
 * waits for those that took part in the last two, at most VISIT_PART of a visit's time.
 * *until: when that ends; 0: it has not begun. Bits do not depend on it. */
static bool wait_for_more(bl_session *s, double *until)
{
    static const double VISIT_PART = 0.1;
    double now = bl_now_s();

    if (s->is_closing || s->broken.status != BL_OK || has_alone(s) || !expects_more(s))
        return false;
    if (*until == 0) *until = now + VISIT_PART * s->visit_s;
    if (now >= *until) return false;
    struct timespec at = {(time_t)*until, (long)((*until - floor(*until)) * 1e9)};
    pthread_cond_timedwait(&s->changed, &s->mutex, &at);
    return true;
}

enum { MOST_AT_ONCE = 64 };

static void serve(bl_session *s)
{
    session_request *taken[MOST_AT_ONCE];
    double until = 0;
    int n;

    pthread_mutex_lock(&s->mutex);
    while (!s->is_closing || s->waiting) {
        if (!s->waiting) {
            pthread_cond_wait(&s->changed, &s->mutex);
            continue;
        }
        if (wait_for_more(s, &until)) continue;
        take(s, taken, MOST_AT_ONCE, &n);
        if (!taken[0]->run) until = 0;
        pthread_mutex_unlock(&s->mutex);
        run_taken(s, taken, n);
        pthread_mutex_lock(&s->mutex);
        for (int i = 0; i < n; i++) taken[i]->is_done = true;
        pthread_cond_broadcast(&s->changed);
    }
    pthread_mutex_unlock(&s->mutex);
}

static bl_status set_up(bl_session *s, bl_rank *rank)
{
    int n = s->job.plan.pass.max_group;

    BL_TRY(bl_rank_open(rank));
    BL_TRY(bl_rank_load_base(rank));
    BL_TRY(bl_rank_create_pass(rank));
    s->micro = calloc((size_t)n, sizeof *s->micro);
    s->part = calloc((size_t)n, sizeof *s->part);
    return s->micro && s->part ? BL_OK : BL_FAIL(BL_ENOMEM, "%d micro-batches", n);
}

static void free_adapters(bl_session *s)
{
    bl_rank_drain(s->rank);
    while (s->adapters) train_session_free_adapter(s->adapters);
}

/* bl_rank_main */
static bl_status session_main(bl_rank *rank, void *user)
{
    bl_session *s = user;

    s->rank = rank;
    bl_status st = set_up(s, rank);
    bl_error_save(&s->broken, st);
    pthread_mutex_lock(&s->mutex);
    s->is_ready = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mutex);
    if (st != BL_OK) return st;
    serve(s);
    free_adapters(s);
    return BL_OK;
}

/* ---- open and close ---- */

static bl_status open_job(bl_session *s)
{
    bl_job *job = &s->job;

    BL_TRY(bl_job_place_ranks(job));
    BL_TRY(bl_job_open_model(job));
    job->model->n_positions = s->config->max_seq_length;
    BL_TRY(bl_job_identify(job));
    bl_plan_input input;
    BL_TRY(bl_job_place_base(job, &input));
    BL_TRY(bl_plan_check(&input, &job->plan));
    /* Adapters that are not known yet may need them. */
    job->plan.pass.weighs = true;
    job->plan.pass.lora_dropout = true;
    return BL_OK;
}

static bl_status start(bl_session *s)
{
    BL_TRY(open_job(s));
    BL_TRY(bl_ranks_create(&s->job, &s->ranks));
    BL_TRY(bl_ranks_start(&s->ranks, session_main, s));
    pthread_mutex_lock(&s->mutex);
    while (!s->is_ready) pthread_cond_wait(&s->changed, &s->mutex);
    pthread_mutex_unlock(&s->mutex);
    return s->broken.status == BL_OK ? BL_OK : bl_error_restore(&s->broken);
}

bl_status bl_session_open(const char *const *keys, int n, bl_session **out)
{
    bl_session *s = calloc(1, sizeof *s);
    pthread_condattr_t attributes;
    bl_error error;

    *out = NULL;
    if (!s) return BL_FAIL(BL_ENOMEM, "a session");
    s->pid = getpid();
    pthread_mutex_init(&s->mutex, NULL);
    pthread_condattr_init(&attributes);
    pthread_condattr_setclock(&attributes, CLOCK_MONOTONIC); /* bl_now_s's */
    pthread_cond_init(&s->changed, &attributes);
    pthread_condattr_destroy(&attributes);
    bl_status st = bl_train_config_load_session(keys, n, &s->config);
    s->job.config = s->config;
    if (st == BL_OK) st = start(s);
    if (st == BL_OK) {
        *out = s;
        return BL_OK;
    }
    bl_error_save(&error, st);
    bl_session_close(s);
    return bl_error_restore(&error);
}

void bl_session_close(bl_session *s)
{
    if (!s || s->pid != getpid() || is_in_call) return;
    pthread_mutex_lock(&s->mutex);
    s->is_closing = true;
    pthread_cond_broadcast(&s->changed);
    pthread_mutex_unlock(&s->mutex);
    if (s->ranks.thread) (void)bl_ranks_join(&s->ranks, BL_OK);
    bl_ranks_free(&s->ranks);
    bl_tokenizer_destroy(s->tokenizer);
    bl_job_close(&s->job);
    free(s->micro);
    free(s->part);
    pthread_cond_destroy(&s->changed);
    pthread_mutex_destroy(&s->mutex);
    bl_train_config_free(s->config);
    free(s);
}

bl_status bl_session_get_stats(bl_session *s, bl_session_stats *out)
{
    if (s->pid != getpid()) return train_session_check_caller(s);
    pthread_mutex_lock(&s->mutex);
    *out = (bl_session_stats){.n_passes = s->n_passes};
    for (const session_request *r = s->waiting; r; r = r->next) out->n_waiting++;
    pthread_mutex_unlock(&s->mutex);
    return BL_OK;
}
