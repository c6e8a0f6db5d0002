/* SPDX-License-Identifier: Apache-2.0 */
/* The ring with a source: shards that are not in device memory, those that are lent, and their
 * stalls in the timeline. test_gather_ring tests the ring's own rules. */
#include "gather_case.h"

#include <stdatomic.h>
#include <unistd.h>

/* ---- a source ---- */

enum {
    FETCHED_UNITS = 4,
    FETCHED_ITEMS = 3,
    FETCHED_SHARDS = FETCHED_UNITS * FETCHED_ITEMS,
    LOG_CALLS = 256
};

/* Units of three items; a case's mask of items selects those that the source loads (the others are
 * in device memory). Shard i holds test_value(rank, i * FLOATS + ...), and the places of a unit's
 * items differ from every other unit's, so that a slot that is filled too early or gathered too
 * late shows. */
typedef struct fetch_case {
    gather_case g;
    int fails_at;      /* of the source's finish calls: that one's task fails; -1: none */
    int refuses;       /* that one's call fails */
    unsigned pause_us; /* of each finish */
    atomic_int n_arrived;
    int log[LOG_CALLS], n_calls, n_finishes; /* unit * 100 + item * 10 + (1: finish) */
} fetch_case;

typedef struct fetch_args {
    fetch_case *c;
    void *dst;
    const void *src;
    bool fails;
} fetch_args;

static bl_status fetch_task(bl_stream *stream, const void *argument)
{
    const fetch_args *a = argument;
    (void)stream;
    usleep(a->c->pause_us);
    if (a->fails) return BL_FAIL(BL_EIO, "planted in the source");
    memcpy(a->dst, a->src, SHARD_BYTES);
    atomic_fetch_add(&a->c->n_arrived, 1);
    return BL_OK;
}

static void log_call(fetch_case *c, int64_t unit, int item, bool is_finish)
{
    if (c->n_calls < LOG_CALLS) c->log[c->n_calls++] = (int)unit * 100 + item * 10 + is_finish;
}

static bl_status fetch_start(void *user, int64_t unit, int item, void *dst, bl_stream *copy)
{
    (void)dst, (void)copy;
    log_call(user, unit, item, false);
    return BL_OK;
}

static bl_status fetch_finish(void *user, int64_t unit, int item, void *dst, bl_stream *copy)
{
    fetch_case *c = user;
    int which = c->n_finishes++;
    fetch_args args = {c, dst, c->g.shards + (unit * FETCHED_ITEMS + item) * FLOATS,
                       which == c->fails_at};
    log_call(c, unit, item, true);
    if (which == c->refuses) return BL_FAIL(BL_EIO, "the source refuses");
    return bl_stream_call(copy, fetch_task, &args, sizeof args);
}

static bl_status open_fetched(test_rank *self, int depth, int fetched_mask, bool is_synchronous,
                              bl_timeline *timeline, fetch_case *c)
{
    bl_gather_unit units[FETCHED_UNITS] = {0};

    *c = (fetch_case){.fails_at = -1, .refuses = -1};
    BL_TRY(gather_case_open(self, FETCHED_SHARDS, &c->g));
    for (int u = 0; u < FETCHED_UNITS; u++) {
        units[u].n_items = FETCHED_ITEMS;
        for (int i = 0; i < FETCHED_ITEMS; i++)
            units[u].item[i] = (bl_gather_item){
                .shard =
                    fetched_mask & 1 << i ? NULL : c->g.shards + (u * FETCHED_ITEMS + i) * FLOATS,
                .shard_bytes = SHARD_BYTES,
                .slot_offset = (size_t)(u * SHARD_BYTES + i * 8 * SHARD_BYTES),
                .lane = BL_LANE_DISK,
                .is_lent = !(fetched_mask & 1 << i)};
    }
    bl_gather_ring_options options = {.device = self->device,
                                      .comm = self->comm,
                                      .stream = c->g.gathers,
                                      .copy = c->g.copies,
                                      .source = {c, fetch_start, fetch_finish},
                                      .depth = depth,
                                      .is_synchronous = is_synchronous,
                                      .timeline = timeline,
                                      .lane = BL_LANE_GATHER};
    size_t before = bl_device_bytes(self->device);
    BL_TRY(bl_gather_ring_create(&options, FETCHED_UNITS, units, &c->g.ring));
    TEST_CHECK(bl_device_bytes(self->device) - before ==
               bl_gather_ring_bytes(depth, FETCHED_UNITS, units, self->n_ranks));
    return bl_gather_ring_validate(c->g.ring);
}

static bl_status use_fetched(fetch_case *c, int64_t unit, int item, unsigned pause_us)
{
    return gather_case_use(&c->g, unit, item, unit * FETCHED_ITEMS + item, 0, pause_us);
}

/* All of a unit is started before any of it is waited for, and items in device memory are not asked
 * for. */
static bl_status start_before_finish(test_rank *self)
{
    static const int expected[] = {200, 220, 201, 221};
    fetch_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_fetched(self, 2, 5, false, NULL, &c));
    for (int i = 0; i < FETCHED_ITEMS; i++) BL_TRY_GOTO(st, done, use_fetched(&c, 2, i, 0));
    TEST_CHECK_GOTO(
        st, done, c.n_calls == BL_COUNT(expected) && memcmp(c.log, expected, sizeof expected) == 0);
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c.g);
    return st;
}

static void test_a_source_starts_all_then_finishes(void **state)
{
    (void)state;
    RUN(start_before_finish, 1);
    RUN(start_before_finish, 2);
}

/* As `reuse`, with slots that the copy stream fills: some readers sleep, the host and all other
 * streams run ahead. */
static bl_status reuse_fetched(test_rank *self)
{
    const int *mask = self->arg;
    fetch_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_fetched(self, 2, *mask, false, NULL, &c));
    for (int i = 0; i < 12; i++) {
        int64_t unit = (i * 3) % FETCHED_UNITS;
        BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.g.ring, unit));
        BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.g.ring, ((i + 1) * 3) % FETCHED_UNITS));
        for (int k = 0; k < FETCHED_ITEMS; k++)
            BL_TRY_GOTO(st, done,
                        use_fetched(&c, unit, k, (i + k + self->rank) % 4 == 0 ? PAUSE_US / 4 : 0));
        BL_TRY_GOTO(st, done, bl_gather_ring_release(c.g.ring, unit, self->stream));
    }
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c.g);
    return st;
}

static void test_a_source_waits_for_readers(void **state)
{
    (void)state;
    for (int mask = 0; mask < 8; mask++)
        for (int n_ranks = 1; n_ranks <= 4; n_ranks *= 2) {
            bl_status st = test_ranks_run(n_ranks, 1, 60, reuse_fetched, &mask, NULL);
            if (st != BL_OK)
                print_error("items %d, %d ranks: %s\n", mask, n_ranks, bl_error_text());
            assert_int_equal(st, BL_OK);
        }
}

/* Prefetched and released unused: the gather is still pending when the slot is reused, and its
 * peers' shards are at the places of the next unit's own. */
static bl_status release_unused(test_rank *self)
{
    fetch_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_fetched(self, 1, 7, false, NULL, &c));
    BL_TRY_GOTO(st, done, gather_case_pause(c.g.gathers, PAUSE_US));
    for (int64_t unit = 0; unit < FETCHED_UNITS; unit++) {
        BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.g.ring, unit));
        if (unit == FETCHED_UNITS - 1)
            for (int k = 0; k < FETCHED_ITEMS; k++)
                BL_TRY_GOTO(st, done, use_fetched(&c, unit, k, 0));
        BL_TRY_GOTO(st, done, bl_gather_ring_release(c.g.ring, unit, self->stream));
    }
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c.g);
    return st;
}

static void test_units_released_unused(void **state)
{
    (void)state;
    RUN(release_unused, 1);
    RUN(release_unused, 3);
}

/* ---- lending ---- */

static bl_status lend(test_rank *self)
{
    fetch_case c;
    const void *got;
    bl_status st;

    BL_TRY_GOTO(st, done, open_fetched(self, 1, 0, false, NULL, &c));
    for (int i = 0; i < FETCHED_ITEMS; i++) {
        BL_TRY_GOTO(st, done, use_fetched(&c, 1, i, 0));
        BL_TRY_GOTO(st, done, bl_gather_ring_acquire(c.g.ring, 1, i, self->stream, &got));
        TEST_CHECK_GOTO(st, done,
                        (got == c.g.shards + (FETCHED_ITEMS + i) * FLOATS) == (self->n_ranks == 1));
    }
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c.g);
    return st;
}

static void test_lent_in_a_group_of_one_copied_in_others(void **state)
{
    bl_gather_unit unit = {.n_items = 2,
                           .item = {{.shard = state, .shard_bytes = 9000, .is_lent = true},
                                    {.shard = state, .shard_bytes = 100}}};
    RUN(lend, 1);
    RUN(lend, 2);
    assert_int_equal(bl_gather_ring_bytes(2, 1, &unit, 1), 2 * 4096);
    assert_int_equal(bl_gather_ring_bytes(2, 1, &unit, 2), 2 * 20480);
}

/* ---- shards that change ---- */

static bl_status add_one_late(bl_stream *stream, const void *argument)
{
    float *values = *(float *const *)argument;
    (void)stream;
    usleep(PAUSE_US);
    for (int i = 0; i < FETCHED_SHARDS * FLOATS; i++) values[i] += 1;
    return BL_OK;
}

/* The source loads them after the change, on its stream. */
static bl_status change_fetched(test_rank *self)
{
    fetch_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_fetched(self, 2, 7, false, NULL, &c));
    BL_TRY_GOTO(st, done,
                bl_stream_call(self->stream, add_one_late, &c.g.shards, sizeof c.g.shards));
    BL_TRY_GOTO(st, done, bl_gather_ring_shards_changed(c.g.ring, self->stream));
    BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.g.ring, 1));
    for (int k = 0; k < FETCHED_ITEMS; k++)
        BL_TRY_GOTO(st, done, gather_case_use(&c.g, 1, k, FETCHED_ITEMS + k, 1.0f, 0));
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c.g);
    return st;
}

static void test_changed_shards_of_a_source(void **state)
{
    (void)state;
    RUN(change_fetched, 1);
    RUN(change_fetched, 3);
}

/* ---- without overlap ---- */

typedef struct arrived_args {
    fetch_case *c;
    int n_arrived;
} arrived_args;

static bl_status check_arrived(bl_stream *stream, const void *argument)
{
    const arrived_args *a = argument;
    int n = atomic_load(&a->c->n_arrived);
    (void)stream;
    return n == a->n_arrived
               ? BL_OK
               : BL_FAIL(BL_EINTERNAL, "%d shards have come, not %d", n, a->n_arrived);
}

/* Before the acquire nothing has come, however long that takes; after it all of the unit has. */
static bl_status bring_when_acquired(test_rank *self)
{
    fetch_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_fetched(self, 2, 7, true, NULL, &c));
    for (int64_t unit = 0; unit < 2; unit++) {
        arrived_args before = {&c, (int)unit * FETCHED_ITEMS},
                     after = {&c, (int)(unit + 1) * FETCHED_ITEMS};
        c.pause_us = PAUSE_US / 10;
        BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.g.ring, unit));
        TEST_CHECK_GOTO(st, done, c.n_calls == (int)unit * 2 * FETCHED_ITEMS);
        BL_TRY_GOTO(st, done, gather_case_pause(self->stream, PAUSE_US));
        BL_TRY_GOTO(st, done, bl_stream_call(self->stream, check_arrived, &before, sizeof before));
        BL_TRY_GOTO(st, done, use_fetched(&c, unit, 0, 0));
        BL_TRY_GOTO(st, done, bl_stream_call(self->stream, check_arrived, &after, sizeof after));
        BL_TRY_GOTO(st, done, use_fetched(&c, unit, 1, 0));
        BL_TRY_GOTO(st, done, use_fetched(&c, unit, 2, 0));
        BL_TRY_GOTO(st, done, bl_gather_ring_release(c.g.ring, unit, self->stream));
    }
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c.g);
    return st;
}

static void test_synchronous(void **state)
{
    (void)state;
    RUN(bring_when_acquired, 1);
    RUN(bring_when_acquired, 2);
}

/* ---- a source that fails ---- */

static bl_status fail_fetch(test_rank *self)
{
    const void *unused;
    fetch_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_fetched(self, 2, 7, false, NULL, &c));
    c.fails_at = self->rank == 0 ? 1 : -1;
    BL_TRY_GOTO(st, done, bl_gather_ring_prefetch(c.g.ring, 0));
    st = use_fetched(&c, 0, 2, 0); /* whether the failure is known by now or not */
    if (self->rank > 0) {          /* its peers: canceled */
        if (st == BL_OK) st = bl_stream_synchronize(self->stream);
        goto done;
    }
    TEST_CHECK_GOTO(st, done, bl_stream_synchronize(self->stream) == BL_EIO || st == BL_EIO);
    TEST_CHECK_GOTO(st, done, strstr(bl_error_text(), "planted in the source"));
    TEST_CHECK_GOTO(st, done,
                    bl_gather_ring_acquire(c.g.ring, 0, 0, self->stream, &unused) == BL_EIO);
    TEST_CHECK_GOTO(st, done, strstr(bl_error_text(), "planted in the source"));
    st = bl_gather_ring_acquire(c.g.ring, 1, 0, self->stream, &unused);
done:
    /* as the rank's thread does, so that the others' gathers end before the ring is closed */
    if (st != BL_OK) {
        bl_error error;
        bl_error_save(&error, st);
        bl_comm_abort(self->comm, &error);
    }
    gather_case_close(&c.g);
    return st == BL_OK ? BL_OK : bl_fail(st, "%s", "planted in the source, and seen");
}

static bl_status refuse_fetch(test_rank *self)
{
    const void *unused;
    fetch_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_fetched(self, 2, 7, false, NULL, &c));
    c.refuses = 1;
    TEST_CHECK_GOTO(st, done, bl_gather_ring_prefetch(c.g.ring, 0) == BL_EIO);
    TEST_CHECK_GOTO(st, done,
                    bl_gather_ring_acquire(c.g.ring, 0, 0, self->stream, &unused) == BL_EIO);
    TEST_CHECK_GOTO(st, done, strstr(bl_error_text(), "the source refuses"));
    TEST_CHECK_GOTO(st, done,
                    bl_gather_ring_acquire(c.g.ring, 1, 0, self->stream, &unused) == BL_EIO);
    st = bl_stream_synchronize(self->stream);
done:
    gather_case_close(&c.g);
    return st;
}

static bl_status fail_task(bl_stream *stream, const void *argument)
{
    (void)stream, (void)argument;
    return BL_FAIL(BL_EIO, "planted on the copy stream");
}

/* An acquire need not wait until the gather stream has come to the failure, too. */
static bl_status fail_copies(test_rank *self)
{
    const void *unused;
    fetch_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, open_fetched(self, 2, 7, false, NULL, &c));
    BL_TRY_GOTO(st, done, bl_stream_call(c.g.copies, fail_task, NULL, 0));
    TEST_CHECK_GOTO(st, done, bl_stream_synchronize(c.g.copies) == BL_EIO);
    TEST_CHECK_GOTO(st, done,
                    bl_gather_ring_acquire(c.g.ring, 0, 0, self->stream, &unused) == BL_EIO);
    TEST_CHECK_GOTO(st, done, strstr(bl_error_text(), "planted on the copy stream"));
done:
    gather_case_close(&c.g);
    return st;
}

static void test_a_failing_source(void **state)
{
    (void)state;
    for (int n_ranks = 1; n_ranks <= 3; n_ranks++) {
        bl_error errors[3];
        assert_int_equal(test_ranks_run(n_ranks, 1, 60, fail_fetch, NULL, errors), BL_EIO);
        assert_non_null(strstr(bl_error_text(), "planted in the source"));
        assert_int_equal(errors[0].status, BL_EIO);
        for (int r = 1; r < n_ranks; r++) assert_int_equal(errors[r].status, BL_ECANCELED);
    }
    RUN(refuse_fetch, 1);
    RUN(fail_copies, 1);
}

/* ---- the timeline ---- */

/* Rank 0's shards take long: it stalls for the disk, the others for the gather that waits for it. A
 * rank that its machine delays stalls for less: then, `arg` is set. */
static bl_status measure_stalls(test_rank *self)
{
    atomic_bool *was_late = self->arg;
    bl_timeline *timeline = NULL;
    bl_timeline_totals totals;
    fetch_case c;
    bl_status st;

    BL_TRY(bl_timeline_create(self->device, 64, NULL, NULL, &timeline));
    BL_TRY_GOTO(st, done, open_fetched(self, 2, 5, false, timeline, &c));
    c.pause_us = self->rank == 0 ? 2 * PAUSE_US : 0;
    for (int i = 0; i < FETCHED_ITEMS; i++) BL_TRY_GOTO(st, done, use_fetched(&c, 0, i, 0));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(c.g.gathers));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(c.g.copies));
    bl_timeline_collect(timeline);
    bl_timeline_get_totals(timeline, &totals);
    const bl_lane_totals *disk = &totals.lane[BL_LANE_DISK], *gather = &totals.lane[BL_LANE_GATHER];
    const bl_lane_totals *late = self->rank == 0 ? disk : gather,
                         *other = self->rank == 0 ? gather : disk;
    TEST_CHECK_GOTO(st, done, disk->n_bytes == 2 * SHARD_BYTES);
    TEST_CHECK_GOTO(
        st, done,
        gather->n_bytes ==
            (self->n_ranks == 1 ? 0 : FETCHED_ITEMS * SHARD_BYTES * (self->n_ranks - 1)));
    if (late->stall_s <= 3e-6 * PAUSE_US || late->stall_s <= other->stall_s)
        atomic_store(was_late, true); /* about 4e-6 */
    if (self->rank == 0) TEST_CHECK_GOTO(st, done, disk->busy_s >= 4e-6 * PAUSE_US);
done:
    gather_case_close(&c.g);
    bl_timeline_destroy(timeline);
    return st;
}

static void test_stalls_and_bytes(void **state)
{
    enum { MAX_TRIES = 20 };
    (void)state;
    for (int n_ranks = 1; n_ranks <= 3; n_ranks += 2) {
        atomic_bool was_late = true;
        for (int n = 0; n < MAX_TRIES && was_late; n++) {
            was_late = false;
            bl_status st = test_ranks_run(n_ranks, 1, 60, measure_stalls, &was_late, NULL);
            if (st != BL_OK) fail_msg("%s", bl_error_text());
        }
        assert_false(was_late);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_source_starts_all_then_finishes),
        cmocka_unit_test(test_a_source_waits_for_readers),
        cmocka_unit_test(test_units_released_unused),
        cmocka_unit_test(test_lent_in_a_group_of_one_copied_in_others),
        cmocka_unit_test(test_changed_shards_of_a_source),
        cmocka_unit_test(test_synchronous),
        cmocka_unit_test(test_a_failing_source),
        cmocka_unit_test(test_stalls_and_bytes),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
