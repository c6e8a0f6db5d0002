/* SPDX-License-Identifier: Apache-2.0 */
/* Products of bf16 against double arithmetic, at awkward shapes, in every format; the same bits for
 * 1, 2 and 3 threads and for any rows beside a row. ctest runs this program with the processor's
 * instructions, with them hidden, and with AMX on emulated tiles.
 *
 * Tolerance: a product of two bf16 numbers is exact. On its way into C it takes part in at most K
 * additions of its step, one multiplication with the factor, an addition per step and two roundings
 * with beta C: |error| <= g (sum|alpha a b| + |beta c|), g = n u / (1 - n u), n = K + n_steps + 4,
 * u = 2^-24 (Higham, Accuracy and Stability, 2nd ed., section 3.1). A bf16 C is rounded once more:
 * 2^-8 of the result. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "gemm_test.h"
#include "ops/gemm.h"

static uint16_t *random_bf16(int64_t n, uint64_t seed)
{
    float *wide = random_floats(n, seed);
    uint16_t *values = malloc((size_t)n * sizeof *values + 1);
    for (int64_t i = 0; i < n; i++) values[i] = bl_f32_to_bf16(wide[i]);
    free(wide);
    return values;
}

/* A row of the output by element, the inputs as doubles by strides. */
typedef struct product {
    int64_t M, N, K;
    double alpha, beta;
    const double *A, *B; /* op(A) (M,K), op(B) (K,N), dense */
    bl_dtype dtype;
    const void *C0; /* rows are N + 2 apart; the gaps are 9 and stay so */
} product;

static double element(bl_dtype dtype, const void *C, int64_t i)
{
    return dtype == BL_F32 ? (double)((const float *)C)[i]
                           : (double)bl_bf16_to_f32(((const uint16_t *)C)[i]);
}

/* a_error: |error| of an element of A, relative. */
static void assert_product(const product *p, const void *C, double a_error)
{
    double n_roundings =
               (double)(p->K + bl_ceil_div(p->K, 128) + BL_WEIGHT_SEGMENTS_MAX + 4) * 0x1p-24,
           g = n_roundings / (1 - n_roundings) + a_error;
    for (int64_t i = 0; i < p->M; i++)
        for (int64_t j = 0; j < p->N + 2; j++) {
            int64_t at = i * (p->N + 2) + j;
            double c = element(p->dtype, C, at), sum = 0, magnitude = 0;
            if (j >= p->N) {
                assert_true(c == 9);
                continue;
            }
            for (int64_t k = 0; k < p->K; k++) {
                double term = p->alpha * p->A[i * p->K + k] * p->B[k * p->N + j];
                sum += term;
                magnitude += fabs(term);
            }
            if (p->beta != 0) {
                double kept = p->beta * element(p->dtype, p->C0, at);
                sum += kept;
                magnitude += fabs(kept);
            }
            double bound = g * magnitude + (double)(p->K + 1) * 0x1p-126;
            if (p->dtype == BL_BF16) bound += (fabs(sum) + bound) * 0x1p-8;
            assert_true(fabs(c - sum) <= bound); /* false for NaN */
        }
}

/* C0 with 9 between its rows; with beta 0 it holds NaN, which must not get through. */
static void *make_c0(int64_t M, int64_t N, bl_dtype dtype, float beta)
{
    float *wide = random_floats(M * (N + 2), 7);
    uint16_t *narrow = malloc((size_t)(M * (N + 2)) * sizeof *narrow + 1);
    for (int64_t i = 0; i < M * (N + 2); i++) {
        if (i % (N + 2) >= N)
            wide[i] = 9;
        else if (beta == 0)
            wide[i] = NAN;
        narrow[i] = bl_f32_to_bf16(wide[i]);
    }
    free(dtype == BL_F32 ? (void *)narrow : (void *)wide);
    return dtype == BL_F32 ? (void *)wide : (void *)narrow;
}

/* dense[i][k], op of a bf16 matrix. */
static double *widen(const uint16_t *matrix, int64_t ld, bool transpose, int64_t rows, int64_t cols)
{
    double *dense = malloc((size_t)(rows * cols) * sizeof *dense + 1);
    for (int64_t i = 0; i < rows; i++)
        for (int64_t k = 0; k < cols; k++)
            dense[i * cols + k] =
                (double)bl_bf16_to_f32(matrix[transpose ? k * ld + i : i * ld + k]);
    return dense;
}

static void check_gemm(const pool_set *pools, int64_t M, int64_t N, int64_t K, int trans,
                       bl_dtype dtype, float alpha, float beta)
{
    bool trans_a = trans & 1, trans_b = trans & 2;
    int64_t lda = (trans_a ? M : K) + 3, ldb = (trans_b ? K : N) + 1;
    uint16_t *A = random_bf16((trans_a ? K : M) * lda, 1),
             *B = random_bf16((trans_b ? N : K) * ldb, 2);
    void *C0 = make_c0(M, N, dtype, beta), *C[MAX_THREADS + 1];
    size_t c_bytes = (size_t)(M * (N + 2)) * bl_dtype_bytes(dtype);
    for (int n = 1; n <= MAX_THREADS; n++) {
        C[n] = malloc(c_bytes + 1);
        memcpy(C[n], C0, c_bytes);
        assert_int_equal(bl_cpu_gemm_bf16(pools->of[n], trans_a, trans_b, M, N, K, alpha, A, lda, B,
                                          ldb, beta, dtype, C[n], N + 2),
                         BL_OK);
        assert_memory_equal(C[n], C[1], c_bytes);
    }
    double *a = widen(A, lda, trans_a, M, K), *b = widen(B, ldb, trans_b, K, N);
    product p = {M, N, K, (double)alpha, (double)beta, a, b, dtype, C0};
    assert_product(&p, C[1], 0);
    for (int n = 1; n <= MAX_THREADS; n++) free(C[n]);
    free(a);
    free(b);
    free(C0);
    free(B);
    free(A);
}

static void test_plain(void **state)
{
    const int64_t shapes[][3] = {{1, 1, 1},      {7, 172, 100}, {172, 7, 100},  {300, 520, 65},
                                 {16, 768, 40},  {600, 16, 33}, {5, 6, 0},      {0, 5, 6},
                                 {5, 0, 6},      {1, 33, 1100}, {515, 40, 513}, {30, 130, 1025},
                                 {14, 32, 1024}, {13, 17, 511}};
    for (size_t s = 0; s < BL_COUNT(shapes); s++)
        for (int trans = 0; trans < 4; trans++)
            for (int dtype = 0; dtype < 2; dtype++) {
                const int64_t *at = shapes[s];
                bl_dtype d = dtype ? BL_BF16 : BL_F32;
                check_gemm(*state, at[0], at[1], at[2], trans, d, 1, 0);
                check_gemm(*state, at[0], at[1], at[2], trans, d, -0.75f, 1);
                check_gemm(*state, at[0], at[1], at[2], trans, d, 2, 0.3f);
            }
}

/* Sizes of 1 to 70, every tail of every loop among them. */
static void test_small_shapes(void **state)
{
    uint64_t seed = 3;
    for (int i = 0; i < 600; i++) {
        int64_t size[3];
        for (int d = 0; d < 3; d++) {
            seed = seed * 6364136223846793005u + 1442695040888963407u;
            size[d] = 1 + (int64_t)((seed >> 33) % 70);
        }
        check_gemm(*state, size[0], size[1], size[2], i % 4, i / 4 % 2 ? BL_BF16 : BL_F32, 1.5f,
                   (float)(i / 8 % 3) / 2);
    }
}

/* ---- frozen matrices ---- */

/* W's value as a product sees it; in dx = dy W, where scales of rows multiply dy, unrounded. */
static double *weight_values(const bl_weight *w)
{
    double *values = malloc((size_t)(w->rows * w->cols) * sizeof *values + 1);
    for (int64_t s = 0, first = 0; s < w->n_segments; first += w->segment[s++].rows)
        for (int64_t i = 0; i < w->segment[s].rows * w->cols; i++) {
            const bl_weight_segment *g = &w->segment[s];
            int64_t row = i / w->cols, col = i % w->cols;
            const float *scales = g->scales;
            double *value = &values[first * w->cols + i];
            if (g->format == BL_FORMAT_FP8_ROW)
                *value =
                    (double)bl_e4m3_to_f32(((const uint8_t *)g->codes)[i]) * (double)scales[row];
            else if (g->format == BL_FORMAT_FP8_BLOCK)
                *value = (double)bl_e4m3_to_f32(((const uint8_t *)g->codes)[i]) *
                         (double)scales[row / BL_FP8_BLOCK * bl_ceil_div(w->cols, BL_FP8_BLOCK) +
                                        col / BL_FP8_BLOCK];
            else if (bl_format_is_packed(g->format)) {
                float single;
                bl_fp8_dequantize_tile(g->format, g->codes, g->scales, w->cols, row, row + 1, col,
                                       col + 1, &single, 1);
                *value = (double)bl_bf16_to_f32(bl_f32_to_bf16(single));
            } else if (g->format == BL_FORMAT_BF16)
                *value = (double)bl_bf16_to_f32(((const uint16_t *)g->codes)[i]);
            else
                *value = (double)bl_bf16_to_f32(bl_f32_to_bf16(
                    g->format == BL_FORMAT_F32 ? ((const float *)g->codes)[i]
                                               : bl_f16_to_f32(((const uint16_t *)g->codes)[i])));
        }
    return values;
}

/* dy[t][n] scale[n] rounded to bf16, over the scale: what dx's products see of dy. */
static void round_scaled(const bl_weight *w, int64_t T, double *dy)
{
    for (int64_t s = 0, first = 0; s < w->n_segments; first += w->segment[s++].rows)
        for (int64_t row = 0; row < w->segment[s].rows; row++)
            for (int64_t t = 0; w->segment[s].format == BL_FORMAT_FP8_ROW && t < T; t++) {
                float scale = ((const float *)w->segment[s].scales)[row];
                double *value = &dy[t * w->rows + first + row];
                *value =
                    (double)bl_bf16_to_f32(bl_f32_to_bf16((float)*value * scale)) / (double)scale;
            }
}

static void check_weight(const pool_set *pools, const frozen *f, bool forward, int64_t T,
                         bl_dtype dtype, float beta)
{
    int64_t n_in = forward ? f->w.cols : f->w.rows, n_out = forward ? f->w.rows : f->w.cols,
            ld_in = n_in + 3;
    uint16_t *in = random_bf16(T * ld_in, 5);
    void *out0 = make_c0(T, n_out, dtype, beta), *out[MAX_THREADS + 1];
    size_t out_bytes = (size_t)(T * (n_out + 2)) * bl_dtype_bytes(dtype);
    for (int n = 1; n <= MAX_THREADS; n++) {
        out[n] = malloc(out_bytes + 1);
        memcpy(out[n], out0, out_bytes);
        assert_int_equal((forward ? bl_cpu_gemm_bf16_weight_nt : bl_cpu_gemm_bf16_weight_nn)(
                             pools->of[n], T, in, ld_in, &f->w, beta, dtype, out[n], n_out + 2),
                         BL_OK);
        assert_memory_equal(out[n], out[1], out_bytes);
    }
    double *values = weight_values(&f->w), *a = widen(in, ld_in, false, T, n_in), *b = values;
    if (forward) {
        b = malloc((size_t)(n_in * n_out) * sizeof *b + 1);
        for (int64_t i = 0; i < n_in * n_out; i++) b[i] = values[i % n_out * f->w.cols + i / n_out];
        free(values);
    }
    product p = {T, n_out, n_in, 1, (double)beta, a, b, dtype, out0};
    /* Within 2^-8 of each term of the exact product, and nearer to that of the rounded dy. */
    if (!forward) {
        assert_product(&p, out[1], 0x1p-8);
        round_scaled(&f->w, T, a);
    }
    assert_product(&p, out[1], forward ? 0 : 0x1p-50);
    for (int n = 1; n <= MAX_THREADS; n++) free(out[n]);
    free(a);
    free(b);
    free(out0);
    free(in);
}

static void check_both_directions(const pool_set *pools, const frozen *f, const int64_t *tokens,
                                  size_t n_tokens)
{
    for (size_t t = 0; t < n_tokens; t++)
        for (int i = 0; i < 4; i++) {
            bl_dtype dtype = i & 2 ? BL_BF16 : BL_F32;
            check_weight(pools, f, i & 1, tokens[t], dtype, 0);
            check_weight(pools, f, i & 1, tokens[t], dtype, i & 2 ? 1 : -0.6f);
        }
}

static void test_every_format(void **state)
{
    const int64_t tokens[] = {0, 1, 7, 8, 9, 172}, rows[] = {172, 0, 1, 130},
                  cols[] = {100, 0, 129};
    pool_set *pools = *state;
    for (int format = 0; format < BL_FORMAT_COUNT; format++)
        for (size_t r = 0; r < BL_COUNT(rows); r++)
            for (size_t c = 0; c < BL_COUNT(cols); c++) {
                frozen f = make_frozen(pools->of[1], 1, &(bl_format){(bl_format)format}, &rows[r],
                                       whole_groups((bl_format)format, cols[c]));
                check_both_directions(pools, &f, tokens, BL_COUNT(tokens));
                free_frozen(&f);
            }
}

/* Segments whose ends fall inside tiles, panels, pairs and blocks, with a format each. */
static void test_fused_matrices(void **state)
{
    const int64_t tokens[] = {1, 3, 20},
                  rows[][3] = {{301, 130, 130}, {5, 1, 2}, {0, 172, 3}, {7, 0, 400}, {1, 600, 1}};
    const bl_format formats[][3] = {{BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_ROW},
                                    {BL_FORMAT_FP8_BLOCK, BL_FORMAT_FP8_BLOCK, BL_FORMAT_FP8_BLOCK},
                                    {BL_FORMAT_BF16, BL_FORMAT_FP8_BLOCK, BL_FORMAT_FP8_ROW},
                                    {BL_FORMAT_FP8_ROW, BL_FORMAT_F32, BL_FORMAT_F16},
                                    {BL_FORMAT_MXFP4, BL_FORMAT_FP8_ROW, BL_FORMAT_INT4_G32},
                                    {BL_FORMAT_FP8_BLOCK, BL_FORMAT_NF4, BL_FORMAT_INT4_G128}};
    pool_set *pools = *state;
    for (size_t r = 0; r < BL_COUNT(rows); r++)
        for (size_t i = 0; i < BL_COUNT(formats); i++)
            for (int n_segments = 2; n_segments <= 3; n_segments++) {
                frozen f =
                    make_frozen(pools->of[1], n_segments, formats[i], rows[r], i < 4 ? 260 : 256);
                check_both_directions(pools, &f, tokens, BL_COUNT(tokens));
                free_frozen(&f);
            }
}

/* More than one step along the inner dimension (beta counts once), and two tiles along the
 * tokens. */
static void test_long_inner_dimensions(void **state)
{
    const int64_t split[] = {515}, wide_rows[] = {1100, 1101}, few_rows[] = {70};
    const bl_format formats[][2] = {{BL_FORMAT_FP8_BLOCK, BL_FORMAT_FP8_ROW},
                                    {BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_ROW},
                                    {BL_FORMAT_BF16, BL_FORMAT_BF16}};
    pool_set *pools = *state;
    for (size_t i = 0; i < BL_COUNT(formats); i++) {
        frozen f = make_frozen(pools->of[1], 2, formats[i], wide_rows, 1300);
        for (int direction = 0; direction < 2; direction++) {
            check_weight(pools, &f, direction, 2, BL_F32, 0.3f);
            check_weight(pools, &f, direction, 15, BL_BF16, 0.3f);
        }
        free_frozen(&f);
        f = make_frozen(pools->of[1], 1, formats[i], few_rows, 90);
        check_both_directions(pools, &f, split, BL_COUNT(split));
        free_frozen(&f);
    }
}

/* A row of y or dx has the same bits alone and among any others. */
static void test_rows_alone(void **state)
{
    enum { T = 530, ROWS = 200, COLS = 650 };
    const bl_format formats[] = {BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_BLOCK};
    pool_set *pools = *state;
    frozen f = make_frozen(pools->of[1], 2, formats, (const int64_t[]){150, 50}, COLS);
    uint16_t *in = random_bf16((int64_t)T * COLS, 5);
    float *all = malloc((size_t)T * COLS * sizeof *all), one[COLS];
    for (int forward = 0; forward < 2; forward++) {
        int64_t n_in = forward ? COLS : ROWS, n_out = forward ? ROWS : COLS;
        bl_status (*multiply)(bl_pool *, int64_t, const uint16_t *, int64_t, const bl_weight *,
                              float, bl_dtype, void *, int64_t) =
            forward ? bl_cpu_gemm_bf16_weight_nt : bl_cpu_gemm_bf16_weight_nn;
        assert_int_equal(multiply(pools->of[2], T, in, n_in, &f.w, 0, BL_F32, all, n_out), BL_OK);
        for (int64_t t = 0; t < T; t += 23) {
            assert_int_equal(
                multiply(pools->of[1], 1, in + t * n_in, n_in, &f.w, 0, BL_F32, one, n_out), BL_OK);
            assert_memory_equal(one, all + t * n_out, (size_t)n_out * sizeof *one);
        }
    }
    free(all);
    free(in);
    free_frozen(&f);
}

static void test_refusing_bad_arguments(void **state)
{
    pool_set *pools = *state;
    uint16_t value = 0;
    float out = 0;
    bl_weight w = {
        .rows = 4, .cols = 4, .n_segments = 1, .segment = {{BL_FORMAT_BF16, &value, NULL, 3}}};
    bl_pool *pool = pools->of[1];
    assert_int_equal(
        bl_cpu_gemm_bf16(pool, false, false, 1, 1, 1, 1, &value, 0, &value, 1, 0, BL_F32, &out, 1),
        BL_EINTERNAL);
    assert_int_equal(
        bl_cpu_gemm_bf16(pool, false, false, 1, 1, 1, 1, &value, 1, &value, 1, 0, BL_F16, &out, 1),
        BL_EINTERNAL);
    assert_int_equal(bl_cpu_gemm_bf16_weight_nt(pool, 1, &value, 4, &w, 0, BL_F32, &out, 4),
                     BL_EINTERNAL);
    w.rows = 3;
    assert_int_equal(bl_cpu_gemm_bf16_weight_nt(pool, 1, &value, 3, &w, 0, BL_F32, &out, 3),
                     BL_EINTERNAL);
    assert_int_equal(bl_cpu_gemm_bf16_weight_nn(pool, 1, &value, 3, &w, 0, BL_F32, &out, 3),
                     BL_EINTERNAL);
    assert_int_equal(bl_cpu_gemm_bf16_weight_nn(pool, 1, &value, 3, &w, 0, BL_F64, &out, 4),
                     BL_EINTERNAL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_plain),
        cmocka_unit_test(test_small_shapes),
        cmocka_unit_test(test_every_format),
        cmocka_unit_test(test_fused_matrices),
        cmocka_unit_test(test_long_inner_dimensions),
        cmocka_unit_test(test_rows_alone),
        cmocka_unit_test(test_refusing_bad_arguments),
    };
    print_message("bf16 products: %s\n", bl_cpu_gemm_has_bf16() ? "native" : "emulated");
    return cmocka_run_group_tests(tests, create_pools, destroy_pools);
}
