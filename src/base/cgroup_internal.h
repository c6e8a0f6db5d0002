/* SPDX-License-Identifier: Apache-2.0 */
/* cgroup_internal.h -- the walk from this process's cgroup to the root, for limits of memory and of
 * CPU time. For base/ only. */
#ifndef BALLAST_BASE_CGROUP_INTERNAL_H
#define BALLAST_BASE_CGROUP_INTERNAL_H

#include <stdint.h>

enum { BASE_CGROUP_PATH_BYTES = 4096 };

/* Where a controller's cgroups are mounted, and its name in /proc/self/cgroup; "": version 2, one
 * tree for all controllers. */
typedef struct base_cgroup_tree {
    const char *mount, *controller;
} base_cgroup_tree;

/* What one cgroup allows, of the files in its directory; -1: no limit. */
typedef int64_t (*base_cgroup_limit_fn)(const char *directory, const void *context);

/* The least limit of this process's cgroup and its parents, as far as this process sees them; -1:
 * none has one. /proc and /sys are those below `root`; "" is this system. */
int64_t base_cgroup_least(const base_cgroup_tree *tree, const char *root,
                          base_cgroup_limit_fn limit, const void *context);

/* The first integer behind `key` at the start of a line of directory/name; "" is the first line.
 * -1: there is none. */
int64_t base_cgroup_read(const char *directory, const char *name, const char *key);

/* The integer behind `key` at the start of a line of the file, times unit; -1: there is none, or it
 * overflows. */
int64_t base_read_number(const char *path, const char *key, int64_t unit);

#endif
