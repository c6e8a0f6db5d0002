/* SPDX-License-Identifier: Apache-2.0 */
/* base_gathered.c -- a ring over shards in device memory: item i of a unit is part i of the unit's
 * matrices. */
#include "linear/base_gathered.h"

#include <stdlib.h>

#include "linear/base_internal.h"

_Static_assert(BL_GATHER_ITEMS == BL_BASE_MATRICES * BL_BASE_SEGMENTS,
               "an item for each part of each matrix");

/* shards NULL: only sizes. */
static bl_gather_unit *make_units(const bl_base_layout *layout, const char *shards)
{
    bl_gather_unit *units = calloc((size_t)layout->n_units, sizeof *units);

    for (bl_base_walk w = {.layout = layout}; units && bl_base_next(&w);) {
        bl_gather_unit *unit = &units[w.idx_unit];
        unit->what = linear_unit_name(layout, w.idx_unit, &unit->index);
        unit->whole_ring = layout->units[w.idx_unit].whole_ring;
        bl_gather_item *item = &unit->item[unit->n_items++];
        *item = (bl_gather_item){.shard_bytes = w.part->shard_bytes,
                                 .slot_offset = w.part->slot_offset,
                                 .is_lent = true};
        if (shards) item->shard = shards + layout->units[w.idx_unit].offset + w.part->shard_offset;
    }
    return units;
}

size_t bl_base_gathered_ring_bytes(const bl_base_layout *layout, int ring_depth)
{
    bl_gather_unit *units = make_units(layout, NULL);
    size_t n_bytes =
        units ? bl_gather_ring_bytes(ring_depth, layout->n_units, units, layout->n_shards)
              : SIZE_MAX;

    free(units);
    return n_bytes;
}

static void destroy_ring(void *ring)
{
    bl_gather_ring_destroy(ring);
}

bl_status bl_base_create_gathered(const bl_base_layout *layout, const void *shards,
                                  const bl_base_gathered_options *o, bl_base **out)
{
    int group_size = o->comm ? bl_comm_size(o->comm) : 1;
    bl_gather_ring_options options = {.device = o->device,
                                      .comm = o->comm,
                                      .stream = o->gather,
                                      .depth = o->ring_depth,
                                      .timeline = o->timeline,
                                      .lane = BL_LANE_GATHER};
    bl_gather_ring *ring = NULL;

    *out = NULL;
    if (layout->n_shards != group_size)
        return BL_FAIL(BL_EINTERNAL, "%d shards for a group of %d ranks", layout->n_shards,
                       group_size);
    bl_base *base = calloc(1, sizeof *base);
    bl_gather_unit *units = make_units(layout, shards);
    bl_status st = base && units ? BL_OK : BL_FAIL(BL_ENOMEM, "gathered base");
    if (st == BL_OK) st = bl_gather_ring_create(&options, layout->n_units, units, &ring);
    free(units);
    if (st != BL_OK) {
        free(base);
        return st;
    }
    *base =
        (bl_base){.layout = layout, .ring = ring, .store = {.self = ring, .destroy = destroy_ring}};
    *out = base;
    return BL_OK;
}
