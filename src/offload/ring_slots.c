/* SPDX-License-Identifier: Apache-2.0 */
/* ring_slots.c -- which unit a slot holds: find, choose the next empty slot, fill. */
#include "offload/ring_slots_internal.h"

int bl_ring_slots_count(const bl_ring_slots *slots)
{
    return slots->n_classes * slots->depth;
}

void bl_ring_slots_clear(bl_ring_slots *slots)
{
    for (int c = 0; c < BL_SLOT_CLASSES; c++) slots->next[c] = 0;
    for (int s = 0; s < bl_ring_slots_count(slots); s++) slots->unit[s] = BL_SLOT_EMPTY;
}

int bl_ring_slots_find(const bl_ring_slots *slots, int64_t unit)
{
    for (int s = 0; s < bl_ring_slots_count(slots); s++)
        if (slots->unit[s] == unit) return s;
    return BL_NO_SLOT;
}

int bl_ring_slots_choose(const bl_ring_slots *slots, int slot_class, bool whole_ring)
{
    if (!whole_ring) {
        for (int i = 0; i < slots->depth; i++) {
            int s = slot_class * slots->depth + (slots->next[slot_class] + i) % slots->depth;
            if (slots->unit[s] == BL_SLOT_EMPTY) return s;
        }
        return BL_NO_SLOT;
    }
    for (int s = 0; s < bl_ring_slots_count(slots); s++)
        if (slots->unit[s] != BL_SLOT_EMPTY) return BL_NO_SLOT;
    return 0;
}

int bl_ring_slots_fill(bl_ring_slots *slots, int64_t unit, int slot, bool whole_ring)
{
    int last = whole_ring ? bl_ring_slots_count(slots) - 1 : slot;

    for (int s = slot; s <= last; s++) {
        slots->unit[s] = unit;
        slots->next[s / slots->depth] = (s + 1) % slots->depth;
    }
    return last;
}
