/* SPDX-License-Identifier: Apache-2.0 */
/* packed.h -- 4-bit formats: one code and one scale at a time, the definition, and the quantization
 * of rows.
 *
 * Two codes share a byte. The value of a weight is values[code] * scale, the fp32 product rounded
 * once, with the table and the group of the format's descriptor:
 *   mxfp4      E2M1 codes, the first in the low bits; a scale of one byte s per 32 weights,
 *              2^(s - 127); 255: NaN. OCP Microscaling Formats (MX) Specification, revision 1.0
 *   int4_g32, int4_g128   code - 8, the first in the low bits; a bf16 scale per 32 or 128
 *   nf4        16 quantiles, the first code in the HIGH bits; an fp32 scale per 64
 *   nvfp4      E2M1, the first in the low bits; an E4M3 scale per 16; the scale of a weight is this
 *              one divided by the row's fp32 divisor, rounded once. Cannot be made here.
 * Groups are within rows. */
#ifndef BALLAST_FP8_PACKED_H
#define BALLAST_FP8_PACKED_H

#include <math.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/pool.h"
#include "base/status.h"
#include "fp8/codec.h"
#include "fp8/format.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Code i of a row. */
static inline unsigned bl_packed_code(const uint8_t *codes, bl_code_layout layout, int64_t i)
{
    bool is_low = (i % 2 == 0) == (layout == BL_CODES_LOW_FIRST);
    return is_low ? codes[i / 2] & 0xfu : codes[i / 2] >> 4;
}

/* n codes, one a byte, to `codes`; n is even. */
static inline void bl_packed_put(bl_code_layout layout, const uint8_t *one, int64_t n,
                                 uint8_t *codes)
{
    int low = layout == BL_CODES_LOW_FIRST ? 0 : 1;

    for (int64_t i = 0; i < n; i += 2)
        codes[i / 2] = (uint8_t)(one[i + low] | one[i + 1 - low] << 4);
}

/* The code of the E2M1 value next to x, ties to the even code; values beyond 6 saturate. Not
 * NaN. */
static inline unsigned bl_e2m1_from_f32(float x)
{
    float m = fabsf(x);
    unsigned code = (m > 0.25f) + (m >= 0.75f) + (m > 1.25f) + (m >= 1.75f) + (m > 2.5f) +
                    (m >= 3.5f) + (m > 5.0f);
    return code | (bl_f32_bits(x) >> 28 & 8u);
}

/* The code of the integer next to x, ties to the even one; clamped to -8 .. 7. Not NaN. */
static inline unsigned bl_int4_from_f32(float x)
{
    const float magic = 0x1.8p23f; /* one ulp is one */
    float clamped = x < -8.0f ? -8.0f : x > 7.0f ? 7.0f : x;
    return (bl_f32_bits(clamped + magic) + 8u) & 0xfu;
}

/* scales[i] = the scale of group `group` + i of a row, whose scales begin at `row_scales`; cols:
 * of the matrix. Packed formats only. */
void bl_packed_scales(bl_format format, const void *row_scales, int64_t cols, int64_t group,
                      int64_t n, float *scales);

/* Whether rows of `cols` weights can be in the format: whole groups of packed ones. */
bool bl_packed_fits(bl_format format, int64_t cols);

/* Rows [row_begin, row_end) of a projection to codes and scales, both from row_begin on, as
 * bl_format_measure counts them. src: dtype F32, BF16 or F16, rows from row_begin on.
 *
 * A group of zeros has scale 1. Other scales, from its absmax m > 0:
 *   mxfp4   2^(floor(log2 m) - 2); least_squares: or twice or half of it
 *   int4    bf16(m / 7.5);         least_squares: or bf16(m / (7 + i/4)), i = 0 .. 15
 *   nf4     m; the code is that of the value next to x * (1/m), the first of two; x / m where 1/m
 *           is infinite. Dettmers et al. 2023, arXiv:2305.14314: its quantiles assume this scale,
 *           and least_squares is ignored
 * With least_squares the scale whose squared error, summed over the group, is least; the first one
 * among equals, the rule's own before all. A scale that its dtype cannot hold, or that makes a
 * value infinite, is the next one that does not.
 * The same bits for any number of threads and on every processor.
 * Errors: BL_EINPUT names the first row and column that is NaN or infinite; cols that do not fit;
 * nvfp4 (BL_EUSAGE). */
BL_API bl_status bl_packed_quantize(bl_pool *pool, bl_format format, bool least_squares,
                                    bl_dtype dtype, const void *src, int64_t row_begin,
                                    int64_t row_end, int64_t cols, uint8_t *codes, void *scales);

/* bl_packed_quantize of n weights of a row, whole groups. False: one is not finite. */
bool bl_packed_quantize_run(bl_format format, bool least_squares, const float *src, int64_t n,
                            uint8_t *codes, void *scales);

/* The codes next to n weights of a group with this scale, one a byte. n: at most a group. */
void bl_packed_encode(bl_format format, float scale, const float *src, int n, uint8_t *one);

#ifdef __cplusplus
}
#endif

#endif
