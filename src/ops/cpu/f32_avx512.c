/* SPDX-License-Identifier: Apache-2.0 */
/* f32_avx512.c -- fp32 products with AVX-512: 28 sums of 16 in 32 registers. */
#include <immintrin.h>

#define TARGET __attribute__((target("avx512f")))
enum { LANES = 16, ROWS = 14 };
#define EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6) X(7) X(8) X(9) X(10) X(11) X(12) X(13) X(14)
typedef float vector __attribute__((vector_size(64), aligned(4), may_alias));
#define fma_vector(a, b, c) ((vector)_mm512_fmadd_ps((__m512)(a), (__m512)(b), (__m512)(c)))
#define spread(x)           ((vector)_mm512_set1_ps(x))

#include "ops/cpu/f32_multiply.h"
#include "ops/cpu/transpose_avx512.h"

INLINE __mmask16 mask_16(int64_t n)
{
    return n >= 16 ? 0xffff : n <= 0 ? 0 : (__mmask16)((1u << n) - 1);
}

TARGET static void pack_columns(const float *src, int64_t ld, int64_t depth, int64_t n_cols,
                                float *panel)
{
    for (int64_t j = 0; j < OPS_F32_PANEL; j += LANES)
        for (int64_t k = 0; k < depth; k += LANES) {
            __mmask16 there = mask_16(depth - k);
            __m512i v[LANES];
            UNROLL for (int r = 0; r < LANES; r++) v[r] =
                j + r < n_cols ? _mm512_maskz_loadu_epi32(there, src + (j + r) * ld + k)
                               : _mm512_setzero_si512();
            transpose_16(v);
            UNROLL for (int i = 0; i < LANES; i++) if (k + i < depth)
                _mm512_storeu_si512(panel + (k + i) * OPS_F32_PANEL + j, v[i]);
        }
}

static bool is_there(void)
{
    return __builtin_cpu_supports("avx512f");
}

const ops_f32_kernels ops_f32_kernels_avx512 = {.name = "avx512",
                                                .is_there = is_there,
                                                .is_fused = true,
                                                .rows = ROWS,
                                                .multiply_adds = 16,
                                                .multiply = multiply,
                                                .pack_columns = pack_columns};
