/* SPDX-License-Identifier: Apache-2.0 */
/* How much memory and CPU time there is to take, of systems made of a few files. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <cmocka.h>

#include <sched.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "base/cores.h"
#include "base/files.h"
#include "base/memory.h"
#include "base/sizes.h"

static char root[] = "/tmp/ballast-available-XXXXXX";

static int set_up(void **state)
{
    (void)state;
    return mkdtemp(root) ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    return bl_tree_remove(root) == BL_OK ? 0 : -1;
}

static void clear(void)
{
    char path[256];
    snprintf(path, sizeof path, "%s/proc", root);
    assert_int_equal(bl_tree_remove(path), BL_OK);
    snprintf(path, sizeof path, "%s/sys", root);
    assert_int_equal(bl_tree_remove(path), BL_OK);
}

static void put(const char *name, const char *text)
{
    char path[256];
    snprintf(path, sizeof path, "%s/%s", root, name);
    char *slash = strrchr(path, '/');
    *slash = '\0';
    assert_int_equal(bl_dir_create(path), BL_OK);
    *slash = '/';
    assert_int_equal(bl_file_write_atomic(path, text, strlen(text)), BL_OK);
}

static const char MEMINFO[] =
    "MemTotal:       2000 kB\nMemFree:   10 kB\nMemAvailable:    1000 kB\n";

static void test_meminfo(void **state)
{
    (void)state;
    clear();
    assert_int_equal(bl_memory_available_bytes_of(root), -1);
    put("proc/meminfo", MEMINFO);
    assert_int_equal(bl_memory_available_bytes_of(root), 1000 * 1024);
    put("proc/meminfo", "MemTotal: 2000 kB\nMemAvailable: 9223372036854775807 kB\n");
    assert_int_equal(bl_memory_available_bytes_of(root), -1);
}

/* The root of a cgroup namespace, as a container sees its own. */
static void test_container(void **state)
{
    (void)state;
    clear();
    put("proc/meminfo", MEMINFO);
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/memory.max", "max\n");
    put("sys/fs/cgroup/memory.current", "400000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 1000 * 1024);
    put("sys/fs/cgroup/memory.max", "700000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 300000);
    /* Cached files make room for memory. */
    put("sys/fs/cgroup/memory.stat", "anon 150000\nfile 250000\ninactive_anon 70000\nactive_anon "
                                     "80000\ninactive_file 20000\nactive_file 5000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 325000);
    put("sys/fs/cgroup/memory.current", "800000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 0);
    /* More than the machine has. */
    put("sys/fs/cgroup/memory.max", "999999999999\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 1000 * 1024);
    put("proc/meminfo", "");
    assert_int_equal(bl_memory_available_bytes_of(root), 999999999999 - 775000);
}

/* The limits of all parents hold as well, whichever is the nearest. */
static void test_nested(void **state)
{
    (void)state;
    clear();
    put("proc/meminfo", MEMINFO);
    put("proc/self/cgroup", "9:name=systemd:/other\n4:memory:/other\n0::/job/step\n");
    put("sys/fs/cgroup/job/step/memory.max", "max\n");
    put("sys/fs/cgroup/job/step/memory.current", "1000\n");
    put("sys/fs/cgroup/job/memory.max", "50000\n");
    put("sys/fs/cgroup/job/memory.current", "3000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 47000);
    put("sys/fs/cgroup/job/step/memory.max", "40000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 39000);
    put("sys/fs/cgroup/memory.max", "30000\n"); /* no memory.current here */
    assert_int_equal(bl_memory_available_bytes_of(root), 30000);
    put("proc/self/cgroup", "9:name=systemd:/job/step\n"); /* version 1 only */
    assert_int_equal(bl_memory_available_bytes_of(root), 30000);
}

/* Version 1: a tree of memory's own, where no limit is a large number. */
static void test_version_1(void **state)
{
    (void)state;
    clear();
    put("proc/meminfo", MEMINFO);
    put("proc/self/cgroup",
        "9:name=systemd:/\n8:cpu,cpuacct:/elsewhere\n4:hugetlb,memory:/job/step\n0::/\n");
    put("sys/fs/cgroup/memory/job/step/memory.limit_in_bytes", "9223372036854771712\n");
    put("sys/fs/cgroup/memory/job/step/memory.usage_in_bytes", "400000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 1000 * 1024);
    put("sys/fs/cgroup/memory/job/step/memory.limit_in_bytes", "700000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 300000);
    /* Cached files make room for memory; those of children count as well. */
    put("sys/fs/cgroup/memory/job/step/memory.stat",
        "cache 1\ninactive_file 7\nactive_file 7\nhierarchical_memory_limit "
        "9223372036854771712\ntotal_inactive_file 20000\ntotal_active_file 5000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 325000);
    put("sys/fs/cgroup/memory/job/step/memory.stat",
        "hierarchical_memory_limit 600000\n"); /* of a parent out of sight */
    assert_int_equal(bl_memory_available_bytes_of(root), 200000);
    put("sys/fs/cgroup/memory/job/memory.limit_in_bytes", "500000\n");
    put("sys/fs/cgroup/memory/job/memory.usage_in_bytes", "450000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 50000);
    put("proc/self/cgroup",
        "8:cpuset:/job\n5:memory_other:/job\n"); /* of other controllers: the root's counts */
    assert_int_equal(bl_memory_available_bytes_of(root), 1000 * 1024);
    put("sys/fs/cgroup/memory/memory.limit_in_bytes", "30000\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 30000);
    /* A container without a separate cgroup namespace reads the host's path, which it does not
     * see. */
    put("proc/self/cgroup", "4:memory:/docker/0123\n");
    assert_int_equal(bl_memory_available_bytes_of(root), 30000);
    put("sys/fs/cgroup/memory.max", "20000\n"); /* both versions at once: the least counts */
    assert_int_equal(bl_memory_available_bytes_of(root), 20000);
}

/* This system: memory taken is counted, to within a quarter, since other processes run. */
static void test_this_process(void **state)
{
    enum { BYTES = 64 << 20, LOCKED_BYTES = 1 << 16 };

    (void)state;
    assert_true(bl_memory_available_bytes() > 0);
    int64_t anonymous = bl_memory_anonymous_bytes(), locked = bl_memory_locked_bytes();
    char *memory = mmap(NULL, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    assert_true(memory != MAP_FAILED);
    memset(memory, 1, BYTES);
    assert_true(bl_memory_anonymous_bytes() - anonymous > BYTES / 4 * 3);
    munmap(memory, BYTES);
    /* AddressSanitizer's and ThreadSanitizer's mlock does nothing. */
    if (locked == 0 && mlock(root, sizeof root) == 0 && bl_memory_locked_bytes() > 0)
        assert_in_range(bl_memory_locked_bytes(), sizeof root, LOCKED_BYTES * 2);
    munlock(root, sizeof root);
}

/* The root of a cgroup namespace, as a container sees its own. */
static void test_quota_of_container(void **state)
{
    (void)state;
    clear();
    assert_int_equal(bl_cores_quota_of(root), -1);
    put("proc/self/cgroup", "0::/\n");
    put("sys/fs/cgroup/cpu.max", "max 100000\n");
    assert_int_equal(bl_cores_quota_of(root), -1);
    put("sys/fs/cgroup/cpu.max", "400000 100000\n"); /* docker run --cpus=4 */
    assert_int_equal(bl_cores_quota_of(root), 4);
    put("sys/fs/cgroup/cpu.max", "400001 100000\n");
    assert_int_equal(bl_cores_quota_of(root), 5);
    put("sys/fs/cgroup/cpu.max", "10000 100000\n"); /* a tenth of a core */
    assert_int_equal(bl_cores_quota_of(root), 1);
    put("sys/fs/cgroup/cpu.max", "9223372036854775807 1\n");
    assert_int_equal(bl_cores_quota_of(root), INT64_MAX);
    static const char *const bad[] = {"", "\n", "400000\n", "0 100000\n", "400000 0\n", "-1 -1\n"};
    for (size_t i = 0; i < BL_COUNT(bad); i++) {
        put("sys/fs/cgroup/cpu.max", bad[i]);
        assert_int_equal(bl_cores_quota_of(root), -1);
    }
}

/* The quotas of all parents hold as well, whichever is the nearest: a pod's and its container's. */
static void test_nested_quotas(void **state)
{
    (void)state;
    clear();
    put("proc/self/cgroup", "3:cpuset:/other\n0::/pod/container\n");
    put("sys/fs/cgroup/pod/container/cpu.max", "max 100000\n");
    put("sys/fs/cgroup/pod/cpu.max", "600000 100000\n");
    put("sys/fs/cgroup/other/cpu.max", "100000 100000\n");
    assert_int_equal(bl_cores_quota_of(root), 6);
    put("sys/fs/cgroup/pod/container/cpu.max", "150000 50000\n");
    assert_int_equal(bl_cores_quota_of(root), 3);
    put("sys/fs/cgroup/cpu.max", "200000 100000\n");
    assert_int_equal(bl_cores_quota_of(root), 2);
}

/* Version 1: a tree of the CPU's own, where no quota is -1. */
static void test_quota_of_version_1(void **state)
{
    (void)state;
    clear();
    put("proc/self/cgroup", "8:cpu,cpuacct:/pod/container\n4:memory:/elsewhere\n0::/\n");
    put("sys/fs/cgroup/cpu/pod/container/cpu.cfs_quota_us", "-1\n");
    put("sys/fs/cgroup/cpu/pod/container/cpu.cfs_period_us", "100000\n");
    assert_int_equal(bl_cores_quota_of(root), -1);
    put("sys/fs/cgroup/cpu/pod/cpu.cfs_quota_us", "750000\n");
    assert_int_equal(bl_cores_quota_of(root), -1); /* of no known period */
    put("sys/fs/cgroup/cpu/pod/cpu.cfs_period_us", "100000\n");
    assert_int_equal(bl_cores_quota_of(root), 8);
    put("sys/fs/cgroup/cpu/pod/container/cpu.cfs_quota_us", "400000\n");
    assert_int_equal(bl_cores_quota_of(root), 4);
    /* A container without a separate cgroup namespace reads the host's path, which it does not
     * see. */
    put("proc/self/cgroup", "4:cpuacct,cpu:/docker/0123\n");
    assert_int_equal(bl_cores_quota_of(root), -1);
    put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us", "300000\n");
    put("sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us", "100000\n");
    assert_int_equal(bl_cores_quota_of(root), 3);
    put("sys/fs/cgroup/cpu.max", "200000 100000\n"); /* both versions at once: the least counts */
    assert_int_equal(bl_cores_quota_of(root), 2);
}

static void test_cores_of_this_process(void **state)
{
    cpu_set_t set;
    int64_t quota = bl_cores_quota();

    (void)state;
    assert_int_equal(sched_getaffinity(0, sizeof set, &set), 0);
    assert_int_equal(bl_cores_bound(), CPU_COUNT(&set));
    assert_true(quota == -1 || quota >= 1);
    assert_int_equal(bl_cores_usable(),
                     quota < 0 ? CPU_COUNT(&set) : bl_min_i64(quota, CPU_COUNT(&set)));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_meminfo),
        cmocka_unit_test(test_container),
        cmocka_unit_test(test_nested),
        cmocka_unit_test(test_version_1),
        cmocka_unit_test(test_this_process),
        cmocka_unit_test(test_quota_of_container),
        cmocka_unit_test(test_nested_quotas),
        cmocka_unit_test(test_quota_of_version_1),
        cmocka_unit_test(test_cores_of_this_process),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
