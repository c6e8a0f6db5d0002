/* SPDX-License-Identifier: Apache-2.0 */
/* kernels_scalar.c -- the inner loops in plain C: the definition that the AVX2 and AVX-512 variants
 * must match bit for bit. */
#include "fp8/cpu/kernels.h"

#include "fp8/element.h"
#include "fp8/packed.h"

static float load(bl_dtype dtype, const void *src, int64_t i)
{
    const unsigned char *bytes = src;
    if (dtype == BL_F32) {
        float value;
        memcpy(&value, bytes + 4 * i, sizeof value);
        return value;
    }
    uint16_t half;
    memcpy(&half, bytes + 2 * i, sizeof half);
    return dtype == BL_BF16 ? bl_bf16_to_f32(half) : bl_f16_to_f32(half);
}

static float absmax(bl_dtype dtype, const void *src, int64_t n)
{
    uint32_t largest = 0;
    for (int64_t i = 0; i < n; i++) largest = bl_absmax_bits(largest, load(dtype, src, i));
    return bl_f32_from_bits(largest);
}

static void encode(bl_dtype dtype, const void *src, float scale, uint8_t *codes, int64_t n)
{
    for (int64_t i = 0; i < n; i++) codes[i] = bl_f32_to_e4m3(load(dtype, src, i) / scale);
}

static void decode(const uint8_t *codes, float scale, float *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++) dst[i] = bl_e4m3_decode(codes[i], scale);
}

static void decode_bf16(const uint8_t *codes, uint16_t *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = (uint16_t)(bl_f32_bits(bl_e4m3_to_f32(codes[i])) >> 16);
}

static void widen(bl_dtype dtype, const void *src, float *dst, int64_t n)
{
    bl_dtype_to_f32(dtype, src, dst, (size_t)n);
}

static void decode_packed(const bl_packed_run *run, int64_t first, float *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++)
        dst[i] = run->values[bl_packed_code(run->codes, run->layout, first + i)] *
                 run->scales[(first + i) / run->group];
}

const bl_fp8_kernels bl_fp8_kernels_scalar = {"scalar",    absmax, encode,       decode,
                                              decode_bf16, widen,  decode_packed};
