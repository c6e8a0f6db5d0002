/* SPDX-License-Identifier: Apache-2.0 */
/* sum.cu -- adds parts in a GPU's memory, in rank order.
 *
 * A thread takes every (number of threads)-th element: neighbors of a warp read neighbors of
 * memory, of one rank's part after the other. The time is that of reading the parts. Compiled
 * without fused multiply-adds, as all that shares bits with the CPU. */
#include "comm/nccl/sum_cuda.h"
#include "fp8/cuda/vector.cuh"

enum {
    ELEMENTS_A_THREAD = 4
}; /* few enough that a piece of 2 MiB has work for all multiprocessors */

template <typename T>
__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    sum_kernel(const T *own, const unsigned char *parts, size_t stride_bytes, int rank, int n_ranks,
               T *to, int64_t n)
{
    int64_t step = (int64_t)gridDim.x * BL_BLOCK_THREADS;
    for (int64_t i = (int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x; i < n; i += step) {
        T sum = 0; /* 0 + -0 is +0: the zero counts */
        for (int r = 0; r < n_ranks; r++)
            sum += r == rank ? own[i] : ((const T *)(parts + (size_t)r * stride_bytes))[i];
        to[i] = sum;
    }
}

template <typename T> static bl_status sum_as(bl_stream *stream, const comm_sum_args *a)
{
    bl_grid grid = {bl_blocks_for(a->n, BL_BLOCK_THREADS * ELEMENTS_A_THREAD), BL_BLOCK_THREADS, 1};
    return bl_launch("sum of ranks", stream, grid, sum_kernel<T>, (const T *)a->own,
                     (const unsigned char *)a->parts, a->stride_bytes, a->rank, a->n_ranks,
                     (T *)a->to, a->n);
}

extern "C" bl_status comm_cuda_sum(bl_stream *stream, const comm_sum_args *a)
{
    switch (a->element) {
    case BL_COMM_F32:
        return sum_as<float>(stream, a);
    case BL_COMM_F64:
        return sum_as<double>(stream, a);
    case BL_COMM_I64:
        return sum_as<uint64_t>(stream, a); /* unsigned: wraps */
    }
    return BL_FAIL(BL_EINTERNAL, "a sum of elements of kind %d", (int)a->element);
}
