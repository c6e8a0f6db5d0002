/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW has the CPU's bits: the same operations in double, none contracted. Sums have their own order. */
#include <cooperative_groups.h>

#include "fp8/vector.cuh"
#include "ops/element.h"
#include "ops/ops_cuda.h"

namespace cg = cooperative_groups;

/* ---- AdamW ---- */

__global__ void __launch_bounds__(BL_BLOCK_THREADS, 4) /* left alone, ptxas spills for occupancy's sake */
    adamw_kernel(int64_t n, bool aligned, bl_adamw_factors factors, const double *grad_scale,
                 const float *grad, float *w, float *m, float *v)
{
    int64_t i = ((int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x) * 4;
    if (i >= n) return;
    double scale = grad_scale ? *grad_scale : 1.0;
    if (!aligned || i + 4 > n) {
        for (int64_t k = i; k < min(i + 4, n); k++)
            bl_adamw_element(&factors, scale, grad[k], w + k, m + k, v + k);
        return;
    }
    float4 group[4] = {*(const float4 *)(grad + i), *(const float4 *)(w + i), *(const float4 *)(m + i),
                       *(const float4 *)(v + i)};
    bl_adamw_element(&factors, scale, group[0].x, &group[1].x, &group[2].x, &group[3].x);
    bl_adamw_element(&factors, scale, group[0].y, &group[1].y, &group[2].y, &group[3].y);
    bl_adamw_element(&factors, scale, group[0].z, &group[1].z, &group[2].z, &group[3].z);
    bl_adamw_element(&factors, scale, group[0].w, &group[1].w, &group[2].w, &group[3].w);
    __stwb((float4 *)(w + i), group[1]);
    __stwb((float4 *)(m + i), group[2]);
    __stwb((float4 *)(v + i), group[3]);
}

extern "C" bl_status ops_cuda_adamw(bl_stream *stream, const void *args)
{
    const bl_adamw_args *a = (const bl_adamw_args *)args;
    bl_adamw_factors factors =
        bl_adamw_factors_of(a->step, a->lr, a->beta1, a->beta2, a->eps, a->weight_decay);
    bool aligned =
        bl_is_aligned(a->grad) && bl_is_aligned(a->w) && bl_is_aligned(a->m) && bl_is_aligned(a->v);
    return bl_launch("adamw", stream, {bl_blocks_for(a->n, 4 * BL_BLOCK_THREADS), BL_BLOCK_THREADS, 1},
                     adamw_kernel, a->n, aligned, factors, a->grad_scale, a->grad, a->w, a->m, a->v);
}

/* ---- the sum of squares ---- */

/* There is no scratch for partial sums of a whole grid, and need be none: n is a rank's share of the LoRA
 * gradients. The elements are cut into SLICES; on Hopper a cluster of as many blocks takes one each and adds
 * up through distributed shared memory, elsewhere one block takes them all, one after the other. The order is
 * the same. */
enum { SLICES = 8, SUM_THREADS = 1024 };

__device__ static inline double square_sum_of_slice(const float *x, int64_t begin, int64_t end, bool aligned)
{
    double sum = 0.0;
#pragma unroll 2
    for (int64_t i = begin + (int64_t)threadIdx.x * BL_GROUP; i < end; i += (int64_t)SUM_THREADS * BL_GROUP) {
        float values[BL_GROUP];
        bl_load(x + i, end - i, aligned, values);
#pragma unroll
        for (int k = 0; k < BL_GROUP; k++) sum += (double)values[k] * (double)values[k];
    }
    return sum;
}

/* The slices' sums in order, added to *sum, by one thread. */
__global__ void __launch_bounds__(SUM_THREADS)
    sum_squares_kernel(const float *x, int64_t n, int64_t per_slice, bool aligned, double *sum)
{
    __shared__ double partial[SUM_THREADS / BL_WARP], of_slice[SLICES];
    for (int slice = (int)blockIdx.x; slice < SLICES; slice += (int)gridDim.x) {
        int64_t begin = slice * per_slice, end = min(begin + per_slice, n);
        double value = bl_block_sum(square_sum_of_slice(x, begin, end, aligned), partial);
        if (threadIdx.x == 0) of_slice[slice] = value;
        __syncthreads();
    }
#if __CUDA_ARCH__ >= 900
    cg::cluster_group cluster = cg::this_cluster();
    cluster.sync();
    if (blockIdx.x == 0 && threadIdx.x == 0) {
        double total = 0.0;
        for (int slice = 0; slice < SLICES; slice++)
            total += cluster.map_shared_rank(of_slice, slice % gridDim.x)[slice];
        *sum += total;
    }
    cluster.sync(); /* nobody leaves while its shared memory may be read */
#else
    if (threadIdx.x == 0) {
        double total = 0.0;
        for (int slice = 0; slice < SLICES; slice++) total += of_slice[slice];
        *sum += total;
    }
#endif
}

extern "C" bl_status ops_cuda_sum_squares(bl_stream *stream, const void *args)
{
    const bl_sum_squares_args *a = (const bl_sum_squares_args *)args;
    if (a->n < 0) return BL_FAIL(BL_EINTERNAL, "sum_squares: %lld elements", (long long)a->n);
    if (a->n == 0) return BL_OK;
    int64_t per_slice = bl_blocks_for(bl_blocks_for(a->n, SLICES), BL_GROUP) * BL_GROUP;
    unsigned n_blocks = bl_cuda_device_properties(bl_stream_device(stream))->capability >= 90 ? SLICES : 1;
    return bl_launch("sum_squares", stream, {n_blocks, SUM_THREADS, n_blocks}, sum_squares_kernel, a->x, a->n,
                     per_slice, bl_is_aligned(a->x), a->sum);
}

/* ---- clipping ---- */

__global__ void clip_scale_kernel(double max_norm, const double *sum_squares, double *norm,
                                  double *grad_scale)
{
    *norm = sqrt(*sum_squares);
    *grad_scale = bl_clip_factor(max_norm, *norm);
}

extern "C" bl_status ops_cuda_clip_scale(bl_stream *stream, const void *args)
{
    const bl_clip_scale_args *a = (const bl_clip_scale_args *)args;
    return bl_launch("clip_scale", stream, {1, 1, 1}, clip_scale_kernel, a->max_norm, a->sum_squares, a->norm,
                     a->grad_scale);
}
