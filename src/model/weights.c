/* SPDX-License-Identifier: Apache-2.0 */
/* weights.c -- data of a rank: its shard of the frozen base, read row range by row range. */
#include "model/weights.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "arch/rope.h"
#include "base/sizes.h"
#include "base/xxh3.h"
#include "device/staging.h"
#include "linear/base_paged.h"
#include "model/rows.h"
#include "offload/transfer.h"
#include "ops/elementwise.h"

static void add_segment(bl_weight *w, bl_format format, int64_t rows, int64_t cols)
{
    w->segment[w->n_segments++] = (bl_weight_segment){.format = format, .rows = rows};
    w->rows += rows;
    w->cols = cols;
}

bool bl_model_head_is_table(const bl_model_config *config, bl_device_kind kind)
{
    return config->tie_word_embeddings && kind == BL_DEVICE_CPU;
}

int64_t bl_model_table_positions(bl_device_kind kind, int64_t n_positions)
{
    enum { TILE = 128 }; /* more than the padding ever has */
    return kind == BL_DEVICE_CPU ? n_positions : bl_max_i64(n_positions, TILE);
}

static void add_table(bl_base_unit *unit, const bl_model_config *config, bl_format format)
{
    unit->n_matrices = 1;
    unit->whole_ring = true;
    add_segment(&unit->matrix[0].weight, format, config->vocab_size, config->hidden_size);
}

/* A layer's matrices; those of routed experts are cut between its groups. */
static void add_layer(bl_base_layout *layout, const bl_model_config *config,
                      const bl_format *formats, int64_t layer)
{
    const bl_arch *arch = config->arch;
    int64_t group = bl_arch_expert_group(config), rows, cols;
    bl_base_unit *unit = &layout->units[layer], *groups = &layout->units[unit->first_group];

    unit->n_matrices = BL_LAYER_MATRICES;
    for (int p = 0; p < arch->n_projections; p++) {
        int m = (int)arch->projections[p].matrix;
        if (!bl_model_has(config, layer, p)) continue;
        bl_projection_shape(config, p, &rows, &cols);
        if (!bl_arch_is_routed(arch, p)) {
            add_segment(&unit->matrix[m].weight, formats[p], rows, cols);
            continue;
        }
        for (int64_t g = 0; g < unit->n_groups; g++) {
            int64_t n = bl_min_i64(group, config->n_experts - g * group);
            add_segment(&groups[g].matrix[m].weight, formats[p], rows / config->n_experts * n,
                        cols);
        }
    }
    for (int64_t g = 0; g < unit->n_groups; g++) {
        groups[g].n_matrices = BL_LAYER_MATRICES;
        groups[g].is_group = true;
        groups[g].of = layer;
        groups[g].group = g;
    }
}

/* The layers, n_tables of the vocabulary's rows behind them, and groups of experts. formats NULL:
 * all have the table's. */
static bl_status make_layout(const bl_model_config *config, const bl_format *formats, int n_tables,
                             bl_format table_format, int n_shards, bl_base_layout *out)
{
    int64_t group = bl_arch_expert_group(config),
            n_groups = group > 0 ? bl_ceil_div(config->n_experts, group) : 0,
            end = config->n_layers + n_tables;
    bl_format all[BL_MAX_PROJECTIONS];

    *out =
        (bl_base_layout){.n_shards = n_shards,
                         .n_units = end + bl_model_layers_of(config, BL_LAYER_EXPERTS) * n_groups};
    out->units = calloc((size_t)out->n_units, sizeof *out->units);
    if (!out->units)
        return BL_FAIL(BL_ENOMEM, "the layout of %lld layers", (long long)config->n_layers);
    for (int p = 0; p < BL_MAX_PROJECTIONS; p++) all[p] = table_format;
    for (int64_t l = 0; l < config->n_layers; l++) {
        out->units[l].first_group = end;
        out->units[l].n_groups = bl_model_kind(config, l) == BL_LAYER_EXPERTS ? n_groups : 0;
        end += out->units[l].n_groups;
        add_layer(out, config, formats ? formats + l * config->arch->n_projections : all, l);
    }
    for (int t = 0; t < n_tables; t++)
        add_table(&out->units[config->n_layers + t], config, table_format);
    bl_status st = bl_base_layout_finish(out);
    if (st != BL_OK) bl_base_layout_free(out);
    return st;
}

bl_status bl_model_layout(const bl_model_config *config, const bl_format *formats,
                          bl_dtype head_dtype, bl_device_kind kind, int n_shards,
                          bl_base_layout *out)
{
    bl_format format = BL_FORMAT_F32;

    bl_format_from_dtype(head_dtype, &format);
    return make_layout(config, formats, bl_model_head_is_table(config, kind) ? 0 : 1, format,
                       n_shards, out);
}

static bl_status make_trained_layout(const bl_model_config *config, bl_format format, int n_shards,
                                     bl_base_layout *out)
{
    return make_layout(config, NULL, config->tie_word_embeddings ? 1 : 2, format, n_shards, out);
}

bl_status bl_model_layout_trained(const bl_model_config *config, int n_shards, bl_base_layout *out)
{
    return make_trained_layout(config, BL_FORMAT_F32, n_shards, out);
}

bl_status bl_model_layout_copy(const bl_model_config *config, int n_shards, bl_base_layout *out)
{
    return make_trained_layout(config, BL_FORMAT_BF16, n_shards, out);
}

bl_status bl_model_round_rows(const bl_model_weights *w, const bl_base_walk *at, int64_t first,
                              int64_t n, const float *rows, bl_stream *stream)
{
    if (!w->copy) return BL_OK;
    bl_tensor copy = bl_tensor_of(bl_pages_memory(w->copy, at->index), BL_BF16);
    return bl_cast(stream, &(bl_cast_args){.n = n,
                                           .x = bl_tensor_f32((float *)(uintptr_t)rows),
                                           .y = bl_tensor_at(copy, first)});
}

int64_t bl_model_embedding_unit(const bl_model *model)
{
    return model->config.n_layers + (model->config.tie_word_embeddings ? 0 : 1);
}

void bl_base_layout_free(bl_base_layout *layout)
{
    free(layout->units);
    *layout = (bl_base_layout){0};
}

/* Those of a segment that every rank holds whole. */
static int64_t count_scales(const bl_weight *w, int segment)
{
    size_t code_bytes, n_scales = 0;

    if (bl_format_describe(w->segment[segment].format)->home != BL_SCALES_WHOLE) return 0;
    (void)bl_format_sizes(w->segment[segment].format, w->segment[segment].rows, w->cols,
                          &code_bytes, &n_scales);
    return (int64_t)n_scales;
}

/* The scales of all segments, one after the other. */
static void place_scales(bl_base_layout *layout, float *scales)
{
    for (int64_t u = 0; u < layout->n_units; u++)
        for (int m = 0; m < layout->units[u].n_matrices; m++) {
            bl_weight *w = &layout->units[u].matrix[m].weight;
            for (int s = 0; s < w->n_segments; s++) {
                int64_t n = count_scales(w, s);
                w->segment[s].scales = n > 0 ? scales : NULL;
                scales += n;
            }
        }
}

/* Pairs of tables: of keys, of queries where these have their own; of long documents each behind
 * those of the others. */
static int count_rope_tables(const bl_model_config *c)
{
    return (bl_model_rope_has_queries(c) ? 2 : 1) * (bl_model_rope_long_after(c) > 0 ? 2 : 1);
}

bl_model_whole_bytes bl_model_measure_whole(const bl_model_config *c, const bl_base_layout *layout,
                                            bl_device_kind kind, int64_t n_positions)
{
    enum { FLOAT = sizeof(float) };
    bl_model_whole_bytes n = {.vectors = bl_arch_vector_floats(c) * FLOAT,
                              .rope_tables = count_rope_tables(c) *
                                             bl_model_table_positions(kind, n_positions) *
                                             bl_model_rotary_dim(c) * FLOAT};
    for (int64_t u = 0; u < layout->n_units; u++)
        for (int m = 0; m < layout->units[u].n_matrices; m++) {
            const bl_weight *w = &layout->units[u].matrix[m].weight;
            for (int s = 0; s < w->n_segments; s++) n.scales += count_scales(w, s) * FLOAT;
        }
    return n;
}

const float *bl_model_layer_vectors(const bl_model_weights *w, int64_t layer)
{
    return w->vectors + bl_arch_vectors_before(&w->model->config, layer);
}

/* logits_scaling divides the final norm's weights: the head is linear. Trained weights stay as they
 * are; the norm's output is divided (pass_head.c). */
static void divide_logits(const bl_model_config *c, const bl_arch_tensor *vector, float *w)
{
    if (c->logits_scaling == 0 || vector->offset != bl_arch_vectors_before(c, c->n_layers)) return;
    for (int64_t i = 0; i < vector->shape[0]; i++) w[i] = (float)((double)w[i] / c->logits_scaling);
}

static bl_status load_vector(bl_model_weights *w, const bl_arch_tensor *vector, bl_staging *staging)
{
    const bl_stored_tensor *t = bl_hf_find(w->model->files, vector->name);
    float *out = staging->bytes; /* it has room for any vector */
    int64_t n = bl_arch_tensor_elements(vector);
    size_t n_bytes = (size_t)n * sizeof *out;

    BL_TRY(bl_stored_tensor_read_f32(t, out));
    for (int64_t i = 0; i < n; i++)
        if (!isfinite(out[i]))
            return BL_FAIL(BL_EINPUT, "%s: tensor %s: element %lld is not finite",
                           bl_safetensors_path(t->file), vector->name, (long long)i);
    w->checksum += XXH3_64bits_withSeed(out, n_bytes, bl_model_tensor_seed(vector->name));
    if (!w->model->is_trained) divide_logits(&w->model->config, vector, out);
    return bl_staging_upload(staging, w->vectors + vector->offset, out, n_bytes);
}

static bl_status load_vectors(bl_model_weights *w, bl_staging *staging)
{
    const bl_model_config *c = &w->model->config;
    int64_t n = bl_arch_tensor_count(c);

    for (int64_t i = 0; i < n; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(c, i);
        if (t.role == BL_ROLE_VECTOR) BL_TRY(load_vector(w, &t, staging));
    }
    return BL_OK;
}

/* One pair of tables at `tables`, cosines before sines: as many positions at a time as the staging
 * buffer has room for. */
static bl_status fill_rope_tables(const bl_model_weights *w, bool is_query, const double *inv_freq,
                                  bl_staging *staging, float *tables)
{
    const bl_model_config *c = &w->model->config;
    int64_t half = bl_model_rotary_dim(c) / 2,
            n_positions = bl_model_table_positions(w->dims.kind, w->model->n_positions),
            most = (int64_t)(staging->n_bytes / (2 * sizeof(float))) / half;
    float *cosines = staging->bytes, *sines = cosines + most * half;

    for (int64_t p = 0, n; p < n_positions; p += n) {
        n = bl_min_i64(most, n_positions - p);
        size_t n_bytes = (size_t)(n * half) * sizeof(float);
        if (!bl_transfer_is_simulated(w->device)) /* a plan fills one per run: the copies alone */
            bl_model_rope_fill(c, inv_freq, is_query, p, n, cosines, sines);
        BL_TRY(bl_staging_upload(staging, tables + p * half, cosines, n_bytes));
        BL_TRY(bl_staging_upload(staging, tables + (n_positions + p) * half, sines, n_bytes));
    }
    return BL_OK;
}

static bl_status make_rope_tables(bl_model_weights *w, bl_staging *staging)
{
    const bl_model_config *c = &w->model->config;
    int64_t half = bl_model_rotary_dim(c) / 2,
            n_table = bl_model_table_positions(w->dims.kind, w->model->n_positions) * half,
            long_after = bl_model_rope_long_after(c);
    bl_block_rope *rope = &w->dims.rope;
    double *inv_freq = malloc((size_t)half * sizeof *inv_freq);
    bl_status st = inv_freq ? BL_OK : BL_FAIL(BL_ENOMEM, "RoPE frequencies");

    *rope = (bl_block_rope){.cos_table = w->rope_tables,
                            .sin_table = w->rope_tables + n_table,
                            .long_after = long_after,
                            .long_offset = 2 * n_table};
    float *tables = w->rope_tables;
    for (int is_query = 0; is_query <= bl_model_rope_has_queries(c); is_query++) {
        if (is_query) rope->query_cos_table = tables, rope->query_sin_table = tables + n_table;
        for (int is_long = 0; st == BL_OK && is_long <= (long_after > 0); is_long++) {
            bl_model_rope_inv_freq(c, is_long, inv_freq);
            st = fill_rope_tables(w, is_query, inv_freq, staging, tables);
            tables += 2 * n_table;
        }
    }
    free(inv_freq);
    return st;
}

static bl_status allocate(bl_model_weights *w)
{
    bl_model_whole_bytes n =
        bl_model_measure_whole(&w->model->config, &w->layout, w->dims.kind, w->model->n_positions);

    w->n_scales = n.scales / (int64_t)sizeof(float);
    BL_TRY(bl_device_alloc(w->device, BL_SPACE_DEVICE, (size_t)n.scales, "scales",
                           (void **)&w->scales));
    BL_TRY(bl_device_alloc(w->device, BL_SPACE_DEVICE, (size_t)n.vectors, "norms",
                           (void **)&w->vectors));
    BL_TRY(bl_device_alloc(w->device, BL_SPACE_DEVICE, (size_t)n.rope_tables, "RoPE tables",
                           (void **)&w->rope_tables));
    place_scales(&w->layout, w->scales);
    return BL_OK;
}

/* What the ranks have read of the base, together; then what each reads whole. */
static bl_status sum_checksums(bl_model_weights *w, bl_comm *shard_group, bl_stream *stream)
{
    bl_twin *sum;

    BL_TRY(bl_twin_create(w->device, sizeof w->checksum, "a checksum", &sum));
    memcpy(sum->host, &w->checksum, sizeof w->checksum);
    bl_status st = bl_twin_upload(sum, stream, 0, sizeof w->checksum);
    if (st == BL_OK) st = bl_comm_all_reduce_i64(shard_group, stream, sum->memory, 1);
    if (st == BL_OK) st = bl_twin_download(sum, stream, 0, sizeof w->checksum);
    bl_status ran =
        bl_stream_synchronize(stream); /* also after a failure: the twin is about to go */
    if (st == BL_OK) st = ran;
    if (st == BL_OK) memcpy(&w->checksum, sum->host, sizeof w->checksum);
    w->checksum += w->model->embedding_checksum;
    bl_twin_destroy(sum);
    return st;
}

/* Room for a vector, and for the tables' rows of one position. */
static size_t staging_bytes(const bl_model_config *c)
{
    int64_t most = bl_max_i64(c->hidden_size, c->head_dim);

    for (int k = 0; k < BL_LAYER_KINDS; k++)
        most = bl_max_i64(most, bl_arch_layer_floats(c, (bl_layer_kind)k));
    return (size_t)bl_max_i64(BL_STAGING_BYTES, most * (int64_t)sizeof(float));
}

/* A tied head is the embedding table. */
static void point_at_tied_head(bl_model_weights *w)
{
    const bl_model_config *c = &w->model->config;
    bl_format format = BL_FORMAT_F32;

    bl_format_from_dtype(w->model->embedding_dtype, &format);
    w->tied_head = (bl_weight){
        .rows = c->vocab_size,
        .cols = c->hidden_size,
        .n_segments = 1,
        .segment = {{.format = format, .codes = w->model->embedding, .rows = c->vocab_size}}};
}

static bl_status lay_out(const bl_model *model, bl_device_kind kind, int n_shards,
                         bl_base_layout *out)
{
    if (model->is_trained) return bl_model_layout_trained(&model->config, n_shards, out);
    return bl_model_layout(&model->config, model->formats, model->head_dtype, kind, n_shards, out);
}

static bl_status check_device(const bl_model_config *c, bl_device_kind kind)
{
    if (c->n_experts == 0 || kind == BL_DEVICE_CPU) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "%s: mixtures of experts run on CPUs only so far; use device cpu",
                   c->arch->title);
}

bl_status bl_model_weights_create(const bl_model *model, bl_device *device, int n_shards,
                                  bl_model_weights **out)
{
    const bl_model_config *c = &model->config;
    bl_staging *staging = NULL;
    bl_status st = BL_OK;

    *out = NULL;
    bl_model_weights *w = calloc(1, sizeof *w);
    if (!w) return BL_FAIL(BL_ENOMEM, "model weights");
    w->model = model;
    w->device = device;
    w->dims =
        bl_block_dims_of(c, bl_model_kind(c, 0), bl_device_get_kind(device), bl_device_act(device));
    BL_TRY_GOTO(st, done, check_device(c, w->dims.kind));
    BL_TRY_GOTO(st, done, lay_out(model, w->dims.kind, n_shards, &w->layout));
    BL_TRY_GOTO(st, done, allocate(w));
    BL_TRY_GOTO(st, done,
                bl_staging_create(device, staging_bytes(c), "staging of weights", &staging));
    BL_TRY_GOTO(st, done, make_rope_tables(w, staging));
    if (!model->is_trained && bl_model_head_is_table(c, w->dims.kind)) point_at_tied_head(w);
    *out = w;
    w = NULL;
done:
    bl_staging_destroy(staging);
    bl_model_weights_free(w);
    return st;
}

bl_status bl_model_weights_load(const bl_model *model, bl_device *device, bl_comm *shard_group,
                                bl_stream *stream, const bl_placement *placement,
                                bl_model_weights **out)
{
    bl_model_weights *w = NULL;
    bl_staging *staging = NULL;
    bl_status st = BL_OK;

    *out = NULL;
    BL_TRY_GOTO(st, done, bl_model_weights_create(model, device, bl_comm_size(shard_group), &w));
    BL_TRY_GOTO(
        st, done,
        bl_staging_create(device, staging_bytes(&model->config), "staging of weights", &staging));
    BL_TRY_GOTO(st, done, bl_model_load_base(w, shard_group, placement, staging));
    BL_TRY_GOTO(st, done, sum_checksums(w, shard_group, stream));
    BL_TRY_GOTO(st, done, load_vectors(w, staging));
    /* Each scale was written by exactly one rank of the group and is zero on the others. */
    BL_TRY_GOTO(st, done, bl_comm_all_reduce_f32(shard_group, stream, w->scales, w->n_scales));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(stream));
    *out = w;
    w = NULL;
done:
    bl_staging_destroy(staging);
    bl_model_weights_free(w);
    return st;
}

bl_status bl_model_weights_place(const bl_model *model, bl_device *device, bl_comm *shard_group,
                                 const bl_placement *placement, bl_model_weights **out)
{
    bl_model_weights *w;

    *out = NULL;
    BL_TRY(bl_model_weights_create(model, device, bl_comm_size(shard_group), &w));
    bl_status st = bl_model_place_base(w, bl_comm_rank(shard_group), placement);
    if (st == BL_OK)
        *out = w;
    else
        bl_model_weights_free(w);
    return st;
}

void bl_model_weights_free(bl_model_weights *w)
{
    if (!w) return;
    bl_pages_destroy(w->pages);
    bl_pages_destroy(w->copy);
    bl_device_free(w->device, BL_SPACE_DEVICE, w->scales);
    bl_device_free(w->device, BL_SPACE_DEVICE, w->vectors);
    bl_device_free(w->device, BL_SPACE_DEVICE, w->rope_tables);
    for (int t = 0; t < BL_MODEL_TABLES; t++)
        bl_device_free(w->device, BL_SPACE_DEVICE, w->tables[t]);
    bl_device_free(w->device, BL_SPACE_DEVICE, w->head_copy);
    bl_base_layout_free(&w->layout);
    bl_base_layout_free(&w->copy_layout);
    free(w);
}

bl_status bl_model_base_create(const bl_model_weights *w, const bl_model_base_options *o,
                               bl_base **out)
{
    bl_comm *comm = bl_comm_size(o->shard_group) > 1 ? o->shard_group : NULL;
    bl_pager_options options = {.device = w->device,
                                .comm = comm,
                                .copy = o->copy,
                                .gather = o->gather,
                                .ring_depth = o->ring_depth,
                                .queue_depth = o->queue_depth,
                                .io_engine = w->model->io_engine,
                                .verify_always = o->verify_always,
                                .timeline = o->timeline,
                                .hooks = o->hooks};
    bl_pages *pages = w->copy ? w->copy : w->pages;
    const bl_base_layout *layout = w->copy ? &w->copy_layout : &w->layout;

    if (bl_pages_files(pages))
        bl_io_files_warn_with(bl_pages_files(pages), w->model->io_files); /* and all ranks' files */
    return bl_base_create_paged(layout, pages, &options, out);
}
