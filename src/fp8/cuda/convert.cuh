/* SPDX-License-Identifier: Apache-2.0 */
/* convert.cuh -- conversions that a GPU has an instruction for. For .cu files only. They are the
 * functions of codec.h and dtype.h, except for the payload of a NaN; emulator/ has them in C++. */
#ifndef BALLAST_FP8_CUDA_CONVERT_CUH
#define BALLAST_FP8_CUDA_CONVERT_CUH

#include <stdint.h>

#include "fp8/element.h"

typedef uint16_t bl_bf16; /* its bits */

__device__ static inline uint32_t bl_bf16_pair(float low, float high)
{
    uint32_t pair;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(high), "f"(low));
    return pair;
}

__device__ static inline uint32_t bl_e4m3_pair(float low, float high)
{
#if __CUDA_ARCH__ >= 890
    uint16_t pair;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(pair) : "f"(high), "f"(low));
    return pair;
#else
    return bl_f32_to_e4m3(low) | (uint32_t)bl_f32_to_e4m3(high) << 8;
#endif
}

__device__ static inline float bl_half_to_f32(uint16_t bits)
{
    float value;
    asm("cvt.f32.f16 %0, %1;" : "=f"(value) : "h"(bits));
    return value;
}

__device__ static inline float2 bl_e4m3_pair_to_f32(uint32_t pair)
{
#if __CUDA_ARCH__ >= 890
    uint32_t halves;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(halves) : "h"((uint16_t)pair));
    return make_float2(bl_half_to_f32((uint16_t)halves), bl_half_to_f32((uint16_t)(halves >> 16)));
#else
    return make_float2(bl_e4m3_to_f32((uint8_t)pair), bl_e4m3_to_f32((uint8_t)(pair >> 8)));
#endif
}

#endif
