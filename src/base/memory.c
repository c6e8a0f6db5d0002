/* SPDX-License-Identifier: Apache-2.0 */
#include "base/memory.h"

#include <inttypes.h>
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
        if (strncmp(line, key, strlen(key)) == 0 && sscanf(line + strlen(key), "%" SCNd64, &value) == 1 &&
            bl_mul_i64_overflows(value, unit, &value))
            value = -1;
    fclose(file);
    return value;
}

/* `name` in the cgroup's folder. */
static int64_t read_cgroup(const char *folder, const char *name, const char *key)
{
    char path[3 * PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    return read_number(path, key, 1);
}

/* What is left to the cgroup itself; -1: it has no limit. */
static int64_t cgroup_left_bytes(const char *folder)
{
    int64_t limit = read_cgroup(folder, "memory.max", ""), used = read_cgroup(folder, "memory.current", "");

    if (limit < 0) return -1;
    used -= bl_max_i64(0, read_cgroup(folder, "memory.stat", "inactive_file ")) +
            bl_max_i64(0, read_cgroup(folder, "memory.stat", "active_file "));
    return bl_max_i64(0, limit - bl_max_i64(0, used));
}

/* The path of this process's cgroup below the mount point: "/a/b", or "" for the root of what it can see. */
static void read_cgroup_path(const char *root, char path[PATH_BYTES])
{
    char name[PATH_BYTES], line[PATH_BYTES];
    FILE *file;

    path[0] = '\0';
    snprintf(name, sizeof name, "%s/proc/self/cgroup", root);
    if (!(file = fopen(name, "r"))) return;
    while (fgets(line, sizeof line, file)) {
        if (strncmp(line, "0::/", 4) != 0) continue;
        line[strcspn(line, "\n")] = '\0';
        snprintf(path, PATH_BYTES, "%s", line[4] ? line + 3 : "");
    }
    fclose(file);
}

int64_t bl_memory_available_bytes_of(const char *root)
{
    char meminfo[PATH_BYTES], path[PATH_BYTES], folder[2 * PATH_BYTES];

    snprintf(meminfo, sizeof meminfo, "%s/proc/meminfo", root);
    int64_t available = read_number(meminfo, "MemAvailable:", 1024);
    read_cgroup_path(root, path);
    for (;;) {
        snprintf(folder, sizeof folder, "%s/sys/fs/cgroup%s", root, path);
        int64_t left = cgroup_left_bytes(folder);
        if (left >= 0 && (available < 0 || left < available)) available = left;
        char *last = strrchr(path, '/');
        if (!last) return available;
        *last = '\0';
    }
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
