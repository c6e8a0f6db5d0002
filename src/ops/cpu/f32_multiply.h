/* SPDX-License-Identifier: Apache-2.0 */
/* f32_multiply.h -- the inner loop of fp32 products, for a file that has defined
 *
 *   TARGET           the attribute of functions with the processor's instructions
 *   LANES, vector    floats of a register, its type (aligned as floats are)
 *   ROWS, EACH_ROWS  of A in a block, X(1) to X(ROWS)
 *   fma_vector(a, b, c), spread(x)
 *
 * ROWS x 2 vectors of sums stay in registers, with two vectors of B and one element of A. */
#include <string.h>

#include "ops/cpu/f32_kernels.h"

#define INLINE static inline __attribute__((always_inline)) TARGET
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

/* alpha sum, or C + alpha sum, of one vector of a row. */
INLINE void finish(const ops_f32_block *s, float *c, const vector sum)
{
    vector alpha = spread(s->alpha), total = alpha * sum;
    if (s->accumulate) total = fma_vector(alpha, sum, *(const vector *)c);
    *(vector *)c = total;
}

/* The same of its first n_there columns. */
INLINE void finish_part(const ops_f32_block *s, float *c, int64_t n_there, const vector sum)
{
    float copy[LANES] = {0};

    if (n_there > LANES) n_there = LANES;
    for (int64_t i = 0; s->accumulate && i < n_there; i++) copy[i] = c[i];
    finish(s, copy, sum);
    for (int64_t i = 0; i < n_there; i++) c[i] = copy[i];
}

/* n_rows x (n_vectors vectors) of the output from `column` on; the counts and both steps are
 * constants where this is inlined. */
INLINE void multiply_rows(const ops_f32_block *s, int64_t column, int n_rows, int n_vectors,
                          int64_t a_row, int64_t a_step)
{
    const float *a = s->a, *b = s->b + column;
    float *c = s->C + column;
    int64_t ldb = s->ldb;
    vector sum[ROWS][2];
    UNROLL for (int i = 0; i < n_rows; i++)
    {
        sum[i][0] = sum[i][1] = (vector){0};
        __builtin_prefetch(c + i * s->ldc, 1);
        if (n_vectors * LANES > 16) __builtin_prefetch(c + i * s->ldc + 16, 1);
    }
    for (int64_t k = 0; k < s->depth; k++, a += a_step, b += ldb) {
        vector b0 = *(const vector *)b, b1 = b0;
        if (n_vectors == 2) b1 = *(const vector *)(b + LANES);
        UNROLL for (int i = 0; i < n_rows; i++)
        {
            vector x = spread(a[i * a_row]);
            sum[i][0] = fma_vector(x, b0, sum[i][0]);
            if (n_vectors == 2) sum[i][1] = fma_vector(x, b1, sum[i][1]);
        }
    }
    int64_t n_there = s->n_cols - column;
    if (n_there >= n_vectors * LANES) {
        UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int v = 0; v < n_vectors; v++)
            finish(s, c + i * s->ldc + v * LANES, sum[i][v]);
        return;
    }
    UNROLL for (int i = 0; i < n_rows; i++) UNROLL for (int v = 0; v < n_vectors; v++)
        finish_part(s, c + i * s->ldc + v * LANES, n_there - v * LANES, sum[i][v]);
}

INLINE void multiply_columns(const ops_f32_block *s, int n_rows, int64_t a_row, int64_t a_step)
{
    for (int64_t column = 0; column < s->n_cols; column += 2 * LANES) {
        if (s->n_cols - column > LANES)
            multiply_rows(s, column, n_rows, 2, a_row, a_step);
        else
            multiply_rows(s, column, n_rows, 1, a_row, a_step);
    }
}

/* A function for each number of rows. */
#define ROWS_FUNCTION(n)                                                                           \
    TARGET static void multiply_##n(const ops_f32_block *s)                                        \
    {                                                                                              \
        if (s->a_is_columns)                                                                       \
            multiply_columns(s, n, 1, s->a_step);                                                  \
        else                                                                                       \
            multiply_columns(s, n, OPS_F32_A_STRIDE, 1);                                           \
    }
#define ROWS_ENTRY(n) [n] = multiply_##n,
EACH_ROWS(ROWS_FUNCTION)

static void multiply(const ops_f32_block *s)
{
    static void (*const functions[ROWS + 1])(const ops_f32_block *) = {EACH_ROWS(ROWS_ENTRY)};
    functions[s->n_rows](s);
}
