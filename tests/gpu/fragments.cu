/* SPDX-License-Identifier: Apache-2.0 */
/* fragments.cu -- as its header says. */
#include "fragments.h"

#include "fp8/cuda/vector.cuh"
#include "ops/cuda/mma.cuh"

__global__ void multiply_kernel(const uint32_t *a, const uint32_t *b, float *c)
{
    int lane = (int)threadIdx.x;
    float sums[4];
    uint32_t left[4], right[2];

    for (int i = 0; i < 4; i++) {
        left[i] = a[4 * lane + i];
        sums[i] = c[4 * lane + i];
    }
    for (int i = 0; i < 2; i++) right[i] = b[2 * lane + i];
    mma_multiply(sums, left, right);
    for (int i = 0; i < 4; i++) c[4 * lane + i] = sums[i];
}

__global__ void load_kernel(bool is_transposed, const uint16_t *tile, const int32_t *at,
                            uint32_t *out)
{
    __shared__ __align__(16) uint16_t shared[FRAGMENT_TILE];
    int lane = (int)threadIdx.x;
    uint32_t loaded[4];

    for (int i = lane; i < FRAGMENT_TILE; i += FRAGMENT_LANES) shared[i] = tile[i];
    __syncthreads();
    if (is_transposed)
        mma_load_transposed(loaded, shared, at[lane]);
    else
        mma_load(loaded, shared, at[lane]);
    for (int i = 0; i < 4; i++) out[4 * lane + i] = loaded[i];
}

extern "C" bl_status fragments_multiply(bl_stream *stream, const uint32_t *a, const uint32_t *b,
                                        float *c)
{
    bl_grid grid = {1, FRAGMENT_LANES, 1};
    return bl_launch("fragments", stream, grid, multiply_kernel, a, b, c);
}

extern "C" bl_status fragments_load(bl_stream *stream, bool is_transposed, const uint16_t *tile,
                                    const int32_t *at, uint32_t *out)
{
    bl_grid grid = {1, FRAGMENT_LANES, 1};
    return bl_launch("fragments", stream, grid, load_kernel, is_transposed, tile, at, out);
}
