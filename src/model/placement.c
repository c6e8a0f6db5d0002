/* SPDX-License-Identifier: Apache-2.0 */
/* placement.c -- the tier of each piece of the base by ratio, host bytes that this takes, NUMA
 * nodes, and names of pages. */
#include "model/placement.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "linear/base_paged.h"
#include "arch/arch.h"
#include "offload/arena.h"

bl_status bl_placement_assign(const bl_base_layout *layout, const bl_placement *placement,
                              bl_tier *tiers)
{
    return bl_base_assign_tiers(layout, placement->tier, placement->ratio, placement->host_part,
                                tiers);
}

bl_status bl_placement_assign_copy(const bl_base_layout *weights, const bl_placement *placement,
                                   bl_tier *tiers)
{
    int64_t n_parts = bl_base_part_count(weights);

    if (placement->places_copy) return bl_placement_assign(weights, placement, tiers);
    for (int64_t i = 0; i < n_parts; i++) tiers[i] = BL_TIER_DEVICE;
    return BL_OK;
}

/* Bytes of a ring that are written without gathers (one shard): the places of pages in device
 * memory are not written. Passes go up and down the layers, so that layer l uses slot l modulo
 * ring_depth, its groups of experts all slots of theirs; an offloaded head, which takes the whole
 * ring, mixes them, and reads from a disk run ahead of the order. */
static size_t used_bytes(const bl_base_layout *layout, const bl_tier *tiers, int ring_depth,
                         size_t ring_bytes)
{
    size_t used = 0;

    if (layout->n_shards > 1) return ring_bytes;
    for (int slot = 0; slot < ring_depth; slot++) {
        size_t largest[2][BL_BASE_MATRICES][BL_BASE_PARTS] = {{{0}}};
        for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) {
            bool is_group = layout->units[w.idx_unit].is_group;
            size_t *item = &largest[is_group][w.idx_matrix][w.idx_part];
            if (tiers[w.index] == BL_TIER_DEVICE) continue;
            if (tiers[w.index] == BL_TIER_DISK || layout->units[w.idx_unit].whole_ring)
                return ring_bytes;
            if ((!is_group && w.idx_unit % ring_depth != slot) || w.part->shard_bytes <= *item)
                continue;
            used += w.part->shard_bytes - *item;
            *item = w.part->shard_bytes;
        }
    }
    return used < ring_bytes ? used : ring_bytes;
}

/* tiers: one per page of the layout. */
static bl_status measure(const bl_base_layout *layout, const bl_tier *tiers,
                         const bl_placement *placement, bool host_writes, int ring_depth,
                         bl_placed_bytes *out)
{
    bl_base_paged_bytes n;

    BL_TRY(bl_base_paged_measure(layout, tiers, ring_depth, !host_writes,
                                 bl_model_pager_queue_depth(placement->n), &n));
    size_t staged = n.disk + (host_writes ? 0 : n.device);
    *out = (bl_placed_bytes){
        .device = n.device,
        .host = n.host,
        .disk = n.disk,
        .ring = n.ring,
        .reader = n.reader,
        .ring_used = used_bytes(layout, tiers, ring_depth, n.ring),
        .writing =
            (size_t)(bl_min_i64((int64_t)staged, (int64_t)bl_model_staging_bytes(placement)) +
                     bl_min_i64((int64_t)n.disk, (int64_t)bl_pages_writing_bytes(placement->n)))};
    return BL_OK;
}

bl_status bl_placement_measure(const bl_base_layout *layout, const bl_placement *placement,
                               bl_device_kind kind, int ring_depth, bl_placed_bytes *out)
{
    bl_tier *tiers = calloc((size_t)bl_base_part_count(layout) + 1, sizeof *tiers);
    bl_status st = tiers ? BL_OK : BL_FAIL(BL_ENOMEM, "the placement of pages");

    *out = (bl_placed_bytes){0};
    if (st == BL_OK) st = bl_placement_assign(layout, placement, tiers);
    if (st == BL_OK) st = measure(layout, tiers, placement, kind == BL_DEVICE_CPU, ring_depth, out);
    free(tiers);
    return st;
}

bl_status bl_placement_measure_copy(const bl_base_layout *weights, const bl_base_layout *copy,
                                    const bl_placement *placement, bl_device_kind kind,
                                    int ring_depth, bl_placed_bytes *out)
{
    bl_tier *tiers = calloc((size_t)bl_base_part_count(weights) + 1, sizeof *tiers);
    bl_status st = tiers ? BL_OK : BL_FAIL(BL_ENOMEM, "the placement of pages");

    *out = (bl_placed_bytes){0};
    if (st == BL_OK) st = bl_placement_assign_copy(weights, placement, tiers);
    if (st == BL_OK) st = measure(copy, tiers, placement, kind == BL_DEVICE_CPU, ring_depth, out);
    out->writing = 0;
    free(tiers);
    return st;
}

size_t bl_model_staging_bytes(const bl_placement *placement)
{
    enum { MAX_BYTES = 32 << 20, MIN_BYTES = 4 << 20 };
    if (placement->staging_bytes) return placement->staging_bytes;
    return (size_t)bl_max_i64(MIN_BYTES, MAX_BYTES / bl_max_i64(1, placement->n));
}

int bl_model_pager_queue_depth(int n)
{
    enum { MIN_DEPTH = 4 };
    return (int)bl_max_i64(MIN_DEPTH, BL_IO_QUEUE_DEPTH / bl_max_i64(1, n));
}

int bl_model_node_of_rank(int index, int n, const char *gpu_bus_id)
{
    int node = gpu_bus_id ? bl_arena_node_of_pci(gpu_bus_id) : -1;
    return node >= 0 ? node : bl_arena_node_of(index, n);
}

bl_status bl_model_bind_rank(int index, int n, const char *gpu_bus_id)
{
    return bl_arena_bind_thread(bl_model_node_of_rank(index, n, gpu_bus_id));
}

void bl_model_page_name(const bl_model_config *config, const bl_base_walk *at,
                        char name[BL_PAGE_NAME_BYTES])
{
    const bl_arch *arch = config->arch;
    const bl_base_part *p = at->part;

    const bl_base_unit *unit = &at->layout->units[at->idx_unit];

    if (at->idx_unit >= config->n_layers && !unit->is_group) {
        snprintf(name, BL_PAGE_NAME_BYTES, "%s",
                 at->idx_unit == config->n_layers ? arch->head : arch->embedding);
        return;
    }
    int64_t layer = unit->is_group ? unit->of : at->idx_unit;
    size_t used = 0;
    for (int s = p->first_segment;
         s < p->first_segment + p->n_segments && used < BL_PAGE_NAME_BYTES; s++) {
        const bl_projection *projection =
            bl_arch_segment(arch, bl_model_kind(config, layer), at->idx_matrix, s);
        used += (size_t)(s == p->first_segment
                             ? snprintf(name, BL_PAGE_NAME_BYTES, "%s.%lld.%s", arch->layers,
                                        (long long)layer, projection->module)
                             : snprintf(name + used, BL_PAGE_NAME_BYTES - used, "+%s",
                                        bl_projection_name(projection)));
    }
    if (unit->is_group && used < BL_PAGE_NAME_BYTES)
        snprintf(name + used, BL_PAGE_NAME_BYTES - used, " group %lld", (long long)unit->group);
}
