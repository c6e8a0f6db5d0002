/* SPDX-License-Identifier: Apache-2.0 */
/* Another system's published speeds, predicted from its operations. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>

#include <cmocka.h>

#include "plan/published.h"

static bl_published explain(int n_hosts)
{
    bl_published p;
    if (bl_published_explain(n_hosts, &p) != BL_OK) fail_msg("%s", bl_error_text());
    return p;
}

static void assert_within(double value, double expected, double part)
{
    if (fabs(value / expected - 1) > part)
        fail_msg("%g, expected %g within %g %%", value, expected, 100 * part);
}

static void both_speeds_are_met(void **state)
{
    (void)state;
    for (int n_hosts = 1; n_hosts <= 2; n_hosts++) {
        bl_published p = explain(n_hosts);
        assert_within(p.rows[0].time.tokens_per_s, p.tokens_per_s, 0.25);
    }
}

/* The padding, which is not published, is the same in both jobs: their ratio does not depend on
 * it. */
static void so_is_their_ratio(void **state)
{
    (void)state;
    double predicted = explain(2).rows[0].time.tokens_per_s / explain(1).rows[0].time.tokens_per_s;
    assert_within(predicted, 1389.0 / 231, 0.25);
}

/* On one host it first waits for copies; after the last change it no longer does. */
static void each_change_helps(void **state)
{
    (void)state;
    for (int n_hosts = 1; n_hosts <= 2; n_hosts++) {
        bl_published p = explain(n_hosts);
        assert_int_equal(p.n_rows, n_hosts == 1 ? 9 : 7);
        for (int i = 1; i < p.n_rows; i++)
            assert_true(p.rows[i].time.tokens_per_s > p.rows[i - 1].time.tokens_per_s);
        const bl_time_part *forward = &p.rows[0].time.part[BL_TIME_FORWARD];
        assert_int_equal(forward->bound, n_hosts == 1 ? BL_LANE_COPY : BL_LANE_GATHER);
        const bl_time_estimate *last = &p.rows[p.n_rows - 1].time;
        assert_int_equal(last->part[BL_TIME_FORWARD].bound, BL_LANE_COMPUTE);
        assert_true(last->part[BL_TIME_FORWARD].compute_s >
                    0.98 * last->part[BL_TIME_FORWARD].seconds);
    }
}

/* Shards of three quarters of 126 layers come over a pageable link and go back, in both passes. */
static void its_copies_by_hand(void **state)
{
    (void)state;
    bl_published p = explain(1);
    double shards = 0.75 * 126 * 3187671040.0 / 8;
    const bl_time_part *part = p.rows[0].time.part;
    assert_within(part[BL_TIME_FORWARD].wait_s[BL_LANE_COPY] +
                      part[BL_TIME_BACKWARD].wait_s[BL_LANE_COPY],
                  2 * shards * (1 / 5.5e9 + 1 / 1.4e9), 0.03);
}

/* The published hours are those of 16 times the tokens: with one row per GPU no choice of the
 * system explains them. */
static void every_weight_of_70b(void **state)
{
    bl_published_full p;

    (void)state;
    if (bl_published_explain_full(&p) != BL_OK) fail_msg("%s", bl_error_text());
    const bl_published_row *rows = p.rows, *last = &rows[p.n_rows - 1];
    assert_int_equal(p.n_rows, 6);
    /* 6 P FLOPs per token, and attention; 16 GPUs of 312 TFLOP/s */
    assert_within(p.mfu, 500.0 * 16 * 2048 * 6 * 68.98e9 / (13.5 * 3600 * 16 * 312e12), 0.03);
    assert_within(p.tokens_per_s, 500.0 * 16 * 2048 / (13.5 * 3600), 1e-9);
    assert_true(rows[0].time.step_s * p.n_steps < p.hours * 3600 / 8);
    /* 16 rows need 16 times the products, and the same network time. */
    assert_within(last->time.model_flops, 16 * rows[0].time.model_flops, 1e-9);
    assert_within(last->time.step_s * p.n_steps / 3600, p.hours, 0.15);
    assert_within(last->time.mfu, 16 * p.mfu, 0.15);
    for (int i = 1; i < 3; i++)
        assert_true(rows[i].time.tokens_per_s > rows[i - 1].time.tokens_per_s);
    /* In a fixed order each of a host's eight ranks receives one sum of its rows from the other
     * host: four bytes for half of the weights. */
    double network_s = 4 * 68.98e9 / 2 / (0.85 * 50e9);
    assert_within(rows[3].time.step_s, network_s + 2 * 129e9 / (0.85 * 50e9), 0.08);
    /* Two gathers of bf16 weights: 8 of the 16 parts enter a host instead of 15. The ends of the
     * pipelines take back less than a fifth. */
    double saved_s = 2 * 2 * 68.98e9 * (15 - 8) / 16 / (0.85 * 50e9);
    assert_within(rows[3].time.step_s - rows[4].time.step_s, 0.9 * saved_s, 0.1);
    /* By a ring two bytes per weight: gathers and sums share the network. */
    assert_within(rows[2].time.step_s, 3 * 129e9 / (0.85 * 50e9), 0.05);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(both_speeds_are_met), cmocka_unit_test(so_is_their_ratio),
        cmocka_unit_test(each_change_helps),   cmocka_unit_test(its_copies_by_hand),
        cmocka_unit_test(every_weight_of_70b),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
