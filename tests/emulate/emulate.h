/* SPDX-License-Identifier: Apache-2.0 */
/* emulate.h -- enough of CUDA C++ to compile the .cu files with a C++ compiler and run their kernels on the
 * CPU.
 *
 * A thread of a kernel is a coroutine; the blocks of a grid run one after the other, those of a cluster side
 * by side. A barrier and a shuffle let the others of the block or warp come as far; one that some threads
 * never reach ends the program with a line. Threads are resumed forwards and backwards in turn, so that what
 * depends on their order shows. Shared memory lies in a section of its own, one image of it a block, filled
 * with 0xa5 when the block begins. What this cannot show: speed, and memory that threads write and read
 * without a barrier while another order than these two makes a difference. Included before everything else
 * (-include). */
#ifndef BALLAST_TESTS_EMULATE_EMULATE_H
#define BALLAST_TESTS_EMULATE_EMULATE_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <algorithm>
#include <cmath>
#include <functional>

#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __shared__    static __attribute__((section("emulated_shared")))
#define __CUDA_ARCH__ 900
#define __expf        expf
#define threadIdx     emulated_thread_idx
#define blockIdx      emulated_block_idx
#define blockDim      emulated_block_dim
#define gridDim       emulated_grid_dim

using std::max;
using std::min;

struct emulated_index {
    unsigned x, y, z;
};
extern emulated_index threadIdx, blockIdx, blockDim, gridDim;

void __syncthreads();
void emulated_sync_warp();
void emulated_sync_cluster();
unsigned emulated_cluster_blocks();
void *emulated_map_shared(void *mine, unsigned rank);
extern unsigned char emulated_lane_values[1024][8]; /* a thread's, for shuffles */
/* Queues the kernel on a stream; one kernel runs at a time. */
int emulated_launch(void *stream, unsigned n_blocks, unsigned n_threads, unsigned n_clustered,
                    std::function<void()> thread);

/* ---- vectors ---- */

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

static inline uint32_t __byte_perm(uint32_t low, uint32_t high, uint32_t selector)
{
    uint64_t bytes = (uint64_t)high << 32 | low;
    uint32_t result = 0;
    for (int i = 0; i < 4; i++)
        result |= (uint32_t)(bytes >> (8 * (selector >> (4 * i) & 7u)) & 0xffu) << (8 * i);
    return result;
}

template <typename T> static inline T __shfl_xor_sync(unsigned, T value, int mask)
{
    T other;
    memcpy(emulated_lane_values[threadIdx.x], &value, sizeof value);
    emulated_sync_warp();
    memcpy(&other, emulated_lane_values[threadIdx.x ^ (unsigned)mask], sizeof other);
    emulated_sync_warp();
    return other;
}

/* Loads and stores of a warp should cover whole sectors of 32 bytes: of those that go through these, the tests ask which share does. */
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

/* ---- the runtime ---- */

struct dim3 {
    unsigned x, y, z;
    dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
};

typedef void *cudaStream_t;
typedef int cudaError_t;
enum { cudaSuccess = 0, cudaMemcpyDeviceToDevice = 3, cudaLaunchAttributeClusterDimension = 4 };

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

template <typename... Parameters, typename... Arguments>
static inline cudaError_t cudaLaunchKernelEx(const cudaLaunchConfig_t *config,
                                             void (*kernel)(Parameters...), Arguments... arguments)
{
    return emulated_launch(config->stream, config->gridDim.x, config->blockDim.x,
                           config->numAttrs ? config->attrs->val.clusterDim.x : 1,
                           [=] { kernel(arguments...); });
}

extern "C" cudaError_t cudaMemcpyAsync(void *dst, const void *src, size_t size_bytes, int kind,
                                       cudaStream_t stream); /* runtime.c */

#endif
