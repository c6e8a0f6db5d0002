/* SPDX-License-Identifier: Apache-2.0 */
/* Each set of inner loops for fp32 products that this processor runs, against the order of its sums
 * in C, bit by bit: every number of rows and columns, both layouts of A, B in panels and in
 * place. */
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
#include "ops/cpu/f32_kernels.h"
#include "skip.h"

enum { LDB_MAX = OPS_F32_PANEL + 9, LDC = OPS_F32_PANEL + 3 };

static float multiply_add(bool is_fused, float a, float b, float c)
{
    volatile float product = a * b; /* rounded here */
    return is_fused ? fmaf(a, b, c) : product + c;
}

static void check_block(const ops_f32_kernels *kernels, const ops_f32_block *block)
{
    float C[OPS_F32_ROWS * LDC], want[OPS_F32_ROWS * LDC];
    ops_f32_block b = *block;

    for (size_t i = 0; i < BL_COUNT(C); i++) want[i] = C[i] = (float)i * 0.37f - 40;
    for (int64_t i = 0; i < b.n_rows; i++)
        for (int64_t j = 0; j < b.n_cols; j++) {
            float sum = 0, *c = want + i * LDC + j;
            for (int64_t k = 0; k < b.depth; k++)
                sum = multiply_add(kernels->is_fused,
                                   b.a_is_columns ? b.a[k * b.a_step + i]
                                                  : b.a[i * OPS_F32_A_STRIDE + k],
                                   b.b[k * b.ldb + j], sum);
            *c = b.accumulate ? multiply_add(kernels->is_fused, b.alpha, sum, *c) : b.alpha * sum;
        }
    b.C = C;
    b.ldc = LDC;
    kernels->multiply(&b);
    assert_memory_equal(C, want, sizeof C);
}

static void check_kernels(const ops_f32_kernels *kernels)
{
    static const int64_t depths[] = {1, 7, OPS_F32_DEPTH};
    float *a = random_floats(OPS_F32_DEPTH * OPS_F32_A_STRIDE, 1),
          *b = random_floats(OPS_F32_DEPTH * LDB_MAX, 2);

    for (int64_t rows = 1; rows <= kernels->rows; rows++)
        for (int64_t cols = 1; cols <= OPS_F32_PANEL; cols++)
            for (int way = 0; way < 4; way++) {
                ops_f32_block block = {.n_rows = rows,
                                       .n_cols = cols,
                                       .depth = depths[(rows + cols) % 3],
                                       .a = a,
                                       .b = b,
                                       .a_is_columns = way & 1,
                                       .a_step = OPS_F32_COLUMN_STRIDE + (way & 2),
                                       .ldb = way & 2 ? LDB_MAX : OPS_F32_PANEL,
                                       .alpha = way & 2 ? -0.7f : 1,
                                       .accumulate = (rows + cols + way) % 2};
                check_block(kernels, &block);
            }
    free(b);
    free(a);
}

static void check_pack_columns(const ops_f32_kernels *kernels)
{
    static const int64_t depths[] = {1, 8, 15, 16, 33};
    float *src = random_floats(OPS_F32_PANEL * 50, 3), panel[34 * OPS_F32_PANEL];

    for (size_t d = 0; d < BL_COUNT(depths); d++)
        for (int64_t n_cols = 1; n_cols <= OPS_F32_PANEL; n_cols++) {
            for (size_t i = 0; i < BL_COUNT(panel); i++) panel[i] = 9;
            kernels->pack_columns(src, 50, depths[d], n_cols, panel);
            for (int64_t k = 0; k < depths[d]; k++)
                for (int64_t j = 0; j < OPS_F32_PANEL; j++)
                    assert_true(panel[k * OPS_F32_PANEL + j] == (j < n_cols ? src[j * 50 + k] : 0));
            for (int64_t i = depths[d] * OPS_F32_PANEL; i < (int64_t)BL_COUNT(panel); i++)
                assert_true(panel[i] == 9);
        }
    free(src);
}

static void check_set(const ops_f32_kernels *kernels)
{
    if (!kernels->is_there()) TEST_SKIP("this processor has no %s", kernels->name);
    check_kernels(kernels);
    check_pack_columns(kernels);
}

#if defined(__x86_64__)
static void test_avx512(void **state)
{
    (void)state;
    check_set(&ops_f32_kernels_avx512);
}

static void test_avx2(void **state)
{
    (void)state;
    check_set(&ops_f32_kernels_avx2);
}
#endif

static void test_portable(void **state)
{
    (void)state;
    check_set(&ops_f32_kernels_portable);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
#if defined(__x86_64__)
        cmocka_unit_test(test_avx512),
        cmocka_unit_test(test_avx2),
#endif
        cmocka_unit_test(test_portable)
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
