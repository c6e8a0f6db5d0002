/* SPDX-License-Identifier: Apache-2.0 */
/* time_machine.c -- a pass on simulated streams: what each action of the schedule queues, in the
 * order in which model/pass.c and offload/spill.c queue it; the base and adapters are in
 * time_machine_base.c and time_machine_adapters.c. A test compares the spans with those of a
 * training. */
#include "plan/time_machine_internal.h"

#include <stdlib.h>

#include "base/sizes.h"

/* ---- operations ---- */

bl_status plan_machine_wait(machine *m, plan_stream stream, int event)
{
    return bl_simulation_add(m->sim, &(bl_sim_op){.stream = stream, .of = event});
}

bl_status plan_machine_stall(machine *m, bl_lane lane, int event, int64_t unit, int item)
{
    return plan_machine_stall_on(m, PLAN_COMPUTE, lane, "wait", event, unit, item);
}

bl_status plan_machine_stall_on(machine *m, plan_stream stream, bl_lane lane, const char *name,
                                int event, int64_t unit, int item)
{
    return bl_simulation_add(m->sim, &(bl_sim_op){.stream = stream,
                                                  .of = event,
                                                  .name = name,
                                                  .is_stall = true,
                                                  .lane = lane,
                                                  .unit = unit,
                                                  .item = item});
}

bl_status plan_machine_work(machine *m, plan_stream stream, bl_lane lane, const bl_work *work)
{
    return bl_simulation_add(m->sim, &(bl_sim_op){.stream = stream, .lane = lane, .work = work});
}

bl_status plan_machine_span(machine *m, plan_stream stream, bl_lane lane, const char *name,
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

/* ---- compute ---- */

static bl_status add_compute(machine *m, const bl_work *work)
{
    return plan_machine_work(m, PLAN_COMPUTE, BL_LANE_COMPUTE, work);
}

static bl_status run_segments(machine *m, int64_t layer, const plan_segments *segments, bool first)
{
    const plan_segment *s = segments->at;

    for (int i = 0; i < segments->n; i++) {
        BL_TRY(plan_machine_acquire_base(m, layer, s[i].matrix));
        BL_TRY(add_compute(m, first ? &s[i].work : &s[i].later));
    }
    return BL_OK;
}

static bl_status run_forward(machine *m, int64_t layer, int i)
{
    const plan_micro *micro = &m->pass->micro[i];
    return run_segments(m, layer, &machine_layer(m, micro->amounts, layer)->forward, i == 0);
}

static bl_status run_backward(machine *m, int64_t layer, int i)
{
    const bl_schedule *s = &m->pass->schedule;
    const plan_micro *micro = &m->pass->micro[i];
    const plan_layer *l = machine_layer(m, micro->amounts, layer);
    /* model/pass.c: the workspace still holds the last layer's activations. */
    bool is_kept = layer == s->n_layers - 1 && s->n_micro == 1;

    if (!micro->has_gradient) return BL_OK;
    BL_TRY(plan_machine_begin_gradients(m, micro, layer));
    BL_TRY(run_segments(m, layer, is_kept ? &l->backward_kept : &l->backward, i == 0));
    return plan_machine_end_gradients(m, micro, layer);
}

static bl_status run_table(machine *m, const plan_micro *micro, int64_t unit, const bl_work *work)
{
    BL_TRY(plan_machine_begin_gradients(m, micro, unit));
    BL_TRY(add_compute(m, work));
    return plan_machine_end_gradients(m, micro, unit);
}

static bl_status run_head(machine *m, const plan_micro *micro, bool has_gradient)
{
    return has_gradient ? run_table(m, micro, machine_head_unit(m), &micro->amounts->head)
                        : add_compute(m, &micro->amounts->head_forward);
}

/* model/pass_head.c: behind the last micro-batch's log-probabilities come the gradients of those
 * that are weighed. */
static bl_status run_heads(machine *m, int at)
{
    const plan_micro *micro = m->pass->micro;
    int n = m->pass->schedule.n_micro;

    BL_TRY(run_head(m, &micro[at], micro[at].has_gradient && !micro[at].is_weighed));
    for (int i = 0; i < n && at + 1 == n; i++)
        if (micro[i].has_gradient && micro[i].is_weighed) BL_TRY(run_head(m, &micro[i], true));
    return BL_OK;
}

static bl_status run_embedding_backward(machine *m, int i)
{
    const plan_micro *micro = &m->pass->micro[i];
    if (!micro->has_gradient) return BL_OK;
    return run_table(m, micro, machine_head_unit(m) + 1, &micro->amounts->embed_backward);
}

/* ---- the stacks of activations ---- */

static const plan_entry *entry_of(const machine *m, const machine_stack *stack, int64_t entry)
{
    return stack == &m->inputs ? &m->pass->input_entry
                               : &m->pass->saved_entry[m->pass->run_of_layer[entry]];
}

static bool is_empty(const machine *m, const machine_stack *stack, int64_t entry)
{
    return stack->n_host == 0 || entry_of(m, stack, entry)->n_bytes == 0;
}

static bl_status transfer(machine *m, machine_stack *stack, int64_t entry, bool out)
{
    const plan_entry *e = entry_of(m, stack, entry);
    int64_t slot = entry % stack->n_slots;

    BL_TRY(plan_machine_wait(m, PLAN_ACTIVATIONS, bl_simulation_event(m->sim, PLAN_COMPUTE)));
    BL_TRY(plan_machine_span(m, PLAN_ACTIVATIONS, BL_LANE_ACTIVATIONS, out ? "out" : "back", entry,
                             stack->item, e->n_bytes, out ? &e->out : &e->back));
    stack->moved[slot] = bl_simulation_last(m->sim);
    stack->is_moving[slot] = true;
    return BL_OK;
}

static bl_status wait_for_transfer(machine *m, machine_stack *stack, int64_t entry)
{
    int64_t slot = entry % stack->n_slots;

    if (!stack->is_moving[slot]) return BL_OK;
    stack->is_moving[slot] = false;
    return plan_machine_stall(m, BL_LANE_ACTIVATIONS, stack->moved[slot], entry, stack->item);
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

    if (stack->n_host == 0 || next < m->pass->schedule.first) return BL_OK;
    stack->is_coming[entry % stack->n_slots] = true;
    return is_empty(m, stack, next) ? BL_OK : transfer(m, stack, next, false);
}

/* ---- the schedule ---- */

static bl_status begin_visit(machine *m, const bl_action *action)
{
    int64_t head = machine_head_unit(m);
    const char *name = action->visit < head    ? "forward"
                       : action->visit == head ? "head"
                                               : "backward";

    BL_TRY(plan_machine_span(m, PLAN_COMPUTE, BL_LANE_COMPUTE, name, action->unit, -1, 0, NULL));
    m->pass->visit_begin[action->visit] = bl_simulation_last(m->sim);
    return BL_OK;
}

static bl_status end_visit(machine *m, const bl_action *action)
{
    BL_TRY(plan_machine_wait(m, PLAN_COMPUTE, BL_SIM_NOTHING));
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
    int64_t unit = action->unit;

    switch (action->kind) {
    case BL_ACTION_VISIT:
        return BL_OK;
    case BL_ACTION_UPDATE:
        return plan_machine_update(m, unit);
    case BL_ACTION_OPEN_GRADIENTS:
        return plan_machine_open_gradients(m, unit);
    case BL_ACTION_CLOSE_GRADIENTS:
        return plan_machine_close_gradients(m, unit);
    case BL_ACTION_PREFETCH_LORA:
        return plan_machine_prefetch_lora(m, unit);
    case BL_ACTION_PREFETCH_BASE:
        return plan_machine_prefetch_base(m, unit);
    case BL_ACTION_BEGIN:
        return begin_visit(m, action);
    case BL_ACTION_ACQUIRE_LORA:
        return plan_machine_acquire_lora(m, unit);
    case BL_ACTION_ACQUIRE_HEAD:
    case BL_ACTION_ACQUIRE_EMBEDDING:
        return plan_machine_acquire_base(m, unit, 0);
    case BL_ACTION_EMBED:
        return add_compute(m, &m->pass->micro[action->micro].amounts->embed);
    case BL_ACTION_FORWARD:
        return run_forward(m, unit, action->micro);
    case BL_ACTION_HEAD:
        return run_heads(m, action->micro);
    case BL_ACTION_BACKWARD:
        return run_backward(m, unit, action->micro);
    case BL_ACTION_EMBED_BACKWARD:
        return run_embedding_backward(m, action->micro);
    case BL_ACTION_RELEASE_BASE:
        plan_machine_release(m, &m->base, unit);
        return BL_OK;
    case BL_ACTION_RELEASE_LORA:
        plan_machine_release_lora(m, unit);
        return BL_OK;
    case BL_ACTION_END:
        return end_visit(m, action);
    default:
        return run_stack(m, action);
    }
}

/* The previous pass's last visit: its prefetches for this pass, and its releases. */
static bl_status carry_out_before(void *user, const bl_action *action)
{
    machine *m = user;

    if (action->kind == BL_ACTION_PREFETCH_BASE) return plan_machine_prefetch_base(m, action->unit);
    if (action->kind == BL_ACTION_RELEASE_BASE) plan_machine_release(m, &m->base, action->unit);
    return BL_OK;
}

/* ---- create ---- */

/* model/pass.c: measure. */
static void create_stacks(machine *m)
{
    int64_t L = m->pass->schedule.n_layers;

    m->inputs = (machine_stack){.n_slots = L + 1, .item = 0};
    m->saved = (machine_stack){.n_slots = L, .item = 1};
    if (!m->in->offload_activations) return;
    m->inputs.n_slots = bl_min_i64(MACHINE_SPILL_SLOTS, L + 1);
    m->inputs.n_host = L + 1;
    m->saved.n_slots = bl_min_i64(MACHINE_SPILL_SLOTS, L);
    m->saved.n_host = L - m->saved.n_slots;
}

bl_status plan_pass_queue(plan_pass *pass)
{
    machine m = {.pass = pass, .sim = &pass->sim, .in = pass->input};
    const bl_schedule *s = &pass->schedule, *before = pass->before;
    bl_status st;

    create_stacks(&m);
    plan_machine_init_frames(&m);
    BL_TRY_GOTO(st, done, plan_machine_create_ring(&m.base, s->ring_depth));
    BL_TRY_GOTO(st, done, plan_machine_create_adapters(&m));
    if (before && !s->is_trained) {
        m.is_before = true;
        BL_TRY_GOTO(
            st, done,
            bl_schedule_visit(before, bl_schedule_n_visits(before) - 1, carry_out_before, &m));
        m.is_before = false;
    }
    BL_TRY_GOTO(st, done, bl_schedule_run(s, carry_out, &m));
    st = plan_machine_join(&m);
    if (st == BL_OK && pass->state && pass->is_last) st = plan_machine_join_tied(&m);
done:
    plan_machine_free_ring(&m.base);
    plan_machine_free_adapters(&m);
    return st;
}
