/* SPDX-License-Identifier: Apache-2.0 */
/* units_places.c -- where the arrays of a unit are: their sizes, their tiers, and the place of each
 * span in them. */
#include <stdlib.h>

#include "trained/units_paged_internal.h"
#include "base/sizes.h"
#include "linear/base_paged.h"

/* ---- sizes and tiers ---- */

/* Of a unit's arrays. A tied embedding has gradients alone. */
static void size_unit(const trained_spans *spans, int64_t unit, bl_dtype moments, held_unit *out)
{
    int64_t n_units = spans->layout->n_units;
    const int64_t *n_bytes = spans->unit_bytes[bl_min_i64(unit, n_units - 1)];

    out->n_bytes[TRAINED_GRAD] = n_bytes[TRAINED_F32];
    out->n_bytes[TRAINED_M] =
        unit < n_units ? n_bytes[moments == BL_F32 ? TRAINED_F32 : TRAINED_BF16] : 0;
    out->n_bytes[TRAINED_V] = out->n_bytes[TRAINED_M];
}

/* Spreads units over the tiers like the base's pages. */
static bl_status assign(const trained_spans *spans, const bl_optimizer_placement *placement,
                        int64_t n_held, held_unit *units)
{
    const bl_base_layout *layout = spans->layout;
    size_t *n_bytes = calloc((size_t)layout->n_units, sizeof *n_bytes);
    bl_tier *tiers = calloc((size_t)layout->n_units, sizeof *tiers);
    bl_status st = n_bytes && tiers ? BL_OK : BL_FAIL(BL_ENOMEM, "the placement of the state");

    for (int64_t u = 0; st == BL_OK && u < layout->n_units; u++)
        n_bytes[u] = (size_t)spans->unit_bytes[u][TRAINED_F32];
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

/* Places a unit after the earlier ones: in the file, or in the memory of each array. */
static void place_unit(held_unit *unit, bl_trained_units_bytes *n)
{
    int64_t moment = unit->n_bytes[TRAINED_M], gradients = unit->n_bytes[TRAINED_GRAD];

    if (unit->tier == BL_TIER_DISK) {
        unit->offset[TRAINED_M] = n->disk;
        unit->offset[TRAINED_V] = n->disk + moment;
        unit->offset[TRAINED_GRAD] = n->disk + 2 * moment;
        n->disk += 2 * moment + gradients;
        return;
    }
    bool is_on_host = unit->tier == BL_TIER_HOST;
    int64_t *moments = is_on_host ? &n->host_moments : &n->moments,
            *all_gradients = is_on_host ? &n->host_gradients : &n->gradients;
    unit->offset[TRAINED_M] = unit->offset[TRAINED_V] = *moments / 2;
    unit->offset[TRAINED_GRAD] = *all_gradients;
    *moments += 2 * moment;
    *all_gradients += gradients;
}

int64_t trained_units_piece_bytes(bl_dtype moments, trained_array array)
{
    bool is_moment = array == TRAINED_M || array == TRAINED_V;
    return UNITS_PIECE_ELEMENTS * (is_moment ? (int64_t)bl_dtype_bytes(moments) : UNITS_FLOAT);
}

static int64_t all_pieces_bytes(bl_dtype moments)
{
    int64_t n_bytes = 0;
    for (int i = 0; i < TRAINED_N_ARRAYS; i++)
        n_bytes += trained_units_piece_bytes(moments, (trained_array)i);
    return UNITS_SLOTS * n_bytes;
}

/* Units with spans on this rank, whose moments, gradients or weights are apart. */
static void find_paged(bool is_gpu, const trained_spans *spans, const bl_tier *weight_tiers,
                       held_unit *units)
{
    for (int64_t i = 0; i < spans->n; i++) {
        held_unit *u = &units[spans->span[i].at.idx_unit];
        u->is_paged |= trained_units_is_apart(is_gpu, u->tier) ||
                       trained_units_is_apart(is_gpu, weight_tiers[spans->span[i].at.index]);
    }
}

bl_status trained_units_assign(const trained_spans *spans, bool is_tied,
                               const bl_optimizer_placement *placement, const bl_tier *weight_tiers,
                               held_unit *units, bl_trained_units_bytes *out)
{
    const bl_base_layout *layout = spans->layout;
    int64_t n_held = layout->n_units + is_tied, table_bytes;
    bl_trained_units_bytes n = {.dtype = placement->moments};
    bool is_paged = false, has_weights = false, is_gpu = placement->kind == BL_DEVICE_CUDA;

    BL_TRY(assign(spans, placement, n_held, units));
    find_paged(is_gpu, spans, weight_tiers, units);
    for (bl_base_walk at = {.layout = layout}; bl_base_next(&at);) {
        has_weights |= weight_tiers[at.index] == BL_TIER_DISK;
        is_paged |= trained_units_is_apart(is_gpu, weight_tiers[at.index]); /* rounding */
    }
    for (int64_t u = 0; u < n_held; u++) {
        is_paged |= trained_units_is_apart(is_gpu, units[u].tier);
        size_unit(spans, u, placement->moments, &units[u]);
        place_unit(&units[u], &n);
    }
    int64_t frames = trained_units_frames_bytes(layout, n_held, units, &table_bytes);
    if (is_gpu) n.device_frames = frames;
    if (!is_gpu || n.disk > 0) n.host_frames = frames;
    if (is_paged) n.pieces = all_pieces_bytes(placement->moments);
    bool has_copy = has_weights && placement->places_copy; /* on disk */
    if (is_paged && (is_gpu || has_copy)) n.pieces += UNITS_SLOTS * (int64_t)UNITS_ROUNDED_BYTES;
    int n_files = (n.disk > 0) + has_weights;
    n.pieces += (n_files + has_copy) * UNITS_QUEUE_DEPTH * (int64_t)UNITS_REQUEST_BYTES;
    n.behind = BL_STAGING_BYTES + n_files * UNITS_BEHIND_DEPTH * (int64_t)UNITS_REQUEST_BYTES;
    if (n_files > 0) n.behind += UNITS_PIECE_ELEMENTS * (int64_t)UNITS_FLOAT;
    *out = n;
    return BL_OK;
}

bl_status trained_units_measure(const trained_spans *spans, bool is_tied,
                                const bl_optimizer_placement *placement, const bl_tier *weights,
                                bl_trained_units_bytes *out)
{
    held_unit *units = calloc((size_t)spans->layout->n_units + 1, sizeof *units);

    if (!units) return BL_FAIL(BL_ENOMEM, "the placement of the state");
    bl_status st = trained_units_assign(spans, is_tied, placement, weights, units, out);
    free(units);
    return st;
}

/* ---- places ---- */

int64_t trained_units_element(const trained_units *units, trained_array array)
{
    bool is_moment = array == TRAINED_M || array == TRAINED_V;
    return is_moment ? (int64_t)bl_dtype_bytes(units->options.placement.moments) : UNITS_FLOAT;
}

static bl_place place_at(const trained_units *units, bl_tier tier, int file, int64_t offset_bytes,
                         char *memory)
{
    return (bl_place){.tier = bl_transfer_reach(units->options.placement.kind, tier),
                      .file = file,
                      .offset_bytes = offset_bytes,
                      .memory = tier == BL_TIER_DISK ? NULL : memory + offset_bytes};
}

/* Byte `at` of a page. */
static bl_place page_place(const trained_units *units, const bl_pages *pages, int file,
                           int64_t page, int64_t at)
{
    bl_tier tier = bl_pages_spec(pages, page)->tier;
    int64_t begin = tier == BL_TIER_DISK ? bl_pages_offset(pages, page) : 0;
    return place_at(units, tier, file, begin + at, bl_pages_memory(pages, page));
}

/* Byte `at` of a unit's array. */
static bl_place array_place(const trained_units *units, int64_t unit, trained_array array,
                            int64_t at)
{
    const held_unit *u = &units->unit[unit];
    char *memory = u->tier == BL_TIER_DISK ? NULL : units->memory[u->tier][array];
    return place_at(units, u->tier, FILE_STATE, u->offset[array] + at, memory);
}

bl_place trained_units_place(const trained_units *units, const trained_span *span,
                             trained_array array, int64_t first)
{
    int64_t element = trained_units_element(units, array);
    trained_element kind = element == UNITS_FLOAT ? TRAINED_F32 : TRAINED_BF16;

    if (array == TRAINED_W)
        return page_place(units, units->options.weights->pages, FILE_WEIGHTS, span->at.index,
                          (span->first + first) * element);
    return array_place(units, span->at.idx_unit, array, span->offset[kind] + first * element);
}

bl_place trained_units_copy_place(const trained_units *units, const bl_base_walk *at, int64_t first)
{
    return page_place(units, units->options.weights->copy, FILE_COPY, at->index,
                      first * (int64_t)bl_dtype_bytes(BL_BF16));
}

bl_place trained_units_gradient_place(const trained_units *units, int64_t unit)
{
    return array_place(units, unit, TRAINED_GRAD, 0);
}

size_t trained_units_place_bytes(const bl_place *place, int64_t n_bytes)
{
    return (size_t)(place->tier == BL_TIER_DISK ? bl_round_up(n_bytes, BL_IO_ALIGN_BYTES)
                                                : n_bytes);
}
