/* SPDX-License-Identifier: Apache-2.0 */
/* run_step.c -- runs the passes of a round (run_pass.c) and accounts each stream's time by phase.
 *
 * Passes that are alike and follow each other are run once, or, where the state of trained weights
 * has tiers, as the first, one in the middle and the last. An unrecorded pass runs first: it
 * prefetches for the first recorded pass and leaves updates pending. */
#include "plan/run_pass_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"

/* A pass that was run: the time from begin_s to end_s counts `times` times. Transfers that begin
 * before until_s belong to it. */
typedef struct window {
    double begin_s, end_s, until_s, times;
} window;

typedef struct runner {
    const bl_time_input *in;
    plan_round round;
    plan_rank *rank;
    bool is_recording;
    window *window;
    int n_windows, max_windows;
    bl_span *span;
    int n_spans, max_spans;
    bl_status status; /* of the sink */
} runner;

static void keep_span(void *user, const bl_span *span)
{
    runner *r = user;

    if (r->n_spans == r->max_spans) {
        int n = bl_max_i64(1024, 2 * r->max_spans);
        bl_span *more = realloc(r->span, (size_t)n * sizeof *more);
        if (!more) {
            r->status = BL_FAIL(BL_ENOMEM, "out of memory: the time of a plan");
            return;
        }
        r->span = more;
        r->max_spans = n;
    }
    r->span[r->n_spans++] = *span;
}

static bl_status open(const bl_time_input *in, bool with_evaluations, bl_span_sink sink, void *user,
                      runner *r)
{
    *r = (runner){.in = in};
    BL_TRY(plan_round_create(in, &r->round));
    return plan_rank_create(in, with_evaluations, sink, user, &r->rank);
}

static void close(runner *r)
{
    plan_rank_destroy(r->rank);
    plan_round_free(&r->round);
    free(r->window);
    free(r->span);
}

static double now_of(const runner *r)
{
    return plan_rank_simulation(r->rank)->now;
}

/* ---- windows ---- */

static bl_status add_window(runner *r, double begin_s, double times)
{
    if (r->n_windows == r->max_windows) {
        int n = (int)bl_max_i64(16, 2 * r->max_windows);
        window *more = realloc(r->window, (size_t)n * sizeof *more);
        if (!more) return BL_FAIL(BL_ENOMEM, "out of memory: the time of a plan");
        r->window = more;
        r->max_windows = n;
    }
    r->window[r->n_windows++] = (window){begin_s, now_of(r), now_of(r), times};
    return BL_OK;
}

static bl_time_phase phase_of(const bl_span *visit)
{
    return strcmp(visit->name, "forward") == 0 ? BL_TIME_FORWARD
           : strcmp(visit->name, "head") == 0  ? BL_TIME_HEAD
                                               : BL_TIME_BACKWARD;
}

static bool is_visit(const bl_span *s)
{
    return s->lane == BL_LANE_COMPUTE && !s->is_stall;
}

/* A stall of the communication stream is not a stall of compute. */
static bool is_stall(const runner *r, const bl_span *s)
{
    bool is_of_gradients =
        r->in->is_trained && r->in->n_ranks > 1 && strcmp(s->name, "gradients") == 0;
    return s->is_stall && !is_of_gradients;
}

/* The phase at a time within the window: visit v lasts from the end of v - 1 to its end; later
 * times belong to the last visit. `at`: index of a visit's span at or before the time; phase_at
 * advances it. */
typedef struct phase_walk {
    const runner *r;
    const window *w;
    int at;
} phase_walk;

static int next_visit(const runner *r, const window *w, int i)
{
    while (i < r->n_spans && !(is_visit(&r->span[i]) && r->span[i].begin_s >= w->begin_s)) i++;
    return i < r->n_spans && r->span[i].begin_s < w->end_s ? i : r->n_spans;
}

static bl_time_phase phase_at(phase_walk *walk, double time_s)
{
    const runner *r = walk->r;

    for (;;) {
        int next = next_visit(r, walk->w, walk->at + 1);
        if (time_s < r->span[walk->at].end_s || next == r->n_spans)
            return phase_of(&r->span[walk->at]);
        walk->at = next;
    }
}

static void account_visits(const runner *r, const window *w, int first, bl_time_estimate *out)
{
    double end_s = w->begin_s;
    int last = first;

    for (int i = first; i < r->n_spans; i = next_visit(r, w, i + 1)) {
        out->part[phase_of(&r->span[i])].seconds += w->times * (r->span[i].end_s - end_s);
        end_s = r->span[i].end_s;
        last = i;
    }
    out->part[phase_of(&r->span[last])].seconds += w->times * (w->end_s - end_s);
}

static void account_spans(const runner *r, const window *w, int first, bl_time_estimate *out)
{
    phase_walk walk = {r, w, first};

    for (int i = 0; i < r->n_spans; i++) {
        const bl_span *s = &r->span[i];
        if (s->begin_s < w->begin_s || s->begin_s >= w->until_s) continue;
        if (is_stall(r, s)) {
            walk.at = first;
            out->part[phase_at(&walk, s->begin_s)].wait_s[s->lane] +=
                w->times * (s->end_s - s->begin_s);
        }
        out->bytes[s->lane] += w->times * (double)s->n_bytes;
    }
}

static void account_streams(const runner *r, const window *w, int first, bl_time_estimate *out)
{
    const bl_simulation *sim = plan_rank_simulation(r->rank);

    for (int s = 0; s < sim->n_streams; s++) {
        phase_walk walk = {r, w, first};
        for (int i = sim->first[s]; i != BL_SIM_NOTHING; i = sim->ops[i].next) {
            const bl_sim_op *op = &sim->ops[i];
            bl_lane lane = plan_rank_lane(r->rank, op);
            double until_s = lane == BL_LANE_COMPUTE ? w->end_s : w->until_s;
            if (!op->work || op->begin_s < w->begin_s || op->begin_s >= until_s) continue;
            bl_time_part *part = &out->part[phase_at(&walk, op->begin_s)];
            double seconds = w->times * (op->end_s - op->begin_s);
            if (lane == BL_LANE_COMPUTE) part->compute_s += seconds;
            part->busy_s[lane] += seconds;
        }
    }
}

static bl_status account(runner *r, bl_time_estimate *out)
{
    BL_TRY(plan_rank_drain(r->rank));
    if (r->status != BL_OK) return r->status;
    for (int k = 0; k < r->n_windows; k++) {
        const window *w = &r->window[k];
        int first = next_visit(r, w, 0);
        if (first == r->n_spans) return BL_FAIL(BL_EINTERNAL, "a predicted pass without visits");
        account_visits(r, w, first, out);
        account_spans(r, w, first, out);
        account_streams(r, w, first, out);
    }
    return BL_OK;
}

/* ---- a round ---- */

/* Consecutive passes with the same micro-batches. */
typedef struct alike {
    runner *r;
    plan_micro *micro; /* [n_micro] */
    int n_micro;
    int64_t n; /* passes; not all of them are run */
} alike;

static bool is_same(const alike *a, const plan_round *round)
{
    if (a->n_micro != round->n_micro) return false;
    for (int m = 0; m < a->n_micro; m++) {
        const plan_micro *x = &a->micro[m], *y = &round->micro[m];
        if (x->training != y->training || x->kind != y->kind) return false;
    }
    return true;
}

static bl_status run_one(runner *r, double times, bool joins)
{
    double begin_s = now_of(r);

    BL_TRY(plan_rank_run(r->rank, &r->round));
    if (joins) BL_TRY(plan_rank_join(r->rank));
    return r->is_recording ? add_window(r, begin_s, times) : BL_OK;
}

static bool has_tiers(const bl_time_input *in)
{
    return in->is_trained && (in->offload_ratio > 0 || in->optimizer_ratio > 0);
}

/* Runs the passes of `a`; the round's micro-batches are restored afterwards. is_end: its last pass
 * is the round's last. */
static bl_status run_alike(alike *a, bool is_end)
{
    plan_round *round = &a->r->round;
    int n_micro = round->n_micro;
    bl_status st = BL_OK;
    plan_micro *micro = round->micro;

    if (a->n == 0) return BL_OK;
    round->micro = a->micro;
    round->n_micro = a->n_micro;
    if (!has_tiers(a->r->in)) {
        st = run_one(a->r, (double)a->n, is_end);
    } else {
        if (a->n > 1) st = run_one(a->r, 1, false);
        if (st == BL_OK && a->n > 2) st = run_one(a->r, (double)(a->n - 2), false);
        if (st == BL_OK) st = run_one(a->r, 1, is_end);
    }
    round->micro = micro;
    round->n_micro = n_micro;
    a->n = 0;
    return st;
}

/* plan_pass_sink */
static bl_status see_pass(void *user, const plan_round *round, bool is_last)
{
    alike *a = user;

    (void)is_last;
    if (a->n > 0 && !is_same(a, round)) BL_TRY(run_alike(a, false));
    if (a->n == 0) {
        a->n_micro = round->n_micro;
        memcpy(a->micro, round->micro, (size_t)round->n_micro * sizeof *a->micro);
    }
    a->n++;
    return BL_OK;
}

static bl_status begin_alike(runner *r, alike *a)
{
    *a = (alike){.r = r, .micro = calloc((size_t)r->round.room, sizeof *a->micro)};
    return a->micro ? BL_OK : BL_FAIL(BL_ENOMEM, "out of memory: the time of a plan");
}

static bl_status run_round(runner *r)
{
    alike a;

    BL_TRY(begin_alike(r, &a));
    bl_status st = plan_round_each(&r->round, see_pass, &a);
    if (st == BL_OK) st = run_alike(&a, true);
    free(a.micro);
    return st;
}

static bl_status run_evaluation(runner *r, int training)
{
    alike a;

    BL_TRY(begin_alike(r, &a));
    bl_status st = plan_evaluation_each(&r->round, training, 1, see_pass, &a);
    if (st == BL_OK) st = run_alike(&a, false);
    free(a.micro);
    return st;
}

/* The unrecorded pass, with the round's first micro-batches. */
static bl_status run_first(void *user, const plan_round *round, bool is_last)
{
    runner *r = user;

    (void)round, (void)is_last;
    if (r->is_recording) return BL_OK;
    r->is_recording = true;
    BL_TRY(plan_rank_run(r->rank, &r->round));
    return BL_OK;
}

static bl_status warm_up(runner *r)
{
    BL_TRY(plan_round_each(&r->round, run_first, r));
    BL_TRY(plan_rank_join(r->rank));
    return plan_rank_update(r->rank);
}

static bl_status predict_round(runner *r, bl_time_estimate *out)
{
    BL_TRY(warm_up(r));
    BL_TRY(run_round(r));
    double begin_s = now_of(r);
    BL_TRY(plan_rank_update(r->rank));
    r->window[r->n_windows - 1].until_s = now_of(r);
    bl_time_part *optimizer = &out->part[BL_TIME_OPTIMIZER];
    double seconds = now_of(r) - begin_s + r->in->rates.step_overhead_s * (1 + r->in->n_others);
    BL_TRY(account(r, out));
    optimizer->seconds = optimizer->compute_s = optimizer->busy_s[BL_LANE_COMPUTE] = seconds;
    return BL_OK;
}

bl_status plan_run_predict(const bl_time_input *in, bl_time_estimate *out)
{
    runner r;
    bl_status st = open(in, false, keep_span, &r, &r);

    *out = (bl_time_estimate){.step_s = 0};
    if (st == BL_OK) st = predict_round(&r, out);
    close(&r);
    return st;
}

/* ---- evaluations ---- */

static double seconds_of(const bl_time_estimate *e)
{
    double seconds = 0;
    for (int p = 0; p < BL_TIME_OPTIMIZER; p++) seconds += e->part[p].seconds;
    return seconds;
}

static bl_status predict_apart(const bl_time_input *in, int training, bl_time_estimate *out)
{
    runner r;
    bl_status st = open(in, true, keep_span, &r, &r);

    *out = (bl_time_estimate){.step_s = 0};
    if (st == BL_OK) st = run_evaluation(&r, training); /* not recorded */
    r.is_recording = true;
    if (st == BL_OK) st = run_evaluation(&r, training);
    if (st == BL_OK) st = account(&r, out);
    close(&r);
    return st;
}

static bl_status predict_with(const bl_time_input *in, int training, int64_t n_micro,
                              bl_time_estimate *out)
{
    runner r;
    bl_status st = open(in, true, keep_span, &r, &r);

    *out = (bl_time_estimate){.step_s = 0};
    if (st == BL_OK) st = warm_up(&r);
    if (st == BL_OK) r.round.left[training] = n_micro;
    if (st == BL_OK) st = run_round(&r);
    if (st == BL_OK) st = account(&r, out);
    close(&r);
    return st;
}

bl_status plan_run_evaluation(const bl_time_input *in, int training,
                              bl_time_evaluation_estimate *out)
{
    bl_time_evaluation e = plan_training_of(in, training).evaluation;
    bl_time_estimate apart, without, with;

    *out = (bl_time_evaluation_estimate){.seconds = 0};
    if (e.n_micro == 0) return BL_OK;
    BL_TRY(predict_apart(in, training, &apart));
    out->apart_s = out->seconds = seconds_of(&apart);
    if (!e.is_overlapped) return BL_OK;
    BL_TRY(predict_with(in, training, 0, &without));
    BL_TRY(predict_with(in, training, e.n_micro, &with));
    out->seconds = seconds_of(&with) - seconds_of(&without);
    return BL_OK;
}

/* ---- spans ---- */

typedef struct tracing {
    runner r;
    bl_time_passes passes;
    bool is_open, is_over; /* is_over: only the first pass was requested */
    double begin_s;        /* of the pass */
    bl_span_sink sink;
    void *user;
} tracing;

static void emit(void *user, const bl_span *span)
{
    tracing *t = user;
    bl_span relative = *span;

    if (!t->is_open) return;
    relative.begin_s -= t->begin_s;
    relative.end_s -= t->begin_s;
    t->sink(t->user, &relative);
}

/* plan_pass_sink */
static bl_status trace_pass(void *user, const plan_round *round, bool is_last)
{
    tracing *t = user;

    (void)round;
    if (t->is_over) return BL_OK;
    t->begin_s = now_of(&t->r);
    t->is_open = true;
    BL_TRY(plan_rank_run(t->r.rank, &t->r.round));
    if (is_last && t->passes != BL_TIME_EVALUATIONS) BL_TRY(plan_rank_join(t->r.rank));
    t->is_over = t->passes == BL_TIME_FIRST_PASS;
    return plan_rank_drain(t->r.rank);
}

static bl_status trace(tracing *t)
{
    runner *r = &t->r;

    for (int i = 0; i < r->round.n_trainings; i++) {
        bl_time_evaluation e = plan_training_of(r->in, i).evaluation;
        if (t->passes == BL_TIME_EVALUATIONS)
            BL_TRY(plan_evaluation_each(
                &r->round, i, e.is_overlapped ? (int)bl_max_i64(1, r->in->n_overlapped) : 1,
                trace_pass, t));
        else if (t->passes == BL_TIME_ROUND_EVALUATING && e.is_overlapped)
            r->round.left[i] = e.n_micro;
    }
    return t->passes == BL_TIME_EVALUATIONS ? BL_OK : plan_round_each(&r->round, trace_pass, t);
}

bl_status plan_run_trace(const bl_time_input *in, bl_time_passes passes, bl_time_before before,
                         bl_span_sink sink, void *user)
{
    tracing t = {.passes = passes, .sink = sink, .user = user};
    bool evaluates = passes >= BL_TIME_ROUND_EVALUATING || before == BL_TIME_AFTER_EVALUATION;
    bl_status st = open(in, evaluates, emit, &t, &t.r);

    if (st == BL_OK && before == BL_TIME_AFTER_STEP) st = warm_up(&t.r);
    if (st == BL_OK && before == BL_TIME_AFTER_EVALUATION) st = run_evaluation(&t.r, 0);
    if (st == BL_OK) st = plan_rank_drain(t.r.rank);
    if (st == BL_OK) st = trace(&t);
    t.is_open = false;
    close(&t.r);
    return st;
}
