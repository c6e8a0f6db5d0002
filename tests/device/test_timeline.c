/* SPDX-License-Identifier: Apache-2.0 */
/* Spans, stalls and bytes of a timeline: the recorded values, the order in which they are
 * collected, and dropped spans. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <stdint.h>
#include <string.h>
#include <unistd.h>

#include "base/counter.h"
#include "base/sizes.h"
#include "device/timeline.h"

enum { PAUSE_US = 10000, LONG_PAUSE_US = 200000, MAX_SEEN = 16 };

typedef struct fixture {
    bl_device *device;
    bl_stream *a, *b;
    bl_event *event;
    bl_timeline *timeline;
    bl_span seen[MAX_SEEN];
    int n_seen;
} fixture;

static void assert_ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

static void see(void *user, const bl_span *span)
{
    fixture *f = user;
    assert_true(f->n_seen < MAX_SEEN);
    f->seen[f->n_seen++] = *span;
}

static void open_fixture(fixture *f, int max_spans)
{
    *f = (fixture){0};
    assert_ok(bl_device_create_cpu(1, &f->device));
    assert_ok(bl_stream_create(f->device, "a", &f->a));
    assert_ok(bl_stream_create(f->device, "b", &f->b));
    assert_ok(bl_event_create(f->device, &f->event));
    assert_ok(bl_timeline_create(f->device, max_spans, see, f, &f->timeline));
}

static void close_fixture(fixture *f)
{
    (void)bl_stream_synchronize(f->a);
    (void)bl_stream_synchronize(f->b);
    bl_timeline_destroy(f->timeline);
    bl_event_destroy(f->event);
    bl_stream_destroy(f->a);
    bl_stream_destroy(f->b);
    bl_device_destroy(f->device);
}

static bl_timeline_totals collected(fixture *f)
{
    bl_timeline_totals totals;
    bl_timeline_collect(f->timeline);
    bl_timeline_get_totals(f->timeline, &totals);
    return totals;
}

static bl_status pause_task(bl_stream *stream, const void *args)
{
    (void)stream;
    usleep(*(const unsigned *)args);
    return BL_OK;
}

static bl_status wait_at_gate(bl_stream *stream, const void *args)
{
    (void)stream;
    bl_counter_wait(*(bl_counter *const *)args, 1);
    return BL_OK;
}

static bl_status fail_task(bl_stream *stream, const void *args)
{
    (void)stream, (void)args;
    return BL_FAIL(BL_EIO, "planted");
}

static void give_pause(bl_stream *stream, unsigned pause_us)
{
    assert_ok(bl_stream_call(stream, pause_task, &pause_us, sizeof pause_us));
}

static void give_span_of(fixture *f, bl_lane lane, const char *name, int64_t unit,
                         bl_stream *stream, int64_t n_bytes, unsigned pause_us)
{
    int span;
    assert_ok(bl_timeline_begin(f->timeline, lane, name, unit, (int)unit + 1, stream, &span));
    give_pause(stream, pause_us);
    assert_ok(bl_timeline_end(f->timeline, span, stream, n_bytes));
}

static void give_span(fixture *f, bl_lane lane, const char *name, int64_t unit, bl_stream *stream,
                      int64_t n_bytes)
{
    give_span_of(f, lane, name, unit, stream, n_bytes, PAUSE_US);
}

/* A span is as long as the work between its ends, a stall as long as the stream stalled. */
static void test_spans_and_stalls(void **state)
{
    bl_counter gate, *at = &gate;
    int span_7;
    fixture f;
    (void)state;

    open_fixture(&f, 8);
    int64_t n_allocations = bl_device_allocations(f.device);
    bl_counter_init(&gate);
    assert_ok(bl_timeline_begin(f.timeline, BL_LANE_DISK, "read", 7, 8, f.a, &span_7));
    assert_ok(bl_stream_call(f.a, wait_at_gate, &at, sizeof at));
    assert_ok(bl_timeline_end(f.timeline, span_7, f.a, 1000));
    assert_ok(bl_event_record(f.event, f.a));
    assert_ok(bl_timeline_wait(f.timeline, BL_LANE_DISK, "wait", 7, 2, f.b, f.event));
    give_span(&f, BL_LANE_COMPUTE, "work", -1, f.b, 0);
    assert_ok(bl_timeline_wait(f.timeline, BL_LANE_COPY, "no wait", 7, 3, f.b, f.event));
    give_span(&f, BL_LANE_DISK, "read", 8, f.a, 234);
    usleep(LONG_PAUSE_US);
    bl_counter_advance(&gate, 1);
    assert_ok(bl_stream_synchronize(f.a));
    assert_ok(bl_stream_synchronize(f.b));
    bl_timeline_totals totals = collected(&f);

    assert_int_equal(f.n_seen, 5);
    static const struct {
        bl_lane lane;
        bool is_stall;
        const char *name;
        int64_t unit;
        int item;
        int64_t n_bytes;
    } expected[] = {{BL_LANE_DISK, false, "read", 7, 8, 1000},
                    {BL_LANE_DISK, true, "wait", 7, 2, 0},
                    {BL_LANE_COMPUTE, false, "work", -1, 0, 0},
                    {BL_LANE_COPY, true, "no wait", 7, 3, 0},
                    {BL_LANE_DISK, false, "read", 8, 9, 234}};
    for (int i = 0; i < f.n_seen; i++) {
        const bl_span *span = &f.seen[i];
        assert_int_equal(span->lane, expected[i].lane);
        assert_int_equal(span->is_stall, expected[i].is_stall);
        assert_string_equal(span->name, expected[i].name);
        assert_int_equal(span->unit, expected[i].unit);
        assert_int_equal(span->item, expected[i].item);
        assert_int_equal(span->n_bytes, expected[i].n_bytes);
        assert_true(span->begin_s > 0 && span->end_s >= span->begin_s);
        if (!span->is_stall) assert_true(span->end_s - span->begin_s >= 1e-6 * PAUSE_US);
    }
    assert_true(f.seen[1].end_s >= f.seen[0].end_s); /* waited for it */
    assert_true(f.seen[2].begin_s >= f.seen[1].end_s);
    /* It stood still meanwhile; a loaded machine may have brought b to its wait late. */
    assert_true(f.seen[1].end_s - f.seen[1].begin_s > 0.1e-6 * LONG_PAUSE_US);
    assert_true(totals.lane[BL_LANE_DISK].busy_s ==
                f.seen[0].end_s - f.seen[0].begin_s + (f.seen[4].end_s - f.seen[4].begin_s));
    assert_true(totals.lane[BL_LANE_DISK].stall_s == f.seen[1].end_s - f.seen[1].begin_s);
    assert_int_equal(totals.lane[BL_LANE_DISK].n_bytes, 1234);
    assert_true(totals.lane[BL_LANE_COMPUTE].stall_s == 0 &&
                totals.lane[BL_LANE_GATHER].busy_s == 0);
    assert_int_equal(totals.n_dropped, 0);
    assert_int_equal(bl_device_allocations(f.device), n_allocations);
    close_fixture(&f);
}

/* Spans are given in the order of their beginnings: one that has not ended holds back those behind
 * it. */
static void test_order(void **state)
{
    bl_counter gate, *at = &gate;
    int span;
    fixture f;
    (void)state;

    open_fixture(&f, 4);
    for (int i = 0; i < 4; i++) give_span(&f, BL_LANE_DISK, "before", i, f.a, 0);
    assert_ok(bl_stream_synchronize(f.a));
    (void)collected(&f);
    f.n_seen = 0;
    bl_counter_init(&gate);
    assert_ok(bl_timeline_begin(f.timeline, BL_LANE_COMPUTE, "slow", 0, -1, f.a, &span));
    assert_ok(bl_stream_call(f.a, wait_at_gate, &at, sizeof at));
    give_span(&f, BL_LANE_COPY, "fast", 1, f.b, 5);
    assert_ok(bl_stream_synchronize(f.b));
    assert_int_equal(collected(&f).lane[BL_LANE_COPY].n_bytes, 0); /* its end has not been given */
    assert_ok(bl_timeline_end(f.timeline, span, f.a, 0));
    assert_int_equal(collected(&f).lane[BL_LANE_COPY].n_bytes, 0); /* nor reached */
    assert_int_equal(f.n_seen, 0);
    bl_counter_advance(&gate, 1);
    assert_ok(bl_stream_synchronize(f.a));
    assert_int_equal(collected(&f).lane[BL_LANE_COPY].n_bytes, 5);
    assert_int_equal(f.n_seen, 2);
    assert_string_equal(f.seen[0].name, "slow");
    assert_string_equal(f.seen[1].name, "fast");
    assert_int_equal(collected(&f).lane[BL_LANE_COPY].n_bytes, 5); /* once */
    close_fixture(&f);
}

/* A full timeline takes in what has finished; only when nothing has are spans dropped, and
 * counted. */
static void test_drops(void **state)
{
    bl_counter gate, *at = &gate;
    fixture f;
    (void)state;

    open_fixture(&f, 3);
    for (int i = 0; i < 7; i++) {
        give_span(&f, BL_LANE_DISK, "taken in", i, f.a, 1);
        assert_ok(bl_stream_synchronize(f.a));
    }
    assert_true(f.n_seen >= 4);
    assert_int_equal(collected(&f).lane[BL_LANE_DISK].n_bytes, 7);
    assert_int_equal(collected(&f).n_dropped, 0);

    bl_counter_init(&gate);
    assert_ok(bl_stream_call(f.a, wait_at_gate, &at, sizeof at));
    for (int i = 0; i < 5; i++) give_span(&f, BL_LANE_COPY, "kept or dropped", i, f.a, 1);
    bl_counter_advance(&gate, 1);
    assert_ok(bl_stream_synchronize(f.a));
    assert_int_equal(collected(&f).n_dropped, 2);
    assert_int_equal(collected(&f).lane[BL_LANE_COPY].n_bytes, 3);
    give_span(&f, BL_LANE_COPY, "again", 0, f.a, 1);
    assert_ok(bl_stream_synchronize(f.a));
    assert_int_equal(collected(&f).lane[BL_LANE_COPY].n_bytes, 4);
    close_fixture(&f);
}

/* A stream that has failed reaches its stamps: nothing is lost, and nothing behind it is held
 * back. */
static void test_failed_streams(void **state)
{
    fixture f;
    (void)state;

    open_fixture(&f, 4);
    assert_ok(bl_stream_call(f.a, fail_task, NULL, 0));
    give_span(&f, BL_LANE_DISK, "skipped", 0, f.a, 3);
    assert_ok(bl_event_record(f.event, f.a));
    assert_ok(bl_timeline_wait(f.timeline, BL_LANE_DISK, "wait", 0, 0, f.b, f.event));
    assert_int_equal(bl_stream_synchronize(f.a), BL_EIO);
    assert_int_equal(bl_stream_synchronize(f.b), BL_EIO);
    assert_int_equal(collected(&f).lane[BL_LANE_DISK].n_bytes, 3);
    assert_int_equal(f.n_seen, 2);
    close_fixture(&f);
}

static void test_none(void **state)
{
    bl_timeline_totals totals = {.n_dropped = 3};
    int span;
    fixture f;
    (void)state;

    open_fixture(&f, 1);
    assert_ok(bl_timeline_begin(NULL, BL_LANE_DISK, "x", 0, 0, f.a, &span));
    assert_ok(bl_timeline_end(NULL, span, f.a, 0));
    give_pause(f.a, PAUSE_US);
    assert_ok(bl_event_record(f.event, f.a));
    /* Waits all the same. */
    assert_ok(bl_timeline_wait(NULL, BL_LANE_DISK, "x", 0, 0, f.b, f.event));
    assert_ok(bl_stream_call(f.a, fail_task, NULL, 0));
    assert_ok(bl_stream_synchronize(f.b));
    bl_timeline_collect(NULL);
    bl_timeline_get_totals(NULL, &totals);
    assert_int_equal(totals.n_dropped, 0);
    bl_timeline_destroy(NULL);
    for (int lane = 0; lane < BL_N_LANES; lane++)
        assert_true(strlen(bl_lane_name((bl_lane)lane)) > 0);
    close_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_spans_and_stalls),
        cmocka_unit_test(test_order),
        cmocka_unit_test(test_drops),
        cmocka_unit_test(test_failed_streams),
        cmocka_unit_test(test_none),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
