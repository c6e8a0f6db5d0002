/* SPDX-License-Identifier: Apache-2.0 */
/* attention_backward.cu -- gradients of attention on CUDA.
 *
 * Two passes, so that every sum has a fixed order: one kernel for dk and dv, one for dq. Both
 * compute S and dP anew (algorithm 2 of arXiv:2307.08691 does so once, and adds to dq atomically).
 * P and dS are rounded to bf16 for the products with do, q and k; everything else is fp32. */
#include <cooperative_groups.h>

#include "ops/cuda/attention.cuh"
#include "ops/cuda/attention_grid.h"

namespace cg = cooperative_groups;

template <int D> struct backward_tile {
    enum {
        ROWS = ATTENTION_WARPS * 16, /* that the block owns: keys, or queries */
        STEP = D <= 128 ? 64 : 16,   /* of the others, a stage of two */
        COLS = D <= 128 ? D : 128,   /* of dk and dv a block: more do not fit the registers */
        SHARED_BYTES = (2 * ROWS + 4 * STEP) * D * (int)sizeof(bl_bf16) +
                       5 * ROWS * (int)sizeof(float), /* ends and statistics, or starts */
        SUMS_LD = COLS + 8 /* fp32 sums of dk, then of dv: rows of 8 accesses are in all banks */
    };
    static_assert((int)ROWS == (int)OPS_ATTENTION_KEYS, "the grid's arithmetic");
    static_assert(2 * ROWS * SUMS_LD * sizeof(float) <= (2 * ROWS + 4 * STEP) * D * sizeof(bl_bf16),
                  "sums take the place of tiles");
};

typedef struct backward_tensors {
    const bl_bf16 *q, *k, *v, *o, *do_;
    bl_bf16 *dq, *dk, *dv;
    const float *lse;
    float *delta;
} backward_tensors;

/* ---- delta: a warp processes a token's head ---- */

__global__ void __launch_bounds__(BL_BLOCK_THREADS)
    attention_delta_kernel(attention_call call, bool is_wide, backward_tensors x)
{
    int64_t item = ((int64_t)blockIdx.x * BL_BLOCK_THREADS + threadIdx.x) / BL_WARP,
            token = item / call.n_heads, at = token * call.o_stride + item % call.n_heads * call.d;
    int lane = (int)threadIdx.x % BL_WARP;
    double sum = 0.0;
    if (token >= call.T) return;
    if (token < attention_n_tokens(call))
        for (int col = lane * BL_GROUP; col < call.d; col += BL_WARP * BL_GROUP) {
            float o[BL_GROUP], do_[BL_GROUP], part = 0.0f;
            bl_load(x.o + at + col, call.d - col, is_wide, o);
            bl_load(x.do_ + at + col, call.d - col, is_wide, do_);
#pragma unroll
            for (int i = 0; i < BL_GROUP; i++) part += o[i] * do_[i];
            sum += (double)part;
        }
    sum = bl_warp_sum(sum);
    if (lane == 0) x.delta[item] = (float)sum;
}

/* ---- dk, dv: a block takes a tile of keys of one key head ---- */

/* ends[r]: key first + r is seen by the queries from itself on that are below it; 0 for a row that
 * belongs to no document. Before those they grow with r. Needs a barrier. */
template <int ROWS>
__device__ static inline void find_ends(const attention_call &call, int first, int n_tokens,
                                        int *ends)
{
    for (int r = (int)threadIdx.x; r < ROWS; r += ATTENTION_THREADS) {
        int token = first + r;
        ends[r] =
            token < n_tokens
                ? min(call.cu_seqlens[1 + bl_document_of(call.cu_seqlens, call.n_documents, token)],
                      token + call.window)
                : 0;
    }
}

/* P^T of the warp's 16 keys, from `first` on, and N queries from `query` on: from S^T. */
template <int N>
__device__ static inline void key_probabilities(float (&s)[1][N / 8][4], const int *ends, int first,
                                                int query, float factor, const float *lse)
{
    int lane = (int)threadIdx.x % BL_WARP, t = lane % 4;
    if (query < first + 15 || query + N > min(ends[0], ends[15])) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int key = lane / 4 + 8 * half, begin = first + key - query - 2 * t,
                end = ends[key] - query - 2 * t;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (8 * n + i < begin || 8 * n + i >= end) s[0][n][2 * half + i] = -INFINITY;
        }
    }
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float2 of_queries = *(const float2 *)(lse + 8 * n + 2 * t);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float *pair = &s[0][n][2 * half];
            pair[0] = mma_exp2(pair[0] * factor - of_queries.x * ATTENTION_LOG2E);
            pair[1] = mma_exp2(pair[1] * factor - of_queries.y * ATTENTION_LOG2E);
        }
    }
}

/* dS^T = P^T (dP^T - delta), in place of P^T. */
template <int N>
__device__ static inline void
key_score_gradients(float (&p)[1][N / 8][4], const float (&dp)[1][N / 8][4], const float *delta)
{
    int t = (int)threadIdx.x % 4;
#pragma unroll
    for (int n = 0; n < N / 8; n++) {
        float2 of_queries = *(const float2 *)(delta + 8 * n + 2 * t);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            p[0][n][2 * half] *= dp[0][n][2 * half] - of_queries.x;
            p[0][n][2 * half + 1] *= dp[0][n][2 * half + 1] - of_queries.y;
        }
    }
}

/* Stage 0 or 1: the queries' rows of q and do, their lse and delta. */
template <int D> struct query_stage {
    bl_bf16 *q, *do_;
    float *lse, *delta;
};

template <int D>
__device__ static inline query_stage<D> stage_of(bl_bf16 *tiles, float *statistics, int index)
{
    enum { STEP = backward_tile<D>::STEP };
    bl_bf16 *q = tiles + index * 2 * STEP * D;
    float *lse = statistics + index * 2 * STEP;
    return {q, q + STEP * D, lse, lse + STEP};
}

template <int D, bool WIDE>
__device__ static inline void stage_load(const attention_call &call, const backward_tensors &x,
                                         const query_stage<D> &stage, int head, int query, int end)
{
    enum { STEP = backward_tile<D>::STEP };
    int64_t at_head = (int64_t)head * call.d;
    tile_load<D, WIDE, STEP>(call, stage.q, x.q + at_head, call.q_stride, query, end);
    tile_load<D, WIDE, STEP>(call, stage.do_, x.do_ + at_head, call.o_stride, query, end);
    int i = (int)threadIdx.x % STEP;
    bool is_there = query + i < end;
    int64_t at = is_there ? (int64_t)(query + i) * call.n_heads + head : 0;
    if ((int)threadIdx.x < STEP)
        mma_copy_word(stage.lse + i, x.lse + at, is_there);
    else if ((int)threadIdx.x < 2 * STEP)
        mma_copy_word(stage.delta + i, x.delta + at, is_there);
}

/* What the queries of a stage, from `query` on, add to dk and dv of the warp's keys, from `first`
 * on. */
template <int D, int COLS>
__device__ static inline void stage_add(float (&dk)[1][COLS / 8][4], float (&dv)[1][COLS / 8][4],
                                        const query_stage<D> &stage, const bl_bf16 *k,
                                        const bl_bf16 *v, int row, int column, const int *ends,
                                        int first, int query, float factor)
{
    enum { STEP = backward_tile<D>::STEP };
    float p[1][STEP / 8][4], dp[1][STEP / 8][4];
    uint32_t rounded[1][STEP / 16][4];
    tile_products<D, 1, STEP>(p, k, row, stage.q);
    key_probabilities<STEP>(p, ends, first, query, factor, stage.lse);
    tile_products<D, 1, STEP>(dp, v, row, stage.do_);
    tile_round<1, STEP>(p, rounded);
    tile_add_weighted<D, 1, STEP, COLS>(dv, rounded, stage.do_, column);
    key_score_gradients<STEP>(p, dp, stage.delta);
    tile_round<1, STEP>(p, rounded);
    tile_add_weighted<D, 1, STEP, COLS>(dk, rounded, stage.q, column);
}

/* 16 rows of fp32 sums in C's layout, from `row` on. */
template <int COLS, int LD>
__device__ static inline void sums_put(float *sums, int row, const float (&c)[COLS / 8][4])
{
    int lane = (int)threadIdx.x % BL_WARP, g = lane / 4, t = lane % 4;
    float *at = sums + (row + g) * LD + 2 * t;
#pragma unroll
    for (int n = 0; n < COLS / 8; n++) {
        *(float2 *)(at + 8 * n) = make_float2(c[n][0], c[n][1]);
        *(float2 *)(at + 8 * LD + 8 * n) = make_float2(c[n][2], c[n][3]);
    }
}

#if __CUDA_ARCH__ >= 900
/* The block's share of the tile's rows: factor times the sums of the cluster's blocks, added in
 * their order. The halves of a chunk are read in an order that keeps lanes in different banks. */
template <int D, bool WIDE, int COLS, int LD>
__device__ static inline void sums_store(const attention_call &call, float *sums, int column,
                                         float factor, bl_bf16 *head, int first)
{
    cg::cluster_group cluster = cg::this_cluster();
    constexpr int CHUNKS = COLS / BL_GROUP;
    int n_pieces = (int)cluster.num_blocks(), n_rows = OPS_ATTENTION_KEYS / n_pieces;
    for (int i = (int)threadIdx.x; i < n_rows * CHUNKS; i += ATTENTION_THREADS) {
        int row = (int)cluster.block_rank() * n_rows + i / CHUNKS, chunk = i % CHUNKS,
            at = column + chunk * BL_GROUP, half = i >> 2 & 1;
        if (first + row >= call.T || at >= call.d) continue;
        float sum[2][4] = {}, out[BL_GROUP];
        for (int p = 0; p < n_pieces; p++) {
            const float *of = cluster.map_shared_rank(sums, (unsigned)p) + row * LD;
#pragma unroll
            for (int k = 0; k < 2; k++) {
                float4 four = *(const float4 *)(of + chunk * BL_GROUP + 4 * (half ^ k));
                sum[k][0] += four.x, sum[k][1] += four.y, sum[k][2] += four.z, sum[k][3] += four.w;
            }
        }
#pragma unroll
        for (int k = 0; k < 4; k++) {
            out[k] = factor * (half ? sum[1][k] : sum[0][k]);
            out[4 + k] = factor * (half ? sum[0][k] : sum[1][k]);
        }
        bl_store(head + (int64_t)(first + row) * call.kv_stride + at, WIDE ? BL_GROUP : call.d - at,
                 WIDE, out);
    }
}
#endif

/* Of dk and dv the columns [column, column + COLS). The pairs of a query head of the group and a
 * stage of its queries, head after head, are cut into n_pieces: a block each, which are a cluster.
 */
template <int D, bool WIDE>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_backward_keys_kernel(attention_call call, int n_pieces, backward_tensors x)
{
    enum {
        ROWS = backward_tile<D>::ROWS,
        STEP = backward_tile<D>::STEP,
        COLS = backward_tile<D>::COLS
    };
    bl_bf16 *k = BL_DYNAMIC_SHARED(bl_bf16), *v = k + ROWS * D, *stages = v + ROWS * D;
    int *ends = (int *)(stages + 4 * STEP * D);
    float *statistics = (float *)(ends + ROWS);
    int n_kv_heads = call.n_heads / call.group, n_tokens = attention_n_tokens(call);
    /* The first keys are seen by most: they go first. */
    int piece = (int)blockIdx.x % n_pieces, item = (int)blockIdx.x / n_pieces,
        slice = item % (D / COLS), kv_head = item / (D / COLS) % n_kv_heads,
        first = item / (D / COLS) / n_kv_heads * ROWS, row = (int)threadIdx.x / BL_WARP * 16,
        column = slice * COLS;
    int64_t at_head = (int64_t)kv_head * call.d;

    find_ends<ROWS>(call, first, n_tokens, ends);
    __syncthreads();
    int end = first < n_tokens ? ends[min((int)ROWS, n_tokens - first) - 1] : 0, /* the largest */
        last = min(row + 16, n_tokens - first) - 1;         /* the warp's, of those in documents */
    int n_stages = (max(end - first, 0) + STEP - 1) / STEP; /* of a head */
    int64_t n_pairs = (int64_t)call.group * n_stages;
    int begin = (int)(n_pairs * piece / n_pieces),
        left = (int)(n_pairs * (piece + 1) / n_pieces) - begin;
    int head = kv_head * call.group, query = first;
    float factor = call.scale * ATTENTION_LOG2E, dk[1][COLS / 8][4] = {}, dv[1][COLS / 8][4] = {};
    if (left > 0) {
        head += begin / n_stages, query += begin % n_stages * STEP;
        tile_load<D, WIDE, ROWS>(call, k, x.k + at_head, call.kv_stride, first, n_tokens);
        tile_load<D, WIDE, ROWS>(call, v, x.v + at_head, call.kv_stride, first, n_tokens);
        stage_load<D, WIDE>(call, x, stage_of<D>(stages, statistics, left % 2), head, query, end);
        mma_copies_commit();
    }
    for (; left > 0; left--) {
        query_stage<D> now = stage_of<D>(stages, statistics, left % 2);
        int at = query;
        query += STEP;
        if (query >= end) head++, query = first;
        mma_copies_wait<0>();
        __syncthreads(); /* this stage is there, the other has been used */
        if (left > 1) {
            stage_load<D, WIDE>(call, x, stage_of<D>(stages, statistics, (left - 1) % 2), head,
                                query, end);
            mma_copies_commit();
        }
        if (last < row || at + STEP <= first + row || at >= ends[last]) continue;
        stage_add<D, COLS>(dk, dv, now, k, v, row, column, ends + row, first + row, at, factor);
    }
#if __CUDA_ARCH__ >= 900
    if (n_pieces > 1) {
        enum { LD = backward_tile<D>::SUMS_LD };
        float *sums = (float *)k;
        __syncthreads(); /* all warps have used the tiles */
        sums_put<COLS, LD>(sums, row, dk[0]);
        sums_put<COLS, LD>(sums + ROWS * LD, row, dv[0]);
        cg::this_cluster().sync();
        sums_store<D, WIDE, COLS, LD>(call, sums, column, call.scale, x.dk + at_head, first);
        sums_store<D, WIDE, COLS, LD>(call, sums + ROWS * LD, column, 1.0f, x.dv + at_head, first);
        cg::this_cluster().sync(); /* no block exits while its shared memory may be read */
        return;
    }
#endif
    __syncwarp(); /* the warp has used its rows of k and v */
    tile_put<D, COLS>(k, row, column, dk[0], call.scale, call.scale);
    tile_put<D, COLS>(v, row, column, dv[0], 1.0f, 1.0f);
    __syncwarp();
    tile_store<D, WIDE, 16, COLS>(call, k, row, column, x.dk + at_head, call.kv_stride, first);
    tile_store<D, WIDE, 16, COLS>(call, v, row, column, x.dv + at_head, call.kv_stride, first);
}

/* ---- dq: a block takes a tile of queries of one head ---- */

/* Of a thread's rows g and g + 8. */
typedef struct backward_rows {
    float lse[2], delta[2]; /* lse: as an exponent of 2 */
} backward_rows;

__device__ static inline backward_rows find_rows(const attention_call &call,
                                                 const backward_tensors &x, const int *starts,
                                                 int first, int head)
{
    int g = (int)threadIdx.x % BL_WARP / 4;
    backward_rows rows;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int at = g + 8 * half;
        int64_t token = first + at;
        bool is_there = starts[at] != INT_MAX;
        rows.lse[half] = is_there ? x.lse[token * call.n_heads + head] * ATTENTION_LOG2E : 0.0f;
        rows.delta[half] = is_there ? x.delta[token * call.n_heads + head] : 0.0f;
    }
    return rows;
}

/* dS, in place of S. */
template <int N>
__device__ static inline void row_score_gradients(float (&s)[1][N / 8][4],
                                                  const float (&dp)[1][N / 8][4],
                                                  const backward_rows &rows, float factor)
{
#pragma unroll
    for (int n = 0; n < N / 8; n++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float p = mma_exp2(s[0][n][i] * factor - rows.lse[i / 2]);
            s[0][n][i] = p * (dp[0][n][i] - rows.delta[i / 2]);
        }
}

template <int D, bool WIDE>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_backward_queries_kernel(attention_call call, backward_tensors x)
{
    enum { ROWS = backward_tile<D>::ROWS, STEP = backward_tile<D>::STEP };
    bl_bf16 *q = BL_DYNAMIC_SHARED(bl_bf16), *do_ = q + ROWS * D, *stages = do_ + ROWS * D;
    int *starts = (int *)(stages + 4 * STEP * D);
    int item = (int)(gridDim.x - 1 - blockIdx.x), head = item % call.n_heads,
        first = item / call.n_heads * ROWS, row = (int)threadIdx.x / BL_WARP * 16,
        n_tokens = attention_n_tokens(call), end = min(first + ROWS, n_tokens);
    int64_t at_head = (int64_t)head * call.d, at_kv_head = (int64_t)(head / call.group) * call.d;

    attention_starts<ROWS>(call, first, starts);
    __syncthreads();
    backward_rows rows = find_rows(call, x, starts + row, first + row, head);
    float factor = call.scale * ATTENTION_LOG2E, dq[1][D / 8][4] = {};
    int begin = starts[0];
    if (begin < end) {
        tile_load<D, WIDE, ROWS>(call, q, x.q + at_head, call.q_stride, first, n_tokens);
        tile_load<D, WIDE, ROWS>(call, do_, x.do_ + at_head, call.o_stride, first, n_tokens);
        tile_load<D, WIDE, STEP>(call, stages, x.k + at_kv_head, call.kv_stride, begin, end);
        tile_load<D, WIDE, STEP>(call, stages + STEP * D, x.v + at_kv_head, call.kv_stride, begin,
                                 end);
        mma_copies_commit();
    }
    for (int key = begin, i = 0; key < end; key += STEP, i++) {
        bl_bf16 *k = stages + i % 2 * 2 * STEP * D, *v = k + STEP * D,
                *next = stages + (i + 1) % 2 * 2 * STEP * D;
        mma_copies_wait<0>();
        __syncthreads(); /* this stage is there, the other has been used */
        if (key + STEP < end) {
            tile_load<D, WIDE, STEP>(call, next, x.k + at_kv_head, call.kv_stride, key + STEP, end);
            tile_load<D, WIDE, STEP>(call, next + STEP * D, x.v + at_kv_head, call.kv_stride,
                                     key + STEP, end);
            mma_copies_commit();
        }
        attention_view view = attention_look(call, starts + row, first + row, 16, key, STEP);
        if (!view.any) continue;
        float s[1][STEP / 8][4], dp[1][STEP / 8][4];
        uint32_t rounded[1][STEP / 16][4];
        tile_products<D, 1, STEP>(s, q, row, k);
        tile_products<D, 1, STEP>(dp, do_, row, v);
        if (!view.all) mask_scores<1, STEP>(s, starts + row, first + row, key);
        row_score_gradients<STEP>(s, dp, rows, factor);
        tile_round<1, STEP>(s, rounded);
        tile_add_weighted<D, 1, STEP, D>(dq, rounded, k, 0);
    }
    __syncwarp(); /* the warp has used its rows of q */
    tile_put<D, D>(q, row, 0, dq[0], call.scale, call.scale);
    __syncwarp();
    tile_store<D, WIDE, 16, D>(call, q, row, 0, x.dq + at_head, call.q_stride, first);
}

/* ---- launchers ---- */

template <int D, bool WIDE>
static bl_status launch_backward(bl_stream *stream, const attention_call &call,
                                 const backward_tensors &x)
{
    enum {
        ROWS = backward_tile<D>::ROWS,
        BYTES = backward_tile<D>::SHARED_BYTES,
        SLICES = D / backward_tile<D>::COLS
    };
    int64_t n_tiles = bl_blocks_for(call.T, ROWS),
            n_items = n_tiles * (call.n_heads / call.group) * SLICES;
    bool has_clusters = bl_cuda_device_properties(bl_stream_device(stream))->capability >= 90;
    int64_t n_pieces = has_clusters ? ops_attention_pieces(n_items) : 1;
    bl_grid keys = attention_grid(n_items * n_pieces, BYTES);
    keys.n_clustered = (unsigned)n_pieces;
    BL_TRY(bl_launch("attention_backward", stream, keys, attention_backward_keys_kernel<D, WIDE>,
                     call, (int)n_pieces, x));
    return bl_launch("attention_backward", stream, attention_grid(n_tiles * call.n_heads, BYTES),
                     attention_backward_queries_kernel<D, WIDE>, call, x);
}

extern "C" bl_status ops_cuda_attention_backward(bl_stream *stream,
                                                 const bl_attention_backward_args *a)
{
    attention_call call = {};
    const bl_tensor matrices[] = {a->q, a->k, a->v, a->o, a->do_, a->dq, a->dk, a->dv};
    BL_TRY(attention_prepare(&call, a->T, a->n_heads, a->n_kv_heads, a->d, a->n_documents, 0,
                             a->window, a->q_stride, a->kv_stride, a->o_stride, a->cu_seqlens));
    backward_tensors x = {(const bl_bf16 *)a->q.data,
                          (const bl_bf16 *)a->k.data,
                          (const bl_bf16 *)a->v.data,
                          (const bl_bf16 *)a->o.data,
                          (const bl_bf16 *)a->do_.data,
                          (bl_bf16 *)a->dq.data,
                          (bl_bf16 *)a->dk.data,
                          (bl_bf16 *)a->dv.data,
                          a->lse,
                          a->delta};
    bool is_wide = attention_is_wide(call, matrices, 8);
    BL_TRY(bl_launch(
        "attention_delta", stream,
        {bl_blocks_for(a->T * a->n_heads, BL_BLOCK_THREADS / BL_WARP), BL_BLOCK_THREADS, 1},
        attention_delta_kernel, call, is_wide, x));
    return ATTENTION_DISPATCH(is_wide, a->d, launch_backward, stream, call, x);
}
