/* SPDX-License-Identifier: Apache-2.0 */
/* emulate.h -- enough of CUDA C++ to compile the .cu files with a C++ compiler and run their
 * kernels on the CPU. Included before everything else (-include).
 *
 * A thread of a kernel is a coroutine. The blocks of a grid run one after the other, those of a
 * cluster side by side, in an order that depends on BALLAST_EMULATED_SEED; so does the order of a
 * block's threads between two barriers. At a barrier or a warp operation a thread waits for the
 * others; one that some threads never reach ends the program with a line. Shared memory is filled
 * with 0xff, which is NaN, when a block begins. README.md lists the faults that this finds, and
 * those that it cannot find. */
#ifndef BALLAST_TESTS_EMULATE_EMULATE_H
#define BALLAST_TESTS_EMULATE_EMULATE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <functional>
#include <type_traits>

#ifdef __SANITIZE_THREAD__
#include "instrument.h"
#endif

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline __attribute__((always_inline))
#define __align__(n)    __attribute__((aligned(n)))
#define __launch_bounds__(...)
/* used: interprocedural optimization must not assume that a barrier leaves a variable unchanged. */
#define __shared__ static __attribute__((section("emulated_shared"), used))
#ifndef __CUDA_ARCH__
#define __CUDA_ARCH__ 900
#endif
#define threadIdx emulated_thread_idx
#define blockIdx  emulated_block_idx
#define blockDim  emulated_block_dim
#define gridDim   emulated_grid_dim

using std::max;
using std::min;

struct emulated_index {
    unsigned x, y, z;
};
extern emulated_index threadIdx, blockIdx, blockDim, gridDim;

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

/* ---- the emulator's interface; kernels reach it through CUDA's names below ---- */

enum { EMULATED_WARP = 32 };

/* All lanes of the warp call this with the same `together`, which runs once, with every lane's
 * `mine`; it may read and write them. lanes[i] is NULL where the block has no such thread. Like a
 * shuffle this orders no accesses to memory. */
typedef void emulated_together(void *const lanes[EMULATED_WARP]);
void emulated_warp_together(emulated_together *together, void *mine);

/* Copies every lane's bytes at `mine` to `all` (EMULATED_WARP * bytes), lane by lane. */
void emulated_warp_exchange(const void *mine, size_t bytes, void *all);

/* An asynchronous copy from global to shared memory of 4, 8 or 16 bytes, both sides aligned to as
 * many; bytes from `n_valid` on become 0. dst holds 0xff until the thread has waited for the copy's
 * group. */
void emulated_copy_async(void *dst_shared, const void *src_global, size_t bytes, size_t n_valid);
void emulated_copy_async_commit();
void emulated_copy_async_wait(
    unsigned n_left);                /* until at most the latest n_left groups are in flight */
void emulated_copy_async_wait_all(); /* committed or not */

/* The block's dynamic shared memory, at a multiple of 1024. */
void *emulated_dynamic_shared();

void emulated_sync_cluster();
unsigned emulated_cluster_blocks();
unsigned emulated_cluster_rank();
void *emulated_map_shared(void *mine, unsigned rank);

/* ---- barriers and warp operations ---- */

void __syncthreads();
void emulated_sync_warp();
void emulated_demand_whole_warp(unsigned mask);

static inline void __syncwarp(unsigned mask = 0xffffffffu)
{
    emulated_demand_whole_warp(mask);
    emulated_sync_warp();
}

template <typename T> struct emulated_shuffle {
    T value, result;
    unsigned source;

    static void together(void *const lanes[EMULATED_WARP])
    {
        for (unsigned i = 0; i < EMULATED_WARP; i++) {
            auto *mine = (emulated_shuffle *)lanes[i];
            if (!mine) continue;
            const auto *from = (const emulated_shuffle *)lanes[mine->source % EMULATED_WARP];
            mine->result = from ? from->value : mine->value;
        }
    }
};

static inline unsigned emulated_lane()
{
    return (threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z)) % EMULATED_WARP;
}

template <typename T> static inline T emulated_shuffled(unsigned mask, T value, unsigned source)
{
    static_assert(std::is_trivially_copyable<T>::value && sizeof(T) <= 8, "a shuffle's operand");
    emulated_demand_whole_warp(mask);
    emulated_shuffle<T> mine = {value, value, source};
    emulated_warp_together(emulated_shuffle<T>::together, &mine);
    return mine.result;
}

template <typename T> static inline T __shfl_sync(unsigned mask, T value, int source)
{
    return emulated_shuffled(mask, value, (unsigned)source);
}

template <typename T> static inline T __shfl_xor_sync(unsigned mask, T value, int lanes)
{
    return emulated_shuffled(mask, value, emulated_lane() ^ (unsigned)lanes);
}

/* Lanes past the last keep their own. */
template <typename T> static inline T __shfl_down_sync(unsigned mask, T value, unsigned delta)
{
    unsigned lane = emulated_lane();
    return emulated_shuffled(mask, value, lane + delta < EMULATED_WARP ? lane + delta : lane);
}

template <typename T> static inline T __shfl_up_sync(unsigned mask, T value, unsigned delta)
{
    unsigned lane = emulated_lane();
    return emulated_shuffled(mask, value, lane >= delta ? lane - delta : lane);
}

struct emulated_votes {
    bool predicate;
    unsigned ballot;

    static void together(void *const lanes[EMULATED_WARP])
    {
        unsigned ballot = 0;
        for (unsigned i = 0; i < EMULATED_WARP; i++)
            if (lanes[i] && ((emulated_votes *)lanes[i])->predicate) ballot |= 1u << i;
        for (unsigned i = 0; i < EMULATED_WARP; i++)
            if (lanes[i]) ((emulated_votes *)lanes[i])->ballot = ballot;
    }
};

static inline unsigned __ballot_sync(unsigned mask, int predicate)
{
    emulated_demand_whole_warp(mask);
    emulated_votes mine = {predicate != 0, 0};
    emulated_warp_together(emulated_votes::together, &mine);
    return mine.ballot;
}

static inline int __any_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, predicate) != 0;
}

static inline int __all_sync(unsigned mask, int predicate)
{
    return __ballot_sync(mask, !predicate) == 0;
}

/* ---- vectors and bits ---- */

struct alignas(16) uint4 {
    uint32_t x, y, z, w;
};
struct alignas(8) uint2 {
    uint32_t x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(8) float2 {
    float x, y;
};

static inline uint4 make_uint4(uint32_t x, uint32_t y, uint32_t z, uint32_t w)
{
    return {x, y, z, w};
}

static inline uint2 make_uint2(uint32_t x, uint32_t y)
{
    return {x, y};
}

static inline float4 make_float4(float x, float y, float z, float w)
{
    return {x, y, z, w};
}

static inline float2 make_float2(float x, float y)
{
    return {x, y};
}

static inline float __uint_as_float(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static inline uint32_t __float_as_uint(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return bits;
}

static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector)
{
    uint64_t bytes = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++)
        result |= (uint32_t)(bytes >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
    return result;
}

static inline int __popc(unsigned bits)
{
    return __builtin_popcount(bits);
}

/* ---- arithmetic: a GPU's approximations are the C library's functions here ---- */

#define __expf  expf
#define __exp2f exp2f
#define __logf  logf
#define __log2f log2f

static inline float __fdividef(float x, float y)
{
    return x / y;
}

static inline float rsqrtf(float x)
{
    return 1.0f / sqrtf(x);
}

/* ---- loads and stores: those of a warp should cover whole sectors of 32 bytes. Of those that go
 * through these, the tests ask which share does. ---- */

void emulated_note_access(const void *p, unsigned bytes, bool is_store);

static inline void emulated_note(const uint4 *p, bool is_store)
{
    emulated_note_access(p, sizeof *p, is_store);
}

static inline void emulated_note(const uint2 *p, bool is_store)
{
    emulated_note_access(p, sizeof *p, is_store);
}

static inline void emulated_note(const void *, bool) {
} /* eight floats of a thread are two stores, with gaps */

template <typename T> static inline void __stwb(T *p, T value)
{
    emulated_note(p, true);
    *p = value;
}

template <typename T> static inline T __ldcs(const T *p)
{
    emulated_note(p, false);
    return *p;
}

template <typename T> static inline T __ldg(const T *p)
{
    return *p;
}

/* ---- the runtime ---- */

typedef void *cudaStream_t;
typedef int cudaError_t;
enum { cudaSuccess = 0, cudaErrorInvalidValue = 1, cudaErrorInvalidConfiguration = 9 };
enum { cudaMemcpyDeviceToDevice = 3 };
enum { cudaLaunchAttributeClusterDimension = 4 };
enum { cudaFuncAttributeMaxDynamicSharedMemorySize = 8 };

struct cudaLaunchAttribute {
    int id;
    struct {
        dim3 clusterDim;
    } val;
};

struct cudaLaunchConfig_t {
    dim3 gridDim, blockDim;
    size_t dynamicSmemBytes;
    cudaStream_t stream;
    cudaLaunchAttribute *attrs;
    unsigned numAttrs;
};

struct emulated_grid {
    dim3 blocks, threads;
    unsigned n_clustered; /* along x */
    size_t shared_bytes;  /* dynamic */
    const void *kernel;
};

/* A kernel's parameters during its launch: n addresses after the first, which is NULL, and their
 * sizes. */
struct emulated_parameters {
    const void *const *at;
    const size_t *bytes;
    size_t n;
};

/* Queues the grid on a stream; one grid runs at a time. Returns CUDA's error for a grid that the
 * device cannot run. */
cudaError_t emulated_launch(cudaStream_t stream, const emulated_grid &grid,
                            const emulated_parameters &parameters, std::function<void()> thread);
cudaError_t emulated_set_most_shared(const void *kernel, int bytes);

template <typename... Parameters, typename... Arguments>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config,
                                             void (*kernel)(Parameters...), Arguments... arguments)
{
    emulated_grid grid = {config->gridDim, config->blockDim,
                          config->numAttrs ? config->attrs->val.clusterDim.x : 1,
                          config->dynamicSmemBytes, (const void *)kernel};
    return [&](Parameters... values) {
        const void *const at[] = {nullptr, &values...};
        const size_t bytes[] = {0, sizeof values...};
        return emulated_launch(config->stream, grid, {at, bytes, sizeof...(values)},
                               [=] { kernel(values...); });
    }(arguments...);
}

/* Only cudaFuncAttributeMaxDynamicSharedMemorySize: a kernel with more than 48 KiB of dynamic
 * shared memory needs it. */
template <typename... Parameters>
static inline cudaError_t cudaFuncSetAttribute(void (*kernel)(Parameters...), int, int bytes)
{
    return emulated_set_most_shared((const void *)kernel, bytes);
}

extern "C" cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t size_bytes, int kind,
                                       cudaStream_t stream); /* runtime.c */

#endif
