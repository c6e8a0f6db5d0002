/* SPDX-License-Identifier: Apache-2.0 */
/* time.c -- runs the schedule of a step on simulated streams and accounts each stream's time by
 * phase. */
#include "plan/time.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "plan/time_internal.h"

const char *bl_time_phase_name(bl_time_phase phase)
{
    static const char *const names[BL_TIME_PHASES] = {"forward", "head", "backward", "optimizer"};
    return names[phase];
}

bl_lane bl_time_bound(const bl_time_estimate *e)
{
    int longest = 0;
    for (int p = 1; p < BL_TIME_PHASES; p++)
        if (e->part[p].seconds > e->part[longest].seconds) longest = p;
    return e->part[longest].bound;
}

/* ---- rates ---- */

static bl_status need(double rate, const char *what, const char *figure)
{
    if (rate > 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "the hardware's %s is not known: give %s among the figures of its hardware.json "
                   "(docs/model.md)",
                   what, figure);
}

static bl_status check_rates(const bl_time_input *in)
{
    const bl_rates *r = &in->rates;
    bool is_cuda = in->kind == BL_DEVICE_CUDA;
    bl_time_products products;

    BL_TRY(need(r->gemm_flops_per_s, "rate of products",
                is_cuda || in->act == BL_BF16 ? "bf16_gemm_flops_per_s" : "f32_gemm_flops_per_s"));
    BL_TRY(need(r->attention_forward_flops_per_s, "rate of attention",
                "attention_forward_flops_per_s"));
    BL_TRY(need(r->attention_backward_flops_per_s, "rate of attention",
                "attention_backward_flops_per_s"));
    if (is_cuda)
        BL_TRY(need(r->memory_bytes_per_s, "device memory's rate", "device_memory_bytes_per_s"));
    if (is_cuda)
        BL_TRY(
            need(r->decode_weights_per_s, "rate of dequantizing FP8", "fp8_decode_weights_per_s"));
    bl_time_count_products(in, &products);
    if (products.n_fp8 > 0)
        BL_TRY(need(r->fp8_gemm_flops_per_s, "rate of FP8 products", "fp8_gemm_flops_per_s"));
    if (in->n_ranks > in->n_hosts)
        BL_TRY(need(r->gather_bytes_per_s, "rate of gathers", "gather_bytes_per_s"));
    if (in->n_hosts > 1)
        BL_TRY(need(r->network_bytes_per_s, "network's rate", "network_bytes_per_s"));
    bool has_state =
        in->is_trained && in->optimizer_ratio > 0 && in->optimizer_tier != BL_TIER_DEVICE;
    /* A GPU's host updates weights with their state; arrays on the GPU are copied out and back. */
    bool has_update = has_state || (in->is_trained && is_cuda && in->offload_ratio > 0);
    if (in->offload_ratio > 0 || in->offload_activations || has_state)
        BL_TRY(need(r->copy_in_bytes_per_s, "rate of copies to the device", "copy_in_bytes_per_s"));
    if ((in->offload_ratio > 0 && in->tier == BL_TIER_DISK) ||
        (has_state && in->optimizer_tier == BL_TIER_DISK))
        BL_TRY(need(r->disk_bytes_per_s, "disk's rate", "disk_read_bytes_per_s"));
    if (in->offload_activations || has_update)
        BL_TRY(need(r->copy_out_bytes_per_s, "rate of copies from the device",
                    "copy_out_bytes_per_s"));
    return BL_OK;
}

/* ---- layers ---- */

/* The run that each layer belongs to, and where its matrices are stored. Free it after a failure,
 * too. */
typedef struct plan_layers {
    int64_t n;
    int *run;       /* [n] */
    bl_tier *tiers; /* [(n + 2) * BL_LAYER_MATRICES]: of the gathered parts */
} plan_layers;

static void free_layers(plan_layers *layers)
{
    free(layers->run);
    free(layers->tiers);
}

static bl_status create_layers(const bl_time_input *in, plan_layers *out)
{
    *out = (plan_layers){.n = 0};
    for (int r = 0; r < in->n_runs; r++) out->n += in->runs[r].n_layers;
    out->run = calloc((size_t)out->n, sizeof *out->run);
    /* and two tables */
    out->tiers = calloc((size_t)(out->n + 2) * BL_LAYER_MATRICES, sizeof *out->tiers);
    if (!out->run || !out->tiers) return BL_FAIL(BL_ENOMEM, "out of memory: time of a plan");
    int64_t at = 0;
    for (int r = 0; r < in->n_runs; r++)
        for (int64_t l = 0; l < in->runs[r].n_layers; l++) out->run[at++] = r;
    return BL_OK;
}

/* A CPU reads a tied head from the embedding's memory; a GPU has it gathered like any other, and
 * one that is trained is in rows of all ranks. */
static bool is_head_free(const bl_time_input *in)
{
    return in->model->tie_word_embeddings && in->kind != BL_DEVICE_CUDA && !in->is_trained;
}

/* In the order of the base's pages, as model/placement.c does it. */
static bl_status place_layers(const bl_time_input *in, const plan_amounts *amounts,
                              plan_layers *layers)
{
    bool has_head = !is_head_free(in);
    int64_t n = layers->n * BL_LAYER_MATRICES + has_head;
    size_t *bytes = calloc((size_t)n, sizeof *bytes);

    if (!bytes) return BL_FAIL(BL_ENOMEM, "out of memory: time of a plan");
    for (int64_t i = 0; i < layers->n * BL_LAYER_MATRICES; i++)
        bytes[i] = (size_t)amounts->layers[layers->run[i / BL_LAYER_MATRICES]]
                       .item[i % BL_LAYER_MATRICES]
                       .shard_bytes;
    if (has_head) bytes[n - 1] = (size_t)amounts->head_item.shard_bytes;
    if (in->tier == BL_TIER_DISK)
        bl_tier_spread_two(bytes, n, in->offload_ratio, in->host_part, layers->tiers);
    else
        bl_tier_spread(bytes, n, in->offload_ratio, in->tier, layers->tiers);
    free(bytes);
    return BL_OK;
}

static void set_capacities(const bl_time_input *in, bl_simulation *sim)
{
    const bl_rates *r = &in->rates;

    sim->capacity[BL_RESOURCE_CORES] = r->cores;
    sim->capacity[BL_RESOURCE_DISK] = sim->capacity[BL_RESOURCE_NETWORK] = 1;
    if (in->kind != BL_DEVICE_CUDA) return;
    sim->capacity[BL_RESOURCE_DEVICE_MEMORY] = r->memory_bytes_per_s;
    sim->capacity[BL_RESOURCE_LINK_IN] = r->copy_in_bytes_per_s;
    sim->capacity[BL_RESOURCE_LINK_OUT] = r->copy_out_bytes_per_s;
    sim->capacity[BL_RESOURCE_LINK_BOTH] = 2 * r->copy_both_bytes_per_s;
    sim->capacity[BL_RESOURCE_HOST_MEMORY] = r->host_memory_bytes_per_s;
}

/* ---- a pass ---- */

/* Shared by the passes of one input. */
typedef struct simulator {
    const bl_time_input *in;
    plan_round round;
    plan_layers layers;
    plan_state state; /* where all weights are trained */
} simulator;

/* Trained weights: the ring gathers them or their bf16 copy, in device memory or in their tiers. */
static bl_status place_trained(simulator *s)
{
    BL_TRY(plan_state_create(s->in, &s->round.amounts[0], s->layers.run, s->layers.n, &s->state));
    if (s->in->act == BL_F32 || s->in->places_copy)
        plan_state_copy_weights(&s->state, s->layers.tiers);
    return BL_OK;
}

static bl_status open_simulator(const bl_time_input *in, bool with_evaluations, simulator *out)
{
    *out = (simulator){.in = in};
    BL_TRY(check_rates(in));
    BL_TRY(plan_round_create(in, with_evaluations, &out->round));
    BL_TRY(create_layers(in, &out->layers));
    return in->is_trained ? place_trained(out)
                          : place_layers(in, &out->round.amounts[0], &out->layers);
}

static void close_simulator(simulator *s)
{
    plan_round_free(&s->round);
    free_layers(&s->layers);
    plan_state_free(&s->state);
}

static bl_schedule schedule_of(const simulator *s, int n_micro, bool has_backward)
{
    const bl_time_input *in = s->in;
    return (bl_schedule){.n_layers = s->layers.n,
                         .n_micro = n_micro,
                         .ring_depth = in->ring_depth,
                         .has_backward = has_backward,
                         .head_is_tied = is_head_free(in) || plan_has_own_head(in),
                         .is_trained = in->is_trained,
                         .first = in->trained ? in->trained->first : 0,
                         .embedding_has_gradient =
                             in->lora->options.table[BL_TABLE_EMBEDDING] ? true
                             : in->modules ? bl_trained_has_embedding(in->modules)
                             : in->trained ? bl_trained_has_embedding(in->trained)
                                           : in->is_trained,
                         .embedding = s->layers.n + (in->model->tie_word_embeddings ? 0 : 1)};
}

static plan_entry entry_of(const bl_time_input *in, int64_t n_bytes)
{
    return (plan_entry){.n_bytes = n_bytes,
                        .out = plan_copy(in, (double)n_bytes, false),
                        .back = plan_copy(in, (double)n_bytes, true)};
}

/* The stacks' entries are of the group, companions apart. */
static bl_status measure_entries(const bl_time_input *in, plan_pass *pass)
{
    int64_t inputs = 0;

    pass->saved_entry = calloc((size_t)in->n_runs, sizeof *pass->saved_entry);
    if (!pass->saved_entry) return BL_FAIL(BL_ENOMEM, "out of memory: time of a plan");
    for (int m = 0; m < pass->schedule.n_micro; m++)
        if (!pass->micro[m].is_companion) inputs += pass->micro[m].amounts->input_bytes;
    pass->input_entry = entry_of(in, inputs);
    for (int r = 0; r < in->n_runs; r++) {
        int64_t saved = 0;
        for (int m = 0; m < pass->schedule.n_micro; m++)
            if (!pass->micro[m].is_companion)
                saved += pass->micro[m].amounts->layers[r].saved_bytes;
        pass->saved_entry[r] = entry_of(in, saved);
    }
    return BL_OK;
}

static void free_pass(plan_pass *pass)
{
    bl_simulation_free(&pass->sim);
    free(pass->saved_entry);
    free(pass->visit_begin);
    free(pass->visit_end);
}

/* The place of a pass in its step, which counts where the state of trained weights has tiers. */
typedef struct step_place {
    bool is_first, is_last;
} step_place;

static step_place place_in_step(const simulator *s, bool is_first, bool is_last)
{
    return s->state.is_paged ? (step_place){is_first, is_last} : (step_place){true, true};
}

/* Free the pass after a failure, too. */
static bl_status simulate(const simulator *s, const plan_micro *micro, int n_micro,
                          const bl_schedule *before, int n_joins, step_place place, plan_pass *pass)
{
    bool has_backward = false;

    for (int m = 0; m < n_micro; m++) has_backward |= micro[m].has_gradient;
    *pass = (plan_pass){.input = s->in,
                        .micro = micro,
                        .schedule = schedule_of(s, n_micro, has_backward),
                        .before = before,
                        .n_joins = n_joins,
                        .run_of_layer = s->layers.run,
                        .state = s->in->is_trained ? &s->state : NULL,
                        .is_first = place.is_first && has_backward,
                        .is_last = place.is_last && has_backward,
                        .tiers = s->layers.tiers};
    bl_simulation_init(&pass->sim);
    BL_TRY(measure_entries(s->in, pass));
    size_t n_visits = (size_t)bl_schedule_n_visits(&pass->schedule);
    pass->visit_begin = calloc(n_visits, sizeof *pass->visit_begin);
    pass->visit_end = calloc(n_visits, sizeof *pass->visit_end);
    if (!pass->visit_begin || !pass->visit_end)
        return BL_FAIL(BL_ENOMEM, "out of memory: time of a plan");
    set_capacities(s->in, &pass->sim);
    BL_TRY(plan_pass_queue(pass));
    return bl_simulation_run(&pass->sim);
}

/* ---- the time of passes ---- */

static bl_time_phase phase_of(const plan_pass *pass, int64_t visit)
{
    int64_t head = pass->schedule.n_layers;
    return visit < head ? BL_TIME_FORWARD : visit == head ? BL_TIME_HEAD : BL_TIME_BACKWARD;
}

/* A stream's operations, each with the visit in which it began. Visit v is the time from the end of
 * v - 1 to its own; what comes after the last belongs to that. */
static void account_stream(const plan_pass *pass, plan_stream stream, double times,
                           bl_time_estimate *out)
{
    const bl_simulation *sim = &pass->sim;
    int64_t visit = 0, last = bl_schedule_n_visits(&pass->schedule) - 1;

    for (int i = sim->first[stream]; i != BL_SIM_NOTHING; i = sim->ops[i].next) {
        const bl_sim_op *op = &sim->ops[i];
        while (visit < last && op->begin_s >= sim->ops[pass->visit_end[visit]].end_s &&
               (stream != PLAN_COMPUTE || i > pass->visit_end[visit]))
            visit++;
        bl_time_part *part = &out->part[phase_of(pass, visit)];
        double seconds = times * (op->end_s - op->begin_s);
        if (op->is_stall && stream == PLAN_COMPUTE) part->wait_s[op->lane] += seconds;
        if (op->work && stream == PLAN_COMPUTE) part->compute_s += seconds;
        if (op->work) part->busy_s[op->lane] += seconds;
        if (op->name) out->bytes[op->lane] += times * (double)op->n_bytes;
    }
}

/* Adds `times` passes to the estimate. */
static void account(const plan_pass *pass, double times, bl_time_estimate *out)
{
    int64_t n_visits = bl_schedule_n_visits(&pass->schedule);
    double end_s = 0, all_s = 0;

    for (int64_t v = 0; v < n_visits; v++) {
        double begin_s = end_s;
        end_s = pass->sim.ops[pass->visit_end[v]].end_s;
        out->part[phase_of(pass, v)].seconds += times * (end_s - begin_s);
    }
    all_s = pass->sim.ops[pass->sim.last[PLAN_COMPUTE]].end_s; /* joined with LoRA's stream */
    out->part[BL_TIME_BACKWARD].seconds += times * (all_s - end_s);
    for (int s = 0; s < PLAN_N_STREAMS; s++) account_stream(pass, (plan_stream)s, times, out);
}

/* Passes that are alike and follow each other are simulated once. Each comes after a pass with
 * gradients, or one without if it has none; and compute waits for its gradients. */
typedef struct accounting {
    const simulator *simulator;
    plan_micro *micro; /* [n_micro]: of the passes seen last, which are not in the estimate yet */
    int n_micro;
    step_place place;
    int64_t n_seen; /* passes, all */
    double times;
    bl_time_estimate *out;
} accounting;

static bool is_same_pass(const accounting *a, const plan_round *round, step_place place)
{
    if (a->n_micro != round->n_micro || a->place.is_first != place.is_first ||
        a->place.is_last != place.is_last)
        return false;
    for (int m = 0; m < a->n_micro; m++) {
        const plan_micro *x = &a->micro[m], *y = &round->micro[m];
        if (x->amounts != y->amounts || x->adapter != y->adapter ||
            x->has_gradient != y->has_gradient)
            return false;
    }
    return true;
}

static bl_status account_seen(accounting *a)
{
    plan_pass pass;

    if (a->times == 0) return BL_OK;
    bool has_backward = a->micro[0].has_gradient;
    bl_schedule before = schedule_of(a->simulator, a->n_micro, has_backward);
    int n_joins =
        has_backward && (a->simulator->in->is_trained || a->micro[0].adapter != PLAN_NO_ADAPTER);
    bl_status st = simulate(a->simulator, a->micro, a->n_micro, &before, n_joins, a->place, &pass);
    if (st == BL_OK) account(&pass, a->times, a->out);
    free_pass(&pass);
    a->times = 0;
    return st;
}

/* plan_pass_sink */
static bl_status see_pass(void *user, const plan_round *round, bool is_last)
{
    accounting *a = user;
    step_place place = place_in_step(a->simulator, a->n_seen++ == 0, is_last);

    if (a->times == 0 || !is_same_pass(a, round, place)) {
        BL_TRY(account_seen(a));
        a->place = place;
        a->n_micro = round->n_micro;
        memcpy(a->micro, round->micro, (size_t)round->n_micro * sizeof *a->micro);
    }
    a->times++;
    return BL_OK;
}

static bl_status begin_accounting(const simulator *s, bl_time_estimate *out, accounting *a)
{
    *out = (bl_time_estimate){.step_s = 0};
    *a = (accounting){.simulator = s, .out = out};
    a->micro = calloc((size_t)s->round.room, sizeof *a->micro);
    return a->micro ? BL_OK : BL_FAIL(BL_ENOMEM, "out of memory: time of a plan");
}

static bl_status account_round(simulator *s, bl_time_estimate *out)
{
    accounting a;

    BL_TRY(begin_accounting(s, out, &a));
    bl_status st = plan_round_each(&s->round, see_pass, &a);
    if (st == BL_OK) st = account_seen(&a);
    free(a.micro);
    return st;
}

static bl_status account_evaluation(simulator *s, int training, bl_time_estimate *out)
{
    accounting a;

    BL_TRY(begin_accounting(s, out, &a));
    bl_status st = plan_evaluation_each(&s->round, training, 1, see_pass, &a);
    if (st == BL_OK) st = account_seen(&a);
    free(a.micro);
    return st;
}

static bl_lane bound_of(const bl_time_part *part)
{
    bl_lane most = BL_LANE_COMPUTE;

    for (int lane = 0; lane < BL_N_LANES; lane++)
        if (part->wait_s[lane] > part->wait_s[most]) most = (bl_lane)lane;
    return part->wait_s[most] > 0.05 * part->seconds ? most : BL_LANE_COMPUTE;
}

/* Tokens and floating-point operations of all trainings. */
static void count_work(const bl_time_input *in, double *tokens, double *flops)
{
    *tokens = *flops = 0;
    for (int i = 0; i <= in->n_others; i++) {
        bl_time_input t = plan_training_of(in, i);
        *tokens += (double)t.n_ranks * t.n_micro * (double)t.micro_tokens * t.useful_part;
        *flops += plan_model_flops(&t);
    }
}

static void finish(const bl_time_input *in, double optimizer_s, bl_time_estimate *out)
{
    bl_time_part *optimizer = &out->part[BL_TIME_OPTIMIZER];
    double tokens;

    optimizer->seconds = optimizer->compute_s = optimizer->busy_s[BL_LANE_COMPUTE] = optimizer_s;
    for (int p = 0; p < BL_TIME_PHASES; p++) {
        out->part[p].bound = bound_of(&out->part[p]);
        out->step_s += out->part[p].seconds;
    }
    count_work(in, &tokens, &out->model_flops);
    out->tokens_per_s = tokens / out->step_s;
    bl_time_count_products(in, &out->products);
    double peak =
        out->products.n_fp8 > 0 ? in->rates.fp8_peak_flops_per_s : in->rates.peak_flops_per_s;
    if (peak > 0) out->mfu = out->model_flops / (out->step_s * peak * (double)in->n_ranks);
}

bl_status bl_time_predict(const bl_time_input *in, bl_time_estimate *out)
{
    simulator s;
    double optimizer_s = 0;

    *out = (bl_time_estimate){.step_s = 0};
    bl_status st = open_simulator(in, false, &s);
    if (st == BL_OK) st = account_round(&s, out);
    for (int i = 0; st == BL_OK && i < s.round.n_trainings; i++)
        optimizer_s += s.round.amounts[i * PLAN_N_KINDS + PLAN_OF_STEP].optimizer_s;
    if (st == BL_OK && in->is_trained) optimizer_s += plan_trained_optimizer_s(in, &s.state);
    close_simulator(&s);
    if (st == BL_OK) finish(in, optimizer_s, out);
    return st;
}

static double seconds_of(const bl_time_estimate *e)
{
    double seconds = 0;
    for (int p = 0; p < BL_TIME_PHASES; p++) seconds += e->part[p].seconds;
    return seconds;
}

static bl_status predict_evaluation(simulator *s, int training, const bl_time_evaluation *e,
                                    bl_time_evaluation_estimate *out)
{
    bl_time_estimate apart, without, with;

    BL_TRY(account_evaluation(s, training, &apart));
    out->apart_s = out->seconds = seconds_of(&apart);
    if (!e->is_overlapped) return BL_OK;
    BL_TRY(account_round(s, &without));
    s->round.left[training] = e->n_micro;
    BL_TRY(account_round(s, &with));
    out->seconds = seconds_of(&with) - seconds_of(&without);
    return BL_OK;
}

bl_status bl_time_predict_evaluation(const bl_time_input *in, int training,
                                     bl_time_evaluation_estimate *out)
{
    bl_time_evaluation e = plan_training_of(in, training).evaluation;
    simulator s;

    *out = (bl_time_evaluation_estimate){.seconds = 0};
    if (e.n_micro == 0) return BL_OK;
    bl_status st = open_simulator(in, true, &s);
    if (st == BL_OK) st = predict_evaluation(&s, training, &e, out);
    close_simulator(&s);
    return st;
}

/* ---- spans ---- */

typedef struct tracing {
    const simulator *simulator;
    bl_schedule before;
    bool has_before, is_over; /* over: the first pass was all that is asked */
    int64_t n_passes;
    bl_time_passes passes;
    bl_span_sink sink;
    void *user;
} tracing;

static void emit(const plan_pass *pass, const tracing *t)
{
    for (int i = 0; i < pass->sim.n_ops; i++) {
        const bl_sim_op *op = &pass->sim.ops[i];
        if (!op->name) continue;
        t->sink(t->user, &(bl_span){.lane = (bl_lane)op->lane,
                                    .is_stall = op->is_stall,
                                    .name = op->name,
                                    .unit = op->unit,
                                    .item = op->item,
                                    .n_bytes = op->n_bytes,
                                    .begin_s = op->begin_s,
                                    .end_s = pass->sim.ops[op->span_end].end_s});
    }
}

/* plan_pass_sink */
static bl_status trace_pass(void *user, const plan_round *round, bool is_last)
{
    tracing *t = user;
    bool is_evaluation = t->passes == BL_TIME_EVALUATIONS, joins;
    plan_pass pass;

    if (t->is_over) return BL_OK;
    joins = is_last && !is_evaluation &&
            (t->simulator->in->is_trained || t->simulator->in->lora->n_floats > 0);
    bl_status st = simulate(t->simulator, round->micro, round->n_micro,
                            t->has_before ? &t->before : NULL, joins ? round->n_trainings : 0,
                            place_in_step(t->simulator, t->n_passes++ == 0, is_last), &pass);
    if (st == BL_OK) emit(&pass, t);
    t->before = pass.schedule;
    t->has_before = true;
    t->is_over = t->passes == BL_TIME_FIRST_PASS;
    free_pass(&pass);
    return st;
}

static bl_status trace(simulator *s, tracing *t)
{
    const bl_time_input *in = s->in;

    for (int i = 0; i < s->round.n_trainings; i++) {
        bl_time_evaluation e = plan_training_of(in, i).evaluation;
        if (t->passes == BL_TIME_EVALUATIONS)
            BL_TRY(plan_evaluation_each(&s->round, i,
                                        e.is_overlapped ? (int)bl_max_i64(1, in->n_overlapped) : 1,
                                        trace_pass, t));
        else if (t->passes == BL_TIME_ROUND_EVALUATING && e.is_overlapped)
            s->round.left[i] = e.n_micro;
    }
    return t->passes == BL_TIME_EVALUATIONS ? BL_OK : plan_round_each(&s->round, trace_pass, t);
}

bl_status bl_time_trace(const bl_time_input *in, bl_time_passes passes, bl_time_before before,
                        bl_span_sink sink, void *user)
{
    simulator s;
    bl_status st = open_simulator(in, passes >= BL_TIME_ROUND_EVALUATING, &s);
    tracing t = {.simulator = &s,
                 .before = schedule_of(&s, 1, before == BL_TIME_AFTER_STEP),
                 .has_before = before != BL_TIME_AFTER_NOTHING,
                 .passes = passes,
                 .sink = sink,
                 .user = user};

    if (st == BL_OK) st = trace(&s, &t);
    close_simulator(&s);
    return st;
}
