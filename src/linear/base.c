/* SPDX-License-Identifier: Apache-2.0 */
/* base.c -- the layout of a base, and its units: in device memory, or gathered by a ring. */
#include "linear/base_internal.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"

/* Far above any model, and so far below 2^63 that no sum over a unit's parts, and no rounding up,
 * overflows. */
static const size_t LARGEST_PART_BYTES = INT64_MAX / 64;

static bl_status too_large(const bl_weight *w)
{
    return BL_FAIL(BL_EINPUT, "a matrix of %lld x %lld is too large", (long long)w->rows,
                   (long long)w->cols);
}

/* Whether the segment's rows continue those of a part of codes. Groups are counted from the
 * segment's row 0: what is cut between the part's groups must be cut between the segment's. */
static bool continues(const bl_weight *w, const bl_base_part *codes, int segment, int64_t row_bytes)
{
    const bl_format last = w->segment[codes->first_segment].format,
                    next = w->segment[segment].format;
    bool is_paged = bl_format_describe(last)->home == BL_SCALES_PAGED;

    if (codes->row_bytes != row_bytes) return false;
    if (last != next) return !is_paged && bl_format_describe(next)->home != BL_SCALES_PAGED;
    return !is_paged || codes->rows % bl_format_describe(last)->group_rows == 0;
}

static bl_status add_segment(bl_base_matrix *matrix, int s, bl_base_part **codes)
{
    const bl_weight *w = &matrix->weight;
    const bl_format_descriptor *format = bl_format_describe(w->segment[s].format);
    bool is_paged = format->home == BL_SCALES_PAGED;
    bl_format_bytes n;

    if (!bl_format_measure(format, w->segment[s].rows, w->cols, &n) ||
        n.codes > LARGEST_PART_BYTES || n.scales > LARGEST_PART_BYTES)
        return too_large(w);
    if (!*codes || !continues(w, *codes, s, n.row)) {
        *codes = &matrix->part[matrix->n_parts];
        **codes = (bl_base_part){.first_segment = s, .group_rows = 1, .row_bytes = n.row};
        if (is_paged)
            (*codes)[1] = (bl_base_part){.first_segment = s,
                                         .is_scales = true,
                                         .group_rows = format->group_rows,
                                         .row_bytes = n.scale_row};
        matrix->n_parts += is_paged ? 2 : 1;
    }
    (*codes)->n_segments++;
    (*codes)->rows += w->segment[s].rows;
    if (is_paged) (*codes)[1].n_segments++, (*codes)[1].rows += n.scale_rows;
    return BL_OK;
}

/* Cuts rows of codes between their groups, and scales as their codes. */
static void cut(bl_base_part *part, int n_shards)
{
    bool has_scales = part[1].is_scales;
    int64_t group_rows = has_scales ? part[1].group_rows : 1,
            n_groups = bl_ceil_div(bl_ceil_div(part->rows, group_rows), n_shards);

    part->shard_rows = bl_min_i64(n_groups * group_rows, part->rows);
    if (has_scales) part[1].shard_rows = n_groups;
}

static bl_status finish_matrix(bl_base_unit *unit, bl_base_matrix *matrix, int n_shards)
{
    const bl_weight *w = &matrix->weight;
    bl_base_part *codes = NULL;

    matrix->n_parts = 0;
    memset(matrix->part, 0, sizeof matrix->part);
    for (int s = 0; s < w->n_segments; s++) BL_TRY(add_segment(matrix, s, &codes));
    for (int p = 0; p < matrix->n_parts; p++) {
        bl_base_part *part = &matrix->part[p];
        size_t gathered;
        if (!part->is_scales) cut(part, n_shards);
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

/* ---- a base ---- */

const char *linear_unit_name(const bl_base_layout *layout, int64_t unit, int64_t *index)
{
    const bl_base_unit *u = &layout->units[unit];
    bool is_table = u->whole_ring,
         is_second = is_table && unit > 0 && layout->units[unit - 1].whole_ring;

    *index = is_table ? -1 : u->is_group ? u->of : unit;
    if (u->is_group) return "the experts of layer";
    return is_second ? "the embedding" : is_table ? "the head" : "layer";
}

bl_status bl_base_create_resident(const bl_base_layout *layout, const void *shards, bl_base **out)
{
    *out = NULL;
    if (layout->n_shards != 1)
        return BL_FAIL(BL_EINTERNAL, "a resident base has one shard, not %d", layout->n_shards);
    bl_base *base = calloc(1, sizeof *base);
    if (!base) return BL_FAIL(BL_ENOMEM, "resident base");
    *base = (bl_base){.layout = layout, .shards = shards};
    *out = base;
    return BL_OK;
}

void bl_base_repeat_layers(bl_base *base, int64_t n_layers, int64_t n_distinct)
{
    base->n_layers = n_layers;
    base->n_distinct = n_distinct;
}

static int64_t own_unit(const bl_base *base, int64_t unit)
{
    if (base->n_distinct == 0) return unit;
    return unit < base->n_layers ? unit % base->n_distinct
                                 : unit - base->n_layers + base->n_distinct;
}

int64_t bl_base_group(const bl_base *base, int64_t unit, int64_t group)
{
    int64_t own = base->layout->units[own_unit(base, unit)].first_group + group;
    return base->n_distinct == 0 ? own : own - base->n_distinct + base->n_layers;
}

void bl_base_destroy(bl_base *base)
{
    if (base && base->store.destroy) base->store.destroy(base->store.self);
    free(base);
}

bl_status bl_base_prefetch(bl_base *base, int64_t unit)
{
    return base->ring ? bl_gather_ring_prefetch(base->ring, own_unit(base, unit)) : BL_OK;
}

/* *out = the matrix's weight with the codes or scales of part p starting at rows[p]. */
static void fill_weight(const bl_base_matrix *matrix, const void *const rows[BL_BASE_PARTS],
                        bl_weight *out)
{
    *out = matrix->weight;
    for (int p = 0; p < matrix->n_parts; p++) {
        const bl_base_part *part = &matrix->part[p];
        const char *at = rows[p];
        for (int s = part->first_segment; s < part->first_segment + part->n_segments; s++) {
            bl_weight_segment *segment = &out->segment[s];
            if (part->is_scales)
                segment->scales = at;
            else
                segment->codes = at;
            at += bl_ceil_div(segment->rows, part->group_rows) * part->row_bytes;
        }
    }
}

const bl_weight *bl_base_describe(const bl_base *base, int64_t unit, int matrix)
{
    return &base->layout->units[own_unit(base, unit)].matrix[matrix].weight;
}

bl_status bl_base_acquire(bl_base *base, int64_t unit, int matrix, bl_stream *stream,
                          bl_weight *out)
{
    int64_t own = own_unit(base, unit);
    const bl_base_unit *u = &base->layout->units[own];
    const bl_base_matrix *m = &u->matrix[matrix];
    const void *rows[BL_BASE_PARTS];
    int item = 0;

    for (int k = 0; k < matrix; k++) item += u->matrix[k].n_parts;
    for (int p = 0; p < m->n_parts; p++) {
        if (base->ring)
            BL_TRY(bl_gather_ring_acquire(base->ring, own, item + p, stream, &rows[p]));
        else
            rows[p] = base->shards + u->offset + m->part[p].shard_offset;
    }
    fill_weight(m, rows, out);
    return BL_OK;
}

bl_status bl_base_release(bl_base *base, int64_t unit, bl_stream *stream)
{
    return base->ring ? bl_gather_ring_release(base->ring, own_unit(base, unit), stream) : BL_OK;
}

bl_status bl_base_verify(bl_base *base)
{
    return base->store.verify ? base->store.verify(base->store.self) : BL_OK;
}

bl_status bl_base_shards_changed(bl_base *base, bl_stream *stream)
{
    return base->ring ? bl_gather_ring_shards_changed(base->ring, stream) : BL_OK;
}
