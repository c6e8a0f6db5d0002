/* SPDX-License-Identifier: Apache-2.0 */
/* ring_slots_internal.h -- which unit is in which slot of a gather ring: no memory, no streams.
 *
 * gather_ring.h has the states. */
#ifndef BALLAST_OFFLOAD_RING_SLOTS_INTERNAL_H
#define BALLAST_OFFLOAD_RING_SLOTS_INTERNAL_H

#include <stdbool.h>
#include <stdint.h>

enum {
    BL_SLOT_EMPTY = -1,
    BL_NO_SLOT = -1,
    BL_SLOT_CLASSES = 2 /* of units, and of sub-units: neither waits for the other's slots */
};

typedef struct bl_ring_slots {
    int depth;     /* slots of a class: class c has [c depth, (c + 1) depth) */
    int n_classes; /* 1: there are no sub-units */
    int next
        [BL_SLOT_CLASSES]; /* of a class' slots, the one to fill first: they are taken in turn */
    /* [n_classes depth], the owner's: BL_SLOT_EMPTY or the unit whose gather was queued last. */
    int64_t *unit;
} bl_ring_slots;

int bl_ring_slots_count(const bl_ring_slots *slots);

/* All slots EMPTY. */
void bl_ring_slots_clear(bl_ring_slots *slots);

/* The first slot that holds `unit`, or BL_NO_SLOT. A whole_ring unit is found in slot 0. */
int bl_ring_slots_find(const bl_ring_slots *slots, int64_t unit);

/* The slot that a gather would take, or BL_NO_SLOT: one of the class that is EMPTY; with whole_ring
 * the first of all, which must be EMPTY. */
int bl_ring_slots_choose(const bl_ring_slots *slots, int slot_class, bool whole_ring);

/* EMPTY -> FILLED: `unit` takes `slot`, which choose gave; whole_ring all of them. Returns the last
 * slot taken. */
int bl_ring_slots_fill(bl_ring_slots *slots, int64_t unit, int slot, bool whole_ring);

#endif
