/* SPDX-License-Identifier: Apache-2.0 */
/* fragments.h -- the warp instructions of ops/cuda/mma.cuh, each by one warp, between arrays of
 * registers: [lane][register]. */
#ifndef BALLAST_TESTS_GPU_FRAGMENTS_H
#define BALLAST_TESTS_GPU_FRAGMENTS_H

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

enum { FRAGMENT_LANES = 32, FRAGMENT_TILE = 4 * 8 * 8 };

/* Device memory. c[lane][4] += the product of a[lane][4] and b[lane][2]. */
bl_status fragments_multiply(bl_stream *stream, const uint32_t *a, const uint32_t *b, float *c);

/* Device memory. out[lane][4]: what ldmatrix, or its transposed form, gives of a tile whose row for
 * each lane begins at element at[lane], a multiple of 8. */
bl_status fragments_load(bl_stream *stream, bool is_transposed, const uint16_t *tile,
                         const int32_t *at, uint32_t *out);

#ifdef __cplusplus
}
#endif

#endif
