/* SPDX-License-Identifier: Apache-2.0 */
/* The ring itself: the effects of prefetch, acquire and release on its slots, its waits, and
 * rejected calls. test_base tests the gathered bytes for any schedule; test_gather_source tests
 * shards that a source loads. */
#include "gather_case.h"

#include "base/sizes.h"
#include "offload/ring_slots_internal.h"

#include <unistd.h>

/* Units 0..n-2 of one item each, the last a whole_ring one of two items. Shard u + i is item i of
 * unit u. */
enum { N_UNITS = 5, WHOLE = N_UNITS - 1 };

static bl_status open_ring(test_rank *self, int depth, gather_case *c)
{
    bl_gather_unit units[N_UNITS] = {0};

    BL_TRY(gather_case_open(self, N_UNITS + 1, c));
    for (int u = 0; u < N_UNITS; u++) {
        units[u].what = u == WHOLE ? "the head" : "layer";
        units[u].index = u == WHOLE ? -1 : u;
        units[u].n_items = u == WHOLE ? 2 : 1;
        units[u].whole_ring = u == WHOLE;
        for (int i = 0; i < units[u].n_items; i++)
            units[u].item[i] = (bl_gather_item){.shard = c->shards + (u + i) * FLOATS,
                                                .shard_bytes = SHARD_BYTES,
                                                .slot_offset = (size_t)(i * 8 * SHARD_BYTES)};
    }
    bl_gather_ring_options options = {
        .device = self->device, .comm = self->comm, .stream = c->gathers, .depth = depth};
    BL_TRY(bl_gather_ring_create(&options, N_UNITS, units, &c->ring));
    return bl_gather_ring_validate(c->ring);
}

static bl_status use(gather_case *c, int64_t unit, int item, float offset, unsigned pause_us)
{
    return gather_case_use(c, unit, item, unit + item, offset, pause_us);
}

/* ---- slots ---- */

static bl_status fill_and_refuse(test_rank *self)
{
    gather_case c;
    bl_status st;
    const void *unused;

    BL_TRY_GOTO(st, done, open_ring(self, 2, &c));
    BL_TRY_GOTO(st, done, use(&c, 0, 0, 0, 0));
    BL_TRY_GOTO(st, done, use(&c, 0, 0, 0, 0)); /* again: the same gather */
    BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.ring, 1));
    BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.ring, 2));     /* no room: no effect */
    BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.ring, WHOLE)); /* nor here */
    TEST_CHECK_GOTO(st, done,
                    bl_gather_ring_acquire(c.ring, 2, 0, self->stream, &unused) == BL_EINTERNAL);
    TEST_CHECK_GOTO(st, done, strstr(bl_error_text(), "no free slot for unit 2"));
    BL_TRY_GOTO(st, done, gather_case_release(&c, 0));
    TEST_CHECK_GOTO(
        st, done, bl_gather_ring_acquire(c.ring, WHOLE, 0, self->stream, &unused) == BL_EINTERNAL);
    BL_TRY_GOTO(st, done, gather_case_release(&c, 3)); /* is not there: no effect */
    BL_TRY_GOTO(st, done, use(&c, 1, 0, 0, 0));
    BL_TRY_GOTO(st, done, gather_case_release(&c, 1));
    BL_TRY_GOTO(st, done, use(&c, WHOLE, 1, 0, 0));
    TEST_CHECK_GOTO(st, done,
                    bl_gather_ring_acquire(c.ring, 0, 0, self->stream, &unused) == BL_EINTERNAL);
    BL_TRY_GOTO(st, done, use(&c, WHOLE, 0, 0, 0));
    BL_TRY_GOTO(st, done, gather_case_release(&c, WHOLE));
    BL_TRY_GOTO(st, done, use(&c, 0, 0, 0, 0));
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c);
    return st;
}

static void test_slots(void **state)
{
    (void)state;
    RUN(fill_and_refuse, 1);
    RUN(fill_and_refuse, 3);
}

/* The slot that was released last is filled last: its readers have the most time to end. */
static void test_slots_are_taken_in_turn(void **state)
{
    int64_t units[3];
    bl_ring_slots slots = {.depth = 3, .n_classes = 1, .unit = units};

    (void)state;
    bl_ring_slots_clear(&slots);
    for (int64_t u = 0; u < 7; u++) {
        int slot = bl_ring_slots_choose(&slots, 0, false);
        assert_int_equal(slot, u % 3);
        assert_int_equal(bl_ring_slots_fill(&slots, u, slot, false), slot);
        units[slot] = BL_SLOT_EMPTY;
    }
    assert_int_equal(bl_ring_slots_fill(&slots, 7, 0, true), 2);
    assert_int_equal(bl_ring_slots_find(&slots, 7), 0);
    assert_int_equal(bl_ring_slots_choose(&slots, 0, false), BL_NO_SLOT);
}

/* Sub-units pass through separate slots, of their size, while a unit stays in its slot; the
 * head needs all of both. */
static bl_status pass_sub_units(test_rank *self)
{
    enum { SUBS = 3 };
    gather_case c;
    bl_status st;
    const void *unused;
    bl_gather_unit units[2 + SUBS + 1] = {0};
    int n = 2 + SUBS, head = n, n_ranks = self->n_ranks;
    int64_t large = bl_round_up(3 * n_ranks * SHARD_BYTES, BL_DEVICE_ALIGNMENT_BYTES),
            small = bl_round_up(n_ranks * SHARD_BYTES, BL_DEVICE_ALIGNMENT_BYTES);

    BL_TRY_GOTO(st, done, gather_case_open(self, n + 1, &c));
    for (int u = 0; u <= head; u++) {
        units[u] =
            (bl_gather_unit){.what = "unit", .index = u, .n_items = 1, .is_sub = u >= 2 && u < n};
        units[u].whole_ring = u == head;
        units[u].item[0] =
            (bl_gather_item){.shard = c.shards + u * FLOATS, .shard_bytes = SHARD_BYTES};
    }
    units[1].item[0].slot_offset = (size_t)(2 * n_ranks) * SHARD_BYTES; /* larger than a sub-unit */
    bl_gather_ring_options options = {
        .device = self->device, .comm = self->comm, .stream = c.gathers, .depth = 2};
    TEST_CHECK_GOTO(
        st, done, bl_gather_ring_bytes(2, head + 1, units, n_ranks) == 2 * (size_t)(large + small));
    BL_TRY_GOTO(st, done, bl_gather_ring_create(&options, head + 1, units, &c.ring));
    BL_TRY_GOTO(st, done, gather_case_use(&c, 1, 0, 1, 0, 0));
    BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.ring, 0)); /* both slots of units are in use */
    for (int u = 2; u < n; u++) BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.ring, u));
    TEST_CHECK_GOTO(st, done, /* both of sub-units, too */
                    bl_gather_ring_acquire(c.ring, 4, 0, self->stream, &unused) == BL_EINTERNAL);
    for (int u = 2; u < n; u++) {
        BL_TRY_GOTO(st, done, gather_case_use(&c, u, 0, u, 0, PAUSE_US));
        BL_TRY_GOTO(st, done, gather_case_release(&c, u));
    }
    BL_TRY_GOTO(st, done, gather_case_use(&c, 1, 0, 1, 0, 0)); /* as it was */
    BL_TRY_GOTO(st, done, gather_case_use(&c, 0, 0, 0, 0, 0));
    TEST_CHECK_GOTO(st, done,
                    bl_gather_ring_acquire(c.ring, head, 0, self->stream, &unused) == BL_EINTERNAL);
    for (int u = 0; u < 2; u++) BL_TRY_GOTO(st, done, gather_case_release(&c, u));
    BL_TRY_GOTO(st, done, gather_case_use(&c, head, 0, head, 0, 0));
    TEST_CHECK_GOTO(st, done,
                    bl_gather_ring_acquire(c.ring, 2, 0, self->stream, &unused) == BL_EINTERNAL);
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c);
    return st;
}

static void test_sub_units(void **state)
{
    (void)state;
    RUN(pass_sub_units, 1);
    RUN(pass_sub_units, 2);
}

/* ---- a slot is not overwritten while it is still read ---- */

static bl_status reuse(test_rank *self)
{
    gather_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_ring(self, 1, &c));
    for (
        int i = 0; i < 6;
        i++) { /* the host runs ahead: all gathers are queued while the first reader still sleeps */
        int64_t unit = (i * 3) % N_UNITS;
        BL_TRY_GOTO(st, done, use(&c, unit, 0, 0, i % 2 == self->rank % 2 ? PAUSE_US : 0));
        BL_TRY_GOTO(st, done, gather_case_release(&c, unit));
    }
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c);
    return st;
}

static void test_reuse_waits_for_readers(void **state)
{
    (void)state;
    RUN(reuse, 1);
    RUN(reuse, 2);
}

/* ---- shards that change ---- */

typedef struct add_args {
    float *values, offset;
    int n;
} add_args;

static bl_status add_slowly(bl_stream *stream, const void *argument)
{
    const add_args *a = argument;
    (void)stream;
    usleep(PAUSE_US);
    for (int i = 0; i < a->n; i++) a->values[i] = a->values[i] + a->offset;
    return BL_OK;
}

static bl_status change(test_rank *self)
{
    gather_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_ring(self, 2, &c));
    BL_TRY_GOTO(st, done, use(&c, 0, 0, 0, 0));
    BL_TRY_GOTO(st, done, use(&c, 1, 0, 0, 0));
    BL_TRY_GOTO(st, done, gather_case_release(&c, 0));
    BL_TRY_GOTO(st, done, gather_case_release(&c, 1));
    /* As the optimizer does: the update is queued behind the last use, and the next step's gathers
     * behind the update. */
    add_args args = {c.shards, 1.0f, (N_UNITS + 1) * FLOATS};
    BL_TRY_GOTO(st, done, bl_stream_call(self->stream, add_slowly, &args, sizeof args));
    BL_TRY_GOTO(st, done, bl_gather_ring_shards_changed(c.ring, self->stream));
    BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.ring, 0));
    BL_TRY_GOTO(st, done, use(&c, 1, 0, 1.0f, 0));
    BL_TRY_GOTO(st, done, use(&c, 0, 0, 1.0f, 0));
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c);
    return st;
}

static void test_changed_shards(void **state)
{
    (void)state;
    RUN(change, 1);
    RUN(change, 4);
}

/* ---- errors ---- */

static bl_status fail_task(bl_stream *stream, const void *argument)
{
    (void)stream, (void)argument;
    return BL_FAIL(BL_EIO, "planted");
}

/* A gather stream that failed: a wait for a gather returns its error. */
static bl_status fail_gathers(test_rank *self)
{
    gather_case c;
    const void *gathered;
    bl_status st;

    BL_TRY_GOTO(st, done, open_ring(self, 2, &c));
    BL_TRY_GOTO(st, done, bl_stream_call(c.gathers, fail_task, NULL, 0));
    BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.ring, 0));
    BL_TRY_GOTO(st, done, bl_gather_ring_acquire(c.ring, 0, 0, self->stream, &gathered));
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c);
    return st;
}

static void test_a_failed_gather_reaches_the_reader(void **state)
{
    (void)state;
    assert_int_equal(test_ranks_run(1, 1, 60, fail_gathers, NULL, NULL), BL_EIO);
    assert_non_null(strstr(bl_error_text(), "planted"));
}

/* Rank 1 stays away from the gather of unit *arg. */
static bl_status stay_away(test_rank *self)
{
    const int *unit = self->arg;
    bl_error failure = {.status = BL_OK};
    gather_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_ring(self, 2, &c));
    BL_TRY_GOTO(st, done, use(&c, 0, 0, 0, 0));
    BL_TRY_GOTO(st, done, gather_case_release(&c, 0));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    while (self->rank == 1 && failure.status == BL_OK) {
        usleep(1000);
        bl_comm_first_error(self->comm, &failure);
    }
    BL_TRY_GOTO(st, done, use(&c, *unit, 0, 0, 0));
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c);
    return st;
}

static void test_errors_name_the_unit(void **state)
{
    int units[] = {3, WHOLE};

    (void)state;
    assert_true(test_ranks_miss(2, 2, stay_away, &units[0],
                                "rank 1 did not reach all_gather of layer 3 within 2.0 s", NULL));
    assert_true(test_ranks_miss(2, 2, stay_away, &units[1],
                                "rank 1 did not reach all_gather of the head within 2.0 s", NULL));
}

static void test_bytes(void **state)
{
    bl_gather_unit units[3] = {
        {.n_items = 2, .item = {{.shard_bytes = 100}, {.shard_bytes = 10, .slot_offset = 4096}}},
        {.n_items = 1, .item = {{.shard_bytes = 2000}}},
        {.n_items = 1, .whole_ring = true, .item = {{.shard_bytes = 20000}}},
    };
    (void)state;
    assert_int_equal(bl_gather_ring_bytes(1, 3, units, 4),
                     81920); /* the head's 80,000, rounded up */
    assert_int_equal(bl_gather_ring_bytes(16, 3, units, 4),
                     16 * 8192); /* 4096 + 40 and 8000 make a slot of 8192 */
    assert_int_equal(bl_gather_ring_bytes(2, 2, units, 1), 2 * 8192);
    units[2].item[0].shard_bytes = SIZE_MAX / 4;
    assert_int_equal(bl_gather_ring_bytes(1, 3, units, 8), SIZE_MAX); /* more than there can be */
    units[1].item[0].shard_bytes = SIZE_MAX / 4;
    assert_int_equal(bl_gather_ring_bytes(8, 2, units, 1), SIZE_MAX);
    bl_gather_ring_destroy(NULL);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_slots),
        cmocka_unit_test(test_slots_are_taken_in_turn),
        cmocka_unit_test(test_sub_units),
        cmocka_unit_test(test_reuse_waits_for_readers),
        cmocka_unit_test(test_changed_shards),
        cmocka_unit_test(test_a_failed_gather_reaches_the_reader),
        cmocka_unit_test(test_errors_name_the_unit),
        cmocka_unit_test(test_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
