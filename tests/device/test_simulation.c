/* SPDX-License-Identifier: Apache-2.0 */
/* Streams in simulated time: order, events, and resources that are shared. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>

#include <cmocka.h>

#include "device/simulation.h"

enum { COMPUTE, GATHER, COPY, READER, LORA, ACTIVATIONS };

static int queue(bl_simulation *sim, int stream, const bl_work *work, int wait_for)
{
    if (wait_for != BL_SIM_NOTHING)
        assert_int_equal(bl_simulation_add(sim, &(bl_sim_op){.stream = stream, .of = wait_for}),
                         BL_OK);
    assert_int_equal(bl_simulation_add(sim, &(bl_sim_op){.stream = stream, .work = work}), BL_OK);
    return bl_simulation_event(sim, stream);
}

static double ended(const bl_simulation *sim, int op)
{
    return sim->ops[op].end_s;
}

static void streams_keep_order_and_wait_for_events(void **state)
{
    const bl_work one = {.seconds = 1}, two = {.seconds = 2};
    bl_simulation sim;

    (void)state;
    bl_simulation_init(&sim);
    int a = queue(&sim, COPY, &two, BL_SIM_NOTHING);
    int b = queue(&sim, COMPUTE, &one, BL_SIM_NOTHING);
    int c = queue(&sim, COMPUTE, &one, a); /* computes from 0 to 1, stalls until 2 */
    int d = queue(&sim, GATHER, &two, b);
    int e = queue(&sim, COPY, &one, BL_SIM_NOTHING);
    assert_int_equal(bl_simulation_event(&sim, LORA), BL_SIM_NOTHING);
    assert_int_equal(bl_simulation_event(&sim, COPY), e);
    assert_int_equal(bl_simulation_run(&sim), BL_OK);
    assert_float_equal(ended(&sim, a), 2, 1e-6);
    assert_float_equal(ended(&sim, b), 1, 1e-6);
    assert_float_equal(sim.ops[c - 1].begin_s, 1, 1e-6);
    assert_float_equal(ended(&sim, c - 1), 2, 1e-6);
    assert_float_equal(ended(&sim, c), 3, 1e-6);
    assert_float_equal(ended(&sim, d), 3, 1e-6);
    assert_float_equal(ended(&sim, e), 3, 1e-6);
    bl_simulation_free(&sim);
}

/* Two works that ask for 0.8 and 0.6 of a link of 1 run at 1/1.4 of their speed; when the shorter
 * one has ended, the other goes on at full speed: 1.4 s, and then 2 - 1. */
static void a_full_resource_slows_those_that_use_it(void **state)
{
    const bl_work copy = {.seconds = 1, .use = {[BL_RESOURCE_LINK_IN] = 0.8}},
                  spill = {.seconds = 2, .use = {[BL_RESOURCE_LINK_IN] = 0.6}},
                  compute = {.seconds = 3, .use = {[BL_RESOURCE_CORES] = 1}};
    bl_simulation sim;

    (void)state;
    bl_simulation_init(&sim);
    sim.capacity[BL_RESOURCE_LINK_IN] = 1;
    int a = queue(&sim, COPY, &copy, BL_SIM_NOTHING);
    int b = queue(&sim, ACTIVATIONS, &spill, BL_SIM_NOTHING);
    int c = queue(&sim, COMPUTE, &compute, BL_SIM_NOTHING);
    assert_int_equal(bl_simulation_run(&sim), BL_OK);
    assert_float_equal(ended(&sim, a), 1.4, 1e-6);
    assert_float_equal(ended(&sim, b), 2.4, 1e-6);
    assert_float_equal(ended(&sim, c), 3, 1e-6); /* cores are of no concern: no capacity */
    bl_simulation_free(&sim);
}

/* Max-min: two works share cores that are full; a third that uses little of a second resource,
 * which one of them has left free, is not slowed. */
static void what_is_held_back_leaves_room(void **state)
{
    const bl_work compute = {.seconds = 1, .use = {[BL_RESOURCE_CORES] = 2}},
                  copy = {.seconds = 1,
                          .use = {[BL_RESOURCE_CORES] = 1, [BL_RESOURCE_HOST_MEMORY] = 9}},
                  read = {.seconds = 1, .use = {[BL_RESOURCE_HOST_MEMORY] = 4}};
    bl_simulation sim;

    (void)state;
    bl_simulation_init(&sim);
    sim.capacity[BL_RESOURCE_CORES] = 2;
    sim.capacity[BL_RESOURCE_HOST_MEMORY] = 10;
    int a = queue(&sim, COMPUTE, &compute, BL_SIM_NOTHING);
    int b = queue(&sim, COPY, &copy, BL_SIM_NOTHING);
    int c = queue(&sim, READER, &read, BL_SIM_NOTHING);
    assert_int_equal(bl_simulation_run(&sim), BL_OK);
    assert_float_equal(ended(&sim, a), 1.5, 1e-6);
    assert_float_equal(ended(&sim, b), 1.5, 1e-6);
    assert_float_equal(ended(&sim, c), 1, 1e-6);
    bl_simulation_free(&sim);
}

static void waiting_in_a_circle_is_an_error(void **state)
{
    bl_simulation sim;

    (void)state;
    bl_simulation_init(&sim);
    assert_int_equal(bl_simulation_add(&sim, &(bl_sim_op){.stream = COPY, .of = 1}), BL_OK);
    assert_int_equal(bl_simulation_add(&sim, &(bl_sim_op){.stream = GATHER, .of = 0}), BL_OK);
    assert_int_equal(bl_simulation_run(&sim), BL_EINTERNAL);
    bl_simulation_free(&sim);
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
