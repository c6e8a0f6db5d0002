/* SPDX-License-Identifier: Apache-2.0 */
#include "base/memory.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/sizes.h"

enum { PATH_BYTES = 4096 };

/* The number behind `key` in a file of the system's, in units of `unit`; -1 when there is none. */
static int64_t read_number(const char *path, const char *key, int64_t unit)
{
    char line[256];
    int64_t value = -1;
    FILE *file = fopen(path, "r");

    if (!file) return -1;
    while (value < 0 && fgets(line, sizeof line, file))
        if (strncmp(line, key, strlen(key)) == 0 &&
            sscanf(line + strlen(key), "%" SCNd64, &value) == 1 &&
            bl_mul_i64_overflows(value, unit, &value))
            value = -1;
    fclose(file);
    return value;
}

/* ---- cgroups ---- */

/* Where a version of them is mounted, and what its files call things. */
typedef struct cgroup_version {
    const char *mount;
    const char *controller; /* of the line in /proc/self/cgroup; version 2 has one tree for all */
    const char *limit, *used, *inactive_file, *active_file;
} cgroup_version;

static const cgroup_version versions[] = {
    {"/sys/fs/cgroup", "", "memory.max", "memory.current", "inactive_file ", "active_file "},
    {"/sys/fs/cgroup/memory", "memory", "memory.limit_in_bytes", "memory.usage_in_bytes",
     "total_inactive_file ", "total_active_file "},
};

/* `name` in the cgroup's folder. */
static int64_t read_cgroup(const char *folder, const char *name, const char *key)
{
    char path[4 * PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return read_number(path, key, 1);
}

/* What is left to the cgroup itself; -1: it has no limit. Version 1 writes "none" as almost 2^63, and knows
 * the least limit of all parents, also of those that a container does not see. */
static int64_t cgroup_left_bytes(const cgroup_version *version, const char *folder)
{
    int64_t limit = read_cgroup(folder, version->limit, ""),
            used = read_cgroup(folder, version->used, "");
    int64_t inherited = read_cgroup(folder, "memory.stat", "hierarchical_memory_limit ");

    if (inherited >= 0 && inherited < limit) limit = inherited;
    if (limit < 0 || limit > INT64_MAX / 2) return -1;
    used -= bl_max_i64(0, read_cgroup(folder, "memory.stat", version->inactive_file)) +
            bl_max_i64(0, read_cgroup(folder, "memory.stat", version->active_file));
    return bl_max_i64(0, limit - bl_max_i64(0, used));
}

/* Whether `list`, of names with commas between them, has `name`; "" is in the empty list only. */
static bool has_name(const char *list, const char *name)
{
    size_t length = strlen(name);

    for (;; list++) {
        size_t n = strcspn(list, ",");
        if (n == length && strncmp(list, name, n) == 0) return true;
        list += n;
        if (!*list) return false;
    }
}

/* The path of this process's cgroup below the mount point: "/a/b", or "" for the root of what it can see.
 * Lines are "NUMBER:CONTROLLERS:PATH". */
static void read_cgroup_path(const cgroup_version *version, const char *root, char path[PATH_BYTES])
{
    char name[PATH_BYTES], line[PATH_BYTES];
    FILE *file;

    path[0] = '\0';
    snprintf(name, sizeof name, "%s/proc/self/cgroup", root);
    if (!(file = fopen(name, "r"))) return;
    while (fgets(line, sizeof line, file)) {
        char *controllers = strchr(line, ':'),
             *below = controllers ? strchr(controllers + 1, ':') : NULL;
        line[strcspn(line, "\n")] = '\0';
        if (!below || below[1] != '/') continue;
        *below++ = '\0';
        if (has_name(controllers + 1, version->controller))
            snprintf(path, PATH_BYTES, "%s", below[1] ? below : "");
    }
    fclose(file);
}

/* The least of what is left to this process's cgroup and to its parents; -1: none has a limit. */
static int64_t cgroups_left_bytes(const cgroup_version *version, const char *root)
{
    char path[PATH_BYTES], folder[3 * PATH_BYTES];
    int64_t least = -1;

    read_cgroup_path(version, root, path);
    for (;;) {
        snprintf(folder, sizeof folder, "%s%s%s", root, version->mount, path);
        int64_t left = cgroup_left_bytes(version, folder);
        if (left >= 0 && (least < 0 || left < least)) least = left;
        char *last = strrchr(path, '/');
        if (!last) return least;
        *last = '\0';
    }
}

int64_t bl_memory_available_bytes_of(const char *root)
{
    char meminfo[PATH_BYTES];

    snprintf(meminfo, sizeof meminfo, "%s/proc/meminfo", root);
    int64_t available = read_number(meminfo, "MemAvailable:", 1024);
    for (size_t i = 0; i < BL_COUNT(versions); i++) {
        int64_t left = cgroups_left_bytes(&versions[i], root);
        if (left >= 0 && (available < 0 || left < available)) available = left;
    }
    return available;
}

int64_t bl_memory_available_bytes(void)
{
    return bl_memory_available_bytes_of("");
}

int64_t bl_memory_anonymous_bytes(void)
{
    return bl_max_i64(0, read_number("/proc/self/status", "RssAnon:", 1024));
}

int64_t bl_memory_locked_bytes(void)
{
    return bl_max_i64(0, read_number("/proc/self/status", "VmLck:", 1024));
}
