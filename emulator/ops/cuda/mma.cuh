/* SPDX-License-Identifier: Apache-2.0 */
/* mma.cuh -- replaces src/ops/cuda/mma.cuh: the same instructions by the layouts of their
 * documentation (PTX ISA, "Matrix Fragments for mma.m16n8k16", "ldmatrix", "cp.async"). A product's
 * sums are fp32, taken in the order of the columns of A, each rounded: a tensor core's own order
 * and rounding are not documented. */
#ifndef BALLAST_OPS_CUDA_MMA_CUH
#define BALLAST_OPS_CUDA_MMA_CUH

#include <stdint.h>

/* Of the functions that only compute: no checks, of which none concerns a kernel's memory. */
#define MMA_UNCHECKED __attribute__((no_sanitize("undefined"), no_sanitize("thread")))

/* Was half of attention's time: so in vectors that fit a register, several sums at a time. */
typedef float mma_four __attribute__((vector_size(16), may_alias));

struct mma_operands {
    float *c;
    const uint32_t *a, *b;

    MMA_UNCHECKED static void together(void *const lanes[EMULATED_WARP])
    {
        alignas(16) uint32_t a[16][16], b[16][8]; /* bits of floats */
        alignas(16) float c[16][8];
        for (int lane = 0; lane < EMULATED_WARP; lane++) {
            const auto *mine = (const mma_operands *)lanes[lane];
            int g = lane / 4, t = 2 * (lane % 4);
            for (int i = 0; i < 4; i++) {
                uint32_t *pair = &a[g + i % 2 * 8][t + i / 2 * 8];
                pair[0] = mine->a[i] << 16;
                pair[1] = mine->a[i] & 0xffff0000u;
            }
            for (int i = 0; i < 2; i++) {
                b[t + 8 * i][g] = mine->b[i] << 16;
                b[t + 8 * i + 1][g] = mine->b[i] & 0xffff0000u;
                memcpy(&c[g + i * 8][t], mine->c + 2 * i, 2 * sizeof(float));
            }
        }
        for (int row = 0; row < 16; row += 4) multiply_four(&c[row], &a[row], b);
        for (int lane = 0; lane < EMULATED_WARP; lane++)
            for (int i = 0; i < 2; i++)
                memcpy(((mma_operands *)lanes[lane])->c + 2 * i,
                       &c[lane / 4 + i * 8][2 * (lane % 4)], 2 * sizeof(float));
    }

    /* Four rows of c += a b; the terms of a sum in the order of k. */
    MMA_UNCHECKED static void multiply_four(float c[][8], const uint32_t a[][16],
                                            const uint32_t b[16][8])
    {
        mma_four sums[4][2];
        memcpy(sums, c, sizeof sums);
        for (int k = 0; k < 16; k++) {
            const mma_four *row = (const mma_four *)b[k];
#pragma GCC unroll 4
            for (int i = 0; i < 4; i++) {
                float factor;
                memcpy(&factor, &a[i][k], sizeof factor);
                sums[i][0] += factor * row[0];
                sums[i][1] += factor * row[1];
            }
        }
        memcpy(c, sums, sizeof sums);
    }
};

static inline void mma_multiply(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    mma_operands mine = {c, a, b};
    emulated_warp_together(mma_operands::together, &mine);
}

static inline uint4 mma_read(const uint16_t *tile, int at)
{
    uint4 raw;
    if ((uintptr_t)(tile + at) % sizeof raw != 0) __builtin_trap();
    memcpy(&raw, tile + at, sizeof raw); /* one access: an assignment may become four narrow ones */
    return raw;
}

/* Each lane reads its own row, in one access. */
template <bool is_transposed> struct mma_rows {
    uint4 row;
    uint32_t *out;

    static void together(void *const lanes[EMULATED_WARP])
    {
        for (int m = 0; m < 4; m++) {
            uint16_t matrix[8][8];
            for (int r = 0; r < 8; r++)
                memcpy(matrix[r], &((const mma_rows *)lanes[8 * m + r])->row, sizeof matrix[r]);
            for (int lane = 0; lane < EMULATED_WARP; lane++) {
                int g = lane / 4, t = lane % 4;
                uint32_t low = is_transposed ? matrix[2 * t][g] : matrix[g][2 * t],
                         high = is_transposed ? matrix[2 * t + 1][g] : matrix[g][2 * t + 1];
                ((mma_rows *)lanes[lane])->out[m] = low | high << 16;
            }
        }
    }
};

static inline void mma_load(uint32_t out[4], const uint16_t *tile, int at)
{
    mma_rows<false> mine = {mma_read(tile, at), out};
    emulated_warp_together(mma_rows<false>::together, &mine);
}

static inline void mma_load_transposed(uint32_t out[4], const uint16_t *tile, int at)
{
    mma_rows<true> mine = {mma_read(tile, at), out};
    emulated_warp_together(mma_rows<true>::together, &mine);
}

static inline void mma_copy(void *shared, const void *global, bool is_there)
{
    emulated_copy_async(shared, global, 16, is_there ? 16 : 0);
}

static inline void mma_copy_word(void *shared, const void *global, bool is_there)
{
    emulated_copy_async(shared, global, 4, is_there ? 4 : 0);
}

static inline void mma_copies_commit(void)
{
    emulated_copy_async_commit();
}

template <int n_pending> static inline void mma_copies_wait(void)
{
    emulated_copy_async_wait(n_pending);
}

static inline float mma_exp2(float x)
{
    float y = exp2f(x);
    return y < 0x1p-126f ? 0.0f : y;
}

static inline void mma_forget(int &) {}

#endif
