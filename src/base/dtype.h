/* SPDX-License-Identifier: Apache-2.0 */
/* dtype.h -- element types, named as safetensors names them, and the exact conversions to and from
 * float. */
#ifndef BALLAST_BASE_DTYPE_H
#define BALLAST_BASE_DTYPE_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include "base/api.h"
#include "base/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

/* In the order of their sizes. */
typedef enum bl_dtype {
    BL_BOOL,
    BL_U8,
    BL_I8,
    BL_F8_E5M2,
    BL_F8_E4M3,
    BL_F8_E8M0,
    BL_I16,
    BL_U16,
    BL_F16,
    BL_BF16,
    BL_I32,
    BL_U32,
    BL_F32,
    BL_F64,
    BL_I64,
    BL_U64,
    BL_DTYPE_COUNT
} bl_dtype;

/* Of a set of dtypes. */
#define BL_DTYPE_BIT(dtype) (UINT32_C(1) << (dtype))

BL_API size_t bl_dtype_bytes(bl_dtype dtype);                /* bytes of one element */
BL_API const char *bl_dtype_name(bl_dtype dtype);            /* "BF16" */
BL_API bool bl_dtype_parse(const char *name, bl_dtype *out); /* false: unknown name */

/* Exact. */
BL_HOST_DEVICE float bl_bf16_to_f32(uint16_t bits)
{
    uint32_t wide = (uint32_t)bits << 16;
    float value;
    memcpy(&value, &wide, sizeof value);
    return value;
}

/* Round to nearest even; NaN stays NaN. */
BL_HOST_DEVICE uint16_t bl_f32_to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    if ((bits & 0x7fffffffu) > 0x7f800000u) return (uint16_t)(bits >> 16 | 0x40u);
    bits += 0x7fffu + (bits >> 16 & 1u);
    return (uint16_t)(bits >> 16);
}

BL_API float bl_f16_to_f32(uint16_t bits); /* exact, subnormals included */
/* Round to nearest even; overflow to infinity; NaN stays NaN. */
BL_API uint16_t bl_f32_to_f16(float value);

/* dst[i] = (float)src[i] for i < count; src holds `dtype`: F32, F16, BF16, F64 or
 * F8_E8M0 (2^(byte - 127), 255: NaN). Any alignment. False: other dtype. */
BL_API bool bl_dtype_to_f32(bl_dtype dtype, const void *src, float *dst, size_t count);

#ifdef __cplusplus
}
#endif

#endif
