/* SPDX-License-Identifier: Apache-2.0 */
/* Products against double arithmetic, at awkward shapes, in every format; and the same bits for 1,
 * 2 and 3 threads.
 *
 * Tolerance: a sum of K products in fp32, in any order, with or without FMA, then times alpha and
 * plus beta
 * C, takes at most K + 3 roundings on the way of any product, so |error| <= g sum|alpha a b| + g
 *   |beta c|
 * with g = n u / (1 - n u), n = K + 3, u = 2^-24 (Higham, Accuracy and Stability, 2nd ed., section
 * 3.1). Underflow adds at most 2^-149 a product. */
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

/* The reference of a product: C = alpha op(A) op(B) + beta C0 by strides, in double. */
typedef struct product {
    int64_t M, N, K;
    double alpha, beta;
    const float *A, *B, *C0;
    int64_t a_row, a_col, b_row, b_col; /* strides of op(A) and op(B) */
    int64_t ldc;                        /* of C0 and C, > N: the gaps are 9 and stay so */
} product;

static void assert_product(const product *p, const float *C)
{
    double n_roundings = (double)(p->K + 3) * 0x1p-24, g = n_roundings / (1 - n_roundings);
    for (int64_t i = 0; i < p->M; i++)
        for (int64_t j = 0; j < p->ldc; j++) {
            double sum = 0, magnitude = 0,
                   c0 = p->beta == 0 ? 0 : p->beta * (double)p->C0[i * p->ldc + j];
            if (j >= p->N) {
                assert_true(C[i * p->ldc + j] == 9);
                continue;
            }
            for (int64_t k = 0; k < p->K; k++) {
                double term = p->alpha * (double)p->A[i * p->a_row + k * p->a_col] *
                              (double)p->B[k * p->b_row + j * p->b_col];
                sum += term;
                magnitude += fabs(term);
            }
            double error = fabs((double)C[i * p->ldc + j] - (sum + c0));
            assert_true(error <=
                        g * (magnitude + fabs(c0)) + (double)p->K * 0x1p-149); /* false for NaN */
        }
}

/* C0 with 9 between its rows; with beta 0 it holds NaN, which must not get through. */
static float *make_c0(int64_t M, int64_t N, int64_t ldc, float beta)
{
    float *C0 = random_floats(M * ldc, 7);
    for (int64_t i = 0; i < M; i++)
        for (int64_t j = 0; j < ldc; j++)
            if (j >= N)
                C0[i * ldc + j] = 9;
            else if (beta == 0)
                C0[i * ldc + j] = NAN;
    return C0;
}

static void check_gemm_f32(const pool_set *pools, int64_t M, int64_t N, int64_t K, bool trans_a,
                           bool trans_b, float alpha, float beta)
{
    int64_t lda = (trans_a ? M : K) + 3, ldb = (trans_b ? K : N) + 1, ldc = N + 2;
    float *A = random_floats((trans_a ? K : M) * lda, 1),
          *B = random_floats((trans_b ? N : K) * ldb, 2);
    float *C0 = make_c0(M, N, ldc, beta), *C[MAX_THREADS + 1];
    size_t c_bytes = (size_t)(M * ldc) * sizeof(float);
    for (int n = 1; n <= MAX_THREADS; n++) {
        C[n] = malloc(c_bytes + 1);
        memcpy(C[n], C0, c_bytes);
        assert_int_equal(bl_cpu_gemm_f32(pools->of[n], trans_a, trans_b, M, N, K, alpha, A, lda, B,
                                         ldb, beta, C[n], ldc),
                         BL_OK);
        assert_memory_equal(C[n], C[1], c_bytes);
    }
    product p = {M,
                 N,
                 K,
                 (double)alpha,
                 (double)beta,
                 A,
                 B,
                 C0,
                 trans_a ? 1 : lda,
                 trans_a ? lda : 1,
                 trans_b ? 1 : ldb,
                 trans_b ? ldb : 1,
                 ldc};
    assert_product(&p, C[1]);
    for (int n = 1; n <= MAX_THREADS; n++) free(C[n]);
    free(C0);
    free(B);
    free(A);
}

static void test_gemm_f32(void **state)
{
    const int64_t shapes[][3] = {{1, 1, 1},      {7, 172, 100}, {172, 7, 100},
                                 {300, 520, 65}, {16, 768, 40}, {600, 16, 33},
                                 {5, 6, 0},      {0, 5, 6},     {5, 0, 6}};
    for (size_t s = 0; s < BL_COUNT(shapes); s++)
        for (int trans = 0; trans < 4; trans++) {
            check_gemm_f32(*state, shapes[s][0], shapes[s][1], shapes[s][2], trans & 1, trans & 2,
                           1, 0);
            check_gemm_f32(*state, shapes[s][0], shapes[s][1], shapes[s][2], trans & 1, trans & 2,
                           -0.75f, 1);
            check_gemm_f32(*state, shapes[s][0], shapes[s][1], shapes[s][2], trans & 1, trans & 2,
                           2, 0.3f);
        }
}

/* ---- frozen matrices ---- */

/* The product over the dequantized weights has the same bits. */
static void check_dequantized(bl_pool *pool, const frozen *f, bool forward, int64_t T,
                              const float *in, int64_t ld_in, float beta, const float *out0,
                              const float *out, int64_t ld_out)
{
    size_t n_bytes = (size_t)(T * ld_out) * sizeof(float);
    float *again = malloc(n_bytes + 1);
    bl_weight plain = {.rows = f->w.rows,
                       .cols = f->w.cols,
                       .n_segments = 1,
                       .segment = {{BL_FORMAT_F32, f->values, NULL, f->w.rows}}};

    memcpy(again, out0, n_bytes);
    assert_int_equal((forward ? bl_cpu_gemm_weight_nt : bl_cpu_gemm_weight_nn)(
                         pool, T, in, ld_in, &plain, beta, again, ld_out),
                     BL_OK);
    assert_memory_equal(again, out, n_bytes);
    free(again);
}

static void check_weight(const pool_set *pools, const frozen *f, bool forward, int64_t T,
                         float beta)
{
    int64_t n_in = forward ? f->w.cols : f->w.rows, n_out = forward ? f->w.rows : f->w.cols,
            ld_in = n_in + 3, ld_out = n_out + 2;
    float *in = random_floats(T * ld_in, 5), *out0 = make_c0(T, n_out, ld_out, beta),
          *out[MAX_THREADS + 1];
    size_t out_bytes = (size_t)(T * ld_out) * sizeof(float);
    for (int n = 1; n <= MAX_THREADS; n++) {
        out[n] = malloc(out_bytes + 1);
        memcpy(out[n], out0, out_bytes);
        bl_status st =
            forward
                ? bl_cpu_gemm_weight_nt(pools->of[n], T, in, ld_in, &f->w, beta, out[n], ld_out)
                : bl_cpu_gemm_weight_nn(pools->of[n], T, in, ld_in, &f->w, beta, out[n], ld_out);
        assert_int_equal(st, BL_OK);
        assert_memory_equal(out[n], out[1], out_bytes);
    }
    product p = {T,
                 n_out,
                 n_in,
                 1,
                 (double)beta,
                 in,
                 f->values,
                 out0,
                 ld_in,
                 1,
                 forward ? 1 : f->w.cols,
                 forward ? f->w.cols : 1,
                 ld_out};
    assert_product(&p, out[1]);
    check_dequantized(pools->of[1], f, forward, T, in, ld_in, beta, out0, out[1], ld_out);
    for (int n = 1; n <= MAX_THREADS; n++) free(out[n]);
    free(out0);
    free(in);
}

static void check_both_directions(const pool_set *pools, const frozen *f, const int64_t *tokens,
                                  size_t n_tokens)
{
    for (size_t t = 0; t < n_tokens; t++)
        for (int direction = 0; direction < 2; direction++) {
            check_weight(pools, f, direction, tokens[t], 0);
            check_weight(pools, f, direction, tokens[t], 1);
            check_weight(pools, f, direction, tokens[t], -0.6f);
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

/* Segments whose ends fall inside tiles, panels and groups of rows, with a format each. */
static void test_fused_matrices(void **state)
{
    const int64_t tokens[] = {1, 3, 20},
                  rows[][3] = {{301, 130, 130}, {5, 1, 2}, {0, 172, 3}, {7, 0, 400}};
    const bl_format formats[][3] = {{BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_ROW, BL_FORMAT_FP8_ROW},
                                    {BL_FORMAT_FP8_BLOCK, BL_FORMAT_FP8_BLOCK, BL_FORMAT_FP8_BLOCK},
                                    {BL_FORMAT_BF16, BL_FORMAT_FP8_BLOCK, BL_FORMAT_FP8_ROW},
                                    {BL_FORMAT_MXFP4, BL_FORMAT_FP8_ROW, BL_FORMAT_INT4_G32},
                                    {BL_FORMAT_FP8_BLOCK, BL_FORMAT_NF4, BL_FORMAT_INT4_G128}};
    pool_set *pools = *state;
    for (size_t r = 0; r < BL_COUNT(rows); r++)
        for (size_t i = 0; i < BL_COUNT(formats); i++)
            for (int n_segments = 2; n_segments <= 3; n_segments++) {
                frozen f =
                    make_frozen(pools->of[1], n_segments, formats[i], rows[r], i < 3 ? 260 : 256);
                check_both_directions(pools, &f, tokens, BL_COUNT(tokens));
                free_frozen(&f);
            }
}

/* More than one panel along the inner dimension (beta counts for the first), and two tiles along
 * the tokens. */
static void test_long_inner_dimensions(void **state)
{
    const int64_t many[] = {2, 30}, split[] = {515}, wide_rows[] = {1100, 1101}, few_rows[] = {70};
    const bl_format formats[][2] = {{BL_FORMAT_FP8_BLOCK, BL_FORMAT_FP8_ROW},
                                    {BL_FORMAT_MXFP4, BL_FORMAT_NVFP4}};
    pool_set *pools = *state;
    for (size_t i = 0; i < BL_COUNT(formats); i++) {
        frozen f = make_frozen(pools->of[1], 2, formats[i], wide_rows, i == 0 ? 2300 : 2304);
        for (size_t t = 0; t < BL_COUNT(many); t++)
            for (int direction = 0; direction < 2; direction++)
                check_weight(pools, &f, direction, many[t], t == 0 ? 0.3f : 0);
        free_frozen(&f);
        f = make_frozen(pools->of[1], 1, formats[i], few_rows, i == 0 ? 90 : 96);
        check_both_directions(pools, &f, split, BL_COUNT(split));
        free_frozen(&f);
    }
}

static void test_refusing_bad_shapes(void **state)
{
    pool_set *pools = *state;
    float value = 0;
    bl_weight w = {
        .rows = 4, .cols = 4, .n_segments = 1, .segment = {{BL_FORMAT_F32, &value, NULL, 3}}};
    assert_int_equal(
        bl_cpu_gemm_f32(pools->of[1], false, false, 2, 2, 2, 1, &value, 1, &value, 2, 0, &value, 2),
        BL_EINTERNAL);
    assert_int_equal(bl_cpu_gemm_f32(pools->of[1], false, false, 2, -1, 2, 1, &value, 2, &value, 2,
                                     0, &value, 2),
                     BL_EINTERNAL);
    assert_int_equal(bl_cpu_gemm_f32(pools->of[1], false, true, 2, 0, 1ll << 31, 1, &value,
                                     1ll << 31, &value, 1ll << 31, 0, &value, 0),
                     BL_ELIMIT);
    assert_int_equal(bl_cpu_gemm_weight_nt(pools->of[1], 1, &value, 4, &w, 0, &value, 4),
                     BL_EINTERNAL);
    w.rows = 3;
    assert_int_equal(bl_cpu_gemm_weight_nt(pools->of[1], 1, &value, 3, &w, 0, &value, 4),
                     BL_EINTERNAL);
    assert_int_equal(bl_cpu_gemm_weight_nn(pools->of[1], 1, &value, 3, &w, 0, &value, 3),
                     BL_EINTERNAL);
}

/* A row has the bits that it has alone, however many others there are. */
static void test_rows_alone(void **state)
{
    enum { T = 37, N = 75, K = 700 };
    const pool_set *pools = *state;
    float *x = random_floats(T * K, 3), *W = random_floats(N * K, 4),
          *y = malloc(T * N * sizeof *y), alone[N];
    bl_weight w = {N, K, 1, {{BL_FORMAT_F32, W, NULL, N}}};

    assert_non_null(y);
    assert_int_equal(bl_cpu_gemm_weight_nt(pools->of[2], T, x, K, &w, 0, y, N), BL_OK);
    for (int64_t t = 0; t < T; t++) {
        assert_int_equal(bl_cpu_gemm_weight_nt(pools->of[1], 1, x + t * K, K, &w, 0, alone, N),
                         BL_OK);
        assert_memory_equal(alone, y + t * N, sizeof alone);
        assert_int_equal(
            bl_cpu_gemm_f32(pools->of[1], false, true, 1, N, K, 1, x + t * K, K, W, K, 0, alone, N),
            BL_OK);
        assert_memory_equal(alone, y + t * N, sizeof alone);
    }
    free(y);
    free(W);
    free(x);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_gemm_f32),       cmocka_unit_test(test_every_format),
        cmocka_unit_test(test_fused_matrices), cmocka_unit_test(test_long_inner_dimensions),
        cmocka_unit_test(test_rows_alone),     cmocka_unit_test(test_refusing_bad_shapes),
    };
    char text[BL_CPU_GEMM_TEXT_BYTES];
    bl_cpu_gemm_describe(text);
    print_message("fp32 products: %s\n", text);
    return cmocka_run_group_tests(tests, create_pools, destroy_pools);
}
