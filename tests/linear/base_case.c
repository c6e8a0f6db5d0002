/* SPDX-License-Identifier: Apache-2.0 */
/* base_case.c -- a small base with odd sizes, its codes as a function of place, and visits that
 * compare two bases. */
#include "base_case.h"

#include <unistd.h>

void base_case_layout(int n_shards, bl_base_unit units[UNITS], bl_base_layout *out)
{
    memset(units, 0, UNITS * sizeof *units);
    for (int u = 0; u < HEAD; u++) {
        units[u].n_matrices = BL_BASE_MATRICES;
        bl_base_matrix *m = units[u].matrix;
        bl_format narrow = u % 2 ? BL_FORMAT_FP8_ROW : BL_FORMAT_FP8_BLOCK;
        m[0].weight = (bl_weight){.rows = 47,
                                  .cols = 33,
                                  .n_segments = 3,
                                  .segment = {{narrow, NULL, NULL, 25},
                                              {narrow, NULL, NULL, 11},
                                              {narrow, NULL, NULL, 11}}};
        if (u == BLOCKS_UNIT)
            m[1].weight = (bl_weight){.rows = 456,
                                      .cols = 131,
                                      .n_segments = 3,
                                      .segment = {{BL_FORMAT_FP8_BLOCK, NULL, NULL, 256},
                                                  {BL_FORMAT_FP8_BLOCK, NULL, NULL, 130},
                                                  {BL_FORMAT_FP8_BLOCK, NULL, NULL, 70}}};
        else
            m[1].weight = (bl_weight){.rows = 3,
                                      .cols = 70 + u,
                                      .n_segments = 1,
                                      .segment = {{BL_FORMAT_F32, NULL, NULL, 3}}};
        m[2].weight = (bl_weight){.rows = 60,
                                  .cols = 33,
                                  .n_segments = 3, /* three widths: three parts */
                                  .segment = {{narrow, NULL, NULL, 30},
                                              {BL_FORMAT_BF16, NULL, NULL, 13},
                                              {narrow, NULL, NULL, 17}}};
        m[3].weight = (bl_weight){
            .rows = 21,
            .cols = 30,
            .n_segments = 2, /* two formats of one width: one part */
            .segment = {{BL_FORMAT_F16, NULL, NULL, 0}, {BL_FORMAT_BF16, NULL, NULL, 21}}};
    }
    units[HEAD].n_matrices = 1;
    units[HEAD].whole_ring = true;
    units[HEAD].matrix[0].weight = (bl_weight){
        .rows = 1001, .cols = 70, .n_segments = 1, .segment = {{BL_FORMAT_F32, NULL, NULL, 1001}}};
    *out = (bl_base_layout){.n_shards = n_shards, .n_units = UNITS, .units = units};
    assert_int_equal(bl_base_layout_finish(out), BL_OK);
}

uint8_t base_case_byte(int64_t unit, int matrix, int segment, bool is_scales, int64_t row,
                       int64_t byte)
{
    if (is_scales) segment += BL_BASE_SEGMENTS;
    return (uint8_t)(int)(127.0f * test_value((int)(unit * 100 + matrix * 10 + segment),
                                              row * 4096 + byte, 3));
}

void base_case_fill(const bl_base_walk *at, int shard, uint8_t *out)
{
    const bl_weight *weight = &at->matrix->weight;
    const bl_base_part *part = at->part;
    int64_t begin, end, first = 0;
    bl_base_part_rows(part, shard, &begin, &end);
    for (int s = part->first_segment; s < part->first_segment + part->n_segments; s++) {
        int64_t n_rows = bl_ceil_div(weight->segment[s].rows, part->group_rows);
        for (int64_t r = 0; r < n_rows; r++) {
            if (first + r < begin || first + r >= end) continue;
            uint8_t *row = out + (first + r - begin) * part->row_bytes;
            for (int64_t b = 0; b < part->row_bytes; b++)
                row[b] = base_case_byte(at->idx_unit, at->idx_matrix, s, part->is_scales, r, b);
        }
        first += n_rows;
    }
}

bl_status base_case_shards(const bl_base_layout *layout, bl_device *device, int shard, void **out)
{
    BL_TRY(bl_device_alloc(device, BL_SPACE_DEVICE, layout->shard_bytes, "shards", out));
    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);)
        base_case_fill(&w, shard,
                       (uint8_t *)*out + layout->units[w.idx_unit].offset + w.part->shard_offset);
    return BL_OK;
}

typedef struct compare_args {
    bl_weight got, want;
    int64_t unit;
    int matrix;
} compare_args;

static bl_status compare_weights(bl_stream *stream, const void *argument)
{
    const compare_args *a = argument;
    (void)stream;
    TEST_CHECK(a->got.rows == a->want.rows && a->got.cols == a->want.cols &&
               a->got.n_segments == a->want.n_segments);
    for (int s = 0; s < a->want.n_segments; s++) {
        const bl_weight_segment *got = &a->got.segment[s], *want = &a->want.segment[s];
        TEST_CHECK(got->rows == want->rows && got->format == want->format);
        if (memcmp(got->codes, want->codes,
                   (size_t)(want->rows * bl_format_row_bytes(want->format, a->want.cols))) != 0)
            return BL_FAIL(BL_EINTERNAL, "unit %lld, matrix %d, segment %d: other codes",
                           (long long)a->unit, a->matrix, s);
        if (got->format != BL_FORMAT_FP8_BLOCK) continue;
        bl_format_bytes n;
        TEST_CHECK(bl_format_measure(bl_format_describe(got->format), got->rows, a->want.cols, &n));
        if (memcmp(got->scales, want->scales, n.scales) != 0)
            return BL_FAIL(BL_EINTERNAL, "unit %lld, matrix %d, segment %d: other scales",
                           (long long)a->unit, a->matrix, s);
    }
    return BL_OK;
}
_Static_assert(sizeof(compare_args) <= BL_STREAM_ARGS_BYTES, "arguments of a task");

static bl_status pause_task(bl_stream *stream, const void *argument)
{
    (void)stream;
    usleep(*(const unsigned *)argument);
    return BL_OK;
}

/* Up to a millisecond, or nothing: another delay for each rank, visit and stream. */
static bl_status pause_stream(bl_stream *stream, int rank, int64_t visit, int which)
{
    float value = test_value(rank, visit * 2 + which, 17);
    unsigned us = value > 0 ? (unsigned)(1000 * value) : 0;
    return us ? bl_stream_call(stream, pause_task, &us, sizeof us) : BL_OK;
}

static bl_status visit(test_rank *self, const base_case *c, bl_base *sharded, bl_base *resident,
                       bl_stream *gathers, const int *order, int n, int at)
{
    int64_t unit = order[at];
    for (int ahead = 0; ahead < c->look_ahead && at + ahead < n; ahead++) {
        BL_TRY(bl_base_prefetch(sharded, order[at + ahead]));
        if (order[at + ahead] == HEAD) break; /* it will need the whole ring */
    }
    if (c->pauses) BL_TRY(pause_stream(gathers, self->rank, at, 0));
    for (int m = 0; m < (unit == HEAD ? 1 : BL_BASE_MATRICES); m++) {
        compare_args args = {.unit = unit, .matrix = m};
        BL_TRY(bl_base_acquire(sharded, unit, m, self->stream, &args.got));
        BL_TRY(bl_base_acquire(resident, unit, m, self->stream, &args.want));
        if (c->pauses && m == 1) BL_TRY(pause_stream(self->stream, self->rank, at, 1));
        BL_TRY(bl_stream_call(self->stream, compare_weights, &args, sizeof args));
    }
    if (at + 1 < n && order[at + 1] == unit) return BL_OK; /* visited again at once */
    return bl_base_release(sharded, unit, self->stream);
}

bl_status base_case_visit(test_rank *self, const base_case *c, bl_base *base, bl_base *resident,
                          bl_stream *gathers)
{
    static const int order[] = {0, 1, 2, 3, HEAD, 3, 2, 1,    0,    0, 1, 2, 3, HEAD, 3,
                                2, 1, 0, 0, 1,    2, 3, HEAD, HEAD, 2, 0, 3, 3, 1};
    int64_t allocations = bl_device_allocations(self->device);

    for (int i = 0; i < (int)BL_COUNT(order); i++)
        BL_TRY(visit(self, c, base, resident, gathers, order, BL_COUNT(order), i));
    BL_TRY(bl_stream_synchronize(self->stream));
    BL_TRY(bl_stream_synchronize(gathers));
    TEST_CHECK(bl_device_allocations(self->device) == allocations);
    return bl_base_verify(base);
}
