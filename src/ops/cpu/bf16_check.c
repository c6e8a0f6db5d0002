/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_check.c -- whether two sets of kernels compute the same, before one of them is used. */
#include <string.h>

#include "base/dtype.h"
#include "ops/cpu/bf16_kernels.h"

/* Rows and columns end inside a vector and a tile, the depth inside a pair of pairs. */
enum { CHECK_ROWS = 27, CHECK_COLS = 29, CHECK_DEPTH = 75, CHECK_LIMIT = 7 };

/* -7 to 7, without a period (Knuth, The Art of Computer Programming, volume 3, section 6.4):
 * sums of 75 products are exact in fp32. */
static uint16_t small_integer(uint64_t i)
{
    uint64_t mixed = i * 0x9e3779b97f4a7c15u >> 40;
    return bl_f32_to_bf16((float)(mixed % (2 * CHECK_LIMIT + 1)) - CHECK_LIMIT);
}

static void multiply_integers(const ops_bf16_kernels *kernels, float C[CHECK_ROWS][CHECK_COLS])
{
    uint16_t A[CHECK_ROWS * CHECK_DEPTH], B[CHECK_DEPTH * CHECK_COLS],
        a[OPS_BF16_ROWS * OPS_BF16_A_STRIDE] = {0},
                          panel[(CHECK_DEPTH + OPS_BF16_DEPTH_UNIT) * OPS_BF16_PANEL];
    float factor[OPS_BF16_PANEL], sums[OPS_BF16_PANEL];
    int64_t unit = kernels->depth_unit, depth = (CHECK_DEPTH + unit - 1) / unit * unit;

    for (int64_t i = 0; i < CHECK_ROWS * CHECK_DEPTH; i++) A[i] = small_integer((uint64_t)i);
    for (int64_t i = 0; i < CHECK_DEPTH * CHECK_COLS; i++)
        B[i] = small_integer((uint64_t)i + CHECK_ROWS * CHECK_DEPTH);
    for (int64_t j = 0; j < OPS_BF16_PANEL; j++) factor[j] = 1;
    kernels->pack_rows(B, CHECK_COLS, CHECK_DEPTH, CHECK_COLS, OPS_BF16_PANEL, panel);
    for (int64_t row = 0, n; row < CHECK_ROWS; row += n) {
        n = CHECK_ROWS - row < kernels->rows ? CHECK_ROWS - row : kernels->rows;
        kernels->copy_rows(A + row * CHECK_DEPTH, CHECK_DEPTH, n, CHECK_DEPTH, NULL, a);
        ops_bf16_block block = {.n_rows = n,
                                .n_cols = CHECK_COLS,
                                .n_pairs = depth / 2,
                                .a = a,
                                .panel = panel,
                                .factor = factor,
                                .sums = sums,
                                .is_first = true,
                                .is_last = true,
                                .C = C[row],
                                .ldc = CHECK_COLS};
        kernels->multiply(&block);
    }
}

bool ops_bf16_kernels_agree(const ops_bf16_kernels *kernels, const ops_bf16_kernels *others)
{
    float C[2][CHECK_ROWS][CHECK_COLS];
    memset(C, 0xff, sizeof C);
    ops_bf16_begin(kernels);
    multiply_integers(kernels, C[0]);
    ops_bf16_end(kernels);
    ops_bf16_begin(others);
    multiply_integers(others, C[1]);
    ops_bf16_end(others);
    return memcmp(C[0], C[1], sizeof C[0]) == 0;
}
