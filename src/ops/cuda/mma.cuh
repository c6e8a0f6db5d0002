/* SPDX-License-Identifier: Apache-2.0 */
/* mma.cuh -- the instructions that attention is made of, one function each: tensor-core products of
 * bf16, loads of their operands from shared memory, asynchronous copies, 2^x. For .cu files only;
 * emulator/ has them in C++. Layouts: PTX ISA, "Matrix Fragments for mma.m16n8k16" and
 * "ldmatrix".
 *
 * Every thread of a warp calls mma_multiply and mma_load*. With lane = 4 g + t of the warp, a
 * register holds two neighbors, the first in its low half:
 *   A (16 x 16): a[0] row g, columns 2t, 2t+1; a[1] row g+8; a[2], a[3] the same rows, columns 8
 *     on.
 *   B (16 x 8):  b[0] rows 2t, 2t+1, column g; b[1] rows 2t+8, 2t+9.
 *   C (16 x 8):  c[0], c[1] row g, columns 2t, 2t+1; c[2], c[3] row g+8. */
#ifndef BALLAST_OPS_CUDA_MMA_CUH
#define BALLAST_OPS_CUDA_MMA_CUH

#include <stdint.h>

/* c += A B, sums in fp32. */
__device__ static inline void mma_multiply(float c[4], const uint32_t a[4], const uint32_t b[2])
{
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 "
                 "{%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Four 8 x 8 matrices from a tile in shared memory: lane 8 m + r says where row r of matrix m is,
 * 16 bytes at a multiple of 16. out[m]: elements 2t, 2t+1 of row g of matrix m. */
__device__ static inline void mma_load(uint32_t out[4], const uint16_t *tile, int at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(tile) + 2 * at)
                 : "memory");
}

/* The same, transposed: out[m]: elements g of rows 2t, 2t+1 of matrix m. */
__device__ static inline void mma_load_transposed(uint32_t out[4], const uint16_t *tile, int at)
{
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(out[0]), "=r"(out[1]), "=r"(out[2]), "=r"(out[3])
                 : "r"((uint32_t)__cvta_generic_to_shared(tile) + 2 * at)
                 : "memory");
}

/* 16 bytes of a tile, at a multiple of 16. */
__device__ static inline uint4 mma_read(const uint16_t *tile, int at)
{
    return *(const uint4 *)(tile + at);
}

/* 16 bytes to shared memory, both at a multiple of 16; zeros, and nothing is read, where !is_there.
 * They have landed for the thread that asked once mma_copies_wait has returned, for others after a
 * barrier on top. */
__device__ static inline void mma_copy(void *shared, const void *global, bool is_there)
{
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;"
                 :
                 : "r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global),
                   "r"(is_there ? 16 : 0)
                 : "memory");
}

/* The same for 4 bytes. */
__device__ static inline void mma_copy_word(void *shared, const void *global, bool is_there)
{
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4, %2;"
                 :
                 : "r"((uint32_t)__cvta_generic_to_shared(shared)), "l"(global),
                   "r"(is_there ? 4 : 0)
                 : "memory");
}

/* Closes the group of the copies that this thread asked for since the last group. */
__device__ static inline void mma_copies_commit(void)
{
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Until at most n_pending groups, the latest, are under way. */
template <int n_pending> __device__ static inline void mma_copies_wait(void)
{
    asm volatile("cp.async.wait_group %0;" ::"n"(n_pending) : "memory");
}

/* 2^x, off by 2 u of it; results below 2^-126 are 0; 0 for minus infinity. */
__device__ static inline float mma_exp2(float x)
{
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

/* The compiler no longer knows where x comes from. */
__device__ static inline void mma_forget(int &x)
{
    asm volatile("" : "+r"(x));
}

#endif
