/* SPDX-License-Identifier: Apache-2.0 */
/* Templates made to crash or to stall: values nested without end, steps that cost more than they
 * count, names and parameters by the ten thousand. Each ends by a limit, with the template's
 * name. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/sizes.h"
#include "jinja/jinja.h"

/* Seconds that the clocks show, and that each look at them adds. */
static double time_s, look_s;

double __wrap_bl_now_s(void);
double __wrap_bl_thread_processor_s(void);

double __wrap_bl_now_s(void)
{
    return time_s += look_s;
}

double __wrap_bl_thread_processor_s(void)
{
    return time_s;
}

static bl_status render(const char *text, bl_jinja_output *out)
{
    static const struct tm now = {.tm_year = 126, .tm_mday = 4};
    json_t *none = json_object();
    bl_jinja *template;

    *out = (bl_jinja_output){0};
    bl_status st = bl_jinja_parse("t", text, strlen(text), &template);
    if (st == BL_OK) {
        st = bl_jinja_render(template, none, &now, out);
        bl_jinja_destroy(template);
    }
    json_decref(none);
    return st;
}

static void check_limit(const char *text, const char *reason)
{
    bl_jinja_output out;

    assert_int_equal(render(text, &out), BL_EINPUT);
    if (strncmp(bl_error_text(), "t:", 2) || !strstr(bl_error_text(), reason))
        fail_msg("%.80s: %s", text, bl_error_text());
}

static void check_output(const char *text, const char *expected)
{
    bl_jinja_output out;

    if (render(text, &out) != BL_OK) fail_msg("%.80s: %s", text, bl_error_text());
    assert_string_equal(out.text, expected);
    bl_jinja_output_free(&out);
}

/* Every way to build a value around another, and everything that walks over values. */
static void test_deep_values(void **state)
{
    static const char *const builders[][2] = {
        {"[]", "[ns.%c]"},
        {"()", "(ns.%c,)"},
        {"{}", "{'a': ns.%c}"},
        {"{}", "dict(a=ns.%c)"},
        {"{}", "dict([('a', ns.%c)])"},
        {"{}", "{'a': ns.%c.items()}"},
        {"[]", "[] + [ns.%c]"},
        {"[]", "[ns.%c][:]"},
        {"[[]]", "[ns.%c | map('list') | list]"},
        {"[]", "[[ns.%c] | reverse | list]"},
        {"[]", "[[ns.%c] | sort]"},
        {"[]", "[ns.%c, ns] | reject('string') | list"},
        {"()", "(ns.%c, ns.%c.count)"},
    };
    static const char *const walkers[] = {
        "ns.x == ns.y",
        "ns.x != ns.y",
        "ns.x < ns.y",
        "ns.x in [ns.y]",
        "[ns.y].index(ns.x)",
        "[ns.y].count(ns.x)",
        "[ns.x, ns.y] | sort",
        "[ns.x, ns.y] | max",
        "[ns.x, ns.y] | unique | list",
        "{ns.x: 1}[ns.y]",
        "ns.x",
        "ns.x | string",
        "ns.x | tojson",
        "ns.x | tojson(sort_keys=true)",
        "[ns.x, ns.y] | select('eq', ns.x) | list",
        "loop.changed(ns.x) and loop.changed(ns.y)",
        "dict([(ns.x, 1)])[ns.y]",
        "[ns.x] | sum(start=[])",
    };
    char text[512], x[64], y[64];
    (void)state;

    for (size_t b = 0; b < BL_COUNT(builders); b++)
        for (size_t w = 0; w < BL_COUNT(walkers); w++) {
            snprintf(x, sizeof x, builders[b][1], 'x', 'x');
            snprintf(y, sizeof y, builders[b][1], 'y', 'y');
            snprintf(text, sizeof text,
                     "{%% set ns = namespace(x=%s, y=%s) %%}{%% for j in range(320) %%}"
                     "{%% for i in range(320) %%}{%% set ns.x = %s %%}{%% set ns.y = %s %%}"
                     "{%% if i + j == 638 %%}{{ %s }}{%% endif %%}{%% endfor %%}{%% endfor %%}",
                     builders[b][0], builders[b][0], x, y, walkers[w]);
            check_limit(text, "data nested more than 256 deep");
        }
}

/* 256 levels are allowed, and namespaces may hold themselves. */
static void test_allowed_values(void **state)
{
    (void)state;
    check_output("{% set ns = namespace(x=1, y=1) %}{% for i in range(255) %}"
                 "{% set ns.x = [ns.x] %}{% set ns.y = [ns.y] %}{% endfor %}"
                 "{{ ns.x == ns.y }}{{ (ns.x | tojson) == (ns.x | string) }}",
                 "TrueTrue");
    check_output("{% set ns = namespace() %}{% for i in range(1000) %}{% set ns.me = [ns] %}"
                 "{% endfor %}{{ ns.me == [ns] }}{{ ns.me[0] == ns }}",
                 "TrueTrue");
}

/* About 17 of the 20 million steps, by comparisons that end at the first byte: few are left for
 * what follows. */
#define STEPS                                                                                      \
    "{% set r = 'a' * 9000000 %}{% set s = 'b' ~ r[1:] %}{% for i in range(1000) %}"               \
    "{% if r.endswith(s) %}{% endif %}{% endfor %}"

static void test_costly_steps(void **state)
{
    static const char *const texts[] = {
        "{% set t = 'a' * 4000000 %}{% set c = 'b' * 4000000 + 'a' %}{{ t.strip(c) | length }}",
        STEPS
        "{% set t = 'a' * 40000 %}{% for i in range(99999) %}{% if t.rfind('a' * 20000 + 'b') %}"
        "{% endif %}{% endfor %}",
        "{% set t = 'a' * 9000000 %}{% set u = 'b' ~ t[1:] %}{% for i in range(99999) %}"
        "{% if t.endswith(u) %}{% endif %}{% endfor %}",
        STEPS "{% set t = 'a' * 9000000 %}{% set u = t[1:] ~ 'b' %}{% for i in range(99999) %}"
              "{% if t.startswith(('x', u)) %}{% endif %}{% endfor %}",
        STEPS "{% set t = 'a' * 9000000 %}{% set u = t[1:] ~ 'b' %}{% for i in range(99999) %}"
              "{% set v = t.removeprefix(u).removesuffix(u) %}{% endfor %}",
        STEPS "{% set t = 'A' * 1000000 %}{% for i in range(99999) %}{% if t is upper %}{% endif %}"
              "{% endfor %}",
        STEPS "{% set t = 'a' * 1000000 %}{% for i in range(99999) %}{% if t[-1] == t.count('') %}"
              "{% endif %}{% endfor %}",
        STEPS "{% set k = 'a' * 1000000 %}{% set d = {k: 1} %}{% for i in range(99999) %}"
              "{% if d[k] %}{% endif %}{% endfor %}",
        "{% set ns = namespace(x=[1], y=[1]) %}{% for i in range(200) %}{% set ns.x = [ns.x, ns.x] "
        "%}{% set ns.y = [ns.y, ns.y] %}{% endfor %}{{ ns.x == ns.y }}",
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(texts); i++) check_limit(texts[i], "more than 20000000 steps");
}

/* `count` times `format` of a number, with `between`. */
static char *repeat(char *end, const char *format, const char *between, int count)
{
    for (int i = 0; i < count; i++) {
        if (i) end = stpcpy(end, between);
        end += sprintf(end, format, i);
    }
    return end;
}

static void test_many_names(void **state)
{
    enum { N = 60000 };
    char *text = malloc(32 * N), *end;

    (void)state;
    assert_non_null(text);
    strcpy(repeat(stpcpy(text, STEPS), "{%% set a%d = 1 %%}", "", N / 2),
           "{% for i in range(99999) %}{{ a0 }}{% endfor %}");
    check_limit(text, "steps");
    end = repeat(stpcpy(text, STEPS "{% macro m("), "p%d", ",", N);
    strcpy(end, ") %}{% endmacro %}{% for i in range(999) %}{{ m() }}{% endfor %}");
    check_limit(text, "steps");
    /* parsed in a moment, and each name found again */
    end = repeat(stpcpy(text, "{{ "), "n%d", "~", N);
    strcpy(repeat(stpcpy(end, " }}{% set n7 = 'y' %}{{ "), "n%d", "~", N), " }}");
    check_output(text, "y");
    free(text);
}

/* Whatever is counted too low ends by the clock. */
static void test_deadline(void **state)
{
    (void)state;
    look_s = 0.5;
    check_limit("{% for i in range(99999) %}{% for k in range(99999) %}{% endfor %}{% endfor %}",
                "more than 10 s for this conversation");
    look_s = 20;
    char *text = malloc(1 << 20), *end;
    assert_non_null(text);
    end = repeat(stpcpy(text, "{{ "), "n%d", "~", 10000);
    strcpy(end, " }}");
    check_limit(text, "more than 10 s to parse");
    free(text);
    look_s = 0;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_deep_values), cmocka_unit_test(test_allowed_values),
        cmocka_unit_test(test_costly_steps), cmocka_unit_test(test_many_names),
        cmocka_unit_test(test_deadline)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
