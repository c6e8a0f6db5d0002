/* SPDX-License-Identifier: Apache-2.0 */
/* time_round.c -- the passes of a round as train/rank/round.c makes them: the micro-batches of all
 * trainings' steps in groups, companions that losses of preferences add, and evaluations,
 * overlapped or in separate passes. */
#include <stdlib.h>

#include "base/sizes.h"
#include "plan/time_internal.h"

/* ---- trainings ---- */

static bl_time_training training_at(const bl_time_input *in, int i)
{
    if (i > 0) return in->others[i - 1];
    return (bl_time_training){.lora = in->lora,
                              .micro_tokens = in->micro_tokens,
                              .document_tokens = in->document_tokens,
                              .label_part = in->label_part,
                              .useful_part = in->useful_part,
                              .n_micro = in->n_micro,
                              .preference = in->preference,
                              .evaluation = in->evaluation};
}

bl_time_input plan_training_of(const bl_time_input *in, int i)
{
    bl_time_training t = training_at(in, i);
    bl_time_input alone = *in;

    alone.lora = t.lora;
    alone.micro_tokens = t.micro_tokens;
    alone.document_tokens = t.document_tokens;
    alone.label_part = t.label_part;
    alone.useful_part = t.useful_part;
    alone.n_micro = t.n_micro;
    alone.preference = t.preference;
    alone.evaluation = t.evaluation;
    alone.others = NULL;
    alone.n_others = 0;
    return alone;
}

/* With kto, three companions of each micro-batch at most. */
enum { MOST_COMPANIONS = 3 };

bl_status plan_round_create(const bl_time_input *in, plan_round *out)
{
    int n = 1 + in->n_others;
    int64_t most = bl_max_i64(1, in->group) + bl_max_i64(1, in->n_overlapped);

    *out = (plan_round){.input = in, .n_trainings = n};
    out->room = (int)most * (1 + MOST_COMPANIONS);
    out->left = calloc((size_t)n, sizeof *out->left);
    out->micro = calloc((size_t)out->room, sizeof *out->micro);
    return out->left && out->micro ? BL_OK : BL_FAIL(BL_ENOMEM, "out of memory: time of a plan");
}

void plan_round_free(plan_round *round)
{
    free(round->left);
    free(round->micro);
}

/* ---- a pass ---- */

static bool has_adapter(const plan_round *round, int i, bool is_reference)
{
    bl_time_training t = training_at(round->input, i);
    return t.lora->n_floats > 0 && (!is_reference || t.preference.is_adapter);
}

static void add(plan_round *round, int i, plan_kind kind, int64_t n, plan_micro like)
{
    bool is_reference = kind == PLAN_OF_STEP_REFERENCE || kind == PLAN_OF_EVALUATION_REFERENCE;

    like.training = i;
    like.kind = kind;
    like.has_adapter = has_adapter(round, i, is_reference);
    for (int64_t m = 0; m < n; m++) round->micro[round->n_micro++] = like;
}

/* Of n micro-batches of training i. */
static void add_companions(plan_round *round, int i, bool of_evaluation, int64_t n)
{
    static const plan_micro companion = {.is_companion = true, .is_weighed = true};
    bl_time_preference p = training_at(round->input, i).preference;
    plan_kind reference = of_evaluation ? PLAN_OF_EVALUATION_REFERENCE : PLAN_OF_STEP_REFERENCE,
              alone = of_evaluation ? PLAN_OF_EVALUATION : PLAN_OF_STEP_ALONE;

    if (p.has_reference) add(round, i, reference, n, companion);
    if (p.has_mismatched) add(round, i, alone, n, companion);
    if (p.has_mismatched && p.has_reference) add(round, i, reference, n, companion);
}

static void add_evaluation(plan_round *round, int i, int64_t n, bool is_overlapped)
{
    bl_time_preference p = training_at(round->input, i).preference;

    if (n == 0) return;
    add(round, i, PLAN_OF_EVALUATION, n,
        (plan_micro){.is_companion = is_overlapped, .is_weighed = p.is_weighed});
    add_companions(round, i, true, n);
    round->left[i] -= n;
}

/* Micro-batches [first, first + n) of the steps of all trainings, and their companions. */
static void add_steps(plan_round *round, int64_t first, int64_t n)
{
    int64_t begin = 0, end = 0;

    for (int companions = 0; companions < 2; companions++, begin = 0)
        for (int i = 0; i < round->n_trainings; i++, begin = end) {
            bl_time_training t = training_at(round->input, i);
            end = begin + t.n_micro;
            int64_t here = bl_max_i64(0, bl_min_i64(end, first + n) - bl_max_i64(begin, first));
            if (here == 0) continue;
            if (companions)
                add_companions(round, i, false, here);
            else
                add(round, i, PLAN_OF_STEP, here,
                    (plan_micro){.has_gradient = true, .is_weighed = t.preference.is_weighed});
        }
}

/* The evaluations' share of one of n_passes passes. */
static void add_overlapped(plan_round *round, int64_t n_passes)
{
    int64_t room = round->input->n_overlapped;

    for (int i = 0; i < round->n_trainings; i++) {
        int64_t n = bl_min_i64(bl_ceil_div(round->left[i], n_passes), room);
        add_evaluation(round, i, n, true);
        room -= n;
    }
}

static int64_t count_left(const plan_round *round)
{
    int64_t n = 0;
    for (int i = 0; i < round->n_trainings; i++) n += round->left[i];
    return n;
}

/* Evaluations that the last pass has no room for. */
static bl_status run_overlapped(plan_round *round, plan_pass_sink sink, void *user)
{
    while (count_left(round) > round->input->n_overlapped) {
        round->n_micro = 0;
        add_overlapped(round, 1);
        BL_TRY(sink(user, round, false));
    }
    return BL_OK;
}

bl_status plan_round_each(plan_round *round, plan_pass_sink sink, void *user)
{
    int64_t n_all = 0, group = bl_max_i64(1, round->input->group);

    for (int i = 0; i < round->n_trainings; i++) n_all += training_at(round->input, i).n_micro;
    for (int64_t first = 0; first < n_all; first += group) {
        int64_t n_passes = bl_ceil_div(n_all - first, group);
        if (n_passes == 1) BL_TRY(run_overlapped(round, sink, user));
        round->n_micro = 0;
        add_steps(round, first, bl_min_i64(group, n_all - first));
        add_overlapped(round, n_passes);
        BL_TRY(sink(user, round, n_passes == 1));
    }
    return BL_OK;
}

bl_status plan_evaluation_each(plan_round *round, int i, int n_most, plan_pass_sink sink,
                               void *user)
{
    bl_time_evaluation e = training_at(round->input, i).evaluation;

    for (round->left[i] = e.n_micro; round->left[i] > 0;) {
        round->n_micro = 0;
        add_evaluation(round, i, bl_min_i64(n_most, round->left[i]), e.is_overlapped);
        BL_TRY(sink(user, round, true));
    }
    return BL_OK;
}
