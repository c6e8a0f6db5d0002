/* SPDX-License-Identifier: Apache-2.0 */
/* grid.h -- codes whose scales are shared by blocks of any size (MXFP8: 1 x 32), as some
 * checkpoints have them, decoded once, when they are loaded: E4M3, or 4 bits by a book of 16
 * values. */
#ifndef BALLAST_FP8_GRID_H
#define BALLAST_FP8_GRID_H

#include <stdbool.h>

#include "base/dtype.h"
#include "base/pool.h"
#include "base/status.h"

/* The scale of (row, col) is scales[row / block_rows][col / block_cols] of n_cols columns, or
 * is_flat: scales[(row * cols + col) / block_cols]. */
typedef struct bl_fp8_grid {
    const float *scales;
    int64_t n_cols, block_rows, block_cols;
    /* Codes of 4 bits, rows of row_bytes: value = (book[code] - zero point) * scale. NULL: E4M3 */
    const float *book;
    const float *zero_points; /* as scales; NULL: none */
    bool is_high_first;       /* a byte's first code is in its high bits */
    bool is_flat;
    int64_t row_bytes;
} bl_fp8_grid;

/* dst[row_end - row_begin][cols] = the values, in dtype F32 or BF16, for rows [row_begin,
 * row_end) of a matrix, whose codes begin at `codes`. Exact in BF16, too, when scales are powers of
 * two. BL_EINPUT names the first row and column whose value is not finite, or not exact in BF16. */
bl_status bl_fp8_grid_decode(bl_pool *pool, const bl_fp8_grid *grid, const uint8_t *codes,
                             int64_t row_begin, int64_t row_end, int64_t cols, bl_dtype dtype,
                             void *dst);

#endif
