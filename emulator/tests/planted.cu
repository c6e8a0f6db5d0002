/* SPDX-License-Identifier: Apache-2.0 */
/* Kernels with a planted fault (planted.h). They are compiled as the checked kernels are. */
#include "planted.h"

#include <cooperative_groups.h>

#include "fp8/cuda/vector.cuh"

enum { THREADS = PLANTED_THREADS, BLOCKS = PLANTED_BLOCKS };

static bl_status launch_blocks(bl_stream *stream, unsigned n_blocks, unsigned n_clustered,
                               void (*kernel)(planted_args), const planted_args *a,
                               size_t shared_bytes = 0)
{
    bl_grid grid = {n_blocks, THREADS, n_clustered};
    grid.shared_bytes = shared_bytes;
    return bl_launch("planted", stream, grid, kernel, *a);
}

#define LAUNCHER(name, n_blocks, n_clustered, shared_bytes)                                        \
    extern "C" bl_status planted_##name(bl_stream *stream, const planted_args *a)                  \
    {                                                                                              \
        return launch_blocks(stream, n_blocks, n_clustered, name##_kernel, a, shared_bytes);       \
    }

__device__ static inline int here()
{
    return (int)(blockIdx.x * blockDim.x + threadIdx.x);
}

/* ---- races in shared memory ---- */

__global__ void race_kernel(planted_args a)
{
    __shared__ float taken[THREADS];
    int t = (int)threadIdx.x;
    taken[t] = 0.0f;
    __syncthreads();
    taken[t] = a.in[here()];
    if (!a.with_fault) __syncthreads();
    a.out[here()] = taken[(t + 1) % THREADS] + taken[(t + THREADS - 1) % THREADS];
}

__global__ void race_in_warp_kernel(planted_args a)
{
    __shared__ float taken[THREADS];
    int t = (int)threadIdx.x;
    taken[t] = 0.0f;
    __syncthreads();
    taken[t] = a.in[here()];
    if (!a.with_fault) __syncwarp();
    a.out[here()] = taken[t ^ 1];
}

/* What orders the threads of each warp does not order warps, late as one of them may be. */
__global__ void race_between_warps_kernel(planted_args a)
{
    __shared__ float taken[THREADS];
    int t = (int)threadIdx.x, other = t ^ 32;
    float value = a.in[here()];
    taken[t] = 0.0f; /* so that reading too early is a race and nothing else */
    __syncthreads();
    taken[t] = value;
    if (!a.with_fault) __syncthreads();
    for (int i = 0; i < 4 && t / 32 % 2 == 0; i++) value = __shfl_sync(0xffffffffu, value, 0);
    __syncwarp();
    a.out[here()] = t / 32 % 2 == 0 ? taken[other] : value;
}

/* A shuffle lets all lanes come as far, but does not make one's stores visible to the others. */
__global__ void race_after_shuffle_kernel(planted_args a)
{
    __shared__ float taken[THREADS];
    int t = (int)threadIdx.x;
    taken[t] = 0.0f;
    __syncthreads();
    taken[t] = a.in[here()];
    float sum = __shfl_xor_sync(0xffffffffu, 1.0f, 1);
    if (!a.with_fault) __syncwarp();
    a.out[here()] = sum * taken[t ^ 1];
}

/* The barrier after the loop's first round is there, the one before the second round's stores may
 * not be. */
__global__ void overwrite_kernel(planted_args a)
{
    __shared__ float taken[THREADS];
    float sum = 0.0f;
    for (int round = 0; round < 2; round++) {
        taken[threadIdx.x] = a.in[here()] + (float)round;
        __syncthreads();
        sum += taken[THREADS - 1 - threadIdx.x];
        if (!a.with_fault) __syncthreads();
    }
    a.out[here()] = sum;
}

/* Many threads load a byte that one of them stores to next: whichever load is remembered must be
 * one that races. */
__global__ void race_of_loads_kernel(planted_args a)
{
    __shared__ float value;
    if (threadIdx.x == 0) value = 1.0f;
    __syncthreads();
    float seen = value;
    if (!a.with_fault) __syncthreads();
    if (threadIdx.x == THREADS / 2) value = 2.0f;
    a.out[here()] = seen;
}

/* Lane 0 loads the byte that the other lanes loaded earlier, and stores. The checker must not
 * forget their loads because of lane 0's. */
__global__ void race_of_lanes_kernel(planted_args a)
{
    __shared__ float value[THREADS / 32];
    int warp = (int)threadIdx.x / 32, lane = (int)threadIdx.x % 32;
    float seen = 0.0f;
    if (lane == 0) value[warp] = 1.0f;
    __syncwarp();
    if (lane != 0) seen = value[warp];
    seen = __shfl_xor_sync(0xffffffffu, seen, 1);
    if (!a.with_fault) __syncwarp();
    if (lane == 0) value[warp] += seen;
    a.out[here()] = seen;
}

__global__ void not_written_kernel(planted_args a)
{
    __shared__ float taken[THREADS + 1];
    taken[threadIdx.x] = 1.0f;
    __syncthreads();
    a.out[here()] = taken[threadIdx.x + (a.with_fault ? 1 : 0)];
}

__global__ void race_in_cluster_kernel(planted_args a)
{
    __shared__ float value;
    cooperative_groups::cluster_group cluster = cooperative_groups::this_cluster();
    if (threadIdx.x == 0) value = a.in[blockIdx.x];
    cluster.sync();
    float other = *cluster.map_shared_rank(&value, cluster.block_rank() ^ 1);
    if (a.with_fault)
        __syncthreads();
    else
        cluster.sync();
    if (threadIdx.x == 0) value = 0.0f;
    a.out[here()] = other;
    cluster.sync();
}

LAUNCHER(race, BLOCKS, 1, 0)
LAUNCHER(race_in_warp, BLOCKS, 1, 0)
LAUNCHER(race_between_warps, BLOCKS, 1, 0)
LAUNCHER(race_after_shuffle, BLOCKS, 1, 0)
LAUNCHER(overwrite, BLOCKS, 1, 0)
LAUNCHER(race_of_loads, BLOCKS, 1, 0)
LAUNCHER(race_of_lanes, BLOCKS, 1, 0)
LAUNCHER(race_in_cluster, BLOCKS, 2, 0)
LAUNCHER(not_written, BLOCKS, 1, 0)

/* ---- asynchronous copies ---- */

__global__ void copy_kernel(planted_args a)
{
    float *tile = BL_DYNAMIC_SHARED(float);
    emulated_copy_async(tile + 4 * threadIdx.x, a.in + 4 * threadIdx.x, 16, 16);
    emulated_copy_async_commit();
    if (a.with_fault) a.out[4 * threadIdx.x] = tile[4 * threadIdx.x];
    emulated_copy_async_wait(0);
    __syncthreads();
    for (int i = 0; i < 4; i++)
        a.out[i * THREADS + threadIdx.x] = tile[PLANTED_N - 1 - (i * THREADS + threadIdx.x)];
}

/* Two stages: the second round's copy goes where the first round's data may still be read. */
__global__ void copy_overwrites_kernel(planted_args a)
{
    float *tile = BL_DYNAMIC_SHARED(float);
    float sum = 0.0f;
    for (int round = 0; round < 2; round++) {
        emulated_copy_async(tile + threadIdx.x, a.in + round * THREADS + threadIdx.x, 4, 4);
        emulated_copy_async_wait_all();
        __syncthreads();
        sum += tile[THREADS - 1 - threadIdx.x];
        if (!a.with_fault) __syncthreads();
    }
    a.out[here()] = sum;
}

__global__ void copy_unfinished_kernel(planted_args a)
{
    float *tile = BL_DYNAMIC_SHARED(float);
    emulated_copy_async(tile + threadIdx.x, a.in + here(), 4, 4);
    emulated_copy_async_commit();
    if (a.with_fault) return;
    emulated_copy_async_wait(0);
    a.out[here()] = tile[threadIdx.x];
}

LAUNCHER(copy, 1, 1, PLANTED_N * sizeof(float))
LAUNCHER(copy_overwrites, BLOCKS, 1, THREADS * sizeof(float))
LAUNCHER(copy_unfinished, BLOCKS, 1, THREADS * sizeof(float))

/* ---- barriers ---- */

__global__ void barrier_kernel(planted_args a)
{
    if (!a.with_fault || threadIdx.x % 64 == 0)
        __syncthreads();
    else
        __syncwarp();
    a.out[here()] = 1.0f;
}

__global__ void shuffle_kernel(planted_args a)
{
    float value = 1.0f;
    if (!a.with_fault || threadIdx.x != 3) value = __shfl_sync(0xffffffffu, value, 0);
    a.out[here()] = value;
}

__device__ static void exchange_one(void *const *) {}

__global__ void collective_kernel(planted_args a)
{
    if (a.with_fault && threadIdx.x == 3)
        emulated_warp_together(exchange_one, nullptr);
    else
        __syncwarp();
    a.out[here()] = 1.0f;
}

LAUNCHER(barrier, BLOCKS, 1, 0)
LAUNCHER(shuffle, BLOCKS, 1, 0)
LAUNCHER(collective, BLOCKS, 1, 0)

/* ---- addresses ---- */

__global__ void misaligned_kernel(planted_args a)
{
    float4 value = *(const float4 *)(a.in + (a.with_fault ? 1 : 0));
    if (threadIdx.x == 0) *(float4 *)a.out = value;
}

__global__ void bounds_static_kernel(planted_args a)
{
    __shared__ float taken[THREADS];
    taken[threadIdx.x + (a.with_fault ? 1 : 0)] = 1.0f;
    __syncthreads();
    a.out[here()] = taken[threadIdx.x];
}

__global__ void bounds_dynamic_kernel(planted_args a)
{
    float *taken = BL_DYNAMIC_SHARED(float);
    taken[threadIdx.x] = 1.0f;
    __syncthreads();
    a.out[here()] = taken[threadIdx.x + (a.with_fault ? 1 : 0)];
}

LAUNCHER(misaligned, 1, 1, 0)
LAUNCHER(bounds_static, BLOCKS, 1, 0)
LAUNCHER(bounds_dynamic, BLOCKS, 1, THREADS * sizeof(float))

/* ---- blocks ---- */

__global__ void blocks_write_kernel(planted_args a)
{
    a.out[a.with_fault ? (int)threadIdx.x : here()] = 1.0f;
}

/* A thread of one block loads an element that a thread of another has loaded, waits for its own
 * block, and stores. */
__global__ void blocks_load_kernel(planted_args a)
{
    float seen = a.in[blockIdx.x == 0 || a.with_fault ? 0 : here()];
    __syncthreads();
    if (blockIdx.x == 0 && threadIdx.x == 1) const_cast<float *>(a.in)[0] = 2.0f;
    a.out[here()] = seen;
}

__global__ void blocks_read_kernel(planted_args a)
{
    a.out[here()] = 1.0f;
    __syncthreads();
    if (a.with_fault && threadIdx.x == 0 && a.out[(here() + THREADS) % PLANTED_N] != 1.0f)
        a.out[here()] = 2.0f;
}

LAUNCHER(blocks_write, BLOCKS, 1, 0)
LAUNCHER(blocks_read, BLOCKS, 1, 0)
LAUNCHER(blocks_load, BLOCKS, 1, 0)

/* ---- limits of a launch ---- */

__global__ void shared_kernel(float *out, size_t bytes)
{
    unsigned char *all = BL_DYNAMIC_SHARED(unsigned char);
    for (size_t i = threadIdx.x; i < bytes; i += THREADS) all[i] = (unsigned char)i;
    __syncthreads();
    out[threadIdx.x] = (float)all[bytes - 1 - threadIdx.x];
}

extern "C" bl_status planted_shared(bl_stream *stream, float *out, size_t bytes,
                                    bool with_attribute)
{
    if (with_attribute) {
        bl_grid grid = {1, THREADS, 1};
        grid.shared_bytes = bytes;
        return bl_launch("planted", stream, grid, shared_kernel, out, bytes);
    }
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(1);
    config.blockDim = dim3(THREADS);
    config.dynamicSmemBytes = bytes;
    config.stream = (cudaStream_t)bl_cuda_stream_handle(stream);
    cudaError_t error = cudaLaunchKernelEx(&config, shared_kernel, out, bytes);
    return error == cudaSuccess ? bl_cuda_launched("planted") : bl_cuda_fail("planted", error);
}

__global__ void grid_kernel(float *out)
{
    unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z),
             thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
    unsigned lane = (unsigned)__shfl_sync(0xffffffffu, thread, 5);
    if (block < PLANTED_N / 32)
        out[block * 32 + thread] = (float)(block * 1000 + thread + 64 * lane);
}

extern "C" bl_status planted_grid(bl_stream *stream, float *out)
{
    cudaLaunchConfig_t config = {};
    config.gridDim = dim3(3, 5, 2);
    config.blockDim = dim3(4, 4, 2);
    config.stream = (cudaStream_t)bl_cuda_stream_handle(stream);
    cudaError_t error = cudaLaunchKernelEx(&config, grid_kernel, out);
    return error == cudaSuccess ? bl_cuda_launched("planted") : bl_cuda_fail("planted", error);
}

__global__ void order_kernel()
{
    planted_note_thread((int)blockIdx.x, (int)threadIdx.x);
}

extern "C" bl_status planted_order(bl_stream *stream)
{
    return bl_launch("planted", stream, {PLANTED_BLOCKS, THREADS, 1}, order_kernel);
}

__global__ void warps_kernel(float *out)
{
    int t = (int)threadIdx.x, lane = t % 32;
    const unsigned all = 0xffffffffu;
    float of_all[32], mine = (float)(t * t);
    emulated_warp_exchange(&mine, sizeof mine, of_all);
    out[t] = of_all[(lane + 7) % 32];
    out += THREADS;
    out[t] = (float)__popc(__ballot_sync(all, t % 3 == 0));
    out += THREADS;
    out[t] = __shfl_down_sync(all, (float)t, 2);
    out += THREADS;
    out[t] = (float)__shfl_sync(all, (double)t, 31) + (__any_sync(all, lane == 9) ? 0.5f : 0.0f) +
             (__all_sync(all, lane != 9) ? 0.25f : 0.0f);
}

extern "C" bl_status planted_warps(bl_stream *stream, float *out)
{
    return bl_launch("planted", stream, {1, THREADS, 1}, warps_kernel, out);
}

__global__ void strided_kernel(float *out, int stride)
{
    float *words = BL_DYNAMIC_SHARED(float);
    for (int i = (int)threadIdx.x; i < 32 * 33; i += 32) words[i] = (float)i;
    __syncthreads();
    out[threadIdx.x] = words[(int)threadIdx.x * stride];
}

extern "C" bl_status planted_strided(bl_stream *stream, float *out, int stride)
{
    bl_grid grid = {1, 32, 1};
    grid.shared_bytes = 32 * 33 * sizeof(float);
    return bl_launch("planted", stream, grid, strided_kernel, out, stride);
}
