/* SPDX-License-Identifier: Apache-2.0 */
/* Inline streams of device.h: tasks end before the call returns, on the caller's thread; events
 * join them with streams that have a thread. CPU devices over the caller's runtime. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdint.h>

#include "device/device.h"

static bl_device *device;
static bl_stream *stream, *other;
static bl_event *event;

static int setup(void **state)
{
    (void)state;
    return bl_device_create_cpu(2, &device) || bl_stream_create_inline(device, &stream) ||
           bl_stream_create(device, "other", &other) || bl_event_create(device, &event);
}

static int teardown(void **state)
{
    (void)state;
    bl_event_destroy(event);
    bl_stream_destroy(stream);
    bl_stream_destroy(other);
    bl_device_destroy(device);
    return 0;
}

static bl_status note_thread(bl_stream *self, const void *args)
{
    (void)self;
    **(pthread_t *const *)args = pthread_self();
    return BL_OK;
}

static bl_status end_badly(bl_stream *self, const void *args)
{
    (void)self;
    (void)args;
    return BL_FAIL(BL_EIO, "planted");
}

static void test_runs_on_the_caller(void **state)
{
    pthread_t ran = {0}, *where = &ran;
    int from = 7, to = 0;

    (void)state;
    assert_int_equal(bl_stream_call(stream, note_thread, &where, sizeof where), BL_OK);
    assert_true(pthread_equal(ran, pthread_self()));
    assert_int_equal(bl_stream_copy(stream, &to, &from, sizeof to), BL_OK);
    assert_int_equal(to, 7);
    assert_int_equal(bl_stream_zero(stream, &to, sizeof to), BL_OK);
    assert_int_equal(to, 0);
}

/* A copy on a thread, seen by the inline stream after its event, and the reverse. */
static void test_events(void **state)
{
    int source = 5, middle = 0, end = 0;

    (void)state;
    assert_int_equal(bl_stream_copy(other, &middle, &source, sizeof middle), BL_OK);
    assert_int_equal(bl_event_record(event, other), BL_OK);
    assert_int_equal(bl_stream_wait(stream, event), BL_OK);
    assert_int_equal(middle, 5);
    assert_int_equal(bl_event_record(event, stream), BL_OK);
    assert_int_equal(bl_stream_wait(other, event), BL_OK);
    assert_int_equal(bl_stream_copy(other, &end, &middle, sizeof end), BL_OK);
    assert_int_equal(bl_stream_synchronize(other), BL_OK);
    assert_int_equal(end, 5);
}

/* As on all streams: synchronize and status report the first error, and later tasks are skipped. */
static void test_failure(void **state)
{
    int from = 1, to = 0;

    (void)state;
    assert_int_equal(bl_stream_call(stream, end_badly, NULL, 0), BL_OK);
    assert_int_equal(bl_stream_copy(stream, &to, &from, sizeof to), BL_OK);
    assert_int_equal(to, 0);
    assert_int_equal(bl_stream_status(stream), BL_EIO);
    assert_int_equal(bl_stream_synchronize(stream), BL_EIO);
    assert_string_equal(bl_error_text(), "planted");
    assert_int_equal(bl_event_record(event, stream), BL_OK);
    assert_int_equal(bl_event_synchronize(event), BL_EIO);
}

static int n_regions;

static void run_region(void (*fn)(void *data), void *data, unsigned n_threads, unsigned flags)
{
    assert_int_equal(n_threads, 3);
    assert_int_equal(flags, 0);
    n_regions++;
    fn(data);
}

static void count_item(void *arg, int64_t index, void *scratch)
{
    (void)scratch;
    ((int *)arg)[index]++;
}

/* A device over the caller's runtime: its pool's loops are regions of the runtime. */
static void test_over_a_runtime(void **state)
{
    bl_device *over = NULL;
    int visits[5] = {0};
    (void)state;

    assert_int_equal(bl_device_create_cpu_over(3, NULL, &over), BL_EUSAGE);
    assert_null(over);
    assert_int_equal(bl_device_create_cpu_over(3, run_region, &over), BL_OK);
    assert_int_equal(bl_pool_threads(bl_device_pool(over)), 3);
    bl_pool_run(bl_device_pool(over), 5, count_item, visits);
    assert_int_equal(n_regions, 1);
    for (int i = 0; i < 5; i++) assert_int_equal(visits[i], 1);
    bl_device_destroy(over);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_runs_on_the_caller, setup, teardown),
        cmocka_unit_test_setup_teardown(test_events, setup, teardown),
        cmocka_unit_test_setup_teardown(test_failure, setup, teardown),
        cmocka_unit_test(test_over_a_runtime),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
