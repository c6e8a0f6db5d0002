/* SPDX-License-Identifier: Apache-2.0 */
/* fast_sums.c -- the accumulator in fixed point: of the largest term, 14 bits fit 33 terms into an
 * int32_t. */
#include "fast_sums.h"

#include <math.h>
#include <string.h>

/* 2^exponent, for the exponents of products of E4M3 codes and their sums. */
static float power_of_two(int exponent)
{
    uint32_t bits = (uint32_t)(exponent + 127) << 23;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static int exponent_of(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    return (int)(bits >> 23 & 255) - 127;
}

static float add_terms(float sum, int n, const float *a, const float *b)
{
    float product[EMULATED_FAST_TERMS], most = fabsf(sum);

    for (int i = 0; i < n; i++) product[i] = a[i] * b[i];
    for (int i = 0; i < n; i++) most = fabsf(product[i]) > most ? fabsf(product[i]) : most;
    if (most == 0) return 0;
    int exponent = exponent_of(most) - (EMULATED_FAST_BITS - 1);
    float to_fixed = power_of_two(-exponent);
    int32_t fixed = (int32_t)(sum * to_fixed);
    for (int i = 0; i < n; i++) fixed += (int32_t)(product[i] * to_fixed);
    return (float)fixed * power_of_two(exponent);
}

float emulated_fast_sum(int64_t k, const float *a, const float *b)
{
    float sum = 0;

    for (int64_t i = 0; i < k; i += EMULATED_FAST_TERMS)
        sum = add_terms(sum, (int)(k - i < EMULATED_FAST_TERMS ? k - i : EMULATED_FAST_TERMS),
                        a + i, b + i);
    return sum;
}
