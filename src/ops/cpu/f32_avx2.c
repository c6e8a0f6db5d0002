/* SPDX-License-Identifier: Apache-2.0 */
/* f32_avx2.c -- fp32 products with AVX2 and FMA: 12 sums of 8 in 16 registers. */
#include <immintrin.h>

#define TARGET __attribute__((target("avx2,fma")))
enum { LANES = 8, ROWS = 6 };
#define EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
typedef float vector __attribute__((vector_size(32), aligned(4), may_alias));
#define fma_vector(a, b, c) ((vector)_mm256_fmadd_ps((__m256)(a), (__m256)(b), (__m256)(c)))
#define spread(x)           ((vector)_mm256_set1_ps(x))

#include "ops/cpu/f32_multiply.h"

/* dst[c][r] = src[r][c], 8 x 8. */
INLINE void transpose_8(const float *src, int64_t ld, float *dst)
{
    __m256 v[LANES], w[LANES];
    UNROLL for (int i = 0; i < LANES; i++) v[i] = _mm256_loadu_ps(src + i * ld);
    UNROLL for (int i = 0; i < LANES; i += 2)
    {
        w[i] = _mm256_unpacklo_ps(v[i], v[i + 1]);
        w[i + 1] = _mm256_unpackhi_ps(v[i], v[i + 1]);
    }
    UNROLL for (int i = 0; i < LANES; i += 4)
    {
        v[i] = _mm256_shuffle_ps(w[i], w[i + 2], 0x44);
        v[i + 1] = _mm256_shuffle_ps(w[i], w[i + 2], 0xee);
        v[i + 2] = _mm256_shuffle_ps(w[i + 1], w[i + 3], 0x44);
        v[i + 3] = _mm256_shuffle_ps(w[i + 1], w[i + 3], 0xee);
    }
    UNROLL for (int i = 0; i < 4; i++)
    {
        _mm256_storeu_ps(dst + i * OPS_F32_PANEL, _mm256_permute2f128_ps(v[i], v[i + 4], 0x20));
        _mm256_storeu_ps(dst + (i + 4) * OPS_F32_PANEL,
                         _mm256_permute2f128_ps(v[i], v[i + 4], 0x31));
    }
}

TARGET static void pack_columns(const float *src, int64_t ld, int64_t depth, int64_t n_cols,
                                float *panel)
{
    int64_t whole = depth / LANES * LANES;
    for (int64_t j = 0; j < OPS_F32_PANEL; j += LANES) {
        int64_t n_whole = j + LANES <= n_cols ? whole : 0;
        for (int64_t k = 0; k < n_whole; k += LANES)
            transpose_8(src + j * ld + k, ld, panel + k * OPS_F32_PANEL + j);
        for (int64_t k = n_whole; k < depth; k++)
            for (int64_t r = j; r < j + LANES; r++)
                panel[k * OPS_F32_PANEL + r] = r < n_cols ? src[r * ld + k] : 0;
    }
}

static bool is_there(void)
{
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
}

const ops_f32_kernels ops_f32_kernels_avx2 = {.name = "avx2",
                                              .is_there = is_there,
                                              .is_fused = true,
                                              .rows = ROWS,
                                              .multiply_adds = 16,
                                              .multiply = multiply,
                                              .pack_columns = pack_columns};
