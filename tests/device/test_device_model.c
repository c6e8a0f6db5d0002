/* SPDX-License-Identifier: Apache-2.0 */
/* A device made of rates: schedules computed by hand, and memory that is counted. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <string.h>
#include <sys/resource.h>

#include <cmocka.h>

#include "base/clock.h"
#include "device/model.h"

static const bl_rates rates = {.memory_bytes_per_s = 100,
                               .copy_in_bytes_per_s = 10,
                               .copy_out_bytes_per_s = 5,
                               .disk_bytes_per_s = 2,
                               .cores = 4,
                               .copy_cores = 1};

typedef struct machine {
    bl_device *device;
    bl_stream *a, *b;
    bl_stamp *begin, *end;
    bl_event *event;
    char *host, *memory; /* 1000 bytes each */
} machine;

static void must(bl_status st)
{
    if (st != BL_OK) fail_msg("%s", bl_error_text());
}

static void open_machine(machine *m, bl_device_kind kind)
{
    bl_model_device_options options = {.kind = kind, .rates = rates};

    must(bl_device_create_model(&options, &m->device));
    must(bl_stream_create(m->device, "a", &m->a));
    must(bl_stream_create(m->device, "b", &m->b));
    must(bl_stamp_create(m->device, &m->begin));
    must(bl_stamp_create(m->device, &m->end));
    must(bl_event_create(m->device, &m->event));
    must(bl_device_alloc(m->device, BL_SPACE_HOST, 1000, "host memory", (void **)&m->host));
    must(bl_device_alloc(m->device, BL_SPACE_DEVICE, 1000, "memory", (void **)&m->memory));
}

static void close_machine(machine *m)
{
    bl_device_free(m->device, BL_SPACE_HOST, m->host);
    bl_device_free(m->device, BL_SPACE_DEVICE, m->memory);
    bl_event_destroy(m->event);
    bl_stamp_destroy(m->begin);
    bl_stamp_destroy(m->end);
    bl_stream_destroy(m->a);
    bl_stream_destroy(m->b);
    bl_device_destroy(m->device);
}

/* Seconds from now until all work of `stream` has ended. */
static double seconds_of(machine *m, bl_stream *stream)
{
    must(bl_stamp_record(m->end, stream));
    must(bl_stream_synchronize(stream));
    return bl_stamp_elapsed_s(m->begin, m->end);
}

static void copies_take_the_time_of_their_way(void **state)
{
    machine m;

    (void)state;
    open_machine(&m, BL_DEVICE_CUDA);
    must(bl_stamp_record(m.begin, m.a));
    assert_true(bl_stamp_seconds(m.begin) == 0);      /* a time like others */
    must(bl_stream_copy(m.a, m.memory, m.host, 100)); /* 10 s over the link */
    assert_float_equal(seconds_of(&m, m.a), 10, 1e-9);
    must(bl_stream_copy(m.a, m.host, m.memory, 100));         /* 20 s back */
    must(bl_stream_copy(m.a, m.memory + 500, m.memory, 100)); /* read and written: 2 s */
    must(bl_stream_zero(m.a, m.memory, 100));                 /* written: 1 s */
    must(bl_stream_copy_rows(m.a, &(bl_row_copy){.dst = m.memory,
                                                 .src = m.memory + 500,
                                                 .dst_stride = 10,
                                                 .src_stride = 20,
                                                 .row_bytes = 10,
                                                 .n_rows = 15})); /* 3 s */
    assert_float_equal(seconds_of(&m, m.a), 10 + 20 + 2 + 1 + 3, 1e-9);
    close_machine(&m);
}

/* Work that is queued after a wait begins then: the program's own time is the clock's. */
static void a_stream_waits_and_the_program_waits(void **state)
{
    machine m;

    (void)state;
    open_machine(&m, BL_DEVICE_CPU);
    must(bl_stamp_record(m.begin, m.a));
    must(bl_stream_wait(m.b, m.event)); /* never recorded: no wait */
    must(bl_stream_copy(m.a, m.memory, m.host, 50));
    must(bl_event_record(m.event, m.a)); /* at 5 s */
    must(bl_stream_copy(m.a, m.memory, m.host, 30));
    must(bl_stream_wait(m.b, m.event));
    must(bl_stream_copy(m.b, m.memory, m.host, 20));
    must(bl_stamp_record(m.end, m.b));
    assert_true(bl_stamp_seconds(m.end) == BL_NEVER_S);
    must(bl_event_synchronize(m.event));
    must(bl_stamp_record(m.end, m.b));
    assert_float_equal(seconds_of(&m, m.b), 7, 1e-9);
    must(bl_stream_synchronize(m.a)); /* 8 s */
    must(bl_stream_copy(m.b, m.memory, m.host, 10));
    assert_float_equal(seconds_of(&m, m.b), 9, 1e-9);
    close_machine(&m);
}

static bl_status never(bl_stream *stream, const void *args)
{
    (void)stream, (void)args;
    return BL_FAIL(BL_EINTERNAL, "a task of a model device");
}

/* Reads go on while their stream does other work, one after the other. */
static void reads_take_the_disks_time(void **state)
{
    machine m;
    int nothing = 0;

    (void)state;
    open_machine(&m, BL_DEVICE_CUDA);
    must(bl_stamp_record(m.begin, m.a));
    must(bl_stream_copy(m.a, m.memory, m.host, 10)); /* 1 s, before them */
    for (int i = 0; i < 2; i++)                      /* each 3 s: until 4 s, until 7 s */
        must(bl_stream_begin_read(m.a, i, 6, never, &nothing, sizeof nothing));
    must(bl_stream_call(m.a, never, &nothing, sizeof nothing));
    must(bl_stream_copy(m.a, m.memory, m.host, 20));
    assert_float_equal(seconds_of(&m, m.a), 3, 1e-9);
    must(bl_stream_end_read(m.a, 0, never, &nothing, sizeof nothing));
    assert_float_equal(seconds_of(&m, m.a), 4, 1e-9);
    must(bl_stream_end_read(m.a, 1, never, &nothing, sizeof nothing));
    assert_float_equal(seconds_of(&m, m.a), 7, 1e-9);
    assert_int_equal(bl_stream_begin_read(m.a, BL_STREAM_READS, 1, never, &nothing, sizeof nothing),
                     BL_EINTERNAL);
    close_machine(&m);
}

/* A read and a write, each 3 s alone: both end at 6 s. */
static void reads_and_writes_share_the_disk(void **state)
{
    machine m;
    int nothing = 0;

    (void)state;
    for (int kind = BL_DEVICE_CPU; kind <= BL_DEVICE_CUDA; kind++) {
        open_machine(&m, (bl_device_kind)kind);
        must(bl_stamp_record(m.begin, m.a));
        must(bl_stream_begin_read(m.a, 0, 6, never, &nothing, sizeof nothing));
        must(bl_model_stream_write(m.b, 6));
        must(bl_stream_end_read(m.a, 0, never, &nothing, sizeof nothing));
        assert_float_equal(seconds_of(&m, m.a), 6, 1e-9);
        assert_float_equal(seconds_of(&m, m.b), 6, 1e-9);
        close_machine(&m);
    }
}

static void memory_is_counted_and_not_made(void **state)
{
    const size_t terabyte = (size_t)1 << 40;
    machine m;
    void *first, *second;

    (void)state;
    open_machine(&m, BL_DEVICE_CUDA);
    must(bl_device_alloc(m.device, BL_SPACE_DEVICE, terabyte, "a terabyte", &first));
    must(bl_device_alloc(m.device, BL_SPACE_HOST, terabyte, "a terabyte", &second));
    assert_int_equal(bl_device_peak_bytes(m.device, BL_SPACE_DEVICE), terabyte + 1000);
    assert_int_equal(((char *)second)[terabyte - 1], 0); /* host code may write and read it */
    ((char *)second)[terabyte - 1] = 1;
    bl_device_free(m.device, BL_SPACE_DEVICE, first);
    bl_device_free(m.device, BL_SPACE_HOST, second);
    assert_int_equal(bl_device_bytes(m.device), 2000);
    assert_int_equal(bl_device_alloc(m.device, BL_SPACE_DEVICE, SIZE_MAX / 2, "too much", &first),
                     BL_ENOMEM);
    assert_int_equal(bl_device_alloc(m.device, BL_SPACE_DEVICE, SIZE_MAX, "too much", &first),
                     BL_ENOMEM);
    close_machine(&m);
}

/* Addresses are reserved as they are needed, so that a small model is planned under a limit. */
static void a_limit_of_addresses_is_named(void **state)
{
    struct rlimit before, limit;
    machine m;
    void *first;

    (void)state;
    assert_int_equal(getrlimit(RLIMIT_AS, &before), 0);
    limit = before;
    limit.rlim_cur = (rlim_t)1 << 45; /* a sanitizer has 20 TiB of addresses */
    assert_int_equal(setrlimit(RLIMIT_AS, &limit), 0);
    open_machine(&m, BL_DEVICE_CUDA);
    assert_int_equal(bl_device_alloc(m.device, BL_SPACE_DEVICE, (size_t)1 << 46, "64 TiB", &first),
                     BL_ENOMEM);
    assert_non_null(strstr(bl_error_text(), "ulimit -v unlimited"));
    close_machine(&m);
    assert_int_equal(setrlimit(RLIMIT_AS, &before), 0);
}

static void it_stands_for_a_kind(void **state)
{
    machine m;
    bl_device *cpu;

    (void)state;
    for (int kind = BL_DEVICE_CPU; kind <= BL_DEVICE_CUDA; kind++) {
        open_machine(&m, (bl_device_kind)kind);
        assert_int_equal(bl_device_get_kind(m.device), kind);
        assert_int_equal(bl_device_host_writes(m.device), kind == BL_DEVICE_CPU);
        assert_float_equal(bl_device_model(m.device)->rates.disk_bytes_per_s, 2, 0);
        close_machine(&m);
    }
    must(bl_device_create_cpu(1, &cpu));
    assert_null(bl_device_model(cpu));
    bl_device_destroy(cpu);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(copies_take_the_time_of_their_way),
        cmocka_unit_test(a_stream_waits_and_the_program_waits),
        cmocka_unit_test(reads_take_the_disks_time),
        cmocka_unit_test(reads_and_writes_share_the_disk),
        cmocka_unit_test(memory_is_counted_and_not_made),
        cmocka_unit_test(a_limit_of_addresses_is_named),
        cmocka_unit_test(it_stands_for_a_kind),
    };
    return cmocka_run_group_tests_name("device model", tests, NULL, NULL);
}
