/* SPDX-License-Identifier: Apache-2.0 */
#include "fp8/fp8.h"

#include "base/sizes.h"
#include "fp8/kernels.h"

enum {
    ITEM_ELEMENTS = 64 << 10, /* a work item's */
    PREFETCH_ROWS = 8,        /* short runs far apart: the processor does not see the next one coming */
    CACHE_LINE_BYTES = 64,
    TRANSPOSE_TILE = 64 /* a cache line of codes: both sides of a tile fill whole lines */
};

static void decode_block_run(const bl_fp8_kernels *kernels, const uint8_t *codes, const float *scales,
                             int64_t col_begin, int64_t col_end, float *dst)
{
    for (int64_t col = col_begin; col < col_end;) {
        int64_t end = bl_min_i64((col / BL_FP8_BLOCK + 1) * BL_FP8_BLOCK, col_end);
        kernels->decode(codes + col, scales[col / BL_FP8_BLOCK], dst + (col - col_begin), end - col);
        col = end;
    }
}

static void dequantise_run(const bl_fp8_kernels *kernels, bl_format format, const void *codes,
                           const float *scales, int64_t cols, int64_t row, int64_t col_begin, int64_t col_end,
                           float *dst)
{
    const unsigned char *bytes = codes;
    int64_t first = row * cols + col_begin, width = col_end - col_begin;
    switch (format) {
    case BL_FORMAT_FP8_ROW:
        kernels->decode(bytes + first, scales[row], dst, width);
        return;
    case BL_FORMAT_FP8_BLOCK:
        scales += row / BL_FP8_BLOCK * bl_ceil_div(cols, BL_FP8_BLOCK);
        decode_block_run(kernels, bytes + row * cols, scales, col_begin, col_end, dst);
        return;
    case BL_FORMAT_F32:
        kernels->widen(BL_F32, bytes + 4 * first, dst, width);
        return;
    case BL_FORMAT_F16:
        kernels->widen(BL_F16, bytes + 2 * first, dst, width);
        return;
    default:
        kernels->widen(BL_BF16, bytes + 2 * first, dst, width);
        return;
    }
}

void bl_fp8_dequantise_tile(bl_format format, const void *codes, const float *scales, int64_t cols,
                            int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end,
                            float *dst, int64_t ld)
{
    const bl_fp8_kernels *kernels = bl_fp8_kernels_best();
    int64_t code_bytes = (int64_t)bl_format_code_bytes(format),
            run_bytes = (col_end - col_begin) * code_bytes;
    for (int64_t row = row_begin; row < row_end; row++, dst += ld) {
        if (row + PREFETCH_ROWS < row_end) {
            const char *ahead = (const char *)codes + ((row + PREFETCH_ROWS) * cols + col_begin) * code_bytes;
            for (int64_t i = 0; i < run_bytes; i += CACHE_LINE_BYTES) __builtin_prefetch(ahead + i);
        }
        dequantise_run(kernels, format, codes, scales, cols, row, col_begin, col_end, dst);
    }
}

typedef struct dequantise_task {
    bl_format format;
    const void *codes;
    const float *scales;
    int64_t rows, cols, rows_per_item;
    float *dst;
} dequantise_task;

static void dequantise_rows(void *argument, int64_t index, void *scratch)
{
    (void)scratch;
    const dequantise_task *task = argument;
    int64_t begin = index * task->rows_per_item, end = bl_min_i64(begin + task->rows_per_item, task->rows);
    bl_fp8_dequantise_tile(task->format, task->codes, task->scales, task->cols, begin, end, 0, task->cols,
                           task->dst + begin * task->cols, task->cols);
}

void bl_fp8_dequantise(bl_pool *pool, bl_format format, const void *codes, const float *scales, int64_t rows,
                       int64_t cols, float *dst)
{
    dequantise_task task = {
        format, codes, scales, rows, cols, bl_max_i64(ITEM_ELEMENTS / bl_max_i64(cols, 1), 1), dst};
    bl_pool_run(pool, bl_ceil_div(rows, task.rows_per_item), dequantise_rows, &task);
}

typedef struct transpose_task {
    const uint8_t *src;
    int64_t rows, cols;
    uint8_t *dst;
} transpose_task;

/* One band of TRANSPOSE_TILE columns of src: as many whole rows of dst. */
static void transpose_band(void *argument, int64_t index, void *scratch)
{
    (void)scratch;
    const transpose_task *task = argument;
    int64_t col_begin = index * TRANSPOSE_TILE, col_end = bl_min_i64(col_begin + TRANSPOSE_TILE, task->cols);
    for (int64_t row_begin = 0; row_begin < task->rows; row_begin += TRANSPOSE_TILE) {
        int64_t row_end = bl_min_i64(row_begin + TRANSPOSE_TILE, task->rows);
        for (int64_t col = col_begin; col < col_end; col++)
            for (int64_t row = row_begin; row < row_end; row++)
                task->dst[col * task->rows + row] = task->src[row * task->cols + col];
    }
}

void bl_fp8_transpose(bl_pool *pool, const uint8_t *src, int64_t rows, int64_t cols, uint8_t *dst)
{
    transpose_task task = {src, rows, cols, dst};
    bl_pool_run(pool, bl_ceil_div(cols, TRANSPOSE_TILE), transpose_band, &task);
}
