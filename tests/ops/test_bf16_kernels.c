/* SPDX-License-Identifier: Apache-2.0 */
/* The inner loops of bf16 products with the processor's instructions against the emulation: the
 * same bits, for every number of rows and columns and tail. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/dtype.h"
#include "base/sizes.h"
#include "ops/cpu/bf16_kernels.h"
#include "skip.h"

enum { SIDE = 70, PANEL_ELEMENTS = (OPS_BF16_DEPTH + 2) * OPS_BF16_PANEL };
static const ops_bf16_kernels *const emulated = &ops_bf16_kernels_emulated;

static uint64_t seed = 1;

static float random_float(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (float)(seed >> 40) * 0x1p-23f - 1.0f;
}

static const ops_bf16_kernels *require_native(void)
{
    const ops_bf16_kernels *native = ops_bf16_kernels_best();
    if (native == emulated) TEST_SKIP("this processor has no AVX512-BF16");
    return native;
}

static uint16_t *random_halves(int64_t n)
{
    uint16_t *values = malloc((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++) values[i] = bl_f32_to_bf16(random_float());
    return values;
}

/* Both wrote the same, and nothing behind it. */
static void assert_same(uint16_t *of[2], int64_t n)
{
    assert_memory_equal(of[0], of[1], (size_t)n * sizeof *of[0]);
}

static void test_copies(void **state)
{
    const ops_bf16_kernels *kernels[2] = {emulated, require_native()};
    enum { N = OPS_BF16_ROWS * OPS_BF16_A_STRIDE };
    uint16_t *src = random_halves((OPS_BF16_DEPTH + 1) * SIDE * 8), *dst[2];
    float scale[OPS_BF16_DEPTH];
    (void)state;

    for (int i = 0; i < OPS_BF16_DEPTH; i++) scale[i] = random_float() * 1e-3f;
    for (int i = 0; i < 2; i++) dst[i] = malloc(N * sizeof *dst[i]);
    for (int64_t depth = 1; depth <= OPS_BF16_DEPTH; depth += depth < SIDE ? 1 : 17)
        for (int64_t rows = 1; rows <= OPS_BF16_ROWS; rows++)
            for (int way = 0; way < 3; way++) {
                for (int i = 0; i < 2; i++) {
                    /* the kernels may write zeros up to whole vectors */
                    memset(dst[i], 0, N * sizeof *dst[i]);
                    if (way == 2)
                        kernels[i]->copy_columns(src, SIDE, rows, depth, dst[i]);
                    else
                        kernels[i]->copy_rows(src, OPS_BF16_DEPTH + 5, rows, depth,
                                              way ? scale : NULL, dst[i]);
                }
                for (int64_t row = 0; row < rows; row++)
                    assert_memory_equal(dst[0] + row * OPS_BF16_A_STRIDE,
                                        dst[1] + row * OPS_BF16_A_STRIDE,
                                        (size_t)(depth + depth % 2) * sizeof **dst);
            }
    free(dst[0]);
    free(dst[1]);
    free(src);
}

static void test_panels(void **state)
{
    const ops_bf16_kernels *kernels[2] = {emulated, require_native()};
    uint16_t *src = random_halves((OPS_BF16_DEPTH + 5) * SIDE), *panel[2];
    (void)state;

    for (int i = 0; i < 2; i++) panel[i] = malloc(PANEL_ELEMENTS * sizeof *panel[i]);
    for (int64_t depth = 1; depth <= OPS_BF16_DEPTH; depth += depth < SIDE ? 1 : 17)
        for (int64_t cols = 1; cols <= OPS_BF16_PANEL; cols++)
            for (int way = 0; way < 2; way++) {
                for (int i = 0; i < 2; i++) {
                    int64_t width = ops_bf16_panel_width(cols);
                    memset(panel[i], 0xa5, PANEL_ELEMENTS * sizeof *panel[i]);
                    if (way)
                        kernels[i]->pack_columns(src, OPS_BF16_DEPTH + 5, depth, cols, width,
                                                 panel[i]);
                    else
                        kernels[i]->pack_rows(src, SIDE, depth, cols, width, panel[i]);
                }
                assert_same(panel, PANEL_ELEMENTS);
            }
    free(panel[0]);
    free(panel[1]);
    free(src);
}

static void test_narrowing(void **state)
{
    const ops_bf16_kernels *kernels[2] = {emulated, require_native()};
    float src[SIDE];
    uint16_t memory[2][SIDE], *dst[2] = {memory[0], memory[1]};
    (void)state;

    for (int64_t n = 0; n <= SIDE; n++) {
        for (int64_t i = 0; i < SIDE; i++) src[i] = random_float();
        for (int i = 0; i < 2; i++) {
            memset(memory[i], 0xa5, sizeof memory[i]);
            kernels[i]->narrow(src, dst[i], n);
        }
        assert_same(dst, SIDE);
    }
}

/* One block into fp32 and into bf16, in the middle of a sum and at its end. */
static void check_block(const ops_bf16_kernels *const kernels[2], ops_bf16_block *block,
                        const float *sums, const uint16_t *C)
{
    enum { LD = OPS_BF16_PANEL + 3, N = OPS_BF16_ROWS * LD };
    float sums_of[2][N];
    uint16_t memory[2][2 * N], *C_of[2] = {memory[0], memory[1]};

    for (int flags = 0; flags < 16; flags++) {
        for (int i = 0; i < 2; i++) {
            memcpy(sums_of[i], sums, sizeof sums_of[i]);
            memcpy(C_of[i], C, sizeof memory[i]);
            block->sums = sums_of[i];
            block->C = C_of[i];
            block->sums_ld = block->ldc = LD;
            block->is_first = flags & 1;
            block->is_last = flags & 2;
            block->c_is_bf16 = flags & 4;
            block->beta = flags & 8 ? 0.7f : 0;
            kernels[i]->multiply(block);
        }
        for (int64_t row = 0; row < block->n_rows; row++)
            assert_memory_equal(sums_of[0] + row * LD, sums_of[1] + row * LD,
                                (size_t)block->n_cols * sizeof *sums);
        assert_same(C_of, (int64_t)BL_COUNT(memory[0]));
    }
}

static void test_products(void **state)
{
    const ops_bf16_kernels *kernels[2] = {emulated, require_native()};
    enum { N = OPS_BF16_ROWS * (OPS_BF16_PANEL + 3) };
    uint16_t *a = random_halves(OPS_BF16_ROWS * OPS_BF16_A_STRIDE),
             *panel = random_halves(PANEL_ELEMENTS), *C = random_halves(2 * N);
    float factor[OPS_BF16_PANEL], sums[N];
    (void)state;

    /* As fp32, C is any two of these: no value so large that sums overflow. */
    for (int64_t i = 0; i < N; i++) sums[i] = random_float();
    for (int64_t i = 0; i < OPS_BF16_PANEL; i++) factor[i] = random_float();
    for (int64_t rows = 1; rows <= kernels[1]->rows; rows++)
        for (int64_t cols = 1; cols <= OPS_BF16_PANEL; cols++)
            for (int64_t pairs = 0; pairs <= OPS_BF16_DEPTH / 2;
                 pairs = pairs < 3 ? pairs + 1 : 4 * pairs + 1) {
                ops_bf16_block block = {.n_rows = rows,
                                        .n_cols = cols,
                                        .n_pairs = pairs,
                                        .a = a,
                                        .panel = panel,
                                        .factor = factor};
                check_block(kernels, &block, sums, C);
            }
    free(a);
    free(panel);
    free(C);
}

/* Attention's product: every part of a square of registers, panels wider than the used part of
 * them, and nothing written beside the tile. */
static void test_tiles(void **state)
{
    const ops_bf16_kernels *kernels[2] = {emulated, require_native()};
    enum { LDA = 2 * SIDE + 6, LDB = 80, LDC = SIDE + 5, N_C = 9 * LDC };
    uint16_t *A = random_halves(9 * LDA), *B = random_halves(SIDE * 2 * LDB);
    float before[N_C], C[2][N_C];
    (void)state;

    for (int64_t i = 0; i < N_C; i++) before[i] = random_float();
    for (int64_t M = 1; M <= 9; M++)
        for (int64_t N = 0; N <= SIDE; N++)
            for (int64_t n_pairs = 0; n_pairs <= SIDE; n_pairs += n_pairs < 3 ? 1 : 33)
                for (int accumulate = 0; accumulate < 2; accumulate++) {
                    for (int i = 0; i < 2; i++) {
                        memcpy(C[i], before, sizeof before);
                        ops_bf16_tile t = {M,   N,    n_pairs, A,     LDA,       B,
                                           LDB, C[i], LDC,     0.37f, accumulate};
                        kernels[i]->multiply_tile(&t);
                    }
                    assert_memory_equal(C[0], C[1], sizeof before);
                }
    free(A);
    free(B);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_copies),    cmocka_unit_test(test_panels),
        cmocka_unit_test(test_narrowing), cmocka_unit_test(test_products),
        cmocka_unit_test(test_tiles),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
