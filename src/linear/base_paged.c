/* SPDX-License-Identifier: Apache-2.0 */
/* base_paged.c -- a base whose shards are stored in tiers: each part of a matrix is a page, each
 * unit a unit of the pager. */
#include "linear/base_paged.h"

#include <stdlib.h>

#include "linear/base_internal.h"
#include "offload/arena.h"

_Static_assert(BL_GATHER_ITEMS == BL_BASE_MATRICES * BL_BASE_PARTS,
               "an item for each part of each matrix");

/* ---- pages ---- */

static bl_pager_unit *make_units(const bl_base_layout *layout)
{
    bl_pager_unit *units = calloc((size_t)layout->n_units, sizeof *units);

    for (bl_base_walk w = {.layout = layout}; units && bl_base_next(&w);) {
        bl_pager_unit *unit = &units[w.idx_unit];
        unit->whole_ring = layout->units[w.idx_unit].whole_ring;
        unit->is_sub = layout->units[w.idx_unit].is_group;
        unit->what = linear_unit_name(layout, w.idx_unit, &unit->index);
        unit->page[unit->n_items++] = w.index;
    }
    return units;
}

/* ---- a base ---- */

static bl_status verify_pager(void *pager)
{
    return bl_pager_verify(pager);
}

static void destroy_pager(void *pager)
{
    bl_pager_destroy(pager);
}

static bl_status check_pages(const bl_base_layout *layout, const bl_pages *pages, int group_size)
{
    if (layout->n_shards != group_size)
        return BL_FAIL(BL_EINTERNAL, "%d shards for a group of %d ranks", layout->n_shards,
                       group_size);
    if (bl_pages_count(pages) < bl_base_part_count(layout))
        return BL_FAIL(BL_EINTERNAL, "%lld pages for a base of %lld",
                       (long long)bl_pages_count(pages), (long long)bl_base_part_count(layout));
    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) {
        const bl_page_spec *spec = bl_pages_spec(pages, w.index);
        if (spec->n_bytes != w.part->shard_bytes)
            return BL_FAIL(BL_EINTERNAL, "page %s has %zu bytes, its part of the base %zu",
                           spec->name, spec->n_bytes, w.part->shard_bytes);
    }
    return BL_OK;
}

bl_status bl_base_create_paged(const bl_base_layout *layout, bl_pages *pages,
                               const bl_pager_options *options, bl_base **out)
{
    bl_pager *pager = NULL;

    *out = NULL;
    BL_TRY(check_pages(layout, pages, options->comm ? bl_comm_size(options->comm) : 1));
    bl_base *base = calloc(1, sizeof *base);
    bl_pager_unit *units = make_units(layout);
    bl_status st = base && units ? BL_OK : BL_FAIL(BL_ENOMEM, "paged base");
    if (st == BL_OK) st = bl_pager_create(options, pages, layout->n_units, units, &pager);
    free(units);
    if (st != BL_OK) {
        free(base);
        return st;
    }
    *base = (bl_base){.layout = layout,
                      .ring = bl_pager_ring(pager),
                      .store = {pager, verify_pager, destroy_pager}};
    *out = base;
    return BL_OK;
}

/* ---- plans ---- */

bl_status bl_base_assign_tiers(const bl_base_layout *layout, bl_tier tier, double ratio,
                               double host_part, bl_tier *tiers)
{
    int64_t n_parts = bl_base_part_count(layout);
    size_t *n_bytes = calloc((size_t)n_parts + 1, sizeof *n_bytes);

    if (!n_bytes) return BL_FAIL(BL_ENOMEM, "the placement of %lld pages", (long long)n_parts);
    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);)
        n_bytes[w.index - w.part->is_scales] += w.part->shard_bytes;
    if (tier == BL_TIER_DISK)
        bl_tier_spread_two(n_bytes, n_parts, ratio, host_part, tiers);
    else
        bl_tier_spread(n_bytes, n_parts, ratio, tier, tiers);
    free(n_bytes);
    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);)
        if (w.part->is_scales) tiers[w.index] = tiers[w.index - 1];
    return BL_OK;
}

bl_status bl_base_paged_measure(const bl_base_layout *layout, const bl_tier *tiers, int ring_depth,
                                bool bounces, int queue_depth, bl_base_paged_bytes *out)
{
    int64_t n_parts = bl_base_part_count(layout), n_units = layout->n_units;
    bl_pager_unit *units = make_units(layout);
    bl_page_spec *specs = calloc((size_t)n_parts + 1, sizeof *specs);
    bl_status st = BL_OK;

    *out = (bl_base_paged_bytes){0};
    if (!units || !specs) {
        st = BL_FAIL(BL_ENOMEM, "the placement of %lld pages", (long long)n_parts);
        goto done;
    }
    for (bl_base_walk w = {.layout = layout}; bl_base_next(&w);) {
        bl_tier tier = tiers[w.index];
        specs[w.index] = (bl_page_spec){.n_bytes = w.part->shard_bytes, .tier = tier};
        *(tier == BL_TIER_DEVICE ? &out->device
          : tier == BL_TIER_HOST ? &out->host
                                 : &out->disk) += bl_arena_piece_bytes(w.part->shard_bytes);
    }
    out->ring = bl_pager_ring_bytes(specs, layout->n_shards, ring_depth, n_units, units);
    out->reader = bl_pager_host_bytes(specs, bounces, queue_depth, n_units, units);
done:
    free(specs);
    free(units);
    return st;
}
