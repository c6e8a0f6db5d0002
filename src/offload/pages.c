/* SPDX-License-Identifier: Apache-2.0 */
/* pages.c -- the frozen bytes of a rank: written once, hashed while they are written, then read.
 *
 * A page is the unit of placement. Its tier decides where its bytes are, and nothing else: device
 * pages are one block, host pages one arena, disk pages one file (page_file.c), so that creation
 * makes three allocations and fails before anything is written.
 *
 *   create   places every page. If a page file of the same key is found whole, its pages count as
 *            written, with the checksums of its list; else its space is taken for writing
 *   write    fills one page after the other, from its first byte to its last: the checksum is that
 *            of the stream of bytes, whatever the pieces. Pages that a file holds are skipped
 *   seal     every page is whole; a new file is made durable and gets its name. From here on
 *            memory and file do not change, and any thread may read
 *
 * A checksum belongs to the page, not to its tier: bytes that come back from a disk, or that were
 * in memory for days, are compared with what was written when the model was loaded. A difference is
 * BL_EINPUT; its finder calls bl_pages_distrust_disk, which removes the list, so that the next
 * start writes the file anew. */
#include "offload/pages.h"

#include <assert.h>
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "base/xxh3.h"
#include "offload/arena.h"
#include "offload/page_file_internal.h"
#include "offload/page_writer_internal.h"
#include "offload/transfer.h"

_Static_assert((int)BL_DEVICE_ALIGNMENT_BYTES == (int)BL_IO_ALIGN_BYTES,
               "a page takes the same in every tier");

typedef struct held_page {
    bl_page_spec spec; /* the name is the page's own */
    void *memory;      /* NULL: on disk */
    size_t n_written;
    bool is_whole; /* then its checksum is known */
    uint64_t xxh3_64, tag;
    int64_t offset_bytes; /* on disk */
} held_page;

struct bl_pages {
    bl_device *device;
    void *block;        /* all device pages */
    bl_arena *arena;    /* all host pages */
    bl_page_file *file; /* all disk pages */
    bool has_disk, is_sealed, is_rewritten;
    XXH3_state_t *hash; /* of the page being written */
    bl_stream *stream;  /* copies bytes to device pages while they are written */
    int64_t current;    /* being written; -1: none */
    int64_t n_pages;
    held_page page[];
};

/* ---- memory ---- */

/* An empty page has an address, too. */
static size_t memory_bytes(const held_page *page)
{
    return bl_arena_piece_bytes(page->spec.n_bytes ? page->spec.n_bytes : 1);
}

/* Of all pages of a tier; SIZE_MAX: more than can be counted. */
static size_t tier_memory_bytes(const bl_pages *pages, bl_tier tier)
{
    size_t sum = 0;

    for (int64_t i = 0; i < pages->n_pages; i++)
        if (pages->page[i].spec.tier == tier &&
            bl_add_overflows(sum, memory_bytes(&pages->page[i]), &sum))
            return SIZE_MAX;
    return sum;
}

static bl_status take_device(bl_pages *pages)
{
    size_t n_bytes = tier_memory_bytes(pages, BL_TIER_DEVICE);

    if (n_bytes == 0) return BL_OK;
    BL_TRY(
        bl_device_alloc(pages->device, BL_SPACE_DEVICE, n_bytes, "frozen weights", &pages->block));
    char *at = pages->block;
    for (int64_t i = 0; i < pages->n_pages; i++) {
        if (pages->page[i].spec.tier != BL_TIER_DEVICE) continue;
        pages->page[i].memory = at;
        at += memory_bytes(&pages->page[i]);
    }
    return bl_stream_create(pages->device, "load", &pages->stream);
}

static bl_status take_host(bl_pages *pages, const bl_pages_options *options)
{
    const bl_arena_options arena = {
        .device = pages->device,
        .size_bytes = tier_memory_bytes(pages, BL_TIER_HOST),
        .what = "offloaded weights",
        .node = options->node,
        .pin = options->pin,
    };

    if (arena.size_bytes == 0) return BL_OK;
    BL_TRY(bl_arena_create(&arena, &pages->arena));
    for (int64_t i = 0; i < pages->n_pages; i++) {
        held_page *page = &pages->page[i];
        if (page->spec.tier != BL_TIER_HOST) continue;
        page->memory = bl_arena_take(pages->arena, memory_bytes(page));
        if (!page->memory)
            return BL_FAIL(BL_EINTERNAL, "page %s: the arena is too small", page->spec.name);
    }
    return BL_OK;
}

/* ---- the disk tier ---- */

/* The places of the disk pages in their order; *out has room for all pages and is the caller's. */
static bl_status list_places(const bl_pages *pages, bl_page_place **out, size_t *n_places)
{
    bl_page_place *places = calloc((size_t)pages->n_pages + 1, sizeof *places);

    *out = places;
    *n_places = 0;
    if (!places) return BL_FAIL(BL_ENOMEM, "%" PRId64 " pages", pages->n_pages);
    for (int64_t i = 0; i < pages->n_pages; i++) {
        const held_page *page = &pages->page[i];
        if (page->spec.tier == BL_TIER_DISK)
            places[(*n_places)++] = (bl_page_place){page->spec.name, page->spec.n_bytes,
                                                    page->offset_bytes, page->xxh3_64, page->tag};
    }
    return BL_OK;
}

size_t bl_pages_writing_bytes(int n_on_host)
{
    return bl_page_writer_bytes(n_on_host);
}

static bl_status open_disk(bl_pages *pages, const bl_pages_options *options)
{
    const bl_page_owner owner = {options->key, options->shard, options->n_shards};
    bl_page_place *places;
    size_t n_places;

    if (bl_transfer_is_simulated(options->device)) return BL_OK; /* without a file */
    bl_status st = list_places(pages, &places, &n_places);
    if (st != BL_OK || n_places == 0) goto done;
    if (!options->dir) {
        st = BL_FAIL(BL_EINTERNAL, "pages on disk, and no folder for them");
        goto done;
    }
    BL_TRY_GOTO(st, done,
                options->is_rewritten
                    ? bl_page_file_create(options->dir, &owner, options->n_on_host, n_places,
                                          places, &pages->file)
                    : bl_page_file_open(options->dir, &owner, options->n_on_host, n_places, places,
                                        &pages->has_disk, &pages->file));
    for (int64_t i = 0, j = 0; i < pages->n_pages; i++) {
        held_page *page = &pages->page[i];
        if (page->spec.tier != BL_TIER_DISK) continue;
        page->offset_bytes = places[j].offset_bytes;
        page->xxh3_64 = places[j].xxh3_64;
        page->tag = places[j].tag;
        page->is_whole |= pages->has_disk;
        j++;
    }
done:
    free(places);
    return st;
}

/* ---- create and destroy ---- */

static bl_status copy_specs(bl_pages *pages, const bl_page_spec *specs)
{
    bl_page_place *names = calloc((size_t)pages->n_pages + 1, sizeof *names);
    bl_status st = names ? BL_OK : BL_FAIL(BL_ENOMEM, "%" PRId64 " pages", pages->n_pages);

    for (int64_t i = 0; i < pages->n_pages && st == BL_OK; i++) {
        held_page *page = &pages->page[i];
        char *name = strdup(specs[i].name);
        page->spec = (bl_page_spec){name, specs[i].n_bytes, specs[i].tier};
        page->is_whole = specs[i].n_bytes == 0; /* nothing will be written */
        page->xxh3_64 = XXH3_64bits(NULL, 0);
        names[i].name = name;
        if (!name) st = BL_FAIL(BL_ENOMEM, "page %s", specs[i].name);
    }
    if (st == BL_OK) st = bl_page_names_check((size_t)pages->n_pages, names);
    free(names);
    return st;
}

bl_status bl_pages_create(const bl_pages_options *options, int64_t n_pages,
                          const bl_page_spec *specs, bl_pages **out)
{
    bl_status st = BL_OK;
    bl_pages *pages = NULL;
    size_t n_bytes;

    *out = NULL;
    if (n_pages < 0 || bl_mul_overflows((size_t)n_pages, sizeof pages->page[0], &n_bytes) ||
        bl_add_overflows(n_bytes, sizeof *pages, &n_bytes) || !(pages = calloc(1, n_bytes)))
        return BL_FAIL(BL_ENOMEM, "%" PRId64 " pages", n_pages);
    pages->device = options->device;
    pages->is_rewritten = options->is_rewritten;
    pages->n_pages = n_pages;
    pages->current = -1;
    if (!(pages->hash = XXH3_createState())) {
        st = BL_FAIL(BL_ENOMEM, "%" PRId64 " pages", n_pages);
        goto done;
    }
    BL_TRY_GOTO(st, done, copy_specs(pages, specs));
    for (int64_t i = 0; options->is_blank && i < n_pages; i++) pages->page[i].is_whole = true;
    BL_TRY_GOTO(st, done, open_disk(pages, options)); /* first: it rejects bad input at once */
    BL_TRY_GOTO(st, done, take_device(pages));
    BL_TRY_GOTO(st, done, take_host(pages, options));
    *out = pages;
    pages = NULL;
done:
    bl_pages_destroy(pages);
    return st;
}

void bl_pages_destroy(bl_pages *pages)
{
    if (!pages) return;
    bl_stream_destroy(pages->stream);
    bl_page_file_close(pages->file);
    bl_arena_destroy(pages->arena);
    if (pages->block) bl_device_free(pages->device, BL_SPACE_DEVICE, pages->block);
    XXH3_freeState(pages->hash);
    for (int64_t i = 0; i < pages->n_pages; i++) free((char *)pages->page[i].spec.name);
    free(pages);
}

/* ---- invariants ---- */

/* Of the states FILLING and SEALED: one page at a time is half written; SEALED, all are whole. */
static bool is_valid(const bl_pages *pages)
{
    for (int64_t i = 0; i < pages->n_pages; i++) {
        const held_page *page = &pages->page[i];
        bool is_partial = page->n_written > 0 && page->n_written < page->spec.n_bytes;
        if (page->n_written > page->spec.n_bytes || (is_partial && i != pages->current) ||
            (pages->is_sealed && !page->is_whole))
            return false;
    }
    return pages->current < pages->n_pages && !(pages->is_sealed && pages->current >= 0);
}

/* After each transition; in debug builds. */
static void check_state(const bl_pages *pages)
{
    assert(is_valid(pages));
    (void)pages, (void)is_valid;
}

/* ---- writing ---- */

/* Whether these bytes are the next of the page, and no other page is half written. */
static bl_status check_order(const bl_pages *pages, int64_t index, size_t offset, size_t n_bytes)
{
    const held_page *page = &pages->page[index];
    const char *name = page->spec.name;

    if (pages->is_sealed) return BL_FAIL(BL_EINTERNAL, "page %s: written after seal", name);
    if (page->spec.tier == BL_TIER_DISK && pages->has_disk)
        return BL_FAIL(BL_EINTERNAL, "page %s: written, and the disk has it", name);
    if (pages->current >= 0 && pages->current != index)
        return BL_FAIL(BL_EINTERNAL, "page %s: written before page %s is whole", name,
                       pages->page[pages->current].spec.name);
    if (offset != page->n_written || n_bytes > page->spec.n_bytes - offset)
        return BL_FAIL(BL_EINTERNAL,
                       "page %s: %zu bytes written at %zu, where %zu of %zu are there", name,
                       n_bytes, offset, page->n_written, page->spec.n_bytes);
    return BL_OK;
}

static bl_status begin_page(bl_pages *pages, int64_t index)
{
    XXH3_64bits_reset(pages->hash);
    pages->current = index;
    if (pages->page[index].spec.tier != BL_TIER_DISK) return BL_OK;
    return bl_page_file_begin(pages->file, pages->page[index].spec.name,
                              pages->page[index].offset_bytes);
}

static bl_status store(bl_pages *pages, const held_page *page, size_t offset, const void *bytes,
                       size_t n_bytes)
{
    char *to = page->memory ? (char *)page->memory + offset : NULL;

    if (n_bytes == 0) return BL_OK;
    if (!to) return bl_page_file_append(pages->file, bytes, n_bytes);
    if (to == bytes) return BL_OK;
    if (page->spec.tier == BL_TIER_HOST) {
        memcpy(to, bytes, n_bytes);
        return BL_OK;
    }
    bl_status st = bl_stream_copy(pages->stream, to, bytes, n_bytes);
    bl_status synced =
        bl_stream_synchronize(pages->stream); /* in any case: bytes are the caller's again */
    return st != BL_OK ? st : synced;
}

bl_status bl_pages_write(bl_pages *pages, int64_t index, size_t offset, const void *bytes,
                         size_t n_bytes)
{
    held_page *page = &pages->page[index];
    bl_status st = check_order(pages, index, offset, n_bytes);

    if (st != BL_OK || page->is_whole) return st;
    if (pages->current < 0) st = begin_page(pages, index);
    if (st == BL_OK) st = store(pages, page, offset, bytes, n_bytes);
    if (st == BL_OK && n_bytes > 0) XXH3_64bits_update(pages->hash, bytes, n_bytes);
    page->n_written += n_bytes;
    if (st == BL_OK && page->n_written == page->spec.n_bytes) {
        if (page->spec.tier == BL_TIER_DISK) st = bl_page_file_end(pages->file);
        page->xxh3_64 = XXH3_64bits_digest(pages->hash);
        page->is_whole = st == BL_OK;
        pages->current = -1;
    }
    check_state(pages);
    /* A write to the disk names its page itself: it may be an earlier one that failed. */
    return st == BL_OK || page->spec.tier == BL_TIER_DISK
               ? st
               : bl_error_prefix(st, "page %s", page->spec.name);
}

void bl_pages_set_tag(bl_pages *pages, int64_t index, uint64_t tag)
{
    pages->page[index].tag = tag;
}

uint64_t bl_pages_tag(const bl_pages *pages, int64_t index)
{
    return pages->page[index].tag;
}

static bl_status publish_disk(bl_pages *pages)
{
    bl_page_place *places;
    size_t n_places;

    bl_status st = list_places(pages, &places, &n_places);
    if (st == BL_OK) st = bl_page_file_publish(pages->file, n_places, places);
    free(places);
    return st;
}

bl_status bl_pages_seal(bl_pages *pages)
{
    if (pages->is_sealed) return BL_FAIL(BL_EINTERNAL, "pages sealed twice");
    for (int64_t i = 0; i < pages->n_pages; i++) {
        const held_page *page = &pages->page[i];
        if (!page->is_whole)
            return BL_FAIL(BL_EINTERNAL, "page %s: sealed with %zu of %zu bytes", page->spec.name,
                           page->n_written, page->spec.n_bytes);
    }
    if (pages->file && pages->is_rewritten)
        BL_TRY(bl_page_file_take(pages->file));
    else if (pages->file && !pages->has_disk)
        BL_TRY(publish_disk(pages));
    bl_stream_destroy(pages->stream);
    pages->stream = NULL;
    pages->is_sealed = true;
    check_state(pages);
    return BL_OK;
}

/* ---- properties ---- */

bool bl_pages_is_rewritten(const bl_pages *pages)
{
    return pages->is_rewritten;
}

bool bl_pages_has_disk(const bl_pages *pages)
{
    return pages->has_disk;
}

const bl_page_spec *bl_pages_spec(const bl_pages *pages, int64_t index)
{
    return &pages->page[index].spec;
}

int64_t bl_pages_count(const bl_pages *pages)
{
    return pages->n_pages;
}

void *bl_pages_memory(const bl_pages *pages, int64_t index)
{
    return pages->page[index].memory;
}

size_t bl_pages_tier_bytes(const bl_pages *pages, bl_tier tier)
{
    return tier_memory_bytes(pages, tier);
}

bl_io_files *bl_pages_files(const bl_pages *pages)
{
    return pages->file ? bl_page_file_files(pages->file) : NULL;
}

int64_t bl_pages_offset(const bl_pages *pages, int64_t index)
{
    return pages->page[index].offset_bytes;
}

/* ---- checks ---- */

static bl_status check_written(const held_page *page)
{
    if (page->is_whole) return BL_OK;
    return BL_FAIL(BL_EINTERNAL, "page %s: checked before it was written", page->spec.name);
}

static bl_status compare(const bl_pages *pages, const held_page *page, uint64_t found)
{
    if (found == page->xxh3_64) return BL_OK;
    if (page->memory)
        return BL_FAIL(BL_EINPUT,
                       "memory of page %s: checksum %016" PRIx64 " where %016" PRIx64
                       " was written",
                       page->spec.name, found, page->xxh3_64);
    return BL_FAIL(
        BL_EINPUT,
        "%s: page %s at %" PRId64 ": checksum %016" PRIx64 " where %016" PRIx64 " was written",
        bl_page_file_path(pages->file), page->spec.name, page->offset_bytes, found, page->xxh3_64);
}

bl_status bl_pages_check(const bl_pages *pages, int64_t index, const void *bytes)
{
    const held_page *page = &pages->page[index];

    BL_TRY(check_written(page));
    return compare(pages, page, XXH3_64bits(bytes, page->spec.n_bytes));
}

/* A page between `memory`, of either space, and the host, piece by piece through the staging
 * buffer: read from the page file, or taken from there. *found: the checksum of what passed. */
static bl_status pass_page(const bl_pages *pages, const held_page *page, bl_staging *staging,
                           bool from_disk, void *memory, uint64_t *found)
{
    XXH3_state_t *hash = XXH3_createState();
    bl_status st = hash ? BL_OK : BL_FAIL(BL_ENOMEM, "page %s", page->spec.name);
    size_t n_bytes = page->spec.n_bytes;

    if (hash) XXH3_64bits_reset(hash);
    for (size_t at = 0, n; st == BL_OK && at < n_bytes; at += n) {
        char *there = (char *)memory + at;
        n = (size_t)bl_min_i64((int64_t)staging->n_bytes, (int64_t)(n_bytes - at));
        st = from_disk ? bl_page_file_read(pages->file, page->offset_bytes + (int64_t)at,
                                           staging->bytes, n)
                       : bl_staging_download(staging, staging->bytes, there, n);
        if (st == BL_OK && from_disk) st = bl_staging_upload(staging, there, staging->bytes, n);
        if (st == BL_OK) XXH3_64bits_update(hash, staging->bytes, n);
    }
    *found = hash ? XXH3_64bits_digest(hash) : 0;
    XXH3_freeState(hash);
    return st;
}

bl_status bl_pages_verify_memory(const bl_pages *pages, int64_t index, bl_staging *staging)
{
    const held_page *page = &pages->page[index];
    uint64_t found;

    if (!page->memory) return BL_OK;
    if (page->spec.tier == BL_TIER_HOST) return bl_pages_check(pages, index, page->memory);
    BL_TRY(check_written(page));
    BL_TRY(pass_page(pages, page, staging, false, page->memory, &found));
    return compare(pages, page, found);
}

void bl_pages_distrust_disk(bl_pages *pages)
{
    if (pages->file) bl_page_file_distrust(pages->file);
}

bl_status bl_pages_read(const bl_pages *pages, int64_t index, bl_staging *staging, void *dst)
{
    const held_page *page = &pages->page[index];
    uint64_t found;

    if (page->spec.tier != BL_TIER_DISK || !bl_pages_files(pages))
        return BL_FAIL(BL_EINTERNAL, "page %s: not to be read from disk", page->spec.name);
    bl_status st = pass_page(pages, page, staging, true, dst, &found);
    if (st != BL_OK) return bl_error_prefix(st, "page %s", page->spec.name);
    BL_TRY(check_written(page));
    return compare(pages, page, found);
}
