/* SPDX-License-Identifier: Apache-2.0 */
/* The codecs against their definition in double arithmetic, every kernel variant against the
 * codecs, and matrices against both. All comparisons are exact: nothing here may round
 * differently. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "fp8/fp8.h"
#include "fp8/cpu/kernels.h"

/* ---- an independent reference: a code's value by its fields, an encoder by search ---- */

enum { FRACTION_BITS = 3, BIAS = 7, LAST_CODE = 0x7e };

static double value_of(unsigned code)
{
    int exponent = (int)(code & 0x7f) >> FRACTION_BITS;
    double fraction = (double)(code & ((1u << FRACTION_BITS) - 1)) / (1 << FRACTION_BITS);
    double magnitude = exponent ? ldexp(1 + fraction, exponent - BIAS) : ldexp(fraction, 1 - BIAS);
    return code & 0x80 ? -magnitude : magnitude;
}

/* The nearest code, ties to the even one. */
static uint8_t reference_e4m3(float value)
{
    uint8_t sign = signbit(value) ? 0x80 : 0;
    if (isnan(value)) return sign | 0x7f;
    double magnitude = fmin(fabs((double)value), value_of(LAST_CODE)), best = INFINITY;
    unsigned found = 0;
    for (unsigned code = 0; code <= LAST_CODE; code++) {
        double distance = fabs(magnitude - value_of(code));
        if (distance < best || (distance == best && code % 2 == 0)) {
            best = distance;
            found = code;
        }
    }
    return sign | (uint8_t)found;
}

static void assert_same_bits(float actual, float expected)
{
    assert_int_equal(bl_f32_bits(actual), bl_f32_bits(expected));
}

static float random_float(uint64_t *state)
{
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return (float)((double)(*state >> 33) / (double)(1u << 30) - 1.0);
}

/* ---- codecs ---- */

static void test_decoding_all_codes(void **state)
{
    (void)state;
    for (unsigned code = 0; code < 256; code++) {
        float e4m3 = bl_e4m3_to_f32((uint8_t)code);
        unsigned magnitude = code & 0x7f;
        if (magnitude == 0x7f)
            assert_true(isnan(e4m3));
        else
            assert_same_bits(e4m3, (float)value_of(code));
        assert_int_equal(!!signbit(e4m3), code >> 7);
    }
    assert_true(bl_e4m3_to_f32(0x7e) == BL_E4M3_MAX);
}

enum { MAX_BOUNDARIES = 4096 };

/* Each code's value, each midpoint between neighbors (the last with what would be the next code),
 * their two fp32 neighbors, and the ends of fp32; both signs. Returns how many. */
static int64_t list_boundaries(float *out)
{
    int64_t n = 0;
    for (unsigned code = 0; code <= LAST_CODE; code++) {
        double low = value_of(code), high = value_of(code + 1);
        double points[2] = {low, (low + high) / 2};
        for (int i = 0; i < 2; i++) {
            float point = (float)points[i];
            assert_true((double)point == points[i]);
            out[n++] = point;
            out[n++] = nextafterf(point, INFINITY);
            out[n++] = fabsf(nextafterf(point, -INFINITY));
        }
    }
    const float ends[] = {448,    464,    479.9f,          480,      57344,
                          61440,  1e6f,   3.4028234e38f,   INFINITY, NAN,
                          1e-45f, 1e-38f, 1.17549435e-38f, 0x1p-10f, 0x1p-17f};
    for (size_t i = 0; i < BL_COUNT(ends); i++) out[n++] = ends[i];
    for (int64_t i = 0, positive = n; i < positive; i++) out[n++] = -out[i];
    assert_true(n <= MAX_BOUNDARIES);
    return n;
}

static void test_encoding_all_boundaries(void **state)
{
    (void)state;
    float values[MAX_BOUNDARIES];
    int64_t n = list_boundaries(values);
    for (int64_t i = 0; i < n; i++)
        assert_int_equal(bl_f32_to_e4m3(values[i]), reference_e4m3(values[i]));
}

static void test_codes_survive_a_round_trip(void **state)
{
    (void)state;
    for (unsigned code = 0; code < 256; code++)
        assert_int_equal(bl_f32_to_e4m3(bl_e4m3_to_f32((uint8_t)code)), code);
}

/* ---- kernel variants ---- */

static const bl_dtype source_dtypes[] = {BL_F32, BL_BF16, BL_F16};

/* Calls check for each variant that this processor has; the scalar one is checked like any
 * other. */
static void for_each_variant(void (*check)(const bl_fp8_kernels *kernels))
{
    for (int variant = 0; variant < BL_FP8_VARIANT_COUNT; variant++) {
        const bl_fp8_kernels *kernels = bl_fp8_kernels_variant((bl_fp8_variant)variant);
        if (kernels)
            check(kernels);
        else
            print_message("skip: this processor lacks FP8 variant %d\n", variant);
    }
}

static size_t narrow(bl_dtype dtype, const float *values, int64_t n, void *out)
{
    for (int64_t i = 0; i < n; i++) {
        uint16_t half = dtype == BL_BF16 ? bl_f32_to_bf16(values[i]) : bl_f32_to_f16(values[i]);
        if (dtype == BL_F32)
            memcpy((char *)out + 4 * i, &values[i], 4);
        else
            memcpy((char *)out + 2 * i, &half, 2);
    }
    return bl_dtype_bytes(dtype);
}

static void check_encode(const bl_fp8_kernels *kernels)
{
    float values[MAX_BOUNDARIES], scaled[MAX_BOUNDARIES];
    unsigned char source[4 * MAX_BOUNDARIES + 1];
    uint8_t codes[MAX_BOUNDARIES + 1];
    const float scales[] = {1, 0.37f, 3e-5f, 1e-40f};
    int64_t n = list_boundaries(values);
    for (size_t s = 0; s < BL_COUNT(scales); s++)
        for (size_t d = 0; d < BL_COUNT(source_dtypes); d++) {
            bl_dtype dtype = source_dtypes[d];
            for (int64_t i = 0; i < n; i++) scaled[i] = values[i] * scales[s];
            narrow(dtype, scaled, n, source + 1);
            codes[n] = 0xa5;
            kernels->encode(dtype, source + 1, scales[s], codes, n);
            for (int64_t i = 0; i < n; i++) {
                float value;
                bl_dtype_to_f32(dtype, source + 1 + (size_t)i * bl_dtype_bytes(dtype), &value, 1);
                assert_int_equal(codes[i], reference_e4m3(value / scales[s]));
            }
            assert_int_equal(codes[n], 0xa5);
        }
}

static void check_decode(const bl_fp8_kernels *kernels)
{
    uint8_t codes[256 + 1];
    float values[256 + 1];
    const float scales[] = {1, 0.37f, 3.1e-5f, 1e-40f, 1e37f};
    for (int i = 0; i < 256; i++) codes[i + 1] = (uint8_t)i;
    for (size_t s = 0; s < BL_COUNT(scales); s++) {
        kernels->decode(codes + 1, scales[s], values, 256);
        for (unsigned code = 0; code < 256; code++) {
            if ((code & 0x7f) == 0x7f)
                assert_true(isnan(values[code]) && !!signbit(values[code]) == code >> 7);
            else
                assert_same_bits(values[code], (float)value_of(code) * scales[s]);
        }
    }
    uint16_t halves[256];
    kernels->decode(codes + 1, 1, values, 256);
    kernels->decode_bf16(codes + 1, halves, 256);
    for (unsigned code = 0; code < 256; code++)
        assert_same_bits(bl_bf16_to_f32(halves[code]), values[code]);
}

static void check_widen_all_halves(const bl_fp8_kernels *kernels)
{
    enum { N = 1 << 16 };
    uint16_t *halves = malloc(N * sizeof *halves);
    float *values = malloc(N * sizeof *values);
    for (int i = 0; i < N; i++) halves[i] = (uint16_t)i;
    for (int f16 = 0; f16 < 2; f16++) {
        kernels->widen(f16 ? BL_F16 : BL_BF16, halves, values, N);
        for (int i = 0; i < N; i++) {
            float expected = f16 ? bl_f16_to_f32(halves[i]) : bl_bf16_to_f32(halves[i]);
            if (isnan(expected))
                assert_true(isnan(values[i]));
            else
                assert_same_bits(values[i], expected);
        }
    }
    free(values);
    free(halves);
}

/* The largest magnitude at each place of runs of each length, with its neighbors left out. */
static void check_absmax(const bl_fp8_kernels *kernels)
{
    enum { N = 150 };
    float values[N];
    unsigned char source[4 * N + 1];
    for (size_t d = 0; d < BL_COUNT(source_dtypes); d++) {
        size_t step = bl_dtype_bytes(source_dtypes[d]);
        for (int n = 0; n <= N - 2; n++)
            for (int place = 0; place < n + 2; place++) {
                for (int i = 0; i < N; i++) values[i] = i % 2 ? -1.5f : 1.5f;
                values[place] = -7;
                narrow(source_dtypes[d], values, N, source + 1);
                float found = kernels->absmax(source_dtypes[d], source + 1 + step, n);
                assert_same_bits(found, n == 0 ? 0 : place >= 1 && place <= n ? 7 : 1.5f);
            }
        for (int place = 0; place < N; place++)
            for (int bad = 0; bad < 3; bad++) {
                for (int i = 0; i < N; i++) values[i] = 65504;
                values[place] = bad == 0 ? NAN : bad == 1 ? INFINITY : -INFINITY;
                narrow(source_dtypes[d], values, N, source);
                assert_false(kernels->absmax(source_dtypes[d], source, N) <= 3.4028234e38f);
            }
    }
}

/* Every length around the vector widths gives the scalar kernels' results, and nothing is written
 * past the end. */
static void check_tails(const bl_fp8_kernels *kernels)
{
    enum { N = 140 };
    float values[N], decoded[2][N + 1];
    unsigned char source[4 * N];
    uint8_t codes[2][N + 1];
    uint64_t seed = 1;
    for (int i = 0; i < N; i++) values[i] = random_float(&seed);
    for (size_t d = 0; d < BL_COUNT(source_dtypes); d++) {
        narrow(source_dtypes[d], values, N, source);
        for (int n = 0; n <= N; n++) {
            memset(codes, 0xa5, sizeof codes);
            memset(decoded, 0xa5, sizeof decoded);
            bl_fp8_kernels_scalar.encode(source_dtypes[d], source, 1.0f / 448, codes[0], n);
            kernels->encode(source_dtypes[d], source, 1.0f / 448, codes[1], n);
            assert_memory_equal(codes[0], codes[1], sizeof codes[0]);
            bl_fp8_kernels_scalar.decode(codes[0], 0.3f, decoded[0], n);
            kernels->decode(codes[1], 0.3f, decoded[1], n);
            assert_memory_equal(decoded[0], decoded[1], sizeof decoded[0]);
            bl_fp8_kernels_scalar.decode_bf16(codes[0], (uint16_t *)decoded[0], n);
            kernels->decode_bf16(codes[1], (uint16_t *)decoded[1], n);
            assert_memory_equal(decoded[0], decoded[1], sizeof decoded[0]);
            bl_fp8_kernels_scalar.widen(source_dtypes[d], source, decoded[0], n);
            kernels->widen(source_dtypes[d], source, decoded[1], n);
            assert_memory_equal(decoded[0], decoded[1], sizeof decoded[0]);
        }
    }
}

static void test_every_variant_encodes(void **state)
{
    (void)state;
    for_each_variant(check_encode);
}

static void test_every_variant_decodes(void **state)
{
    (void)state;
    for_each_variant(check_decode);
}

static void test_every_variant_widens(void **state)
{
    (void)state;
    for_each_variant(check_widen_all_halves);
}

static void test_every_variant_finds_absmax(void **state)
{
    (void)state;
    for_each_variant(check_absmax);
}

static void test_every_variant_handles_tails(void **state)
{
    (void)state;
    for_each_variant(check_tails);
}

/* ---- matrices ---- */

typedef struct matrix {
    bl_pool *pool;
    int64_t rows, cols, n_blocks; /* blocks across */
    float *values;                /* what `source` holds, as fp32 */
    void *source;
    uint8_t *codes;
    float *scales; /* enough for either FP8 format */
} matrix;

/* Rows of different magnitude, one of zeros, one of the smallest subnormals, one with a lone
 * weight. */
static matrix make_matrix(int n_threads, bl_dtype dtype, int64_t rows, int64_t cols)
{
    matrix m = {.rows = rows, .cols = cols, .n_blocks = bl_ceil_div(cols, BL_FP8_BLOCK)};
    size_t n = (size_t)(rows * cols);
    assert_int_equal(bl_pool_create(n_threads, &m.pool), BL_OK);
    m.values = malloc(n * sizeof *m.values + 1);
    m.source = malloc(n * 4 + 1);
    m.codes = malloc(n + 1);
    m.scales = malloc((size_t)(rows + bl_ceil_div(rows, BL_FP8_BLOCK) * m.n_blocks + 1) *
                      sizeof *m.scales);
    uint64_t seed = (uint64_t)(rows * 1000 + cols);
    for (int64_t row = 0; row < rows; row++)
        for (int64_t col = 0; col < cols; col++) {
            float value = random_float(&seed) * (float)(1 + row % 5) * 0.05f;
            if (row % 11 == 3) value = 0;
            if (row % 11 == 4) value = col % 2 ? 1e-45f : -3e-45f;
            if (row % 11 == 5) value = col == cols / 2 ? -0.7f : 0;
            m.values[row * cols + col] = value;
        }
    narrow(dtype, m.values, (int64_t)n, m.source);
    bl_dtype_to_f32(dtype, m.source, m.values, n);
    return m;
}

static void free_matrix(matrix *m)
{
    bl_pool_destroy(m->pool);
    free(m->values);
    free(m->source);
    free(m->codes);
    free(m->scales);
}

static float reference_scale(const matrix *m, int64_t row_begin, int64_t row_end, int64_t col_begin,
                             int64_t col_end)
{
    float absmax = 0;
    for (int64_t row = row_begin; row < bl_min_i64(row_end, m->rows); row++)
        for (int64_t col = col_begin; col < bl_min_i64(col_end, m->cols); col++)
            absmax = fmaxf(absmax, fabsf(m->values[row * m->cols + col]));
    float scale = absmax / 448.0f;
    return scale == 0 ? 1 : scale;
}

/* Codes, scales and the values got back, for all of the matrix; and tiles of it. */
static void check_matrix(const matrix *m, bl_format format)
{
    const float *scales = m->scales;
    size_t n = (size_t)(m->rows * m->cols);
    float *back = malloc(n * sizeof *back + 1);
    bl_fp8_dequantize(m->pool, format, m->codes, scales, m->rows, m->cols, back);
    for (int64_t row = 0; row < m->rows; row++)
        for (int64_t col = 0; col < m->cols; col++) {
            int64_t i = row * m->cols + col, block_row = row / 128, block = col / 128;
            float scale =
                format == BL_FORMAT_FP8_ROW ? scales[row] : scales[block_row * m->n_blocks + block];
            assert_int_equal(m->codes[i], reference_e4m3(m->values[i] / scale));
            assert_int_not_equal(m->codes[i] & 0x7f, 0x7f);
            assert_same_bits(back[i], (float)value_of(m->codes[i]) * scale);
        }
    for (int64_t row = 0; row < m->rows && format == BL_FORMAT_FP8_ROW; row++)
        assert_same_bits(scales[row], reference_scale(m, row, row + 1, 0, m->cols));
    for (int64_t row = 0; row < m->rows && format == BL_FORMAT_FP8_BLOCK; row += 128)
        for (int64_t col = 0; col < m->cols; col += 128)
            assert_same_bits(scales[row / 128 * m->n_blocks + col / 128],
                             reference_scale(m, row, row + 128, col, col + 128));

    int64_t r0 = m->rows / 3, r1 = m->rows - m->rows / 7, c0 = m->cols / 5,
            c1 = m->cols - m->cols / 9;
    int64_t width = c1 - c0, ld = width + 3;
    float *tile = malloc((size_t)((r1 - r0) * ld) * sizeof *tile + 1);
    for (int64_t i = 0; i < (r1 - r0) * ld; i++) tile[i] = 77;
    bl_fp8_dequantize_tile(format, m->codes, scales, m->cols, r0, r1, c0, c1, tile, ld);
    for (int64_t row = r0; row < r1; row++)
        for (int64_t col = 0; col < ld; col++)
            assert_same_bits(tile[(row - r0) * ld + col],
                             col < width ? back[row * m->cols + c0 + col] : 77);
    free(tile);
    free(back);
}

static const int64_t shapes[][2] = {{1, 1},     {1, 100},   {7, 3}, {172, 100}, {128, 128},
                                    {129, 257}, {300, 640}, {0, 5}, {5, 0}};

static void test_quantizing_matrices(void **state)
{
    (void)state;
    for (size_t s = 0; s < BL_COUNT(shapes); s++)
        for (size_t d = 0; d < BL_COUNT(source_dtypes); d++)
            for (int n_threads = 1; n_threads <= 3; n_threads++) {
                matrix m = make_matrix(n_threads, source_dtypes[d], shapes[s][0], shapes[s][1]);
                assert_int_equal(bl_fp8_row_quantize(m.pool, source_dtypes[d], m.source, 0, m.rows,
                                                     m.cols, m.codes, m.scales),
                                 BL_OK);
                check_matrix(&m, BL_FORMAT_FP8_ROW);
                assert_int_equal(bl_fp8_block_quantize(m.pool, source_dtypes[d], m.source, 0,
                                                       m.rows, m.cols, m.codes, m.scales),
                                 BL_OK);
                check_matrix(&m, BL_FORMAT_FP8_BLOCK);
                free_matrix(&m);
            }
}

/* Cut into shards of any size, of whole blocks in fp8_block, the matrix is the same. */
static void check_shard(const matrix *m, bl_format format, int64_t begin, int64_t end)
{
    const char *mine = (const char *)m->source + 2 * begin * m->cols;
    uint8_t *codes = malloc((size_t)((end - begin) * m->cols));
    float scales[300];
    bool is_block = format == BL_FORMAT_FP8_BLOCK;
    bl_status st =
        is_block ? bl_fp8_block_quantize(m->pool, BL_BF16, mine, begin, end, m->cols, codes, scales)
                 : bl_fp8_row_quantize(m->pool, BL_BF16, mine, begin, end, m->cols, codes, scales);
    int64_t first = bl_format_scale_index(format, begin, m->cols), n_rows = end - begin,
            n_scales = is_block ? bl_ceil_div(n_rows, 128) * m->n_blocks : n_rows;

    assert_int_equal(st, BL_OK);
    assert_memory_equal(codes, m->codes + begin * m->cols, (size_t)(n_rows * m->cols));
    assert_memory_equal(scales, m->scales + first, (size_t)n_scales * sizeof(float));
    free(codes);
}

static void test_quantizing_shards(void **state)
{
    (void)state;
    matrix m = make_matrix(2, BL_BF16, 300, 200);
    assert_int_equal(
        bl_fp8_block_quantize(m.pool, BL_BF16, m.source, 0, m.rows, m.cols, m.codes, m.scales),
        BL_OK);
    for (int64_t shard = 128; shard <= 384; shard += 128)
        for (int64_t begin = 0; begin < m.rows; begin += shard)
            check_shard(&m, BL_FORMAT_FP8_BLOCK, begin, bl_min_i64(begin + shard, m.rows));
    assert_int_equal(
        bl_fp8_row_quantize(m.pool, BL_BF16, m.source, 0, m.rows, m.cols, m.codes, m.scales),
        BL_OK);
    for (int64_t shard = 50; shard <= 170; shard += 40)
        for (int64_t begin = 0; begin < m.rows; begin += shard)
            check_shard(&m, BL_FORMAT_FP8_ROW, begin, bl_min_i64(begin + shard, m.rows));
    free_matrix(&m);
}

/* Two bad weights: the one of the lower row is named, by its place in the projection. */
static void test_refusing_bad_weights(void **state)
{
    (void)state;
    const float bad[] = {NAN, INFINITY, -INFINITY};
    for (size_t b = 0; b < BL_COUNT(bad); b++)
        for (size_t d = 0; d < BL_COUNT(source_dtypes); d++) {
            bl_dtype dtype = source_dtypes[d];
            matrix m = make_matrix(3, dtype, 172, 300);
            m.values[150 * 300 + 2] = m.values[97 * 300 + 299] = bad[b];
            narrow(dtype, m.values, 172 * 300, m.source);
            const char *text = isnan(bad[b]) ? "row 97, column 299: the weight is NaN"
                                             : "row 97, column 299: the weight is infinite";
            assert_int_equal(
                bl_fp8_row_quantize(m.pool, dtype, m.source, 0, 172, 300, m.codes, m.scales),
                BL_EINPUT);
            assert_string_equal(bl_error_text(), text);
            assert_int_equal(
                bl_fp8_block_quantize(m.pool, dtype, m.source, 0, 172, 300, m.codes, m.scales),
                BL_EINPUT);
            assert_string_equal(bl_error_text(), text);
            const char *shard = (const char *)m.source + (size_t)(90 * 300) * bl_dtype_bytes(dtype);
            assert_int_equal(
                bl_fp8_row_quantize(m.pool, dtype, shard, 90, 172, 300, m.codes, m.scales),
                BL_EINPUT);
            assert_string_equal(bl_error_text(), text);
            free_matrix(&m);
        }
    matrix m = make_matrix(1, BL_F32, 4, 4);
    assert_int_equal(bl_fp8_row_quantize(m.pool, BL_F64, m.source, 0, 4, 4, m.codes, m.scales),
                     BL_EINPUT);
    assert_string_equal(bl_error_text(), "weights of type F64 cannot be quantized");
    free_matrix(&m);
}

static void test_dequantizing_stored_formats(void **state)
{
    (void)state;
    for (size_t d = 0; d < BL_COUNT(source_dtypes); d++) {
        bl_format format;
        matrix m = make_matrix(2, source_dtypes[d], 172, 100);
        float *back = malloc(172 * 100 * sizeof *back), tile[3][10];
        assert_true(bl_format_from_dtype(source_dtypes[d], &format));
        bl_fp8_dequantize(m.pool, format, m.source, NULL, m.rows, m.cols, back);
        assert_memory_equal(back, m.values, 172 * 100 * sizeof *back);
        bl_fp8_dequantize_tile(format, m.source, NULL, m.cols, 169, 172, 90, 100, tile[0], 10);
        for (int row = 0; row < 3; row++)
            assert_memory_equal(tile[row], m.values + (169 + row) * 100 + 90, 40);
        free(back);
        free_matrix(&m);
    }
}

static void test_transposing(void **state)
{
    (void)state;
    for (size_t s = 0; s < BL_COUNT(shapes); s++) {
        int64_t rows = shapes[s][0], cols = shapes[s][1];
        bl_pool *pool;
        uint8_t *src = malloc((size_t)(rows * cols) + 1), *dst = malloc((size_t)(rows * cols) + 1);
        assert_int_equal(bl_pool_create(2, &pool), BL_OK);
        for (int64_t i = 0; i < rows * cols; i++) src[i] = (uint8_t)(i * 7 + i / 256);
        bl_fp8_transpose(pool, src, rows, cols, dst);
        for (int64_t row = 0; row < rows; row++)
            for (int64_t col = 0; col < cols; col++)
                assert_int_equal(dst[col * rows + row], src[row * cols + col]);
        bl_pool_destroy(pool);
        free(src);
        free(dst);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_decoding_all_codes),
        cmocka_unit_test(test_encoding_all_boundaries),
        cmocka_unit_test(test_codes_survive_a_round_trip),
        cmocka_unit_test(test_every_variant_encodes),
        cmocka_unit_test(test_every_variant_decodes),
        cmocka_unit_test(test_every_variant_widens),
        cmocka_unit_test(test_every_variant_finds_absmax),
        cmocka_unit_test(test_every_variant_handles_tails),
        cmocka_unit_test(test_quantizing_matrices),
        cmocka_unit_test(test_quantizing_shards),
        cmocka_unit_test(test_refusing_bad_weights),
        cmocka_unit_test(test_dequantizing_stored_formats),
        cmocka_unit_test(test_transposing),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
