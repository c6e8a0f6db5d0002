/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of objects: used, without effect, rejected, unknown. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/present.h"
#include "base/sizes.h"

static const bl_known_key keys[] = {
    {"r", BL_KEY_USED, NULL, NULL},
    {"use_dora", BL_KEY_REJECTED, NULL, "DoRA is not supported"},
    {"act", BL_KEY_REJECTED, "[\"silu\", \"swish\"]", NULL},
    {"factor", BL_KEY_REJECTED, "[1]", NULL},
    {"is_causal", BL_KEY_REJECTED, "[true]", "the mask is causal"},
    {"window", BL_KEY_REJECTED, "[]", NULL},
    {"tools", BL_KEY_REJECTED, "[\"\", \"[]\", [], {}]", NULL},
};
static const char *const used[] = {"bias", "factor2", NULL};
static const bl_key_table table = {keys, BL_COUNT(keys), used, "revision peft_version"};

static json_t *parse(const char *text)
{
    json_t *value = NULL;

    assert_int_equal(bl_json_parse("t", 1, text, strlen(text), &value), BL_OK);
    return value;
}

static void test_neutral_values(void **state)
{
    static const char *const neutral[] = {
        "null",   "false",     "\"\"",       "[]",
        "{}",     "[null]",    "[[], [{}]]", "{\"a\": false, \"b\": {\"c\": [\"\"]}}",
        "[\"\"]", "{\"a\":{}}"};
    static const char *const values[] = {
        "true",        "0",          "0.0", "\" \"",
        "\"\\u0000\"", "\"false\"",  "[0]", "[null, true]",
        "[[1]]",       "{\"a\": 0}", "-1",  "{\"a\": null, \"b\": {\"c\": [\"\", \"x\"]}}"};
    (void)state;

    for (size_t i = 0; i < BL_COUNT(neutral) + BL_COUNT(values); i++) {
        bool is_neutral = i < BL_COUNT(neutral);
        json_t *value = parse(is_neutral ? neutral[i] : values[i - BL_COUNT(neutral)]);
        assert_int_equal(bl_key_check(&table, "f", "new", value, NULL),
                         is_neutral ? BL_OK : BL_EINPUT);
        json_decref(value);
    }
}

/* Without `says` the object is accepted, else the error is exactly it. */
static void test_objects(void **state)
{
    static const struct {
        const char *object, *says;
    } cases[] = {
        {"{}", NULL},
        {"{\"r\": 8, \"bias\": \"all\", \"factor2\": 3, \"revision\": \"main\"}", NULL},
        {"{\"_name\": \"x\", \"_rank_pattern\": {\"a\": 1}}", NULL},
        {"{\"new\": null, \"newer\": [], \"off\": false, \"none\": {\"a\": \"\"}}", NULL},
        {"{\"use_dora\": false, \"act\": null, \"factor\": null, \"is_causal\": null}", NULL},
        {"{\"act\": \"swish\", \"factor\": 1.0, \"is_causal\": true, \"window\": null}", NULL},
        {"{\"factor\": [1, 1.0, [null]], \"act\": [\"silu\", \"swish\"], \"window\": null}", NULL},
        {"{\"tools\": []}", NULL},
        {"{\"tools\": [\"[]\", {}]}", NULL},
        {"{\"use_dora\": true}", "f: key use_dora: expected null, got true: DoRA is not supported"},
        {"{\"act\": \"gelu\"}", "f: key act: expected \"silu\" or \"swish\", got \"gelu\""},
        {"{\"act\": false}", "f: key act: expected \"silu\" or \"swish\", got false"},
        {"{\"factor\": 2}", "f: key factor: expected 1, got 2"},
        {"{\"factor\": [1, 2]}", "f: key factor: expected 1, got [1,2]"},
        {"{\"factor\": {\"a\": 0}}", "f: key factor: expected 1, got {\"a\":0}"},
        {"{\"is_causal\": false}",
         "f: key is_causal: expected true, got false: the mask is causal"},
        {"{\"window\": 0}", "f: key window: expected null, got 0"},
        {"{\"window\": []}", "f: key window: expected null, got []"},
        {"{\"tools\": false}", "f: key tools: expected \"\", \"[]\", [] or {}, got false"},
        {"{\"use_dorra\": true}",
         "f: key use_dorra: unknown, with the value true; did you mean use_dora?"},
        {"{\"biass\": 0}", "f: key biass: unknown, with the value 0; did you mean bias?"},
        {"{\"kasa_config\": {\"a\": 1}, \"later\": 1}",
         "f: key kasa_config: unknown, with the value {\"a\":1}; remove it if it does not change "
         "the result"},
        {"{\"a\\nb\": \"\\u0007\"}",
         "f: key a?b: unknown, with the value \"\\u0007\"; remove it if it does not change the "
         "result"},
    };
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        json_t *object = parse(cases[i].object);
        bl_status st = bl_keys_check(&table, "f", object, NULL);
        assert_int_equal(st, cases[i].says ? BL_EINPUT : BL_OK);
        if (cases[i].says) assert_string_equal(bl_error_text(), cases[i].says);
        json_decref(object);
    }
}

static void test_unknown_keys_are_collected(void **state)
{
    bl_key_names names = {0};
    json_t *object =
        parse("{\"b\": 1, \"_c\": 1, \"r\": 1, \"a\": [0], \"n\": null, \"ab\": \"x\"}");
    (void)state;

    assert_int_equal(bl_keys_check(&table, "f", object, &names), BL_OK);
    assert_int_equal(bl_keys_check(&table, "f", object, &names), BL_OK);
    assert_string_equal(names.text, "b, a, ab");
    assert_int_equal(names.n, 3);
    json_decref(object);

    object = parse("{\"b\": 1, \"use_dora\": true}"); /* a known key is an error there, too */
    assert_int_equal(bl_keys_check(&table, "f", object, &names), BL_EINPUT);
    json_decref(object);
}

/* A list of neutral values is neutral; an object with one is not: {"a": 1} is no weight of 1. */
static void test_named_keys(void **state)
{
    static const bl_known_key some[] = {{"p", BL_KEY_NAMED, "[1]", NULL},
                                        {"q", BL_KEY_NAMED, "[1]", NULL},
                                        {"s", BL_KEY_NAMED, NULL, NULL},
                                        {"t", BL_KEY_NAMED, "[1]", NULL},
                                        {"u", BL_KEY_NAMED, "[1]", NULL}};
    static const bl_key_table named = {some, BL_COUNT(some), NULL, NULL};
    bl_key_names names = {0};
    json_t *object =
        parse("{\"p\": 1.0, \"q\": 2, \"s\": \"x\", \"t\": [1, 1], \"u\": {\"a\": 1}}");
    (void)state;

    assert_int_equal(bl_keys_check(&named, "f", object, &names), BL_OK);
    assert_string_equal(names.text, "q, s, u");
    json_decref(object);
}

static void test_list_of_names_has_an_end(void **state)
{
    bl_key_names names = {0};
    char name[96];
    (void)state;

    for (int i = 0; i < 2000; i++) {
        snprintf(name, sizeof name, "%080d", i); /* shown are its first 64 bytes */
        assert_int_equal(bl_key_check(&table, "f", name + (i % 2 ? 0 : 40), json_true(), &names),
                         BL_OK);
    }
    size_t n_bytes = strlen(names.text);
    assert_true(n_bytes > 900 && n_bytes < sizeof names.text);
    assert_string_equal(names.text + n_bytes - 5, ", ...");
    assert_null(strstr(names.text, "..., "));
}

/* A long name must not cost the product of its length with all others. */
static void test_long_key_has_no_nearest(void **state)
{
    static char text[1 << 20];
    (void)state;

    memset(text, 'r', sizeof text);
    memcpy(text, "{\"", 2);
    memcpy(text + sizeof text - 6, "\": 1}", 6);
    json_t *object = parse(text);
    assert_int_equal(bl_keys_check(&table, "f", object, NULL), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "remove it"));
    assert_true(strlen(bl_error_text()) < 200);
    json_decref(object);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_neutral_values),
        cmocka_unit_test(test_objects),
        cmocka_unit_test(test_unknown_keys_are_collected),
        cmocka_unit_test(test_named_keys),
        cmocka_unit_test(test_list_of_names_has_an_end),
        cmocka_unit_test(test_long_key_has_no_nearest),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
