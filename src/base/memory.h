/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h -- what the system says about memory: how much a process may still take, and what it
 * holds. */
#ifndef BALLAST_BASE_MEMORY_H
#define BALLAST_BASE_MEMORY_H

#include <stdint.h>

/* What this process may still take before the system would kill someone: the least of MemAvailable
 * and of what is left to its cgroup and to each of that one's parents (cgroup v2: memory.max less
 * memory.current; v1: memory.limit_in_bytes, or hierarchical_memory_limit where that is less, less
 * memory.usage_in_bytes; cached files count as free). -1: unknown. */
int64_t bl_memory_available_bytes(void);

/* The same of a system whose /proc and /sys lie below `root`, for tests; "" is this one. */
int64_t bl_memory_available_bytes_of(const char *root);

/* In which large allocations take memory when they are touched: 2 MiB where the system grants huge
 * pages to who asks, else the page size. */
int64_t bl_memory_touched_page_bytes(void);

/* RssAnon and VmLck of this process: anonymous memory that is resident, and memory locked by mlock.
 * 0 where the system does not tell. */
int64_t bl_memory_anonymous_bytes(void);
int64_t bl_memory_locked_bytes(void);

#endif
