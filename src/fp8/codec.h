/* SPDX-License-Identifier: Apache-2.0 */
/* codec.h -- one FP8 code at a time: the definition that every vector kernel must meet bit for bit.
 *
 * E4M3 of "OCP 8-bit Floating Point Specification (OFP8)", revision 1.0, table 1: bias 7, 2^-9 ..
 * 448, no infinities, NaN is 0x7f and 0xff. Encoding rounds to nearest, ties to even, and saturates
 * (section 5.2.1: infinities become the largest finite value); a NaN becomes 0x7f with its sign.
 * Decoding is exact. The default rounding mode and subnormals must be on. The functions compile for
 * the GPU, too. */
#ifndef BALLAST_FP8_CODEC_H
#define BALLAST_FP8_CODEC_H

#include <stdint.h>
#include <string.h>

#include "base/host_device.h"

#ifdef __cplusplus
extern "C" {
#endif

#define BL_E4M3_MAX 448.0f

/* The code of NaN, without its sign. */
enum { BL_FP8_NAN = 0x7f };

/* The bits of a float. */
BL_HOST_DEVICE uint32_t bl_f32_bits(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

/* The float of these bits. */
BL_HOST_DEVICE float bl_f32_from_bits(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Below the smallest normal code the rounding is left to an addition: in the binade of `magic` one
 * ulp is one code. */
BL_HOST_DEVICE uint8_t bl_f32_to_e4m3(float value)
{
    uint32_t bits = bl_f32_bits(value), sign = bits >> 24 & 0x80u, magnitude = bits & 0x7fffffffu,
             code;
    if (magnitude > 0x7f800000u) {
        code = BL_FP8_NAN;
    } else if (magnitude < 0x3c800000u) { /* 2^-6 */
        const float magic = 0x1p14f;
        code = bl_f32_bits(bl_f32_from_bits(magnitude) + magic) - bl_f32_bits(magic);
    } else {
        code = ((magnitude + 0x7ffffu + (magnitude >> 20 & 1u)) >> 20) - (120u << 3);
        if (code > 0x7eu) code = 0x7eu;
    }
    return (uint8_t)(sign | code);
}

/* Exact. */
BL_HOST_DEVICE float bl_e4m3_to_f32(uint8_t code)
{
    uint32_t sign = (uint32_t)(code & 0x80u) << 24, magnitude = code & 0x7fu, bits;
    if (magnitude == BL_FP8_NAN)
        bits = 0x7fc00000u;
    else if (magnitude < 8)
        bits = bl_f32_bits((float)magnitude * 0x1p-9f);
    else
        bits = (magnitude << 20) + (120u << 23);
    return bl_f32_from_bits(sign | bits);
}

#ifdef __cplusplus
}
#endif

#endif
