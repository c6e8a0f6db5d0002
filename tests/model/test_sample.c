/* SPDX-License-Identifier: Apache-2.0 */
/* The choice of the next token, against transformers (tools/golden/sample/make_sample.py) and
 * against shares of many draws. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <math.h>

#include "base/json.h"
#include "model/sample.h"

enum { MAX_VOCAB = 64 };

static bl_token_sampler *new_sampler(bl_sampling sampling, int64_t vocab)
{
    bl_token_sampler *sampler;
    if (bl_token_sampler_create(&sampling, vocab, &sampler) != BL_OK)
        fail_msg("%s", bl_error_text());
    return sampler;
}

static double option(const json_t *options, const char *key, double absent)
{
    const json_t *value = json_object_get(options, key);
    return value ? json_number_value(value) : absent;
}

static void check_case(size_t number, const json_t *c)
{
    const json_t *options = json_object_get(c, "options"), *expected, *ids_list;
    float logits[MAX_VOCAB];
    int32_t ids[MAX_VOCAB];
    double sum, largest = 0;
    size_t i;
    json_t *item;
    const bl_sampling sampling = {.repetition_penalty = option(options, "repetition_penalty", 1),
                                  .temperature = option(options, "temperature", 1),
                                  .top_k = (int64_t)option(options, "top_k", 0),
                                  .top_p = option(options, "top_p", 1),
                                  .min_p = option(options, "min_p", 0)};

    json_array_foreach(json_object_get(c, "logits"), i, item) logits[i] =
        (float)json_number_value(item);
    size_t vocab = i;
    ids_list = json_object_get(c, "ids");
    json_array_foreach(ids_list, i, item) ids[i] = (int32_t)json_integer_value(item);
    bl_token_sampler *sampler = new_sampler(sampling, (int64_t)vocab);
    const double *p = bl_token_sampler_probabilities(sampler, logits, ids, (int64_t)i, &sum);
    expected = json_object_get(c, "probabilities");
    for (i = 0; i < vocab; i++) {
        double value = json_number_value(json_array_get(expected, i));
        largest = fmax(largest, fabs(p[i] / sum - value));
        if ((p[i] == 0) != (value == 0))
            fail_msg("case %zu: token %zu has %g, not %g", number, i, p[i] / sum, value);
    }
    if (largest > 1e-12) fail_msg("case %zu: a probability is off by %g", number, largest);
    bl_token_sampler_destroy(sampler);
}

static void test_as_transformers(void **state)
{
    json_t *golden, *item;
    size_t i;

    (void)state;
    assert_int_equal(bl_json_load("tests/golden/sample/cases.json", 1 << 20, &golden), BL_OK);
    json_array_foreach(json_object_get(golden, "cases"), i, item) check_case(i, item);
    assert_int_equal(i, 48);
    json_decref(golden);
}

/* n ids of a sequence: only their number has an effect without a penalty. */
static void check_shares(const float *logits, int64_t vocab, double temperature, double top_p,
                         const double *shares)
{
    enum { DRAWS = 20000 };
    int64_t count[8] = {0};
    bl_token_sampler *sampler = new_sampler(
        (bl_sampling){
            .repetition_penalty = 1, .temperature = temperature, .top_p = top_p, .seed = 7},
        vocab);

    for (int64_t n = 0; n < DRAWS; n++) {
        int32_t id = bl_token_sampler_choose(sampler, logits, NULL, n);
        assert_int_equal(id, bl_token_sampler_choose(sampler, logits, NULL, n));
        count[id]++;
    }
    for (int64_t i = 0; i < vocab; i++) /* five standard deviations of a binomial */
        assert_true(fabs((double)count[i] - DRAWS * shares[i]) <=
                    5 * sqrt(DRAWS * shares[i] * (1 - shares[i])));
    bl_token_sampler_destroy(sampler);
}

static void test_shares_of_draws(void **state)
{
    float logits[5] = {(float)log(0.1), (float)log(0.4), (float)log(0.05), (float)log(0.25),
                       (float)log(0.2)};
    static const float equal[4] = {1, 3, 3, 3}, wide[3] = {-1e30f, 1e30f, 0};
    double roots = sqrt(0.1) + sqrt(0.4) + sqrt(0.05) + sqrt(0.25) + sqrt(0.2);
    (void)state;

    check_shares(logits, 5, 1.0, 1.0, (double[]){0.1, 0.4, 0.05, 0.25, 0.2});
    check_shares(logits, 5, 2.0, 1.0,
                 (double[]){sqrt(0.1) / roots, sqrt(0.4) / roots, sqrt(0.05) / roots,
                            sqrt(0.25) / roots, sqrt(0.2) / roots});
    /* The smallest set of at least 0.6. */
    check_shares(logits, 5, 1.0, 0.6, (double[]){0, 0.4 / 0.65, 0, 0.25 / 0.65, 0});
    check_shares(logits, 5, 1.0, 0.7, (double[]){0, 0.4 / 0.85, 0, 0.25 / 0.85, 0.2 / 0.85});
    check_shares(logits, 5, 1.0, 0.0, (double[]){0, 1, 0, 0, 0});
    check_shares(logits, 5, 1e-6, 1.0, (double[]){0, 1, 0, 0, 0});
    check_shares(equal, 4, 0.0, 0.5, (double[]){0, 1, 0, 0}); /* the lowest id of equals */
    check_shares(wide, 3, 0.5, 0.9, (double[]){0, 1, 0});
}

static void test_seeds_differ(void **state)
{
    static const float logits[5] = {-2.3f, -0.9f, -3.0f, -1.4f, -1.6f};
    int differ = 0;
    int32_t last = -1;
    (void)state;

    for (uint64_t seed = 0; seed <= 100; seed++) {
        bl_token_sampler *sampler = new_sampler(
            (bl_sampling){.repetition_penalty = 1, .temperature = 1, .top_p = 1, .seed = seed}, 5);
        int32_t id = bl_token_sampler_choose(sampler, logits, NULL, 3);
        differ += seed > 0 && id != last;
        last = id;
        bl_token_sampler_destroy(sampler);
    }
    assert_true(differ > 40);
}

/* Greedy choice follows the penalty; equals of the k-th token remain. */
static void test_greedy_penalty_and_equals(void **state)
{
    static const float logits[4] = {2, 1.9f, -1, 1.9f};
    static const int32_t ids[3] = {0, 0, 2};
    double sum;
    (void)state;

    bl_token_sampler *greedy =
        new_sampler((bl_sampling){.repetition_penalty = 1.5, .top_p = 1, .min_p = 0}, 4);
    assert_int_equal(bl_token_sampler_choose(greedy, logits, ids, 3), 1);
    assert_int_equal(bl_token_sampler_choose(greedy, logits, ids, 0), 0);
    bl_token_sampler_destroy(greedy);
    bl_token_sampler *top = new_sampler(
        (bl_sampling){.repetition_penalty = 1, .temperature = 1, .top_p = 1, .top_k = 2}, 4);
    const double *p = bl_token_sampler_probabilities(top, logits, ids, 3, &sum);
    assert_true(p[0] > 0 && p[1] > 0 && p[2] == 0 && p[3] > 0);
    bl_token_sampler_destroy(top);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_as_transformers),
        cmocka_unit_test(test_shares_of_draws),
        cmocka_unit_test(test_seeds_differ),
        cmocka_unit_test(test_greedy_penalty_and_equals),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
