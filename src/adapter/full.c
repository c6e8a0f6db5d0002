/* SPDX-License-Identifier: Apache-2.0 */
/* full.c -- the trainable state of a run that trains every weight: its memory, and the way of a
 * gradient from backward to the rank's rows. */
#include "adapter/full.h"

#include <stdlib.h>

#include "adapter/internal.h"
#include "base/sizes.h"
#include "ops/elementwise.h"

enum { FLOAT = sizeof(float) };

/* A table's gradient takes the place of two layers'. */
static int64_t layer_bytes(const bl_base_layout *layout)
{
    return (int64_t)layout->units[0].slot_bytes;
}

bl_status bl_adapter_full_measure(const bl_model_config *config, const bl_base_layout *layout,
                                  const bl_tier *weights, const bl_optimizer_placement *placement,
                                  bl_adapter_full_bytes *out)
{
    const bl_base_unit *head = &layout->units[config->n_layers];
    bl_adapter_full_bytes n = {.vectors = bl_arch_vector_floats(config) * FLOAT,
                               .staging = BL_STAGING_BYTES};

    BL_TRY(
        adapter_units_measure(layout, config->tie_word_embeddings, placement, weights, &n.units));
    if (layout->n_shards > 1) {
        n.whole = bl_max_i64(2 * layer_bytes(layout), (int64_t)head->slot_bytes);
        for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);)
            n.part = bl_max_i64(n.part, (int64_t)w.part->shard_bytes);
    }
    *out = n;
    return BL_OK;
}

static double embedding_rate(const bl_train_config *config)
{
    if (config->embedding_learning_rate == BL_OPTION_AUTO) return 1;
    return config->embedding_learning_rate / config->learning_rate;
}

bl_optimizer_placement bl_adapter_full_placement(const bl_train_config *config)
{
    static const bl_tier tiers[] = {[BL_OPTIMIZER_DEVICE] = BL_TIER_DEVICE,
                                    [BL_OPTIMIZER_HOST] = BL_TIER_HOST,
                                    [BL_OPTIMIZER_DISK] = BL_TIER_DISK};
    bl_device_kind kind = bl_train_config_device_kind(config);
    bl_tier tier = tiers[config->optimizer_tier];

    return (bl_optimizer_placement){
        .kind = kind,
        .moments = bl_train_config_moments(config),
        .seed = (uint64_t)config->seed,
        .embedding_rate = embedding_rate(config),
        .ratio = config->optimizer_ratio,
        .tier = kind == BL_DEVICE_CPU && tier == BL_TIER_HOST ? BL_TIER_DEVICE : tier,
        .dir = config->offload_dir,
        .io_engine = config->io_engine};
}

/* ---- the sink ---- */

/* The unit of the base that has the weights whose gradients are those of `unit`. */
static const bl_base_unit *unit_of(const adapter_full *f, int64_t unit)
{
    int64_t head = f->config->n_layers;
    bool is_tied = f->config->tie_word_embeddings;
    return &f->base_layout->units[is_tied && unit > head ? head : unit];
}

/* Of several ranks: where the whole gradients of the unit are until they are reduced. */
static float *whole_of(const bl_adapter_state *s, int64_t unit)
{
    const adapter_full *f = s->trained;

    if (unit >= f->config->n_layers) return f->whole;
    return f->whole + s->turn * (layer_bytes(f->base_layout) / FLOAT);
}

/* What was there has been reduced. */
static bl_status wait_for_whole(const bl_adapter_state *s, int64_t unit, bl_stream *stream)
{
    bool is_table = unit >= s->trained->config->n_layers;

    for (int i = 0; i < 2; i++)
        if (is_table || i == s->turn)
            BL_TRY(bl_timeline_wait(s->timeline, BL_LANE_LORA, "wait", unit, -1, stream,
                                    s->reduced[i]));
    return BL_OK;
}

/* Several ranks add to their rows on the communication stream, one on compute. The rows may still
 * be read there by the last update. */
static bl_status sink_open(void *user, int64_t unit, bl_stream *stream)
{
    bl_adapter_state *s = user;
    adapter_full *f = s->trained;

    if (!f->whole) return adapter_units_open_gradient(f->units, unit, stream, &f->rows);
    BL_TRY(bl_event_record(f->opened, stream));
    BL_TRY(bl_stream_wait(s->communication, f->opened));
    return adapter_units_open_gradient(f->units, unit, s->communication, &f->rows);
}

static bl_status sink_close(void *user, int64_t unit, bl_stream *stream)
{
    bl_adapter_state *s = user;
    const adapter_full *f = s->trained;
    return adapter_units_close_gradient(f->units, unit, f->whole ? s->communication : stream);
}

static bl_status sink_begin(void *user, int64_t unit, bl_stream *stream, bl_weight_gradients *out)
{
    bl_adapter_state *s = user;
    const adapter_full *f = s->trained;
    const bl_base_unit *u = unit_of(f, unit);
    bool is_whole = f->whole != NULL;
    float *memory = is_whole ? whole_of(s, unit) : f->rows;

    *out = (bl_weight_gradients){.vectors = NULL};
    for (int m = 0; m < u->n_matrices; m++) {
        const bl_base_part *part = u->matrix[m].part;
        out->matrix[m] = memory + (is_whole ? part->slot_offset : part->shard_offset) / FLOAT;
    }
    if (unit <= f->config->n_layers)
        out->vectors = f->vector_grad + unit * bl_arch_layer_floats(f->config);
    if (!is_whole) return BL_OK;
    BL_TRY(wait_for_whole(s, unit, stream));
    return bl_stream_zero(stream, memory, u->slot_bytes);
}

/* In the order of ranks, and added to what earlier micro-batches have left. */
static bl_status reduce_part(bl_adapter_state *s, int64_t unit, const bl_base_part *part,
                             const float *whole)
{
    int64_t n = (int64_t)part->shard_bytes / FLOAT;

    bl_comm_set_label(s->world, "the gradients of layer", unit);
    BL_TRY(bl_comm_reduce_scatter_f32(s->world, s->communication, whole + part->slot_offset / FLOAT,
                                      s->partial, n));
    bl_comm_set_label(s->world, NULL, 0);
    return bl_accumulate(
        s->communication,
        &(bl_accumulate_args){.n = n,
                              .x = bl_tensor_f32(s->partial),
                              .y = bl_tensor_f32(s->trained->rows + part->shard_offset / FLOAT),
                              .without_workers = true});
}

static bl_status sink_end(void *user, int64_t unit, bl_stream *stream)
{
    bl_adapter_state *s = user;
    const adapter_full *f = s->trained;
    const bl_base_unit *u = unit_of(f, unit);
    int turn = s->turn, span;
    bool is_table = unit >= f->config->n_layers;

    if (!f->whole) return BL_OK;
    const float *whole = whole_of(s, unit);
    if (!is_table) s->turn ^= 1;
    BL_TRY(bl_event_record(s->written[turn], stream));
    BL_TRY(bl_stream_wait(s->communication, s->written[turn]));
    BL_TRY(bl_timeline_begin(s->timeline, BL_LANE_LORA, "gradients", unit, -1, s->communication,
                             &span));
    for (int m = 0; m < u->n_matrices; m++) BL_TRY(reduce_part(s, unit, u->matrix[m].part, whole));
    for (int i = 0; i < 2; i++)
        if (is_table || i == turn) BL_TRY(bl_event_record(s->reduced[i], s->communication));
    int64_t received = (int64_t)u->shard_bytes * (bl_comm_size(s->world) - 1);
    return bl_timeline_end(s->timeline, span, s->communication, received);
}

const bl_weight_sink *bl_adapter_full_sink(const bl_adapter_state *s)
{
    return s->trained ? &s->trained->sink : NULL;
}

/* ---- the step ---- */

bl_status adapter_full_join(bl_adapter_state *s)
{
    return adapter_units_join(s->trained->units, s->compute);
}

static bl_status sum_vectors(const bl_adapter_state *s)
{
    const adapter_full *f = s->trained;

    if (bl_comm_size(s->world) == 1) return BL_OK;
    bl_comm_set_label(s->world, "the gradients of norms and biases", -1);
    BL_TRY(bl_comm_all_reduce_f32(s->world, s->communication, f->vector_grad, f->n_vectors));
    bl_comm_set_label(s->world, NULL, 0);
    return BL_OK;
}

bl_status adapter_full_reduce(bl_adapter_state *s, double *sum)
{
    const adapter_full *f = s->trained;

    BL_TRY(sum_vectors(s));
    BL_TRY(adapter_units_sum_squares(f->units, s->communication, sum));
    if (bl_comm_rank(s->world) != 0) return BL_OK; /* alike on every rank */
    return bl_sum_squares(s->communication,
                          &(bl_sum_squares_args){f->n_vectors, f->vector_grad, sum});
}

/* As transformers' Trainer, which decays neither norms nor biases. */
static bl_status update_vectors(bl_adapter_state *s, bl_adamw_args args)
{
    const adapter_full *f = s->trained;

    args.weight_decay = 0;
    args.n = f->n_vectors;
    args.grad = f->vector_grad;
    args.w = f->vectors;
    args.m = bl_tensor_f32(f->vector_m);
    args.v = bl_tensor_f32(f->vector_v);
    BL_TRY(bl_adamw(s->compute, &args));
    return bl_stream_zero(s->compute, f->vector_grad, (size_t)f->bytes.vectors);
}

bl_status adapter_full_update(bl_adapter_state *s, const bl_adamw_args *args)
{
    BL_TRY(update_vectors(s, *args));
    return adapter_units_update(s->trained->units, args);
}

static bl_status update_unit(void *user, int64_t unit)
{
    bl_adapter_state *s = user;
    return adapter_units_update_unit(s->trained->units, unit);
}

bl_status bl_adapter_full_flush(bl_adapter_state *s)
{
    return s && s->trained ? adapter_units_flush(s->trained->units) : BL_OK;
}

const bl_weight_updates *bl_adapter_full_updates(const bl_adapter_state *s)
{
    return s && s->trained ? &s->trained->updates : NULL;
}

bl_status adapter_full_round(bl_adapter_state *s)
{
    return adapter_units_round(s->trained->units);
}

bl_status adapter_full_warm_up(bl_adapter_state *s, bl_adamw_args args)
{
    const adapter_full *f = s->trained;

    adapter_units_forget(f->units);
    BL_TRY(bl_stream_zero(s->compute, f->vector_grad, (size_t)f->bytes.vectors));
    if (!f->whole) return BL_OK;
    BL_TRY(bl_stream_zero(s->compute, f->whole, (size_t)f->bytes.whole));
    args.n = layer_bytes(f->base_layout) / FLOAT / 2; /* of two layers four parts */
    args.grad = f->whole;
    args.w = f->whole + args.n;
    args.m = bl_tensor_of(f->whole + 2 * args.n, f->bytes.units.dtype);
    args.v = bl_tensor_of(f->whole + 3 * args.n, f->bytes.units.dtype);
    return bl_adamw(s->compute, &args);
}

/* ---- create ---- */

static bl_status take(const bl_adapter_state *s, int64_t n_bytes, const char *what, float **out)
{
    return bl_device_alloc(s->device, BL_SPACE_DEVICE, (size_t)n_bytes, what, (void **)out);
}

static bl_status allocate(bl_adapter_state *s, const bl_optimizer_placement *placement)
{
    adapter_full *f = s->trained;
    adapter_units_options options = {.device = s->device,
                                     .weights = f->weights,
                                     .base = f->base,
                                     .compute = s->compute,
                                     .timeline = s->timeline,
                                     .is_tied = f->config->tie_word_embeddings,
                                     .rank = bl_comm_rank(s->world),
                                     .placement = *placement};

    BL_TRY(adapter_units_create(&options, &f->units));
    BL_TRY(bl_event_create(s->device, &f->opened));
    BL_TRY(take(s, f->bytes.vectors, "AdamW first moments", &f->vector_m));
    BL_TRY(take(s, f->bytes.vectors, "AdamW second moments", &f->vector_v));
    BL_TRY(take(s, f->bytes.vectors, "gradients", &f->vector_grad));
    if (f->bytes.whole > 0) {
        BL_TRY(take(s, f->bytes.whole, "a layer's gradients", &f->whole));
        BL_TRY(take(s, f->bytes.part, "reduced gradients", &s->partial));
    }
    for (int i = 0; i < 2; i++) {
        BL_TRY(bl_event_create(s->device, &s->written[i]));
        BL_TRY(bl_event_create(s->device, &s->reduced[i]));
    }
    return adapter_allocate_sums(s);
}

/* A part is a whole matrix: its gradient is one product. */
static bl_status check_parts(const bl_base_layout *layout)
{
    for (bl_base_walk at = {.layout = layout}; bl_base_next(&at);)
        if (at.matrix->n_parts != 1)
            return BL_FAIL(BL_EINTERNAL, "trained weights that are not contiguous");
    return BL_OK;
}

static bl_status measure(bl_adapter_state *s, const bl_pages *pages,
                         const bl_optimizer_placement *placement)
{
    adapter_full *f = s->trained;
    int64_t n_parts = bl_base_part_count(f->base_layout);
    bl_tier *tiers = calloc((size_t)n_parts, sizeof *tiers);

    if (!tiers) return BL_FAIL(BL_ENOMEM, "the state of all weights");
    for (int64_t i = 0; i < n_parts; i++) tiers[i] = bl_pages_spec(pages, i)->tier;
    bl_status st = bl_adapter_full_measure(f->config, f->base_layout, tiers, placement, &f->bytes);
    free(tiers);
    s->bytes = (bl_adapter_bytes){.staging = f->bytes.staging};
    return st;
}

bl_status bl_adapter_full_create(bl_model_weights *weights, bl_base *base,
                                 const bl_optimizer_placement *placement, bl_comm *world,
                                 bl_stream *compute, bl_stream *communication,
                                 bl_timeline *timeline, bl_adapter_state **out)
{
    const bl_model_config *config = &weights->model->config;

    *out = NULL;
    BL_TRY(check_parts(&weights->layout));
    bl_adapter_state *s = calloc(1, sizeof *s);
    adapter_full *f = calloc(1, sizeof *f);
    if (!s || !f) {
        free(s), free(f);
        return BL_FAIL(BL_ENOMEM, "the state of all weights");
    }
    *f = (adapter_full){.config = config,
                        .weights = weights,
                        .base_layout = &weights->layout,
                        .base = base,
                        .n_vectors = bl_arch_vector_floats(config),
                        .vectors = weights->vectors,
                        .sink = {s, sink_open, sink_begin, sink_end, sink_close},
                        .updates = {s, update_unit}};
    *s = (bl_adapter_state){.trained = f,
                            .device = weights->device,
                            .world = world,
                            .compute = compute,
                            .communication = communication,
                            .timeline = timeline,
                            .n_layers = config->n_layers};
    bl_status st = measure(s, weights->pages, placement);
    if (st == BL_OK) st = allocate(s, placement);
    if (st == BL_OK) st = adapter_full_round(s);
    if (st == BL_OK) st = bl_adapter_state_publish(s);
    if (st != BL_OK) {
        bl_adapter_state_destroy(s);
        return st;
    }
    *out = s;
    return BL_OK;
}

void adapter_full_free(bl_adapter_state *s)
{
    adapter_full *f = s->trained;
    float *const blocks[] = {f->vector_m, f->vector_v, f->vector_grad, f->whole};

    for (size_t i = 0; i < BL_COUNT(blocks); i++)
        bl_device_free(s->device, BL_SPACE_DEVICE, blocks[i]);
    adapter_units_destroy(f->units);
    bl_event_destroy(f->opened);
    free(f);
}
