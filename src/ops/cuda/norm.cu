/* SPDX-License-Identifier: Apache-2.0 */
/* RMSNorm on CUDA, of tokens and of heads. A block takes a row. It reads it once: groups stay in
 * registers while the row's sum is made; only what is past ROW_THREADS * KEPT groups (16,384
 * channels) is read again. Sums: products and eight neighbors' sum in fp32, all above in double, in
 * an order that depends on H alone. */
#include "fp8/cuda/vector.cuh"
#include "ops/element_internal.h"
#include "ops/cuda/ops_cuda.h"

enum { ROW_THREADS = 512, KEPT = 4 };

/* Thread 0 knows `value`; all get it. */
__device__ static inline float from_thread_0(float value)
{
    __shared__ float shared;
    if (threadIdx.x == 0) shared = value;
    __syncthreads();
    return shared;
}

__device__ static inline double squares(uint4 raw)
{
    float x[BL_GROUP], sum = 0.0f;
    bl_unpack(raw, x);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) sum += x[i] * x[i];
    return (double)sum;
}

__device__ static inline void normalize_group(uint4 raw, float rstd, const float *w,
                                              int64_t n_valid, bool aligned, bl_bf16 *y)
{
    float x[BL_GROUP], weight[BL_GROUP];
    bl_unpack(raw, x);
    bl_load(w, n_valid, aligned, weight);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) x[i] = bl_rmsnorm_element(x[i], rstd, weight[i]);
    bl_store(y, n_valid, aligned, x);
}

__global__ void __launch_bounds__(ROW_THREADS, 2)
    rmsnorm_forward_kernel(int64_t H, int64_t n_heads, int64_t row_stride, double eps, bool aligned,
                           const bl_bf16 *x, const float *w, bl_bf16 *y, float *rstd_out)
{
    __shared__ double partial[ROW_THREADS / BL_WARP];
    int64_t first = (int64_t)threadIdx.x * BL_GROUP, stride = (int64_t)blockDim.x * BL_GROUP;
    int64_t at = bl_norm_row(blockIdx.x, H, n_heads, row_stride);
    x += at;
    y += at;

    uint4 kept[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        kept[k] = col < H ? bl_load_raw(x + col, H - col, aligned) : make_uint4(0, 0, 0, 0);
    }
    double sum = 0.0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) sum += squares(kept[k]);
    for (int64_t col = first + KEPT * stride; col < H; col += stride)
        sum += squares(bl_load_raw(x + col, H - col, aligned));

    sum = bl_block_sum(sum, partial);
    float rstd = 0.0f;
    if (threadIdx.x == 0) {
        rstd = (float)(1.0 / sqrt(sum / (double)H + eps));
        if (rstd_out) rstd_out[blockIdx.x] = rstd;
    }
    rstd = from_thread_0(rstd);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        if (col < H) normalize_group(kept[k], rstd, w + col, H - col, aligned, y + col);
    }
    for (int64_t col = first + KEPT * stride; col < H; col += stride)
        normalize_group(bl_load_raw(x + col, H - col, aligned), rstd, w + col, H - col, aligned,
                        y + col);
}

__device__ static inline double triple_products(uint4 raw_x, uint4 raw_dy, const float *w,
                                                int64_t n_valid, bool aligned)
{
    float x[BL_GROUP], dy[BL_GROUP], weight[BL_GROUP], sum = 0.0f;
    bl_unpack(raw_x, x);
    bl_unpack(raw_dy, dy);
    bl_load(w, n_valid, aligned, weight);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) sum += dy[i] * weight[i] * x[i];
    return (double)sum;
}

typedef struct gradient_row {
    float rstd, along;
    bool accumulate, aligned;
} gradient_row;

__device__ static inline void gradient_group(gradient_row row, uint4 raw_x, uint4 raw_dy,
                                             const float *w, int64_t n_valid, bl_bf16 *dx)
{
    float x[BL_GROUP], dy[BL_GROUP], weight[BL_GROUP];
    bl_unpack(raw_x, x);
    bl_unpack(raw_dy, dy);
    bl_load(w, n_valid, row.aligned, weight);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
        x[i] = bl_rmsnorm_gradient_element(x[i], row.rstd, weight[i], dy[i], row.along);
    if (row.accumulate) {
        float before[BL_GROUP];
        bl_load(dx, n_valid, row.aligned, before);
#pragma unroll
        for (int i = 0; i < BL_GROUP; i++) x[i] = before[i] + x[i];
    }
    bl_store(dx, n_valid, row.aligned, x);
}

/* dx may be dy: a thread writes only where it has read, and has the row's sum by then. */
__global__ void __launch_bounds__(ROW_THREADS, 2)
    rmsnorm_backward_kernel(int64_t H, int64_t n_heads, int64_t row_stride, bool accumulate,
                            bool aligned, const bl_bf16 *x, const float *w, const float *rstd,
                            const bl_bf16 *dy, bl_bf16 *dx)
{
    __shared__ double partial[ROW_THREADS / BL_WARP];
    int64_t first = (int64_t)threadIdx.x * BL_GROUP, stride = (int64_t)blockDim.x * BL_GROUP;
    int64_t at = bl_norm_row(blockIdx.x, H, n_heads, row_stride);
    x += at;
    dy += at;
    dx += at;

    uint4 kept_x[KEPT], kept_dy[KEPT];
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        kept_x[k] = col < H ? bl_load_raw(x + col, H - col, aligned) : make_uint4(0, 0, 0, 0);
        kept_dy[k] = col < H ? bl_load_raw(dy + col, H - col, aligned) : make_uint4(0, 0, 0, 0);
    }
    double sum = 0.0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        if (col < H) sum += triple_products(kept_x[k], kept_dy[k], w + col, H - col, aligned);
    }
    for (int64_t col = first + KEPT * stride; col < H; col += stride)
        sum += triple_products(bl_load_raw(x + col, H - col, aligned),
                               bl_load_raw(dy + col, H - col, aligned), w + col, H - col, aligned);

    sum = bl_block_sum(sum, partial);
    gradient_row row = {rstd[blockIdx.x], 0.0f, accumulate, aligned};
    if (threadIdx.x == 0)
        row.along = (float)((double)row.rstd * (double)row.rstd * sum / (double)H);
    row.along = from_thread_0(row.along);
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        if (col < H) gradient_group(row, kept_x[k], kept_dy[k], w + col, H - col, dx + col);
    }
    for (int64_t col = first + KEPT * stride; col < H; col += stride)
        gradient_group(row, bl_load_raw(x + col, H - col, aligned),
                       bl_load_raw(dy + col, H - col, aligned), w + col, H - col, dx + col);
}

/* A block per row; vectors of 16 bytes where all rows allow them. */
static bl_status plan_rows(const char *what, int64_t T, int64_t H, int64_t n_heads,
                           int64_t row_stride, bl_grid *grid, bool *aligned)
{
    if (T < 0 || H < 1 || n_heads < 0 || (n_heads > 0 && row_stride < n_heads * H))
        return BL_FAIL(BL_EINTERNAL, "%s: %lld rows of %lld channels, %lld heads", what,
                       (long long)T, (long long)H, (long long)n_heads);
    *grid = {n_heads > 0 ? T * n_heads : T, bl_row_threads(H, ROW_THREADS), 1};
    *aligned = H % BL_GROUP == 0 && (n_heads == 0 || row_stride % BL_GROUP == 0);
    return BL_OK;
}

extern "C" bl_status ops_cuda_rmsnorm_forward(bl_stream *stream, const bl_rmsnorm_forward_args *a)
{
    bl_grid grid = {};
    bool aligned = false;
    BL_TRY(plan_rows("rmsnorm_forward", a->T, a->H, a->n_heads, a->row_stride, &grid, &aligned));
    aligned =
        aligned && bl_is_aligned(a->x.data) && bl_is_aligned(a->w) && bl_is_aligned(a->y.data);
    return bl_launch("rmsnorm_forward", stream, grid, rmsnorm_forward_kernel, a->H, a->n_heads,
                     a->row_stride, a->eps, aligned, (const bl_bf16 *)a->x.data, a->w,
                     (bl_bf16 *)a->y.data, a->rstd);
}

extern "C" bl_status ops_cuda_rmsnorm_backward(bl_stream *stream, const bl_rmsnorm_backward_args *a)
{
    bl_grid grid = {};
    bool aligned = false;
    BL_TRY(plan_rows("rmsnorm_backward", a->T, a->H, a->n_heads, a->row_stride, &grid, &aligned));
    aligned = aligned && bl_is_aligned(a->x.data) && bl_is_aligned(a->w) &&
              bl_is_aligned(a->dy.data) && bl_is_aligned(a->dx.data);
    return bl_launch("rmsnorm_backward", stream, grid, rmsnorm_backward_kernel, a->H, a->n_heads,
                     a->row_stride, a->accumulate != 0, aligned, (const bl_bf16 *)a->x.data, a->w,
                     a->rstd, (const bl_bf16 *)a->dy.data, (bl_bf16 *)a->dx.data);
}
