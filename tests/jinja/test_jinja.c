/* SPDX-License-Identifier: Apache-2.0 */
/* The interpreter against transformers' environment on small templates (jinja_golden.json), what it
 * refuses, and its limits. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/sizes.h"
#include "jinja/jinja.h"

static const struct tm now = {.tm_year = 126,
                              .tm_mon = 6,
                              .tm_mday = 4,
                              .tm_hour = 9,
                              .tm_min = 5,
                              .tm_sec = 7,
                              .tm_wday = 6,
                              .tm_yday = 184};

static bl_status render(const char *text, const json_t *variables, bl_jinja_output *out)
{
    bl_jinja *template;

    *out = (bl_jinja_output){0};
    bl_status st = bl_jinja_parse("t", text, strlen(text), &template);
    if (st != BL_OK) return st;
    st = bl_jinja_render(template, variables, &now, out);
    bl_jinja_destroy(template);
    return st;
}

static void test_as_transformers(void **state)
{
    json_t *golden, *entry;
    size_t i, n_errors = 0;
    (void)state;

    assert_int_equal(bl_json_load("tests/jinja/jinja_golden.json", 1 << 20, &golden), BL_OK);
    json_array_foreach(json_object_get(golden, "cases"), i, entry)
    {
        const char *text = json_string_value(json_object_get(entry, "template"));
        const json_t *expected = json_object_get(entry, "rendered");
        bl_jinja_output out;
        bl_status st = render(text, json_object_get(golden, "variables"), &out);
        if (json_is_null(expected)) {
            assert_int_equal(st, BL_EINPUT);
            n_errors++;
        } else if (st != BL_OK) {
            fail_msg("%s: %s", text, bl_error_text());
        } else if (out.n_bytes != json_string_length(expected) ||
                   memcmp(out.text, json_string_value(expected), out.n_bytes)) {
            fail_msg("%s:\nexpected %s\ngot      %s", text, json_string_value(expected), out.text);
        }
        bl_jinja_output_free(&out);
    }
    assert_true(i > 100 && n_errors > 20 && n_errors < 40);
    json_decref(golden);
}

static const struct {
    const char *text, *error;
} refused[] = {
    {"\n{% include 'x' %}", "t:2: statement {% include %} is not supported"},
    {"{% extends 'x' %}", "t:1: statement {% extends %} is not supported"},
    {"{% block a %}{% endblock %}", "t:1: statement {% block %} is not supported"},
    {"{% for x in y recursive %}{% endfor %}", "t:1: for ... recursive is not supported"},
    {"{{ f(**x) }}", "t:1: argument ** is not supported"},
    {"{% macro m() %}{{ kwargs }}{% endmacro %}", "t:1: kwargs is not supported"},
    {"\n\n{{ 1 | groupby('x') }}", "t:3: filter groupby is not supported"},
    {"{{ 1 is filter }}", "t:1: test filter is not supported"},
    {"{{ 'a'.encode() }}", "t:1: string method encode is not supported"},
    {"{{ 'a' % 1 }}", "t:1: operator % on a string is not supported"},
    {"{{ cycler(1) }}", "t:1: functions lipsum, cycler and joiner are not supported"},
    {"{{ range }}", "t:1: writing a function is not supported"},
    {"{{ [1] | map('upper') }}", "t:1: writing a iterator is not supported"},
    {"{% macro m() %}{% generation %}{% endgeneration %}{% endmacro %}{{ m() }}",
     "t:1: {% generation %} in a macro or a captured block is not supported"},
    {"{{ x.y.z }}", "t:1: x is undefined; it has no attribute y"},
    {"{{ raise_exception('no ' ~ 1) }}", "t:1: no 1"},
    {"{% if a %}\n{% endfor %}", "t:2: statement {% endfor %} is not supported"},
    {"{% if a %}\n", "t:1: expected endif, got the end"},
    {"{{ 'a }}", "t:1: a string without its end"},
    {"{# a", "t:1: a comment without its end"},
    {"{{ (1 }}", "t:1: unexpected '}'"},
    {"{{ 1 ! 2 }}", "t:1: unexpected character '!'"},
    {"{{ 9223372036854775807 + 1 }}", "t:1: an integer of more than 64 bits"},
};

static void test_refusals(void **state)
{
    json_t *none = json_object();
    (void)state;
    for (size_t i = 0; i < BL_COUNT(refused); i++) {
        bl_jinja_output out;
        assert_int_equal(render(refused[i].text, none, &out), BL_EINPUT);
        assert_string_equal(bl_error_text(), refused[i].error);
        assert_null(out.text);
        assert_int_equal(out.raised, strstr(refused[i].text, "raise_exception") != NULL);
    }
    json_decref(none);
}

/* base/json.h reads an integer outside int64 as a real; Python does not. */
static void test_integer_outside_int64(void **state)
{
    static const char text[] = "{\"x\": 12345678901234567890, \"y\": 1e22, \"z\": -9.5e17}";
    bl_jinja_output out;
    json_t *variables;
    (void)state;

    assert_int_equal(bl_json_parse("t", 1, text, strlen(text), &variables), BL_OK);
    for (int i = 0; i < 2; i++) {
        assert_int_equal(render(i ? "{{ y }}" : "{{ [x] | tojson }}", variables, &out), BL_EINPUT);
        assert_string_equal(bl_error_text(), "t:1: a number of 2^63 or more: integer and float are "
                                             "not told apart; write it as a string");
    }
    assert_int_equal(render("{{ z }}{{ x > 1 }}", variables, &out), BL_OK);
    assert_string_equal(out.text, "-9.5e+17True");
    bl_jinja_output_free(&out);
    json_decref(variables);
}

static void check_limit(const char *text, const char *reason)
{
    json_t *none = json_object();
    bl_jinja_output out;

    assert_int_equal(render(text, none, &out), BL_EINPUT);
    if (!strstr(bl_error_text(), reason)) fail_msg("%.80s: %s", text, bl_error_text());
    json_decref(none);
}

/* `open` n times, `inner`, and `close` n times. */
static void check_nested(const char *open, size_t n, const char *inner, const char *close,
                         const char *reason)
{
    char *text = calloc(1, n * (strlen(open) + strlen(close)) + strlen(inner) + 16), *end = text;

    assert_non_null(text);
    for (size_t i = 0; i < n; i++) end = stpcpy(end, open);
    end = stpcpy(end, inner);
    for (size_t i = 0; i < n; i++) end = stpcpy(end, close);
    check_limit(text, reason);
    free(text);
}

static void test_limits(void **state)
{
    (void)state;
    check_limit("{% set r = range(99999) %}{% for a in r %}{{ -1 in r }}{% endfor %}",
                "more than 20000000 steps");
    check_limit("{{ range(100001) | list }}", "more than 100000 items");
    check_limit("{{ 'aaaaaaaa' * 100000000 }}", "more than");
    check_limit("{% set ns = namespace(x='aaaaaaaaaaaaaaaa') %}{% for a in range(99) %}"
                "{% set ns.x = ns.x + ns.x %}{% endfor %}",
                "MiB");
    check_limit("{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
                "macros called more than 100 deep");
    check_nested("{% if true %}", 200, "", "{% endif %}", "nested more than 100 deep");
    check_nested("{{ - ", 1,
                 "- - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - "
                 "- - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - "
                 "- - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - - 1",
                 " }}", "nested more than 100 deep");
    check_nested("{{ 1", 1, "", "", "in a tag");
}

/* Left-associative operators nest in the tree, not in the text. */
static void test_long_expressions(void **state)
{
    enum { N = 3000 };
    char *text = calloc(1, 4 * N + 64), *end = text;
    json_t *none = json_object();
    bl_jinja_output out;

    (void)state;
    assert_non_null(text);
    end = stpcpy(end, "{{ 0");
    for (int i = 0; i < N; i++) end = stpcpy(end, "+1");
    strcpy(end, " }}");
    assert_int_equal(render(text, none, &out), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "more than 1000 deep"));
    strcpy(text + 4 + 2 * 500, " }}");
    assert_int_equal(render(text, none, &out), BL_OK);
    assert_string_equal(out.text, "500");
    bl_jinja_output_free(&out);
    json_decref(none);
    free(text);
}

static void test_generation_spans(void **state)
{
    json_t *none = json_object();
    bl_jinja_output out;

    (void)state;
    assert_int_equal(render("é{% for x in [1, 2] %}<{% generation %}a{{ x }}{% endgeneration %}>"
                            "{% endfor %}",
                            none, &out),
                     BL_OK);
    assert_string_equal(out.text, "é<a1><a2>");
    assert_int_equal(out.n_spans, 2);
    assert_int_equal(out.span[0].begin, 3);
    assert_int_equal(out.span[0].end, 5);
    assert_int_equal(out.span[1].begin, 7);
    assert_int_equal(out.span[1].end, 9);
    bl_jinja_output_free(&out);
    json_decref(none);
}

static void test_prepared_messages(void **state)
{
    json_t *messages, *prepared;
    char *text;
    static const char given[] = "[{\"role\": \"user\", \"content\": null, \"name\": \"n\"},"
                                "{\"role\": \"assistant\", \"reasoning\": \"r\"},"
                                "{\"reasoning_content\": \"a\", \"thinking\": \"b\"}]";
    static const char expected[] =
        "[{\"role\": \"user\", \"name\": \"n\"}, "
        "{\"thinking\": \"r\", \"role\": \"assistant\", \"reasoning\": \"r\", "
        "\"reasoning_content\": \"r\"}, "
        "{\"thinking\": \"b\", \"reasoning_content\": \"a\"}]";

    (void)state;
    assert_int_equal(bl_json_parse("t", 1, given, strlen(given), &messages), BL_OK);
    assert_int_equal(bl_jinja_prepare_messages(messages, &prepared), BL_OK);
    assert_non_null(text = json_dumps(prepared, 0));
    assert_string_equal(text, expected);
    free(text);
    json_decref(prepared);
    json_decref(messages);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_as_transformers),
                                       cmocka_unit_test(test_refusals),
                                       cmocka_unit_test(test_limits),
                                       cmocka_unit_test(test_long_expressions),
                                       cmocka_unit_test(test_generation_spans),
                                       cmocka_unit_test(test_prepared_messages),
                                       cmocka_unit_test(test_integer_outside_int64)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
