/* SPDX-License-Identifier: Apache-2.0 */
/* units_spans.c -- where a span is in the arrays of its unit, and AdamW over some of its
 * elements. */
#include "adapter/units_paged_internal.h"
#include "base/sizes.h"

int64_t adapter_units_element(const adapter_units *units, adapter_array array)
{
    bool is_moment = array == ADAPTER_M || array == ADAPTER_V;
    return is_moment ? (int64_t)bl_dtype_bytes(units->options.placement.moments) : UNITS_FLOAT;
}

int64_t adapter_units_span_offset(const adapter_units *units, const adapter_span *span,
                                  adapter_array array)
{
    bool is_f32 = adapter_units_element(units, array) == UNITS_FLOAT;
    return span->offset[is_f32 ? ADAPTER_F32 : ADAPTER_BF16];
}

char *adapter_units_span_memory(const adapter_units *units, const adapter_span *span,
                                adapter_array array)
{
    const held_unit *u = &units->unit[span->at.idx_unit];

    if (array == ADAPTER_W) {
        char *page = bl_pages_memory(units->options.weights->pages, span->at.index);
        return page ? page + span->first * UNITS_FLOAT : NULL;
    }
    if (u->tier == BL_TIER_DISK) return NULL;
    return units->memory[u->tier][array] + u->offset[array] +
           adapter_units_span_offset(units, span, array);
}

bl_tier adapter_units_place(const adapter_units *units, const adapter_span *span,
                            adapter_array array)
{
    bl_tier tier = array == ADAPTER_W
                       ? bl_pages_spec(units->options.weights->pages, span->at.index)->tier
                       : units->unit[span->at.idx_unit].tier;
    return tier == BL_TIER_DEVICE && !units->is_gpu ? BL_TIER_HOST : tier;
}

bl_tier adapter_units_copy_place(const adapter_units *units, const bl_base_walk *at)
{
    bl_tier tier = bl_pages_spec(units->options.weights->copy, at->index)->tier;
    return tier == BL_TIER_DEVICE && !units->is_gpu ? BL_TIER_HOST : tier;
}

bl_adamw_args adapter_units_adamw(const adapter_units *units, const adapter_span *span,
                                  int64_t first, int64_t n, char *const memory[ADAPTER_N_ARRAYS])
{
    bl_dtype moments = units->options.placement.moments;
    bl_adamw_args args = units->update;

    args.n = n;
    if (units->layout->units[span->at.idx_unit].whole_ring) /* embedding and head */
        args.lr *= units->options.placement.embedding_rate;
    args.grad = (const float *)memory[ADAPTER_GRAD];
    args.w = (float *)memory[ADAPTER_W];
    args.m = bl_tensor_of(memory[ADAPTER_M], moments);
    args.v = bl_tensor_of(memory[ADAPTER_V], moments);
    args.seed = units->options.placement.seed;
    args.tensor = span->at.index;
    args.first = units->options.rank * ((int64_t)span->at.part->shard_bytes / UNITS_FLOAT) +
                 span->first + first;
    return args;
}
