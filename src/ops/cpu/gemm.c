/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.c -- products on the CPU in fp32, of plain matrices and with a frozen one.
 *
 * Every product is cut into tiles of the output, one pool item each. A tile of a product with a
 * frozen matrix walks along the inner dimension: dequantize the columns of a step into panels in
 * the worker's scratch, add their product, next step. The panels stay in the cache, so dequantizing
 * costs a few instructions for 16 weights that are then used once per token. */
#include "ops/gemm.h"

#include <limits.h>
#include <stdio.h>

#include "ops/cpu/f32_kernels.h"
#include "ops/cpu/ops_cpu.h"
#include "ops/cpu/tiles.h"

enum {
    TILE_M = 518, /* elements of a tile of the output; whole blocks of 14 rows */
    TILE_N = OPS_F32_WIDTH,
    STRIP_ROWS = 32,                /* of W dequantized at a time, then packed: */
    STRIP_COLS = 128,               /* small enough for the first-level cache */
    STRIP_STRIDE = STRIP_COLS + 16, /* rows a power of two apart would share cache sets */
};
/* A worker's scratch: rows of the product's left side, panels of its right side, and a strip of W
 * on its way there. */
typedef struct weight_scratch {
    ops_f32_rows rows;
    float panels[OPS_F32_DEPTH * TILE_N];
    float strip[STRIP_ROWS * STRIP_STRIDE];
} weight_scratch;
_Static_assert(sizeof(weight_scratch) <= BL_POOL_SCRATCH_BYTES &&
                   sizeof(ops_f32_scratch) <= BL_POOL_SCRATCH_BYTES,
               "operands fit the scratch");
_Static_assert(OPS_F32_DEPTH % STRIP_COLS == 0 && STRIP_COLS % BL_FP8_BLOCK == 0 &&
                   STRIP_ROWS % OPS_F32_PANEL == 0,
               "panels and strips begin where blocks do");

void bl_cpu_gemm_describe(char text[BL_CPU_GEMM_TEXT_BYTES])
{
    snprintf(text, BL_CPU_GEMM_TEXT_BYTES, "ballast fp32 %s",
             ops_f32_kernels_best()->is_fused ? "fma" : "no fma");
}

static ops_tiles choose_tiles(bl_pool *pool, int64_t M, int64_t N)
{
    const ops_f32_kernels *kernels = ops_f32_kernels_best();
    return ops_choose_tiles(
        M, N,
        (ops_tile_limits){TILE_M, TILE_N, kernels->rows, OPS_F32_PANEL, kernels->multiply_adds},
        bl_pool_threads(pool));
}

bl_status ops_gemm_check_matrix(const char *name, int64_t n_rows, int64_t n_cols, int64_t ld)
{
    if (n_rows < 0 || n_cols < 0 || ld < n_cols)
        return BL_FAIL(BL_EINTERNAL, "GEMM: %s of %lld x %lld with rows %lld apart", name,
                       (long long)n_rows, (long long)n_cols, (long long)ld);
    if (n_rows > INT_MAX || ld > INT_MAX)
        return BL_FAIL(BL_ELIMIT,
                       "GEMM: %s of %lld x %lld with rows %lld apart is past 32-bit sizes", name,
                       (long long)n_rows, (long long)n_cols, (long long)ld);
    return BL_OK;
}

/* ---- fp32 ---- */

typedef struct gemm_task {
    bool trans_a, trans_b;
    int64_t M, N, K, lda, ldb, ldc;
    float alpha, beta;
    const float *A, *B;
    float *C;
    ops_tiles tiles;
} gemm_task;

static void gemm_tile(void *arg, int64_t index, void *scratch)
{
    gemm_task *t = arg;
    int64_t n_across = bl_ceil_div(t->N, t->tiles.n);
    int64_t m = index / n_across * t->tiles.m, n = index % n_across * t->tiles.n;
    int64_t height = bl_min_i64(t->tiles.m, t->M - m), width = bl_min_i64(t->tiles.n, t->N - n);

    ops_f32_gemm(t->trans_a, t->trans_b, height, width, t->K, t->alpha,
                 t->A + (t->trans_a ? m : m * t->lda), t->lda, t->B + (t->trans_b ? n * t->ldb : n),
                 t->ldb, t->beta, t->C + m * t->ldc + n, t->ldc, scratch);
}

bl_status bl_cpu_gemm_f32(bl_pool *pool, bool trans_a, bool trans_b, int64_t M, int64_t N,
                          int64_t K, float alpha, const float *A, int64_t lda, const float *B,
                          int64_t ldb, float beta, float *C, int64_t ldc)
{
    BL_TRY(ops_gemm_check_matrix("A", trans_a ? K : M, trans_a ? M : K, lda));
    BL_TRY(ops_gemm_check_matrix("B", trans_b ? N : K, trans_b ? K : N, ldb));
    BL_TRY(ops_gemm_check_matrix("C", M, N, ldc));
    gemm_task task = {trans_a, trans_b, M,    N, K, lda, ldb,
                      ldc,     alpha,   beta, A, B, C,   choose_tiles(pool, M, N)};
    bl_pool_run(pool, task.tiles.count, gemm_tile, &task);
    return BL_OK;
}

/* ---- with a frozen matrix ---- */

typedef struct weight_task {
    const bl_weight *w;
    bool forward; /* in = x, out = y (T,N); otherwise in = dy, out = dx (T,K) */
    int64_t T, n_outer, n_inner, ld_in, ld_out;
    float beta;
    const float *in;
    float *out;
    ops_tiles tiles;
} weight_task;

/* dst[row - row_begin][col - col_begin] = W[row][col], whatever segments hold the rows. */
static void decode(const bl_weight *w, int64_t row_begin, int64_t row_end, int64_t col_begin,
                   int64_t col_end, float *dst, int64_t ld)
{
    int64_t first = 0; /* row of W at which the segment begins */
    for (int s = 0; s < w->n_segments; s++) {
        const bl_weight_segment *segment = &w->segment[s];
        int64_t begin = bl_max_i64(row_begin, first),
                end = bl_min_i64(row_end, first + segment->rows);
        if (begin < end)
            bl_fp8_dequantize_tile(segment->format, segment->codes, segment->scales, w->cols,
                                   begin - first, end - first, col_begin, col_end,
                                   dst + (begin - row_begin) * ld, ld);
        first += segment->rows;
    }
}

/* Rows [row, row + n_rows) of W from column `col` on if they are stored as fp32, else NULL. */
static const float *find_f32(const bl_weight *w, int64_t row, int64_t n_rows, int64_t col)
{
    int64_t first = 0;
    for (int s = 0; s < w->n_segments; first += w->segment[s++].rows)
        if (row >= first && row + n_rows <= first + w->segment[s].rows)
            return w->segment[s].format == BL_FORMAT_F32
                       ? (const float *)w->segment[s].codes + (row - first) * w->cols + col
                       : NULL;
    return NULL;
}

/* Panels [depth][OPS_F32_PANEL] of columns [outer, outer + width) of W^T or W, rows [inner, inner +
 * depth). */
static void pack_weight(const bl_weight *w, bool forward, int64_t inner, int64_t depth,
                        int64_t outer, int64_t width, float *panels, float *strip)
{
    const float *in_place =
        forward ? find_f32(w, outer, width, inner) : find_f32(w, inner, depth, outer);

    if (in_place && forward)
        ops_f32_pack_columns(in_place, w->cols, depth, width, panels);
    else if (in_place)
        ops_f32_pack_rows(in_place, w->cols, depth, width, panels);
    else if (forward)
        for (int64_t row = 0; row < width; row += STRIP_ROWS)
            for (int64_t col = 0; col < depth; col += STRIP_COLS) {
                int64_t n_rows = bl_min_i64(STRIP_ROWS, width - row),
                        n_cols = bl_min_i64(STRIP_COLS, depth - col);
                decode(w, outer + row, outer + row + n_rows, inner + col, inner + col + n_cols,
                       strip, STRIP_STRIDE);
                ops_f32_pack_columns(strip, STRIP_STRIDE, n_cols, n_rows,
                                     panels + row * depth + col * OPS_F32_PANEL);
            }
    else
        for (int64_t row = 0; row < depth; row += STRIP_ROWS)
            for (int64_t col = 0; col < width; col += STRIP_COLS) {
                int64_t n_rows = bl_min_i64(STRIP_ROWS, depth - row),
                        n_cols = bl_min_i64(STRIP_COLS, width - col);
                decode(w, inner + row, inner + row + n_rows, outer + col, outer + col + n_cols,
                       strip, STRIP_STRIDE);
                for (int64_t i = 0; i < n_cols; i += OPS_F32_PANEL)
                    ops_f32_pack_rows(strip + i, STRIP_STRIDE, n_rows,
                                      bl_min_i64(OPS_F32_PANEL, n_cols - i),
                                      panels + (col + i) * depth + row * OPS_F32_PANEL);
            }
}

/* out (n_rows, width) = in W^T or W, of the columns [outer, outer + width) of the right side, which
 * begin at row or column `first` of W; plus beta out. */
static void multiply_weight(const weight_task *t, int64_t first, int64_t row, int64_t n_rows,
                            int64_t outer, weight_scratch *s)
{
    int64_t width = bl_min_i64(t->tiles.n, t->n_outer - outer);
    float *out = t->out + row * t->ld_out + outer;

    if (t->n_inner == 0 || (t->beta != 0 && t->beta != 1))
        ops_f32_scale(out, t->ld_out, n_rows, width, t->beta);
    for (int64_t inner = 0; inner < t->n_inner; inner += OPS_F32_DEPTH) {
        int64_t depth = bl_min_i64(OPS_F32_DEPTH, t->n_inner - inner);
        ops_f32_step step = {.left = {t->in + row * t->ld_in + inner, t->ld_in, false},
                             .M = n_rows,
                             .N = width,
                             .depth = depth,
                             .panels = s->panels,
                             .panel_step = depth * OPS_F32_PANEL,
                             .ldb = OPS_F32_PANEL,
                             .alpha = 1,
                             .accumulate = inner > 0 || t->beta != 0,
                             .C = out,
                             .ldc = t->ld_out};
        pack_weight(t->w, t->forward, inner + (t->forward ? 0 : first), depth,
                    outer + (t->forward ? first : 0), width, s->panels, s->strip);
        ops_f32_multiply(&step, &s->rows);
    }
}

static void weight_tile(void *arg, int64_t index, void *scratch)
{
    const weight_task *t = arg;
    int64_t n_across = bl_ceil_div(t->n_outer, t->tiles.n), token = index / n_across * t->tiles.m;

    multiply_weight(t, 0, token, bl_min_i64(t->tiles.m, t->T - token),
                    index % n_across * t->tiles.n, scratch);
}

static bl_status run_weight_tiles(bl_pool *pool, weight_task *t)
{
    t->tiles = choose_tiles(pool, t->T, t->n_outer);
    bl_pool_run(pool, t->tiles.count, weight_tile, t);
    return BL_OK;
}

bl_status ops_gemm_check_weight(const bl_weight *w)
{
    int64_t rows = 0;
    if (w->n_segments < 0 || w->n_segments > BL_WEIGHT_SEGMENTS_MAX)
        return BL_FAIL(BL_EINTERNAL, "GEMM: a matrix of %d segments", w->n_segments);
    for (int s = 0; s < w->n_segments; s++) rows += w->segment[s].rows;
    if (rows != w->rows)
        return BL_FAIL(BL_EINTERNAL, "GEMM: segments of %lld rows for a matrix of %lld",
                       (long long)rows, (long long)w->rows);
    return ops_gemm_check_matrix("W", w->rows, w->cols, w->cols);
}

bl_status bl_cpu_gemm_weight_nt(bl_pool *pool, int64_t T, const float *x, int64_t ldx,
                                const bl_weight *w, float beta, float *y, int64_t ldy)
{
    BL_TRY(ops_gemm_check_weight(w));
    BL_TRY(ops_gemm_check_matrix("x", T, w->cols, ldx));
    BL_TRY(ops_gemm_check_matrix("y", T, w->rows, ldy));
    weight_task task = {.w = w,
                        .forward = true,
                        .T = T,
                        .n_outer = w->rows,
                        .n_inner = w->cols,
                        .ld_in = ldx,
                        .ld_out = ldy,
                        .beta = beta,
                        .in = x,
                        .out = y};
    return run_weight_tiles(pool, &task);
}

bl_status bl_cpu_gemm_weight_nn(bl_pool *pool, int64_t T, const float *dy, int64_t lddy,
                                const bl_weight *w, float beta, float *dx, int64_t lddx)
{
    BL_TRY(ops_gemm_check_weight(w));
    BL_TRY(ops_gemm_check_matrix("dy", T, w->rows, lddy));
    BL_TRY(ops_gemm_check_matrix("dx", T, w->cols, lddx));
    weight_task task = {.w = w,
                        .T = T,
                        .n_outer = w->cols,
                        .n_inner = w->rows,
                        .ld_in = lddy,
                        .ld_out = lddx,
                        .beta = beta,
                        .in = dy,
                        .out = dx};
    return run_weight_tiles(pool, &task);
}

/* ---- with the matrices of groups of rows ---- */

enum { GROUP_ROWS_MAX = 128, GROUP_COLS = 128 }; /* of an item */

typedef struct grouped_task {
    weight_task weight; /* of one group's size */
    const int32_t *first;
} grouped_task;

/* The rows of a block, at most GROUP_ROWS_MAX of one group. */
typedef struct grouped_block {
    int64_t group, row, n_rows;
} grouped_block;

static grouped_block block_at(const grouped_task *t, int64_t index)
{
    grouped_block b = {.group = 0};

    for (;; b.group++) {
        int64_t n_rows = t->first[b.group + 1] - t->first[b.group],
                n_blocks = bl_ceil_div(n_rows, GROUP_ROWS_MAX);
        if (index < n_blocks) {
            b.row = t->first[b.group] - t->first[0] + index * GROUP_ROWS_MAX;
            b.n_rows = bl_min_i64(GROUP_ROWS_MAX, n_rows - index * GROUP_ROWS_MAX);
            return b;
        }
        index -= n_blocks;
    }
}

static void grouped_tile(void *arg, int64_t index, void *scratch)
{
    const grouped_task *t = arg;
    const weight_task *w = &t->weight;
    int64_t n_across = bl_ceil_div(w->n_outer, w->tiles.n);
    grouped_block b = block_at(t, index / n_across);

    multiply_weight(w, b.group * (w->forward ? w->n_outer : w->n_inner), b.row, b.n_rows,
                    index % n_across * w->tiles.n, scratch);
}

bl_status bl_cpu_gemm_grouped(bl_pool *pool, bool forward, bool is_added, int64_t n_groups,
                              const int32_t *first, const float *in, const bl_weight *w, float *out)
{
    int64_t rows = w->rows / n_groups, n_blocks = 0;
    grouped_task task = {.weight = {.w = w,
                                    .forward = forward,
                                    .n_outer = forward ? rows : w->cols,
                                    .n_inner = forward ? w->cols : rows,
                                    .ld_in = forward ? w->cols : rows,
                                    .ld_out = forward ? rows : w->cols,
                                    .beta = is_added,
                                    .tiles = {.n = GROUP_COLS},
                                    .in = in,
                                    .out = out},
                         .first = first};

    BL_TRY(ops_gemm_check_weight(w));
    for (int64_t g = 0; g < n_groups; g++)
        n_blocks += bl_ceil_div(first[g + 1] - first[g], GROUP_ROWS_MAX);
    bl_pool_run(pool, n_blocks * bl_ceil_div(task.weight.n_outer, GROUP_COLS), grouped_tile, &task);
    return BL_OK;
}
