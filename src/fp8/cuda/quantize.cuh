/* SPDX-License-Identifier: Apache-2.0 */
/* quantize.cuh -- quantizes rows of bf16 to E4M3 with a scale per row: code shared by kernels of
 * fp8/, and by kernels of ops/ that also quantize their result. For .cu files only.
 *
 * One block quantizes a row. A row that is too long for a block's registers is quantized by a
 * cluster of up to BL_QUANTIZE_CLUSTER blocks, which exchange their absmax through distributed
 * shared memory. */
#ifndef BALLAST_FP8_CUDA_QUANTIZE_CUH
#define BALLAST_FP8_CUDA_QUANTIZE_CUH

#include <cooperative_groups.h>

#include "fp8/cuda/vector.cuh"
#include "fp8/element.h"

enum {
    BL_QUANTIZE_THREADS = 512,
    BL_QUANTIZE_KEPT = 4, /* groups in a thread's registers: 16 registers */
    BL_QUANTIZE_PIECE = BL_QUANTIZE_THREADS * BL_QUANTIZE_KEPT * BL_GROUP,
    BL_QUANTIZE_CLUSTER = 8 /* the most that every Hopper device grants */
};

__device__ static inline uint32_t bl_group_absmax(const float values[BL_GROUP], uint32_t so_far)
{
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) so_far = bl_absmax_bits(so_far, values[i]);
    return so_far;
}

__device__ static inline void bl_encode_group(bl_e4m3_divisor divisor, float values[BL_GROUP],
                                              uint8_t *codes, int64_t n_valid, bool aligned)
{
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) values[i] = bl_e4m3_quotient(values[i], divisor);
    bl_store_codes(codes, n_valid, aligned, values);
}

/* The absmax of a group of stored bf16, in which missing elements are 0. */
__device__ static inline uint32_t bl_raw_absmax(uint4 raw, uint32_t so_far)
{
    float values[BL_GROUP];
    bl_unpack(raw, values);
    return bl_group_absmax(values, so_far);
}

__device__ static inline void bl_encode_raw(bl_e4m3_divisor divisor, uint4 raw, uint8_t *codes,
                                            int64_t n_valid, bool aligned)
{
    float values[BL_GROUP];
    bl_unpack(raw, values);
    bl_encode_group(divisor, values, codes, n_valid, aligned);
}

/* The maximum of all threads' bits, over the block, then over its cluster; for at most
 * BL_QUANTIZE_THREADS threads. is_odd alternates between the rows of a block. */
__device__ static inline uint32_t bl_row_max(uint32_t bits, [[maybe_unused]] bool is_odd)
{
    __shared__ uint32_t partial[BL_QUANTIZE_THREADS / BL_WARP], of_row;
    int lane = (int)threadIdx.x % BL_WARP, warp = (int)threadIdx.x / BL_WARP;
    bits = bl_warp_max_bits(bits);
    if (lane == 0) partial[warp] = bits;
    __syncthreads();
    if (warp == 0) {
        bits = bl_warp_max_bits(lane < (int)blockDim.x / BL_WARP ? partial[lane] : 0);
        if (lane == 0) of_row = bits;
    }
#if __CUDA_ARCH__ >= 900
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    if (cluster.num_blocks() > 1) {
        /* Other blocks may read the value of one row while that of the next row is written. */
        __shared__ uint32_t of_block[2];
        if (threadIdx.x == 0) of_block[is_odd] = bits;
        cluster.sync();
        if (warp == 0) {
            bits = 0;
            if (lane < (int)cluster.num_blocks())
                bits = *cluster.map_shared_rank(&of_block[is_odd], lane);
            bits = bl_warp_max_bits(bits);
            if (lane == 0) of_row = bits;
        }
    }
#endif
    __syncthreads();
    return of_row;
}

/* Call at the end of a kernel: no block exits while others may read its shared memory. */
__device__ static inline void bl_row_max_end([[maybe_unused]] unsigned n_pieces)
{
#if __CUDA_ARCH__ >= 900
    if (n_pieces > 1) cooperative_groups::this_cluster().sync();
#endif
}

/* The number of blocks for a row of `cols` columns; *piece: the columns of each, a multiple of
 * BL_GROUP. */
static inline int64_t bl_quantize_pieces(int capability, int64_t cols, int64_t *piece)
{
    int64_t n_pieces = capability >= 90 ? bl_blocks_for(cols, BL_QUANTIZE_PIECE) : 1;
    if (n_pieces > BL_QUANTIZE_CLUSTER) n_pieces = BL_QUANTIZE_CLUSTER;
    *piece = bl_blocks_for(bl_blocks_for(cols, n_pieces), BL_GROUP) * BL_GROUP;
    return n_pieces;
}

#endif
