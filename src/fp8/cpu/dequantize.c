/* SPDX-License-Identifier: Apache-2.0 */
/* dequantize.c -- codes and scales to fp32, codes to bf16, by runs of a row; and the transpose of
 * FP8 codes by cache-line tiles. */
#include "fp8/fp8.h"

#include "base/sizes.h"
#include "fp8/packed.h"
#include "fp8/cpu/kernels.h"

enum {
    ITEM_ELEMENTS = 64 << 10, /* a work item's */
    PREFETCH_ROWS = 8, /* short runs far apart: the processor does not see the next one coming */
    CACHE_LINE_BYTES = 64,
    RUN_GROUPS = 64,    /* scales at hand while packed codes are decoded */
    TRANSPOSE_TILE = 64 /* a cache line of codes: both sides of a tile fill whole lines */
};

static void decode_block_run(const bl_fp8_kernels *kernels, const uint8_t *codes,
                             const float *scales, int64_t col_begin, int64_t col_end, float *dst)
{
    for (int64_t col = col_begin; col < col_end;) {
        int64_t end = bl_min_i64((col / BL_FP8_BLOCK + 1) * BL_FP8_BLOCK, col_end);
        kernels->decode(codes + col, scales[col / BL_FP8_BLOCK], dst + (col - col_begin),
                        end - col);
        col = end;
    }
}

/* codes and scales: of the row. */
static void decode_packed_run(const bl_fp8_kernels *kernels, bl_format format, const uint8_t *codes,
                              const void *scales, int64_t cols, int64_t col_begin, int64_t col_end,
                              float *dst)
{
    const bl_format_descriptor *f = bl_format_describe(format);
    float values[RUN_GROUPS];

    for (int64_t col = col_begin; col < col_end;) {
        int64_t group = col / f->group_cols, begin = group * f->group_cols,
                end = bl_min_i64(begin + RUN_GROUPS * f->group_cols, col_end);
        bl_packed_run run = {codes + begin / 2, f->layout, f->values, values, f->group_cols};
        bl_packed_scales(format, scales, cols, group, bl_ceil_div(end - begin, f->group_cols),
                         values);
        kernels->decode_packed(&run, col - begin, dst + (col - col_begin), end - col);
        col = end;
    }
}

/* scales: of the row's groups. */
static void dequantize_run(const bl_fp8_kernels *kernels, bl_format format, const void *codes,
                           const void *scales, int64_t cols, int64_t row, int64_t col_begin,
                           int64_t col_end, float *dst)
{
    const unsigned char *bytes = codes;
    int64_t first = row * cols + col_begin, width = col_end - col_begin;
    switch (format) {
    case BL_FORMAT_FP8_ROW:
        kernels->decode(bytes + first, *(const float *)scales, dst, width);
        return;
    case BL_FORMAT_FP8_BLOCK:
        decode_block_run(kernels, bytes + row * cols, scales, col_begin, col_end, dst);
        return;
    case BL_FORMAT_F32:
        kernels->widen(BL_F32, bytes + 4 * first, dst, width);
        return;
    case BL_FORMAT_F16:
        kernels->widen(BL_F16, bytes + 2 * first, dst, width);
        return;
    case BL_FORMAT_BF16:
        kernels->widen(BL_BF16, bytes + 2 * first, dst, width);
        return;
    case BL_FORMAT_MXFP4:
    case BL_FORMAT_INT4_G32:
    case BL_FORMAT_INT4_G128:
    case BL_FORMAT_NF4:
    case BL_FORMAT_NVFP4:
        decode_packed_run(kernels, format, bytes + row * bl_format_row_bytes(format, cols), scales,
                          cols, col_begin, col_end, dst);
        return;
    case BL_FORMAT_COUNT: /* no default: a new format without a case does not compile */
        return;
    }
}

void bl_fp8_dequantize_tile(bl_format format, const void *codes, const void *scales, int64_t cols,
                            int64_t row_begin, int64_t row_end, int64_t col_begin, int64_t col_end,
                            float *dst, int64_t ld)
{
    const bl_fp8_kernels *kernels = bl_fp8_kernels_best();
    int64_t row_bytes = bl_format_row_bytes(format, cols),
            begin_bytes = bl_format_row_bytes(format, col_begin),
            run_bytes = bl_format_row_bytes(format, col_end) - begin_bytes;
    const bl_format_descriptor *f = bl_format_describe(format);
    bl_format_bytes n = {0};

    bl_format_measure(f, 1, cols, &n);
    for (int64_t row = row_begin; row < row_end; row++, dst += ld) {
        const char *row_scales =
            n.scales ? (const char *)scales + row / f->group_rows * n.scale_row : NULL;
        if (row + PREFETCH_ROWS < row_end) {
            const char *ahead =
                (const char *)codes + (row + PREFETCH_ROWS) * row_bytes + begin_bytes;
            for (int64_t i = 0; i < run_bytes; i += CACHE_LINE_BYTES) __builtin_prefetch(ahead + i);
        }
        dequantize_run(kernels, format, codes, row_scales, cols, row, col_begin, col_end, dst);
    }
}

void bl_fp8_decode_bf16_tile(const uint8_t *codes, int64_t cols, int64_t row_begin, int64_t row_end,
                             int64_t col_begin, int64_t col_end, uint16_t *dst, int64_t ld)
{
    const bl_fp8_kernels *kernels = bl_fp8_kernels_best();
    for (int64_t row = row_begin; row < row_end; row++, dst += ld)
        kernels->decode_bf16(codes + row * cols + col_begin, dst, col_end - col_begin);
}

typedef struct dequantize_task {
    bl_format format;
    const void *codes, *scales;
    int64_t rows, cols, rows_per_item;
    float *dst;
} dequantize_task;

static void dequantize_rows(void *argument, int64_t index, void *scratch)
{
    (void)scratch;
    const dequantize_task *task = argument;
    int64_t begin = index * task->rows_per_item,
            end = bl_min_i64(begin + task->rows_per_item, task->rows);
    bl_fp8_dequantize_tile(task->format, task->codes, task->scales, task->cols, begin, end, 0,
                           task->cols, task->dst + begin * task->cols, task->cols);
}

void bl_fp8_dequantize(bl_pool *pool, bl_format format, const void *codes, const void *scales,
                       int64_t rows, int64_t cols, float *dst)
{
    dequantize_task task = {
        format, codes, scales, rows, cols, bl_max_i64(ITEM_ELEMENTS / bl_max_i64(cols, 1), 1), dst};
    bl_pool_run(pool, bl_ceil_div(rows, task.rows_per_item), dequantize_rows, &task);
}

typedef struct transpose_task {
    const uint8_t *src;
    int64_t rows, cols;
    uint8_t *dst;
} transpose_task;

/* Eight rows of eight codes, in registers: swap halves of rows four apart, quarters of rows two
 * apart, then bytes of neighbors (Warren, Hacker's Delight, 2nd ed., section 7-3). */
static void transpose_8x8(const uint8_t *src, int64_t src_ld, uint8_t *dst, int64_t dst_ld)
{
    static const uint64_t masks[5] = {0, 0x00ff00ff00ff00ffu, 0x0000ffff0000ffffu, 0,
                                      0x00000000ffffffffu};
    uint64_t x[8];
    for (int i = 0; i < 8; i++) memcpy(&x[i], src + i * src_ld, 8);
    for (int apart = 4; apart > 0; apart /= 2)
        for (int i = 0; i < 8; i++) {
            if (i & apart) continue;
            uint64_t swapped = (x[i] >> (8 * apart) ^ x[i + apart]) & masks[apart];
            x[i + apart] ^= swapped;
            x[i] ^= swapped << (8 * apart);
        }
    for (int i = 0; i < 8; i++) memcpy(dst + i * dst_ld, &x[i], 8);
}

/* n_rows x n_cols codes, at most TRANSPOSE_TILE either way. They pass through a small tile, so that
 * dst, whose row stride may be a power of two, is written a cache line at a time. */
static void transpose_tile(const uint8_t *src, int64_t src_ld, int64_t n_rows, int64_t n_cols,
                           uint8_t *dst, int64_t dst_ld)
{
    uint8_t tile[TRANSPOSE_TILE][TRANSPOSE_TILE];
    if (n_rows == TRANSPOSE_TILE && n_cols == TRANSPOSE_TILE) {
        for (int64_t row = 0; row < TRANSPOSE_TILE; row += 8)
            for (int64_t col = 0; col < TRANSPOSE_TILE; col += 8)
                transpose_8x8(src + row * src_ld + col, src_ld, &tile[col][row], TRANSPOSE_TILE);
    } else {
        for (int64_t row = 0; row < n_rows; row++)
            for (int64_t col = 0; col < n_cols; col++) tile[col][row] = src[row * src_ld + col];
    }
    for (int64_t col = 0; col < n_cols; col++)
        memcpy(dst + col * dst_ld, tile[col], (size_t)n_rows);
}

/* One band of TRANSPOSE_TILE columns of src: as many whole rows of dst. */
static void transpose_band(void *argument, int64_t index, void *scratch)
{
    (void)scratch;
    const transpose_task *task = argument;
    int64_t col = index * TRANSPOSE_TILE, n_cols = bl_min_i64(TRANSPOSE_TILE, task->cols - col);
    for (int64_t row = 0; row < task->rows; row += TRANSPOSE_TILE)
        transpose_tile(task->src + row * task->cols + col, task->cols,
                       bl_min_i64(TRANSPOSE_TILE, task->rows - row), n_cols,
                       task->dst + col * task->rows + row, task->rows);
}

void bl_fp8_transpose(bl_pool *pool, const uint8_t *src, int64_t rows, int64_t cols, uint8_t *dst)
{
    transpose_task task = {src, rows, cols, dst};
    bl_pool_run(pool, bl_ceil_div(cols, TRANSPOSE_TILE), transpose_band, &task);
}
