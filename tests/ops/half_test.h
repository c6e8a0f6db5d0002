/* SPDX-License-Identifier: Apache-2.0 */
/* half_test.h -- numbers that bf16 holds, as fp32 and as bf16. */
#ifndef BALLAST_TESTS_HALF_TEST_H
#define BALLAST_TESTS_HALF_TEST_H

#include "ops_test.h"

#include "base/dtype.h"

/* The rounding error of bf16. */
static const double U_BF16 = 1.0 / 512;

static inline uint16_t *test_rounded(const float *x, int64_t n)
{
    uint16_t *half = test_alloc(n, sizeof *half);
    for (int64_t i = 0; i < n; i++) half[i] = bl_f32_to_bf16(x[i]);
    return half;
}

/* x_i = half_i */
static inline void test_widen(const uint16_t *half, float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = bl_bf16_to_f32(half[i]);
}

/* x_i is rounded to a number of bf16. */
static inline void test_round_floats(float *x, int64_t n)
{
    for (int64_t i = 0; i < n; i++) x[i] = bl_bf16_to_f32(bl_f32_to_bf16(x[i]));
}

#endif
