/* SPDX-License-Identifier: Apache-2.0 */
/* sum_internal.h -- the addition under every reduction. One translation unit for all backends, so that their bits
 * agree. */
#ifndef BALLAST_COMM_SUM_INTERNAL_H
#define BALLAST_COMM_SUM_INTERNAL_H

#include "comm/comm_internal.h"

enum {
    BL_SUM_BLOCK = 4096
}; /* elements summed over all ranks while the result stays in the first-level cache */

size_t bl_sum_element_bytes(bl_comm_element element);

/* sum[i] += values[i] for n elements; integers wrap. The two must not overlap. */
void bl_sum_add(bl_comm_element element, void *sum, const void *values, int64_t n);

#endif
