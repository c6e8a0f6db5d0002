/* SPDX-License-Identifier: Apache-2.0 */
/* f32_kernels.h -- products of fp32 on the calling thread: inner loops for each kind of processor,
 * and what is built of them. Internal to ops/: it runs inside pool items.
 *
 * The inner dimension is taken in steps that begin at multiples of OPS_F32_DEPTH. An element of a
 * step is one sum from k = 0 up: sum = 0; sum = fma(a[k], b[k], sum), which fma(alpha, sum, C) adds
 * to the output. So its bits depend on its row of A, its column of B, K, alpha and beta alone: not
 * on the other rows and columns, not on tiles or threads. They are the same on every processor with
 * fused multiply-adds; the portable kernels on a processor without them round products, too. */
#ifndef BALLAST_OPS_CPU_F32_KERNELS_H
#define BALLAST_OPS_CPU_F32_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    OPS_F32_DEPTH = 256, /* of a step; a multiple of BL_FP8_BLOCK */
    OPS_F32_ROWS = 14,   /* of A in a block: the most that a set of kernels takes */
    OPS_F32_A_STRIDE = OPS_F32_DEPTH + 16, /* rows a power of two apart would share cache sets */
    OPS_F32_COLUMN_STRIDE = 16,            /* of A stored transposed */
    OPS_F32_PANEL = 32,                    /* columns of a panel of B */
    OPS_F32_WIDTH = 8 * OPS_F32_PANEL,     /* columns of B that are packed together */
};

/* C (n_rows, n_cols) = alpha A B, or += : over one step of the inner dimension, n_cols <=
 * OPS_F32_PANEL. a[i][k] with rows OPS_F32_A_STRIDE apart; `a_is_columns`: a[k][i] with rows
 * a_step apart. b[k][j] has OPS_F32_PANEL readable columns, rows ldb apart. */
typedef struct ops_f32_block {
    int64_t n_rows, n_cols, depth;
    const float *a, *b;
    bool a_is_columns;
    int64_t a_step, ldb;
    float alpha;
    bool accumulate;
    float *C;
    int64_t ldc;
} ops_f32_block;

typedef struct ops_f32_kernels {
    const char *name;
    bool (*is_there)(void); /* whether this processor runs them */
    bool is_fused;          /* each multiply-add is rounded once */
    int64_t rows;           /* of a block, at most */
    double multiply_adds;   /* per cycle, for choosing tiles */
    void (*multiply)(const ops_f32_block *block);
    /* One panel [depth][OPS_F32_PANEL] of src[j][k], rows ld apart, j < n_cols; else zeros. */
    void (*pack_columns)(const float *src, int64_t ld, int64_t depth, int64_t n_cols, float *panel);
} ops_f32_kernels;

extern const ops_f32_kernels ops_f32_kernels_avx512, ops_f32_kernels_avx2, ops_f32_kernels_portable;

/* The fastest that the processor has, or the set whose name the environment variable
 * BALLAST_CPU_F32 has, with a warning where it is not there. Never NULL; the same throughout the
 * process. */
const ops_f32_kernels *ops_f32_kernels_best(void);

/* The rows of A that a block multiplies. */
typedef struct ops_f32_rows {
    float a[OPS_F32_DEPTH * OPS_F32_COLUMN_STRIDE];
} ops_f32_rows;
_Static_assert(OPS_F32_ROWS *OPS_F32_A_STRIDE <= OPS_F32_DEPTH * OPS_F32_COLUMN_STRIDE &&
                   (int)OPS_F32_ROWS <= (int)OPS_F32_COLUMN_STRIDE,
               "rows fit either way");

/* A caller's temporary memory, aligned to 64 bytes. */
typedef struct ops_f32_scratch {
    ops_f32_rows rows;
    float b[OPS_F32_DEPTH * OPS_F32_WIDTH];
} ops_f32_scratch;

/* op(A) (M, depth) of a product, or its part from some row and column on. */
typedef struct ops_f32_left {
    const float *A;
    int64_t lda;
    bool is_transposed;
} ops_f32_left;

/* C (M,N) = alpha op(A) B, or += : B in panels [depth][OPS_F32_PANEL], one after the other, or in
 * place, with rows ldb apart. depth <= OPS_F32_DEPTH. */
typedef struct ops_f32_step {
    ops_f32_left left;
    int64_t M, N, depth;
    const float *panels;
    int64_t panel_step, ldb; /* floats from a panel to the next, from a row of one to the next */
    float alpha;
    bool accumulate;
    float *C;
    int64_t ldc;
} ops_f32_step;

void ops_f32_multiply(const ops_f32_step *step, ops_f32_rows *rows);

/* Panels of columns [0, n_cols) of src[k][j], rows ld apart; of src[j][k]. Zeros fill the last. */
void ops_f32_pack_rows(const float *src, int64_t ld, int64_t depth, int64_t n_cols, float *panels);
void ops_f32_pack_columns(const float *src, int64_t ld, int64_t depth, int64_t n_cols,
                          float *panels);

/* C = beta C, also where C is NaN and beta 0. */
void ops_f32_scale(float *C, int64_t ldc, int64_t n_rows, int64_t n_cols, float beta);

/* C (M,N) = alpha op(A) op(B) + beta C, row-major; op(A) (M,K), op(B) (K,N). beta 0 overwrites C,
 * whatever it held. */
void ops_f32_gemm(bool trans_a, bool trans_b, int64_t M, int64_t N, int64_t K, float alpha,
                  const float *A, int64_t lda, const float *B, int64_t ldb, float beta, float *C,
                  int64_t ldc, ops_f32_scratch *scratch);

#endif
