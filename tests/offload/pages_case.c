/* SPDX-License-Identifier: Apache-2.0 */
/* pages_case.c -- pages in three tiers in a directory, written, reopened and compared. */
#include "pages_case.h"

#include <fcntl.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/files.h"

enum { PIECE_BYTES = 70001 };

/* Sizes around a block and around the 4 MiB that go to the disk at once; an empty one. */
const bl_page_spec pages_specs[N_PAGES] = {
    {"layer 0 qkv", 300000, BL_TIER_DEVICE},
    {"layer 0 o", (4 << 20) + 4097, BL_TIER_DISK},
    {"layer 1 qkv", 123457, BL_TIER_HOST},
    {"layer 1 \"o\"", 4096, BL_TIER_DISK},
    {"scales", 1, BL_TIER_DISK},
    {"nothing", 0, BL_TIER_DISK},
    {"layer 1 down", 9 << 20, BL_TIER_DISK},
};

bl_device *pages_device;
bl_staging *pages_staging;
static char folder[] = "/tmp/ballast-test-XXXXXX";

int pages_set_up(void **state)
{
    (void)state;
    return mkdtemp(folder) && bl_device_create_cpu(1, &pages_device) == BL_OK &&
                   bl_staging_create(pages_device, BL_STAGING_BYTES, "pages", &pages_staging) ==
                       BL_OK
               ? 0
               : -1;
}

int pages_tear_down(void **state)
{
    (void)state;
    bl_staging_destroy(pages_staging);
    bl_device_destroy(pages_device);
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

const char *pages_path_of(const char *name)
{
    static char paths[16][512];
    static unsigned next;
    char *path = paths[next++ % 16];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

/* An empty folder. */
const char *pages_new_dir(void)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/d", folder);
    assert_int_equal(bl_tree_remove(path), BL_OK);
    assert_int_equal(bl_dir_create(path), BL_OK);
    return path;
}

size_t pages_count_files(const char *dir)
{
    char **names;
    size_t n_names;
    assert_int_equal(bl_dir_list(dir, &names, &n_names), BL_OK);
    bl_names_free(names, n_names);
    return n_names;
}

void pages_assert_error_has(const char *part)
{
    const char *text = bl_error_text();
    if (!strstr(text, part)) fail_msg("error \"%s\" lacks \"%s\"", text, part);
    if (strchr(text, '\n')) fail_msg("error of several lines: \"%s\"", text);
}

/* Page i's bytes: of its name, so that they are the same whatever the other pages are. */
uint8_t *pages_content(const bl_page_spec *spec)
{
    uint8_t *bytes = malloc(spec->n_bytes + 1);
    uint32_t state = 1;

    assert_non_null(bytes);
    for (const char *c = spec->name; *c; c++) state = state * 31 + (uint8_t)*c;
    for (size_t i = 0; i < spec->n_bytes; i++) {
        state = state * 1664525 + 1013904223;
        bytes[i] = (uint8_t)(state >> 24);
    }
    return bytes;
}

bl_status pages_create_some(const char *dir, uint64_t key, int64_t n_pages,
                            const bl_page_spec *some, bl_pages **out)
{
    const bl_pages_options options = {
        .device = pages_device, .node = -1, .dir = dir, .key = key, .shard = 1, .n_shards = 4};
    return bl_pages_create(&options, n_pages, some, out);
}

bl_status pages_fill_only(bl_pages *pages)
{
    bl_status st = BL_OK;

    for (int64_t i = 0; i < bl_pages_count(pages) && st == BL_OK; i++) {
        const bl_page_spec *spec = bl_pages_spec(pages, i);
        if (spec->tier == BL_TIER_DISK && bl_pages_has_disk(pages)) continue;
        uint8_t *bytes = pages_content(spec);
        for (size_t at = 0; at < spec->n_bytes && st == BL_OK; at += PIECE_BYTES)
            st =
                bl_pages_write(pages, i, at, bytes + at,
                               spec->n_bytes - at < PIECE_BYTES ? spec->n_bytes - at : PIECE_BYTES);
        free(bytes);
    }
    return st;
}

bl_status pages_fill(bl_pages *pages)
{
    bl_status st = pages_fill_only(pages);
    return st == BL_OK ? bl_pages_seal(pages) : st;
}

bl_pages *pages_made_with(const char *dir, uint64_t key, bool expect_disk)
{
    bl_pages *pages;
    bl_status st = pages_create_some(dir, key, N_PAGES, pages_specs, &pages);
    if (st != BL_OK) fail_msg("create: %s", bl_error_text());
    assert_int_equal(bl_pages_has_disk(pages), expect_disk);
    if (pages_fill(pages) != BL_OK) fail_msg("fill: %s", bl_error_text());
    return pages;
}

bl_pages *pages_made(const char *dir, bool expect_disk)
{
    return pages_made_with(dir, PAGES_KEY, expect_disk);
}

/* All bytes of all pages, through a reader and through bl_pages_read. */
void pages_assert_contents(const bl_pages *pages)
{
    uint8_t *found = malloc(PAGES_MAX_BYTES);
    bl_reader *reader;

    assert_non_null(found);
    assert_int_equal(
        bl_reader_create(&(bl_reader_options){.queue_depth = 4}, bl_pages_files(pages), &reader),
        BL_OK);
    for (int64_t i = 0; i < bl_pages_count(pages); i++) {
        const bl_page_spec *spec = bl_pages_spec(pages, i);
        uint8_t *expected = pages_content(spec);
        if (spec->tier != BL_TIER_DISK) {
            assert_memory_equal(bl_pages_memory(pages, i), expected, spec->n_bytes);
            assert_int_equal(bl_pages_verify_memory(pages, i, pages_staging), BL_OK);
        } else {
            bl_io_read read = {
                .offset_bytes = bl_pages_offset(pages, i), .n_bytes = spec->n_bytes, .dst = found};
            assert_null(bl_pages_memory(pages, i));
            assert_int_equal(read.offset_bytes % BL_IO_ALIGN_BYTES, 0);
            memset(found, 0, spec->n_bytes);
            if (spec->n_bytes > 0) {
                assert_int_equal(bl_reader_submit(reader, &read), BL_OK);
                assert_int_equal(bl_reader_wait(reader, &read), BL_OK);
            }
            assert_memory_equal(found, expected, spec->n_bytes);
            memset(found, 0, spec->n_bytes);
            assert_int_equal(bl_pages_read(pages, i, pages_staging, found), BL_OK);
            assert_memory_equal(found, expected, spec->n_bytes);
        }
        assert_int_equal(bl_pages_check(pages, i, expected), BL_OK);
        free(expected);
    }
    bl_reader_destroy(reader);
    free(found);
}

void pages_assert_made(const char *dir, bool expect_disk)
{
    bl_pages *pages = pages_made(dir, expect_disk);
    pages_assert_contents(pages);
    bl_pages_destroy(pages);
    assert_int_equal(pages_count_files(dir), 2);
}

const char *pages_in_dir(const char *ending)
{
    char name[128];
    snprintf(name, sizeof name, "d/base-%016" PRIx64 "-1-of-4%s", (uint64_t)PAGES_KEY, ending);
    return pages_path_of(name);
}

void pages_flip(const char *path, int64_t offset)
{
    uint8_t byte;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, offset), 1);
    byte ^= 0x10;
    assert_int_equal(pwrite(fd, &byte, 1, offset), 1);
    assert_int_equal(fsync(fd), 0);
    close(fd);
}

pid_t pages_fork_writer(const char *dir, void (*first)(void))
{
    /* ThreadSanitizer wants no thread beside the one that forks. */
    bl_staging_destroy(pages_staging);
    pid_t child = fork();
    assert_true(child >= 0);
    if (child > 0) {
        assert_int_equal(bl_staging_create(pages_device, BL_STAGING_BYTES, "pages", &pages_staging),
                         BL_OK);
        return child;
    }
    if (first) first();
    if (bl_device_create_cpu(1, &pages_device) != BL_OK)
        _exit(1); /* threads do not survive a fork */
    bl_pages *pages = NULL;
    bool good = pages_create_some(dir, PAGES_KEY, N_PAGES, pages_specs, &pages) == BL_OK &&
                pages_fill(pages) == BL_OK;
    bl_pages_destroy(pages);
    bl_device_destroy(pages_device);
    _exit(good ? 0 : 1);
}
