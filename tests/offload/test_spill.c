/* SPDX-License-Identifier: Apache-2.0 */
/* A stack that spills: entries come back as they were put whatever the shape and the speed of both
 * streams, transfers overlap the work, and calls out of order are rejected. Built with
 * ThreadSanitizer, a missing wait is a race here. */
#include "ops_test.h"

#include <stdatomic.h>
#include <unistd.h>

#include "offload/spill.h"

enum { ENTRY_BYTES = 256, MAX_ENTRIES = 9, MAX_SPANS = 512, PAUSE_US = 300 };

typedef struct shape {
    int64_t n_entries, n_slots, n_host;
} shape;

typedef struct fixture {
    shape shape;
    bl_device *device;
    bl_stream *compute, *copy;
    bl_timeline *timeline;
    unsigned char *slots, *host;
    size_t n_host_bytes;
    bl_spill *spill;
    size_t row[MAX_ENTRIES];
    uint64_t random;
} fixture;

static void assert_ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

static size_t row_bytes_of(const void *user, int64_t entry)
{
    return ((const size_t *)user)[entry];
}

static bl_spill_options options_of(const fixture *f)
{
    return (bl_spill_options){.device = f->device,
                              .compute = f->compute,
                              .copy = f->copy,
                              .n_entries = f->shape.n_entries,
                              .n_slots = f->shape.n_slots,
                              .n_host = f->shape.n_host,
                              .n_rows = ENTRY_BYTES,
                              .row_bytes = row_bytes_of,
                              .user = f->row,
                              .slots = f->slots,
                              .host = f->host,
                              .timeline = f->timeline,
                              .item = 3};
}

/* is_uneven: entries of 0 to 3 bytes per row. */
static void open_rows(fixture *f, shape s, bool is_uneven)
{
    *f = (fixture){.shape = s, .random = 88172645463325252u};
    for (size_t e = 0; e < MAX_ENTRIES; e++) f->row[e] = is_uneven ? (5 * e + 2) % 4 : 1;
    assert_ok(bl_device_create_cpu(1, &f->device));
    assert_ok(bl_stream_create(f->device, "compute", &f->compute));
    assert_ok(bl_stream_create(f->device, "copy", &f->copy));
    assert_ok(bl_timeline_create(f->device, MAX_SPANS, NULL, NULL, &f->timeline));
    bl_spill_options options = options_of(f);
    bl_spill_bytes n = bl_spill_measure(&options);
    f->n_host_bytes = n.host;
    f->slots = options.slots = test_alloc(1, (int64_t)n.slots);
    f->host = options.host = test_alloc(1, (int64_t)n.host);
    assert_ok(bl_spill_create(&options, &f->spill));
}

static void open_fixture(fixture *f, shape s)
{
    open_rows(f, s, false);
}

static void close_fixture(fixture *f)
{
    (void)bl_stream_synchronize(f->compute);
    (void)bl_stream_synchronize(f->copy);
    bl_spill_destroy(f->spill);
    bl_timeline_destroy(f->timeline);
    free(f->slots);
    free(f->host);
    bl_stream_destroy(f->compute);
    bl_stream_destroy(f->copy);
    bl_device_destroy(f->device);
}

static unsigned random_below(fixture *f, unsigned n) /* xorshift64 */
{
    f->random ^= f->random << 13;
    f->random ^= f->random >> 7;
    f->random ^= f->random << 17;
    return (unsigned)(f->random % n);
}

/* ---- work on entries ---- */

typedef struct work_args {
    unsigned char *at;
    size_t n_bytes;
    unsigned value, pause_us;
} work_args;

static unsigned char byte_of(unsigned value, size_t i)
{
    return (unsigned char)(value * 31 + i * 7 + 1);
}

static bl_status write_task(bl_stream *stream, const void *argument)
{
    const work_args *a = argument;
    (void)stream;
    usleep(a->pause_us);
    for (size_t i = 0; i < a->n_bytes; i++) a->at[i] = byte_of(a->value, i);
    return BL_OK;
}

static bl_status check_task(bl_stream *stream, const void *argument)
{
    const work_args *a = argument;
    (void)stream;
    usleep(a->pause_us);
    for (size_t i = 0; i < a->n_bytes; i++)
        if (a->at[i] != byte_of(a->value, i))
            return BL_FAIL(BL_EINTERNAL, "entry of value %u: byte %zu is %d", a->value, i,
                           a->at[i]);
    return BL_OK;
}

static bl_status spoil_task(bl_stream *stream, const void *argument)
{
    const work_args *a = argument;
    (void)stream;
    memset(a->at, 0xee, a->n_bytes);
    return BL_OK;
}

static bl_status sleep_task(bl_stream *stream, const void *argument)
{
    (void)stream;
    usleep(*(const unsigned *)argument);
    return BL_OK;
}

static void queue(fixture *f, bl_stream_fn fn, int64_t entry, unsigned round, size_t n_rows)
{
    work_args args = {bl_spill_at(f->spill, entry), n_rows * f->row[entry],
                      round * 100 + (unsigned)entry, random_below(f, PAUSE_US)};
    assert_ok(bl_stream_call(f->compute, fn, &args, sizeof args));
}

static void delay_copies(fixture *f)
{
    unsigned pause_us = random_below(f, 2 * PAUSE_US);
    assert_ok(bl_stream_call(f->copy, sleep_task, &pause_us, sizeof pause_us));
}

static void valid(const fixture *f)
{
    assert_ok(bl_spill_validate(f->spill));
}

static void rise(fixture *f, unsigned round, int64_t n, size_t n_rows, bool keep)
{
    assert_ok(bl_spill_begin(f->spill, (int64_t)n_rows, keep));
    valid(f);
    for (int64_t e = 0; e < n; e++) {
        if (random_below(f, 3) == 0) delay_copies(f);
        assert_ok(bl_spill_reserve(f->spill, e));
        valid(f);
        queue(f, write_task, e, round, n_rows);
        assert_ok(bl_spill_put(f->spill, e));
        valid(f);
        queue(f, check_task, e, round, n_rows); /* beside its way out */
    }
}

static void fall(fixture *f, unsigned round, int64_t from, int64_t to, size_t n_rows)
{
    for (int64_t e = from - 1; e >= to; e--) {
        if (random_below(f, 3) == 0) delay_copies(f);
        assert_ok(bl_spill_take(f->spill, e));
        valid(f);
        queue(f, check_task, e, round, n_rows);
        if (f->shape.n_host + f->shape.n_slots <=
            from) /* `from` were put: no way out is under way */
            queue(f, spoil_task, e, round, n_rows);
        assert_ok(bl_spill_drop(f->spill, e));
        valid(f);
    }
}

static void finish(fixture *f)
{
    assert_ok(bl_stream_synchronize(f->compute));
    assert_ok(bl_stream_synchronize(f->copy));
}

static int64_t moved_bytes(fixture *f)
{
    bl_timeline_totals totals;
    bl_timeline_collect(f->timeline);
    bl_timeline_get_totals(f->timeline, &totals);
    assert_int_equal(totals.n_dropped, 0);
    return totals.lane[BL_LANE_ACTIVATIONS].n_bytes;
}

/* Copies in host memory are as they were put and no longer than was asked for; those in slots are
 * spoilt or the stack's newest. */
static void look_at_all(const fixture *f, unsigned round, int64_t n, size_t n_rows)
{
    const unsigned char *next = f->host;
    for (int64_t e = 0; e < n; next += ENTRY_BYTES * f->row[e++]) {
        const unsigned char *at = bl_spill_look(f->spill, e);
        if (e < f->shape.n_host) assert_ptr_equal(at, next);
        if (f->shape.n_slots == f->shape.n_entries) assert_non_null(at);
        if (e >= f->shape.n_host) continue;
        for (size_t i = 0; i < n_rows * f->row[e]; i++)
            assert_int_equal(at[i], byte_of(round * 100 + (unsigned)e, i));
        for (size_t i = n_rows * f->row[e]; i < ENTRY_BYTES * f->row[e]; i++)
            assert_int_equal(at[i], 0);
    }
}

static void whole_round(fixture *f, unsigned round, int64_t n, size_t n_rows)
{
    const shape *s = &f->shape;
    int64_t before = moved_bytes(f), out = bl_min_i64(n, s->n_host),
            back = bl_max_i64(0, n - s->n_slots);

    memset(f->host, 0, f->n_host_bytes);
    rise(f, round, n, n_rows, true);
    fall(f, round, n, 0, n_rows);
    finish(f);
    look_at_all(f, round, n, n_rows);
    int64_t moved = 0;
    for (int64_t e = 0; e < out; e++) moved += (int64_t)(n_rows * f->row[e]);
    for (int64_t e = 0; e < back; e++) moved += (int64_t)(n_rows * f->row[e]);
    assert_int_equal(moved_bytes(f) - before, moved);
}

static void run_shape(shape s, bool is_uneven)
{
    fixture f;

    open_rows(&f, s, is_uneven);
    whole_round(&f, 1, s.n_entries, ENTRY_BYTES);
    whole_round(&f, 2, s.n_entries, 0);
    whole_round(&f, 3, s.n_entries, 40);
    whole_round(&f, 4, (s.n_entries + 1) / 2, ENTRY_BYTES);
    int64_t moved = moved_bytes(&f);
    rise(&f, 5, s.n_entries, ENTRY_BYTES, false); /* nothing is kept */
    finish(&f);
    assert_int_equal(moved_bytes(&f), moved);
    for (int64_t e = 0; e < s.n_entries; e++)
        assert_true((bl_spill_look(f.spill, e) != NULL) == (e >= s.n_entries - s.n_slots));
    rise(&f, 6, s.n_entries, ENTRY_BYTES,
         true); /* given up on the way up, and on the way down: transfers are under way */
    rise(&f, 7, s.n_entries, ENTRY_BYTES, true);
    fall(&f, 7, s.n_entries, s.n_entries / 2, ENTRY_BYTES);
    rise(&f, 8, s.n_entries, ENTRY_BYTES, false);
    finish(&f);
    whole_round(&f, 9, s.n_entries, ENTRY_BYTES);
    close_fixture(&f);
}

static void test_entries_come_back(void **state)
{
    static const shape shapes[] = {{1, 1, 0}, {5, 5, 0}, {5, 5, 5}, {2, 1, 1}, {2, 1, 2},
                                   {5, 1, 4}, {5, 2, 3}, {5, 2, 5}, {9, 2, 8}, {9, 3, 6}};
    (void)state;
    for (size_t i = 0; i < 2 * BL_COUNT(shapes); i++) run_shape(shapes[i / 2], i % 2);
}

/* Entries that will not be taken stay in host memory: they are not loaded, and have no address. */
static void test_entries_that_are_not_taken(void **state)
{
    const shape s = {9, 2, 7};
    const int64_t first = 3;
    fixture f;

    (void)state;
    open_fixture(&f, s);
    for (unsigned round = 1; round < 3; round++) {
        int64_t before = moved_bytes(&f), taken_from = round == 1 ? first : 0;
        rise(&f, round, s.n_entries, ENTRY_BYTES, true);
        bl_spill_take_from(f.spill, taken_from);
        fall(&f, round, s.n_entries, taken_from, ENTRY_BYTES);
        if (round == 1) assert_int_equal(bl_spill_take(f.spill, first - 1), BL_EINTERNAL);
        finish(&f);
        look_at_all(&f, round, s.n_host, ENTRY_BYTES);
        int64_t back = s.n_entries - s.n_slots - taken_from;
        assert_int_equal(moved_bytes(&f) - before, (s.n_host + back) * ENTRY_BYTES);
    }
    close_fixture(&f);
}

/* ---- transfers overlap work ---- */

static atomic_bool gate_is_open;

static bl_status gate_task(bl_stream *stream, const void *argument)
{
    (void)stream, (void)argument;
    while (!atomic_load(&gate_is_open)) usleep(100);
    return BL_OK;
}

static bl_status count_task(bl_stream *stream, const void *argument)
{
    (void)stream;
    atomic_fetch_add(*(atomic_int *const *)argument, 1);
    return BL_OK;
}

static void close_gate(bl_stream *stream)
{
    atomic_store(&gate_is_open, false);
    assert_ok(bl_stream_call(stream, gate_task, NULL, 0));
}

static void write_entry(fixture *f, int64_t entry)
{
    assert_ok(bl_spill_reserve(f->spill, entry));
    queue(f, write_task, entry, 0, ENTRY_BYTES);
    assert_ok(bl_spill_put(f->spill, entry));
}

/* Two slots: the transfer of entry 0 does not delay the writing of entry 1, but that of entry 2. */
static void test_work_goes_on_beside_the_way_out(void **state)
{
    fixture f;
    atomic_int n_reached = 0, *counter = &n_reached;
    (void)state;

    open_fixture(&f, (shape){5, 2, 3});
    assert_ok(bl_spill_begin(f.spill, ENTRY_BYTES, true));
    close_gate(f.copy);
    write_entry(&f, 0);
    write_entry(&f, 1);
    assert_ok(bl_stream_synchronize(f.compute)); /* comes back, though nothing has been copied */
    assert_ok(bl_spill_reserve(f.spill, 2));
    assert_ok(bl_stream_call(f.compute, count_task, &counter, sizeof counter));
    usleep(20000);
    assert_int_equal(atomic_load(&n_reached), 0);
    atomic_store(&gate_is_open, true);
    finish(&f);
    assert_int_equal(atomic_load(&n_reached), 1);
    close_fixture(&f);
}

/* Two slots: while entry 3 is in use, entry 2 comes back into the slot that entry 4 left. */
static void test_the_way_back_goes_on_beside_work(void **state)
{
    fixture f;
    (void)state;

    open_fixture(&f, (shape){5, 2, 5});
    assert_ok(bl_spill_begin(f.spill, ENTRY_BYTES, true));
    for (int64_t e = 0; e < 4; e++) write_entry(&f, e);
    close_gate(f.copy);
    write_entry(&f, 4);
    assert_ok(bl_spill_take(f.spill, 4));
    assert_ok(bl_stream_synchronize(f.compute)); /* at once: what never left is not waited for */
    atomic_store(&gate_is_open, true);
    assert_ok(bl_stream_synchronize(f.copy));
    assert_ok(bl_spill_drop(f.spill, 4));
    assert_ok(bl_spill_take(f.spill, 3));
    close_gate(f.compute);                    /* the visit that uses entry 3 */
    assert_ok(bl_stream_synchronize(f.copy)); /* comes back, though the visit goes on */
    assert_int_equal(f.slots[5], byte_of(2, 5));
    atomic_store(&gate_is_open, true);
    assert_ok(bl_spill_drop(f.spill, 3));
    fall(&f, 0, 3, 0, ENTRY_BYTES);
    finish(&f);
    close_fixture(&f);
}

/* Work on an entry that is being fetched begins when it is there. */
static void test_work_waits_for_the_way_back(void **state)
{
    fixture f;
    atomic_int n_reached = 0, *counter = &n_reached;
    (void)state;

    open_fixture(&f, (shape){5, 2, 3});
    assert_ok(bl_spill_begin(f.spill, ENTRY_BYTES, true));
    for (int64_t e = 0; e < 5; e++) write_entry(&f, e);
    fall(&f, 0, 5, 4, ENTRY_BYTES);
    finish(&f);
    close_gate(f.copy);
    fall(&f, 0, 4, 3, ENTRY_BYTES); /* entry 1 begins to come back into its slot */
    assert_ok(bl_spill_take(f.spill, 2));
    assert_ok(bl_spill_drop(f.spill, 2));
    assert_ok(bl_spill_take(f.spill, 1));
    assert_ok(bl_stream_call(f.compute, count_task, &counter, sizeof counter));
    usleep(20000);
    assert_int_equal(atomic_load(&n_reached), 0);
    atomic_store(&gate_is_open, true);
    finish(&f);
    assert_int_equal(atomic_load(&n_reached), 1);
    close_fixture(&f);
}

/* The transfer that the next call queues takes so long from where compute is now. */
static void pace_next_transfer(fixture *f, bl_event *here, unsigned pause_us)
{
    assert_ok(bl_event_record(here, f->compute));
    assert_ok(bl_stream_wait(f->copy, here));
    assert_ok(bl_stream_call(f->copy, sleep_task, &pause_us, sizeof pause_us));
}

enum { HIDDEN_ENTRIES = 8, VISIT_US = 20000, TRANSFER_US = 15000 };

/* Compute's stall time, with transfers that take three quarters of a visit, and two slots. */
static double measure_stalls(void)
{
    enum { N = HIDDEN_ENTRIES };
    fixture f;
    bl_event *here;
    bl_timeline_totals totals;
    unsigned visit_us = VISIT_US;

    open_fixture(&f, (shape){N, 2, N - 2});
    assert_ok(bl_event_create(f.device, &here));
    assert_ok(bl_spill_begin(f.spill, ENTRY_BYTES, true));
    for (int64_t e = 0; e < N; e++) {
        assert_ok(bl_spill_reserve(f.spill, e));
        assert_ok(bl_stream_call(f.compute, sleep_task, &visit_us, sizeof visit_us));
        if (e < N - 2) pace_next_transfer(&f, here, TRANSFER_US);
        assert_ok(bl_spill_put(f.spill, e));
    }
    for (int64_t e = N - 1; e >= 0; e--) {
        assert_ok(bl_spill_take(f.spill, e));
        assert_ok(bl_stream_call(f.compute, sleep_task, &visit_us, sizeof visit_us));
        if (e >= 2) pace_next_transfer(&f, here, TRANSFER_US);
        assert_ok(bl_spill_drop(f.spill, e));
    }
    finish(&f);
    bl_timeline_collect(f.timeline);
    bl_timeline_get_totals(f.timeline, &totals);
    bl_event_destroy(here);
    close_fixture(&f);
    return totals.lane[BL_LANE_ACTIVATIONS].stall_s;
}

/* Compute rarely stalls; with one slot it would stall at each transfer. The limit, half of the
 * transfers' time, lets each visit be 7.5 ms late; a loaded machine, which only adds stalls, may
 * try again. */
static void test_transfers_are_hidden(void **state)
{
    enum { MAX_TRIES = 20 };
    double transfers_s = 2 * (HIDDEN_ENTRIES - 2) * TRANSFER_US * 1e-6, stall_s = transfers_s;

    (void)state;
    for (int n = 0; n < MAX_TRIES && stall_s >= 0.5 * transfers_s; n++) stall_s = measure_stalls();
    assert_true(stall_s < 0.5 * transfers_s);
}

/* ---- rejected calls ---- */

static void test_wrong_order_is_refused(void **state)
{
    fixture f;
    (void)state;

    open_fixture(&f, (shape){4, 2, 2});
    bl_spill *s = f.spill;
    assert_ok(bl_spill_begin(s, ENTRY_BYTES, true));
    assert_int_equal(bl_spill_begin(s, ENTRY_BYTES + 1, true), BL_EINTERNAL);
    assert_int_equal(bl_spill_take(s, -1), BL_EINTERNAL);
    assert_int_equal(bl_spill_drop(s, -1), BL_EINTERNAL);
    assert_int_equal(bl_spill_put(s, 0), BL_EINTERNAL);
    assert_int_equal(bl_spill_reserve(s, 1), BL_EINTERNAL);
    assert_ok(bl_spill_reserve(s, 0));
    assert_int_equal(bl_spill_reserve(s, 0), BL_EINTERNAL);
    assert_int_equal(bl_spill_take(s, 0), BL_EINTERNAL); /* not complete */
    assert_ok(bl_spill_put(s, 0));
    assert_int_equal(bl_spill_put(s, 0), BL_EINTERNAL);
    for (int64_t e = 1; e < 4; e++) write_entry(&f, e);
    assert_int_equal(bl_spill_reserve(s, 4), BL_EINTERNAL); /* no more than n_entries */
    assert_int_equal(bl_spill_take(s, 2), BL_EINTERNAL);    /* not the newest */
    assert_int_equal(bl_spill_drop(s, 3), BL_EINTERNAL);    /* not taken */
    assert_ok(bl_spill_take(s, 3));
    assert_int_equal(bl_spill_take(s, 3), BL_EINTERNAL);
    assert_ok(bl_spill_drop(s, 3));
    assert_int_equal(bl_spill_reserve(s, 3),
                     BL_EINTERNAL); /* from the first take on it only falls */
    assert_ok(bl_spill_begin(s, ENTRY_BYTES, false));
    write_entry(&f, 0);
    assert_int_equal(bl_spill_take(s, 0), BL_EINTERNAL); /* nothing is kept in this round */
    valid(&f);
    close_fixture(&f);
}

static void test_wrong_shapes_are_refused(void **state)
{
    fixture f;
    bl_spill *spill;
    static const shape wrong[] = {{4, 0, 4}, {4, 5, 0}, {4, 2, 1}, {4, 2, 5}};
    (void)state;

    open_fixture(&f, (shape){4, 2, 2});
    for (size_t i = 0; i < BL_COUNT(wrong); i++) {
        bl_spill_options options = options_of(&f);
        options.n_entries = wrong[i].n_entries;
        options.n_slots = wrong[i].n_slots;
        options.n_host = wrong[i].n_host;
        assert_int_equal(bl_spill_create(&options, &spill), BL_EINTERNAL);
        assert_null(spill);
    }
    bl_spill_options same_stream = options_of(&f), no_host = options_of(&f);
    same_stream.copy = f.compute;
    assert_int_equal(bl_spill_create(&same_stream, &spill), BL_EINTERNAL);
    no_host.n_host = 0;
    no_host.copy = NULL;
    assert_ok(bl_spill_create(&no_host, &spill)); /* for rounds that do not keep */
    assert_int_equal(bl_spill_begin(spill, ENTRY_BYTES, true), BL_EINTERNAL);
    assert_ok(bl_spill_begin(spill, ENTRY_BYTES, false));
    bl_spill_destroy(spill);
    bl_spill_destroy(NULL);
    close_fixture(&f);
}

static bl_status fail_task(bl_stream *stream, const void *argument)
{
    (void)stream, (void)argument;
    return BL_FAIL(BL_EIO, "planted");
}

/* A transfer that failed reaches the stream that waits for it, and the next call once it is
 * known. */
static void test_a_failed_transfer_reaches_compute(void **state)
{
    fixture f;
    (void)state;

    open_fixture(&f, (shape){5, 2, 3});
    assert_ok(bl_spill_begin(f.spill, ENTRY_BYTES, true));
    close_gate(f.copy);
    assert_ok(bl_stream_call(f.copy, fail_task, NULL, 0));
    for (int64_t e = 0; e < 3; e++) write_entry(&f, e); /* the failure is not known yet */
    atomic_store(&gate_is_open, true);
    assert_int_equal(bl_stream_synchronize(f.compute), BL_EIO);
    assert_non_null(strstr(bl_error_text(), "planted"));
    assert_int_equal(bl_spill_reserve(f.spill, 3), BL_EIO);
    close_fixture(&f);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_entries_come_back),
        cmocka_unit_test(test_entries_that_are_not_taken),
        cmocka_unit_test(test_work_goes_on_beside_the_way_out),
        cmocka_unit_test(test_the_way_back_goes_on_beside_work),
        cmocka_unit_test(test_work_waits_for_the_way_back),
        cmocka_unit_test(test_transfers_are_hidden),
        cmocka_unit_test(test_wrong_order_is_refused),
        cmocka_unit_test(test_wrong_shapes_are_refused),
        cmocka_unit_test(test_a_failed_transfer_reaches_compute),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
