/* SPDX-License-Identifier: Apache-2.0 */
/* fp8.h -- how a frozen weight matrix is stored, and the way there and back.
 *
 * A matrix is row-major, dense, rows x cols. Its value is code * scale, the fp32 product rounded
 * once:
 *   fp8_row    E4M3 codes, one fp32 scale a row:             scales[rows]
 *   fp8_block  E4M3 codes, one fp32 scale a 128 x 128 block: scales[ceil(rows/128)][ceil(cols/128)]
 *   f32, f16, bf16   the value itself, as the checkpoint stores it; no scales
 * Quantizing: scale = absmax / 448, code = E4M3(w / scale), both of them IEEE fp32 divisions (a
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

#ifdef __cplusplus
extern "C" {
#endif

/* How a frozen matrix is stored. */
typedef enum bl_format {
    BL_FORMAT_FP8_ROW,
    BL_FORMAT_FP8_BLOCK,
    BL_FORMAT_F32,
    BL_FORMAT_F16,
    BL_FORMAT_BF16,
    BL_FORMAT_COUNT
} bl_format;

/* Rows and columns of a block of fp8_block. */
enum { BL_FP8_BLOCK = 128 };

BL_API const char *bl_format_name(bl_format format);           /* "fp8_row" */
BL_API bool bl_format_parse(const char *name, bl_format *out); /* false: unknown name */
BL_API bool
bl_format_from_dtype(bl_dtype dtype,
                     bl_format *out); /* the stored format of F32, F16, BF16; else false */
/* True: codes and scales; false: the values themselves. */
BL_API bool bl_format_is_fp8(bl_format format);
BL_API size_t bl_format_code_bytes(bl_format format); /* of one weight */
/* Bytes of the codes of a rows x cols matrix, and the number of its scales. False: more than a
 * size_t can count. */
BL_API bool bl_format_sizes(bl_format format, int64_t rows, int64_t cols, size_t *codes_bytes,
                            size_t *n_scales);

/* ---- quantizing. `src` and `codes` begin at row `row_begin` of the projection and hold rows
 * [row_begin, row_end). ---- */

/* fp8_row; scales[row_end - row_begin]. Errors name the row of the projection and the column. */
BL_API bl_status bl_fp8_row_quantize(bl_pool *pool, bl_dtype dtype, const void *src,
                                     int64_t row_begin, int64_t row_end, int64_t cols,
                                     uint8_t *codes, float *scales);

/* fp8_block, whole: rows [0, rows) and scales[ceil(rows/128)][ceil(cols/128)]. */
BL_API bl_status bl_fp8_block_quantize(bl_pool *pool, bl_dtype dtype, const void *src, int64_t rows,
                                       int64_t cols, uint8_t *codes, float *scales);

/* fp8_block in three steps, for a rank that holds some rows only. It computes the absmax over all
 * rows of the blocks it has a part in (up to 127 rows on either side are its neighbors'), computes
 * scales from them, and encodes the rows it owns. The grid's row 0 is the block that contains
 * row_begin, floor(row_begin/128) of the projection; it has ceil(row_end/128) -
 * floor(row_begin/128) rows of ceil(cols/128) blocks. */

/* absmax[i][j] = max(absmax[i][j], max |src| over the part of block (i, j) at hand): rows may come
 *   piece by
 * piece. */
BL_API bl_status bl_fp8_block_absmax(bl_pool *pool, bl_dtype dtype, const void *src,
                                     int64_t row_begin, int64_t row_end, int64_t cols,
                                     float *absmax);
/* scale = absmax / 448, or 1; absmax finite, >= 0. */
BL_API float bl_fp8_scale(float absmax);
BL_API bl_status bl_fp8_block_encode(bl_pool *pool, bl_dtype dtype, const void *src,
                                     int64_t row_begin, int64_t row_end, int64_t cols,
                                     const float *scales, uint8_t *codes);

/* ---- and back: any format ---- */

/* dst[(row - row_begin) * ld + col - col_begin] = the value at (row, col), for the tile [row_begin,
 * row_end) x [col_begin, col_end) of the matrix of `cols` columns that begins at `codes` and
 * `scales`. ld >= col_end - col_begin. */
BL_API void bl_fp8_dequantize_tile(bl_format format, const void *codes, const float *scales,
                                   int64_t cols, int64_t row_begin, int64_t row_end,
                                   int64_t col_begin, int64_t col_end, float *dst, int64_t ld);

/* The whole matrix: dst[rows][cols]. */
BL_API void bl_fp8_dequantize(bl_pool *pool, bl_format format, const void *codes,
                              const float *scales, int64_t rows, int64_t cols, float *dst);

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
