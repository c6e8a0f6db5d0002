/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h -- memory as the system reports it: how much a process may still allocate, and how much
 * it holds. */
#ifndef BALLAST_BASE_MEMORY_H
#define BALLAST_BASE_MEMORY_H

#include <stdint.h>

/* Bytes that this process may still allocate before the system would kill a process: the least of
 * MemAvailable and of the rest of its cgroup's limit and of each parent cgroup's (cgroup v2:
 * memory.max less memory.current; v1: memory.limit_in_bytes, or hierarchical_memory_limit where it
 * is less, less memory.usage_in_bytes; cached files count as free). -1: unknown. */
int64_t bl_memory_available_bytes(void);

/* As above with /proc and /sys below the directory `root`, for tests; "" is this system. */
int64_t bl_memory_available_bytes_of(const char *root);

/* Unit of memory that a large allocation takes when touched: 2 MiB where the system grants huge
 * pages on request, else the page size. */
int64_t bl_memory_touched_page_bytes(void);

/* RssAnon and VmLck of this process: anonymous memory that is resident, and memory locked by mlock.
 * 0 where the system does not tell. */
int64_t bl_memory_anonymous_bytes(void);
int64_t bl_memory_locked_bytes(void);

#endif
