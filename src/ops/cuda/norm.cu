/* SPDX-License-Identifier: Apache-2.0 */
/* RMSNorm on CUDA, of tokens and of heads, and LayerNorm. A block processes a row. It reads it
 * once: groups stay in registers while the row's sums are computed; only groups past ROW_THREADS *
 * KEPT (16,384 channels; KEPT_OF_TWO, 12,288, in LayerNorm's backward) are read again. Sums:
 * products and eight neighbors' sum in fp32, all above in double, in an order that depends on H
 * alone. */
#include "fp8/cuda/quantize.cuh"
#include "ops/element_internal.h"
#include "ops/cuda/ops_cuda.h"

enum { ROW_THREADS = 512, KEPT = 4 };

/* Thread 0 has `value`; all get it. */
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

/* Returns the stored value. */
__device__ static inline uint4 normalize_group(uint4 raw, float rstd, const float *w,
                                               int64_t n_valid, bool aligned, bl_bf16 *y)
{
    float x[BL_GROUP], weight[BL_GROUP];
    bl_unpack(raw, x);
    bl_load(w, n_valid, aligned, weight);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) x[i] = bl_rmsnorm_element(x[i], rstd, weight[i]);
    uint4 normed = bl_pack(x);
    bl_store_raw(y, n_valid, aligned, normed);
    return normed;
}

/* quantizes: y's codes, too, from the groups as they are stored; those past KEPT are read back by
 * the thread that wrote them. */
__device__ static inline void rmsnorm_row(bool quantizes, int64_t H, int64_t n_heads,
                                          int64_t row_stride, double eps, bool aligned,
                                          const bl_bf16 *x, const float *w, bl_bf16 *y,
                                          float *rstd_out, bl_quantized quantized)
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
    uint32_t largest = 0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        if (col >= H) break;
        kept[k] = normalize_group(kept[k], rstd, w + col, H - col, aligned, y + col);
        if (quantizes) largest = bl_raw_absmax(kept[k], largest);
    }
    for (int64_t col = first + KEPT * stride; col < H; col += stride) {
        uint4 raw = bl_load_raw(x + col, H - col, aligned);
        raw = normalize_group(raw, rstd, w + col, H - col, aligned, y + col);
        if (quantizes) largest = bl_raw_absmax(raw, largest);
    }
    if (!quantizes) return;

    float scale = bl_e4m3_scale(bl_f32_from_bits(bl_row_max(largest, false)));
    bl_e4m3_divisor divisor = bl_e4m3_divisor_of(scale);
    uint8_t *codes = quantized.codes + blockIdx.x * H;
    if (threadIdx.x == 0) quantized.scales[blockIdx.x] = scale;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        if (col >= H) break;
        bl_encode_raw(divisor, kept[k], codes + col, H - col, aligned);
    }
    for (int64_t col = first + KEPT * stride; col < H; col += stride)
        bl_encode_raw(divisor, bl_load_raw(y + col, H - col, aligned), codes + col, H - col,
                      aligned);
}

__global__ void __launch_bounds__(ROW_THREADS, 2)
    rmsnorm_forward_kernel(int64_t H, int64_t n_heads, int64_t row_stride, double eps, bool aligned,
                           const bl_bf16 *x, const float *w, bl_bf16 *y, float *rstd_out)
{
    rmsnorm_row(false, H, n_heads, row_stride, eps, aligned, x, w, y, rstd_out, {});
}

__global__ void __launch_bounds__(ROW_THREADS, 2)
    rmsnorm_quantized_kernel(int64_t H, double eps, bool aligned, const bl_bf16 *x, const float *w,
                             bl_bf16 *y, float *rstd_out, bl_quantized quantized)
{
    rmsnorm_row(true, H, 0, 0, eps, aligned, x, w, y, rstd_out, quantized);
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
    aligned = aligned && bl_is_aligned(a->x.data) && bl_is_aligned(a->w) &&
              bl_is_aligned(a->y.data) && bl_is_aligned(a->quantized.codes);
    const bl_bf16 *x = (const bl_bf16 *)a->x.data;
    bl_bf16 *y = (bl_bf16 *)a->y.data;
    if (a->quantized.codes)
        return bl_launch("rmsnorm_forward", stream, grid, rmsnorm_quantized_kernel, a->H, a->eps,
                         aligned, x, a->w, y, a->rstd, a->quantized);
    return bl_launch("rmsnorm_forward", stream, grid, rmsnorm_forward_kernel, a->H, a->n_heads,
                     a->row_stride, a->eps, aligned, x, a->w, y, a->rstd);
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

/* ---- LayerNorm: as RMSNorm, with two sums a pass, one after the other ---- */

__device__ static inline double group_sum(uint4 raw)
{
    float x[BL_GROUP], sum = 0.0f;
    bl_unpack(raw, x);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) sum += x[i];
    return (double)sum;
}

/* Of the channels that exist: the others' are not 0 less the mean. */
__device__ static inline double centered_squares(uint4 raw, float mean, int64_t n_valid)
{
    float x[BL_GROUP], sum = 0.0f;
    bl_unpack(raw, x);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) sum += i < n_valid ? (x[i] - mean) * (x[i] - mean) : 0.0f;
    return (double)sum;
}

/* b: NULL for none. */
__device__ static inline void center_group(uint4 raw, float mean, float rstd, const float *w,
                                           const float *b, int64_t n_valid, bool aligned,
                                           bl_bf16 *y)
{
    float x[BL_GROUP], weight[BL_GROUP], bias[BL_GROUP] = {};
    bl_unpack(raw, x);
    bl_load(w, n_valid, aligned, weight);
    if (b) bl_load(b, n_valid, aligned, bias);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
        x[i] = bl_layernorm_element(x[i], mean, rstd, weight[i], bias[i]);
    bl_store(y, n_valid, aligned, x);
}

__global__ void __launch_bounds__(ROW_THREADS, 2)
    layernorm_forward_kernel(int64_t H, double eps, bool aligned, const bl_bf16 *x, const float *w,
                             const float *b, bl_bf16 *y, float *mean_out, float *rstd_out)
{
    __shared__ double partial[ROW_THREADS / BL_WARP];
    int64_t first = (int64_t)threadIdx.x * BL_GROUP, stride = (int64_t)blockDim.x * BL_GROUP;
    x += blockIdx.x * H;
    y += blockIdx.x * H;

    uint4 kept[KEPT];
    double sum = 0.0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        kept[k] = col < H ? bl_load_raw(x + col, H - col, aligned) : make_uint4(0, 0, 0, 0);
        sum += group_sum(kept[k]);
    }
    for (int64_t col = first + KEPT * stride; col < H; col += stride)
        sum += group_sum(bl_load_raw(x + col, H - col, aligned));
    float mean = from_thread_0((float)(bl_block_sum(sum, partial) / (double)H));

    sum = 0.0;
#pragma unroll
    for (int k = 0; k < KEPT; k++) sum += centered_squares(kept[k], mean, H - first - k * stride);
    for (int64_t col = first + KEPT * stride; col < H; col += stride)
        sum += centered_squares(bl_load_raw(x + col, H - col, aligned), mean, H - col);
    sum = bl_block_sum(sum, partial);
    float rstd = from_thread_0((float)(1.0 / sqrt(sum / (double)H + eps)));
    if (threadIdx.x == 0 && rstd_out) {
        mean_out[blockIdx.x] = mean;
        rstd_out[blockIdx.x] = rstd;
    }
#pragma unroll
    for (int k = 0; k < KEPT; k++) {
        int64_t col = first + k * stride;
        if (col < H)
            center_group(kept[k], mean, rstd, w + col, b ? b + col : NULL, H - col, aligned,
                         y + col);
    }
    for (int64_t col = first + KEPT * stride; col < H; col += stride)
        center_group(bl_load_raw(x + col, H - col, aligned), mean, rstd, w + col,
                     b ? b + col : NULL, H - col, aligned, y + col);
}

typedef struct layer_sums {
    double shift, along; /* sums of dy w and of dy w (x - mean) */
} layer_sums;

__device__ static inline void add_group(layer_sums *sums, uint4 raw_x, uint4 raw_dy, float mean,
                                        const float *w, int64_t n_valid, bool aligned)
{
    float x[BL_GROUP], dy[BL_GROUP], weight[BL_GROUP], shift = 0.0f, along = 0.0f;
    bl_unpack(raw_x, x);
    bl_unpack(raw_dy, dy);
    bl_load(w, n_valid, aligned, weight);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) {
        shift += dy[i] * weight[i]; /* 0 where a channel does not exist */
        along += dy[i] * weight[i] * (x[i] - mean);
    }
    sums->shift += (double)shift;
    sums->along += (double)along;
}

__device__ static inline void layer_gradient_group(bl_layernorm_row row, bool accumulate,
                                                   uint4 raw_x, uint4 raw_dy, const float *w,
                                                   int64_t n_valid, bool aligned, bl_bf16 *dx)
{
    float x[BL_GROUP], dy[BL_GROUP], weight[BL_GROUP], before[BL_GROUP] = {};
    bl_unpack(raw_x, x);
    bl_unpack(raw_dy, dy);
    bl_load(w, n_valid, aligned, weight);
    if (accumulate) bl_load(dx, n_valid, aligned, before);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
        x[i] = before[i] + bl_layernorm_gradient_element(row, x[i], weight[i], dy[i]);
    bl_store(dx, n_valid, aligned, x);
}

/* Groups of x and dy each: with the two sums, a fourth does not fit the registers. */
enum { KEPT_OF_TWO = 3 };

/* dx may be dy, as in RMSNorm. */
__global__ void __launch_bounds__(ROW_THREADS, 2)
    layernorm_backward_kernel(int64_t H, bool accumulate, bool aligned, const bl_bf16 *x,
                              const float *w, const float *mean, const float *rstd,
                              const bl_bf16 *dy, bl_bf16 *dx)
{
    __shared__ double partial[2][ROW_THREADS / BL_WARP];
    int64_t first = (int64_t)threadIdx.x * BL_GROUP, stride = (int64_t)blockDim.x * BL_GROUP;
    bl_layernorm_row row = {mean[blockIdx.x], rstd[blockIdx.x], 0.0f, 0.0f};
    x += blockIdx.x * H;
    dy += blockIdx.x * H;
    dx += blockIdx.x * H;

    uint4 kept_x[KEPT_OF_TWO], kept_dy[KEPT_OF_TWO];
    layer_sums sums = {0.0, 0.0};
#pragma unroll
    for (int k = 0; k < KEPT_OF_TWO; k++) {
        int64_t col = first + k * stride;
        kept_x[k] = col < H ? bl_load_raw(x + col, H - col, aligned) : make_uint4(0, 0, 0, 0);
        kept_dy[k] = col < H ? bl_load_raw(dy + col, H - col, aligned) : make_uint4(0, 0, 0, 0);
    }
#pragma unroll
    for (int k = 0; k < KEPT_OF_TWO; k++) {
        int64_t col = first + k * stride;
        if (col < H) add_group(&sums, kept_x[k], kept_dy[k], row.mean, w + col, H - col, aligned);
    }
    for (int64_t col = first + KEPT_OF_TWO * stride; col < H; col += stride)
        add_group(&sums, bl_load_raw(x + col, H - col, aligned),
                  bl_load_raw(dy + col, H - col, aligned), row.mean, w + col, H - col, aligned);

    double n = (double)H, shift = bl_block_sum(sums.shift, partial[0]) / n,
           along = (double)row.rstd * (double)row.rstd * bl_block_sum(sums.along, partial[1]) / n;
    row.shift = from_thread_0((float)shift);
    __syncthreads(); /* all have it: the place is used again */
    row.along = from_thread_0((float)along);
#pragma unroll
    for (int k = 0; k < KEPT_OF_TWO; k++) {
        int64_t col = first + k * stride;
        if (col < H)
            layer_gradient_group(row, accumulate, kept_x[k], kept_dy[k], w + col, H - col, aligned,
                                 dx + col);
    }
    for (int64_t col = first + KEPT_OF_TWO * stride; col < H; col += stride)
        layer_gradient_group(row, accumulate, bl_load_raw(x + col, H - col, aligned),
                             bl_load_raw(dy + col, H - col, aligned), w + col, H - col, aligned,
                             dx + col);
}

extern "C" bl_status ops_cuda_layernorm_forward(bl_stream *stream,
                                                const bl_layernorm_forward_args *a)
{
    bl_grid grid = {};
    bool aligned = false;
    BL_TRY(plan_rows("layernorm_forward", a->T, a->H, 0, 0, &grid, &aligned));
    aligned = aligned && bl_is_aligned(a->x.data) && bl_is_aligned(a->w) && bl_is_aligned(a->b) &&
              bl_is_aligned(a->y.data);
    return bl_launch("layernorm_forward", stream, grid, layernorm_forward_kernel, a->H, a->eps,
                     aligned, (const bl_bf16 *)a->x.data, a->w, a->b, (bl_bf16 *)a->y.data, a->mean,
                     a->rstd);
}

extern "C" bl_status ops_cuda_layernorm_backward(bl_stream *stream,
                                                 const bl_layernorm_backward_args *a)
{
    bl_grid grid = {};
    bool aligned = false;
    BL_TRY(plan_rows("layernorm_backward", a->T, a->H, 0, 0, &grid, &aligned));
    aligned = aligned && bl_is_aligned(a->x.data) && bl_is_aligned(a->w) &&
              bl_is_aligned(a->dy.data) && bl_is_aligned(a->dx.data);
    return bl_launch("layernorm_backward", stream, grid, layernorm_backward_kernel, a->H,
                     a->accumulate != 0, aligned, (const bl_bf16 *)a->x.data, a->w, a->mean,
                     a->rstd, (const bl_bf16 *)a->dy.data, (bl_bf16 *)a->dx.data);
}
