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

MMA_UNCHECKED static inline float mma_low(uint32_t pair)
{
    return __uint_as_float(pair << 16);
}

MMA_UNCHECKED static inline float mma_high(uint32_t pair)
{
    return __uint_as_float(pair & 0xffff0000u);
}

/* Was half of attention's time: so a row of the product at a time, in the compiler's vectors. */
typedef float mma_row __attribute__((vector_size(32)));

struct mma_operands {
    float *c;
    const uint32_t *a, *b;

    MMA_UNCHECKED static void together(void *const lanes[EMULATED_WARP])
    {
        float a[16][16];
        mma_row b[16], c[16];
        for (int lane = 0; lane < EMULATED_WARP; lane++) {
            const auto *mine = (const mma_operands *)lanes[lane];
            int g = lane / 4, t = lane % 4;
            for (int i = 0; i < 4; i++) {
                int row = g + i % 2 * 8, col = 2 * t + i / 2 * 8;
                a[row][col] = mma_low(mine->a[i]);
                a[row][col + 1] = mma_high(mine->a[i]);
                c[g + i / 2 * 8][2 * t + i % 2] = mine->c[i];
            }
            for (int i = 0; i < 2; i++) {
                b[2 * t + 8 * i][g] = mma_low(mine->b[i]);
                b[2 * t + 8 * i + 1][g] = mma_high(mine->b[i]);
            }
        }
        for (int row = 0; row < 16; row++) {
            mma_row sums = c[row];
            for (int k = 0; k < 16; k++) sums += a[row][k] * b[k];
            c[row] = sums;
        }
        for (int lane = 0; lane < EMULATED_WARP; lane++)
            for (int i = 0; i < 4; i++)
                ((mma_operands *)lanes[lane])->c[i] =
                    c[lane / 4 + i / 2 * 8][2 * (lane % 4) + i % 2];
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
