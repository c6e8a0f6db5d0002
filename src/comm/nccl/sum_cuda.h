/* SPDX-License-Identifier: Apache-2.0 */
/* sum_cuda.h -- the addition under every reduction, for parts in a GPU's memory. Internal to
 * comm/. */
#ifndef BALLAST_COMM_NCCL_SUM_CUDA_H
#define BALLAST_COMM_NCCL_SUM_CUDA_H

#include "comm/backend.h"

#ifdef __cplusplus
extern "C" {
#endif

/* to[i] = ((0 + x_0[i]) + x_1[i]) + ... for n elements, in the element type (integers wrap): the
 * bits of comm/sum_internal.h. x_rank is `own`, the others begin at parts + r * stride_bytes. `to`
 * may be `own`. All device memory, aligned to an element. */
typedef struct comm_sum_args {
    bl_comm_element element;
    int rank, n_ranks;
    const void *own, *parts;
    size_t stride_bytes;
    void *to;
    int64_t n;
} comm_sum_args;

/* Queues it. BL_EINTERNAL: no such element, or CUDA refuses the launch. */
bl_status comm_cuda_sum(bl_stream *stream, const comm_sum_args *args);

#ifdef __cplusplus
}
#endif

#endif
