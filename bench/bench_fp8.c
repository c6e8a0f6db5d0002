/* SPDX-License-Identifier: Apache-2.0 */
/* bench_fp8 [THREADS [ROWS COLS [RUNS]]]: the rates of quantizing and dequantizing weights,
 * compared with a memcpy of as many bytes.
 *
 * A case reads its source and writes its result once; memcpy moves the same total, half of it read
 * and half written, split over the same threads. The cases take turns, run by run, and the fastest
 * run of each counts (the median is printed too). One JSON line per case. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "fp8/fp8.h"
#include "fp8/cpu/kernels.h"

enum { MAX_RUNS = 101, COPY_ITEM_BYTES = 1 << 20 };

typedef struct bench {
    bl_pool *pool;
    int64_t rows, cols;
    void *source[2]; /* fp32, bf16 */
    uint8_t *codes, *transposed;
    float *scales, *decoded;
    char *from, *to;
    size_t copy_bytes;
} bench;

static void copy_item(void *arg, int64_t index, void *scratch)
{
    const bench *b = arg;
    size_t begin = (size_t)index * COPY_ITEM_BYTES, n = b->copy_bytes - begin;
    (void)scratch;
    memcpy(b->to + begin, b->from + begin, n < COPY_ITEM_BYTES ? n : COPY_ITEM_BYTES);
}

static void copy(bench *b)
{
    bl_pool_run(b->pool, bl_ceil_div((int64_t)b->copy_bytes, COPY_ITEM_BYTES), copy_item, b);
}
static void row_from_f32(bench *b)
{
    bl_fp8_row_quantize(b->pool, BL_F32, b->source[0], 0, b->rows, b->cols, b->codes, b->scales);
}
static void row_from_bf16(bench *b)
{
    bl_fp8_row_quantize(b->pool, BL_BF16, b->source[1], 0, b->rows, b->cols, b->codes, b->scales);
}
static void block_from_f32(bench *b)
{
    bl_fp8_block_quantize(b->pool, BL_F32, b->source[0], 0, b->rows, b->cols, b->codes, b->scales);
}
static void block_from_bf16(bench *b)
{
    bl_fp8_block_quantize(b->pool, BL_BF16, b->source[1], 0, b->rows, b->cols, b->codes, b->scales);
}
static void row_to_f32(bench *b)
{
    bl_fp8_dequantize(b->pool, BL_FORMAT_FP8_ROW, b->codes, b->scales, b->rows, b->cols,
                      b->decoded);
}
static void block_to_f32(bench *b)
{
    bl_fp8_dequantize(b->pool, BL_FORMAT_FP8_BLOCK, b->codes, b->scales, b->rows, b->cols,
                      b->decoded);
}
static void transpose(bench *b)
{
    bl_fp8_transpose(b->pool, b->codes, b->rows, b->cols, b->transposed);
}

static const struct {
    const char *name;
    void (*run)(bench *b);
    size_t bytes_per_weight; /* read and written */
} cases[] = {
    {"fp8_row from f32", row_from_f32, 5},
    {"fp8_row from bf16", row_from_bf16, 3},
    {"fp8_block from f32", block_from_f32, 5},
    {"fp8_block from bf16", block_from_bf16, 3},
    {"fp8_row to f32", row_to_f32, 5},
    {"fp8_block to f32", block_to_f32, 5},
    {"transpose", transpose, 2},
};

static int compare_doubles(const void *a, const void *b)
{
    double x = *(const double *)a, y = *(const double *)b;
    return (x > y) - (x < y);
}

static void run_case(bench *b, size_t c, int n_runs)
{
    double seconds[2][MAX_RUNS];
    size_t bytes = cases[c].bytes_per_weight * (size_t)(b->rows * b->cols);
    b->copy_bytes = bytes / 2;
    for (int run = -1; run < n_runs; run++) /* the first warms up */
        for (int what = 0; what < 2; what++) {
            double start = bl_now_s();
            if (what == 0)
                cases[c].run(b);
            else
                copy(b);
            if (run >= 0) seconds[what][run] = bl_now_s() - start;
        }
    for (int what = 0; what < 2; what++)
        qsort(seconds[what], (size_t)n_runs, sizeof(double), compare_doubles);
    printf(
        "{\"bench\":\"fp8\",\"case\":\"%s\",\"kernels\":\"%s\",\"threads\":%d,\"rows\":%lld,"
        "\"cols\":%lld,"
        "\"bytes\":%zu,"
        "\"min_s\":%.6f,\"median_s\":%.6f,\"gb_per_s\":%.2f,\"memcpy_gb_per_s\":%.2f,\"percent_of_"
        "memcpy\":%.1f}\n",
        cases[c].name, bl_fp8_kernels_best()->name, bl_pool_threads(b->pool), (long long)b->rows,
        (long long)b->cols, bytes, seconds[0][0], seconds[0][n_runs / 2],
        1e-9 * (double)bytes / seconds[0][0], 1e-9 * (double)bytes / seconds[1][0],
        100 * seconds[1][0] / seconds[0][0]);
}

/* Weights as a network has them: small, of either sign. */
static void fill(bench *b)
{
    uint64_t seed = 1;
    float *f32 = b->source[0];
    uint16_t *bf16 = b->source[1];
    for (int64_t i = 0; i < b->rows * b->cols; i++) {
        seed = seed * 6364136223846793005u + 1442695040888963407u;
        f32[i] = 0.02f * ((float)(seed >> 40) / (float)(1 << 23) - 1.0f);
        bf16[i] = bl_f32_to_bf16(f32[i]);
    }
    memset(b->from, 1, 5 * (size_t)(b->rows * b->cols) / 2 + 1);
}

int main(int argc, char **argv)
{
    bench b = {.rows = argc > 3 ? atoll(argv[2]) : 8192, .cols = argc > 3 ? atoll(argv[3]) : 4096};
    int n_threads = argc > 1 ? atoi(argv[1]) : 2, n_runs = argc > 4 ? atoi(argv[4]) : 15;
    if (b.rows < 1 || b.cols < 1 || n_runs < 1 || n_runs > MAX_RUNS ||
        bl_pool_create(n_threads, &b.pool) != BL_OK) {
        fprintf(stderr, "usage: %s [THREADS [ROWS COLS [RUNS]]], at most %d runs\n", argv[0],
                MAX_RUNS);
        return 2;
    }
    size_t n = (size_t)(b.rows * b.cols),
           n_blocks = (size_t)(bl_ceil_div(b.rows, 128) * bl_ceil_div(b.cols, 128));
    b.source[0] = malloc(4 * n);
    b.source[1] = malloc(2 * n);
    b.codes = malloc(n);
    b.transposed = malloc(n);
    b.decoded = malloc(4 * n);
    b.scales = malloc(((size_t)b.rows + n_blocks) * sizeof(float));
    b.from = malloc(5 * n / 2 + 1);
    b.to = malloc(5 * n / 2 + 1);
    if (!b.source[0] || !b.source[1] || !b.codes || !b.transposed || !b.decoded || !b.scales ||
        !b.from || !b.to) {
        fprintf(stderr, "no memory for %zu weights\n", n);
        return 4;
    }
    fill(&b);
    for (size_t c = 0; c < BL_COUNT(cases); c++) run_case(&b, c, n_runs);
    void *buffers[] = {b.source[0], b.source[1], b.codes, b.transposed,
                       b.decoded,   b.scales,    b.from,  b.to};
    for (size_t i = 0; i < BL_COUNT(buffers); i++) free(buffers[i]);
    bl_pool_destroy(b.pool);
    return 0;
}
