/* SPDX-License-Identifier: Apache-2.0 */
/* cores.c -- usable cores: the least of the affinity and the CPU quotas of all enclosing cgroups.
 * Quotas: Documentation/scheduler/sched-bwc.rst of the kernel. */
#include "base/cores.h"

#include <inttypes.h>
#include <sched.h>
#include <stdio.h>
#include <string.h>

#include "base/cgroup_internal.h"
#include "base/sizes.h"
#include "base/thread.h"

int64_t bl_cores_bound(void)
{
    cpu_set_t set;
    return sched_getaffinity(0, sizeof set, &set) == 0 ? CPU_COUNT(&set) : 1;
}

/* The kernel takes the cores that a cgroup does not have out of a set that is asked for. */
static void *count_allowed(void *n)
{
    cpu_set_t all;

    memset(&all, 0xFF, sizeof all);
    if (sched_setaffinity(0, sizeof all, &all) == 0) *(int64_t *)n = bl_cores_bound();
    return NULL;
}

int64_t bl_cores_allowed(void)
{
    int64_t n = bl_cores_bound();
    pthread_t thread;

    if (bl_thread_create(&thread, count_allowed, &n) == 0) pthread_join(thread, NULL);
    return n;
}

int64_t bl_cores_of_process(pid_t process)
{
    cpu_set_t set;
    return sched_getaffinity(process, sizeof set, &set) == 0 ? CPU_COUNT(&set) : -1;
}

static int64_t cores_of(int64_t quota_us, int64_t period_us)
{
    if (quota_us <= 0 || period_us <= 0) return -1;
    return (quota_us - 1) / period_us + 1;
}

/* cpu.max: "QUOTA PERIOD", or "max PERIOD". */
static int64_t quota_of_v2(const char *directory, const void *context)
{
    char path[4 * BASE_CGROUP_PATH_BYTES];
    int64_t quota_us, period_us;

    (void)context;
    snprintf(path, sizeof path, "%s/cpu.max", directory);
    FILE *file = fopen(path, "r");
    if (!file) return -1;
    int n = fscanf(file, "%" SCNd64 " %" SCNd64, &quota_us, &period_us);
    fclose(file);
    return n == 2 ? cores_of(quota_us, period_us) : -1;
}

/* Without a limit the quota is -1. */
static int64_t quota_of_v1(const char *directory, const void *context)
{
    (void)context;
    return cores_of(base_cgroup_read(directory, "cpu.cfs_quota_us", ""),
                    base_cgroup_read(directory, "cpu.cfs_period_us", ""));
}

int64_t bl_cores_quota_of(const char *root)
{
    static const struct {
        base_cgroup_tree tree;
        base_cgroup_limit_fn quota;
    } versions[] = {
        {{"/sys/fs/cgroup", ""}, quota_of_v2},
        {{"/sys/fs/cgroup/cpu", "cpu"}, quota_of_v1},
        {{"/sys/fs/cgroup/cpu,cpuacct", "cpu"}, quota_of_v1}, /* where the link cpu is missing */
    };
    int64_t least = -1;

    for (size_t i = 0; i < BL_COUNT(versions); i++) {
        int64_t n = base_cgroup_least(&versions[i].tree, root, versions[i].quota, NULL);
        if (n >= 0 && (least < 0 || n < least)) least = n;
    }
    return least;
}

int64_t bl_cores_quota(void)
{
    return bl_cores_quota_of("");
}

int64_t bl_cores_usable(void)
{
    int64_t n = bl_cores_bound(), quota = bl_cores_quota();
    return quota >= 0 ? bl_min_i64(n, quota) : n;
}

void bl_processor_name(char name[BL_PROCESSOR_NAME_BYTES])
{
    static const char label[] = "model name\t: ";
    char line[1024];
    FILE *file = fopen("/proc/cpuinfo", "re");

    name[0] = '\0';
    while (file && name[0] == '\0' && fgets(line, sizeof line, file))
        if (strncmp(line, label, strlen(label)) == 0)
            snprintf(name, BL_PROCESSOR_NAME_BYTES, "%.*s",
                     (int)strcspn(line + strlen(label), "\n"), line + strlen(label));
    if (file) fclose(file);
}
