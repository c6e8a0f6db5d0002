/* SPDX-License-Identifier: Apache-2.0 */
/* vector.cuh -- shared code of the kernels of fp8/ and ops/: eight elements at a time, reductions
 * over a block, grids. For .cu files only; included by no C file.
 *
 * A kernel takes its elements in groups of eight neighbors of a row: 16 bytes of bf16. Where rows
 * begin at a multiple of 16 bytes (`aligned`) a whole group is one access; elsewhere, and at a
 * row's end, the same code goes element by element. So there is one path through the arithmetic,
 * and any shape and alignment is right. */
#ifndef BALLAST_FP8_CUDA_VECTOR_CUH
#define BALLAST_FP8_CUDA_VECTOR_CUH

#include <stdint.h>

#include "device/cuda/stream.h"
#include "fp8/cuda/convert.cuh"

enum { BL_GROUP = 8, BL_WARP = 32, BL_BLOCK_THREADS = 256 };
enum { BL_BLOCK_ELEMENTS = BL_BLOCK_THREADS * BL_GROUP };

/* ---- groups; n_valid: how many of the eight exist, at most 8 are read ---- */

__device__ static inline void bl_unpack(uint4 raw, float out[BL_GROUP])
{
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        out[2 * i] = __uint_as_float(words[i] << 16);
        out[2 * i + 1] = __uint_as_float(words[i] & 0xffff0000u);
    }
}

__device__ static inline uint4 bl_pack(const float in[BL_GROUP])
{
    return make_uint4(bl_bf16_pair(in[0], in[1]), bl_bf16_pair(in[2], in[3]),
                      bl_bf16_pair(in[4], in[5]), bl_bf16_pair(in[6], in[7]));
}

/* A group of bf16 as stored; elements that do not exist are 0. It is read once: the cache evicts it
 * before data that all rows share, the weights of norms and the factors of columns. */
__device__ static inline uint4 bl_load_raw(const bl_bf16 *p, int64_t n_valid, bool aligned)
{
    if (aligned && n_valid >= BL_GROUP) return __ldcs((const uint4 *)p);
    uint32_t words[4] = {0, 0, 0, 0};
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
        if (i < n_valid) words[i / 2] |= (uint32_t)p[i] << (16 * (i % 2));
    return make_uint4(words[0], words[1], words[2], words[3]);
}

/* Eight F16 as bf16, each rounded once. */
__device__ static inline uint4 bl_halves_to_bf16(uint4 raw)
{
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
    float values[BL_GROUP];
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
        values[i] = bl_half_to_f32((uint16_t)(words[i / 2] >> (16 * (i % 2))));
    return bl_pack(values);
}

__device__ static inline void bl_load(const bl_bf16 *p, int64_t n_valid, bool aligned,
                                      float out[BL_GROUP])
{
    bl_unpack(bl_load_raw(p, n_valid, aligned), out);
}

__device__ static inline void bl_load(const float *p, int64_t n_valid, bool aligned,
                                      float out[BL_GROUP])
{
    if (aligned && n_valid >= BL_GROUP) {
        float4 low = ((const float4 *)p)[0], high = ((const float4 *)p)[1];
        out[0] = low.x, out[1] = low.y, out[2] = low.z, out[3] = low.w;
        out[4] = high.x, out[5] = high.y, out[6] = high.z, out[7] = high.w;
        return;
    }
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++) out[i] = i < n_valid ? p[i] : 0.0f;
}

__device__ static inline void bl_store_raw(bl_bf16 *p, int64_t n_valid, bool aligned, uint4 raw)
{
    if (aligned && n_valid >= BL_GROUP) {
        __stwb((uint4 *)p, raw); /* an assignment may become four narrow stores */
        return;
    }
    const uint32_t words[4] = {raw.x, raw.y, raw.z, raw.w};
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
        if (i < n_valid) p[i] = (bl_bf16)(words[i / 2] >> (16 * (i % 2)));
}

__device__ static inline void bl_store(bl_bf16 *p, int64_t n_valid, bool aligned,
                                       const float in[BL_GROUP])
{
    bl_store_raw(p, n_valid, aligned, bl_pack(in));
}

__device__ static inline void bl_store(float *p, int64_t n_valid, bool aligned,
                                       const float in[BL_GROUP])
{
    if (aligned && n_valid >= BL_GROUP) {
        __stwb((float4 *)p, make_float4(in[0], in[1], in[2], in[3]));
        __stwb((float4 *)p + 1, make_float4(in[4], in[5], in[6], in[7]));
        return;
    }
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
        if (i < n_valid) p[i] = in[i];
}

/* Eight codes: 8 bytes. */
__device__ static inline void bl_store_codes(uint8_t *p, int64_t n_valid, bool aligned,
                                             const float in[BL_GROUP])
{
    uint32_t words[2] = {bl_e4m3_pair(in[0], in[1]) | bl_e4m3_pair(in[2], in[3]) << 16,
                         bl_e4m3_pair(in[4], in[5]) | bl_e4m3_pair(in[6], in[7]) << 16};
    if (aligned && n_valid >= BL_GROUP) {
        __stwb((uint2 *)p, make_uint2(words[0], words[1]));
        return;
    }
#pragma unroll
    for (int i = 0; i < BL_GROUP; i++)
        if (i < n_valid) p[i] = (uint8_t)(words[i / 4] >> (8 * (i % 4)));
}

/* ---- sums and maxima; every thread of the block calls, blockDim.x is a multiple of 32 ---- */

__device__ static inline double bl_warp_sum(double value)
{
#pragma unroll
    for (int apart = BL_WARP / 2; apart > 0; apart /= 2)
        value += __shfl_xor_sync(0xffffffffu, value, apart);
    return value;
}

__device__ static inline float bl_warp_max(float value)
{
#pragma unroll
    for (int apart = BL_WARP / 2; apart > 0; apart /= 2)
        value = fmaxf(value, __shfl_xor_sync(0xffffffffu, value, apart));
    return value;
}

__device__ static inline uint32_t bl_warp_max_bits(uint32_t value)
{
#pragma unroll
    for (int apart = BL_WARP / 2; apart > 0; apart /= 2)
        value = max(value, __shfl_xor_sync(0xffffffffu, value, apart));
    return value;
}

/* The block's sum, valid in warp 0 only; `partial` has one place a warp and may be used again after
 * a barrier. The order depends on blockDim.x alone. */
__device__ static inline double bl_block_sum(double value, double *partial)
{
    int lane = (int)threadIdx.x % BL_WARP, warp = (int)threadIdx.x / BL_WARP,
        n_warps = (int)blockDim.x / BL_WARP;
    value = bl_warp_sum(value);
    if (lane == 0) partial[warp] = value;
    __syncthreads();
    return warp == 0 ? bl_warp_sum(lane < n_warps ? partial[lane] : 0.0) : 0.0;
}

/* ---- dynamic shared memory ---- */

/* Type *name = BL_DYNAMIC_SHARED(Type): the block's, of bl_grid's shared_bytes, at a multiple of
 * 128 bytes. Every use in a kernel is the same memory. */
#ifdef __CUDACC__
extern __shared__ __align__(128) unsigned char bl_dynamic_shared[];
#define BL_DYNAMIC_SHARED(Type) ((Type *)bl_dynamic_shared)
#else
#define BL_DYNAMIC_SHARED(Type) ((Type *)emulated_dynamic_shared())
#endif

/* ---- host side ---- */

static inline bool bl_is_aligned(const void *p)
{
    return (uintptr_t)p % 16 == 0;
}

/* Threads of a block that takes a row of n elements in groups: a whole number of warps, at most
 * `most`. */
static inline unsigned bl_row_threads(int64_t n, unsigned most)
{
    int64_t n_groups = (n + BL_GROUP - 1) / BL_GROUP,
            threads = (n_groups + BL_WARP - 1) / BL_WARP * BL_WARP;
    if (threads < BL_WARP) return BL_WARP;
    return threads > (int64_t)most ? most : (unsigned)threads;
}

/* n_blocks along x, of n_threads each; neighbors form clusters of n_clustered (Hopper; 1: none).
 * Each block has shared_bytes of dynamic shared memory besides its static one. */
typedef struct bl_grid {
    int64_t n_blocks;
    unsigned n_threads, n_clustered;
    int64_t n_blocks_y = 1, n_blocks_z = 1;
    size_t shared_bytes = 0;
} bl_grid;

enum { BL_GRID_YZ_MAX = 65535, BL_SHARED_PLAIN_MAX = 48 << 10 };

/* Queues kernel(args...); no blocks queue nothing. More than 2^31 - 1 blocks along x or 65,535
 * along y or z, a grid's limits, are BL_EINTERNAL; other failures name `what`. */
template <typename... Parameters, typename... Arguments>
static inline bl_status bl_launch(const char *what, bl_stream *stream, bl_grid grid,
                                  void (*kernel)(Parameters...), Arguments... arguments)
{
    if (grid.n_blocks < 0 || grid.n_blocks > INT32_MAX || grid.n_blocks_y < 0 ||
        grid.n_blocks_y > BL_GRID_YZ_MAX || grid.n_blocks_z < 0 || grid.n_blocks_z > BL_GRID_YZ_MAX)
        return BL_FAIL(BL_EINTERNAL, "%s: a grid of %lld x %lld x %lld blocks", what,
                       (long long)grid.n_blocks, (long long)grid.n_blocks_y,
                       (long long)grid.n_blocks_z);
    if (grid.n_blocks == 0 || grid.n_blocks_y == 0 || grid.n_blocks_z == 0) return BL_OK;
    if (grid.shared_bytes > BL_SHARED_PLAIN_MAX) {
        cudaError_t error = cudaFuncSetAttribute(
            kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, (int)grid.shared_bytes);
        if (error != cudaSuccess) return bl_cuda_fail(what, error);
    }
    cudaLaunchAttribute cluster;
    cluster.id = cudaLaunchAttributeClusterDimension;
    cluster.val.clusterDim.x = grid.n_clustered;
    cluster.val.clusterDim.y = cluster.val.clusterDim.z = 1;
    cudaLaunchConfig_t config = {};
    config.gridDim =
        dim3((unsigned)grid.n_blocks, (unsigned)grid.n_blocks_y, (unsigned)grid.n_blocks_z);
    config.blockDim = dim3(grid.n_threads);
    config.dynamicSmemBytes = grid.shared_bytes;
    config.stream = (cudaStream_t)bl_cuda_stream_handle(stream);
    config.attrs = &cluster;
    config.numAttrs = grid.n_clustered > 1 ? 1 : 0;
    cudaError_t error = cudaLaunchKernelEx(&config, kernel, arguments...);
    return error == cudaSuccess ? bl_cuda_launched(what) : bl_cuda_fail(what, error);
}

static inline bl_status bl_copy(const char *what, bl_stream *stream, void *dst, const void *src,
                                size_t size_bytes)
{
    cudaStream_t handle = (cudaStream_t)bl_cuda_stream_handle(stream);
    cudaError_t error = cudaMemcpyAsync(dst, src, size_bytes, cudaMemcpyDeviceToDevice, handle);
    return error == cudaSuccess ? BL_OK : bl_cuda_fail(what, error);
}

/* Blocks of n_each elements for n of them; negative for a negative n, which bl_launch refuses. */
static inline int64_t bl_blocks_for(int64_t n, int64_t n_each)
{
    return n < 0 ? -1 : (n + n_each - 1) / n_each;
}

#endif
