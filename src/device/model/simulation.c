/* SPDX-License-Identifier: Apache-2.0 */
/* simulation.c -- streams in simulated time: a queue of operations per stream, and a clock that
 * moves from the end of one work to the next. */
#include "device/simulation.h"

#include <math.h>
#include <stdlib.h>

enum { FIRST_OPS = 1024 };

void bl_simulation_init(bl_simulation *sim)
{
    *sim = (bl_simulation){.n_ops = 0};
    for (int s = 0; s < BL_SIM_STREAMS; s++)
        sim->first[s] = sim->last[s] = sim->head[s] = BL_SIM_NOTHING;
}

void bl_simulation_free(bl_simulation *sim)
{
    free(sim->ops);
}

static bl_status make_room(bl_simulation *sim)
{
    int n_max = sim->n_max == 0 ? FIRST_OPS : 2 * sim->n_max;
    bl_sim_op *ops;

    if (sim->n_ops < sim->n_max) return BL_OK;
    ops = realloc(sim->ops, (size_t)n_max * sizeof *ops);
    if (!ops) return BL_FAIL(BL_ENOMEM, "a simulation of %d operations", n_max);
    sim->ops = ops;
    sim->n_max = n_max;
    return BL_OK;
}

bl_status bl_simulation_add(bl_simulation *sim, const bl_sim_op *op)
{
    int at = sim->n_ops, s = op->stream;

    BL_TRY(make_room(sim));
    sim->ops[at] = *op;
    sim->ops[at].next = BL_SIM_NOTHING;
    sim->ops[at].end_s = -1;
    sim->ops[at].span_end = at;
    *(sim->last[s] == BL_SIM_NOTHING ? &sim->first[s] : &sim->ops[sim->last[s]].next) = at;
    sim->last[s] = at;
    if (sim->head[s] == BL_SIM_NOTHING) {
        sim->head[s] = at;
        sim->ops[at].begin_s = sim->now;
    }
    if (s >= sim->n_streams) sim->n_streams = s + 1;
    sim->n_ops++;
    return BL_OK;
}

int bl_simulation_event(const bl_simulation *sim, int stream)
{
    return sim->last[stream];
}

bool bl_simulation_is_done(const bl_simulation *sim, int op)
{
    return op == BL_SIM_NOTHING || sim->ops[op].end_s >= 0;
}

/* ---- running ---- */

static void finish(bl_simulation *sim, int stream)
{
    bl_sim_op *op = &sim->ops[sim->head[stream]];
    op->end_s = sim->now;
    sim->head[stream] = op->next;
    sim->is_under_way[stream] = false;
    if (op->next != BL_SIM_NOTHING) sim->ops[op->next].begin_s = sim->now;
}

static double seconds_of(const bl_sim_op *op)
{
    return op->work ? op->work->seconds : 0;
}

/* Until the stream is at a work that takes time or at a wait that is not over. */
static bool advance(bl_simulation *sim, int stream)
{
    bool moved = false;

    while (sim->head[stream] != BL_SIM_NOTHING && !sim->is_under_way[stream]) {
        const bl_sim_op *op = &sim->ops[sim->head[stream]];
        if (!op->work && !bl_simulation_is_done(sim, op->of)) return moved;
        double seconds = seconds_of(op);
        if (seconds > 0) {
            sim->is_under_way[stream] = true;
            sim->left_s[stream] = seconds;
        } else {
            finish(sim, stream);
        }
        moved = true;
    }
    return moved;
}

/* How much of full speed the works that are not settled may have for a resource's sake. */
static double share(const bl_simulation *sim, int resource, const bool *is_settled,
                    double *unsettled)
{
    double free = sim->capacity[resource];

    *unsettled = 0;
    if (free <= 0) return 1;
    for (int s = 0; s < sim->n_streams; s++) {
        if (!sim->is_under_way[s]) continue;
        double use = sim->ops[sim->head[s]].work->use[resource];
        if (is_settled[s])
            free -= sim->speed[s] * use;
        else
            *unsettled += use;
    }
    return *unsettled > 0 ? fmax(0, free) / *unsettled : 1;
}

/* Raises all works' speeds together; where a resource is full, those that use it stay behind. */
static void set_speeds(bl_simulation *sim)
{
    bool is_settled[BL_SIM_STREAMS];
    double level = 0;

    for (int s = 0; s < sim->n_streams; s++) {
        is_settled[s] = !sim->is_under_way[s];
        sim->speed[s] = 1;
    }
    while (level < 1) {
        int full = BL_SIM_NOTHING;
        level = 1;
        for (int k = 0; k < BL_RESOURCES; k++) {
            double unsettled, most = share(sim, k, is_settled, &unsettled);
            if (unsettled > 0 && most < level - 1e-12) {
                level = most;
                full = k;
            }
        }
        for (int s = 0; full != BL_SIM_NOTHING && s < sim->n_streams; s++)
            if (!is_settled[s] && sim->ops[sim->head[s]].work->use[full] > 0) {
                is_settled[s] = true;
                sim->speed[s] = fmax(level, 1e-9); /* no work stalls permanently */
            }
    }
}

/* To the time when the next work ends; false: none is under way. */
static bool step(bl_simulation *sim)
{
    double next_s = INFINITY;

    set_speeds(sim);
    for (int s = 0; s < sim->n_streams; s++)
        if (sim->is_under_way[s]) next_s = fmin(next_s, sim->left_s[s] / sim->speed[s]);
    if (next_s == INFINITY) return false;
    sim->now += next_s;
    for (int s = 0; s < sim->n_streams; s++) {
        if (!sim->is_under_way[s]) continue;
        sim->left_s[s] -= next_s * sim->speed[s];
        if (sim->left_s[s] <= 1e-12 * seconds_of(&sim->ops[sim->head[s]])) finish(sim, s);
    }
    return true;
}

bl_status bl_simulation_run_until(bl_simulation *sim, int op)
{
    do {
        for (bool moved = true; moved;) {
            moved = false;
            for (int s = 0; s < sim->n_streams; s++) moved = advance(sim, s) || moved;
        }
    } while (!bl_simulation_is_done(sim, op) && step(sim));
    if (bl_simulation_is_done(sim, op)) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "simulation: operation %d waits permanently", op);
}

bl_status bl_simulation_run(bl_simulation *sim)
{
    for (int s = 0; s < sim->n_streams; s++) BL_TRY(bl_simulation_run_until(sim, sim->last[s]));
    return BL_OK;
}
