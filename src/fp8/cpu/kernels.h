/* SPDX-License-Identifier: Apache-2.0 */
/* kernels.h -- the inner loops over one run of elements, once for every kind of processor.
 *
 * All variants give the same bits; the scalar one is the definition. Tests take each by name,
 * everything else takes bl_fp8_kernels_best. Runs may have any alignment and any length, zero
 * included. */
#ifndef BALLAST_FP8_CPU_KERNELS_H
#define BALLAST_FP8_CPU_KERNELS_H

#include <stdint.h>

#include "base/dtype.h"
#include "fp8/format.h"

/* Codes of 4 bits, from the first one of a group on, and the groups' scales. */
typedef struct bl_packed_run {
    const uint8_t *codes;
    bl_code_layout layout;
    const float *values, *scales; /* values[16] */
    int64_t group;                /* a multiple of 16 */
} bl_packed_run;

typedef struct bl_fp8_kernels {
    const char *name;
    /* max |src[i]| as fp32; a result above FLT_MAX, or NaN: src is not finite. dtype: F32, BF16,
     * F16 */
    float (*absmax)(bl_dtype dtype, const void *src, int64_t n);
    /* codes[i] = E4M3(src[i] / scale) */
    void (*encode)(bl_dtype dtype, const void *src, float scale, uint8_t *codes, int64_t n);
    /* dst[i] = value(codes[i]) * scale */
    void (*decode)(const uint8_t *codes, float scale, float *dst, int64_t n);
    /* dst[i] = value(codes[i]) as bf16, which holds every value of E4M3 */
    void (*decode_bf16)(const uint8_t *codes, uint16_t *dst, int64_t n);
    /* dst[i] = (float)src[i]; dtype: F32, BF16, F16 */
    void (*widen)(bl_dtype dtype, const void *src, float *dst, int64_t n);
    /* dst[i] = values[code first + i] * scales[(first + i) / group] */
    void (*decode_packed)(const bl_packed_run *run, int64_t first, float *dst, int64_t n);
} bl_fp8_kernels;

typedef enum bl_fp8_variant {
    BL_FP8_SCALAR,
    BL_FP8_AVX2,
    BL_FP8_AVX512,
    BL_FP8_AVX512_VBMI,
    BL_FP8_VARIANT_COUNT
} bl_fp8_variant;

/* NULL: this processor cannot run it. */
const bl_fp8_kernels *bl_fp8_kernels_variant(bl_fp8_variant variant);
/* The fastest that this processor can run; never NULL. Cheap, but not for inner loops. */
const bl_fp8_kernels *bl_fp8_kernels_best(void);

extern const bl_fp8_kernels bl_fp8_kernels_scalar, bl_fp8_kernels_avx2, bl_fp8_kernels_avx512,
    bl_fp8_kernels_avx512_vbmi;

#endif
