/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_avx512.c -- bf16 products with vdpbf16ps: Zen 4, Sapphire Rapids and later.
 *
 * The kernel keeps ROWS x 32 sums in registers: 28 of 32, with two vectors of B and one pair of A.
 * A multiply-add a cycle needs a seventh of the loads that the processor can make, so B's panel may
 * come from the second-level cache. Attention's keeps SQUARE rows of SQUARE vectors: as many loads
 * of B as of A, both from the first-level cache. */
#include <immintrin.h>
#include <string.h>

#include "ops/cpu/bf16_avx512.h"
#include "ops/cpu/transpose_avx512.h"

enum { PAIR = 2, ROWS = 14, SQUARE = 4, STRIDE = OPS_BF16_A_STRIDE };

INLINE __mmask32 mask_32(int64_t n)
{
    return n >= 32 ? 0xffffffffu : n <= 0 ? 0 : (__mmask32)((1u << n) - 1);
}

/* ---- the product ---- */

/* n_rows x 16 n_vectors of the output; both are constants where this is inlined. */
INLINE void multiply_rows(const ops_bf16_block *s, int n_rows, int n_vectors)
{
    const uint16_t *a = s->a, *b = s->panel;
    __m512 sum[ROWS][2];
    UNROLL for (int i = 0; i < n_rows; i++)
    {
        sum[i][0] = sum[i][1] = _mm512_setzero_ps();
        prefetch_row(s, i, n_vectors);
    }
    for (int64_t p = 0; p < s->n_pairs; p++, a += PAIR, b += n_vectors * LANES * PAIR) {
        __m512bh b0 = (__m512bh)_mm512_loadu_si512(b), b1 = b0;
        if (n_vectors == 2) b1 = (__m512bh)_mm512_loadu_si512(b + LANES * PAIR);
        UNROLL for (int i = 0; i < n_rows; i++)
        {
            int pair;
            memcpy(&pair, a + i * STRIDE, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            sum[i][0] = _mm512_dpbf16_ps(sum[i][0], both, b0);
            if (n_vectors == 2) sum[i][1] = _mm512_dpbf16_ps(sum[i][1], both, b1);
        }
    }
    UNROLL for (int i = 0; i < n_rows; i++)
    {
        finish(s, i, 0, sum[i][0]);
        if (n_vectors == 2) finish(s, i, LANES, sum[i][1]);
    }
}

/* A function for each number of rows. */
#define ROWS_FUNCTION(n)                                                                           \
    TARGET static void multiply_##n(const ops_bf16_block *s)                                       \
    {                                                                                              \
        if (s->n_cols > OPS_BF16_NARROW)                                                           \
            multiply_rows(s, n, 2);                                                                \
        else                                                                                       \
            multiply_rows(s, n, 1);                                                                \
    }
#define ROWS_ENTRY(n) [n] = multiply_##n,
#define EACH_ROWS(X)  X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
EACH_ROWS(ROWS_FUNCTION)

static void multiply(const ops_bf16_block *s)
{
    static void (*const functions[ROWS + 1])(const ops_bf16_block *) = {EACH_ROWS(ROWS_ENTRY)};
    functions[s->n_rows](s);
}

/* ---- attention's product ---- */

/* rows x (16 vectors) of C, of which the last vector has the columns of `last`. */
INLINE void tile_block(const ops_bf16_tile *t, int64_t row, int64_t column, int rows, int vectors,
                       __mmask16 last)
{
    __m512 sum[SQUARE][SQUARE];
    const uint16_t *a = t->A + row * t->lda, *b = t->B + PAIR * column;
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++) sum[r][v] =
        _mm512_setzero_ps();
    for (int64_t p = 0; p < t->n_pairs; p++, a += PAIR, b += PAIR * t->ldb) {
        __m512bh words[SQUARE];
        UNROLL for (int v = 0; v < vectors; v++) words[v] =
            (__m512bh)_mm512_loadu_si512(b + PAIR * LANES * v);
        UNROLL for (int r = 0; r < rows; r++)
        {
            int pair;
            memcpy(&pair, a + r * t->lda, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
            UNROLL for (int v = 0; v < vectors; v++) sum[r][v] =
                _mm512_dpbf16_ps(sum[r][v], both, words[v]);
        }
    }
    __m512 alpha = _mm512_set1_ps(t->alpha);
    UNROLL for (int r = 0; r < rows; r++) UNROLL for (int v = 0; v < vectors; v++)
    {
        float *c = t->C + (row + r) * t->ldc + column + LANES * v;
        __mmask16 there = v == vectors - 1 ? last : (__mmask16)0xffff;
        __m512 value = _mm512_mul_ps(sum[r][v], alpha);
        if (t->accumulate) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(there, c));
        _mm512_mask_storeu_ps(c, there, value);
    }
}

#define TILE_CASE(rows, vectors)                                                                   \
    case (rows)*8 + (vectors):                                                                     \
        tile_block(t, row, column, rows, vectors, last);                                           \
        break;
#define TILE_CASES(rows) TILE_CASE(rows, 1) TILE_CASE(rows, 2) TILE_CASE(rows, 3) TILE_CASE(rows, 4)

TARGET static void tile_rows(const ops_bf16_tile *t, int64_t row, int rows)
{
    for (int64_t column = 0; column < t->N; column += LANES * SQUARE) {
        int64_t left = t->N - column, n = left < LANES * SQUARE ? left : LANES * SQUARE;
        int vectors = (int)((n + LANES - 1) / LANES);
        __mmask16 last = mask_16(n - LANES * (vectors - 1));
        switch (rows * 8 + vectors) {
            TILE_CASES(1) TILE_CASES(2) TILE_CASES(3) TILE_CASES(4)
        }
    }
}

static void multiply_tile(const ops_bf16_tile *t)
{
    for (int64_t row = 0; row < t->M; row += SQUARE)
        tile_rows(t, row, t->M - row < SQUARE ? (int)(t->M - row) : SQUARE);
}

/* ---- conversions ---- */

TARGET static void narrow(const float *src, uint16_t *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i += LANES) {
        __mmask16 there = mask_16(n - i);
        __m512 wide = _mm512_maskz_loadu_ps(there, src + i);
        _mm256_mask_storeu_epi16(dst + i, there, (__m256i)_mm512_cvtneps_pbh(wide));
    }
}

/* ---- A ---- */

TARGET static void copy_row_scaled(const uint16_t *src, int64_t depth, const float *scale,
                                   uint16_t *dst)
{
    for (int64_t k = 0; k < depth; k += LANES) {
        __mmask16 there = mask_16(depth - k);
        __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, src + k));
        __m512 value = _mm512_mul_ps(_mm512_castsi512_ps(_mm512_slli_epi32(wide, 16)),
                                     _mm512_maskz_loadu_ps(there, scale + k));
        _mm256_storeu_si256((__m256i *)(dst + k), (__m256i)_mm512_cvtneps_pbh(value));
    }
}

TARGET static void copy_rows(const uint16_t *src, int64_t ld, int64_t n_rows, int64_t depth,
                             const float *scale, uint16_t *dst)
{
    for (int64_t i = 0; i < n_rows; i++, src += ld, dst += STRIDE) {
        if (scale)
            copy_row_scaled(src, depth, scale, dst);
        else
            memcpy(dst, src, (size_t)depth * sizeof *dst);
        if (depth % PAIR) dst[depth] = 0;
    }
}

/* Elements 0 to 15 of rows k and k + 1, as pairs. */
INLINE __m512i load_pairs(const uint16_t *src, int64_t ld, bool has_second, __mmask16 there)
{
    __m256i first = _mm256_maskz_loadu_epi16(there, src), second = _mm256_setzero_si256();
    if (has_second) second = _mm256_maskz_loadu_epi16(there, src + ld);
    return _mm512_or_si512(_mm512_cvtepu16_epi32(first),
                           _mm512_slli_epi32(_mm512_cvtepu16_epi32(second), 16));
}

TARGET static void copy_columns(const uint16_t *src, int64_t ld, int64_t n_rows, int64_t depth,
                                uint16_t *dst)
{
    for (int64_t k = 0; k < depth; k += LANES * PAIR)
        for (int64_t i = 0; i < n_rows; i += LANES) {
            __mmask16 there = mask_16(n_rows - i);
            __m512i v[LANES];
            UNROLL for (int p = 0; p < LANES; p++)
            {
                int64_t left = depth - k - p * PAIR;
                v[p] = left <= 0 ? _mm512_setzero_si512()
                                 : load_pairs(src + (k + p * PAIR) * ld + i, ld, left > 1, there);
            }
            transpose_16(v);
            UNROLL for (int r = 0; r < LANES; r++) if (i + r < n_rows)
                _mm512_storeu_si512(dst + (i + r) * STRIDE + k, v[r]);
        }
}

/* ---- B ---- */

TARGET static void pack_rows(const uint16_t *src, int64_t ld, int64_t depth, int64_t n_cols,
                             int64_t width, uint16_t *panel)
{
    for (int64_t k = 0; k < depth; k += PAIR, src += PAIR * ld, panel += PAIR * width)
        for (int64_t j = 0; j < width; j += LANES)
            _mm512_storeu_si512(panel + PAIR * j,
                                load_pairs(src + j, ld, k + 1 < depth, mask_16(n_cols - j)));
}

TARGET static void pack_columns(const uint16_t *src, int64_t ld, int64_t depth, int64_t n_cols,
                                int64_t width, uint16_t *panel)
{
    for (int64_t j = 0; j < width; j += LANES)
        for (int64_t k = 0; k < depth; k += LANES * PAIR) {
            __mmask32 there = mask_32(depth - k);
            __m512i v[LANES];
            UNROLL for (int r = 0; r < LANES; r++) v[r] =
                j + r < n_cols ? _mm512_maskz_loadu_epi16(there, src + (j + r) * ld + k)
                               : _mm512_setzero_si512();
            transpose_16(v);
            UNROLL for (int p = 0; p < LANES; p++) if (k + p * PAIR < depth)
                _mm512_storeu_si512(panel + (k + p * PAIR) * width + PAIR * j, v[p]);
        }
}

const ops_bf16_kernels ops_bf16_kernels_avx512 = {.name = "avx512_bf16",
                                                  .rows = ROWS,
                                                  .depth_unit = PAIR,
                                                  .multiply_adds = 32,
                                                  .narrow = narrow,
                                                  .copy_rows = copy_rows,
                                                  .copy_columns = copy_columns,
                                                  .pack_rows = pack_rows,
                                                  .pack_columns = pack_columns,
                                                  .multiply = multiply,
                                                  .multiply_tile = multiply_tile};
