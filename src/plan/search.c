/* SPDX-License-Identifier: Apache-2.0 */
/* search.c -- nested loops over the free keys: each option is fitted by its offload ratio and
 * ranked by the bound of its time; the best are run. */
#include "plan/choice_internal.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "plan/bound_internal.h"

enum { N_RATIOS = 20, RING_MIN = 2, RING_MAX = 4, N_TOP = 16, N_PARTS = 8 };

static const bl_activation_checkpointing savings[] = {BL_RECOMPUTE_FULL, BL_RECOMPUTE_SELECTIVE,
                                                      BL_RECOMPUTE_MLP, BL_RECOMPUTE_NONE};

unsigned bl_plan_auto_keys(const bl_train_config *c)
{
    bool is_save_auto = c->activation_checkpointing == BL_RECOMPUTE_AUTO,
         is_full = bl_train_config_is_full(c);
    return (c->offload_ratio == (double)BL_OPTION_AUTO ? BL_FREE_RATIO : 0u) |
           (is_save_auto ? BL_FREE_SAVE : 0u) |
           (is_save_auto && c->activation_checkpointing_layers == BL_OPTION_AUTO ? BL_FREE_LAYERS
                                                                                 : 0u) |
           (c->visit_tokens == BL_OPTION_AUTO ? BL_FREE_VISIT : 0u) |
           (is_full && c->optimizer_tier == BL_OPTIMIZER_AUTO ? BL_FREE_OPTIMIZER : 0u) |
           (is_full && c->offload_compute_copy == BL_COPY_AUTO ? BL_FREE_COPY : 0u);
}

unsigned plan_fixed_keys(const bl_train_config *c)
{
    return bl_train_config_is_full(c) ? BL_FREE_HOST_PART | BL_FREE_SHARDS : 0;
}

unsigned bl_plan_keys_left_open(const bl_train_config *c)
{
    static const struct {
        const char *key;
        unsigned freedom;
    } keys[] = {{"offload_ratio", BL_FREE_RATIO},
                {"offload_tier", BL_FREE_TIER},
                {"offload_host_part", BL_FREE_HOST_PART},
                {"activation_checkpointing", BL_FREE_SAVE},
                {"activation_offload", BL_FREE_ACTIVATION_OFFLOAD},
                {"visit_tokens", BL_FREE_VISIT},
                {"ring_depth", BL_FREE_RING},
                {"shard_size", BL_FREE_SHARDS}};
    unsigned left = bl_plan_auto_keys(c);

    for (size_t i = 0; i < BL_COUNT(keys); i++)
        if (!bl_train_config_given(c, keys[i].key)) left |= keys[i].freedom;
    if ((left & BL_FREE_SAVE) && !bl_train_config_given(c, "activation_checkpointing_layers"))
        left |= BL_FREE_LAYERS;
    if (bl_train_config_given(c, "offload_tier") && c->offload_tier == BL_OFFLOAD_HOST)
        left &= ~(unsigned)BL_FREE_HOST_PART;
    if (!bl_train_config_given(c, "per_device_train_batch_size") ||
        !bl_train_config_given(c, "gradient_accumulation_steps"))
        left |= BL_FREE_MICRO_BATCH;
    return left & ~plan_fixed_keys(c);
}

/* ---- options ---- */

typedef enum search_way {
    BY_BOUNDS, /* runs the options with the best bounds */
    OF_MEMORY, /* whether anything fits; computes no times */
    BY_RUNS    /* runs all options */
} search_way;

typedef struct search {
    const bl_plan_input *input;
    unsigned free_keys;
    bl_plan_objective objective;
    search_way way;
    int64_t gpu_limit, host_limit; /* of a process; INT64_MAX: not known */
    double disk_limit;             /* of a rank */
    bl_linear_prepared prepared;   /* of a layer: the same for all options */
    plan_bounds *bounds;
    plan_frontier frontier; /* by speed: of the options that were run */
    plan_options fitting;   /* all that fit; their times are bounds */
    bl_plan_option *top;    /* [N_TOP], the fastest first; n_top of them */
    int n_top;
    bl_plan_choice *choice;
} search;

/* Unlimited where it is not known. */
static int64_t limit_of(int64_t available)
{
    return available < 0 ? INT64_MAX : bl_plan_usable_bytes(available);
}

static bl_status predict(const search *s, bl_plan_option *o)
{
    bl_plan_input in = *s->input;

    in.config = &o->config;
    o->plan.placement = (bl_placement){
        .ratio = o->config.offload_ratio,
        .tier = o->config.offload_tier == BL_OFFLOAD_DISK ? BL_TIER_DISK : BL_TIER_HOST,
        .host_part = o->config.offload_host_part,
        .places_copy = o->config.offload_compute_copy == BL_COPY_OFFLOADED,
        .dir = o->config.offload_dir,
        .pin = true,
        .n = in.topology.n_on_host};
    o->plan.pass = bl_plan_pass_options(&in, bl_plan_save_of(o->config.activation_checkpointing));
    if (o->prepares) o->plan.pass.prepared = s->prepared;
    o->plan.optimizer = bl_trained_full_placement(&o->config);
    return bl_plan_predict_memory(&in, &o->plan.placement, &o->plan.optimizer, &o->plan.pass,
                                  &o->plan.memory);
}

static bool fits_gpu(const search *s, const bl_plan_option *o)
{
    return bl_memory_gpu_bytes(&o->plan.memory, s->input->topology.n_here) <= s->gpu_limit;
}

static bool fits_host(const search *s, const bl_plan_option *o)
{
    return o->plan.memory.total <= s->host_limit && (double)o->plan.memory.disk <= s->disk_limit;
}

/* Moments and gradients that are not in device memory are in the tier of offloaded weights, or on
 * disk. With the ratio of the weights an update copies no layer to the host and back. */
static void offload_state(const search *s, bl_train_config *c)
{
    bool on_disk = c->offload_tier == BL_OFFLOAD_DISK || c->optimizer_tier == BL_OPTIMIZER_DISK;

    c->optimizer_tier = on_disk ? BL_OPTIMIZER_DISK : BL_OPTIMIZER_HOST;
    if (s->input->config->optimizer_ratio == BL_OPTION_AUTO)
        c->optimizer_ratio = c->offload_ratio > 0 ? c->offload_ratio : 1;
}

/* The state's ratio follows that of the weights. */
static void follow_ratio(const search *s, bl_train_config *c)
{
    const unsigned both = BL_FREE_RATIO | BL_FREE_OPTIMIZER;

    if ((s->free_keys & both) != both) return;
    if (c->offload_ratio > 0)
        offload_state(s, c);
    else
        c->optimizer_tier = BL_OPTIMIZER_DEVICE;
}

/* Ratio i / N_RATIOS. */
static bl_status try_ratio(const search *s, bl_plan_option *o, int i, bool *fits)
{
    o->config.offload_ratio = (double)i / N_RATIOS;
    follow_ratio(s, &o->config);
    BL_TRY(predict(s, o));
    *fits = fits_gpu(s, o);
    return BL_OK;
}

/* The least part offloaded with which the GPU's memory is enough: more is hardly ever faster
 * (try_other_ratios) and takes more of the host's. From the second step on a larger part takes less
 * of the GPU; at the first step a ring may be added. */
static bl_status least_ratio(const search *s, bl_plan_option *o, bool *fits)
{
    int low = 1, high = N_RATIOS;

    if (!(s->free_keys & BL_FREE_RATIO)) {
        BL_TRY(predict(s, o));
        *fits = fits_gpu(s, o);
        return BL_OK;
    }
    if (s->objective == BL_PLAN_BY_MEMORY) return try_ratio(s, o, N_RATIOS, fits);
    BL_TRY(try_ratio(s, o, 0, fits));
    if (*fits) return BL_OK;
    BL_TRY(try_ratio(s, o, N_RATIOS, fits));
    if (!*fits) return BL_OK;
    while (low < high) {
        int middle = (low + high) / 2;
        BL_TRY(try_ratio(s, o, middle, fits));
        if (*fits)
            high = middle;
        else
            low = middle + 1;
    }
    return try_ratio(s, o, high, fits);
}

static void keep_top(search *s, const bl_plan_option *o)
{
    int at = s->n_top < N_TOP ? s->n_top++ : N_TOP;

    for (; at > 0 && o->time.tokens_per_s > s->top[at - 1].time.tokens_per_s; at--)
        if (at < N_TOP) s->top[at] = s->top[at - 1];
    if (at < N_TOP) s->top[at] = *o;
}

/* Sets its time and speed: those of a run with BY_RUNS, else bounds. */
static bl_status bound(search *s, bl_plan_option *o)
{
    bl_plan_input in = *s->input;
    bl_plan_time time;

    in.config = &o->config;
    if (s->way == BY_RUNS) return bl_plan_estimate(&in, &o->plan, &o->time);
    BL_TRY(bl_plan_time_open(&in, &o->plan, &time));
    bl_status st = plan_bound(s->bounds, &time.input, &o->time.step_s);
    bl_plan_time_close(&time);
    o->time.tokens_per_s = st == BL_OK ? 1 / o->time.step_s : 0;
    return st;
}

static bl_status weigh(search *s, bl_plan_option *o)
{
    if (s->way == OF_MEMORY || s->objective != BL_PLAN_BY_SPEED)
        return plan_choice_keep(s->objective, &s->frontier, o, s->choice);
    BL_TRY(bound(s, o));
    return plan_options_add(&s->fitting, o);
}

/* The largest offloaded part that fits into host memory; the rest stays on disk. */
static bl_status fill_host(const search *s, bl_plan_option *o)
{
    int low = 0, high = N_RATIOS - 1; /* low fits, if anything does */

    if (!(s->free_keys & BL_FREE_HOST_PART) || o->config.offload_tier != BL_OFFLOAD_DISK ||
        !fits_host(s, o))
        return BL_OK;
    while (low < high) {
        int middle = (low + high + 1) / 2;
        o->config.offload_host_part = (double)middle / N_RATIOS;
        BL_TRY(predict(s, o));
        if (fits_gpu(s, o) && fits_host(s, o))
            low = middle;
        else
            high = middle - 1;
    }
    o->config.offload_host_part = (double)low / N_RATIOS;
    return predict(s, o);
}

/* A larger part of the base in host memory: where that takes less of what binds, of the fastest
 * options. */
static bl_status try_other_ratios(search *s)
{
    bool fits;

    for (int t = 0; t < s->n_top; t++) {
        int first = (int)lround(s->top[t].config.offload_ratio * N_RATIOS) + 1;
        for (int i = first; i <= N_RATIOS; i++) {
            bl_plan_option o = s->top[t];
            s->choice->n_options++;
            if (s->free_keys & BL_FREE_HOST_PART) o.config.offload_host_part = 0;
            BL_TRY(try_ratio(s, &o, i, &fits));
            if (fits) BL_TRY(fill_host(s, &o));
            if (fits && fits_host(s, &o)) BL_TRY(weigh(s, &o));
        }
    }
    return BL_OK;
}

/* Where the host's memory is too small: first the optimizer's state, whose pages a step reads and
 * writes once; then the weights, too, which each pass reads. */
static bl_status use_disk(const search *s, bl_plan_option *o, bool *fits)
{
    bl_train_config *c = &o->config;

    if (!*fits || fits_host(s, o) || !(s->free_keys & BL_FREE_TIER) ||
        c->offload_tier != BL_OFFLOAD_HOST)
        return BL_OK;
    if ((s->free_keys & BL_FREE_OPTIMIZER) && c->optimizer_tier == BL_OPTIMIZER_HOST) {
        c->optimizer_tier = BL_OPTIMIZER_DISK;
        BL_TRY(predict(s, o));
        *fits = fits_gpu(s, o);
        if (*fits && fits_host(s, o)) return BL_OK;
    }
    c->offload_tier = BL_OFFLOAD_DISK;
    BL_TRY(predict(s, o));
    *fits = fits_gpu(s, o);
    return BL_OK;
}

static int64_t n_fitting(const search *s)
{
    return s->choice->n_fit + s->fitting.n;
}

static bl_status try_option(search *s, bl_plan_option *o)
{
    bool fits;

    s->choice->n_options++;
    BL_TRY(least_ratio(s, o, &fits));
    if (o->config.offload_ratio == 0 && (s->free_keys & BL_FREE_COPY) &&
        o->config.offload_compute_copy == BL_COPY_OFFLOADED)
        return BL_OK; /* no weights are offloaded, so neither is the copy: tried before */
    BL_TRY(use_disk(s, o, &fits));
    if (fits) BL_TRY(fill_host(s, o));
    if (!fits || !fits_host(s, o)) {
        o->time = (bl_time_estimate){0};
        if (n_fitting(s) == 0 &&
            (s->choice->n_options == 1 || plan_option_is_less(o, &s->choice->best)))
            s->choice->best = *o;
        return BL_OK;
    }
    BL_TRY(weigh(s, o));
    keep_top(s, o);
    return BL_OK;
}

/* Of the fastest options: some layers save everything, the others what a way of recomputation
 * leaves. */
static bl_status try_layer(search *s, const bl_plan_option *base,
                           bl_activation_checkpointing saving, int part)
{
    bl_plan_option o = *base;

    o.config.activation_checkpointing = saving;
    o.config.activation_checkpointing_layers =
        bl_ceil_div(s->input->model->n_layers * part, N_PARTS);
    return try_option(s, &o);
}

static bl_status try_layers(search *s)
{
    bl_plan_option top[N_TOP];
    int n_top = s->n_top;

    if (!(s->free_keys & BL_FREE_LAYERS)) return BL_OK;
    memcpy(top, s->top, (size_t)n_top * sizeof *top);
    for (int t = 0; t < n_top; t++)
        for (size_t i = 0; i < BL_COUNT(savings); i++)
            for (int part = 1; part < N_PARTS; part++)
                if (savings[i] != BL_RECOMPUTE_NONE)
                    BL_TRY(try_layer(s, &top[t], savings[i], part));
    return BL_OK;
}

/* ---- every combination ---- */

/* Nothing is prepared in a GPU whose memory is not known. */
static bl_status each_preparation(search *s, const bl_plan_option *base)
{
    bl_plan_input in = *s->input;
    bl_plan_option o = *base;

    BL_TRY(try_option(s, &o));
    o = *base;
    in.config = &o.config;
    bl_pass_options pass =
        bl_plan_pass_options(&in, bl_plan_save_of(o.config.activation_checkpointing));
    o.prepares = s->gpu_limit < INT64_MAX && bl_plan_uses_prepared(&in, &pass);
    return o.prepares ? try_option(s, &o) : BL_OK;
}

/* Of full fine-tuning: the bf16 copy in device memory, and in the tiers of the weights, where some
 * are outside of it. */
static bl_status each_copy(search *s, const bl_train_config *base)
{
    bl_plan_option o = {.config = *base};

    if (!(s->free_keys & BL_FREE_COPY)) return each_preparation(s, &o);
    o.config.offload_compute_copy = BL_COPY_ON_DEVICE;
    BL_TRY(each_preparation(s, &o));
    if (!(s->free_keys & BL_FREE_RATIO) && base->offload_ratio == 0) return BL_OK;
    o = (bl_plan_option){.config = *base};
    o.config.offload_compute_copy = BL_COPY_OFFLOADED;
    return each_preparation(s, &o);
}

/* Moments and gradients: where the weights' ratio is free, too, try_ratio places them. */
static bl_status each_optimizer(search *s, const bl_train_config *base)
{
    bl_train_config c = *base;

    if (!(s->free_keys & BL_FREE_OPTIMIZER)) return each_copy(s, base);
    c.optimizer_tier = BL_OPTIMIZER_DEVICE;
    BL_TRY(each_copy(s, &c));
    if (s->free_keys & BL_FREE_RATIO) return BL_OK;
    offload_state(s, &c);
    return each_copy(s, &c);
}

static bl_status each_ring(search *s, const bl_train_config *base)
{
    bool is_free = s->free_keys & BL_FREE_RING;
    for (int64_t ring = is_free ? RING_MIN : base->ring_depth;
         ring <= (is_free ? RING_MAX : base->ring_depth); ring++) {
        bl_train_config c = *base;
        c.ring_depth = ring;
        BL_TRY(each_optimizer(s, &c));
    }
    return BL_OK;
}

static bl_status each_saving(search *s, const bl_train_config *base)
{
    bool saves = s->free_keys & BL_FREE_SAVE, offloads = s->free_keys & BL_FREE_ACTIVATION_OFFLOAD;

    for (size_t i = 0; i < (saves ? BL_COUNT(savings) : 1); i++)
        for (int offload = 0; offload < (offloads ? 2 : 1); offload++) {
            bl_train_config c = *base;
            if (saves) c.activation_checkpointing = savings[i];
            if (offloads) c.activation_offload = offload;
            BL_TRY(each_ring(s, &c));
        }
    return BL_OK;
}

/* Micro-batches per visit: all divisors of those of a round, up to the first with which nothing
 * fits: a longer visit takes more memory. */
static bl_status each_visit(search *s, const bl_train_config *base)
{
    bl_plan_input in = *s->input;

    if (!(s->free_keys & BL_FREE_VISIT)) return each_saving(s, base);
    in.config = base;
    int64_t micro = bl_max_i64(1, bl_plan_micro_tokens(&in)), n_micro = bl_plan_count_micro(&in);
    for (int64_t group = 1; group <= n_micro; group++) {
        if (n_micro % group != 0) continue;
        bl_train_config c = *base;
        c.visit_tokens = group * micro;
        int64_t before = n_fitting(s);
        BL_TRY(each_saving(s, &c));
        if (n_fitting(s) == before) break;
    }
    return BL_OK;
}

/* The sequences of a step and rank, in micro-batches of every size that divides them, up to the
 * first with which nothing fits. */
static bl_status each_micro_batch(search *s, const bl_train_config *base)
{
    int64_t n = base->per_device_train_batch_size * base->gradient_accumulation_steps;

    if (!(s->free_keys & BL_FREE_MICRO_BATCH)) return each_visit(s, base);
    for (int64_t batch = 1; batch <= n; batch++) {
        if (n % batch != 0) continue;
        bl_train_config c = *base;
        c.per_device_train_batch_size = batch;
        c.gradient_accumulation_steps = n / batch;
        int64_t before = n_fitting(s);
        BL_TRY(each_visit(s, &c));
        if (n_fitting(s) == before) break;
    }
    return BL_OK;
}

static bl_status each_shard_size(search *s, const bl_train_config *base)
{
    const bl_topology *t = &s->input->topology;
    int64_t sizes[] = {t->n_ranks, t->n_on_host, 1};

    if (!(s->free_keys & BL_FREE_SHARDS)) return each_micro_batch(s, base);
    for (size_t i = 0; i < BL_COUNT(sizes); i++) {
        if ((i > 0 && sizes[i] == sizes[i - 1]) || t->n_ranks % sizes[i] != 0) continue;
        bl_train_config c = *base;
        c.shard_size = sizes[i];
        BL_TRY(each_micro_batch(s, &c));
    }
    return BL_OK;
}

/* bl_plan_option_fn */
static bl_status run_option(void *user, const bl_plan_option *option, double *speed)
{
    search *s = user;
    bl_plan_option o = *option;
    bl_plan_input in = *s->input;

    in.config = &o.config;
    if (s->way == BY_BOUNDS) BL_TRY(bl_plan_estimate(&in, &o.plan, &o.time));
    *speed = 1 / o.time.step_s;
    return plan_choice_keep(s->objective, &s->frontier, &o, s->choice);
}

/* The usable part of the host's memory; 0: not known. */
static int64_t host_bytes(const search *s)
{
    return s->host_limit < INT64_MAX ? s->host_limit : 0;
}

/* Runs the best of the options that fit. */
static bl_status run_best(search *s)
{
    double speed;

    if (s->fitting.n == 0) return BL_OK;
    for (int i = 0; s->way == BY_RUNS && i < s->fitting.n; i++)
        BL_TRY(run_option(s, &s->fitting.option[i], &speed));
    if (s->way == BY_BOUNDS) BL_TRY(plan_options_select(&s->fitting, host_bytes(s), run_option, s));
    plan_choice_finish(&s->frontier, host_bytes(s), s->choice);
    s->choice->n_fit = s->fitting.n;
    return BL_OK;
}

static bl_status run_chosen(search *s)
{
    bl_plan_option *best = &s->choice->best;
    bl_plan_input in = *s->input;

    in.config = &best->config;
    return bl_plan_estimate(&in, &best->plan, &best->time);
}

static bl_status run(const bl_plan_input *in, unsigned free_keys, bl_plan_objective objective,
                     search_way way, bl_plan_choice *out)
{
    bl_train_config base = *in->config;
    int64_t n_processes = bl_ceil_div(in->topology.n_on_host, in->topology.n_here);
    double disk = in->hardware ? in->hardware->disk_bytes.value : 0;
    search s = {.input = in,
                .free_keys = free_keys,
                .objective = objective,
                .way = way,
                .gpu_limit = limit_of(bl_plan_gpu_available_bytes(in)),
                .host_limit = limit_of(bl_plan_available_bytes(in)),
                .disk_limit = disk > 0 ? disk / in->topology.n_on_host : INFINITY,
                .choice = out};

    if (s.host_limit < INT64_MAX) s.host_limit /= n_processes;
    *out = (bl_plan_choice){0};
    bl_pass_options pass = bl_plan_pass_options(in, BL_SAVE_S0);
    BL_TRY(bl_plan_prepare(in, &pass));
    s.prepared = pass.prepared;
    BL_TRY(plan_bounds_create(&s.bounds));
    s.top = calloc(N_TOP, sizeof *s.top);
    bl_status st = s.top ? BL_OK : BL_FAIL(BL_ENOMEM, "the plan's options");
    if (st == BL_OK) st = each_shard_size(&s, &base);
    bool is_by_time = objective == BL_PLAN_BY_SPEED && way != OF_MEMORY;
    if (st == BL_OK && is_by_time) st = try_layers(&s);
    if (st == BL_OK && (free_keys & BL_FREE_RATIO) && is_by_time) st = try_other_ratios(&s);
    if (st == BL_OK && is_by_time) st = run_best(&s);
    if (st == BL_OK && !is_by_time && way != OF_MEMORY && out->n_fit > 0) st = run_chosen(&s);
    plan_bounds_destroy(s.bounds);
    free(s.frontier.option);
    free(s.fitting.option);
    free(s.top);
    return st;
}

bl_status bl_plan_search(const bl_plan_input *in, unsigned free_keys, bl_plan_objective objective,
                         bl_plan_choice *out)
{
    return run(in, free_keys, objective, BY_BOUNDS, out);
}

bl_status plan_search_memory(const bl_plan_input *in, unsigned free_keys, bl_plan_choice *out)
{
    return run(in, free_keys, BL_PLAN_BY_SPEED, OF_MEMORY, out);
}

bl_status plan_search_by_runs(const bl_plan_input *in, unsigned free_keys, bl_plan_choice *out)
{
    return run(in, free_keys, BL_PLAN_BY_SPEED, BY_RUNS, out);
}
