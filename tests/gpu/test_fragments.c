/* SPDX-License-Identifier: Apache-2.0 */
/* The layouts of tensor-core operands, a second time: which thread has which element, by the
 * formulas of the PTX ISA ("Matrix Fragments for mma.m16n8k16 with floating point type",
 * "ldmatrix"), element by element, as mma.cuh does not have them. Products of small whole numbers
 * are exact, so one element at a wrong place shows. On a GPU this is a test of attention's
 * assumptions, on the emulated one of the emulator. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include <stdlib.h>
#include <string.h>

#include "base/dtype.h"
#include "fragments.h"
#include "gpu_test.h"

enum { M = 16, N = 8, K = 16, ROW = 8, MATRICES = 4 };

static int whole(uint32_t *state)
{
    *state = *state * 1664525u + 1013904223u;
    return (int)(*state >> 28) - 8;
}

/* ---- the PTX ISA's formulas: element i of a thread's fragment ---- */

static int group_of(int lane)
{
    return lane >> 2;
}

static int in_group(int lane)
{
    return lane % 4;
}

static int a_row(int lane, int i)
{
    return (i >= 0 && i < 2) || (i >= 4 && i < 6) ? group_of(lane) : group_of(lane) + 8;
}

static int a_col(int lane, int i)
{
    return i < 4 ? in_group(lane) * 2 + (i & 1) : in_group(lane) * 2 + (i & 1) + 8;
}

static int b_row(int lane, int i)
{
    return i < 2 ? in_group(lane) * 2 + (i & 1) : in_group(lane) * 2 + (i & 1) + 8;
}

static int c_row(int lane, int i)
{
    return i < 2 ? group_of(lane) : group_of(lane) + 8;
}

static int c_col(int lane, int i)
{
    return in_group(lane) * 2 + (i & 1);
}

/* Two elements per register, the first in the lower half. */
static void put(uint32_t *registers, int i, int value)
{
    uint32_t bits = bl_f32_to_bf16((float)value);
    registers[i / 2] |= i % 2 ? bits << 16 : bits;
}

/* ---- tests ---- */

static void *on_device(test_device d, const void *values, size_t bytes)
{
    void *memory;
    gpu_ok(bl_device_alloc(d.device, BL_SPACE_DEVICE, bytes, "fragments", &memory));
    test_write(d, memory, values, bytes);
    return memory;
}

static void test_products(void **state)
{
    enum { ROUNDS = 20 };
    test_device d = ((gpu_test *)*state)->gpu;
    uint32_t seed = 1;

    for (int round = 0; round < ROUNDS; round++) {
        int A[M][K], B[K][N], C[M][N];
        uint32_t a[FRAGMENT_LANES][4] = {{0}}, b[FRAGMENT_LANES][2] = {{0}};
        float c[FRAGMENT_LANES][4];

        for (int i = 0; i < M * K; i++) A[i / K][i % K] = whole(&seed);
        for (int i = 0; i < K * N; i++) B[i / N][i % N] = whole(&seed);
        for (int i = 0; i < M * N; i++) C[i / N][i % N] = whole(&seed);
        for (int lane = 0; lane < FRAGMENT_LANES; lane++) {
            for (int i = 0; i < 8; i++) put(a[lane], i, A[a_row(lane, i)][a_col(lane, i)]);
            for (int i = 0; i < 4; i++) put(b[lane], i, B[b_row(lane, i)][group_of(lane)]);
            for (int i = 0; i < 4; i++) c[lane][i] = (float)C[c_row(lane, i)][c_col(lane, i)];
        }
        void *at_a = on_device(d, a, sizeof a), *at_b = on_device(d, b, sizeof b),
             *at_c = on_device(d, c, sizeof c);
        gpu_ok(fragments_multiply(d.stream, at_a, at_b, at_c));
        test_read(d, c, at_c, sizeof c);
        for (int lane = 0; lane < FRAGMENT_LANES; lane++)
            for (int i = 0; i < 4; i++) {
                int row = c_row(lane, i), col = c_col(lane, i), want = C[row][col];
                for (int k = 0; k < K; k++) want += A[row][k] * B[k][col];
                if (c[lane][i] != (float)want)
                    fail_msg("lane %d, element %d: %g instead of %d", lane, i, c[lane][i], want);
            }
        bl_device_free(d.device, BL_SPACE_DEVICE, at_a);
        bl_device_free(d.device, BL_SPACE_DEVICE, at_b);
        bl_device_free(d.device, BL_SPACE_DEVICE, at_c);
    }
}

/* Lane 8 m + r has the address of row r of matrix m. Thread T gets of each matrix elements
 * 2 (T % 4) and the next one of row T / 4; transposed, of column T / 4. */
static void check_loads(test_device d, bool is_transposed)
{
    uint16_t tile[FRAGMENT_TILE];
    int32_t at[FRAGMENT_LANES];
    uint32_t out[FRAGMENT_LANES][MATRICES] = {{0}};

    for (int i = 0; i < FRAGMENT_TILE; i++) tile[i] = (uint16_t)(1000 + i);
    for (int lane = 0; lane < FRAGMENT_LANES; lane++)
        at[lane] = 13 * lane % FRAGMENT_LANES * ROW; /* rows in any order */
    void *at_tile = on_device(d, tile, sizeof tile), *at_at = on_device(d, at, sizeof at),
         *at_out = on_device(d, out, sizeof out);
    gpu_ok(fragments_load(d.stream, is_transposed, at_tile, at_at, at_out));
    test_read(d, out, at_out, sizeof out);
    for (int lane = 0; lane < FRAGMENT_LANES; lane++)
        for (int m = 0; m < MATRICES; m++)
            for (int half = 0; half < 2; half++) {
                int along = 2 * (lane % 4) + half, across = lane / 4,
                    row = is_transposed ? along : across, col = is_transposed ? across : along;
                uint16_t want = tile[at[8 * m + row] + col],
                         got = (uint16_t)(out[lane][m] >> 16 * half);
                if (got != want)
                    fail_msg("lane %d, matrix %d, half %d: %d instead of %d", lane, m, half, got,
                             want);
            }
    bl_device_free(d.device, BL_SPACE_DEVICE, at_tile);
    bl_device_free(d.device, BL_SPACE_DEVICE, at_at);
    bl_device_free(d.device, BL_SPACE_DEVICE, at_out);
}

static void test_loads(void **state)
{
    test_device d = ((gpu_test *)*state)->gpu;
    check_loads(d, false);
    check_loads(d, true);
}

int main(void)
{
    gpu_test t;

    if (!gpu_test_create(&t)) return SKIPPED;
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_prestate(test_products, &t),
        cmocka_unit_test_prestate(test_loads, &t),
    };
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    gpu_test_destroy(&t);
    return n_failed;
}
