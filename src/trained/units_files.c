/* SPDX-License-Identifier: Apache-2.0 */
/* units_files.c -- full fine-tuning, where moments may be on disk: reads the moments and weights of
 * a span of trained rows from checkpoint files, in pieces, and its gradients for a dump.
 * units_behind.c writes checkpoint files. */
#include <string.h>

#include "trained/internal.h"
#include "trained/units_paged_internal.h"
#include "base/sizes.h"

/* Moves elements [first, first + n) of an array that is on disk from or to `memory`. */
static bl_status move(trained_units *units, const trained_span *span, trained_array array,
                      int64_t first, int64_t n, void *memory, bool is_write)
{
    const bl_place at = trained_units_place(units, span, array, first),
                   host = {.tier = BL_TIER_HOST, .memory = memory};
    size_t n_bytes = trained_units_place_bytes(&at, n * trained_units_element(units, array));

    return trained_units_explain(
        units, span->at.idx_unit,
        bl_transfer_now(&units->pieces, is_write ? &host : &at, is_write ? &at : &host, n_bytes));
}

/* ---- reading ---- */

/* Elements [first, first + n) of a stored tensor, F32 or BF16, in the dtype `to`, which is one of
 * these. */
static bl_status read_elements(const bl_stored_tensor *tensor, int64_t first, int64_t n,
                               bl_dtype to, void *dst)
{
    enum { CHUNK = 4096 };
    float values[CHUNK];
    uint16_t halves[CHUNK];
    int64_t element = (int64_t)bl_dtype_bytes(tensor->dtype);

    if (tensor->dtype == to)
        return bl_stored_tensor_read(tensor, first * element, (size_t)(n * element), dst);
    for (int64_t at = 0, count; at < n; at += count) {
        count = bl_min_i64(CHUNK, n - at);
        BL_TRY(bl_stored_tensor_read(tensor, (first + at) * element, (size_t)(count * element),
                                     to == BL_F32 ? (void *)halves : values));
        for (int64_t i = 0; i < count; i++)
            if (to == BL_F32)
                ((float *)dst)[at + i] = bl_bf16_to_f32(halves[i]);
            else
                ((uint16_t *)dst)[at + i] = bl_f32_to_bf16(values[i]);
    }
    return BL_OK;
}

static bl_dtype dtype_of(const trained_units *units, trained_array array)
{
    return trained_units_element(units, array) == UNITS_FLOAT ? BL_F32 : BL_BF16;
}

/* Rewrites elements [begin, end) of an array, with [first, last) from the tensor. */
static bl_status rewrite(trained_units *units, const trained_span *span, trained_array array,
                         int64_t begin, int64_t end, int64_t first, int64_t last,
                         const bl_stored_tensor *tensor, int64_t source)
{
    char *piece = units->slot[0].memory[array];

    if (first > begin || last < end)
        BL_TRY(move(units, span, array, begin, end - begin, piece, false));
    BL_TRY(read_elements(tensor, source, last - first, dtype_of(units, array),
                         piece + (first - begin) * trained_units_element(units, array)));
    return move(units, span, array, begin, end - begin, piece, true);
}

static bl_status load_memory(bl_staging *staging, const bl_stored_tensor *tensor, int64_t source,
                             int64_t n, bl_dtype dtype, char *memory)
{
    int64_t element = (int64_t)bl_dtype_bytes(dtype), most = (int64_t)staging->n_bytes / element;

    for (int64_t at = 0, count; at < n; at += count) {
        count = bl_min_i64(most, n - at);
        BL_TRY(read_elements(tensor, source + at, count, dtype, staging->bytes));
        BL_TRY(bl_staging_upload(staging, memory + at * element, staging->bytes,
                                 (size_t)(count * element)));
    }
    return BL_OK;
}

bl_status trained_units_load(trained_units *units, const trained_span *span, trained_array array,
                             int64_t first, int64_t n, const bl_stored_tensor *tensor,
                             int64_t source, bl_staging *staging)
{
    int64_t total = bl_round_up(span->n * UNITS_FLOAT, BL_DEVICE_ALIGNMENT_BYTES) / UNITS_FLOAT;
    int64_t last = first + n;
    bl_place at = trained_units_place(units, span, array, first);

    if (at.tier != BL_TIER_DISK)
        return load_memory(staging, tensor, source, n, dtype_of(units, array), at.memory);
    for (int64_t begin = first / UNITS_PIECE_ELEMENTS * UNITS_PIECE_ELEMENTS, end; begin < last;
         begin = end) {
        end = bl_min_i64(begin + UNITS_PIECE_ELEMENTS, total);
        int64_t from = bl_max_i64(begin, first), to = bl_min_i64(end, last);
        BL_TRY(rewrite(units, span, array, begin, end, from, to, tensor, source + (from - first)));
    }
    return BL_OK;
}

bl_status trained_units_gradient(trained_units *units, const trained_span *span, const float **rows)
{
    const bl_place frame = {.tier = BL_TIER_DEVICE, .memory = units->device_frames};
    bl_place at = trained_units_place(units, span, TRAINED_GRAD, 0);

    if (at.tier == BL_TIER_DISK) {
        BL_TRY(move(units, span, TRAINED_GRAD, 0, span->n, units->host_frames, false));
        at = (bl_place){.tier = BL_TIER_HOST, .memory = units->host_frames};
    }
    *rows = at.memory;
    if (!units->is_gpu || at.tier == BL_TIER_DEVICE) return BL_OK;
    *rows = frame.memory;
    return bl_transfer_now(&units->visit, &at, &frame, (size_t)span->n * UNITS_FLOAT);
}
