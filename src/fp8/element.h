/* SPDX-License-Identifier: Apache-2.0 */
/* element.h -- quantizing and decoding one number, for C and for CUDA: shared by the kernels of
 * every device.
 *
 * The rule of fp8.h: scale = absmax / 448, or 1 where that is zero; code = E4M3(x / scale); value =
 * code * scale. All of it is fp32, each operation rounded once. */
#ifndef BALLAST_FP8_ELEMENT_H
#define BALLAST_FP8_ELEMENT_H

#include <float.h>
#include <math.h>

#include "base/dtype.h"
#include "base/host_device.h"
#include "fp8/codec.h"

/* absmax >= 0. Infinity and NaN give NaN: every product with such a scale is NaN, too. */
BL_HOST_DEVICE float bl_e4m3_scale(float absmax)
{
    if (!(absmax <= FLT_MAX)) return bl_f32_from_bits(0x7fc00000u);
    float scale = absmax / BL_E4M3_MAX;
    return scale > 0 ? scale : 1.0f;
}

/* Many numbers are divided by one scale, and IEEE's quotient must come out (another one is another
 * code now and then), but a division costs a GPU more than the memory leaves time for. */
typedef struct bl_e4m3_divisor {
    float scale;
    float reciprocal; /* 1 / scale, rounded once; 0: divide */
} bl_e4m3_divisor;

/* The way round division is taken for scales in [2^-80, 2^80] only. There, with y = RN(1/s): q0 = x
 * y is within 2 ulp of x/s, q1 = q0 + y (x - q0 s) is within 1 ulp, its remainder x - q1 s is
 * exact, and q1 + y (x
 * - q1 s) rounds to RN(x/s) (Markstein 1990, IBM J. Res. Dev. 34(1), theorem 3), as long as nothing
 *   underflows that matters: quotients below 2^-10 are code 0 however they are rounded, and for
 *   larger ones x >= 2^-90, whose remainder's last bit is above 2^-140, within fp32's denormals. */
BL_HOST_DEVICE bl_e4m3_divisor bl_e4m3_divisor_of(float scale)
{
    bl_e4m3_divisor d = {scale, scale >= 0x1p-80f && scale <= 0x1p80f ? 1.0f / scale : 0.0f};
    return d;
}

/* x / d.scale, as far as its E4M3 code is concerned. |x| <= 2^9 d.scale, or NaN; anything when the
 *   scale is
 * NaN. */
BL_HOST_DEVICE float bl_e4m3_quotient(float x, bl_e4m3_divisor d)
{
    if (d.reciprocal == 0.0f) return x / d.scale;
    float q = x * d.reciprocal;
    q = fmaf(fmaf(-q, d.scale, x), d.reciprocal, q);
    q = fmaf(fmaf(-q, d.scale, x), d.reciprocal, q);
    return copysignf(q, x); /* of a zero */
}

/* The fp32 value, and it rounded to bf16: the weight that a bf16 product sees. */
BL_HOST_DEVICE float bl_e4m3_decode(uint8_t code, float scale)
{
    return bl_e4m3_to_f32(code) * scale;
}

BL_HOST_DEVICE uint16_t bl_e4m3_decode_bf16(uint8_t code, float scale)
{
    return bl_f32_to_bf16(bl_e4m3_decode(code, scale));
}

/* The larger of a magnitude so far and |x|; a NaN is larger than everything, and stays. Bits of
 * non-negative floats are ordered as the floats are. */
BL_HOST_DEVICE uint32_t bl_absmax_bits(uint32_t so_far, float x)
{
    uint32_t magnitude = bl_f32_bits(x) & 0x7fffffffu;
    return magnitude > so_far ? magnitude : so_far;
}

#endif
