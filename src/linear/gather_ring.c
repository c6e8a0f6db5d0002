/* SPDX-License-Identifier: Apache-2.0 */
#include "linear/gather_ring.h"

#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"

enum { EMPTY = -1 };

typedef struct ring_slot {
    int64_t unit; /* EMPTY or the unit whose gather was queued last */
    bl_event *ready[BL_GATHER_ITEMS];
    bl_event *free; /* recorded by release */
} ring_slot;

struct bl_gather_ring {
    bl_device *device;
    bl_comm *comm;
    bl_stream *stream;
    int depth, next; /* `next` is the slot to fill first: slots are taken in turn */
    int64_t n_units;
    bl_gather_unit *units;
    size_t slot_bytes;
    char *memory;
    bl_event *changed;
    ring_slot *slots;
};

/* SIZE_MAX for more than there can be, here and in what is made of it: no allocation of that size succeeds. */
static size_t unit_bytes(const bl_gather_unit *unit, int group_size)
{
    size_t end = 0;
    for (int i = 0; i < unit->n_items; i++) {
        const bl_gather_item *item = &unit->item[i];
        size_t item_end;
        if (bl_mul_overflows(item->shard_bytes, (size_t)group_size, &item_end) ||
            bl_add_overflows(item_end, item->slot_offset, &item_end) || item_end > INT64_MAX - BL_DEVICE_ALIGNMENT_BYTES)
            return SIZE_MAX;
        if (item_end > end) end = item_end;
    }
    return (size_t)bl_round_up((int64_t)end, BL_DEVICE_ALIGNMENT_BYTES);
}

static void measure(int64_t n_units, const bl_gather_unit *units, int group_size, size_t *slot_bytes, size_t *whole_bytes)
{
    *slot_bytes = *whole_bytes = 0;
    for (int64_t i = 0; i < n_units; i++) {
        size_t bytes = unit_bytes(&units[i], group_size);
        size_t *largest = units[i].whole_ring ? whole_bytes : slot_bytes;
        if (bytes > *largest) *largest = bytes;
    }
}

size_t bl_gather_ring_bytes(int depth, int64_t n_units, const bl_gather_unit *units, int group_size)
{
    size_t slot_bytes, whole_bytes, all_slots;
    measure(n_units, units, group_size, &slot_bytes, &whole_bytes);
    if (bl_mul_overflows((size_t)depth, slot_bytes, &all_slots)) return SIZE_MAX;
    return all_slots > whole_bytes ? all_slots : whole_bytes;
}

bl_status bl_gather_ring_create(bl_device *device, bl_comm *comm, bl_stream *stream, int depth, int64_t n_units,
                                const bl_gather_unit *units, bl_gather_ring **out)
{
    bl_status st = BL_OK;
    size_t whole_bytes;

    *out = NULL;
    bl_gather_ring *ring = calloc(1, sizeof *ring);
    if (!ring) return BL_FAIL(BL_ENOMEM, "a ring of %d slots", depth);
    *ring = (bl_gather_ring){.device = device, .comm = comm, .stream = stream, .depth = depth, .n_units = n_units};
    ring->units = calloc((size_t)n_units, sizeof *units);
    ring->slots = calloc((size_t)depth, sizeof *ring->slots);
    if (!ring->units || !ring->slots) {
        st = BL_FAIL(BL_ENOMEM, "a ring of %d slots", depth);
        goto done;
    }
    memcpy(ring->units, units, (size_t)n_units * sizeof *units);
    measure(n_units, units, bl_comm_size(comm), &ring->slot_bytes, &whole_bytes);
    BL_TRY_GOTO(st, done,
                bl_device_alloc(device, BL_SPACE_DEVICE,
                                bl_gather_ring_bytes(depth, n_units, units, bl_comm_size(comm)), "gather ring",
                                (void **)&ring->memory));
    BL_TRY_GOTO(st, done, bl_event_create(device, &ring->changed));
    for (int s = 0; s < depth; s++) {
        ring->slots[s].unit = EMPTY;
        BL_TRY_GOTO(st, done, bl_event_create(device, &ring->slots[s].free));
        for (int i = 0; i < BL_GATHER_ITEMS; i++) BL_TRY_GOTO(st, done, bl_event_create(device, &ring->slots[s].ready[i]));
    }
    *out = ring;
    ring = NULL;
done:
    bl_gather_ring_destroy(ring);
    return st;
}

void bl_gather_ring_destroy(bl_gather_ring *ring)
{
    if (!ring) return;
    for (int s = 0; ring->slots && s < ring->depth; s++) {
        bl_event_destroy(ring->slots[s].free);
        for (int i = 0; i < BL_GATHER_ITEMS; i++) bl_event_destroy(ring->slots[s].ready[i]);
    }
    bl_event_destroy(ring->changed);
    bl_device_free(ring->device, BL_SPACE_DEVICE, ring->memory);
    free(ring->slots);
    free(ring->units);
    free(ring);
}

/* The first slot that holds `unit`, or -1. A whole_ring unit is found in slot 0. */
static int find_slot(const bl_gather_ring *ring, int64_t unit)
{
    for (int s = 0; s < ring->depth; s++)
        if (ring->slots[s].unit == unit) return s;
    return -1;
}

/* The slot that a gather of `unit` would take, or -1. */
static int choose_slot(const bl_gather_ring *ring, int64_t unit)
{
    if (!ring->units[unit].whole_ring) {
        for (int i = 0; i < ring->depth; i++) {
            int s = (ring->next + i) % ring->depth;
            if (ring->slots[s].unit == EMPTY) return s;
        }
        return -1;
    }
    for (int s = 0; s < ring->depth; s++)
        if (ring->slots[s].unit != EMPTY) return -1;
    return 0;
}

static bl_status queue_gather(bl_gather_ring *ring, int64_t unit, int slot)
{
    const bl_gather_unit *u = &ring->units[unit];
    int last = u->whole_ring ? ring->depth - 1 : slot;

    for (int s = slot; s <= last; s++) {
        BL_TRY(bl_stream_wait(ring->stream, ring->slots[s].free)); /* invariant 3 */
        ring->slots[s].unit = unit;
    }
    ring->next = (last + 1) % ring->depth;
    for (int i = 0; i < u->n_items; i++) {
        const bl_gather_item *item = &u->item[i];
        char *whole = ring->memory + (size_t)slot * ring->slot_bytes + item->slot_offset;
        char *own = whole + (size_t)bl_comm_rank(ring->comm) * item->shard_bytes;
        BL_TRY(bl_stream_copy(ring->stream, own, item->shard, item->shard_bytes));
        BL_TRY(bl_comm_all_gather(ring->comm, ring->stream, own, whole, item->shard_bytes));
        BL_TRY(bl_event_record(ring->slots[slot].ready[i], ring->stream));
    }
    return BL_OK;
}

bl_status bl_gather_ring_prefetch(bl_gather_ring *ring, int64_t unit)
{
    if (find_slot(ring, unit) >= 0) return BL_OK;
    int slot = choose_slot(ring, unit);
    return slot < 0 ? BL_OK : queue_gather(ring, unit, slot);
}

bl_status bl_gather_ring_acquire(bl_gather_ring *ring, int64_t unit, int item, bl_stream *stream, const void **out)
{
    int slot = find_slot(ring, unit);
    if (slot < 0) {
        slot = choose_slot(ring, unit);
        if (slot < 0)
            return BL_FAIL(BL_EINTERNAL, "gather ring: no free slot for unit %lld (depth %d)", (long long)unit, ring->depth);
        BL_TRY(queue_gather(ring, unit, slot));
    }
    BL_TRY(bl_stream_wait(stream, ring->slots[slot].ready[item]));
    *out = ring->memory + (size_t)slot * ring->slot_bytes + ring->units[unit].item[item].slot_offset;
    return BL_OK;
}

bl_status bl_gather_ring_release(bl_gather_ring *ring, int64_t unit, bl_stream *stream)
{
    for (int s = 0; s < ring->depth; s++) {
        if (ring->slots[s].unit != unit) continue;
        BL_TRY(bl_event_record(ring->slots[s].free, stream)); /* invariant 2 */
        ring->slots[s].unit = EMPTY;
    }
    return BL_OK;
}

bl_status bl_gather_ring_shards_changed(bl_gather_ring *ring, bl_stream *stream)
{
    BL_TRY(bl_event_record(ring->changed, stream));
    return bl_stream_wait(ring->stream, ring->changed);
}

bl_status bl_gather_ring_validate(const bl_gather_ring *ring)
{
    for (int a = 0; a < ring->depth; a++) {
        int64_t unit = ring->slots[a].unit;
        if (unit == EMPTY) continue;
        if (unit < 0 || unit >= ring->n_units)
            return BL_FAIL(BL_EINTERNAL, "gather ring: slot %d holds unit %lld of %lld", a, (long long)unit, (long long)ring->n_units);
        for (int b = 0; b < ring->depth; b++)
            if (b != a && (ring->slots[b].unit == unit) != ring->units[unit].whole_ring)
                return BL_FAIL(BL_EINTERNAL, "gather ring: unit %lld in slots %d and %d", (long long)unit, a, b);
    }
    return BL_OK;
}
