/* SPDX-License-Identifier: Apache-2.0 */
/* Streams in simulated time: order, events, and resources that are shared. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "plan/simulate_internal.h"

static int queue(plan_simulation *sim, plan_stream stream, const plan_work *work, int wait_for)
{
    if (wait_for != PLAN_NOTHING)
        assert_int_equal(
            plan_simulation_add(sim, &(plan_op){.stream = (int)stream, .of = wait_for}), BL_OK);
    assert_int_equal(plan_simulation_add(sim, &(plan_op){.stream = (int)stream, .work = work}),
                     BL_OK);
    return plan_simulation_last(sim);
}

static double ended(const plan_simulation *sim, int op)
{
    return sim->ops[op].end_s;
}

static void streams_keep_order_and_wait_for_events(void **state)
{
    const plan_work one = {.seconds = 1}, two = {.seconds = 2};
    plan_simulation sim;

    (void)state;
    plan_simulation_init(&sim);
    int a = queue(&sim, PLAN_COPY, &two, PLAN_NOTHING);
    int b = queue(&sim, PLAN_COMPUTE, &one, PLAN_NOTHING);
    int c = queue(&sim, PLAN_COMPUTE, &one, a); /* computes from 0 to 1, stands still until 2 */
    int d = queue(&sim, PLAN_GATHER, &two, b);
    int e = queue(&sim, PLAN_COPY, &one, PLAN_NOTHING);
    assert_int_equal(plan_simulation_event(&sim, PLAN_LORA), PLAN_NOTHING);
    assert_int_equal(plan_simulation_event(&sim, PLAN_COPY), e);
    assert_int_equal(plan_simulation_run(&sim), BL_OK);
    assert_float_equal(ended(&sim, a), 2, 1e-6);
    assert_float_equal(ended(&sim, b), 1, 1e-6);
    assert_float_equal(sim.ops[c - 1].begin_s, 1, 1e-6);
    assert_float_equal(ended(&sim, c - 1), 2, 1e-6);
    assert_float_equal(ended(&sim, c), 3, 1e-6);
    assert_float_equal(ended(&sim, d), 3, 1e-6);
    assert_float_equal(ended(&sim, e), 3, 1e-6);
    plan_simulation_free(&sim);
}

/* Two works that ask for 0.8 and 0.6 of a link of 1 run at 1/1.4 of their speed; when the shorter one has ended, the other goes on
 * at full speed: 1.4 s, and then 2 - 1. */
static void a_full_resource_slows_those_that_use_it(void **state)
{
    const plan_work copy = {.seconds = 1, .use = {[PLAN_LINK_IN] = 0.8}},
                    spill = {.seconds = 2, .use = {[PLAN_LINK_IN] = 0.6}},
                    compute = {.seconds = 3, .use = {[PLAN_CORES] = 1}};
    plan_simulation sim;

    (void)state;
    plan_simulation_init(&sim);
    sim.capacity[PLAN_LINK_IN] = 1;
    int a = queue(&sim, PLAN_COPY, &copy, PLAN_NOTHING);
    int b = queue(&sim, PLAN_ACTIVATIONS, &spill, PLAN_NOTHING);
    int c = queue(&sim, PLAN_COMPUTE, &compute, PLAN_NOTHING);
    assert_int_equal(plan_simulation_run(&sim), BL_OK);
    assert_float_equal(ended(&sim, a), 1.4, 1e-6);
    assert_float_equal(ended(&sim, b), 2.4, 1e-6);
    assert_float_equal(ended(&sim, c), 3, 1e-6); /* cores are of no concern: no capacity */
    plan_simulation_free(&sim);
}

/* Max-min: two works share cores that are full; a third that uses little of a second resource, which
 * one of them has left free, is not slowed. */
static void what_is_held_back_leaves_room(void **state)
{
    const plan_work compute = {.seconds = 1, .use = {[PLAN_CORES] = 2}},
                    copy = {.seconds = 1, .use = {[PLAN_CORES] = 1, [PLAN_HOST_MEMORY] = 9}},
                    read = {.seconds = 1, .use = {[PLAN_HOST_MEMORY] = 4}};
    plan_simulation sim;

    (void)state;
    plan_simulation_init(&sim);
    sim.capacity[PLAN_CORES] = 2;
    sim.capacity[PLAN_HOST_MEMORY] = 10;
    int a = queue(&sim, PLAN_COMPUTE, &compute, PLAN_NOTHING);
    int b = queue(&sim, PLAN_COPY, &copy, PLAN_NOTHING);
    int c = queue(&sim, PLAN_READER, &read, PLAN_NOTHING);
    assert_int_equal(plan_simulation_run(&sim), BL_OK);
    assert_float_equal(ended(&sim, a), 1.5, 1e-6);
    assert_float_equal(ended(&sim, b), 1.5, 1e-6);
    assert_float_equal(ended(&sim, c), 1, 1e-6);
    plan_simulation_free(&sim);
}

static void waiting_in_a_circle_is_an_error(void **state)
{
    plan_simulation sim;

    (void)state;
    plan_simulation_init(&sim);
    assert_int_equal(plan_simulation_add(&sim, &(plan_op){.stream = PLAN_COPY, .of = 1}), BL_OK);
    assert_int_equal(plan_simulation_add(&sim, &(plan_op){.stream = PLAN_GATHER, .of = 0}), BL_OK);
    assert_int_equal(plan_simulation_run(&sim), BL_EINTERNAL);
    plan_simulation_free(&sim);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(streams_keep_order_and_wait_for_events),
        cmocka_unit_test(a_full_resource_slows_those_that_use_it),
        cmocka_unit_test(what_is_held_back_leaves_room),
        cmocka_unit_test(waiting_in_a_circle_is_an_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
