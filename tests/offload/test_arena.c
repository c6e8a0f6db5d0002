/* SPDX-License-Identifier: Apache-2.0 */
/* The arena on this host, and under a small RLIMIT_MEMLOCK. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <linux/capability.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <unistd.h>

#include "arena_case.h"
#include "base/memory.h"
#include "base/sizes.h"
#include "skip.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

enum { LOCK_LIMIT_BYTES = 1 << 16, HUGE_PAGE_BYTES = 2 << 20 };

/* ---- functions of the linker's --wrap ---- */

/* The sanitizers make mlock do nothing: here it is the system's in every build. */
static size_t locked_bytes, unlocked_bytes;

int __wrap_mlock(const void *memory, size_t n_bytes);
int __wrap_munlock(const void *memory, size_t n_bytes);
bl_pool *__real_bl_device_pool(bl_device *device);
bl_pool *__wrap_bl_device_pool(bl_device *device);

int __wrap_mlock(const void *memory, size_t n_bytes)
{
    locked_bytes += n_bytes;
    return (int)syscall(SYS_mlock, memory, n_bytes);
}

int __wrap_munlock(const void *memory, size_t n_bytes)
{
    unlocked_bytes += n_bytes;
    return (int)syscall(SYS_munlock, memory, n_bytes);
}

static bool has_no_pool; /* as a GPU */

bl_pool *__wrap_bl_device_pool(bl_device *device)
{
    return has_no_pool ? NULL : __real_bl_device_pool(device);
}

/* ---- helpers ---- */

static bl_arena *make(bl_device *device, size_t size_bytes)
{
    bl_arena *arena;
    assert_ok(bl_arena_create(
        &(bl_arena_options){
            .device = device, .size_bytes = size_bytes, .what = "weights", .node = -1},
        &arena));
    return arena;
}

/* ThreadSanitizer takes several times the touched memory. */
#ifdef __SANITIZE_THREAD__
enum { HAS_SHADOW = 1 };
#else
enum { HAS_SHADOW = 0 };
#endif

/* ---- pieces ---- */

static void test_piece_bytes(void **state)
{
    (void)state;
    assert_int_equal(bl_arena_piece_bytes(0), 0);
    assert_int_equal(bl_arena_piece_bytes(1), 4096);
    assert_int_equal(bl_arena_piece_bytes(4096), 4096);
    assert_int_equal(bl_arena_piece_bytes(4097), 8192);
    assert_int_equal(bl_arena_piece_bytes(3187671040), 3187671040);
    assert_true(bl_arena_piece_bytes(SIZE_MAX - 4095) == SIZE_MAX - 4095);
    assert_true(bl_arena_piece_bytes(SIZE_MAX - 4094) == SIZE_MAX);
    assert_true(bl_arena_piece_bytes(SIZE_MAX) == SIZE_MAX);
}

static void test_take(void **state)
{
    static const size_t sizes[] = {1, 4096, 0, 5000, 3 * MIB + 1, 100};
    size_t sum = 0;
    char *last_end = NULL;

    for (size_t i = 0; i < BL_COUNT(sizes); i++) sum += bl_arena_piece_bytes(sizes[i]);
    bl_arena *arena = make(*state, sum);
    assert_int_equal(get_info(arena).size_bytes, sum);
    for (size_t i = 0; i < BL_COUNT(sizes); i++) {
        char *piece = bl_arena_take(arena, sizes[i]);
        assert_non_null(piece);
        assert_int_equal((uintptr_t)piece % BL_DEVICE_ALIGNMENT_BYTES, 0);
        assert_ptr_equal(piece, last_end ? last_end : bl_arena_memory(arena));
        for (size_t k = 0; k < sizes[i]; k++) assert_int_equal(piece[k], 0);
        memset(piece, 0x5A, sizes[i]);
#ifdef __SANITIZE_ADDRESS__
        assert_true(__asan_address_is_poisoned(piece + sizes[i]) || sizes[i] % 4096 == 0);
        assert_true(i + 1 == BL_COUNT(sizes) ||
                    __asan_address_is_poisoned(piece + bl_arena_piece_bytes(sizes[i])));
#endif
        last_end = piece + bl_arena_piece_bytes(sizes[i]);
        assert_int_equal(get_info(arena).taken_bytes, last_end - (char *)bl_arena_memory(arena));
    }
    assert_null(bl_arena_take(arena, 1));
    assert_null(bl_arena_take(arena, SIZE_MAX));
    assert_int_equal(get_info(arena).taken_bytes, sum);
    bl_arena_destroy(arena);

    arena = make(*state, 8192);
    assert_null(bl_arena_take(arena, 8193));
    assert_non_null(bl_arena_take(arena, 8192));
    bl_arena_destroy(arena);

    arena = make(*state, 0);
    assert_non_null(bl_arena_memory(arena));
    assert_non_null(bl_arena_take(arena, 0));
    bl_arena_destroy(arena);
    bl_arena_destroy(NULL);
}

/* VmSize, in pages. */
static long count_mapped_pages(void)
{
    long n = 0;
    FILE *file = fopen("/proc/self/statm", "r");
    assert_non_null(file);
    assert_int_equal(fscanf(file, "%ld", &n), 1);
    fclose(file);
    return n;
}

/* Nothing of what was mapped to find a huge page's boundary stays: that would be 2 MiB a round. */
static void test_addresses_are_given_back(void **state)
{
    enum { N_ROUNDS = 50 };
    if (HAS_SHADOW) TEST_SKIP("ThreadSanitizer takes memory itself");
    bl_arena_destroy(make(*state, 4096));
    long before = count_mapped_pages();
    for (int i = 0; i < N_ROUNDS; i++) bl_arena_destroy(make(*state, 4096));
    assert_true(count_mapped_pages() - before < N_ROUNDS * (HUGE_PAGE_BYTES / 4096) / 4);
}

/* ---- the block ---- */

static bool is_resident(char *memory, size_t n_bytes)
{
    size_t n_pages = n_bytes / 4096;
    unsigned char *pages = malloc(n_pages);
    bool all = true;

    assert_non_null(pages);
    assert_int_equal(mincore(memory, n_bytes, pages), 0);
    for (size_t i = 0; i < n_pages; i++) all = all && (pages[i] & 1);
    free(pages);
    return all;
}

/* The size is not a power of two, and all memory is resident from the beginning: no more than
 * requested, except for the lag of the system's counter (64 pages per thread) and
 * AddressSanitizer's shadow of it, an eighth. */
static void check_touched(bl_device *device)
{
    enum { SIZE_BYTES = 72 * MIB + 3 * 4096, SLACK_BYTES = 2 * MIB };
    int64_t before = bl_memory_anonymous_bytes();
    bl_arena *arena = make(device, SIZE_BYTES);
    int64_t taken = bl_memory_anonymous_bytes() - before;

    assert_true(is_resident(bl_arena_memory(arena), SIZE_BYTES));
    assert_in_range(taken, SIZE_BYTES - SLACK_BYTES, SIZE_BYTES + SIZE_BYTES / 8 + SLACK_BYTES);
    bl_arena_destroy(arena);
    assert_in_range(bl_memory_anonymous_bytes() - before + SLACK_BYTES, 0,
                    SIZE_BYTES / 8 + 2 * SLACK_BYTES);
}

static void test_touched(void **state)
{
    if (HAS_SHADOW) TEST_SKIP("ThreadSanitizer takes memory itself");
    check_touched(*state);
    has_no_pool = true;
    check_touched(*state);
    has_no_pool = false;
}

static bool grants_huge_pages(void)
{
    char line[128] = "";
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "r");

    if (!file) return false;
    if (!fgets(line, sizeof line, file)) line[0] = '\0';
    fclose(file);
    return strstr(line, "[always]") || strstr(line, "[madvise]");
}

enum { SEVERAL_BYTES = 16 * HUGE_PAGE_BYTES + 4096 };

static void test_huge_pages(void **state)
{
    if (!grants_huge_pages()) TEST_SKIP("this system has no transparent huge pages");
    bl_arena *arena = make(*state, SEVERAL_BYTES);
    size_t huge_bytes = get_info(arena).huge_bytes;

    assert_int_equal((uintptr_t)bl_arena_memory(arena) % HUGE_PAGE_BYTES, 0);
    assert_in_range(huge_bytes, HUGE_PAGE_BYTES, SEVERAL_BYTES - 4096);
    assert_int_equal(huge_bytes % HUGE_PAGE_BYTES, 0);
    bl_arena_destroy(arena);
}

static void test_huge_pages_of_a_neighbor(void **state)
{
    bl_arena *arena = make(*state, SEVERAL_BYTES);
    size_t huge_bytes = get_info(arena).huge_bytes;

    /* A neighbor's are not counted, at a lower or a higher address and whether or not the system
     * made one mapping of both. */
    bl_arena *small = make(*state, HUGE_PAGE_BYTES);
    assert_in_range(get_info(small).huge_bytes, 0, HUGE_PAGE_BYTES);
    assert_int_equal(get_info(arena).huge_bytes, huge_bytes);
    bl_arena_destroy(small);
    bl_arena_destroy(arena);
}

static void assert_no_memory(bl_device *device, size_t size_bytes)
{
    char number[32];
    bl_arena *none = (bl_arena *)&number;
    bl_arena_options options = {
        .device = device, .size_bytes = size_bytes, .what = "weights of rank 3", .node = -1};

    assert_int_equal(bl_arena_create(&options, &none), BL_ENOMEM);
    assert_null(none);
    snprintf(number, sizeof number, "%zu bytes", size_bytes);
    assert_non_null(strstr(bl_error_text(), "weights of rank 3: "));
    assert_non_null(strstr(bl_error_text(), number));
    assert_non_null(strstr(bl_error_text(), " are available"));
}

static void test_more_than_there_is(void **state)
{
    assert_no_memory(*state, 2 * (size_t)bl_memory_available_bytes());
    assert_no_memory(*state, SIZE_MAX / 2);
    assert_no_memory(*state, SIZE_MAX);
}

/* ---- pinning ---- */

/* What this process may lock: its limit, or, with CAP_IPC_LOCK, which root does not have
 * everywhere, anything. */
static bool may_lock(size_t n_bytes)
{
    void *memory = mmap(NULL, n_bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);

    assert_true(memory != MAP_FAILED);
    bool may = syscall(SYS_mlock, memory, n_bytes) == 0;
    munmap(memory, n_bytes);
    return may;
}

static void test_pinned(void **state)
{
    enum { SIZE_BYTES = MIB + 4096 };
    bl_arena *arena;
    bl_arena_options options = {
        .device = *state, .size_bytes = SIZE_BYTES, .what = "w", .node = -1, .pin = true};
    int64_t before = bl_memory_locked_bytes();

    if (!may_lock(SIZE_BYTES)) TEST_SKIP("RLIMIT_MEMLOCK is too small here");
    locked_bytes = unlocked_bytes = 0;
    assert_ok(bl_arena_create(&options, &arena));
    assert_true(get_info(arena).is_pinned);
    assert_int_equal(bl_memory_locked_bytes() - before, SIZE_BYTES);
    bl_arena_destroy(arena);
    assert_int_equal(locked_bytes, SIZE_BYTES);
    assert_int_equal(unlocked_bytes, SIZE_BYTES);

    arena = make(*state, SIZE_BYTES);
    assert_false(get_info(arena).is_pinned);
    bl_arena_destroy(arena);
    assert_int_equal(locked_bytes, SIZE_BYTES);
    assert_int_equal(unlocked_bytes, SIZE_BYTES);
}

/* As a user who is not root: the capability hides the limit. */
static bool lower_limit(void)
{
    struct rlimit limit = {LOCK_LIMIT_BYTES, LOCK_LIMIT_BYTES};
    struct __user_cap_header_struct header = {.version = _LINUX_CAPABILITY_VERSION_3};
    struct __user_cap_data_struct data[_LINUX_CAPABILITY_U32S_3];

    if (syscall(SYS_capget, &header, data) != 0) return false;
    data[CAP_TO_INDEX(CAP_IPC_LOCK)].effective &= ~CAP_TO_MASK(CAP_IPC_LOCK);
    return syscall(SYS_capset, &header, data) == 0 && setrlimit(RLIMIT_MEMLOCK, &limit) == 0;
}

static int create_unpinned(bl_device *device)
{
    unlocked_bytes = 0;
    bl_arena *arena;
    bl_arena_options options = {.device = device,
                                .size_bytes = MIB,
                                .what = "offloaded weights of rank 3",
                                .node = -1,
                                .pin = true};

    REQUIRE(lower_limit());
    REQUIRE(bl_arena_create(&options, &arena) == BL_OK);
    REQUIRE(!get_info(arena).is_pinned);
    char *piece = bl_arena_take(arena, MIB);
    REQUIRE(piece != NULL);
    for (int i = 0; i < MIB; i++) REQUIRE(piece[i] == 0);
    memset(piece, 1, MIB);
    bl_arena_destroy(arena);
    REQUIRE(unlocked_bytes <= MIB); /* by the device after the refusal; not once more */
    return 0;
}

static void test_unpinned_fallback(void **state)
{
    char text[TEXT_BYTES];

    (void)state;
    assert_child_succeeds(create_unpinned, text);
    assert_int_equal(count(text, "warning: "), 1);
    assert_int_equal(count(text, "\n"), 1);
    assert_non_null(strstr(text, "warning: offloaded weights of rank 3: "));
    assert_non_null(strstr(text, "RLIMIT_MEMLOCK allows 65536 "));
    assert_non_null(strstr(text, "cannot lock 1048576 bytes"));
    assert_non_null(strstr(text, "ulimit -l 1024,"));
}

/* What is locked already counts: the limit that would do is for both. */
static int create_second(bl_device *device)
{
    bl_arena *small, *second;
    bl_arena_options options = {.device = device,
                                .size_bytes = LOCK_LIMIT_BYTES / 2,
                                .what = "ring",
                                .node = -1,
                                .pin = true};

    REQUIRE(lower_limit());
    REQUIRE(bl_arena_create(&options, &small) == BL_OK);
    REQUIRE(get_info(small).is_pinned);
    options.size_bytes = MIB;
    REQUIRE(bl_arena_create(&options, &second) == BL_OK);
    bl_arena_destroy(second);
    bl_arena_destroy(small);
    return 0;
}

static void test_locked_already(void **state)
{
    char text[TEXT_BYTES];

    (void)state;
    assert_child_succeeds(create_second, text);
    assert_non_null(strstr(text, "ring: cannot lock 1048576 bytes in memory: RLIMIT_MEMLOCK "));
    assert_non_null(strstr(text, "ulimit -l 1056,"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_piece_bytes),
        cmocka_unit_test(test_take),
        cmocka_unit_test(test_addresses_are_given_back),
        cmocka_unit_test(test_touched),
        cmocka_unit_test(test_huge_pages),
        cmocka_unit_test(test_huge_pages_of_a_neighbor),
        cmocka_unit_test(test_more_than_there_is),
        cmocka_unit_test(test_pinned),
        cmocka_unit_test(test_unpinned_fallback),
        cmocka_unit_test(test_locked_already),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
