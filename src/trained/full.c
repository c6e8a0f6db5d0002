/* SPDX-License-Identifier: Apache-2.0 */
/* full.c -- the trainable state of a run that trains the model's weights: its memory, and where
 * gradients of its rows, norms and biases are. */
#include "trained/full.h"

#include <stdlib.h>

#include "trained/internal.h"
#include "base/sizes.h"

enum { FLOAT = sizeof(float) };

/* A table's gradient takes the place of two layers'. */
static int64_t layer_bytes(const bl_base_layout *layout)
{
    return (int64_t)layout->units[0].slot_bytes;
}

/* Several ranks: the buffers of gradients.c. */
static void measure_whole(const trained_spans *spans, bl_trained_full_bytes *n)
{
    const bl_base_layout *layout = spans->layout;

    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) {
        if (!trained_spans_have(spans, &w)) continue;
        const bl_base_unit *unit = &layout->units[w.idx_unit];
        n->whole = bl_max_i64(n->whole, unit->whole_ring ? (int64_t)unit->slot_bytes
                                                         : 2 * layer_bytes(layout));
        n->part = bl_max_i64(n->part, (int64_t)w.part->shard_bytes);
    }
}

static void measure_vectors(const bl_model_config *config, const bl_trained_set *set,
                            bl_trained_full_bytes *n)
{
    for (int64_t i = 0; i < set->n_ranges; i++) n->vector_moment += set->range[i].n * FLOAT;
    if (set->n_ranges > 0) n->vector_gradients = bl_arch_vector_floats(config) * FLOAT;
}

bl_status bl_trained_full_measure(const bl_model_config *config, const bl_base_layout *layout,
                                  const bl_trained_set *set, const bl_tier *weights,
                                  const bl_optimizer_placement *placement,
                                  bl_trained_full_bytes *out)
{
    bl_trained_full_bytes n = {.staging = BL_STAGING_BYTES};
    trained_spans spans;

    BL_TRY(trained_spans_create(layout, set, 0, &spans));
    trained_spans_level(&spans);
    measure_vectors(config, set, &n);
    if (layout->n_shards > 1) measure_whole(&spans, &n);
    bl_status st =
        trained_units_measure(&spans, config->tie_word_embeddings, placement, weights, &n.units);
    trained_spans_free(&spans);
    *out = n;
    return st;
}

bl_optimizer_placement bl_trained_full_placement(const bl_train_config *config)
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
        .ratio = config->optimizer_ratio == BL_OPTION_AUTO ? 0 : config->optimizer_ratio,
        .tier = kind == BL_DEVICE_CPU && tier == BL_TIER_HOST ? BL_TIER_DEVICE : tier,
        .dir = config->offload_dir,
        .places_copy = config->offload_compute_copy == BL_COPY_OFFLOADED,
        .io_engine = config->io_engine};
}

/* ---- the sink ---- */

/* The unit of the base that has the weights whose gradients are those of `unit`. */
static int64_t unit_index(const trained_full *f, int64_t unit)
{
    int64_t head = f->config->n_layers;
    return f->config->tie_word_embeddings && unit > head ? head : unit;
}

static const bl_base_unit *unit_of(const trained_full *f, int64_t unit)
{
    return &f->base_layout->units[unit_index(f, unit)];
}

static bl_status open_gradients(bl_trained_state *s, int64_t unit, bl_stream *stream)
{
    return trained_units_open_gradient(s->trained->units, unit, stream, &s->rows);
}

static bl_status close_gradients(bl_trained_state *s, int64_t unit, bl_stream *stream)
{
    return trained_units_close_gradient(s->trained->units, unit, stream);
}

/* One rank: gradients are added to the rows themselves. */
static void place_in_rows(const bl_trained_state *s, int64_t unit, bl_weight_gradients *out)
{
    const trained_full *f = s->trained;
    int64_t base_unit = unit_index(f, unit);

    for (int64_t i = f->spans.first[base_unit]; i < f->spans.first[base_unit + 1]; i++) {
        const trained_span *span = &f->spans.span[i];
        out->matrix[span->at.idx_matrix][span->idx] = s->rows + span->offset[TRAINED_F32] / FLOAT;
    }
}

/* Several ranks: gradients of frozen rows of a matrix stay zero. */
static bl_status place_in_whole(const bl_trained_state *s, int64_t unit, bl_stream *stream,
                                float *whole, bl_weight_gradients *out)
{
    const trained_full *f = s->trained;
    const bl_base_unit *u = unit_of(f, unit);

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

static bl_status begin_gradients(bl_trained_state *s, int64_t unit, bl_stream *stream, float *whole,
                                 bl_unit_gradients *out)
{
    const trained_full *f = s->trained;

    if (whole) return place_in_whole(s, unit, stream, whole, &out->weights);
    if (!f->reduces) place_in_rows(s, unit, &out->weights);
    return BL_OK;
}

/* Several ranks: the trained matrices, with this rank's spans of each. */
static bl_status list_shares(bl_trained_state *s)
{
    const trained_full *f = s->trained;

    BL_TRY(trained_create_shares(s, f->config->n_layers + 2, 2 * f->spans.n));
    for (int64_t u = 0; u < s->n_shared; u++) {
        const bl_base_unit *unit = unit_of(f, u);
        int64_t base_unit = unit_index(f, u);
        for (int m = 0; m < unit->n_matrices; m++) {
            const bl_base_part *part = unit->matrix[m].part;
            if (f->set->unit[u].matrix[m].n == 0) continue;
            trained_add_share(s, u, (int64_t)part->slot_offset / FLOAT,
                              (int64_t)part->shard_bytes / FLOAT);
            for (int64_t i = f->spans.first[base_unit]; i < f->spans.first[base_unit + 1]; i++) {
                const trained_span *span = &f->spans.span[i];
                if (span->at.idx_matrix == m)
                    trained_add_piece(s, u, span->first, span->n,
                                      span->offset[TRAINED_F32] / FLOAT);
            }
        }
    }
    return BL_OK;
}

/* ---- the step ---- */

static bl_status update_unit(void *user, int64_t unit)
{
    bl_trained_state *s = user;
    return trained_units_update_unit(s->trained->units, unit);
}

bl_status bl_trained_full_flush(bl_trained_state *s)
{
    return s && s->trained ? trained_units_flush(s->trained->units) : BL_OK;
}

const bl_weight_updates *bl_trained_full_updates(const bl_trained_state *s)
{
    return s && s->trained ? &s->trained->updates : NULL;
}

/* ---- create ---- */

static bl_status allocate(bl_trained_state *s, const bl_optimizer_placement *placement)
{
    trained_full *f = s->trained;
    trained_units_options options = {.device = s->device,
                                     .weights = f->weights,
                                     .spans = &f->spans,
                                     .base = f->base,
                                     .compute = s->compute,
                                     .timeline = s->timeline,
                                     .is_tied = f->config->tie_word_embeddings,
                                     .rank = bl_comm_rank(s->world),
                                     .placement = *placement};

    BL_TRY(trained_units_create(&options, &f->units));
    BL_TRY(trained_replicated_create(
        &(trained_replicated_options){
            .weights = f->weights, .set = f->set, .label = "the gradients of norms and biases"},
        &s->replicated));
    if (f->reduces) BL_TRY(list_shares(s));
    BL_TRY(trained_create_sink(s, f->bytes.whole, layer_bytes(f->base_layout), f->bytes.part));
    s->sink.has_embedding = bl_trained_has_embedding(f->set);
    return trained_allocate_sums(s);
}

/* A part is a whole matrix: its gradient is one product. */
static bl_status check_parts(const bl_base_layout *layout)
{
    for (bl_base_walk at = {.layout = layout}; bl_base_next(&at);)
        if (at.matrix->n_parts != 1)
            return BL_FAIL(BL_EINTERNAL, "trained weights that are not contiguous");
    return BL_OK;
}

static bl_status measure(bl_trained_state *s, const bl_pages *pages,
                         const bl_optimizer_placement *placement)
{
    trained_full *f = s->trained;
    int64_t n_parts = bl_base_part_count(f->base_layout);
    bl_tier *tiers = calloc((size_t)n_parts, sizeof *tiers);

    if (!tiers) return BL_FAIL(BL_ENOMEM, "the state of all weights");
    for (int64_t i = 0; i < n_parts; i++) tiers[i] = bl_pages_spec(pages, i)->tier;
    bl_status st =
        bl_trained_full_measure(f->config, f->base_layout, f->set, tiers, placement, &f->bytes);
    free(tiers);
    s->bytes = (bl_adapter_bytes){.staging = f->bytes.staging};
    return st;
}

bl_status bl_trained_full_create(const bl_trained_context *context, bl_model_weights *weights,
                                 bl_base *base, const bl_optimizer_placement *placement,
                                 bl_trained_state **out)
{
    const bl_model_config *config = &weights->model->config;

    *out = NULL;
    BL_TRY(check_parts(&weights->layout));
    bl_trained_state *s = calloc(1, sizeof *s);
    trained_full *f = calloc(1, sizeof *f);
    if (!s || !f) {
        free(s), free(f);
        return BL_FAIL(BL_ENOMEM, "the state of all weights");
    }
    *f = (trained_full){.config = config,
                        .weights = weights,
                        .base_layout = &weights->layout,
                        .base = base,
                        .set = &weights->model->trained,
                        .reduces = bl_comm_size(context->world) > 1,
                        .updates = {s, update_unit}};
    *s = (bl_trained_state){.trained = f,
                            .n_layers = config->n_layers,
                            .open = open_gradients,
                            .begin = begin_gradients,
                            .close = close_gradients,
                            .label = "the gradients of layer"};
    trained_use_context(s, context);
    bl_status st = trained_spans_create(f->base_layout, f->set, bl_comm_rank(s->world), &f->spans);
    if (st == BL_OK) trained_spans_level(&f->spans);
    if (st == BL_OK) st = measure(s, weights->pages, placement);
    if (st == BL_OK) st = allocate(s, placement);
    if (st == BL_OK) st = trained_units_round(s->trained->units);
    if (st == BL_OK) st = bl_trained_state_publish(s);
    if (st != BL_OK) {
        bl_trained_state_destroy(s);
        return st;
    }
    *out = s;
    return BL_OK;
}

void trained_full_free(bl_trained_state *s)
{
    trained_full *f = s->trained;

    bl_trained_state_drop_shard(s);
    trained_units_destroy(f->units);
    trained_spans_free(&f->spans);
    free(f);
}
