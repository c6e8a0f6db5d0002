/* SPDX-License-Identifier: Apache-2.0 */
/* f32_product.c -- fp32 products on one thread. A step of B is packed in the second-level cache;
 * then some rows of A after the other are copied to the first-level cache and multiplied. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "ops/cpu/f32_kernels.h"
#include "ops/cpu/ops_cpu.h"

/* Fewer rows do not win back what packing B in rows costs: it is multiplied in place. */
enum { PACKED_ROWS_MIN = 64, LINE_FLOATS = 16 };

/* ---- the choice ---- */

static const ops_f32_kernels *const all[] = {/* the fastest first */
#if defined(__x86_64__)
                                             &ops_f32_kernels_avx512, &ops_f32_kernels_avx2,
#endif
                                             &ops_f32_kernels_portable};

static pthread_once_t once = PTHREAD_ONCE_INIT;
static const ops_f32_kernels *best;

static void choose(void)
{
    const char *wish = getenv("BALLAST_CPU_F32");
    const ops_f32_kernels *wanted = NULL;

    for (size_t i = BL_COUNT(all); i-- > 0;) {
        if (!all[i]->is_there()) continue;
        best = all[i];
        if (wish && strcmp(wish, best->name) == 0) wanted = best;
    }
    if (wanted) best = wanted;
    if (wish && wish[0] && !wanted)
        bl_log_warning("BALLAST_CPU_F32=%s: there are no such products on this processor; fp32 "
                       "products are by %s",
                       wish, best->name);
}

const ops_f32_kernels *ops_f32_kernels_best(void)
{
    pthread_once(&once, choose);
    return best;
}

/* ---- operands ---- */

void ops_f32_pack_rows(const float *src, int64_t ld, int64_t depth, int64_t n_cols, float *panels)
{
    for (int64_t k = 0; k < depth; k++, src += ld) {
        float *row = panels + k * OPS_F32_PANEL;
        for (int64_t col = 0; col < n_cols; col += OPS_F32_PANEL, row += depth * OPS_F32_PANEL) {
            int64_t n = bl_min_i64(OPS_F32_PANEL, n_cols - col);
            if (n == OPS_F32_PANEL)
                memcpy(row, src + col, OPS_F32_PANEL * sizeof *row);
            else
                for (int64_t j = 0; j < OPS_F32_PANEL; j++) row[j] = j < n ? src[col + j] : 0;
        }
    }
}

void ops_f32_pack_columns(const float *src, int64_t ld, int64_t depth, int64_t n_cols,
                          float *panels)
{
    const ops_f32_kernels *kernels = ops_f32_kernels_best();
    for (int64_t col = 0; col < n_cols; col += OPS_F32_PANEL)
        kernels->pack_columns(src + col * ld, ld, depth, bl_min_i64(OPS_F32_PANEL, n_cols - col),
                              panels + col * depth);
}

/* Rows [row, row + n_rows) of op(A), as blocks have them; `row` is one of n_left. */
static void copy_left(const ops_f32_left *left, int64_t row, int64_t n_rows, int64_t n_left,
                      int64_t depth, float *a)
{
    if (!left->is_transposed) {
        for (int64_t i = 0; i < n_rows; i++)
            memcpy(a + i * OPS_F32_A_STRIDE, left->A + (row + i) * left->lda,
                   (size_t)depth * sizeof *a);
        return;
    }
    const float *from = left->A + row;
    if (n_left >= OPS_F32_COLUMN_STRIDE)
        for (int64_t k = 0; k < depth; k++)
            *(vf16 *)(a + k * OPS_F32_COLUMN_STRIDE) = *(const vf16 *)(from + k * left->lda);
    else
        for (int64_t k = 0; k < depth; k++)
            memcpy(a + k * OPS_F32_COLUMN_STRIDE, from + k * left->lda, (size_t)n_rows * sizeof *a);
}

/* One of n_parts of the rows [row, row + n_rows), into the second-level cache. */
static void prefetch_left(const ops_f32_left *left, int64_t row, int64_t n_rows, int64_t depth,
                          int64_t part, int64_t n_parts)
{
    int64_t n_runs = left->is_transposed ? depth : n_rows,
            length = left->is_transposed ? n_rows : depth;
    const float *from = left->A + (left->is_transposed ? row : row * left->lda);

    for (int64_t run = part * n_runs / n_parts; run < (part + 1) * n_runs / n_parts; run++) {
        for (int64_t i = 0; i < length; i += LINE_FLOATS)
            __builtin_prefetch(from + run * left->lda + i, 0, 2);
        __builtin_prefetch(from + run * left->lda + length - 1, 0, 2);
    }
}

/* ---- products ---- */

void ops_f32_multiply(const ops_f32_step *s, ops_f32_rows *rows)
{
    const ops_f32_kernels *kernels = ops_f32_kernels_best();
    /* Blocks of about the same height: few rows keep the processor waiting for their own sums. */
    int64_t n_blocks = bl_ceil_div(s->M, kernels->rows);
    bool in_place = s->left.is_transposed && s->N <= OPS_F32_PANEL; /* each element is used once */
    ops_f32_block b = {.depth = s->depth,
                       .a = rows->a,
                       .a_is_columns = s->left.is_transposed,
                       .a_step = in_place ? s->left.lda : OPS_F32_COLUMN_STRIDE,
                       .ldb = s->ldb,
                       .alpha = s->alpha,
                       .accumulate = s->accumulate,
                       .ldc = s->ldc};

    for (int64_t i = 0, row = 0; i < n_blocks; i++, row += b.n_rows) {
        int64_t n_panels = bl_ceil_div(s->N, OPS_F32_PANEL), next = (i + 1) * s->M / n_blocks,
                n_next = (i + 2) * s->M / n_blocks - next;
        b.n_rows = next - row;
        if (in_place)
            b.a = s->left.A + row;
        else
            copy_left(&s->left, row, b.n_rows, s->M - row, s->depth, rows->a);
        b.b = s->panels;
        for (int64_t panel = 0; panel < n_panels; panel++, b.b += s->panel_step) {
            int64_t col = panel * OPS_F32_PANEL;
            if (i + 1 < n_blocks) prefetch_left(&s->left, next, n_next, s->depth, panel, n_panels);
            b.n_cols = bl_min_i64(OPS_F32_PANEL, s->N - col);
            b.C = s->C + row * s->ldc + col;
            kernels->multiply(&b);
        }
    }
}

void ops_f32_scale(float *C, int64_t ldc, int64_t n_rows, int64_t n_cols, float beta)
{
    for (int64_t row = 0; row < n_rows; row++, C += ldc)
        for (int64_t col = 0; col < n_cols; col++) C[col] = beta == 0 ? 0 : beta * C[col];
}

void ops_f32_gemm(bool trans_a, bool trans_b, int64_t M, int64_t N, int64_t K, float alpha,
                  const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                  int64_t ldc, ops_f32_scratch *scratch)
{
    if (K == 0 || (beta != 0 && beta != 1)) ops_f32_scale(C, ldc, M, N, beta);
    for (int64_t n = 0; n < N; n += OPS_F32_WIDTH)
        for (int64_t k = 0; k < K; k += OPS_F32_DEPTH) {
            int64_t width = bl_min_i64(OPS_F32_WIDTH, N - n),
                    depth = bl_min_i64(OPS_F32_DEPTH, K - k);
            const float *from = B + (trans_b ? n * ldb + k : k * ldb + n);
            ops_f32_step step = {.left = {A + (trans_a ? k * lda : k), lda, trans_a},
                                 .M = M,
                                 .N = width,
                                 .depth = depth,
                                 .panels = scratch->b,
                                 .panel_step = depth * OPS_F32_PANEL,
                                 .ldb = OPS_F32_PANEL,
                                 .alpha = alpha,
                                 .accumulate = k > 0 || beta != 0,
                                 .C = C + n,
                                 .ldc = ldc};
            if (trans_b) {
                ops_f32_pack_columns(from, ldb, depth, width, scratch->b);
            } else if (M < PACKED_ROWS_MIN && width % OPS_F32_PANEL == 0) {
                step.panels = from;
                step.panel_step = OPS_F32_PANEL;
                step.ldb = ldb;
            } else {
                ops_f32_pack_rows(from, ldb, depth, width, scratch->b);
            }
            ops_f32_multiply(&step, &scratch->rows);
        }
}
