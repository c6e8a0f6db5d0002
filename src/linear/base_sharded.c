/* SPDX-License-Identifier: Apache-2.0 */
/* base_sharded.c -- one row-shard of every matrix a rank, all-gathered just in time through a gather ring. Items of a ring unit are the
 * parts of its matrices, in order, so that a matrix is ready as soon as its own parts are. */
#include "linear/base_internal.h"

#include <stdlib.h>

#include "base/sizes.h"
#include "comm/gather_ring.h"

_Static_assert(BL_GATHER_ITEMS == BL_BASE_MATRICES * BL_BASE_SEGMENTS,
               "an item for each part of each matrix");

typedef struct base_sharded {
    bl_base base;
    bl_gather_ring *ring;
} base_sharded;

static bl_status sharded_prefetch(bl_base *base, int64_t unit)
{
    return bl_gather_ring_prefetch(((base_sharded *)base)->ring, unit);
}

static bl_status sharded_acquire(bl_base *base, int64_t unit, int matrix, bl_stream *stream,
                                 bl_weight *out)
{
    const bl_base_unit *u = &base->layout->units[unit];
    const void *codes[BL_BASE_SEGMENTS];
    int item = 0;

    for (int m = 0; m < matrix; m++) item += u->matrix[m].n_parts;
    for (int p = 0; p < u->matrix[matrix].n_parts; p++)
        BL_TRY(bl_gather_ring_acquire(((base_sharded *)base)->ring, unit, item + p, stream,
                                      &codes[p]));
    bl_base_fill_weight(&u->matrix[matrix], codes, out);
    return BL_OK;
}

static bl_status sharded_release(bl_base *base, int64_t unit, bl_stream *stream)
{
    return bl_gather_ring_release(((base_sharded *)base)->ring, unit, stream);
}

static void sharded_destroy(bl_base *base)
{
    bl_gather_ring_destroy(((base_sharded *)base)->ring);
    free(base);
}

static bl_gather_unit *make_units(const bl_base_layout *layout, const char *shards)
{
    bl_gather_unit *units = calloc((size_t)layout->n_units, sizeof *units);

    for (bl_base_walk w = {.layout = layout}; units && bl_base_next(&w);) {
        const bl_base_unit *from = &layout->units[w.idx_unit];
        bl_gather_unit *unit = &units[w.idx_unit];
        unit->whole_ring = from->whole_ring;
        unit->item[unit->n_items++] =
            (bl_gather_item){.shard = shards + from->offset + w.part->shard_offset,
                             .shard_bytes = w.part->shard_bytes,
                             .slot_offset = w.part->slot_offset};
    }
    return units;
}

bl_status bl_base_create_sharded(const bl_base_layout *layout, const void *shards,
                                 bl_device *device, bl_comm *comm, bl_stream *stream,
                                 int ring_depth, bl_base **out)
{
    static const bl_base_ops ops = {.prefetch = sharded_prefetch,
                                    .acquire = sharded_acquire,
                                    .release = sharded_release,
                                    .destroy = sharded_destroy};

    *out = NULL;
    if (layout->n_shards != bl_comm_size(comm))
        return BL_FAIL(BL_EINTERNAL, "%d shards for a group of %d ranks", layout->n_shards,
                       bl_comm_size(comm));
    base_sharded *self = calloc(1, sizeof *self);
    bl_gather_unit *units = make_units(layout, shards);
    bl_gather_ring_options options = {
        .device = device, .comm = comm, .stream = stream, .depth = ring_depth};
    bl_status st = self && units ? BL_OK : BL_FAIL(BL_ENOMEM, "sharded base");
    if (st == BL_OK) st = bl_gather_ring_create(&options, layout->n_units, units, &self->ring);
    free(units);
    if (st != BL_OK) {
        free(self);
        return st;
    }
    self->base = (bl_base){&ops, layout};
    *out = &self->base;
    return BL_OK;
}

/* As bl_gather_ring_bytes of make_units' units, whose ends are those of the layout's slots. */
size_t bl_base_sharded_ring_bytes(const bl_base_layout *layout, int ring_depth)
{
    size_t slot_bytes = 0, whole_bytes = 0, all_slots;

    for (int64_t u = 0; u < layout->n_units; u++) {
        size_t *largest = layout->units[u].whole_ring ? &whole_bytes : &slot_bytes;
        if (layout->units[u].slot_bytes > *largest) *largest = layout->units[u].slot_bytes;
    }
    if (bl_mul_overflows((size_t)ring_depth, slot_bytes, &all_slots)) return SIZE_MAX;
    return all_slots > whole_bytes ? all_slots : whole_bytes;
}
