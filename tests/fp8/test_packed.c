/* SPDX-License-Identifier: Apache-2.0 */
/* Packed formats: quantizing against tools/golden/packed/make_packed.py (NumPy), decoding against
 * each format's definition in double arithmetic, every kernel variant against the scalar one. All
 * comparisons are exact. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/sizes.h"
#include "fp8/cpu/kernels.h"
#include "fp8/fp8.h"
#include "fp8/packed.h"

static const bl_format packed[] = {BL_FORMAT_MXFP4, BL_FORMAT_INT4_G32, BL_FORMAT_INT4_G128,
                                   BL_FORMAT_NF4, BL_FORMAT_NVFP4};

static bl_pool *pool;

/* ---- the definition ---- */

static double e2m1(unsigned code)
{
    unsigned exponent = code >> 1 & 3, fraction = code & 1;
    double m = exponent ? ldexp(1 + 0.5 * fraction, (int)exponent - 1) : 0.5 * fraction;
    return code & 8 ? -m : m;
}

/* The scale at `at`; NVFP4's before the division. */
static double scale_at(bl_format format, const unsigned char *at)
{
    uint16_t half;
    float single;

    if (format == BL_FORMAT_MXFP4) return at[0] == 255 ? NAN : ldexp(1, at[0] - 127);
    if (format == BL_FORMAT_NVFP4) return (double)bl_e4m3_to_f32(at[0]);
    if (format == BL_FORMAT_NF4) {
        memcpy(&single, at, sizeof single);
        return (double)single;
    }
    memcpy(&half, at, sizeof half);
    return (double)bl_bf16_to_f32(half);
}

static double table_value(bl_format format, unsigned code)
{
    if (format == BL_FORMAT_MXFP4 || format == BL_FORMAT_NVFP4) return e2m1(code);
    if (format == BL_FORMAT_NF4) return (double)bl_format_describe(format)->values[code];
    return (double)(int)code - 8;
}

/* Both factors have at most 24 bits: their product is exact in double, and rounded once. */
static float weight_at(bl_format format, const uint8_t *codes, const unsigned char *scales,
                       int64_t cols, int64_t row, int64_t col)
{
    const bl_format_descriptor *f = bl_format_describe(format);
    bl_format_bytes n;
    assert_true(bl_format_measure(f, 1, cols, &n));
    uint8_t both = codes[row * n.row + col / 2];
    bool is_high = (col % 2 == 1) != (format == BL_FORMAT_NF4);
    const unsigned char *of_row = scales + row * n.scale_row;
    double scale =
        scale_at(format, of_row + col / f->group_cols * (int64_t)bl_dtype_bytes(f->scale_dtype));
    if (format == BL_FORMAT_NVFP4) {
        float divisor;
        memcpy(&divisor, of_row + n.scale_row - 4, sizeof divisor);
        scale = (double)((float)scale / divisor);
    }
    return (float)(table_value(format, is_high ? both >> 4 : both & 15) * scale);
}

/* ---- decoding ---- */

static void assert_same(float actual, float expected, const char *what, int64_t i)
{
    if (bl_f32_bits(actual) != bl_f32_bits(expected) && !(isnan(actual) && isnan(expected)))
        fail_msg("%s, weight %lld: %a, not %a", what, (long long)i, (double)actual,
                 (double)expected);
}

static void fill(uint64_t seed, unsigned char *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        bytes[i] = (unsigned char)(seed >> 56);
    }
}

/* Random bytes are codes and scales of any size: NaN, infinities and subnormals among them. Tiles
 * begin and end anywhere, inside bytes, too. */
static void check_decode(bl_format format, int64_t rows, int64_t cols)
{
    bl_format_bytes n;
    assert_true(bl_format_measure(bl_format_describe(format), rows, cols, &n));
    uint8_t *codes = malloc(n.codes);
    unsigned char *scales = malloc(n.scales);
    float *dst = malloc((size_t)(rows * cols) * sizeof *dst);

    fill(1 + (uint64_t)format, codes, n.codes);
    fill(99 + (uint64_t)cols, scales, n.scales);
    bl_fp8_dequantize(pool, format, codes, scales, rows, cols, dst);
    for (int64_t i = 0; i < rows * cols; i++)
        assert_same(dst[i], weight_at(format, codes, scales, cols, i / cols, i % cols),
                    bl_format_name(format), i);
    for (int64_t begin = 0; begin < bl_min_i64(cols, 70); begin += 3)
        for (int64_t end = begin; end <= cols; end += 29 + cols / 20) {
            int64_t ld = end - begin;
            for (int64_t i = 0; i < 2 * ld; i++) dst[i] = -1;
            bl_fp8_dequantize_tile(format, codes, scales, cols, 1, 3, begin, end, dst, ld);
            for (int64_t i = 0; i < 2 * ld; i++)
                assert_same(dst[i],
                            weight_at(format, codes, scales, cols, 1 + i / ld, begin + i % ld),
                            "tile", i);
        }
    free(dst), free(scales), free(codes);
}

static void test_decode(void **state)
{
    (void)state;
    for (size_t f = 0; f < BL_COUNT(packed); f++) {
        check_decode(packed[f], 4, 256);
        check_decode(packed[f], 3, 128 * 71); /* more scales than are decoded at a time */
    }
}

/* All pairs of codes in every variant, from every offset and for every length. */
static void test_variants(void **state)
{
    enum { N = 512, GROUP = 32 };
    uint8_t codes[N / 2];
    float scales[N / GROUP], got[N], want[N];

    (void)state;
    for (int i = 0; i < N / 2; i++) codes[i] = (uint8_t)i;
    for (int i = 0; i < N / GROUP; i++) scales[i] = (float)(i + 1) / 3;
    for (int v = 0; v < BL_FP8_VARIANT_COUNT; v++) {
        const bl_fp8_kernels *kernels = bl_fp8_kernels_variant((bl_fp8_variant)v);
        if (!kernels) {
            print_message("skip: this processor lacks FP8 variant %d\n", v);
            continue;
        }
        for (int layout = BL_CODES_LOW_FIRST; layout <= BL_CODES_HIGH_FIRST; layout++)
            for (int64_t first = 0; first < 70; first++)
                for (int64_t n = 0; first + n <= N; n += first % 2 ? 17 : 32) {
                    bl_packed_run run = {codes, (bl_code_layout)layout,
                                         bl_format_describe(BL_FORMAT_NF4)->values, scales, GROUP};
                    kernels->decode_packed(&run, first, got, n);
                    for (int64_t i = 0; i < n; i++) {
                        int64_t at = first + i;
                        uint8_t both = codes[at / 2];
                        bool is_high = (at % 2 == 1) == (layout == BL_CODES_LOW_FIRST);
                        want[i] = run.values[is_high ? both >> 4 : both & 15] * scales[at / GROUP];
                    }
                    assert_memory_equal(got, want, (size_t)n * sizeof *got);
                }
    }
}

/* ---- quantizing ---- */

static void *from_hex(const json_t *object, const char *key, size_t *n_bytes)
{
    const char *text = json_string_value(json_object_get(object, key));
    assert_non_null(text);
    *n_bytes = strlen(text) / 2;
    unsigned char *bytes = malloc(*n_bytes);
    for (size_t i = 0; i < *n_bytes; i++) {
        unsigned byte;
        assert_int_equal(sscanf(text + 2 * i, "%2x", &byte), 1);
        bytes[i] = (unsigned char)byte;
    }
    return bytes;
}

static void assert_bytes(const char *what, const char *format, const unsigned char *got,
                         const unsigned char *want, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (got[i] != want[i])
            fail_msg("%s of %s: byte %zu is 0x%02x, not 0x%02x", what, format, i, got[i], want[i]);
}

static void check_case(const json_t *item, const float *weights, int64_t rows, int64_t cols)
{
    const char *name = json_string_value(json_object_get(item, "format"));
    bool least_squares = json_is_true(json_object_get(item, "least_squares"));
    size_t n_codes, n_scales;
    unsigned char *codes = from_hex(item, "codes", &n_codes),
                  *scales = from_hex(item, "scales", &n_scales), *got_codes = malloc(n_codes),
                  *got_scales = malloc(n_scales);
    bl_format format;
    bl_format_bytes n, before;

    assert_true(bl_format_parse(name, &format));
    assert_true(bl_format_measure(bl_format_describe(format), rows, cols, &n));
    assert_int_equal(n.codes, n_codes);
    assert_int_equal(n.scales, n_scales);
    for (int64_t cut = 0; cut <= rows; cut += 3) { /* shards give the same */
        memset(got_codes, 0xa5, n_codes), memset(got_scales, 0xa5, n_scales);
        assert_true(bl_format_measure(bl_format_describe(format), cut, cols, &before));
        assert_int_equal(bl_packed_quantize(pool, format, least_squares, BL_F32, weights, 0, cut,
                                            cols, got_codes, got_scales),
                         BL_OK);
        assert_int_equal(bl_packed_quantize(pool, format, least_squares, BL_F32,
                                            weights + cut * cols, cut, rows, cols,
                                            got_codes + before.codes, got_scales + before.scales),
                         BL_OK);
        assert_bytes("scales", name, got_scales, scales, n_scales);
        assert_bytes("codes", name, got_codes, codes, n_codes);
    }
    free(got_scales), free(got_codes), free(scales), free(codes);
}

static void test_golden(void **state)
{
    json_t *golden, *item;
    size_t i, n_weights;

    (void)state;
    assert_int_equal(bl_json_load("tests/golden/packed/cases.json", 1 << 20, &golden), BL_OK);
    int64_t rows = json_integer_value(json_object_get(golden, "rows")),
            cols = json_integer_value(json_object_get(golden, "cols"));
    float *weights = from_hex(golden, "weights", &n_weights);
    assert_int_equal(n_weights, rows * cols * 4);
    json_array_foreach(json_object_get(golden, "cases"), i, item)
        check_case(item, weights, rows, cols);
    assert_int_equal(i, 8);
    free(weights);
    json_decref(golden);
}

/* What a format holds comes back: each scale with each code once, from bf16, too. */
static void check_round_trip(bl_format format, float scale)
{
    enum { COLS = 128 };
    const float *values = bl_format_describe(format)->values;
    float weights[COLS], back[COLS];
    uint16_t halves[COLS];
    uint8_t codes[COLS / 2];
    float scales[8];

    for (int i = 0; i < COLS; i++) {
        weights[i] = values[i % 16] * scale;
        halves[i] = bl_f32_to_bf16(weights[i]);
    }
    assert_int_equal(
        bl_packed_quantize(pool, format, true, BL_F32, weights, 0, 1, COLS, codes, scales), BL_OK);
    bl_fp8_dequantize(pool, format, codes, scales, 1, COLS, back);
    for (int i = 0; i < COLS; i++) assert_true(back[i] == weights[i]);
    if (format == BL_FORMAT_NF4) return; /* its values are no bf16 numbers */
    assert_int_equal(
        bl_packed_quantize(pool, format, true, BL_BF16, halves, 0, 1, COLS, codes, scales), BL_OK);
    bl_fp8_dequantize(pool, format, codes, scales, 1, COLS, back);
    for (int i = 0; i < COLS; i++) assert_true(back[i] == bl_bf16_to_f32(halves[i]));
}

static void test_round_trip(void **state)
{
    (void)state;
    for (int e = -100; e <= 100; e++) check_round_trip(BL_FORMAT_MXFP4, ldexpf(1, e));
    for (int e = -100; e <= 100; e++) check_round_trip(BL_FORMAT_NF4, ldexpf(1.25f, e));
}

static void test_rejections(void **state)
{
    static const struct {
        float bad;
        const char *text;
    } cases[] = {{NAN, "row 9, column 200: the weight is NaN"},
                 {INFINITY, "row 9, column 200: the weight is infinite"}};
    enum { ROWS = 4, COLS = 256 };
    static float weights[ROWS * COLS];
    uint8_t codes[ROWS * COLS / 2];
    float scales[ROWS * COLS / 32];

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        for (size_t f = 0; f + 1 < BL_COUNT(packed); f++) {
            weights[2 * COLS + 200] = cases[i].bad;
            assert_int_equal(bl_packed_quantize(pool, packed[f], true, BL_F32, weights, 7, 11, COLS,
                                                codes, scales),
                             BL_EINPUT);
            assert_string_equal(bl_error_text(), cases[i].text);
        }
    assert_int_equal(
        bl_packed_quantize(pool, BL_FORMAT_NF4, true, BL_F32, weights, 0, 4, 96, codes, scales),
        BL_EINPUT);
    assert_string_equal(bl_error_text(),
                        "rows of 96 weights are not whole groups of 64, as nf4 needs");
    assert_int_equal(
        bl_packed_quantize(pool, BL_FORMAT_NVFP4, true, BL_F32, weights, 0, 4, 96, codes, scales),
        BL_EUSAGE);
    assert_int_equal(
        bl_packed_quantize(pool, BL_FORMAT_MXFP4, true, BL_F64, weights, 0, 4, 96, codes, scales),
        BL_EINPUT);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decode),     cmocka_unit_test(test_variants),
        cmocka_unit_test(test_golden),     cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_rejections),
    };
    if (bl_pool_create(2, &pool) != BL_OK) return 1;
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    bl_pool_destroy(pool);
    return n_failed;
}
