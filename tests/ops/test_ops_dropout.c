/* SPDX-License-Identifier: Apache-2.0 */
/* Philox against the published answers, and dropout's mask: its counters, its rate, its
 * independence of layout and threads. */
#include "ops_test.h"

#include "ops/elementwise.h"
#include "ops/philox.h"

/* Known answers of the paper's Random123 library, kat_vectors, "philox4x32 10". */
static void philox_gives_the_published_answers(void **state)
{
    (void)state;
    static const struct {
        uint32_t counter[4], key[2], want[4];
    } cases[] = {
        {{0, 0, 0, 0}, {0, 0}, {0x6627e8d5, 0xe169c58d, 0xbc57ac4c, 0x9b00dbd8}},
        {{0xffffffff, 0xffffffff, 0xffffffff, 0xffffffff},
         {0xffffffff, 0xffffffff},
         {0x408f276d, 0x41c83b0e, 0xa20bc7c6, 0x6d5451fd}},
        {{0x243f6a88, 0x85a308d3, 0x13198a2e, 0x03707344},
         {0xa4093822, 0x299f31d0},
         {0xd16cfe09, 0x94fdcceb, 0x5001e420, 0x24126ea1}},
    };
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        uint32_t words[4];
        memcpy(words, cases[i].counter, sizeof words);
        bl_philox_4x32_10(words, (bl_philox_key){{cases[i].key[0], cases[i].key[1]}});
        assert_memory_equal(words, cases[i].want, sizeof words);
    }
}

static bl_dropout_args example(int64_t T, int64_t C, const int64_t *sample, const int32_t *position,
                               const float *x, float *y)
{
    return (bl_dropout_args){.T = T,
                             .C = C,
                             .p = 0.1f,
                             .seed = 0x123456789abcdef0u,
                             .step = 77,
                             .layer = 3,
                             .matrix = 2,
                             .sample = sample,
                             .position = position,
                             .x = bl_tensor_f32(x),
                             .y = bl_tensor_f32(y)};
}

/* The mask as philox.h documents it, element by element. */
static void dropout_follows_the_documented_counters(void **state)
{
    (void)state;
    const int64_t columns[] = {1, 3, 64, 100, 172, 1031};
    enum { T = 5 };
    const int64_t sample[T] = {0, 0, 1, (int64_t)1 << 40, 7};
    const int32_t position[T] = {0, 1, 0, 131071, 5};
    for (size_t k = 0; k < BL_COUNT(columns); k++) {
        int64_t C = columns[k];
        float *x = test_random_floats(T * C, 9), *y = test_floats(T * C);
        for (int threads = 1; threads <= 3; threads++) {
            test_device d = test_device_create(threads);
            bl_dropout_args args = example(T, C, sample, position, x, y);
            assert_int_equal(bl_dropout(d.stream, &args), BL_OK);
            test_finish(d);
            for (int64_t t = 0; t < T; t++) {
                for (int64_t c = 0; c < C; c++) {
                    uint32_t key_words[4] = {77, 0, 3, 2};
                    bl_philox_4x32_10(key_words, (bl_philox_key){{0x9abcdef0u, 0x12345678u}});
                    uint32_t words[4] = {(uint32_t)(c / 4), (uint32_t)position[t],
                                         (uint32_t)sample[t], (uint32_t)(sample[t] >> 32)};
                    bl_philox_4x32_10(words, (bl_philox_key){{key_words[0], key_words[1]}});
                    int kept = words[c % 4] >= (uint32_t)floor((double)0.1f * 4294967296.0);
                    float want = kept ? x[t * C + c] * (float)(1.0 / (1.0 - (double)0.1f)) : 0.0f;
                    assert_true(y[t * C + c] == want);
                }
            }
            test_device_destroy(d);
        }
        free(x);
        free(y);
    }
}

static void thresholds_are_exact(void **state)
{
    (void)state;
    assert_int_equal(bl_dropout_threshold(0.5f), 0x80000000u);
    assert_int_equal(bl_dropout_threshold(1.0f - 0x1p-24f), 0xffffff00u);
    assert_int_equal(bl_dropout_threshold(0x1p-40f), 0);
    assert_true(bl_dropout_scale(0.75f) == 4.0f);
}

static void dropout_rate_and_keys(void **state)
{
    (void)state;
    enum { T = 64, C = 1024 };
    int64_t sample[T];
    int32_t position[T];
    float *x = test_floats(T * C), *y = test_floats(T * C), *z = test_floats(T * C);
    for (int t = 0; t < T; t++) {
        sample[t] = t / 16;
        position[t] = t % 16;
    }
    for (int i = 0; i < T * C; i++) x[i] = 1.0f;
    test_device d = test_device_create(2);
    bl_dropout_args args = example(T, C, sample, position, x, y), other = args;
    bl_dropout(d.stream, &args);
    test_finish(d);
    int64_t dropped = 0;
    for (int i = 0; i < T * C; i++) dropped += y[i] == 0.0f;
    /* binomial: n p = 6554, standard deviation 77; five of them */
    assert_true(fabs((double)dropped - 0.1 * T * C) < 5 * 77);

    /* Each part of the key changes the mask: two independent masks agree on 82 % of the
     * elements. */
    for (int part = 0; part < 4; part++) {
        other = args;
        other.y = bl_tensor_f32(z);
        if (part == 0) other.seed++;
        if (part == 1) other.step++;
        if (part == 2) other.layer++;
        if (part == 3) other.matrix++;
        bl_dropout(d.stream, &other);
        test_finish(d);
        int64_t same = 0;
        for (int i = 0; i < T * C; i++) same += y[i] == z[i];
        assert_true(fabs((double)same / (T * C) - 0.82) < 0.01);
    }
    /* A row alone draws the same mask as among others; in place; p = 0 copies. */
    memcpy(z, x, C * sizeof *z);
    other = example(1, C, sample + 37, position + 37, z, z);
    bl_dropout(d.stream, &other);
    test_finish(d);
    test_same_bits("row 37", y + 37 * C, z, C);
    args.p = 0.0f;
    bl_dropout(d.stream, &args);
    test_finish(d);
    test_same_bits("p = 0", x, y, T * C);
    args.T = 0;
    args.p = 0.5f;
    assert_int_equal(bl_dropout(d.stream, &args), BL_OK);
    args.p = 1.0f;
    assert_int_equal(bl_dropout(d.stream, &args), BL_EUSAGE);
    args.p = NAN;
    assert_int_equal(bl_dropout(d.stream, &args), BL_EUSAGE);
    test_finish(d);
    test_device_destroy(d);
    free(x);
    free(y);
    free(z);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(philox_gives_the_published_answers),
        cmocka_unit_test(dropout_follows_the_documented_counters),
        cmocka_unit_test(thresholds_are_exact),
        cmocka_unit_test(dropout_rate_and_keys),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
