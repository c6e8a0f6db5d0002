/* SPDX-License-Identifier: Apache-2.0 */
/* The model of Hopper's fast FP8 sums: cuts against an independent one in double, the loss of small
 * terms beside a large one, and the size of the error that DeepSeek-V3 reports (arXiv:2412.19437,
 * 3.3.2: nearly 2 % at most of sums of 4096 products of random values). */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>

#include <cmocka.h>
#include <math.h>
#include <stdio.h>

#include "emulator/fast_sums.h"
#include "fp8/fp8.h"

enum { K = 4096, N_SUMS = 200 };

static uint64_t state_of_random = 88172645463325252u;

static double uniform(void) /* xorshift64, [0, 1) */
{
    state_of_random ^= state_of_random << 13;
    state_of_random ^= state_of_random >> 7;
    state_of_random ^= state_of_random << 17;
    return (double)(state_of_random >> 11) * 0x1p-53;
}

/* Sum of 12 uniform values: normal enough. */
static float random_code(void)
{
    double sum = -6;
    for (int i = 0; i < 12; i++) sum += uniform();
    return bl_e4m3_to_f32(bl_f32_to_e4m3((float)sum));
}

/* Rounds towards zero at the 14th bit of `most`. */
static double cut(double value, double most)
{
    int exponent;
    (void)frexp(most, &exponent); /* most in [2^(exponent - 1), 2^exponent) */
    return ldexp(trunc(ldexp(value, 14 - exponent)), exponent - 14);
}

static double by_definition(int64_t k, const float *a, const float *b)
{
    double sum = 0;

    for (int64_t begin = 0; begin < k; begin += 32) {
        int64_t end = begin + 32 < k ? begin + 32 : k;
        double most = fabs(sum), next;
        for (int64_t i = begin; i < end; i++) most = fmax(most, fabs((double)a[i] * (double)b[i]));
        next = cut(sum, most);
        for (int64_t i = begin; i < end; i++) next += cut((double)a[i] * (double)b[i], most);
        sum = most > 0 ? next : 0;
    }
    return sum;
}

static void test_sums(void **state)
{
    static float a[K], b[K];
    double worst = 0, error = 0, size = 0;

    (void)state;
    for (int n = 0; n < N_SUMS; n++) {
        int64_t k = n < 40 ? n * 7 : K;
        double exact = 0;
        for (int64_t i = 0; i < k; i++) {
            a[i] = random_code();
            b[i] = random_code();
            exact += (double)a[i] * (double)b[i];
        }
        double sum = (double)emulated_fast_sum(k, a, b);
        assert_true(sum == by_definition(k, a, b));
        if (k < K) continue;
        error += (sum - exact) * (sum - exact);
        size += exact * exact;
        worst = fmax(worst, fabs(sum - exact) / sqrt(K));
    }
    printf("%d sums of %d products: error %.2g of their size, at most %.2g\n", N_SUMS, K,
           sqrt(error / size), worst);
    assert_in_range(1e4 * sqrt(error / size), 1e4 * 0.0005, 1e4 * 0.02);
    assert_true(worst < 0.02);
}

/* Beside 1, what is below 2^-13 is lost, term by term, however many there are. */
static void test_small_terms_are_lost(void **state)
{
    float a[K], b[K];

    (void)state;
    for (int i = 0; i < K; i++) a[i] = 0x1p-7f, b[i] = 0x1p-6f;
    a[0] = b[0] = 1;
    assert_true(emulated_fast_sum(K, a, b) == 1 + 4095 * 0x1p-13f);
    for (int i = 1; i < K; i++) b[i] = 0x1p-7f;
    assert_true(emulated_fast_sum(K, a, b) == 1);
    b[0] = -1;
    assert_true(emulated_fast_sum(K, a, b) == -1);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_sums),
                                       cmocka_unit_test(test_small_terms_are_lost)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
