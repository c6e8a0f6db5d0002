/* SPDX-License-Identifier: Apache-2.0 */
/* arena.h -- one block of host memory for everything a rank keeps outside its device: exact in
 * size, near the rank, pinned, touched in parallel before the first step.
 *
 * Ask for the bytes first and allocate once: pieces are taken from the front and live as long as
 * the arena. Memory comes from mmap in whole pages (no rounding to powers of two), with huge pages
 * where the system grants them (MADV_HUGEPAGE), preferably of a NUMA node (hwloc), touched by the
 * threads of the pool, then pinned by the device (bl_device_pin). Where pinning is refused
 * (RLIMIT_MEMLOCK) the arena works unpinned: one warning names the limit and the need. */
#ifndef BALLAST_OFFLOAD_ARENA_H
#define BALLAST_OFFLOAD_ARENA_H

#include <stdbool.h>

#include "device/device.h"

#ifdef __cplusplus
extern "C" {
#endif

typedef struct bl_arena bl_arena;

typedef struct bl_arena_options {
    bl_device *device; /* borrowed as long as the arena lives */
    size_t size_bytes; /* of all that will be taken: the sum of bl_arena_piece_bytes */
    const char *what;  /* in messages: "offloaded weights of rank 3" */
    /* NUMA node; -1: that of the calling thread's cores, or none when they belong to several */
    int node;
    /* Lock it, and register it with the GPU. Where that fails: BL_ELIMIT on a GPU, a warning on the
     * CPU. */
    bool pin;
} bl_arena_options;

/* BL_ENOMEM names `what`, the requested and the available bytes; that is checked before a page is
 * touched, but without other arenas that are being made at the same time: plan first. BL_EUSAGE: no
 * such node. */
bl_status bl_arena_create(const bl_arena_options *options, bl_arena **out);
void bl_arena_destroy(bl_arena *arena); /* NULL is fine */

/* What a piece takes of the arena: n_bytes rounded up to BL_DEVICE_ALIGNMENT_BYTES. SIZE_MAX on
 * overflow. */
size_t bl_arena_piece_bytes(size_t n_bytes);
/* The next piece, zero-filled, aligned to BL_DEVICE_ALIGNMENT_BYTES. NULL when more is taken than
 * was asked for. Bytes from n_bytes up to bl_arena_piece_bytes are unused: AddressSanitizer reports
 * an access. */
void *bl_arena_take(bl_arena *arena, size_t n_bytes);

/* Where the block came from, as the system says afterwards. */
typedef struct bl_arena_info {
    size_t size_bytes, taken_bytes,
        huge_bytes; /* huge_bytes: in huge pages (AnonHugePages of smaps) */
    int node;       /* bound to; -1: none, as on a host with one node */
    bool is_pinned;
} bl_arena_info;
void bl_arena_get_info(const bl_arena *arena, bl_arena_info *out);
void *bl_arena_memory(const bl_arena *arena); /* the whole block */

/* NUMA nodes are those that have cores, in hwloc's logical order, from 0 on.
 *
 * The node of rank `index` of `n` ranks of this host: ranks are dealt out to the nodes in order,
 * evenly. -1 when there are more nodes than ranks (a rank then has cores of several), when the
 * calling thread may not run on all of them (taskset, mpirun's binding, an earlier bind_thread: it
 * stays where it was put), or the host does not say. */
int bl_arena_node_of(int index, int n);
/* The node next to a device of the PCI bus ("0000:1b:00.0"). -1: the host does not say, or says
 * several; or it has one node. */
int bl_arena_node_of_pci(const char *bus_id);
/* Keeps the calling thread, and threads it starts from now on, on those of its cores that are the
 * node's. Does nothing for -1, for a node that has none of its cores, and on a host with one node;
 * a refusal by the system is logged. BL_EUSAGE: no such node. */
bl_status bl_arena_bind_thread(int node);

#ifdef __cplusplus
}
#endif

#endif
