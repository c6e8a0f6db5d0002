/* SPDX-License-Identifier: Apache-2.0 */
/* gemm.c -- products on the CPU in fp32, of plain matrices and with a frozen one.
 *
 * Every product is cut into tiles of the output, one pool item each. A tile of a product with a
 * frozen matrix walks along the inner dimension: decode a panel of W into the worker's scratch, let
 * the BLAS add its product, next panel. The panel stays in the cache, so decoding costs a few
 * instructions for 16 weights that are then used once per token. With many tokens, forward turns
 * the panel over as it decodes: the BLAS is about 8 % faster on a product without transposes. */
#include "ops/gemm.h"

#include <limits.h>
#include <stdatomic.h>

#include "ops/cpu/blas.h"
#include "ops/cpu/ops_cpu.h"

enum {
    TILE_MAX = 256, /* elements of a tile along either side of the output */
    TILE_MIN = 64,
    TILE_TOKENS_MIN = 256, /* a panel decoded for fewer tokens costs more than 2 % of its product */
    N_ITEMS_WANTED = 16,   /* enough to keep some cores evenly busy, where shapes allow */
    /* along W's side: wider is slower, narrower, and reading short runs of many rows shows */
    PANEL_OUTER = 128,
    PANEL_INNER = 1024, /* elements of a panel along the inner dimension */
    PANEL_PAD = 16,     /* rows of a panel a power of two apart would share cache sets */
    TURN_TOKENS_MIN =
        256, /* fewer do not win back what transposing a panel costs: 2 % of 512 tokens' product */
    STRIP_ROWS = 32,  /* of W dequantized at a time, then transposed: */
    STRIP_COLS = 128, /* small enough for the first-level cache */
};
/* A worker's scratch: a panel of the product's right side, and a strip of W on its way there. */
typedef struct weight_scratch {
    float panel[PANEL_INNER * (PANEL_OUTER + PANEL_PAD)];
    float strip[STRIP_ROWS * (STRIP_COLS + PANEL_PAD)];
} weight_scratch;
_Static_assert(PANEL_OUTER *(PANEL_INNER + PANEL_PAD) <= PANEL_INNER * (PANEL_OUTER + PANEL_PAD),
               "a panel fits either way round");
_Static_assert(sizeof(weight_scratch) <= BL_POOL_SCRATCH_BYTES, "panel and strip fit the scratch");
_Static_assert(PANEL_INNER % STRIP_COLS == 0 && STRIP_COLS % BL_FP8_BLOCK == 0 &&
                   PANEL_OUTER % BL_FP8_BLOCK == 0,
               "panels and strips begin where blocks do");

const char *bl_cpu_gemm_library(void)
{
    return ops_blas_name();
}

bl_status bl_cpu_gemm_prepare(void)
{
    return ops_blas_prepare();
}

void bl_cpu_gemm_describe(char text[BL_CPU_GEMM_TEXT_BYTES])
{
    ops_blas_describe(text, BL_CPU_GEMM_TEXT_BYTES);
}

static int64_t count_tiles(int64_t M, int64_t tile_m, int64_t N, int64_t tile_n)
{
    return bl_ceil_div(M, tile_m) * bl_ceil_div(N, tile_n);
}

/* row = beta row, n_rows times; beta 0 clears even a NaN. */
static void scale_tile(float *C, int64_t ldc, int64_t n_rows, int64_t n_cols, float beta)
{
    for (int64_t row = 0; row < n_rows; row++, C += ldc)
        for (int64_t col = 0; col < n_cols; col++) C[col] = beta == 0 ? 0 : beta * C[col];
}

bl_status ops_gemm_check_matrix(const char *name, int64_t n_rows, int64_t n_cols, int64_t ld)
{
    if (n_rows < 0 || n_cols < 0 || ld < n_cols)
        return BL_FAIL(BL_EINTERNAL, "GEMM: %s of %lld x %lld with rows %lld apart", name,
                       (long long)n_rows, (long long)n_cols, (long long)ld);
    if (n_rows > INT_MAX || ld > INT_MAX)
        return BL_FAIL(
            BL_ELIMIT,
            "GEMM: %s of %lld x %lld with rows %lld apart is past the BLAS's 32-bit sizes", name,
            (long long)n_rows, (long long)n_cols, (long long)ld);
    return BL_OK;
}

static bl_status check_library(const atomic_bool *out_of_memory)
{
    return atomic_load(out_of_memory) ? BL_FAIL(BL_ENOMEM, "the buffers of %s", ops_blas_name())
                                      : BL_OK;
}

/* ---- fp32 ---- */

typedef struct gemm_task {
    bool trans_a, trans_b;
    int64_t M, N, K, lda, ldb, ldc;
    float alpha, beta;
    const float *A, *B;
    float *C;
    int64_t tile_m, tile_n;
    atomic_bool out_of_memory;
} gemm_task;

static void gemm_tile(void *arg, int64_t index, void *scratch)
{
    gemm_task *t = arg;
    int64_t n_across = bl_ceil_div(t->N, t->tile_n);
    int64_t m = index / n_across * t->tile_m, n = index % n_across * t->tile_n;
    int64_t height = bl_min_i64(t->tile_m, t->M - m), width = bl_min_i64(t->tile_n, t->N - n);
    float *C = t->C + m * t->ldc + n;
    (void)scratch;
    if (t->K == 0) {
        scale_tile(C, t->ldc, height, width, t->beta);
        return;
    }
    const float *A = t->A + (t->trans_a ? m : m * t->lda),
                *B = t->B + (t->trans_b ? n * t->ldb : n);
    if (!ops_blas_sgemm(t->trans_a, t->trans_b, height, width, t->K, t->alpha, A, t->lda, B, t->ldb,
                        t->beta, C, t->ldc))
        atomic_store(&t->out_of_memory, true);
}

bl_status bl_cpu_gemm_f32(bl_pool *pool, bool trans_a, bool trans_b, int64_t M, int64_t N,
                          int64_t K, float alpha, const float *A, int64_t lda, const float *B,
                          int64_t ldb, float beta, float *C, int64_t ldc)
{
    BL_TRY(ops_gemm_check_matrix("A", trans_a ? K : M, trans_a ? M : K, lda));
    BL_TRY(ops_gemm_check_matrix("B", trans_b ? N : K, trans_b ? K : N, ldb));
    BL_TRY(ops_gemm_check_matrix("C", M, N, ldc));
    gemm_task task = {trans_a, trans_b, M, N, K, lda,      ldb,      ldc,
                      alpha,   beta,    A, B, C, TILE_MAX, TILE_MAX, false};
    while (count_tiles(M, task.tile_m, N, task.tile_n) < N_ITEMS_WANTED) {
        int64_t *longer =
            bl_min_i64(task.tile_m, M) > bl_min_i64(task.tile_n, N) ? &task.tile_m : &task.tile_n;
        if (*longer <= TILE_MIN) break;
        *longer /= 2;
    }
    bl_pool_run(pool, count_tiles(M, task.tile_m, N, task.tile_n), gemm_tile, &task);
    return check_library(&task.out_of_memory);
}

/* ---- with a frozen matrix ---- */

typedef struct weight_task {
    const bl_weight *w;
    bool forward; /* in = x, out = y (T,N); otherwise in = dy, out = dx (T,K) */
    int64_t T, n_outer, n_inner, ld_in, ld_out;
    float beta;
    const float *in;
    float *out;
    int64_t tile_tokens, tile_outer;
    atomic_bool out_of_memory;
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

/* Vectors a and b are rows i and i + n of a square: swaps b's elements whose index has bit n clear
 * with a's that have it set (Warren, Hacker's Delight, 2nd ed., section 7-3). */
#define SWAP(a, b, l0, l1, l2, l3, l4, l5, l6, l7, n)                                              \
    do {                                                                                           \
        vf8 low_ = __builtin_shufflevector(a, b, l0, l1, l2, l3, l4, l5, l6, l7);                  \
        b = __builtin_shufflevector(a, b, l0 + n, l1 + n, l2 + n, l3 + n, l4 + n, l5 + n, l6 + n,  \
                                    l7 + n);                                                       \
        a = low_;                                                                                  \
    } while (0)
#define SWAP_4(a, b) SWAP(a, b, 0, 1, 2, 3, 8, 9, 10, 11, 4)
#define SWAP_2(a, b) SWAP(a, b, 0, 1, 8, 9, 4, 5, 12, 13, 2)
#define SWAP_1(a, b) SWAP(a, b, 0, 8, 2, 10, 4, 12, 6, 14, 1)

/* dst[c][r] = src[r][c]; rows and columns are multiples of 8. */
BL_CLONES static void transpose_squares(const float *src, int64_t src_ld, int64_t n_rows,
                                        int64_t n_cols, float *dst, int64_t dst_ld)
{
    for (int64_t row = 0; row < n_rows; row += 8)
        for (int64_t col = 0; col < n_cols; col += 8) {
            vf8 x[8];
            for (int i = 0; i < 8; i++) x[i] = *(const vf8 *)(src + (row + i) * src_ld + col);
            for (int i = 0; i < 4; i++) SWAP_4(x[i], x[i + 4]);
            for (int i = 0; i < 8; i += i % 4 == 1 ? 3 : 1) SWAP_2(x[i], x[i + 2]);
            for (int i = 0; i < 8; i += 2) SWAP_1(x[i], x[i + 1]);
            for (int i = 0; i < 8; i++) *(vf8 *)(dst + (col + i) * dst_ld + row) = x[i];
        }
}

static void transpose(const float *src, int64_t src_ld, int64_t n_rows, int64_t n_cols, float *dst,
                      int64_t dst_ld)
{
    int64_t rows = n_rows / 8 * 8, cols = n_cols / 8 * 8;
    transpose_squares(src, src_ld, rows, cols, dst, dst_ld);
    for (int64_t row = 0; row < n_rows; row++)
        for (int64_t col = row < rows ? cols : 0; col < n_cols; col++)
            dst[col * dst_ld + row] = src[row * src_ld + col];
}

/* panel[col - col_begin][row - row_begin] = W[row][col] */
static void decode_transposed(const bl_weight *w, int64_t row_begin, int64_t row_end,
                              int64_t col_begin, int64_t col_end, float *panel, int64_t ld,
                              float *strip)
{
    int64_t strip_ld = STRIP_COLS + PANEL_PAD;
    for (int64_t col = col_begin; col < col_end; col += STRIP_COLS)
        for (int64_t row = row_begin; row < row_end; row += STRIP_ROWS) {
            int64_t n_rows = bl_min_i64(STRIP_ROWS, row_end - row),
                    n_cols = bl_min_i64(STRIP_COLS, col_end - col);
            decode(w, row, row + n_rows, col, col + n_cols, strip, strip_ld);
            transpose(strip, strip_ld, n_rows, n_cols,
                      panel + (col - col_begin) * ld + row - row_begin, ld);
        }
}

static void weight_tile(void *arg, int64_t index, void *scratch)
{
    weight_task *t = arg;
    int64_t n_across = bl_ceil_div(t->n_outer, t->tile_outer);
    int64_t token = index / n_across * t->tile_tokens, outer = index % n_across * t->tile_outer;
    int64_t n_tokens = bl_min_i64(t->tile_tokens, t->T - token),
            width = bl_min_i64(t->tile_outer, t->n_outer - outer);
    bool turned = t->forward && n_tokens >= TURN_TOKENS_MIN, as_stored = t->forward && !turned;
    int64_t ld = (as_stored ? PANEL_INNER : PANEL_OUTER) + PANEL_PAD;
    weight_scratch *s = scratch;
    float *out = t->out + token * t->ld_out + outer;
    if (t->n_inner == 0) scale_tile(out, t->ld_out, n_tokens, width, t->beta);
    for (int64_t inner = 0; inner < t->n_inner; inner += PANEL_INNER) {
        int64_t depth = bl_min_i64(PANEL_INNER, t->n_inner - inner);
        if (turned)
            decode_transposed(t->w, outer, outer + width, inner, inner + depth, s->panel, ld,
                              s->strip);
        else if (as_stored)
            decode(t->w, outer, outer + width, inner, inner + depth, s->panel, ld);
        else
            decode(t->w, inner, inner + depth, outer, outer + width, s->panel, ld);
        if (!ops_blas_sgemm(false, as_stored, n_tokens, width, depth, 1,
                            t->in + token * t->ld_in + inner, t->ld_in, s->panel, ld,
                            inner == 0 ? t->beta : 1, out, t->ld_out))
            atomic_store(&t->out_of_memory, true);
    }
}

static bl_status run_weight_tiles(bl_pool *pool, weight_task *t)
{
    t->tile_tokens = bl_max_i64(t->T, 1);
    t->tile_outer = PANEL_OUTER;
    while (count_tiles(t->T, t->tile_tokens, t->n_outer, t->tile_outer) < N_ITEMS_WANTED &&
           t->tile_tokens > TILE_TOKENS_MIN)
        t->tile_tokens = bl_max_i64(bl_ceil_div(t->tile_tokens, 2), TILE_TOKENS_MIN);
    bl_pool_run(pool, count_tiles(t->T, t->tile_tokens, t->n_outer, t->tile_outer), weight_tile, t);
    return check_library(&t->out_of_memory);
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

/* The BLAS has other kernels for fewer rows, and sums in another order for more: within these
 * bounds a row's bits do not depend on their number. */
enum { GROUP_ROWS_MIN = 16, GROUP_ROWS_MAX = 128 };

typedef struct grouped_scratch {
    float panel[PANEL_INNER * (PANEL_OUTER + PANEL_PAD)];
    float in[GROUP_ROWS_MIN * PANEL_INNER], out[GROUP_ROWS_MIN * PANEL_OUTER]; /* of fewer rows */
} grouped_scratch;
_Static_assert(sizeof(grouped_scratch) <= BL_POOL_SCRATCH_BYTES, "panel and rows fit the scratch");

typedef struct grouped_task {
    const bl_weight *w;
    bool forward, is_added;
    int64_t n_groups, n_outer, n_inner, ld_in, ld_out;
    const int32_t *first;
    const float *in;
    float *out;
    atomic_bool out_of_memory;
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
            b.row = t->first[b.group] + index * GROUP_ROWS_MAX;
            b.n_rows = bl_min_i64(GROUP_ROWS_MAX, n_rows - index * GROUP_ROWS_MAX);
            return b;
        }
        index -= n_blocks;
    }
}

/* out (n_rows, width) (+)= in (n_rows, depth) times the panel. Few rows go through copies. */
static void multiply_block(grouped_task *t, const grouped_block *b, int64_t inner, int64_t depth,
                           int64_t outer, int64_t width, grouped_scratch *s)
{
    const float *in = t->in + b->row * t->ld_in + inner;
    float *out = t->out + b->row * t->ld_out + outer;
    int64_t ld_in = t->ld_in, ld_out = t->ld_out, n_rows = b->n_rows,
            ld = (t->forward ? PANEL_INNER : PANEL_OUTER) + PANEL_PAD;
    bool is_copied = n_rows<GROUP_ROWS_MIN, adds = inner> 0 || t->is_added;

    for (int64_t row = 0; is_copied && row < GROUP_ROWS_MIN; row++) {
        if (row < n_rows)
            memcpy(s->in + row * PANEL_INNER, in + row * ld_in, (size_t)depth * sizeof *in);
        else
            memset(s->in + row * PANEL_INNER, 0, (size_t)depth * sizeof *in);
        if (inner > 0 || !t->is_added) continue;
        if (row < n_rows)
            memcpy(s->out + row * PANEL_OUTER, out + row * ld_out, (size_t)width * sizeof *out);
        else
            memset(s->out + row * PANEL_OUTER, 0, (size_t)width * sizeof *out);
    }
    if (is_copied) in = s->in, ld_in = PANEL_INNER, ld_out = PANEL_OUTER;
    if (!ops_blas_sgemm(false, t->forward, is_copied ? GROUP_ROWS_MIN : n_rows, width, depth, 1, in,
                        ld_in, s->panel, ld, adds, is_copied ? s->out : out, ld_out))
        atomic_store(&t->out_of_memory, true);
    if (!is_copied || inner + depth < t->n_inner) return;
    for (int64_t row = 0; row < n_rows; row++)
        memcpy(out + row * t->ld_out, s->out + row * PANEL_OUTER, (size_t)width * sizeof *out);
}

static void grouped_tile(void *arg, int64_t index, void *scratch)
{
    grouped_task *t = arg;
    grouped_scratch *s = scratch;
    int64_t n_across = bl_ceil_div(t->n_outer, PANEL_OUTER), outer = index % n_across * PANEL_OUTER,
            width = bl_min_i64(PANEL_OUTER, t->n_outer - outer);
    grouped_block b = block_at(t, index / n_across);
    int64_t first = b.group * (t->forward ? t->n_outer : t->n_inner); /* row of W */

    for (int64_t inner = 0; inner < t->n_inner; inner += PANEL_INNER) {
        int64_t depth = bl_min_i64(PANEL_INNER, t->n_inner - inner);
        if (t->forward)
            decode(t->w, first + outer, first + outer + width, inner, inner + depth, s->panel,
                   PANEL_INNER + PANEL_PAD);
        else
            decode(t->w, first + inner, first + inner + depth, outer, outer + width, s->panel,
                   PANEL_OUTER + PANEL_PAD);
        multiply_block(t, &b, inner, depth, outer, width, s);
    }
}

bl_status bl_cpu_gemm_grouped(bl_pool *pool, bool forward, bool is_added, int64_t n_groups,
                              const int32_t *first, const float *in, const bl_weight *w, float *out)
{
    int64_t rows = w->rows / n_groups, n_blocks = 0;
    grouped_task task = {.w = w,
                         .forward = forward,
                         .is_added = is_added,
                         .n_groups = n_groups,
                         .n_outer = forward ? rows : w->cols,
                         .n_inner = forward ? w->cols : rows,
                         .ld_in = forward ? w->cols : rows,
                         .ld_out = forward ? rows : w->cols,
                         .first = first,
                         .in = in,
                         .out = out};

    BL_TRY(ops_gemm_check_weight(w));
    for (int64_t g = 0; g < n_groups; g++)
        n_blocks += bl_ceil_div(first[g + 1] - first[g], GROUP_ROWS_MAX);
    bl_pool_run(pool, n_blocks * bl_ceil_div(task.n_outer, PANEL_OUTER), grouped_tile, &task);
    return check_library(&task.out_of_memory);
}
