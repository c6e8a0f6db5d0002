/* SPDX-License-Identifier: Apache-2.0 */
/* time_machine.c -- a pass on simulated streams: what each action of the schedule queues, in the
 * order in which model/pass.c, ring/gather_ring.c, offload/pager.c, offload/spill.c and
 * adapter/state.c queue it. A test compares the spans with those of a training. */
#include <stdlib.h>

#include "base/sizes.h"
#include "ring/ring_slots.h"
#include "plan/time_internal.h"

enum { SPILL_SLOTS = 2, N_ITEMS = BL_LAYER_MATRICES, N_TURNS = 2 };

typedef struct slot_events {
    int brought[N_ITEMS], ready[N_ITEMS], free, gathered;
} slot_events;

typedef struct machine_ring {
    bl_ring_slots held;
    slot_events *events; /* [depth] */
} machine_ring;

/* One of the pass's stacks. */
typedef struct machine_stack {
    int64_t n_slots, n_host;
    int item;
    bool is_moving[SPILL_SLOTS], is_coming[SPILL_SLOTS];
    int moved[SPILL_SLOTS];
} machine_stack;

typedef struct machine {
    plan_pass *pass;
    bl_simulation *sim;
    const bl_time_input *in;
    machine_ring base, lora;
    machine_stack inputs, saved;
    int turn, reduced[N_TURNS]; /* of gradients */
    bool is_before;             /* prefetches are complete before time 0 */
} machine;

/* ---- operations ---- */

static bl_status add_wait(machine *m, plan_stream stream, int event)
{
    return bl_simulation_add(m->sim, &(bl_sim_op){.stream = stream, .of = event});
}

/* As bl_timeline_wait: compute stalls on a lane. */
static bl_status add_stall(machine *m, bl_lane lane, int event, int64_t unit, int item)
{
    return bl_simulation_add(m->sim, &(bl_sim_op){.stream = PLAN_COMPUTE,
                                                  .of = event,
                                                  .name = "wait",
                                                  .is_stall = true,
                                                  .lane = lane,
                                                  .unit = unit,
                                                  .item = item});
}

static bl_status add_work(machine *m, plan_stream stream, bl_lane lane, const bl_work *work)
{
    return bl_simulation_add(m->sim, &(bl_sim_op){.stream = stream, .lane = lane, .work = work});
}

static bl_status add_span(machine *m, plan_stream stream, bl_lane lane, const char *name,
                          int64_t unit, int item, int64_t n_bytes, const bl_work *work)
{
    return bl_simulation_add(m->sim, &(bl_sim_op){.stream = stream,
                                                  .work = work,
                                                  .of = BL_SIM_NOTHING,
                                                  .name = name,
                                                  .lane = lane,
                                                  .unit = unit,
                                                  .item = item,
                                                  .n_bytes = n_bytes});
}

/* ---- the base's ring ---- */

static int64_t head_unit(const machine *m)
{
    return m->pass->schedule.n_layers;
}

/* The head, and a trained embedding that is not the head. */
static bool is_table(const machine *m, int64_t unit)
{
    return unit >= head_unit(m);
}

static int n_items(const machine *m, int64_t unit)
{
    return is_table(m, unit) ? 1 : N_ITEMS;
}

static const plan_layer *layer_of(const machine *m, int64_t layer)
{
    return &m->pass->amounts->layers[m->pass->run_of_layer[layer]];
}

static const plan_item *item_of(const machine *m, int64_t unit, int item)
{
    return is_table(m, unit) ? &m->pass->amounts->head_item : &layer_of(m, unit)->item[item];
}

static bl_tier tier_of(const machine *m, int64_t unit, int item)
{
    return m->pass->tiers[unit * N_ITEMS + item];
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
static bl_status queue_source(machine *m, int64_t unit, slot_events *events)
{
    int read[N_ITEMS];
    int submitted = bl_simulation_event(m->sim, PLAN_COPY);

    for (int i = 0; i < n_items(m, unit); i++) {
        if (tier_of(m, unit, i) != BL_TIER_DISK) continue;
        BL_TRY(add_wait(m, PLAN_READER, submitted));
        BL_TRY(add_work(m, PLAN_READER, BL_LANE_DISK, &item_of(m, unit, i)->read));
        read[i] = bl_simulation_last(m->sim);
    }
    for (int i = 0; i < n_items(m, unit); i++) {
        const plan_item *item = item_of(m, unit, i);
        if (tier_of(m, unit, i) == BL_TIER_DEVICE) continue;
        BL_TRY(
            add_span(m, PLAN_COPY, lane_of(m, unit, i), "shard", unit, i, item->shard_bytes, NULL));
        int span = bl_simulation_last(m->sim);
        bool is_read = tier_of(m, unit, i) == BL_TIER_DISK;
        if (is_read) BL_TRY(add_wait(m, PLAN_COPY, read[i]));
        BL_TRY(add_work(m, PLAN_COPY, BL_LANE_COPY, is_read ? &item->copy_read : &item->copy));
        m->sim->ops[span].span_end = events->brought[i] = bl_simulation_last(m->sim);
    }
    return BL_OK;
}

static bl_status queue_item(machine *m, int64_t unit, int i, slot_events *events)
{
    const plan_item *item = item_of(m, unit, i);
    bool is_resident = tier_of(m, unit, i) == BL_TIER_DEVICE;

    if (is_lent(m, unit, i)) return BL_OK;
    if (!is_resident) BL_TRY(add_wait(m, PLAN_GATHER, events->brought[i]));
    BL_TRY(add_span(m, PLAN_GATHER, BL_LANE_GATHER, "gather", unit, i,
                    item->shard_bytes * (m->in->n_shards - 1),
                    is_resident ? &item->gather_resident : &item->gather));
    events->ready[i] = bl_simulation_last(m->sim);
    return BL_OK;
}

static slot_events no_events(void)
{
    slot_events e = {.free = BL_SIM_NOTHING, .gathered = BL_SIM_NOTHING};
    for (int i = 0; i < N_ITEMS; i++) e.brought[i] = e.ready[i] = BL_SIM_NOTHING;
    return e;
}

static bl_status queue_unit(machine *m, int64_t unit, int slot)
{
    machine_ring *ring = &m->base;
    int last = bl_ring_slots_fill(&ring->held, unit, slot, is_table(m, unit));

    if (m->is_before) {
        ring->events[slot] = no_events();
        return BL_OK;
    }
    for (int s = slot; s <= last; s++) {
        BL_TRY(add_wait(m, PLAN_GATHER, ring->events[s].free));
        BL_TRY(add_wait(m, PLAN_COPY, ring->events[s].free));
        BL_TRY(add_wait(m, PLAN_COPY, ring->events[s].gathered));
    }
    BL_TRY(queue_source(m, unit, &ring->events[slot]));
    for (int i = 0; i < n_items(m, unit); i++) BL_TRY(queue_item(m, unit, i, &ring->events[slot]));
    for (int s = slot; s <= last; s++)
        ring->events[s].gathered = bl_simulation_event(m->sim, PLAN_GATHER);
    return BL_OK;
}

static bl_status prefetch_base(machine *m, int64_t unit)
{
    bl_ring_slots *held = &m->base.held;

    if (m->in->habits.is_synchronous || bl_ring_slots_find(held, unit) != BL_NO_SLOT) return BL_OK;
    int slot = bl_ring_slots_choose(held, is_table(m, unit));
    return slot == BL_NO_SLOT ? BL_OK : queue_unit(m, unit, slot);
}

static bl_status wait_for_item(machine *m, int64_t unit, int i, const slot_events *events)
{
    if (is_lent(m, unit, i)) return BL_OK;
    if (tier_of(m, unit, i) != BL_TIER_DEVICE)
        BL_TRY(add_stall(m, lane_of(m, unit, i), events->brought[i], unit, i));
    return add_stall(m, BL_LANE_GATHER, events->ready[i], unit, i);
}

static bl_status gather_synchronously(machine *m, int64_t unit, int slot)
{
    int arrived = bl_simulation_event(m->sim, PLAN_COMPUTE);

    BL_TRY(add_wait(m, PLAN_GATHER, arrived));
    BL_TRY(add_wait(m, PLAN_COPY, arrived));
    BL_TRY(queue_unit(m, unit, slot));
    for (int i = 0; i < n_items(m, unit); i++)
        BL_TRY(wait_for_item(m, unit, i, &m->base.events[slot]));
    return BL_OK;
}

static bl_status acquire_base(machine *m, int64_t unit, int item)
{
    int slot = bl_ring_slots_find(&m->base.held, unit);

    if (slot == BL_NO_SLOT) {
        slot = bl_ring_slots_choose(&m->base.held, is_table(m, unit));
        if (slot == BL_NO_SLOT)
            return BL_FAIL(BL_EINTERNAL, "prediction: no slot for unit %lld", (long long)unit);
        BL_TRY(m->in->habits.is_synchronous ? gather_synchronously(m, unit, slot)
                                            : queue_unit(m, unit, slot));
    }
    return wait_for_item(m, unit, item, &m->base.events[slot]);
}

static void release(machine *m, machine_ring *ring, int64_t unit)
{
    for (int s = 0; s < ring->held.depth; s++) {
        if (ring->held.unit[s] != unit) continue;
        ring->events[s].free = bl_simulation_event(m->sim, PLAN_COMPUTE);
        ring->held.unit[s] = BL_SLOT_EMPTY;
    }
}

/* ---- LoRA's ring and gradients ---- */

static bool has_lora(const machine *m)
{
    return m->in->lora->n_floats > 0;
}

static bl_status prefetch_lora(machine *m, int64_t layer)
{
    machine_ring *ring = &m->lora;

    if (!has_lora(m) || bl_ring_slots_find(&ring->held, layer) != BL_NO_SLOT) return BL_OK;
    int slot = bl_ring_slots_choose(&ring->held, false);
    if (slot == BL_NO_SLOT) return BL_OK;
    bl_ring_slots_fill(&ring->held, layer, slot, false);
    slot_events *events = &ring->events[slot];
    BL_TRY(add_wait(m, PLAN_LORA, events->free));
    BL_TRY(add_span(m, PLAN_LORA, BL_LANE_LORA, "gather", layer, 0,
                    m->pass->amounts->lora_gather_bytes, &m->pass->amounts->lora_gather));
    events->ready[0] = bl_simulation_last(m->sim);
    return BL_OK;
}

static bl_status acquire_lora(machine *m, int64_t layer)
{
    if (!has_lora(m)) return BL_OK;
    BL_TRY(prefetch_lora(m, layer));
    int slot = bl_ring_slots_find(&m->lora.held, layer);
    if (slot == BL_NO_SLOT)
        return BL_FAIL(BL_EINTERNAL, "prediction: no slot for LoRA of layer %lld",
                       (long long)layer);
    return add_stall(m, BL_LANE_LORA, m->lora.events[slot].ready[0], layer, 0);
}

/* Reduced over all ranks and added to the shard. */
static bl_status queue_lora_gradients(machine *m, int64_t layer)
{
    const plan_amounts *a = m->pass->amounts;

    BL_TRY(
        add_span(m, PLAN_LORA, BL_LANE_LORA, "gradients", layer, -1, a->lora_reduce_bytes, NULL));
    int span = bl_simulation_last(m->sim);
    BL_TRY(add_work(m, PLAN_LORA, BL_LANE_LORA, &a->lora_reduce));
    m->reduced[m->turn] = bl_simulation_last(m->sim);
    m->turn = (m->turn + 1) % N_TURNS;
    BL_TRY(add_work(m, PLAN_LORA, BL_LANE_LORA, &a->lora_add));
    m->sim->ops[span].span_end = bl_simulation_last(m->sim);
    return BL_OK;
}

/* ---- gradients of all weights: adapter/full.c ---- */

/* The embedding is the unit behind the head here, also where both are one. */
static const plan_gradients *gradients_of(const machine *m, int64_t unit)
{
    return is_table(m, unit) ? &m->pass->amounts->gradients : &layer_of(m, unit)->gradients;
}

static bool reduces(const machine *m)
{
    return m->in->is_trained && m->in->n_ranks > 1;
}

/* A table's gradients take the memory of two layers'. */
static bl_status begin_gradients(machine *m, int64_t unit)
{
    if (!reduces(m)) return BL_OK;
    for (int i = 0; i < N_TURNS; i++)
        if (is_table(m, unit) || i == m->turn)
            BL_TRY(add_stall(m, BL_LANE_LORA, m->reduced[i], unit, -1));
    return add_work(m, PLAN_COMPUTE, BL_LANE_COMPUTE, &gradients_of(m, unit)->zero);
}

static bl_status end_gradients(machine *m, int64_t unit)
{
    const plan_gradients *g = gradients_of(m, unit);
    int turn = m->turn;

    if (!reduces(m)) return BL_OK;
    if (!is_table(m, unit)) m->turn = (m->turn + 1) % N_TURNS;
    BL_TRY(add_wait(m, PLAN_LORA, bl_simulation_event(m->sim, PLAN_COMPUTE)));
    BL_TRY(add_span(m, PLAN_LORA, BL_LANE_LORA, "gradients", unit, -1, g->n_bytes, &g->reduce));
    for (int i = 0; i < N_TURNS; i++)
        if (is_table(m, unit) || i == turn) m->reduced[i] = bl_simulation_last(m->sim);
    return BL_OK;
}

/* ---- compute ---- */

static bl_status run_segments(machine *m, int64_t layer, const plan_segments *segments, bool first)
{
    const plan_segment *s = segments->at;

    for (int i = 0; i < segments->n; i++) {
        BL_TRY(acquire_base(m, layer, s[i].matrix));
        BL_TRY(add_work(m, PLAN_COMPUTE, BL_LANE_COMPUTE, first ? &s[i].work : &s[i].later));
    }
    return BL_OK;
}

static bl_status run_forward(machine *m, int64_t layer, int micro)
{
    return run_segments(m, layer, &layer_of(m, layer)->forward, micro == 0);
}

static bl_status run_backward(machine *m, int64_t layer, int micro)
{
    const bl_schedule *s = &m->pass->schedule;
    const plan_layer *l = layer_of(m, layer);
    /* model/pass.c: the workspace still holds the last layer's activations. */
    bool is_kept = layer == s->n_layers - 1 && s->n_micro == 1;
    const plan_segments *segments = is_kept ? &l->backward_kept : &l->backward;

    if (has_lora(m)) BL_TRY(add_stall(m, BL_LANE_LORA, m->reduced[m->turn], layer, -1));
    BL_TRY(begin_gradients(m, layer));
    BL_TRY(run_segments(m, layer, segments, micro == 0));
    BL_TRY(end_gradients(m, layer));
    if (!has_lora(m)) return BL_OK;
    BL_TRY(add_wait(m, PLAN_LORA, bl_simulation_event(m->sim, PLAN_COMPUTE)));
    return queue_lora_gradients(m, layer);
}

static bl_status run_table(machine *m, int64_t unit, const bl_work *work)
{
    BL_TRY(begin_gradients(m, unit));
    BL_TRY(add_work(m, PLAN_COMPUTE, BL_LANE_COMPUTE, work));
    return end_gradients(m, unit);
}

/* ---- the stacks of activations ---- */

static bool is_empty(const machine *m, const machine_stack *stack, int64_t entry)
{
    return stack->n_host == 0 || (stack == &m->saved && layer_of(m, entry)->saved_bytes == 0);
}

static bl_status transfer(machine *m, machine_stack *stack, int64_t entry, bool out)
{
    const plan_amounts *a = m->pass->amounts;
    bool is_input = stack == &m->inputs;
    const plan_layer *layer = is_input ? NULL : layer_of(m, entry);
    const bl_work *work = is_input ? (out ? &a->input_out : &a->input_back)
                                   : (out ? &layer->saved_out : &layer->saved_back);
    int64_t slot = entry % stack->n_slots,
            n_bytes = (is_input ? a->input_bytes : layer->saved_bytes) * m->pass->schedule.n_micro;

    BL_TRY(add_wait(m, PLAN_ACTIVATIONS, bl_simulation_event(m->sim, PLAN_COMPUTE)));
    BL_TRY(add_span(m, PLAN_ACTIVATIONS, BL_LANE_ACTIVATIONS, out ? "out" : "back", entry,
                    stack->item, n_bytes, work));
    stack->moved[slot] = bl_simulation_last(m->sim);
    stack->is_moving[slot] = true;
    return BL_OK;
}

static bl_status wait_for_transfer(machine *m, machine_stack *stack, int64_t entry)
{
    int64_t slot = entry % stack->n_slots;

    if (!stack->is_moving[slot]) return BL_OK;
    stack->is_moving[slot] = false;
    return add_stall(m, BL_LANE_ACTIVATIONS, stack->moved[slot], entry, stack->item);
}

static bl_status reserve(machine *m, machine_stack *stack, int64_t entry)
{
    if (stack->n_host == 0) return BL_OK;
    stack->is_coming[entry % stack->n_slots] = false;
    return wait_for_transfer(m, stack, entry);
}

static bl_status put(machine *m, machine_stack *stack, int64_t entry)
{
    bool stays = !m->pass->schedule.has_backward || entry >= stack->n_host;
    return stays || is_empty(m, stack, entry) ? BL_OK : transfer(m, stack, entry, true);
}

static bl_status take(machine *m, machine_stack *stack, int64_t entry)
{
    if (stack->n_host == 0 || !stack->is_coming[entry % stack->n_slots]) return BL_OK;
    return wait_for_transfer(m, stack, entry);
}

static bl_status drop(machine *m, machine_stack *stack, int64_t entry)
{
    int64_t next = entry - stack->n_slots;

    if (stack->n_host == 0 || next < 0) return BL_OK;
    stack->is_coming[entry % stack->n_slots] = true;
    return is_empty(m, stack, next) ? BL_OK : transfer(m, stack, next, false);
}

/* ---- the schedule ---- */

static bl_status begin_visit(machine *m, const bl_action *action)
{
    int64_t head = head_unit(m);
    const char *name = action->visit < head    ? "forward"
                       : action->visit == head ? "head"
                                               : "backward";

    BL_TRY(add_span(m, PLAN_COMPUTE, BL_LANE_COMPUTE, name, action->unit, -1, 0, NULL));
    m->pass->visit_begin[action->visit] = bl_simulation_last(m->sim);
    return BL_OK;
}

static bl_status end_visit(machine *m, const bl_action *action)
{
    BL_TRY(add_wait(m, PLAN_COMPUTE, BL_SIM_NOTHING));
    int last = bl_simulation_last(m->sim);
    m->pass->visit_end[action->visit] = last;
    m->sim->ops[m->pass->visit_begin[action->visit]].span_end = last;
    return BL_OK;
}

static bl_status run_stack(machine *m, const bl_action *action)
{
    switch (action->kind) {
    case BL_ACTION_RESERVE_INPUT:
        return reserve(m, &m->inputs, action->unit);
    case BL_ACTION_RESERVE_SAVED:
        return reserve(m, &m->saved, action->unit);
    case BL_ACTION_TAKE_INPUT:
        return take(m, &m->inputs, action->unit);
    case BL_ACTION_TAKE_SAVED:
        return take(m, &m->saved, action->unit);
    case BL_ACTION_PUT_INPUT:
        return put(m, &m->inputs, action->unit);
    case BL_ACTION_PUT_SAVED:
        return put(m, &m->saved, action->unit);
    case BL_ACTION_DROP_INPUT:
        return drop(m, &m->inputs, action->unit);
    case BL_ACTION_DROP_SAVED:
        return drop(m, &m->saved, action->unit);
    default:
        return BL_FAIL(BL_EINTERNAL, "action %d of a prediction", (int)action->kind);
    }
}

/* bl_action_sink */
static bl_status carry_out(void *user, const bl_action *action)
{
    machine *m = user;
    const plan_amounts *a = m->pass->amounts;
    int64_t unit = action->unit;

    switch (action->kind) {
    case BL_ACTION_VISIT:
    case BL_ACTION_UPDATE: /* memory has all: the step's end updated it */
    case BL_ACTION_OPEN_GRADIENTS:
    case BL_ACTION_CLOSE_GRADIENTS:
        return BL_OK;
    case BL_ACTION_PREFETCH_LORA:
        return prefetch_lora(m, unit);
    case BL_ACTION_PREFETCH_BASE:
        return prefetch_base(m, unit);
    case BL_ACTION_BEGIN:
        return begin_visit(m, action);
    case BL_ACTION_ACQUIRE_LORA:
        return acquire_lora(m, unit);
    case BL_ACTION_ACQUIRE_HEAD:
    case BL_ACTION_ACQUIRE_EMBEDDING:
        return acquire_base(m, unit, 0);
    case BL_ACTION_EMBED:
        return add_work(m, PLAN_COMPUTE, BL_LANE_COMPUTE, &a->embed);
    case BL_ACTION_FORWARD:
        return run_forward(m, unit, action->micro);
    case BL_ACTION_HEAD:
        return run_table(m, unit, &a->head);
    case BL_ACTION_BACKWARD:
        return run_backward(m, unit, action->micro);
    case BL_ACTION_EMBED_BACKWARD:
        return run_table(m, head_unit(m) + 1, &a->embed_backward);
    case BL_ACTION_RELEASE_BASE:
        release(m, &m->base, unit);
        return BL_OK;
    case BL_ACTION_RELEASE_LORA:
        release(m, &m->lora, unit);
        return BL_OK;
    case BL_ACTION_END:
        return end_visit(m, action);
    default:
        return run_stack(m, action);
    }
}

/* Prefetches of the previous pass's last visit for this one. */
static bl_status carry_out_before(void *user, const bl_action *action)
{
    return action->kind == BL_ACTION_PREFETCH_BASE ? prefetch_base(user, action->unit) : BL_OK;
}

/* ---- create ---- */

static bl_status create_ring(machine_ring *ring, int depth)
{
    ring->held =
        (bl_ring_slots){.depth = depth, .unit = calloc((size_t)depth, sizeof *ring->held.unit)};
    ring->events = calloc((size_t)depth, sizeof *ring->events);
    if (!ring->held.unit || !ring->events) return BL_FAIL(BL_ENOMEM, "a ring of %d slots", depth);
    bl_ring_slots_clear(&ring->held);
    for (int s = 0; s < depth; s++) ring->events[s] = no_events();
    return BL_OK;
}

static void free_ring(machine_ring *ring)
{
    free(ring->held.unit);
    free(ring->events);
}

/* model/pass.c: measure. */
static void create_stacks(machine *m)
{
    int64_t L = m->pass->schedule.n_layers;

    m->inputs = (machine_stack){.n_slots = L + 1, .item = 0};
    m->saved = (machine_stack){.n_slots = L, .item = 1};
    if (!m->in->offload_activations) return;
    m->inputs.n_slots = bl_min_i64(SPILL_SLOTS, L + 1);
    m->inputs.n_host = L + 1;
    m->saved.n_slots = bl_min_i64(SPILL_SLOTS, L);
    m->saved.n_host = L - m->saved.n_slots;
}

/* bl_adapter_state_join */
static bl_status join(machine *m)
{
    if (!has_lora(m) && !m->in->is_trained) return BL_OK;
    return add_stall(m, BL_LANE_LORA, bl_simulation_event(m->sim, PLAN_LORA), -1, -1);
}

bl_status plan_pass_queue(plan_pass *pass)
{
    machine m = {.pass = pass,
                 .sim = &pass->sim,
                 .in = pass->input,
                 .reduced = {BL_SIM_NOTHING, BL_SIM_NOTHING}};
    const bl_schedule *s = &pass->schedule;
    bl_status st;

    create_stacks(&m);
    BL_TRY_GOTO(st, done, create_ring(&m.base, s->ring_depth));
    BL_TRY_GOTO(st, done, create_ring(&m.lora, s->ring_depth));
    if (pass->is_warm && !s->is_trained) {
        m.is_before = true;
        BL_TRY_GOTO(st, done,
                    bl_schedule_visit(s, bl_schedule_n_visits(s) - 1, carry_out_before, &m));
        m.is_before = false;
    }
    BL_TRY_GOTO(st, done, bl_schedule_run(s, carry_out, &m));
    st = join(&m);
done:
    free_ring(&m.base);
    free_ring(&m.lora);
    return st;
}
