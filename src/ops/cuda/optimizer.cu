/* SPDX-License-Identifier: Apache-2.0 */
/* AdamW has the CPU's bits: the same operations in double, none contracted. Sums have their own
 * order. */
#include "fp8/cuda/vector.cuh"
#include "ops/element_internal.h"
#include "ops/cuda/ops_cuda.h"

/* ---- AdamW ---- */

__global__ void __launch_bounds__(BL_BLOCK_THREADS,
                                  4) /* left alone, ptxas spills for occupancy's sake */
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
    float4 group[4] = {*(const float4 *)(grad + i), *(const float4 *)(w + i),
                       *(const float4 *)(m + i), *(const float4 *)(v + i)};
    bl_adamw_element(&factors, scale, group[0].x, &group[1].x, &group[2].x, &group[3].x);
    bl_adamw_element(&factors, scale, group[0].y, &group[1].y, &group[2].y, &group[3].y);
    bl_adamw_element(&factors, scale, group[0].z, &group[1].z, &group[2].z, &group[3].z);
    bl_adamw_element(&factors, scale, group[0].w, &group[1].w, &group[2].w, &group[3].w);
    __stwb((float4 *)(w + i), group[1]);
    __stwb((float4 *)(m + i), group[2]);
    __stwb((float4 *)(v + i), group[3]);
}

extern "C" bl_status ops_cuda_adamw(bl_stream *stream, const bl_adamw_args *a)
{
    bl_adamw_factors factors =
        bl_adamw_factors_of(a->step, a->lr, a->beta1, a->beta2, a->eps, a->weight_decay);
    bool aligned =
        bl_is_aligned(a->grad) && bl_is_aligned(a->w) && bl_is_aligned(a->m) && bl_is_aligned(a->v);
    return bl_launch("adamw", stream,
                     {bl_blocks_for(a->n, 4 * BL_BLOCK_THREADS), BL_BLOCK_THREADS, 1}, adamw_kernel,
                     a->n, aligned, factors, a->grad_scale, a->grad, a->w, a->m, a->v);
}

/* ---- the sum of squares ---- */

/* The elements are cut into at most SLICES of whole block strides; a block sums one, and one block
 * adds the slices' sums in order. How n is cut depends on n alone, and so do the bits. */
enum {
    SLICES = BL_CUDA_STREAM_SCRATCH_BYTES / sizeof(double),
    UNROLL = 2, /* groups of a thread under way: 64 bytes each of 2048 threads */
    STRIDE = BL_BLOCK_ELEMENTS * UNROLL
};

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    square_slices_kernel(const float *x, int64_t n, int64_t per_slice, bool aligned,
                         double *of_slice)
{
    __shared__ double partial[BL_BLOCK_THREADS / BL_WARP];
    int64_t begin = blockIdx.x * per_slice, end = min(begin + per_slice, n);
    double sum = 0.0;
    for (int64_t i = begin + (int64_t)threadIdx.x * BL_GROUP; i < end; i += STRIDE) {
        float values[UNROLL][BL_GROUP];
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
            bl_load(x + i + u * BL_BLOCK_ELEMENTS, end - i - u * BL_BLOCK_ELEMENTS, aligned,
                    values[u]);
#pragma unroll
        for (int u = 0; u < UNROLL; u++)
#pragma unroll
            for (int k = 0; k < BL_GROUP; k++) sum += (double)values[u][k] * (double)values[u][k];
    }
    sum = bl_block_sum(sum, partial);
    if (threadIdx.x == 0) of_slice[blockIdx.x] = sum;
}

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    add_slices_kernel(const double *of_slice, int n_slices, double *sum)
{
    __shared__ double partial[BL_BLOCK_THREADS / BL_WARP];
    double mine = 0.0;
    for (int i = (int)threadIdx.x; i < n_slices; i += BL_BLOCK_THREADS) mine += of_slice[i];
    mine = bl_block_sum(mine, partial);
    if (threadIdx.x == 0) *sum += mine;
}

extern "C" bl_status ops_cuda_sum_squares(bl_stream *stream, const bl_sum_squares_args *a)
{
    if (a->n < 0) return BL_FAIL(BL_EINTERNAL, "sum_squares: %lld elements", (long long)a->n);
    if (a->n == 0) return BL_OK;
    int64_t per_slice = bl_blocks_for(bl_blocks_for(a->n, SLICES), STRIDE) * STRIDE;
    int64_t n_slices = bl_blocks_for(a->n, per_slice);
    double *of_slice = (double *)bl_cuda_stream_scratch(stream);
    BL_TRY(bl_launch("sum_squares", stream, {n_slices, BL_BLOCK_THREADS, 1}, square_slices_kernel,
                     a->x, a->n, per_slice, bl_is_aligned(a->x), of_slice));
    return bl_launch("sum_squares", stream, {1, BL_BLOCK_THREADS, 1}, add_slices_kernel,
                     (const double *)of_slice, (int)n_slices, a->sum);
}

/* ---- clipping ---- */

__global__ void clip_scale_kernel(double max_norm, const double *sum_squares, double *norm,
                                  double *grad_scale)
{
    *norm = sqrt(*sum_squares);
    *grad_scale = bl_clip_factor(max_norm, *norm);
}

extern "C" bl_status ops_cuda_clip_scale(bl_stream *stream, const bl_clip_scale_args *a)
{
    return bl_launch("clip_scale", stream, {1, 1, 1}, clip_scale_kernel, a->max_norm,
                     a->sum_squares, a->norm, a->grad_scale);
}
