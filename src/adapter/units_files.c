/* SPDX-License-Identifier: Apache-2.0 */
/* units_files.c -- reads the arrays of a span from checkpoint files, in pieces, and the gradients
 * of a span for a dump. units_behind.c writes checkpoint files. */
#include <string.h>

#include "adapter/internal.h"
#include "adapter/units_paged_internal.h"
#include "base/sizes.h"

/* Copies elements [first, first + n) of the array between the disk and `memory`. */
static bl_status transfer(adapter_units *units, const adapter_span *span, adapter_array array,
                          int64_t first, int64_t n, void *memory, bool is_write)
{
    bl_reader *reader;
    bl_io_read io = adapter_units_transfer(units, span, array, first, n, memory, &reader);

    BL_TRY(is_write ? bl_reader_submit_write(reader, &io) : bl_reader_submit(reader, &io));
    return adapter_units_wait(units, reader, &io, span->at.idx_unit);
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

static bl_dtype dtype_of(const adapter_units *units, adapter_array array)
{
    return adapter_units_element(units, array) == UNITS_FLOAT ? BL_F32 : BL_BF16;
}

/* Rewrites elements [begin, end) of an array, with [first, last) from the tensor. */
static bl_status rewrite(adapter_units *units, const adapter_span *span, adapter_array array,
                         int64_t begin, int64_t end, int64_t first, int64_t last,
                         const bl_stored_tensor *tensor, int64_t source)
{
    char *piece = units->slot[0].memory[array];

    if (first > begin || last < end)
        BL_TRY(transfer(units, span, array, begin, end - begin, piece, false));
    BL_TRY(read_elements(tensor, source, last - first, dtype_of(units, array),
                         piece + (first - begin) * adapter_units_element(units, array)));
    return transfer(units, span, array, begin, end - begin, piece, true);
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

bl_status adapter_units_load(adapter_units *units, const adapter_span *span, adapter_array array,
                             int64_t first, int64_t n, const bl_stored_tensor *tensor,
                             int64_t source, bl_staging *staging)
{
    int64_t total = bl_round_up(span->n * UNITS_FLOAT, BL_DEVICE_ALIGNMENT_BYTES) / UNITS_FLOAT;
    int64_t last = first + n;
    char *memory = adapter_units_span_memory(units, span, array);

    if (memory)
        return load_memory(staging, tensor, source, n, dtype_of(units, array),
                           memory + first * adapter_units_element(units, array));
    for (int64_t begin = first / UNITS_PIECE_ELEMENTS * UNITS_PIECE_ELEMENTS, end; begin < last;
         begin = end) {
        end = bl_min_i64(begin + UNITS_PIECE_ELEMENTS, total);
        int64_t from = bl_max_i64(begin, first), to = bl_min_i64(end, last);
        BL_TRY(rewrite(units, span, array, begin, end, from, to, tensor, source + (from - first)));
    }
    return BL_OK;
}

bl_status adapter_units_gradient(adapter_units *units, const adapter_span *span, const float **rows)
{
    char *memory = adapter_units_span_memory(units, span, ADAPTER_GRAD),
         *frames = units->device_frames;
    size_t n_bytes = (size_t)span->n * UNITS_FLOAT;

    *rows = (const float *)memory;
    if (units->unit[span->at.idx_unit].tier == BL_TIER_DEVICE) return BL_OK;
    if (!memory) {
        memory = units->host_frames;
        *rows = (const float *)memory;
        BL_TRY(transfer(units, span, ADAPTER_GRAD, 0, span->n, memory, false));
    }
    if (!frames) return BL_OK; /* a CPU */
    *rows = (const float *)frames;
    BL_TRY(bl_stream_copy(units->in, frames, memory, n_bytes));
    return bl_stream_synchronize(units->in);
}
