/* SPDX-License-Identifier: Apache-2.0 */
/* gather_ring.c -- queues copies and all-gathers into slots; events order them against the streams
 * that use a slot. */
#include "offload/gather_ring.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "offload/ring_slots_internal.h"

typedef struct ring_slot {
    bl_event *brought[BL_GATHER_ITEMS]; /* by the source: this rank's own shard is in place */
    bl_event *ready[BL_GATHER_ITEMS];
    bl_event *free;     /* recorded by release */
    bl_event *gathered; /* the gather stream has finished with it */
} ring_slot;

struct bl_gather_ring {
    bl_gather_ring_options options;
    int group_size, rank;
    int64_t n_units;
    bl_gather_unit *units;
    size_t slot_bytes[BL_SLOT_CLASSES];
    char *memory;
    bl_event *changed, *arrived;
    bl_ring_slots held; /* the units in the slots */
    ring_slot *slots;
    /* Of a gather that could not be queued whole: its slot must not be used. */
    bl_error error;
};

static bool is_lent(const bl_gather_item *item, int group_size)
{
    return item->is_lent && group_size == 1;
}

/* SIZE_MAX for more than there can be, here and in numbers computed from it: no allocation of that
 * size succeeds. */
static size_t unit_bytes(const bl_gather_unit *unit, int group_size)
{
    size_t end = 0;
    for (int i = 0; i < unit->n_items; i++) {
        const bl_gather_item *item = &unit->item[i];
        size_t item_end;
        if (is_lent(item, group_size)) continue;
        if (bl_mul_overflows(item->shard_bytes, (size_t)group_size, &item_end) ||
            bl_add_overflows(item_end, item->slot_offset, &item_end) ||
            item_end > INT64_MAX - BL_DEVICE_ALIGNMENT_BYTES)
            return SIZE_MAX;
        if (item_end > end) end = item_end;
    }
    return (size_t)bl_round_up((int64_t)end, BL_DEVICE_ALIGNMENT_BYTES);
}

static void measure(int64_t n_units, const bl_gather_unit *units, int group_size,
                    size_t slot_bytes[BL_SLOT_CLASSES], size_t *whole_bytes)
{
    slot_bytes[0] = slot_bytes[1] = *whole_bytes = 0;
    for (int64_t i = 0; i < n_units; i++) {
        size_t bytes = unit_bytes(&units[i], group_size);
        size_t *largest = units[i].whole_ring ? whole_bytes : &slot_bytes[units[i].is_sub];
        if (bytes > *largest) *largest = bytes;
    }
}

size_t bl_gather_ring_bytes(int depth, int64_t n_units, const bl_gather_unit *units, int group_size)
{
    size_t slot_bytes[BL_SLOT_CLASSES], both, whole_bytes, all_slots;
    measure(n_units, units, group_size, slot_bytes, &whole_bytes);
    if (bl_add_overflows(slot_bytes[0], slot_bytes[1], &both) ||
        bl_mul_overflows((size_t)depth, both, &all_slots))
        return SIZE_MAX;
    return all_slots > whole_bytes ? all_slots : whole_bytes;
}

static bl_status create_slots(bl_gather_ring *ring)
{
    bl_device *device = ring->options.device;

    for (int s = 0; s < bl_ring_slots_count(&ring->held); s++) {
        ring_slot *slot = &ring->slots[s];
        BL_TRY(bl_event_create(device, &slot->free));
        BL_TRY(bl_event_create(device, &slot->gathered));
        for (int i = 0; i < BL_GATHER_ITEMS; i++) {
            BL_TRY(bl_event_create(device, &slot->brought[i]));
            BL_TRY(bl_event_create(device, &slot->ready[i]));
        }
    }
    return BL_OK;
}

static bool has_sub_units(int64_t n_units, const bl_gather_unit *units)
{
    for (int64_t u = 0; u < n_units; u++)
        if (units[u].is_sub) return true;
    return false;
}

bl_status bl_gather_ring_create(const bl_gather_ring_options *options, int64_t n_units,
                                const bl_gather_unit *units, bl_gather_ring **out)
{
    bl_status st = BL_OK;
    size_t whole_bytes, ring_bytes;
    int depth = options->depth, n_classes = has_sub_units(n_units, units) ? BL_SLOT_CLASSES : 1;
    size_t n_slots = (size_t)n_classes * (size_t)depth;

    *out = NULL;
    bl_gather_ring *ring = calloc(1, sizeof *ring);
    if (!ring) return BL_FAIL(BL_ENOMEM, "a ring of %d slots", depth);
    *ring = (bl_gather_ring){.options = *options,
                             .group_size = 1,
                             .n_units = n_units,
                             .held = {.depth = depth, .n_classes = n_classes}};
    if (options->comm) {
        ring->group_size = bl_comm_size(options->comm);
        ring->rank = bl_comm_rank(options->comm);
    }
    ring->units = calloc((size_t)n_units, sizeof *units);
    ring->slots = calloc(n_slots, sizeof *ring->slots);
    ring->held.unit = calloc(n_slots, sizeof *ring->held.unit);
    if (!ring->units || !ring->slots || !ring->held.unit) {
        st = BL_FAIL(BL_ENOMEM, "a ring of %d slots", depth);
        goto done;
    }
    bl_ring_slots_clear(&ring->held);
    memcpy(ring->units, units, (size_t)n_units * sizeof *units);
    measure(n_units, units, ring->group_size, ring->slot_bytes, &whole_bytes);
    ring_bytes = bl_gather_ring_bytes(depth, n_units, units, ring->group_size);
    BL_TRY_GOTO(st, done,
                bl_comm_alloc(options->comm, options->device, ring_bytes, "gather ring",
                              (void **)&ring->memory));
    BL_TRY_GOTO(st, done, bl_event_create(options->device, &ring->changed));
    BL_TRY_GOTO(st, done, bl_event_create(options->device, &ring->arrived));
    BL_TRY_GOTO(st, done, create_slots(ring));
    *out = ring;
    ring = NULL;
done:
    bl_gather_ring_destroy(ring);
    return st;
}

void bl_gather_ring_destroy(bl_gather_ring *ring)
{
    if (!ring) return;
    for (int s = 0; ring->slots && s < bl_ring_slots_count(&ring->held); s++) {
        bl_event_destroy(ring->slots[s].free);
        bl_event_destroy(ring->slots[s].gathered);
        for (int i = 0; i < BL_GATHER_ITEMS; i++) {
            bl_event_destroy(ring->slots[s].brought[i]);
            bl_event_destroy(ring->slots[s].ready[i]);
        }
    }
    bl_event_destroy(ring->changed);
    bl_event_destroy(ring->arrived);
    bl_comm_free(ring->options.comm, ring->options.device, ring->memory);
    free(ring->held.unit);
    free(ring->slots);
    free(ring->units);
    free(ring);
}

/* The slot that a gather of `unit` would take, or BL_NO_SLOT. */
static int choose_slot(const bl_gather_ring *ring, int64_t unit)
{
    return bl_ring_slots_choose(&ring->held, ring->units[unit].is_sub,
                                ring->units[unit].whole_ring);
}

static char *item_memory(const bl_gather_ring *ring, int64_t unit, int item, int slot)
{
    size_t n_units = (size_t)bl_min_i64(slot, ring->held.depth), n_sub = (size_t)slot - n_units;

    return ring->memory + n_units * ring->slot_bytes[0] + n_sub * ring->slot_bytes[1] +
           ring->units[unit].item[item].slot_offset;
}

static char *own_memory(const bl_gather_ring *ring, int64_t unit, int item, int slot)
{
    return item_memory(ring, unit, item, slot) +
           (size_t)ring->rank * ring->units[unit].item[item].shard_bytes;
}

bl_status bl_gather_ring_validate(const bl_gather_ring *ring)
{
    for (int a = 0; a < bl_ring_slots_count(&ring->held); a++) {
        int64_t unit = ring->held.unit[a];
        if (unit == BL_SLOT_EMPTY) continue;
        if (unit < 0 || unit >= ring->n_units)
            return BL_FAIL(BL_EINTERNAL, "gather ring: slot %d holds unit %lld of %lld", a,
                           (long long)unit, (long long)ring->n_units);
        for (int b = 0; b < bl_ring_slots_count(&ring->held); b++)
            if (b != a && (ring->held.unit[b] == unit) != ring->units[unit].whole_ring)
                return BL_FAIL(BL_EINTERNAL, "gather ring: unit %lld in slots %d and %d",
                               (long long)unit, a, b);
    }
    return BL_OK;
}

/* After each transition of a slot; in debug builds. */
static void check_state(const bl_gather_ring *ring)
{
    assert(bl_gather_ring_validate(ring) == BL_OK);
    (void)ring;
}

/* The copy stream's part: shards that the source loads. */
static bl_status queue_source(bl_gather_ring *ring, int64_t unit, int slot)
{
    const bl_gather_unit *u = &ring->units[unit];
    const bl_gather_source *source = &ring->options.source;
    bl_stream *copy = ring->options.copy;

    for (int i = 0; i < u->n_items; i++)
        if (!u->item[i].shard)
            BL_TRY(source->start(source->user, unit, i, own_memory(ring, unit, i, slot), copy));
    for (int i = 0; i < u->n_items; i++) {
        int span;
        if (u->item[i].shard) continue;
        BL_TRY(bl_timeline_begin(ring->options.timeline, u->item[i].lane, "shard", unit, i, copy,
                                 &span));
        BL_TRY(source->finish(source->user, unit, i, own_memory(ring, unit, i, slot), copy));
        BL_TRY(
            bl_timeline_end(ring->options.timeline, span, copy, (int64_t)u->item[i].shard_bytes));
        BL_TRY(bl_event_record(ring->slots[slot].brought[i], copy));
    }
    return BL_OK;
}

static bl_status queue_item(bl_gather_ring *ring, int64_t unit, int i, int slot)
{
    const bl_gather_item *item = &ring->units[unit].item[i];
    bl_stream *stream = ring->options.stream;
    char *own = own_memory(ring, unit, i, slot);
    int span;

    if (is_lent(item, ring->group_size)) return BL_OK;
    if (!item->shard) BL_TRY(bl_stream_wait(stream, ring->slots[slot].brought[i]));
    BL_TRY(bl_timeline_begin(ring->options.timeline, ring->options.lane, "gather", unit, i, stream,
                             &span));
    if (item->shard) BL_TRY(bl_stream_copy(stream, own, item->shard, item->shard_bytes));
    if (ring->options.comm)
        BL_TRY(bl_comm_all_gather(ring->options.comm, stream, own, item_memory(ring, unit, i, slot),
                                  item->shard_bytes));
    BL_TRY(bl_timeline_end(ring->options.timeline, span, stream,
                           (int64_t)item->shard_bytes * (ring->group_size - 1)));
    return bl_event_record(ring->slots[slot].ready[i], stream);
}

static bl_status queue_unit(bl_gather_ring *ring, int64_t unit, int slot)
{
    const bl_gather_unit *u = &ring->units[unit];
    bl_stream *stream = ring->options.stream, *copy = ring->options.copy;
    int last = bl_ring_slots_fill(&ring->held, unit, slot, u->whole_ring);

    for (int s = slot; s <= last;
         s++) { /* invariant 3; the gather stream is behind its own gathers anyway */
        BL_TRY(bl_stream_wait(stream, ring->slots[s].free));
        if (copy) BL_TRY(bl_stream_wait(copy, ring->slots[s].free));
        if (copy) BL_TRY(bl_stream_wait(copy, ring->slots[s].gathered));
    }
    if (copy) BL_TRY(queue_source(ring, unit, slot));
    if (ring->options.comm) bl_comm_set_label(ring->options.comm, u->what, u->index);
    for (int i = 0; i < u->n_items; i++) BL_TRY(queue_item(ring, unit, i, slot));
    if (ring->options.comm) bl_comm_set_label(ring->options.comm, NULL, 0);
    for (int s = slot; s <= last; s++)
        BL_TRY(bl_event_record(ring->slots[s].gathered, stream)); /* invariant 2 */
    return BL_OK;
}

static bl_status queue_gather(bl_gather_ring *ring, int64_t unit, int slot)
{
    bl_status st = queue_unit(ring, unit, slot);
    if (st != BL_OK) bl_error_save(&ring->error, st);
    check_state(ring);
    return st;
}

bl_status bl_gather_ring_prefetch(bl_gather_ring *ring, int64_t unit)
{
    if (ring->error.status != BL_OK) return bl_error_restore(&ring->error);
    if (ring->options.is_synchronous || bl_ring_slots_find(&ring->held, unit) >= 0) return BL_OK;
    int slot = choose_slot(ring, unit);
    return slot < 0 ? BL_OK : queue_gather(ring, unit, slot);
}

/* First for the own shard, then for the others': so each lane is charged with its own part of a
 * stall. */
static bl_status wait_for_item(bl_gather_ring *ring, int64_t unit, int i, int slot,
                               bl_stream *stream)
{
    const bl_gather_item *item = &ring->units[unit].item[i];
    bl_timeline *timeline = ring->options.timeline;

    if (is_lent(item, ring->group_size)) return BL_OK;
    if (!item->shard)
        BL_TRY(bl_timeline_wait(timeline, item->lane, "wait", unit, i, stream,
                                ring->slots[slot].brought[i]));
    return bl_timeline_wait(timeline, ring->options.lane, "wait", unit, i, stream,
                            ring->slots[slot].ready[i]);
}

/* Loads start after the work queued on `stream`, and the stream waits for all of them. */
static bl_status gather_synchronously(bl_gather_ring *ring, int64_t unit, int slot,
                                      bl_stream *stream)
{
    BL_TRY(bl_event_record(ring->arrived, stream));
    BL_TRY(bl_stream_wait(ring->options.stream, ring->arrived));
    if (ring->options.copy) BL_TRY(bl_stream_wait(ring->options.copy, ring->arrived));
    BL_TRY(queue_gather(ring, unit, slot));
    for (int i = 0; i < ring->units[unit].n_items; i++)
        BL_TRY(wait_for_item(ring, unit, i, slot, stream));
    return BL_OK;
}

bl_status bl_gather_ring_acquire(bl_gather_ring *ring, int64_t unit, int item, bl_stream *stream,
                                 const void **out)
{
    const bl_gather_item *wanted = &ring->units[unit].item[item];
    int slot = bl_ring_slots_find(&ring->held, unit);

    if (ring->error.status != BL_OK) return bl_error_restore(&ring->error);
    BL_TRY(bl_stream_status(ring->options.stream));
    if (ring->options.copy) BL_TRY(bl_stream_status(ring->options.copy));
    if (slot < 0) {
        slot = choose_slot(ring, unit);
        if (slot < 0)
            return BL_FAIL(BL_EINTERNAL, "gather ring: no free slot for unit %lld (depth %d)",
                           (long long)unit, ring->options.depth);
        if (ring->options.is_synchronous)
            BL_TRY(gather_synchronously(ring, unit, slot, stream));
        else
            BL_TRY(queue_gather(ring, unit, slot));
    }
    BL_TRY(wait_for_item(ring, unit, item, slot, stream));
    *out = is_lent(wanted, ring->group_size) ? wanted->shard : item_memory(ring, unit, item, slot);
    return BL_OK;
}

bl_status bl_gather_ring_release(bl_gather_ring *ring, int64_t unit, bl_stream *stream)
{
    for (int s = 0; s < bl_ring_slots_count(&ring->held); s++) {
        if (ring->held.unit[s] != unit) continue;
        BL_TRY(bl_event_record(ring->slots[s].free, stream)); /* invariant 2 */
        ring->held.unit[s] = BL_SLOT_EMPTY;
    }
    check_state(ring);
    return BL_OK;
}

bl_status bl_gather_ring_shards_changed(bl_gather_ring *ring, bl_stream *stream)
{
    BL_TRY(bl_event_record(ring->changed, stream));
    if (ring->options.copy) BL_TRY(bl_stream_wait(ring->options.copy, ring->changed));
    return bl_stream_wait(ring->options.stream, ring->changed);
}

void *bl_gather_ring_memory(const bl_gather_ring *ring)
{
    return ring->memory;
}
