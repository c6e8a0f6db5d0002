/* SPDX-License-Identifier: Apache-2.0 */
/* The arena on hosts with several NUMA nodes, which hwloc makes up from HWLOC_SYNTHETIC. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <sched.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "arena_case.h"
#include "skip.h"

/* A process keeps the first topology that it loads: each of these hosts has its own child. */

static bool are_nodes(int n, const int *nodes)
{
    for (int i = 0; i < n; i++)
        if (bl_arena_node_of(i, n) != nodes[i]) return false;
    return true;
}

static bool is_bound(bl_device *device, int node, int expected)
{
    bl_arena *arena;
    bl_arena_options options = {.device = device, .size_bytes = MIB, .what = "w", .node = node};

    if (bl_arena_create(&options, &arena) != BL_OK) return false;
    int found = get_info(arena).node;
    bl_arena_destroy(arena);
    return found == expected;
}

static bool is_no_node(bl_device *device, int node, const char *text)
{
    bl_arena *arena;
    bl_arena_options options = {.device = device, .size_bytes = MIB, .what = "w", .node = node};

    return bl_arena_create(&options, &arena) == BL_EUSAGE && !arena &&
           strcmp(bl_error_text(), text) == 0 && bl_arena_bind_thread(node) == BL_EUSAGE &&
           strcmp(bl_error_text(), text) == 0;
}

static int four_nodes(bl_device *device)
{
    setenv("HWLOC_SYNTHETIC", "node:4 core:2 pu:1", 1);
    REQUIRE(are_nodes(8, (const int[]){0, 0, 1, 1, 2, 2, 3, 3}));
    REQUIRE(are_nodes(6, (const int[]){0, 0, 1, 2, 2, 3}));
    REQUIRE(are_nodes(4, (const int[]){0, 1, 2, 3}));
    REQUIRE(are_nodes(3, (const int[]){-1, -1, -1}));
    REQUIRE(are_nodes(1, (const int[]){-1}));
    for (int node = 0; node < 4; node++) {
        REQUIRE(is_bound(device, node, node));
        REQUIRE(bl_arena_bind_thread(node) == BL_OK);
    }
    REQUIRE(is_bound(device, -1, -1)); /* this thread may run on the cores of all */
    REQUIRE(bl_arena_bind_thread(-1) == BL_OK);
    REQUIRE(is_no_node(device, 4, "NUMA node 4: this host has 4 with cores"));
    return 0;
}

/* Two kinds of memory beside the cores of each package. */
static int nodes_without_cores(bl_device *device)
{
    setenv("HWLOC_SYNTHETIC", "pack:2 [numa][numa] core:2 pu:1", 1);
    REQUIRE(are_nodes(2, (const int[]){0, 1}));
    REQUIRE(is_bound(device, 1, 1));
    REQUIRE(is_no_node(device, 2, "NUMA node 2: this host has 2 with cores"));
    return 0;
}

static int one_node(bl_device *device)
{
    setenv("HWLOC_SYNTHETIC", "node:1 core:8 pu:1", 1);
    REQUIRE(are_nodes(3, (const int[]){0, 0, 0}));
    REQUIRE(is_bound(device, 0, -1));
    REQUIRE(is_bound(device, -1, -1));
    REQUIRE(is_no_node(device, 1, "NUMA node 1: this host has 1 with cores"));
    return 0;
}

static void test_hosts(void **state)
{
    char text[TEXT_BYTES];

    (void)state;
    assert_child_succeeds(four_nodes, text);
    assert_child_succeeds(nodes_without_cores, text);
    assert_child_succeeds(one_node, text);
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

/* Two cores declared as two nodes, which hwloc takes for this machine's. Of the nodes with memory
 * only the first need exist. */
static int bind_for_real(bl_device *device)
{
    bl_arena *arena;
    bl_arena_options options = {
        .device = device, .size_bytes = MIB, .what = "near weights", .node = -1};

    setenv("HWLOC_SYNTHETIC", "node:2 core:1 pu:1", 1);
    setenv("HWLOC_THISSYSTEM", "1", 1);
    REQUIRE(bl_arena_node_of(1, 2) == 1);
    REQUIRE(bl_arena_bind_thread(0) == BL_OK);
    REQUIRE(bl_arena_node_of(1, 2) == -1); /* a thread's binding to cores is kept */
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
        cmocka_unit_test(test_hosts),
        cmocka_unit_test(test_node_of_a_device),
        cmocka_unit_test(test_binding),
        cmocka_unit_test(test_binding_refused),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
