/* SPDX-License-Identifier: Apache-2.0 */
/* sum_internal.h -- the addition under every reduction. One translation unit for all backends, so
 * that their bits agree. */
#ifndef BALLAST_COMM_SUM_INTERNAL_H
#define BALLAST_COMM_SUM_INTERNAL_H

#include "comm/backend.h"
#include "comm/blocks_internal.h"

enum {
    COMM_SUM_BLOCK = 4096
}; /* elements summed over all ranks while the result stays in the first-level cache */

size_t comm_sum_element_bytes(bl_comm_element element);

/* to[i] = (S_0 + S_1) + ..., S_b = ((0 + x_r[i]) + x_r+1[i]) + ... over the ranks r of block b, for
 * n elements; integers wrap. x_r begins at values[r] + offset_bytes. `to` must not overlap them. */
void comm_sum_blocks(bl_comm_element element, const comm_blocks *blocks, const void *const *values,
                     size_t offset_bytes, void *to, int64_t n);

/* A sum between processes is made in pieces, with a scratch. Part p of a piece is summed for its
 * owner, rank p (blocks_internal.h). */
typedef struct comm_parts {
    unsigned char *values;
    int64_t first, stride, n_part, end; /* in elements: part p begins at first + p * stride */
    size_t unit_bytes;
} comm_parts;

/* The piece of a REDUCE_SCATTER's or an ALL_REDUCE's task that begins at element *first of recv or
 * of the values, its parts of at most `most_bytes`; *first is then the next one's. False: there is
 * none. */
bool comm_parts_next(const bl_comm_task *task, size_t most_bytes, int64_t *first, comm_parts *out);
int64_t comm_part_length(const comm_parts *parts,
                         int p); /* elements; the last parts may be empty */
size_t comm_part_bytes(const comm_parts *parts, int p);
unsigned char *comm_part_of(const comm_parts *parts, int p);
/* Where rank p's sum belongs: in recv, or in place. */
void *comm_part_target(const bl_comm_task *task, const comm_parts *parts, int p);

#endif
