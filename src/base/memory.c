/* SPDX-License-Identifier: Apache-2.0 */
/* memory.c -- available memory: the least of /proc/meminfo and the limits of all enclosing cgroups
 * (versions 1 and 2). */
#include "base/memory.h"

#include <stdio.h>
#include <string.h>
#include <unistd.h>

#include "base/cgroup_internal.h"
#include "base/sizes.h"

/* A version of cgroups, and the names in its files. */
typedef struct cgroup_version {
    base_cgroup_tree tree;
    const char *limit, *used, *inactive_file, *active_file;
} cgroup_version;

static const cgroup_version versions[] = {
    {{"/sys/fs/cgroup", ""}, "memory.max", "memory.current", "inactive_file ", "active_file "},
    {{"/sys/fs/cgroup/memory", "memory"},
     "memory.limit_in_bytes",
     "memory.usage_in_bytes",
     "total_inactive_file ",
     "total_active_file "},
};

/* What is left to the cgroup itself; -1: it has no limit. Version 1 writes "none" as almost 2^63,
 * and knows the least limit of all parents, also of those that a container does not see. */
static int64_t cgroup_left_bytes(const char *folder, const void *context)
{
    const cgroup_version *version = context;
    int64_t limit = base_cgroup_read(folder, version->limit, ""),
            used = base_cgroup_read(folder, version->used, "");
    int64_t inherited = base_cgroup_read(folder, "memory.stat", "hierarchical_memory_limit ");

    if (inherited >= 0 && inherited < limit) limit = inherited;
    if (limit < 0 || limit > INT64_MAX / 2) return -1;
    used -= bl_max_i64(0, base_cgroup_read(folder, "memory.stat", version->inactive_file)) +
            bl_max_i64(0, base_cgroup_read(folder, "memory.stat", version->active_file));
    return bl_max_i64(0, limit - bl_max_i64(0, used));
}

int64_t bl_memory_available_bytes_of(const char *root)
{
    char meminfo[BASE_CGROUP_PATH_BYTES];

    snprintf(meminfo, sizeof meminfo, "%s/proc/meminfo", root);
    int64_t available = base_read_number(meminfo, "MemAvailable:", 1024);
    for (size_t i = 0; i < BL_COUNT(versions); i++) {
        int64_t left = base_cgroup_least(&versions[i].tree, root, cgroup_left_bytes, &versions[i]);
        if (left >= 0 && (available < 0 || left < available)) available = left;
    }
    return available;
}

int64_t bl_memory_available_bytes(void)
{
    return bl_memory_available_bytes_of("");
}

int64_t bl_memory_touched_page_bytes(void)
{
    enum { HUGE_PAGE_BYTES = 2 << 20 };
    char text[64] = "";
    FILE *file = fopen("/sys/kernel/mm/transparent_hugepage/enabled", "re");

    if (file) {
        if (!fgets(text, sizeof text, file)) text[0] = '\0';
        fclose(file);
    }
    bool grants = strstr(text, "[always]") || strstr(text, "[madvise]");
    return grants ? HUGE_PAGE_BYTES : (int64_t)sysconf(_SC_PAGESIZE);
}

int64_t bl_memory_anonymous_bytes(void)
{
    return bl_max_i64(0, base_read_number("/proc/self/status", "RssAnon:", 1024));
}

int64_t bl_memory_locked_bytes(void)
{
    return bl_max_i64(0, base_read_number("/proc/self/status", "VmLck:", 1024));
}
