/* SPDX-License-Identifier: Apache-2.0 */
/* The list of a page file: a written list is read back, and each possible defect of a list is
 * rejected by name. No list here has a seal: the list's own checks alone must find the
 * defects. */
#include <stdarg.h>
#include <stddef.h>
#include <setjmp.h>
#include <stdint.h>

#include <cmocka.h>
#include <stdbool.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "offload/page_list_internal.h"

enum { N_PLACES = 3, FILE_BYTES = 20480 };

static const bl_page_owner owner = {0x1234, 1, 4};
/* Sizes of more and of less than a block, and none. */
static const bl_page_place places[N_PLACES] = {
    {"first", 5000, 0, 0x0123456789abcdef, 0xfedcba9876543210},
    {"scales", 1, 8192, 7, 0},
    {"nothing \"\xc3\xa4\"", 0, 12288, 0, 9}};

static char folder[] = "/tmp/ballast-test-XXXXXX";
static char path[64];

static char *list_text(uint64_t *hash)
{
    char *text = NULL;
    assert_int_equal(bl_page_list_write(&owner, FILE_BYTES, N_PLACES, places, &text, hash), BL_OK);
    return text;
}

static void put(const char *text, size_t n_bytes)
{
    assert_int_equal(bl_file_write_atomic(path, text, n_bytes), BL_OK);
}

/* Looks up the places of the pages in another order than that of the list. */
static bl_status read_list(bl_page_place found[N_PLACES], int64_t *file_bytes, uint64_t *hash)
{
    for (int i = 0; i < N_PLACES; i++)
        found[i] = (bl_page_place){.name = places[N_PLACES - 1 - i].name,
                                   .n_bytes = places[N_PLACES - 1 - i].n_bytes};
    return bl_page_list_read(path, &owner, N_PLACES, found, file_bytes, hash);
}

static void assert_refused(const char *what, const char *reason)
{
    bl_page_place found[N_PLACES];
    int64_t file_bytes;
    uint64_t hash;

    if (read_list(found, &file_bytes, &hash) != BL_EINPUT) fail_msg("%s: not refused", what);
    if (!strstr(bl_error_text(), path) || !strstr(bl_error_text(), reason))
        fail_msg("%s: error \"%s\" lacks \"%s\"", what, bl_error_text(), reason);
}

/* `text` with the first `from` after `after` replaced. */
static char *edited(const char *text, const char *after, const char *from, const char *to)
{
    const char *start = strstr(text, after), *at = start ? strstr(start, from) : NULL;
    char *out = NULL;

    if (!at) fail_msg("the list has no \"%s\" after \"%s\"", from, after);
    assert_int_equal(
        bl_text_format(&out, "%.*s%s%s", (int)(at - text), text, to, at + strlen(from)), BL_OK);
    return out;
}

static void test_what_was_written(void **state)
{
    bl_page_place found[N_PLACES];
    uint64_t hash, found_hash;
    int64_t file_bytes;
    char *text = list_text(&hash);

    (void)state;
    put(text, strlen(text));
    assert_int_equal(read_list(found, &file_bytes, &found_hash), BL_OK);
    assert_true(found_hash == hash);
    assert_int_equal(file_bytes, FILE_BYTES);
    for (int i = 0; i < N_PLACES; i++) {
        const bl_page_place *expected = &places[N_PLACES - 1 - i];
        assert_int_equal(found[i].offset_bytes, expected->offset_bytes);
        assert_true(found[i].xxh3_64 == expected->xxh3_64);
        assert_true(found[i].tag == expected->tag);
    }
    free(text);
}

static void test_pages_in_any_order(void **state)
{
    const bl_page_place reversed[N_PLACES] = {places[2], places[1], places[0]};
    bl_page_place found[N_PLACES];
    uint64_t hash, found_hash;
    int64_t file_bytes;
    char *text = NULL;

    (void)state;
    assert_int_equal(bl_page_list_write(&owner, FILE_BYTES, N_PLACES, reversed, &text, &hash),
                     BL_OK);
    put(text, strlen(text));
    assert_int_equal(read_list(found, &file_bytes, &found_hash), BL_OK);
    for (int i = 0; i < N_PLACES; i++)
        assert_int_equal(found[i].offset_bytes, reversed[i].offset_bytes);
    free(text);
}

/* The checksum covers all values of the list, and neither its spaces nor the order of its keys. */
static void test_checksum(void **state)
{
    bl_page_place found[N_PLACES];
    uint64_t hash, found_hash;
    int64_t file_bytes;
    char *text = list_text(&hash), *spaced = edited(text, "", "\"shard\"", " \n\"shard\""),
         *turned = edited(text, "", "\"shard\": 1", "\"file_bytes\": 20480"),
         *keys = edited(turned, "\"n_shards\"", "\"file_bytes\": 20480", "\"shard\": 1"),
         *added = edited(text, "", "\"format\"", "\"added\": 1, \"format\"");

    (void)state;
    put(spaced, strlen(spaced));
    assert_int_equal(read_list(found, &file_bytes, &found_hash), BL_OK);
    assert_true(found_hash == hash);
    put(keys, strlen(keys));
    assert_int_equal(read_list(found, &file_bytes, &found_hash), BL_OK);
    assert_true(found_hash == hash);
    put(added, strlen(added));
    assert_int_equal(read_list(found, &file_bytes, &found_hash), BL_OK);
    assert_true(found_hash != hash);
    free(text);
    free(spaced);
    free(turned);
    free(keys);
    free(added);
}

static void test_damaged_lists(void **state)
{
    static const struct {
        const char *after, *from, *to, *reason;
    } edits[] = {
        {"", "{", "[", "expected"},
        {"", "\"format\"", "\"other\"", "format"},
        {"", "ballast-pages-2", "ballast-pages-1", "key format: expected ballast-pages-2"},
        {"", "\"pages\": [", "\"pages\": 7, \"x\": [", "pages"},
        {"", "\"pages\": [", "\"pages\": [7,", "object"},
        {"", "\"shard\": 1", "\"shard\": 2", "key shard"},
        {"", "\"n_shards\": 4", "\"n_shards\": 8", "key n_shards"},
        {"", "0000000000001234", "0000000000001235", "of another model, format or layout"},
        {"", "\"0000000000001234\"", "\"1234\"", "key key: expected 16 hexadecimal digits"},
        {"", "\"0000000000001234\"", "1234", "key key"},
        {"", "\"file_bytes\": ", "\"file_bytes\": -", "key file_bytes"},
        {"", "\"file_bytes\": ", "\"file_bytes\": 99999999999999999999, \"x\": ", "integer"},
        {"", "\"file_bytes\": ", "\"file_bytes\": 4095, \"x\": ", "key file_bytes"},
        {"", "\"file_bytes\": ", "\"file_bytes\": 8192, \"x\": ",
         "key bytes"}, /* the first page is in the seal's block */
        {"first", "\"offset\": ", "\"offset\": 4096, \"x\": ", "overlaps page first"},
        {"scales", "\"offset\": ", "\"offset\": 4096, \"x\": ", "page scales overlaps page first"},
        {"first", "\"bytes\": 5000", "\"bytes\": 8193",
         "page scales overlaps page first"}, /* by a byte */
        {"scales", "\"offset\": ", "\"offset\": -4096, \"x\": ", "key offset"},
        {"scales",
         "\"offset\": ", "\"offset\": 8193, \"x\": ", "key offset: expected a multiple of 4096"},
        {"scales", "\"offset\": ", "\"offset\": 16384, \"x\": ", "key bytes"}, /* the seal's */
        {"scales", "\"offset\": ", "\"offset\": 9223372036854771712, \"x\": ", "key offset"},
        {"scales", "\"offset\": ", "\"offset\": 1e3, \"x\": ", "key offset"},
        {"scales", "\"bytes\": 1", "\"bytes\": -1", "key bytes"},
        {"scales", "\"bytes\": 1", "\"bytes\": 2", "page scales has 2 bytes, 1 are needed"},
        {"scales", "\"bytes\": 1", "\"bytes\": 9223372036854775807", "key bytes"},
        {"scales", "\"bytes\": 1", "\"bytes\": 9223372036854775808", "integer"},
        {"scales", "\"xxh3_64\": \"", "\"xxh3_64\": \"0",
         "key xxh3_64: expected 16 hexadecimal digits"},
        {"first", "0123456789abcdef", "0123456789ABCDEF",
         "key xxh3_64: expected 16 hexadecimal digits"},
        {"scales", "\"xxh3_64\": \"0000000000000007", "\"xxh3_64\": \"-fffffffffffffff9",
         "key xxh3_64: expected 16 hexadecimal digits"},
        {"scales", "\"xxh3_64\": \"", "\"xxh3_64\": null, \"x\": \"", "key xxh3_64"},
        {"", "scales", "scalds", "has no page scales"},
        {"", "nothing \\\"\xc3\xa4\\\"", "scales", "two pages of the name scales"},
        {"", "\"scales\"", "\"scales\\u0000\"", "\\u0000"},
        {"", "\"scales\"", "{}", "key name"},
        {"", "\"name\"", "\"bytes\": 3, \"name\"", "duplicate"},
    };
    uint64_t hash;
    char *text = list_text(&hash);

    (void)state;
    for (size_t i = 0; i < BL_COUNT(edits); i++) {
        char *damaged = edited(text, edits[i].after, edits[i].from, edits[i].to);
        put(damaged, strlen(damaged));
        assert_refused(edits[i].to, edits[i].reason);
        free(damaged);
    }
    free(text);
}

static void test_no_lists(void **state)
{
    uint64_t hash;
    char *text = list_text(&hash);

    (void)state;
    for (size_t n = 0; n + 1 < strlen(text); n++) { /* the last byte is a line's end, or a brace */
        put(text, n);
        assert_refused("cut", "");
    }
    put("<html>", 6);
    assert_refused("<html>", "");
    assert_int_equal(unlink(path), 0);
    assert_int_equal(mkfifo(path, 0600), 0);
    assert_refused("FIFO", "");
    free(text);
}

static void test_names(void **state)
{
    const bl_page_place twins[] = {{.name = "a"}, {.name = "b"}, {.name = "a"}},
                        odd[] = {{.name = "\xff"}};
    uint64_t hash;
    char *text;

    (void)state;
    assert_int_equal(bl_page_names_check(N_PLACES, places), BL_OK);
    assert_int_equal(bl_page_names_check(0, NULL), BL_OK);
    assert_int_equal(bl_page_names_check(3, twins), BL_EINTERNAL);
    assert_non_null(strstr(bl_error_text(), "two pages of the name a"));
    assert_int_equal(bl_page_list_write(&owner, FILE_BYTES, 1, odd, &text, &hash), BL_EINTERNAL);
    assert_null(text);
}

static int create_all(void **state)
{
    (void)state;
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/list.json", folder);
    return 0;
}

static int remove_all(void **state)
{
    (void)state;
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_what_was_written), cmocka_unit_test(test_pages_in_any_order),
        cmocka_unit_test(test_checksum),         cmocka_unit_test(test_damaged_lists),
        cmocka_unit_test(test_no_lists),         cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, create_all, remove_all);
}
