/* SPDX-License-Identifier: Apache-2.0 */
/* pager.c -- the source that feeds a gather ring from tiers.
 *
 * The ring calls source_start for each item of a unit that it does not find in device memory, then
 * source_finish for each. A page is a transfer (transfer.h) from its tier to the slot: start begins
 * it, finish ends it. Where the host cannot write device memory, pages from disk pass through a
 * staging buffer (`bounce`), and the host stream `disk` waits for reads and checks pages, with
 * verify_always also those of host memory. Elsewhere the copy stream does.
 *
 *   a page          entered by                       left by
 *   UNSEEN          create; verify                   check_arrival: it agrees with its checksum
 *   TRUSTED         check_arrival                    verify, which checks again
 *
 * Invariants; bl_pager_validate checks those marked *, which the calling thread can see.
 *   1.  `trusted` belongs to the tasks of reads (to verify, while the streams are idle): one at a
 *       time, in order, no lock. The staging buffer is theirs from `bounced` to their end.
 *   2.* A unit's items are all finished before the next unit's are started: so slot i of the mover,
 *       of item i, is IDLE when it is begun, and the staging buffer, large enough for any unit, is
 *       copied out before the next unit is read into it.
 *   3.* In a slot of the ring, items do not overlap and do not exceed it; a unit's disk pages fit
 *       the staging buffer.
 *   4.  What leaves the copy stream came from memory that was checked when it was filled, or from a
 *       disk page that is TRUSTED (with verify_always: that agreed with its checksum just now).
 *   5.  Once their stream has failed, tasks are skipped and reads may stay under way: nothing looks
 *       at the memory they fill, and the reader is destroyed before any memory it writes to.
 * The invariants of slots are the ring's. */
#include "offload/pager.h"

#include <assert.h>
#include <stdlib.h>
#include <string.h>

#include "base/log.h"
#include "base/sizes.h"
#include "offload/arena.h"
#include "offload/transfer.h"

_Static_assert((int)BL_GATHER_ITEMS <= (int)BL_STREAM_READS, "a read for each item of a unit");

enum {
    SMALLEST_CHUNK_BYTES = 256 << 10, /* smaller requests cost a disk more than they save */
    SMALL_REQUESTS = 12 /* of a unit, smaller than a chunk: where its larger pages end */
};

struct bl_pager {
    bl_pager_options options;
    bl_pager_hooks hooks;
    bl_pages *pages;
    bl_page_spec *specs; /* [bl_pages_count] */
    int64_t n_units;
    bl_pager_unit *units;
    bl_gather_unit *gather_units;
    int group_size;
    bl_gather_ring *ring;
    bl_arena *bounce_arena;
    char *bounce; /* NULL: disk pages are read straight into slots */
    size_t bounce_bytes;
    bl_reader *reader; /* NULL: no page is on disk */
    bl_stream *disk;   /* NULL: the copy stream does its work */
    bl_mover mover;
    bl_event *bounced; /* on copy: the staging buffer is copied out */
    bool *trusted;     /* [bl_pages_count]: disk pages that have agreed with their checksums */
    /* Of the calling thread: what has been queued for the unit that was queued last. */
    int64_t queued_unit;
    int n_started, n_finished;
};

/* ---- sizes ---- */

static size_t saturated_add(size_t a, size_t b)
{
    size_t sum;
    return bl_add_overflows(a, b, &sum) ? SIZE_MAX : sum;
}

static size_t saturated_mul(size_t a, size_t b)
{
    size_t product;
    return bl_mul_overflows(a, b, &product) ? SIZE_MAX : product;
}

/* One item after the other. Lent ones take no room, in a group of one. */
static void lay_out_unit(const bl_page_spec *specs, int group_size, const bl_pager_unit *unit,
                         bl_gather_unit *out)
{
    size_t end = 0;

    *out = (bl_gather_unit){.what = unit->what,
                            .index = unit->index,
                            .n_items = unit->n_items,
                            .whole_ring = unit->whole_ring,
                            .is_sub = unit->is_sub};
    for (int i = 0; i < unit->n_items; i++) {
        const bl_page_spec *spec = &specs[unit->page[i]];
        bool is_lent = spec->tier == BL_TIER_DEVICE;
        out->item[i] =
            (bl_gather_item){.shard_bytes = spec->n_bytes,
                             .slot_offset = end,
                             .lane = spec->tier == BL_TIER_DISK ? BL_LANE_DISK : BL_LANE_COPY,
                             .is_lent = is_lent};
        if (is_lent && group_size == 1) continue;
        end = saturated_add(end,
                            bl_arena_piece_bytes(saturated_mul(spec->n_bytes, (size_t)group_size)));
    }
}

static bl_gather_unit *lay_out(const bl_page_spec *specs, int group_size, int64_t n_units,
                               const bl_pager_unit *units)
{
    bl_gather_unit *out = calloc((size_t)n_units, sizeof *out);
    for (int64_t u = 0; out && u < n_units; u++)
        lay_out_unit(specs, group_size, &units[u], &out[u]);
    return out;
}

size_t bl_pager_ring_bytes(const bl_page_spec *specs, int group_size, int ring_depth,
                           int64_t n_units, const bl_pager_unit *units)
{
    bl_gather_unit *gather_units = lay_out(specs, group_size, n_units, units);
    size_t n_bytes = gather_units
                         ? bl_gather_ring_bytes(ring_depth, n_units, gather_units, group_size)
                         : SIZE_MAX;
    free(gather_units);
    return n_bytes;
}

/* The bytes on disk of a unit's first n_items items: the place of item n_items in the staging
 * buffer. */
static size_t disk_bytes(const bl_page_spec *specs, const bl_pager_unit *unit, int n_items)
{
    size_t sum = 0;
    for (int i = 0; i < n_items; i++)
        if (specs[unit->page[i]].tier == BL_TIER_DISK)
            sum = saturated_add(sum, bl_arena_piece_bytes(specs[unit->page[i]].n_bytes));
    return sum;
}

static size_t largest_disk_bytes(const bl_page_spec *specs, int64_t n_units,
                                 const bl_pager_unit *units)
{
    size_t largest = 0;
    for (int64_t u = 0; u < n_units; u++) {
        size_t n_bytes = disk_bytes(specs, &units[u], units[u].n_items);
        if (n_bytes > largest) largest = n_bytes;
    }
    return largest;
}

/* The queue is as deep as the options say where the largest unit fills it with requests of the
 * largest size, and no deeper than one unit can fill: only one is read at a time. */
static void size_queue(size_t unit_bytes, int queue_depth, int *depth, size_t *chunk_bytes)
{
    int64_t n_bytes = unit_bytes > INT64_MAX / 2 ? INT64_MAX / 2 : (int64_t)unit_bytes;
    int64_t deepest = queue_depth > 0 ? queue_depth : BL_IO_QUEUE_DEPTH;
    int64_t chunk = bl_round_up(bl_ceil_div(n_bytes, deepest), BL_IO_ALIGN_BYTES);

    if (chunk > BL_IO_CHUNK_BYTES) chunk = BL_IO_CHUNK_BYTES;
    if (chunk < SMALLEST_CHUNK_BYTES) chunk = SMALLEST_CHUNK_BYTES;
    *chunk_bytes = (size_t)chunk;
    *depth = (int)bl_min_i64(deepest, bl_ceil_div(n_bytes, chunk) + SMALL_REQUESTS);
}

size_t bl_pager_host_bytes(const bl_page_spec *specs, bool bounces, int queue_depth,
                           int64_t n_units, const bl_pager_unit *units)
{
    size_t unit_bytes = largest_disk_bytes(specs, n_units, units), chunk_bytes;
    int depth;

    if (unit_bytes == 0) return 0;
    size_queue(unit_bytes, queue_depth, &depth, &chunk_bytes);
    size_t buffers = saturated_mul((size_t)depth, chunk_bytes + 2 * (size_t)BL_IO_ALIGN_BYTES);
    return saturated_add(buffers, bounces ? unit_bytes : 0);
}

/* ---- pages in flight ---- */

/* UNSEEN -> TRUSTED. A second read repairs damage in transit, in memory or a cable, but not damage
 * on the disk. `bytes`: host memory. */
static bl_status check_arrival(bl_pager *pager, const bl_place *from, int64_t page, void *bytes)
{
    const bl_place to = {.tier = BL_TIER_HOST, .memory = bytes};
    const bl_page_spec *spec = &pager->specs[page];

    if (bl_pages_is_rewritten(pager->pages)) return BL_OK;
    if (pager->trusted[page] && !pager->options.verify_always) return BL_OK;
    if (bl_pages_check(pager->pages, page, bytes) != BL_OK) {
        bl_log_warning("%s: reading it again", bl_error_text());
        bl_status st = bl_transfer_now(&pager->mover, from, &to, spec->n_bytes);
        if (st != BL_OK) return bl_error_prefix(st, "page %s", spec->name);
        st = bl_pages_check(pager->pages, page, bytes);
        if (st != BL_OK) bl_pages_distrust_disk(pager->pages);
        BL_TRY(st);
    }
    pager->trusted[page] = true;
    return BL_OK;
}

/* bl_mover.arrived: a page has been read, or with verify_always is to be copied from host
 * memory. */
static bl_status arrived(void *user, const bl_move *t, bl_status st)
{
    bl_pager *pager = user;
    void *bytes = bl_transfer_host_memory(t);

    if (st != BL_OK) return bl_error_prefix(st, "page %s", pager->specs[t->unit].name);
    return t->from.tier == BL_TIER_DISK ? check_arrival(pager, &t->from, t->unit, bytes)
                                        : bl_pages_check(pager->pages, t->unit, bytes);
}

typedef struct pace_args {
    bl_pager *pager;
    int64_t page;
} pace_args;

static bl_status pace_task(bl_stream *stream, const void *args)
{
    const pace_args *a = args;
    const bl_page_spec *spec = &a->pager->specs[a->page];
    (void)stream;
    a->pager->hooks.pace(a->pager->hooks.pace_user, spec->tier, a->page, spec->n_bytes);
    return BL_OK;
}

/* ---- invariants ---- */

/* Invariant 3 of one unit. */
static bl_status validate_unit(const bl_pager *pager, int64_t unit)
{
    const bl_gather_unit *u = &pager->gather_units[unit];
    size_t room = bl_gather_ring_bytes(1, 1, u, pager->group_size), end = 0;

    for (int i = 0; i < u->n_items; i++) {
        if (u->item[i].is_lent && pager->group_size == 1) continue;
        if (u->item[i].slot_offset < end)
            return BL_FAIL(BL_EINTERNAL, "pager: item %d of unit %lld overlaps the one before it",
                           i, (long long)unit);
        end = u->item[i].slot_offset + u->item[i].shard_bytes * (size_t)pager->group_size;
    }
    if (end > room)
        return BL_FAIL(BL_EINTERNAL, "pager: unit %lld ends at %zu of a slot of %zu",
                       (long long)unit, end, room);
    size_t bounced = disk_bytes(pager->specs, &pager->units[unit], u->n_items);
    if (pager->bounce && bounced > pager->bounce_bytes)
        return BL_FAIL(BL_EINTERNAL, "pager: unit %lld needs %zu of %zu bytes to bounce",
                       (long long)unit, bounced, pager->bounce_bytes);
    return BL_OK;
}

bl_status bl_pager_validate(const bl_pager *pager)
{
    BL_TRY(bl_gather_ring_validate(pager->ring));
    if (pager->n_started != pager->n_finished)
        return BL_FAIL(BL_EINTERNAL, "pager: of unit %lld, %d items were started and %d finished",
                       (long long)pager->queued_unit, pager->n_started, pager->n_finished);
    for (int64_t u = 0; u < pager->n_units; u++) BL_TRY(validate_unit(pager, u));
    return BL_OK;
}

/* When a unit has been queued whole; in debug builds. */
static void check_state(const bl_pager *pager)
{
    assert(bl_pager_validate(pager) == BL_OK);
    (void)pager;
}

/* ---- the source: called by the ring, on the caller's thread ---- */

static bl_place place_of(const bl_pager *pager, int64_t page)
{
    return (bl_place){.tier = pager->specs[page].tier,
                      .offset_bytes = bl_pages_offset(pager->pages, page),
                      .memory = bl_pages_memory(pager->pages, page)};
}

/* The move of an item to its place in a slot. */
static bl_move describe(const bl_pager *pager, int64_t unit, int item, void *dst)
{
    const bl_pager_unit *u = &pager->units[unit];
    int64_t page = u->page[item];
    bool bounces = pager->bounce && pager->specs[page].tier == BL_TIER_DISK;

    return (bl_move){.from = place_of(pager, page),
                     .to = {.tier = BL_TIER_DEVICE, .memory = dst},
                     .n_bytes = pager->specs[page].n_bytes,
                     .through = bounces ? pager->bounce + disk_bytes(pager->specs, u, item) : NULL,
                     .is_checked = pager->options.verify_always,
                     .unit = page};
}

/* Rewritten pages are read after their update, for which the copy stream waits
 * (bl_gather_ring_shards_changed). */
static bl_status wait_to_bounce(const bl_pager *pager, bl_stream *copy)
{
    if (bl_pages_is_rewritten(pager->pages)) BL_TRY(bl_event_record(pager->bounced, copy));
    return bl_stream_wait(pager->disk, pager->bounced);
}

static bl_status source_start(void *user, int64_t unit, int item, void *dst, bl_stream *copy)
{
    bl_pager *pager = user;
    const bl_move t = describe(pager, unit, item, dst);

    if (pager->n_started == pager->n_finished) {
        pager->queued_unit = unit;
        pager->n_started = pager->n_finished = 0;
        if (pager->disk) BL_TRY(wait_to_bounce(pager, copy));
    }
    if (unit != pager->queued_unit || pager->n_finished > 0)
        return BL_FAIL(BL_EINTERNAL, "pager: unit %lld is started before unit %lld is finished",
                       (long long)unit, (long long)pager->queued_unit);
    pager->n_started++;
    return bl_transfer_begin(&pager->mover, item, &t);
}

static bl_status source_finish(void *user, int64_t unit, int item, void *dst, bl_stream *copy)
{
    bl_pager *pager = user;
    const bl_move t = describe(pager, unit, item, dst);
    const pace_args pace = {pager, t.unit};

    pager->n_finished++;
    BL_TRY(bl_transfer_finish(&pager->mover, item, &t));
    if (pager->n_finished == pager->n_started) {
        check_state(pager);
        if (pager->disk) BL_TRY(bl_event_record(pager->bounced, copy));
    }
    return pager->hooks.pace ? bl_stream_call(copy, pace_task, &pace, sizeof pace) : BL_OK;
}

/* ---- create and destroy ---- */

static bl_status check_units(const bl_pages *pages, int64_t n_units, const bl_pager_unit *units)
{
    for (int64_t u = 0; u < n_units; u++) {
        if (units[u].n_items < 0 || units[u].n_items > BL_GATHER_ITEMS)
            return BL_FAIL(BL_EINTERNAL, "pager: unit %lld has %d items", (long long)u,
                           units[u].n_items);
        for (int i = 0; i < units[u].n_items; i++)
            if (units[u].page[i] < 0 || units[u].page[i] >= bl_pages_count(pages))
                return BL_FAIL(BL_EINTERNAL, "pager: unit %lld wants page %lld of %lld",
                               (long long)u, (long long)units[u].page[i],
                               (long long)bl_pages_count(pages));
    }
    return BL_OK;
}

static bl_status create_ring(bl_pager *pager)
{
    const bl_pager_options *o = &pager->options;
    bl_gather_ring_options options = {.device = o->device,
                                      .comm = o->comm,
                                      .stream = o->gather,
                                      .copy = o->copy,
                                      .source = {pager, source_start, source_finish},
                                      .depth = o->ring_depth,
                                      .is_synchronous = pager->hooks.is_synchronous,
                                      .timeline = o->timeline,
                                      .lane = BL_LANE_GATHER};

    pager->gather_units = lay_out(pager->specs, pager->group_size, pager->n_units, pager->units);
    if (!pager->gather_units)
        return BL_FAIL(BL_ENOMEM, "a pager of %lld units", (long long)pager->n_units);
    for (int64_t u = 0; u < pager->n_units; u++)
        for (int i = 0; i < pager->units[u].n_items; i++) {
            bl_gather_item *item = &pager->gather_units[u].item[i];
            if (item->is_lent) item->shard = bl_pages_memory(pager->pages, pager->units[u].page[i]);
        }
    return bl_gather_ring_create(&options, pager->n_units, pager->gather_units, &pager->ring);
}

static bl_status create_disk_stream(bl_pager *pager)
{
    bl_device *device = pager->options.device;

    BL_TRY(bl_event_create(device, &pager->bounced));
    return bl_stream_create_host(device, "disk", &pager->disk);
}

/* The reader, and where its reads go: into slots where the host can write them, and their memory is
 * registered; else into the staging buffer. */
static bl_status create_reader(bl_pager *pager)
{
    size_t unit_bytes = largest_disk_bytes(pager->specs, pager->n_units, pager->units);
    bl_reader_options options = {.engine = pager->options.io_engine,
                                 .hook = pager->hooks.io,
                                 .hook_arg = pager->hooks.io_user};
    bool host_writes = bl_device_host_writes(pager->options.device);

    if (unit_bytes > 0 && (pager->hooks.bounces || !host_writes)) {
        bl_arena_options arena = {.device = pager->options.device,
                                  .size_bytes = unit_bytes,
                                  .what = "bounce buffer of the pager",
                                  .node = -1,
                                  .pin = !host_writes};
        BL_TRY(bl_arena_create(&arena, &pager->bounce_arena));
        pager->bounce = bl_arena_take(pager->bounce_arena, unit_bytes);
        pager->bounce_bytes = unit_bytes;
        options.memory = pager->bounce;
        options.memory_bytes = unit_bytes;
    } else if (unit_bytes > 0) {
        options.memory = bl_gather_ring_memory(pager->ring);
        options.memory_bytes = bl_gather_ring_bytes(pager->options.ring_depth, pager->n_units,
                                                    pager->gather_units, pager->group_size);
    }
    size_queue(unit_bytes, pager->options.queue_depth, &options.queue_depth, &options.chunk_bytes);
    return bl_transfer_open_reader(pager->options.device, &options, bl_pages_files(pager->pages),
                                   &pager->reader);
}

bl_status bl_pager_create(const bl_pager_options *options, bl_pages *pages, int64_t n_units,
                          const bl_pager_unit *units, bl_pager **out)
{
    bl_status st = BL_OK;

    *out = NULL;
    BL_TRY(check_units(pages, n_units, units));
    bl_pager *pager = calloc(1, sizeof *pager);
    if (!pager) return BL_FAIL(BL_ENOMEM, "a pager");
    pager->options = *options;
    if (options->hooks) pager->hooks = *options->hooks;
    pager->pages = pages;
    pager->n_units = n_units;
    pager->group_size = options->comm ? bl_comm_size(options->comm) : 1;
    int64_t n_pages = bl_pages_count(pages);
    pager->units = calloc((size_t)n_units, sizeof *units);
    pager->specs = calloc((size_t)n_pages, sizeof *pager->specs);
    pager->trusted = calloc((size_t)n_pages, sizeof *pager->trusted);
    if (!pager->units || !pager->specs || !pager->trusted) {
        st = BL_FAIL(BL_ENOMEM, "a pager of %lld units", (long long)n_units);
        goto done;
    }
    memcpy(pager->units, units, (size_t)n_units * sizeof *units);
    for (int64_t p = 0; p < n_pages; p++) pager->specs[p] = *bl_pages_spec(pages, p);
    BL_TRY_GOTO(st, done, create_ring(pager));
    if (bl_pages_tier_bytes(pages, BL_TIER_DISK) > 0) BL_TRY_GOTO(st, done, create_reader(pager));
    if (pager->bounce || (options->verify_always && !bl_device_host_writes(options->device)))
        BL_TRY_GOTO(st, done, create_disk_stream(pager));
    pager->mover = (bl_mover){.device = options->device,
                              .in = options->copy,
                              .disk = pager->disk,
                              .reader = {pager->reader},
                              .arrived = arrived,
                              .user = pager};
    BL_TRY_GOTO(st, done, bl_mover_open(&pager->mover));
    *out = pager;
    pager = NULL;
done:
    bl_pager_destroy(pager);
    return st;
}

void bl_pager_destroy(bl_pager *pager)
{
    if (!pager) return;
    if (pager->ring) { /* tasks that name this pager may still be queued behind a failure */
        (void)bl_stream_synchronize(pager->options.copy);
        (void)bl_stream_synchronize(pager->options.gather);
    }
    bl_stream_destroy(pager->disk);
    bl_mover_close(&pager->mover);
    bl_event_destroy(pager->bounced);
    bl_reader_destroy(pager->reader); /* invariant 5: before the memory that it writes to */
    bl_gather_ring_destroy(pager->ring);
    bl_arena_destroy(pager->bounce_arena);
    free(pager->gather_units);
    free(pager->trusted);
    free(pager->specs);
    free(pager->units);
    free(pager);
}

bl_gather_ring *bl_pager_ring(const bl_pager *pager)
{
    return pager->ring;
}

/* ---- checks ---- */

static size_t largest_disk_page(const bl_pager *pager)
{
    size_t largest = 0;
    for (int64_t p = 0; p < bl_pages_count(pager->pages); p++)
        if (pager->specs[p].tier == BL_TIER_DISK && pager->specs[p].n_bytes > largest)
            largest = pager->specs[p].n_bytes;
    return largest;
}

bl_status bl_pager_verify(bl_pager *pager)
{
    bl_device *device = pager->options.device;
    bl_status st = BL_OK;
    bl_staging *staging = NULL;
    void *buffer = NULL;

    BL_TRY(bl_device_alloc(device, BL_SPACE_HOST, largest_disk_page(pager), "a page to be verified",
                           &buffer));
    BL_TRY_GOTO(st, done,
                bl_staging_create(device, BL_STAGING_BYTES, "staging of pages", &staging));
    for (int64_t p = 0; p < bl_pages_count(pager->pages); p++) {
        const bl_move t = {.from = place_of(pager, p),
                           .to = {.tier = BL_TIER_HOST, .memory = buffer},
                           .n_bytes = pager->specs[p].n_bytes,
                           .unit = p};
        if (t.from.tier != BL_TIER_DISK) {
            BL_TRY_GOTO(st, done, bl_pages_verify_memory(pager->pages, p, staging));
            continue;
        }
        pager->trusted[p] = false;
        st = bl_transfer_now(&pager->mover, &t.from, &t.to, t.n_bytes);
        BL_TRY_GOTO(st, done, arrived(pager, &t, st));
    }
done:
    bl_staging_destroy(staging);
    bl_device_free(device, BL_SPACE_HOST, buffer);
    return st;
}
