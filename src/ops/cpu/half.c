/* SPDX-License-Identifier: Apache-2.0 */
/* half.c -- bf16 tensors as the fp32 rows that the CPU's kernels compute on: rows are widened into
 * the first-level cache and rounded from there. */
#include "ops/cpu/half_avx512.h"
#include "ops/cpu/ops_cpu.h"

/* The elements of a row that vector kernels compute. */
static int64_t whole_16(int64_t n)
{
    return n & ~INT64_C(15);
}

BL_CLONES static void widen_generic(int64_t n, const uint16_t *x, float *y)
{
    for (int64_t i = 0; i < n; i += 16)
        *(vu16 *)(y + i) = __builtin_convertvector(*(const vh16 *)(x + i), vu16) << 16;
}

BL_CLONES static void round_generic(int64_t n, const float *x, uint16_t *y)
{
    for (int64_t i = 0; i < n; i += 16) ops_round_16(x + i, y + i);
}

BL_CLONES static void scale_round_generic(int64_t n, float factor, const float *x, uint16_t *y)
{
    for (int64_t i = 0; i < n; i += 16) {
        vf16 scaled = *(const vf16 *)(x + i) * factor;
        ops_round_16((const float *)&scaled, y + i);
    }
}

#ifdef HALF_AVX512

HALF_TARGET static void widen_avx512(int64_t n, const uint16_t *x, float *y)
{
    for (int64_t i = 0; i < n; i += 16) _mm512_storeu_ps(y + i, half_widen_16(x + i));
}

HALF_TARGET static void round_avx512(int64_t n, const float *x, uint16_t *y)
{
    for (int64_t i = 0; i < n; i += 16) half_round_16(_mm512_loadu_ps(x + i), y + i);
}

HALF_TARGET static void scale_round_avx512(int64_t n, float factor, const float *x, uint16_t *y)
{
    for (int64_t i = 0; i < n; i += 16)
        half_round_16(_mm512_mul_ps(_mm512_loadu_ps(x + i), _mm512_set1_ps(factor)), y + i);
}
#endif

void ops_widen(int64_t n, const uint16_t *x, float *y)
{
    int64_t whole = whole_16(n);
    OPS_KERNEL(widen)(whole, x, y);
    for (int64_t i = whole; i < n; i++) y[i] = bl_bf16_to_f32(x[i]);
}

void ops_round(int64_t n, const float *x, uint16_t *y)
{
    int64_t whole = whole_16(n);
    OPS_KERNEL(round)(whole, x, y);
    for (int64_t i = whole; i < n; i++) y[i] = bl_f32_to_bf16(x[i]);
}

void ops_scale_round(int64_t n, float factor, const float *x, uint16_t *y)
{
    int64_t whole = whole_16(n);
    OPS_KERNEL(scale_round)(whole, factor, x, y);
    for (int64_t i = whole; i < n; i++) y[i] = bl_f32_to_bf16(x[i] * factor);
}

const float *ops_read(bl_tensor t, int64_t at, int64_t n, float *copy)
{
    if (t.dtype == BL_F32) return (const float *)t.data + at;
    ops_widen(n, (const uint16_t *)t.data + at, copy);
    return copy;
}

void ops_write(bl_tensor t, int64_t at, int64_t n, const float *values)
{
    if (t.dtype != BL_F32) ops_round(n, values, (uint16_t *)t.data + at);
}
