/* SPDX-License-Identifier: Apache-2.0 */
/* The AMX kernels: bit for bit the sums in the order that tdpbf16ps documents, for every number of
 * rows, columns and tail, without reads or writes outside of the operands; and the check that
 * rejects a processor with other sums. Built twice: test_bf16_amx has emulated tiles
 * (amx_emulated.c), test_bf16_amx_native the processor's. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "amx_emulated.h"
#include "base/dtype.h"
#include "base/sizes.h"
#include "ops/cpu/bf16_kernels.h"

enum {
    SIDE = 70,
    TILE_PAIRS = 16,
    PANEL_ELEMENTS = (OPS_BF16_DEPTH + OPS_BF16_DEPTH_UNIT) * OPS_BF16_PANEL,
    NOT_A_NUMBER = 0x7fc0
};
static const ops_bf16_kernels *const amx = &ops_bf16_kernels_amx, *const emulated =
                                                                      &ops_bf16_kernels_emulated;

static uint64_t seed = 1;

static float random_float(void)
{
    seed = seed * 6364136223846793005u + 1442695040888963407u;
    return (float)(seed >> 40) * 0x1p-23f - 1.0f;
}

static uint16_t *halves(int64_t n, bool is_random)
{
    uint16_t *values = malloc((size_t)n * sizeof *values);
    for (int64_t i = 0; i < n; i++)
        values[i] = is_random ? bl_f32_to_bf16(random_float()) : NOT_A_NUMBER;
    return values;
}

/* sum over pairs of a[k] b[k][column], b's rows `width` pairs wide: tile by tile, the even and the
 * odd elements apart. Products of bf16 are exact. */
static float sum_in_order(const uint16_t *a, const uint16_t *b, int64_t width, int64_t column,
                          int64_t n_pairs)
{
    float sum = 0;
    for (int64_t first = 0; first < n_pairs; first += TILE_PAIRS) {
        float part[2] = {0, 0};
        for (int64_t p = first; p < bl_min_i64(first + TILE_PAIRS, n_pairs); p++)
            for (int odd = 0; odd < 2; odd++)
                part[odd] += bl_bf16_to_f32(a[2 * p + odd]) *
                             bl_bf16_to_f32(b[2 * (p * width + column) + odd]);
        sum += part[0] + part[1];
    }
    return sum;
}

static void test_blocks(void **state)
{
    enum { LD = OPS_BF16_PANEL + 3, N = OPS_BF16_ROWS * LD };
    uint16_t *a = halves(OPS_BF16_ROWS * OPS_BF16_A_STRIDE, true),
             *panel = halves(PANEL_ELEMENTS, true);
    float factor[OPS_BF16_PANEL], before[N], C[N], sums[N];
    (void)state;

    for (int64_t i = 0; i < N; i++) before[i] = random_float();
    for (int64_t i = 0; i < OPS_BF16_PANEL; i++) factor[i] = random_float();
    amx->begin();
    for (int64_t rows = 1; rows <= amx->rows; rows++)
        for (int64_t cols = 1; cols <= OPS_BF16_PANEL; cols++)
            for (int64_t pairs = 0; pairs <= OPS_BF16_DEPTH / 2;
                 pairs = pairs < 48 ? pairs + TILE_PAIRS : pairs + 17 * TILE_PAIRS) {
                int64_t width = ops_bf16_panel_width(cols);
                memcpy(C, before, sizeof C);
                memcpy(sums, before, sizeof sums);
                ops_bf16_block block = {.n_rows = rows,
                                        .n_cols = cols,
                                        .n_pairs = pairs,
                                        .a = a,
                                        .panel = panel,
                                        .factor = factor,
                                        .sums = sums,
                                        .sums_ld = LD,
                                        .is_last = true,
                                        .C = C,
                                        .ldc = LD};
                amx->multiply(&block);
                assert_memory_equal(sums, before, sizeof sums);
                for (int64_t i = 0; i < OPS_BF16_ROWS; i++)
                    for (int64_t j = 0; j < LD; j++) {
                        float expected = before[i * LD + j];
                        if (i < rows && j < cols) {
                            float sum =
                                sum_in_order(a + i * OPS_BF16_A_STRIDE, panel, width, j, pairs);
                            expected = factor[j] * sum + expected;
                        }
                        assert_memory_equal(&C[i * LD + j], &expected, sizeof expected);
                    }
            }
    amx->end();
    free(a);
    free(panel);
}

/* As for vdpbf16ps, and zeros up to whole tiles. */
static void test_copies_and_panels(void **state)
{
    enum { N_A = OPS_BF16_ROWS * OPS_BF16_A_STRIDE, LD = OPS_BF16_DEPTH + 5 };
    uint16_t *src = halves(LD * SIDE * 8, true), *expected = malloc(PANEL_ELEMENTS * 2),
             *panel = malloc(PANEL_ELEMENTS * 2), *a = malloc(N_A * 2),
             *expected_a = malloc(N_A * 2);
    float scale[OPS_BF16_DEPTH];
    (void)state;

    for (int i = 0; i < OPS_BF16_DEPTH; i++) scale[i] = random_float() * 1e-3f;
    for (int64_t depth = 1; depth <= OPS_BF16_DEPTH; depth += depth < SIDE ? 1 : 19)
        for (int64_t n = 1; n <= OPS_BF16_PANEL; n += n < 3 ? 1 : 13) {
            int64_t width = ops_bf16_panel_width(n),
                    whole = bl_round_up(depth, OPS_BF16_DEPTH_UNIT) * width;
            for (int way = 0; way < 2; way++) {
                memset(expected, 0, PANEL_ELEMENTS * 2);
                memset(expected + whole, 0xa5, (size_t)(PANEL_ELEMENTS - whole) * 2);
                memset(panel, 0xa5, PANEL_ELEMENTS * 2);
                (way ? emulated->pack_columns : emulated->pack_rows)(src, way ? LD : SIDE, depth, n,
                                                                     width, expected);
                (way ? amx->pack_columns : amx->pack_rows)(src, way ? LD : SIDE, depth, n, width,
                                                           panel);
                assert_memory_equal(panel, expected, PANEL_ELEMENTS * 2);
            }
            for (int way = 0; way < 3; way++) {
                memset(expected_a, 0, N_A * 2);
                memset(a, 0xa5, N_A * 2);
                for (int i = 0; i < 2; i++) {
                    const ops_bf16_kernels *kernels = i ? amx : emulated;
                    uint16_t *dst = i ? a : expected_a;
                    if (way == 2)
                        kernels->copy_columns(src, SIDE, n, depth, dst);
                    else
                        kernels->copy_rows(src, LD, n, depth, way ? scale : NULL, dst);
                }
                for (int64_t row = 0; row < n; row++)
                    assert_memory_equal(
                        a + row * OPS_BF16_A_STRIDE, expected_a + row * OPS_BF16_A_STRIDE,
                        (size_t)bl_round_up(depth, OPS_BF16_DEPTH_UNIT) * sizeof *a);
            }
        }
    free(src);
    free(expected);
    free(panel);
    free(a);
    free(expected_a);
}

/* Attention's product: NaN in A beside its rows and behind its pairs, and in B behind its pairs. */
static void check_tile(int64_t M, int64_t N, int64_t n_pairs, bool accumulate)
{
    enum { LDA = 2 * SIDE + 6, LDB = 80, LDC = SIDE + 5 };
    int64_t n_a = M * LDA, n_b = (n_pairs + TILE_PAIRS) * 2 * LDB;
    uint16_t *A = halves(n_a, false), *B = halves(n_b, false);
    float before[33 * LDC], C[33 * LDC];

    for (int64_t i = 0; i < M; i++)
        for (int64_t k = 0; k < 2 * n_pairs; k++) A[i * LDA + k] = bl_f32_to_bf16(random_float());
    for (int64_t i = 0; i < n_pairs * 2 * LDB; i++) B[i] = bl_f32_to_bf16(random_float());
    for (int64_t i = 0; i < 33 * LDC; i++) before[i] = C[i] = random_float();
    ops_bf16_tile t = {M, N, n_pairs, A, LDA, B, LDB, C, LDC, 0.37f, accumulate};
    amx->multiply_tile(&t);
    for (int64_t i = 0; i < 33; i++)
        for (int64_t j = 0; j < LDC; j++) {
            float expected = before[i * LDC + j];
            if (i < M && j < N) {
                float sum = sum_in_order(A + i * LDA, B, LDB, j, n_pairs);
                expected = accumulate ? 0.37f * sum + expected : 0.37f * sum;
            }
            assert_memory_equal(&C[i * LDC + j], &expected, sizeof expected);
        }
    free(A);
    free(B);
}

static void test_tiles(void **state)
{
    const int64_t rows[] = {1, 2, 9, 15, 16, 17, 33};
    (void)state;

    amx->begin();
    for (size_t r = 0; r < BL_COUNT(rows); r++)
        for (int64_t N = 0; N <= SIDE; N += N < 20 ? 1 : 5)
            for (int64_t n_pairs = 0; n_pairs <= SIDE; n_pairs += n_pairs < 18 ? 1 : 13)
                for (int accumulate = 0; accumulate < 2; accumulate++)
                    check_tile(rows[r], N, n_pairs, accumulate);
    amx->end();
}

/* The check that a process makes before it uses AMX. */
static void test_broken_processors(void **state)
{
    (void)state;
    assert_true(ops_bf16_kernels_agree(amx, &ops_bf16_kernels_avx512));
    for (int fault = AMX_SOUND + 1; fault < AMX_FAULTS; fault++) {
        if (!amx_emulated_break((amx_fault)fault)) continue;
        assert_false(ops_bf16_kernels_agree(amx, &ops_bf16_kernels_avx512));
    }
    amx_emulated_break(AMX_SOUND);
}

int main(void)
{
    if (amx_obstacle()) {
        print_message("skipped: %s\n", amx_obstacle());
        return 77;
    }
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_blocks),
        cmocka_unit_test(test_copies_and_panels),
        cmocka_unit_test(test_tiles),
        cmocka_unit_test(test_broken_processors),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
