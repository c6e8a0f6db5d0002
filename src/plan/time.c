/* SPDX-License-Identifier: Apache-2.0 */
/* time.c -- runs the schedule of a step on simulated streams and accounts each stream's time by
 * phase. */
#include "plan/time.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "plan/time_internal.h"

/* Fraction of the datasheet's bytes per second that kernels reach which only read and write
 * (docs/model.md). */
static const double MEMORY_EFFICIENCY = 0.82;

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

bl_rates bl_time_rates_of(const bl_hardware *h, int n_ranks_on_host, int threads, bl_dtype act)
{
    double n = n_ranks_on_host;
    bl_rates r = {
        .gemm_flops_per_s = h->bf16_gemm_flops_per_s.value,
        .fp8_gemm_flops_per_s = h->fp8_gemm_flops_per_s.value,
        .fp8_fast_gemm_flops_per_s = h->fp8_fast_gemm_flops_per_s.value,
        .attention_forward_flops_per_s = h->attention_forward_flops_per_s.value,
        .attention_backward_flops_per_s = h->attention_backward_flops_per_s.value,
        .memory_bytes_per_s = h->device_memory_bytes_per_s.value,
        .decode_weights_per_s = h->fp8_decode_weights_per_s.value,
        .launch_s = h->launch_s.value,
        .gather_bytes_per_s = h->gather_bytes_per_s.value,
        .gather_latency_s = h->gather_latency_s.value,
        .network_bytes_per_s = h->network_bytes_per_s.value,
        .network_latency_s = h->network_latency_s.value,
        .copy_in_bytes_per_s = h->copy_in_bytes_per_s.value,
        .copy_out_bytes_per_s = h->copy_out_bytes_per_s.value,
        .copy_both_bytes_per_s = h->copy_both_bytes_per_s.value,
        .host_memory_bytes_per_s = h->host_memory_bytes_per_s.value / n,
        .disk_bytes_per_s = h->disk_read_bytes_per_s.value / n,
        .peak_flops_per_s = h->bf16_peak_flops_per_s.value,
        .fp8_peak_flops_per_s = h->fp8_peak_flops_per_s.value,
    };
    r.memory_bytes_per_s *= MEMORY_EFFICIENCY;
    if (h->kind == BL_DEVICE_CUDA) return r;
    /* Cores are shared: a rank computes with its threads' part of what all of them reach. */
    double part = fmin(1.0 / n, (double)threads / bl_max_i64(h->n_cores, 1));
    double products =
        act == BL_BF16 ? h->bf16_gemm_flops_per_s.value : h->f32_gemm_flops_per_s.value;
    r.gemm_flops_per_s = r.peak_flops_per_s = products * part;
    /* The figures are fp32's; attention consists of products. */
    double faster =
        h->f32_gemm_flops_per_s.value > 0 ? products / h->f32_gemm_flops_per_s.value : 1;
    r.attention_forward_flops_per_s *= part * faster;
    r.attention_backward_flops_per_s *= part * faster;
    if (r.attention_forward_flops_per_s <= 0) r.attention_forward_flops_per_s = r.gemm_flops_per_s;
    if (r.attention_backward_flops_per_s <= 0)
        r.attention_backward_flops_per_s = r.gemm_flops_per_s;
    r.memory_bytes_per_s = 2 * h->copy_in_bytes_per_s.value / n; /* a copy reads and writes */
    r.cores = h->n_cores / n;
    r.compute_cores = fmin(threads, r.cores); /* more threads than cores are in the rates already */
    r.copy_cores = 1;
    return r;
}

static bl_status need(double rate, const char *what)
{
    return rate > 0 ? BL_OK : BL_FAIL(BL_EUSAGE, "the hardware's %s is not known", what);
}

static bl_status check_rates(const bl_time_input *in)
{
    const bl_rates *r = &in->rates;
    bool is_cuda = in->kind == BL_DEVICE_CUDA;
    bl_time_products products;

    BL_TRY(need(r->gemm_flops_per_s, "rate of products"));
    BL_TRY(need(r->attention_forward_flops_per_s, "rate of attention"));
    BL_TRY(need(r->attention_backward_flops_per_s, "rate of attention"));
    if (is_cuda) BL_TRY(need(r->memory_bytes_per_s, "device memory's rate"));
    if (is_cuda) BL_TRY(need(r->decode_weights_per_s, "rate of decoding FP8"));
    bl_time_count_products(in, &products);
    if (products.n_fp8 > 0) BL_TRY(need(r->fp8_gemm_flops_per_s, "rate of FP8 products"));
    if (in->n_ranks > 1) BL_TRY(need(r->gather_bytes_per_s, "rate of gathers"));
    if (in->n_hosts > 1) BL_TRY(need(r->network_bytes_per_s, "network's rate"));
    if (in->offload_ratio > 0 || in->offload_activations)
        BL_TRY(need(r->copy_in_bytes_per_s, "rate of copies to the device"));
    if (in->offload_ratio > 0 && in->tier == BL_TIER_DISK)
        BL_TRY(need(r->disk_bytes_per_s, "disk's rate"));
    if (in->offload_activations)
        BL_TRY(need(r->copy_out_bytes_per_s, "rate of copies from the device"));
    return BL_OK;
}

/* ---- a pass, and the step derived from it ---- */

/* The run that each layer belongs to, and where its matrices are stored. */
typedef struct plan_layers {
    int64_t n;
    int *run;       /* [n] */
    bl_tier *tiers; /* [(n + 2) * BL_LAYER_MATRICES] */
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
    if (!out->run || !out->tiers) {
        free_layers(out);
        return BL_FAIL(BL_ENOMEM, "a prediction");
    }
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

    if (!bytes) return BL_FAIL(BL_ENOMEM, "a prediction");
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
    if (in->kind != BL_DEVICE_CUDA) return;
    sim->capacity[BL_RESOURCE_DEVICE_MEMORY] = r->memory_bytes_per_s;
    sim->capacity[BL_RESOURCE_LINK_IN] = r->copy_in_bytes_per_s;
    sim->capacity[BL_RESOURCE_LINK_OUT] = r->copy_out_bytes_per_s;
    sim->capacity[BL_RESOURCE_LINK_BOTH] = 2 * r->copy_both_bytes_per_s;
    sim->capacity[BL_RESOURCE_HOST_MEMORY] = r->host_memory_bytes_per_s;
}

typedef struct plan_run {
    plan_amounts amounts;
    plan_layers layers;
    plan_pass pass;
} plan_run;

static void free_run(plan_run *run)
{
    plan_amounts_free(&run->amounts);
    free_layers(&run->layers);
    bl_simulation_free(&run->pass.sim);
    free(run->pass.visit_begin);
    free(run->pass.visit_end);
}

/* One pass over `group` micro-batches, simulated. */
static bl_status simulate(const bl_time_input *in, int group, bool is_warm, plan_run *run)
{
    *run = (plan_run){.pass = {.input = in, .is_warm = is_warm}};
    plan_pass *pass = &run->pass;

    bl_simulation_init(&pass->sim);
    BL_TRY(plan_amounts_create(in, group, &run->amounts));
    BL_TRY(create_layers(in, &run->layers));
    BL_TRY(place_layers(in, &run->amounts, &run->layers));
    pass->amounts = &run->amounts;
    pass->run_of_layer = run->layers.run;
    pass->tiers = run->layers.tiers;
    pass->schedule =
        (bl_schedule){.n_layers = run->layers.n,
                      .n_micro = group,
                      .ring_depth = in->ring_depth,
                      .has_backward = true,
                      .head_is_tied = is_head_free(in),
                      .is_trained = in->is_trained,
                      .embedding = run->layers.n + (in->model->tie_word_embeddings ? 0 : 1)};
    size_t n_visits = (size_t)bl_schedule_n_visits(&pass->schedule);
    pass->visit_begin = calloc(n_visits, sizeof *pass->visit_begin);
    pass->visit_end = calloc(n_visits, sizeof *pass->visit_end);
    if (!pass->visit_begin || !pass->visit_end) return BL_FAIL(BL_ENOMEM, "a prediction");
    set_capacities(in, &pass->sim);
    BL_TRY(plan_pass_queue(pass));
    return bl_simulation_run(&pass->sim);
}

static bl_time_phase phase_of(const plan_pass *pass, int64_t visit)
{
    int64_t head = pass->schedule.n_layers;
    return visit < head ? BL_TIME_FORWARD : visit == head ? BL_TIME_HEAD : BL_TIME_BACKWARD;
}

/* A stream's operations, each with the visit in which it began. Visit v is the time from the end of
 * v - 1 to its own; what comes after the last belongs to that. */
static void account_stream(const plan_run *run, plan_stream stream, double times,
                           bl_time_estimate *out)
{
    const plan_pass *pass = &run->pass;
    const bl_simulation *sim = &pass->sim;
    int64_t visit = 0, last = bl_schedule_n_visits(&pass->schedule) - 1;

    for (int i = sim->first[stream]; i != BL_SIM_NOTHING; i = sim->ops[i].next) {
        const bl_sim_op *op = &sim->ops[i];
        while (visit < last && op->begin_s >= sim->ops[pass->visit_end[visit]].end_s &&
               (stream != PLAN_COMPUTE || i > pass->visit_end[visit]))
            visit++;
        bl_time_part *part = &out->part[phase_of(pass, visit)];
        double seconds = times * (op->end_s - op->begin_s);
        if (op->is_stall) part->wait_s[op->lane] += seconds;
        if (op->work && stream == PLAN_COMPUTE) part->compute_s += seconds;
        if (op->work) part->busy_s[op->lane] += seconds;
        if (op->name) out->bytes[op->lane] += times * (double)op->n_bytes;
    }
}

/* Adds `times` passes to the estimate. */
static void account(const plan_run *run, double times, bl_time_estimate *out)
{
    const plan_pass *pass = &run->pass;
    int64_t n_visits = bl_schedule_n_visits(&pass->schedule);
    double end_s = 0, all_s = 0;

    for (int64_t v = 0; v < n_visits; v++) {
        double begin_s = end_s;
        end_s = pass->sim.ops[pass->visit_end[v]].end_s;
        out->part[phase_of(pass, v)].seconds += times * (end_s - begin_s);
    }
    all_s = pass->sim.ops[pass->sim.last[PLAN_COMPUTE]].end_s; /* joined with LoRA's stream */
    out->part[BL_TIME_BACKWARD].seconds += times * (all_s - end_s);
    for (int s = 0; s < PLAN_N_STREAMS; s++) account_stream(run, (plan_stream)s, times, out);
}

static bl_lane bound_of(const bl_time_part *part)
{
    bl_lane most = BL_LANE_COMPUTE;

    for (int lane = 0; lane < BL_N_LANES; lane++)
        if (part->wait_s[lane] > part->wait_s[most]) most = (bl_lane)lane;
    return part->wait_s[most] > 0.05 * part->seconds ? most : BL_LANE_COMPUTE;
}

static void finish(const bl_time_input *in, double optimizer_s, bl_time_estimate *out)
{
    bl_time_part *optimizer = &out->part[BL_TIME_OPTIMIZER];

    optimizer->seconds = optimizer->compute_s = optimizer->busy_s[BL_LANE_COMPUTE] = optimizer_s;
    for (int p = 0; p < BL_TIME_PHASES; p++) {
        out->part[p].bound = bound_of(&out->part[p]);
        out->step_s += out->part[p].seconds;
    }
    double tokens = (double)in->n_ranks * in->n_micro * (double)in->micro_tokens;
    out->tokens_per_s = tokens * in->useful_part / out->step_s;
    out->model_flops = plan_model_flops(in);
    bl_time_count_products(in, &out->products);
    double peak =
        out->products.n_fp8 > 0 ? in->rates.fp8_peak_flops_per_s : in->rates.peak_flops_per_s;
    if (peak > 0) out->mfu = out->model_flops / (out->step_s * peak * (double)in->n_ranks);
}

bl_status bl_time_predict(const bl_time_input *in, bl_time_estimate *out)
{
    int group = (int)bl_min_i64(in->group, in->n_micro), rest = in->n_micro % group;
    const int groups[2] = {group, rest};
    const double times[2] = {in->n_micro / group, 1};
    double optimizer_s = 0;

    *out = (bl_time_estimate){.step_s = 0};
    BL_TRY(check_rates(in));
    for (int i = 0; i < 2 && groups[i] > 0; i++) {
        plan_run run;
        bl_status st = simulate(in, groups[i], true, &run);
        if (st == BL_OK) account(&run, times[i], out);
        if (i == 0) optimizer_s = run.amounts.optimizer_s;
        free_run(&run);
        BL_TRY(st);
    }
    finish(in, optimizer_s, out);
    return BL_OK;
}

bl_status bl_time_trace(const bl_time_input *in, bool is_first, bl_span_sink sink, void *user)
{
    plan_run run;

    BL_TRY(check_rates(in));
    bl_status st = simulate(in, (int)bl_min_i64(in->group, in->n_micro), !is_first, &run);
    for (int i = 0; st == BL_OK && i < run.pass.sim.n_ops; i++) {
        const bl_sim_op *op = &run.pass.sim.ops[i];
        if (!op->name) continue;
        sink(user, &(bl_span){.lane = (bl_lane)op->lane,
                              .is_stall = op->is_stall,
                              .name = op->name,
                              .unit = op->unit,
                              .item = op->item,
                              .n_bytes = op->n_bytes,
                              .begin_s = op->begin_s,
                              .end_s = run.pass.sim.ops[op->span_end].end_s});
    }
    free_run(&run);
    return st;
}
