/* SPDX-License-Identifier: Apache-2.0 */
/* kernels_avx512.c -- the inner loops with AVX-512. Sixteen elements at a time; codec.h's
 * arithmetic with masks for its branches. The last few go the scalar way. */
#include "fp8/cpu/kernels.h"

#include <immintrin.h>

#include "fp8/codec.h"

#define TARGET __attribute__((target("avx512f,avx512bw,avx512vl")))
#define INLINE static inline __attribute__((always_inline)) TARGET

enum { LANES = 16 };

INLINE void store(float *dst, __m512 values)
{
    _mm512_storeu_ps(dst, values);
}

INLINE __m512 load(bl_dtype dtype, const void *src, int64_t i)
{
    if (dtype == BL_F32) return _mm512_loadu_ps((const char *)src + 4 * i);
    __m256i halves = _mm256_loadu_si256((const __m256i *)((const char *)src + 2 * i));
    if (dtype == BL_F16) return _mm512_cvtph_ps(halves);
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(halves), 16));
}

INLINE __m128i encode16(__m512 value)
{
    const __m512i magic = _mm512_castps_si512(_mm512_set1_ps(0x1p14f));
    __m512i bits = _mm512_castps_si512(value),
            magnitude = _mm512_and_si512(bits, _mm512_set1_epi32(0x7fffffff));
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 20), _mm512_set1_epi32(1));
    __m512i rounded =
        _mm512_add_epi32(_mm512_add_epi32(magnitude, odd), _mm512_set1_epi32(0x7ffff));
    __m512i code = _mm512_sub_epi32(_mm512_srli_epi32(rounded, 20), _mm512_set1_epi32(120 << 3));
    code = _mm512_min_epi32(code, _mm512_set1_epi32(0x7e));

    __mmask16 tiny = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(0x3c800000));
    __m512 shifted = _mm512_add_ps(_mm512_castsi512_ps(magnitude), _mm512_castsi512_ps(magic));
    code = _mm512_mask_sub_epi32(code, tiny, _mm512_castps_si512(shifted), magic);
    __mmask16 nan = _mm512_cmpgt_epi32_mask(magnitude, _mm512_set1_epi32(0x7f800000));
    code = _mm512_mask_mov_epi32(code, nan, _mm512_set1_epi32(BL_FP8_NAN));

    __m512i sign = _mm512_and_si512(_mm512_srli_epi32(bits, 24), _mm512_set1_epi32(0x80));
    return _mm512_cvtepi32_epi8(_mm512_or_si512(code, sign));
}

INLINE __m512 decode_lanes(const uint8_t *codes, float factor)
{
    __m512i wide = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)codes)),
            magnitude = _mm512_and_si512(wide, _mm512_set1_epi32(0x7f));
    __m512i bits = _mm512_add_epi32(_mm512_slli_epi32(magnitude, 20), _mm512_set1_epi32(120 << 23));
    __mmask16 tiny = _mm512_cmplt_epi32_mask(magnitude, _mm512_set1_epi32(8));
    __m512 small = _mm512_mul_ps(_mm512_cvtepi32_ps(magnitude), _mm512_set1_ps(0x1p-9f));
    bits = _mm512_mask_mov_epi32(bits, tiny, _mm512_castps_si512(small));
    __mmask16 nan = _mm512_cmpeq_epi32_mask(magnitude, _mm512_set1_epi32(BL_FP8_NAN));
    bits = _mm512_mask_mov_epi32(bits, nan, _mm512_set1_epi32(0x7fc00000));
    __m512i sign = _mm512_and_si512(_mm512_slli_epi32(wide, 24), _mm512_set1_epi32(INT32_MIN));
    return _mm512_mul_ps(_mm512_castsi512_ps(_mm512_or_si512(bits, sign)), _mm512_set1_ps(factor));
}

INLINE float absmax_of(bl_dtype dtype, const void *src, int64_t n)
{
    const __m512i mask = _mm512_set1_epi32(0x7fffffff);
    __m512i largest[4] = {_mm512_setzero_si512(), _mm512_setzero_si512(), _mm512_setzero_si512(),
                          _mm512_setzero_si512()}; /* independent chains */
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES)
        for (int chain = 0; chain < 4; chain++) {
            __m512i bits = _mm512_castps_si512(load(dtype, src, i + chain * LANES));
            largest[chain] = _mm512_max_epi32(largest[chain], _mm512_and_si512(bits, mask));
        }
    for (; i + LANES <= n; i += LANES)
        largest[0] = _mm512_max_epi32(
            largest[0], _mm512_and_si512(_mm512_castps_si512(load(dtype, src, i)), mask));
    largest[0] = _mm512_max_epi32(_mm512_max_epi32(largest[0], largest[1]),
                                  _mm512_max_epi32(largest[2], largest[3]));
    uint32_t result = (uint32_t)_mm512_reduce_max_epi32(largest[0]);
    uint32_t rest = bl_f32_bits(bl_fp8_kernels_scalar.absmax(
        dtype, (const char *)src + i * (dtype == BL_F32 ? 4 : 2), n - i));
    return bl_f32_from_bits(result > rest ? result : rest);
}

INLINE void encode_from(bl_dtype dtype, const void *src, float scale, uint8_t *codes, int64_t n)
{
    const __m512 divisor = _mm512_set1_ps(scale);
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES)
        _mm_storeu_si128((__m128i *)(codes + i),
                         encode16(_mm512_div_ps(load(dtype, src, i), divisor)));
    bl_fp8_kernels_scalar.encode(dtype, (const char *)src + i * (dtype == BL_F32 ? 4 : 2), scale,
                                 codes + i, n - i);
}

typedef struct table16 {
    __m512 values;
} table16;

INLINE table16 load_table(const float *values)
{
    return (table16){_mm512_loadu_ps(values)};
}

INLINE __m512 look_up(const table16 *table, const uint8_t *codes, bool is_low, float factor)
{
    __m128i both = _mm_loadl_epi64((const __m128i *)(const void *)codes), mask = _mm_set1_epi8(0xf),
            low = _mm_and_si128(both, mask), high = _mm_and_si128(_mm_srli_epi16(both, 4), mask);
    __m512i code =
        _mm512_cvtepu8_epi32(is_low ? _mm_unpacklo_epi8(low, high) : _mm_unpacklo_epi8(high, low));
    return _mm512_mul_ps(_mm512_permutexvar_ps(code, table->values), _mm512_set1_ps(factor));
}

#include "fp8/cpu/kernels_vector.h"

const bl_fp8_kernels bl_fp8_kernels_avx512 = {"avx512",    absmax, encode,       decode,
                                              decode_bf16, widen,  decode_packed};

/* ---- with VBMI, which looks 64 bytes up in a table of 128 at once. Every E4M3 value is a bf16, so
 * a code becomes two bytes: they are interleaved to bf16 and then, with zeros, to fp32. ---- */

#define VBMI __attribute__((target("avx512f,avx512bw,avx512vl,avx512vbmi")))

/* The bf16 bits of code m < 0x80; the eight subnormals are m * 2^-9. */
#define NORMAL(m) (((m) << 4) + (120 << 7))
#define SUBNORMAL(m)                                                                               \
    ((m) == 0 ? 0 : (m) == 1 ? 0x3b00 : (m) < 4 ? 0x3b80 + ((m)-2) * 0x40 : 0x3c00 + ((m)-4) * 0x20)
#define BF16(m)       ((m) == BL_FP8_NAN ? 0x7fc0 : (m) < 8 ? SUBNORMAL(m) : NORMAL(m))
#define HIGH(m)       (BF16(m) >> 8)
#define LOW(m)        (BF16(m) & 0xff)
#define TABLE4(f, m)  f(m), f((m) + 1), f((m) + 2), f((m) + 3)
#define TABLE16(f, m) TABLE4(f, m), TABLE4(f, (m) + 4), TABLE4(f, (m) + 8), TABLE4(f, (m) + 12)
#define TABLE64(f, m)                                                                              \
    TABLE16(f, m), TABLE16(f, (m) + 16), TABLE16(f, (m) + 32), TABLE16(f, (m) + 48)

static const uint8_t high_bytes[128] = {TABLE64(HIGH, 0), TABLE64(HIGH, 64)};
static const uint8_t low_bytes[128] = {TABLE64(LOW, 0), TABLE64(LOW, 64)};

/* The unpack instructions work within 16-byte lanes: with the codes dealt out in fours, their
 * results are in order. */
static const uint32_t deal[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};

VBMI static void decode_vbmi(const uint8_t *codes, float scale, float *dst, int64_t n)
{
    const __m512i high_0 = _mm512_loadu_si512(high_bytes),
                  high_1 = _mm512_loadu_si512(high_bytes + 64);
    const __m512i low_0 = _mm512_loadu_si512(low_bytes), low_1 = _mm512_loadu_si512(low_bytes + 64);
    const __m512i order = _mm512_loadu_si512(deal), sign_bit = _mm512_set1_epi8(INT8_MIN),
                  zero = _mm512_setzero_si512();
    const __m512 factor = _mm512_set1_ps(scale);
    int64_t i = 0;
    for (; i + 4 * LANES <= n; i += 4 * LANES) {
        __m512i run = _mm512_permutexvar_epi32(order, _mm512_loadu_si512(codes + i));
        __m512i high = _mm512_permutex2var_epi8(high_0, run, high_1),
                low = _mm512_permutex2var_epi8(low_0, run, low_1);
        high = _mm512_or_si512(high, _mm512_and_si512(run, sign_bit));
        __m512i first = _mm512_unpacklo_epi8(low, high),
                second = _mm512_unpackhi_epi8(low, high); /* bf16 */
        __m512i wide[4] = {_mm512_unpacklo_epi16(zero, first), _mm512_unpackhi_epi16(zero, first),
                           _mm512_unpacklo_epi16(zero, second),
                           _mm512_unpackhi_epi16(zero, second)};
        for (int k = 0; k < 4; k++)
            _mm512_storeu_ps(dst + i + k * LANES,
                             _mm512_mul_ps(_mm512_castsi512_ps(wide[k]), factor));
    }
    decode(codes + i, scale, dst + i, n - i);
}

/* As above, one interleaving less: here the halves of a lane are eight codes each. */
VBMI static void decode_bf16_vbmi(const uint8_t *codes, uint16_t *dst, int64_t n)
{
    const __m512i high_0 = _mm512_loadu_si512(high_bytes),
                  high_1 = _mm512_loadu_si512(high_bytes + 64);
    const __m512i low_0 = _mm512_loadu_si512(low_bytes), low_1 = _mm512_loadu_si512(low_bytes + 64);
    const __m512i order = _mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7),
                  sign_bit = _mm512_set1_epi8(INT8_MIN);
    for (int64_t i = 0; i < n; i += 4 * LANES) {
        __mmask64 there = n - i >= 4 * LANES ? ~0ull : (1ull << (n - i)) - 1;
        __m512i run = _mm512_permutexvar_epi64(order, _mm512_maskz_loadu_epi8(there, codes + i));
        __m512i high = _mm512_permutex2var_epi8(high_0, run, high_1),
                low = _mm512_permutex2var_epi8(low_0, run, low_1);
        high = _mm512_or_si512(high, _mm512_and_si512(run, sign_bit));
        _mm512_mask_storeu_epi16(dst + i, (__mmask32)there, _mm512_unpacklo_epi8(low, high));
        _mm512_mask_storeu_epi16(dst + i + 2 * LANES, (__mmask32)(there >> 32),
                                 _mm512_unpackhi_epi8(low, high));
    }
}

const bl_fp8_kernels bl_fp8_kernels_avx512_vbmi = {
    "avx512_vbmi", absmax, encode, decode_vbmi, decode_bf16_vbmi, widen, decode_packed};
