/* SPDX-License-Identifier: Apache-2.0 */
/* time_machine_adapters.c -- trainable weights on simulated streams: LoRA's rings, one for each
 * adapter of the pass, and gradients, LoRA's as in adapter/state.c and all weights' as in
 * adapter/full.c. */
#include <stdlib.h>

#include "plan/time_machine_internal.h"

/* ---- create ---- */

static machine_turns no_turns(void)
{
    return (machine_turns){.turn = 0, .reduced = {BL_SIM_NOTHING, BL_SIM_NOTHING}};
}

/* NULL: the base alone. */
static machine_adapter *find_adapter(machine *m, const plan_micro *micro)
{
    for (int a = 0; a < m->n_adapters; a++)
        if (m->adapters[a].number == micro->adapter) return &m->adapters[a];
    return NULL;
}

bl_status plan_machine_create_adapters(machine *m)
{
    const bl_schedule *s = &m->pass->schedule;

    m->weights = no_turns();
    m->adapters = calloc((size_t)s->n_micro, sizeof *m->adapters);
    if (!m->adapters) return BL_FAIL(BL_ENOMEM, "out of memory: time of a plan");
    for (int i = 0; i < s->n_micro; i++) {
        const plan_micro *micro = &m->pass->micro[i];
        if (micro->adapter == PLAN_NO_ADAPTER || find_adapter(m, micro)) continue;
        machine_adapter *a = &m->adapters[m->n_adapters++];
        *a = (machine_adapter){
            .number = micro->adapter, .amounts = micro->amounts, .gradients = no_turns()};
        BL_TRY(plan_machine_create_ring(&a->ring, s->ring_depth));
    }
    return BL_OK;
}

void plan_machine_free_adapters(machine *m)
{
    for (int a = 0; a < m->n_adapters; a++) plan_machine_free_ring(&m->adapters[a].ring);
    free(m->adapters);
}

/* ---- LoRA's rings ---- */

static bl_status prefetch(machine *m, machine_adapter *a, int64_t layer)
{
    machine_ring *ring = &a->ring;

    if (bl_ring_slots_find(&ring->held, layer) != BL_NO_SLOT) return BL_OK;
    int slot = bl_ring_slots_choose(&ring->held, false);
    if (slot == BL_NO_SLOT) return BL_OK;
    bl_ring_slots_fill(&ring->held, layer, slot, false);
    machine_slot_events *events = &ring->events[slot];
    BL_TRY(plan_machine_wait(m, PLAN_LORA, events->free));
    BL_TRY(plan_machine_span(m, PLAN_LORA, BL_LANE_LORA, "gather", layer, 0,
                             a->amounts->lora_gather_bytes, &a->amounts->lora_gather));
    events->ready[0] = bl_simulation_last(m->sim);
    return BL_OK;
}

bl_status plan_machine_prefetch_lora(machine *m, int64_t layer)
{
    for (int a = 0; a < m->n_adapters; a++) BL_TRY(prefetch(m, &m->adapters[a], layer));
    return BL_OK;
}

static bl_status acquire(machine *m, machine_adapter *a, int64_t layer)
{
    BL_TRY(prefetch(m, a, layer));
    int slot = bl_ring_slots_find(&a->ring.held, layer);
    if (slot == BL_NO_SLOT)
        return BL_FAIL(BL_EINTERNAL, "prediction: no slot for LoRA of layer %lld",
                       (long long)layer);
    return plan_machine_stall(m, BL_LANE_LORA, a->ring.events[slot].ready[0], layer, 0);
}

bl_status plan_machine_acquire_lora(machine *m, int64_t layer)
{
    for (int a = 0; a < m->n_adapters; a++) BL_TRY(acquire(m, &m->adapters[a], layer));
    return BL_OK;
}

void plan_machine_release_lora(machine *m, int64_t layer)
{
    for (int a = 0; a < m->n_adapters; a++) plan_machine_release(m, &m->adapters[a].ring, layer);
}

/* ---- gradients of LoRA ---- */

/* Reduced over all ranks and added to the shard. */
static bl_status queue_lora_gradients(machine *m, machine_adapter *adapter, int64_t layer)
{
    const plan_amounts *a = adapter->amounts;
    machine_turns *turns = &adapter->gradients;

    BL_TRY(plan_machine_wait(m, PLAN_LORA, bl_simulation_event(m->sim, PLAN_COMPUTE)));
    BL_TRY(plan_machine_span(m, PLAN_LORA, BL_LANE_LORA, "gradients", layer, -1,
                             a->lora_reduce_bytes, NULL));
    int span = bl_simulation_last(m->sim);
    BL_TRY(plan_machine_work(m, PLAN_LORA, BL_LANE_LORA, &a->lora_reduce));
    turns->reduced[turns->turn] = bl_simulation_last(m->sim);
    turns->turn = (turns->turn + 1) % MACHINE_TURNS;
    BL_TRY(plan_machine_work(m, PLAN_LORA, BL_LANE_LORA, &a->lora_add));
    m->sim->ops[span].span_end = bl_simulation_last(m->sim);
    return BL_OK;
}

/* ---- gradients of all weights ---- */

/* The embedding is the unit behind the head here, also where both are one. */
static const plan_gradients *gradients_of(const machine *m, const plan_micro *micro, int64_t unit)
{
    if (!machine_is_table(m, unit)) return &machine_layer(m, micro->amounts, unit)->gradients;
    return &micro->amounts->gradients[unit - machine_head_unit(m)];
}

static bool reduces(const machine *m)
{
    return m->in->is_trained && m->in->n_ranks > 1;
}

/* A table's gradients take the memory of two layers'. */
static bl_status begin_weights(machine *m, const plan_micro *micro, int64_t unit)
{
    if (!reduces(m) || gradients_of(m, micro, unit)->n_bytes == 0) return BL_OK;
    for (int i = 0; i < MACHINE_TURNS; i++)
        if (machine_is_table(m, unit) || i == m->weights.turn)
            BL_TRY(plan_machine_stall(m, BL_LANE_LORA, m->weights.reduced[i], unit, -1));
    return plan_machine_work(m, PLAN_COMPUTE, BL_LANE_COMPUTE, &gradients_of(m, micro, unit)->zero);
}

static bl_status end_weights(machine *m, const plan_micro *micro, int64_t unit)
{
    const plan_gradients *g = gradients_of(m, micro, unit);
    machine_turns *turns = &m->weights;
    int turn = turns->turn;

    if (!reduces(m) || g->n_bytes == 0) return BL_OK;
    if (!machine_is_table(m, unit)) turns->turn = (turn + 1) % MACHINE_TURNS;
    BL_TRY(plan_machine_wait(m, PLAN_LORA, bl_simulation_event(m->sim, PLAN_COMPUTE)));
    BL_TRY(plan_machine_span(m, PLAN_LORA, BL_LANE_LORA, "gradients", unit, -1, g->n_bytes,
                             &g->reduce));
    for (int i = 0; i < MACHINE_TURNS; i++)
        if (machine_is_table(m, unit) || i == turn) turns->reduced[i] = bl_simulation_last(m->sim);
    return BL_OK;
}

/* ---- of either ---- */

bl_status plan_machine_begin_gradients(machine *m, const plan_micro *micro, int64_t unit)
{
    const machine_adapter *a = find_adapter(m, micro);

    if (a && !machine_is_table(m, unit))
        BL_TRY(
            plan_machine_stall(m, BL_LANE_LORA, a->gradients.reduced[a->gradients.turn], unit, -1));
    return begin_weights(m, micro, unit);
}

bl_status plan_machine_end_gradients(machine *m, const plan_micro *micro, int64_t unit)
{
    machine_adapter *a = find_adapter(m, micro);

    BL_TRY(end_weights(m, micro, unit));
    return a && !machine_is_table(m, unit) ? queue_lora_gradients(m, a, unit) : BL_OK;
}

/* bl_adapter_state_join */
bl_status plan_machine_join(machine *m)
{
    for (int i = 0; i < m->pass->n_joins; i++)
        BL_TRY(plan_machine_stall(m, BL_LANE_LORA, bl_simulation_event(m->sim, PLAN_LORA), -1, -1));
    return BL_OK;
}
