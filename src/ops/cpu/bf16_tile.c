/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_tile.c -- tiles of ROWS x (16 COLUMNS) sums in registers; with vdpbf16ps where the processor
 * has it, else in fp32 arithmetic. */
#include "ops/cpu/bf16_tile.h"

#include "ops/cpu/bf16_kernels.h"
#include "ops/cpu/ops_cpu.h"

enum { ROWS = 4, VECTORS = 4 };

typedef struct tile {
    int64_t n_pairs, lda, ldb, ldc;
    float alpha;
    bool accumulate;
    const uint16_t *A;
    const uint32_t *B;
    float *C;
} tile;

#if defined(__x86_64__)
#include <immintrin.h>
#define NATIVE __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))

/* rows x (16 vectors) of C, of which the last vector has the columns of `last`. */
NATIVE __attribute__((always_inline)) static inline void
native_block(const tile *t, int64_t row, int64_t column, int rows, int vectors, __mmask16 last)
{
    __m512 sum[ROWS][VECTORS];
    const uint16_t *a = t->A + row * t->lda;
    const uint32_t *b = t->B + column;
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) sum[r][v] = _mm512_setzero_ps();
    for (int64_t p = 0; p < t->n_pairs; p++, b += t->ldb) {
        __m512bh words[VECTORS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) words[v] = (__m512bh)_mm512_loadu_si512(b + 16 * v);
#pragma GCC unroll 4
        for (int r = 0; r < rows; r++) {
            int32_t pair;
            memcpy(&pair, a + r * t->lda + 2 * p, sizeof pair);
            __m512bh both = (__m512bh)_mm512_set1_epi32(pair);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                sum[r][v] = _mm512_dpbf16_ps(sum[r][v], both, words[v]);
        }
    }
    __m512 alpha = _mm512_set1_ps(t->alpha);
#pragma GCC unroll 4
    for (int r = 0; r < rows; r++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            float *c = t->C + (row + r) * t->ldc + column + 16 * v;
            __mmask16 mask = v == vectors - 1 ? last : (__mmask16)0xffff;
            __m512 value = _mm512_mul_ps(sum[r][v], alpha);
            if (t->accumulate) value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(mask, c));
            _mm512_mask_storeu_ps(c, mask, value);
        }
}

NATIVE static void native_rows(const tile *t, int64_t row, int rows, int64_t N)
{
    for (int64_t column = 0; column < N; column += 16 * VECTORS) {
        int vectors = (int)bl_ceil_div(bl_min_i64(16 * VECTORS, N - column), 16);
        int64_t n_last = bl_min_i64(16, N - column - 16 * (vectors - 1));
        __mmask16 last = (__mmask16)(0xffffu >> (16 - n_last));
        switch (rows * 8 + vectors) {
#define CASE(rows, vectors)                                                                        \
    case (rows)*8 + (vectors):                                                                     \
        native_block(t, row, column, rows, vectors, last);                                         \
        break;
#define CASES(rows) CASE(rows, 1) CASE(rows, 2) CASE(rows, 3) CASE(rows, 4)
            CASES(1) CASES(2) CASES(3) CASES(4)
        }
    }
}
#endif

/* One row of C in fp32 arithmetic: products of bf16 are exact in it. */
OPS_CLONES static void plain_row(const tile *t, int64_t row, int64_t N)
{
    for (int64_t column = 0; column < N; column += OPS_TILE_COLUMNS) {
        const uint16_t *a = t->A + row * t->lda;
        float sum[OPS_TILE_COLUMNS] = {0};
        for (int64_t p = 0; p < t->n_pairs; p++) {
            const uint32_t *words = t->B + p * t->ldb + column;
            float low = bl_bf16_to_f32(a[2 * p]), high = bl_bf16_to_f32(a[2 * p + 1]);
            for (int i = 0; i < OPS_TILE_COLUMNS; i++) {
                uint32_t even = words[i] << 16, odd = words[i] & 0xffff0000u;
                float b[2];
                memcpy(&b[0], &even, sizeof even);
                memcpy(&b[1], &odd, sizeof odd);
                sum[i] += high * b[1]; /* vdpbf16ps adds this one first */
                sum[i] += low * b[0];
            }
        }
        float *c = t->C + row * t->ldc + column;
        int64_t n = bl_min_i64(OPS_TILE_COLUMNS, N - column);
        for (int64_t i = 0; i < n; i++)
            c[i] = t->accumulate ? t->alpha * sum[i] + c[i] : t->alpha * sum[i];
    }
}

void ops_bf16_tile(int64_t M, int64_t N, int64_t n_pairs, float alpha, const uint16_t *A,
                   int64_t lda, const uint32_t *B, int64_t ldb, bool accumulate, float *C,
                   int64_t ldc)
{
    tile t = {n_pairs, lda, ldb, ldc, alpha, accumulate, A, B, C};
#if defined(__x86_64__)
    if (ops_bf16_kernels_best() != &ops_bf16_kernels_emulated) {
        for (int64_t row = 0; row < M; row += ROWS)
            native_rows(&t, row, (int)bl_min_i64(ROWS, M - row), N);
        return;
    }
#endif
    for (int64_t row = 0; row < M; row++) plain_row(&t, row, N);
}

/* A square of 16 x 16 words, by rows of words of x. */
OPS_CLONES static void transpose_words(int64_t n_rows, const uint16_t *x, int64_t ldx,
                                       int64_t n_words, uint32_t *packed, int64_t ld_packed)
{
    uint32_t square[16][16] = {{0}};
    for (int64_t r = 0; r < n_rows; r++)
        memcpy(square[r], x + r * ldx, (size_t)n_words * sizeof(uint32_t));
    for (int64_t w = 0; w < n_words; w++)
        for (int64_t r = 0; r < 16; r++) packed[w * ld_packed + r] = square[r][w];
}

void ops_bf16_pack_transposed(int64_t N, int64_t K, const uint16_t *x, int64_t ldx,
                              uint32_t *packed, int64_t ld_packed)
{
    for (int64_t n = 0; n < N; n += 16)
        for (int64_t w = 0; w < K / 2; w += 16)
            transpose_words(bl_min_i64(16, N - n), x + n * ldx + 2 * w, ldx,
                            bl_min_i64(16, K / 2 - w), packed + w * ld_packed + n, ld_packed);
}

OPS_CLONES static void interleave(int64_t n, const uint16_t *even, const uint16_t *odd,
                                  uint32_t *words)
{
    for (int64_t i = 0; i < n; i++) words[i] = even[i] | (uint32_t)odd[i] << 16;
}

void ops_bf16_pack(int64_t K, int64_t N, const uint16_t *x, int64_t ldx, uint32_t *packed,
                   int64_t ld_packed)
{
    for (int64_t k = 0; k < K; k += 2, packed += ld_packed) {
        const uint16_t *row = x + k * ldx;
        if (k + 1 < K)
            interleave(N, row, row + ldx, packed);
        else
            for (int64_t i = 0; i < N; i++) packed[i] = row[i];
        for (int64_t i = N; i < bl_round_up(N, OPS_TILE_COLUMNS); i++) packed[i] = 0;
    }
}
