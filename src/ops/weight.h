/* SPDX-License-Identifier: Apache-2.0 */
/* weight.h -- a frozen matrix as a GEMM sees it: borrowed pointers to codes and scales, in the
 * format they are stored in. */
#ifndef BALLAST_OPS_WEIGHT_H
#define BALLAST_OPS_WEIGHT_H

#include <stdint.h>

#include "fp8/fp8.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most segments of a fused matrix. */
enum { BL_WEIGHT_SEGMENTS_MAX = 3 };

/* rows x cols of the matrix, row-major and dense, with scales as fp8/fp8.h lays them out; a block
 * grid starts at the segment's row 0. A segment may have no rows. */
typedef struct bl_weight_segment {
    bl_format format;
    const void *codes;
    const void *scales; /* in the format's scale_dtype; NULL for stored formats */
    int64_t rows;
} bl_weight_segment;

/* One matrix of `rows` x `cols`: its segments stacked along the rows (q|k|v, gate|up), of any
 * formats. The rows of the segments add up to `rows`. */
typedef struct bl_weight {
    int64_t rows, cols;
    int n_segments;
    bl_weight_segment segment[BL_WEIGHT_SEGMENTS_MAX];
} bl_weight;

#ifdef __cplusplus
}
#endif

#endif
