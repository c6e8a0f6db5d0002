/* SPDX-License-Identifier: Apache-2.0 */
/* units_files.c -- copies the arrays of a part to and from checkpoint files, in pieces; reads a
 * part's gradients for a dump. */
#include <string.h>

#include "adapter/internal.h"
#include "adapter/units_paged_internal.h"
#include "base/sizes.h"

static char *part_memory(const adapter_units *units, const bl_base_walk *at, adapter_array array)
{
    if (array == ADAPTER_W) return bl_pages_memory(units->options.weights->pages, at->index);
    if (units->unit[at->idx_unit].tier == BL_TIER_DISK) return NULL;
    return (char *)units->memory[array] + units->unit[at->idx_unit].offset + at->part->shard_offset;
}

/* Copies bytes [offset, offset + n_bytes) of the array between the disk and `memory`. */
static bl_status transfer(adapter_units *units, const bl_base_walk *at, adapter_array array,
                          int64_t offset, int64_t n_bytes, void *memory, bool is_write)
{
    bl_reader *reader;
    bl_io_read io = adapter_units_transfer(units, at, array, offset, n_bytes, memory, &reader);

    BL_TRY(is_write ? bl_reader_submit_write(reader, &io) : bl_reader_submit(reader, &io));
    return adapter_units_wait(units, reader, &io, at->idx_unit);
}

bl_status adapter_units_round_part(adapter_units *units, const bl_base_walk *at)
{
    char *piece = units->slot[0].memory[0];

    for (int64_t offset = 0, n; offset < (int64_t)at->part->shard_bytes; offset += n) {
        n = bl_min_i64(UNITS_PIECE_BYTES, (int64_t)at->part->shard_bytes - offset);
        BL_TRY(transfer(units, at, ADAPTER_W, offset, n, piece, false));
        BL_TRY(bl_model_round_rows(units->options.weights, at, offset / UNITS_FLOAT,
                                   n / UNITS_FLOAT, (const float *)piece, units->inline_stream));
    }
    return bl_stream_synchronize(units->inline_stream);
}

bl_status adapter_units_append(adapter_units *units, const bl_base_walk *at, adapter_array array,
                               bl_staging *staging, bl_safetensors_writer *writer)
{
    int64_t total = bl_round_up((int64_t)at->part->shard_bytes, BL_DEVICE_ALIGNMENT_BYTES);
    const char *memory = part_memory(units, at, array);

    if (memory)
        return adapter_append_floats(writer, staging, (const float *)memory, total / UNITS_FLOAT);
    for (int64_t offset = 0, n; offset < total; offset += n) {
        char *piece = units->slot[0].memory[0];
        n = bl_min_i64(UNITS_PIECE_BYTES, total - offset);
        BL_TRY(transfer(units, at, array, offset, n, piece, false));
        BL_TRY(bl_safetensors_writer_append(writer, piece, (size_t)n));
    }
    return BL_OK;
}

/* Rewrites the blocks [begin, end) of an array, with bytes [first, last) from the tensor. */
static bl_status rewrite(adapter_units *units, const bl_base_walk *at, adapter_array array,
                         int64_t begin, int64_t end, int64_t first, int64_t last,
                         const bl_stored_tensor *tensor, int64_t source)
{
    char *piece = units->slot[0].memory[0];

    if (first > begin || last < end)
        BL_TRY(transfer(units, at, array, begin, end - begin, piece, false));
    BL_TRY(bl_stored_tensor_read(tensor, source, (size_t)(last - first), piece + (first - begin)));
    return transfer(units, at, array, begin, end - begin, piece, true);
}

bl_status adapter_units_load(adapter_units *units, const bl_base_walk *at, adapter_array array,
                             int64_t offset, size_t n_bytes, const bl_stored_tensor *tensor,
                             int64_t source, bl_staging *staging)
{
    int64_t total = bl_round_up((int64_t)at->part->shard_bytes, BL_DEVICE_ALIGNMENT_BYTES),
            last = offset + (int64_t)n_bytes;
    char *memory = part_memory(units, at, array);

    if (memory) return adapter_load_bytes(staging, tensor, source, n_bytes, memory + offset);
    for (int64_t begin = offset / UNITS_PIECE_BYTES * UNITS_PIECE_BYTES, end; begin < last;
         begin = end) {
        end = bl_min_i64(begin + UNITS_PIECE_BYTES, total);
        int64_t from = bl_max_i64(begin, offset), to = bl_min_i64(end, last);
        BL_TRY(rewrite(units, at, array, begin, end, from, to, tensor, source + (from - offset)));
    }
    return BL_OK;
}

bl_status adapter_units_gradient(adapter_units *units, const bl_base_walk *at, const float **rows)
{
    *rows = (const float *)part_memory(units, at, ADAPTER_GRAD);
    if (*rows) return BL_OK;
    *rows = (const float *)units->frames;
    return transfer(units, at, ADAPTER_GRAD, 0, (int64_t)at->part->shard_bytes, units->frames,
                    false);
}
