/* SPDX-License-Identifier: Apache-2.0 */
/* ring_slots_internal.h -- which unit is in which slot of a gather ring: no memory, no streams.
 *
 * gather_ring.h has the states. */
#ifndef BALLAST_OFFLOAD_RING_SLOTS_INTERNAL_H
#define BALLAST_OFFLOAD_RING_SLOTS_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

enum { BL_SLOT_EMPTY = -1, BL_NO_SLOT = -1 };

typedef struct bl_ring_slots {
    int depth;
    int next; /* the slot to fill first: slots are taken in turn */
    int64_t
        *unit; /* [depth], the owner's: BL_SLOT_EMPTY or the unit whose gather was queued last */
} bl_ring_slots;

/* All slots EMPTY. */
void bl_ring_slots_clear(bl_ring_slots *slots);

/* The first slot that holds `unit`, or BL_NO_SLOT. A whole_ring unit is found in slot 0. */
int bl_ring_slots_find(const bl_ring_slots *slots, int64_t unit);

/* The slot that a gather would take, or BL_NO_SLOT: one that is EMPTY; with whole_ring the first of
 * all, which must be EMPTY. */
int bl_ring_slots_choose(const bl_ring_slots *slots, bool whole_ring);

/* EMPTY -> FILLED: `unit` takes `slot`, which choose gave; whole_ring all of them. Returns the last
 * slot taken. */
int bl_ring_slots_fill(bl_ring_slots *slots, int64_t unit, int slot, bool whole_ring);

#endif
