/* SPDX-License-Identifier: Apache-2.0 */
/* layer_order.c -- which layers the ring holds: the order of calls is recorded, and each call
 * prefetches what followed it the last time.
 *
 * The record is the latest calls, forward and backward apart. `match` is the earlier call whose
 * successors are expected now: while calls come as recorded it advances with them; when one does
 * not, the earlier call is sought that shares the longest run of calls before it. Without such a
 * call (the first pass) layers are expected to go up and then down, or around. */
#include <stdlib.h>

#include "base/sizes.h"
#include "linear/layer_internal.h"

enum {
    PASSES = 16,      /* recorded, of n_layers calls each: a step with recomputation has three */
    MIN_RECORD = 256, /* calls */
    LONGEST_RUN = 32  /* compared to choose among earlier calls */
};

bl_status bl_linear_order_create(bl_linear_order *order, int64_t n_layers)
{
    order->capacity = PASSES * n_layers + MIN_RECORD;
    order->match = -1;
    order->calls = malloc((size_t)order->capacity * sizeof *order->calls);
    return order->calls ? BL_OK : BL_FAIL(BL_ENOMEM, "linear stack: record of calls");
}

static bl_linear_recorded *call_at(const bl_linear_order *order, int64_t index)
{
    return &order->calls[index % order->capacity];
}

static bool is_same(bl_linear_recorded a, bl_linear_recorded b)
{
    return a.layer == b.layer && a.is_backward == b.is_backward;
}

/* The earlier call like the last one after the longest equal run, the oldest of those. */
static int64_t find_match(const bl_linear_order *order)
{
    int64_t last = order->n_calls - 1, oldest = bl_max_i64(0, order->n_calls - order->capacity),
            match = -1, longest = 0;

    for (int64_t i = oldest; i < last; i++) {
        int64_t run = 0;
        while (run < LONGEST_RUN && i - run >= oldest &&
               is_same(*call_at(order, i - run), *call_at(order, last - run)))
            run++;
        if (run > longest) longest = run, match = i;
    }
    return match;
}

static void record(bl_linear_order *order, bl_linear_recorded call)
{
    bool was_expected = order->match >= 0 && is_same(*call_at(order, order->match + 1), call);

    if (order->match >= 0 && !was_expected) order->n_strays++;
    *call_at(order, order->n_calls++) = call;
    order->match = was_expected ? order->match + 1 : find_match(order);
}

/* The layer expected after `unit` without a record: up and down, or around. */
static int64_t next_unit(const bl_linear_stack *stack, int64_t unit, int *direction)
{
    if (stack->options.forward_only) return (unit + 1) % stack->n_layers;
    if (unit + *direction < 0 || unit + *direction >= stack->n_layers) *direction = -*direction;
    return bl_min_i64(bl_max_i64(unit + *direction, 0), stack->n_layers - 1);
}

static bool is_among(const int64_t *units, int64_t n, int64_t unit)
{
    for (int64_t i = 0; i < n; i++)
        if (units[i] == unit) return true;
    return false;
}

/* The next n distinct units, from `unit` on: as recorded, then as they are expected without a
 * record. Turning at one end, n units are met within 2 n steps; when turning at both, all of
 * them. */
static int64_t expect(const bl_linear_stack *stack, int64_t unit, int64_t n, int64_t *units)
{
    const bl_linear_order *order = &stack->order;
    int direction = stack->direction;
    int64_t n_units = 0;

    units[n_units++] = unit;
    for (int64_t i = order->match + 1; order->match >= 0 && i < order->n_calls && n_units < n; i++)
        if (!is_among(units, n_units, call_at(order, i)->layer))
            units[n_units++] = call_at(order, i)->layer;
    for (int64_t step = 0; step < 2 * n && n_units < n; step++) {
        if (!is_among(units, n_units, unit)) units[n_units++] = unit;
        unit = next_unit(stack, unit, &direction);
    }
    return n_units;
}

/* Whether the ring has a copy: to a group of one, pages in device memory are lent. */
static bool is_gathered(const bl_linear_stack *stack, int64_t unit)
{
    return stack->n_ranks > 1 || stack->layers[unit].tier != BL_TIER_DEVICE;
}

bl_status bl_linear_order_turn(bl_linear_stack *stack, int64_t layer, bool is_backward,
                               bl_stream *stream)
{
    int64_t n = bl_min_i64(stack->ring_depth, stack->n_layers), *wanted = stack->wanted, *held;

    if (stack->last_layer >= 0 && layer != stack->last_layer)
        stack->direction = layer > stack->last_layer ? 1 : -1;
    stack->last_layer = layer;
    record(&stack->order, (bl_linear_recorded){(int32_t)layer, is_backward});
    n = expect(stack, layer, n, wanted);
    if (is_gathered(stack, layer) && !is_among(stack->held, stack->n_held, layer))
        stack->order.n_on_demand++;
    for (int64_t i = 0; i < stack->n_held; i++)
        if (!is_among(wanted, n, stack->held[i]))
            BL_TRY(bl_base_release(stack->base, stack->held[i], stream));
    for (int64_t i = 0; i < n; i++) {
        if (is_gathered(stack, wanted[i]) && !is_among(stack->held, stack->n_held, wanted[i])) {
            stack->order.n_gathers++;
            stack->order.gathered_bytes += stack->layout.units[wanted[i]].slot_bytes;
        }
        BL_TRY(bl_base_prefetch(stack->base, wanted[i]));
    }
    held = stack->held;
    stack->held = wanted;
    stack->wanted = held;
    stack->n_held = n;
    return BL_OK;
}
