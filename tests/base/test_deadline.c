/* SPDX-License-Identifier: Apache-2.0 */
/* test_deadline.c -- when a thread's deadline is over, with clocks that the test sets. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include "base/clock.h"
#include "base/deadline.h"

static double now_s, processor_s;

double __wrap_bl_now_s(void);
double __wrap_bl_thread_processor_s(void);

double __wrap_bl_now_s(void)
{
    return now_s;
}

double __wrap_bl_thread_processor_s(void)
{
    return processor_s;
}

static bool is_over(double elapsed_s, double used_s)
{
    double begin_s = now_s, begin_processor_s = processor_s, limit_s;

    now_s += elapsed_s;
    processor_s += used_s;
    bool over = bl_deadline_is_over(&limit_s);
    now_s = begin_s;
    processor_s = begin_processor_s;
    return over;
}

/* Both clocks must have passed, whatever they show at the beginning. */
static void test_both_clocks(void **state)
{
    static const double starts[] = {-1e6, -5, 0, 3, 1e9};
    (void)state;

    for (size_t i = 0; i < sizeof starts / sizeof *starts; i++) {
        now_s = starts[i];
        processor_s = -starts[i];
        assert_false(is_over(1e6, 1e6)); /* there is none */
        assert_true(bl_deadline_begin(1000));
        assert_false(is_over(0, 0));
        assert_false(is_over(9.9, 9.9));
        assert_false(is_over(1e6, 1.9)); /* stopped, or waiting for a core */
        assert_true(is_over(10.1, 2.1));
        bl_deadline_end(true);
        assert_false(is_over(1e6, 1e6));
    }
}

static void test_outermost_counts(void **state)
{
    (void)state;
    assert_true(bl_deadline_begin(0));
    now_s += 6;
    processor_s += 6;
    bool begun = bl_deadline_begin(100 << 20);
    assert_false(begun);
    bl_deadline_end(begun);
    assert_true(is_over(4.5, 4.5));
    bl_deadline_end(true);
}

static void test_by_input(void **state)
{
    double limit_s;
    (void)state;

    assert_true(bl_deadline_begin(3 << 20));
    assert_false(is_over(39, 39));
    assert_true(is_over(41, 41));
    bl_deadline_is_over(&limit_s);
    assert_float_equal(limit_s, 40, 0);
    bl_deadline_end(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_both_clocks),
                                       cmocka_unit_test(test_outermost_counts),
                                       cmocka_unit_test(test_by_input)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
