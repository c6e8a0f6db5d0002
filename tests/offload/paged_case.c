/* SPDX-License-Identifier: Apache-2.0 */
/* paged_case.c -- pages in tiers behind a pager, their expected bytes, and files to damage. */
#include "paged_case.h"

#include <dirent.h>
#include <fcntl.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"

enum { LARGEST_BYTES = 300 * 1024 + 17 };

/* Sizes that are no multiples of anything, and one that takes several requests. */
static const size_t sizes[] = {1, 4096, 5000, 12288, LARGEST_BYTES};
static const int unit_items[CASE_UNITS] = {4, 5, 1, 5, 2};

static unsigned char *contents[CASE_RANKS];

static size_t place_of(int page)
{
    size_t at = 0;
    for (int p = 0; p < page; p++) at += case_page_bytes(p);
    return at;
}

size_t case_page_bytes(int page)
{
    return page >= CASE_PAGES - unit_items[CASE_WHOLE] ? 300000
                                                       : sizes[page % (int)BL_COUNT(sizes)];
}

const unsigned char *case_contents(int rank, int page)
{
    return contents[rank] + place_of(page);
}

void case_make_contents(void)
{
    for (int r = 0; r < CASE_RANKS; r++) {
        size_t n = place_of(CASE_PAGES);
        uint64_t z = (uint64_t)r + 1;
        contents[r] = malloc(n);
        if (!contents[r]) abort();
        for (size_t i = 0; i < n; i++) {
            z ^= z << 13, z ^= z >> 7, z ^= z << 17; /* xorshift64 */
            contents[r][i] = (unsigned char)(z >> 24);
        }
    }
}

void case_free_contents(void)
{
    for (int r = 0; r < CASE_RANKS; r++) free(contents[r]);
}

static bl_tier tier_of(case_tiers tiers, int page)
{
    static const bl_tier same[] = {BL_TIER_DEVICE, BL_TIER_HOST, BL_TIER_DISK};
    static const bl_tier mixed[] = {BL_TIER_DISK, BL_TIER_DEVICE, BL_TIER_DISK, BL_TIER_HOST};
    return tiers == CASE_MIXED ? mixed[page % (int)BL_COUNT(mixed)] : same[tiers];
}

static bl_status fill_pages(paged_case *c)
{
    bl_pages_options options = {.device = c->self->device,
                                .pin = bl_device_get_kind(c->self->device) == BL_DEVICE_CUDA,
                                .node = -1,
                                .dir = c->options.dir,
                                .key = 77,
                                .shard = c->self->rank,
                                .n_shards = c->self->n_ranks};

    BL_TRY(bl_pages_create(&options, CASE_PAGES, c->specs, &c->pages));
    for (int p = 0; p < CASE_PAGES; p++) {
        if (bl_pages_has_disk(c->pages) && c->specs[p].tier == BL_TIER_DISK) continue;
        const void *bytes = case_contents(c->self->rank, p);
        if (c->seen) bytes = memcpy(c->seen, bytes, c->specs[p].n_bytes); /* it is pinned */
        BL_TRY(bl_pages_write(c->pages, p, 0, bytes, c->specs[p].n_bytes));
    }
    return bl_pages_seal(c->pages);
}

bl_status case_create_pager(paged_case *c)
{
    bl_pager_options options = {.device = c->self->device,
                                .comm = c->self->comm,
                                .copy = c->copies,
                                .gather = c->gathers,
                                .ring_depth = c->options.ring_depth,
                                .io_engine = c->options.engine,
                                .verify_always = c->options.verify_always,
                                .timeline = c->timeline,
                                .hooks = &c->options.hooks};
    BL_TRY(bl_pager_create(&options, c->pages, CASE_UNITS, c->units, &c->pager));
    return bl_pager_validate(c->pager);
}

bl_status case_open(test_rank *self, const case_options *options, paged_case *c)
{
    static const char *const names[CASE_PAGES] = {
        "layer 0",  "layer 1",  "layer 2",  "layer 3",  "layer 4",  "layer 5",
        "layer 6",  "layer 7",  "layer 8",  "layer 9",  "layer 10", "layer 11",
        "layer 12", "layer 13", "layer 14", "layer 15", "layer 16"};
    int64_t page = 0;

    *c = (paged_case){.self = self, .options = *options};
    for (int p = 0; p < CASE_PAGES; p++)
        c->specs[p] = (bl_page_spec){names[p], case_page_bytes(p), tier_of(options->tiers, p)};
    for (int u = 0; u < CASE_UNITS; u++) {
        c->units[u].whole_ring = u == CASE_WHOLE;
        c->units[u].n_items = unit_items[u];
        for (int i = 0; i < unit_items[u]; i++) c->units[u].page[i] = page++;
    }
    BL_TRY(bl_stream_create(self->device, "copies", &c->copies));
    BL_TRY(bl_stream_create(self->device, "gathers", &c->gathers));
    BL_TRY(bl_timeline_create(self->device, 4096, NULL, NULL, &c->timeline));
    if (bl_device_get_kind(self->device) != BL_DEVICE_CPU)
        BL_TRY(bl_device_alloc(self->device, BL_SPACE_HOST, LARGEST_BYTES * (size_t)self->n_ranks,
                               "what was seen", (void **)&c->seen));
    BL_TRY(fill_pages(c));
    return case_create_pager(c);
}

void case_close(paged_case *c)
{
    (void)bl_stream_synchronize(c->self->stream);
    bl_pager_destroy(c->pager);
    bl_pages_destroy(c->pages);
    bl_device_free(c->self->device, BL_SPACE_HOST, c->seen);
    bl_timeline_destroy(c->timeline);
    bl_stream_destroy(c->copies);
    bl_stream_destroy(c->gathers);
}

typedef struct look_args {
    const unsigned char *gathered;
    paged_case *c;
    int page;
    unsigned pause_us;
} look_args;

static bl_status look(bl_stream *stream, const void *argument)
{
    const look_args *a = argument;
    size_t n = case_page_bytes(a->page);

    (void)stream;
    if (a->pause_us) usleep(a->pause_us);
    for (int r = 0; r < a->c->self->n_ranks; r++) {
        const unsigned char *at = a->gathered + (size_t)r * n;
        if (memcmp(at, case_contents(r, a->page), n) != 0)
            return BL_FAIL(BL_EINTERNAL, "page %d of rank %d has other bytes", a->page, r);
        for (size_t i = 0; i < n; i += 61) a->c->sum = a->c->sum * 31 + at[i];
    }
    return BL_OK;
}

bl_status case_use(paged_case *c, int64_t unit, int item, unsigned pause_us)
{
    const void *gathered;
    BL_TRY(bl_gather_ring_acquire(bl_pager_ring(c->pager), unit, item, c->self->stream, &gathered));
    if (c->seen) {
        size_t n_bytes = case_page_bytes((int)c->units[unit].page[item]) * (size_t)c->self->n_ranks;
        BL_TRY(bl_stream_copy(c->self->stream, c->seen, gathered, n_bytes));
        gathered = c->seen;
    }
    look_args args = {gathered, c, (int)c->units[unit].page[item], pause_us};
    BL_TRY(bl_stream_call(c->self->stream, look, &args, sizeof args));
    return bl_pager_validate(c->pager);
}

bl_status case_visit(paged_case *c, int64_t unit)
{
    BL_TRY(bl_gather_ring_prefetch(bl_pager_ring(c->pager), unit));
    for (int i = 0; i < c->units[unit].n_items; i++) BL_TRY(case_use(c, unit, i, 0));
    return bl_gather_ring_release(bl_pager_ring(c->pager), unit, c->self->stream);
}

/* ---- files ---- */

void case_make_dir(char dir[32])
{
    strcpy(dir, "/tmp/ballast-pager-XXXXXX");
    if (!mkdtemp(dir)) abort();
}

bool case_find_file(const char *dir, const char *suffix, char path[512])
{
    DIR *d = opendir(dir);
    bool found = false;
    const struct dirent *entry;

    while (d && !found && (entry = readdir(d)) != NULL) {
        size_t n = strlen(entry->d_name), m = strlen(suffix);
        found = n >= m && strcmp(entry->d_name + n - m, suffix) == 0 && entry->d_name[0] != '.';
        if (found) snprintf(path, 512, "%s/%s", dir, entry->d_name);
    }
    if (d) closedir(d);
    return found;
}

void case_remove_dir(const char *dir)
{
    char path[512];
    while (case_find_file(dir, "", path))
        if (unlink(path) != 0) abort();
    rmdir(dir);
}

void case_flip_byte(const char *path, int64_t offset)
{
    unsigned char byte;
    int fd = open(path, O_RDWR | O_CLOEXEC);
    if (fd < 0 || pread(fd, &byte, 1, offset) != 1) abort();
    byte = (unsigned char)~byte;
    if (pwrite(fd, &byte, 1, offset) != 1) abort();
    close(fd);
}
