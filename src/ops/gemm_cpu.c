/* SPDX-License-Identifier: Apache-2.0 */
/* Every product is cut into tiles of the output, one pool item each. A tile of a product with a frozen matrix
 * walks along the inner dimension: decode a panel of W into the worker's scratch, let the BLAS add its
 * product, next panel. The panel stays in the cache, so decoding costs a few instructions for 16 weights that
 * are then used once per token. */
#include "ops/gemm.h"

#include <limits.h>
#include <stdatomic.h>

#include "ops/blas.h"
#include "ops/ops_cpu.h"

enum {
    TILE_MAX = 256, /* elements of a tile along either side of the output; for W's side, of a panel too */
    TILE_MIN = 64,
    TILE_TOKENS_MIN = 256, /* a panel decoded for fewer tokens costs more than 2 % of its product */
    N_ITEMS_WANTED = 16,   /* enough to keep some cores evenly busy, where shapes allow */
    PANEL_OUTER_MIN = 128, /* narrower, and reading single codes of many rows begins to show */
    PANEL_INNER = 1024,    /* elements of a panel along the inner dimension */
    PANEL_PAD = 16,        /* rows of a panel a power of two apart would share cache sets */
};
_Static_assert((TILE_MAX * (PANEL_INNER + PANEL_PAD)) * sizeof(float) <= BL_POOL_SCRATCH_BYTES,
               "a panel fits the scratch");
_Static_assert((PANEL_INNER * (TILE_MAX + PANEL_PAD)) * sizeof(float) <= BL_POOL_SCRATCH_BYTES,
               "a panel fits the scratch");
_Static_assert(PANEL_INNER % BL_FP8_BLOCK == 0 && PANEL_OUTER_MIN % BL_FP8_BLOCK == 0,
               "panels begin where vectors and blocks do");

const char *bl_cpu_gemm_library(void)
{
    return ops_blas_name();
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

static bl_status check_matrix(const char *name, int64_t n_rows, int64_t n_cols, int64_t ld)
{
    if (n_rows < 0 || n_cols < 0 || ld < n_cols)
        return BL_FAIL(BL_EINTERNAL, "GEMM: %s of %lld x %lld with rows %lld apart", name, (long long)n_rows,
                       (long long)n_cols, (long long)ld);
    if (n_rows > INT_MAX || ld > INT_MAX)
        return BL_FAIL(BL_ELIMIT,
                       "GEMM: %s of %lld x %lld with rows %lld apart is past the BLAS's 32-bit sizes", name,
                       (long long)n_rows, (long long)n_cols, (long long)ld);
    return BL_OK;
}

static bl_status check_library(const atomic_bool *out_of_memory)
{
    return atomic_load(out_of_memory) ? BL_FAIL(BL_ENOMEM, "GEMM: the buffers of %s", ops_blas_name())
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
    const float *A = t->A + (t->trans_a ? m : m * t->lda), *B = t->B + (t->trans_b ? n * t->ldb : n);
    if (!ops_blas_sgemm(t->trans_a, t->trans_b, height, width, t->K, t->alpha, A, t->lda, B, t->ldb, t->beta,
                        C, t->ldc))
        atomic_store(&t->out_of_memory, true);
}

bl_status bl_cpu_gemm_f32(bl_pool *pool, bool trans_a, bool trans_b, int64_t M, int64_t N, int64_t K,
                          float alpha, const float *A, int64_t lda, const float *B, int64_t ldb, float beta,
                          float *C, int64_t ldc)
{
    BL_TRY(check_matrix("A", trans_a ? K : M, trans_a ? M : K, lda));
    BL_TRY(check_matrix("B", trans_b ? N : K, trans_b ? K : N, ldb));
    BL_TRY(check_matrix("C", M, N, ldc));
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

/* panel[row - row_begin][col - col_begin] = W[row][col], whatever segments the rows lie in. */
static void decode_panel(const bl_weight *w, int64_t row_begin, int64_t row_end, int64_t col_begin,
                         int64_t col_end, float *panel, int64_t ld)
{
    int64_t first = 0; /* row of W at which the segment begins */
    for (int s = 0; s < w->n_segments; s++) {
        const bl_weight_segment *segment = &w->segment[s];
        int64_t begin = bl_max_i64(row_begin, first), end = bl_min_i64(row_end, first + segment->rows);
        if (begin < end)
            bl_fp8_dequantise_tile(segment->format, segment->codes, segment->scales, w->cols, begin - first,
                                   end - first, col_begin, col_end, panel + (begin - row_begin) * ld, ld);
        first += segment->rows;
    }
}

static void weight_tile(void *arg, int64_t index, void *scratch)
{
    weight_task *t = arg;
    int64_t n_across = bl_ceil_div(t->n_outer, t->tile_outer);
    int64_t token = index / n_across * t->tile_tokens, outer = index % n_across * t->tile_outer;
    int64_t n_tokens = bl_min_i64(t->tile_tokens, t->T - token),
            width = bl_min_i64(t->tile_outer, t->n_outer - outer);
    int64_t ld = (t->forward ? PANEL_INNER : t->tile_outer) + PANEL_PAD;
    float *panel = scratch, *out = t->out + token * t->ld_out + outer;
    if (t->n_inner == 0) scale_tile(out, t->ld_out, n_tokens, width, t->beta);
    for (int64_t inner = 0; inner < t->n_inner; inner += PANEL_INNER) {
        int64_t depth = bl_min_i64(PANEL_INNER, t->n_inner - inner);
        if (t->forward)
            decode_panel(t->w, outer, outer + width, inner, inner + depth, panel, ld);
        else
            decode_panel(t->w, inner, inner + depth, outer, outer + width, panel, ld);
        if (!ops_blas_sgemm(false, t->forward, n_tokens, width, depth, 1, t->in + token * t->ld_in + inner,
                            t->ld_in, panel, ld, inner == 0 ? t->beta : 1, out, t->ld_out))
            atomic_store(&t->out_of_memory, true);
    }
}

static bl_status run_weight_tiles(bl_pool *pool, weight_task *t)
{
    t->tile_tokens = bl_max_i64(t->T, 1);
    t->tile_outer = TILE_MAX;
    while (count_tiles(t->T, t->tile_tokens, t->n_outer, t->tile_outer) < N_ITEMS_WANTED) {
        if (t->tile_outer > PANEL_OUTER_MIN)
            t->tile_outer /= 2;
        else if (t->tile_tokens > TILE_TOKENS_MIN)
            t->tile_tokens = bl_max_i64(bl_ceil_div(t->tile_tokens, 2), TILE_TOKENS_MIN);
        else
            break;
    }
    bl_pool_run(pool, count_tiles(t->T, t->tile_tokens, t->n_outer, t->tile_outer), weight_tile, t);
    return check_library(&t->out_of_memory);
}

static bl_status check_weight(const bl_weight *w)
{
    int64_t rows = 0;
    if (w->n_segments < 0 || w->n_segments > BL_WEIGHT_SEGMENTS_MAX)
        return BL_FAIL(BL_EINTERNAL, "GEMM: a matrix of %d segments", w->n_segments);
    for (int s = 0; s < w->n_segments; s++) rows += w->segment[s].rows;
    if (rows != w->rows)
        return BL_FAIL(BL_EINTERNAL, "GEMM: segments of %lld rows for a matrix of %lld", (long long)rows,
                       (long long)w->rows);
    return check_matrix("W", w->rows, w->cols, w->cols);
}

bl_status bl_cpu_gemm_weight_nt(bl_pool *pool, int64_t T, const float *x, int64_t ldx, const bl_weight *w,
                                float beta, float *y, int64_t ldy)
{
    BL_TRY(check_weight(w));
    BL_TRY(check_matrix("x", T, w->cols, ldx));
    BL_TRY(check_matrix("y", T, w->rows, ldy));
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

bl_status bl_cpu_gemm_weight_nn(bl_pool *pool, int64_t T, const float *dy, int64_t lddy, const bl_weight *w,
                                float beta, float *dx, int64_t lddx)
{
    BL_TRY(check_weight(w));
    BL_TRY(check_matrix("dy", T, w->rows, lddy));
    BL_TRY(check_matrix("dx", T, w->cols, lddx));
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
