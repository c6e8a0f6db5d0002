/* SPDX-License-Identifier: Apache-2.0 */
/* Tokens that are declared outside tokenizer.json, against transformers' ids
 * (declared_golden.json). */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/files.h"
#include "base/json.h"
#include "tokenizer/tokenizer.h"

static void write_files(const char *folder, const json_t *files)
{
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)files, name, value)
    {
        char path[128], *text = json_dumps(value, 0);
        assert_non_null(text);
        snprintf(path, sizeof path, "%s/%s", folder, name);
        assert_int_equal(bl_file_write_atomic(path, text, strlen(text)), BL_OK);
        free(text);
    }
}

static void check_ids(const char *name, const bl_tokenizer *tokenizer, const char *text,
                      const json_t *expected)
{
    bl_ids ids = {0};

    assert_int_equal(bl_tokenizer_encode(tokenizer, text, strlen(text), BL_PARSE_SPECIAL, &ids),
                     BL_OK);
    if (ids.n != json_array_size(expected)) fail_msg("%s: %s: %zu ids", name, text, ids.n);
    for (size_t i = 0; i < ids.n; i++)
        if (ids.id[i] != json_integer_value(json_array_get(expected, i)))
            fail_msg("%s: %s: id %zu is %d", name, text, i, (int)ids.id[i]);
    bl_ids_free(&ids);
}

static char warnings[1024];

void __wrap_bl_log_warning(const char *format, ...);
void __wrap_bl_log_warning(const char *format, ...)
{
    size_t used = strlen(warnings);
    va_list args;
    va_start(args, format);
    vsnprintf(warnings + used, sizeof warnings - used, format, args);
    va_end(args);
}

static void check_named(const char *name, const bl_tokenizer *tokenizer, const json_t *expected)
{
    char *text = json_dumps(bl_tokenizer_named_tokens(tokenizer), JSON_SORT_KEYS);

    if (!json_equal(bl_tokenizer_named_tokens(tokenizer), expected))
        fail_msg("%s: named tokens: %s", name, text);
    free(text);
}

static void check_case(const char *folder, const json_t *entry)
{
    const char *name = bl_json_text(json_object_get(entry, "name"));
    const char *reason = bl_json_text(json_object_get(entry, "reason"));
    const json_t *texts = json_object_get(entry, "texts"), *ids = json_object_get(entry, "ids");
    const char *warns = bl_json_text(json_object_get(entry, "warns"));
    bl_tokenizer *tokenizer;

    *warnings = '\0';
    bl_status st = bl_tokenizer_load(folder, &tokenizer);
    if (reason) {
        if (st != BL_EINPUT || !strstr(bl_error_text(), reason) ||
            strncmp(bl_error_text(), folder, strlen(folder)))
            fail_msg("%s: status %d: %s", name, (int)st, bl_error_text());
        return;
    }
    if (st != BL_OK) fail_msg("%s: %s", name, bl_error_text());
    if (*warns ? !strstr(warnings, warns) : *warnings)
        fail_msg("%s: warnings: \"%s\"", name, warnings);
    check_named(name, tokenizer, json_object_get(entry, "named"));
    for (size_t i = 0; i < json_array_size(texts); i++)
        check_ids(name, tokenizer, bl_json_text(json_array_get(texts, i)), json_array_get(ids, i));
    bl_tokenizer_destroy(tokenizer);
}

static void test_as_transformers(void **state)
{
    char folder[] = "/tmp/ballast-declared-XXXXXX";
    json_t *golden, *entry;
    size_t i;
    (void)state;

    assert_int_equal(bl_json_load("tests/tokenizer/declared_golden.json", 1 << 20, &golden), BL_OK);
    assert_true(json_array_size(json_object_get(golden, "cases")) > 30);
    assert_non_null(mkdtemp(folder));
    json_array_foreach(json_object_get(golden, "cases"), i, entry)
    {
        char one[64];
        snprintf(one, sizeof one, "%s/%zu", folder, i);
        assert_int_equal(bl_dir_create(one), BL_OK);
        write_files(one, json_object_get(entry, "files"));
        check_case(one, entry);
    }
    assert_int_equal(bl_tree_remove(folder), BL_OK);
    json_decref(golden);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_as_transformers)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
