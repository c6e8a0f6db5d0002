/* SPDX-License-Identifier: Apache-2.0 */
/* base_case.h -- a model in small for the sources of frozen weights, and visits that compare one
 * source with the resident one, bit for bit. */
#ifndef BALLAST_TESTS_BASE_CASE_H
#define BALLAST_TESTS_BASE_CASE_H

#include "ops_test.h"
#include "test_ranks.h"

#include "linear/base.h"

enum { UNITS = 5, HEAD = UNITS - 1, BLOCKS_UNIT = 2 };

/* Widths that differ between units and inside a matrix, rows that no rank count divides, an empty
 * segment, more ranks than rows or groups, segments that end between groups and inside one, and a
 * head larger than a slot. */
void base_case_layout(int n_shards, bl_base_unit units[UNITS], bl_base_layout *out);

/* The value of a byte of a row of codes or scales; and shard `shard` of the walk's current part. */
uint8_t base_case_byte(int64_t unit, int matrix, int segment, bool is_scales, int64_t row,
                       int64_t byte);
void base_case_fill(const bl_base_walk *at, int shard, uint8_t *out);

/* All parts' shards, as the layout places them. The caller frees device memory *out. */
bl_status base_case_shards(const bl_base_layout *layout, bl_device *device, int shard, void **out);

typedef struct base_case {
    int depth, look_ahead; /* look_ahead 0: no prefetch */
    bool pauses;
} base_case;

/* Two training passes, one forward, and some jumping about, without an allocation; then verifies
 * the base. */
bl_status base_case_visit(test_rank *self, const base_case *c, bl_base *base, bl_base *resident,
                          bl_stream *gathers);

#endif
