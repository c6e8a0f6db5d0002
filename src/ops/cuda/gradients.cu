/* SPDX-License-Identifier: Apache-2.0 */
/* Gradients of norms, biases and the embedding, on CUDA. There are no atomics: each block owns its
 * columns, or its row of the table, and adds in an order that depends only on shapes and ids. */
#include "fp8/cuda/vector.cuh"
#include "ops/element_internal.h"
#include "ops/cuda/ops_cuda.h"

/* ---- norms and biases ---- */

/* A block sums 16 columns (one sector per row) over all rows. Two threads load a row's sector, so a
 * warp processes 16 rows at a time. Sums of threads are added in the warp, then in the block. */
enum {
    COLUMNS = 2 * BL_GROUP,
    ROWS_OF_WARP = BL_WARP / 2,
    N_WARPS = BL_BLOCK_THREADS / BL_WARP,
    ROWS_OF_BLOCK = N_WARPS * ROWS_OF_WARP
};

typedef struct norm_task {
    int64_t n_rows, H, n_heads, row_stride;
    bool aligned;
    const bl_bf16 *x, *dy;
    const float *mean, *rstd; /* mean NULL: 0 */
    float *dw, *db;           /* or NULL */
} norm_task;

/* Writes the warp's sums of its 16 columns to `out`: each thread of the first eight rows writes one
 * of its eight columns. */
__device__ static inline void sum_rows_of_warp(double sums[BL_GROUP], double *out)
{
    int lane = (int)threadIdx.x % BL_WARP;
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
#pragma unroll
        for (int apart = BL_WARP / 2; apart >= 2; apart /= 2)
            sums[i] += __shfl_xor_sync(0xffffffffu, sums[i], apart);
    double mine = sums[0];
#pragma unroll
    for (int i = 1; i < BL_GROUP; i++)
        if (lane / 2 == i) mine = sums[i];
    if (lane / 2 < BL_GROUP) out[lane % 2 * BL_GROUP + lane / 2] = mine;
}

__device__ static inline void add_columns(const double (*of_warp)[COLUMNS], int64_t begin,
                                          int64_t H, float *out)
{
    int64_t h = begin + threadIdx.x % BL_WARP;
    if (threadIdx.x % BL_WARP >= COLUMNS || h >= H) return;
    double sum = 0.0;
    for (int w = 0; w < N_WARPS; w++) sum += of_warp[w][threadIdx.x % BL_WARP];
    out[h] = (float)((double)out[h] + sum);
}

__global__ void __launch_bounds__(BL_BLOCK_THREADS) norm_gradients_kernel(norm_task task)
{
    __shared__ double dw_of_warp[N_WARPS][COLUMNS], db_of_warp[N_WARPS][COLUMNS];
    int lane = (int)threadIdx.x % BL_WARP, warp = (int)threadIdx.x / BL_WARP;
    int64_t begin = (int64_t)blockIdx.x * COLUMNS, col = begin + lane % 2 * BL_GROUP,
            n_valid = task.H - col;
    double dw[BL_GROUP] = {}, db[BL_GROUP] = {};

    for (int64_t r = warp * ROWS_OF_WARP + lane / 2; n_valid > 0 && r < task.n_rows;
         r += ROWS_OF_BLOCK) {
        int64_t at = bl_norm_row(r, task.H, task.n_heads, task.row_stride) + col;
        float x[BL_GROUP] = {}, dy[BL_GROUP];
        double mean = 0.0, rstd = 0.0;
        bl_load(task.dy + at, n_valid, task.aligned, dy);
        if (task.dw) {
            bl_load(task.x + at, n_valid, task.aligned, x);
            rstd = (double)task.rstd[r];
            if (task.mean) mean = (double)task.mean[r];
        }
#pragma unroll
        for (int i = 0; i < BL_GROUP; i++) {
            dw[i] += (double)dy[i] * (((double)x[i] - mean) * rstd);
            db[i] += (double)dy[i];
        }
    }
    sum_rows_of_warp(dw, dw_of_warp[warp]);
    sum_rows_of_warp(db, db_of_warp[warp]);
    __syncthreads();
    if (warp == 0 && task.dw) add_columns(dw_of_warp, begin, task.H, task.dw);
    if (warp == 1 && task.db) add_columns(db_of_warp, begin, task.H, task.db);
}

extern "C" bl_status ops_cuda_norm_gradients(bl_stream *stream, const bl_norm_gradients_args *a)
{
    if (a->T < 0 || a->H < 1 || a->n_heads < 0 ||
        (a->n_heads > 0 && a->row_stride < a->n_heads * a->H))
        return BL_FAIL(BL_EINTERNAL, "norm_gradients: %lld rows of %lld channels, %lld heads",
                       (long long)a->T, (long long)a->H, (long long)a->n_heads);
    if (a->T == 0) return BL_OK;
    norm_task task;
    task.n_rows = a->n_heads > 0 ? a->T * a->n_heads : a->T;
    task.H = a->H;
    task.n_heads = a->n_heads;
    task.row_stride = a->row_stride;
    task.aligned = a->H % BL_GROUP == 0 && bl_is_aligned(a->dy.data) &&
                   (!a->dw || bl_is_aligned(a->x.data)) &&
                   (a->n_heads == 0 || a->row_stride % BL_GROUP == 0);
    task.x = (const bl_bf16 *)a->x.data;
    task.dy = (const bl_bf16 *)a->dy.data;
    task.mean = a->mean;
    task.rstd = a->rstd;
    task.dw = a->dw;
    task.db = a->db;
    return bl_launch("norm_gradients", stream, {bl_blocks_for(a->H, COLUMNS), BL_BLOCK_THREADS, 1},
                     norm_gradients_kernel, task);
}

/* ---- the embedding ---- */

/* Sets bit i of same[w] if token begin + 32 w + i is before `end` and has this id. Returns whether
 * any bit is set. All threads of the block call it. */
__device__ static inline bool find_same(const int32_t *ids, int64_t begin, int64_t end, int32_t id,
                                        uint32_t *same)
{
    int64_t t = begin + threadIdx.x;
    uint32_t mask = __ballot_sync(0xffffffffu, t < end && ids[t] == id), any = 0;
    __syncthreads(); /* all threads have read the previous masks */
    if (threadIdx.x % BL_WARP == 0) same[threadIdx.x / BL_WARP] = mask;
    __syncthreads();
    for (int w = 0; w < N_WARPS; w++) any |= same[w];
    return any != 0;
}

/* One block per token and 2048 columns. The block of an id's first token adds the rows of all
 * tokens with this id, in order; the blocks of the other tokens return. */
__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    embedding_backward_kernel(int64_t T, int64_t H, bool aligned, float scale, const int32_t *ids,
                              const bl_bf16 *dy, float *table)
{
    __shared__ uint32_t same[N_WARPS];
    int64_t first = blockIdx.x,
            col = (int64_t)blockIdx.y * BL_BLOCK_ELEMENTS + (int64_t)threadIdx.x * BL_GROUP,
            n_valid = H - col;
    int32_t id = ids[first];
    float sum[BL_GROUP];

    for (int64_t begin = 0; begin < first; begin += BL_BLOCK_THREADS)
        if (find_same(ids, begin, first, id, same)) return;
    table += id * H + col;
    dy += col;
    if (n_valid > 0) bl_load(table, n_valid, aligned, sum);
    for (int64_t begin = first; begin < T; begin += BL_BLOCK_THREADS) {
        if (!find_same(ids, begin, T, id, same) || n_valid <= 0) continue;
        for (int i = 0; i < BL_BLOCK_THREADS; i++) {
            float d[BL_GROUP];
            if (!(same[i / BL_WARP] >> i % BL_WARP & 1u)) continue;
            bl_load(dy + (begin + i) * H, n_valid, aligned, d);
#pragma unroll
            for (int k = 0; k < BL_GROUP; k++) sum[k] += scale * d[k];
        }
    }
    if (n_valid > 0) bl_store(table, n_valid, aligned, sum);
}

extern "C" bl_status ops_cuda_embedding_backward(bl_stream *stream,
                                                 const bl_embedding_backward_args *a)
{
    if (a->T < 0 || a->H < 1)
        return BL_FAIL(BL_EINTERNAL, "embedding_backward: %lld rows of %lld channels",
                       (long long)a->T, (long long)a->H);
    bl_grid grid = {a->T, BL_BLOCK_THREADS, 1};
    grid.n_blocks_y = bl_blocks_for(a->H, BL_BLOCK_ELEMENTS);
    bool aligned = bl_is_aligned(a->dy.data) && bl_is_aligned(a->table) && a->H % BL_GROUP == 0;
    return bl_launch("embedding_backward", stream, grid, embedding_backward_kernel, a->T, a->H,
                     aligned, a->scale, a->ids, (const bl_bf16 *)a->dy.data, a->table);
}
