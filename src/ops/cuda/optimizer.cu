/* SPDX-License-Identifier: Apache-2.0 */
/* optimizer.cu -- AdamW, sums of squares and clipping on CUDA. AdamW has the CPU's bits: the same
 * operations, none contracted. Sums have their own order. */
#include <limits.h>

#include "fp8/cuda/vector.cuh"
#include "ops/element_internal.h"
#include "ops/cuda/ops_cuda.h"

/* ---- AdamW ---- */

/* Four neighbors of a moment, moved at once. */
template <typename T> struct alignas(4 * sizeof(T)) adamw_four {
    T value[4];
};

/* element: its number in the tensor, for the rounding. */
__device__ inline void adamw_element(const bl_adamw_factors *factors, float scale, bl_philox_key,
                                     int64_t, float grad, float *w, float *m, float *v)
{
    bl_adamw_element(factors, scale, grad, w, m, v);
}
__device__ inline void adamw_element(const bl_adamw_factors *factors, float scale,
                                     bl_philox_key key, int64_t element, float grad, float *w,
                                     uint16_t *m, uint16_t *v)
{
    key = bl_rounding_key_of(key, (uint32_t)(element >> 32));
    bl_adamw_element_bf16(factors, scale, grad, bl_rounding_word(key, (uint32_t)element), w, m, v);
}

/* What all elements of a call have in common. */
struct adamw_call {
    int64_t n;
    bool aligned;
    bl_adamw_factors factors;
    const double *grad_scale;
    bl_philox_key key; /* of bf16 moments' rounding */
    int64_t first;
};

/* Four elements of a thread. */
template <typename T>
__device__ inline void update_four(const adamw_call &c, const float *grad, float *w, T *m, T *v)
{
    int64_t i = ((int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x) * 4;
    if (i >= c.n) return;
    float scale = c.grad_scale ? (float)*c.grad_scale : 1.0f;
    if (!c.aligned || i + 4 > c.n) {
        for (int64_t k = i; k < min(i + 4, c.n); k++)
            adamw_element(&c.factors, scale, c.key, c.first + k, grad[k], w + k, m + k, v + k);
        return;
    }
    float4 g = *(const float4 *)(grad + i), weights = *(const float4 *)(w + i);
    adamw_four<T> moment1 = *(const adamw_four<T> *)(m + i),
                  moment2 = *(const adamw_four<T> *)(v + i);
    adamw_element(&c.factors, scale, c.key, c.first + i, g.x, &weights.x, &moment1.value[0],
                  &moment2.value[0]);
    adamw_element(&c.factors, scale, c.key, c.first + i + 1, g.y, &weights.y, &moment1.value[1],
                  &moment2.value[1]);
    adamw_element(&c.factors, scale, c.key, c.first + i + 2, g.z, &weights.z, &moment1.value[2],
                  &moment2.value[2]);
    adamw_element(&c.factors, scale, c.key, c.first + i + 3, g.w, &weights.w, &moment1.value[3],
                  &moment2.value[3]);
    __stwb((float4 *)(w + i), weights);
    *(adamw_four<T> *)(m + i) = moment1;
    *(adamw_four<T> *)(v + i) = moment2;
}

/* Left alone, ptxas spills for occupancy's sake. */
__global__ void __launch_bounds__(BL_BLOCK_THREADS, 4)
    adamw_kernel(adamw_call c, const float *grad, float *w, float *m, float *v)
{
    update_four(c, grad, w, m, v);
}
__global__ void __launch_bounds__(BL_BLOCK_THREADS, 4)
    adamw_bf16_kernel(adamw_call c, const float *grad, float *w, uint16_t *m, uint16_t *v)
{
    update_four(c, grad, w, m, v);
}

extern "C" bl_status ops_cuda_adamw(bl_stream *stream, const bl_adamw_args *a)
{
    adamw_call call = {
        a->n,
        bl_is_aligned(a->grad) && bl_is_aligned(a->w) && bl_is_aligned(a->m.data) &&
            bl_is_aligned(a->v.data),
        bl_adamw_factors_of(a->step, a->lr, a->beta1, a->beta2, a->eps, a->weight_decay),
        a->grad_scale,
        bl_rounding_key(a->seed, (uint64_t)a->step, (uint32_t)a->tensor),
        a->first};
    bl_grid grid = {bl_blocks_for(a->n, 4 * BL_BLOCK_THREADS), BL_BLOCK_THREADS, 1};

    if (a->m.dtype == BL_BF16)
        return bl_launch("adamw", stream, grid, adamw_bf16_kernel, call, a->grad, a->w,
                         (uint16_t *)a->m.data, (uint16_t *)a->v.data);
    return bl_launch("adamw", stream, grid, adamw_kernel, call, a->grad, a->w, (float *)a->m.data,
                     (float *)a->v.data);
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

extern "C" bl_status ops_cuda_add_sums(bl_stream *stream, const bl_add_sums_args *a)
{
    if (a->n < 0 || a->n > INT_MAX)
        return BL_FAIL(BL_EINTERNAL, "add_sums: %lld sums", (long long)a->n);
    if (a->n == 0) return BL_OK;
    return bl_launch("add_sums", stream, {1, BL_BLOCK_THREADS, 1}, add_slices_kernel, a->sums,
                     (int)a->n, a->sum);
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
