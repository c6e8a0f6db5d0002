/* SPDX-License-Identifier: Apache-2.0 */
/* Memory that runs out at each allocation of a parse, once and permanently: BL_ENOMEM, nothing
 * leaked (checked by the debug preset), nothing read past its end. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/sizes.h"

static long n_left; /* allocations until one fails; negative: none */
static bool is_persistent, was_refused;

#pragma GCC diagnostic ignored "-Wmissing-prototypes" /* names that the linker makes */

static bool refuse(void)
{
    if (n_left < 0 || (n_left > 0 && n_left-- > 0)) return false;
    was_refused = true;
    if (!is_persistent) n_left = -1;
    return true;
}

void *__real_malloc(size_t n);
void *__wrap_malloc(size_t n)
{
    return refuse() ? NULL : __real_malloc(n);
}

void *__real_calloc(size_t n, size_t size);
void *__wrap_calloc(size_t n, size_t size)
{
    return refuse() ? NULL : __real_calloc(n, size);
}

/* Parses with allocation `fail_at` (from 0) failing. Whether it was reached. */
static bool fail_once(const char *text, long fail_at)
{
    json_t *document;

    was_refused = false;
    n_left = fail_at;
    bl_status st = bl_json_parse("f.json", 1, text, strlen(text), &document);
    n_left = -1;
    if (was_refused) {
        assert_int_equal(st, BL_ENOMEM);
        assert_null(document);
        assert_string_equal(bl_error_text(), "out of memory: f.json: parsing JSON");
    }
    json_decref(document);
    return was_refused;
}

static long fail_each(const char *text)
{
    long n = 0;

    for (int i = 0; i < 2; i++) {
        is_persistent = i == 1;
        for (n = 0; fail_once(text, n);) n++;
    }
    return n;
}

/* Strings and numbers whose last byte, or any other, is the one for which the lexer's buffer
 * grows. */
static void test_tokens_of_every_length(void **state)
{
    char text[256];

    (void)state;
    for (int length = 1; length < 70; length++) {
        snprintf(text, sizeof text, "{\"%.*s\": 1}", length,
                 "aaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaaa");
        assert_true(fail_each(text) > 3);
        snprintf(text, sizeof text, "[0.%0*d, 0.%0*de-2, 1]", length, 1, length, 1);
        assert_true(fail_each(text) > 3);
        snprintf(text, sizeof text, "[9%0*d]", length, 1);
        assert_true(fail_each(text) >= 3);
    }
}

/* More blocks than the table of a small document holds, and an error after them. */
static void test_many_blocks(void **state)
{
    enum { ENTRIES = 400, ENTRY_BYTES = 40 };
    char *text = malloc(ENTRIES * ENTRY_BYTES + 8);
    json_t *document;

    (void)state;
    assert_non_null(text);
    text[0] = '{';
    char *at = text + 1;
    for (int i = 0; i < ENTRIES; i++)
        at += sprintf(at, "%s\"key number %d\": [%d, \"v\"]", i ? ", " : "", i, i);
    strcpy(at, "}");
    assert_true(fail_each(text) > 4 * ENTRIES);
    strcpy(at, ",}");
    assert_int_equal(bl_json_parse("f.json", 1, text, strlen(text), &document), BL_EINPUT);
    strcpy(at, "}");
    assert_int_equal(bl_json_parse("f.json", 1, text, strlen(text), &document), BL_OK);
    assert_int_equal(json_object_size(document), ENTRIES);
    json_decref(document);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_tokens_of_every_length),
        cmocka_unit_test(test_many_blocks),
    };
    n_left = -1;
    return cmocka_run_group_tests(tests, NULL, NULL);
}
