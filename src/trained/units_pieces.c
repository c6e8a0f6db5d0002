/* SPDX-License-Identifier: Apache-2.0 */
/* units_pieces.c -- the update of PAGED units, on the host: their weights, moments and gradients
 * pass through a ring of pieces. While one piece is updated, later pieces are read and earlier ones
 * are written, so the disk reads and writes all the time, for units of any size. Arrays in host
 * memory are updated in place; those in a GPU's memory are copied to the piece and back. The
 * rounded rows of the bf16 copy are written in the same way.
 *
 *   slot       entered by                              left by
 *   READING    read_ahead: up to UNITS_AHEAD pieces    update_piece, which waits for the read
 *   WRITING    update_piece                            read_ahead, for another piece; unit's end
 *
 * Pieces of all units are in the order of forward visits, so the first pieces of a unit are read
 * while the previous unit is updated. When a unit's task ends, its weights are on disk and the
 * pager may read them. */
#include <stdlib.h>

#include "trained/units_paged_internal.h"
#include "base/sizes.h"
#include "ops/elementwise.h"

/* ---- pieces ---- */

static void add_pieces(trained_units *units, const trained_span *span)
{
    for (int64_t first = 0; first < span->n; first += UNITS_PIECE_ELEMENTS)
        units->piece[units->n_pieces++] =
            (unit_piece){span, first, bl_min_i64(UNITS_PIECE_ELEMENTS, span->n - first)};
}

/* The embedding is visited first, so the last unit's pieces come first. */
static void list_unit(trained_units *units, int64_t unit)
{
    held_unit *u = &units->unit[unit];

    u->first_piece = units->n_pieces;
    for (int64_t i = units->spans->first[unit]; i < units->spans->first[unit + 1]; i++)
        if (u->is_paged) add_pieces(units, &units->spans->span[i]);
    u->n_pieces = units->n_pieces - u->first_piece;
}

bl_status trained_units_list_pieces(trained_units *units)
{
    int64_t n = 0, last = units->n_units - 1; /* the embedding's, or the tied table */

    for (int64_t i = 0; i < units->spans->n; i++)
        n += bl_ceil_div(units->spans->span[i].n, UNITS_PIECE_ELEMENTS);
    units->piece = calloc((size_t)n + 1, sizeof *units->piece);
    if (!units->piece) return BL_FAIL(BL_ENOMEM, "%lld pieces of the state", (long long)n);
    list_unit(units, last);
    for (int64_t u = 0; u < last; u++) list_unit(units, u);
    return BL_OK;
}

/* ---- moves ---- */

/* Begins to read n_bytes of a place, or to write them, unless they are in host memory. */
static bl_status begin_move(trained_units *units, piece_slot *slot, const bl_place *at,
                            void *memory, int64_t n_bytes, bool is_write)
{
    const bl_place host = {.tier = BL_TIER_HOST, .memory = memory};

    if (at->tier == BL_TIER_HOST) return BL_OK;
    return bl_transfer_add(&units->pieces, &slot->batch, is_write ? &host : at,
                           is_write ? at : &host, trained_units_place_bytes(at, n_bytes));
}

/* The arrays [0, n) of a piece. */
static bl_status begin_moves(trained_units *units, const unit_piece *piece, piece_slot *slot,
                             trained_array n, bool is_write)
{
    for (int i = 0; i < (int)n; i++) {
        trained_array array = (trained_array)i;
        bl_place at = trained_units_place(units, piece->span, array, piece->first);
        BL_TRY(begin_move(units, slot, &at, slot->memory[i],
                          piece->n * trained_units_element(units, array), is_write));
    }
    return BL_OK;
}

static bl_status end_moves(const trained_units *units, piece_slot *slot, int64_t unit)
{
    return trained_units_explain(units, unit, bl_transfer_wait(&slot->batch));
}

/* ---- the update ---- */

static piece_slot *slot_of(trained_units *units, int64_t piece)
{
    return &units->slot[piece % UNITS_SLOTS];
}

static bl_status read_ahead(trained_units *units)
{
    while (units->n_read < bl_min_i64(units->n_updated + UNITS_AHEAD, units->n_pieces)) {
        const unit_piece *piece = &units->piece[units->n_read];
        piece_slot *slot = slot_of(units, units->n_read);
        BL_TRY(end_moves(units, slot, piece->span->at.idx_unit));
        BL_TRY(begin_moves(units, piece, slot, TRAINED_N_ARRAYS, false));
        units->n_read++;
    }
    return BL_OK;
}

/* The memory of a piece's array during its update. */
static char *piece_memory(const trained_units *units, const unit_piece *p, const piece_slot *slot,
                          trained_array array)
{
    bl_place at = trained_units_place(units, p->span, array, p->first);
    return at.tier == BL_TIER_HOST ? at.memory : slot->memory[array];
}

/* Rounds floats [first, first + n) of a part into the copy, if there is one. */
static bl_status round_rows(trained_units *units, const bl_base_walk *at, int64_t first, int64_t n,
                            const float *rows, piece_slot *slot)
{
    if (!units->options.weights->copy) return BL_OK;
    bl_place to = trained_units_copy_place(units, at, first);
    bl_tensor rounded = bl_tensor_of(to.tier == BL_TIER_HOST ? to.memory : slot->rounded, BL_BF16);
    BL_TRY(bl_cast_on_host(
        units->disk,
        &(bl_cast_args){.n = n, .x = bl_tensor_f32((float *)(uintptr_t)rows), .y = rounded}));
    return begin_move(units, slot, &to, slot->rounded, (int64_t)bl_tensor_bytes(rounded, n), true);
}

static bl_status update_piece(trained_units *units)
{
    const unit_piece *piece = &units->piece[units->n_updated];
    piece_slot *slot = slot_of(units, units->n_updated);
    char *memory[TRAINED_N_ARRAYS];

    BL_TRY(read_ahead(units));
    BL_TRY(end_moves(units, slot, piece->span->at.idx_unit));
    for (int i = 0; i < TRAINED_N_ARRAYS; i++)
        memory[i] = piece_memory(units, piece, slot, (trained_array)i);
    BL_TRY(trained_units_adamw(units, piece->span, piece->first, piece->n, memory, units->disk,
                               bl_adamw_on_host));
    BL_TRY(round_rows(units, &piece->span->at, piece->span->first + piece->first, piece->n,
                      (const float *)memory[TRAINED_W], slot));
    BL_TRY(begin_moves(units, piece, slot, TRAINED_GRAD, true));
    units->n_updated++;
    return BL_OK;
}

typedef struct update_args {
    trained_units *units;
    int64_t unit;
} update_args;

static bl_status update_task(bl_stream *stream, const void *args)
{
    const update_args *a = args;
    trained_units *units = a->units;
    const held_unit *u = &units->unit[a->unit];
    int64_t end = u->first_piece + u->n_pieces;

    (void)stream;
    if (units->n_updated != u->first_piece)
        return BL_FAIL(BL_EINTERNAL, "the update of unit %lld is not the next", (long long)a->unit);
    while (units->n_updated < end) BL_TRY(update_piece(units));
    BL_TRY(read_ahead(units));
    for (int64_t p = bl_max_i64(u->first_piece, units->n_read - UNITS_SLOTS); p < end; p++)
        BL_TRY(end_moves(units, slot_of(units, p), a->unit));
    return BL_OK;
}

bl_status trained_units_queue_update(trained_units *units, int64_t unit)
{
    const update_args args = {units, unit};
    if (bl_transfer_is_simulated(units->options.device))
        return trained_units_model_update(units, unit);
    return bl_stream_call(units->disk, update_task, &args, sizeof args);
}

/* ---- rounding ---- */

typedef struct round_args {
    trained_units *units;
    bl_base_walk at;
} round_args;

/* In pieces, alternating two slots: no unit is WAITING. */
static bl_status round_task(bl_stream *stream, const void *args)
{
    const round_args *a = args;
    trained_units *units = a->units;
    int64_t total = (int64_t)a->at.part->shard_bytes / UNITS_FLOAT, unit = a->at.idx_unit;
    const trained_span page = {.at = a->at, .n = total};

    (void)stream;
    for (int64_t first = 0, n, i = 0; first < total; first += n, i ^= 1) {
        n = bl_min_i64(UNITS_PIECE_ELEMENTS, total - first);
        const unit_piece piece = {&page, first, n};
        piece_slot *slot = &units->slot[i];
        bl_place from = trained_units_place(units, &page, TRAINED_W, first);
        BL_TRY(end_moves(units, slot, unit));
        BL_TRY(begin_move(units, slot, &from, slot->memory[TRAINED_W], n * UNITS_FLOAT, false));
        BL_TRY(end_moves(units, slot, unit));
        BL_TRY(round_rows(units, &a->at, first, n,
                          (const float *)piece_memory(units, &piece, slot, TRAINED_W), slot));
    }
    for (int i = 0; i < 2; i++) BL_TRY(end_moves(units, &units->slot[i], unit));
    return BL_OK;
}

bl_status trained_units_queue_round(trained_units *units, const bl_base_walk *at)
{
    const round_args args = {units, *at};
    return bl_stream_call(units->disk, round_task, &args, sizeof args);
}
