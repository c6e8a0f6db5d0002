/* SPDX-License-Identifier: Apache-2.0 */
/* Stochastic rounding (ops/rounding_internal.h) and AdamW with moments in bf16: the rounding has
 * no bias, its words are uniform and independent, splitting a tensor changes no bit, and the
 * moments stay about a reference in float64.
 *
 * The words are a function of fixed counters: a limit that holds once holds always. Limits are five
 * standard deviations of what independent, uniform words give. */
#include "ops_test.h"

#include "base/dtype.h"
#include "ops/optimizer.h"
#include "ops/rounding_internal.h"

enum { N_WORDS = 1 << 20, BINS = 256 };

static float float_of(uint32_t bits)
{
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* ---- one value ---- */

/* Over all 2^16 random numbers the mean is the value itself, exactly: sums of bf16 numbers near it
 * fit a double. */
static void the_mean_of_all_draws_is_the_value(void **state)
{
    static const uint32_t bits[] = {0x3f800000, 0x3f800001, 0x3f808000, 0x3f80ffff, 0xbf812345,
                                    0x3fffffff, 0x00000001, 0x0000ffff, 0x007fffff, 0x80001234,
                                    0x7f7f0000, 0x00800000, 0x33d6bf95};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(bits); i++) {
        float value = float_of(bits[i]);
        double sum = 0;
        for (uint32_t r = 0; r < 1u << 16; r++) {
            uint16_t rounded = bl_f32_to_bf16_random(value, r | 0xabcd0000u);
            assert_true(rounded == bits[i] >> 16 || rounded == (bits[i] >> 16) + 1);
            sum += (double)bl_bf16_to_f32(rounded);
        }
        assert_true(sum / 65536 == (double)value);
    }
}

static void special_values_stay(void **state)
{
    static const uint32_t bits[] = {0x7f800000, 0xff800000, 0x7f800001, 0xffffffff, 0, 0x80000000};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(bits); i++)
        for (uint32_t r = 0; r < 1u << 16; r++) {
            float value = float_of(bits[i]), got = bl_bf16_to_f32(bl_f32_to_bf16_random(value, r));
            assert_true(isnan(value) ? isnan(got) : memcmp(&got, &value, sizeof got) == 0);
        }
}

/* ---- words ---- */

/* The worst of the bytes' distributions, as standard deviations of chi square (255 degrees of
 * freedom: mean 255, variance 510). */
static double worst_chi(const uint32_t *words)
{
    double worst = 0;
    for (int byte = 0; byte < 4; byte++) {
        int64_t count[BINS] = {0};
        double chi = 0, want = (double)N_WORDS / BINS;
        for (int64_t i = 0; i < N_WORDS; i++) count[words[i] >> 8 * byte & 0xff]++;
        for (int b = 0; b < BINS; b++) chi += ((double)count[b] - want) * ((double)count[b] - want);
        worst = fmax(worst, fabs(chi / want - (BINS - 1)) / sqrt(2.0 * (BINS - 1)));
    }
    return worst;
}

static double half_of(uint32_t word, bool is_high)
{
    return ((double)(is_high ? word >> 16 : word & 0xffff) + 0.5) / 65536 - 0.5;
}

/* Of halves of a and b; independent ones have variance 1 / N_WORDS. */
static double correlation(const uint32_t *a, bool a_high, const uint32_t *b, bool b_high)
{
    double sum = 0;
    for (int64_t i = 0; i < N_WORDS; i++) sum += half_of(a[i], a_high) * half_of(b[i], b_high);
    return 12 * sum / N_WORDS * sqrt((double)N_WORDS);
}

static void fill(uint32_t *words, uint64_t seed, uint64_t step, uint32_t tensor, uint64_t first)
{
    for (uint64_t i = 0; i < N_WORDS; i++)
        words[i] = bl_rounding_word(
            bl_rounding_key_of(bl_rounding_key(seed, step, tensor), (uint32_t)((first + i) >> 32)),
            (uint32_t)(first + i));
}

static void words_are_uniform_and_independent(void **state)
{
    static const struct {
        uint64_t seed, step;
        uint32_t tensor;
        uint64_t first;
    } cases[] = {{42, 1, 0, 0},
                 {42, 2, 0, 0},
                 {42, 1, 1, 0},
                 {43, 1, 0, 0},
                 {42, 1, 0, 1},
                 {42, 1, 0, 64},
                 {42, 1, 0, 4096},
                 {42, 1, 0, UINT64_C(1) << 32},
                 {42, UINT64_C(1) << 32, 0, 0},
                 {UINT64_C(42) << 32, 1, 0, 0}};
    uint32_t *plain = test_alloc(N_WORDS, 4), *other = test_alloc(N_WORDS, 4);
    (void)state;
    fill(plain, 42, 1, 0, 0);
    assert_true(fabs(correlation(plain, false, plain, true)) < 5);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        fill(other, cases[i].seed, cases[i].step, cases[i].tensor, cases[i].first);
        double chi = worst_chi(other);
        if (!(chi < 5)) fail_msg("case %zu: chi square off by %g standard deviations", i, chi);
        for (int halves = 0; halves < 4 && i > 0; halves++) {
            double z = correlation(plain, halves & 1, other, halves >> 1);
            if (!(fabs(z) < 5)) fail_msg("case %zu, halves %d: correlated by %g", i, halves, z);
        }
    }
    free(plain);
    free(other);
}

/* ---- AdamW ---- */

enum { N = 100000, STEPS = 60 };

typedef struct bf16_state {
    float *w, *grad;
    uint16_t *m, *v;
} bf16_state;

static bf16_state create_state(void)
{
    return (bf16_state){test_random_floats(N, 1), test_random_floats(N, 2), test_alloc(N, 2),
                        test_alloc(N, 2)};
}

static void free_state(bf16_state s)
{
    free(s.w), free(s.grad), free(s.m), free(s.v);
}

static bl_adamw_args args_of(bf16_state s, int64_t step, int64_t begin, int64_t n)
{
    return (bl_adamw_args){.n = n,
                           .step = step,
                           .lr = 1e-2,
                           .beta1 = 0.9,
                           .beta2 = 0.999,
                           .eps = 1e-8,
                           .weight_decay = 0.1,
                           .grad = s.grad + begin,
                           .w = s.w + begin,
                           .m = bl_tensor_of(s.m + begin, BL_BF16),
                           .v = bl_tensor_of(s.v + begin, BL_BF16),
                           .seed = 42,
                           .tensor = 5,
                           .first = begin};
}

static void splitting_changes_no_bit(void **state)
{
    static const int64_t sizes[] = {N, 1, 777, 16384, 16385};
    bf16_state want = {0};
    (void)state;
    for (size_t k = 0; k < BL_COUNT(sizes); k++) {
        bf16_state s = create_state();
        test_device d = test_device_create(1 + (int)k % 3);
        for (int64_t step = 1, n; step <= 2; step++)
            for (int64_t begin = 0; begin < N; begin += n) {
                n = begin < 100 || sizes[k] > 1 ? bl_min_i64(sizes[k], N - begin) : N - begin;
                bl_adamw_args args = args_of(s, step, begin, n);
                assert_int_equal(bl_adamw(d.stream, &args), BL_OK);
            }
        test_finish(d);
        test_device_destroy(d);
        if (k == 0) {
            want = s;
            continue;
        }
        assert_memory_equal(s.w, want.w, N * sizeof *s.w);
        assert_memory_equal(s.m, want.m, N * sizeof *s.m);
        assert_memory_equal(s.v, want.v, N * sizeof *s.v);
        free_state(s);
    }
    free_state(want);
}

/* Of each element the gradient of all steps is g (1 + 0.5 (-1)^step). A moment is a sum of unbiased
 * roundings of its value: its mean over the elements, each divided by its float64 value, is 1.
 * The variance of such a quotient is measured; the mean of N has 1 / N of it. Rounding to nearest
 * is far outside: v's increments, a thousandth of it, are less than half a spacing and vanish. */
static void moments_have_no_bias(void **state)
{
    bf16_state s = create_state();
    float *base = test_random_floats(N, 3);
    double m = 0, v = 0, sum[2] = {0}, squares[2] = {0};
    test_device d = test_device_create(2);

    (void)state;
    for (int64_t i = 0; i < N; i++) base[i] = copysignf(0.1f + fabsf(base[i]), base[i]);
    for (int64_t step = 1; step <= STEPS; step++) {
        double factor = step % 2 ? 0.5 : 1.5;
        for (int64_t i = 0; i < N; i++) s.grad[i] = base[i] * (float)factor;
        bl_adamw_args args = args_of(s, step, 0, N);
        assert_int_equal(bl_adamw(d.stream, &args), BL_OK);
        test_finish(d);
        m = 0.9 * m + (1 - 0.9) * factor;
        v = 0.999 * v + (1 - 0.999) * factor * factor;
    }
    for (int64_t i = 0; i < N; i++) {
        double g = (double)base[i], quotient[2] = {(double)bl_bf16_to_f32(s.m[i]) / (m * g),
                                                   (double)bl_bf16_to_f32(s.v[i]) / (v * g * g)};
        for (int k = 0; k < 2; k++) {
            sum[k] += quotient[k] - 1;
            squares[k] += (quotient[k] - 1) * (quotient[k] - 1);
        }
    }
    for (int k = 0; k < 2; k++) {
        double mean = sum[k] / N, deviation = sqrt(squares[k] / N);
        printf("%s after %d steps: mean off by %.1e, standard deviation %.1e\n", k ? "v" : "m",
               STEPS, mean, deviation);
        assert_true(fabs(mean) < 5 * deviation / sqrt(N));
        assert_true(deviation > 1e-4 && deviation < 0.05);
    }
    test_device_destroy(d);
    free(base);
    free_state(s);
}

/* w moves by the moments before they are rounded: a step from widened moments in fp32 has the bits
 * of w. */
static void weights_move_by_unrounded_moments(void **state)
{
    bf16_state s = create_state();
    float *w = test_floats(N), *m = test_floats(N), *v = test_floats(N);
    test_device d = test_device_create(2);

    (void)state;
    for (int64_t step = 1; step <= 3; step++) {
        memcpy(w, s.w, N * sizeof *w);
        assert_true(bl_dtype_to_f32(BL_BF16, s.m, m, N) && bl_dtype_to_f32(BL_BF16, s.v, v, N));
        bl_adamw_args args = args_of(s, step, 0, N), fp32 = args;
        fp32.w = w, fp32.m = bl_tensor_f32(m), fp32.v = bl_tensor_f32(v);
        assert_int_equal(bl_adamw(d.stream, &args), BL_OK);
        assert_int_equal(bl_adamw(d.stream, &fp32), BL_OK);
        test_finish(d);
        assert_memory_equal(s.w, w, N * sizeof *w);
    }
    test_device_destroy(d);
    free(w), free(m), free(v);
    free_state(s);
}

/* Whose lower half rounding would carry into the sign. */
static void gradients_that_are_nan_stay_nan(void **state)
{
    static const uint32_t nan_bits = 0x7fffffff;
    bf16_state s = create_state();
    bl_adamw_args args = args_of(s, 1, 0, N);
    test_device d = test_device_create(2);
    float *grad = test_floats(N);

    (void)state;
    for (int64_t i = 0; i < N; i += 3) memcpy(grad + i, &nan_bits, sizeof *grad);
    args.grad = grad;
    assert_int_equal(bl_adamw(d.stream, &args), BL_OK);
    test_finish(d);
    for (int64_t i = 0; i < N; i++) {
        bool is_nan = i % 3 == 0;
        assert_int_equal(isnan(bl_bf16_to_f32(s.m[i])), is_nan);
        assert_int_equal(isnan(bl_bf16_to_f32(s.v[i])), is_nan);
        assert_int_equal(isnan(s.w[i]), is_nan);
    }
    test_device_destroy(d);
    free(grad);
    free_state(s);
}

static void other_dtypes_are_refused(void **state)
{
    bf16_state s = create_state();
    bl_adamw_args args = args_of(s, 1, 0, N);
    test_device d = test_device_create(1);

    (void)state;
    args.v.dtype = BL_F32;
    assert_int_equal(bl_adamw(d.stream, &args), BL_EINTERNAL);
    args.m.dtype = args.v.dtype = BL_F16;
    assert_int_equal(bl_adamw(d.stream, &args), BL_EINTERNAL);
    test_device_destroy(d);
    free_state(s);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(the_mean_of_all_draws_is_the_value),
        cmocka_unit_test(special_values_stay),
        cmocka_unit_test(words_are_uniform_and_independent),
        cmocka_unit_test(splitting_changes_no_bit),
        cmocka_unit_test(moments_have_no_bias),
        cmocka_unit_test(weights_move_by_unrounded_moments),
        cmocka_unit_test(gradients_that_are_nan_stay_nan),
        cmocka_unit_test(other_dtypes_are_refused),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
