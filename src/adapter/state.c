/* SPDX-License-Identifier: Apache-2.0 */
/* state.c -- LoRA weights, gradients and AdamW's moments as shards of one vector; reduces
 * gradients, clips, updates, publishes. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "ops/elementwise.h"
#include "ops/optimizer.h"
#include "adapter/internal.h"

/* sums: BL_N_LANES numbers of bytes, added up; BL_N_LANES stalls of each rank, which leaves the
 * others' zero: a sum is enough. */
enum { LOSS, SQUARES, LANE_BYTES, LANE_STALLS = LANE_BYTES + BL_N_LANES };
enum { NORM, SCALE, N_CLIP }; /* clip */

bl_adapter_bytes bl_adapter_state_measure(bl_dtype act, const bl_lora_layout *layout,
                                          int64_t n_layers, int n_ranks, int ring_depth)
{
    enum { FLOAT = sizeof(float) };
    int64_t chunk = bl_ceil_div(layout->n_floats, n_ranks),
            act_bytes = (int64_t)bl_dtype_bytes(act);
    return (bl_adapter_bytes){.shard = n_layers * chunk * FLOAT,
                              .part = chunk * FLOAT,
                              .whole = chunk * n_ranks * FLOAT,
                              .copy = act_bytes == FLOAT ? 0 : n_layers * chunk * act_bytes,
                              .ring = ring_depth * chunk * n_ranks * act_bytes,
                              .staging = BL_STAGING_BYTES};
}

static int64_t n_sums(const bl_adapter_state *s)
{
    return LANE_STALLS + (int64_t)bl_comm_size(s->world) * BL_N_LANES;
}

static bl_status sink_begin(void *user, int64_t layer, bl_stream *stream, float **gradients)
{
    bl_adapter_state *s = user;
    *gradients = s->full[s->turn];
    return bl_timeline_wait(s->timeline, BL_LANE_LORA, "wait", layer, -1, stream,
                            s->reduced[s->turn]);
}

static bl_status sink_end(void *user, int64_t layer, bl_stream *stream)
{
    bl_adapter_state *s = user;
    int turn = s->turn, span;
    int64_t received = bl_comm_sum_received(s->world, s->chunk * (int64_t)sizeof(float));

    s->turn ^= 1;
    BL_TRY(bl_event_record(s->written[turn], stream));
    BL_TRY(bl_stream_wait(s->communication, s->written[turn]));
    BL_TRY(bl_timeline_begin(s->timeline, BL_LANE_LORA, "gradients", layer, -1, s->communication,
                             &span));
    bl_comm_set_label(s->world, "the LoRA gradients of layer", layer);
    BL_TRY(bl_comm_reduce_scatter_f32(s->world, s->communication, s->full[turn], s->partial,
                                      s->chunk));
    bl_comm_set_label(s->world, NULL, 0);
    BL_TRY(bl_event_record(s->reduced[turn], s->communication));
    BL_TRY(bl_accumulate(s->communication,
                         &(bl_accumulate_args){.n = s->chunk,
                                               .x = bl_tensor_f32(s->partial),
                                               .y = bl_tensor_f32(s->grad + layer * s->chunk),
                                               .without_workers = true}));
    return bl_timeline_end(s->timeline, span, s->communication, received);
}

/* A separate copy only where activations are not fp32. */
static bl_status allocate_copy(bl_adapter_state *s)
{
    s->compute_copy = bl_tensor_of(s->w, bl_device_act(s->device));
    if (s->compute_copy.dtype == BL_F32) return BL_OK;
    s->compute_copy.data = NULL;
    return bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)s->bytes.copy,
                           "LoRA weights to compute with", &s->compute_copy.data);
}

static bl_status create_staging(bl_adapter_state *s)
{
    return bl_staging_create(s->device, (size_t)s->bytes.staging, "staging of trained weights",
                             &s->staging);
}

bl_status adapter_allocate_sums(bl_adapter_state *s)
{
    BL_TRY(bl_event_create(s->device, &s->joined));
    BL_TRY(bl_device_alloc(s->device, BL_SPACE_DEVICE, N_CLIP * sizeof(double), "norm and scale",
                           (void **)&s->clip));
    BL_TRY(bl_twin_create(s->device, (size_t)n_sums(s) * sizeof(double), "sums", &s->sums_twin));
    s->sums = s->sums_twin->memory;
    return create_staging(s);
}

static bl_status allocate_frozen(bl_adapter_state *s)
{
    BL_TRY(bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)s->bytes.shard,
                           "frozen LoRA weights", (void **)&s->w));
    BL_TRY(allocate_copy(s));
    return create_staging(s);
}

static bl_status allocate(bl_adapter_state *s)
{
    float **const shards[] = {&s->w, &s->m, &s->v, &s->grad};
    static const char *const names[] = {"LoRA weights", "AdamW first moments",
                                        "AdamW second moments", "LoRA gradients"};

    for (size_t i = 0; i < BL_COUNT(shards); i++)
        BL_TRY(bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)s->bytes.shard, names[i],
                               (void **)shards[i]));
    BL_TRY(allocate_copy(s));
    for (int i = 0; i < 2; i++) {
        BL_TRY(bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)s->bytes.whole,
                               "a layer's gradients", (void **)&s->full[i]));
        BL_TRY(bl_event_create(s->device, &s->written[i]));
        BL_TRY(bl_event_create(s->device, &s->reduced[i]));
    }
    BL_TRY(bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)s->bytes.part, "reduced gradients",
                           (void **)&s->partial));
    return adapter_allocate_sums(s);
}

static bl_status create_ring(bl_adapter_state *s, int depth)
{
    bl_gather_unit *units = calloc((size_t)s->n_layers, sizeof *units);
    if (!units) return BL_FAIL(BL_ENOMEM, "the LoRA ring");
    for (int64_t l = 0; l < s->n_layers; l++)
        units[l] =
            (bl_gather_unit){.what = "the LoRA weights of layer",
                             .index = l,
                             .n_items = 1,
                             .item = {{.shard = bl_tensor_at(s->compute_copy, l * s->chunk).data,
                                       .shard_bytes = bl_tensor_bytes(s->compute_copy, s->chunk)}}};
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

static bl_status create(bl_device *device, bl_comm *world, bl_stream *compute,
                        bl_stream *communication, bl_timeline *timeline,
                        const bl_lora_layout *layout, int64_t n_layers, int ring_depth,
                        bl_status (*take)(bl_adapter_state *), bl_adapter_state **out)
{
    *out = NULL;
    bl_adapter_state *s = calloc(1, sizeof *s);
    if (!s) return BL_FAIL(BL_ENOMEM, "adapter state");
    *s = (bl_adapter_state){.layout = layout,
                            .device = device,
                            .world = world,
                            .compute = compute,
                            .communication = communication,
                            .timeline = timeline,
                            .n_layers = n_layers,
                            .chunk = bl_ceil_div(layout->n_floats, bl_comm_size(world)),
                            .bytes =
                                bl_adapter_state_measure(bl_device_act(device), layout, n_layers,
                                                         bl_comm_size(world), ring_depth)};
    s->n_floats = n_layers * s->chunk;
    s->sink = (bl_gradient_sink){.user = s, .begin = sink_begin, .end = sink_end};
    bl_status st = take(s);
    if (st == BL_OK && layout->n_table_floats > 0)
        st = bl_adapter_terms_create(device, layout, &s->terms);
    st = bl_comm_begin_alloc(world, st);
    if (st == BL_OK) st = create_ring(s, ring_depth);
    if (st != BL_OK) {
        bl_adapter_state_destroy(s);
        return st;
    }
    *out = s;
    return BL_OK;
}

bl_status bl_adapter_state_create(bl_device *device, bl_comm *world, bl_stream *compute,
                                  bl_stream *communication, bl_timeline *timeline,
                                  const bl_lora_layout *layout, int64_t n_layers, int ring_depth,
                                  bl_adapter_state **out)
{
    return create(device, world, compute, communication, timeline, layout, n_layers, ring_depth,
                  allocate, out);
}

bl_status bl_adapter_state_create_frozen(bl_device *device, bl_comm *world, bl_stream *compute,
                                         bl_stream *communication, bl_timeline *timeline,
                                         const bl_lora_layout *layout, int64_t n_layers,
                                         int ring_depth, bl_adapter_state **out)
{
    return create(device, world, compute, communication, timeline, layout, n_layers, ring_depth,
                  allocate_frozen, out);
}

bl_status bl_adapter_state_add_modules(bl_adapter_state *s, bl_model_weights *weights,
                                       const bl_trained_set *set)
{
    BL_TRY(adapter_modules_create(weights, set, s->terms, &s->modules));
    s->sink.modules = adapter_modules_gradients(s->modules);
    return BL_OK;
}

void bl_adapter_state_destroy(bl_adapter_state *s)
{
    if (!s) return;
    adapter_modules_destroy(s->modules);
    bl_adapter_terms_destroy(s->terms);
    bl_gather_ring_destroy(s->ring);
    if (s->trained) adapter_full_free(s);
    if (s->compute_copy.data != s->w)
        bl_device_free(s->device, BL_SPACE_DEVICE, s->compute_copy.data);
    float *const blocks[] = {s->w, s->m, s->v, s->grad, s->full[0], s->full[1], s->partial};
    for (size_t i = 0; i < BL_COUNT(blocks); i++)
        bl_device_free(s->device, BL_SPACE_DEVICE, blocks[i]);
    bl_device_free(s->device, BL_SPACE_DEVICE, s->clip);
    bl_twin_destroy(s->sums_twin);
    bl_staging_destroy(s->staging);
    for (int i = 0; i < 2; i++) {
        bl_event_destroy(s->written[i]);
        bl_event_destroy(s->reduced[i]);
    }
    bl_event_destroy(s->joined);
    free(s);
}

bl_status bl_adapter_state_publish(bl_adapter_state *s)
{
    if (s->trained) return bl_base_shards_changed(s->trained->base, s->compute);
    if (s->compute_copy.data != s->w)
        BL_TRY(bl_cast(
            s->compute,
            &(bl_cast_args){.n = s->n_floats, .x = bl_tensor_f32(s->w), .y = s->compute_copy}));
    BL_TRY(adapter_modules_publish(s->modules, s->compute));
    if (s->terms) BL_TRY(adapter_terms_publish(s->terms, s->compute));
    return bl_gather_ring_shards_changed(s->ring, s->compute);
}

bl_status bl_adapter_state_initialize(bl_adapter_state *s, uint64_t seed)
{
    int64_t begin = bl_comm_rank(s->world) * s->chunk,
            most = (int64_t)(s->staging->n_bytes / sizeof(float));

    for (int64_t l = 0; l < s->n_layers; l++)
        for (int64_t k = 0, n; k < s->chunk; k += n) {
            n = bl_min_i64(most, s->chunk - k);
            bl_lora_layout_initialize(s->layout, seed, l, begin + k, n, s->staging->bytes);
            BL_TRY(bl_staging_upload(s->staging, s->w + l * s->chunk + k, s->staging->bytes,
                                     (size_t)n * sizeof(float)));
        }
    if (s->terms) BL_TRY(adapter_terms_initialize(s->terms, seed, s->staging));
    return bl_adapter_state_publish(s);
}

bl_pass_adapter bl_adapter_state_adapter(const bl_adapter_state *s)
{
    return (bl_pass_adapter){
        .lora = s->layout, .ring = s->ring, .terms = bl_adapter_terms_list(s->terms)};
}

const bl_gradient_sink *bl_adapter_state_sink(const bl_adapter_state *s)
{
    return &s->sink;
}

double *bl_adapter_state_loss_sum(const bl_adapter_state *s)
{
    return &s->sums[LOSS];
}

bl_status bl_adapter_state_join(bl_adapter_state *s)
{
    BL_TRY(bl_event_record(s->joined, s->communication));
    BL_TRY(bl_timeline_wait(s->timeline, BL_LANE_LORA, "wait", -1, -1, s->compute, s->joined));
    if (s->trained) BL_TRY(adapter_full_join(s));
    return bl_stream_synchronize(s->compute);
}

static void put_lanes(bl_adapter_state *s, const bl_lane_totals *lanes)
{
    double *sums = s->sums_twin->host, *stalls = sums + LANE_STALLS;

    memset(stalls, 0, (size_t)(n_sums(s) - LANE_STALLS) * sizeof *stalls);
    for (int i = 0; i < BL_N_LANES; i++) {
        sums[LANE_BYTES + i] = (double)lanes[i].n_bytes;
        stalls[bl_comm_rank(s->world) * BL_N_LANES + i] = lanes[i].stall_s;
    }
}

static void take_lanes(const bl_adapter_state *s, bl_lane_totals *lanes)
{
    const double *sums = s->sums_twin->host;

    for (int i = 0; i < BL_N_LANES; i++) {
        lanes[i].n_bytes = (int64_t)sums[LANE_BYTES + i];
        for (int64_t at = LANE_STALLS + i; at < n_sums(s); at += BL_N_LANES)
            lanes[i].stall_s = fmax(lanes[i].stall_s, sums[at]);
    }
}

bl_status bl_adapter_state_reduce(bl_adapter_state *s, double *loss_sum, double *grad_norm,
                                  bl_lane_totals *lanes)
{
    size_t n_bytes = s->sums_twin->n_bytes, n_first = LANE_BYTES * sizeof(double);
    const double *sums = s->sums_twin->host;

    put_lanes(s, lanes);
    BL_TRY(bl_twin_upload(s->sums_twin, s->communication, n_first, n_bytes - n_first));
    if (s->trained)
        BL_TRY(adapter_full_reduce(s, &s->sums[SQUARES]));
    else
        BL_TRY(bl_sum_squares(s->communication,
                              &(bl_sum_squares_args){s->n_floats, s->grad, &s->sums[SQUARES]}));
    BL_TRY(adapter_modules_reduce(s->modules, s->world, s->communication, &s->sums[SQUARES]));
    BL_TRY(bl_comm_all_reduce_f64(s->world, s->communication, s->sums, n_sums(s)));
    BL_TRY(bl_twin_download(s->sums_twin, s->communication, 0, n_bytes));
    BL_TRY(bl_stream_synchronize(s->communication));
    *loss_sum = sums[LOSS];
    *grad_norm = sqrt(sums[SQUARES]);
    take_lanes(s, lanes);
    return BL_OK;
}

bl_status bl_adapter_state_update(bl_adapter_state *s, int64_t step, double lr, double beta1,
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
    if (s->trained) {
        BL_TRY(adapter_full_update(s, &args));
    } else {
        BL_TRY(bl_adamw(s->compute, &args));
        BL_TRY(bl_stream_zero(s->compute, s->grad, (size_t)s->bytes.shard));
        BL_TRY(adapter_modules_update(s->modules, s->compute, &args));
    }
    BL_TRY(bl_stream_zero(s->compute, s->sums, 2 * sizeof(double)));
    return bl_adapter_state_publish(s);
}

/* A layer's gradients are n_ranks parts, of several ranks two at least. */
static bl_status warm_up_optimizer(bl_adapter_state *s)
{
    bl_adamw_args args = {.n = s->chunk, .step = 1, .eps = 1.0, .grad_scale = &s->clip[SCALE]};

    BL_TRY(bl_clip_scale(s->compute, &(bl_clip_scale_args){1.0, &s->sums[SQUARES], &s->clip[NORM],
                                                           &s->clip[SCALE]}));
    if (s->trained) return adapter_full_warm_up(s, args);
    for (int i = 0; i < 2; i++)
        BL_TRY(bl_stream_zero(s->compute, s->full[i], (size_t)s->bytes.whole));
    args.grad = s->full[0], args.w = s->full[0] + s->chunk;
    args.m = bl_tensor_f32(s->full[1]), args.v = bl_tensor_f32(s->full[1] + s->chunk);
    if (bl_comm_size(s->world) > 1) BL_TRY(bl_adamw(s->compute, &args));
    for (int i = 0; i < 2; i++)
        BL_TRY(bl_stream_zero(s->compute, s->full[i], (size_t)s->bytes.whole));
    return bl_stream_zero(s->compute, s->grad, (size_t)s->bytes.shard);
}

bl_status bl_adapter_state_warm_up(bl_adapter_state *s)
{
    bl_lane_totals lanes[BL_N_LANES] = {0};
    double loss_sum, grad_norm;

    BL_TRY(bl_adapter_state_reduce(s, &loss_sum, &grad_norm, lanes));
    BL_TRY(bl_stream_zero(s->compute, s->sums, 2 * sizeof(double)));
    BL_TRY(warm_up_optimizer(s));
    return bl_adapter_state_publish(s);
}
