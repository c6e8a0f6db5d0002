/* SPDX-License-Identifier: Apache-2.0 */
/* fp8_cuda.h -- the formats on a CUDA stream: decoding weights, quantizing activations, transposing
 * codes. For a build with CUDA only.
 *
 * All pointers are device memory of the stream's device, 16-byte aligned unless said otherwise;
 * matrices are row-major and dense unless a leading dimension is named. A call queues kernels,
 * allocates nothing and returns bl_cuda_launched(...) or BL_EINTERNAL for sizes that make no sense.
 * Sizes of zero queue nothing. Codes are E4M3; scale = absmax / 448 and code = E4M3(x / scale) as
 * in fp8.h, scale 1 where that quotient is zero, and values past the range saturate. A NaN or an
 * infinity among activations makes its scale, and so everything multiplied with it, NaN: losses
 * show it. */
#ifndef BALLAST_FP8_CUDA_FP8_CUDA_H
#define BALLAST_FP8_CUDA_FP8_CUDA_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#ifdef __cplusplus
extern "C" {
#endif

#include "device/device.h"
#include "fp8/fp8.h"

/* dst (rows, cols) bf16 = the values of a matrix of any format, each rounded once from the fp32
 * value. codes and scales as in fp8.h. Packed formats: BL_EUSAGE. */
bl_status fp8_cuda_dequantize(bl_stream *stream, bl_format format, const void *codes,
                              const void *scales, int64_t rows, int64_t cols, void *dst);

/* One scale a row: codes (T, cols), scales (T) of x'_tc = x_tc * column_factor_c, the product in
 * fp32; column_factor NULL for ones. x bf16, row t at x + t * ld. cols is a multiple of 16, ld of
 * 8. */
bl_status fp8_cuda_quantize_rows(bl_stream *stream, const void *x, int64_t ld,
                                 const float *column_factor, int64_t T, int64_t cols,
                                 uint8_t *codes, float *scales);

/* One scale for 128 neighboring columns of a row: codes (T, cols), scales (ceil(cols/128), T): the
 * scales of one group of columns are contiguous, as cuBLASLt's VEC128 requires. x bf16, row t at x
 * + t * ld. cols is a multiple of 16, ld of 8. */
bl_status fp8_cuda_quantize_groups(bl_stream *stream, const void *x, int64_t ld, int64_t T,
                                   int64_t cols, uint8_t *codes, float *scales);

/* dst (cols, rows) = src (rows, cols) transposed, codes of one byte. rows and cols are multiples of
 * 16. */
bl_status fp8_cuda_transpose(bl_stream *stream, const uint8_t *src, int64_t rows, int64_t cols,
                             uint8_t *dst);

/* dst[c * dst_ld + r] = src[r * cols + c] for r < rows, c < cols: a grid of block scales
 * transposed; any alignment. */
bl_status fp8_cuda_transpose_scales(bl_stream *stream, const float *src, int64_t rows, int64_t cols,
                                    float *dst, int64_t dst_ld);

/* dst[i] = value for i < n; any alignment. */
bl_status fp8_cuda_fill(bl_stream *stream, float *dst, int64_t n, float value);

#ifdef __cplusplus
}
#endif

#endif
