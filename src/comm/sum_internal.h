/* SPDX-License-Identifier: Apache-2.0 */
/* sum_internal.h -- the addition under every reduction. One translation unit for all backends, so
 * that their bits agree. */
#ifndef BALLAST_COMM_SUM_INTERNAL_H
#define BALLAST_COMM_SUM_INTERNAL_H

#include "comm/backend.h"

enum {
    COMM_SUM_BLOCK = 4096
}; /* elements summed over all ranks while the result stays in the first-level cache */

size_t comm_sum_element_bytes(bl_comm_element element);

/* sum[i] += values[i] for n elements; integers wrap. The two must not overlap. */
void comm_sum_add(bl_comm_element element, void *sum, const void *values, int64_t n);

/* A sum between processes goes in pieces, through a scratch with room for a part of each rank: part
 * p of a piece goes from every rank to rank p, which sums it. */
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
