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
static const double UNSURE = 0.01;    /* of speed: error of one bound relative to another */
enum { N_FASTEST = 24, N_FASTEST_FULL = 48, N_CLIMB = 24, N_FRUGAL = 8, N_OTHER = 12 };

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

/* Speed in steps of a quarter of a percent: predictions are not more precise. */
static long speed_step(const bl_plan_option *o)
{
    return o->time.tokens_per_s > 0 ? lround(400 * log(o->time.tokens_per_s)) : LONG_MIN;
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

/* ---- by bounds ---- */

bl_status plan_options_add(plan_options *a, const bl_plan_option *o)
{
    if (a->n == a->room) {
        int room = a->room > 0 ? 2 * a->room : 256;
        bl_plan_option *more = realloc(a->option, (size_t)room * sizeof *more);
        if (!more) return BL_FAIL(BL_ENOMEM, "the plan's options");
        a->option = more;
        a->room = room;
    }
    a->option[a->n++] = *o;
    return BL_OK;
}

/* Whether a run of one option corrects the bound of the other: the ratio of run and bound is nearly
 * the same for options that offload and save alike. In full fine-tuning it depends on the units
 * that the host updates, so on offload_ratio. */
static bool is_akin(const bl_train_config *a, const bl_train_config *b)
{
    return is_alike(a, b) &&
           a->activation_checkpointing_layers == b->activation_checkpointing_layers &&
           (a->offload_ratio > 0) == (b->offload_ratio > 0) &&
           (!bl_train_config_is_full(a) || a->offload_ratio == b->offload_ratio);
}

typedef struct selection {
    plan_options *all;
    bool *has_run; /* [all->n] */
    bl_plan_option_fn run;
    void *user;
    double fastest; /* of those that were run */
} selection;

/* The best option that has not run, with at least the speed `enough` and at most `most` bytes of
 * host memory. other: only options that are not alike to it; NULL: all. */
static bl_plan_option *next_best(const selection *s, double enough, double most,
                                 const bl_train_config *other)
{
    bl_plan_option *best = NULL;

    for (int i = 0; i < s->all->n; i++) {
        bl_plan_option *o = &s->all->option[i];
        if (s->has_run[i] || o->time.tokens_per_s < enough || (double)option_host_bytes(o) > most ||
            (other && is_alike(&o->config, other)))
            continue;
        if (!best || is_better(o, best)) best = o;
    }
    return best;
}

/* Runs an option. The ratio of its run and its bound corrects the speeds of its kin. */
static bl_status run_one(selection *s, const bl_plan_option *o)
{
    double speed, part;

    s->has_run[o - s->all->option] = true;
    BL_TRY(s->run(s->user, o, &speed));
    part = speed * o->time.step_s;
    s->all->option[o - s->all->option].time.tokens_per_s = speed;
    for (int i = 0; i < s->all->n; i++) {
        bl_plan_option *kin = &s->all->option[i];
        if (!s->has_run[i] && is_akin(&kin->config, &o->config))
            kin->time.tokens_per_s = part / kin->time.step_s;
    }
    s->fastest = fmax(s->fastest, speed);
    return BL_OK;
}

/* Runs the best options with at least the speed `enough`, n_most at most, until no other bound
 * reaches the fastest of these runs. */
static bl_status run_some(selection *s, int n_most, double enough, double most,
                          const bl_train_config *other)
{
    s->fastest = 0;
    for (int i = 0; i < n_most; i++) {
        const bl_plan_option *o = next_best(s, fmax(enough, s->fastest), most, other);
        if (!o) break;
        BL_TRY(run_one(s, o));
    }
    return BL_OK;
}

/* The least host memory of the options that are at most SLACK slower than `speed`. */
static double least_host_bytes(const plan_options *a, double speed)
{
    double least = INFINITY;

    for (int i = 0; i < a->n; i++)
        if (a->option[i].time.tokens_per_s >= (1 - SLACK) * speed)
            least = fmin(least, (double)option_host_bytes(&a->option[i]));
    return least;
}

static const bl_plan_option *best_run(const selection *s)
{
    const bl_plan_option *best = NULL;

    for (int i = 0; i < s->all->n; i++)
        if (s->has_run[i] && (!best || is_better(&s->all->option[i], best)))
            best = &s->all->option[i];
    return best;
}

static const bl_plan_option *fastest_run(const selection *s)
{
    const bl_plan_option *fastest = NULL;

    for (int i = 0; i < s->all->n; i++)
        if (s->has_run[i] &&
            (!fastest || s->all->option[i].time.tokens_per_s > fastest->time.tokens_per_s))
            fastest = &s->all->option[i];
    return fastest;
}

/* They differ only in the depth of the ring and in the offloaded ratio. */
static bool divides_alike(const bl_plan_option *a, const bl_plan_option *b)
{
    const bl_train_config *c = &a->config, *d = &b->config;

    return is_alike(c, d) && a->prepares == b->prepares && c->visit_tokens == d->visit_tokens &&
           c->activation_checkpointing_layers == d->activation_checkpointing_layers &&
           c->per_device_train_batch_size == d->per_device_train_batch_size &&
           c->gradient_accumulation_steps == d->gradient_accumulation_steps;
}

/* The nearest to `of` by its ratio: with a ring of one slot more or less; with the same ring, a
 * larger or smaller ratio. NULL: none, or it was run. */
static const bl_plan_option *neighbor(const selection *s, const bl_plan_option *of, int more_slots,
                                      int ratio_sign)
{
    const bl_plan_option *nearest = NULL;
    double least = INFINITY;

    for (int i = 0; i < s->all->n; i++) {
        const bl_plan_option *o = &s->all->option[i];
        double more = o->config.offload_ratio - of->config.offload_ratio;
        if (o->config.ring_depth != of->config.ring_depth + more_slots || fabs(more) >= least ||
            (ratio_sign != 0 && more * ratio_sign <= 0) || !divides_alike(o, of))
            continue;
        nearest = o;
        least = fabs(more);
    }
    return nearest && !s->has_run[nearest - s->all->option] ? nearest : NULL;
}

/* Where transfers bind, a bound shows neither the waits that a deeper ring hides nor those between
 * copies and gathers: from the fastest run on, a step in each direction, until none is faster. */
static bl_status climb(selection *s)
{
    static const struct {
        int more_slots, ratio_sign;
    } steps[] = {{1, 0}, {-1, 0}, {0, 1}, {0, -1}};
    int n_run = 0, n_before = -1;

    while (n_run < N_CLIMB && n_run > n_before) {
        const bl_plan_option *from = fastest_run(s);
        n_before = n_run;
        for (size_t i = 0; from && i < BL_COUNT(steps); i++) {
            const bl_plan_option *o = neighbor(s, from, steps[i].more_slots, steps[i].ratio_sign);
            if (!o) continue;
            BL_TRY(run_one(s, o));
            n_run++;
        }
    }
    return BL_OK;
}

static bl_status run_selected(selection *s, int64_t host_bytes)
{
    bool is_full = s->all->n > 0 && bl_train_config_is_full(&s->all->option[0].config);
    BL_TRY(run_some(s, is_full ? N_FASTEST_FULL : N_FASTEST, 0, INFINITY, NULL));
    BL_TRY(climb(s));
    double fastest = s->fastest,
           most = least_host_bytes(s->all, fastest) + SAME_HOST * (double)host_bytes;
    BL_TRY(run_some(s, N_FRUGAL, (1 - SLACK - UNSURE) * fastest, most, NULL));
    const bl_plan_option *best = best_run(s);
    if (best) BL_TRY(run_some(s, N_OTHER, 0, INFINITY, &best->config));
    return climb(s); /* bounds of one kin may be further off than another's */
}

bl_status plan_options_select(plan_options *a, int64_t host_bytes, bl_plan_option_fn run,
                              void *user)
{
    selection s = {
        .all = a, .has_run = calloc((size_t)a->n + 1, sizeof *s.has_run), .run = run, .user = user};
    bl_status st =
        s.has_run ? run_selected(&s, host_bytes) : BL_FAIL(BL_ENOMEM, "the plan's options");

    free(s.has_run);
    return st;
}
