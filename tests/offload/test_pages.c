/* SPDX-License-Identifier: Apache-2.0 */
/* Pages in three tiers: the exact bytes back; page files used again or written anew, and what other
 * processes and flipped bits lead to. */
#include "pages_case.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include "base/files.h"
#include "offload/page_folder.h"

static void test_tiers(void **state)
{
    const char *dir = pages_new_dir();
    bl_pages *pages = pages_made(dir, false);

    (void)state;
    pages_assert_contents(pages);
    assert_int_equal(bl_pages_count(pages), N_PAGES);
    assert_string_equal(bl_pages_spec(pages, 3)->name, "layer 1 \"o\"");
    assert_true(bl_pages_spec(pages, 3)->name != pages_specs[3].name);
    assert_int_equal(bl_pages_tier_bytes(pages, BL_TIER_DEVICE), 303104); /* 74 x 4096 */
    assert_int_equal(bl_pages_tier_bytes(pages, BL_TIER_HOST), 126976);   /* 31 x 4096 */
    assert_int_equal(bl_pages_tier_bytes(pages, BL_TIER_DISK), (1026 + 1 + 1 + 1 + 2304) * 4096);
    assert_int_equal(bl_pages_seal(pages), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 0, 0, "x", 1), BL_EINTERNAL);
    assert_int_equal(bl_pages_read(pages, 0, pages_staging, NULL), BL_EINTERNAL);
    bl_pages_destroy(pages);
    bl_pages_destroy(NULL);

    assert_int_equal(pages_create_some(NULL, PAGES_KEY, 1, pages_specs, &pages), BL_OK);
    assert_null(bl_pages_files(pages));
    assert_int_equal(pages_fill(pages), BL_OK);
    bl_pages_destroy(pages);
    assert_int_equal(pages_create_some(NULL, PAGES_KEY, 0, NULL, &pages), BL_OK);
    assert_int_equal(bl_pages_seal(pages), BL_OK);
    bl_pages_destroy(pages);
}

/* The ranks of a host share the memory of the staging blocks; with less memory each block is reused
 * sooner. */
static void test_one_of_many_ranks(void **state)
{
    const bl_pages_options options = {.device = pages_device,
                                      .node = -1,
                                      .dir = pages_new_dir(),
                                      .key = PAGES_KEY,
                                      .shard = 1,
                                      .n_shards = 4,
                                      .n_on_host = 8};
    bl_pages *pages;

    (void)state;
    assert_int_equal(bl_pages_create(&options, N_PAGES, pages_specs, &pages), BL_OK);
    assert_int_equal(pages_fill(pages), BL_OK);
    pages_assert_contents(pages);
    bl_pages_destroy(pages);
    assert_int_equal(bl_pages_writing_bytes(0), 32 << 20);
    assert_int_equal(bl_pages_writing_bytes(1), 32 << 20);
    assert_int_equal(bl_pages_writing_bytes(2), 16 << 20);
    assert_int_equal(bl_pages_writing_bytes(8), 8 << 20);
    assert_int_equal(bl_pages_writing_bytes(1000), 8 << 20);
}

static void test_writing_in_place(void **state)
{
    static const bl_page_spec two[] = {{"a", 5000, BL_TIER_DEVICE}, {"b", 5000, BL_TIER_HOST}};
    bl_pages *pages;

    (void)state;
    assert_int_equal(pages_create_some(NULL, PAGES_KEY, 2, two, &pages), BL_OK);
    for (int i = 0; i < 2; i++) {
        uint8_t *bytes = pages_content(&two[i]), *memory = bl_pages_memory(pages, i);
        memcpy(memory, bytes, 5000);
        assert_int_equal(bl_pages_write(pages, i, 0, memory, 3000), BL_OK);
        assert_int_equal(bl_pages_write(pages, i, 3000, memory + 3000, 2000), BL_OK);
        assert_int_equal(bl_pages_check(pages, i, bytes), BL_OK);
        free(bytes);
    }
    assert_int_equal(bl_pages_seal(pages), BL_OK);
    for (int i = 0; i < 2; i++) {
        ((uint8_t *)bl_pages_memory(pages, i))[4999] ^= 1;
        assert_int_equal(bl_pages_verify_memory(pages, i, pages_staging), BL_EINPUT);
        pages_assert_error_has(i ? "memory of page b: checksum" : "memory of page a: checksum");
        ((uint8_t *)bl_pages_memory(pages, i))[4999] ^= 1;
        assert_int_equal(bl_pages_verify_memory(pages, i, pages_staging), BL_OK);
    }
    bl_pages_destroy(pages);
}

static void test_order_of_writes(void **state)
{
    const char *dir = pages_new_dir();
    const bl_page_spec twins[] = {
        {"a", 1, BL_TIER_HOST}, {"b", 2, BL_TIER_HOST}, {"a", 3, BL_TIER_HOST}};
    uint8_t bytes[8192] = {0};
    bl_pages *pages;

    (void)state;
    assert_int_equal(pages_create_some(dir, PAGES_KEY, N_PAGES, pages_specs, &pages), BL_OK);
    assert_int_equal(bl_pages_check(pages, 3, bytes), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 3, 1, bytes, 1), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 3, 0, bytes, 4097), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 3, 0, bytes, 4095), BL_OK);
    assert_int_equal(bl_pages_write(pages, 4, 0, bytes, 1), BL_EINTERNAL);
    pages_assert_error_has("page scales: written before page layer 1 \"o\" is whole");
    assert_int_equal(bl_pages_write(pages, 3, 0, bytes, 1), BL_EINTERNAL);
    assert_int_equal(bl_pages_seal(pages), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 3, 4095, bytes, 1), BL_OK);
    assert_int_equal(bl_pages_write(pages, 3, 4096, bytes, 1), BL_EINTERNAL);
    assert_int_equal(bl_pages_write(pages, 4, 0, bytes, 1), BL_OK);
    bl_pages_destroy(pages);
    assert_int_equal(pages_count_files(dir), 0);
    assert_int_equal(pages_create_some(NULL, PAGES_KEY, 3, twins, &pages), BL_EINTERNAL);
    pages_assert_error_has("two pages of the name a");
    assert_int_equal(pages_create_some(NULL, PAGES_KEY, 2, pages_specs, &pages), BL_EINTERNAL);
    assert_null(pages);
}

static void test_used_again(void **state)
{
    const char *dir = pages_new_dir();
    const bl_page_spec fewer[] = {{pages_specs[6].name, pages_specs[6].n_bytes, BL_TIER_DISK},
                                  {pages_specs[3].name, 4096, BL_TIER_DISK},
                                  {pages_specs[1].name, 10, BL_TIER_HOST}};
    const bl_page_spec more[] = {{pages_specs[6].name, pages_specs[6].n_bytes, BL_TIER_DISK},
                                 {"another", 100, BL_TIER_DISK}};
    const bl_page_spec resized[] = {{"another", 101, BL_TIER_DISK}};
    struct stat before, after;
    uint8_t byte = 0;
    bl_pages *pages;

    (void)state;
    pages_assert_made(dir, false);
    assert_int_equal(stat(pages_in_dir(".pages"), &before), 0);
    pages_assert_made(dir, true);
    assert_int_equal(pages_create_some(dir, PAGES_KEY, 3, fewer, &pages), BL_OK);
    assert_true(bl_pages_has_disk(pages));
    assert_int_equal(bl_pages_write(pages, 1, 0, &byte, 1), BL_EINTERNAL);
    pages_assert_error_has("the disk has it");
    uint8_t *found = malloc(pages_specs[6].n_bytes), *expected = pages_content(&pages_specs[6]);
    assert_int_equal(bl_pages_read(pages, 0, pages_staging, found), BL_OK); /* before seal */
    assert_memory_equal(found, expected, pages_specs[6].n_bytes);
    assert_int_equal(pages_fill(pages), BL_OK);
    pages_assert_contents(pages);
    bl_pages_destroy(pages);
    assert_int_equal(stat(pages_in_dir(".pages"), &after), 0);
    assert_int_equal(before.st_ino, after.st_ino);

    bl_pages_destroy(pages_made_with(dir, PAGES_KEY + 1, false)); /* of another key: beside it */
    assert_int_equal(pages_count_files(dir), 4);
    bl_pages *old = pages_made(dir, true); /* its file stays valid when another takes the name */
    assert_int_equal(pages_create_some(dir, PAGES_KEY, 2, more, &pages), BL_OK);
    assert_false(bl_pages_has_disk(pages));
    assert_int_equal(pages_fill(pages), BL_OK);
    pages_assert_contents(pages);
    bl_pages_destroy(pages);
    pages_assert_contents(old);
    bl_pages_destroy(old);
    assert_int_equal(pages_create_some(dir, PAGES_KEY, 1, resized, &pages), BL_OK);
    assert_false(bl_pages_has_disk(pages));
    bl_pages_destroy(pages);
    assert_int_equal(pages_create_some(dir, PAGES_KEY, 2, more, &pages),
                     BL_OK); /* one that was not finished changes nothing */
    assert_true(bl_pages_has_disk(pages));
    bl_pages_destroy(pages);
    free(found);
    free(expected);
}

/* Counts page files of other keys, finished or not; no other files. */
static void test_files_of_other_keys(void **state)
{
    const char *dir = pages_new_dir();
    const char *const not_pages[] = {
        "d/base-0000000000001235-0-of-4.json", "d/base-0000000000001235.pages",
        "d/base-0000000000001235-0-of-4.pages.old", "d/other-0000000000001235-0-of-4.pages"};
    int64_t n_files, n_bytes;
    struct stat info;

    (void)state;
    pages_assert_made(dir, false);
    assert_int_equal(bl_page_folder_others(dir, PAGES_KEY, &n_files, &n_bytes), BL_OK);
    assert_int_equal(n_files, 0);
    assert_int_equal(n_bytes, 0);
    for (size_t i = 0; i < sizeof not_pages / sizeof not_pages[0]; i++)
        assert_int_equal(bl_file_write_atomic(pages_path_of(not_pages[i]), "x", 1), BL_OK);
    bl_pages_destroy(pages_made_with(dir, PAGES_KEY + 1, false));
    assert_int_equal(
        bl_file_write_atomic(pages_path_of("d/base-0000000000001235-0-of-4.pages.tmp-1-0"), "x", 1),
        BL_OK);
    assert_int_equal(bl_page_folder_others(dir, PAGES_KEY, &n_files, &n_bytes), BL_OK);
    assert_int_equal(n_files, 2);
    assert_int_equal(stat(pages_in_dir(".pages"), &info), 0); /* as large as its neighbor */
    assert_in_range(n_bytes, info.st_size, info.st_size + 65536);
    assert_int_equal(bl_page_folder_others(dir, PAGES_KEY + 1, &n_files, &n_bytes), BL_OK);
    assert_int_equal(n_files, 1);
    assert_int_equal(bl_page_folder_others(pages_path_of("absent"), PAGES_KEY, &n_files, &n_bytes),
                     BL_EINPUT);
}

/* The list of one file beside the pages of another of the same size. */
static void test_list_of_another_file(void **state)
{
    const bl_page_spec a[] = {{"a", 5000, BL_TIER_DISK}}, b[] = {{"b", 5000, BL_TIER_DISK}};
    const char *dir = pages_new_dir();
    bl_pages *pages;

    (void)state;
    assert_int_equal(pages_create_some(dir, PAGES_KEY, 1, a, &pages), BL_OK);
    assert_int_equal(pages_fill(pages), BL_OK);
    bl_pages_destroy(pages);
    assert_int_equal(rename(pages_in_dir(".json"), pages_path_of("d/kept")), 0);
    assert_int_equal(pages_create_some(dir, PAGES_KEY, 1, b, &pages), BL_OK);
    assert_int_equal(pages_fill(pages), BL_OK);
    bl_pages_destroy(pages);
    assert_int_equal(rename(pages_path_of("d/kept"), pages_in_dir(".json")), 0);
    assert_int_equal(pages_create_some(dir, PAGES_KEY, 1, a, &pages), BL_OK);
    assert_false(bl_pages_has_disk(pages));
    bl_pages_destroy(pages);
}

static void test_two_writers(void **state)
{
    enum { N_WRITERS = 3 };
    const char *dir = pages_new_dir();
    pid_t children[N_WRITERS];
    bl_pages *first, *second;

    (void)state;
    assert_int_equal(pages_create_some(dir, PAGES_KEY, N_PAGES, pages_specs, &first),
                     BL_OK); /* two of one process */
    assert_int_equal(pages_create_some(dir, PAGES_KEY, N_PAGES, pages_specs, &second), BL_OK);
    assert_int_equal(pages_count_files(dir), 2);
    assert_int_equal(pages_fill(first), BL_OK);
    assert_int_equal(pages_fill(second), BL_OK);
    pages_assert_contents(first);
    pages_assert_contents(second);
    bl_pages_destroy(first);
    pages_assert_contents(second);
    bl_pages_destroy(second);
    pages_assert_made(dir, true);

    dir = pages_new_dir();
    for (int i = 0; i < N_WRITERS; i++) children[i] = pages_fork_writer(dir, NULL);
    for (int i = 0; i < N_WRITERS; i++) {
        int status;
        assert_int_equal(waitpid(children[i], &status, 0), children[i]);
        assert_true(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
    pages_assert_made(dir, true);
}

static void test_flipped_on_disk(void **state)
{
    const char *dir = pages_new_dir();
    char place[64];
    bl_pages *pages = pages_made(dir, false);
    uint8_t *bytes = malloc(PAGES_MAX_BYTES);

    (void)state;
    snprintf(place, sizeof place, "page layer 1 down at %" PRId64 ": checksum",
             bl_pages_offset(pages, 6));
    pages_flip(pages_in_dir(".pages"),
               bl_pages_offset(pages, 6) + (int64_t)pages_specs[6].n_bytes - 1);
    assert_int_equal(bl_pages_read(pages, 6, pages_staging, bytes), BL_EINPUT);
    pages_assert_error_has(place);
    pages_assert_error_has(pages_in_dir(".pages"));
    assert_int_equal(bl_pages_check(pages, 6, bytes), BL_EINPUT);
    assert_int_equal(bl_pages_read(pages, 1, pages_staging, bytes), BL_OK);
    bl_pages_destroy(pages);

    pages = pages_made(dir, true);
    assert_int_equal(bl_pages_read(pages, 6, pages_staging, bytes), BL_EINPUT);
    bl_pages_distrust_disk(pages);
    bl_pages_destroy(pages);
    pages_assert_made(dir, false);
    free(bytes);
}

/* ---- damaged lists ---- */

static void put_list(const char *text, size_t n_bytes)
{
    assert_int_equal(bl_file_write_atomic(pages_in_dir(".json"), text, n_bytes), BL_OK);
}

/* What is wrong with a list is page_list.c's to find; here, that a list or a page file with
 * anything wrong leads to both being written anew, and that the seal finds what no other check
 * does. */
static void test_damaged_lists(void **state)
{
    const char *dir = pages_new_dir();
    char *text, *damaged;
    size_t n_bytes;

    (void)state;
    pages_assert_made(dir, false);
    assert_int_equal(bl_file_read_all(pages_in_dir(".json"), 1 << 20, (void **)&text, &n_bytes),
                     BL_OK);
    assert_int_equal(bl_text_format(&damaged, "{\"added\": 1, %s", text + 1),
                     BL_OK); /* sound, and of another checksum */
    put_list(damaged, strlen(damaged));
    free(damaged);
    pages_assert_made(dir, false);
    put_list(text, n_bytes / 2);
    pages_assert_made(dir, false);
    put_list("", 0);
    pages_assert_made(dir, false);
    assert_int_equal(unlink(pages_in_dir(".json")), 0);
    assert_int_equal(mkfifo(pages_in_dir(".json"), 0600), 0);
    pages_assert_made(dir, false);

    put_list(text, n_bytes);
    pages_assert_made(dir, true); /* the same bytes again: the damage was at fault */
    assert_int_equal(truncate(pages_in_dir(".pages"), 8 << 20), 0);
    pages_assert_made(dir, false);
    struct stat info;
    assert_int_equal(stat(pages_in_dir(".pages"), &info), 0);
    pages_flip(pages_in_dir(".pages"), info.st_size - BL_IO_ALIGN_BYTES); /* the seal */
    pages_assert_made(dir, false);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tiers),
        cmocka_unit_test(test_one_of_many_ranks),
        cmocka_unit_test(test_writing_in_place),
        cmocka_unit_test(test_order_of_writes),
        cmocka_unit_test(test_used_again),
        cmocka_unit_test(test_files_of_other_keys),
        cmocka_unit_test(test_list_of_another_file),
        cmocka_unit_test(test_two_writers),
        cmocka_unit_test(test_damaged_lists),
        cmocka_unit_test(test_flipped_on_disk),
    };
    return cmocka_run_group_tests(tests, pages_set_up, pages_tear_down);
}
