/* SPDX-License-Identifier: Apache-2.0 */
/* matmul_plan.h -- how a product with a frozen matrix is made on CUDA: which kind of GEMM its
 * formats allow, and the layout of its scratch. Arithmetic only: no GPU is asked. Internal to
 * ops/. */
#ifndef BALLAST_OPS_CUDA_MATMUL_PLAN_H
#define BALLAST_OPS_CUDA_MATMUL_PLAN_H

#include "ops/cuda/gemm_cuda.h"
#include "ops/matmul.h"

/* The kind that mode, matrix and tokens ask for. BF16 unless mode is FP8, all segments have the
 * same FP8 format and follow each other in memory, rows and cols are multiples of 16, and, for
 * blocks, each segment but the last ends where a block does, so that their grids stack, and T is a
 * multiple of 4: cuBLAS 13, "128-element 1D and 128x128 2D Block Scaling", wants M and N to be,
 * since the tokens' scales have N per row. *reason (may be NULL): why mode FP8 gives BF16; else not
 * written. */
ops_gemm_kind ops_matmul_plan_kind(const bl_matmul_weight_args *args, bl_matmul_fallback *reason);

/* Whether the product, of the kind of ops_matmul_plan_kind, has fast sums. */
bool ops_matmul_plan_has_fast_sums(const bl_matmul_weight_args *args, ops_gemm_kind kind);

/* Whether the matrix is one dense bf16 matrix already. */
bool ops_matmul_plan_is_dense(const bl_weight *weight);

/* What is made of the matrix alone: bits of bl_matmul_prepared.made. Those of one kind are there
 * together. */
enum {
    OPS_MADE_DENSE = 1,        /* BF16 */
    OPS_MADE_SCALES = 2,       /* FP8 */
    OPS_MADE_TURNED = 4,       /* FP8 */
    OPS_MADE_TURNED_SCALES = 8 /* FP8 */
};

/* Offsets into prepared memory, multiples of 256; pieces that a kind does not need take no room.
 * Does not depend on T or the direction. */
typedef struct ops_prepared_layout {
    size_t dense; /* BF16: W (N,K) bf16, unless it is dense already */
    /* FP8_ROW: W's scales as one vector (N), for y and dx. FP8_BLOCK: as one grid in the GEMM's
     * layout, for y. */
    size_t scales;
    size_t turned; /* FP8, dx: W's codes transposed, (K,N) */
    /* dx: FP8_ROW: ones (K); FP8_BLOCK: the grid transposed, in the GEMM's layout */
    size_t turned_scales;
    size_t bytes;
} ops_prepared_layout;

ops_prepared_layout ops_matmul_plan_prepared(const bl_weight *weight, ops_gemm_kind kind);

/* Offsets into the scratch, multiples of 256, in this order; pieces that a kind does not need take
 * no room. */
typedef struct ops_matmul_layout {
    size_t workspace; /* BL_MATMUL_SCRATCH_BYTES for cuBLASLt */
    size_t own; /* ops_prepared_layout, where args->prepared has no room for it; whatever T is */
    bool has_own;
    size_t codes;  /* FP8: `in` quantized */
    size_t scales; /* FP8: its scales: (T), or [ceil(inner/128)][T] */
    size_t bytes;
} ops_matmul_layout;

ops_matmul_layout ops_matmul_plan_layout(const bl_matmul_weight_args *args, ops_gemm_kind kind);

/* Tokens that one product takes at most: ops_matmul_plan_piece of the wider side. */
int64_t ops_matmul_plan_tokens(const bl_matmul_weight_args *args);

/* Of n rows or columns that have `elements` each in some matrix of a product, how many one cuBLASLt
 * product takes: all, or, so that no matrix it sees spans 2^31 elements, a multiple of 128 (of 1,
 * where 128 are too many). */
int64_t ops_matmul_plan_piece(int64_t n, int64_t elements);

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
