/* SPDX-License-Identifier: Apache-2.0 */
/* units_parts.c -- where a part is in the arrays of its unit, and AdamW over some of its
 * elements. */
#include "adapter/units_paged_internal.h"
#include "base/sizes.h"

int64_t adapter_units_array_bytes(const bl_base_part *part, int64_t element)
{
    return bl_round_up((int64_t)part->shard_bytes / UNITS_FLOAT * element,
                       BL_DEVICE_ALIGNMENT_BYTES);
}

int64_t adapter_units_element(const adapter_units *units, adapter_array array)
{
    bool is_moment = array == ADAPTER_M || array == ADAPTER_V;
    return is_moment ? (int64_t)bl_dtype_bytes(units->options.placement.moments) : UNITS_FLOAT;
}

int64_t adapter_units_part_offset(const adapter_units *units, const bl_base_walk *at,
                                  adapter_array array)
{
    const bl_base_matrix *matrix = units->layout->units[at->idx_unit].matrix;
    int64_t offset = 0;

    for (int m = 0; m <= at->idx_matrix; m++)
        for (int p = 0; p < (m == at->idx_matrix ? at->idx_part : matrix[m].n_parts); p++)
            offset +=
                adapter_units_array_bytes(&matrix[m].part[p], adapter_units_element(units, array));
    return offset;
}

char *adapter_units_part_memory(const adapter_units *units, const bl_base_walk *at,
                                adapter_array array)
{
    const held_unit *u = &units->unit[at->idx_unit];

    if (array == ADAPTER_W) return bl_pages_memory(units->options.weights->pages, at->index);
    if (u->tier == BL_TIER_DISK) return NULL;
    return units->memory[u->tier][array] + u->offset[array] +
           adapter_units_part_offset(units, at, array);
}

bl_tier adapter_units_place(const adapter_units *units, const bl_base_walk *at, adapter_array array)
{
    bl_tier tier = array == ADAPTER_W
                       ? bl_pages_spec(units->options.weights->pages, at->index)->tier
                       : units->unit[at->idx_unit].tier;
    return tier == BL_TIER_DEVICE && !units->is_gpu ? BL_TIER_HOST : tier;
}

bl_adamw_args adapter_units_adamw(const adapter_units *units, const bl_base_walk *at, int64_t first,
                                  int64_t n, char *const memory[ADAPTER_N_ARRAYS])
{
    bl_dtype moments = units->options.placement.moments;
    bl_adamw_args args = units->update;

    args.n = n;
    if (units->layout->units[at->idx_unit].whole_ring) /* embedding and head */
        args.lr *= units->options.placement.embedding_rate;
    args.grad = (const float *)memory[ADAPTER_GRAD];
    args.w = (float *)memory[ADAPTER_W];
    args.m = bl_tensor_of(memory[ADAPTER_M], moments);
    args.v = bl_tensor_of(memory[ADAPTER_V], moments);
    args.seed = units->options.placement.seed;
    args.tensor = at->index;
    args.first = units->options.rank * ((int64_t)at->part->shard_bytes / UNITS_FLOAT) + first;
    return args;
}
