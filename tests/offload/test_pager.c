/* SPDX-License-Identifier: Apache-2.0 */
/* The pager under schedules, tiers, engines and delays of all kinds: what compute sees is exact,
 * nothing is allocated on the way, and the account of bytes is right. The linker's --wrap counts
 * what our code allocates (tests/faults has more of it). */
#include "ops_test.h"
#include "paged_case.h"

#include <errno.h>
#include <sys/types.h>
#include <unistd.h>

#pragma GCC diagnostic ignored "-Wmissing-prototypes" /* names that the linker makes */

static atomic_long n_allocations;

void *__real_malloc(size_t n);
void *__wrap_malloc(size_t n)
{
    atomic_fetch_add(&n_allocations, 1);
    return __real_malloc(n);
}

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size)
{
    atomic_fetch_add(&n_allocations, 1);
    return __real_calloc(n, size);
}

void *__real_realloc(void *old, size_t n);
void *__wrap_realloc(void *old, size_t n)
{
    atomic_fetch_add(&n_allocations, 1);
    return __real_realloc(old, n);
}

void *__real_mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset);
void *__wrap_mmap(void *at, size_t n, int protection, int flags, int fd, off_t offset)
{
    atomic_fetch_add(&n_allocations, 1);
    return __real_mmap(at, n, protection, flags, fd, offset);
}

/* ---- schedules ---- */

enum { VISITS = 24, DELAY_US = 400 };

typedef struct schedule {
    case_options options;
    uint64_t seed;
    atomic_long n_io; /* completions, by which delays are chosen */
    uint64_t sums[CASE_RANKS];
} schedule;

/* In [0, n), the same on all ranks unless `rank` says otherwise. */
static int choose(const schedule *s, int rank, int64_t index, int n)
{
    return (int)((test_value(rank, index, s->seed) + 1.0f) / 2.0f * (float)n);
}

static int64_t delay_and_cut(void *user, const bl_io_completion *done)
{
    schedule *s = user;
    int which = choose(s, 9, atomic_fetch_add(&s->n_io, 1), 8);

    if (which == 0) usleep(DELAY_US);
    if (which == 1) return -EINTR;
    if (which == 2 && done->result > 1) return done->result / 2;
    return done->result;
}

static void delay(void *user, bl_tier tier, int64_t page, size_t n_bytes)
{
    (void)tier, (void)page;
    if (choose(user, 10, (int64_t)n_bytes, 3) == 0) usleep(DELAY_US);
}

/* Layers up, the head, layers down, as in training; then here and there. */
static int64_t unit_at(const schedule *s, int visit)
{
    static const int order[] = {0, 1, 2, 3, CASE_WHOLE, 3, 2, 1, 0, 0, 1, 2, 3, CASE_WHOLE};
    return visit < (int)BL_COUNT(order) ? order[visit] : choose(s, 0, visit, CASE_UNITS);
}

static bl_status visit(paged_case *c, const schedule *s, int at)
{
    int64_t unit = unit_at(s, at);
    int rank = c->self->rank, ahead = choose(s, 0, 1000 + at, 4);

    for (int k = 0; k < ahead && at + k < VISITS; k++) {
        BL_TRY(bl_gather_ring_prefetch(bl_pager_ring(c->pager), unit_at(s, at + k)));
        BL_TRY(bl_pager_validate(c->pager));
        if (unit_at(s, at + k) == CASE_WHOLE) break; /* it will need the whole ring */
    }
    for (int i = 0; i < c->units[unit].n_items; i++) {
        if (choose(s, 0, 2000 + at * 16 + i, 8) == 0) continue; /* not every item is used */
        unsigned pause_us = choose(s, rank, 3000 + at * 16 + i, 6) == 0 ? DELAY_US : 0;
        BL_TRY(case_use(c, unit, i, pause_us));
    }
    if (at + 1 < VISITS && unit_at(s, at + 1) == unit) return BL_OK; /* visited again at once */
    BL_TRY(bl_gather_ring_release(bl_pager_ring(c->pager), unit, c->self->stream));
    return bl_pager_validate(c->pager);
}

/* When it returns, every rank has come here and has nothing to do. */
static bl_status meet(test_rank *self)
{
    BL_TRY(bl_comm_barrier(self->comm, self->stream));
    return bl_stream_synchronize(self->stream);
}

static bl_status run_schedule(test_rank *self)
{
    schedule *s = self->arg;
    paged_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, case_open(self, &s->options, &c));
    BL_TRY_GOTO(st, done, meet(self));
    long n_before = atomic_load(&n_allocations);
    int64_t n_of_device = bl_device_allocations(self->device);
    for (int at = 0; at < VISITS; at++) BL_TRY_GOTO(st, done, visit(&c, s, at));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    BL_TRY_GOTO(st, done, meet(self));
    TEST_CHECK_GOTO(st, done, atomic_load(&n_allocations) == n_before);
    TEST_CHECK_GOTO(st, done, bl_device_allocations(self->device) == n_of_device);
    BL_TRY_GOTO(st, done, meet(self));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(c.gathers));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(c.copies));
    BL_TRY_GOTO(st, done, bl_pager_verify(c.pager));
    s->sums[self->rank] = c.sum;
done:
    case_close(&c);
    return st;
}

static void run_case(const case_options *options, int n_ranks, uint64_t sums[CASE_RANKS])
{
    char dir[32];
    schedule s = {.options = *options, .seed = 5};

    case_make_dir(dir);
    s.options.dir = dir;
    s.options.hooks.io = delay_and_cut;
    s.options.hooks.io_user = &s;
    s.options.hooks.pace = delay;
    s.options.hooks.pace_user = &s;
    bl_status st = test_ranks_run(n_ranks, 1, 60, run_schedule, &s, NULL);
    case_remove_dir(dir);
    if (st != BL_OK)
        print_error("%d ranks, tiers %d, engine %d, depth %d, bounces %d, synchronous %d: %s\n",
                    n_ranks, options->tiers, options->engine, options->ring_depth,
                    options->hooks.bounces, options->hooks.is_synchronous, bl_error_text());
    assert_int_equal(st, BL_OK);
    memcpy(sums, s.sums, sizeof s.sums);
}

/* All tiers, engines, depths, groups and ways give each byte of each page at each visit: compared
 * as they are used, and by their sums. */
static void test_what_compute_sees(void **state)
{
    static const int depths[] = {1, 2, 4}, groups[] = {1, 2, 4};
    (void)state;
    for (size_t g = 0; g < BL_COUNT(groups); g++) {
        uint64_t first[CASE_RANKS] = {0}, sums[CASE_RANKS];
        for (size_t d = 0; d < BL_COUNT(depths); d++)
            for (case_tiers tiers = CASE_ALL_DEVICE; tiers <= CASE_MIXED; tiers++)
                for (int way = 0; way < 4; way++) {
                    bool has_disk = tiers >= CASE_ALL_DISK, bounces = way & 1;
                    if (!has_disk && way > 0) break;
                    case_options options = {
                        .tiers = tiers,
                        .engine = way & 2 ? BL_IO_PREAD : BL_IO_URING,
                        .ring_depth = depths[d],
                        .verify_always = (d + (size_t)way) % 3 == 0,
                        .hooks = {.bounces = bounces, .is_synchronous = d == 1 && way == 3}};
                    run_case(&options, groups[g], sums);
                    if (first[0] == 0) memcpy(first, sums, sizeof first);
                    assert_memory_equal(sums, first, sizeof first);
                    assert_true(first[0] != 0);
                }
    }
}

/* ---- sizes ---- */

static bl_status check_sizes(test_rank *self)
{
    const case_options *options = self->arg;
    paged_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, case_open(self, options, &c));
    bl_pager_destroy(c.pager);
    c.pager = NULL;
    size_t before = bl_device_bytes(self->device);
    BL_TRY_GOTO(st, done, case_create_pager(&c));
    size_t expected =
        bl_pager_ring_bytes(c.specs, self->n_ranks, options->ring_depth, CASE_UNITS, c.units);
    TEST_CHECK_GOTO(st, done, bl_device_bytes(self->device) - before == expected);
    if (options->tiers == CASE_ALL_DEVICE)
        TEST_CHECK_GOTO(st, done, (expected == 0) == (self->n_ranks == 1));
done:
    case_close(&c);
    return st;
}

static void test_ring_bytes(void **state)
{
    char dir[32];
    (void)state;
    for (case_tiers tiers = CASE_ALL_DEVICE; tiers <= CASE_MIXED; tiers++)
        for (int n_ranks = 1; n_ranks <= 3; n_ranks += 2) {
            case_make_dir(dir);
            case_options options = {
                .tiers = tiers, .ring_depth = 2, .dir = dir, .hooks = {.bounces = n_ranks == 3}};
            assert_int_equal(test_ranks_run(n_ranks, 1, 60, check_sizes, &options, NULL), BL_OK);
            case_remove_dir(dir);
        }
}

static void test_plans(void **state)
{
    enum { MIB = 1 << 20 };
    bl_page_spec specs[] = {{"a", 100 * (size_t)MIB, BL_TIER_DISK},
                            {"b", 60 * (size_t)MIB, BL_TIER_DISK},
                            {"c", 500 * (size_t)MIB, BL_TIER_DEVICE},
                            {"d", 5000, BL_TIER_HOST}};
    bl_pager_unit units[] = {{.n_items = 3, .page = {0, 2, 1}}, {.n_items = 2, .page = {3, 1}}};
    const size_t buffer = BL_IO_CHUNK_BYTES + 2 * BL_IO_ALIGN_BYTES;

    (void)state;
    assert_int_equal(bl_pager_ring_bytes(specs, 1, 2, 2, units),
                     2 * 160 * (size_t)MIB); /* c is lent */
    assert_int_equal(bl_pager_ring_bytes(specs, 2, 2, 2, units), 2 * 2 * 660 * (size_t)MIB);
    assert_int_equal(bl_pager_host_bytes(specs, true, 0, 2, units),
                     160 * (size_t)MIB + BL_IO_QUEUE_DEPTH * buffer);
    assert_int_equal(bl_pager_host_bytes(specs, false, 8, 2, units), 8 * buffer);
    assert_int_equal(bl_pager_host_bytes(specs, true, 0, 0, units), 0); /* nothing on disk */
    specs[1].n_bytes =
        1000; /* a small unit: requests of 256 KiB, 12 small ones and one for its bytes */
    assert_int_equal(bl_pager_host_bytes(specs, false, 0, 1, &units[1]),
                     (1 + 12) * ((256 << 10) + 2 * BL_IO_ALIGN_BYTES));
    specs[0].n_bytes = SIZE_MAX / 2;
    assert_int_equal(bl_pager_ring_bytes(specs, 4, 2, 2, units), SIZE_MAX);
    assert_int_equal(bl_pager_ring_bytes(specs, 1, 8, 2, units), SIZE_MAX);
    specs[1].n_bytes = SIZE_MAX - 10;
    assert_int_equal(bl_pager_host_bytes(specs, true, 0, 2, units), SIZE_MAX);
    bl_pager_destroy(NULL);
}

/* ---- counters ---- */

typedef struct paced_case {
    case_options options;
    int64_t n_bytes[3];
} paced_case;

static void count_pace(void *user, bl_tier tier, int64_t page, size_t n_bytes)
{
    (void)page;
    ((paced_case *)user)->n_bytes[tier] += (int64_t)n_bytes;
}

static bl_status count_bytes(test_rank *self)
{
    paced_case *p = self->arg;
    bl_timeline_totals totals;
    int64_t expected[3] = {0};
    paged_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, case_open(self, &p->options, &c));
    for (int round = 0; round < 2; round++)
        for (int u = 0; u < CASE_UNITS; u++) BL_TRY_GOTO(st, done, case_visit(&c, u));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(c.copies));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(c.gathers));
    bl_timeline_collect(c.timeline);
    bl_timeline_get_totals(c.timeline, &totals);
    for (int page = 0; page < CASE_PAGES; page++)
        expected[c.specs[page].tier] += 2 * (int64_t)c.specs[page].n_bytes;
    TEST_CHECK_GOTO(st, done, totals.lane[BL_LANE_DISK].n_bytes == expected[BL_TIER_DISK]);
    TEST_CHECK_GOTO(st, done, totals.lane[BL_LANE_COPY].n_bytes == expected[BL_TIER_HOST]);
    TEST_CHECK_GOTO(st, done, totals.lane[BL_LANE_GATHER].n_bytes == 0 && totals.n_dropped == 0);
    TEST_CHECK_GOTO(st, done, p->n_bytes[BL_TIER_DISK] == expected[BL_TIER_DISK]);
    TEST_CHECK_GOTO(st, done, p->n_bytes[BL_TIER_HOST] == expected[BL_TIER_HOST]);
    TEST_CHECK_GOTO(st, done, p->n_bytes[BL_TIER_DEVICE] == 0);
done:
    case_close(&c);
    return st;
}

static void test_bytes_are_counted(void **state)
{
    char dir[32];
    (void)state;
    for (int bounces = 0; bounces < 2; bounces++) {
        case_make_dir(dir);
        paced_case p = {
            .options = {
                .tiers = CASE_MIXED, .ring_depth = 2, .dir = dir, .hooks = {.bounces = bounces}}};
        p.options.hooks.pace = count_pace;
        p.options.hooks.pace_user = &p;
        bl_status st = test_ranks_run(1, 1, 60, count_bytes, &p, NULL);
        if (st != BL_OK) print_error("%s\n", bl_error_text());
        assert_int_equal(st, BL_OK);
        case_remove_dir(dir);
    }
}

/* ---- a unit of as many items as a unit may have, all on disk ---- */

static bl_status visit_all_pages(test_rank *self)
{
    const case_options *options = self->arg;
    paged_case c;
    bl_status st;

    BL_TRY_GOTO(st, done, case_open(self, options, &c));
    bl_pager_destroy(c.pager);
    c.pager = NULL;
    c.units[0].n_items = BL_GATHER_ITEMS;
    for (int i = 0; i < BL_GATHER_ITEMS; i++) c.units[0].page[i] = i % CASE_PAGES;
    BL_TRY_GOTO(st, done, case_create_pager(&c));
    for (int round = 0; round < 2; round++) BL_TRY_GOTO(st, done, case_visit(&c, 0));
    BL_TRY_GOTO(st, done, bl_stream_synchronize(self->stream));
done:
    case_close(&c);
    return st;
}

static void test_a_unit_of_most_items(void **state)
{
    char dir[32];
    (void)state;
    for (int bounces = 0; bounces < 2; bounces++) {
        case_make_dir(dir);
        case_options options = {
            .tiers = CASE_ALL_DISK, .ring_depth = 2, .dir = dir, .hooks = {.bounces = bounces}};
        bl_status st = test_ranks_run(1, 1, 60, visit_all_pages, &options, NULL);
        if (st != BL_OK) print_error("%s\n", bl_error_text());
        assert_int_equal(st, BL_OK);
        case_remove_dir(dir);
    }
}

/* ---- pages that their owner rewrites ---- */

enum { REWRITTEN_BYTES = 2 * BL_IO_ALIGN_BYTES };

typedef struct rewritten_case {
    const char *dir;
    bool bounces;
} rewritten_case;

typedef struct rewrite_args {
    bl_reader *reader;
    char *bytes; /* to be written, or to be looked at */
    int64_t offset;
    char value;
} rewrite_args;

static bl_status rewrite_late(bl_stream *stream, const void *argument)
{
    const rewrite_args *a = argument;
    bl_io_read io = {.offset_bytes = a->offset, .n_bytes = REWRITTEN_BYTES, .dst = a->bytes};

    (void)stream;
    usleep(50 * DELAY_US);
    memset(a->bytes, a->value, REWRITTEN_BYTES);
    BL_TRY(bl_reader_submit_write(a->reader, &io));
    return bl_reader_wait(a->reader, &io);
}

static bl_status look_for_value(bl_stream *stream, const void *argument)
{
    const rewrite_args *a = argument;

    (void)stream;
    for (int i = 0; i < REWRITTEN_BYTES; i++)
        if (a->bytes[i] != a->value)
            return BL_FAIL(BL_EINTERNAL, "byte %d is %d, not %d", i, a->bytes[i], a->value);
    return BL_OK;
}

static bl_status load_rewritten(test_rank *self, bl_pager *pager, bl_stream *update,
                                rewrite_args *args)
{
    bl_gather_ring *ring = bl_pager_ring(pager);
    const void *page;

    for (char value = 1; value < 4; value++) {
        args->value = value;
        BL_TRY(bl_stream_call(update, rewrite_late, args, sizeof *args));
        BL_TRY(bl_gather_ring_shards_changed(ring, update));
        BL_TRY(bl_gather_ring_acquire(ring, 0, 0, self->stream, &page));
        const rewrite_args look = {.bytes = (char *)(uintptr_t)page, .value = value};
        BL_TRY(bl_stream_call(self->stream, look_for_value, &look, sizeof look));
        BL_TRY(bl_gather_ring_release(ring, 0, self->stream));
        BL_TRY(bl_stream_synchronize(self->stream));
    }
    return BL_OK;
}

/* A load waits for the update that was queued before it. */
static bl_status rewrite_pages(test_rank *self)
{
    const rewritten_case *r = self->arg;
    const bl_page_spec spec = {"weights", REWRITTEN_BYTES, BL_TIER_DISK};
    const bl_pager_unit unit = {.n_items = 1};
    const bl_pages_options options = {.device = self->device,
                                      .node = -1,
                                      .dir = r->dir,
                                      .key = 5,
                                      .n_shards = 1,
                                      .is_rewritten = true,
                                      .is_blank = true};
    const bl_reader_options reader = {0};
    const bl_pager_hooks hooks = {.bounces = r->bounces};
    paged_case c = {.self = self};
    bl_stream *update = NULL;
    rewrite_args args = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "copies", &c.copies));
    BL_TRY_GOTO(st, done, bl_stream_create(self->device, "gathers", &c.gathers));
    BL_TRY_GOTO(st, done, bl_stream_create_host(self->device, "update", &update));
    BL_TRY_GOTO(st, done, bl_pages_create(&options, 1, &spec, &c.pages));
    BL_TRY_GOTO(st, done, bl_pages_seal(c.pages));
    BL_TRY_GOTO(st, done, bl_reader_create(&reader, bl_pages_files(c.pages), &args.reader));
    BL_TRY_GOTO(st, done,
                bl_device_alloc(self->device, BL_SPACE_HOST, REWRITTEN_BYTES, "a page",
                                (void **)&args.bytes));
    args.offset = bl_pages_offset(c.pages, 0);
    const bl_pager_options pager = {.device = self->device,
                                    .copy = c.copies,
                                    .gather = c.gathers,
                                    .ring_depth = 1,
                                    .hooks = &hooks};
    BL_TRY_GOTO(st, done, bl_pager_create(&pager, c.pages, 1, &unit, &c.pager));
    st = load_rewritten(self, c.pager, update, &args);
done:
    bl_stream_destroy(update);
    bl_reader_destroy(args.reader);
    bl_device_free(self->device, BL_SPACE_HOST, args.bytes);
    case_close(&c);
    return st;
}

static void test_rewritten_pages(void **state)
{
    (void)state;
    for (int bounces = 0; bounces < 2; bounces++) {
        char dir[32];
        case_make_dir(dir);
        rewritten_case r = {dir, bounces};
        bl_status st = test_ranks_run(1, 1, 60, rewrite_pages, &r, NULL);
        if (st != BL_OK) print_error("%s\n", bl_error_text());
        assert_int_equal(st, BL_OK);
        case_remove_dir(dir);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_compute_sees),
        cmocka_unit_test(test_ring_bytes),
        cmocka_unit_test(test_plans),
        cmocka_unit_test(test_bytes_are_counted),
        cmocka_unit_test(test_a_unit_of_most_items),
        cmocka_unit_test(test_rewritten_pages),
    };
    case_make_contents();
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    case_free_contents();
    return n_failed;
}
