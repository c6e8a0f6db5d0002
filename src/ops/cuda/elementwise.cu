/* SPDX-License-Identifier: Apache-2.0 */
/* elementwise.cu -- SwiGLU, GELU, sums, biases, casts, dropout and the embedding on CUDA. One group
 * of eight elements per thread. A block takes 2048 columns of one row, so that what belongs to the
 * row (a token's id, its place in the sample) is the same for all of its threads. */
#include "fp8/cuda/vector.cuh"
#include "ops/element_internal.h"
#include "ops/cuda/ops_cuda.h"
#include "ops/philox.h"

/* Where a thread's group is in a (T, n_columns) matrix, by blocks of whole rows. */
typedef struct place {
    int64_t row, col, n_valid; /* n_valid <= 0: nowhere */
} place;

__device__ static inline place place_of(int64_t n_columns, unsigned blocks_per_row)
{
    place p;
    p.row = blockIdx.x / blocks_per_row;
    p.col = (int64_t)(blockIdx.x % blocks_per_row) * BL_BLOCK_ELEMENTS +
            (int64_t)threadIdx.x * BL_GROUP;
    p.n_valid = n_columns - p.col;
    return p;
}

/* The grid for it. */
static bl_status plan_rows(const char *what, int64_t T, int64_t n_columns, bl_grid *grid,
                           unsigned *blocks_per_row)
{
    int64_t per_row = bl_blocks_for(n_columns, BL_BLOCK_ELEMENTS);
    if (T < 0 || n_columns < 0 || per_row > INT32_MAX)
        return BL_FAIL(BL_EINTERNAL, "%s: %lld rows of %lld columns", what, (long long)T,
                       (long long)n_columns);
    *grid = {T * per_row, BL_BLOCK_THREADS, 1};
    *blocks_per_row = (unsigned)per_row;
    return BL_OK;
}

/* ---- SwiGLU ---- */

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    swiglu_forward_kernel(int64_t I, bool aligned, unsigned blocks_per_row, const bl_bf16 *gate_up,
                          bl_bf16 *h)
{
    place p = place_of(I, blocks_per_row);
    if (p.n_valid <= 0) return;
    const bl_bf16 *gate = gate_up + p.row * 2 * I + p.col;
    float g[BL_GROUP], u[BL_GROUP];
    bl_load(gate, p.n_valid, aligned, g);
    bl_load(gate + I, p.n_valid, aligned, u);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) g[i] = bl_swiglu(g[i], u[i]);
    bl_store(h + p.row * I + p.col, p.n_valid, aligned, g);
}

extern "C" bl_status ops_cuda_swiglu_forward(bl_stream *stream, const bl_swiglu_forward_args *a)
{
    bl_grid grid = {};
    unsigned blocks_per_row = 0;
    if (a->quantized.codes) return ops_cuda_swiglu_forward_quantized(stream, a);
    BL_TRY(plan_rows("swiglu_forward", a->T, a->I, &grid, &blocks_per_row));
    bool aligned =
        bl_is_aligned(a->gate_up.data) && bl_is_aligned(a->h.data) && a->I % BL_GROUP == 0;
    return bl_launch("swiglu_forward", stream, grid, swiglu_forward_kernel, a->I, aligned,
                     blocks_per_row, (const bl_bf16 *)a->gate_up.data, (bl_bf16 *)a->h.data);
}

/* d_gate_up may be gate_up: a thread reads its elements before it writes them, and no other thread
 * accesses them. */
__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    swiglu_backward_kernel(int64_t I, bool aligned, unsigned blocks_per_row, const bl_bf16 *gate_up,
                           const bl_bf16 *dh, bl_bf16 *d_gate_up)
{
    place p = place_of(I, blocks_per_row);
    if (p.n_valid <= 0) return;
    int64_t at = p.row * 2 * I + p.col;
    float g[BL_GROUP], u[BL_GROUP], d[BL_GROUP];
    bl_load(gate_up + at, p.n_valid, aligned, g);
    bl_load(gate_up + at + I, p.n_valid, aligned, u);
    bl_load(dh + p.row * I + p.col, p.n_valid, aligned, d);
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) {
        bl_swiglu_gradient gradient = bl_swiglu_gradient_of(g[i], u[i], d[i]);
        g[i] = gradient.dg;
        u[i] = gradient.du;
    }
    bl_store(d_gate_up + at, p.n_valid, aligned, g);
    bl_store(d_gate_up + at + I, p.n_valid, aligned, u);
}

extern "C" bl_status ops_cuda_swiglu_backward(bl_stream *stream, const bl_swiglu_backward_args *a)
{
    bl_grid grid = {};
    unsigned blocks_per_row = 0;
    BL_TRY(plan_rows("swiglu_backward", a->T, a->I, &grid, &blocks_per_row));
    bool aligned = bl_is_aligned(a->gate_up.data) && bl_is_aligned(a->dh.data) &&
                   bl_is_aligned(a->d_gate_up.data) && a->I % BL_GROUP == 0;
    return bl_launch("swiglu_backward", stream, grid, swiglu_backward_kernel, a->I, aligned,
                     blocks_per_row, (const bl_bf16 *)a->gate_up.data, (const bl_bf16 *)a->dh.data,
                     (bl_bf16 *)a->d_gate_up.data);
}

/* ---- GELU, sums and copies of n elements: one long row ---- */

template <bool is_erf>
__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    gelu_forward_kernel(int64_t n, bool aligned, const bl_bf16 *u, bl_bf16 *h)
{
    int64_t i = ((int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x) * BL_GROUP;
    if (i >= n) return;
    float x[BL_GROUP];
    bl_load(u + i, n - i, aligned, x);
#pragma unroll
    for (int k = 0; k < BL_GROUP; k++) x[k] = is_erf ? bl_gelu_erf(x[k]) : bl_gelu_tanh(x[k]);
    bl_store(h + i, n - i, aligned, x);
}

extern "C" bl_status ops_cuda_gelu_forward(bl_stream *stream, const bl_gelu_forward_args *a)
{
    bl_grid grid = {bl_blocks_for(a->n, BL_BLOCK_ELEMENTS), BL_BLOCK_THREADS, 1};
    bool aligned = bl_is_aligned(a->u.data) && bl_is_aligned(a->h.data);
    return bl_launch("gelu_forward", stream, grid,
                     a->form == BL_GELU_ERF ? gelu_forward_kernel<true>
                                            : gelu_forward_kernel<false>,
                     a->n, aligned, (const bl_bf16 *)a->u.data, (bl_bf16 *)a->h.data);
}

/* du may be u or dh: a thread reads its elements before it writes them. */
template <bool is_erf>
__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    gelu_backward_kernel(int64_t n, bool aligned, const bl_bf16 *u, const bl_bf16 *dh, bl_bf16 *du)
{
    int64_t i = ((int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x) * BL_GROUP;
    if (i >= n) return;
    float x[BL_GROUP], d[BL_GROUP];
    bl_load(u + i, n - i, aligned, x);
    bl_load(dh + i, n - i, aligned, d);
#pragma unroll
    for (int k = 0; k < BL_GROUP; k++)
        x[k] = is_erf ? bl_gelu_erf_gradient(x[k], d[k]) : bl_gelu_tanh_gradient(x[k], d[k]);
    bl_store(du + i, n - i, aligned, x);
}

extern "C" bl_status ops_cuda_gelu_backward(bl_stream *stream, const bl_gelu_backward_args *a)
{
    bl_grid grid = {bl_blocks_for(a->n, BL_BLOCK_ELEMENTS), BL_BLOCK_THREADS, 1};
    bool aligned =
        bl_is_aligned(a->u.data) && bl_is_aligned(a->dh.data) && bl_is_aligned(a->du.data);
    return bl_launch(
        "gelu_backward", stream, grid,
        a->form == BL_GELU_ERF ? gelu_backward_kernel<true> : gelu_backward_kernel<false>, a->n,
        aligned, (const bl_bf16 *)a->u.data, (const bl_bf16 *)a->dh.data, (bl_bf16 *)a->du.data);
}

template <typename T>
__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    add_kernel(int64_t n, bool aligned, const T *a, const T *b, T *y)
{
    int64_t i = ((int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x) * BL_GROUP;
    if (i >= n) return;
    float sum[BL_GROUP], other[BL_GROUP];
    bl_load(a + i, n - i, aligned, sum);
    bl_load(b + i, n - i, aligned, other);
#pragma unroll
    for (int k = 0; k < BL_GROUP; k++) sum[k] += other[k];
    bl_store(y + i, n - i, aligned, sum);
}

extern "C" bl_status ops_cuda_add(bl_stream *stream, const bl_add_args *a)
{
    bl_grid grid = {bl_blocks_for(a->n, BL_BLOCK_ELEMENTS), BL_BLOCK_THREADS, 1};
    bool aligned = bl_is_aligned(a->a.data) && bl_is_aligned(a->b.data) && bl_is_aligned(a->y.data);
    if (a->y.dtype == BL_BF16)
        return bl_launch("add", stream, grid, add_kernel<bl_bf16>, a->n, aligned,
                         (const bl_bf16 *)a->a.data, (const bl_bf16 *)a->b.data,
                         (bl_bf16 *)a->y.data);
    return bl_launch("add", stream, grid, add_kernel<float>, a->n, aligned,
                     (const float *)a->a.data, (const float *)a->b.data, (float *)a->y.data);
}

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    add_bias_kernel(int64_t N, bool aligned, unsigned blocks_per_row, const float *bias, bl_bf16 *y)
{
    place p = place_of(N, blocks_per_row);
    if (p.n_valid <= 0) return;
    float sum[BL_GROUP], other[BL_GROUP];
    y += p.row * N + p.col;
    bl_load(y, p.n_valid, aligned, sum);
    bl_load(bias + p.col, p.n_valid, aligned, other);
#pragma unroll
    for (int k = 0; k < BL_GROUP; k++) sum[k] += other[k];
    bl_store(y, p.n_valid, aligned, sum);
}

extern "C" bl_status ops_cuda_add_bias(bl_stream *stream, const bl_add_bias_args *a)
{
    bl_grid grid = {};
    unsigned blocks_per_row = 0;
    BL_TRY(plan_rows("add_bias", a->T, a->N, &grid, &blocks_per_row));
    bool aligned = bl_is_aligned(a->y.data) && bl_is_aligned(a->bias) && a->N % BL_GROUP == 0;
    return bl_launch("add_bias", stream, grid, add_bias_kernel, a->N, aligned, blocks_per_row,
                     a->bias, (bl_bf16 *)a->y.data);
}

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    scale_kernel(int64_t n, bool aligned, float scale, const bl_bf16 *x, bl_bf16 *y)
{
    int64_t i = ((int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x) * BL_GROUP;
    if (i >= n) return;
    float values[BL_GROUP];
    bl_load(x + i, n - i, aligned, values);
#pragma unroll
    for (int k = 0; k < BL_GROUP; k++) values[k] *= scale;
    bl_store(y + i, n - i, aligned, values);
}

extern "C" bl_status ops_cuda_scale(bl_stream *stream, const bl_scale_args *a)
{
    bl_grid grid = {bl_blocks_for(a->n, BL_BLOCK_ELEMENTS), BL_BLOCK_THREADS, 1};
    bool aligned = bl_is_aligned(a->x.data) && bl_is_aligned(a->y.data);
    return bl_launch("scale", stream, grid, scale_kernel, a->n, aligned, a->scale,
                     (const bl_bf16 *)a->x.data, (bl_bf16 *)a->y.data);
}

template <typename From, typename To>
__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    cast_kernel(int64_t n, bool aligned, const From *x, To *y)
{
    int64_t i = ((int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x) * BL_GROUP;
    if (i >= n) return;
    float values[BL_GROUP];
    bl_load(x + i, n - i, aligned, values);
    bl_store(y + i, n - i, aligned, values);
}

extern "C" bl_status ops_cuda_cast(bl_stream *stream, const bl_cast_args *a)
{
    bl_grid grid = {bl_blocks_for(a->n, BL_BLOCK_ELEMENTS), BL_BLOCK_THREADS, 1};
    if (a->x.dtype == a->y.dtype)
        return bl_copy("cast", stream, a->y.data, a->x.data, bl_tensor_bytes(a->y, a->n));
    bool aligned = bl_is_aligned(a->x.data) && bl_is_aligned(a->y.data);
    if (a->x.dtype == BL_F32)
        return bl_launch("cast", stream, grid, cast_kernel<float, bl_bf16>, a->n, aligned,
                         (const float *)a->x.data, (bl_bf16 *)a->y.data);
    return bl_launch("cast", stream, grid, cast_kernel<bl_bf16, float>, a->n, aligned,
                     (const bl_bf16 *)a->x.data, (float *)a->y.data);
}

/* ---- dropout ---- */

typedef struct dropout_mask {
    bl_philox_key key;
    uint32_t threshold;
    float scale;
    const int64_t *sample;
    const int32_t *position;
} dropout_mask;

template <typename T>
__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    dropout_kernel(int64_t C, bool aligned, unsigned blocks_per_row, dropout_mask mask, const T *x,
                   T *y)
{
    place p = place_of(C, blocks_per_row);
    if (p.n_valid <= 0) return;
    int64_t at = p.row * C + p.col;
    float values[BL_GROUP];
    bl_load(x + at, p.n_valid, aligned, values);
    int64_t sample = mask.sample[p.row];
    int32_t position = mask.position[p.row];
#pragma unroll
    for (int half = 0; half < 2; half++) {
        uint32_t words[4];
        bl_dropout_words(mask.key, sample, position, (uint32_t)(p.col / 4) + (uint32_t)half, words);
#pragma unroll
        for (int k = 0; k < 4; k++) {
            float kept = values[4 * half + k] * mask.scale;
            values[4 * half + k] = words[k] >= mask.threshold ? kept : 0.0f;
        }
    }
    bl_store(y + at, p.n_valid, aligned, values);
}

extern "C" bl_status ops_cuda_dropout(bl_stream *stream, const bl_dropout_args *a)
{
    bl_grid grid = {};
    unsigned blocks_per_row = 0;
    BL_TRY(plan_rows("dropout", a->T, a->C, &grid, &blocks_per_row));
    if (a->p == 0.0f) {
        if (a->x.data == a->y.data) return BL_OK;
        return bl_copy("dropout", stream, a->y.data, a->x.data, bl_tensor_bytes(a->y, a->T * a->C));
    }
    dropout_mask mask;
    mask.key = bl_dropout_key(a->seed, a->step, a->layer, a->matrix);
    mask.threshold = bl_dropout_threshold(a->p);
    mask.scale = bl_dropout_scale(a->p);
    mask.sample = a->sample;
    mask.position = a->position;
    bool aligned = bl_is_aligned(a->x.data) && bl_is_aligned(a->y.data) && a->C % BL_GROUP == 0;
    if (a->y.dtype == BL_BF16)
        return bl_launch("dropout", stream, grid, dropout_kernel<bl_bf16>, a->C, aligned,
                         blocks_per_row, mask, (const bl_bf16 *)a->x.data, (bl_bf16 *)a->y.data);
    return bl_launch("dropout", stream, grid, dropout_kernel<float>, a->C, aligned, blocks_per_row,
                     mask, (const float *)a->x.data, (float *)a->y.data);
}

/* ---- embedding ---- */

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    embedding_kernel(int64_t H, bl_dtype dtype, bool aligned, unsigned blocks_per_row,
                     const int32_t *ids, const void *table, bl_bf16 *y)
{
    place p = place_of(H, blocks_per_row);
    if (p.n_valid <= 0) return;
    int64_t from = (int64_t)ids[p.row] * H + p.col;
    uint4 raw;
    if (dtype == BL_F32) {
        float values[BL_GROUP];
        bl_load((const float *)table + from, p.n_valid, aligned, values);
        raw = bl_pack(values);
    } else {
        raw = bl_load_raw((const uint16_t *)table + from, p.n_valid, aligned);
        if (dtype == BL_F16) raw = bl_halves_to_bf16(raw);
    }
    bl_store_raw(y + p.row * H + p.col, p.n_valid, aligned, raw);
}

extern "C" bl_status ops_cuda_embedding(bl_stream *stream, const bl_embedding_args *a)
{
    bl_grid grid = {};
    unsigned blocks_per_row = 0;
    BL_TRY(plan_rows("embedding", a->T, a->H, &grid, &blocks_per_row));
    bool aligned = bl_is_aligned(a->table.data) && bl_is_aligned(a->y.data) && a->H % BL_GROUP == 0;
    return bl_launch("embedding", stream, grid, embedding_kernel, a->H, a->table.dtype, aligned,
                     blocks_per_row, a->ids, a->table.data, (bl_bf16 *)a->y.data);
}
