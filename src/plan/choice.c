/* SPDX-License-Identifier: Apache-2.0 */
/* choice.c -- which of the options that fit is chosen. By speed: of those within SLACK of the
 * fastest the one that takes least of a host's memory. By memory: the one that takes least of a
 * GPU's, then of a host's. */
#include <limits.h>
#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "plan/choice_internal.h"

static const double SLACK = 0.05;     /* of speed */
static const double SAME_HOST = 0.05; /* of a host's memory: less is not worth any speed */

/* Of a process. */
static int64_t option_host_bytes(const bl_plan_option *o)
{
    return o->plan.memory.total;
}

bool plan_option_is_less(const bl_plan_option *a, const bl_plan_option *b)
{
    return a->plan.memory.device < b->plan.memory.device ||
           (a->plan.memory.device == b->plan.memory.device &&
            a->plan.memory.total < b->plan.memory.total);
}

/* In steps of a thousandth: the model is not better than that. */
static long speed_step(const bl_plan_option *o)
{
    return o->time.tokens_per_s > 0 ? lround(1000 * log(o->time.tokens_per_s)) : LONG_MIN;
}

/* Of GPU and host together. */
static int64_t bytes_taken(const bl_plan_option *o)
{
    return bl_memory_sum(&o->plan.memory, 0, BL_MEMORY_ITEMS - 1) + o->plan.memory.disk;
}

static bool is_better(const bl_plan_option *a, const bl_plan_option *b)
{
    if (speed_step(a) != speed_step(b)) return speed_step(a) > speed_step(b);
    if (a->config.offload_ratio != b->config.offload_ratio)
        return a->config.offload_ratio < b->config.offload_ratio;
    return bytes_taken(a) < bytes_taken(b);
}

/* They differ in nothing but how much is offloaded, the ring, and how a step is divided. */
static bool is_alike(const bl_train_config *a, const bl_train_config *b)
{
    return a->offload_tier == b->offload_tier && a->shard_size == b->shard_size &&
           a->optimizer_tier == b->optimizer_tier &&
           a->offload_compute_copy == b->offload_compute_copy &&
           a->activation_checkpointing == b->activation_checkpointing &&
           a->activation_offload == b->activation_offload;
}

static void keep_by_speed(bl_plan_choice *c, const bl_plan_option *o)
{
    if (c->n_fit == 0) {
        c->best = *o;
    } else if (is_better(o, &c->best)) {
        if (!is_alike(&o->config, &c->best.config)) c->second = c->best;
        c->best = *o;
    } else if (!is_alike(&o->config, &c->best.config) &&
               (c->second.time.tokens_per_s == 0 || is_better(o, &c->second))) {
        c->second = *o;
    }
}

/* Whether a is at least as fast as b and takes no more of the host. */
static bool beats(const bl_plan_option *a, const bl_plan_option *b)
{
    return option_host_bytes(a) <= option_host_bytes(b) && !is_better(b, a);
}

static bl_status keep_frugal(plan_frontier *f, const bl_plan_option *o)
{
    int n = 0;

    for (int i = 0; i < f->n; i++)
        if (beats(&f->option[i], o)) return BL_OK;
    for (int i = 0; i < f->n; i++)
        if (!beats(o, &f->option[i])) f->option[n++] = f->option[i];
    f->n = n;
    if (f->n == f->room) {
        int room = f->room > 0 ? 2 * f->room : 16;
        bl_plan_option *more = realloc(f->option, (size_t)room * sizeof *more);
        if (!more) return BL_FAIL(BL_ENOMEM, "the plan's options");
        f->option = more;
        f->room = room;
    }
    f->option[f->n++] = *o;
    return BL_OK;
}

bl_status plan_choice_keep(bl_plan_objective objective, plan_frontier *f, const bl_plan_option *o,
                           bl_plan_choice *c)
{
    if (objective == BL_PLAN_BY_SPEED) {
        BL_TRY(keep_frugal(f, o));
        keep_by_speed(c, o);
    } else if (c->n_fit == 0 || plan_option_is_less(o, &c->best)) {
        c->best = *o;
    }
    c->n_fit++;
    return BL_OK;
}

void plan_choice_finish(const plan_frontier *f, int64_t host_bytes, bl_plan_choice *c)
{
    double enough = (1 - SLACK) * c->best.time.tokens_per_s, least = INFINITY;
    const bl_plan_option *chosen = NULL;

    for (int i = 0; i < f->n; i++)
        if (f->option[i].time.tokens_per_s >= enough)
            least = fmin(least, (double)option_host_bytes(&f->option[i]));
    least += SAME_HOST * (double)host_bytes;
    for (int i = 0; i < f->n; i++) {
        const bl_plan_option *o = &f->option[i];
        if (o->time.tokens_per_s < enough || (double)option_host_bytes(o) > least) continue;
        if (!chosen || is_better(o, chosen)) chosen = o;
    }
    if (!chosen || (double)option_host_bytes(&c->best) <= least) return;
    c->second = c->best;
    c->best = *chosen;
}
