/* SPDX-License-Identifier: Apache-2.0 */
/* merge_experts.c -- deltas of routed experts: the factors of a layer's experts are read once for
 * all tensors that have parts of them. */
#include <math.h>
#include <stdlib.h>

#include "base/sizes.h"
#include "convert/merge_internal.h"
#include "ops/gemm.h"
#include "trained/peft.h"

void bl_merge_experts_free(bl_merge_experts *x)
{
    free(x->a);
    free(x->b);
    *x = (bl_merge_experts){0};
}

/* Sizes, and memory for the factors of all adapters. */
static bl_status allocate(const bl_merge *m, int64_t layer, int module, bl_merge_experts *x)
{
    const bl_model_config *config = &m->conversion.config;

    bl_merge_experts_free(x);
    bl_projection_shape(config, module, &x->rows, &x->cols);
    x->n_experts = config->n_experts;
    for (size_t i = 0; i < m->options->n_adapters; i++) {
        const bl_peft_config *peft = bl_peft_get_config(m->terms[i].adapter);
        if (peft->targets >> module & 1) x->r += bl_peft_rank(peft, module);
    }
    x->a = malloc((size_t)(x->n_experts * x->r * x->cols) * sizeof *x->a);
    x->b = malloc((size_t)(x->rows * x->r) * sizeof *x->b);
    if (!x->a || !x->b)
        return BL_FAIL(BL_ENOMEM, "the factors of %lld experts", (long long)x->n_experts);
    x->layer = layer;
    x->module = module;
    return BL_OK;
}

/* Adds those of an adapter: A below, B beside those before, `at` of x->r. factor: as large as the
 * larger of the two. */
static bl_status add_adapter(const bl_merge *m, size_t i, bl_merge_experts *x, int64_t at,
                             float *factor)
{
    const bl_merge_term *term = &m->terms[i];
    int64_t r = bl_peft_rank(bl_peft_get_config(term->adapter), x->module), E = x->n_experts;

    BL_TRY(bl_peft_read(term->adapter, x->layer, x->module, BL_PEFT_A, factor));
    BL_TRY(bl_merge_check_factor(m, i, x->layer, factor, E * r * x->cols));
    for (int64_t e = 0; e < E; e++)
        for (int64_t k = 0; k < r * x->cols; k++)
            x->a[(e * x->r + at) * x->cols + k] = factor[e * r * x->cols + k];
    BL_TRY(bl_peft_read(term->adapter, x->layer, x->module, BL_PEFT_B, factor));
    BL_TRY(bl_merge_check_factor(m, i, x->layer, factor, x->rows * r));
    for (int64_t row = 0; row < x->rows; row++)
        for (int64_t k = 0; k < r; k++)
            x->b[row * x->r + at + k] =
                (float)(term->scale_of[x->module] * (double)factor[row * r + k]);
    return BL_OK;
}

bl_status bl_merge_read_experts(const bl_merge *m, int64_t layer, int module, bl_merge_experts *x)
{
    int64_t at = 0;

    if (x->a && x->layer == layer && x->module == module) return BL_OK;
    BL_TRY(allocate(m, layer, module, x));
    float *factor =
        malloc((size_t)bl_max_i64(x->rows * x->r, x->n_experts * x->r * x->cols) * sizeof *factor);
    if (!factor) return BL_FAIL(BL_ENOMEM, "a factor of %lld experts", (long long)x->n_experts);
    bl_status st = BL_OK;
    for (size_t i = 0; st == BL_OK && i < m->options->n_adapters; i++) {
        const bl_peft_config *peft = bl_peft_get_config(m->terms[i].adapter);
        if (!(peft->targets >> module & 1)) continue;
        st = add_adapter(m, i, x, at, factor);
        at += bl_peft_rank(peft, module);
    }
    free(factor);
    return st;
}

bl_status bl_merge_experts_delta(bl_pool *pool, const bl_merge_experts *x, int64_t row,
                                 int64_t rows, float *delta)
{
    int64_t own = x->rows / x->n_experts;

    for (int64_t end = row + rows, n; row < end; row += n, delta += n * x->cols) {
        int64_t e = row / own;
        n = bl_min_i64(end, (e + 1) * own) - row;
        BL_TRY(bl_cpu_gemm_f32(pool, false, false, n, x->cols, x->r, 1.0f, x->b + row * x->r, x->r,
                               x->a + e * x->r * x->cols, x->cols, 0.0f, delta, x->cols));
    }
    return BL_OK;
}
