/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_test.h -- pools of 1, 2 and 3 threads, random numbers and frozen matrices in every format,
 * for tests of products. */
#ifndef BALLAST_TESTS_OPS_GEMM_TEST_H
#define BALLAST_TESTS_OPS_GEMM_TEST_H

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
#include "fp8/packed.h"
#include "ops/weight.h"

enum { MAX_THREADS = 3 };

typedef struct pool_set {
    bl_pool *of[MAX_THREADS + 1]; /* by number of threads */
} pool_set;

static inline int create_pools(void **state)
{
    pool_set *p = calloc(1, sizeof *p);
    for (int n = 1; n <= MAX_THREADS; n++)
        if (bl_pool_create(n, &p->of[n]) != BL_OK) return -1;
    *state = p;
    return 0;
}

static inline int destroy_pools(void **state)
{
    pool_set *p = *state;
    for (int n = 1; n <= MAX_THREADS; n++) bl_pool_destroy(p->of[n]);
    free(p);
    return 0;
}

static inline float *random_floats(int64_t n, uint64_t seed)
{
    float *values = malloc((size_t)n * sizeof *values + 1);
    for (int64_t i = 0; i < n; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        values[i] = (float)((double)(seed >> 33) / (double)(1u << 30) - 1.0);
    }
    return values;
}

typedef struct frozen {
    bl_weight w;
    float *values; /* W as fp32: what fp8/ makes of the codes, which its own tests check */
    void *codes[BL_WEIGHT_SEGMENTS_MAX];
    void *scales[BL_WEIGHT_SEGMENTS_MAX];
} frozen;

static inline void make_segment(bl_pool *pool, frozen *f, int s, bl_format format, int64_t rows,
                                int64_t cols, float *values)
{
    bl_format_bytes n;
    assert_true(bl_format_measure(bl_format_describe(format), rows, cols, &n));
    f->codes[s] = malloc(n.codes + 1);
    f->scales[s] = n.scales ? malloc(n.scales) : NULL;
    f->w.segment[s] = (bl_weight_segment){format, f->codes[s], f->scales[s], rows};
    float *source = random_floats(rows * cols, 40 + (uint64_t)s);
    uint16_t *halves = f->codes[s];
    switch (format) {
    case BL_FORMAT_FP8_ROW:
        assert_int_equal(
            bl_fp8_row_quantize(pool, BL_F32, source, 0, rows, cols, f->codes[s], f->scales[s]),
            BL_OK);
        break;
    case BL_FORMAT_FP8_BLOCK:
        assert_int_equal(
            bl_fp8_block_quantize(pool, BL_F32, source, 0, rows, cols, f->codes[s], f->scales[s]),
            BL_OK);
        break;
    case BL_FORMAT_F32:
        memcpy(f->codes[s], source, n.codes);
        break;
    case BL_FORMAT_MXFP4:
    case BL_FORMAT_INT4_G32:
    case BL_FORMAT_INT4_G128:
    case BL_FORMAT_NF4:
        assert_int_equal(bl_packed_quantize(pool, format, true, BL_F32, source, 0, rows, cols,
                                            f->codes[s], f->scales[s]),
                         BL_OK);
        break;
    case BL_FORMAT_NVFP4:
        for (size_t i = 0; i < n.codes; i++) ((uint8_t *)f->codes[s])[i] = (uint8_t)(i * 37);
        for (size_t i = 0; i < n.scales; i++) ((uint8_t *)f->scales[s])[i] = (uint8_t)(40 + i % 16);
        for (int64_t row = 1; row <= rows && cols > 0; row++)
            memcpy((char *)f->scales[s] + row * n.scale_row - 4, &(float){3.0f}, 4);
        break;
    default:
        for (int64_t i = 0; i < rows * cols; i++)
            halves[i] =
                format == BL_FORMAT_F16 ? bl_f32_to_f16(source[i]) : bl_f32_to_bf16(source[i]);
    }
    bl_fp8_dequantize(pool, format, f->codes[s], f->scales[s], rows, cols, values);
    free(source);
}

/* cols, rounded up to what the format can hold. */
static inline int64_t whole_groups(bl_format format, int64_t cols)
{
    return bl_format_is_packed(format) ? bl_round_up(cols, bl_format_describe(format)->group_cols)
                                       : cols;
}

static inline frozen make_frozen(bl_pool *pool, int n_segments, const bl_format *formats,
                                 const int64_t *rows, int64_t cols)
{
    frozen f = {.w = {.cols = cols, .n_segments = n_segments}};
    for (int s = 0; s < n_segments; s++) f.w.rows += rows[s];
    f.values = malloc((size_t)(f.w.rows * cols) * sizeof *f.values + 1);
    for (int64_t s = 0, row = 0; s < n_segments; row += rows[s++])
        make_segment(pool, &f, (int)s, formats[s], rows[s], cols, f.values + row * cols);
    return f;
}

static inline void free_frozen(frozen *f)
{
    for (int s = 0; s < f->w.n_segments; s++) {
        free(f->codes[s]);
        free(f->scales[s]);
    }
    free(f->values);
}

#endif
