/* SPDX-License-Identifier: Apache-2.0 */
/* bf16_emulated.c -- bf16 products on any processor, with the bits of vdpbf16ps: for tests, and for
 * machines without it. Slower than fp32. */
#include <string.h>

#include "base/dtype.h"
#include "ops/cpu/bf16_kernels.h"
#include "ops/cpu/ops_cpu.h"

enum { LANES = 16 };
_Static_assert(OPS_BF16_PANEL % LANES == 0 && (int)OPS_BF16_NARROW == (int)LANES,
               "panels are whole vectors");

static void narrow(const float *src, uint16_t *dst, int64_t n)
{
    for (int64_t i = 0; i < n; i++) dst[i] = bl_f32_to_bf16(src[i]);
}

static void copy_rows(const uint16_t *src, int64_t ld, int64_t n_rows, int64_t depth,
                      const float *scale, uint16_t *dst)
{
    for (int64_t i = 0; i < n_rows; i++, src += ld, dst += OPS_BF16_A_STRIDE) {
        if (scale)
            for (int64_t k = 0; k < depth; k++)
                dst[k] = bl_f32_to_bf16(bl_bf16_to_f32(src[k]) * scale[k]);
        else
            memcpy(dst, src, (size_t)depth * sizeof *dst);
        if (depth % 2) dst[depth] = 0;
    }
}

static void copy_columns(const uint16_t *src, int64_t ld, int64_t n_rows, int64_t depth,
                         uint16_t *dst)
{
    for (int64_t i = 0; i < n_rows; i++, dst += OPS_BF16_A_STRIDE) {
        for (int64_t k = 0; k < depth; k++) dst[k] = src[k * ld + i];
        if (depth % 2) dst[depth] = 0;
    }
}

static void pack(const uint16_t *src, int64_t k_stride, int64_t j_stride, int64_t depth,
                 int64_t n_cols, int64_t width, uint16_t *panel)
{
    for (int64_t k = 0; k < depth + depth % 2; k++)
        for (int64_t j = 0; j < width; j++)
            panel[(k / 2 * width + j) * 2 + k % 2] =
                k < depth && j < n_cols ? src[k * k_stride + j * j_stride] : 0;
}

static void pack_rows(const uint16_t *src, int64_t ld, int64_t depth, int64_t n_cols, int64_t width,
                      uint16_t *panel)
{
    pack(src, ld, 1, depth, n_cols, width, panel);
}

static void pack_columns(const uint16_t *src, int64_t ld, int64_t depth, int64_t n_cols,
                         int64_t width, uint16_t *panel)
{
    pack(src, 1, ld, depth, n_cols, width, panel);
}

/* sum[j] = sum over k of a[k] b[k][j], one vector of a panel. */
BL_CLONES static void sum_emulated(const uint16_t *a, const uint16_t *b, int64_t n_pairs,
                                   int64_t width, float sum[LANES])
{
    vf16 total = {0};
    for (int64_t p = 0; p < n_pairs; p++) {
        vu16 pairs = *(const vu16 *)(b + p * width * 2), low = pairs << 16,
             high = pairs & 0xffff0000u;
        total += bl_bf16_to_f32(a[2 * p + 1]) * (vf16)high;
        total += bl_bf16_to_f32(a[2 * p]) * (vf16)low;
    }
    memcpy(sum, &total, sizeof total);
}

static void store(const ops_bf16_block *s, int64_t row, int64_t col, float value)
{
    float *sums = s->sums + row * s->sums_ld + col;
    float total = s->factor[col] * value;
    if (!s->is_first) total += *sums;
    if (!s->is_last) {
        *sums = total;
    } else if (s->c_is_bf16) {
        uint16_t *c = (uint16_t *)s->C + row * s->ldc + col;
        *c = bl_f32_to_bf16(s->beta == 0 ? total : total + s->beta * bl_bf16_to_f32(*c));
    } else {
        float *c = (float *)s->C + row * s->ldc + col;
        *c = s->beta == 0 ? total : total + s->beta * *c;
    }
}

static void multiply(const ops_bf16_block *s)
{
    int64_t width = ops_bf16_panel_width(s->n_cols);
    for (int64_t first = 0; first < s->n_cols; first += LANES)
        for (int64_t row = 0; row < s->n_rows; row++) {
            float sum[LANES];
            sum_emulated(s->a + row * OPS_BF16_A_STRIDE, s->panel + 2 * first, s->n_pairs, width,
                         sum);
            for (int64_t j = 0; j < LANES && first + j < s->n_cols; j++)
                store(s, row, first + j, sum[j]);
        }
}

static void multiply_tile(const ops_bf16_tile *t)
{
    for (int64_t row = 0; row < t->M; row++)
        for (int64_t first = 0; first < t->N; first += LANES) {
            float sum[LANES], *c = t->C + row * t->ldc + first;
            sum_emulated(t->A + row * t->lda, t->B + 2 * first, t->n_pairs, t->ldb, sum);
            for (int64_t j = 0; j < LANES && first + j < t->N; j++)
                c[j] = t->accumulate ? t->alpha * sum[j] + c[j] : t->alpha * sum[j];
        }
}

const ops_bf16_kernels ops_bf16_kernels_emulated = {.name = "emulated",
                                                    .rows = 14, /* as vdpbf16ps's */
                                                    .depth_unit = 2,
                                                    .multiply_adds = 32,
                                                    .narrow = narrow,
                                                    .copy_rows = copy_rows,
                                                    .copy_columns = copy_columns,
                                                    .pack_rows = pack_rows,
                                                    .pack_columns = pack_columns,
                                                    .multiply = multiply,
                                                    .multiply_tile = multiply_tile};
