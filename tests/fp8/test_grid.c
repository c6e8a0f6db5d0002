/* SPDX-License-Identifier: Apache-2.0 */
/* test_grid.c -- codes with blocks of any size, decoded: values, and those that are not held. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>

#include "fp8/codec.h"
#include "fp8/grid.h"

enum { ROWS = 21, COLS = 300, MAX_BLOCKS = ROWS * COLS };

/* Blocks from single weights to one for all; some end at the edge, others beyond it. */
static void test_values(void **state)
{
    static const int64_t sizes[][2] = {{1, 32}, {1, 1}, {4, 7}, {21, 300}, {5, 257}, {64, 64}};
    static uint8_t codes[ROWS * COLS];
    static float scales[MAX_BLOCKS], wide[ROWS * COLS];
    static uint16_t halves[ROWS * COLS];
    bl_pool *pool;

    (void)state;
    assert_int_equal(bl_pool_create(3, &pool), BL_OK);
    for (int i = 0; i < ROWS * COLS; i++) codes[i] = (uint8_t)(i * 37 % 127 + i / 128 % 2 * 128);
    for (int i = 0; i < MAX_BLOCKS; i++) scales[i] = ldexpf(1, i % 23 - 11);
    for (size_t s = 0; s < sizeof sizes / sizeof sizes[0]; s++) {
        int64_t r = sizes[s][0], c = sizes[s][1], first = 3;
        bl_fp8_grid grid = {
            .scales = scales, .n_cols = (COLS + c - 1) / c, .block_rows = r, .block_cols = c};
        assert_int_equal(bl_fp8_grid_decode(pool, &grid, codes, first, ROWS, COLS, BL_F32, wide),
                         BL_OK);
        assert_int_equal(bl_fp8_grid_decode(pool, &grid, codes, first, ROWS, COLS, BL_BF16, halves),
                         BL_OK);
        for (int64_t i = 0; i < (ROWS - first) * COLS; i++) {
            int64_t row = first + i / COLS, col = i % COLS;
            float value = bl_e4m3_to_f32(codes[i]) * scales[row / r * grid.n_cols + col / c];
            assert_true(wide[i] == value);
            assert_true(bl_bf16_to_f32(halves[i]) == value);
        }
    }
    bl_pool_destroy(pool);
}

static void assert_not_held(uint8_t code, float scale, bl_dtype dtype, const char *text)
{
    uint8_t codes[2 * COLS] = {0};
    float dst[2 * COLS];
    bl_fp8_grid grid = {.scales = &scale, .n_cols = 1, .block_rows = 9, .block_cols = COLS};
    bl_pool *pool;

    codes[COLS + 270] = code;
    codes[COLS + 271] = code;
    assert_int_equal(bl_pool_create(1, &pool), BL_OK);
    bl_status st = bl_fp8_grid_decode(pool, &grid, codes, 4, 6, COLS, dtype, dst);
    bl_pool_destroy(pool);
    assert_int_equal(st, text ? BL_EINPUT : BL_OK);
    if (text) assert_string_equal(bl_error_text(), text);
}

static void test_values_that_are_not_held(void **state)
{
    (void)state;
    assert_not_held(0x7f, 1, BL_F32, "row 5, column 270: code * scale is nan, not finite");
    assert_not_held(0x7f, 1, BL_BF16, "row 5, column 270: code * scale is nan, not finite");
    assert_not_held(0x7e, 0x1p127f, BL_F32, "row 5, column 270: code * scale is inf, not finite");
    assert_not_held(0x01, 0x1p-127f, BL_F32, NULL);
    assert_not_held(0x01, 0x1p-127f, BL_BF16,
                    "row 5, column 270: code * scale is 1.14794e-41, which bf16 does not hold");
    assert_not_held(0x01, 0x1p-124f, BL_BF16, NULL); /* the smallest subnormal */
    assert_not_held(0x3b, 0.3f, BL_BF16,
                    "row 5, column 270: code * scale is 0.4125, which bf16 does not hold");
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_values),
                                       cmocka_unit_test(test_values_that_are_not_held)};
    return cmocka_run_group_tests_name("grid", tests, NULL, NULL);
}
