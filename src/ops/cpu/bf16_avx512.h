/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_avx512.h -- how sums of products get into the output, 16 at a time: common to the kernels
 * with vdpbf16ps and those with AMX, whose processors have AVX-512, too. */
#ifndef BALLAST_OPS_CPU_BF16_AVX512_H
#define BALLAST_OPS_CPU_BF16_AVX512_H

#include <immintrin.h>

#include "ops/cpu/bf16_kernels.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl,avx512bf16")))
#define INLINE static inline __attribute__((always_inline)) TARGET
#if defined(__clang__)
#define UNROLL _Pragma("clang loop unroll(full)")
#else
#define UNROLL _Pragma("GCC unroll 16")
#endif

enum { LANES = 16 };

INLINE __mmask16 mask_16(int64_t n)
{
    return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
}

/* One vector of a row of the output. */
INLINE void finish(const ops_bf16_block *s, int64_t row, int64_t col, __m512 sum)
{
    float *sums = s->sums + row * s->sums_ld + col;
    __m512 total = _mm512_mul_ps(_mm512_loadu_ps(s->factor + col), sum);
    if (!s->is_first) total = _mm512_add_ps(total, _mm512_loadu_ps(sums));
    if (!s->is_last) {
        _mm512_storeu_ps(sums, total);
        return;
    }
    __mmask16 there = mask_16(s->n_cols - col);
    __m512 beta = _mm512_set1_ps(s->beta);
    if (s->c_is_bf16) {
        uint16_t *c = (uint16_t *)s->C + row * s->ldc + col;
        if (s->beta != 0) {
            __m512i wide = _mm512_cvtepu16_epi32(_mm256_maskz_loadu_epi16(there, c));
            __m512 before = _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
            total = _mm512_add_ps(total, _mm512_mul_ps(beta, before));
        }
        _mm256_mask_storeu_epi16(c, there, (__m256i)_mm512_cvtneps_pbh(total));
    } else {
        float *c = (float *)s->C + row * s->ldc + col;
        if (s->beta != 0)
            total = _mm512_add_ps(total, _mm512_mul_ps(beta, _mm512_maskz_loadu_ps(there, c)));
        _mm512_mask_storeu_ps(c, there, total);
    }
}

/* What `finish` reads or writes of a row, into the first-level cache while sums are made: the bytes
 * of a panel's row of C or of `sums`, which the step before left in the second-level cache. */
INLINE void prefetch_row(const ops_bf16_block *s, int64_t row, int n_vectors)
{
    int64_t c_bytes = s->c_is_bf16 ? 2 : 4;
    const char *c = (const char *)s->C + row * s->ldc * c_bytes,
               *sums = (const char *)(s->sums + row * s->sums_ld);
    if (s->is_last) {
        __builtin_prefetch(c, 1);
        if (!s->c_is_bf16 && n_vectors == 2) __builtin_prefetch(c + 64, 1);
    }
    if (s->is_first && s->is_last) return;
    __builtin_prefetch(sums, 1);
    if (n_vectors == 2) __builtin_prefetch(sums + 64, 1);
}

#endif
