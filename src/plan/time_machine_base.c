/* SPDX-License-Identifier: Apache-2.0 */
/* time_machine_base.c -- the base on simulated streams: what ring/gather_ring.c and offload/pager.c
 * queue to bring a unit into a slot. */
#include <stdlib.h>

#include "plan/time_machine_internal.h"

/* ---- rings ---- */

static machine_slot_events no_events(void)
{
    machine_slot_events e = {.free = BL_SIM_NOTHING, .gathered = BL_SIM_NOTHING};
    for (int i = 0; i < MACHINE_ITEMS; i++) e.brought[i] = e.ready[i] = BL_SIM_NOTHING;
    return e;
}

bl_status plan_machine_create_ring(machine_ring *ring, int depth)
{
    ring->held =
        (bl_ring_slots){.depth = depth, .unit = calloc((size_t)depth, sizeof *ring->held.unit)};
    ring->events = calloc((size_t)depth, sizeof *ring->events);
    if (!ring->held.unit || !ring->events) return BL_FAIL(BL_ENOMEM, "a ring of %d slots", depth);
    bl_ring_slots_clear(&ring->held);
    for (int s = 0; s < depth; s++) ring->events[s] = no_events();
    return BL_OK;
}

void plan_machine_free_ring(machine_ring *ring)
{
    free(ring->held.unit);
    free(ring->events);
}

void plan_machine_release(machine *m, machine_ring *ring, int64_t unit)
{
    for (int s = 0; s < ring->held.depth; s++) {
        if (ring->held.unit[s] != unit) continue;
        ring->events[s].free = bl_simulation_event(m->sim, PLAN_COMPUTE);
        ring->held.unit[s] = BL_SLOT_EMPTY;
    }
}

/* ---- a unit ---- */

static int n_items(const machine *m, int64_t unit)
{
    return machine_is_table(m, unit) ? 1 : MACHINE_ITEMS;
}

static const plan_item *item_of(const machine *m, int64_t unit, int item)
{
    const plan_amounts *base = machine_base(m);
    return machine_is_table(m, unit) ? &base->head_item : &machine_layer(m, base, unit)->item[item];
}

static bl_tier tier_of(const machine *m, int64_t unit, int item)
{
    return m->pass->tiers[unit * MACHINE_ITEMS + item];
}

static bool is_lent(const machine *m, int64_t unit, int item)
{
    return m->in->n_shards == 1 && tier_of(m, unit, item) == BL_TIER_DEVICE;
}

static bl_lane lane_of(const machine *m, int64_t unit, int item)
{
    return tier_of(m, unit, item) == BL_TIER_DISK ? BL_LANE_DISK : BL_LANE_COPY;
}

/* The reader takes all of a unit's reads when the copy stream has come to it. */
static bl_status queue_source(machine *m, int64_t unit, machine_slot_events *events)
{
    int read[MACHINE_ITEMS];
    int submitted = bl_simulation_event(m->sim, PLAN_COPY);

    for (int i = 0; i < n_items(m, unit); i++) {
        if (tier_of(m, unit, i) != BL_TIER_DISK) continue;
        BL_TRY(plan_machine_wait(m, PLAN_READER, submitted));
        BL_TRY(plan_machine_work(m, PLAN_READER, BL_LANE_DISK, &item_of(m, unit, i)->read));
        read[i] = bl_simulation_last(m->sim);
    }
    for (int i = 0; i < n_items(m, unit); i++) {
        const plan_item *item = item_of(m, unit, i);
        if (tier_of(m, unit, i) == BL_TIER_DEVICE) continue;
        BL_TRY(plan_machine_span(m, PLAN_COPY, lane_of(m, unit, i), "shard", unit, i,
                                 item->shard_bytes, NULL));
        int span = bl_simulation_last(m->sim);
        bool is_read = tier_of(m, unit, i) == BL_TIER_DISK;
        if (is_read) BL_TRY(plan_machine_wait(m, PLAN_COPY, read[i]));
        BL_TRY(plan_machine_work(m, PLAN_COPY, BL_LANE_COPY,
                                 is_read ? &item->copy_read : &item->copy));
        m->sim->ops[span].span_end = events->brought[i] = bl_simulation_last(m->sim);
    }
    return BL_OK;
}

static bl_status queue_item(machine *m, int64_t unit, int i, machine_slot_events *events)
{
    const plan_item *item = item_of(m, unit, i);
    bool is_resident = tier_of(m, unit, i) == BL_TIER_DEVICE;

    if (is_lent(m, unit, i)) return BL_OK;
    if (!is_resident) BL_TRY(plan_machine_wait(m, PLAN_GATHER, events->brought[i]));
    BL_TRY(plan_machine_span(m, PLAN_GATHER, BL_LANE_GATHER, "gather", unit, i,
                             item->shard_bytes * (m->in->n_shards - 1),
                             is_resident ? &item->gather_resident : &item->gather));
    events->ready[i] = bl_simulation_last(m->sim);
    return BL_OK;
}

static bl_status queue_unit(machine *m, int64_t unit, int slot)
{
    machine_ring *ring = &m->base;
    int last = bl_ring_slots_fill(&ring->held, unit, slot, machine_is_table(m, unit));

    if (m->is_before) {
        ring->events[slot] = no_events();
        return BL_OK;
    }
    for (int s = slot; s <= last; s++) {
        BL_TRY(plan_machine_wait(m, PLAN_GATHER, ring->events[s].free));
        BL_TRY(plan_machine_wait(m, PLAN_COPY, ring->events[s].free));
        BL_TRY(plan_machine_wait(m, PLAN_COPY, ring->events[s].gathered));
    }
    BL_TRY(queue_source(m, unit, &ring->events[slot]));
    for (int i = 0; i < n_items(m, unit); i++) BL_TRY(queue_item(m, unit, i, &ring->events[slot]));
    for (int s = slot; s <= last; s++)
        ring->events[s].gathered = bl_simulation_event(m->sim, PLAN_GATHER);
    return BL_OK;
}

bl_status plan_machine_prefetch_base(machine *m, int64_t unit)
{
    bl_ring_slots *held = &m->base.held;

    if (m->in->habits.is_synchronous || bl_ring_slots_find(held, unit) != BL_NO_SLOT) return BL_OK;
    int slot = bl_ring_slots_choose(held, machine_is_table(m, unit));
    return slot == BL_NO_SLOT ? BL_OK : queue_unit(m, unit, slot);
}

static bl_status wait_for_item(machine *m, int64_t unit, int i, const machine_slot_events *events)
{
    if (is_lent(m, unit, i)) return BL_OK;
    if (tier_of(m, unit, i) != BL_TIER_DEVICE)
        BL_TRY(plan_machine_stall(m, lane_of(m, unit, i), events->brought[i], unit, i));
    return plan_machine_stall(m, BL_LANE_GATHER, events->ready[i], unit, i);
}

static bl_status gather_synchronously(machine *m, int64_t unit, int slot)
{
    int arrived = bl_simulation_event(m->sim, PLAN_COMPUTE);

    BL_TRY(plan_machine_wait(m, PLAN_GATHER, arrived));
    BL_TRY(plan_machine_wait(m, PLAN_COPY, arrived));
    BL_TRY(queue_unit(m, unit, slot));
    for (int i = 0; i < n_items(m, unit); i++)
        BL_TRY(wait_for_item(m, unit, i, &m->base.events[slot]));
    return BL_OK;
}

bl_status plan_machine_acquire_base(machine *m, int64_t unit, int item)
{
    int slot = bl_ring_slots_find(&m->base.held, unit);

    if (slot == BL_NO_SLOT) {
        slot = bl_ring_slots_choose(&m->base.held, machine_is_table(m, unit));
        if (slot == BL_NO_SLOT)
            return BL_FAIL(BL_EINTERNAL, "prediction: no slot for unit %lld", (long long)unit);
        BL_TRY(m->in->habits.is_synchronous ? gather_synchronously(m, unit, slot)
                                            : queue_unit(m, unit, slot));
    }
    return wait_for_item(m, unit, item, &m->base.events[slot]);
}
