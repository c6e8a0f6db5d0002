/* SPDX-License-Identifier: Apache-2.0 */
/* grid.c -- rows of codes with a grid of scales, decoded: each run of a row's codes that share a
 * scale at a time. */
#include "fp8/grid.h"

#include <math.h>
#include <stdatomic.h>
#include <string.h>

#include "base/sizes.h"
#include "fp8/cpu/kernels.h"

enum { ITEM_ELEMENTS = 64 << 10, RUN = 256 };

typedef struct decode_task {
    const bl_fp8_kernels *kernels;
    const bl_fp8_grid *grid;
    const uint8_t *codes;
    int64_t row_begin, row_end, cols, rows_per_item;
    bl_dtype dtype;
    unsigned char *dst;
    atomic_llong first_bad_row;
} decode_task;

/* n codes of 4 bits of a row from `col` on. */
static void decode_nibbles(const bl_fp8_grid *g, const uint8_t *row, int64_t col, float zero,
                           float scale, float *values, int64_t n)
{
    for (int64_t i = 0; i < n; i++, col++) {
        int shift = (col % 2 != 0) != g->is_high_first ? 4 : 0;
        values[i] = (g->book[row[col / 2] >> shift & 15] - zero) * scale;
    }
}

/* At most RUN values from `col` on that share a scale. */
static int64_t decode_run(const decode_task *task, int64_t row, int64_t col, float *values)
{
    const bl_fp8_grid *g = task->grid;
    int64_t at = g->is_flat ? row * task->cols + col : col, /* along the blocks */
        block = at / g->block_cols,
            n = bl_min_i64(bl_min_i64((block + 1) * g->block_cols - at, task->cols - col), RUN);

    if (!g->is_flat) block += row / g->block_rows * g->n_cols;
    if (g->book)
        decode_nibbles(g, task->codes + (row - task->row_begin) * g->row_bytes, col,
                       g->zero_points ? g->zero_points[block] : 0, g->scales[block], values, n);
    else
        task->kernels->decode(task->codes + (row - task->row_begin) * task->cols + col,
                              g->scales[block], values, n);
    return n;
}

static bool is_held(bl_dtype dtype, float value)
{
    return isfinite(value) && (dtype == BL_F32 || bl_bf16_to_f32(bl_f32_to_bf16(value)) == value);
}

static bool decode_row(const decode_task *task, int64_t row)
{
    int64_t n;
    float values[RUN];
    unsigned char *dst =
        task->dst + (row - task->row_begin) * task->cols * (int64_t)bl_dtype_bytes(task->dtype);
    bool is_bad = false;

    for (int64_t col = 0; col < task->cols; col += n) {
        n = decode_run(task, row, col, values);
        for (int64_t i = 0; i < n; i++) {
            uint16_t half = bl_f32_to_bf16(values[i]);
            is_bad |= !is_held(task->dtype, values[i]);
            if (task->dtype == BL_BF16) memcpy(dst + 2 * (col + i), &half, sizeof half);
        }
        if (task->dtype == BL_F32) memcpy(dst + 4 * col, values, (size_t)n * sizeof *values);
    }
    return !is_bad;
}

static void decode_rows(void *argument, int64_t index, void *scratch)
{
    decode_task *task = argument;
    int64_t begin = task->row_begin + index * task->rows_per_item,
            end = bl_min_i64(begin + task->rows_per_item, task->row_end);

    (void)scratch;
    for (int64_t row = begin; row < end; row++) {
        if (decode_row(task, row)) continue;
        long long seen = atomic_load(&task->first_bad_row);
        while (row < seen && !atomic_compare_exchange_weak(&task->first_bad_row, &seen, row))
            continue;
        return;
    }
}

static bl_status fail_at(const decode_task *task, int64_t row)
{
    int64_t n;
    float values[RUN];

    for (int64_t col = 0; col < task->cols; col += n) {
        n = decode_run(task, row, col, values);
        for (int64_t i = 0; i < n; i++)
            if (!is_held(task->dtype, values[i]))
                return BL_FAIL(BL_EINPUT, "row %lld, column %lld: code * scale is %g, %s",
                               (long long)row, (long long)(col + i), (double)values[i],
                               isfinite(values[i]) ? "which bf16 does not hold" : "not finite");
    }
    return BL_FAIL(BL_EINTERNAL, "row %lld: its values are fine", (long long)row);
}

bl_status bl_fp8_grid_decode(bl_pool *pool, const bl_fp8_grid *grid, const uint8_t *codes,
                             int64_t row_begin, int64_t row_end, int64_t cols, bl_dtype dtype,
                             void *dst)
{
    decode_task task = {.kernels = bl_fp8_kernels_best(),
                        .grid = grid,
                        .codes = codes,
                        .row_begin = row_begin,
                        .row_end = row_end,
                        .cols = cols,
                        .rows_per_item = bl_max_i64(ITEM_ELEMENTS / bl_max_i64(cols, 1), 1),
                        .dtype = dtype,
                        .dst = dst,
                        .first_bad_row = row_end};

    bl_pool_run(pool, bl_ceil_div(row_end - row_begin, task.rows_per_item), decode_rows, &task);
    int64_t bad = atomic_load(&task.first_bad_row);
    return bad == row_end ? BL_OK : fail_at(&task, bad);
}
