/* SPDX-License-Identifier: Apache-2.0 */
/* The order of the rows, the number of steps and the learning rates.
 *
 * Rates: the tables below were computed with transformers' formulas (optimization.py:
 * get_linear_schedule_with_warmup, get_cosine_schedule_with_warmup,
 * get_constant_schedule_with_warmup) in Python, by hand, for the values that the test sets. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/sizes.h"
#include "train/data/sampler.h"

/* ---- the permutation ---- */

/* Fills rows[n] with one epoch and checks that it has each row once. */
static void read_epoch(int64_t n, uint64_t seed, bool shuffle, int64_t epoch, int64_t *rows)
{
    bl_sampler sampler = {n, seed, shuffle};
    bool *seen = calloc((size_t)n, sizeof *seen);

    assert_non_null(seen);
    for (int64_t i = 0; i < n; i++) {
        rows[i] = bl_sampler_row(&sampler, epoch * n + i);
        assert_in_range(rows[i], 0, n - 1);
        if (seen[rows[i]])
            fail_msg("%d rows, epoch %d: row %d comes twice", (int)n, (int)epoch, (int)rows[i]);
        seen[rows[i]] = true;
    }
    free(seen);
}

static void test_each_row_once(void **state)
{
    static const int64_t large[] = {1000, 1023, 1024, 1025, 4095, 4096, 4097, 65537, 300000};
    int64_t *rows = malloc(300000 * sizeof *rows);

    (void)state;
    assert_non_null(rows);
    for (int64_t n = 1; n <= 130; n++)
        for (int64_t epoch = 0; epoch < 3; epoch++) read_epoch(n, 42, true, epoch, rows);
    for (size_t i = 0; i < BL_COUNT(large); i++) read_epoch(large[i], 7, true, 1, rows);
    read_epoch(100, 42, false, 2, rows);
    for (int64_t i = 0; i < 100; i++) assert_int_equal(rows[i], i);
    free(rows);
}

/* Rows at the same place in two orders of n rows: one on average if the orders are independent, at
 * most 12 with probability 1 - 1e-10 (Poisson). */
static int same_places(const int64_t *a, const int64_t *b, int64_t n)
{
    int same = 0;
    for (int64_t i = 0; i < n; i++) same += a[i] == b[i];
    return same;
}

static void test_orders_differ(void **state)
{
    enum { N = 500 };
    int64_t file_order[N], first[N], again[N], next_epoch[N], far_epoch[N], other_seed[N],
        high_seed[N];

    (void)state;
    read_epoch(N, 42, false, 0, file_order);
    read_epoch(N, 42, true, 0, first);
    read_epoch(N, 42, true, 0, again);
    read_epoch(N, 42, true, 1, next_epoch);
    read_epoch(N, 42, true, INT64_C(1) << 33, far_epoch);
    read_epoch(N, 43, true, 0, other_seed);
    read_epoch(N, 42 + (UINT64_C(1) << 40), true, 0, high_seed);
    assert_memory_equal(first, again, sizeof first);
    const int64_t *const others[] = {file_order, next_epoch, far_epoch, other_seed, high_seed};
    for (size_t i = 0; i < BL_COUNT(others); i++)
        assert_true(same_places(first, others[i], N) <= 12);
}

/* Over 4000 seeds each of 6 rows comes first about equally often: chi-squared with 5 degrees of
 * freedom is below 40 with probability 1 - 1.5e-7. */
static void test_no_row_is_preferred(void **state)
{
    enum { ROWS = 6, SEEDS = 4000 };
    double count[ROWS] = {0}, chi_squared = 0.0;

    (void)state;
    for (uint64_t seed = 0; seed < SEEDS; seed++) {
        bl_sampler sampler = {ROWS, seed, true};
        count[bl_sampler_row(&sampler, 0)]++;
    }
    for (int i = 0; i < ROWS; i++) {
        double expected = (double)SEEDS / ROWS;
        chi_squared += (count[i] - expected) * (count[i] - expected) / expected;
    }
    assert_true(chi_squared < 40.0);
}

/* ---- steps ---- */

static void test_numbers_of_steps(void **state)
{
    bl_train_config c = {.per_device_train_batch_size = 2,
                         .gradient_accumulation_steps = 3,
                         .ranks = 4,
                         .epoch_end = BL_EPOCH_CONTINUE,
                         .num_train_epochs = 3};

    (void)state;
    assert_int_equal(bl_train_batch_rows(&c), 24);
    assert_int_equal(bl_train_total_steps(&c, 240), 30);
    assert_int_equal(bl_train_total_steps(&c, 241), 31); /* 723 rows */
    assert_int_equal(bl_train_total_steps(&c, 1), 1);
    c.num_train_epochs = 0.5;
    assert_int_equal(bl_train_total_steps(&c, 241), 6); /* 121 rows */
    c.max_steps = 7;
    assert_int_equal(bl_train_total_steps(&c, 241), 7);
}

/* ---- transformers' Trainer ---- */

static int64_t integer(const json_t *object, const char *key)
{
    return json_integer_value(json_object_get(object, key));
}

static bl_train_config trainer_case(const json_t *run)
{
    static const char *const schedules[] = {
        [BL_LR_LINEAR] = "linear", [BL_LR_COSINE] = "cosine", [BL_LR_CONSTANT] = "constant"};
    bl_train_config c = {.per_device_train_batch_size = integer(run, "batch"),
                         .gradient_accumulation_steps = integer(run, "accumulation"),
                         .ranks = 1,
                         .num_train_epochs = json_number_value(json_object_get(run, "epochs")),
                         .max_steps = integer(run, "max_steps"),
                         .warmup_steps = integer(run, "warmup_steps"),
                         .learning_rate = 0.001};
    const char *schedule = json_string_value(json_object_get(run, "schedule"));

    for (size_t i = 0; i < BL_COUNT(schedules); i++)
        if (strcmp(schedule, schedules[i]) == 0) c.lr_scheduler_type = (bl_lr_scheduler_type)i;
    return c;
}

/* Steps, rows of each and learning rates: tools/golden/train/make_epochs.py ran the Trainer. */
static void test_epochs_of_the_trainer(void **state)
{
    json_t *golden, *run;
    size_t k;

    (void)state;
    assert_int_equal(bl_json_load("tests/golden/train/epochs.json", 1 << 20, &golden), BL_OK);
    assert_true(json_array_size(json_object_get(golden, "cases")) > 8);
    json_array_foreach(json_object_get(golden, "cases"), k, run)
    {
        bl_train_config c = trainer_case(run);
        const json_t *rows = json_object_get(run, "step_rows"),
                     *rates = json_object_get(run, "rates");
        int64_t n_rows = integer(run, "rows"), n_steps = (int64_t)json_array_size(rows);
        assert_int_equal(bl_train_total_steps(&c, n_rows), n_steps);
        for (int64_t s = 0; s < n_steps; s++) {
            double rate = json_number_value(json_array_get(rates, (size_t)s));
            assert_int_equal(bl_train_position(&c, n_rows, s + 1) -
                                 bl_train_position(&c, n_rows, s),
                             json_integer_value(json_array_get(rows, (size_t)s)));
            /* a few roundings of double precision: order of the same operations */
            assert_true(fabs(bl_train_learning_rate(&c, s, n_steps) - rate) <=
                        1e-18 + 1e-14 * rate);
        }
    }
    json_decref(golden);
}

/* The other way: the same rows for every step, whatever the epoch. */
static void test_steps_of_one_size(void **state)
{
    bl_train_config c = {.per_device_train_batch_size = 4,
                         .gradient_accumulation_steps = 3,
                         .ranks = 1,
                         .num_train_epochs = 2,
                         .epoch_end = BL_EPOCH_CONTINUE};

    (void)state;
    assert_int_equal(bl_train_total_steps(&c, 53), 9);
    for (int64_t s = 0; s < 9; s++) assert_int_equal(bl_train_position(&c, 53, s), 12 * s);
}

/* ---- learning rates ---- */

typedef struct schedule {
    bl_lr_scheduler_type type;
    int64_t warmup_steps;
    double warmup_ratio;
    double rate[10]; /* of the steps 0..9 of 10; peak 0.001 */
} schedule;

static const schedule schedules[] = {
    /* 0.001 * (10 - s) / 10 */
    {BL_LR_LINEAR,
     0,
     0,
     {0.001, 0.0009, 0.0008, 0.0007, 0.0006, 0.0005, 0.0004, 0.0003, 0.0002, 0.0001}},
    /* s / 4, then (10 - s) / 6 */
    {BL_LR_LINEAR,
     4,
     0,
     {0, 0.00025, 0.0005, 0.00075, 0.001, 0.00083333333333333333, 0.00066666666666666667, 0.0005,
      0.00033333333333333333, 0.00016666666666666667}},
    /* ceil(0.25 * 10) = 3: s / 3, then (10 - s) / 7 */
    {BL_LR_LINEAR,
     0,
     0.25,
     {0, 0.00033333333333333333, 0.00066666666666666667, 0.001, 0.00085714285714285714,
      0.00071428571428571429, 0.00057142857142857143, 0.00042857142857142857,
      0.00028571428571428571, 0.00014285714285714286}},
    /* (1 + cos(pi s / 10)) / 2 */
    {BL_LR_COSINE,
     0,
     0,
     {0.001, 0.00097552825814757678, 0.00090450849718747371, 0.00079389262614623656,
      0.00065450849718747371, 0.0005, 0.00034549150281252629, 0.00020610737385376344,
      0.000095491502812526288, 0.000024471741852423213}},
    /* s / 2, then (1 + cos(pi (s - 2) / 8)) / 2 */
    {BL_LR_COSINE,
     2,
     0,
     {0, 0.0005, 0.001, 0.00096193976625564338, 0.00085355339059327376, 0.00069134171618254489,
      0.0005, 0.00030865828381745511, 0.00014644660940672624, 0.000038060233744356622}},
    {BL_LR_CONSTANT, 0, 0, {0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001}},
    {BL_LR_CONSTANT_WITH_WARMUP,
     5,
     0,
     {0, 0.0002, 0.0004, 0.0006, 0.0008, 0.001, 0.001, 0.001, 0.001, 0.001}},
    {BL_LR_CONSTANT_WITH_WARMUP,
     0,
     0,
     {0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001, 0.001}},
    /* a warm-up longer than the run */
    {BL_LR_LINEAR,
     20,
     0,
     {0, 0.00005, 0.0001, 0.00015, 0.0002, 0.00025, 0.0003, 0.00035, 0.0004, 0.00045}},
    {BL_LR_COSINE,
     20,
     0,
     {0, 0.00005, 0.0001, 0.00015, 0.0002, 0.00025, 0.0003, 0.00035, 0.0004, 0.00045}},
};

static void test_learning_rates(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(schedules); i++) {
        const schedule *s = &schedules[i];
        bl_train_config c = {.learning_rate = 0.001,
                             .lr_scheduler_type = s->type,
                             .warmup_steps = s->warmup_steps,
                             .warmup_ratio = s->warmup_ratio};
        for (int64_t step = 0; step < 10; step++) {
            double rate = bl_train_learning_rate(&c, step, 10), error = rate - s->rate[step];
            /* a few roundings of doubles near 0.001 */
            if (!(error <= 1e-17 && error >= -1e-17))
                fail_msg("schedule %zu, step %d: %.17g, not %.17g", i, (int)step, rate,
                         s->rate[step]);
        }
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_each_row_once),       cmocka_unit_test(test_orders_differ),
        cmocka_unit_test(test_no_row_is_preferred), cmocka_unit_test(test_numbers_of_steps),
        cmocka_unit_test(test_learning_rates),      cmocka_unit_test(test_epochs_of_the_trainer),
        cmocka_unit_test(test_steps_of_one_size),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
