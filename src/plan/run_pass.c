/* SPDX-License-Identifier: Apache-2.0 */
/* run_pass.c -- creates a rank's objects with the functions that train/ uses, on a device and
 * communicators made of rates, and runs passes. */
#include "plan/run_pass_internal.h"

#include <stdlib.h>
#include <string.h>

#include "trained/full.h"
#include "trained/state.h"
#include "base/sizes.h"
#include "comm/model.h"
#include "device/model.h"
#include "model/batch.h"
#include "model/pass.h"

/* The objects of one training over the base. */
typedef struct training {
    bl_lora_layout lora;
    bl_trained_state *state, *reference; /* NULL: none */
    bl_pass_adapter adapter, reference_adapter;
    bl_batches *step, *evaluation; /* one micro-batch each, which all passes share */
} training;

struct plan_rank {
    const bl_time_input *in;
    int64_t n_layers;
    int n_trainings;
    bl_model model;
    bool has_all;              /* model.trained has all tensors, and this object frees it */
    uint8_t *bf16_matrices;    /* [n_layers] */
    bl_token_statistics *data; /* [2 n_trainings] */
    bl_device *device;
    bl_comm *world, *shard_group;
    bl_stream *compute, *copy, *gather, *communication, *activations;
    bl_timeline *timeline;
    bl_model_weights *weights;
    bl_base *base;
    training *training; /* [n_trainings] */
    bl_pass *pass;
    bl_pass_micro *micro;
    bl_pass_weigher weigher;
    int64_t n_steps;
    plan_kernel_sink kernels; /* NULL: not requested */
    void *kernels_user;
    int64_t visit; /* the current one, counted for `kernels` */
};

/* ---- the model ---- */

static bl_status open_model(plan_rank *r)
{
    const bl_time_input *in = r->in;
    size_t n_projections = (size_t)in->model->arch->n_projections, at = 0;

    for (int i = 0; i < in->n_runs; i++) r->n_layers += in->runs[i].n_layers;
    r->model =
        (bl_model){.config = *in->model,
                   .embedding_dtype = BL_BF16,
                   .head_dtype = in->head_dtype,
                   .formats = calloc((size_t)r->n_layers * n_projections, sizeof *r->model.formats),
                   .n_positions = in->micro_tokens,
                   .is_trained = in->is_trained};
    r->model.config.n_layers = r->n_layers;
    memset(r->model.config.dense_layers, 0, sizeof r->model.config.dense_layers);
    r->bf16_matrices = calloc((size_t)r->n_layers, sizeof *r->bf16_matrices);
    if (!r->model.formats || !r->bf16_matrices)
        return BL_FAIL(BL_ENOMEM, "out of memory: the time of a plan");
    for (int i = 0; i < in->n_runs; i++)
        for (int64_t l = 0; l < in->runs[i].n_layers; l++, at++) {
            memcpy(r->model.formats + at * n_projections, in->runs[i].format,
                   n_projections * sizeof *r->model.formats);
            r->bf16_matrices[at] = (uint8_t)in->runs[i].bf16_matrices;
            if (in->model->n_experts > 0 && in->runs[i].kind == BL_LAYER_DENSE)
                bl_model_set_dense(&r->model.config, (int64_t)at);
        }
    if (!in->is_trained) return BL_OK;
    /* Other numbers of layers: the input has only a few of those of in->trained. */
    r->has_all = !in->trained || in->trained->n_layers != r->n_layers;
    if (r->has_all) return bl_trained_all(&r->model.config, &r->model.trained);
    r->model.trained = *in->trained;
    return BL_OK;
}

/* ---- device, streams, communicators ---- */

/* Statistics of the micro-batches of steps and of evaluations, by their tokens. */
static bl_status list_data(plan_rank *r)
{
    r->data = calloc(2 * (size_t)r->n_trainings, sizeof *r->data);
    if (!r->data) return BL_FAIL(BL_ENOMEM, "out of memory: the time of a plan");
    for (int i = 0; i < r->n_trainings; i++) {
        bl_time_input t = plan_training_of(r->in, i);
        r->data[2 * i] = (bl_token_statistics){t.micro_tokens, t.document_tokens, t.label_part};
        r->data[2 * i + 1] =
            (bl_token_statistics){t.evaluation.micro_tokens, t.evaluation.document_tokens, 1};
    }
    return BL_OK;
}

/* plan_run_kernels runs three layers and reports the middle one, which is neither first nor
 * last. */
enum { N_SAMPLED = 3, SAMPLED = 1 };

/* bl_model_device_options.on_kernel */
static void see_kernel(void *user, const bl_stream *stream, const bl_model_kernel *k)
{
    plan_rank *r = user;
    int64_t backward = 2 * N_SAMPLED - SAMPLED;

    if (!r->kernels || stream != r->compute || (r->visit != SAMPLED && r->visit != backward))
        return;
    r->kernels(r->kernels_user, &(plan_kernel){.is_backward = r->visit == backward,
                                               .op = k->op,
                                               .rate = k->rate,
                                               .flops = k->flops,
                                               .bytes = k->bytes,
                                               .seconds = k->seconds});
}

/* bl_pass_input.stop: before each visit. */
static bool count_visit(void *user)
{
    ((plan_rank *)user)->visit++;
    return false;
}

static bl_status open_device(plan_rank *r, bl_span_sink sink, void *user)
{
    const bl_time_input *in = r->in;
    bl_model_device_options options = {.kind = in->kind,
                                       .rates = in->rates,
                                       .document_tokens = in->document_tokens,
                                       .label_part = in->label_part,
                                       .data = r->data,
                                       .n_data = 2 * r->n_trainings,
                                       .on_kernel = see_kernel,
                                       .on_kernel_user = r};
    int n_spans = (int)(64 * r->n_layers + 1024);

    BL_TRY(bl_device_create_model(&options, &r->device));
    BL_TRY(bl_device_set_act(r->device, in->act));
    BL_TRY(bl_stream_create(r->device, "compute", &r->compute));
    BL_TRY(bl_stream_create(r->device, "comm", &r->communication));
    BL_TRY(bl_stream_create(r->device, "gather", &r->gather));
    BL_TRY(bl_stream_create(r->device, "copy", &r->copy));
    if (in->offload_activations)
        BL_TRY(bl_stream_create(r->device, "activations", &r->activations));
    BL_TRY(bl_timeline_create(r->device, n_spans, sink, user, &r->timeline));
    BL_TRY(
        bl_comm_create_model(0, in->n_ranks, in->n_ranks / in->n_hosts, in->n_shards, &r->world));
    if (in->sum_block > 0) BL_TRY(bl_comm_set_sum_block(r->world, in->sum_block));
    if (in->gathers_by_hosts) bl_comm_model_gather_by_hosts(r->world);
    return bl_comm_split(r->world, 0, &r->shard_group);
}

static bl_status create_base(plan_rank *r)
{
    const bl_time_input *in = r->in;
    bl_placement placement = {.ratio = in->offload_ratio,
                              .tier = in->tier,
                              .host_part = in->host_part,
                              .places_copy = in->places_copy};
    bl_model_base_options options = {.shard_group = r->shard_group,
                                     .copy = r->copy,
                                     .gather = r->gather,
                                     .ring_depth = in->ring_depth,
                                     .timeline = r->timeline};

    BL_TRY(bl_model_weights_place(&r->model, r->device, r->shard_group, &placement, &r->weights));
    return bl_model_base_create(r->weights, &options, &r->base);
}

/* ---- what is trained ---- */

static bl_trained_context context_of(const plan_rank *r)
{
    return (bl_trained_context){.device = r->device,
                                .world = r->world,
                                .compute = r->compute,
                                .communication = r->communication,
                                .timeline = r->timeline};
}

static bl_status create_full(plan_rank *r)
{
    const bl_time_input *in = r->in;
    bl_optimizer_placement placement = {.kind = in->kind,
                                        .moments = in->moments,
                                        .ratio = in->optimizer_ratio,
                                        .tier = in->optimizer_tier,
                                        .places_copy = in->places_copy};

    if (in->kind == BL_DEVICE_CPU && placement.tier == BL_TIER_HOST)
        placement.tier = BL_TIER_DEVICE;
    bl_trained_context context = context_of(r);
    return bl_trained_full_create(&context, r->weights, r->base, &placement, &r->training[0].state);
}

static bl_status create_adapter(plan_rank *r, training *t, const bl_time_input *like)
{
    const bl_time_input *in = r->in;
    const bl_trained_set *modules = t == r->training ? in->modules : NULL;

    if (t->lora.n_floats == 0) return BL_OK;
    if (modules) BL_TRY(bl_adapter_modules_prepare(r->weights, modules));
    bl_trained_context context = context_of(r);
    BL_TRY(bl_trained_state_create(&context, &t->lora, r->n_layers, in->ring_depth, &t->state));
    if (modules || t->lora.n_table_floats > 0)
        BL_TRY(bl_trained_state_add_modules(t->state, r->weights, modules));
    t->adapter = bl_trained_state_adapter(t->state);
    t->adapter.dropout.p = (float)t->lora.options.dropout;
    if (!like->preference.has_reference || !like->preference.is_adapter) return BL_OK;
    BL_TRY(bl_trained_state_create_frozen(&context, &t->lora, r->n_layers, in->ring_depth,
                                          &t->reference));
    t->reference_adapter = bl_trained_state_adapter(t->reference);
    return BL_OK;
}

static bl_status create_batch(plan_rank *r, int64_t tokens, bl_batches **out)
{
    BL_TRY(bl_batches_create(r->device, 1, tokens, out));
    (*out)->micro[0].T = tokens;
    (*out)->micro[0].n_documents = 1;
    return BL_OK;
}

static bl_status create_trainings(plan_rank *r, bool with_evaluations)
{
    r->training = calloc((size_t)r->n_trainings, sizeof *r->training);
    if (!r->training) return BL_FAIL(BL_ENOMEM, "out of memory: the time of a plan");
    for (int i = 0; i < r->n_trainings; i++) {
        training *t = &r->training[i];
        bl_time_input like = plan_training_of(r->in, i);
        t->lora = *like.lora;
        t->lora.kinds = bl_model_kinds(&r->model.config);
        if (!r->in->is_trained) bl_lora_layout_stack(&t->lora, r->in->act != BL_F32);
        BL_TRY(r->in->is_trained ? create_full(r) : create_adapter(r, t, &like));
        BL_TRY(create_batch(r, like.micro_tokens, &t->step));
        if (with_evaluations && like.evaluation.n_micro > 0)
            BL_TRY(create_batch(r, like.evaluation.micro_tokens, &t->evaluation));
    }
    return BL_OK;
}

/* ---- the pass ---- */

/* Number of companions of a micro-batch. */
static int count_companions(const bl_time_preference *p)
{
    int reference = p->has_reference ? 1 : 0;
    return reference + (p->has_mismatched ? 1 + reference : 0);
}

/* The tensors that layers with a backward pass save: BL_SAVE_S4 in all of them; or another set, and
 * BL_SAVE_S4 in n_saving_all of them. */
static void set_saving(const bl_time_input *in, bl_pass_options *o)
{
    int64_t layer = 0, first = in->trained ? in->trained->first : 0;

    o->save = BL_SAVE_S4;
    for (int i = 0; i < in->n_runs; layer += in->runs[i++].n_layers) {
        if (layer + in->runs[i].n_layers <= first) continue;
        if (in->runs[i].save == BL_SAVE_S4)
            o->n_saving_all += in->runs[i].n_layers;
        else
            o->save = in->runs[i].save;
    }
    if (o->save == BL_SAVE_S4) o->n_saving_all = 0;
}

static bl_pass_options pass_options(const plan_rank *r, bool with_evaluations)
{
    const bl_time_input *in = r->in;
    bl_pass_options o = {.mode = in->mode,
                         .sums = in->sums,
                         .bf16_matrices = r->bf16_matrices,
                         .max_group = (int)bl_max_i64(1, in->group),
                         .ring_depth = in->ring_depth,
                         .training = true,
                         .offload_activations = in->offload_activations,
                         .activations = r->activations,
                         .timeline = r->timeline};
    int most = 0;

    set_saving(in, &o);
    for (int i = 0; i < r->n_trainings; i++) {
        bl_time_input t = plan_training_of(in, i);
        const bl_lora_options *lora = &t.lora->options;
        o.T_max = bl_max_i64(o.T_max, t.micro_tokens);
        if (with_evaluations && t.evaluation.n_micro > 0)
            o.T_max = bl_max_i64(o.T_max, t.evaluation.micro_tokens);
        o.lora_r = bl_max_i64(o.lora_r, t.lora->n_floats > 0 ? bl_lora_largest_r(t.lora) : 0);
        o.lora_dropout |= lora->dropout > 0;
        if (t.lora->n_table_floats > 0) o.terms_r = bl_max_i64(o.terms_r, lora->r);
        o.weighs |= t.preference.is_weighed;
        most = (int)bl_max_i64(most, count_companions(&t.preference));
    }
    o.max_companions = o.max_group * most + (int)bl_max_i64(1, in->n_overlapped) * (1 + most);
    if (!in->decodes_each_use && !r->weights->copy)
        bl_linear_prepared_measure(in->kind, &r->weights->layout, r->n_layers, in->mode,
                                   r->bf16_matrices, &o.prepared);
    return o;
}

/* bl_pass_weigher.weigh: the host's work takes no time here. */
static bl_status weigh(void *user, float *const *values)
{
    (void)user, (void)values;
    return BL_OK;
}

/* Ops of padded micro-batches have more tokens: rounds up the tokens of the statistics. */
static void pad_data(plan_rank *r, int64_t T_max)
{
    int64_t step = bl_pass_token_step(r->pass), most = bl_block_rows(&r->weights->dims, T_max);

    for (int i = 0; step > 0 && i < 2 * r->n_trainings; i++)
        r->data[i].T = bl_min_i64(bl_round_up(r->data[i].T, step), most);
}

static bl_status create_pass(plan_rank *r, bool with_evaluations)
{
    bl_pass_options options = pass_options(r, with_evaluations);

    BL_TRY(bl_pass_create(r->device, r->weights, r->base, r->compute, &options, &r->pass));
    r->micro = calloc((size_t)(options.max_group + options.max_companions), sizeof *r->micro);
    if (!r->micro) return BL_FAIL(BL_ENOMEM, "out of memory: the time of a plan");
    r->weigher.weigh = weigh;
    pad_data(r, options.T_max);
    return BL_OK;
}

static bl_status create(plan_rank *r, bool with_evaluations, bl_span_sink sink, void *user)
{
    BL_TRY(open_model(r));
    BL_TRY(list_data(r));
    BL_TRY(open_device(r, sink, user));
    BL_TRY(create_base(r));
    BL_TRY(create_trainings(r, with_evaluations));
    return create_pass(r, with_evaluations);
}

bl_status plan_rank_create(const bl_time_input *in, bool with_evaluations, bl_span_sink sink,
                           void *user, plan_rank **out)
{
    plan_rank *r = calloc(1, sizeof *r);

    *out = NULL;
    if (!r) return BL_FAIL(BL_ENOMEM, "out of memory: the time of a plan");
    *r = (plan_rank){.in = in, .n_trainings = 1 + in->n_others};
    bl_status st = create(r, with_evaluations, sink, user);
    if (st != BL_OK) {
        plan_rank_destroy(r);
        return st;
    }
    *out = r;
    return BL_OK;
}

void plan_rank_destroy(plan_rank *r)
{
    if (!r) return;
    bl_pass_destroy(r->pass);
    for (int i = 0; r->training && i < r->n_trainings; i++) {
        training *t = &r->training[i];
        bl_batches_destroy(t->step);
        bl_batches_destroy(t->evaluation);
        bl_trained_state_destroy(t->state);
        bl_trained_state_destroy(t->reference);
    }
    bl_base_destroy(r->base);
    bl_model_weights_free(r->weights);
    bl_timeline_destroy(r->timeline);
    bl_stream *const streams[] = {r->compute, r->copy, r->gather, r->communication, r->activations};
    for (size_t i = 0; i < BL_COUNT(streams); i++) bl_stream_destroy(streams[i]);
    bl_comm_destroy(r->shard_group);
    bl_comm_destroy(r->world);
    if (r->device) bl_device_destroy(r->device);
    if (r->has_all) bl_trained_free(&r->model.trained);
    free(r->model.formats);
    free(r->bf16_matrices);
    free(r->data);
    free(r->training);
    free(r->micro);
    free(r);
}

/* ---- passes ---- */

static bl_pass_micro micro_of(const plan_rank *r, const plan_micro *like)
{
    training *t = &r->training[like->training];
    bool is_evaluation = like->kind >= PLAN_OF_EVALUATION,
         is_reference =
             like->kind == PLAN_OF_STEP_REFERENCE || like->kind == PLAN_OF_EVALUATION_REFERENCE;
    bl_pass_micro micro = {.batch = is_evaluation ? t->evaluation->micro : t->step->micro,
                           .loss_scale = 1,
                           .is_companion = like->is_companion,
                           .is_weighed = like->is_weighed};

    if (t->state) micro.loss_sum = bl_trained_state_loss_sum(t->state);
    if (like->has_adapter) micro.adapter = is_reference ? &t->reference_adapter : &t->adapter;
    if (!like->has_gradient) return micro;
    if (t->state) micro.gradients = bl_trained_state_sink(t->state);
    return micro;
}

bl_status plan_rank_run(plan_rank *r, const plan_round *round)
{
    bl_pass_input input = {.n_micro = round->n_micro,
                           .micro = r->micro,
                           .stop = count_visit,
                           .stop_user = r,
                           .updates = bl_trained_full_updates(r->training[0].state)};

    r->visit = -1;
    for (int m = 0; m < round->n_micro; m++) {
        r->micro[m] = micro_of(r, &round->micro[m]);
        if (r->micro[m].is_weighed) input.weigher = &r->weigher;
    }
    BL_TRY(bl_pass_run(r->pass, &input));
    return bl_stream_synchronize(r->compute);
}

bl_status plan_rank_join(plan_rank *r)
{
    for (int i = 0; i < r->n_trainings; i++)
        if (r->training[i].state) BL_TRY(bl_trained_state_join(r->training[i].state));
    return BL_OK;
}

bl_status plan_rank_update(plan_rank *r)
{
    bl_lane_totals lanes[BL_N_LANES] = {0};
    double loss_sum, grad_norm;

    r->n_steps++;
    for (int i = 0; i < r->n_trainings; i++) {
        bl_trained_state *state = r->training[i].state;
        if (!state) continue;
        BL_TRY(bl_trained_state_reduce(state, &loss_sum, &grad_norm, lanes));
        BL_TRY(bl_trained_state_update(state, r->n_steps, 1, 0.9, 0.999, 1e-8, 0, 0));
    }
    return bl_stream_synchronize(r->compute);
}

bl_status plan_rank_drain(plan_rank *r)
{
    BL_TRY(bl_device_model_drain(r->device));
    bl_timeline_collect(r->timeline);
    return BL_OK;
}

bl_device *plan_rank_device(const plan_rank *r)
{
    return r->device;
}

const bl_simulation *plan_rank_simulation(const plan_rank *r)
{
    return bl_device_model_simulation(r->device);
}

bl_lane plan_rank_lane(const plan_rank *r, const bl_sim_op *op)
{
    if (op->stream == bl_model_stream_index(r->compute)) return BL_LANE_COMPUTE;
    if (op->stream == bl_model_stream_index(r->gather)) return BL_LANE_GATHER;
    if (op->stream == bl_model_stream_index(r->communication)) return BL_LANE_LORA;
    if (r->activations && op->stream == bl_model_stream_index(r->activations))
        return BL_LANE_ACTIVATIONS;
    return op->work && op->work->use[BL_RESOURCE_DISK] > 0 ? BL_LANE_DISK : BL_LANE_COPY;
}

/* plan_pass_sink */
static bl_status run_first(void *user, const plan_round *round, bool is_last)
{
    plan_rank *r = user;

    (void)is_last;
    return r->n_steps++ == 0 ? plan_rank_run(r, round) : BL_OK;
}

const bl_time_run *plan_longest_run(const bl_time_input *in)
{
    const bl_time_run *longest = in->runs;

    for (int i = 1; i < in->n_runs; i++)
        if (in->runs[i].kind != longest->kind && in->runs[i].n_layers > longest->n_layers)
            longest = &in->runs[i];
    return longest;
}

bl_status plan_run_kernels(const bl_time_input *in, plan_kernel_sink sink, void *user)
{
    bl_time_input alone = plan_training_of(in, 0);
    bl_time_run run = *plan_longest_run(in);
    plan_rank *r = NULL;
    plan_round round;

    run.n_layers = N_SAMPLED;
    alone.runs = &run;
    alone.n_runs = 1;
    alone.n_micro = (int)bl_max_i64(1, in->group);
    alone.preference = (bl_time_preference){.is_weighed = false};
    bl_status st = plan_round_create(&alone, &round);
    if (st == BL_OK) st = plan_rank_create(&alone, false, NULL, NULL, &r);
    if (st == BL_OK) {
        r->kernels = sink;
        r->kernels_user = user;
        st = plan_round_each(&round, run_first, r);
    }
    plan_rank_destroy(r);
    plan_round_free(&round);
    return st;
}
