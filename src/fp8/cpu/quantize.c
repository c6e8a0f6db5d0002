/* SPDX-License-Identifier: Apache-2.0 */
/* quantize.c -- quantizes weights to FP8.
 *
 * Weights are read twice, for absmax and for the codes, the second time from the cache: work is
 * split by rows (fp8_row) or by rows of blocks (fp8_block; narrower pieces would keep to few cache
 * sets, as the row stride is often a power of two). The workers only note the lowest bad row; the
 * error is worded afterwards, so that it names the same weight whatever their timing. */
#include "fp8/fp8.h"

#include <float.h>
#include <math.h>
#include <stdatomic.h>

#include "base/sizes.h"
#include "fp8/element.h"
#include "fp8/cpu/kernels.h"

enum {
    ITEM_BYTES =
        256 << 10, /* of source a work item: small beside a matrix, large beside handing one out */
    ENCODE_RUN = 256, /* weights between two prefetches: long enough for the memory to keep up */
    CACHE_LINE_BYTES = 64
};

typedef struct quantize_task {
    const bl_fp8_kernels *kernels;
    bl_dtype dtype;
    const unsigned char *src;
    int64_t row_begin, row_end, cols;
    int64_t rows_per_item;
    uint8_t *codes;
    float *scales;
    atomic_llong first_bad_row; /* of the projection */
} quantize_task;

static bl_status init_task(quantize_task *task, bl_dtype dtype, const void *src, int64_t row_begin,
                           int64_t row_end, int64_t cols)
{
    if (dtype != BL_F32 && dtype != BL_BF16 && dtype != BL_F16)
        return BL_FAIL(BL_EINPUT, "weights of type %s cannot be quantized", bl_dtype_name(dtype));
    *task = (quantize_task){.kernels = bl_fp8_kernels_best(),
                            .dtype = dtype,
                            .src = src,
                            .row_begin = row_begin,
                            .row_end = row_end,
                            .cols = cols,
                            .first_bad_row = row_end};
    int64_t row_bytes = bl_max_i64(cols * (int64_t)bl_dtype_bytes(dtype), 1);
    task->rows_per_item = bl_max_i64(ITEM_BYTES / row_bytes, 1);
    return BL_OK;
}

static const unsigned char *source_at(const quantize_task *task, int64_t row, int64_t col)
{
    return task->src +
           ((row - task->row_begin) * task->cols + col) * (int64_t)bl_dtype_bytes(task->dtype);
}

static void note_bad_row(quantize_task *task, int64_t row)
{
    long long seen = atomic_load(&task->first_bad_row);
    while (row < seen && !atomic_compare_exchange_weak(&task->first_bad_row, &seen, row)) continue;
}

static bl_status check_rows(quantize_task *task)
{
    int64_t row = atomic_load(&task->first_bad_row);
    if (row >= task->row_end) return BL_OK;
    for (int64_t col = 0; col < task->cols; col++) {
        float value;
        bl_dtype_to_f32(task->dtype, source_at(task, row, col), &value, 1);
        if (!isfinite(value))
            return BL_FAIL(BL_EINPUT, "row %lld, column %lld: the weight is %s", (long long)row,
                           (long long)col, isnan(value) ? "NaN" : "infinite");
    }
    return BL_FAIL(BL_EINTERNAL, "row %lld: absmax is not finite, but the weights are",
                   (long long)row);
}

float bl_fp8_scale(float absmax)
{
    return bl_e4m3_scale(absmax);
}

/* The division keeps this loop busy, not the memory: meanwhile the next row is fetched for its
 * absmax. */
static void encode_row(quantize_task *task, int64_t row, bool has_next)
{
    int64_t i = row - task->row_begin,
            run_bytes = ENCODE_RUN * (int64_t)bl_dtype_bytes(task->dtype);
    for (int64_t col = 0; col < task->cols; col += ENCODE_RUN) {
        const unsigned char *run = source_at(task, row, col);
        if (has_next) {
            const unsigned char *ahead = source_at(task, row + 1, col);
            for (int64_t line = 0; line < run_bytes; line += CACHE_LINE_BYTES)
                __builtin_prefetch(ahead + line);
        }
        task->kernels->encode(task->dtype, run, task->scales[i], task->codes + i * task->cols + col,
                              bl_min_i64(ENCODE_RUN, task->cols - col));
    }
}

static void quantize_rows(void *argument, int64_t index, void *scratch)
{
    (void)scratch;
    quantize_task *task = argument;
    int64_t begin = task->row_begin + index * task->rows_per_item;
    int64_t end = bl_min_i64(begin + task->rows_per_item, task->row_end);
    for (int64_t row = begin; row < end; row++) {
        int64_t i = row - task->row_begin;
        float absmax = task->kernels->absmax(task->dtype, source_at(task, row, 0), task->cols);
        if (!(absmax <= FLT_MAX)) {
            note_bad_row(task, row);
            return;
        }
        task->scales[i] = bl_fp8_scale(absmax);
        encode_row(task, row, row + 1 < end);
    }
}

bl_status bl_fp8_row_quantize(bl_pool *pool, bl_dtype dtype, const void *src, int64_t row_begin,
                              int64_t row_end, int64_t cols, uint8_t *codes, float *scales)
{
    quantize_task task;
    BL_TRY(init_task(&task, dtype, src, row_begin, row_end, cols));
    task.codes = codes;
    task.scales = scales;
    bl_pool_run(pool, bl_ceil_div(row_end - row_begin, task.rows_per_item), quantize_rows, &task);
    return check_rows(&task);
}

/* A row of blocks is read twice, the second time from the cache. */
static void quantize_block_row(void *argument, int64_t index, void *scratch)
{
    (void)scratch;
    quantize_task *task = argument;
    int64_t n_blocks = bl_ceil_div(task->cols, BL_FP8_BLOCK),
            begin = task->row_begin + index * BL_FP8_BLOCK,
            end = bl_min_i64(begin + BL_FP8_BLOCK, task->row_end);
    float *scales = task->scales + index * n_blocks;

    for (int64_t block = 0; block < n_blocks; block++) scales[block] = 0;
    for (int64_t row = begin; row < end; row++)
        for (int64_t block = 0; block < n_blocks; block++) {
            int64_t col = block * BL_FP8_BLOCK, width = bl_min_i64(BL_FP8_BLOCK, task->cols - col);
            float found = task->kernels->absmax(task->dtype, source_at(task, row, col), width);
            if (!(found <= FLT_MAX)) {
                note_bad_row(task, row);
                return;
            }
            if (found > scales[block]) scales[block] = found;
        }
    for (int64_t block = 0; block < n_blocks; block++) scales[block] = bl_fp8_scale(scales[block]);
    for (int64_t row = begin; row < end; row++)
        for (int64_t block = 0; block < n_blocks; block++) {
            int64_t col = block * BL_FP8_BLOCK, width = bl_min_i64(BL_FP8_BLOCK, task->cols - col);
            task->kernels->encode(task->dtype, source_at(task, row, col), scales[block],
                                  task->codes + (row - task->row_begin) * task->cols + col, width);
        }
}

bl_status bl_fp8_block_quantize(bl_pool *pool, bl_dtype dtype, const void *src, int64_t row_begin,
                                int64_t row_end, int64_t cols, uint8_t *codes, float *scales)
{
    quantize_task task;
    BL_TRY(init_task(&task, dtype, src, row_begin, row_end, cols));
    task.codes = codes;
    task.scales = scales;
    bl_pool_run(pool, bl_ceil_div(row_end - row_begin, BL_FP8_BLOCK), quantize_block_row, &task);
    return check_rows(&task);
}
