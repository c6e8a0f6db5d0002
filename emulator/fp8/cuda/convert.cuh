/* SPDX-License-Identifier: Apache-2.0 */
/* convert.cuh -- replaces src/fp8/cuda/convert.cuh: the same conversions without a GPU's
 * instructions. */
#ifndef BALLAST_FP8_CONVERT_CUH
#define BALLAST_FP8_CONVERT_CUH

extern "C" {
#include "base/dtype.h"
}
#include "fp8/element.h"

typedef uint16_t bl_bf16; /* its bits */

static inline uint32_t bl_bf16_pair(float low, float high)
{
    return bl_f32_to_bf16(low) | (uint32_t)bl_f32_to_bf16(high) << 16;
}

static inline uint32_t bl_e4m3_pair(float low, float high)
{
    return bl_f32_to_e4m3(low) | (uint32_t)bl_f32_to_e4m3(high) << 8;
}

static inline float bl_half_to_f32(uint16_t bits)
{
    return bl_f16_to_f32(bits);
}

static inline float2 bl_e4m3_pair_to_f32(uint32_t pair)
{
    return make_float2(bl_e4m3_to_f32((uint8_t)pair), bl_e4m3_to_f32((uint8_t)(pair >> 8)));
}

#endif
