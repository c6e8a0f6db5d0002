/* SPDX-License-Identifier: Apache-2.0 */
/* The stream contract of device.h, point by point, on the CPU device. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <pthread.h>
#include <stdalign.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/counter.h"
#include "base/sizes.h"
#include "device/device.h"

BL_API const char *__asan_default_options(void); /* ASan looks it up by name */
const char *__asan_default_options(void)
{
    return "allocator_may_return_null=1"; /* as malloc does */
}

static void assert_ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

typedef struct fixture {
    bl_device *device;
    bl_stream *a, *b;
    bl_event *event;
} fixture;

static int setup(void **state) /* b: a host stream, on the CPU as any other */
{
    fixture *f = calloc(1, sizeof *f);
    assert_non_null(f);
    assert_ok(bl_device_create_cpu(2, &f->device));
    assert_ok(bl_stream_create(f->device, "stream a", &f->a));
    assert_ok(bl_stream_create_host(f->device, "a stream with a long name", &f->b));
    assert_ok(bl_event_create(f->device, &f->event));
    *state = f;
    return 0;
}

static int teardown(void **state)
{
    fixture *f = *state;
    bl_event_destroy(f->event);
    bl_stream_destroy(f->a);
    bl_stream_destroy(f->b);
    bl_device_destroy(f->device);
    free(f);
    return 0;
}

/* ---- tasks ---- */

static bl_status wait_at_gate(bl_stream *stream, const void *args)
{
    (void)stream;
    bl_counter_wait(*(bl_counter *const *)args, 1);
    return BL_OK;
}

static void give_gate(bl_stream *stream, bl_counter *gate)
{
    bl_counter_init(gate);
    assert_ok(bl_stream_call(stream, wait_at_gate, &gate, sizeof gate));
}

static void open_gate(bl_counter *gate)
{
    bl_counter_advance(gate, 1);
}

typedef struct set_args {
    int *target;
    int value;
} set_args;

static bl_status set_task(bl_stream *stream, const void *args)
{
    const set_args *a = args;
    (void)stream;
    *a->target = a->value;
    return BL_OK;
}

static void give_set(bl_stream *stream, int *target, int value)
{
    set_args args = {.target = target, .value = value};
    assert_ok(bl_stream_call(stream, set_task, &args, sizeof args));
}

static bl_status fail_task(bl_stream *stream, const void *args)
{
    (void)stream;
    return BL_FAIL(BL_EIO, "%s", (const char *)args);
}

static void give_failure(bl_stream *stream, const char *text)
{
    assert_ok(bl_stream_call(stream, fail_task, text, strlen(text) + 1));
}

static void assert_fails(bl_status st, const char *text)
{
    assert_int_equal(st, BL_EIO);
    assert_string_equal(bl_error_text(), text);
}

/* ---- memory ---- */

static void test_memory(void **state)
{
    bl_device *device = ((fixture *)*state)->device;
    static const size_t sizes[] = {0, 1, 4095, 4096, 4097, 5 << 20};
    void *memory[BL_COUNT(sizes)];
    size_t total_bytes = 0;
    int64_t n_before = bl_device_allocations(device);

    assert_int_equal(bl_device_get_kind(device), BL_DEVICE_CPU);
    for (size_t i = 0; i < BL_COUNT(sizes); i++) {
        assert_ok(bl_device_alloc(device, i % 2 ? BL_SPACE_HOST : BL_SPACE_DEVICE, sizes[i], "x",
                                  &memory[i]));
        assert_non_null(memory[i]);
        assert_int_equal((uintptr_t)memory[i] % BL_DEVICE_ALIGNMENT_BYTES, 0);
        for (size_t k = 0; k < sizes[i]; k++) assert_int_equal(((char *)memory[i])[k], 0);
        memset(memory[i], 0x5A, sizes[i]);
        total_bytes += sizes[i];
        assert_int_equal(bl_device_bytes(device), total_bytes);
    }
    assert_int_equal(bl_device_allocations(device) - n_before, BL_COUNT(sizes));
    for (size_t i = 0; i < BL_COUNT(sizes); i++) {
        size_t k = (i + 2) % BL_COUNT(sizes); /* neither first in nor last in */
        bl_device_free(device, k % 2 ? BL_SPACE_HOST : BL_SPACE_DEVICE, memory[k]);
        total_bytes -= sizes[k];
        assert_int_equal(bl_device_bytes(device), total_bytes);
    }
    bl_device_free(device, BL_SPACE_DEVICE, NULL);

    void *none = &total_bytes;
    assert_int_equal(bl_device_alloc(device, BL_SPACE_DEVICE, SIZE_MAX / 4, "ring slot 3", &none),
                     BL_ENOMEM);
    assert_null(none);
    assert_non_null(strstr(bl_error_text(), "ring slot 3"));
    assert_non_null(strstr(bl_error_text(), "4611686018427387903 bytes"));
    assert_int_equal(bl_device_bytes(device), 0);
}

static void *allocate_often(void *argument)
{
    bl_device *device = argument;
    void *memory[100];
    for (int round = 0; round < 10; round++) {
        for (int i = 0; i < 100; i++)
            if (bl_device_alloc(device, BL_SPACE_HOST, (size_t)i, "x", &memory[i]) != BL_OK)
                abort();
        for (int i = 0; i < 100; i++) bl_device_free(device, BL_SPACE_HOST, memory[i]);
    }
    return NULL;
}

static void test_memory_from_threads(void **state)
{
    bl_device *device = ((fixture *)*state)->device;
    pthread_t threads[3];
    for (int i = 0; i < 3; i++)
        assert_int_equal(pthread_create(&threads[i], NULL, allocate_often, device), 0);
    for (int i = 0; i < 3; i++) pthread_join(threads[i], NULL);
    assert_int_equal(bl_device_bytes(device), 0);
    assert_int_equal(bl_device_allocations(device), 3000);
}

/* ---- streams ---- */

typedef struct append_args {
    int *list, *n;
    int value;
    char rest[BL_STREAM_ARGS_BYTES - 2 * sizeof(int *) - sizeof(int)];
} append_args;

static bl_status append_task(bl_stream *stream, const void *args)
{
    const append_args *a = args;
    (void)stream;
    if ((uintptr_t)args % alignof(max_align_t) != 0)
        return BL_FAIL(BL_EINTERNAL, "misaligned arguments");
    if (a->rest[sizeof a->rest - 1] != (char)a->value)
        return BL_FAIL(BL_EINTERNAL, "arguments cut short");
    a->list[(*a->n)++] = a->value;
    return BL_OK;
}

/* More tasks than the ring holds, in order, each with the arguments of its call. */
static void test_order_and_arguments(void **state)
{
    enum { N_TASKS = 5 * BL_STREAM_DEPTH + 3 };
    bl_stream *stream = ((fixture *)*state)->a;
    static int list[N_TASKS];
    int n = 0;
    append_args args = {.list = list, .n = &n};

    for (int i = 0; i < N_TASKS; i++) {
        args.value = i;
        args.rest[sizeof args.rest - 1] = (char)i;
        assert_ok(bl_stream_call(stream, append_task, &args, sizeof args));
    }
    assert_ok(bl_stream_synchronize(stream));
    assert_int_equal(n, N_TASKS);
    for (int i = 0; i < N_TASKS; i++) assert_int_equal(list[i], i);

    assert_ptr_equal(bl_stream_device(stream), ((fixture *)*state)->device);
    char large[BL_STREAM_ARGS_BYTES + 1] = {0};
    assert_int_equal(bl_stream_call(stream, append_task, large, sizeof large), BL_EINTERNAL);
    assert_ok(bl_stream_synchronize(stream));
}

typedef struct producer {
    bl_stream *stream;
    atomic_int n_given;
    int done;
} producer;

static void *give_too_many(void *argument)
{
    producer *p = argument;
    set_args args = {.target = &p->done, .value = 1};
    for (int i = 0; i < BL_STREAM_DEPTH + 1; i++) {
        bl_stream_call(p->stream, set_task, &args, sizeof args);
        atomic_fetch_add(&p->n_given, 1);
    }
    return NULL;
}

/* Behind a closed gate, which takes one place, the ring takes BL_STREAM_DEPTH - 1 calls, and the
 * next one waits. */
static void test_full_ring_blocks(void **state)
{
    producer p = {.stream = ((fixture *)*state)->a};
    bl_counter gate;
    pthread_t thread;

    give_gate(p.stream, &gate);
    assert_int_equal(pthread_create(&thread, NULL, give_too_many, &p), 0);
    for (int i = 0; i < 5000 && atomic_load(&p.n_given) < BL_STREAM_DEPTH - 1; i++) usleep(1000);
    usleep(20 * 1000);
    assert_int_equal(atomic_load(&p.n_given), BL_STREAM_DEPTH - 1);
    assert_int_equal(p.done, 0);
    open_gate(&gate);
    pthread_join(thread, NULL);
    assert_ok(bl_stream_synchronize(p.stream));
    assert_int_equal(p.done, 1);
}

static void test_copy_and_zero(void **state)
{
    bl_stream *stream = ((fixture *)*state)->a;
    char src[100], dst[100];
    bl_row_copy rows = {dst + 70, src, 10, 5, 3, 2};
    memset(src, 7, sizeof src);
    memset(dst, 1, sizeof dst);
    assert_ok(bl_stream_copy(stream, dst + 10, src, 50));
    assert_ok(bl_stream_zero(stream, dst + 20, 5));
    assert_ok(bl_stream_copy_rows(stream, &rows));
    rows.row_bytes = 6;
    assert_int_equal(bl_stream_copy_rows(stream, &rows), BL_EINTERNAL);
    assert_ok(bl_stream_zero(stream, NULL, 0));
    assert_ok(bl_stream_synchronize(stream));
    for (int i = 0; i < 100; i++) {
        bool is_copied = (i >= 10 && i < 60) || (i >= 70 && i < 90 && i % 10 < 3);
        assert_int_equal(dst[i], i >= 20 && i < 25 ? 0 : is_copied ? 7 : 1);
    }
}

static bl_status read_name(bl_stream *stream, const void *args)
{
    (void)stream;
    pthread_getname_np(pthread_self(), *(char *const *)args, 16);
    return BL_OK;
}

static void test_thread_names(void **state)
{
    fixture *f = *state;
    char name[16], *target = name;
    assert_ok(bl_stream_call(f->a, read_name, &target, sizeof target));
    assert_ok(bl_stream_synchronize(f->a));
    assert_string_equal(name, "stream a");
    assert_ok(bl_stream_call(f->b, read_name, &target, sizeof target));
    assert_ok(bl_stream_synchronize(f->b));
    assert_string_equal(name, "a stream with a");
}

static void add_index(void *arg, int64_t index, void *scratch)
{
    int64_t *values = arg;
    (void)scratch;
    values[index] += index;
}

static bl_status use_pool(bl_stream *stream, const void *args)
{
    bl_pool_run(bl_device_pool(bl_stream_device(stream)), 1000, add_index, *(int64_t *const *)args);
    return BL_OK;
}

static void test_pool_in_tasks(void **state)
{
    fixture *f = *state;
    static int64_t values[2][1000];
    int64_t *first = values[0], *second = values[1];
    assert_int_equal(bl_pool_threads(bl_device_pool(f->device)), 2);
    for (int i = 0; i < 20; i++) { /* two streams share the workers */
        assert_ok(bl_stream_call(f->a, use_pool, &first, sizeof first));
        assert_ok(bl_stream_call(f->b, use_pool, &second, sizeof second));
    }
    assert_ok(bl_stream_synchronize(f->a));
    assert_ok(bl_stream_synchronize(f->b));
    for (int64_t i = 0; i < 1000; i++)
        assert_true(values[0][i] == 20 * i && values[1][i] == 20 * i);
}

/* ---- events ---- */

static void test_event_orders_streams(void **state)
{
    fixture *f = *state;
    bl_counter gate;
    int x = 0, seen = 0;

    assert_ok(bl_event_synchronize(f->event)); /* never recorded: no wait */
    assert_ok(bl_stream_wait(f->b, f->event));
    give_set(f->b, &seen, 1);
    assert_ok(bl_stream_synchronize(f->b));
    assert_int_equal(seen, 1);

    give_gate(f->a, &gate);
    give_set(f->a, &x, 42);
    assert_ok(bl_event_record(f->event, f->a));
    assert_ok(bl_stream_wait(f->b, f->event));
    assert_ok(bl_stream_copy(f->b, &seen, &x, sizeof x));
    usleep(10 * 1000);
    open_gate(&gate);
    assert_ok(bl_stream_synchronize(f->b));
    assert_int_equal(seen, 42);
    assert_ok(bl_event_synchronize(f->event));
    assert_int_equal(x, 42);
}

/* A wait means the record before it: a later one, behind a closed gate and on another stream, does
 * not hold it up. */
static void test_event_is_recorded_again(void **state)
{
    fixture *f = *state;
    bl_counter first, second;
    bl_stream *c = NULL;
    int x = 0, seen = 0;

    assert_ok(bl_stream_create(f->device, "c", &c));
    give_gate(f->a, &first);
    give_set(f->a, &x, 1);
    assert_ok(bl_event_record(f->event, f->a));
    assert_ok(bl_stream_wait(f->b, f->event));
    assert_ok(bl_stream_copy(f->b, &seen, &x, sizeof x));
    give_gate(c, &second);
    give_set(c, &x, 2);
    assert_ok(bl_event_record(f->event, c));

    open_gate(&first);
    assert_ok(bl_stream_synchronize(f->b)); /* would hang if it waited for c */
    assert_int_equal(seen, 1);

    assert_ok(bl_stream_wait(f->b, f->event));
    assert_ok(bl_stream_copy(f->b, &seen, &x, sizeof x));
    open_gate(&second);
    assert_ok(bl_stream_synchronize(f->b));
    assert_int_equal(seen, 2);
    bl_stream_destroy(c);
}

/* The other way round: the later record fires first; a wait for the earlier one still waits. */
static void test_records_fire_out_of_order(void **state)
{
    fixture *f = *state;
    bl_counter gate;
    bl_stream *c = NULL;
    int x = 0, seen = 0;

    assert_ok(bl_stream_create(f->device, "c", &c));
    give_gate(f->a, &gate);
    give_set(f->a, &x, 1);
    assert_ok(bl_event_record(f->event, f->a));
    assert_ok(bl_stream_wait(f->b, f->event));
    assert_ok(bl_stream_copy(f->b, &seen, &x, sizeof x));
    assert_ok(bl_event_record(f->event, c));
    assert_ok(bl_event_synchronize(f->event));
    usleep(10 * 1000);
    open_gate(&gate);
    assert_ok(bl_stream_synchronize(f->b));
    assert_int_equal(seen, 1);
    bl_stream_destroy(c);
}

static void test_event_outlives_stream(void **state)
{
    fixture *f = *state;
    bl_stream *c = NULL;
    int x = 0;

    assert_ok(bl_stream_create(f->device, "c", &c));
    give_set(c, &x, 3);
    assert_ok(bl_event_record(f->event, c));
    bl_stream_destroy(c); /* waits for its tasks */
    assert_int_equal(x, 3);
    assert_ok(bl_event_synchronize(f->event));
    assert_ok(bl_stream_wait(f->b, f->event));
    assert_ok(bl_stream_synchronize(f->b));
}

typedef struct step_args {
    int *value;
    int expected;
} step_args;

static bl_status check_and_step(bl_stream *stream, const void *args)
{
    const step_args *a = args;
    (void)stream;
    if (*a->value != a->expected)
        return BL_FAIL(BL_EINTERNAL, "%d instead of %d", *a->value, a->expected);
    ++*a->value;
    return BL_OK;
}

/* A plain integer handed from stream to stream, by one event that is recorded again and again. */
static void test_relay(void **state)
{
    enum { N_STEPS = 10000 };
    fixture *f = *state;
    int value = 0;
    for (int i = 0; i < N_STEPS; i++) {
        bl_stream *stream = i % 2 ? f->b : f->a;
        step_args args = {.value = &value, .expected = i};
        assert_ok(bl_stream_wait(stream, f->event));
        assert_ok(bl_stream_call(stream, check_and_step, &args, sizeof args));
        assert_ok(bl_event_record(f->event, stream));
    }
    assert_ok(bl_event_synchronize(f->event));
    assert_int_equal(value, N_STEPS);
}

/* ---- errors ---- */

static void test_first_error_is_sticky(void **state)
{
    fixture *f = *state;
    bl_event *before = NULL;
    int x = 0, y = 0;

    assert_ok(bl_event_create(f->device, &before));
    give_set(f->a, &x, 1);
    assert_ok(bl_event_record(before, f->a));
    give_failure(f->a, "first");
    give_set(f->a, &x, 2);
    give_failure(f->a, "second");
    assert_ok(bl_event_record(f->event, f->a));
    assert_ok(bl_stream_wait(f->b, before));
    give_set(f->b, &y, 1);
    assert_ok(bl_stream_synchronize(f->b)); /* what comes before the failure is in order */
    assert_int_equal(y, 1);
    assert_ok(bl_event_synchronize(before));

    assert_fails(bl_stream_synchronize(f->a), "first");
    assert_int_equal(x, 1);
    assert_ok(bl_stream_wait(f->b, f->event));
    give_set(f->b, &y, 2);
    bl_fail(BL_EUSAGE, "another text of this thread");
    assert_fails(bl_event_synchronize(f->event), "first");
    bl_fail(BL_EUSAGE, "another text of this thread");
    assert_fails(bl_stream_synchronize(f->b), "first"); /* inherited */
    assert_int_equal(y, 1);
    give_set(f->a, &x, 3);
    assert_fails(bl_stream_synchronize(f->a), "first");
    assert_int_equal(x, 1);
    bl_event_destroy(before);
}

static void *open_late(void *argument)
{
    usleep(30 * 1000);
    open_gate(argument);
    return NULL;
}

/* An event of a failed stream promises as much as any: stream a failed, yet its wait for stream b
 * comes first. */
static void test_failed_stream_still_waits(void **state)
{
    fixture *f = *state;
    bl_event *after = NULL;
    bl_counter gate;
    pthread_t thread;
    int x = 0;

    assert_ok(bl_event_create(f->device, &after));
    give_failure(f->a, "early");
    give_gate(f->b, &gate);
    give_set(f->b, &x, 1);
    give_failure(f->b, "late"); /* is not inherited by a stream that has an error */
    assert_ok(bl_event_record(f->event, f->b));
    assert_ok(bl_stream_wait(f->a, f->event));
    assert_ok(bl_event_record(after, f->a));
    assert_int_equal(pthread_create(&thread, NULL, open_late, &gate), 0);
    assert_fails(bl_event_synchronize(after), "early");
    assert_int_equal(x, 1);
    pthread_join(thread, NULL);
    bl_event_destroy(after);
}

/* A stamp is reached in stream order, by failed streams as well, and tells 0 until then. */
static void test_stamps(void **state)
{
    fixture *f = *state;
    bl_stamp *first = NULL, *second = NULL;
    bl_counter gate;

    assert_ok(bl_stamp_create(f->device, &first));
    assert_ok(bl_stamp_create(f->device, &second));
    give_gate(f->a, &gate);
    assert_ok(bl_stamp_record(first, f->a));
    assert_true(bl_stamp_seconds(first) == BL_NEVER_S);
    assert_true(bl_stamp_elapsed_s(first, second) == 0);
    bl_counter_advance(&gate, 1);
    give_failure(f->a, "between");
    assert_ok(bl_stamp_record(second, f->a));
    assert_fails(bl_stream_synchronize(f->a), "between");
    assert_true(bl_stamp_seconds(first) > BL_NEVER_S);
    assert_true(bl_stamp_seconds(second) >= bl_stamp_seconds(first));
    assert_true(bl_stamp_elapsed_s(first, second) ==
                bl_stamp_seconds(second) - bl_stamp_seconds(first));
    bl_stamp_destroy(first);
    bl_stamp_destroy(second);
    bl_stamp_destroy(NULL);
}

/* The status of a stream can be asked without waiting. */
static void test_stream_status(void **state)
{
    fixture *f = *state;
    bl_counter gate;

    give_gate(f->a, &gate);
    give_failure(f->a, "behind the gate");
    assert_ok(bl_stream_status(f->a));
    bl_counter_advance(&gate, 1);
    assert_fails(bl_stream_synchronize(f->a), "behind the gate");
    assert_fails(bl_stream_status(f->a), "behind the gate");
}

static void test_bad_arguments(void **state)
{
    (void)state;
    bl_device *device = NULL;
    assert_int_equal(bl_device_create_cpu(0, &device), BL_EUSAGE);
    assert_int_equal(bl_device_create_cpu_over(2, NULL, &device), BL_EUSAGE);
    assert_null(device);
    bl_device_destroy(NULL), bl_stream_destroy(NULL), bl_event_destroy(NULL);
}

#define STREAM_TEST(function) cmocka_unit_test_setup_teardown(function, setup, teardown)

int main(void)
{
    const struct CMUnitTest tests[] = {
        STREAM_TEST(test_memory),
        STREAM_TEST(test_memory_from_threads),
        STREAM_TEST(test_order_and_arguments),
        STREAM_TEST(test_full_ring_blocks),
        STREAM_TEST(test_copy_and_zero),
        STREAM_TEST(test_thread_names),
        STREAM_TEST(test_pool_in_tasks),
        STREAM_TEST(test_event_orders_streams),
        STREAM_TEST(test_event_is_recorded_again),
        STREAM_TEST(test_records_fire_out_of_order),
        STREAM_TEST(test_event_outlives_stream),
        STREAM_TEST(test_relay),
        STREAM_TEST(test_first_error_is_sticky),
        STREAM_TEST(test_failed_stream_still_waits),
        STREAM_TEST(test_stamps),
        STREAM_TEST(test_stream_status),
        cmocka_unit_test(test_bad_arguments),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
