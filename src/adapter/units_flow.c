/* SPDX-License-Identifier: Apache-2.0 */
/* units_flow.c -- the update of PAGED units, on the host: their weights, moments and gradients pass
 * through a ring of pieces. While one piece is updated, later pieces are read and earlier pieces
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

#include "adapter/units_paged_internal.h"
#include "base/sizes.h"
#include "ops/elementwise.h"

/* ---- pieces ---- */

static void add_pieces(adapter_units *units, const adapter_span *span)
{
    for (int64_t first = 0; first < span->n; first += UNITS_PIECE_ELEMENTS)
        units->piece[units->n_pieces++] =
            (unit_piece){span, first, bl_min_i64(UNITS_PIECE_ELEMENTS, span->n - first)};
}

/* The embedding is visited first, so the last unit's pieces come first. */
static void list_unit(adapter_units *units, int64_t unit)
{
    held_unit *u = &units->unit[unit];

    u->first_piece = units->n_pieces;
    for (int64_t i = units->spans->first[unit]; i < units->spans->first[unit + 1]; i++)
        if (u->is_paged) add_pieces(units, &units->spans->span[i]);
    u->n_pieces = units->n_pieces - u->first_piece;
}

bl_status adapter_units_list_pieces(adapter_units *units)
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

/* ---- transfers ---- */

bl_io_read adapter_units_transfer(const adapter_units *units, const adapter_span *span,
                                  adapter_array array, int64_t first, int64_t n, void *memory,
                                  bl_reader **reader)
{
    const held_unit *u = &units->unit[span->at.idx_unit];
    int64_t element = adapter_units_element(units, array),
            begin = array == ADAPTER_W
                        ? bl_pages_offset(units->options.weights->pages, span->at.index) +
                              span->first * element
                        : u->offset[array] + adapter_units_span_offset(units, span, array);

    *reader = array == ADAPTER_W ? units->weights_reader : units->reader;
    return (bl_io_read){.offset_bytes = begin + first * element,
                        .n_bytes = (size_t)bl_round_up(n * element, BL_IO_ALIGN_BYTES),
                        .dst = memory};
}

bl_status adapter_units_wait(adapter_units *units, bl_reader *reader, bl_io_read *io, int64_t unit)
{
    bl_status st = bl_reader_wait(reader, io);

    if (st == BL_OK) return BL_OK;
    return unit < units->n_units && !units->layout->units[unit].whole_ring
               ? bl_error_prefix(st, "state of layer %lld", (long long)unit)
               : bl_error_prefix(st, "state of the vocabulary's weights");
}

static bl_status begin_io(adapter_units *units, const unit_piece *piece, piece_slot *slot,
                          adapter_array array, bool is_write)
{
    bl_reader *reader;

    slot->io[array] = adapter_units_transfer(units, piece->span, array, piece->first, piece->n,
                                             slot->memory[array], &reader);
    BL_TRY(is_write ? bl_reader_submit_write(reader, &slot->io[array])
                    : bl_reader_submit(reader, &slot->io[array]));
    slot->flies[array] = true;
    return BL_OK;
}

static bl_status begin_copy(adapter_units *units, const unit_piece *piece, piece_slot *slot,
                            adapter_array array, bool is_write)
{
    int64_t element = adapter_units_element(units, array);
    char *memory = adapter_units_span_memory(units, piece->span, array) + piece->first * element;
    size_t n_bytes = (size_t)(piece->n * element);

    slot->is_copying = true;
    return is_write ? bl_stream_copy(units->upload, memory, slot->memory[array], n_bytes)
                    : bl_stream_copy(units->fetch, slot->memory[array], memory, n_bytes);
}

/* Begins to read or write the arrays [0, n) of a piece that are not in host memory. */
static bl_status begin_transfers(adapter_units *units, const unit_piece *piece, piece_slot *slot,
                                 adapter_array n, bool is_write)
{
    for (int i = 0; i < (int)n; i++) {
        bl_tier place = adapter_units_place(units, piece->span, (adapter_array)i);
        if (place == BL_TIER_DISK)
            BL_TRY(begin_io(units, piece, slot, (adapter_array)i, is_write));
        else if (place == BL_TIER_DEVICE)
            BL_TRY(begin_copy(units, piece, slot, (adapter_array)i, is_write));
    }
    if (!slot->is_copying) return BL_OK;
    return bl_event_record(slot->copied, is_write ? units->upload : units->fetch);
}

static bl_status end_transfers(adapter_units *units, piece_slot *slot, int64_t unit)
{
    bl_status st = BL_OK;

    if (slot->is_copying) st = bl_event_synchronize(slot->copied);
    slot->is_copying = false;
    if (slot->rounded_flies) {
        slot->rounded_flies = false;
        bl_status ended = adapter_units_wait(units, units->copy_reader, &slot->rounded_io, unit);
        if (st == BL_OK) st = ended;
    }
    for (int i = 0; i < ADAPTER_N_ARRAYS; i++) {
        if (!slot->flies[i]) continue;
        slot->flies[i] = false;
        bl_status ended = adapter_units_wait(
            units, i == ADAPTER_W ? units->weights_reader : units->reader, &slot->io[i], unit);
        if (st == BL_OK) st = ended;
    }
    return st;
}

/* ---- the update ---- */

static piece_slot *slot_of(adapter_units *units, int64_t piece)
{
    return &units->slot[piece % UNITS_SLOTS];
}

static bl_status read_ahead(adapter_units *units)
{
    while (units->n_read < bl_min_i64(units->n_updated + UNITS_AHEAD, units->n_pieces)) {
        const unit_piece *piece = &units->piece[units->n_read];
        piece_slot *slot = slot_of(units, units->n_read);
        BL_TRY(end_transfers(units, slot, piece->span->at.idx_unit));
        BL_TRY(begin_transfers(units, piece, slot, ADAPTER_N_ARRAYS, false));
        units->n_read++;
    }
    return BL_OK;
}

/* The memory of a piece's array during its update. */
static char *piece_memory(const adapter_units *units, const unit_piece *p, const piece_slot *slot,
                          adapter_array array)
{
    if (adapter_units_place(units, p->span, array) != BL_TIER_HOST) return slot->memory[array];
    return adapter_units_span_memory(units, p->span, array) +
           p->first * adapter_units_element(units, array);
}

/* Writes the rows in slot->rounded, in whole blocks: a page ends at the end of a block. */
static bl_status write_rounded(adapter_units *units, const bl_base_walk *at, int64_t first,
                               int64_t n, piece_slot *slot)
{
    int64_t element = (int64_t)bl_dtype_bytes(BL_BF16),
            page = bl_pages_offset(units->options.weights->copy, at->index);

    slot->rounded_io = (bl_io_read){.offset_bytes = page + first * element,
                                    .n_bytes = (size_t)bl_round_up(n * element, BL_IO_ALIGN_BYTES),
                                    .dst = slot->rounded};
    BL_TRY(bl_reader_submit_write(units->copy_reader, &slot->rounded_io));
    slot->rounded_flies = true;
    return BL_OK;
}

/* Rounds floats [first, first + n) of a part into the copy, if there is one. */
static bl_status round_rows(adapter_units *units, const bl_base_walk *at, int64_t first, int64_t n,
                            const float *rows, piece_slot *slot)
{
    const bl_model_weights *weights = units->options.weights;

    if (!weights->copy) return BL_OK;
    bl_tensor copy = bl_model_copy_rows(weights, at, first);
    bl_tier place = adapter_units_copy_place(units, at);
    bl_tensor rounded = place == BL_TIER_HOST ? copy : bl_tensor_of(slot->rounded, copy.dtype);
    BL_TRY(bl_cast_on_host(
        units->disk,
        &(bl_cast_args){.n = n, .x = bl_tensor_f32((float *)(uintptr_t)rows), .y = rounded}));
    if (place == BL_TIER_HOST) return BL_OK;
    if (place == BL_TIER_DISK) return write_rounded(units, at, first, n, slot);
    slot->is_copying = true;
    return bl_stream_copy(units->upload, copy.data, rounded.data, bl_tensor_bytes(copy, n));
}

static bl_status update_piece(adapter_units *units)
{
    const unit_piece *piece = &units->piece[units->n_updated];
    piece_slot *slot = slot_of(units, units->n_updated);
    char *memory[ADAPTER_N_ARRAYS];

    BL_TRY(read_ahead(units));
    BL_TRY(end_transfers(units, slot, piece->span->at.idx_unit));
    for (int i = 0; i < ADAPTER_N_ARRAYS; i++)
        memory[i] = piece_memory(units, piece, slot, (adapter_array)i);
    bl_adamw_args args = adapter_units_adamw(units, piece->span, piece->first, piece->n, memory);
    BL_TRY(bl_adamw_on_host(units->disk, &args));
    BL_TRY(round_rows(units, &piece->span->at, piece->span->first + piece->first, args.n, args.w,
                      slot));
    BL_TRY(begin_transfers(units, piece, slot, ADAPTER_GRAD, true));
    units->n_updated++;
    return BL_OK;
}

typedef struct update_args {
    adapter_units *units;
    int64_t unit;
} update_args;

static bl_status update_task(bl_stream *stream, const void *args)
{
    const update_args *a = args;
    adapter_units *units = a->units;
    const held_unit *u = &units->unit[a->unit];
    int64_t end = u->first_piece + u->n_pieces;

    (void)stream;
    if (units->n_updated != u->first_piece)
        return BL_FAIL(BL_EINTERNAL, "the update of unit %lld is not the next", (long long)a->unit);
    while (units->n_updated < end) BL_TRY(update_piece(units));
    BL_TRY(read_ahead(units));
    for (int64_t p = bl_max_i64(u->first_piece, units->n_read - UNITS_SLOTS); p < end; p++)
        BL_TRY(end_transfers(units, slot_of(units, p), a->unit));
    return BL_OK;
}

bl_status adapter_units_queue_update(adapter_units *units, int64_t unit)
{
    const update_args args = {units, unit};
    return bl_stream_call(units->disk, update_task, &args, sizeof args);
}

/* ---- rounding ---- */

typedef struct round_args {
    adapter_units *units;
    bl_base_walk at;
} round_args;

/* In pieces, alternating two slots: no unit is WAITING. */
static bl_status round_task(bl_stream *stream, const void *args)
{
    const round_args *a = args;
    adapter_units *units = a->units;
    int64_t total = (int64_t)a->at.part->shard_bytes / UNITS_FLOAT;
    const adapter_span page = {.at = a->at, .n = total};
    const float *memory = (const float *)adapter_units_span_memory(units, &page, ADAPTER_W);

    (void)stream;
    for (int64_t first = 0, n, i = 0; first < total; first += n, i ^= 1) {
        n = bl_min_i64(UNITS_PIECE_ELEMENTS, total - first);
        const unit_piece piece = {&page, first, n};
        piece_slot *slot = &units->slot[i];
        BL_TRY(end_transfers(units, slot, a->at.idx_unit));
        const float *rows = memory ? memory + first : (const float *)slot->memory[ADAPTER_W];
        if (!memory) {
            BL_TRY(begin_io(units, &piece, slot, ADAPTER_W, false));
            BL_TRY(end_transfers(units, slot, a->at.idx_unit));
        }
        BL_TRY(round_rows(units, &a->at, first, n, rows, slot));
        if (slot->is_copying) BL_TRY(bl_event_record(slot->copied, units->upload));
    }
    for (int i = 0; i < 2; i++) BL_TRY(end_transfers(units, &units->slot[i], a->at.idx_unit));
    return BL_OK;
}

bl_status adapter_units_queue_round(adapter_units *units, const bl_base_walk *at)
{
    const round_args args = {units, *at};
    return bl_stream_call(units->disk, round_task, &args, sizeof args);
}
