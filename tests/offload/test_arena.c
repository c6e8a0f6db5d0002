/* SPDX-License-Identifier: Apache-2.0 */
/* The arena on this host, under a small RLIMIT_MEMLOCK and on hosts with several NUMA nodes, which
 * hwloc makes up from HWLOC_SYNTHETIC. It is longer than 600 lines: half of it builds those
 * hosts. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <linux/capability.h>
#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/syscall.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/memory.h"
#include "base/sizes.h"
#include "offload/arena.h"
#include "skip.h"

#ifdef __SANITIZE_ADDRESS__
#include <sanitizer/asan_interface.h>
#endif

enum { MIB = 1 << 20, LOCK_LIMIT_BYTES = 1 << 16, HUGE_PAGE_BYTES = 2 << 20, TEXT_BYTES = 4096 };

/* ---- what the linker's --wrap puts in between ---- */

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

static void assert_ok(bl_status st)
{
    if (st != BL_OK) fail_msg("%s: %s", bl_status_name(st), bl_error_text());
}

static int set_up(void **state)
{
    return bl_device_create_cpu(2, (bl_device **)state) == BL_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    bl_device_destroy(*state);
    return 0;
}

static bl_arena *make(bl_device *device, size_t size_bytes)
{
    bl_arena *arena;
    assert_ok(bl_arena_create(
        &(bl_arena_options){
            .device = device, .size_bytes = size_bytes, .what = "weights", .node = -1},
        &arena));
    return arena;
}

static bl_arena_info get_info(const bl_arena *arena)
{
    bl_arena_info info;
    bl_arena_get_info(arena, &info);
    return info;
}

/* The exit status of fn in a child; what it wrote to stderr is in text. A child has a device of its
 * own: threads do not survive a fork. */
static int run_child(int (*fn)(bl_device *device), char text[TEXT_BYTES])
{
    int ends[2], status = -1;
    size_t n_bytes = 0;
    ssize_t n;

    assert_int_equal(pipe(ends), 0);
    fflush(NULL);
    pid_t pid = fork();
    assert_true(pid >= 0);
    if (pid == 0) {
        bl_device *device;
        alarm(60);
        unlocked_bytes = 0;
        if (dup2(ends[1], STDERR_FILENO) < 0 || bl_device_create_cpu(1, &device) != BL_OK)
            _exit(98);
        int code = fn(device);
        bl_device_destroy(device);
        _exit(code);
    }
    close(ends[1]);
    while (n_bytes < TEXT_BYTES - 1 &&
           (n = read(ends[0], text + n_bytes, TEXT_BYTES - 1 - n_bytes)) > 0)
        n_bytes += (size_t)n;
    text[n_bytes] = '\0';
    close(ends[0]);
    assert_int_equal(waitpid(pid, &status, 0), pid);
    return WIFEXITED(status) ? WEXITSTATUS(status) : 99;
}

/* Ends the child with the number of the line that does not hold. */
#define REQUIRE(condition)                                                                         \
    do {                                                                                           \
        if (!(condition)) {                                                                        \
            fprintf(stderr, "line %d: %s (%s)\n", __LINE__, #condition, bl_error_text());          \
            return 1;                                                                              \
        }                                                                                          \
    } while (0)

static void assert_child_succeeds(int (*fn)(bl_device *device), char text[TEXT_BYTES])
{
    int code = run_child(fn, text);
    if (code != 0) fail_msg("exit code %d: %s", code, text);
}

static int count(const char *text, const char *part)
{
    int n = 0;
    for (const char *at = strstr(text, part); at; at = strstr(at + 1, part)) n++;
    return n;
}

/* ThreadSanitizer takes several times as much as what is touched. */
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

/* Not a power of two, and the memory is there from the beginning: no more than was asked for, but
 * for what the system's counter is late (64 pages a thread) and AddressSanitizer's shadow of it, an
 * eighth. */
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

    /* A neighbor's are not counted, whichever lies below the other and whether or not the system
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
        .device = *state, .size_bytes = SIZE_BYTES, .what = "w", .node = -1, .must_pin = true};
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
static int create_must_pin(bl_device *device)
{
    bl_arena *small, *none = NULL;
    bl_arena_options options = {.device = device,
                                .size_bytes = LOCK_LIMIT_BYTES / 2,
                                .what = "ring",
                                .node = -1,
                                .must_pin = true};

    REQUIRE(lower_limit());
    REQUIRE(bl_arena_create(&options, &small) == BL_OK);
    options.size_bytes = MIB;
    REQUIRE(bl_arena_create(&options, &none) == BL_ELIMIT);
    REQUIRE(none == NULL);
    REQUIRE(strstr(bl_error_text(),
                   "ring: cannot lock 1048576 bytes in memory: RLIMIT_MEMLOCK allows 65536 "));
    REQUIRE(strstr(bl_error_text(), "ulimit -l 1056,"));
    bl_arena_destroy(small);
    return 0;
}

static void test_must_pin(void **state)
{
    char text[TEXT_BYTES];

    (void)state;
    assert_child_succeeds(create_must_pin, text);
    assert_string_equal(text, "");
}

/* ---- NUMA ---- */

static void assert_nodes(int n, const int *nodes)
{
    for (int i = 0; i < n; i++) assert_int_equal(bl_arena_node_of(i, n), nodes[i]);
}

static void assert_bound(bl_device *device, int node, int expected)
{
    bl_arena *arena;
    bl_arena_options options = {.device = device, .size_bytes = MIB, .what = "w", .node = node};

    assert_ok(bl_arena_create(&options, &arena));
    assert_int_equal(get_info(arena).node, expected);
    bl_arena_destroy(arena);
}

static void assert_no_node(bl_device *device, int node, const char *text)
{
    bl_arena *arena;
    bl_arena_options options = {.device = device, .size_bytes = MIB, .what = "w", .node = node};

    assert_int_equal(bl_arena_create(&options, &arena), BL_EUSAGE);
    assert_null(arena);
    assert_string_equal(bl_error_text(), text);
    assert_int_equal(bl_arena_bind_thread(node), BL_EUSAGE);
    assert_string_equal(bl_error_text(), text);
}

static void test_four_nodes(void **state)
{
    setenv("HWLOC_SYNTHETIC", "node:4 core:2 pu:1", 1);
    assert_nodes(8, (const int[]){0, 0, 1, 1, 2, 2, 3, 3});
    assert_nodes(6, (const int[]){0, 0, 1, 2, 2, 3});
    assert_nodes(4, (const int[]){0, 1, 2, 3});
    assert_nodes(3, (const int[]){-1, -1, -1});
    assert_nodes(1, (const int[]){-1});
    for (int node = 0; node < 4; node++) {
        assert_bound(*state, node, node);
        assert_ok(bl_arena_bind_thread(node));
    }
    assert_bound(*state, -1, -1); /* this thread may run on the cores of all */
    assert_ok(bl_arena_bind_thread(-1));
    assert_no_node(*state, 4, "NUMA node 4: this host has 4 with cores");
    unsetenv("HWLOC_SYNTHETIC");
}

/* Two kinds of memory beside the cores of each package. */
static void test_nodes_without_cores(void **state)
{
    setenv("HWLOC_SYNTHETIC", "pack:2 [numa][numa] core:2 pu:1", 1);
    assert_nodes(2, (const int[]){0, 1});
    assert_bound(*state, 1, 1);
    assert_no_node(*state, 2, "NUMA node 2: this host has 2 with cores");
    unsetenv("HWLOC_SYNTHETIC");
}

static void test_one_node(void **state)
{
    setenv("HWLOC_SYNTHETIC", "node:1 core:8 pu:1", 1);
    assert_nodes(3, (const int[]){0, 0, 0});
    assert_bound(*state, 0, -1);
    assert_bound(*state, -1, -1);
    assert_no_node(*state, 1, "NUMA node 1: this host has 1 with cores");
    unsetenv("HWLOC_SYNTHETIC");
}

static bool has_two_cores(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_ISSET(0, &set) && CPU_ISSET(1, &set);
}

static bool runs_on(int core)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 && CPU_COUNT(&set) == 1 &&
           CPU_ISSET(core, &set);
}

/* hwloc's XML: an object that stays open, with its cores and nodes as masks; a node; a core's only
 * thread; a GPU behind a bridge. */
#define SETS(cores, nodes)                                                                         \
    " cpuset=\"0x" cores "\" complete_cpuset=\"0x" cores "\" nodeset=\"0x" nodes                   \
    "\" complete_nodeset=\"0x" nodes "\""
#define OBJECT(type, index, cores, nodes, id)                                                      \
    "<object type=\"" type "\" os_index=\"" index "\"" SETS(cores, nodes) " gp_index=\"" id "\">"
#define NODE(index, cores, nodes, id)                                                              \
    "<object type=\"NUMANode\" os_index=\"" index                                                  \
    "\"" SETS(cores, nodes) " gp_index=\"" id "\" local_memory=\"1073741824\"/>"
#define PU(index, cores, nodes, id)                                                                \
    "<object type=\"PU\" os_index=\"" index "\"" SETS(cores, nodes) " gp_index=\"" id "\"/>"
#define PCI_DEVICE(id, domain, bus)                                                                \
    "<object type=\"Bridge\" gp_index=\"" id                                                       \
    "\" bridge_type=\"0-1\" depth=\"0\" bridge_pci=\"" domain ":[" bus "-" bus                     \
    "]\"><object type=\"PCIDev\" gp_index=\"" id "1\" pci_busid=\"" domain ":" bus                 \
    ":00.0\" pci_type=\"0302 [10de:2335] [10de:18be] a1\" pci_link_speed=\"63.0\"/></object>"

/* Two packages with a node each, and a device under each and one under the host's own bridge. */
static const char pci_host[] =
    "<?xml version=\"1.0\"?><!DOCTYPE topology SYSTEM \"hwloc2.dtd\"><topology "
    "version=\"2.0\">" OBJECT("Machine", "0", "3", "3", "1") PCI_DEVICE("20", "0000", "05")
        OBJECT("Package", "0", "1", "1", "2") NODE("0", "1", "1", "3") PU("0", "1", "1", "4")
            PCI_DEVICE("22", "0000", "17") "</object>" OBJECT("Package", "1", "2", "2", "5")
                NODE("1", "2", "2", "6") PU("1", "2", "2", "7")
                    PCI_DEVICE("24", "0001", "b8") "</object></object></topology>";

/* A GPU's memory is next to it, whatever the ranks' order: where the host says one node. */
static void test_node_of_a_device(void **state)
{
    char path[] = "/tmp/ballast-arena-XXXXXX";
    int fd = mkstemp(path);

    (void)state;
    assert_true(fd >= 0);
    assert_true(write(fd, pci_host, strlen(pci_host)) == (ssize_t)strlen(pci_host));
    close(fd);
    setenv("HWLOC_XMLFILE", path, 1);
    assert_int_equal(bl_arena_node_of_pci("0001:B8:00.0"), 1);
    assert_int_equal(bl_arena_node_of_pci("0000:17:00.0"), 0);
    assert_int_equal(bl_arena_node_of_pci("0000:05:00.0"), -1);
    assert_int_equal(bl_arena_node_of_pci("0000:06:00.0"), -1);
    assert_int_equal(bl_arena_node_of_pci("no such text"), -1);
    unsetenv("HWLOC_XMLFILE");
    unlink(path);
}

/* A thread that its owner has put on one core stays there. */
static int bind_to_one_node(bl_device *device)
{
    cpu_set_t set;

    (void)device;
    CPU_ZERO(&set);
    CPU_SET(1, &set);
    setenv("HWLOC_SYNTHETIC", "node:1 core:2 pu:1", 1);
    setenv("HWLOC_THISSYSTEM", "1", 1);
    REQUIRE(sched_setaffinity(0, sizeof set, &set) == 0);
    REQUIRE(bl_arena_bind_thread(0) == BL_OK);
    REQUIRE(runs_on(1));
    return 0;
}

/* Two cores called two nodes, and hwloc told to believe it. Only the first of the memory's need
 * exist. */
static int bind_for_real(bl_device *device)
{
    bl_arena *arena;
    bl_arena_options options = {
        .device = device, .size_bytes = MIB, .what = "near weights", .node = -1};

    setenv("HWLOC_SYNTHETIC", "node:2 core:1 pu:1", 1);
    setenv("HWLOC_THISSYSTEM", "1", 1);
    REQUIRE(bl_arena_node_of(1, 2) == 1);
    REQUIRE(bl_arena_bind_thread(0) == BL_OK);
    REQUIRE(bl_arena_node_of(1, 2) == -1); /* who has been put on cores is not taken off them */
    REQUIRE(bl_arena_bind_thread(1) == BL_OK);
    REQUIRE(runs_on(0));
    REQUIRE(bl_arena_create(&options, &arena) == BL_OK);
    bl_arena_info info = get_info(arena);
    if (info.node != 0) REQUIRE(info.node == -1); /* containers may forbid mbind */
    fprintf(stderr, "node %d\n", info.node);
    bl_arena_destroy(arena);
    return 0;
}

/* A node that the system does not have: the memory is made nevertheless. */
static int bind_refused(bl_device *device)
{
    bl_arena *arena;
    bl_arena_options options = {
        .device = device, .size_bytes = MIB, .what = "far weights", .node = 63};

    setenv("HWLOC_SYNTHETIC", "node:64 core:1 pu:1", 1);
    setenv("HWLOC_THISSYSTEM", "1", 1);
    REQUIRE(bl_arena_create(&options, &arena) == BL_OK);
    REQUIRE(get_info(arena).node == -1);
    REQUIRE(bl_arena_take(arena, MIB) != NULL);
    bl_arena_destroy(arena);
    return 0;
}

static void test_binding(void **state)
{
    char text[TEXT_BYTES];

    (void)state;
    if (!has_two_cores()) TEST_SKIP("this needs cores 0 and 1");
    assert_child_succeeds(bind_for_real, text);
    if (strcmp(text, "node 0\n") == 0) return;
    assert_int_equal(count(text, "warning: near weights: "), 1);
    TEST_SKIP("this system does not bind memory: %s", text);
}

static void test_binding_refused(void **state)
{
    char text[TEXT_BYTES];

    (void)state;
    if (!has_two_cores()) TEST_SKIP("this needs cores 0 and 1");
    assert_child_succeeds(bind_to_one_node, text);
    assert_child_succeeds(bind_refused, text);
    assert_int_equal(
        count(text, "warning: far weights: its memory cannot be bound to NUMA node 63: "), 1);
    assert_int_equal(count(text, "\n"), 1);
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
        cmocka_unit_test(test_must_pin),
        cmocka_unit_test(test_four_nodes),
        cmocka_unit_test(test_nodes_without_cores),
        cmocka_unit_test(test_one_node),
        cmocka_unit_test(test_node_of_a_device),
        cmocka_unit_test(test_binding),
        cmocka_unit_test(test_binding_refused),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
