/* SPDX-License-Identifier: Apache-2.0 */
/* simulate.c -- the event loop of simulated streams: to the next end of a work; a resource that is
 * full is shared max-min fairly. */
#include "plan/simulate_internal.h"

#include <math.h>
#include <stdlib.h>

enum { FIRST_OPS = 1024 };

void plan_simulation_init(plan_simulation *sim)
{
    *sim = (plan_simulation){.n_ops = 0};
    for (int s = 0; s < PLAN_N_STREAMS; s++) sim->first[s] = sim->last[s] = PLAN_NOTHING;
}

void plan_simulation_free(plan_simulation *sim)
{
    free(sim->ops);
}

bl_status plan_simulation_add(plan_simulation *sim, const plan_op *op)
{
    int at = sim->n_ops, *last = &sim->last[op->stream];

    if (at == sim->n_max) {
        int n_max = at == 0 ? FIRST_OPS : 2 * at;
        plan_op *ops = realloc(sim->ops, (size_t)n_max * sizeof *ops);
        if (!ops) return BL_FAIL(BL_ENOMEM, "a simulation of %d operations", n_max);
        sim->ops = ops;
        sim->n_max = n_max;
    }
    sim->ops[at] = *op;
    sim->ops[at].next = PLAN_NOTHING;
    sim->ops[at].end_s = -1;
    *(*last == PLAN_NOTHING ? &sim->first[op->stream] : &sim->ops[*last].next) = at;
    *last = at;
    sim->ops[at].span_end = at;
    sim->n_ops++;
    return BL_OK;
}

int plan_simulation_last(const plan_simulation *sim)
{
    return sim->n_ops - 1;
}

int plan_simulation_event(const plan_simulation *sim, plan_stream stream)
{
    return sim->last[stream];
}

/* ---- running ---- */

typedef struct runner {
    plan_simulation *sim;
    double now;
    int head[PLAN_N_STREAMS]; /* the operation that the stream is at; PLAN_NOTHING: it is idle */
    bool is_under_way[PLAN_N_STREAMS]; /* head is a work that has begun */
    double left_s[PLAN_N_STREAMS];     /* of it, at full speed */
    double speed[PLAN_N_STREAMS];      /* of it, 0..1 */
} runner;

static void finish(runner *r, int stream)
{
    plan_op *op = &r->sim->ops[r->head[stream]];
    op->end_s = r->now;
    r->head[stream] = op->next;
    r->is_under_way[stream] = false;
    if (op->next != PLAN_NOTHING) r->sim->ops[op->next].begin_s = r->now;
}

static double seconds_of(const plan_op *op)
{
    return op->work ? op->work->seconds : 0;
}

static bool is_done(const plan_simulation *sim, int op)
{
    return op == PLAN_NOTHING || sim->ops[op].end_s >= 0;
}

/* Until the stream is at a work that takes time or at a wait that is not over. */
static bool advance(runner *r, int stream)
{
    bool moved = false;

    while (r->head[stream] != PLAN_NOTHING && !r->is_under_way[stream]) {
        const plan_op *op = &r->sim->ops[r->head[stream]];
        if (!op->work && !is_done(r->sim, op->of)) return moved;
        double seconds = seconds_of(op);
        if (seconds > 0) {
            r->is_under_way[stream] = true;
            r->left_s[stream] = seconds;
        } else {
            finish(r, stream);
        }
        moved = true;
    }
    return moved;
}

/* How much of full speed the works that are not settled may have for a resource's sake. */
static double share(const runner *r, int resource, const bool *is_settled, double *unsettled)
{
    double free = r->sim->capacity[resource];

    *unsettled = 0;
    if (free <= 0) return 1;
    for (int s = 0; s < PLAN_N_STREAMS; s++) {
        if (!r->is_under_way[s]) continue;
        double use = r->sim->ops[r->head[s]].work->use[resource];
        if (is_settled[s])
            free -= r->speed[s] * use;
        else
            *unsettled += use;
    }
    return *unsettled > 0 ? fmax(0, free) / *unsettled : 1;
}

/* Raises all works' speeds together; where a resource is full, those that use it stay behind. */
static void set_speeds(runner *r)
{
    bool is_settled[PLAN_N_STREAMS];
    double level = 0;

    for (int s = 0; s < PLAN_N_STREAMS; s++) {
        is_settled[s] = !r->is_under_way[s];
        r->speed[s] = 1;
    }
    while (level < 1) {
        int full = PLAN_NOTHING;
        level = 1;
        for (int k = 0; k < PLAN_N_RESOURCES; k++) {
            double unsettled, most = share(r, k, is_settled, &unsettled);
            if (unsettled > 0 && most < level - 1e-12) {
                level = most;
                full = k;
            }
        }
        for (int s = 0; full != PLAN_NOTHING && s < PLAN_N_STREAMS; s++)
            if (!is_settled[s] && r->sim->ops[r->head[s]].work->use[full] > 0) {
                is_settled[s] = true;
                r->speed[s] = fmax(level, 1e-9); /* nothing stands still for ever */
            }
    }
}

/* To the time when the next work ends; false: none is under way. */
static bool step(runner *r)
{
    double next_s = INFINITY;

    set_speeds(r);
    for (int s = 0; s < PLAN_N_STREAMS; s++)
        if (r->is_under_way[s]) next_s = fmin(next_s, r->left_s[s] / r->speed[s]);
    if (next_s == INFINITY) return false;
    r->now += next_s;
    for (int s = 0; s < PLAN_N_STREAMS; s++) {
        if (!r->is_under_way[s]) continue;
        r->left_s[s] -= next_s * r->speed[s];
        if (r->left_s[s] <= 1e-12 * seconds_of(&r->sim->ops[r->head[s]])) finish(r, s);
    }
    return true;
}

bl_status plan_simulation_run(plan_simulation *sim)
{
    runner r = {.sim = sim};

    for (int s = 0; s < PLAN_N_STREAMS; s++) {
        r.head[s] = sim->first[s];
        if (r.head[s] != PLAN_NOTHING) sim->ops[r.head[s]].begin_s = 0;
    }
    do {
        for (bool moved = true; moved;) {
            moved = false;
            for (int s = 0; s < PLAN_N_STREAMS; s++) moved = advance(&r, s) || moved;
        }
    } while (step(&r));
    for (int s = 0; s < PLAN_N_STREAMS; s++)
        if (r.head[s] != PLAN_NOTHING)
            return BL_FAIL(BL_EINTERNAL, "simulation: operation %d waits for ever", r.head[s]);
    return BL_OK;
}
