/* SPDX-License-Identifier: Apache-2.0 */
/* f32_portable.c -- fp32 products on any processor, in vectors of 4. Multiply-adds are fused where
 * the compiler's target has them (this file alone is compiled with -ffp-contract=fast): on AArch64,
 * not on x86-64's baseline. */
#define TARGET
enum { LANES = 4, ROWS = 6 };
#define EACH_ROWS(X) X(1) X(2) X(3) X(4) X(5) X(6)
typedef float vector __attribute__((vector_size(16), aligned(4), may_alias));
#define fma_vector(a, b, c) ((a) * (b) + (c))
#define spread(x)           ((vector){x, x, x, x})

#include "ops/cpu/f32_multiply.h"

static void pack_columns(const float *src, int64_t ld, int64_t depth, int64_t n_cols, float *panel)
{
    for (int64_t k = 0; k < depth; k++)
        for (int64_t j = 0; j < OPS_F32_PANEL; j++)
            panel[k * OPS_F32_PANEL + j] = j < n_cols ? src[j * ld + k] : 0;
}

#if defined(__FP_FAST_FMAF) || defined(__ARM_FEATURE_FMA)
enum { IS_FUSED = 1 };
#else
enum { IS_FUSED = 0 };
#endif

static bool is_there(void)
{
    return true;
}

const ops_f32_kernels ops_f32_kernels_portable = {.name = "portable",
                                                  .is_there = is_there,
                                                  .is_fused = IS_FUSED,
                                                  .rows = ROWS,
                                                  .multiply_adds = 4,
                                                  .multiply = multiply,
                                                  .pack_columns = pack_columns};
