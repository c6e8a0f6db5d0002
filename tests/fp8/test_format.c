/* SPDX-License-Identifier: Apache-2.0 */
/* The descriptors of all formats, and the bytes that follow from a descriptor: also of packed
 * codes, groups along a row, zero points and divisors, in formats that do not exist. Expected
 * bytes are counted weight by weight and group by group. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "fp8/fp8.h"

static const bl_format_descriptor packed[] = {
    {.name = "E2M1 codes, E8M0 per 32",
     .bits = 4,
     .dtype = BL_U8,
     .layout = BL_CODES_LOW_FIRST,
     .group_rows = 1,
     .group_cols = 32,
     .home = BL_SCALES_WHOLE,
     .scale_dtype = BL_F8_E8M0},
    {.name = "E2M1 codes, E4M3 per 16, fp32 per row",
     .bits = 4,
     .dtype = BL_U8,
     .layout = BL_CODES_LOW_FIRST,
     .group_rows = 1,
     .group_cols = 16,
     .home = BL_SCALES_WHOLE,
     .scale_dtype = BL_F8_E4M3,
     .has_divisor = true},
    {.name = "integers with zero points, bf16 per 128",
     .bits = 4,
     .dtype = BL_U8,
     .layout = BL_CODES_LOW_FIRST,
     .group_rows = 1,
     .group_cols = 128,
     .home = BL_SCALES_WHOLE,
     .scale_dtype = BL_BF16,
     .zero_point_bits = 4},
    {.name = "quantiles, fp32 per 64",
     .bits = 4,
     .dtype = BL_U8,
     .layout = BL_CODES_HIGH_FIRST,
     .group_rows = 1,
     .group_cols = 64,
     .home = BL_SCALES_WHOLE,
     .scale_dtype = BL_F32},
    {.name = "three bits, fp32 per 16 x 8",
     .bits = 3,
     .dtype = BL_U8,
     .layout = BL_CODES_LOW_FIRST,
     .group_rows = 16,
     .group_cols = 8,
     .home = BL_SCALES_WHOLE,
     .scale_dtype = BL_F32,
     .zero_point_bits = 3},
};

/* ---- bytes ---- */

static int64_t bytes_of_bits(int64_t n_bits)
{
    return n_bits / 8 + (n_bits % 8 != 0);
}

/* Counts what begins: a group at each multiple of its size. */
static int64_t count_groups(int64_t n, int64_t size)
{
    int64_t n_groups = 0;
    for (int64_t i = 0; i < n; i += size) n_groups++;
    return n_groups;
}

static void check_bytes(const bl_format_descriptor *f, int64_t rows, int64_t cols)
{
    bl_format_bytes n;
    int64_t down = 0, across = 0, rest = 0, width = 1, n_bits = 0;

    for (int64_t i = 0; i < cols; i++) n_bits += f->bits;
    if (f->home != BL_SCALES_NONE) {
        down = count_groups(rows, f->group_rows);
        across = f->group_cols == 0 ? 1 : count_groups(cols, f->group_cols);
        rest = bytes_of_bits(across * f->zero_point_bits) + (f->has_divisor ? 4 : 0);
        width = (int64_t)bl_dtype_bytes(f->scale_dtype);
    }
    assert_true(bl_format_measure(f, rows, cols, &n));
    assert_int_equal(n.row, bytes_of_bits(n_bits));
    assert_int_equal(n.codes, rows * n.row);
    assert_int_equal(n.scale_rows, down);
    assert_int_equal(n.scale_cols, across);
    int64_t align = f->has_divisor ? 4 : width;
    assert_int_equal(n.scale_row % align, 0); /* each row's scales are aligned */
    assert_in_range(n.scale_row - across * width - rest, 0, align - 1);
    assert_int_equal(n.scales, down * n.scale_row);
}

static void test_bytes(void **state)
{
    static const int64_t sizes[] = {0, 1, 2, 7, 15, 16, 17, 31, 32, 33, 127, 128, 129, 257, 511};

    (void)state;
    for (size_t r = 0; r < BL_COUNT(sizes); r++)
        for (size_t c = 0; c < BL_COUNT(sizes); c++) {
            for (size_t i = 0; i < BL_COUNT(packed); i++)
                check_bytes(&packed[i], sizes[r], sizes[c]);
            for (int f = 0; f < BL_FORMAT_COUNT; f++)
                check_bytes(bl_format_describe((bl_format)f), sizes[r], sizes[c]);
        }
}

/* Figures of published formats: bytes per weight of 16,384 x 53,248. */
static void test_bytes_per_weight(void **state)
{
    static const double per_weight[BL_COUNT(packed) - 1] = {
        0.5 + 1.0 / 32, 0.5 + 1.0 / 16 + 4.0 / 53248, 0.5 + 2.5 / 128, 0.5 + 4.0 / 64};
    const int64_t rows = 16384, cols = 53248;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(per_weight); i++) {
        bl_format_bytes n;
        assert_true(bl_format_measure(&packed[i], rows, cols, &n));
        double measured = (double)(n.codes + n.scales) / ((double)rows * (double)cols);
        assert_float_equal(measured, per_weight[i], 1e-8);
    }
}

static void test_overflows(void **state)
{
    const int64_t most = INT64_MAX;
    bl_format_bytes n;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(packed); i++) {
        const bl_format_descriptor *f = &packed[i];
        assert_false(bl_format_measure(f, -1, 4, &n));
        assert_false(bl_format_measure(f, 4, -1, &n));
        assert_false(bl_format_measure(f, most, most, &n));
        assert_false(bl_format_measure(f, most, 64, &n));
        assert_false(bl_format_measure(f, 64, most, &n));
        assert_true(bl_format_measure(f, 1, most / 8, &n)); /* bits are not counted */
    }
    /* The codes fit, the scales do not: fp32 for each weight. */
    bl_format_descriptor fine = packed[0];
    fine.group_cols = 1;
    fine.scale_dtype = BL_F32;
    assert_false(bl_format_measure(&fine, 1, most / 3, &n));
    assert_true(bl_format_measure(&fine, 1, most / 5, &n));
    assert_false(bl_format_measure(&fine, 5, most / 5, &n));
    assert_int_equal(bl_format_row_bytes(BL_FORMAT_F32, most / 2), INT64_MAX);
}

/* ---- the table ---- */

static void test_descriptors(void **state)
{
    (void)state;
    for (int i = 0; i < BL_FORMAT_COUNT; i++) {
        const bl_format_descriptor *f = bl_format_describe((bl_format)i);
        bl_format parsed, stored;
        assert_string_equal(bl_format_name((bl_format)i), f->name);
        assert_true(bl_format_parse(f->name, &parsed));
        assert_int_equal(parsed, i);
        assert_true(f->group_rows >= 1 && f->group_cols >= 0);
        if (f->layout == BL_CODES_WHOLE)
            assert_int_equal(f->bits, 8 * bl_dtype_bytes(f->dtype));
        else
            assert_int_equal(f->dtype, BL_U8);
        assert_int_equal(bl_format_has_scales((bl_format)i), f->home != BL_SCALES_NONE);
        bool is_stored = bl_format_from_dtype(f->dtype, &stored);
        assert_int_equal(is_stored, f->home == BL_SCALES_NONE);
        if (is_stored) assert_int_equal(stored, i);
        if (!is_stored) continue;
        assert_int_equal(f->group_rows * f->group_cols, 1);
        assert_int_equal(f->zero_point_bits, 0);
        assert_false(f->has_divisor);
        assert_null(f->values);
    }
}

static void test_sizes(void **state)
{
    bl_format format;
    size_t codes_bytes, n_scales;

    (void)state;
    assert_false(bl_format_parse("fp8", &format));
    assert_true(bl_format_sizes(BL_FORMAT_FP8_ROW, 172, 100, &codes_bytes, &n_scales));
    assert_true(codes_bytes == 17200 && n_scales == 172);
    assert_true(bl_format_sizes(BL_FORMAT_FP8_BLOCK, 172, 100, &codes_bytes, &n_scales));
    assert_true(codes_bytes == 17200 && n_scales == 2);
    assert_true(bl_format_sizes(BL_FORMAT_BF16, 106496, 16384, &codes_bytes, &n_scales));
    assert_true(codes_bytes == 2 * (size_t)106496 * 16384 && n_scales == 0);
    assert_false(bl_format_sizes(BL_FORMAT_F32, INT64_MAX, 4, &codes_bytes, &n_scales));
    assert_false(bl_format_sizes(BL_FORMAT_F32, -1, 4, &codes_bytes, &n_scales));
}

/* Where the scales of a row are, counted from the first row. */
static void test_scale_index(void **state)
{
    enum { ROWS = 300 };
    static const int64_t widths[] = {1, 127, 128, 129, 400};

    (void)state;
    for (int i = 0; i < BL_FORMAT_COUNT; i++)
        for (size_t w = 0; w < BL_COUNT(widths); w++) {
            const bl_format_descriptor *f = bl_format_describe((bl_format)i);
            bl_format_bytes n;
            int64_t index = 0;
            assert_true(bl_format_measure(f, ROWS, widths[w], &n));
            for (int64_t row = 0; row < ROWS; row++) {
                if (row > 0 && row % f->group_rows == 0) index += n.scale_cols;
                assert_int_equal(bl_format_scale_index((bl_format)i, row, widths[w]), index);
            }
        }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bytes),     cmocka_unit_test(test_bytes_per_weight),
        cmocka_unit_test(test_overflows), cmocka_unit_test(test_descriptors),
        cmocka_unit_test(test_sizes),     cmocka_unit_test(test_scale_index),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
