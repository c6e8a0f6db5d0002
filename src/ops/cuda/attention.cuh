/* SPDX-License-Identifier: Apache-2.0 */
/* attention.cuh -- shared code of the attention kernels. Internal to ops/cuda/.
 *
 * A tile is some rows of a head's q, k, v or do in shared memory: D columns wide, where D is the
 * next of 32, 64, 96, 128 and 256 from d on, the columns behind d zeros. Chunks of 8 elements (16
 * bytes) are permuted within their row, so that 8 rows of one chunk, which one phase of ldmatrix
 * reads, are in different banks.
 *
 * The stream of tokens is cut into tiles as it is, whatever the documents: a row's keys begin where
 * its document does (attention_starts), a block goes over the keys from its first row's on, and
 * keys that a row does not see are masked. So the host need not know the documents' lengths. Sums
 * are computed tile after tile: their order, and so the bits, depends on the shapes and cu_seqlens
 * alone. */
#ifndef BALLAST_OPS_CUDA_ATTENTION_CUH
#define BALLAST_OPS_CUDA_ATTENTION_CUH

#include <limits.h>

#include "fp8/cuda/vector.cuh"
#include "ops/cuda/mma.cuh"
#include "ops/cuda/ops_cuda.h"
#include "ops/element_internal.h"

enum { ATTENTION_WARPS = 4, ATTENTION_THREADS = ATTENTION_WARPS * BL_WARP };

/* A call's shape. */
typedef struct attention_call {
    int T, n_heads, group, d, n_documents, position_offset; /* group: query heads of a key head */
    int window;                                             /* none: at least all keys */
    int64_t q_stride, kv_stride, o_stride;
    const int32_t *cu_seqlens;
    float scale; /* 1 / sqrt(d) */
} attention_call;

#define ATTENTION_LOG2E 1.44269504f

/* ---- tiles ---- */

/* Place of a chunk in a tile, in elements. */
template <int D> __device__ static inline int tile_at(int row, int chunk)
{
    return row * D + (chunk ^ (D % 64 == 0 ? row & 7 : row >> 1 & 3)) * BL_GROUP;
}

/* WIDE, here and in the kernels: rows of every head begin at multiples of 16 bytes and d is a
 * multiple of 8, so that chunks are accessed as they are. Otherwise elements are. */

/* Rows [first, first + ROWS) of a head; those from `end` on are zeros, and nothing is read for
 * them. A pass takes ABREAST chunks of some rows; the chunks' permutation is the same in all
 * passes. */
template <int D, int ROWS>
__device__ static inline void tile_load_wide(const attention_call &call, bl_bf16 *tile,
                                             const bl_bf16 *head, int64_t stride, int first,
                                             int end)
{
    constexpr int CHUNKS = D / BL_GROUP, ABREAST = CHUNKS % 8 == 0 ? 8 : 4,
                  PASS = ATTENTION_THREADS / ABREAST;
    int row = (int)threadIdx.x / ABREAST, chunk = (int)threadIdx.x % ABREAST;
    const bl_bf16 *source = head + (first + row) * stride + chunk * BL_GROUP;
    bl_bf16 *place = tile + tile_at<D>(row, chunk);
#pragma unroll
    for (int pass = 0; pass < ROWS; pass += PASS) {
#pragma unroll
        for (int i = 0; i < CHUNKS; i += ABREAST) {
            bool is_there = first + row + pass < end && (chunk + i) * BL_GROUP < call.d;
            mma_copy(place + pass * D + i * BL_GROUP, is_there ? source + i * BL_GROUP : head,
                     is_there);
        }
        source += PASS * stride;
    }
}

template <int D, int ROWS>
__device__ static inline void tile_load_narrow(const attention_call &call, bl_bf16 *tile,
                                               const bl_bf16 *head, int64_t stride, int first,
                                               int end)
{
    constexpr int CHUNKS = D / BL_GROUP;
#pragma unroll 1
    for (int i = (int)threadIdx.x; i < ROWS * CHUNKS; i += ATTENTION_THREADS) {
        int row = i / CHUNKS, chunk = i % CHUNKS, column = chunk * BL_GROUP;
        *(uint4 *)(tile + tile_at<D>(row, chunk)) = bl_load_raw(
            head + (first + row) * stride + column, first + row < end ? call.d - column : 0, false);
    }
}

template <int D, bool WIDE, int ROWS>
__device__ static inline void tile_load(const attention_call &call, bl_bf16 *tile,
                                        const bl_bf16 *head, int64_t stride, int first, int end)
{
    if (WIDE)
        tile_load_wide<D, ROWS>(call, tile, head, stride, first, end);
    else
        tile_load_narrow<D, ROWS>(call, tile, head, stride, first, end);
}

/* The warp's rows [row, row + ROWS) of a tile, their columns [column, column + COLS), to memory;
 * rows from T on are left out. */
template <int D, bool WIDE, int ROWS, int COLS>
__device__ static inline void tile_store(const attention_call &call, const bl_bf16 *tile, int row,
                                         int column, bl_bf16 *head, int64_t stride, int first)
{
    constexpr int CHUNKS = COLS / BL_GROUP;
    int lane = (int)threadIdx.x % BL_WARP;
#pragma unroll 4
    for (int i = lane; i < ROWS * CHUNKS; i += BL_WARP) {
        int at = row + i / CHUNKS, chunk = column / BL_GROUP + i % CHUNKS;
        if (first + at < call.T && chunk * BL_GROUP < call.d)
            bl_store_raw(head + (int64_t)(first + at) * stride + chunk * BL_GROUP,
                         WIDE ? BL_GROUP : call.d - chunk * BL_GROUP, WIDE,
                         mma_read(tile, tile_at<D>(at, chunk)));
    }
}

/* 16 rows of fp32 in C's layout, rows g times factor_low and rows g + 8 times factor_high, rounded
 * to the tile's rows from `row` and columns from `column` on. */
template <int D, int COLS>
__device__ static inline void tile_put(bl_bf16 *tile, int row, int column,
                                       const float (&c)[COLS / 8][4], float factor_low,
                                       float factor_high)
{
    int lane = (int)threadIdx.x % BL_WARP, g = lane / 4, t = lane % 4;
#pragma unroll
    for (int n = 0; n < COLS / 8; n++) {
        int chunk = column / BL_GROUP + n;
        *(uint32_t *)(tile + tile_at<D>(row + g, chunk) + 2 * t) =
            bl_bf16_pair(c[n][0] * factor_low, c[n][1] * factor_low);
        *(uint32_t *)(tile + tile_at<D>(row + g + 8, chunk) + 2 * t) =
            bl_bf16_pair(c[n][2] * factor_high, c[n][3] * factor_high);
    }
}

/* ---- products of tiles ---- */

/* Where a lane's row of a tile begins and, in it, its chunk of the first 16 columns: those of the
 * columns from 16 k on are at row + (chunk ^ 16 k). */
typedef struct tile_lane {
    int row, chunk;
} tile_lane;

template <int D> __device__ static inline tile_lane tile_lane_at(int row, int chunk)
{
    tile_lane lane = {row * D, tile_at<D>(row, chunk) - row * D};
    mma_forget(lane.chunk); /* else the addresses for all k occupy registers */
    return lane;
}

/* c = A B^T: A the rows [row, row + 16 M) of tile a, B the N rows of tile b. */
template <int D, int M, int N>
__device__ static inline void tile_products(float (&c)[M][N / 8][4], const bl_bf16 *a, int row,
                                            const bl_bf16 *b)
{
    int lane = (int)threadIdx.x % BL_WARP;
    tile_lane of_a = tile_lane_at<D>(row + lane % 16, lane / 16),
              of_b = tile_lane_at<D>(lane % 8 + lane / 16 * 8, lane / 8 % 2);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N / 8; n++) c[m][n][0] = c[m][n][1] = c[m][n][2] = c[m][n][3] = 0.0f;
#pragma unroll
    for (int k = 0; k < D / 16; k++) {
        uint32_t left[M][4];
#pragma unroll
        for (int m = 0; m < M; m++)
            mma_load(left[m], a, of_a.row + (of_a.chunk ^ (16 * k)) + 16 * m * D);
#pragma unroll
        for (int n = 0; n < N / 16; n++) {
            uint32_t right[4]; /* of columns 16 n .. +7 and 16 n + 8 .. +15 */
            mma_load(right, b, of_b.row + (of_b.chunk ^ (16 * k)) + 16 * n * D);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_multiply(c[m][2 * n], left[m], right);
                mma_multiply(c[m][2 * n + 1], left[m], right + 2);
            }
        }
    }
}

/* c += P B: P of N columns in A's layout, B the N rows of tile b, its columns [column, column +
 * COLS), column a multiple of COLS. */
template <int D, int M, int N, int COLS>
__device__ static inline void tile_add_weighted(float (&c)[M][COLS / 8][4],
                                                const uint32_t (&p)[M][N / 16][4], const bl_bf16 *b,
                                                int column)
{
    int lane = (int)threadIdx.x % BL_WARP;
    tile_lane of_b = tile_lane_at<D>(lane % 16, column / BL_GROUP + lane / 16);
#pragma unroll
    for (int k = 0; k < N / 16; k++)
#pragma unroll
        for (int n = 0; n < COLS / 16; n++) {
            uint32_t right[4];
            mma_load_transposed(right, b, of_b.row + (of_b.chunk ^ (16 * n)) + 16 * k * D);
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma_multiply(c[m][2 * n], p[m][k], right);
                mma_multiply(c[m][2 * n + 1], p[m][k], right + 2);
            }
        }
}

/* Numbers in C's layout, rounded to bf16, in A's. */
template <int M, int N>
__device__ static inline void tile_round(const float (&c)[M][N / 8][4], uint32_t (&p)[M][N / 16][4])
{
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int k = 0; k < N / 16; k++) {
            p[m][k][0] = bl_bf16_pair(c[m][2 * k][0], c[m][2 * k][1]);
            p[m][k][1] = bl_bf16_pair(c[m][2 * k][2], c[m][2 * k][3]);
            p[m][k][2] = bl_bf16_pair(c[m][2 * k + 1][0], c[m][2 * k + 1][1]);
            p[m][k][3] = bl_bf16_pair(c[m][2 * k + 1][2], c[m][2 * k + 1][3]);
        }
}

/* ---- documents ---- */

/* Tokens that belong to a document. */
__device__ static inline int attention_n_tokens(const attention_call &call)
{
    return call.cu_seqlens[call.n_documents];
}

/* starts[r]: the first key that query first + r sees, INT_MAX for a row that belongs to no
 * document; its last key is first + r + position_offset. They grow with r. Needs a barrier. */
template <int ROWS>
__device__ static inline void attention_starts(const attention_call &call, int first, int *starts)
{
    int n_tokens = attention_n_tokens(call);
    for (int r = (int)threadIdx.x; r < ROWS; r += ATTENTION_THREADS) {
        int token = first + r;
        starts[r] =
            token < n_tokens
                ? max(call.cu_seqlens[bl_document_of(call.cu_seqlens, call.n_documents, token)],
                      token + call.position_offset - call.window + 1)
                : INT_MAX;
    }
}

/* Whether some of the rows, whose starts are given, see some of the keys [key, key + n_keys); all =
 * all see all. */
typedef struct attention_view {
    bool any, all;
} attention_view;

__device__ static inline attention_view attention_look(const attention_call &call,
                                                       const int *starts, int first, int n_rows,
                                                       int key, int n_keys)
{
    int newest = first + call.position_offset; /* the first row's last key */
    attention_view view = {starts[0] < key + n_keys && newest + n_rows - 1 >= key,
                           starts[n_rows - 1] <= key && newest >= key + n_keys - 1};
    return view;
}

/* Scores of 16 M rows, whose starts are given, and N keys from `key` on: minus infinity where the
 * row does not see the key. last: the last key that the first row sees. */
template <int M, int N>
__device__ static inline void mask_scores(float (&s)[M][N / 8][4], const int *starts, int last,
                                          int key)
{
    int lane = (int)threadIdx.x % BL_WARP, t = lane % 4;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = 16 * m + 8 * half + lane / 4, start = starts[row] - key - 2 * t,
                end = last + row - key - 2 * t;
#pragma unroll
            for (int n = 0; n < N / 8; n++)
#pragma unroll
                for (int i = 0; i < 2; i++)
                    if (8 * n + i < start || 8 * n + i > end) s[m][n][2 * half + i] = -INFINITY;
        }
}

/* ---- host side ---- */

/* The call of these arguments. BL_EINTERNAL: sizes past a kernel's integers. */
static inline bl_status attention_prepare(attention_call *call, int64_t T, int64_t n_heads,
                                          int64_t n_kv_heads, int64_t d, int64_t n_documents,
                                          int64_t position_offset, int64_t window, int64_t q_stride,
                                          int64_t kv_stride, int64_t o_stride,
                                          const int32_t *cu_seqlens)
{
    const int64_t most = INT_MAX / 2; /* a tile's end stays an int */
    if (T < 0 || n_documents < 0 || T > most || position_offset > most - T || n_heads > most ||
        n_documents > most)
        return BL_FAIL(
            BL_EINTERNAL, "attention: %lld tokens, offset %lld, %lld heads, %lld documents",
            (long long)T, (long long)position_offset, (long long)n_heads, (long long)n_documents);
    call->T = (int)T;
    call->n_heads = (int)n_heads;
    call->group = (int)(n_heads / n_kv_heads);
    call->d = (int)d;
    call->n_documents = (int)n_documents;
    call->position_offset = (int)position_offset;
    call->window = (int)(window > 0 && window < most ? window : most);
    call->q_stride = q_stride;
    call->kv_stride = kv_stride;
    call->o_stride = o_stride;
    call->cu_seqlens = cu_seqlens;
    call->scale = (float)(1.0 / sqrt((double)d));
    return BL_OK;
}

/* Of n_blocks blocks with so much shared memory. */
static inline bl_grid attention_grid(int64_t n_blocks, int shared_bytes)
{
    bl_grid grid = {n_blocks, ATTENTION_THREADS, 1};
    grid.shared_bytes = (size_t)shared_bytes;
    return grid;
}

/* Whether the kernels may be WIDE. */
static inline bool attention_is_wide(const attention_call &call, const bl_tensor *matrices,
                                     int n_matrices)
{
    bool is_wide = call.d % BL_GROUP == 0 && call.q_stride % BL_GROUP == 0 &&
                   call.kv_stride % BL_GROUP == 0 && call.o_stride % BL_GROUP == 0;
    for (int i = 0; i < n_matrices; i++) is_wide = is_wide && bl_is_aligned(matrices[i].data);
    return is_wide;
}

/* f<D, WIDE>(...), D by d. Any D from d on gives the right result. */
#define ATTENTION_DISPATCH(is_wide, d, f, ...)                                                     \
    (!(is_wide)   ? (d) <= 64 ? f<64, false>(__VA_ARGS__) : f<256, false>(__VA_ARGS__)             \
       : (d) <= 32 ? f<32, true>(__VA_ARGS__)                                                      \
     : (d) <= 64  ? f<64, true>(__VA_ARGS__)                                                       \
     : (d) <= 96  ? f<96, true>(__VA_ARGS__)                                                       \
     : (d) <= 128 ? f<128, true>(__VA_ARGS__)                                                      \
                  : f<256, true>(__VA_ARGS__))

#endif
