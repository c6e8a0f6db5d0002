/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.c -- tables of dtypes, and fp16 <-> fp32 by bits where no instruction is assumed. */
#include "base/dtype.h"

#include <math.h>

static const struct {
    const char *name;
    size_t bytes;
} dtypes[BL_DTYPE_COUNT] = {
    [BL_BOOL] = {"BOOL", 1},       [BL_U8] = {"U8", 1},           [BL_I8] = {"I8", 1},
    [BL_F8_E5M2] = {"F8_E5M2", 1}, [BL_F8_E4M3] = {"F8_E4M3", 1}, [BL_F8_E8M0] = {"F8_E8M0", 1},
    [BL_I16] = {"I16", 2},         [BL_U16] = {"U16", 2},         [BL_F16] = {"F16", 2},
    [BL_BF16] = {"BF16", 2},       [BL_I32] = {"I32", 4},         [BL_U32] = {"U32", 4},
    [BL_F32] = {"F32", 4},         [BL_F64] = {"F64", 8},         [BL_I64] = {"I64", 8},
    [BL_U64] = {"U64", 8},
};

size_t bl_dtype_bytes(bl_dtype dtype)
{
    return dtypes[dtype].bytes;
}

const char *bl_dtype_name(bl_dtype dtype)
{
    return dtypes[dtype].name;
}

bool bl_dtype_parse(const char *name, bl_dtype *out)
{
    for (int i = 0; i < BL_DTYPE_COUNT; i++)
        if (strcmp(dtypes[i].name, name) == 0) {
            *out = (bl_dtype)i;
            return true;
        }
    return false;
}

float bl_f16_to_f32(uint16_t half)
{
    uint32_t sign = (uint32_t)(half & 0x8000u) << 16, exponent = half >> 10 & 31u,
             fraction = half & 1023u, bits;
    if (exponent == 31) {
        bits = sign | 0x7f800000u | fraction << 13;
    } else if (exponent != 0) {
        bits = sign | (exponent + 112) << 23 | fraction << 13;
    } else { /* zero or subnormal: fraction * 2^-24, exact in float */
        float magnitude = (float)fraction * 0x1p-24f;
        memcpy(&bits, &magnitude, sizeof bits);
        bits |= sign;
    }
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

uint16_t bl_f32_to_f16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint16_t sign = (uint16_t)(bits >> 16 & 0x8000u);
    uint32_t magnitude = bits & 0x7fffffffu;
    if (magnitude > 0x7f800000u) return sign | 0x7e00u;
    if (magnitude >= 0x477ff000u) return sign | 0x7c00u; /* 65520 and above round to infinity */
    if (magnitude < 0x38800000u) { /* below 2^-14: let the addition round to 2^-24 */
        float positive, shifted;
        memcpy(&positive, &magnitude, sizeof positive);
        shifted = positive + 0.5f; /* ulp(0.5) is 2^-24 */
        memcpy(&bits, &shifted, sizeof bits);
        return sign | (uint16_t)(bits - 0x3f000000u);
    }
    magnitude += 0xfffu + (magnitude >> 13 & 1u);
    return sign | (uint16_t)((magnitude >> 13) - (112u << 10));
}

bool bl_dtype_to_f32(bl_dtype dtype, const void *src, float *dst, size_t count)
{
    const unsigned char *bytes = src;
    switch (dtype) {
    case BL_F32:
        memcpy(dst, src, count * sizeof(float));
        return true;
    case BL_BF16:
    case BL_F16:
        for (size_t i = 0; i < count; i++) {
            uint16_t half;
            memcpy(&half, bytes + 2 * i, sizeof half);
            dst[i] = dtype == BL_BF16 ? bl_bf16_to_f32(half) : bl_f16_to_f32(half);
        }
        return true;
    case BL_F64:
        for (size_t i = 0; i < count; i++) {
            double wide;
            memcpy(&wide, bytes + 8 * i, sizeof wide);
            dst[i] = (float)wide;
        }
        return true;
    case BL_F8_E8M0:
        for (size_t i = 0; i < count; i++)
            dst[i] = bytes[i] == 0xff ? NAN : ldexpf(1, bytes[i] - 127);
        return true;
    default:
        return false;
    }
}
