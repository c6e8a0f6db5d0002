/* SPDX-License-Identifier: Apache-2.0 */
/* units.c -- the placement of each unit's arrays; the gradients of a visit; the step over all
 * units. */
#include <stdio.h>
#include <stdlib.h>

#include "adapter/units_paged_internal.h"
#include "base/sizes.h"
#include "linear/base_paged.h"
#include "ops/elementwise.h"

/* ---- sizes ---- */

/* Of a unit's arrays. A tied embedding has gradients alone. */
static void size_unit(const adapter_spans *spans, int64_t unit, bl_dtype moments, held_unit *out)
{
    int64_t n_units = spans->layout->n_units;
    const int64_t *n_bytes = spans->unit_bytes[bl_min_i64(unit, n_units - 1)];

    out->n_bytes[ADAPTER_GRAD] = n_bytes[ADAPTER_F32];
    out->n_bytes[ADAPTER_M] =
        unit < n_units ? n_bytes[moments == BL_F32 ? ADAPTER_F32 : ADAPTER_BF16] : 0;
    out->n_bytes[ADAPTER_V] = out->n_bytes[ADAPTER_M];
}

/* Spreads units over the tiers like the base's pages. */
static bl_status assign(const adapter_spans *spans, const bl_optimizer_placement *placement,
                        int64_t n_held, held_unit *units)
{
    const bl_base_layout *layout = spans->layout;
    size_t *n_bytes = calloc((size_t)layout->n_units, sizeof *n_bytes);
    bl_tier *tiers = calloc((size_t)layout->n_units, sizeof *tiers);
    bl_status st = n_bytes && tiers ? BL_OK : BL_FAIL(BL_ENOMEM, "the placement of the state");

    for (int64_t u = 0; st == BL_OK && u < layout->n_units; u++)
        n_bytes[u] = (size_t)spans->unit_bytes[u][ADAPTER_F32];
    if (st == BL_OK)
        bl_tier_spread(n_bytes, layout->n_units, placement->ratio, placement->tier, tiers);
    for (int64_t u = 0; st == BL_OK && u < n_held; u++) {
        int64_t of = bl_min_i64(u, layout->n_units - 1); /* a tied head is the last */
        units[u].tier = n_bytes[of] > 0 ? tiers[of] : BL_TIER_DEVICE;
    }
    free(tiers);
    free(n_bytes);
    return st;
}

/* Behind the units placed before it: in the file, or in the memory of each array. */
static void place_unit(held_unit *unit, bl_adapter_units_bytes *n)
{
    int64_t moment = unit->n_bytes[ADAPTER_M], gradients = unit->n_bytes[ADAPTER_GRAD];

    if (unit->tier == BL_TIER_DISK) {
        unit->offset[ADAPTER_M] = n->disk;
        unit->offset[ADAPTER_V] = n->disk + moment;
        unit->offset[ADAPTER_GRAD] = n->disk + 2 * moment;
        n->disk += 2 * moment + gradients;
        return;
    }
    bool is_on_host = unit->tier == BL_TIER_HOST;
    int64_t *moments = is_on_host ? &n->host_moments : &n->moments,
            *all_gradients = is_on_host ? &n->host_gradients : &n->gradients;
    unit->offset[ADAPTER_M] = unit->offset[ADAPTER_V] = *moments / 2;
    unit->offset[ADAPTER_GRAD] = *all_gradients;
    *moments += 2 * moment;
    *all_gradients += gradients;
}

static int64_t piece_bytes(bl_dtype moments, adapter_array array)
{
    bool is_moment = array == ADAPTER_M || array == ADAPTER_V;
    return UNITS_PIECE_ELEMENTS * (is_moment ? (int64_t)bl_dtype_bytes(moments) : UNITS_FLOAT);
}

static int64_t slot_bytes(bl_dtype moments)
{
    int64_t n_bytes = 0;
    for (int i = 0; i < ADAPTER_N_ARRAYS; i++) n_bytes += piece_bytes(moments, (adapter_array)i);
    return n_bytes;
}

/* Units with spans on this rank, whose moments, gradients or weights are apart. */
static void find_paged(bool is_gpu, const adapter_spans *spans, const bl_tier *weight_tiers,
                       held_unit *units)
{
    for (int64_t i = 0; i < spans->n; i++) {
        held_unit *u = &units[spans->span[i].at.idx_unit];
        u->is_paged |= adapter_units_is_apart(is_gpu, u->tier) ||
                       adapter_units_is_apart(is_gpu, weight_tiers[spans->span[i].at.index]);
    }
}

/* units: receives sizes and placement; [n_units + is_tied]. */
static bl_status measure_units(const adapter_spans *spans, bool is_tied,
                               const bl_optimizer_placement *placement, const bl_tier *weight_tiers,
                               held_unit *units, bl_adapter_units_bytes *out)
{
    const bl_base_layout *layout = spans->layout;
    int64_t n_held = layout->n_units + is_tied, table_bytes;
    bl_adapter_units_bytes n = {.dtype = placement->moments};
    bool is_paged = false, has_weights = false, is_gpu = placement->kind == BL_DEVICE_CUDA;

    BL_TRY(assign(spans, placement, n_held, units));
    find_paged(is_gpu, spans, weight_tiers, units);
    for (bl_base_walk at = {.layout = layout}; bl_base_next(&at);) {
        has_weights |= weight_tiers[at.index] == BL_TIER_DISK;
        is_paged |= adapter_units_is_apart(is_gpu, weight_tiers[at.index]); /* rounding */
    }
    for (int64_t u = 0; u < n_held; u++) {
        is_paged |= adapter_units_is_apart(is_gpu, units[u].tier);
        size_unit(spans, u, placement->moments, &units[u]);
        place_unit(&units[u], &n);
    }
    int64_t frames = adapter_units_frames_bytes(layout, n_held, units, &table_bytes);
    if (is_gpu) n.device_frames = frames;
    if (!is_gpu || n.disk > 0) n.host_frames = frames;
    if (is_paged) n.pieces = UNITS_SLOTS * slot_bytes(placement->moments);
    bool has_copy = has_weights && placement->places_copy; /* on disk */
    if (is_paged && (is_gpu || has_copy)) n.pieces += UNITS_SLOTS * (int64_t)UNITS_ROUNDED_BYTES;
    int n_files = (n.disk > 0) + has_weights;
    n.pieces += (n_files + has_copy) * UNITS_QUEUE_DEPTH * (int64_t)UNITS_REQUEST_BYTES;
    n.behind = BL_STAGING_BYTES + n_files * UNITS_BEHIND_DEPTH * (int64_t)UNITS_REQUEST_BYTES;
    if (n_files > 0) n.behind += UNITS_PIECE_ELEMENTS * (int64_t)UNITS_FLOAT;
    *out = n;
    return BL_OK;
}

bl_status adapter_units_measure(const adapter_spans *spans, bool is_tied,
                                const bl_optimizer_placement *placement, const bl_tier *weights,
                                bl_adapter_units_bytes *out)
{
    held_unit *units = calloc((size_t)spans->layout->n_units + 1, sizeof *units);

    if (!units) return BL_FAIL(BL_ENOMEM, "the placement of the state");
    bl_status st = measure_units(spans, is_tied, placement, weights, units, out);
    free(units);
    return st;
}

/* ---- create ---- */

/* One pinned block, near the rank's GPU. */
static bl_status allocate_host(adapter_units *units, const bl_adapter_units_bytes *n)
{
    const size_t n_bytes[ADAPTER_N_ARRAYS] = {[ADAPTER_M] = (size_t)n->host_moments / 2,
                                              [ADAPTER_V] = (size_t)n->host_moments / 2,
                                              [ADAPTER_GRAD] = (size_t)n->host_gradients};
    char what[64];
    bl_arena_options options = {
        .device = units->options.device, .what = what, .node = -1, .pin = true};

    snprintf(what, sizeof what, "optimizer state of rank %d", units->options.rank);
    for (int i = 0; i < ADAPTER_N_ARRAYS; i++)
        options.size_bytes += bl_arena_piece_bytes(n_bytes[i]);
    BL_TRY(bl_arena_create(&options, &units->arena));
    for (int i = 0; i < ADAPTER_N_ARRAYS; i++)
        if (n_bytes[i] > 0)
            units->memory[BL_TIER_HOST][i] = bl_arena_take(units->arena, n_bytes[i]);
    return BL_OK;
}

static bl_status allocate_memory(adapter_units *units, const bl_adapter_units_bytes *n)
{
    static const char *const names[ADAPTER_N_ARRAYS] = {"AdamW first moments",
                                                        "AdamW second moments", NULL, "gradients"};
    bl_device *device = units->options.device;

    for (int i = 0; i < ADAPTER_N_ARRAYS; i++) {
        int64_t n_bytes = i == ADAPTER_GRAD ? n->gradients : n->moments / 2;
        if (i == ADAPTER_W || n_bytes == 0) continue;
        BL_TRY(bl_device_alloc(device, BL_SPACE_DEVICE, (size_t)n_bytes, names[i],
                               (void **)&units->memory[BL_TIER_DEVICE][i]));
    }
    if (n->host_gradients > 0) BL_TRY(allocate_host(units, n));
    BL_TRY(bl_event_create(device, &units->updated));
    return bl_device_alloc(device, BL_SPACE_DEVICE, (size_t)units->n_units * sizeof(double),
                           "squares of gradients", (void **)&units->squares);
}

/* Between host and device. */
static bl_status create_copies(adapter_units *units)
{
    bl_device *device = units->options.device;

    BL_TRY(bl_stream_create_urgent(device, "gradients out", &units->out));
    BL_TRY(bl_stream_create_urgent(device, "gradients in", &units->in));
    BL_TRY(bl_stream_create_urgent(device, "weights in", &units->upload));
    BL_TRY(bl_stream_create_urgent(device, "state out", &units->fetch));
    BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, sizeof *units->grad_scale, "the clipping scale",
                           (void **)&units->grad_scale));
    for (int i = 0; i < UNITS_SLOTS; i++) BL_TRY(bl_event_create(device, &units->slot[i].copied));
    return BL_OK;
}

/* Whether updates write rows of the bf16 copy to disk. */
static bool writes_copy(const adapter_units *units)
{
    const bl_model_weights *weights = units->options.weights;
    return weights->copy && bl_pages_files(weights->copy);
}

/* Memory of rounded pieces, used where the host cannot write the copy itself. */
static bl_status create_rounded(adapter_units *units)
{
    BL_TRY(bl_device_alloc(units->options.device, BL_SPACE_HOST,
                           (size_t)UNITS_SLOTS * UNITS_ROUNDED_BYTES, "rounded pieces of weights",
                           (void **)&units->rounded));
    for (int i = 0; i < UNITS_SLOTS; i++)
        units->slot[i].rounded = units->rounded + (size_t)i * UNITS_ROUNDED_BYTES;
    return BL_OK;
}

static bl_status create_slots(adapter_units *units)
{
    bl_dtype moments = units->options.placement.moments;
    char *memory;

    BL_TRY(bl_device_alloc(units->options.device, BL_SPACE_HOST,
                           (size_t)(UNITS_SLOTS * slot_bytes(moments)), "pieces of the state",
                           (void **)&units->slots));
    memory = units->slots;
    for (int s = 0; s < UNITS_SLOTS; s++)
        for (int i = 0; i < ADAPTER_N_ARRAYS; i++) {
            units->slot[s].memory[i] = memory;
            memory += piece_bytes(moments, (adapter_array)i);
        }
    if (units->is_gpu || writes_copy(units)) BL_TRY(create_rounded(units));
    return units->is_gpu ? create_copies(units) : BL_OK;
}

bl_status adapter_units_create_reader(const adapter_units *units, bl_io_files *files,
                                      int queue_depth, bl_reader **out)
{
    const bl_optimizer_placement *placement = &units->options.placement;
    bl_reader_options options = {.engine = placement->io_engine,
                                 .queue_depth = queue_depth,
                                 .chunk_bytes = UNITS_REQUEST_BYTES};

    if (placement->hooks) {
        options.hook = placement->hooks->io;
        options.hook_arg = placement->hooks->io_user;
    }
    return bl_reader_create(&options, files, out);
}

static bl_status create_paging(adapter_units *units, const bl_adapter_units_bytes *n)
{
    const adapter_units_options *o = &units->options;
    char what[64];

    BL_TRY(bl_stream_create_host(o->device, "state", &units->disk));
    BL_TRY(create_slots(units));
    if (n->disk > 0) {
        snprintf(what, sizeof what, "optimizer state of rank %d", o->rank);
        BL_TRY(bl_scratch_open(o->placement.dir, what, n->disk, &units->files));
        BL_TRY(adapter_units_create_reader(units, units->files, UNITS_QUEUE_DEPTH, &units->reader));
    }
    if (n->device_frames + n->host_frames > 0) BL_TRY(adapter_units_create_frames(units, n));
    if (bl_pages_files(o->weights->pages))
        BL_TRY(adapter_units_create_reader(units, bl_pages_files(o->weights->pages),
                                           UNITS_QUEUE_DEPTH, &units->weights_reader));
    if (writes_copy(units))
        BL_TRY(adapter_units_create_reader(units, bl_pages_files(o->weights->copy),
                                           UNITS_QUEUE_DEPTH, &units->copy_reader));
    return adapter_units_list_pieces(units);
}

static bl_status create(adapter_units *units)
{
    int64_t n_parts = bl_base_part_count(units->layout);
    bl_tier *tiers = calloc((size_t)n_parts, sizeof *tiers);
    bl_adapter_units_bytes n;

    units->unit = calloc((size_t)units->n_held, sizeof *units->unit);
    if (!tiers || !units->unit) {
        free(tiers);
        return BL_FAIL(BL_ENOMEM, "the optimizer's state");
    }
    for (int64_t i = 0; i < n_parts; i++)
        tiers[i] = bl_pages_spec(units->options.weights->pages, i)->tier;
    bl_status st = measure_units(units->spans, units->options.is_tied, &units->options.placement,
                                 tiers, units->unit, &n);
    free(tiers);
    if (st == BL_OK) st = allocate_memory(units, &n);
    if (st == BL_OK && n.pieces > 0) st = create_paging(units, &n);
    return st == BL_OK ? adapter_units_create_behind(units, &n) : st;
}

bl_status adapter_units_create(const adapter_units_options *options, adapter_units **out)
{
    adapter_units *units = calloc(1, sizeof *units);

    *out = NULL;
    if (!units) return BL_FAIL(BL_ENOMEM, "the optimizer's state");
    *units = (adapter_units){.options = *options,
                             .is_gpu = options->placement.kind == BL_DEVICE_CUDA,
                             .layout = &options->weights->layout,
                             .spans = options->spans,
                             .n_units = options->weights->layout.n_units,
                             .n_held = options->weights->layout.n_units + options->is_tied};
    bl_status st = create(units);
    if (st != BL_OK) {
        adapter_units_destroy(units);
        return st;
    }
    *out = units;
    return BL_OK;
}

void adapter_units_destroy(adapter_units *units)
{
    if (!units) return;
    bl_device *device = units->options.device;
    if (units->disk) (void)bl_stream_synchronize(units->disk);
    adapter_units_destroy_behind(units);
    bl_stream *const streams[] = {units->disk, units->in, units->out, units->upload, units->fetch};
    for (size_t i = 0; i < BL_COUNT(streams); i++) bl_stream_destroy(streams[i]);
    bl_reader_destroy(units->reader);
    bl_reader_destroy(units->weights_reader);
    bl_reader_destroy(units->copy_reader);
    bl_io_files_close(units->files);
    adapter_units_destroy_frames(units);
    for (int i = 0; i < UNITS_SLOTS; i++) bl_event_destroy(units->slot[i].copied);
    bl_event_destroy(units->updated);
    for (int i = 0; i < ADAPTER_N_ARRAYS; i++)
        bl_device_free(device, BL_SPACE_DEVICE, units->memory[BL_TIER_DEVICE][i]);
    bl_arena_destroy(units->arena);
    bl_device_free(device, BL_SPACE_DEVICE, units->squares);
    bl_device_free(device, BL_SPACE_HOST, units->slots);
    bl_device_free(device, BL_SPACE_HOST, units->rounded);
    bl_device_free(device, BL_SPACE_HOST, units->grad_scale);
    free(units->piece);
    free(units->unit);
    free(units);
}

/* ---- the gradients of a visit ---- */

static float *gradients_in_memory(const adapter_units *units, int64_t unit)
{
    return (float *)(units->memory[BL_TIER_DEVICE][ADAPTER_GRAD] +
                     units->unit[unit].offset[ADAPTER_GRAD]);
}

static bl_status open_unit(adapter_units *units, int64_t unit, bl_stream *stream, float **rows)
{
    held_unit *u = &units->unit[unit];

    *rows = NULL;
    if (u->n_bytes[ADAPTER_GRAD] == 0) return BL_OK;
    if (u->state == UNIT_WAITING)
        return BL_FAIL(BL_EINTERNAL, "gradients of unit %lld, which waits for its update",
                       (long long)unit);
    if (u->tier != BL_TIER_DEVICE) {
        BL_TRY(adapter_units_open_frame(units, unit, stream, rows));
    } else {
        *rows = gradients_in_memory(units, unit);
        if (u->state == UNIT_CLEAN)
            BL_TRY(bl_stream_zero(stream, *rows, (size_t)u->n_bytes[ADAPTER_GRAD]));
    }
    u->state = UNIT_SUMMED;
    return BL_OK;
}

bl_status adapter_units_open_gradient(adapter_units *units, int64_t unit, bl_stream *stream,
                                      float **rows)
{
    BL_TRY(open_unit(units, unit, stream, rows));
    return unit < units->n_units ? adapter_units_prefetch_next(units, unit) : BL_OK;
}

static bl_status sum_squares(adapter_units *units, int64_t unit, const float *rows,
                             bl_stream *stream)
{
    BL_TRY(bl_stream_zero(stream, &units->squares[unit], sizeof(double)));
    return bl_sum_squares(
        stream, &(bl_sum_squares_args){units->unit[unit].n_bytes[ADAPTER_GRAD] / UNITS_FLOAT, rows,
                                       &units->squares[unit]});
}

bl_status adapter_units_close_gradient(adapter_units *units, int64_t unit, bl_stream *stream)
{
    if (units->unit[unit].tier == BL_TIER_DEVICE) return BL_OK;
    if (unit < units->n_units)
        BL_TRY(sum_squares(units, unit, adapter_units_frame_rows(units, unit), stream));
    return adapter_units_close_frame(units, unit, stream);
}

/* ---- the step ---- */

/* The gradients of a unit without a visit are zero. */
static bl_status visit_all(adapter_units *units, bl_stream *stream)
{
    float *rows;

    for (int64_t u = 0; u < units->n_held; u++) {
        if (units->unit[u].state != UNIT_CLEAN) continue;
        BL_TRY(open_unit(units, u, stream, &rows));
        BL_TRY(adapter_units_close_gradient(units, u, stream));
    }
    return BL_OK;
}

bl_status adapter_units_join(adapter_units *units, bl_stream *stream)
{
    int64_t head = units->n_units - 1, embedding = units->n_units;
    float *to, *from;

    BL_TRY(visit_all(units, stream));
    if (!units->options.is_tied || units->unit[head].n_bytes[ADAPTER_GRAD] == 0) return BL_OK;
    BL_TRY(open_unit(units, head, stream, &to));
    BL_TRY(open_unit(units, embedding, stream, &from));
    BL_TRY(bl_accumulate(
        stream, &(bl_accumulate_args){.n = units->unit[head].n_bytes[ADAPTER_GRAD] / UNITS_FLOAT,
                                      .x = bl_tensor_f32(from),
                                      .y = bl_tensor_f32(to)}));
    units->unit[embedding].state = UNIT_CLEAN;
    return adapter_units_close_gradient(units, head, stream);
}

bl_status adapter_units_sum_squares(adapter_units *units, bl_stream *stream, double *sum)
{
    for (int64_t u = 0; u < units->n_units; u++)
        if (units->unit[u].tier == BL_TIER_DEVICE && units->unit[u].n_bytes[ADAPTER_GRAD] > 0)
            BL_TRY(sum_squares(units, u, gradients_in_memory(units, u), stream));
    return bl_add_sums(stream, &(bl_add_sums_args){units->n_units, units->squares, sum});
}

/* Span by span: the weights are pages. */
static bl_status update_in_memory(adapter_units *units, const adapter_span *span)
{
    char *memory[ADAPTER_N_ARRAYS];

    for (int i = 0; i < ADAPTER_N_ARRAYS; i++)
        memory[i] = adapter_units_span_memory(units, span, (adapter_array)i);
    bl_adamw_args args = adapter_units_adamw(units, span, 0, span->n, memory);
    BL_TRY(bl_adamw(units->options.compute, &args));
    return bl_model_round_rows(units->options.weights, &span->at, span->first, args.n, args.w,
                               units->options.compute);
}

static bl_status update_unit_in_memory(adapter_units *units, int64_t unit)
{
    const adapter_spans *spans = units->spans;

    BL_TRY(adapter_units_wait_for_file(units, unit, BL_LANE_DISK, units->options.compute));
    for (int64_t i = spans->first[unit]; i < spans->first[unit + 1]; i++)
        BL_TRY(update_in_memory(units, &spans->span[i]));
    return BL_OK;
}

/* The clipping scale comes from compute, on a GPU the last gradients from `out`. */
static bl_status let_host_update(adapter_units *units)
{
    bl_stream *compute = units->options.compute;

    if (units->is_gpu) {
        BL_TRY(bl_stream_copy(compute, units->grad_scale, units->update.grad_scale,
                              sizeof *units->grad_scale));
        units->update.grad_scale = units->grad_scale;
        BL_TRY(bl_event_record(units->updated, units->out));
        BL_TRY(bl_stream_wait(units->disk, units->updated));
    }
    BL_TRY(bl_event_record(units->updated, compute));
    return bl_stream_wait(units->disk, units->updated);
}

bl_status adapter_units_update(adapter_units *units, const bl_adamw_args *args)
{
    units->update = *args;
    units->n_read = units->n_updated = 0;
    for (int64_t u = 0; u < units->n_units; u++) {
        units->unit[u].state = units->unit[u].is_paged ? UNIT_WAITING : UNIT_CLEAN;
        if (!units->unit[u].is_paged) BL_TRY(update_unit_in_memory(units, u));
    }
    return units->disk ? let_host_update(units) : BL_OK;
}

bl_status adapter_units_round(adapter_units *units)
{
    const bl_model_weights *weights = units->options.weights;

    if (!weights->copy) return BL_OK;
    for (bl_base_walk at = {.layout = units->layout}; bl_base_next(&at);) {
        const float *rows = bl_pages_memory(weights->pages, at.index);
        int64_t n = (int64_t)at.part->shard_bytes / UNITS_FLOAT;
        bl_tier tier = bl_pages_spec(weights->pages, at.index)->tier;
        BL_TRY(adapter_units_is_apart(units->is_gpu, tier)
                   ? adapter_units_queue_round(units, &at)
                   : bl_model_round_rows(weights, &at, 0, n, rows, units->options.compute));
    }
    return units->disk ? bl_stream_synchronize(units->disk) : BL_OK;
}

void adapter_units_forget(adapter_units *units)
{
    for (int64_t u = 0; u < units->n_held; u++) units->unit[u].state = UNIT_CLEAN;
}

/* Which lane an update keeps waiting, and the bytes that it moves there. */
static bl_lane lane_of_update(const adapter_units *units, int64_t unit, int64_t *n_bytes)
{
    enum { BF16 = 2 }; /* bytes */
    int64_t on_disk = 0, copied = 0;

    for (int64_t s = units->spans->first[unit]; s < units->spans->first[unit + 1]; s++) {
        const adapter_span *span = &units->spans->span[s];
        for (int i = 0; i < ADAPTER_N_ARRAYS; i++) {
            int64_t n = span->n * adapter_units_element(units, (adapter_array)i);
            bl_tier place = adapter_units_place(units, span, (adapter_array)i);
            int64_t both_ways = i == ADAPTER_GRAD ? n : 2 * n;
            on_disk += place == BL_TIER_DISK ? both_ways : 0;
            copied += place == BL_TIER_DEVICE ? both_ways : 0;
        }
        if (!units->options.weights->copy) continue;
        bl_tier place = adapter_units_copy_place(units, &span->at);
        on_disk += place == BL_TIER_DISK ? BF16 * span->n : 0;
        copied += place == BL_TIER_DEVICE ? BF16 * span->n : 0;
    }
    *n_bytes = on_disk > 0 ? on_disk : copied;
    return on_disk > 0 ? BL_LANE_DISK : BL_LANE_COPY;
}

bl_status adapter_units_update_unit(adapter_units *units, int64_t unit)
{
    bl_timeline *timeline = units->options.timeline;
    int64_t n_bytes;
    int span;

    if (unit >= units->n_units || units->unit[unit].state != UNIT_WAITING) return BL_OK;
    bl_lane lane = lane_of_update(units, unit, &n_bytes);
    BL_TRY(adapter_units_wait_for_file(units, unit, BL_LANE_DISK, units->disk));
    BL_TRY(bl_timeline_begin(timeline, lane, "update", unit, -1, units->disk, &span));
    BL_TRY(adapter_units_queue_update(units, unit));
    BL_TRY(bl_timeline_end(timeline, span, units->disk, n_bytes));
    units->unit[unit].state = UNIT_CLEAN;
    BL_TRY(bl_base_shards_changed(units->options.base, units->disk));
    BL_TRY(bl_event_record(units->updated, units->disk));
    BL_TRY(adapter_units_continue_file(units, unit));
    return bl_timeline_wait(timeline, lane, "update", unit, -1, units->options.compute,
                            units->updated);
}

bl_status adapter_units_flush(adapter_units *units)
{
    if (!units->disk) return BL_OK;
    for (int64_t i = 0; i < units->n_pieces; i++)
        BL_TRY(adapter_units_update_unit(units, units->piece[i].span->at.idx_unit));
    BL_TRY(bl_stream_synchronize(units->disk));
    return units->out ? bl_stream_synchronize(units->out) : BL_OK;
}
