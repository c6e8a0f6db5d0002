/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_kernels.h -- the inner loops of bf16 products, once for every kind of processor. Internal to
 * ops/.
 *
 * A block is a few rows of A times one panel of B, over at most OPS_BF16_DEPTH of the inner
 * dimension, which is taken as pairs (2p, 2p + 1): vdpbf16ps multiplies two pairs at once. A is in
 * rows, OPS_BF16_A_STRIDE elements apart: never a power of two, whose rows would share cache sets.
 * A panel of B is [n_pairs][OPS_BF16_PANEL columns][2], or OPS_BF16_NARROW columns where that is
 * enough. Zeros fill the depth up to a multiple of the kernels' unit, and the columns of a panel.
 *
 * Every element is a sum in one order: sum = 0; for each p: sum += a[2p+1] b[2p+1]; sum += a[2p]
 * b[2p], each rounded once to fp32. That is what vdpbf16ps computes (Intel, Architecture
 * Instruction Set Extensions, 319433, VDPBF16PS; AMD's Zen 4 gives the same bits), and what the
 * emulation computes, too: products of bf16 are exact in fp32. Only where something is subnormal
 * or overflows may they differ: vdpbf16ps takes subnormals as zero.
 *
 * AMX sums in another order: bf16_amx.c. */
#ifndef BALLAST_OPS_CPU_BF16_KERNELS_H
#define BALLAST_OPS_CPU_BF16_KERNELS_H

#include <stdbool.h>
#include <stdint.h>

enum {
    OPS_BF16_DEPTH = 640,
    OPS_BF16_A_STRIDE = OPS_BF16_DEPTH + 32,
    OPS_BF16_ROWS = 32, /* of a block: the most that a set of kernels takes */
    OPS_BF16_PANEL = 32,
    OPS_BF16_NARROW = 16,
    OPS_BF16_DEPTH_UNIT = 32, /* the largest unit of the depth */
};

/* t[i][j] = factor[j] sum_k A[i][k] B[k][j], plus sums[i][j] unless `is_first`. Not `is_last`: sums
 * = t. `is_last`: C = t + beta C, rounded once if C is bf16; beta 0 overwrites. */
typedef struct ops_bf16_block {
    int64_t n_rows, n_cols, n_pairs;
    const uint16_t *a, *panel;
    const float *factor; /* as many as the panel has columns, and so is a row of sums */
    float *sums;
    int64_t sums_ld;
    bool is_first, is_last, c_is_bf16;
    float beta;
    void *C;
    int64_t ldc;
} ops_bf16_block;

/* C (M,N) = alpha A B, or += : A (M, 2 n_pairs) with rows lda apart, B a panel of ldb columns as
 * pack_rows and pack_columns write it (ldb >= N rounded up to OPS_BF16_NARROW), C fp32.
 *
 * Attention is made of it. Its inner dimensions are a head's channels or a block of keys, and its
 * blocks of rows end where the mask does. So A is multiplied where it is, which ops_bf16_block,
 * whose A has a fixed distance of rows, cannot do without a copy, and the registers hold squares
 * of sums, which suit a short inner dimension. */
typedef struct ops_bf16_tile {
    int64_t M, N, n_pairs;
    const uint16_t *A;
    int64_t lda;
    const uint16_t *B;
    int64_t ldb;
    float *C;
    int64_t ldc;
    float alpha;
    bool accumulate;
} ops_bf16_tile;

/* Columns of a panel of which n_cols are used. */
static inline int64_t ops_bf16_panel_width(int64_t n_cols)
{
    return n_cols > OPS_BF16_NARROW ? OPS_BF16_PANEL : OPS_BF16_NARROW;
}

typedef struct ops_bf16_kernels {
    const char *name;
    int64_t rows;         /* of A in a block, at most */
    int64_t depth_unit;   /* of A's rows and of panels as stored: 2, or OPS_BF16_DEPTH_UNIT */
    double multiply_adds; /* per cycle, for choosing tiles */
    /* Around the products of an item, on their thread: registers that the processor keeps only
     * while they are in use. NULL: there are none. */
    void (*begin)(void);
    void (*end)(void);
    /* dst[i] = bf16(src[i]), to nearest even */
    void (*narrow)(const float *src, uint16_t *dst, int64_t n);
    /* Rows of A: dst[i][k] = src[i][k], or bf16(src[i][k] scale[k]) where scale is not NULL. Zeros
     * from `depth` on up to the unit; behind them dst may be written up to whole vectors. */
    void (*copy_rows)(const uint16_t *src, int64_t ld, int64_t n_rows, int64_t depth,
                      const float *scale, uint16_t *dst);
    /* The same of A stored transposed: dst[i][k] = src[k][i]. */
    void (*copy_columns)(const uint16_t *src, int64_t ld, int64_t n_rows, int64_t depth,
                         uint16_t *dst);
    /* One panel of `width` columns, a multiple of OPS_BF16_NARROW, of which n_cols are there;
     * src[k][j], rows ld apart. Rows from `depth` on up to the unit are zeros. */
    void (*pack_rows)(const uint16_t *src, int64_t ld, int64_t depth, int64_t n_cols, int64_t width,
                      uint16_t *panel);
    /* The same of B stored transposed: src[j][k]. */
    void (*pack_columns)(const uint16_t *src, int64_t ld, int64_t depth, int64_t n_cols,
                         int64_t width, uint16_t *panel);
    void (*multiply)(const ops_bf16_block *block);
    void (*multiply_tile)(const ops_bf16_tile *tile);
} ops_bf16_kernels;

static inline void ops_bf16_begin(const ops_bf16_kernels *kernels)
{
    if (kernels->begin) kernels->begin();
}

static inline void ops_bf16_end(const ops_bf16_kernels *kernels)
{
    if (kernels->end) kernels->end();
}

/* The fastest that the processor and the system allow, or the set whose name the environment
 * variable BALLAST_CPU_BF16 has, with a warning where it is not there; the emulation where there
 * are no instructions. Never NULL; the same throughout the process. */
const ops_bf16_kernels *ops_bf16_kernels_best(void);

/* Inputs of the choice. */
typedef struct ops_bf16_host {
    const char *wish; /* the environment variable; NULL: unset */
    bool has_avx512, has_amx;
    int (*request_amx)(void); /* asks the system once for the tiles: 0, or an errno */
    const ops_bf16_kernels *amx, *avx512;
} ops_bf16_host;

const ops_bf16_kernels *ops_bf16_kernels_choose(const ops_bf16_host *host);

/* Whether both have the same bits for a product of small integers, which no order of sums rounds:
 * every part of the tiles is in it. */
bool ops_bf16_kernels_agree(const ops_bf16_kernels *kernels, const ops_bf16_kernels *others);

extern const ops_bf16_kernels ops_bf16_kernels_emulated, ops_bf16_kernels_avx512,
    ops_bf16_kernels_amx;

#endif
