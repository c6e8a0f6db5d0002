/* SPDX-License-Identifier: Apache-2.0 */
/* codec.h's E4M3 against cuda_fp8.h, whose host functions compute as the GPU's instructions do:
 * all codes, all bf16 numbers, and fp32 numbers of all sizes. NaN has many codes; any of them will
 * do. Needs no GPU. */
#include <math.h>
#include <stdio.h>

#include <cuda_fp8.h>

#include "fp8/element.h"

static int n_wrong;

static void compare(float x)
{
    uint8_t nvidia = __nv_cvt_float_to_fp8(x, __NV_SATFINITE, __NV_E4M3), ours = bl_f32_to_e4m3(x);
    if (isnan(x) ? (nvidia & ours & 0x7f) == BL_FP8_NAN : nvidia == ours) return;
    if (n_wrong++ < 10) printf("%a: %02x here, %02x at NVIDIA\n", (double)x, ours, nvidia);
}

int main(void)
{
    for (int code = 0; code < 256; code++) {
        float nvidia = __half2float(
                  __half(__nv_cvt_fp8_to_halfraw((__nv_fp8_storage_t)code, __NV_E4M3))),
              ours = bl_e4m3_to_f32((uint8_t)code);
        if (nvidia == ours || (isnan(nvidia) && isnan(ours))) continue;
        n_wrong++;
        printf("code %02x: %a here, %a at NVIDIA\n", code, (double)ours, (double)nvidia);
    }
    for (uint32_t bits = 0; bits < 65536; bits++) compare(bl_bf16_to_f32((uint16_t)bits));
    for (uint64_t bits = 0; bits < (uint64_t)1 << 32; bits += 251) {
        float x = bl_f32_from_bits((uint32_t)bits);
        compare(x);
        uint16_t nvidia = __bfloat16_as_ushort(__float2bfloat16_rn(x)), ours = bl_f32_to_bf16(x);
        if (nvidia != ours && !isnan(x) && n_wrong++ < 10)
            printf("%a: another bf16 at NVIDIA\n", (double)x);
    }
    return n_wrong > 0;
}
