/* SPDX-License-Identifier: Apache-2.0 */
/* arena_internal.h -- binds the memory of an arena to a NUMA node; for arena.c. */
#ifndef BALLAST_OFFLOAD_ARENA_INTERNAL_H
#define BALLAST_OFFLOAD_ARENA_INTERNAL_H

#include "base/status.h"

#include <stddef.h>

/* Before the first touch: prefers the node for these pages; a full node spills over instead of
 * ending the process. `node` as in bl_arena_options. *bound is the node, or -1: the host has only
 * one, the thread's cores belong to several, or the system refused (logged with `what`). BL_EUSAGE:
 * the host has no such node. */
bl_status bl_arena_bind_memory(void *memory, size_t size_bytes, int node, const char *what,
                               int *bound);

#endif
