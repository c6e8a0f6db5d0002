/* SPDX-License-Identifier: Apache-2.0 */
/* The pager where the host cannot write device memory: disk pages come through the pinned bounce
 * buffer, host pages by the copy engine. On a GPU, or on the fake runtime of tests/device. */
#include "ops_test.h"
#include "paged_case.h"

#include <errno.h>

#include "offload/arena.h"
#ifdef BALLAST_CUDA_EMULATED
#include "emulator/emulated.h"
#endif

enum { SKIPPED = 77 };

/* As a rank of test_ranks, but on a GPU and alone. False: there is none. */
static bool open_rank(test_rank *self)
{
    *self = (test_rank){.n_ranks = 1};
    if (bl_device_create_cuda(0, &self->device) != BL_OK) return false;
    assert_int_equal(bl_stream_create(self->device, "test", &self->stream), BL_OK);
    return true;
}

static void close_rank(test_rank *self)
{
    bl_stream_destroy(self->stream);
    bl_device_destroy(self->device);
}

static void assert_ok(bl_status st)
{
    if (st != BL_OK) print_error("%s\n", bl_error_text());
    assert_int_equal(st, BL_OK);
}

static bl_status visit_all(paged_case *c)
{
    for (int round = 0; round < 2; round++)
        for (int64_t u = 0; u < CASE_UNITS; u++) BL_TRY(case_visit(c, u));
    return bl_stream_synchronize(c->self->stream);
}

static void test_what_compute_sees(void **state)
{
    uint64_t first = 0;

    (void)state;
    for (case_tiers tiers = CASE_ALL_DEVICE; tiers <= CASE_MIXED; tiers++)
        for (int depth = 1; depth <= 4; depth *= 2) {
            char dir[32];
            test_rank self;
            paged_case c;
            case_make_dir(dir);
            assert_true(open_rank(&self));
            case_options options = {
                .tiers = tiers, .ring_depth = depth, .verify_always = depth == 2, .dir = dir};
            assert_ok(case_open(&self, &options, &c));
            int64_t n_allocations = bl_device_allocations(self.device);
            assert_ok(visit_all(&c));
            assert_int_equal(bl_device_allocations(self.device), n_allocations);
            assert_ok(bl_pager_verify(c.pager));
            if (first == 0) first = c.sum;
            assert_true(c.sum == first && first != 0);
            case_close(&c);
            close_rank(&self);
            case_remove_dir(dir);
        }
}

static int64_t fail_third(void *user, const bl_io_completion *done)
{
    return atomic_fetch_add((atomic_int *)user, 1) == 2 ? -EIO : done->result;
}

static void test_a_read_that_fails(void **state)
{
    atomic_int n_io = 0;
    char dir[32];
    test_rank self;
    paged_case c;

    (void)state;
    case_make_dir(dir);
    assert_true(open_rank(&self));
    case_options options = {.tiers = CASE_MIXED,
                            .ring_depth = 2,
                            .dir = dir,
                            .hooks = {.io = fail_third, .io_user = &n_io}};
    assert_ok(case_open(&self, &options, &c));
    assert_int_equal(visit_all(&c), BL_EIO);
    assert_non_null(strstr(bl_error_text(), "page layer "));
    assert_non_null(strstr(bl_error_text(), dir));
    assert_non_null(strstr(bl_error_text(), "Input/output error"));
    case_close(&c);
    close_rank(&self);
    case_remove_dir(dir);
}

#ifdef BALLAST_CUDA_EMULATED
/* Unpinned copies would block the thread that queues them, so a GPU does not fall back to them. */
static void test_unpinned_memory_is_refused(void **state)
{
    enum { SIZE_BYTES = 1 << 20 };
    test_rank self;
    bl_arena *arena;

    (void)state;
    assert_true(open_rank(&self));
    bl_arena_options options = {.device = self.device,
                                .size_bytes = SIZE_BYTES,
                                .what = "offloaded weights",
                                .node = -1,
                                .pin = true};
    emulated_limit_registrations(SIZE_BYTES - 1);
    assert_int_equal(bl_arena_create(&options, &arena), BL_ELIMIT);
    emulated_limit_registrations(SIZE_MAX);
    assert_null(arena);
    assert_non_null(strstr(bl_error_text(), "offloaded weights: cannot pin 1048576 bytes"));
    assert_non_null(strstr(bl_error_text(), "memory.max"));
    assert_ok(bl_arena_create(&options, &arena));
    bl_arena_destroy(arena);
    close_rank(&self);
}
#endif

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_compute_sees),
        cmocka_unit_test(test_a_read_that_fails),
#ifdef BALLAST_CUDA_EMULATED
        cmocka_unit_test(test_unpinned_memory_is_refused),
#endif
    };
    test_rank self;

    if (!open_rank(&self)) {
        printf("skip: no GPU: %s\n", bl_error_text());
        return SKIPPED;
    }
    close_rank(&self);
    case_make_contents();
    int n_failed = cmocka_run_group_tests(tests, NULL, NULL);
    case_free_contents();
    return n_failed;
}
