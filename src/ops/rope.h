/* SPDX-License-Identifier: Apache-2.0 */
/* rope.h -- rotary position embedding. Su et al. 2021, arXiv:2104.09864, eq. 34, in Hugging Face's
 * rotate-half layout: pair i of a head is (x_i, x_{i + d_rotated/2}). */
#ifndef BALLAST_OPS_ROPE_H
#define BALLAST_OPS_ROPE_H

#include "ops/ops.h"

#ifdef __cplusplus
extern "C" {
#endif

/* In place on n_heads consecutive heads of d channels at x + t * row_stride, for each token t, on
 * the pairs of the first d_rotated channels of a head (0: of all d; the others stay):
 *   (a, b) -> (a cos - b sin, b cos + a sin),  angle = (p_t + position_offset) inv_freq[i],
 * p_t the token's index in its document. direction -1 rotates back: the backward of the forward.
 * cos_table, sin_table: (n_positions, d_rotated/2) fp32, made from double angles by
 * bl_rope_fill_tables; every position used is < n_positions. With long_after > 0 a document of more
 * tokens (with position_offset those before) takes the tables long_offset floats behind these. */
typedef struct bl_rope_args {
    int64_t T, n_heads, d, row_stride, n_documents, position_offset;
    int direction; /* +1 or -1 */
    const int32_t *cu_seqlens;
    const float *cos_table, *sin_table;
    bl_tensor x;
    int64_t long_after, long_offset;
    int64_t d_rotated; /* even, at most d */
} bl_rope_args;
BL_API bl_status bl_rope(bl_stream *stream, const bl_rope_args *args);

/* Host function, on host memory: scale times cos and sin of p * inv_freq[i] for n_positions
 * positions p from first_position on, i < half; angles, functions and products in double. */
BL_API void bl_rope_fill_tables(int64_t first_position, int64_t n_positions, int64_t half,
                                const double *inv_freq, double scale, float *cos_table,
                                float *sin_table);

#ifdef __cplusplus
}
#endif

#endif
