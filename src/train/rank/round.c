/* SPDX-License-Identifier: Apache-2.0 */
/* round.c -- the training loop of one rank, for all runs over its base.
 *
 * A round is one optimizer step of each run that still trains: count the labels of all ranks;
 * forward, loss and backward of all runs' micro-batches, group by group, so that each layer's
 * frozen weights are loaded once per group, for all runs' micro-batches; then run by run the sum of
 * loss and gradients and AdamW; then run by run evaluations and checkpoints. With eval_overlap an
 * evaluation only begins there: its micro-batches are in the groups of the next round, whose update
 * waits for its end and the checkpoint. While a round runs, the rows of the next one are read and
 * tokenized: some before each visit of its passes.
 *
 * A run has the bits that it has alone: micro-batches do not mix, a run's come in their order, and
 * each has its run's adapter, gradients and loss (model/pass.h).
 *
 * Of several runs, one whose loss is not finite ends alone: all ranks see that sum. Any other
 * failure ends the job. */
#include <stdlib.h>
#include <time.h>

#include "base/clock.h"
#include "base/log.h"
#include "base/sizes.h"
#include "train/rank/evaluate.h"
#include "train/rank/preference.h"
#include "train/rank/round.h"
#include "train/rank/rungs.h"

enum { LABELS, TOKENS, FILLED, N_COUNTS }; /* of a run's step: bl_round_totals */
enum { STOPS, SAVED, N_SIGNS };            /* ranks that stop; with a done part of a save */

typedef struct bl_round {
    bl_trainer **trainers; /* of this rank, a run each */
    int n_trainers;
    const bl_round_source *source; /* NULL: the runs are those from the start */
    int64_t *counts;               /* [N_COUNTS n_trainers + N_SIGNS] */
    bool *stepped;                 /* [n_trainers]: in the round under way */
    int64_t n_visits;              /* of the round under way, without those of evaluations alone */
} bl_round;

static bl_trainer *lead_of(const bl_round *r)
{
    return r->trainers[0];
}

static int64_t count_live(const bl_round *r)
{
    int64_t n = 0;
    for (int i = 0; i < r->n_trainers; i++) n += bl_trainer_goes_on(r->trainers[i]);
    return n;
}

/* What follows in the log is of that run, if there are several. */
static bl_trainer *enter(const bl_round *r, int i)
{
    bl_log_set_label(r->n_trainers > 1 || r->source ? r->trainers[i]->training->name : NULL);
    return r->trainers[i];
}

/* Before a visit, while the one before it runs: its share of the next round's rows. */
static bool before_visit(void *user)
{
    bl_round *r = user;

    if (atomic_load(&lead_of(r)->control->abandon) != 0) return true;
    for (int i = 0; i < r->n_trainers; i++) {
        bl_trainer *t = r->trainers[i];
        if (bl_trainer_goes_on(t))
            bl_trainer_fill(t, bl_ceil_div(bl_trainer_rows_to_fill(t), r->n_visits));
    }
    return false;
}

/* Sums labels and tokens of each run's step over all ranks, and asks whether any rank wants to
 * stop. Advances a checkpoint behind the steps when all ranks have done their part. */
static bl_status count_round(bl_round *r, bool *stops)
{
    bl_trainer *lead = lead_of(r);
    int n = r->n_trainers;

    for (int i = 0; i < n; i++) {
        const bl_trainer *t = r->trainers[i];
        const bl_batches *batches = bl_trainer_batches(t);
        bool is_live = bl_trainer_goes_on(t);
        int64_t *counts = r->counts + N_COUNTS * i;
        counts[LABELS] = is_live ? batches->n_labels : 0;
        counts[TOKENS] = is_live ? batches->n_tokens : 0;
        counts[FILLED] = 0;
        for (int m = 0; is_live && m < batches->n_micro; m++)
            counts[FILLED] += batches->micro[m].T > 0;
    }
    int64_t *signs = r->counts + (int64_t)N_COUNTS * n;
    signs[STOPS] = atomic_load(&lead->control->stop);
    signs[SAVED] = bl_trainer_save_is_done(lead); /* full fine-tuning: the only run */
    BL_TRY(bl_host_comm_sum(&lead->rank->host_comm, r->counts, N_COUNTS * n + N_SIGNS));
    *stops = signs[STOPS] > 0;
    return signs[SAVED] == lead->job->topology.n_ranks ? bl_trainer_advance_save(lead) : BL_OK;
}

static bl_round_totals totals_of(const bl_round *r, int i)
{
    const int64_t *counts = r->counts + N_COUNTS * i;
    return (bl_round_totals){
        .n_labels = counts[LABELS], .n_tokens = counts[TOKENS], .n_filled = counts[FILLED]};
}

/* A run of several that cannot continue, as all ranks see, is dropped; the others continue. */
static void end_alone(bl_trainer *t, bl_status st)
{
    t->status = st;
    bl_error_save(&t->error, st);
    if (t->output) bl_log_warning("this run ends here, the others go on: %s", t->error.text);
}

/* All ranks see a loss that is not finite. */
static bl_status note_failure(const bl_round *r, bl_trainer *t, bl_status st)
{
    if (st != BL_ENUMERIC || r->n_trainers == 1) return st;
    end_alone(t, st);
    return BL_OK;
}

/* Micro-batches of all runs, those of a run one after the other. */
static bl_status begin_steps(bl_round *r, int64_t *n_micro)
{
    *n_micro = 0;
    for (int i = 0; i < r->n_trainers; i++) {
        bl_trainer *t = enter(r, i);
        if (!bl_trainer_goes_on(t)) continue;
        bl_round_totals totals = totals_of(r, i);
        bl_status st = bl_trainer_begin_step(t, &totals, lead_of(r)->micro + *n_micro);
        if (st == BL_EINPUT && r->n_trainers > 1) { /* a step without labels: of all ranks */
            end_alone(t, st);
            continue;
        }
        BL_TRY(st);
        *n_micro += bl_trainer_batches(t)->n_micro;
    }
    return BL_OK;
}

/* Adds companions to the group, which has micro-batches [first, first + n) of the round: those of
 * runs with preference losses. */
static bl_status join_preferences(const bl_round *r, int64_t first, int64_t n)
{
    int64_t begin = 0;

    for (int i = 0; i < r->n_trainers; i++) {
        const bl_trainer *t = r->trainers[i];
        if (!bl_trainer_goes_on(t)) continue;
        int64_t end = begin + bl_trainer_batches(t)->n_micro, from = bl_max_i64(begin, first),
                to = bl_min_i64(end, first + n);
        if (t->rank->preference && from < to)
            BL_TRY(bl_preference_join(t->rank->preference, BL_PREFERENCE_STEP,
                                      bl_trainer_batches(t), t->mismatched[t->steps_done & 1],
                                      (int)(from - begin), (int)(to - from), (int)(from - first),
                                      t->rank->group));
        begin = end;
    }
    return BL_OK;
}

/* Evaluations in the visits of this round: their share of one of n_passes passes. */
static bl_status join_evaluations(const bl_round *r, int64_t n_passes)
{
    int room = lead_of(r)->job->plan.n_overlapped;

    for (int i = 0; i < r->n_trainers; i++)
        BL_TRY(bl_trainer_join_evaluation(enter(r, i), n_passes, lead_of(r)->rank->group, &room));
    return BL_OK;
}

static int64_t count_overlapped(const bl_round *r)
{
    int64_t n = 0;
    for (int i = 0; i < r->n_trainers; i++)
        if (r->trainers[i]->evaluates) n += bl_evaluation_left(r->trainers[i]->rank->evaluation);
    return n;
}

static bl_status run_group(bl_round *r, bl_pass_input *input)
{
    const bl_rank *rank = lead_of(r)->rank;

    *input = bl_group_input(rank->group);
    input->stop = before_visit;
    input->stop_user = r;
    input->updates = bl_trained_full_updates(rank->state);
    return bl_pass_run(rank->pass, input);
}

/* Evaluations that the last pass has no room for run before it, so that it is the last one. */
static bl_status run_overlapped(bl_round *r, bl_pass_input *input)
{
    const bl_job *job = lead_of(r)->job;

    while (count_overlapped(r) > job->plan.n_overlapped) {
        bl_group_clear(lead_of(r)->rank->group);
        BL_TRY(join_evaluations(r, 1));
        BL_TRY(run_group(r, input));
    }
    return BL_OK;
}

/* Leaves the last group in *input. */
static bl_status run_groups(bl_round *r, int64_t n_micro, bl_pass_input *input)
{
    const bl_job *job = lead_of(r)->job;
    bl_group *group = lead_of(r)->rank->group;
    int64_t room = job->plan.pass.max_group;
    int at;

    r->n_visits = bl_ceil_div(n_micro, room) * (2 * job->model->config.n_layers + 1);
    for (int64_t first = 0; first < n_micro; first += room) {
        int64_t n = bl_min_i64(room, n_micro - first),
                n_passes = bl_ceil_div(n_micro - first, room);
        if (n_passes == 1) BL_TRY(run_overlapped(r, input));
        bl_group_clear(group);
        BL_TRY(bl_group_add(group, lead_of(r)->micro + first, (int)n, &at));
        BL_TRY(join_preferences(r, first, n));
        BL_TRY(join_evaluations(r, n_passes));
        BL_TRY(run_group(r, input));
    }
    return BL_OK;
}

/* Moves the start of all runs' steps by the time that this takes: it is not theirs. */
static bl_status end_evaluations(const bl_round *r)
{
    double started = bl_now_s();

    for (int i = 0; i < r->n_trainers; i++) {
        bl_trainer *t = enter(r, i);
        BL_TRY(note_failure(r, t, bl_trainer_end_evaluation(t)));
    }
    for (int i = 0; i < r->n_trainers; i++) r->trainers[i]->started_s += bl_now_s() - started;
    return BL_OK;
}

static bl_status end_steps(bl_round *r, const bl_pass_input *last_group)
{
    bl_trainer *lead = lead_of(r);
    bl_lane_totals lanes[BL_N_LANES];
    bl_step_result result = {.n_fallbacks = -1};
    bl_status st = BL_OK;

    for (int i = 0; i < r->n_trainers; i++) {
        if (!bl_trainer_goes_on(r->trainers[i])) continue;
        BL_TRY(bl_trainer_end_fill(enter(r, i)));
        BL_TRY(bl_trained_state_join(r->trainers[i]->rank->state));
    }
    BL_TRY(end_evaluations(r));
    bl_trainer_count_lanes(lead, lanes);
    BL_TRY(bl_trainer_count_fallbacks(lead, &result.n_fallbacks));
    for (int i = 0; i < r->n_trainers && st == BL_OK; i++) {
        bl_trainer *t = enter(r, i);
        bl_round_totals totals = totals_of(r, i);
        r->stepped[i] = bl_trainer_goes_on(t);
        if (!r->stepped[i]) continue;
        for (int lane = 0; lane < BL_N_LANES; lane++) result.lanes[lane] = lanes[lane];
        result.preference = (bl_preference_metrics){0}; /* that of the run before it */
        st = note_failure(r, t, bl_trainer_end_step(t, &totals, last_group, &result));
    }
    return st;
}

/* After a step, or before the first one: a run that has done all its steps writes its adapter,
 * whatever the others have still to do. */
static bl_status end_run(const bl_round *r, bl_trainer *t)
{
    (void)r;
    if (t->has_ended || t->status != BL_OK || bl_trainer_has_more(t)) return BL_OK;
    return bl_trainer_end(t);
}

/* Evaluations and checkpoints that are due. Lanes count steps alone. */
static bl_status after_steps(bl_round *r, const bool *stepped)
{
    bool evaluated = false;

    for (int i = 0; i < r->n_trainers; i++) {
        bl_trainer *t = enter(r, i);
        if (!stepped[i] || t->status != BL_OK) continue;
        BL_TRY(note_failure(r, t, bl_trainer_after_step(t)));
        evaluated |= t->evaluated_step == t->steps_done;
    }
    if (evaluated) {
        bl_lane_totals of_no_step[BL_N_LANES];
        bl_trainer_count_lanes(lead_of(r), of_no_step);
    }
    return BL_OK;
}

static bl_status run_round(bl_round *r)
{
    bl_pass_input input;
    int64_t n_micro;

    BL_TRY(bl_trainer_await_save(lead_of(r)));
    BL_TRY(begin_steps(r, &n_micro));
    BL_TRY(run_groups(r, n_micro, &input));
    BL_TRY(end_steps(r, &input));
    BL_TRY(after_steps(r, r->stepped));
    bl_rungs_decide(r->trainers, r->n_trainers);
    for (int i = 0; i < r->n_trainers; i++) BL_TRY(end_run(r, enter(r, i)));
    return BL_OK;
}

/* All runs that still train are saved; the message is the first one's. */
static bl_status stop_runs(bl_round *r)
{
    bl_error error = {.status = BL_OK};

    if (count_live(r) == 0)
        return BL_FAIL(BL_ESTOPPED, "stopped on request: no job was in progress");
    for (int i = 0; i < r->n_trainers; i++) {
        bl_trainer *t = enter(r, i);
        if (!bl_trainer_has_more(t)) continue;
        bl_status st = bl_trainer_stop(t);
        if (st != BL_ESTOPPED) return st;
        if (error.status == BL_OK) bl_error_save(&error, st);
    }
    return bl_error_restore(&error);
}

/* Those from `first` on. */
static bl_status start_runs(bl_round *r, int first)
{
    for (int i = first; i < r->n_trainers; i++) {
        bl_trainer *t = enter(r, i);
        BL_TRY(note_failure(r, t, bl_trainer_start(t)));
    }
    bl_lane_totals of_no_step[BL_N_LANES];
    bl_trainer_count_lanes(lead_of(r), of_no_step);
    bl_rungs_decide(r->trainers, r->n_trainers); /* once more, of a job that is resumed */
    for (int i = first; i < r->n_trainers; i++) BL_TRY(end_run(r, enter(r, i)));
    return BL_OK;
}

static bl_status change_runs(bl_round *r, bool *is_over)
{
    int n_new = 0;

    *is_over = true;
    if (!r->source) return BL_OK;
    BL_TRY(r->source->change(r->source->user, r->trainers, &r->n_trainers, &n_new, is_over));
    return n_new > 0 ? start_runs(r, r->n_trainers - n_new) : BL_OK;
}

/* Nothing trains, and runs may come. */
static void wait_for_runs(void)
{
    const struct timespec pause = {0, 50 * 1000 * 1000};
    nanosleep(&pause, NULL);
}

static bl_status run_rounds(bl_round *r)
{
    bool stops, is_over, is_first = true;

    if (!r->source) BL_TRY(start_runs(r, 0));
    for (;;) {
        BL_TRY(change_runs(r, &is_over));
        bool is_live = count_live(r) > 0;
        if (!is_live && is_over) return BL_OK;
        BL_TRY(count_round(r, &stops));
        if (stops) return stop_runs(r);
        if (!is_live) {
            if (r->n_trainers == 1) wait_for_runs();
            continue;
        }
        for (int i = 0; i < r->n_trainers; i++) atomic_store(&r->trainers[i]->is_saving, false);
        BL_TRY(run_round(r));
        /* The collectives of a round, and all before it, have been the same on all ranks. */
        if (is_first) BL_TRY(bl_comm_trust_order(lead_of(r)->rank->world));
        is_first = false;
    }
}

/* The first run that failed alone; after all ranks have ended their work for the others. */
static bl_status first_failure(const bl_round *r)
{
    for (int i = 0; i < r->n_trainers; i++) {
        if (r->trainers[i]->status == BL_OK) continue;
        lead_of(r)->rank->is_at_fault = r->trainers[i]->rank->is_at_fault;
        BL_TRY(bl_host_comm_barrier(&lead_of(r)->rank->host_comm));
        return bl_error_restore(&r->trainers[i]->error);
    }
    return BL_OK;
}

/* All ranks see a loss that is not finite: they complete the checkpoint of an earlier step. */
static bl_status keep_save(const bl_round *r, bl_status st)
{
    bl_error error;

    if (st != BL_ENUMERIC) return st;
    bl_error_save(&error, st);
    (void)bl_trainer_end_save(lead_of(r));
    return bl_error_restore(&error);
}

bl_status bl_round_run(bl_trainer **trainers, int n, const bl_round_source *source)
{
    int room = source ? source->room : n;
    bl_round r = {.trainers = trainers,
                  .n_trainers = n,
                  .source = source,
                  .counts = calloc((size_t)(N_COUNTS * room + N_SIGNS), sizeof *r.counts),
                  .stepped = calloc((size_t)room, sizeof *r.stepped)};

    bl_status st =
        r.counts && r.stepped ? run_rounds(&r) : BL_FAIL(BL_ENOMEM, "the counts of %d runs", room);
    st = st == BL_OK ? first_failure(&r) : keep_save(&r, st);
    bl_log_set_label(NULL);
    free(r.counts);
    free(r.stepped);
    return st;
}
