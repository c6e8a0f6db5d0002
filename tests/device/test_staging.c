/* SPDX-License-Identifier: Apache-2.0 */
/* staging.h under the guard: every size around a piece's arrives, there and back, nothing beside it
 * changes, and wrong ranges are refused. Without the guard, whose tasks are waited for in any case:
 * on a stream that is late. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "base/sizes.h"
#include "device/guard.h"
#include "device/staging.h"

enum { PIECE = 256, MARGIN = 64, MOST = 3 * PIECE + 1 };

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
    bl_stream *stream;
} fixture;

static int set_up(void **state)
{
    static fixture f;
    bl_device_guard_memory(true);
    assert_ok(bl_device_create_cpu(1, &f.device));
    assert_ok(bl_stream_create(f.device, "stream", &f.stream));
    *state = &f;
    return 0;
}

static int tear_down(void **state)
{
    fixture *f = *state;
    bl_stream_destroy(f->stream);
    assert_int_equal(bl_device_bytes(f->device), 0);
    bl_device_destroy(f->device);
    return 0;
}

static unsigned char number(size_t i)
{
    return (unsigned char)(i * 37 + i / 256 + 1);
}

/* n bytes up to the middle of the memory and back; the margins stay zero. */
static void round_trip(bl_staging *staging, unsigned char *memory, size_t n, bool in_place)
{
    unsigned char from[MOST], back[MOST + 2 * MARGIN], *host = in_place ? staging->bytes : from;

    memset(back, 0, sizeof back);
    assert_ok(bl_staging_upload(staging, memory, back, sizeof back));
    for (size_t i = 0; i < n; i++) host[i] = number(i);
    assert_ok(bl_staging_upload(staging, memory + MARGIN, host, n));
    assert_ok(bl_staging_download(staging, back, memory, sizeof back));
    for (size_t i = 0; i < sizeof back; i++)
        assert_int_equal(back[i], i >= MARGIN && i < MARGIN + n ? number(i - MARGIN) : 0);
    if (!in_place) return;
    assert_ok(bl_staging_download(staging, staging->bytes, memory + MARGIN, n));
    for (size_t i = 0; i < n; i++) assert_int_equal(host[i], number(i));
}

static void test_any_number_of_bytes(void **state)
{
    static const size_t sizes[] = {0, 1, PIECE - 1, PIECE, PIECE + 1, 2 * PIECE, MOST};
    fixture *f = *state;
    bl_staging *staging;
    void *memory;

    assert_ok(bl_device_alloc(f->device, BL_SPACE_DEVICE, MOST + 2 * MARGIN, "there", &memory));
    assert_ok(bl_staging_create(f->device, PIECE, "pieces", &staging));
    for (size_t i = 0; i < BL_COUNT(sizes); i++) {
        round_trip(staging, memory, sizes[i], false);
        if (sizes[i] <= PIECE) round_trip(staging, memory, sizes[i], true);
    }
    assert_int_equal(bl_staging_upload(staging, memory, staging->bytes, PIECE + 1), BL_EINTERNAL);
    assert_int_equal(bl_staging_download(staging, staging->bytes, memory, PIECE + 1), BL_EINTERNAL);
    unsigned char *middle = (unsigned char *)staging->bytes + PIECE / 2;
    assert_int_equal(bl_staging_upload(staging, memory, middle, PIECE / 2 + 1), BL_EINTERNAL);
    memset(staging->bytes, 1, PIECE);
    memset(middle, 2, PIECE / 2);
    assert_ok(bl_staging_upload(staging, memory, middle, PIECE / 2));
    assert_ok(bl_staging_download(staging, middle, memory, PIECE / 2));
    for (int i = 0; i < PIECE; i++)
        assert_int_equal(((unsigned char *)staging->bytes)[i], i < PIECE / 2 ? 1 : 2);
    bl_staging_destroy(staging);
    bl_staging_destroy(NULL);
    bl_device_free(f->device, BL_SPACE_DEVICE, memory);
}

static bl_status double_task(bl_stream *stream, const void *args)
{
    int32_t *x = *(int32_t *const *)args;
    (void)stream;
    for (int i = 0; i < 16; i++) x[i] *= 2;
    return BL_OK;
}

static void test_a_twin(void **state)
{
    fixture *f = *state;
    bl_twin *twin;

    assert_ok(bl_twin_create(f->device, 16 * sizeof(int32_t), "counters", &twin));
    int32_t *x = twin->host;
    for (int i = 0; i < 16; i++) assert_int_equal(x[i], 0);
    for (int i = 0; i < 16; i++) x[i] = i + 1;
    assert_ok(bl_twin_upload(twin, f->stream, 4 * sizeof *x, 8 * sizeof *x));
    assert_ok(bl_stream_call(f->stream, double_task, &twin->memory, sizeof twin->memory));
    assert_ok(bl_twin_download(twin, f->stream, 0, 6 * sizeof *x));
    assert_ok(bl_twin_download(twin, f->stream, 12 * sizeof *x, 4 * sizeof *x));
    assert_ok(bl_stream_synchronize(f->stream));
    for (int i = 0; i < 16; i++) /* 4..11 went up, 0..5 and 12..15 came down */
        assert_int_equal(x[i], i < 4 || i >= 12 ? 0 : i < 6 ? 2 * (i + 1) : i + 1);
    assert_int_equal(bl_twin_upload(twin, f->stream, 60, 5), BL_EINTERNAL);
    assert_int_equal(bl_twin_download(twin, f->stream, 65, 0), BL_EINTERNAL);
    assert_ok(bl_twin_upload(twin, f->stream, 64, 0));
    bl_twin_destroy(twin);
    bl_twin_destroy(NULL);
}

static void test_no_memory(void **state)
{
    fixture *f = *state;
    bl_staging *staging;
    bl_twin *twin;

    assert_int_equal(bl_staging_create(f->device, SIZE_MAX / 4, "the moon", &staging), BL_ENOMEM);
    assert_null(staging);
    assert_int_equal(bl_twin_create(f->device, SIZE_MAX / 4, "the sun", &twin), BL_ENOMEM);
    assert_null(twin);
    assert_non_null(strstr(bl_error_text(), "the sun"));
}

static bl_status fail_task(bl_stream *stream, const void *args)
{
    (void)stream, (void)args;
    return BL_FAIL(BL_EIO, "a planted failure");
}

/* What an abandoned step leaves behind can still be saved. */
static void test_a_failed_stream_of_others(void **state)
{
    fixture *f = *state;
    bl_staging *staging;
    bl_stream *failed;
    int there = 5, back = 0;
    void *memory;

    assert_ok(bl_device_alloc(f->device, BL_SPACE_DEVICE, sizeof there, "there", &memory));
    assert_ok(bl_staging_create(f->device, PIECE, "pieces", &staging));
    assert_ok(bl_stream_create(f->device, "failed", &failed));
    assert_ok(bl_stream_copy(failed, memory, &there, sizeof there));
    assert_ok(bl_stream_call(failed, fail_task, NULL, 0));
    assert_int_equal(bl_stream_synchronize(failed), BL_EIO);
    assert_ok(bl_staging_download(staging, &back, memory, sizeof back));
    assert_int_equal(back, there);
    bl_stream_destroy(failed);
    bl_staging_destroy(staging);
    bl_device_free(f->device, BL_SPACE_DEVICE, memory);
}

static bl_status sleep_task(bl_stream *stream, const void *args)
{
    static const struct timespec nap = {.tv_nsec = 20000000};
    (void)stream, (void)args;
    nanosleep(&nap, NULL);
    return BL_OK;
}

/* A piece stays in the buffer until it is where it belongs, and comes out when it is there. */
static void test_a_late_stream(void **state)
{
    unsigned char there[MOST], back[MOST];
    bl_device *device;
    bl_staging *staging;
    void *memory;
    (void)state;

    bl_device_guard_memory(false);
    assert_ok(bl_device_create_cpu(1, &device));
    assert_ok(bl_device_alloc(device, BL_SPACE_DEVICE, MOST, "there", &memory));
    assert_ok(bl_staging_create(device, PIECE, "pieces", &staging));
    for (size_t i = 0; i < MOST; i++) there[i] = number(i);
    assert_ok(bl_stream_call(staging->stream, sleep_task, NULL, 0));
    assert_ok(bl_staging_upload(staging, memory, there, MOST));
    assert_memory_equal(memory, there, MOST);
    assert_ok(bl_stream_call(staging->stream, sleep_task, NULL, 0));
    assert_ok(bl_staging_download(staging, back, memory, MOST));
    assert_memory_equal(back, there, MOST);
    bl_staging_destroy(staging);
    bl_device_free(device, BL_SPACE_DEVICE, memory);
    bl_device_destroy(device);
    bl_device_guard_memory(true);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_any_number_of_bytes), cmocka_unit_test(test_a_twin),
        cmocka_unit_test(test_no_memory), cmocka_unit_test(test_a_failed_stream_of_others),
        cmocka_unit_test(test_a_late_stream)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
