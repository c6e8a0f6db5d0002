/* SPDX-License-Identifier: Apache-2.0 */
/* gather_ring.h -- row-shards that are all-gathered into a fixed ring of slots just before they are needed.
 *
 * A unit (a decoder layer, the head, a layer's LoRA weights) is a list of items; of each item every rank of the group owns one
 * shard of equal size. A gather copies the rank's own shard into its place in a slot and completes it with an in-place
 * all-gather on the ring's stream; an acquire makes another stream wait for exactly that item. The base that is sharded
 * (base_sharded.c) and the LoRA weights (train/) are both kept this way.
 *
 * All ranks of the group call prefetch, acquire and release in the same order: whether a call starts a gather depends on the
 * calls before it alone, so the collectives match without any talk between ranks.
 *
 *   slot state   unit    entered by                               left by
 *   EMPTY        -1      create, release                          prefetch, or acquire of a unit not in the ring
 *   FILLED       >= 0    a gather has been queued                 release
 *
 * Invariants (bl_gather_ring_validate): (1) a unit is in at most one slot, or in all of them when it is `whole_ring`;
 * (2) an EMPTY slot's `free` event covers every use of its memory; (3) a gather into a slot waits for that event. */
#ifndef BALLAST_LINEAR_GATHER_RING_H
#define BALLAST_LINEAR_GATHER_RING_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "comm/comm.h"
#include "device/device.h"

enum { BL_GATHER_ITEMS = 12 };

typedef struct bl_gather_item {
    const void *shard;  /* this rank's part, device memory, borrowed until the ring is destroyed */
    size_t shard_bytes; /* the same on every rank */
    size_t slot_offset; /* the gathered item is group size * shard_bytes at this offset of the slot */
} bl_gather_item;

typedef struct bl_gather_unit {
    int n_items;
    bool whole_ring; /* larger than a slot: lies at the start of the ring and needs all slots */
    bl_gather_item item[BL_GATHER_ITEMS];
} bl_gather_unit;

typedef struct bl_gather_ring bl_gather_ring;

/* units[n_units] is copied. The ring takes max(depth * slot bytes, the largest whole_ring unit) of device memory, where slot bytes
 * is the largest other unit. comm and stream are borrowed; the stream carries the gathers. depth >= 1. */
bl_status bl_gather_ring_create(bl_device *device, bl_comm *comm, bl_stream *stream, int depth, int64_t n_units,
                                const bl_gather_unit *units, bl_gather_ring **out);
void bl_gather_ring_destroy(bl_gather_ring *ring); /* after both streams are idle; NULL is fine */

/* Queues the gather of `unit` if it is not in the ring and a slot is EMPTY; else does nothing. */
bl_status bl_gather_ring_prefetch(bl_gather_ring *ring, int64_t unit);

/* *out = item `item` of `unit`, gathered: valid for tasks queued on `stream` after this call until the unit is released. Gathers it
 * now if it was not prefetched. BL_EINTERNAL when no slot is EMPTY: somebody did not release. */
bl_status bl_gather_ring_acquire(bl_gather_ring *ring, int64_t unit, int item, bl_stream *stream, const void **out);

/* The unit's slot may be overwritten once the tasks queued on `stream` so far have run. No-op if the unit is not in the ring. */
bl_status bl_gather_ring_release(bl_gather_ring *ring, int64_t unit, bl_stream *stream);

/* Makes later gathers wait for the tasks queued on `stream` so far: call it after work that changes the shards. */
bl_status bl_gather_ring_shards_changed(bl_gather_ring *ring, bl_stream *stream);

/* What create takes; SIZE_MAX when that is more than a size_t can count. */
size_t bl_gather_ring_bytes(int depth, int64_t n_units, const bl_gather_unit *units, int group_size);
bl_status bl_gather_ring_validate(const bl_gather_ring *ring);

#endif
