/* SPDX-License-Identifier: Apache-2.0 */
/* transpose_avx512.h -- squares of 16 x 16 elements of 32 bits, in registers, for a file that has
 * defined UNROLL. */
#ifndef BALLAST_OPS_CPU_TRANSPOSE_AVX512_H
#define BALLAST_OPS_CPU_TRANSPOSE_AVX512_H

#include <immintrin.h>

/* v[i] holds row i: afterwards, column i; elements of 32 bits. */
static inline __attribute__((always_inline, target("avx512f"))) void transpose_16(__m512i v[16])
{
    __m512i w[16];
    UNROLL for (int i = 0; i < 16; i += 2)
    {
        w[i] = _mm512_unpacklo_epi32(v[i], v[i + 1]);
        w[i + 1] = _mm512_unpackhi_epi32(v[i], v[i + 1]);
    }
    UNROLL for (int i = 0; i < 16; i += 4)
    {
        v[i] = _mm512_unpacklo_epi64(w[i], w[i + 2]);
        v[i + 1] = _mm512_unpackhi_epi64(w[i], w[i + 2]);
        v[i + 2] = _mm512_unpacklo_epi64(w[i + 1], w[i + 3]);
        v[i + 3] = _mm512_unpackhi_epi64(w[i + 1], w[i + 3]);
    }
    /* Rows 4 r + c hold column 4 lane + c of rows 4 r to 4 r + 3 in each 128-bit lane. */
    UNROLL for (int c = 0; c < 4; c++)
    {
        __m512i even_0 = _mm512_shuffle_i32x4(v[c], v[c + 4], 0x88),
                odd_0 = _mm512_shuffle_i32x4(v[c], v[c + 4], 0xdd),
                even_1 = _mm512_shuffle_i32x4(v[c + 8], v[c + 12], 0x88),
                odd_1 = _mm512_shuffle_i32x4(v[c + 8], v[c + 12], 0xdd);
        w[c] = _mm512_shuffle_i32x4(even_0, even_1, 0x88);
        w[c + 8] = _mm512_shuffle_i32x4(even_0, even_1, 0xdd);
        w[c + 4] = _mm512_shuffle_i32x4(odd_0, odd_1, 0x88);
        w[c + 12] = _mm512_shuffle_i32x4(odd_0, odd_1, 0xdd);
    }
    UNROLL for (int i = 0; i < 16; i++) v[i] = w[i];
}

#endif
