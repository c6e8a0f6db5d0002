/* SPDX-License-Identifier: Apache-2.0 */
/* state.c -- LoRA weights, gradients and AdamW's moments as shards of one vector; reduces
 * gradients, clips, updates, publishes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "ops/elementwise.h"
#include "ops/optimizer.h"
#include "trained/internal.h"

/* sums: BL_N_LANES numbers of bytes, added up; BL_N_LANES stalls of each rank, which leaves the
 * others' zero: a sum is enough. */
enum { LOSS, SQUARES, LANE_BYTES, LANE_STALLS = LANE_BYTES + BL_N_LANES };
enum { NORM, SCALE, N_CLIP }; /* clip */
enum { ALIGNMENT_BYTES = 256 };

bl_adapter_bytes bl_trained_state_measure(bl_dtype act, const bl_lora_layout *layout,
                                          int64_t n_layers, int n_ranks, int ring_depth)
{
    enum { FLOAT = sizeof(float) };
    int64_t chunk = bl_ceil_div(layout->n_floats, n_ranks),
            all = bl_lora_chunks_before(layout, n_layers, n_ranks),
            act_bytes = (int64_t)bl_dtype_bytes(act);
    return (bl_adapter_bytes){.shard = all * FLOAT,
                              .part = chunk * FLOAT,
                              .whole = chunk * n_ranks * FLOAT,
                              .copy = act_bytes == FLOAT ? 0 : all * act_bytes,
                              .ring = ring_depth * chunk * n_ranks * act_bytes,
                              .staging = BL_STAGING_BYTES};
}

static int64_t n_sums(const bl_trained_state *s)
{
    return LANE_STALLS + (int64_t)bl_comm_size(s->world) * BL_N_LANES;
}

int64_t trained_chunk(const bl_trained_state *s, int64_t layer)
{
    return bl_lora_chunk(s->layout, layer, bl_comm_size(s->world));
}

int64_t trained_chunks_before(const bl_trained_state *s, int64_t layer)
{
    return bl_lora_chunks_before(s->layout, layer, bl_comm_size(s->world));
}

/* bl_trained_state.begin. Where layers differ, the padding of one may have gradients of another. */
static bl_status begin_gradients(bl_trained_state *s, int64_t unit, bl_stream *stream, float *whole,
                                 bl_unit_gradients *out)
{
    out->lora = whole;
    if (!whole || unit >= s->n_layers) return BL_OK;
    int64_t n = bl_lora_layer_floats(s->layout, unit),
            padded = trained_chunk(s, unit) * bl_comm_size(s->world);
    if (padded == n) return BL_OK;
    return bl_stream_zero(stream, whole + n, (size_t)(padded - n) * sizeof *whole);
}

/* A separate copy only where activations are not fp32. */
static bl_status allocate_copy(bl_trained_state *s)
{
    s->compute_copy = bl_tensor_of(s->w, bl_device_act(s->device));
    if (s->compute_copy.dtype == BL_F32) return BL_OK;
    s->compute_copy.data = NULL;
    return bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)s->bytes.copy,
                           "LoRA weights to compute with", &s->compute_copy.data);
}

static bl_status create_staging(bl_trained_state *s)
{
    return bl_staging_create(s->device, (size_t)s->bytes.staging, "staging of trained weights",
                             &s->staging);
}

bl_status trained_allocate_sums(bl_trained_state *s)
{
    BL_TRY(bl_event_create(s->device, &s->joined));
    BL_TRY(bl_device_alloc(s->device, BL_SPACE_DEVICE, N_CLIP * sizeof(double), "norm and scale",
                           (void **)&s->clip));
    BL_TRY(bl_twin_create(s->device, (size_t)n_sums(s) * sizeof(double), "sums", &s->sums_twin));
    s->sums = s->sums_twin->memory;
    return create_staging(s);
}

static bl_status allocate_frozen(bl_trained_state *s)
{
    BL_TRY(bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)s->bytes.shard,
                           "frozen LoRA weights", (void **)&s->w));
    BL_TRY(allocate_copy(s));
    return create_staging(s);
}

static bl_status allocate(bl_trained_state *s)
{
    float **const shards[] = {&s->w, &s->m, &s->v, &s->grad};
    static const char *const names[] = {"LoRA weights", "AdamW first moments",
                                        "AdamW second moments", "LoRA gradients"};

    for (size_t i = 0; i < BL_COUNT(shards); i++)
        BL_TRY(bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)s->bytes.shard, names[i],
                               (void **)shards[i]));
    BL_TRY(allocate_copy(s));
    BL_TRY(trained_create_shares(s, s->n_layers, s->n_layers));
    for (int64_t l = 0; l < s->n_layers; l++) {
        trained_add_share(s, l, 0, trained_chunk(s, l));
        trained_add_piece(s, l, 0, trained_chunk(s, l), trained_chunks_before(s, l));
    }
    s->rows = s->grad;
    int64_t second = bl_round_up(s->bytes.whole, ALIGNMENT_BYTES);
    BL_TRY(trained_create_sink(s, second + s->bytes.whole, second, s->bytes.part));
    return trained_allocate_sums(s);
}

static bl_status create_ring(bl_trained_state *s, int depth)
{
    bl_gather_unit *units = calloc((size_t)s->n_layers, sizeof *units);
    if (!units) return BL_FAIL(BL_ENOMEM, "the LoRA ring");
    for (int64_t l = 0; l < s->n_layers; l++)
        units[l] = (bl_gather_unit){
            .what = "the LoRA weights of layer",
            .index = l,
            .n_items = 1,
            .item = {{.shard = bl_tensor_at(s->compute_copy, trained_chunks_before(s, l)).data,
                      .shard_bytes = bl_tensor_bytes(s->compute_copy, trained_chunk(s, l))}}};
    bl_gather_ring_options options = {.device = s->device,
                                      .comm = s->world,
                                      .stream = s->communication,
                                      .depth = depth,
                                      .timeline = s->timeline,
                                      .lane = BL_LANE_LORA};
    bl_status st = bl_gather_ring_create(&options, s->n_layers, units, &s->ring);
    free(units);
    return st;
}

static bl_status create(const bl_trained_context *c, const bl_lora_layout *layout, int64_t n_layers,
                        int ring_depth, bl_status (*take)(bl_trained_state *),
                        bl_trained_state **out)
{
    int n_ranks = bl_comm_size(c->world);

    *out = NULL;
    bl_trained_state *s = calloc(1, sizeof *s);
    if (!s) return BL_FAIL(BL_ENOMEM, "trained state");
    trained_use_context(s, c);
    s->layout = layout;
    s->n_layers = n_layers;
    s->bytes =
        bl_trained_state_measure(bl_device_act(c->device), layout, n_layers, n_ranks, ring_depth);
    s->n_floats = trained_chunks_before(s, n_layers);
    s->begin = begin_gradients;
    s->label = "the LoRA gradients of layer";
    bl_status st = take(s);
    if (st == BL_OK && layout->n_table_floats > 0)
        st = bl_adapter_terms_create(c->device, layout, &s->terms);
    st = bl_comm_begin_alloc(c->world, st);
    if (st == BL_OK) st = create_ring(s, ring_depth);
    if (st != BL_OK) {
        bl_trained_state_destroy(s);
        return st;
    }
    *out = s;
    return BL_OK;
}

bl_status bl_trained_state_create(const bl_trained_context *context, const bl_lora_layout *layout,
                                  int64_t n_layers, int ring_depth, bl_trained_state **out)
{
    return create(context, layout, n_layers, ring_depth, allocate, out);
}

bl_status bl_trained_state_create_frozen(const bl_trained_context *context,
                                         const bl_lora_layout *layout, int64_t n_layers,
                                         int ring_depth, bl_trained_state **out)
{
    return create(context, layout, n_layers, ring_depth, allocate_frozen, out);
}

bl_status bl_trained_state_add_modules(bl_trained_state *s, bl_model_weights *weights,
                                       const bl_trained_set *set)
{
    trained_replicated_options options = {.weights = weights,
                                          .set = set,
                                          .has_tables = true,
                                          .terms = s->terms,
                                          .label = "the gradients of modules_to_save"};

    BL_TRY(trained_replicated_create(&options, &s->replicated));
    s->sink.has_embedding = (set && trained_set_has_table(set, BL_TABLE_EMBEDDING)) ||
                            (s->terms && s->layout->options.table[BL_TABLE_EMBEDDING]);
    return BL_OK;
}

void bl_trained_state_destroy(bl_trained_state *s)
{
    if (!s) return;
    if (s->trained) trained_full_free(s);
    trained_replicated_destroy(s->replicated);
    bl_adapter_terms_destroy(s->terms);
    bl_gather_ring_destroy(s->ring);
    if (s->compute_copy.data != s->w)
        bl_device_free(s->device, BL_SPACE_DEVICE, s->compute_copy.data);
    float *const blocks[] = {s->w, s->m, s->v, s->grad};
    for (size_t i = 0; i < BL_COUNT(blocks); i++)
        bl_device_free(s->device, BL_SPACE_DEVICE, blocks[i]);
    bl_device_free(s->device, BL_SPACE_DEVICE, s->clip);
    bl_twin_destroy(s->sums_twin);
    bl_staging_destroy(s->staging);
    trained_free_sink(s);
    bl_event_destroy(s->joined);
    free(s);
}

bl_status bl_trained_state_publish(bl_trained_state *s)
{
    if (s->trained) return bl_base_shards_changed(s->trained->base, s->compute);
    if (s->compute_copy.data != s->w)
        BL_TRY(bl_cast(
            s->compute,
            &(bl_cast_args){.n = s->n_floats, .x = bl_tensor_f32(s->w), .y = s->compute_copy}));
    BL_TRY(trained_replicated_publish(s->replicated, s->compute));
    if (s->terms) BL_TRY(trained_terms_publish(s->terms, s->compute));
    return bl_gather_ring_shards_changed(s->ring, s->compute);
}

bl_status bl_trained_state_initialize(bl_trained_state *s, uint64_t seed)
{
    int64_t most = (int64_t)(s->staging->n_bytes / sizeof(float));

    for (int64_t l = 0; l < s->n_layers; l++) {
        int64_t chunk = trained_chunk(s, l), begin = bl_comm_rank(s->world) * chunk;
        float *shard = s->w + trained_chunks_before(s, l);
        for (int64_t k = 0, n; k < chunk; k += n) {
            n = bl_min_i64(most, chunk - k);
            bl_lora_layout_initialize(s->layout, seed, l, begin + k, n, s->staging->bytes);
            BL_TRY(bl_staging_upload(s->staging, shard + k, s->staging->bytes,
                                     (size_t)n * sizeof(float)));
        }
    }
    if (s->terms) BL_TRY(trained_terms_initialize(s->terms, seed, s->staging));
    return bl_trained_state_publish(s);
}

bl_pass_adapter bl_trained_state_adapter(const bl_trained_state *s)
{
    return (bl_pass_adapter){
        .lora = s->layout, .ring = s->ring, .terms = bl_adapter_terms_list(s->terms)};
}

const bl_gradient_sink *bl_trained_state_sink(const bl_trained_state *s)
{
    return &s->sink;
}

double *bl_trained_state_loss_sum(const bl_trained_state *s)
{
    return &s->sums[LOSS];
}

bl_status bl_trained_state_join(bl_trained_state *s)
{
    BL_TRY(bl_event_record(s->joined, s->communication));
    BL_TRY(bl_timeline_wait(s->timeline, BL_LANE_LORA, "wait", -1, -1, s->compute, s->joined));
    if (s->trained) BL_TRY(trained_units_join(s->trained->units, s->compute));
    return bl_stream_synchronize(s->compute);
}

static void put_lanes(bl_trained_state *s, const bl_lane_totals *lanes)
{
    double *sums = s->sums_twin->host, *stalls = sums + LANE_STALLS;

    memset(stalls, 0, (size_t)(n_sums(s) - LANE_STALLS) * sizeof *stalls);
    for (int i = 0; i < BL_N_LANES; i++) {
        sums[LANE_BYTES + i] = (double)lanes[i].n_bytes;
        stalls[bl_comm_rank(s->world) * BL_N_LANES + i] = lanes[i].stall_s;
    }
}

static void take_lanes(const bl_trained_state *s, bl_lane_totals *lanes)
{
    const double *sums = s->sums_twin->host, *longest = sums + LANE_STALLS;
    double most = -1;

    for (int64_t at = LANE_STALLS; at < n_sums(s); at += BL_N_LANES) {
        double total = 0;
        for (int i = 0; i < BL_N_LANES; i++) total += sums[at + i];
        if (total <= most) continue;
        most = total;
        longest = sums + at;
    }
    for (int i = 0; i < BL_N_LANES; i++) {
        lanes[i].n_bytes = (int64_t)sums[LANE_BYTES + i];
        lanes[i].stall_s = longest[i];
    }
}

bl_status bl_trained_state_reduce(bl_trained_state *s, double *loss_sum, double *grad_norm,
                                  bl_lane_totals *lanes)
{
    size_t n_bytes = s->sums_twin->n_bytes, n_first = LANE_BYTES * sizeof(double);
    const double *sums = s->sums_twin->host;

    put_lanes(s, lanes);
    BL_TRY(bl_twin_upload(s->sums_twin, s->communication, n_first, n_bytes - n_first));
    if (s->trained)
        BL_TRY(trained_units_sum_squares(s->trained->units, s->communication, &s->sums[SQUARES]));
    else
        BL_TRY(bl_sum_squares(s->communication,
                              &(bl_sum_squares_args){s->n_floats, s->grad, &s->sums[SQUARES]}));
    BL_TRY(trained_replicated_reduce(s->replicated, s->world, s->communication, &s->sums[SQUARES]));
    BL_TRY(bl_comm_all_reduce_f64(s->world, s->communication, s->sums, n_sums(s)));
    BL_TRY(bl_twin_download(s->sums_twin, s->communication, 0, n_bytes));
    BL_TRY(bl_stream_synchronize(s->communication));
    *loss_sum = sums[LOSS];
    *grad_norm = sqrt(sums[SQUARES]);
    take_lanes(s, lanes);
    return BL_OK;
}

/* Updates a factor of projection p, floats [offset, offset + n) of each layer's vector: those on
 * this rank. */
static bl_status update_factor(const bl_trained_state *s, int p, int64_t offset, int64_t n,
                               bl_adamw_args args)
{
    for (int64_t l = 0; l < s->n_layers; l++) {
        int64_t chunk = trained_chunk(s, l), begin = bl_comm_rank(s->world) * chunk,
                first = bl_max_i64(offset, begin), last = bl_min_i64(offset + n, begin + chunk),
                at = trained_chunks_before(s, l) + first - begin;
        if (first >= last || !bl_lora_has(s->layout, l, p)) continue;
        args.n = last - first;
        args.grad = s->grad + at;
        args.w = s->w + at;
        args.m = bl_tensor_f32(s->m + at);
        args.v = bl_tensor_f32(s->v + at);
        BL_TRY(bl_adamw(s->compute, &args));
    }
    return BL_OK;
}

/* At once, or factor by factor if they have rates. args: of all. */
static bl_status update_lora(const bl_trained_state *s, const bl_adamw_args *args)
{
    const bl_lora_layout *layout = s->layout;

    if (!layout->has_rates) BL_TRY(bl_adamw(s->compute, args));
    for (int p = 0; p < layout->arch->n_projections && layout->has_rates; p++) {
        bl_adamw_args a = *args, b = *args;
        if (layout->a_offset[p] < 0) continue;
        a.lr *= layout->rate[p][BL_PEFT_A];
        b.lr *= layout->rate[p][BL_PEFT_B];
        BL_TRY(update_factor(s, p, layout->a_offset[p], bl_lora_factor_floats(layout, p, BL_PEFT_A),
                             a));
        BL_TRY(update_factor(s, p, layout->b_offset[p], bl_lora_factor_floats(layout, p, BL_PEFT_B),
                             b));
    }
    return bl_stream_zero(s->compute, s->grad, (size_t)s->bytes.shard);
}

bl_status bl_trained_state_update(bl_trained_state *s, int64_t step, double lr, double beta1,
                                  double beta2, double eps, double weight_decay,
                                  double max_grad_norm)
{
    bl_adamw_args args = {.n = s->n_floats,
                          .step = step,
                          .lr = lr,
                          .beta1 = beta1,
                          .beta2 = beta2,
                          .eps = eps,
                          .weight_decay = weight_decay,
                          .grad_scale = &s->clip[SCALE],
                          .grad = s->grad,
                          .w = s->w,
                          .m = bl_tensor_f32(s->m),
                          .v = bl_tensor_f32(s->v)};

    BL_TRY(bl_clip_scale(s->compute, &(bl_clip_scale_args){max_grad_norm, &s->sums[SQUARES],
                                                           &s->clip[NORM], &s->clip[SCALE]}));
    if (s->trained) /* a file may still be written from the replicated tensors */
        BL_TRY(trained_units_wait_for_file(s->trained->units, -1, BL_LANE_DISK, s->compute));
    BL_TRY(trained_replicated_update(s->replicated, s->compute, &args));
    BL_TRY(s->trained ? trained_units_update(s->trained->units, &args) : update_lora(s, &args));
    BL_TRY(bl_stream_zero(s->compute, s->sums, 2 * sizeof(double)));
    return bl_trained_state_publish(s);
}

bl_status bl_trained_state_clear(bl_trained_state *s)
{
    BL_TRY(bl_stream_zero(s->compute, s->grad, (size_t)s->bytes.shard));
    BL_TRY(trained_replicated_clear(s->replicated, s->compute));
    return bl_stream_zero(s->compute, s->sums, 2 * sizeof(double));
}

bl_tensor bl_trained_state_weights(const bl_trained_state *s)
{
    return s->compute_copy;
}

/* Runs the ops of an update on zeros, in the memory of whole gradients. */
static bl_status warm_up_optimizer(bl_trained_state *s)
{
    bl_dtype moments = s->trained ? s->trained->bytes.units.dtype : BL_F32;
    bl_adamw_args args = {.n = s->whole_bytes / (int64_t)sizeof(float) / 4,
                          .step = 1,
                          .eps = 1.0,
                          .grad_scale = &s->clip[SCALE]};

    BL_TRY(bl_clip_scale(s->compute, &(bl_clip_scale_args){1.0, &s->sums[SQUARES], &s->clip[NORM],
                                                           &s->clip[SCALE]}));
    if (s->trained) trained_units_forget(s->trained->units);
    if (s->grad) BL_TRY(bl_stream_zero(s->compute, s->grad, (size_t)s->bytes.shard));
    BL_TRY(trained_replicated_clear(s->replicated, s->compute));
    if (args.n == 0) return BL_OK;
    BL_TRY(bl_stream_zero(s->compute, s->whole[0], (size_t)s->whole_bytes));
    args.grad = s->whole[0];
    args.w = s->whole[0] + args.n;
    args.m = bl_tensor_of(s->whole[0] + 2 * args.n, moments);
    args.v = bl_tensor_of(s->whole[0] + 3 * args.n, moments);
    BL_TRY(bl_adamw(s->compute, &args));
    return bl_stream_zero(s->compute, s->whole[0], (size_t)s->whole_bytes);
}

bl_status bl_trained_state_warm_up(bl_trained_state *s)
{
    bl_lane_totals lanes[BL_N_LANES] = {0};
    double loss_sum, grad_norm;

    BL_TRY(bl_trained_state_reduce(s, &loss_sum, &grad_norm, lanes));
    BL_TRY(bl_stream_zero(s->compute, s->sums, 2 * sizeof(double)));
    BL_TRY(warm_up_optimizer(s));
    return bl_trained_state_publish(s);
}
