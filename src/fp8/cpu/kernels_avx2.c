/* SPDX-License-Identifier: Apache-2.0 */
/* Thirty-two elements (eight for the way back) at a time; codec.h's arithmetic with blends for its
 * branches. The last few go the scalar way. */
#include "fp8/cpu/kernels.h"

#include <immintrin.h>

#include "fp8/codec.h"

#define TARGET __attribute__((target("avx2,f16c")))
#define INLINE static inline __attribute__((always_inline)) TARGET

enum { LANES = 8 };

/* `dtype` is a constant wherever this is inlined. */
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

INLINE __m256 decode8(__m128i codes)
{
    __m256i wide = _mm256_cvtepu8_epi32(codes),
            magnitude = _mm256_and_si256(wide, _mm256_set1_epi32(0x7f));
    __m256i bits = _mm256_add_epi32(_mm256_slli_epi32(magnitude, 20), _mm256_set1_epi32(120 << 23));
    __m256i tiny = _mm256_cmpgt_epi32(_mm256_set1_epi32(8), magnitude);
    __m256 small = _mm256_mul_ps(_mm256_cvtepi32_ps(magnitude), _mm256_set1_ps(0x1p-9f));
    bits = _mm256_blendv_epi8(bits, _mm256_castps_si256(small), tiny);
    __m256i nan = _mm256_cmpeq_epi32(magnitude, _mm256_set1_epi32(BL_FP8_NAN));
    bits = _mm256_blendv_epi8(bits, _mm256_set1_epi32(0x7fc00000), nan);
    __m256i sign = _mm256_and_si256(_mm256_slli_epi32(wide, 24), _mm256_set1_epi32(INT32_MIN));
    return _mm256_castsi256_ps(_mm256_or_si256(bits, sign));
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

INLINE void widen_from(bl_dtype dtype, const void *src, float *dst, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) _mm256_storeu_ps(dst + i, load(dtype, src, i));
    bl_fp8_kernels_scalar.widen(dtype, (const char *)src + i * (dtype == BL_F32 ? 4 : 2), dst + i,
                                n - i);
}

TARGET static float absmax(bl_dtype dtype, const void *src, int64_t n)
{
    switch (dtype) {
    case BL_F32:
        return absmax_of(BL_F32, src, n);
    case BL_F16:
        return absmax_of(BL_F16, src, n);
    default:
        return absmax_of(BL_BF16, src, n);
    }
}

TARGET static void encode(bl_dtype dtype, const void *src, float scale, uint8_t *codes, int64_t n)
{
    switch (dtype) {
    case BL_F32:
        encode_from(BL_F32, src, scale, codes, n);
        return;
    case BL_F16:
        encode_from(BL_F16, src, scale, codes, n);
        return;
    default:
        encode_from(BL_BF16, src, scale, codes, n);
        return;
    }
}

TARGET static void decode(const uint8_t *codes, float scale, float *dst, int64_t n)
{
    const __m256 factor = _mm256_set1_ps(scale);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) {
        __m128i run = _mm_loadl_epi64((const __m128i *)(codes + i));
        _mm256_storeu_ps(dst + i, _mm256_mul_ps(decode8(run), factor));
    }
    bl_fp8_kernels_scalar.decode(codes + i, scale, dst + i, n - i);
}

TARGET static void widen(bl_dtype dtype, const void *src, float *dst, int64_t n)
{
    switch (dtype) {
    case BL_F32:
        widen_from(BL_F32, src, dst, n);
        return;
    case BL_F16:
        widen_from(BL_F16, src, dst, n);
        return;
    default:
        widen_from(BL_BF16, src, dst, n);
        return;
    }
}

/* Only products on processors with vdpbf16ps need it fast, and those have VBMI. */
static void decode_bf16(const uint8_t *codes, uint16_t *dst, int64_t n)
{
    bl_fp8_kernels_scalar.decode_bf16(codes, dst, n);
}

const bl_fp8_kernels bl_fp8_kernels_avx2 = {"avx2", absmax, encode, decode, decode_bf16, widen};
