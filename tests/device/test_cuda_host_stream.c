/* SPDX-License-Identifier: Apache-2.0 */
/* Host streams beside a GPU's own, events between the two kinds, and priorities: on a GPU, or on
 * the emulated one (emulator/). Tasks of a host stream may wait. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <cuda_runtime_api.h>
#include <stdint.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "device/cuda/stream.h"
#include "device/device.h"

enum { WORDS = 4096, ROUNDS = 3 * BL_STREAM_DEPTH, LATE_US = 20000 };

typedef struct fixture {
    bl_device *device;
    bl_stream *gpu, *other, *host;
    bl_event *event, *back;
    int *pinned, *result, *memory; /* [WORDS]; memory: the device's */
} fixture;

static void assert_ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

static int setup(void **state)
{
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    assert_ok(bl_device_create_cuda(0, &f->device));
    assert_ok(bl_stream_create(f->device, "gpu", &f->gpu));
    assert_ok(bl_stream_create(f->device, "other", &f->other));
    assert_ok(bl_stream_create_host(f->device, "host", &f->host));
    assert_ok(bl_event_create(f->device, &f->event));
    assert_ok(bl_event_create(f->device, &f->back));
    size_t bytes = WORDS * sizeof(int);
    assert_ok(bl_device_alloc(f->device, BL_SPACE_HOST, bytes, "pinned", (void **)&f->pinned));
    assert_ok(bl_device_alloc(f->device, BL_SPACE_HOST, bytes, "result", (void **)&f->result));
    assert_ok(bl_device_alloc(f->device, BL_SPACE_DEVICE, bytes, "memory", (void **)&f->memory));
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    bl_stream_destroy(f->host);
    bl_stream_destroy(f->gpu);
    bl_stream_destroy(f->other);
    bl_event_destroy(f->event);
    bl_event_destroy(f->back);
    bl_device_free(f->device, BL_SPACE_HOST, f->pinned);
    bl_device_free(f->device, BL_SPACE_HOST, f->result);
    bl_device_free(f->device, BL_SPACE_DEVICE, f->memory);
    bl_device_destroy(f->device);
    free(f);
    return 0;
}

/* ---- tasks ---- */

typedef struct fill_args {
    int *at, value;
    bool is_late;
} fill_args;

static bl_status fill(bl_stream *stream, const void *args)
{
    const fill_args *a = args;
    (void)stream;
    if (a->is_late) usleep(LATE_US);
    for (int i = 0; i < WORDS; i++) a->at[i] = a->value;
    return BL_OK;
}

static void give_fill(bl_stream *stream, int *at, int value, bool is_late)
{
    assert_ok(bl_stream_call(stream, fill, &(fill_args){at, value, is_late}, sizeof(fill_args)));
}

/* Adds 1 to every word: also reads the GPU's copy. */
static bl_status increment(bl_stream *stream, const void *args)
{
    int *at = *(int *const *)args;
    (void)stream;
    for (int i = 0; i < WORDS; i++) at[i]++;
    return BL_OK;
}

static bl_status break_down(bl_stream *stream, const void *args)
{
    (void)stream, (void)args;
    return BL_FAIL(BL_ENUMERIC, "broke down");
}

static void assert_all(const int *at, int value)
{
    for (int i = 0; i < WORDS; i++) assert_int_equal(at[i], value);
}

static void copy(bl_stream *stream, int *dst, const int *src)
{
    assert_ok(bl_stream_copy(stream, dst, src, WORDS * sizeof(int)));
}

/* ---- the contract ---- */

static void test_the_gpu_waits_for_the_host(void **state)
{
    fixture *f = *state;
    assert_ok(bl_stream_wait(f->host, f->event)); /* never recorded: no wait */
    for (int i = 1; i < 6; i++) {
        give_fill(f->host, f->pinned, i, true);
        assert_ok(bl_event_record(f->event, f->host));
        assert_ok(bl_stream_wait(f->gpu, f->event));
        copy(f->gpu, f->memory, f->pinned);
        copy(f->gpu, f->result, f->memory);
        assert_ok(bl_stream_synchronize(f->gpu));
        assert_all(f->result, i);
        assert_ok(bl_event_synchronize(f->event));
    }
}

/* Both directions, with the giver far ahead. */
static void test_turn_by_turn(void **state)
{
    fixture *f = *state;
    for (int i = 0; i < ROUNDS; i++) {
        assert_ok(bl_stream_call(f->host, increment, &f->pinned, sizeof f->pinned));
        assert_ok(bl_event_record(f->event, f->host));
        assert_ok(bl_stream_wait(f->gpu, f->event));
        copy(f->gpu, f->memory, f->pinned);
        assert_ok(bl_stream_zero(f->gpu, f->pinned, WORDS * sizeof(int)));
        copy(f->gpu, f->pinned, f->memory);
        assert_ok(bl_event_record(f->back, f->gpu));
        assert_ok(bl_stream_wait(f->host, f->back));
    }
    assert_ok(bl_stream_synchronize(f->host));
    assert_all(f->pinned, ROUNDS);
}

/* The second record of the event comes after the host stream's work behind its wait: a wait for
 * that record would never end. */
static void test_a_wait_is_for_the_record_before_it(void **state)
{
    fixture *f = *state;
    copy(f->gpu, f->memory, f->pinned);
    assert_ok(bl_event_record(f->event, f->gpu));
    assert_ok(bl_stream_wait(f->host, f->event));
    give_fill(f->host, f->result, 9, true);
    assert_ok(bl_event_record(f->back, f->host));
    assert_ok(bl_stream_wait(f->gpu, f->back));
    assert_ok(bl_event_record(f->event, f->gpu));
    assert_ok(bl_event_synchronize(f->event));
    assert_all(f->result, 9);
}

static void test_errors_go_both_ways(void **state)
{
    fixture *f = *state;
    assert_ok(bl_event_record(f->event, f->host)); /* before the failure */
    assert_ok(bl_stream_call(f->host, break_down, NULL, 0));
    give_fill(f->host, f->result, 1, false);
    assert_ok(bl_event_record(f->back, f->host));
    assert_int_equal(bl_stream_synchronize(f->host), BL_ENUMERIC);
    assert_string_equal(bl_error_text(), "broke down");
    assert_int_equal(bl_stream_status(f->host), BL_ENUMERIC);
    assert_all(f->result, 0);
    assert_ok(bl_event_synchronize(f->event));
    assert_int_equal(bl_event_synchronize(f->back), BL_ENUMERIC);

    assert_ok(bl_stream_wait(f->gpu, f->event));
    assert_ok(bl_stream_synchronize(f->gpu));
    assert_ok(bl_stream_wait(f->gpu, f->back));
    assert_int_equal(bl_stream_synchronize(f->gpu), BL_ENUMERIC);

    bl_stream *second; /* a failure of the GPU's stream stops a host stream that waits for it */
    assert_ok(bl_stream_create_host(f->device, "second", &second));
    assert_ok(bl_event_record(f->event, f->gpu));
    assert_ok(bl_stream_wait(second, f->event));
    give_fill(second, f->result, 2, false);
    assert_int_equal(bl_stream_synchronize(second), BL_ENUMERIC);
    assert_all(f->result, 0);
    bl_stream_destroy(second);
}

/* Two host streams, and a GPU's stream between them that fails nowhere. */
static void test_host_streams_wait_for_each_other(void **state)
{
    fixture *f = *state;
    bl_stream *second;
    assert_ok(bl_stream_create_host(f->device, "second", &second));
    give_fill(f->host, f->pinned, 3, true);
    assert_ok(bl_event_record(f->event, f->host));
    assert_ok(bl_stream_wait(second, f->event));
    assert_ok(bl_stream_call(second, increment, &f->pinned, sizeof f->pinned));
    assert_ok(bl_stream_synchronize(second));
    assert_all(f->pinned, 4);
    bl_stream_destroy(second);
}

static void test_lanes_are_used_again(void **state)
{
    fixture *f = *state;
    bl_stream *short_lived;
    for (int i = 0; i < 60; i++) {
        if (i % 2)
            assert_ok(bl_stream_create_host(f->device, "short-lived", &short_lived));
        else
            assert_ok(bl_stream_create(f->device, "short-lived", &short_lived));
        give_fill(short_lived, f->pinned, i, false);
        assert_ok(bl_event_record(f->event, short_lived));
        assert_ok(bl_stream_wait(f->gpu, f->event));
        assert_ok(bl_stream_wait(f->host, f->event));
        bl_stream_destroy(short_lived); /* the event stays */
        copy(f->gpu, f->result, f->pinned);
        assert_ok(bl_stream_synchronize(f->gpu));
        assert_ok(bl_stream_synchronize(f->host));
        assert_ok(bl_event_synchronize(f->event));
        assert_all(f->result, i);
    }
}

static void test_stamps(void **state)
{
    fixture *f = *state;
    bl_stamp *first, *second;
    assert_ok(bl_stamp_create(f->device, &first));
    assert_ok(bl_stamp_create(f->device, &second));
    double before = bl_now_s();
    assert_ok(bl_stamp_record(first, f->host));
    give_fill(f->host, f->pinned, 1, true);
    assert_ok(bl_stamp_record(second, f->host));
    assert_ok(bl_stream_synchronize(f->host));
    double elapsed = bl_stamp_elapsed_s(first, second);
    assert_true(bl_stamp_seconds(first) >= before && bl_stamp_seconds(second) <= bl_now_s());
    assert_true(elapsed >= 1e-6 * LATE_US && elapsed <= bl_now_s() - before);
    assert_ok(bl_stamp_record(second, f->gpu));
    assert_ok(bl_stream_synchronize(f->gpu));
    assert_true(bl_stamp_seconds(second) > BL_NEVER_S);
    bl_stamp_destroy(first);
    bl_stamp_destroy(second);
}

static void test_rows_on_the_gpu(void **state)
{
    fixture *f = *state;
    enum { ROWS = 16, WIDE = 64, NARROW = 24 };
    int *dst = f->memory + ROWS * WIDE;
    bl_row_copy rows = {.dst = dst,
                        .src = f->memory + 8,
                        .dst_stride = NARROW * sizeof(int),
                        .src_stride = WIDE * sizeof(int),
                        .row_bytes = NARROW * sizeof(int),
                        .n_rows = ROWS};

    for (int i = 0; i < WORDS; i++) f->pinned[i] = i;
    copy(f->gpu, f->memory, f->pinned);
    assert_ok(bl_stream_copy_rows(f->gpu, &rows));
    copy(f->gpu, f->result, f->memory);
    assert_ok(bl_stream_synchronize(f->gpu));
    for (int row = 0; row < ROWS; row++)
        for (int i = 0; i < NARROW; i++)
            assert_int_equal(f->result[ROWS * WIDE + row * NARROW + i], row * WIDE + 8 + i);
    assert_int_equal(bl_stream_copy_rows(f->host, &rows), BL_EINTERNAL);
}

static void test_what_it_does_not_take(void **state)
{
    fixture *f = *state;
    assert_int_equal(bl_stream_copy(f->host, f->pinned, f->result, 4), BL_EINTERNAL);
    assert_int_equal(bl_stream_zero(f->host, f->pinned, 4), BL_EINTERNAL);
    assert_ok(bl_stream_synchronize(f->host));
}

static int priority_of(bl_stream *stream)
{
    int priority;
    assert_int_equal(cudaStreamGetPriority(bl_cuda_stream_handle(stream), &priority), cudaSuccess);
    return priority;
}

/* A smaller number is a greater priority. */
static void test_urgent_streams_come_first(void **state)
{
    fixture *f = *state;
    bl_stream *urgent;
    assert_ok(bl_stream_create_urgent(f->device, "urgent", &urgent));
    assert_true(priority_of(urgent) < priority_of(f->gpu));
    bl_stream_destroy(urgent);
}

#define HOST_TEST(f) cmocka_unit_test_setup_teardown(f, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        HOST_TEST(test_the_gpu_waits_for_the_host),
        HOST_TEST(test_turn_by_turn),
        HOST_TEST(test_a_wait_is_for_the_record_before_it),
        HOST_TEST(test_errors_go_both_ways),
        HOST_TEST(test_host_streams_wait_for_each_other),
        HOST_TEST(test_lanes_are_used_again),
        HOST_TEST(test_stamps),
        HOST_TEST(test_rows_on_the_gpu),
        HOST_TEST(test_what_it_does_not_take),
        HOST_TEST(test_urgent_streams_come_first),
    };
#ifndef BALLAST_CUDA_EMULATED
    bl_device *device;
    if (bl_device_create_cuda(0, &device) != BL_OK) {
        printf("skip: no GPU: %s\n", bl_error_text());
        return 77;
    }
    bl_device_destroy(device);
#endif
    return cmocka_run_group_tests(tests, NULL, NULL);
}
