/* SPDX-License-Identifier: Apache-2.0 */
/* matmul_plan.h -- how a product with a frozen matrix is made on CUDA: which kind of GEMM its formats allow,
 * and what lies where in its scratch. Arithmetic only: no GPU is asked. Internal to ops/. */
#ifndef BALLAST_OPS_CUDA_MATMUL_PLAN_H
#define BALLAST_OPS_CUDA_MATMUL_PLAN_H

#include "ops/cuda/gemm_cuda.h"
#include "ops/matmul.h"

/* The kind that mode, matrix and tokens ask for. BF16 unless mode is FP8, all segments have the same FP8 format and
 * follow each other in memory, rows and cols are multiples of 16, and, for blocks, each segment but the last
 * ends where a block does, so that their grids stack, and T is a multiple of 4: cuBLAS 13, "128-element 1D and
 * 128x128 2D Block Scaling", wants M and N to be, since the tokens' scales lie N to a row. */
ops_gemm_kind ops_matmul_plan_kind(const bl_matmul_weight_args *args);

/* Whether the matrix is one dense bf16 matrix already. */
bool ops_matmul_plan_is_dense(const bl_weight *weight);

/* Offsets into the scratch, multiples of 256, in this order; what a kind does not need takes no room. */
typedef struct ops_matmul_layout {
    size_t workspace; /* BL_MATMUL_SCRATCH_BYTES for cuBLASLt */
    size_t dense;     /* BF16: W (N,K) bf16, unless it is dense already */
    size_t codes;     /* FP8: `in` quantised */
    size_t scales;    /* FP8: its scales: (T), or [ceil(inner/128)][T] */
    size_t turned;    /* FP8, dx: W's codes transposed, (K,N) */
    /* FP8: W's scales as one vector (N), or as one grid in the GEMM's layout. */
    size_t weight_scales;
    size_t ones; /* FP8_ROW, dx: (K) */
    size_t bytes;
} ops_matmul_layout;

ops_matmul_layout ops_matmul_plan_layout(const bl_matmul_weight_args *args, ops_gemm_kind kind);

/* Blocks of 128 along n elements, and the distance of a grid's rows in the GEMM's layout. */
static inline int64_t ops_matmul_blocks(int64_t n)
{
    return (n + BL_FP8_BLOCK - 1) / BL_FP8_BLOCK;
}

static inline int64_t ops_matmul_grid_stride(int64_t n)
{
    return (ops_matmul_blocks(n) + 3) / 4 * 4;
}

#endif
