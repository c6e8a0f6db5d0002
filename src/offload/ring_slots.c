/* SPDX-License-Identifier: Apache-2.0 */
/* ring_slots.c -- which unit a slot holds: find, choose the next empty slot, fill. */
#include "offload/ring_slots_internal.h"

void bl_ring_slots_clear(bl_ring_slots *slots)
{
    slots->next = 0;
    for (int s = 0; s < slots->depth; s++) slots->unit[s] = BL_SLOT_EMPTY;
}

int bl_ring_slots_find(const bl_ring_slots *slots, int64_t unit)
{
    for (int s = 0; s < slots->depth; s++)
        if (slots->unit[s] == unit) return s;
    return BL_NO_SLOT;
}

int bl_ring_slots_choose(const bl_ring_slots *slots, bool whole_ring)
{
    if (!whole_ring) {
        for (int i = 0; i < slots->depth; i++) {
            int s = (slots->next + i) % slots->depth;
            if (slots->unit[s] == BL_SLOT_EMPTY) return s;
        }
        return BL_NO_SLOT;
    }
    for (int s = 0; s < slots->depth; s++)
        if (slots->unit[s] != BL_SLOT_EMPTY) return BL_NO_SLOT;
    return 0;
}

int bl_ring_slots_fill(bl_ring_slots *slots, int64_t unit, int slot, bool whole_ring)
{
    int last = whole_ring ? slots->depth - 1 : slot;

    for (int s = slot; s <= last; s++) slots->unit[s] = unit;
    slots->next = (last + 1) % slots->depth;
    return last;
}
