/* SPDX-License-Identifier: Apache-2.0 */
/* The JSON reader: its errors, its getters, and nst/JSONTestSuite when BALLAST_TEST_DATA names the
 * test data. */
#include <float.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "skip.h"

static bl_status parse(const char *text, json_t **out)
{
    return bl_json_parse("f.json", 1, text, strlen(text), out);
}

static void test_errors_name_the_place(void **state)
{
    static const struct {
        const char *text, *error;
    } cases[] = {
        {"{\"a\": 1,\n \"b\": }", "f.json:2:7: unexpected token near '}'"},
        {"{\"a\": 1, \"a\": 2}", "f.json:1:12: duplicate object key near '\"a\"'"},
        {"{} x", "f.json:1:4: end of file expected near 'x'"},
        {"[99999999999999999999,\n 1e999]", "f.json:2:6: real number overflow near '1e999'"},
        {"[99999999999999999999 1]", "f.json:1:23: ']' expected near '1'"},
        {"[000000000000000000000]", "f.json:1:2: invalid token near '0'"},
        {"[1e999]", "f.json:1:6: real number overflow near '1e999'"},
        {"[\"\xff\"]", "f.json:1:2: unable to decode byte 0xff near '\"'"},
        {"", "f.json:1:0: unexpected token near end of file"},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        json_t *document = (json_t *)&cases;
        assert_int_equal(parse(cases[i].text, &document), BL_EINPUT);
        assert_null(document);
        assert_string_equal(bl_error_text(), cases[i].error);
    }
    json_t *document;
    assert_int_equal(bl_json_parse("rows.jsonl", 41, "{\"x\" 1}", 7, &document), BL_EINPUT);
    assert_string_equal(bl_error_text(), "rows.jsonl:41:6: ':' expected near '1'");
    assert_int_equal(bl_json_parse("f.json", 1, "[\n1]\0hidden", 11, &document), BL_EINPUT);
    assert_string_equal(bl_error_text(), "f.json:2:3: NUL byte");
}

/* Integers outside int64 become the nearest real; those inside stay exact, whatever the other
 * values. */
static void test_integers_of_any_size(void **state)
{
    static const struct {
        const char *text;
        double value;
    } reals[] = {
        {"9223372036854775808", 9223372036854775808.0},
        {"-9223372036854775809", -9223372036854775808.0},
        {"18446744073709551615", 18446744073709551616.0},
        {"9999999999999999999", 1e19},
        {"1000000000000000019884624838656", 1e30},
        {"-12345678901234567890123", -12345678901234567890123.0},
    };
    char text[640];
    json_t *d;
    int64_t integer = 0;
    double real = 0;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(reals); i++) {
        snprintf(text, sizeof text,
                 "{\"s\":\"9223372036854775808 \\\" "
                 "-9999999999999999999999\",\"exact\":9223372036854775807, "
                 "\"big\":%s,"
                 "\"least\":-9223372036854775808,\"real\":12345678901234567890.5, "
                 "\"e\":12345678901234567890e-19}",
                 reals[i].text);
        assert_int_equal(parse(text, &d), BL_OK);
        assert_int_equal(bl_json_get_int("f", d, "exact", BL_JSON_REQUIRED, 0, INT64_MAX, &integer),
                         BL_OK);
        assert_true(integer == INT64_MAX);
        assert_int_equal(bl_json_get_int("f", d, "least", BL_JSON_REQUIRED, INT64_MIN, 0, &integer),
                         BL_OK);
        assert_true(integer == INT64_MIN);
        assert_string_equal(json_string_value(json_object_get(d, "s")),
                            "9223372036854775808 \" -9999999999999999999999");
        assert_true(json_real_value(json_object_get(d, "real")) == 12345678901234567890.5);
        assert_true(json_real_value(json_object_get(d, "e")) == 1.2345678901234567890);
        assert_true(json_real_value(json_object_get(d, "big")) == reals[i].value);
        assert_int_equal(bl_json_get_real("f", d, "big", BL_JSON_REQUIRED, -1e31, 1e31, &real),
                         BL_OK);
        assert_int_equal(
            bl_json_get_int("f", d, "big", BL_JSON_REQUIRED, INT64_MIN, INT64_MAX, &integer),
            BL_EINPUT);
        json_decref(d);
        assert_int_equal(parse(reals[i].text, &d), BL_OK); /* nothing behind the last digit */
        assert_true(json_real_value(d) == reals[i].value);
        json_decref(d);
    }
    assert_int_equal(parse("{\"id\":1000000000000000019884624838656}", &d), BL_OK);
    assert_int_equal(bl_json_get_int("f", d, "id", BL_JSON_REQUIRED, 0, 7, &integer), BL_EINPUT);
    assert_string_equal(bl_error_text(), "f: key id: expected an integer in [0, 7], got 1e30");
    json_decref(d);

    /* One that no double is near. */
    memset(text, '9', 400);
    text[400] = '\0';
    assert_int_equal(parse(text, &d), BL_OK);
    assert_true(json_real_value(d) == DBL_MAX);
    json_decref(d);
}

static void test_byte_order_marks(void **state)
{
    static const struct {
        const char *bytes, *error;
        size_t n_bytes;
    } cases[] = {
        {"\xef\xbb\xbf{\"a\":1}", NULL, 10},
        {"\xef\xbb\xbf", "mark.json:1:0: unexpected token near end of file", 3},
        {"\xff\xfe{\0}\0", "mark.json: the text is UTF-16; save it as UTF-8", 6},
        {"\xfe\xff\0{\0}", "mark.json: the text is UTF-16; save it as UTF-8", 6},
        {"\xff\xfe\0\0{\0\0\0", "mark.json: the text is UTF-32; save it as UTF-8", 8},
    };
    json_t *d;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(bl_file_write_atomic("mark.json", cases[i].bytes, cases[i].n_bytes),
                         BL_OK);
        assert_int_equal(bl_json_load("mark.json", 100, &d), cases[i].error ? BL_EINPUT : BL_OK);
        if (cases[i].error) assert_string_equal(bl_error_text(), cases[i].error);
        json_decref(d);
    }
    remove("mark.json");
}

static void test_depth_is_bounded(void **state)
{
    enum { TOO_DEEP = 100000 };
    char *text = malloc(TOO_DEEP);
    json_t *document;

    (void)state;
    memset(text, '[', TOO_DEEP);
    assert_int_equal(bl_json_parse("f", 1, text, TOO_DEEP, &document), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "maximum parsing depth reached"));
    memset(text, '[', 2000);
    memset(text + 2000, ']', 2000);
    assert_int_equal(bl_json_parse("f", 1, text, 4000, &document), BL_OK);
    json_decref(document);
    free(text);
}

static void test_getters(void **state)
{
    json_t *d;
    int64_t integer = 7;
    double real = 7;
    bool flag = true;
    const char *text = "kept";
    const json_t *part = NULL;

    (void)state;
    assert_int_equal(parse("{\"i\":5,\"r\":1.5,\"t\":true,\"s\":\"x\",\"n\":null,\"z\":"
                           "\"a\\u0000b\",\"o\":{},\"a\":[1]}",
                           &d),
                     BL_OK);
    assert_int_equal(bl_json_get_int("f", d, "i", BL_JSON_REQUIRED, 0, 5, &integer), BL_OK);
    assert_int_equal(integer, 5);
    assert_int_equal(bl_json_get_int("f", d, "i", BL_JSON_REQUIRED, 6, 9, &integer), BL_EINPUT);
    assert_string_equal(bl_error_text(), "f: key i: expected an integer in [6, 9], got 5");
    assert_int_equal(bl_json_get_int("f", d, "i", BL_JSON_REQUIRED, 0, 4, &integer), BL_EINPUT);
    assert_int_equal(bl_json_get_int("f", d, "r", BL_JSON_REQUIRED, 0, 5, &integer), BL_EINPUT);
    assert_string_equal(bl_error_text(), "f: key r: expected an integer in [0, 5], got 1.5");
    assert_int_equal(bl_json_get_int("f", d, "none", BL_JSON_REQUIRED, 0, 5, &integer), BL_EINPUT);
    assert_string_equal(bl_error_text(), "f: key none: missing; expected an integer in [0, 5]");
    assert_int_equal(bl_json_get_int("f", d, "n", BL_JSON_REQUIRED, 0, 5, &integer), BL_EINPUT);
    assert_string_equal(bl_error_text(), "f: key n: expected an integer in [0, 5], got null");
    integer = 7;
    assert_int_equal(bl_json_get_int("f", d, "n", BL_JSON_OPTIONAL, 0, 5, &integer), BL_OK);
    assert_int_equal(bl_json_get_int("f", d, "none", BL_JSON_OPTIONAL, 0, 5, &integer), BL_OK);
    assert_int_equal(integer, 7);
    assert_int_equal(bl_json_get_real("f", d, "r", BL_JSON_REQUIRED, 0, 2, &real), BL_OK);
    assert_true(real == 1.5);
    assert_int_equal(bl_json_get_real("f", d, "i", BL_JSON_REQUIRED, 0, 5, &real), BL_OK);
    assert_true(real == 5);
    assert_int_equal(bl_json_get_real("f", d, "s", BL_JSON_REQUIRED, 0, 2, &real), BL_EINPUT);
    assert_string_equal(bl_error_text(), "f: key s: expected a number in [0, 2], got \"x\"");
    assert_int_equal(bl_json_get_real("f", d, "i", BL_JSON_REQUIRED, 0, 2, &real), BL_EINPUT);
    assert_int_equal(bl_json_get_bool("f", d, "i", BL_JSON_REQUIRED, &flag), BL_EINPUT);
    assert_int_equal(bl_json_get_bool("f", d, "t", BL_JSON_REQUIRED, &flag), BL_OK);
    assert_int_equal(bl_json_get_string("f", d, "s", BL_JSON_REQUIRED, &text), BL_OK);
    assert_string_equal(text, "x");
    assert_int_equal(bl_json_get_string("f", d, "z", BL_JSON_REQUIRED, &text), BL_EINPUT);
    assert_string_equal(bl_error_text(),
                        "f: key z: expected a string without NUL, got \"a\\u0000b\"");
    assert_null(bl_json_text(json_object_get(d, "z")));
    assert_null(bl_json_text(json_object_get(d, "i")));
    assert_string_equal(bl_json_text(json_object_get(d, "s")), "x");
    assert_int_equal(bl_json_get_string("f", d, "t", BL_JSON_REQUIRED, &text), BL_EINPUT);
    assert_int_equal(bl_json_get_array("f", d, "a", BL_JSON_REQUIRED, &part), BL_OK);
    assert_int_equal(json_array_size(part), 1);
    assert_int_equal(bl_json_get_array("f", d, "o", BL_JSON_REQUIRED, &part), BL_EINPUT);
    assert_int_equal(bl_json_get_object("f", d, "o", BL_JSON_REQUIRED, &part), BL_OK);
    assert_int_equal(bl_json_get_object("f", d, "a", BL_JSON_REQUIRED, &part), BL_EINPUT);
    assert_int_equal(bl_json_check_object("f", d), BL_OK);
    assert_int_equal(bl_json_check_object("f", json_object_get(d, "a")), BL_EINPUT);
    assert_string_equal(bl_error_text(), "f: expected a JSON object, got [1]");
    json_decref(d);
}

/* Valid JSON that the reader refuses on purpose. */
static const struct {
    const char *file, *reason;
} refused_on_purpose[] = {
    {"y_object_duplicated_key.json", "which of the two a config means cannot be known"},
    {"y_object_duplicated_key_and_value.json", "as above"},
    {"y_object_escaped_null_in_key.json", "jansson's keys are C strings"},
};

static bool is_refused_on_purpose(const char *file)
{
    for (size_t i = 0; i < BL_COUNT(refused_on_purpose); i++)
        if (!strcmp(file, refused_on_purpose[i].file)) return true;
    return false;
}

static void test_json_test_suite(void **state)
{
    const char *data = getenv("BALLAST_TEST_DATA");
    char **names, *dir, *path;
    size_t n_names, n_checked = 0;
    int n_wrong = 0;

    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    assert_int_equal(bl_path_join(data, "suites/JSONTestSuite/test_parsing", &dir), BL_OK);
    assert_int_equal(bl_dir_list(dir, &names, &n_names), BL_OK);
    for (size_t i = 0; i < n_names; i++) {
        json_t *document;
        assert_int_equal(bl_path_join(dir, names[i], &path), BL_OK);
        bl_status st = bl_json_load(path, 1 << 20, &document);
        assert_true(st == BL_OK || st == BL_EINPUT);
        assert_true((st == BL_OK) == (document != NULL));
        bool accept = names[i][0] == 'y' && !is_refused_on_purpose(names[i]);
        if (names[i][0] != 'i' && accept != (st == BL_OK)) {
            printf("%s: %s\n", names[i], st == BL_OK ? "accepted" : bl_error_text());
            n_wrong++;
        }
        n_checked++;
        json_decref(document);
        free(path);
    }
    assert_int_equal(n_wrong, 0);
    assert_true(n_checked > 300);
    bl_names_free(names, n_names);
    free(dir);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_errors_name_the_place),
        cmocka_unit_test(test_integers_of_any_size),
        cmocka_unit_test(test_byte_order_marks),
        cmocka_unit_test(test_depth_is_bounded),
        cmocka_unit_test(test_getters),
        cmocka_unit_test(test_json_test_suite),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
