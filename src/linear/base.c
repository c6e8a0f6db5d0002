/* SPDX-License-Identifier: Apache-2.0 */
#include "linear/base_backend.h"

#include "base/sizes.h"

/* Far above any model, and so far below 2^63 that no sum over a unit's parts, and no rounding up, overflows. */
static const size_t LARGEST_PART_BYTES = INT64_MAX / 64;

static bl_status too_large(const bl_weight *w)
{
    return BL_FAIL(BL_EINPUT, "a matrix of %lld x %lld is too large", (long long)w->rows,
                   (long long)w->cols);
}

static bl_status finish_matrix(bl_base_unit *unit, bl_base_matrix *matrix, int n_shards)
{
    const bl_weight *w = &matrix->weight;

    matrix->n_parts = 0;
    for (int s = 0; s < w->n_segments; s++) {
        size_t bytes, n_scales;
        if (!bl_format_sizes(w->segment[s].format, w->segment[s].rows, w->cols, &bytes,
                             &n_scales) ||
            bytes > LARGEST_PART_BYTES)
            return too_large(w);
        int64_t row_bytes = w->cols * (int64_t)bl_format_code_bytes(w->segment[s].format);
        bl_base_part *last = matrix->n_parts ? &matrix->part[matrix->n_parts - 1] : NULL;
        if (last && last->row_bytes == row_bytes) {
            last->rows += w->segment[s].rows;
            last->n_segments++;
        } else {
            matrix->part[matrix->n_parts++] = (bl_base_part){.first_segment = s,
                                                             .n_segments = 1,
                                                             .rows = w->segment[s].rows,
                                                             .row_bytes = row_bytes};
        }
    }
    for (int p = 0; p < matrix->n_parts; p++) {
        bl_base_part *part = &matrix->part[p];
        size_t gathered;
        part->shard_rows = bl_ceil_div(part->rows, n_shards);
        if (bl_mul_overflows((size_t)part->shard_rows, (size_t)part->row_bytes,
                             &part->shard_bytes) ||
            bl_mul_overflows(part->shard_bytes, (size_t)n_shards, &gathered) ||
            gathered > LARGEST_PART_BYTES)
            return too_large(w);
        part->shard_offset = unit->shard_bytes;
        part->slot_offset = unit->slot_bytes;
        unit->shard_bytes +=
            (size_t)bl_round_up((int64_t)part->shard_bytes, BL_DEVICE_ALIGNMENT_BYTES);
        unit->slot_bytes += (size_t)bl_round_up((int64_t)gathered, BL_DEVICE_ALIGNMENT_BYTES);
    }
    return BL_OK;
}

bl_status bl_base_layout_finish(bl_base_layout *layout)
{
    layout->shard_bytes = 0;
    for (int64_t u = 0; u < layout->n_units; u++) {
        bl_base_unit *unit = &layout->units[u];
        unit->shard_bytes = unit->slot_bytes = 0;
        for (int m = 0; m < unit->n_matrices; m++)
            BL_TRY(finish_matrix(unit, &unit->matrix[m], layout->n_shards));
        unit->offset = layout->shard_bytes;
        if (bl_add_overflows(layout->shard_bytes, unit->shard_bytes, &layout->shard_bytes))
            return BL_FAIL(BL_EINPUT, "the base is too large for this machine's addresses");
    }
    return BL_OK;
}

bool bl_base_next(bl_base_walk *walk)
{
    const bl_base_layout *layout = walk->layout;

    if (walk->part) walk->index++, walk->idx_part++;
    for (; walk->idx_unit < layout->n_units; walk->idx_unit++, walk->idx_matrix = 0) {
        const bl_base_unit *unit = &layout->units[walk->idx_unit];
        for (; walk->idx_matrix < unit->n_matrices; walk->idx_matrix++, walk->idx_part = 0) {
            walk->matrix = &unit->matrix[walk->idx_matrix];
            walk->part = &walk->matrix->part[walk->idx_part];
            if (walk->idx_part < walk->matrix->n_parts) return true;
        }
    }
    walk->part = NULL;
    return false;
}

int64_t bl_base_part_count(const bl_base_layout *layout)
{
    bl_base_walk walk = {.layout = layout};
    while (bl_base_next(&walk)) continue;
    return walk.index;
}

void bl_base_part_rows(const bl_base_part *part, int shard, int64_t *begin, int64_t *end)
{
    *begin = bl_min_i64(shard * part->shard_rows, part->rows);
    *end = bl_min_i64(*begin + part->shard_rows, part->rows);
}

void bl_base_fill_weight(const bl_base_matrix *matrix, const void *const codes[BL_BASE_SEGMENTS],
                         bl_weight *out)
{
    *out = matrix->weight;
    for (int p = 0; p < matrix->n_parts; p++) {
        const bl_base_part *part = &matrix->part[p];
        const char *at = codes[p];
        for (int s = part->first_segment; s < part->first_segment + part->n_segments; s++) {
            out->segment[s].codes = at;
            at += out->segment[s].rows * part->row_bytes;
        }
    }
}

void bl_base_destroy(bl_base *base)
{
    if (base) base->ops->destroy(base);
}

bl_status bl_base_prefetch(bl_base *base, int64_t unit)
{
    return base->ops->prefetch(base, unit);
}

bl_status bl_base_acquire(bl_base *base, int64_t unit, int matrix, bl_stream *stream,
                          bl_weight *out)
{
    return base->ops->acquire(base, unit, matrix, stream, out);
}

bl_status bl_base_release(bl_base *base, int64_t unit, bl_stream *stream)
{
    return base->ops->release(base, unit, stream);
}

bl_status bl_base_verify(bl_base *base)
{
    return base->ops->verify ? base->ops->verify(base) : BL_OK;
}
