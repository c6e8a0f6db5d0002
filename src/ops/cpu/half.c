/* SPDX-License-Identifier: Apache-2.0 */
/* half.c -- bf16 tensors as the fp32 rows that the CPU's kernels compute on: rows are widened into
 * the first-level cache and rounded from there. */
#include "ops/cpu/ops_cpu.h"

OPS_CLONES static void widen_row(int64_t n, const uint16_t *x, float *y)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        *(vu16 *)(y + i) = __builtin_convertvector(*(const vh16 *)(x + i), vu16) << 16;
    for (; i < n; i++) y[i] = bl_bf16_to_f32(x[i]);
}

/* y_i = bf16(factor x_i), 16 elements at a time; y may be where x is. */
OPS_CLONES static void scale_round_row(int64_t n, float factor, const float *x, uint16_t *y)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        vf16 scaled = *(const vf16 *)(x + i) * factor;
        ops_round_16((const float *)&scaled, y + i);
    }
    for (; i < n; i++) y[i] = bl_f32_to_bf16(x[i] * factor);
}

OPS_CLONES static void round_row(int64_t n, const float *x, uint16_t *y)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) ops_round_16(x + i, y + i);
    for (; i < n; i++) y[i] = bl_f32_to_bf16(x[i]);
}

void ops_widen(int64_t n, const uint16_t *x, float *y)
{
    widen_row(n, x, y);
}

void ops_round(int64_t n, const float *x, uint16_t *y)
{
    round_row(n, x, y);
}

void ops_scale_round(int64_t n, float factor, const float *x, uint16_t *y)
{
    scale_round_row(n, factor, x, y);
}

const float *ops_read(bl_tensor t, int64_t at, int64_t n, float *copy)
{
    if (t.dtype == BL_F32) return (const float *)t.data + at;
    widen_row(n, (const uint16_t *)t.data + at, copy);
    return copy;
}

void ops_write(bl_tensor t, int64_t at, int64_t n, const float *values)
{
    if (t.dtype != BL_F32) round_row(n, values, (uint16_t *)t.data + at);
}
