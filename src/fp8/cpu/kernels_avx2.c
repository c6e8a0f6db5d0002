/* SPDX-License-Identifier: Apache-2.0 */
/* kernels_avx2.c -- the inner loops with AVX2. Thirty-two elements (eight for the way back) at a
 * time; codec.h's arithmetic with blends for its branches. The last few go the scalar way. */
#include "fp8/cpu/kernels.h"

#include <immintrin.h>

#include "fp8/codec.h"

#define TARGET __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline)) TARGET

enum { LANES = 8 };

INLINE void store(float *dst, __m256 values)
{
    _mm256_storeu_ps(dst, values);
}

INLINE __m256 load(bl_dtype dtype, const void *src, int64_t i)
{
    if (dtype == BL_F32) return _mm256_loadu_ps((const float *)((const char *)src + 4 * i));
    __m128i halves = _mm_loadu_si128((const __m128i *)((const char *)src + 2 * i));
    if (dtype == BL_F16) return _mm256_cvtph_ps(halves);
    return _mm256_castsi256_ps(_mm256_slli_epi32(_mm256_cvtepu16_epi32(halves), 16));
}

/* The code of each lane, 0 .. 255. */
INLINE __m256i encode8(__m256 value)
{
    const __m256i magic = _mm256_castps_si256(_mm256_set1_ps(0x1p14f));
    __m256i bits = _mm256_castps_si256(value),
            magnitude = _mm256_and_si256(bits, _mm256_set1_epi32(0x7fffffff));
    __m256i odd = _mm256_and_si256(_mm256_srli_epi32(bits, 20), _mm256_set1_epi32(1));
    __m256i rounded =
        _mm256_add_epi32(_mm256_add_epi32(magnitude, odd), _mm256_set1_epi32(0x7ffff));
    __m256i code = _mm256_sub_epi32(_mm256_srli_epi32(rounded, 20), _mm256_set1_epi32(120 << 3));
    code = _mm256_min_epi32(code, _mm256_set1_epi32(0x7e));

    __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(0x3c800000), magnitude);
    __m256 shifted = _mm256_add_ps(_mm256_castsi256_ps(magnitude), _mm256_castsi256_ps(magic));
    code = _mm256_blendv_epi8(code, _mm256_sub_epi32(_mm256_castps_si256(shifted), magic), tiny);
    __m256i nan = _mm256_cmpgt_epi32(magnitude, _mm256_set1_epi32(0x7f800000));
    code = _mm256_blendv_epi8(code, _mm256_set1_epi32(BL_FP8_NAN), nan);

    __m256i sign = _mm256_and_si256(_mm256_srli_epi32(bits, 24), _mm256_set1_epi32(0x80));
    return _mm256_or_si256(code, sign);
}

INLINE __m256 decode_lanes(const uint8_t *codes, float factor)
{
    __m256i wide = _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i *)codes)),
            magnitude = _mm256_and_si256(wide, _mm256_set1_epi32(0x7f));
    __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
    __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
    __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
    bits = _mm256_blendv_epi8(bits, _mm256_castps_si256(small), tiny);
    __m256i nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(BL_FP8_NAN));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), nan);
    __m256i sign = _mm256_and_si256(_mm256_slli_epi32(wide, 24), _mm256_set1_epi32(INT32_MIN));
    return _mm256_mul_ps(_mm256_castsi256_ps(_mm256_or_si256(bits, sign)), _mm256_set1_ps(factor));
}

INLINE float absmax_of(bl_dtype dtype, const void *src, int64_t n)
{
    const __m256i mask = _mm256_set1_epi32(0x7fffffff);
    __m256i largest[4] = {_mm256_setzero_si256(), _mm256_setzero_si256(), _mm256_setzero_si256(),
                          _mm256_setzero_si256()}; /* independent chains */
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int chain = 0; chain < 4; chain++) {
            __m256i bits = _mm256_castps_si256(load(dtype, src, i + chain * LANES));
            largest[chain] = _mm256_max_epi32(largest[chain], _mm256_and_si256(bits, mask));
        }
    uint32_t lanes[LANES], result;
    largest[0] = _mm256_max_epi32(_mm256_max_epi32(largest[0], largest[1]),
                                  _mm256_max_epi32(largest[2], largest[3]));
    _mm256_storeu_si256((__m256i *)lanes, largest[0]);
    result = bl_f32_bits(bl_fp8_kernels_scalar.absmax(
        dtype, (const char *)src + i * (dtype == BL_F32 ? 4 : 2), n - i));
    for (int lane = 0; lane < LANES; lane++) result = lanes[lane] > result ? lanes[lane] : result;
    return bl_f32_from_bits(result);
}

INLINE void encode_from(bl_dtype dtype, const void *src, float scale, uint8_t *codes, int64_t n)
{
    const __m256 divisor = _mm256_set1_ps(scale);
    const __m256i order =
        _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7); /* undoes the packs' interleaving */
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        __m256i part[4];
        for (int k = 0; k < 4; k++)
            part[k] = encode8(_mm256_div_ps(load(dtype, src, i + k * LANES), divisor));
        __m256i low = _mm256_packus_epi32(part[0], part[1]),
                high = _mm256_packus_epi32(part[2], part[3]);
        __m256i run = _mm256_permutevar8x32_epi32(_mm256_packus_epi16(low, high), order);
        _mm256_storeu_si256((__m256i *)(codes + i), run);
    }
    bl_fp8_kernels_scalar.encode(dtype, (const char *)src + i * (dtype == BL_F32 ? 4 : 2), scale,
                                 codes + i, n - i);
}

typedef struct table16 {
    __m256 low, high;
} table16;

INLINE table16 load_table(const float *values)
{
    return (table16){_mm256_loadu_ps(values), _mm256_loadu_ps(values + LANES)};
}

INLINE __m256 look_up(const table16 *table, const uint8_t *codes, bool is_low, float factor)
{
    int32_t word;
    memcpy(&word, codes, sizeof word);
    __m128i both = _mm_cvtsi32_si128(word), mask = _mm_set1_epi8(0xf),
            low = _mm_and_si128(both, mask), high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
    __m256i code =
        _mm256_cvtepu8_epi32(is_low ? _mm_unpacklo_epi8(low, high) : _mm_unpacklo_epi8(high, low));
    __m256 value = _mm256_blendv_ps(_mm256_permutevar8x32_ps(table->low, code),
                                    _mm256_permutevar8x32_ps(table->high, code),
                                    _mm256_castsi256_ps(_mm256_slli_epi32(code, 28)));
    return _mm256_mul_ps(value, _mm256_set1_ps(factor));
}

#include "fp8/cpu/kernels_vector.h"

const bl_fp8_kernels bl_fp8_kernels_avx2 = {"avx2",      absmax, encode,       decode,
                                            decode_bf16, widen,  decode_packed};
