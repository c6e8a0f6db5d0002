/* SPDX-License-Identifier: Apache-2.0 */
/* fp8.h -- how a frozen weight matrix is stored, and the way there and back.
 *
 * A matrix is row-major, dense, rows x cols. Its value is code * scale, the fp32 product rounded
 * once:
 *   fp8_row    E4M3 codes, one fp32 scale per row:           scales[rows]
 *   fp8_block  E4M3 codes, one fp32 scale a 128 x 128 block: scales[ceil(rows/128)][ceil(cols/128)]
 *   f32, f16, bf16   the value itself, as the checkpoint stores it; no scales
 *   mxfp4, int4_g32, int4_g128, nf4, nvfp4   4-bit codes: packed.h
 * Quantizing to FP8: scale = absmax / 448, code = E4M3(w / scale), both IEEE fp32 divisions (a
 * reciprocal changes codes). Where absmax / 448 is zero (all weights zero, or too small for fp32 to
 * hold the scale) the scale is 1. Zeros at the end of a row or block change nothing, so padding is
 * free. A NaN or an infinity among the weights is BL_EINPUT.
 *
 * All memory is the host's, owned by the caller. Weights and codes may have any alignment; sources
 * are F32, BF16 or F16 (BL_EINPUT for others). Outputs are overwritten and must not overlap inputs.
 * Results are the same bits on every processor and for any number of threads. */
#ifndef BALLAST_FP8_FP8_H
#define BALLAST_FP8_FP8_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/dtype.h"
#include "base/pool.h"
#include "base/status.h"
#include "fp8/codec.h"
#include "fp8/format.h"

#ifdef __cplusplus
extern "C" {
#endif

/* ---- quantizing. `src` and `codes` begin at row `row_begin` of the projection and hold rows
 * [row_begin, row_end). ---- */

/* fp8_row; scales[row_end - row_begin]. Errors name the row of the projection and the column. */
BL_API bl_status bl_fp8_row_quantize(bl_pool *pool, bl_dtype dtype, const void *src,
                                     int64_t row_begin, int64_t row_end, int64_t cols,
                                     uint8_t *codes, float *scales);

/* fp8_block; row_begin is a multiple of 128, row_end is one or the projection's end:
 * scales[ceil((row_end - row_begin)/128)][ceil(cols/128)]. */
BL_API bl_status bl_fp8_block_quantize(bl_pool *pool, bl_dtype dtype, const void *src,
                                       int64_t row_begin, int64_t row_end, int64_t cols,
                                       uint8_t *codes, float *scales);

/* scale = absmax / 448, or 1; absmax finite, >= 0. */
BL_API float bl_fp8_scale(float absmax);

/* ---- and back: any format ---- */

/* dst[(row - row_begin) * ld + col - col_begin] = the value at (row, col), for the tile [row_begin,
 * row_end) x [col_begin, col_end) of the matrix of `cols` columns that begins at `codes` and
 * `scales`. ld >= col_end - col_begin. */
BL_API void bl_fp8_dequantize_tile(bl_format format, const void *codes, const void *scales,
                                   int64_t cols, int64_t row_begin, int64_t row_end,
                                   int64_t col_begin, int64_t col_end, float *dst, int64_t ld);

/* The whole matrix: dst[rows][cols]. */
BL_API void bl_fp8_dequantize(bl_pool *pool, bl_format format, const void *codes,
                              const void *scales, int64_t rows, int64_t cols, float *dst);

/* dst[(row - row_begin) * ld + col - col_begin] = the code at (row, col) of an FP8 matrix of `cols`
 * columns as bf16, without its scale: exact. ld >= col_end - col_begin. */
BL_API void bl_fp8_decode_bf16_tile(const uint8_t *codes, int64_t cols, int64_t row_begin,
                                    int64_t row_end, int64_t col_begin, int64_t col_end,
                                    uint16_t *dst, int64_t ld);

/* dst[cols][rows] = src[rows][cols], codes of one byte. */
BL_API void bl_fp8_transpose(bl_pool *pool, const uint8_t *src, int64_t rows, int64_t cols,
                             uint8_t *dst);

#ifdef __cplusplus
}
#endif

#endif
