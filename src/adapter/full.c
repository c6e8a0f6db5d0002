/* SPDX-License-Identifier: Apache-2.0 */
/* full.c -- the trainable state of a run that trains the model's weights: its memory, and the way
 * of a gradient from backward to the rank's rows. */
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

/* Of several ranks. */
static void measure_whole(const adapter_spans *spans, bl_adapter_full_bytes *n)
{
    const bl_base_layout *layout = spans->layout;

    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) {
        if (!adapter_spans_have(spans, &w)) continue;
        const bl_base_unit *unit = &layout->units[w.idx_unit];
        n->whole = bl_max_i64(n->whole, unit->whole_ring ? (int64_t)unit->slot_bytes
                                                         : 2 * layer_bytes(layout));
        n->part = bl_max_i64(n->part, (int64_t)w.part->shard_bytes);
    }
}

static void measure_vectors(const bl_model_config *config, const bl_trained_set *set,
                            bl_adapter_full_bytes *n)
{
    for (int64_t i = 0; i < set->n_ranges; i++) n->vector_moment += set->range[i].n * FLOAT;
    if (set->n_ranges > 0) n->vector_gradients = bl_arch_vector_floats(config) * FLOAT;
}

bl_status bl_adapter_full_measure(const bl_model_config *config, const bl_base_layout *layout,
                                  const bl_trained_set *set, const bl_tier *weights,
                                  const bl_optimizer_placement *placement,
                                  bl_adapter_full_bytes *out)
{
    bl_adapter_full_bytes n = {.staging = BL_STAGING_BYTES};
    adapter_spans spans;

    BL_TRY(adapter_spans_create(layout, set, 0, &spans));
    adapter_spans_level(&spans);
    measure_vectors(config, set, &n);
    if (layout->n_shards > 1) measure_whole(&spans, &n);
    bl_status st =
        adapter_units_measure(&spans, config->tie_word_embeddings, placement, weights, &n.units);
    adapter_spans_free(&spans);
    *out = n;
    return st;
}

static double embedding_rate(const bl_train_config *config)
{
    if (config->embedding_learning_rate == BL_OPTION_AUTO) return 1;
    return config->embedding_learning_rate / config->learning_rate;
}

bl_optimizer_placement bl_adapter_full_placement(const bl_train_config *config)
{
    static const bl_tier tiers[] = {[BL_OPTIMIZER_AUTO] = BL_TIER_DEVICE,
                                    [BL_OPTIMIZER_DEVICE] = BL_TIER_DEVICE,
                                    [BL_OPTIMIZER_HOST] = BL_TIER_HOST,
                                    [BL_OPTIMIZER_DISK] = BL_TIER_DISK};
    bl_device_kind kind = bl_train_config_device_kind(config);
    bl_tier tier = tiers[config->optimizer_tier];

    return (bl_optimizer_placement){
        .kind = kind,
        .moments = bl_train_config_moments(config),
        .seed = (uint64_t)config->seed,
        .embedding_rate = embedding_rate(config),
        .ratio = config->optimizer_ratio == BL_OPTION_AUTO ? 0 : config->optimizer_ratio,
        .tier = kind == BL_DEVICE_CPU && tier == BL_TIER_HOST ? BL_TIER_DEVICE : tier,
        .dir = config->offload_dir,
        .places_copy = config->offload_compute_copy == BL_COPY_OFFLOADED,
        .io_engine = config->io_engine};
}

/* ---- the sink ---- */

/* The unit of the base that has the weights whose gradients are those of `unit`. */
static int64_t unit_index(const adapter_full *f, int64_t unit)
{
    int64_t head = f->config->n_layers;
    return f->config->tie_word_embeddings && unit > head ? head : unit;
}

static const bl_base_unit *unit_of(const adapter_full *f, int64_t unit)
{
    return &f->base_layout->units[unit_index(f, unit)];
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

    if (!f->reduces) return adapter_units_open_gradient(f->units, unit, stream, &f->rows);
    BL_TRY(bl_event_record(f->opened, stream));
    BL_TRY(bl_stream_wait(s->communication, f->opened));
    return adapter_units_open_gradient(f->units, unit, s->communication, &f->rows);
}

static bl_status sink_close(void *user, int64_t unit, bl_stream *stream)
{
    bl_adapter_state *s = user;
    const adapter_full *f = s->trained;
    return adapter_units_close_gradient(f->units, unit, f->reduces ? s->communication : stream);
}

/* Of one rank: its rows are all. */
static void place_in_rows(const adapter_full *f, int64_t unit, bl_weight_gradients *out)
{
    int64_t base_unit = unit_index(f, unit);

    for (int64_t i = f->spans.first[base_unit]; i < f->spans.first[base_unit + 1]; i++) {
        const adapter_span *span = &f->spans.span[i];
        out->matrix[span->at.idx_matrix][span->idx] = f->rows + span->offset[ADAPTER_F32] / FLOAT;
    }
}

/* Of several: gradients of frozen rows of a matrix stay zero. */
static bl_status place_in_whole(bl_adapter_state *s, int64_t unit, bl_stream *stream,
                                bl_weight_gradients *out)
{
    const adapter_full *f = s->trained;
    const bl_base_unit *u = unit_of(f, unit);
    float *whole = whole_of(s, unit);

    if (!bl_trained_has_matrices(out->trained)) return BL_OK;
    BL_TRY(wait_for_whole(s, unit, stream));
    for (int m = 0; m < u->n_matrices; m++) {
        const bl_trained_spans *spans = &out->trained->matrix[m];
        const bl_base_part *part = u->matrix[m].part;
        float *matrix = whole + part->slot_offset / FLOAT;
        if (spans->n == 0) continue;
        BL_TRY(
            bl_stream_zero(stream, matrix, (size_t)f->base_layout->n_shards * part->shard_bytes));
        for (int i = 0; i < spans->n; i++)
            out->matrix[m][i] = matrix + spans->at[i].begin * part->row_bytes / FLOAT;
    }
    return BL_OK;
}

static bl_status sink_begin(void *user, int64_t unit, bl_stream *stream, bl_weight_gradients *out)
{
    bl_adapter_state *s = user;
    const adapter_full *f = s->trained;

    *out = (bl_weight_gradients){.trained = &f->set->unit[unit]};
    if (unit <= f->config->n_layers && f->vector_grad)
        out->vectors = f->vector_grad + unit * bl_arch_layer_floats(f->config);
    if (f->reduces) return place_in_whole(s, unit, stream, out);
    place_in_rows(f, unit, out);
    return BL_OK;
}

/* Sums over the ranks, and adds the result to the sum of earlier micro-batches. */
static bl_status reduce_part(bl_adapter_state *s, int64_t unit, int matrix, const float *whole)
{
    const adapter_full *f = s->trained;
    const bl_base_part *part = unit_of(f, unit)->matrix[matrix].part;
    int64_t base_unit = unit_index(f, unit);

    bl_comm_set_label(s->world, "the gradients of layer", unit);
    BL_TRY(bl_comm_reduce_scatter_f32(s->world, s->communication, whole + part->slot_offset / FLOAT,
                                      s->partial, (int64_t)part->shard_bytes / FLOAT));
    bl_comm_set_label(s->world, NULL, 0);
    for (int64_t i = f->spans.first[base_unit]; i < f->spans.first[base_unit + 1]; i++) {
        const adapter_span *span = &f->spans.span[i];
        if (span->at.idx_matrix != matrix) continue;
        BL_TRY(bl_accumulate(
            s->communication,
            &(bl_accumulate_args){.n = span->n,
                                  .x = bl_tensor_f32(s->partial + span->first),
                                  .y = bl_tensor_f32(f->rows + span->offset[ADAPTER_F32] / FLOAT),
                                  .without_workers = true}));
    }
    return BL_OK;
}

static bl_status sink_end(void *user, int64_t unit, bl_stream *stream)
{
    bl_adapter_state *s = user;
    const adapter_full *f = s->trained;
    const bl_base_unit *u = unit_of(f, unit);
    const bl_trained_unit *trained = &f->set->unit[unit];
    int turn = s->turn, span;
    int64_t received = 0;
    bool is_table = unit >= f->config->n_layers;

    if (!f->reduces || !bl_trained_has_matrices(trained)) return BL_OK;
    const float *whole = whole_of(s, unit);
    if (!is_table) s->turn ^= 1;
    BL_TRY(bl_event_record(s->written[turn], stream));
    BL_TRY(bl_stream_wait(s->communication, s->written[turn]));
    BL_TRY(bl_timeline_begin(s->timeline, BL_LANE_LORA, "gradients", unit, -1, s->communication,
                             &span));
    for (int m = 0; m < u->n_matrices; m++) {
        if (trained->matrix[m].n == 0) continue;
        BL_TRY(reduce_part(s, unit, m, whole));
        received += bl_comm_sum_received(s->world, (int64_t)u->matrix[m].part->shard_bytes);
    }
    for (int i = 0; i < 2; i++)
        if (is_table || i == turn) BL_TRY(bl_event_record(s->reduced[i], s->communication));
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

    if (!f->reduces || !f->vector_grad) return BL_OK;
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
    if (bl_comm_rank(s->world) != 0 || !f->vector_grad) return BL_OK; /* alike on every rank */
    return bl_sum_squares(s->communication,
                          &(bl_sum_squares_args){f->n_vectors, f->vector_grad, sum});
}

/* As transformers' Trainer, which decays neither norms nor biases. */
static bl_status update_vectors(bl_adapter_state *s, bl_adamw_args args)
{
    const adapter_full *f = s->trained;

    if (!f->vector_grad) return BL_OK;
    BL_TRY(adapter_units_wait_for_file(f->units, -1, BL_LANE_DISK, s->compute));
    args.weight_decay = 0;
    float *m = f->vector_m, *v = f->vector_v;
    for (int64_t i = 0; i < f->set->n_ranges; i++, m += args.n, v += args.n) {
        const bl_trained_span *range = &f->set->range[i];
        args.n = range->n;
        args.grad = f->vector_grad + range->begin;
        args.w = f->vectors + range->begin;
        args.m = bl_tensor_f32(m);
        args.v = bl_tensor_f32(v);
        BL_TRY(bl_adamw(s->compute, &args));
    }
    return bl_stream_zero(s->compute, f->vector_grad, (size_t)f->bytes.vector_gradients);
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
    if (f->vector_grad)
        BL_TRY(bl_stream_zero(s->compute, f->vector_grad, (size_t)f->bytes.vector_gradients));
    if (!f->whole) return BL_OK;
    BL_TRY(bl_stream_zero(s->compute, f->whole, (size_t)f->bytes.whole));
    args.n = f->bytes.whole / FLOAT / 4;
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
                                     .spans = &f->spans,
                                     .base = f->base,
                                     .compute = s->compute,
                                     .timeline = s->timeline,
                                     .is_tied = f->config->tie_word_embeddings,
                                     .rank = bl_comm_rank(s->world),
                                     .placement = *placement};

    BL_TRY(adapter_units_create(&options, &f->units));
    BL_TRY(bl_event_create(s->device, &f->opened));
    if (f->bytes.vector_moment > 0) {
        BL_TRY(take(s, f->bytes.vector_moment, "AdamW first moments", &f->vector_m));
        BL_TRY(take(s, f->bytes.vector_moment, "AdamW second moments", &f->vector_v));
        BL_TRY(take(s, f->bytes.vector_gradients, "gradients", &f->vector_grad));
    }
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
    bl_status st =
        bl_adapter_full_measure(f->config, f->base_layout, f->set, tiers, placement, &f->bytes);
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
                        .set = &weights->model->trained,
                        .reduces = bl_comm_size(world) > 1,
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
    bl_status st = adapter_spans_create(f->base_layout, f->set, bl_comm_rank(world), &f->spans);
    if (st == BL_OK) adapter_spans_level(&f->spans);
    if (st == BL_OK) st = measure(s, weights->pages, placement);
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
    bl_adapter_full_drop_shard(s);
    adapter_units_destroy(f->units);
    adapter_spans_free(&f->spans);
    bl_event_destroy(f->opened);
    free(f);
}
