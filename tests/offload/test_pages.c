/* SPDX-License-Identifier: Apache-2.0 */
/* Pages in three tiers: the exact bytes back, page files used again or written anew, and what crashes, full
 * disks, other processes and flipped bits lead to. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>

#include <cmocka.h>
#include <errno.h>
#include <fcntl.h>
#include <inttypes.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/files.h"
#include "offload/pages.h"

enum { N_PAGES = 7, KEY = 0x1234, PIECE_BYTES = 70001, MAX_PAGE_BYTES = 9 << 20, ANOTHER_USER = 65534 };

/* Sizes around a block and around the 4 MiB that go to the disk at once; an empty one. */
static const bl_page_spec specs[N_PAGES] = {
    {"layer 0 qkv", 300000, BL_TIER_DEVICE},
    {"layer 0 o", (4 << 20) + 4097, BL_TIER_DISK},
    {"layer 1 qkv", 123457, BL_TIER_HOST},
    {"layer 1 \"o\"", 4096, BL_TIER_DISK},
    {"scales", 1, BL_TIER_DISK},
    {"nothing", 0, BL_TIER_DISK},
    {"layer 1 down", 9 << 20, BL_TIER_DISK},
};

static bl_device *device;
static char folder[] = "/tmp/ballast-test-XXXXXX";

/* ---- fault injection (the linker's --wrap) ---- */

static int pwrite_error, n_pwrites_before_error, fsync_error, fallocate_error;
static bool pwrite_is_short, pwrite_refuses_direct;
static pid_t killed_at_pwrite; /* this process */

ssize_t __real_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset);
int __real_fsync(int fd);
int __wrap_fsync(int fd);
int __real_fallocate(int fd, int mode, off_t offset, off_t n_bytes);
int __wrap_fallocate(int fd, int mode, off_t offset, off_t n_bytes);

ssize_t __wrap_pwrite(int fd, const void *src, size_t n_bytes, off_t offset)
{
    if (pwrite_error && n_pwrites_before_error-- <= 0) {
        errno = pwrite_error;
        if (pwrite_error == EINTR) pwrite_error = 0;
        return -1;
    }
    if (pwrite_refuses_direct && fcntl(fd, F_GETFL) & O_DIRECT) {
        errno = EINVAL;
        return -1;
    }
    if (pwrite_is_short && n_bytes > 1000) n_bytes = n_bytes / 2 + 1;
    ssize_t put = __real_pwrite(fd, src, n_bytes, offset);
    if (killed_at_pwrite == getpid() && offset > 0) raise(SIGKILL);
    return put;
}

int __wrap_fsync(int fd)
{
    if (!fsync_error) return __real_fsync(fd);
    errno = fsync_error;
    return -1;
}

int __wrap_fallocate(int fd, int mode, off_t offset, off_t n_bytes)
{
    if (!fallocate_error) return __real_fallocate(fd, mode, offset, n_bytes);
    errno = fallocate_error;
    return -1;
}

/* ---- helpers ---- */

static const char *path_of(const char *name)
{
    static char paths[16][512];
    static unsigned next;
    char *path = paths[next++ % 16];
    snprintf(path, sizeof paths[0], "%s/%s", folder, name);
    return path;
}

/* An empty folder. */
static const char *new_dir(void)
{
    static char path[512];
    snprintf(path, sizeof path, "%s/d", folder);
    assert_int_equal(bl_tree_remove(path), BL_OK);
    assert_int_equal(bl_dir_create(path), BL_OK);
    return path;
}

static size_t count_files(const char *dir)
{
    char **names;
    size_t n_names;
    assert_int_equal(bl_dir_list(dir, &names, &n_names), BL_OK);
    bl_names_free(names, n_names);
    return n_names;
}

static void assert_error_has(const char *part)
{
    const char *text = bl_error_text();
    if (!strstr(text, part)) fail_msg("error \"%s\" lacks \"%s\"", text, part);
    if (strchr(text, '\n')) fail_msg("error of several lines: \"%s\"", text);
}

/* Page i's bytes: of its name, so that they are the same whatever the other pages are. */
static uint8_t *content(const bl_page_spec *spec)
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

static bl_status create_some(const char *dir, uint64_t key, int64_t n_pages, const bl_page_spec *some,
                             bl_pages **out)
{
    const bl_pages_options options = {
        .device = device, .node = -1, .dir = dir, .key = key, .shard = 1, .n_shards = 4};
    return bl_pages_create(&options, n_pages, some, out);
}

/* Writes all pages that are wanted, in pieces. */
static bl_status fill(bl_pages *pages)
{
    bl_status st = BL_OK;

    for (int64_t i = 0; i < bl_pages_count(pages) && st == BL_OK; i++) {
        const bl_page_spec *spec = bl_pages_spec(pages, i);
        if (spec->tier == BL_TIER_DISK && bl_pages_has_disk(pages)) continue;
        uint8_t *bytes = content(spec);
        for (size_t at = 0; at < spec->n_bytes && st == BL_OK; at += PIECE_BYTES)
            st = bl_pages_write(pages, i, at, bytes + at,
                                spec->n_bytes - at < PIECE_BYTES ? spec->n_bytes - at : PIECE_BYTES);
        free(bytes);
    }
    return st == BL_OK ? bl_pages_seal(pages) : st;
}

static bl_pages *made_with(const char *dir, uint64_t key, bool expect_disk)
{
    bl_pages *pages;
    bl_status st = create_some(dir, key, N_PAGES, specs, &pages);
    if (st != BL_OK) fail_msg("create: %s", bl_error_text());
    assert_int_equal(bl_pages_has_disk(pages), expect_disk);
    if (fill(pages) != BL_OK) fail_msg("fill: %s", bl_error_text());
    return pages;
}

static bl_pages *made(const char *dir, bool expect_disk)
{
    return made_with(dir, KEY, expect_disk);
}

/* All bytes of all pages, through a reader and through bl_pages_read. */
static void assert_contents(const bl_pages *pages)
{
    uint8_t *found = malloc(MAX_PAGE_BYTES);
    bl_reader *reader;

    assert_non_null(found);
    assert_int_equal(bl_reader_create(&(bl_reader_options){.queue_depth = 4}, bl_pages_files(pages), &reader),
                     BL_OK);
    for (int64_t i = 0; i < bl_pages_count(pages); i++) {
        const bl_page_spec *spec = bl_pages_spec(pages, i);
        uint8_t *expected = content(spec);
        if (spec->tier != BL_TIER_DISK) {
            assert_memory_equal(bl_pages_memory(pages, i), expected, spec->n_bytes);
            assert_int_equal(bl_pages_verify_memory(pages, i), BL_OK);
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
            assert_int_equal(bl_pages_read(pages, i, found), BL_OK);
            assert_memory_equal(found, expected, spec->n_bytes);
        }
        assert_int_equal(bl_pages_check(pages, i, expected), BL_OK);
        free(expected);
    }
    bl_reader_destroy(reader);
    free(found);
}

static void assert_made(const char *dir, bool expect_disk)
{
    bl_pages *pages = made(dir, expect_disk);
    assert_contents(pages);
    bl_pages_destroy(pages);
    assert_int_equal(count_files(dir), 2);
}

static const char *in_dir(const char *ending)
{
    char name[128];
    snprintf(name, sizeof name, "d/base-%016" PRIx64 "-1-of-4%s", (uint64_t)KEY, ending);
    return path_of(name);
}

static void flip(const char *path, int64_t offset)
{
    uint8_t byte;
    int fd = open(path, O_RDWR);
    assert_true(fd >= 0);
    assert_int_equal(pread(fd, &byte, 1, offset), 1);
    byte ^= 0x10;
    assert_int_equal(__real_pwrite(fd, &byte, 1, offset), 1);
    assert_int_equal(__real_fsync(fd), 0);
    close(fd);
}

/* ---- tests ---- */

static void test_tiers(void **state)
{
    const char *dir = new_dir();
    bl_pages *pages = made(dir, false);

    (void)state;
    assert_contents(pages);
    assert_int_equal(bl_pages_count(pages), N_PAGES);
    assert_string_equal(bl_pages_spec(pages, 3)->name, "layer 1 \"o\"");
    assert_true(bl_pages_spec(pages, 3)->name != specs[3].name);
    assert_int_equal(bl_pages_tier_bytes(pages, BL_TIER_DEVICE), 303104); /* 74 x 4096 */
    assert_int_equal(bl_pages_tier_bytes(pages, BL_TIER_HOST), 126976);   /* 31 x 4096 */
    assert_int_equal(bl_pages_tier_bytes(pages, BL_TIER_DISK), (1026 + 1 + 1 + 1 + 2304) * 4096);
    assert_int_equal(bl_pages_seal(pages), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 0, 0, "x", 1), BL_EINTERNAL);
    assert_int_equal(bl_pages_read(pages, 0, NULL), BL_EINTERNAL);
    bl_pages_destroy(pages);
    bl_pages_destroy(NULL);

    assert_int_equal(create_some(NULL, KEY, 1, specs, &pages), BL_OK);
    assert_null(bl_pages_files(pages));
    assert_int_equal(fill(pages), BL_OK);
    bl_pages_destroy(pages);
    assert_int_equal(create_some(NULL, KEY, 0, NULL, &pages), BL_OK);
    assert_int_equal(bl_pages_seal(pages), BL_OK);
    bl_pages_destroy(pages);
}

static void test_writing_in_place(void **state)
{
    static const bl_page_spec two[] = {{"a", 5000, BL_TIER_DEVICE}, {"b", 5000, BL_TIER_HOST}};
    bl_pages *pages;

    (void)state;
    assert_int_equal(create_some(NULL, KEY, 2, two, &pages), BL_OK);
    for (int i = 0; i < 2; i++) {
        uint8_t *bytes = content(&two[i]), *memory = bl_pages_memory(pages, i);
        memcpy(memory, bytes, 5000);
        assert_int_equal(bl_pages_write(pages, i, 0, memory, 3000), BL_OK);
        assert_int_equal(bl_pages_write(pages, i, 3000, memory + 3000, 2000), BL_OK);
        assert_int_equal(bl_pages_check(pages, i, bytes), BL_OK);
        free(bytes);
    }
    assert_int_equal(bl_pages_seal(pages), BL_OK);
    for (int i = 0; i < 2; i++) {
        ((uint8_t *)bl_pages_memory(pages, i))[4999] ^= 1;
        assert_int_equal(bl_pages_verify_memory(pages, i), BL_EINPUT);
        assert_error_has(i ? "memory of page b: checksum" : "memory of page a: checksum");
        ((uint8_t *)bl_pages_memory(pages, i))[4999] ^= 1;
        assert_int_equal(bl_pages_verify_memory(pages, i), BL_OK);
    }
    bl_pages_destroy(pages);
}

static void test_order_of_writes(void **state)
{
    const char *dir = new_dir();
    const bl_page_spec twins[] = {{"a", 1, BL_TIER_HOST}, {"b", 2, BL_TIER_HOST}, {"a", 3, BL_TIER_HOST}};
    uint8_t bytes[8192] = {0};
    bl_pages *pages;

    (void)state;
    assert_int_equal(create_some(dir, KEY, N_PAGES, specs, &pages), BL_OK);
    assert_int_equal(bl_pages_check(pages, 3, bytes), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 3, 1, bytes, 1), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 3, 0, bytes, 4097), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 3, 0, bytes, 4095), BL_OK);
    assert_int_equal(bl_pages_write(pages, 4, 0, bytes, 1), BL_EINTERNAL);
    assert_error_has("page scales: written before page layer 1 \"o\" is whole");
    assert_int_equal(bl_pages_write(pages, 3, 0, bytes, 1), BL_EINTERNAL);
    assert_int_equal(bl_pages_seal(pages), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 3, 4095, bytes, 1), BL_OK);
    assert_int_equal(bl_pages_write(pages, 3, 4096, bytes, 1), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 4, 0, bytes, 1), BL_OK);
    bl_pages_destroy(pages);
    assert_int_equal(count_files(dir), 0);
    assert_int_equal(create_some(NULL, KEY, 3, twins, &pages), BL_EINTERNAL);
    assert_error_has("two pages of the name a");
    assert_int_equal(create_some(NULL, KEY, 2, specs, &pages), BL_EINTERNAL);
    assert_null(pages);
}

static void test_used_again(void **state)
{
    const char *dir = new_dir();
    const bl_page_spec fewer[] = {{specs[6].name, specs[6].n_bytes, BL_TIER_DISK},
                                  {specs[3].name, 4096, BL_TIER_DISK},
                                  {specs[1].name, 10, BL_TIER_HOST}};
    const bl_page_spec more[] = {{specs[6].name, specs[6].n_bytes, BL_TIER_DISK},
                                 {"another", 100, BL_TIER_DISK}};
    const bl_page_spec resized[] = {{"another", 101, BL_TIER_DISK}};
    struct stat before, after;
    uint8_t byte = 0;
    bl_pages *pages;

    (void)state;
    assert_made(dir, false);
    assert_int_equal(stat(in_dir(".pages"), &before), 0);
    assert_made(dir, true);
    assert_int_equal(create_some(dir, KEY, 3, fewer, &pages), BL_OK);
    assert_true(bl_pages_has_disk(pages));
    assert_int_equal(bl_pages_write(pages, 1, 0, &byte, 1), BL_EINTERNAL);
    assert_error_has("the disk has it");
    uint8_t *found = malloc(specs[6].n_bytes), *expected = content(&specs[6]);
    assert_int_equal(bl_pages_read(pages, 0, found), BL_OK); /* before seal */
    assert_memory_equal(found, expected, specs[6].n_bytes);
    assert_int_equal(fill(pages), BL_OK);
    assert_contents(pages);
    bl_pages_destroy(pages);
    assert_int_equal(stat(in_dir(".pages"), &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);

    bl_pages_destroy(made_with(dir, KEY + 1, false)); /* of another key: beside it */
    assert_int_equal(count_files(dir), 4);
    bl_pages *old = made(dir, true); /* its file stays valid when another takes the name */
    assert_int_equal(create_some(dir, KEY, 2, more, &pages), BL_OK);
    assert_false(bl_pages_has_disk(pages));
    assert_int_equal(fill(pages), BL_OK);
    assert_contents(pages);
    bl_pages_destroy(pages);
    assert_contents(old);
    bl_pages_destroy(old);
    assert_int_equal(create_some(dir, KEY, 1, resized, &pages), BL_OK);
    assert_false(bl_pages_has_disk(pages));
    bl_pages_destroy(pages);
    assert_int_equal(create_some(dir, KEY, 2, more, &pages),
                     BL_OK); /* one that was not finished changes nothing */
    assert_true(bl_pages_has_disk(pages));
    bl_pages_destroy(pages);
    free(found);
    free(expected);
}

/* The child ends at the nth write, or writes all. */
static pid_t fork_writer(const char *dir, bool dies)
{
    pid_t child = fork();
    assert_true(child >= 0);
    if (child > 0) return child;
    bl_device *own;
    killed_at_pwrite = dies ? getpid() : 0;
    if (bl_device_create_cpu(1, &own) != BL_OK) _exit(1);
    device = own;
    bl_pages *pages = NULL;
    bool good = create_some(dir, KEY, N_PAGES, specs, &pages) == BL_OK && fill(pages) == BL_OK;
    bl_pages_destroy(pages);
    bl_device_destroy(own);
    _exit(good ? 0 : 1);
}

static void test_killed_while_writing(void **state)
{
    const char *dir = new_dir();
    int status;

    (void)state;
    waitpid(fork_writer(dir, true), &status, 0);
    assert_true(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
    assert_int_equal(count_files(dir), 1);
    assert_made(dir, false); /* and what the dead one left is gone */

    assert_int_equal(unlink(in_dir(".json")), 0); /* killed between the renames */
    bl_pages *pages;
    assert_int_equal(create_some(dir, KEY, N_PAGES, specs, &pages), BL_OK);
    assert_false(bl_pages_has_disk(pages));
    bl_pages_destroy(pages);
    assert_int_equal(count_files(dir), 0);
}

/* The list of one file beside the pages of another of the same size. */
static void test_list_of_another_file(void **state)
{
    const bl_page_spec a[] = {{"a", 5000, BL_TIER_DISK}}, b[] = {{"b", 5000, BL_TIER_DISK}};
    const char *dir = new_dir();
    bl_pages *pages;

    (void)state;
    assert_int_equal(create_some(dir, KEY, 1, a, &pages), BL_OK);
    assert_int_equal(fill(pages), BL_OK);
    bl_pages_destroy(pages);
    assert_int_equal(rename(in_dir(".json"), path_of("d/kept")), 0);
    assert_int_equal(create_some(dir, KEY, 1, b, &pages), BL_OK);
    assert_int_equal(fill(pages), BL_OK);
    bl_pages_destroy(pages);
    assert_int_equal(rename(path_of("d/kept"), in_dir(".json")), 0);
    assert_int_equal(create_some(dir, KEY, 1, a, &pages), BL_OK);
    assert_false(bl_pages_has_disk(pages));
    bl_pages_destroy(pages);
}

static void test_two_writers(void **state)
{
    enum { N_WRITERS = 3 };
    const char *dir = new_dir();
    pid_t children[N_WRITERS];
    bl_pages *first, *second;

    (void)state;
    assert_int_equal(create_some(dir, KEY, N_PAGES, specs, &first), BL_OK); /* two of one process */
    assert_int_equal(create_some(dir, KEY, N_PAGES, specs, &second), BL_OK);
    assert_int_equal(count_files(dir), 2);
    assert_int_equal(fill(first), BL_OK);
    assert_int_equal(fill(second), BL_OK);
    assert_contents(first);
    assert_contents(second);
    bl_pages_destroy(first);
    assert_contents(second);
    bl_pages_destroy(second);
    assert_made(dir, true);

    dir = new_dir();
    for (int i = 0; i < N_WRITERS; i++) children[i] = fork_writer(dir, false);
    for (int i = 0; i < N_WRITERS; i++) {
        int status;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    assert_made(dir, true);
}

static void test_flipped_on_disk(void **state)
{
    const char *dir = new_dir();
    char place[64];
    bl_pages *pages = made(dir, false);
    uint8_t *bytes = malloc(MAX_PAGE_BYTES);

    (void)state;
    snprintf(place, sizeof place, "page layer 1 down at %" PRId64 ": checksum", bl_pages_offset(pages, 6));
    flip(in_dir(".pages"), bl_pages_offset(pages, 6) + (int64_t)specs[6].n_bytes - 1);
    assert_int_equal(bl_pages_read(pages, 6, bytes), BL_EINPUT);
    assert_error_has(place);
    assert_error_has(in_dir(".pages"));
    assert_int_equal(bl_pages_check(pages, 6, bytes), BL_EINPUT);
    assert_int_equal(bl_pages_read(pages, 1, bytes), BL_OK);
    bl_pages_destroy(pages);

    pages = made(dir, true);
    assert_int_equal(bl_pages_read(pages, 6, bytes), BL_EINPUT);
    bl_pages_distrust_disk(pages);
    bl_pages_destroy(pages);
    assert_made(dir, false);
    free(bytes);
}

/* ---- damaged lists ---- */

static void put_list(const char *text, size_t n_bytes)
{
    assert_int_equal(bl_file_write_atomic(in_dir(".json"), text, n_bytes), BL_OK);
}

/* Replaces the first `from` after `after` in the list by `to`. */
static char *edited(const char *text, const char *after, const char *from, const char *to)
{
    const char *start = strstr(text, after);
    const char *at = start ? strstr(start, from) : NULL;
    char *out = NULL;

    if (!at) fail_msg("the list has no \"%s\" after \"%s\"", from, after);
    assert_int_equal(bl_text_format(&out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from)), BL_OK);
    return out;
}

static void test_damaged_lists(void **state)
{
    static const struct {
        const char *after, *from, *to;
    } edits[] = {
        {"", "ballast-pages-1", "ballast-pages-2"},
        {"", "{", "["},
        {"", "\"pages\": [", "\"pages\": 7, \"x\": ["},
        {"", "\"shard\": 1", "\"shard\": 2"},
        {"", "\"n_shards\": 4", "\"n_shards\": 8"},
        {"", "\"key\": \"0000000000001234\"", "\"key\": \"0000000000001235\""},
        {"", "\"key\": \"0000000000001234\"", "\"key\": \"1234\""},
        {"", "\"key\": \"0000000000001234\"", "\"key\": 1234"},
        {"", "\"file_bytes\": ", "\"file_bytes\": -"},
        {"", "\"file_bytes\": ", "\"file_bytes\": 1"},
        {"", "\"file_bytes\": ", "\"file_bytes\": 9223372036854775807, \"x\": "},
        {"", "\"file_bytes\": ", "\"file_bytes\": 99999999999999999999, \"x\": "},
        {"", "\"file_bytes\": ", "\"file_bytes\": 0, \"x\": "},
        {"", "\"file_bytes\": ", "\"file_bytes\": 4096, \"x\": "},
        {"scales", "\"offset\": ", "\"offset\": 0, \"x\": "}, /* overlaps the first */
        {"scales", "\"offset\": ", "\"offset\": -4096, \"x\": "},
        {"scales", "\"offset\": ", "\"offset\": 1, \"x\": "},
        {"scales", "\"offset\": ", "\"offset\": 9223372036854771712, \"x\": "},
        {"scales", "\"offset\": ", "\"offset\": 1e3, \"x\": "},
        {"scales", "\"bytes\": 1", "\"bytes\": -1"},
        {"scales", "\"bytes\": 1", "\"bytes\": 2"},
        {"scales", "\"bytes\": 1", "\"bytes\": 9223372036854775807"},
        {"scales", "\"bytes\": 1", "\"bytes\": 9223372036854775808"},
        {"scales", "\"xxh3_64\": \"", "\"xxh3_64\": \"0"},
        {"scales", "\"xxh3_64\": \"", "\"xxh3_64\": \"-"},
        {"scales", "\"xxh3_64\": \"", "\"xxh3_64\": null, \"x\": \""},
        {"", "scales", "scalds"},
        {"", "\"scales\"", "\"nothing\""}, /* twice */
        {"", "\"scales\"", "\"scales\\u0000\""},
        {"", "\"scales\"", "{}"},
        {"", "\"name\"", "\"bytes\": 3, \"name\""}, /* a key twice */
        {"", "\"format\"", "\"added\": 1, \"format\""},
    };
    const char *dir = new_dir();
    char *text, *damaged;
    size_t n_bytes;

    (void)state;
    assert_made(dir, false);
    assert_int_equal(bl_file_read_all(in_dir(".json"), 1 << 20, (void **)&text, &n_bytes), BL_OK);
    for (size_t i = 0; i < sizeof edits / sizeof edits[0]; i++) {
        damaged = edited(text, edits[i].after, edits[i].from, edits[i].to);
        put_list(damaged, strlen(damaged));
        free(damaged);
        assert_made(dir, false);
    }
    for (size_t n = 0; n < n_bytes - 1; n += n < 8 ? 1 : n_bytes / 4) { /* the last byte is a brace */
        put_list(text, n);
        assert_made(dir, false);
    }
    put_list("<html>", 6);
    assert_made(dir, false);
    assert_int_equal(unlink(in_dir(".json")), 0);
    assert_int_equal(mkfifo(in_dir(".json"), 0600), 0);
    assert_made(dir, false);

    put_list(text, n_bytes);
    assert_made(dir, true); /* the same bytes again: the edits were at fault */
    assert_int_equal(truncate(in_dir(".pages"), 8 << 20), 0);
    assert_made(dir, false);
    struct stat info;
    assert_int_equal(stat(in_dir(".pages"), &info), 0);
    flip(in_dir(".pages"), info.st_size - BL_IO_ALIGN_BYTES); /* the seal */
    assert_made(dir, false);
    free(text);
}

/* ---- disks that fail ---- */

static void assert_refused(const char *dir, bl_status expected, const char *part)
{
    bl_pages *pages;

    bl_status st = create_some(dir, KEY, N_PAGES, specs, &pages);
    if (st == BL_OK) st = fill(pages);
    bl_error error;
    bl_error_save(&error, st); /* destroy must not lose the reason */
    if (pages) assert_int_equal(count_files(dir), 0);
    bl_pages_destroy(pages);
    assert_int_equal(st, expected);
    bl_error_restore(&error);
    assert_error_has(part);
}

static void test_disk_full(void **state)
{
    static const struct {
        int error, n_writes_before;
        bl_status status;
        const char *part;
    } failures[] = {
        {ENOSPC, 0, BL_ELIMIT, "page layer 0 o: "},
        {ENOSPC, 1, BL_ELIMIT, "writing 8192 bytes at offset 4194304: No space left on device"},
        {EDQUOT, 3, BL_ELIMIT, "page scales: "},
        {ENOSPC, 7, BL_ELIMIT, "writing 4096 bytes at offset "}, /* the seal */
        {ENOSPC, 8, BL_ELIMIT, ".json.tmp-"},
        {EIO, 2, BL_EIO, "Input/output error"},
    };
    const char *dir = new_dir();
    const struct rlimit small = {3 << 20, RLIM_INFINITY};
    struct rlimit whole;

    (void)state;
    for (size_t i = 0; i < sizeof failures / sizeof failures[0]; i++) {
        pwrite_error = failures[i].error;
        n_pwrites_before_error = failures[i].n_writes_before;
        assert_refused(dir, failures[i].status, failures[i].part);
        pwrite_error = 0;
        assert_int_equal(count_files(dir), 0);
    }
    fsync_error = EIO;
    assert_refused(dir, BL_EIO, "fsync: Input/output error");
    fsync_error = 0;
    assert_int_equal(count_files(dir), 0);
    fallocate_error = ENOSPC;
    assert_refused(dir, BL_ELIMIT, "the page file takes 13656064 bytes, the disk had ");
    assert_int_equal(count_files(dir), 0);
    fallocate_error = EOPNOTSUPP;
    assert_made(dir, false);
    fallocate_error = 0;

    dir = new_dir();
    signal(SIGXFSZ, SIG_IGN);
    assert_int_equal(getrlimit(RLIMIT_FSIZE, &whole), 0);
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &small), 0);
    assert_refused(dir, BL_ELIMIT, "File too large");
    fallocate_error = EOPNOTSUPP; /* then the write meets the limit */
    assert_refused(dir, BL_ELIMIT, "File too large");
    fallocate_error = 0;
    assert_int_equal(setrlimit(RLIMIT_FSIZE, &whole), 0);
    assert_int_equal(count_files(dir), 0);

    if (mount("none", dir, "tmpfs", 0, "size=4m") != 0) {
        print_message("skipped: a small disk of its own (no right to mount)\n");
        return;
    }
    assert_refused(dir, BL_ELIMIT, "/d: the page file takes 13656064 bytes, the disk has 4194304");
    assert_int_equal(count_files(dir), 0);
    assert_int_equal(umount(dir), 0);
}

static void test_odd_writes(void **state)
{
    const char *dir = new_dir();

    (void)state;
    pwrite_is_short = true;
    assert_made(dir, false);
    pwrite_is_short = false;
    dir = new_dir();
    pwrite_refuses_direct = true;
    assert_made(dir, false);
    pwrite_refuses_direct = false;
    dir = new_dir();
    pwrite_error = EINTR;
    n_pwrites_before_error = 1;
    assert_made(dir, false);
    assert_int_equal(pwrite_error, 0);
}

static void test_folder(void **state)
{
    const char *dir = new_dir();

    (void)state;
    assert_refused(path_of("absent"), BL_EINPUT, "absent: No such file or directory");
    assert_int_equal(bl_file_write_atomic(path_of("file"), "x", 1), BL_OK);
    assert_refused(path_of("file"), BL_EINPUT, "file: Not a directory");
    assert_refused(NULL, BL_EINTERNAL, "no folder");
    if (geteuid() == 0) assert_int_equal(chmod(folder, 0755), 0);
    assert_int_equal(chmod(dir, 0555), 0);
    if (geteuid() == 0) assert_int_equal(seteuid(ANOTHER_USER), 0);
    bl_pages *pages;
    bl_status st = create_some(dir, KEY, N_PAGES, specs, &pages);
    if (getuid() == 0) assert_int_equal(seteuid(0), 0);
    assert_int_equal(st, BL_EIO);
    assert_error_has("creating it: Permission denied");
    assert_int_equal(chmod(dir, 0755), 0);
}

static int create_all(void **state)
{
    (void)state;
    return mkdtemp(folder) && bl_device_create_cpu(1, &device) == BL_OK ? 0 : -1;
}

static int remove_all(void **state)
{
    (void)state;
    bl_device_destroy(device);
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiers),           cmocka_unit_test(test_writing_in_place),
        cmocka_unit_test(test_order_of_writes), cmocka_unit_test(test_used_again),
        cmocka_unit_test(test_damaged_lists),   cmocka_unit_test(test_list_of_another_file),
        cmocka_unit_test(test_two_writers),     cmocka_unit_test(test_killed_while_writing),
        cmocka_unit_test(test_flipped_on_disk), cmocka_unit_test(test_disk_full),
        cmocka_unit_test(test_odd_writes),      cmocka_unit_test(test_folder),
    };
    return cmocka_run_group_tests(tests, create_all, remove_all);
}
