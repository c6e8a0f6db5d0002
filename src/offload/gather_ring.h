/* SPDX-License-Identifier: Apache-2.0 */
/* gather_ring.h -- row-shards that are all-gathered into a fixed ring of slots just before they are
 * needed.
 *
 * A unit (a decoder layer, the head, a layer's LoRA weights) is a list of items; of each item every
 * rank of the group owns one shard of equal size. A gather moves the rank's own shard to its place
 * in a slot and completes it with an in-place all-gather on the ring's stream; an acquire makes
 * another stream wait for exactly that item. Shards in device memory are copied on the gather
 * stream; others are loaded by a source (offload/pager.h) on a separate copy stream, so that the
 * next unit is loaded while this one is gathered. The base (linear/base_paged.c) and LoRA weights
 * (trained/state.h) have a ring each.
 *
 * All ranks of the group call prefetch, acquire and release in the same order: whether a call
 * starts a gather depends on the calls before it alone, so the collectives match without extra
 * communication.
 *
 * Sub-units (groups of a layer's experts) have slots apart from those of units, as many and sized
 * for the largest of them: a unit stays in its slot while its sub-units use theirs.
 *
 *   slot state   unit    entered by                               left by
 *   EMPTY        -1      create, release                          prefetch, or acquire of a unit
 *                                                                 not in the ring
 *   FILLED       >= 0    a gather has been queued                 release
 *
 * Invariants (bl_gather_ring_validate): (1) a unit is in at most one slot, or in all of them when
 * it is `whole_ring`; (2) an EMPTY slot's `free` event covers every use of its memory after an
 * acquire, its `gathered` event every gather into it, also of items that were never acquired; (3)
 * every write into a slot waits for both. */
#ifndef BALLAST_OFFLOAD_GATHER_RING_H
#define BALLAST_OFFLOAD_GATHER_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/comm.h"
#include "device/device.h"
#include "device/timeline.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Most items of a unit: codes and scales of every segment of every matrix. */
enum { BL_GATHER_ITEMS = 36 };

typedef struct bl_gather_item {
    /* This rank's part, device memory, borrowed until the ring is destroyed; NULL: the source loads
     * it. */
    const void *shard;
    size_t shard_bytes; /* the same on every rank */
    /* The gathered item is group size * shard_bytes at this offset of the slot. */
    size_t slot_offset;
    bl_lane lane; /* of the source's tasks */
    /* In a group of one: acquire gives `shard` (not NULL) itself, nothing is copied, no slot
     * memory is used. */
    bool is_lent;
} bl_gather_item;

typedef struct bl_gather_unit {
    /* For errors, as in bl_comm_set_label: {"layer", 17}. The string is borrowed. */
    const char *what;
    int64_t index;
    int n_items;
    bool whole_ring; /* larger than a slot: starts at the ring's start and needs all slots */
    bool is_sub;     /* takes a slot of sub-units */
    bl_gather_item item[BL_GATHER_ITEMS];
} bl_gather_unit;

/* Loads shards that are not in device memory. Both functions queue work on `copy` that fills dst
 * (shard_bytes of device memory, which is free from then on) and return: start for every such item
 * of a unit, then finish for each, in the same order. What finish has queued ends when dst is
 * filled. A failure of that work becomes the stream's. */
typedef struct bl_gather_source {
    void *user;
    bl_status (*start)(void *user, int64_t unit, int item, void *dst, bl_stream *copy);
    bl_status (*finish)(void *user, int64_t unit, int item, void *dst, bl_stream *copy);
} bl_gather_source;

typedef struct bl_gather_ring_options {
    bl_device *device;
    bl_comm *comm;           /* borrowed; NULL: a group of one */
    bl_stream *stream;       /* carries the gathers; borrowed */
    bl_stream *copy;         /* carries the source's work; borrowed; NULL without a source */
    bl_gather_source source; /* for items without a shard */
    int depth;               /* slots of units, and of sub-units, >= 1 */
    /* For comparisons: acquire loads the whole unit, without overlap. */
    bool is_synchronous;
    bl_timeline *timeline; /* borrowed; NULL: none */
    bl_lane lane;          /* of the gathers, on the timeline */
} bl_gather_ring_options;

typedef struct bl_gather_ring bl_gather_ring;

/* units[n_units] is copied. The ring takes max(depth * slot bytes, the largest whole_ring unit) of
 * device memory, where slot bytes is the largest other unit and the largest sub-unit together. */
bl_status bl_gather_ring_create(const bl_gather_ring_options *options, int64_t n_units,
                                const bl_gather_unit *units, bl_gather_ring **out);
void bl_gather_ring_destroy(bl_gather_ring *ring); /* after all streams are idle; NULL is fine */

/* Queues the gather of `unit` if it is not in the ring and a slot is EMPTY; else does nothing. */
BL_API bl_status bl_gather_ring_prefetch(bl_gather_ring *ring, int64_t unit);

/* *out = item `item` of `unit`, gathered: valid for tasks queued on `stream` after this call until
 * the unit is released. Gathers it now if it was not prefetched. BL_EINTERNAL when no slot is
 * EMPTY: all slots are in use. When the gather or copy stream has failed by now, its error; a later
 * failure reaches `stream`. */
BL_API bl_status bl_gather_ring_acquire(bl_gather_ring *ring, int64_t unit, int item,
                                        bl_stream *stream, const void **out);

/* The unit's slot may be overwritten once the tasks queued on `stream` so far have run. No-op if
 * the unit is not in the ring. */
BL_API bl_status bl_gather_ring_release(bl_gather_ring *ring, int64_t unit, bl_stream *stream);

/* Makes later gathers, and the source's work for them, wait for the tasks queued on `stream` so
 * far: call it after work that changes the shards. */
bl_status bl_gather_ring_shards_changed(bl_gather_ring *ring, bl_stream *stream);

/* The ring's memory, of bl_gather_ring_bytes, for registration with the kernel. */
void *bl_gather_ring_memory(const bl_gather_ring *ring);

/* What create takes; SIZE_MAX when that is more than a size_t can count. */
size_t bl_gather_ring_bytes(int depth, int64_t n_units, const bl_gather_unit *units,
                            int group_size);
bl_status bl_gather_ring_validate(const bl_gather_ring *ring);

#ifdef __cplusplus
}
#endif

#endif
