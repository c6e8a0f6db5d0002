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

/* ---- groups of experts ---- */

static int64_t groups_of(const bl_schedule *s, int64_t unit)
{
    bool has = !s->kinds || bl_layer_kind_of(s->kinds, unit) == BL_LAYER_EXPERTS;
    return unit < s->n_layers && has ? s->n_groups : 0;
}

static bl_status emit_group(const emitter *e, bl_action_kind kind, int64_t unit, int64_t group,
                            int micro)
{
    return e->sink(
        e->user,
        &(bl_action){
            .kind = kind, .visit = e->visit, .unit = unit, .micro = micro, .group = group});
}

/* The visit after this one, without that of a tied head, for which nothing is gathered. */
static int64_t next_visit(const bl_schedule *s, int64_t at)
{
    at++;
    return s->head_is_tied && unit_at(s, at) == s->n_layers ? at + 1 : at;
}

/* From group g of the visit on, in the order of use; it goes through its groups `rounds` times
 * more. As with units, nothing is gathered beyond a head. */
static bl_status prefetch_groups(const emitter *e, int64_t g, int rounds)
{
    const bl_schedule *s = e->schedule;
    int64_t at = e->visit;

    for (int i = 0; i < s->ring_depth; i++) {
        int64_t unit = unit_at(s, at);
        while (unit < s->n_layers && groups_of(s, unit) == 0)
            unit = unit_at(s, at = next_visit(s, at));
        if (unit == s->n_layers) break;
        BL_TRY(emit_group(e, BL_ACTION_PREFETCH_GROUP, unit, g, -1));
        if (++g < s->n_groups) continue;
        g = 0;
        if (--rounds <= 0) at = next_visit(s, at);
    }
    return BL_OK;
}

/* The visit that the current one's unit may stay for. A tied head is in host memory: around it the
 * last layer is visited twice in a row. */
static int64_t coming_visit(const emitter *e)
{
    int64_t next = e->visit + 1;
    return next < bl_schedule_n_visits(e->schedule) ? next_visit(e->schedule, e->visit) : next;
}

/* Whether the unit of the visit is that of the next, too, and stays. */
static bool is_visited_again(const emitter *e, int64_t unit)
{
    const bl_schedule *s = e->schedule;
    int64_t next = coming_visit(e);

    return unit == unit_at(s, next) && !(s->is_trained && next >= bl_schedule_n_visits(s));
}

/* Micro-batches [first, end) through all groups, each of which is gathered once; rounds: with those
 * that follow in the visit. */
static bl_status emit_groups(const emitter *e, bl_action_kind kind, int64_t layer, int first,
                             int end, int rounds)
{
    int64_t n = groups_of(e->schedule, layer);
    bool stays = n == 1 && (rounds > 1 || is_visited_again(e, layer));

    for (int64_t g = 0; g < n; g++) {
        BL_TRY(prefetch_groups(e, g, rounds));
        for (int m = first; m < end; m++) BL_TRY(emit_group(e, kind, layer, g, m));
        if (!stays) BL_TRY(emit_group(e, BL_ACTION_RELEASE_GROUP, layer, g, -1));
    }
    return BL_OK;
}

/* ---- visits ---- */

static bl_status begin_visit(const emitter *e, int64_t unit)
{
    BL_TRY(emit(e, BL_ACTION_VISIT, unit));
    if (e->schedule->is_trained) BL_TRY(update(e));
    BL_TRY(prefetch(e));
    if (e->schedule->n_groups > 0) BL_TRY(prefetch_groups(e, 0, 1));
    BL_TRY(emit(e, BL_ACTION_BEGIN, unit));
    return unit < e->schedule->n_layers ? emit(e, BL_ACTION_ACQUIRE_LORA, unit) : BL_OK;
}

static bl_status end_visit(const emitter *e, int64_t unit)
{
    const bl_schedule *s = e->schedule;
    bool again = is_visited_again(e, unit), is_last = coming_visit(e) >= bl_schedule_n_visits(s);

    if (!again) BL_TRY(emit(e, BL_ACTION_RELEASE_BASE, unit));
    if ((!again || is_last) && unit < s->n_layers) BL_TRY(emit(e, BL_ACTION_RELEASE_LORA, unit));
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
    BL_TRY(emit_groups(e, BL_ACTION_FORWARD_GROUP, layer, 0, e->schedule->n_micro, 1));
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

/* Of layers with experts: all micro-batches together, or one by one. */
static bl_status backward_groups(const emitter *e, int64_t layer)
{
    const bl_schedule *s = e->schedule;
    int n_rounds = s->is_one_by_one ? s->n_micro : 1, n = s->n_micro / n_rounds;

    for (int i = 0; i < n_rounds; i++) {
        int first = i * n, end = first + n;
        for (int m = first; m < end; m++)
            BL_TRY(emit_group(e, BL_ACTION_BACKWARD_BEGIN, layer, 0, m));
        BL_TRY(emit_groups(e, BL_ACTION_BACKWARD_GROUP, layer, first, end, n_rounds - i));
        for (int m = first; m < end; m++) BL_TRY(emit_group(e, BL_ACTION_BACKWARD, layer, 0, m));
    }
    return BL_OK;
}

static bl_status visit_backward(const emitter *e, int64_t layer)
{
    BL_TRY(emit(e, BL_ACTION_TAKE_INPUT, layer));
    BL_TRY(emit(e, BL_ACTION_TAKE_SAVED, layer));
    BL_TRY(groups_of(e->schedule, layer) > 0
               ? backward_groups(e, layer)
               : emit_with_gradients(e, BL_ACTION_BACKWARD, layer, layer));
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
