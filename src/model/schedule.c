/* SPDX-License-Identifier: Apache-2.0 */
/* schedule.c -- emits the actions of a pass in order: prefetch, begin, one per micro-batch, end,
 * for each visit of 0..L-1, head, L-1..first. */
#include "model/schedule_internal.h"

#include "base/sizes.h"

/* Where the actions of a visit go. */
typedef struct emitter {
    const bl_schedule *schedule;
    int64_t visit;
    bl_action_sink sink;
    void *user;
} emitter;

static bl_status emit(const emitter *e, bl_action_kind kind, int64_t unit)
{
    return e->sink(e->user,
                   &(bl_action){.kind = kind, .visit = e->visit, .unit = unit, .micro = -1});
}

static bl_status emit_micro_batches(const emitter *e, bl_action_kind kind, int64_t unit)
{
    for (int m = 0; m < e->schedule->n_micro; m++)
        BL_TRY(e->sink(e->user,
                       &(bl_action){.kind = kind, .visit = e->visit, .unit = unit, .micro = m}));
    return BL_OK;
}

int64_t bl_schedule_n_visits(const bl_schedule *schedule)
{
    int64_t n_layers = schedule->n_layers;
    return n_layers + 1 + (schedule->has_backward ? n_layers - schedule->first : 0);
}

/* What follows the last visit is the next pass's start. */
static int64_t unit_at(const bl_schedule *schedule, int64_t at)
{
    at %= bl_schedule_n_visits(schedule);
    return at <= schedule->n_layers ? at : 2 * schedule->n_layers - at;
}

/* Before the visit's prefetches: the units of forward visits that the first of them is for. */
static bl_status update(const emitter *e)
{
    const bl_schedule *s = e->schedule;
    int64_t end = bl_min_i64(e->visit + s->ring_depth, s->n_layers + 1);

    for (int64_t at = e->visit == 0 ? 0 : e->visit + s->ring_depth - 1; at < end; at++)
        if (at != s->embedding) BL_TRY(emit(e, BL_ACTION_UPDATE, at));
    return BL_OK;
}

static bl_status prefetch(const emitter *e)
{
    const bl_schedule *s = e->schedule;
    int64_t n_visits = bl_schedule_n_visits(s);

    for (int64_t at = e->visit; at < e->visit + s->ring_depth; at++) {
        int64_t unit = unit_at(s, at);
        if (s->is_trained && at >= n_visits) break;
        /* nothing may be gathered beyond a head that still needs the whole ring */
        if (unit == s->n_layers) {
            if (s->head_is_tied) continue;
            return emit(e, BL_ACTION_PREFETCH_BASE, unit);
        }
        /* LoRA's weights may change between passes. */
        if (at < n_visits) BL_TRY(emit(e, BL_ACTION_PREFETCH_LORA, unit));
        BL_TRY(emit(e, BL_ACTION_PREFETCH_BASE, unit));
    }
    return BL_OK;
}

static bl_status begin_visit(const emitter *e, int64_t unit)
{
    BL_TRY(emit(e, BL_ACTION_VISIT, unit));
    if (e->schedule->is_trained) BL_TRY(update(e));
    BL_TRY(prefetch(e));
    BL_TRY(emit(e, BL_ACTION_BEGIN, unit));
    return unit < e->schedule->n_layers ? emit(e, BL_ACTION_ACQUIRE_LORA, unit) : BL_OK;
}

static bl_status end_visit(const emitter *e, int64_t unit)
{
    const bl_schedule *s = e->schedule;
    int64_t n_visits = bl_schedule_n_visits(s), next = e->visit + 1;

    /* A tied head is in host memory: around it the last layer is visited twice in a row. */
    if (s->head_is_tied && next < n_visits && unit_at(s, next) == s->n_layers) next++;
    /* Visited again at once: keep it. */
    bool again = unit == unit_at(s, next) && !(s->is_trained && next >= n_visits);
    if (!again) BL_TRY(emit(e, BL_ACTION_RELEASE_BASE, unit));
    if ((!again || next >= n_visits) && unit < s->n_layers)
        BL_TRY(emit(e, BL_ACTION_RELEASE_LORA, unit));
    return emit(e, BL_ACTION_END, unit);
}

/* The micro-batches of a visit that give gradients of the weights of `gradients`. */
static bl_status emit_with_gradients(const emitter *e, bl_action_kind kind, int64_t unit,
                                     int64_t gradients)
{
    bool is_trained = e->schedule->is_trained && e->schedule->has_backward;

    if (is_trained) BL_TRY(emit(e, BL_ACTION_OPEN_GRADIENTS, gradients));
    BL_TRY(emit_micro_batches(e, kind, unit));
    return is_trained ? emit(e, BL_ACTION_CLOSE_GRADIENTS, gradients) : BL_OK;
}

static bl_status visit_forward(const emitter *e, int64_t layer)
{
    bool keeps = e->schedule->has_backward;

    BL_TRY(emit(e, BL_ACTION_RESERVE_INPUT, layer + 1));
    if (keeps) BL_TRY(emit(e, BL_ACTION_RESERVE_SAVED, layer));
    BL_TRY(emit_micro_batches(e, BL_ACTION_FORWARD, layer));
    BL_TRY(emit(e, BL_ACTION_PUT_INPUT, layer + 1));
    return keeps ? emit(e, BL_ACTION_PUT_SAVED, layer) : BL_OK;
}

static bl_status visit_head(const emitter *e, int64_t head)
{
    const bl_schedule *s = e->schedule;

    if (s->has_backward) BL_TRY(emit(e, BL_ACTION_TAKE_INPUT, head));
    if (!s->head_is_tied) BL_TRY(emit(e, BL_ACTION_ACQUIRE_HEAD, head));
    BL_TRY(emit_with_gradients(e, BL_ACTION_HEAD, head, head));
    return s->has_backward ? emit(e, BL_ACTION_DROP_INPUT, head) : BL_OK;
}

static bl_status visit_backward(const emitter *e, int64_t layer)
{
    BL_TRY(emit(e, BL_ACTION_TAKE_INPUT, layer));
    BL_TRY(emit(e, BL_ACTION_TAKE_SAVED, layer));
    BL_TRY(emit_with_gradients(e, BL_ACTION_BACKWARD, layer, layer));
    if (layer == 0 && e->schedule->embedding_has_gradient)
        BL_TRY(emit_with_gradients(e, BL_ACTION_EMBED_BACKWARD, e->schedule->embedding,
                                   e->schedule->n_layers + 1));
    BL_TRY(emit(e, BL_ACTION_DROP_INPUT, layer));
    return emit(e, BL_ACTION_DROP_SAVED, layer);
}

static bl_status emit_visit(const bl_schedule *schedule, int64_t at, bl_action_sink sink,
                            void *user)
{
    const emitter e = {schedule, at, sink, user};
    int64_t unit = unit_at(schedule, at);

    BL_TRY(begin_visit(&e, unit));
    if (at < schedule->n_layers)
        BL_TRY(visit_forward(&e, unit));
    else if (at == schedule->n_layers)
        BL_TRY(visit_head(&e, unit));
    else
        BL_TRY(visit_backward(&e, unit));
    return end_visit(&e, unit);
}

bl_status bl_schedule_run(const bl_schedule *schedule, bl_action_sink sink, void *user)
{
    const emitter e = {schedule, -1, sink, user};

    BL_TRY(emit(&e, BL_ACTION_RESERVE_INPUT, 0));
    if (schedule->is_trained) BL_TRY(emit(&e, BL_ACTION_UPDATE, schedule->embedding));
    if (schedule->is_trained) BL_TRY(emit(&e, BL_ACTION_ACQUIRE_EMBEDDING, schedule->embedding));
    BL_TRY(emit_micro_batches(&e, BL_ACTION_EMBED, 0));
    if (schedule->is_trained) BL_TRY(emit(&e, BL_ACTION_RELEASE_BASE, schedule->embedding));
    BL_TRY(emit(&e, BL_ACTION_PUT_INPUT, 0));
    for (int64_t at = 0; at < bl_schedule_n_visits(schedule); at++)
        BL_TRY(emit_visit(schedule, at, sink, user));
    return BL_OK;
}
