/* SPDX-License-Identifier: Apache-2.0 */
/* half_avx512.h -- converts 16 elements between bf16 and fp32 with AVX-512. The generic vectors in
 * ops_cpu.h give the same bits, but compilers make three times as many instructions of them. Only
 * functions with HALF_TARGET call these, and only if ops_has_avx512 is true. */
#ifndef BALLAST_OPS_CPU_HALF_AVX512_H
#define BALLAST_OPS_CPU_HALF_AVX512_H

#include <stdbool.h>
#include <stdint.h>

#if defined(__x86_64__)
#define HALF_AVX512 1
#include <immintrin.h>

#define HALF_TARGET __attribute__((target("avx512f")))
#define HALF_INLINE static inline __attribute__((always_inline)) HALF_TARGET

static inline bool ops_has_avx512(void)
{
    return __builtin_cpu_supports("avx512f");
}

HALF_INLINE __m512 half_widen_16(const uint16_t *x)
{
    __m256i half = _mm256_loadu_si256((const __m256i *)x);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
}

/* The upper halves of 16 words. */
HALF_INLINE void half_store_16(__m512i words, uint16_t *y)
{
    _mm256_storeu_si256((__m256i *)y, _mm512_cvtepi32_epi16(_mm512_srli_epi32(words, 16)));
}

/* bl_f32_to_bf16: x plus half a unit of the last place, less one if the last bit is 0. A NaN gets
 * its quiet bit instead. */
HALF_INLINE void half_round_16(__m512 x, uint16_t *y)
{
    __m512i bits = _mm512_castps_si512(x),
            last = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1)),
            rounded = _mm512_add_epi32(bits, _mm512_add_epi32(last, _mm512_set1_epi32(0x7fff)));
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    half_store_16(_mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000)), y);
}

/* bl_f32_to_bf16_random: x plus `random` (16 words below 2^16). Infinity has no lower half, so it
 * stays. */
HALF_INLINE void half_round_random_16(__m512 x, __m512i random, uint16_t *y)
{
    __m512i bits = _mm512_castps_si512(x), rounded = _mm512_add_epi32(bits, random);
    __mmask16 is_nan = _mm512_cmp_ps_mask(x, x, _CMP_UNORD_Q);
    half_store_16(_mm512_mask_or_epi32(rounded, is_nan, bits, _mm512_set1_epi32(0x400000)), y);
}

/* The variant of a function for this processor. */
#define OPS_KERNEL(name) (ops_has_avx512() ? name##_avx512 : name##_generic)
#else
#define OPS_KERNEL(name) name##_generic
#endif

#endif
