/* SPDX-License-Identifier: Apache-2.0 */
/* units_create.c -- the units' memory, streams, readers and movers. */
#include <stdio.h>
#include <stdlib.h>

#include "trained/units_paged_internal.h"
#include "base/sizes.h"
#include "linear/base_paged.h"

/* ---- memory ---- */

/* One pinned block, near the rank's GPU. */
static bl_status allocate_host(trained_units *units, const bl_trained_units_bytes *n)
{
    const size_t n_bytes[TRAINED_N_ARRAYS] = {[TRAINED_M] = (size_t)n->host_moments / 2,
                                              [TRAINED_V] = (size_t)n->host_moments / 2,
                                              [TRAINED_GRAD] = (size_t)n->host_gradients};
    char what[64];
    bl_arena_options options = {
        .device = units->options.device, .what = what, .node = -1, .pin = true};

    snprintf(what, sizeof what, "optimizer state of rank %d", units->options.rank);
    for (int i = 0; i < TRAINED_N_ARRAYS; i++)
        options.size_bytes += bl_arena_piece_bytes(n_bytes[i]);
    BL_TRY(bl_arena_create(&options, &units->arena));
    for (int i = 0; i < TRAINED_N_ARRAYS; i++)
        if (n_bytes[i] > 0)
            units->memory[BL_TIER_HOST][i] = bl_arena_take(units->arena, n_bytes[i]);
    return BL_OK;
}

static bl_status allocate_memory(trained_units *units, const bl_trained_units_bytes *n)
{
    static const char *const names[TRAINED_N_ARRAYS] = {"AdamW first moments",
                                                        "AdamW second moments", NULL, "gradients"};
    bl_device *device = units->options.device;

    for (int i = 0; i < TRAINED_N_ARRAYS; i++) {
        int64_t n_bytes = i == TRAINED_GRAD ? n->gradients : n->moments / 2;
        if (i == TRAINED_W || n_bytes == 0) continue;
        BL_TRY(bl_device_alloc(device, BL_SPACE_DEVICE, (size_t)n_bytes, names[i],
                               (void **)&units->memory[BL_TIER_DEVICE][i]));
    }
    if (n->host_gradients > 0) BL_TRY(allocate_host(units, n));
    BL_TRY(bl_event_create(device, &units->updated));
    return bl_device_alloc(device, BL_SPACE_DEVICE, (size_t)units->n_units * sizeof(double),
                           "squares of gradients", (void **)&units->squares);
}

/* Between host and device. */
static bl_status create_copies(trained_units *units)
{
    bl_device *device = units->options.device;

    BL_TRY(bl_stream_create_urgent(device, "gradients out", &units->visit.out));
    BL_TRY(bl_stream_create_urgent(device, "gradients in", &units->visit.in));
    BL_TRY(bl_stream_create_urgent(device, "weights in", &units->pieces.in));
    BL_TRY(bl_stream_create_urgent(device, "state out", &units->pieces.out));
    BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, sizeof *units->grad_scale, "the clipping scale",
                           (void **)&units->grad_scale));
    for (int i = 0; i < UNITS_SLOTS; i++)
        BL_TRY(bl_event_create(device, &units->slot[i].batch.copied));
    return BL_OK;
}

/* Whether updates write rows of the bf16 copy to disk. */
static bool writes_copy(const trained_units *units)
{
    const bl_model_weights *weights = units->options.weights;
    return weights->copy && bl_pages_files(weights->copy);
}

/* Memory of rounded pieces, used where the host cannot write the copy itself. */
static bl_status create_rounded(trained_units *units)
{
    BL_TRY(bl_device_alloc(units->options.device, BL_SPACE_HOST,
                           (size_t)UNITS_SLOTS * UNITS_ROUNDED_BYTES, "rounded pieces of weights",
                           (void **)&units->rounded));
    for (int i = 0; i < UNITS_SLOTS; i++)
        units->slot[i].rounded = units->rounded + (size_t)i * UNITS_ROUNDED_BYTES;
    return BL_OK;
}

static bl_status create_slots(trained_units *units)
{
    bl_dtype moments = units->options.placement.moments;
    int64_t n_bytes = 0;
    char *memory;

    for (int i = 0; i < TRAINED_N_ARRAYS; i++)
        n_bytes += UNITS_SLOTS * trained_units_piece_bytes(moments, (trained_array)i);
    BL_TRY(bl_device_alloc(units->options.device, BL_SPACE_HOST, (size_t)n_bytes,
                           "pieces of the state", (void **)&units->slots));
    memory = units->slots;
    for (int s = 0; s < UNITS_SLOTS; s++)
        for (int i = 0; i < TRAINED_N_ARRAYS; i++) {
            units->slot[s].memory[i] = memory;
            memory += trained_units_piece_bytes(moments, (trained_array)i);
        }
    if (units->is_gpu || writes_copy(units)) BL_TRY(create_rounded(units));
    return units->is_gpu ? create_copies(units) : BL_OK;
}

bl_status trained_units_create_reader(const trained_units *units, bl_io_files *files,
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

static bl_status frame_arrived(void *user, const bl_move *move, bl_status st)
{
    return trained_units_explain(user, move->unit, st);
}

static bl_status create_movers(trained_units *units)
{
    const bl_model_weights *weights = units->options.weights;
    bl_io_files *files[BL_MOVER_FILES] = {[FILE_STATE] = units->files,
                                          [FILE_WEIGHTS] = bl_pages_files(weights->pages),
                                          [FILE_COPY] =
                                              weights->copy ? bl_pages_files(weights->copy) : NULL};

    units->visit.device = units->pieces.device = units->options.device;
    units->visit.disk = units->disk;
    units->visit.timeline = units->options.timeline;
    units->visit.arrived = frame_arrived;
    units->visit.user = units;
    for (int f = 0; f < BL_MOVER_FILES; f++) {
        if (!files[f]) continue;
        BL_TRY(trained_units_create_reader(units, files[f], UNITS_QUEUE_DEPTH,
                                           &units->pieces.reader[f]));
        units->visit.reader[f] = units->pieces.reader[f];
    }
    return bl_mover_open(&units->visit);
}

static bl_status create_paging(trained_units *units, const bl_trained_units_bytes *n)
{
    const trained_units_options *o = &units->options;
    char what[64];

    BL_TRY(bl_stream_create_host(o->device, "state", &units->disk));
    for (int64_t u = 0; u < units->n_units; u++)
        BL_TRY(bl_event_create(o->device, &units->unit[u].updated));
    BL_TRY(create_slots(units));
    if (n->disk > 0 && !bl_transfer_is_simulated(o->device)) {
        snprintf(what, sizeof what, "optimizer state of rank %d", o->rank);
        BL_TRY(bl_scratch_open(o->placement.dir, what, n->disk, &units->files));
    }
    BL_TRY(create_movers(units));
    if (n->device_frames + n->host_frames > 0) BL_TRY(trained_units_create_frames(units, n));
    return trained_units_list_pieces(units);
}

static bl_status create(trained_units *units)
{
    int64_t n_parts = bl_base_part_count(units->layout);
    bl_tier *tiers = calloc((size_t)n_parts, sizeof *tiers);
    bl_trained_units_bytes n;

    units->unit = calloc((size_t)units->n_held, sizeof *units->unit);
    if (!tiers || !units->unit) {
        free(tiers);
        return BL_FAIL(BL_ENOMEM, "the optimizer's state");
    }
    for (int64_t i = 0; i < n_parts; i++)
        tiers[i] = bl_pages_spec(units->options.weights->pages, i)->tier;
    bl_status st = trained_units_assign(units->spans, units->options.is_tied,
                                        &units->options.placement, tiers, units->unit, &n);
    free(tiers);
    if (st == BL_OK) st = allocate_memory(units, &n);
    if (st == BL_OK && n.pieces > 0) st = create_paging(units, &n);
    return st == BL_OK ? trained_units_create_behind(units, &n) : st;
}

bl_status trained_units_create(const trained_units_options *options, trained_units **out)
{
    trained_units *units = calloc(1, sizeof *units);

    *out = NULL;
    if (!units) return BL_FAIL(BL_ENOMEM, "the optimizer's state");
    *units = (trained_units){.options = *options,
                             .is_gpu = options->placement.kind == BL_DEVICE_CUDA,
                             .layout = &options->weights->layout,
                             .spans = options->spans,
                             .n_units = options->weights->layout.n_units,
                             .n_held = options->weights->layout.n_units + options->is_tied};
    bl_status st = create(units);
    if (st != BL_OK) {
        trained_units_destroy(units);
        return st;
    }
    *out = units;
    return BL_OK;
}

void trained_units_destroy(trained_units *units)
{
    if (!units) return;
    bl_device *device = units->options.device;
    if (units->disk) (void)bl_stream_synchronize(units->disk);
    trained_units_destroy_behind(units);
    bl_stream *const streams[] = {units->disk, units->visit.in, units->visit.out, units->pieces.in,
                                  units->pieces.out};
    for (size_t i = 0; i < BL_COUNT(streams); i++) bl_stream_destroy(streams[i]);
    for (int f = 0; f < BL_MOVER_FILES; f++) bl_reader_destroy(units->pieces.reader[f]);
    bl_mover_close(&units->visit);
    bl_io_files_close(units->files);
    trained_units_destroy_frames(units);
    for (int i = 0; i < UNITS_SLOTS; i++) bl_event_destroy(units->slot[i].batch.copied);
    bl_event_destroy(units->updated);
    for (int64_t u = 0; units->unit && u < units->n_held; u++)
        bl_event_destroy(units->unit[u].updated);
    for (int i = 0; i < TRAINED_N_ARRAYS; i++)
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
