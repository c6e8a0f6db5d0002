/* SPDX-License-Identifier: Apache-2.0 */
/* kernels_vector.h -- the kernels that differ between vector instructions only in their vectors.
 * kernels_avx2.c and kernels_avx512.c include it after they have defined what it uses:
 *
 *   TARGET, INLINE          attributes of functions with these instructions
 *   LANES                   floats per vector
 *   load                    LANES elements of a dtype as floats
 *   store, decode_lanes     LANES floats to memory; LANES codes to floats, times a factor
 *   table16, load_table     16 floats in vectors
 *   look_up                 those of LANES codes of 4 bits, times a factor
 *   absmax_of, encode_from  absmax and encode of bl_fp8_kernels
 *
 * INLINE functions get dtype as a constant. Elements after the last whole vector take the scalar
 * kernels. */
#ifndef BALLAST_FP8_CPU_KERNELS_VECTOR_H
#define BALLAST_FP8_CPU_KERNELS_VECTOR_H

#include "fp8/cpu/kernels.h"

#define BY_DTYPE(kernel, ...)                                                                      \
    (dtype == BL_F32   ? kernel(BL_F32, __VA_ARGS__)                                               \
     : dtype == BL_F16 ? kernel(BL_F16, __VA_ARGS__)                                               \
                       : kernel(BL_BF16, __VA_ARGS__))

INLINE void widen_from(bl_dtype dtype, const void *src, float *dst, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(dst + i, load(dtype, src, i));
    bl_fp8_kernels_scalar.widen(dtype, (const char *)src + i * (dtype == BL_F32 ? 4 : 2), dst + i,
                                n - i);
}

TARGET static float absmax(bl_dtype dtype, const void *src, int64_t n)
{
    return BY_DTYPE(absmax_of, src, n);
}

TARGET static void encode(bl_dtype dtype, const void *src, float scale, uint8_t *codes, int64_t n)
{
    BY_DTYPE(encode_from, src, scale, codes, n);
}

TARGET static void decode(const uint8_t *codes, float scale, float *dst, int64_t n)
{
    int64_t i = 0;
    for (; i + LANES <= n; i += LANES) store(dst + i, decode_lanes(codes + i, scale));
    bl_fp8_kernels_scalar.decode(codes + i, scale, dst + i, n - i);
}

TARGET static void widen(bl_dtype dtype, const void *src, float *dst, int64_t n)
{
    BY_DTYPE(widen_from, src, dst, n);
}

/* Only products on processors with vdpbf16ps need it fast, and those have VBMI. */
static void decode_bf16(const uint8_t *codes, uint16_t *dst, int64_t n)
{
    bl_fp8_kernels_scalar.decode_bf16(codes, dst, n);
}

/* A group after the other; before the first whole vector and after a group's last one, code by
 * code. */
TARGET static void decode_packed(const bl_packed_run *run, int64_t first, float *dst, int64_t n)
{
    const table16 table = load_table(run->values);
    bool is_low = run->layout == BL_CODES_LOW_FIRST;

    for (int64_t i = 0; i < n;) {
        int64_t at = first + i, ahead = -at & (LANES - 1), left = run->group - at % run->group,
                end = left < n - i ? i + left : n;
        if (ahead > 0) {
            if (ahead > end - i) ahead = end - i;
            bl_fp8_kernels_scalar.decode_packed(run, at, dst + i, ahead);
            i += ahead;
        }
        float scale = run->scales[at / run->group];
        for (; i + LANES <= end; i += LANES)
            store(dst + i, look_up(&table, run->codes + (first + i) / 2, is_low, scale));
        bl_fp8_kernels_scalar.decode_packed(run, first + i, dst + i, end - i);
        i = end;
    }
}

#endif
