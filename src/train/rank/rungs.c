/* SPDX-License-Identifier: Apache-2.0 */
/* rungs.c -- successive halving: which runs continue after a rung. */
#include "train/rank/rungs.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/log.h"
#include "base/sizes.h"

/* INT64_MAX: beyond any step. */
static int64_t step_of(const bl_train_config *c, int rung)
{
    int64_t step = c->grace_period;
    for (int i = 0; i < rung; i++) {
        if (step > INT64_MAX / c->reduction_factor) return INT64_MAX;
        step *= c->reduction_factor;
    }
    return step;
}

/* The number of the rung at that step; -1: none. */
static int find_rung(const bl_trainer *t, int64_t step)
{
    const bl_train_config *c = t->config;

    if (c->reduction_factor == 0 || step >= t->training->total_steps) return -1;
    for (int rung = 0; rung < BL_MAX_RUNGS && step_of(c, rung) <= step; rung++)
        if (step_of(c, rung) == step) return rung;
    return -1;
}

bool bl_trainer_has_rung(const bl_trainer *t, int64_t step)
{
    return find_rung(t, step) >= 0;
}

void bl_trainer_note_rung(bl_trainer *t, int64_t step, double loss)
{
    int rung = find_rung(t, step);

    if (rung != t->rungs.n) return; /* none, or known from a checkpoint */
    t->rungs.loss[t->rungs.n++] = loss;
}

bool bl_trainer_waits(const bl_trainer *t)
{
    return t->rungs.n > t->n_decided;
}

/* ---- decisions ---- */

static bool is_done(const bl_trainer *t)
{
    return t->status != BL_OK || t->steps_done >= t->training->total_steps ||
           bl_trainer_stops_early(t);
}

/* Whether the run has reached the rung, or may still reach it, and can continue there. */
static bool competes(const bl_trainer *t, int rung)
{
    const bl_train_config *c = t->config;
    int64_t step = step_of(c, rung);
    bool was_stopped = t->rungs.stopped_at > 0 && t->rungs.stopped_at < step,
         has_ended = bl_trainer_is_out_of_patience(t) && t->steps_done <= step;

    if (c->reduction_factor == 0 || was_stopped || has_ended) return false;
    if (t->rungs.n > rung) return true;
    return !is_done(t) && step < t->training->total_steps;
}

/* The number of competing runs with a lower loss, or with the same loss and a lower index. */
static int place_of(bl_trainer **trainers, int n, int rung, int i)
{
    double loss = trainers[i]->rungs.loss[rung];
    int place = 0;

    for (int k = 0; k < n; k++) {
        if (k == i || !competes(trainers[k], rung)) continue;
        double other = trainers[k]->rungs.loss[rung];
        place += other < loss || (other == loss && k < i);
    }
    return place;
}

static void log_decision(bl_trainer **trainers, int n, int rung, int n_kept)
{
    for (int i = 0; i < n; i++) {
        const bl_trainer *t = trainers[i];
        if (!t->output || !competes(t, rung)) continue;
        bl_log_set_label(t->training->name);
        int place = place_of(trainers, n, rung, i);
        bl_log_info("rung of %lld steps: validation loss %.4f, place %d of %d that are kept: %s",
                    (long long)step_of(t->config, rung), t->rungs.loss[rung], place + 1, n_kept,
                    place < n_kept ? "goes on" : "stops");
    }
    bl_log_set_label(NULL);
}

/* false: some runs have not reached the rung, or none competes. */
static bool decide(bl_trainer **trainers, int n, int rung)
{
    int n_competing = 0;
    int64_t factor = 1;

    for (int i = 0; i < n; i++) {
        if (!competes(trainers[i], rung)) continue;
        if (trainers[i]->rungs.n <= rung) return false;
        factor = trainers[i]->config->reduction_factor;
        n_competing++;
    }
    if (n_competing == 0) return false;
    int n_kept = (int)bl_ceil_div(n_competing, factor);
    log_decision(trainers, n, rung, n_kept);
    /* A run that is stopped at this rung still competes there, so places do not change. */
    for (int i = 0; i < n; i++) {
        bl_trainer *t = trainers[i];
        if (competes(t, rung) && place_of(trainers, n, rung, i) >= n_kept)
            t->rungs.stopped_at = step_of(t->config, rung);
        t->n_decided = rung + 1;
    }
    return true;
}

void bl_rungs_decide(bl_trainer **trainers, int n)
{
    for (int rung = trainers[0]->n_decided; rung < BL_MAX_RUNGS && decide(trainers, n, rung);)
        rung++;
}
