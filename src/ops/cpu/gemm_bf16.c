/* SPDX-License-Identifier: Apache-2.0 */
/* gemm_bf16.c -- products of bf16 with fp32 sums. The output is cut into tiles, one pool item each.
 * A tile walks along the inner dimension in steps. It packs the step of B, of FP8 codes decoded to
 * bf16, which is exact, into the second-level cache; then, for a few rows of A after the other, it
 * copies them into the first-level cache and multiplies. Meanwhile it prefetches the next rows of A
 * and the next step of B. Scales never meet the codes: those that are common to a column of a step
 * multiply its sums, those of W's rows in dx = dy W multiply dy.
 *
 * Where steps begin depends on K and the formats alone, and every element is summed in one order.
 * So the bits of a row of C depend neither on the tiles, which are chosen by the shape and the
 * number of threads, nor on the other rows. */
#include "ops/gemm.h"

#include <stdio.h>
#include <string.h>

#include "ops/cpu/bf16_kernels.h"
#include "ops/cpu/ops_cpu.h"
#include "ops/cpu/tiles.h"

enum {
    TILE_M = 518, /* whole blocks of 14 rows; 512 is whole ones of 32 */
    TILE_N = 8 * OPS_BF16_PANEL,
    STEP_UNIT = 32,  /* of the depth of steps; even, as pairs are */
    STRIP_ROWS = 32, /* of W decoded at a time, then packed: they stay in the first-level cache */
    CACHE_LINE_BYTES = 64
};

/* A worker's scratch. */
typedef struct bf16_scratch {
    uint16_t b[OPS_BF16_DEPTH * TILE_N];
    uint16_t a[OPS_BF16_ROWS * OPS_BF16_A_STRIDE];
    float sums[TILE_M * TILE_N];
    uint16_t strip[STRIP_ROWS * OPS_BF16_A_STRIDE];
    float row_scale[OPS_BF16_DEPTH]; /* of W's rows, in dx = dy W */
    float factor[TILE_N];
} bf16_scratch;
_Static_assert(sizeof(bf16_scratch) <= BL_POOL_SCRATCH_BYTES, "a tile fits the scratch");
_Static_assert((int)STRIP_ROWS >= (int)OPS_BF16_PANEL && (int)OPS_BF16_A_STRIDE >= (int)TILE_N,
               "a strip holds a panel's columns of W^T, and rows of W as wide as a tile");
_Static_assert((int)TILE_N <= (int)OPS_BF16_DEPTH, "a run of a strip's row is at most a step deep");
_Static_assert(STRIP_ROWS % OPS_BF16_DEPTH_UNIT == 0 && OPS_BF16_DEPTH % OPS_BF16_DEPTH_UNIT == 0,
               "zeros behind the last strip of a panel, and none behind the others");

typedef struct bf16_task {
    const ops_bf16_kernels *kernels;
    int64_t M, N, K, tile_m, tile_n, depth;
    bool trans_a, trans_b;
    const uint16_t *A, *B;
    int64_t lda, ldb, ldc;
    float alpha, beta;
    const bl_weight *w; /* in place of B; trans_b: its transpose */
    bool scales_rows;   /* dx = dy W with fp8_row in W */
    bool has_blocks;
    bool c_is_bf16;
    void *C;
} bf16_task;

/* Of A's rows and of panels, whose last rows may be zeros. */
static int64_t stored_depth(const bf16_task *t, int64_t depth)
{
    return bl_round_up(depth, t->kernels->depth_unit);
}

/* ---- the frozen matrix ---- */

/* The segment that holds a row of W; *first: its first row. */
static const bl_weight_segment *find_segment(const bl_weight *w, int64_t row, int64_t *first)
{
    int s = 0;
    *first = 0;
    while (s + 1 < w->n_segments && row >= *first + w->segment[s].rows)
        *first += w->segment[s++].rows;
    return &w->segment[s];
}

/* dst[i] = bf16(W[row][col + i]), rounded once from the fp32 value. */
static void narrow_run(const ops_bf16_kernels *kernels, const bl_weight_segment *s, int64_t cols,
                       int64_t row, int64_t col, uint16_t *dst, int64_t n)
{
    float wide[OPS_BF16_DEPTH];
    int64_t at = row * cols + col;

    if (s->format == BL_FORMAT_BF16) {
        memcpy(dst, (const uint16_t *)s->codes + at, (size_t)n * sizeof *dst);
    } else if (s->format == BL_FORMAT_F32) {
        kernels->narrow((const float *)s->codes + at, dst, n);
    } else {
        bl_fp8_dequantize_tile(s->format, s->codes, s->scales, cols, row, row + 1, col, col + n,
                               wide, n);
        kernels->narrow(wide, dst, n);
    }
}

/* dst[i][j] = bf16(W[row + i][col + j]), of FP8 without scales. */
static void decode_rows(const bf16_task *t, int64_t row, int64_t n_rows, int64_t col,
                        int64_t n_cols, uint16_t *dst, int64_t ld)
{
    for (int64_t end = row + n_rows; row < end;) {
        int64_t first, cols = t->w->cols;
        const bl_weight_segment *s = find_segment(t->w, row, &first);
        int64_t begin = row - first, n = bl_min_i64(end - row, s->rows - begin);
        if (bl_format_describe(s->format)->dtype == BL_F8_E4M3)
            bl_fp8_decode_bf16_tile(s->codes, cols, begin, begin + n, col, col + n_cols, dst, ld);
        else
            for (int64_t i = 0; i < n; i++)
                narrow_run(t->kernels, s, cols, begin + i, col, dst + i * ld, n_cols);
        row += n;
        dst += n * ld;
    }
}

/* Panels of columns [n, n + n_cols) of W^T. */
static void pack_weight_nt(const bf16_task *t, int64_t k, int64_t depth, int64_t n, int64_t n_cols,
                           bf16_scratch *s)
{
    uint16_t *panel = s->b;
    for (int64_t col = 0; col < n_cols;) {
        int64_t width = ops_bf16_panel_width(n_cols - col),
                n_there = bl_min_i64(width, n_cols - col);
        decode_rows(t, n + col, n_there, k, depth, s->strip, OPS_BF16_A_STRIDE);
        t->kernels->pack_columns(s->strip, OPS_BF16_A_STRIDE, depth, n_there, width, panel);
        panel += stored_depth(t, depth) * width;
        col += width;
    }
}

/* Panels of columns [n, n + n_cols) of W. */
static void pack_weight_nn(const bf16_task *t, int64_t k, int64_t depth, int64_t n, int64_t n_cols,
                           bf16_scratch *s)
{
    for (int64_t row = 0; row < depth; row += STRIP_ROWS) {
        int64_t n_rows = bl_min_i64(STRIP_ROWS, depth - row);
        uint16_t *panel = s->b;
        decode_rows(t, k + row, n_rows, n, n_cols, s->strip, OPS_BF16_A_STRIDE);
        for (int64_t col = 0; col < n_cols;) {
            int64_t width = ops_bf16_panel_width(n_cols - col),
                    n_there = bl_min_i64(width, n_cols - col);
            t->kernels->pack_rows(s->strip + col, OPS_BF16_A_STRIDE, n_rows, n_there, width,
                                  panel + row * width);
            panel += stored_depth(t, depth) * width;
            col += width;
        }
    }
}

/* What the sums of the step at k are multiplied with, per column. */
static void set_factors(const bf16_task *t, int64_t k, int64_t n, int64_t n_cols, float *factor)
{
    for (int64_t j = 0; j < TILE_N; j++) factor[j] = j < n_cols ? t->alpha : 0;
    for (int64_t j = 0; t->w && t->K > 0 && j < n_cols; j++) {
        int64_t row = t->trans_b ? n + j : k, col = t->trans_b ? k : n + j, first;
        const bl_weight_segment *s = find_segment(t->w, row, &first);
        const float *scales = s->scales;
        if (s->format == BL_FORMAT_FP8_BLOCK)
            factor[j] =
                scales[(row - first) / BL_FP8_BLOCK * bl_ceil_div(t->w->cols, BL_FP8_BLOCK) +
                       col / BL_FP8_BLOCK];
        else if (s->format == BL_FORMAT_FP8_ROW && t->trans_b)
            factor[j] = scales[row - first];
    }
}

/* The scales of rows [k, k + depth) of W, which multiply the columns of dy. */
static void set_row_scales(const bf16_task *t, int64_t k, int64_t depth, float *scale)
{
    for (int64_t i = 0; t->scales_rows && i < depth; i++) {
        int64_t first;
        const bl_weight_segment *s = find_segment(t->w, k + i, &first);
        scale[i] = s->format == BL_FORMAT_FP8_ROW ? ((const float *)s->scales)[k + i - first] : 1;
    }
}

/* ---- steps ---- */

/* Where the step that begins at k ends: a step sees one row or column of blocks. */
static int64_t end_of_step(const bf16_task *t, int64_t k)
{
    int64_t end = bl_min_i64(k + t->depth, t->K), first;
    if (!t->has_blocks) return end;
    if (t->trans_b) return bl_min_i64(end, (k / BL_FP8_BLOCK + 1) * BL_FP8_BLOCK);
    const bl_weight_segment *s = find_segment(t->w, k, &first);
    if (s->format == BL_FORMAT_FP8_BLOCK)
        end = bl_min_i64(end, first + ((k - first) / BL_FP8_BLOCK + 1) * BL_FP8_BLOCK);
    return bl_min_i64(end, first + s->rows);
}

static void pack_plain(const bf16_task *t, int64_t k, int64_t depth, int64_t n, int64_t n_cols,
                       uint16_t *panel)
{
    for (int64_t col = 0; col < n_cols;) {
        int64_t width = ops_bf16_panel_width(n_cols - col),
                n_there = bl_min_i64(width, n_cols - col);
        if (t->trans_b)
            t->kernels->pack_columns(t->B + (n + col) * t->ldb + k, t->ldb, depth, n_there, width,
                                     panel);
        else
            t->kernels->pack_rows(t->B + k * t->ldb + n + col, t->ldb, depth, n_there, width,
                                  panel);
        panel += stored_depth(t, depth) * width;
        col += width;
    }
}

static void pack_step(const bf16_task *t, int64_t k, int64_t depth, int64_t n, int64_t n_cols,
                      bf16_scratch *s)
{
    if (!t->w)
        pack_plain(t, k, depth, n, n_cols, s->b);
    else if (t->trans_b)
        pack_weight_nt(t, k, depth, n, n_cols, s);
    else
        pack_weight_nn(t, k, depth, n, n_cols, s);
}

/* ---- prefetching ---- */

/* Runs of bytes to prefetch, cache line by cache line. */
typedef struct ahead {
    const bf16_task *t;
    bool is_b;
    int64_t first, n_runs; /* rows of A or of B as stored */
    int64_t begin, n;      /* elements of a row */
    int64_t run, offset_bytes;
} ahead;

static const char *find_run(const ahead *p, int64_t *n_bytes)
{
    const bf16_task *t = p->t;
    int64_t row = p->first + p->run, first;
    const char *base;

    if (!p->is_b) {
        base = (const char *)(t->A + row * t->lda);
    } else if (!t->w) {
        base = (const char *)(t->B + row * t->ldb);
    } else {
        const bl_weight_segment *s = find_segment(t->w, row, &first);
        base = (const char *)s->codes + (row - first) * bl_format_row_bytes(s->format, t->w->cols);
        int bits = bl_format_describe(s->format)->bits;
        *n_bytes = p->n * bits / 8;
        return base + p->begin * bits / 8;
    }
    *n_bytes = 2 * p->n;
    return base + 2 * p->begin;
}

/* The next n_lines lines, into the second-level cache. */
static void prefetch(ahead *p, int64_t n_lines)
{
    while (n_lines > 0 && p->run < p->n_runs) {
        int64_t n_bytes;
        const char *run = find_run(p, &n_bytes);
        for (; n_lines > 0 && p->offset_bytes < n_bytes;
             n_lines--, p->offset_bytes += CACHE_LINE_BYTES)
            __builtin_prefetch(run + p->offset_bytes, 0, 2);
        if (p->offset_bytes < n_bytes) return;
        p->offset_bytes = 0;
        p->run++;
    }
}

/* Lines of `n_elements` bf16 numbers, per one of n_calls. */
static int64_t lines_per_call(int64_t n_elements, int64_t n_calls)
{
    return bl_ceil_div(bl_ceil_div(n_elements * 2, CACHE_LINE_BYTES), bl_max_i64(n_calls, 1)) + 1;
}

/* ---- tiles ---- */

typedef struct tile {
    const bf16_task *t;
    bf16_scratch *s;
    int64_t m, n, n_rows, n_cols;
    ahead next_b;
    int64_t b_lines; /* to prefetch per block */
    ops_bf16_block block;
} tile;

/* n_rows rows of A from `row` of the tile on, times all panels. */
static void multiply_rows(tile *x, int64_t k, int64_t depth, int64_t row, int64_t n_rows)
{
    const bf16_task *t = x->t;
    ops_bf16_block *b = &x->block;
    int64_t m = x->m + row, left = x->n_rows - row;
    ahead next_a = {.t = t,
                    .first = m + n_rows,
                    .n_runs = t->trans_a ? 0 : bl_min_i64(left - n_rows, t->kernels->rows),
                    .begin = k,
                    .n = depth};
    int64_t a_lines =
        lines_per_call(depth * t->kernels->rows, bl_ceil_div(x->n_cols, OPS_BF16_PANEL));

    b->n_rows = n_rows;
    if (t->trans_a)
        t->kernels->copy_columns(t->A + k * t->lda + m, t->lda, b->n_rows, depth, x->s->a);
    else
        t->kernels->copy_rows(t->A + m * t->lda + k, t->lda, b->n_rows, depth,
                              t->scales_rows ? x->s->row_scale : NULL, x->s->a);
    b->panel = x->s->b;
    for (int64_t col = 0; col < x->n_cols; col += OPS_BF16_PANEL) {
        b->n_cols = bl_min_i64(OPS_BF16_PANEL, x->n_cols - col);
        b->factor = x->s->factor + col;
        b->sums = x->s->sums + row * TILE_N + col;
        b->C = (char *)t->C + (m * t->ldc + x->n + col) * (t->c_is_bf16 ? 2 : 4);
        t->kernels->multiply(b);
        b->panel += 2 * b->n_pairs * ops_bf16_panel_width(b->n_cols);
        prefetch(&next_a, a_lines);
        prefetch(&x->next_b, x->b_lines);
    }
}

/* The step of B that begins at k, to be prefetched while the one before is multiplied. */
static void look_ahead(tile *x, int64_t k)
{
    const bf16_task *t = x->t;
    int64_t depth = k < t->K ? end_of_step(t, k) - k : 0;

    x->next_b = t->trans_b ? (ahead){t, true, x->n, depth > 0 ? x->n_cols : 0, k, depth, 0, 0}
                           : (ahead){t, true, k, depth, x->n, x->n_cols, 0, 0};
    x->b_lines = lines_per_call(depth * x->n_cols, bl_ceil_div(x->n_rows, t->kernels->rows) *
                                                       bl_ceil_div(x->n_cols, OPS_BF16_PANEL));
}

static void bf16_tile(void *arg, int64_t index, void *scratch)
{
    const bf16_task *t = arg;
    bf16_scratch *s = scratch;
    int64_t n_across = bl_ceil_div(t->N, t->tile_n), m = index / n_across * t->tile_m,
            n = index % n_across * t->tile_n, k = 0;
    tile x = {.t = t,
              .s = s,
              .m = m,
              .n = n,
              .n_rows = bl_min_i64(t->tile_m, t->M - m),
              .n_cols = bl_min_i64(t->tile_n, t->N - n),
              .block = {.a = s->a,
                        .sums_ld = TILE_N,
                        .is_first = true,
                        .c_is_bf16 = t->c_is_bf16,
                        .beta = t->beta,
                        .ldc = t->ldc}};
    /* Blocks of about the same height: few rows keep the processor waiting for their own sums. */
    int64_t n_blocks = bl_ceil_div(x.n_rows, t->kernels->rows);
    ops_bf16_begin(t->kernels);
    do { /* once for K = 0, too: C = beta C */
        int64_t end = end_of_step(t, k), depth = end - k;
        pack_step(t, k, depth, n, x.n_cols, s);
        set_factors(t, k, n, x.n_cols, s->factor);
        set_row_scales(t, k, depth, s->row_scale);
        look_ahead(&x, end);
        x.block.n_pairs = stored_depth(t, depth) / 2;
        x.block.is_last = end == t->K;
        for (int64_t i = 0, row = 0; i < n_blocks; i++) {
            int64_t next = (i + 1) * x.n_rows / n_blocks;
            multiply_rows(&x, k, depth, row, next - row);
            row = next;
        }
        x.block.is_first = false;
        k = end;
    } while (k < t->K);
    ops_bf16_end(t->kernels);
}

/* The tiles change no bit of the output: they may be chosen by the number of threads. */
static void run_tiles(bl_pool *pool, bf16_task *t)
{
    t->kernels = ops_bf16_kernels_best();
    ops_tiles tiles = ops_choose_tiles(t->M, t->N,
                                       (ops_tile_limits){TILE_M, TILE_N, t->kernels->rows,
                                                         OPS_BF16_PANEL, t->kernels->multiply_adds},
                                       bl_pool_threads(pool));
    int64_t n_steps = bl_max_i64(bl_ceil_div(t->K, OPS_BF16_DEPTH), 1);
    t->depth = ops_tile_side(t->K, n_steps, STEP_UNIT);
    t->tile_m = tiles.m;
    t->tile_n = tiles.n;
    bl_pool_run(pool, tiles.count, bf16_tile, t);
}

/* ---- gemm.h ---- */

static bl_status check_output(bl_dtype dtype)
{
    if (dtype == BL_F32 || dtype == BL_BF16) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "GEMM: a bf16 product into %s", bl_dtype_name(dtype));
}

bl_status bl_cpu_gemm_bf16(bl_pool *pool, bool trans_a, bool trans_b, int64_t M, int64_t N,
                           int64_t K, float alpha, const uint16_t *A, int64_t lda,
                           const uint16_t *B, int64_t ldb, float beta, bl_dtype c_dtype, void *C,
                           int64_t ldc)
{
    BL_TRY(ops_gemm_check_matrix("A", trans_a ? K : M, trans_a ? M : K, lda));
    BL_TRY(ops_gemm_check_matrix("B", trans_b ? N : K, trans_b ? K : N, ldb));
    BL_TRY(ops_gemm_check_matrix("C", M, N, ldc));
    BL_TRY(check_output(c_dtype));
    bf16_task task = {.M = M,
                      .N = N,
                      .K = K,
                      .trans_a = trans_a,
                      .trans_b = trans_b,
                      .A = A,
                      .B = B,
                      .lda = lda,
                      .ldb = ldb,
                      .ldc = ldc,
                      .alpha = alpha,
                      .beta = beta,
                      .c_is_bf16 = c_dtype == BL_BF16,
                      .C = C};
    run_tiles(pool, &task);
    return BL_OK;
}

static bl_status multiply_weight(bl_pool *pool, bool forward, int64_t T, const uint16_t *in,
                                 int64_t ld_in, const bl_weight *w, float beta, bl_dtype dtype,
                                 void *out, int64_t ld_out)
{
    BL_TRY(ops_gemm_check_weight(w));
    BL_TRY(ops_gemm_check_matrix(forward ? "x" : "dy", T, forward ? w->cols : w->rows, ld_in));
    BL_TRY(ops_gemm_check_matrix(forward ? "y" : "dx", T, forward ? w->rows : w->cols, ld_out));
    BL_TRY(check_output(dtype));
    bf16_task task = {.M = T,
                      .N = forward ? w->rows : w->cols,
                      .K = forward ? w->cols : w->rows,
                      .trans_b = forward,
                      .w = w,
                      .A = in,
                      .lda = ld_in,
                      .ldc = ld_out,
                      .alpha = 1,
                      .beta = beta,
                      .c_is_bf16 = dtype == BL_BF16,
                      .C = out};
    for (int s = 0; s < w->n_segments; s++) {
        task.scales_rows |=
            !forward && w->segment[s].rows > 0 && w->segment[s].format == BL_FORMAT_FP8_ROW;
        task.has_blocks |= w->segment[s].rows > 0 && w->segment[s].format == BL_FORMAT_FP8_BLOCK;
    }
    run_tiles(pool, &task);
    return BL_OK;
}

bl_status bl_cpu_gemm_bf16_weight_nt(bl_pool *pool, int64_t T, const uint16_t *x, int64_t ldx,
                                     const bl_weight *w, float beta, bl_dtype y_dtype, void *y,
                                     int64_t ldy)
{
    return multiply_weight(pool, true, T, x, ldx, w, beta, y_dtype, y, ldy);
}

bl_status bl_cpu_gemm_bf16_weight_nn(bl_pool *pool, int64_t T, const uint16_t *dy, int64_t lddy,
                                     const bl_weight *w, float beta, bl_dtype dx_dtype, void *dx,
                                     int64_t lddx)
{
    return multiply_weight(pool, false, T, dy, lddy, w, beta, dx_dtype, dx, lddx);
}

bool bl_cpu_gemm_has_bf16(void)
{
    return ops_bf16_kernels_best() != &ops_bf16_kernels_emulated;
}

void bl_cpu_gemm_describe_bf16(char text[BL_CPU_GEMM_TEXT_BYTES])
{
    snprintf(text, BL_CPU_GEMM_TEXT_BYTES, "ballast %s", ops_bf16_kernels_best()->name);
}
