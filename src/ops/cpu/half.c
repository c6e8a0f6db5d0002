/* SPDX-License-Identifier: Apache-2.0 */
/* half.c -- bf16 tensors as the fp32 rows that the CPU's kernels compute on: rows are widened into
 * the first-level cache and rounded from there. */
#include "ops/cpu/ops_cpu.h"

typedef uint32_t vu16 __attribute__((vector_size(64), aligned(4), may_alias));
typedef uint16_t vh16 __attribute__((vector_size(32), aligned(2), may_alias));

OPS_CLONES static void widen_row(int64_t n, const uint16_t *x, float *y)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16)
        *(vu16 *)(y + i) = __builtin_convertvector(*(const vh16 *)(x + i), vu16) << 16;
    for (; i < n; i++) y[i] = bl_bf16_to_f32(x[i]);
}

/* bl_f32_to_bf16, 16 elements at a time. */
OPS_CLONES static void round_row(int64_t n, const float *x, uint16_t *y)
{
    int64_t i = 0;
    for (; i + 16 <= n; i += 16) {
        vu16 bits = *(const vu16 *)(x + i), high = bits >> 16,
             is_nan = (vu16)((bits & 0x7fffffffu) > 0x7f800000u),
             rounded = (bits + 0x7fffu + (high & 1u)) >> 16;
        *(vh16 *)(y + i) =
            __builtin_convertvector((rounded & ~is_nan) | ((high | 0x40u) & is_nan), vh16);
    }
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
