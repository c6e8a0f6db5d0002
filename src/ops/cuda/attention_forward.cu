/* SPDX-License-Identifier: Apache-2.0 */
/* attention_forward.cu -- attention on CUDA.
 *
 * A block takes a tile of queries of one head and goes over the keys with the running maximum and
 * sum of each row (algorithm 1 of arXiv:2307.08691); a warp takes 16 FRAGMENTS of its rows. S and O
 * stay in registers. The next V is on its way during S and softmax, the next K during P V. P is
 * rounded to bf16; sums, maxima and o are fp32 until o is written. */
#include "ops/cuda/attention.cuh"

template <int D> struct forward_tile {
    enum {
        FRAGMENTS = D <= 128 ? 2 : 1,
        ROWS = ATTENTION_WARPS * 16 * FRAGMENTS,
        KEYS = 64,
        SHARED_BYTES = (ROWS + 2 * KEYS) * D * (int)sizeof(bl_bf16) + ROWS * (int)sizeof(int)
    };
};

/* Of a thread's rows 16 m + g and 16 m + g + 8 (halves 0 and 1). */
template <int M, int D> struct forward_rows {
    float highest[M][2], sum[M][2];
    float o[M][D / 8][4];
};

template <int M, int D> __device__ static inline void rows_begin(forward_rows<M, D> &rows)
{
#pragma unroll
    for (int m = 0; m < M; m++) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            rows.highest[m][half] = -INFINITY;
            rows.sum[m][half] = 0.0f;
        }
#pragma unroll
        for (int n = 0; n < D / 8; n++)
            rows.o[m][n][0] = rows.o[m][n][1] = rows.o[m][n][2] = rows.o[m][n][3] = 0.0f;
    }
}

/* Scores become 2^(factor (s - highest)); the rows' sums from earlier tiles are rescaled to the new
 * maximum. */
template <int M, int D, int N>
__device__ static inline void online_softmax(forward_rows<M, D> &rows, float (&s)[M][N / 8][4],
                                             float factor)
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float highest = rows.highest[m][half];
#pragma unroll
            for (int n = 0; n < N / 8; n++)
                highest = fmaxf(highest, fmaxf(s[m][n][2 * half], s[m][n][2 * half + 1]));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 1));
            highest = fmaxf(highest, __shfl_xor_sync(0xffffffffu, highest, 2));
            /* A row that has seen no key yet: minus infinity less this is not NaN. */
            float base = highest == -INFINITY ? 0.0f : highest * factor;
            float moved = mma_exp2(rows.highest[m][half] * factor - base), sum = 0.0f;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[m][n][i] = mma_exp2(s[m][n][i] * factor - base);
                    sum += s[m][n][i];
                }
            rows.highest[m][half] = highest;
            rows.sum[m][half] = rows.sum[m][half] * moved + sum;
#pragma unroll
            for (int n = 0; n < D / 8; n++) {
                rows.o[m][n][2 * half] *= moved;
                rows.o[m][n][2 * half + 1] *= moved;
            }
        }
}

/* o and lse; the warp's rows of the queries' tile are where o is put in order. */
template <bool WIDE, int M, int D>
__device__ static inline void rows_end(forward_rows<M, D> &rows, const attention_call &call,
                                       const int *starts, bl_bf16 *tile, int first, int row,
                                       int head, bl_bf16 *o, float *lse)
{
    int lane = (int)threadIdx.x % BL_WARP, g = lane / 4, t = lane % 4;
    __syncwarp(); /* the warp has used its rows of the tile */
#pragma unroll
    for (int m = 0; m < M; m++) {
        float inverse[2];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = rows.sum[m][half];
            sum += __shfl_xor_sync(0xffffffffu, sum, 1);
            sum += __shfl_xor_sync(0xffffffffu, sum, 2);
            bool is_padding = starts[row + 16 * m + 8 * half + g] == INT_MAX;
            inverse[half] = is_padding ? 0.0f : 1.0f / sum;
            int64_t token = first + row + 16 * m + 8 * half + g;
            if (lse && t == 0 && token < call.T)
                lse[token * call.n_heads + head] =
                    is_padding ? 0.0f : rows.highest[m][half] * call.scale + logf(sum);
        }
        tile_put<D, D>(tile, row + 16 * m, 0, rows.o[m], inverse[0], inverse[1]);
    }
    __syncwarp();
    tile_store<D, WIDE, 16 * M, D>(call, tile, row, 0, o, call.o_stride, first);
}

template <int D, bool WIDE>
__global__ void __launch_bounds__(ATTENTION_THREADS, 2)
    attention_forward_kernel(attention_call call, const bl_bf16 *q, const bl_bf16 *k,
                             const bl_bf16 *v, bl_bf16 *o, float *lse)
{
    enum {
        M = forward_tile<D>::FRAGMENTS,
        ROWS = forward_tile<D>::ROWS,
        KEYS = forward_tile<D>::KEYS
    };
    bl_bf16 *queries = BL_DYNAMIC_SHARED(bl_bf16), *keys = queries + ROWS * D,
            *values = keys + KEYS * D;
    int *starts = (int *)(values + KEYS * D);
    /* The last queries see most: they go first. */
    int item = (int)(gridDim.x - 1 - blockIdx.x), head = item % call.n_heads,
        first = item / call.n_heads * ROWS, row = (int)threadIdx.x / BL_WARP * 16 * M;
    int at_q = head * call.d, at_kv = head / call.group * call.d;

    int n_tokens = attention_n_tokens(call),
        end = min(first + ROWS, n_tokens) + call.position_offset;
    attention_starts<ROWS>(call, first, starts);
    __syncthreads();
    forward_rows<M, D> rows;
    rows_begin<M, D>(rows);
    int begin = starts[0];
    if (begin < end) {
        tile_load<D, WIDE, ROWS>(call, queries, q + at_q, call.q_stride, first, n_tokens);
        tile_load<D, WIDE, KEYS>(call, keys, k + at_kv, call.kv_stride, begin, end);
        mma_copies_commit();
    }
    for (int key = begin; key < end; key += KEYS) {
        attention_view view = attention_look(call, starts + row, first + row, 16 * M, key, KEYS);
        float s[M][KEYS / 8][4];
        uint32_t p[M][KEYS / 16][4];
        mma_copies_wait<0>();
        __syncthreads(); /* K is there, V has been used */
        tile_load<D, WIDE, KEYS>(call, values, v + at_kv, call.kv_stride, key, end);
        mma_copies_commit();
        if (view.any) {
            tile_products<D, M, KEYS>(s, queries, row, keys);
            if (!view.all)
                mask_scores<M, KEYS>(s, starts + row, first + row + call.position_offset, key);
            online_softmax<M, D, KEYS>(rows, s, call.scale * ATTENTION_LOG2E);
            tile_round<M, KEYS>(s, p);
        }
        mma_copies_wait<0>();
        __syncthreads(); /* V is there, K has been used */
        if (key + KEYS < end) {
            tile_load<D, WIDE, KEYS>(call, keys, k + at_kv, call.kv_stride, key + KEYS, end);
            mma_copies_commit();
        }
        if (view.any) tile_add_weighted<D, M, KEYS, D>(rows.o, p, values, 0);
    }
    rows_end<WIDE>(rows, call, starts, queries, first, row, head, o + at_q, lse);
}

template <int D, bool WIDE>
static bl_status launch_forward(bl_stream *stream, const attention_call &call,
                                const bl_attention_forward_args *a)
{
    int64_t n_tiles = bl_blocks_for(a->T, forward_tile<D>::ROWS);
    return bl_launch("attention_forward", stream,
                     attention_grid(n_tiles * a->n_heads, forward_tile<D>::SHARED_BYTES),
                     attention_forward_kernel<D, WIDE>, call, (const bl_bf16 *)a->q.data,
                     (const bl_bf16 *)a->k.data, (const bl_bf16 *)a->v.data, (bl_bf16 *)a->o.data,
                     a->lse);
}

extern "C" bl_status ops_cuda_attention_forward(bl_stream *stream,
                                                const bl_attention_forward_args *a)
{
    attention_call call = {};
    const bl_tensor matrices[] = {a->q, a->k, a->v, a->o};
    BL_TRY(attention_prepare(&call, a->T, a->n_heads, a->n_kv_heads, a->d, a->n_documents,
                             a->position_offset, a->window, a->q_stride, a->kv_stride, a->o_stride,
                             a->cu_seqlens));
    return ATTENTION_DISPATCH(attention_is_wide(call, matrices, 4), a->d, launch_forward, stream,
                              call, a);
}
