/* SPDX-License-Identifier: Apache-2.0 */
/* cgroup.c -- reads limits from the files of this process's cgroup and of those above it. Files:
 * cgroups(7); Documentation/admin-guide/cgroup-v2.rst and cgroup-v1/ of the kernel. */
#include "base/cgroup_internal.h"

#include <inttypes.h>
#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/sizes.h"

enum { PATH_BYTES = BASE_CGROUP_PATH_BYTES };

int64_t base_read_number(const char *path, const char *key, int64_t unit)
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

int64_t base_cgroup_read(const char *directory, const char *name, const char *key)
{
    char path[4 * PATH_BYTES];
    snprintf(path, sizeof path, "%s/%s", directory, name);
    return base_read_number(path, key, 1);
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

/* The path of this process's cgroup below the mount point: "/a/b", or "" for the root of what it
 * can see. Lines are "NUMBER:CONTROLLERS:PATH". */
static void read_path(const char *controller, const char *root, char path[PATH_BYTES])
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
        if (has_name(controllers + 1, controller))
            snprintf(path, PATH_BYTES, "%s", below[1] ? below : "");
    }
    fclose(file);
}

int64_t base_cgroup_least(const base_cgroup_tree *tree, const char *root,
                          base_cgroup_limit_fn limit, const void *context)
{
    char path[PATH_BYTES], directory[3 * PATH_BYTES];
    int64_t least = -1;

    read_path(tree->controller, root, path);
    for (;;) {
        snprintf(directory, sizeof directory, "%s%s%s", root, tree->mount, path);
        int64_t value = limit(directory, context);
        if (value >= 0 && (least < 0 || value < least)) least = value;
        char *last = strrchr(path, '/');
        if (!last) return least;
        *last = '\0';
    }
}
