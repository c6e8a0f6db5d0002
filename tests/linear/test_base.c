/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts of row shards for any shapes and shard counts, and the base that is resident in device
 * memory. Links no offload. */
#include "base_case.h"

/* ---- layouts ---- */

/* Codes: rows of all segments from `first_segment` on. */
static void check_codes(const bl_weight *weight, const bl_base_part *part, int first_segment)
{
    int64_t rows = 0;

    assert_int_equal(part->first_segment, first_segment);
    assert_int_equal(part->group_rows, 1);
    for (int s = first_segment; s < first_segment + part->n_segments; s++) {
        const bl_weight_segment *segment = &weight->segment[s];
        assert_int_equal(part->row_bytes, bl_format_row_bytes(segment->format, weight->cols));
        rows += segment->rows;
    }
    assert_int_equal(part->rows, rows);
}

/* Scales, of the part before: each shard has those of its rows and no others; each segment's begin
 * with its rows. */
static void check_scales(const bl_weight *weight, const bl_base_part *part, int n_shards)
{
    const bl_base_part *codes = part - 1;
    int64_t rows = 0;

    assert_int_equal(part->first_segment, codes->first_segment);
    assert_int_equal(part->n_segments, codes->n_segments);
    for (int s = part->first_segment; s < part->first_segment + part->n_segments; s++) {
        const bl_weight_segment *segment = &weight->segment[s];
        const bl_format_descriptor *format = bl_format_describe(segment->format);
        bl_format_bytes n;
        assert_true(bl_format_measure(format, segment->rows, weight->cols, &n));
        assert_int_equal(format->home, BL_SCALES_PAGED);
        assert_int_equal(part->group_rows, format->group_rows);
        assert_int_equal(part->row_bytes, n.scale_row);
        rows += n.scale_rows;
        if (s + 1 < part->first_segment + part->n_segments)
            assert_int_equal(segment->rows % format->group_rows, 0);
    }
    assert_int_equal(part->rows, rows);
    for (int i = 0; i < n_shards; i++) {
        int64_t begin, end, first, last;
        bl_base_part_rows(codes, i, &begin, &end);
        bl_base_part_rows(part, i, &first, &last);
        assert_int_equal(begin, bl_min_i64(first * part->group_rows, codes->rows));
        assert_int_equal(end, bl_min_i64(last * part->group_rows, codes->rows));
    }
}

/* Each row on exactly one rank, in order. */
static void check_shards(const bl_base_part *part, int n_shards)
{
    int64_t next_row = 0;

    for (int i = 0; i < n_shards; i++) {
        int64_t begin, end;
        bl_base_part_rows(part, i, &begin, &end);
        assert_int_equal(begin, next_row);
        assert_true(end >= begin && end - begin <= part->shard_rows);
        assert_true(end == part->rows || end == (i + 1) * part->shard_rows);
        next_row = end;
    }
    assert_int_equal(next_row, part->rows);
    assert_int_equal(part->shard_bytes, part->shard_rows * part->row_bytes);
}

static void check_unit(const bl_base_unit *unit, int n_shards)
{
    size_t shard_end = 0, slot_end = 0;

    for (int m = 0; m < unit->n_matrices; m++) {
        const bl_base_matrix *matrix = &unit->matrix[m];
        int next_segment = 0;
        for (int p = 0; p < matrix->n_parts; p++) {
            const bl_base_part *part = &matrix->part[p];
            if (part->is_scales) {
                check_scales(&matrix->weight, part, n_shards);
            } else {
                check_codes(&matrix->weight, part, next_segment);
                next_segment += part->n_segments;
            }
            check_shards(part, n_shards);
            assert_true(part->shard_offset >= shard_end &&
                        part->shard_offset % BL_DEVICE_ALIGNMENT_BYTES == 0);
            assert_true(part->slot_offset >= slot_end &&
                        part->slot_offset % BL_DEVICE_ALIGNMENT_BYTES == 0);
            shard_end = part->shard_offset + part->shard_bytes;
            slot_end = part->slot_offset + part->shard_bytes * (size_t)n_shards;
        }
        assert_int_equal(next_segment, matrix->weight.n_segments);
    }
    assert_true(unit->shard_bytes >= shard_end && unit->slot_bytes >= slot_end);
}

static void test_layout(void **state)
{
    (void)state;
    for (int n_shards = 1; n_shards <= 70;
         n_shards++) { /* past the rows of every matrix but the head */
        bl_base_unit units[UNITS];
        bl_base_layout layout;
        size_t offset = 0;
        base_case_layout(n_shards, units, &layout);
        for (int u = 0; u < UNITS; u++) {
            assert_int_equal(units[u].offset, offset);
            offset += units[u].shard_bytes;
            check_unit(&units[u], n_shards);
        }
        assert_int_equal(layout.shard_bytes, offset);
        assert_int_equal(units[1].matrix[0].n_parts, 1);
        assert_int_equal(units[1].matrix[2].n_parts, 3);
        assert_int_equal(units[1].matrix[3].n_parts, 1);
        /* Blocks: a segment that ends inside a group ends its part. */
        assert_int_equal(units[0].matrix[0].n_parts, 6);
        assert_int_equal(units[0].matrix[2].n_parts, 5);
        assert_int_equal(units[BLOCKS_UNIT].matrix[1].n_parts, 4);
        assert_int_equal(units[BLOCKS_UNIT].matrix[1].part[0].n_segments, 2);
    }
}

/* Each part once, in order; none of a layout without units. */
static void test_walk(void **state)
{
    bl_base_unit units[UNITS];
    bl_base_layout layout;
    int64_t n = 0;

    (void)state;
    base_case_layout(3, units, &layout);
    bl_base_walk w = {.layout = &layout};
    for (int u = 0; u < UNITS; u++)
        for (int m = 0; m < units[u].n_matrices; m++)
            for (int p = 0; p < units[u].matrix[m].n_parts; p++, n++) {
                assert_true(bl_base_next(&w));
                assert_int_equal(w.index, n);
                assert_int_equal(w.idx_unit, u);
                assert_int_equal(w.idx_matrix, m);
                assert_int_equal(w.idx_part, p);
                assert_ptr_equal(w.matrix, &units[u].matrix[m]);
                assert_ptr_equal(w.part, &units[u].matrix[m].part[p]);
            }
    assert_false(bl_base_next(&w));
    assert_false(bl_base_next(&w));
    assert_int_equal(w.index, n);
    assert_int_equal(bl_base_part_count(&layout), n);
    layout.n_units = 0;
    assert_int_equal(bl_base_part_count(&layout), 0);
}

static void check_too_large(int64_t rows, int64_t cols)
{
    bl_base_unit unit = {.n_matrices = 1};
    bl_base_layout layout = {.n_shards = 8, .n_units = 1, .units = &unit};
    unit.matrix[0].weight = (bl_weight){.rows = rows,
                                        .cols = cols,
                                        .n_segments = 1,
                                        .segment = {{BL_FORMAT_F32, NULL, NULL, rows}}};
    assert_int_equal(bl_base_layout_finish(&layout), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "too large"));
}

static void test_layout_that_overflows(void **state)
{
    (void)state;
    check_too_large(INT64_MAX / 8, 16);
    check_too_large(1, INT64_MAX / 2);
    check_too_large((int64_t)1 << 31, (int64_t)1 << 31);
    check_too_large((int64_t)1 << 58, 1);

    /* Each unit fits, all together do not. */
    enum { MANY = 300 };
    bl_base_unit *units = test_alloc(MANY, sizeof *units);
    bl_base_layout layout = {.n_shards = 1, .n_units = MANY, .units = units};
    for (int u = 0; u < MANY; u++) {
        units[u].n_matrices = 1;
        units[u].matrix[0].weight =
            (bl_weight){.rows = (int64_t)1 << 28,
                        .cols = (int64_t)1 << 28,
                        .n_segments = 1,
                        .segment = {{BL_FORMAT_FP8_ROW, NULL, NULL, (int64_t)1 << 28}}};
    }
    assert_int_equal(bl_base_layout_finish(&layout), BL_EINPUT);
    free(units);
}

/* ---- sources ---- */

static void check_resident_scales(const bl_weight *w, int unit, int matrix, int segment)
{
    const bl_weight_segment *s = &w->segment[segment];
    const uint8_t *at = (const uint8_t *)s->scales;
    bl_format_bytes n;

    assert_true(bl_format_measure(bl_format_describe(s->format), s->rows, w->cols, &n));
    if (bl_format_describe(s->format)->home != BL_SCALES_PAGED) {
        assert_null(at);
        return;
    }
    assert_true(n.scales > 0);
    for (int64_t i = 0; i < (int64_t)n.scales; i++)
        assert_int_equal(
            at[i], base_case_byte(unit, matrix, segment, true, i / n.scale_row, i % n.scale_row));
}

static void test_resident_has_each_row(void **state)
{
    bl_base_unit units[UNITS];
    bl_base_layout layout;
    void *codes;
    bl_base *base;
    test_device d = test_device_create(1);
    (void)state;

    base_case_layout(1, units, &layout);
    assert_int_equal(base_case_shards(&layout, d.device, 0, &codes), BL_OK);
    assert_int_equal(bl_base_create_resident(&layout, codes, &base), BL_OK);
    for (int u = 0; u < UNITS; u++)
        for (int m = 0; m < units[u].n_matrices; m++) {
            bl_weight w;
            assert_int_equal(bl_base_acquire(base, u, m, d.stream, &w), BL_OK);
            for (int s = 0; s < w.n_segments; s++) {
                int64_t row_bytes = bl_format_row_bytes(w.segment[s].format, w.cols);
                const uint8_t *at = w.segment[s].codes;
                for (int64_t i = 0; i < w.segment[s].rows * row_bytes; i++)
                    assert_int_equal(at[i],
                                     base_case_byte(u, m, s, false, i / row_bytes, i % row_bytes));
                check_resident_scales(&w, u, m, s);
            }
            assert_int_equal(bl_base_release(base, u, d.stream), BL_OK);
        }
    bl_base_destroy(base);
    bl_device_free(d.device, BL_SPACE_DEVICE, codes);
    test_device_destroy(d);
}

static void test_wrong_number_of_shards(void **state)
{
    bl_base_unit units[UNITS];
    bl_base_layout layout;
    bl_base *base = (bl_base *)units;
    (void)state;

    base_case_layout(2, units, &layout);
    assert_int_equal(bl_base_create_resident(&layout, NULL, &base), BL_EINTERNAL);
    assert_null(base);
    bl_base_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_layout),
        cmocka_unit_test(test_walk),
        cmocka_unit_test(test_layout_that_overflows),
        cmocka_unit_test(test_resident_has_each_row),
        cmocka_unit_test(test_wrong_number_of_shards),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
