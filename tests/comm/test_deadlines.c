/* SPDX-License-Identifier: Apache-2.0 */
/* Lateness by a simulated clock: a watch and a guard of communicators of GPUs, and processes that
 * were stopped. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <cmocka.h>

#include "base/clock.h"
#include "comm/nccl/deadlines.h"

/* The clock's start is arbitrary: the events below are before, at and after its 0. */
#define AT(seconds) ((seconds)-150.0)

static void test_a_stop_is_an_absence(void **state)
{
    comm_round round = {100.0};

    (void)state;
    assert_false(comm_round_begin(&round, 100.05));
    assert_false(comm_round_begin(&round, 102.05)); /* slow, but by no more than 2 s */
    assert_true(comm_round_begin(&round, 104.1));
    assert_false(comm_round_begin(&round, 104.15)); /* it is noticed once */
}

static void test_overdue(void **state)
{
    (void)state;
    assert_false(comm_nccl_is_overdue(10.0, 5.0, 14.9));
    assert_true(comm_nccl_is_overdue(10.0, 5.0, 15.0));
    assert_false(comm_nccl_is_overdue(10.0, 0.0, 1e9)); /* no deadline */
}

/* A watch that looks 20 times per second, each look of look_s, its sleep from `stop_s` on longer by
 * stopped_s. Returns when it found that a launch at 0 s is overdue. */
static double watch_from(double look_s, double stop_s, double stopped_s, double deadline_s)
{
    double round_s = 0, since_s = 0, now_s = 0;
    bool was_slow = false;

    for (;;) {
        double looked_s = now_s + look_s; /* the look of the round before */
        now_s = looked_s + 0.05;
        if (looked_s >= stop_s && looked_s < stop_s + look_s + 0.05) now_s += stopped_s;
        if (comm_nccl_watch_pardons(round_s, looked_s, now_s, &was_slow)) since_s = now_s;
        round_s = now_s;
        if (comm_nccl_is_overdue(since_s, deadline_s, now_s)) return now_s;
        assert_true(now_s < 1e4);
    }
}

static void test_watch(void **state)
{
    double found_s;

    (void)state;
    found_s = watch_from(0.0, 1e9, 0, 10.0);
    assert_true(found_s >= 10.0 && found_s < 10.1);
    /* Stopped for longer than the deadline: it starts again. */
    found_s = watch_from(0.0, 4.0, 60.0, 10.0);
    assert_true(found_s >= 74.0 && found_s < 74.2);
    /* Looks that take 3 s each are pardoned once, not each time. */
    found_s = watch_from(3.0, 1e9, 0, 10.0);
    assert_true(found_s >= 13.0 && found_s < 17.0);
}

static comm_nccl_guard_clock new_clock(void)
{
    return (comm_nccl_guard_clock){{AT(100.0)}, .back_s = BL_NEVER_S, .failed_s = BL_NEVER_S};
}

static void test_guard_of_a_job_that_is_well(void **state)
{
    comm_nccl_guard_clock clock = new_clock();

    (void)state;
    assert_int_equal(comm_nccl_guard_judge(&clock, BL_NEVER_S, false, 10.0, AT(1e6)),
                     COMM_NCCL_IN_TIME);
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), false, 10.0, AT(109.9)),
                     COMM_NCCL_IN_TIME);
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), false, 10.0, AT(110.0)),
                     COMM_NCCL_HANGS);
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), false, 0, AT(1e6)),
                     COMM_NCCL_IN_TIME);
    /* A deadline that is shorter than the time allowed for an abort does not count as a hang. */
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), false, 0.5, AT(102.4)),
                     COMM_NCCL_IN_TIME);
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), false, 0.5, AT(102.5)),
                     COMM_NCCL_HANGS);
    assert_true(clock.failed_s == BL_NEVER_S);
}

static void test_guard_that_was_stopped(void **state)
{
    comm_nccl_guard_clock clock = new_clock();

    (void)state;
    comm_nccl_guard_begin_round(&clock, AT(100.25));
    assert_true(clock.back_s == BL_NEVER_S);
    comm_nccl_guard_begin_round(&clock,
                                AT(200.0)); /* with its watches, whose last round was at 100 s */
    assert_true(clock.back_s == AT(200.0));
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), false, 10.0, AT(209.9)),
                     COMM_NCCL_IN_TIME);
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), false, 10.0, AT(210.0)),
                     COMM_NCCL_HANGS);
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(205.0), false, 10.0, AT(214.9)),
                     COMM_NCCL_IN_TIME);
}

static void test_guard_of_a_job_that_has_failed(void **state)
{
    comm_nccl_guard_clock clock = new_clock();

    (void)state;
    /* From when the guard sees that on: a watch that hung before is not late at once. */
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), true, 600.0, AT(150.0)),
                     COMM_NCCL_IN_TIME);
    assert_true(clock.failed_s == AT(150.0));
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), true, 600.0, AT(152.5)),
                     COMM_NCCL_IN_TIME);
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), true, 600.0, AT(152.6)),
                     COMM_NCCL_LATE);
    /* A watch that goes round is in time; so is all of a process that was stopped meanwhile. */
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(152.0), true, 600.0, AT(152.6)),
                     COMM_NCCL_IN_TIME);
    comm_nccl_guard_begin_round(&clock, AT(300.0));
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), true, 600.0, AT(302.5)),
                     COMM_NCCL_IN_TIME);
    assert_int_equal(comm_nccl_guard_judge(&clock, AT(100.0), true, 600.0, AT(302.6)),
                     COMM_NCCL_LATE);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_stop_is_an_absence),
        cmocka_unit_test(test_overdue),
        cmocka_unit_test(test_watch),
        cmocka_unit_test(test_guard_of_a_job_that_is_well),
        cmocka_unit_test(test_guard_that_was_stopped),
        cmocka_unit_test(test_guard_of_a_job_that_has_failed),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
