/* SPDX-License-Identifier: Apache-2.0 */
/* spans.c -- intersects the trained rows with those of a rank. */
#include "trained/spans_internal.h"

#include <stdlib.h>

#include "base/sizes.h"
#include "device/device.h"

static const bl_trained_spans *spans_of(const bl_trained_set *set, const bl_base_walk *at)
{
    return &set->unit[at->idx_unit].matrix[at->idx_matrix];
}

bool trained_spans_have(const trained_spans *spans, const bl_base_walk *at)
{
    return spans_of(spans->set, at)->n > 0;
}

/* Sets the span except its places. False: the rank has none of the rows. */
static bool intersect(const bl_base_walk *at, const bl_trained_span *trained, int rank,
                      trained_span *out)
{
    enum { FLOAT = sizeof(float) };
    const bl_base_part *part = at->part;
    int64_t begin, end, cols = part->row_bytes / FLOAT;

    *out = (trained_span){.at = *at};
    bl_base_part_rows(part, rank, &begin, &end);
    if (trained->n == part->rows) {
        out->row = rank * part->shard_rows;
        out->n_rows = part->shard_rows;
        out->n = (int64_t)part->shard_bytes / FLOAT;
        out->file_n = bl_round_up((int64_t)part->shard_bytes, BL_DEVICE_ALIGNMENT_BYTES) / FLOAT;
        return true;
    }
    out->row = bl_max_i64(begin, trained->begin);
    out->n_rows = bl_min_i64(end, trained->begin + trained->n) - out->row;
    out->first = (out->row - begin) * cols;
    out->n = out->file_n = out->n_rows * cols;
    return out->n_rows > 0;
}

/* Places the span after the unit's earlier spans, which take n_bytes. */
static void place(trained_span *span, int64_t n_bytes[TRAINED_ELEMENTS])
{
    static const int64_t sizes[TRAINED_ELEMENTS] = {sizeof(float), sizeof(uint16_t)};

    for (int e = 0; e < TRAINED_ELEMENTS; e++) {
        span->offset[e] = n_bytes[e];
        n_bytes[e] += bl_round_up(span->n * sizes[e], BL_DEVICE_ALIGNMENT_BYTES);
    }
}

/* Lists the spans of a rank; span NULL: only raises unit_bytes to the rank's. */
static void list(trained_spans *s, int rank, trained_span *span)
{
    int64_t n = 0, unit = -1, n_bytes[TRAINED_ELEMENTS] = {0}, file_n = 0;

    for (bl_base_walk at = {.layout = s->layout}; bl_base_next(&at);) {
        const bl_trained_spans *trained = spans_of(s->set, &at);
        while (unit < at.idx_unit) {
            unit++;
            n_bytes[TRAINED_F32] = n_bytes[TRAINED_BF16] = 0;
            if (span) s->first[unit] = n;
        }
        for (int i = 0; i < trained->n; i++) {
            trained_span found;
            if (!intersect(&at, &trained->at[i], rank, &found)) continue;
            found.idx = i;
            found.file_first = file_n;
            file_n += found.file_n;
            place(&found, n_bytes);
            for (int e = 0; e < TRAINED_ELEMENTS; e++)
                s->unit_bytes[unit][e] = bl_max_i64(s->unit_bytes[unit][e], n_bytes[e]);
            if (span) span[n] = found;
            n++;
        }
    }
    if (!span) return;
    s->n = s->first[s->layout->n_units] = n;
    s->file_n = file_n;
}

bl_status trained_spans_create(const bl_base_layout *layout, const bl_trained_set *set, int rank,
                               trained_spans *out)
{
    size_t n_units = (size_t)layout->n_units,
           most = (size_t)bl_base_part_count(layout) * BL_TRAINED_SPANS;

    *out = (trained_spans){.layout = layout,
                           .set = set,
                           .span = calloc(most, sizeof *out->span),
                           .first = calloc(n_units + 1, sizeof *out->first),
                           .unit_bytes = calloc(n_units, sizeof *out->unit_bytes)};
    if (!out->span || !out->first || !out->unit_bytes) {
        trained_spans_free(out);
        return BL_FAIL(BL_ENOMEM, "the list of trained rows");
    }
    list(out, rank, out->span);
    return BL_OK;
}

void trained_spans_level(trained_spans *spans)
{
    for (int i = 0; i < spans->layout->n_shards; i++) list(spans, i, NULL);
}

void trained_spans_free(trained_spans *spans)
{
    free(spans->span);
    free(spans->first);
    free(spans->unit_bytes);
    *spans = (trained_spans){.n = 0};
}

const trained_span *trained_span_at(const trained_spans *spans, int64_t unit, int matrix,
                                    int64_t row)
{
    for (int64_t i = spans->first[unit]; i < spans->first[unit + 1]; i++) {
        const trained_span *s = &spans->span[i];
        if (s->at.idx_matrix == matrix && row >= s->row && row < s->row + s->n_rows) return s;
    }
    return NULL;
}
