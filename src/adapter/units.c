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
static void size_unit(const bl_base_layout *layout, int64_t unit, bl_dtype moments, held_unit *out)
{
    int64_t element = (int64_t)bl_dtype_bytes(moments), n_bytes = 0;
    const bl_base_unit *u = &layout->units[bl_min_i64(unit, layout->n_units - 1)];

    out->n_bytes[ADAPTER_GRAD] = (int64_t)u->shard_bytes;
    for (int m = 0; unit < layout->n_units && m < u->n_matrices; m++)
        for (int p = 0; p < u->matrix[m].n_parts; p++)
            n_bytes += adapter_units_array_bytes(&u->matrix[m].part[p], element);
    out->n_bytes[ADAPTER_M] = out->n_bytes[ADAPTER_V] = n_bytes;
}

/* Spreads units over the tiers like the base's pages. */
static bl_status assign(const bl_base_layout *layout, const bl_optimizer_placement *placement,
                        int64_t n_held, held_unit *units)
{
    size_t *n_bytes = calloc((size_t)layout->n_units, sizeof *n_bytes);
    bl_tier *tiers = calloc((size_t)layout->n_units, sizeof *tiers);
    bl_status st = n_bytes && tiers ? BL_OK : BL_FAIL(BL_ENOMEM, "the placement of the state");

    for (int64_t u = 0; st == BL_OK && u < layout->n_units; u++)
        n_bytes[u] = layout->units[u].shard_bytes;
    if (st == BL_OK)
        bl_tier_spread(n_bytes, layout->n_units, placement->ratio, placement->tier, tiers);
    for (int64_t u = 0; st == BL_OK && u < n_held; u++) {
        int64_t of = bl_min_i64(u, layout->n_units - 1); /* a tied head is the last */
        units[u].tier = tiers[of];
    }
    free(tiers);
    free(n_bytes);
    return st;
}

static int64_t frames_bytes(const bl_base_layout *layout, int64_t n_held, const held_unit *units,
                            int64_t *table_bytes)
{
    int64_t layer = 0, tied = 0;

    *table_bytes = 0;
    for (int64_t u = 0; u < n_held; u++) {
        if (units[u].tier != BL_TIER_DISK) continue;
        bool is_table = u < layout->n_units && layout->units[u].whole_ring;
        int64_t *most = u == layout->n_units ? &tied : is_table ? table_bytes : &layer;
        *most = bl_max_i64(*most, units[u].n_bytes[ADAPTER_GRAD]);
    }
    return *table_bytes + bl_max_i64(2 * layer, tied);
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
    unit->offset[ADAPTER_M] = unit->offset[ADAPTER_V] = n->moments / 2;
    unit->offset[ADAPTER_GRAD] = n->gradients;
    n->moments += 2 * moment;
    n->gradients += gradients;
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

/* units: receives sizes and placement; [n_units + is_tied]. */
static bl_status measure_units(const bl_base_layout *layout, bool is_tied,
                               const bl_optimizer_placement *placement, const bl_tier *weight_tiers,
                               held_unit *units, bl_adapter_units_bytes *out)
{
    int64_t n_held = layout->n_units + is_tied, table_bytes;
    bl_adapter_units_bytes n = {.dtype = placement->moments};
    bool is_paged = false, has_weights = false;

    BL_TRY(assign(layout, placement, n_held, units));
    for (int64_t u = 0; u < n_held; u++) units[u].is_paged = units[u].tier == BL_TIER_DISK;
    for (bl_base_walk at = {.layout = layout}; bl_base_next(&at);) {
        has_weights |= weight_tiers[at.index] == BL_TIER_DISK;
        units[at.idx_unit].is_paged |= weight_tiers[at.index] == BL_TIER_DISK;
    }
    for (int64_t u = 0; u < n_held; u++) {
        is_paged |= units[u].is_paged;
        size_unit(layout, u, placement->moments, &units[u]);
        place_unit(&units[u], &n);
    }
    n.frames = frames_bytes(layout, n_held, units, &table_bytes);
    if (is_paged) n.pieces = UNITS_SLOTS * slot_bytes(placement->moments);
    n.pieces += ((n.disk > 0) + has_weights) * UNITS_QUEUE_DEPTH * (int64_t)UNITS_REQUEST_BYTES;
    *out = n;
    return BL_OK;
}

bl_status adapter_units_measure(const bl_base_layout *layout, bool is_tied,
                                const bl_optimizer_placement *placement, const bl_tier *weights,
                                bl_adapter_units_bytes *out)
{
    held_unit *units = calloc((size_t)layout->n_units + 1, sizeof *units);

    if (!units) return BL_FAIL(BL_ENOMEM, "the placement of the state");
    bl_status st = measure_units(layout, is_tied, placement, weights, units, out);
    free(units);
    return st;
}

/* ---- create ---- */

static bl_status allocate_memory(adapter_units *units, const bl_adapter_units_bytes *n)
{
    static const char *const names[ADAPTER_N_ARRAYS] = {"AdamW first moments",
                                                        "AdamW second moments", NULL, "gradients"};
    bl_device *device = units->options.device;

    for (int i = 0; i < ADAPTER_N_ARRAYS; i++) {
        int64_t n_bytes = i == ADAPTER_GRAD ? n->gradients : n->moments / 2;
        if (i == ADAPTER_W || n_bytes == 0) continue;
        BL_TRY(bl_device_alloc(device, BL_SPACE_DEVICE, (size_t)n_bytes, names[i],
                               (void **)&units->memory[i]));
    }
    BL_TRY(bl_event_create(device, &units->updated));
    return bl_device_alloc(device, BL_SPACE_DEVICE, (size_t)units->n_units * sizeof(double),
                           "squares of gradients", (void **)&units->squares);
}

static bl_status create_frames(adapter_units *units, const bl_adapter_units_bytes *n)
{
    bl_device *device = units->options.device;
    int64_t table_bytes, layer_bytes;

    units->frames_bytes = frames_bytes(units->layout, units->n_held, units->unit, &table_bytes);
    layer_bytes =
        (n->frames - table_bytes) / 2 / BL_DEVICE_ALIGNMENT_BYTES * BL_DEVICE_ALIGNMENT_BYTES;
    BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, (size_t)n->frames, "a visit's gradients",
                           (void **)&units->frames));
    units->frame[FRAME_TABLE].memory = units->frames;
    units->frame[FRAME_TIED].memory = units->frame[FRAME_LAYER].memory =
        units->frames + table_bytes;
    units->frame[FRAME_LAYER + 1].memory = units->frame[FRAME_LAYER].memory + layer_bytes;
    for (int i = 0; i < N_FRAMES; i++) {
        held_frame *frame = &units->frame[i];
        frame->unit = -1;
        BL_TRY(bl_event_create(device, &frame->complete));
        BL_TRY(bl_event_create(device, &frame->ready));
        BL_TRY(bl_event_create(device, &frame->written));
    }
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
    return BL_OK;
}

static bl_status create_reader(const adapter_units *units, bl_io_files *files, bl_reader **out)
{
    const bl_optimizer_placement *placement = &units->options.placement;
    bl_reader_options options = {.engine = placement->io_engine,
                                 .queue_depth = UNITS_QUEUE_DEPTH,
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
    BL_TRY(bl_stream_create_inline(o->device, &units->inline_stream));
    BL_TRY(create_slots(units));
    if (n->disk > 0) {
        snprintf(what, sizeof what, "optimizer state of rank %d", o->rank);
        BL_TRY(bl_scratch_open(o->placement.dir, what, n->disk, &units->files));
        BL_TRY(create_reader(units, units->files, &units->reader));
        BL_TRY(create_frames(units, n));
    }
    if (bl_pages_files(o->weights->pages))
        BL_TRY(create_reader(units, bl_pages_files(o->weights->pages), &units->weights_reader));
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
    bl_status st = measure_units(units->layout, units->options.is_tied, &units->options.placement,
                                 tiers, units->unit, &n);
    free(tiers);
    if (st == BL_OK) st = allocate_memory(units, &n);
    return st == BL_OK && n.pieces > 0 ? create_paging(units, &n) : st;
}

bl_status adapter_units_create(const adapter_units_options *options, adapter_units **out)
{
    adapter_units *units = calloc(1, sizeof *units);

    *out = NULL;
    if (!units) return BL_FAIL(BL_ENOMEM, "the optimizer's state");
    *units = (adapter_units){.options = *options,
                             .layout = &options->weights->layout,
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
    bl_stream_destroy(units->disk);
    bl_stream_destroy(units->inline_stream);
    bl_reader_destroy(units->reader);
    bl_reader_destroy(units->weights_reader);
    bl_io_files_close(units->files);
    for (int i = 0; i < N_FRAMES; i++) {
        bl_event_destroy(units->frame[i].complete);
        bl_event_destroy(units->frame[i].ready);
        bl_event_destroy(units->frame[i].written);
    }
    bl_event_destroy(units->updated);
    for (int i = 0; i < ADAPTER_N_ARRAYS; i++)
        bl_device_free(device, BL_SPACE_DEVICE, units->memory[i]);
    bl_device_free(device, BL_SPACE_DEVICE, units->squares);
    bl_device_free(device, BL_SPACE_HOST, units->frames);
    bl_device_free(device, BL_SPACE_HOST, units->slots);
    free(units->piece);
    free(units->unit);
    free(units);
}

/* ---- the gradients of a visit ---- */

static float *gradients_in_memory(const adapter_units *units, int64_t unit)
{
    return (float *)(units->memory[ADAPTER_GRAD] + units->unit[unit].offset[ADAPTER_GRAD]);
}

static int frame_of(const adapter_units *units, int64_t unit)
{
    if (unit == units->n_units) return FRAME_TIED;
    if (units->layout->units[unit].whole_ring) return FRAME_TABLE;
    return FRAME_LAYER + (int)(unit & 1);
}

/* Whether two frames have memory in common. */
static bool overlap(int a, int b)
{
    return a == b || (a == FRAME_TIED && b < FRAME_TABLE) || (b == FRAME_TIED && a < FRAME_TABLE);
}

typedef struct frame_args {
    adapter_units *units;
    int64_t unit;
    bool is_write;
} frame_args;

static bl_status frame_task(bl_stream *stream, const void *args)
{
    const frame_args *a = args;
    adapter_units *units = a->units;
    const held_unit *u = &units->unit[a->unit];
    bl_io_read io = {.offset_bytes = u->offset[ADAPTER_GRAD],
                     .n_bytes = (size_t)u->n_bytes[ADAPTER_GRAD],
                     .dst = units->frame[frame_of(units, a->unit)].memory};

    (void)stream;
    BL_TRY(a->is_write ? bl_reader_submit_write(units->reader, &io)
                       : bl_reader_submit(units->reader, &io));
    return adapter_units_wait(units, units->reader, &io, a->unit);
}

static bl_status queue_frame(adapter_units *units, int64_t unit, bool is_write)
{
    const frame_args args = {units, unit, is_write};
    return bl_stream_call(units->disk, frame_task, &args, sizeof args);
}

/* Runs after the frame's last write, which is queued on the same stream. */
static bl_status queue_read(adapter_units *units, int64_t unit)
{
    held_frame *frame = &units->frame[frame_of(units, unit)];

    BL_TRY(queue_frame(units, unit, false));
    BL_TRY(bl_event_record(frame->ready, units->disk));
    frame->unit = unit;
    return BL_OK;
}

static bl_status wait_for_frame(adapter_units *units, int64_t unit, bl_stream *stream)
{
    int frame = frame_of(units, unit);

    for (int i = 0; i < N_FRAMES; i++)
        if (overlap(i, frame))
            BL_TRY(bl_timeline_wait(units->options.timeline, BL_LANE_DISK, "gradients", unit, -1,
                                    stream, units->frame[i].written));
    return BL_OK;
}

static bl_status open_frame(adapter_units *units, int64_t unit, bl_stream *stream)
{
    held_frame *frame = &units->frame[frame_of(units, unit)];

    if (units->unit[unit].state == UNIT_CLEAN) {
        BL_TRY(wait_for_frame(units, unit, stream));
        return bl_stream_zero(stream, frame->memory,
                              (size_t)units->unit[unit].n_bytes[ADAPTER_GRAD]);
    }
    if (frame->unit != unit) BL_TRY(queue_read(units, unit));
    frame->unit = -1;
    return bl_timeline_wait(units->options.timeline, BL_LANE_DISK, "gradients", unit, -1, stream,
                            frame->ready);
}

/* Reads the gradients that the next visit adds to during this visit, into the other layer frame. */
static bl_status prefetch_next(adapter_units *units, int64_t unit)
{
    int64_t next = unit - 1; /* also of the head */

    if (next < 0 || units->layout->units[next].whole_ring ||
        units->unit[next].tier != BL_TIER_DISK || units->unit[next].state != UNIT_SUMMED)
        return BL_OK;
    return queue_read(units, next);
}

static bl_status open_unit(adapter_units *units, int64_t unit, bl_stream *stream, float **rows)
{
    held_unit *u = &units->unit[unit];

    if (u->state == UNIT_WAITING)
        return BL_FAIL(BL_EINTERNAL, "gradients of unit %lld, which waits for its update",
                       (long long)unit);
    if (u->tier == BL_TIER_DISK) {
        *rows = (float *)units->frame[frame_of(units, unit)].memory;
        BL_TRY(open_frame(units, unit, stream));
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
    return units->files && unit < units->n_units ? prefetch_next(units, unit) : BL_OK;
}

bl_status adapter_units_close_gradient(adapter_units *units, int64_t unit, bl_stream *stream)
{
    const held_unit *u = &units->unit[unit];
    held_frame *frame = &units->frame[frame_of(units, unit)];

    if (u->tier != BL_TIER_DISK) return BL_OK;
    if (unit < units->n_units) {
        BL_TRY(bl_stream_zero(stream, &units->squares[unit], sizeof(double)));
        BL_TRY(bl_sum_squares(stream, &(bl_sum_squares_args){u->n_bytes[ADAPTER_GRAD] / UNITS_FLOAT,
                                                             (const float *)frame->memory,
                                                             &units->squares[unit]}));
    }
    BL_TRY(bl_event_record(frame->complete, stream));
    BL_TRY(bl_stream_wait(units->disk, frame->complete));
    BL_TRY(queue_frame(units, unit, true));
    return bl_event_record(frame->written, units->disk);
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
    if (!units->options.is_tied) return BL_OK;
    BL_TRY(open_unit(units, head, stream, &to));
    BL_TRY(open_unit(units, embedding, stream, &from));
    BL_TRY(bl_accumulate(
        stream, &(bl_accumulate_args){.n = units->unit[head].n_bytes[ADAPTER_GRAD] / UNITS_FLOAT,
                                      .x = bl_tensor_f32(from),
                                      .y = bl_tensor_f32(to)}));
    units->unit[embedding].state = UNIT_CLEAN;
    return adapter_units_close_gradient(units, head, stream);
}

typedef struct add_args {
    const double *square;
    double *sum;
} add_args;

static bl_status add_task(bl_stream *stream, const void *args)
{
    const add_args *a = args;
    (void)stream;
    *a->sum += *a->square;
    return BL_OK;
}

bl_status adapter_units_sum_squares(adapter_units *units, bl_stream *stream, double *sum)
{
    for (int64_t u = 0; u < units->n_units; u++) {
        const add_args add = {&units->squares[u], sum};
        const held_unit *unit = &units->unit[u];
        if (unit->tier == BL_TIER_DISK)
            BL_TRY(bl_stream_call(stream, add_task, &add, sizeof add));
        else
            BL_TRY(bl_sum_squares(stream,
                                  &(bl_sum_squares_args){unit->n_bytes[ADAPTER_GRAD] / UNITS_FLOAT,
                                                         gradients_in_memory(units, u), sum}));
    }
    return BL_OK;
}

/* Part by part: the weights are pages. */
static bl_status update_in_memory(adapter_units *units, const bl_base_walk *at)
{
    char *memory[ADAPTER_N_ARRAYS];

    for (int i = 0; i < ADAPTER_N_ARRAYS; i++)
        memory[i] = adapter_units_part_memory(units, at, (adapter_array)i);
    bl_adamw_args args =
        adapter_units_adamw(units, at, 0, (int64_t)at->part->shard_bytes / UNITS_FLOAT, memory);
    BL_TRY(bl_adamw(units->options.compute, &args));
    return bl_model_round_rows(units->options.weights, at, 0, args.n, args.w,
                               units->options.compute);
}

bl_status adapter_units_update(adapter_units *units, const bl_adamw_args *args)
{
    units->update = *args;
    units->n_read = units->n_updated = 0;
    for (bl_base_walk at = {.layout = units->layout}; bl_base_next(&at);)
        if (!units->unit[at.idx_unit].is_paged) BL_TRY(update_in_memory(units, &at));
    for (int64_t u = 0; u < units->n_units; u++)
        units->unit[u].state = units->unit[u].is_paged ? UNIT_WAITING : UNIT_CLEAN;
    if (!units->disk) return BL_OK;
    /* The clipping scale comes from compute. */
    BL_TRY(bl_event_record(units->updated, units->options.compute));
    return bl_stream_wait(units->disk, units->updated);
}

bl_status adapter_units_round(adapter_units *units)
{
    const bl_model_weights *weights = units->options.weights;

    if (!weights->copy) return BL_OK;
    for (bl_base_walk at = {.layout = units->layout}; bl_base_next(&at);) {
        const float *rows = bl_pages_memory(weights->pages, at.index);
        int64_t n = (int64_t)at.part->shard_bytes / UNITS_FLOAT;
        BL_TRY(rows ? bl_model_round_rows(weights, &at, 0, n, rows, units->options.compute)
                    : adapter_units_round_part(units, &at));
    }
    return BL_OK;
}

void adapter_units_forget(adapter_units *units)
{
    for (int64_t u = 0; u < units->n_held; u++) units->unit[u].state = UNIT_CLEAN;
}

bl_status adapter_units_update_unit(adapter_units *units, int64_t unit)
{
    if (unit >= units->n_units || units->unit[unit].state != UNIT_WAITING) return BL_OK;
    BL_TRY(adapter_units_queue_update(units, unit));
    units->unit[unit].state = UNIT_CLEAN;
    BL_TRY(bl_base_shards_changed(units->options.base, units->disk));
    BL_TRY(bl_event_record(units->updated, units->disk));
    return bl_timeline_wait(units->options.timeline, BL_LANE_DISK, "update", unit, -1,
                            units->options.compute, units->updated);
}

bl_status adapter_units_flush(adapter_units *units)
{
    if (!units->disk) return BL_OK;
    for (int64_t i = 0; i < units->n_pieces; i++)
        BL_TRY(adapter_units_update_unit(units, units->piece[i].at.idx_unit));
    return bl_stream_synchronize(units->disk);
}
