/* SPDX-License-Identifier: Apache-2.0 */
/* The pager under faults: reads that fail, bytes that change, and owners that leave at any moment.
 * No rank hangs, and the message names the page, the file, the place and the reason. */
#include "ops_test.h"
#include "base/clock.h"
#include "paged_case.h"

#include <errno.h>
#include <unistd.h>

enum {
    FAULT_SECONDS =
        30, /* that a failure may take to surface on all ranks; a rank's deadline is 60 */
    LARGE_PAGE = 4,
    LARGE_UNIT = 1, /* its unit */
    FLIPPED_AT = 300000,
    SLOW_US = 3000
};

typedef struct fault_case {
    case_options options;
    int rank;   /* whose reads or streams fail */
    int result; /* what its reads are said to return: -errno */
    /* at this completion of that rank's: all from then on, or that one, while others are slow */
    int fails_at;
    bool fails_once;
    atomic_int n_io;
    char path[512]; /* of the page file */
    int64_t flipped_at;
    bool is_transient; /* the byte is flipped back once it has been read */
    int stops_at, how; /* the first step that is not done, and the kind of end (stop_somewhere) */
} fault_case;

static void open_fault(fault_case *f, case_tiers tiers, char dir[32])
{
    case_make_dir(dir);
    *f = (fault_case){.options = {.tiers = tiers, .ring_depth = 2, .dir = dir}, .flipped_at = -1};
    f->options.hooks.io_user = f;
}

/* As a rank does that gives up: the others' gathers must end before this one's can. */
static bl_status leave(paged_case *c, bl_status st)
{
    bl_error error;

    if (st == BL_OK) st = bl_stream_synchronize(c->self->stream);
    bl_error_save(&error, st);
    if (st != BL_OK) bl_comm_abort(c->self->comm, &error);
    case_close(c);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

static bl_status visit_all(paged_case *c)
{
    for (int round = 0; round < 2; round++)
        for (int64_t u = 0; u < CASE_UNITS; u++) BL_TRY(case_visit(c, u));
    return bl_stream_synchronize(c->self->stream);
}

/* ---- reads that fail ---- */

static int64_t fail_reads(void *user, const bl_io_completion *done)
{
    fault_case *f = user;
    int n = atomic_fetch_add(&f->n_io, 1);

    if (f->fails_once && n != f->fails_at)
        usleep(SLOW_US); /* it is still under way when the others have given up */
    return n == f->fails_at || (n > f->fails_at && !f->fails_once) ? f->result : done->result;
}

static bl_status visit_with_faults(test_rank *self)
{
    fault_case *f = self->arg;
    case_options options = f->options;
    paged_case c;

    if (self->rank != f->rank) options.hooks.io = NULL;
    bl_status st = case_open(self, &options, &c);
    return leave(&c, st == BL_OK ? visit_all(&c) : st);
}

static void test_a_read_that_fails(void **state)
{
    static const struct {
        int error;
        bl_status status;
        const char *text;
    } faults[] = {{EIO, BL_EIO, "Input/output error"},
                  {ENOMEM, BL_ENOMEM, "Cannot allocate memory"}};
    (void)state;
    for (int i = 0; i < 24; i++) {
        int which = i % 2, n_ranks = 1 << i % 3;
        bl_error errors[CASE_RANKS];
        char dir[32];
        fault_case f;
        open_fault(&f, i % 4 == 3 ? CASE_MIXED : CASE_ALL_DISK, dir);
        f.options.engine = i & 4 ? BL_IO_PREAD : BL_IO_URING;
        f.options.hooks.bounces = i & 8;
        f.options.hooks.io = fail_reads;
        f.rank = n_ranks - 1;
        f.result = -faults[which].error;
        f.fails_at = (i * 5) % 13;
        f.fails_once = i & 1;
        double start_s = bl_now_s();
        bl_status st = test_ranks_run(n_ranks, 1, 60, visit_with_faults, &f, errors);
        assert_true(bl_now_s() - start_s < FAULT_SECONDS);
        assert_int_equal(st, faults[which].status);
        assert_non_null(strstr(bl_error_text(), "page layer "));
        assert_non_null(strstr(bl_error_text(), dir));
        assert_non_null(strstr(bl_error_text(), ".pages"));
        assert_non_null(strstr(bl_error_text(), " bytes at offset "));
        assert_non_null(strstr(bl_error_text(), faults[which].text));
        for (int r = 0; r < n_ranks; r++)
            assert_int_equal(errors[r].status, r == f.rank ? faults[which].status : BL_ECANCELED);
        case_remove_dir(dir);
    }
}

/* ---- bytes that change ---- */

static int64_t heal(void *user, const bl_io_completion *done)
{
    fault_case *f = user;
    int64_t at = f->flipped_at;

    if (f->is_transient && at >= done->offset_bytes && at < done->offset_bytes + done->result &&
        atomic_fetch_add(&f->n_io, 1) == 0)
        case_flip_byte(f->path, at);
    return done->result;
}

static bl_status visit_damaged(test_rank *self)
{
    fault_case *f = self->arg;
    paged_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, case_open(self, &f->options, &c));
    TEST_CHECK_GOTO(st, done, case_find_file(f->options.dir, ".pages", f->path));
    f->flipped_at = bl_pages_offset(c.pages, LARGE_PAGE) + FLIPPED_AT;
    case_flip_byte(f->path, f->flipped_at);
    if (f->how == 1)
        st = bl_pager_verify(c.pager);
    else
        st = visit_all(&c);
done:
    return leave(&c, st);
}

static void check_damage(bl_status st, const fault_case *f, const char *dir)
{
    char path[512];

    if (f->is_transient) {
        if (st != BL_OK) print_error("%s\n", bl_error_text());
        assert_int_equal(st, BL_OK);
        /* Read, and read again; and once more when it was trusted. */
        assert_int_equal(f->n_io, f->how == 1 ? 2 : 3);
        assert_true(case_find_file(dir, ".json", path));
        return;
    }
    assert_int_equal(st, BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "page layer 4 at "));
    assert_non_null(strstr(bl_error_text(), f->path));
    assert_non_null(strstr(bl_error_text(), "checksum"));
    assert_false(case_find_file(dir, ".json", path)); /* the next run writes the file anew */
}

static void test_a_damaged_page(void **state)
{
    (void)state;
    for (int i = 0; i < 16; i++) {
        char dir[32];
        fault_case f;
        open_fault(&f, i & 8 ? CASE_ALL_DISK : CASE_MIXED, dir);
        f.options.hooks.io = heal;
        f.options.hooks.bounces = i & 1;
        f.options.engine = i & 4 ? BL_IO_PREAD : BL_IO_URING;
        f.is_transient = i & 2;
        f.how = (i + i / 8) & 1;
        check_damage(test_ranks_run(1, 1, 60, visit_damaged, &f, NULL), &f, dir);
        case_remove_dir(dir);
    }
}

static bl_status load_unseen(paged_case *c, int64_t unit)
{
    const void *unused;
    BL_TRY(bl_gather_ring_acquire(bl_pager_ring(c->pager), unit, 0, c->self->stream, &unused));
    BL_TRY(bl_gather_ring_release(bl_pager_ring(c->pager), unit, c->self->stream));
    return bl_stream_synchronize(c->self->stream);
}

/* Damage that comes when the page has been trusted already: seen by a pager that verifies always,
 * and by a verification. */
static bl_status damage_later(test_rank *self)
{
    fault_case *f = self->arg;
    paged_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, case_open(self, &f->options, &c));
    BL_TRY_GOTO(st, done, visit_all(&c));
    if (f->options.tiers == CASE_ALL_DISK) {
        TEST_CHECK_GOTO(st, done, case_find_file(f->options.dir, ".pages", f->path));
        case_flip_byte(f->path, bl_pages_offset(c.pages, LARGE_PAGE) + FLIPPED_AT);
        /* A page is trusted once it has been checked. */
        if (!f->options.verify_always)
            TEST_CHECK_GOTO(st, done, load_unseen(&c, LARGE_UNIT) == BL_OK);
    } else {
        ((char *)bl_pages_memory(c.pages, LARGE_PAGE))[FLIPPED_AT] ^= 1;
    }
    st = f->options.verify_always ? visit_all(&c) : bl_pager_verify(c.pager);
done:
    return leave(&c, st);
}

static void test_damage_after_the_first_arrival(void **state)
{
    (void)state;
    for (int i = 0; i < 6; i++) {
        char dir[32];
        fault_case f;
        open_fault(&f, (case_tiers)(i % 3), dir);
        f.options.verify_always = i >= 3;
        if (f.options.tiers == CASE_ALL_DEVICE && f.options.verify_always)
            f.options.verify_always = false;
        assert_int_equal(test_ranks_run(1, 1, 60, damage_later, &f, NULL), BL_EINPUT);
        assert_non_null(strstr(bl_error_text(), "layer 4"));
        case_remove_dir(dir);
    }
}

/* ---- leaving ---- */

enum { STEPS = 15 };

static bl_status do_step(paged_case *c, int step)
{
    switch (step) {
    case 0:
        return bl_gather_ring_prefetch(bl_pager_ring(c->pager), 0);
    case 1:
        return bl_gather_ring_prefetch(bl_pager_ring(c->pager), 1);
    case 2:
        return case_use(c, 0, 0, 300);
    case 3:
        return case_use(c, 0, 1, 0);
    case 4:
        return bl_gather_ring_release(bl_pager_ring(c->pager), 0, c->self->stream);
    case 5:
        return bl_gather_ring_prefetch(bl_pager_ring(c->pager), 3);
    case 6:
        return case_use(c, 1, 4, 0);
    case 7:
        return bl_gather_ring_release(bl_pager_ring(c->pager), 1, c->self->stream);
    case 8:
        return bl_gather_ring_prefetch(bl_pager_ring(c->pager), 2);
    case 9:
        return case_use(c, 3, 4, 300);
    case 10:
        return bl_gather_ring_release(bl_pager_ring(c->pager), 3, c->self->stream);
    case 11:
        return bl_gather_ring_release(bl_pager_ring(c->pager), 2, c->self->stream);
    case 12:
        return bl_gather_ring_prefetch(bl_pager_ring(c->pager), CASE_WHOLE);
    case 13:
        return case_use(c, CASE_WHOLE, 0, 0);
    default:
        return bl_gather_ring_release(bl_pager_ring(c->pager), CASE_WHOLE, c->self->stream);
    }
}

static bl_status fail_task(bl_stream *stream, const void *args)
{
    (void)stream, (void)args;
    return BL_FAIL(BL_EIO, "planted");
}

/* Does stops_at steps, then leaves: at once (0), or after a failure of compute (1), the gathers (2)
 * or the copies (3) on one rank. */
static bl_status stop_somewhere(test_rank *self)
{
    fault_case *f = self->arg;
    paged_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, case_open(self, &f->options, &c));
    bl_stream *const failing[] = {NULL, self->stream, c.gathers, c.copies};
    int n_steps = f->how == 0 || self->rank == f->rank ? f->stops_at : STEPS;
    for (int step = 0; step < n_steps; step++) BL_TRY_GOTO(st, done, do_step(&c, step));
    if (f->how == 0) goto done;
    if (self->rank == f->rank)
        BL_TRY_GOTO(st, done, bl_stream_call(failing[f->how], fail_task, NULL, 0));
    for (int step = n_steps; step < STEPS; step++) BL_TRY_GOTO(st, done, do_step(&c, step));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(c.gathers));
    st = bl_stream_synchronize(c.copies);
done:
    return leave(&c, st);
}

static int64_t slow_read(void *user, const bl_io_completion *done)
{
    fault_case *f = user;
    if (atomic_fetch_add(&f->n_io, 1) % 3 == 0) usleep(500);
    return done->result;
}

static void test_leaving_at_any_moment(void **state)
{
    (void)state;
    for (int how = 0; how < 4; how++)
        for (int stop = 0; stop <= STEPS; stop++) {
            int n_ranks = 1 + (stop + how) % 2;
            char dir[32];
            fault_case f;
            open_fault(&f, stop % 3 == 2 ? CASE_MIXED : CASE_ALL_DISK, dir);
            f.options.hooks.io = slow_read;
            f.options.hooks.bounces = stop & 2;
            f.options.engine = stop & 1 ? BL_IO_PREAD : BL_IO_URING;
            f.how = how;
            f.stops_at = stop;
            double start_s = bl_now_s();
            bl_status st = test_ranks_run(n_ranks, 1, 60, stop_somewhere, &f, NULL);
            assert_true(bl_now_s() - start_s < FAULT_SECONDS);
            if (st != (how == 0 ? BL_OK : BL_EIO))
                print_error("%d at %d: %s\n", how, stop, bl_error_text());
            assert_int_equal(st, how == 0 ? BL_OK : BL_EIO);
            case_remove_dir(dir);
        }
}

/* ---- what create refuses ---- */

static bl_status refuse_units(test_rank *self)
{
    fault_case *f = self->arg;
    bl_pager *pager;
    paged_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, case_open(self, &f->options, &c));
    bl_pager_options options = {
        .device = self->device, .copy = c.copies, .gather = c.gathers, .ring_depth = 1};
    c.units[1].page[0] = CASE_PAGES;
    TEST_CHECK_GOTO(
        st, done,
        bl_pager_create(&options, c.pages, CASE_UNITS, c.units, &pager) == BL_EINTERNAL && !pager);
    c.units[1].page[0] = 0;
    c.units[1].n_items = BL_GATHER_ITEMS + 1;
    TEST_CHECK_GOTO(
        st, done,
        bl_pager_create(&options, c.pages, CASE_UNITS, c.units, &pager) == BL_EINTERNAL && !pager);
done:
    return leave(&c, st);
}

static void test_units_that_cannot_be(void **state)
{
    char dir[32];
    fault_case f;
    (void)state;
    open_fault(&f, CASE_MIXED, dir);
    assert_int_equal(test_ranks_run(1, 1, 60, refuse_units, &f, NULL), BL_OK);
    case_remove_dir(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_read_that_fails),
        cmocka_unit_test(test_a_damaged_page),
        cmocka_unit_test(test_damage_after_the_first_arrival),
        cmocka_unit_test(test_leaving_at_any_moment),
        cmocka_unit_test(test_units_that_cannot_be),
    };
    case_make_contents();
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    case_free_contents();
    return n_failed;
}
