/* SPDX-License-Identifier: Apache-2.0 */
/* json.c -- jansson behind strict limits: NUL and integers beyond int64 are handled before it sees
 * the text; typed getters name the key. */
#include "base/json.h"

#include <ctype.h>
#include <errno.h>
#include <float.h>
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file_kind.h"
#include "base/files.h"
#include "base/json_memory_internal.h"

/* Digits of the smallest integers outside int64. */
enum { BIG_INTEGER_DIGITS = 19 };

/* ---- parsing ---- */

/* jansson takes a NUL byte for the end of its buffer and would accept whatever follows. */
static bl_status refuse_nul(const char *file, int64_t first_line, const char *text, size_t n_bytes)
{
    const char *nul = memchr(text, '\0', n_bytes);
    const char *line_start = text;
    int64_t line = first_line;

    if (!nul) return BL_OK;
    for (const char *end; (end = memchr(line_start, '\n', (size_t)(nul - line_start))) != NULL;
         line++)
        line_start = end + 1;
    return BL_FAIL(BL_EINPUT, "%s:%" PRId64 ":%td: NUL byte", file, line, nul - line_start + 1);
}

/* Writes the integer literal of n bytes at `at` as a real in its place: the 17 digits that give the
 * nearest double back, an exponent, and spaces, so that every line and column stays. */
static void write_as_real(char *at, size_t n)
{
    char digits[32], real[32], after = at[n];

    at[n] = '\0';
    double value = strtod(at, NULL);
    at[n] = after;
    if (isinf(value)) value = copysign(DBL_MAX, value);
    snprintf(digits, sizeof digits, "%+.16e", value); /* +d.dddddddddddddddde+xx */
    snprintf(real, sizeof real, "%s%c%.16se%d", value < 0 ? "-" : "", digits[1], digits + 3,
             atoi(digits + 20) - 16);
    size_t n_real = strlen(real);
    memcpy(at, real, n_real);
    memset(at + n_real, ' ', n - n_real);
}

/* Writes each integer outside int64 as a real, in place; text[n_bytes] is ours and not a digit.
 * Text that is no JSON stays none. */
static void widen_big_integers(char *text, size_t n_bytes)
{
    char *end = text + n_bytes;
    bool in_string = false;

    for (char *at = text; at < end; at++) {
        if (in_string && *at == '\\')
            at++;
        else if (*at == '"')
            in_string = !in_string;
        if (in_string || (*at != '-' && !isdigit((unsigned char)*at))) continue;
        char *start = at, *digits = at + (*at == '-');
        for (at = digits; isdigit((unsigned char)*at);) at++;
        size_t n_digits = (size_t)(at - digits);
        bool is_integer = n_digits > 0 && *at != '.' && *at != 'e' && *at != 'E';
        while (at < end && strchr("+-.0123456789eE", *at)) at++;
        at--;
        if (!is_integer || n_digits < BIG_INTEGER_DIGITS || *digits == '0') continue;
        errno = 0;
        strtoll(start, NULL, 10);
        if (errno == ERANGE) write_as_real(start, (size_t)(digits - start) + n_digits);
    }
}

/* As bl_json_loadb, except that integers outside int64, at which jansson stops, become reals. Such
 * texts are rare: only they are parsed twice. */
static json_t *load_text(const char *text, size_t n_bytes, json_error_t *error)
{
    static const size_t flags = JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL;
    json_t *document = bl_json_loadb(text, n_bytes, flags, error);

    if (document || bl_json_ran_out() || json_error_code(error) != json_error_numeric_overflow)
        return document;
    char *copy = bl_json_malloc(n_bytes + 1);
    if (!copy) return NULL;
    memcpy(copy, text, n_bytes);
    copy[n_bytes] = '\0';
    widen_big_integers(copy, n_bytes);
    document = bl_json_loadb(copy, n_bytes, flags, error);
    free(copy);
    return document;
}

bl_status bl_json_parse(const char *file, int64_t first_line, const void *text, size_t n_bytes,
                        json_t **out)
{
    json_error_t error;

    *out = NULL;
    BL_TRY(refuse_nul(file, first_line, text, n_bytes));
    bl_json_watch_memory();
    *out = load_text(text, n_bytes, &error);
    if (bl_json_ran_out()) {
        json_decref(*out);
        *out = NULL;
        return BL_FAIL(BL_ENOMEM, "%s: parsing JSON", file);
    }
    if (*out) return BL_OK;
    bl_text_hide_controls(error.text);
    int64_t line = first_line + (error.line > 0 ? error.line - 1 : 0);
    return BL_FAIL(BL_EINPUT, "%s:%" PRId64 ":%d: %s", file, line,
                   error.column > 0 ? error.column : 0, error.text);
}

bl_status bl_json_load(const char *path, size_t max_bytes, json_t **out)
{
    char *text = NULL;
    const char *json;
    size_t n_bytes = 0;

    *out = NULL;
    BL_TRY(bl_file_read_all(path, max_bytes, (void **)&text, &n_bytes));
    json = text;
    bl_status st = bl_text_skip_mark(path, &json, &n_bytes);
    if (st == BL_OK) st = bl_file_kind_refuse(path, json, n_bytes, "JSON");
    if (st == BL_OK) st = bl_json_parse(path, 1, json, n_bytes, out);
    free(text);
    return st;
}

/* ---- values ---- */

void bl_text_hide_controls(char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f) *text = '?';
}

const char *bl_json_show(const json_t *value, char shown[BL_JSON_SHOWN_BYTES])
{
    if (!value) {
        snprintf(shown, BL_JSON_SHOWN_BYTES, "nothing");
        return shown;
    }
    size_t length =
        json_dumpb(value, shown, BL_JSON_SHOWN_BYTES - 1, JSON_ENCODE_ANY | JSON_COMPACT);
    if (length == 0 || length > BL_JSON_SHOWN_BYTES - 1) {
        snprintf(shown, BL_JSON_SHOWN_BYTES, "%s",
                 json_is_object(value)  ? "an object"
                 : json_is_array(value) ? "an array"
                                        : "a long value");
        return shown;
    }
    shown[length] = '\0';
    bl_text_hide_controls(shown);
    return shown;
}

bl_status bl_json_fail(const char *file, const char *key, const char *expected, const json_t *value)
{
    char shown[BL_JSON_SHOWN_BYTES];

    bl_json_show(value, shown);
    return BL_FAIL(BL_EINPUT, "%s: key %s: expected %s, got %s", file, key, expected, shown);
}

bl_status bl_json_check_object(const char *file, const json_t *value)
{
    char shown[BL_JSON_SHOWN_BYTES];

    if (json_is_object(value)) return BL_OK;
    bl_json_show(value, shown);
    return BL_FAIL(BL_EINPUT, "%s: expected a JSON object, got %s", file, shown);
}

/* The value to convert, or NULL when the key is absent and may be. */
static bl_status find_value(const char *file, const json_t *object, const char *key,
                            bl_json_need need, const char *expected, const json_t **value)
{
    *value = json_object_get(object, key);
    if (need == BL_JSON_OPTIONAL && (!*value || json_is_null(*value))) {
        *value = NULL;
        return BL_OK;
    }
    if (!*value) return BL_FAIL(BL_EINPUT, "%s: key %s: missing; expected %s", file, key, expected);
    return BL_OK;
}

const char *bl_json_text(const json_t *value)
{
    const char *text = json_string_value(value);

    return text && strlen(text) == json_string_length(value) ? text : NULL;
}

bl_status bl_json_get_int(const char *file, const json_t *object, const char *key,
                          bl_json_need need, int64_t min, int64_t max, int64_t *out)
{
    char expected[96];
    const json_t *value;

    snprintf(expected, sizeof expected, "an integer in [%" PRId64 ", %" PRId64 "]", min, max);
    BL_TRY(find_value(file, object, key, need, expected, &value));
    if (!value) return BL_OK;
    json_int_t number = json_integer_value(value);
    if (!json_is_integer(value) || number < min || number > max)
        return bl_json_fail(file, key, expected, value);
    *out = number;
    return BL_OK;
}

bl_status bl_json_get_real(const char *file, const json_t *object, const char *key,
                           bl_json_need need, double min, double max, double *out)
{
    char expected[96];
    const json_t *value;

    snprintf(expected, sizeof expected, "a number in [%g, %g]", min, max);
    BL_TRY(find_value(file, object, key, need, expected, &value));
    if (!value) return BL_OK;
    double number = json_number_value(value);
    if (!json_is_number(value) || !(number >= min && number <= max))
        return bl_json_fail(file, key, expected, value);
    *out = number;
    return BL_OK;
}

bl_status bl_json_get_bool(const char *file, const json_t *object, const char *key,
                           bl_json_need need, bool *out)
{
    const json_t *value;

    BL_TRY(find_value(file, object, key, need, "true or false", &value));
    if (!value) return BL_OK;
    if (!json_is_boolean(value)) return bl_json_fail(file, key, "true or false", value);
    *out = json_is_true(value);
    return BL_OK;
}

bl_status bl_json_get_string(const char *file, const json_t *object, const char *key,
                             bl_json_need need, const char **out)
{
    const json_t *value;

    BL_TRY(find_value(file, object, key, need, "a string", &value));
    if (!value) return BL_OK;
    if (!json_is_string(value)) return bl_json_fail(file, key, "a string", value);
    const char *text = bl_json_text(value);
    if (!text) return bl_json_fail(file, key, "a string without NUL", value);
    *out = text;
    return BL_OK;
}

bl_status bl_json_get_array(const char *file, const json_t *object, const char *key,
                            bl_json_need need, const json_t **out)
{
    const json_t *value;

    BL_TRY(find_value(file, object, key, need, "an array", &value));
    if (!value) return BL_OK;
    const char *text = json_string_value(value);
    if (text && *text == '[')
        return BL_FAIL(BL_EINPUT,
                       "%s: key %s: expected an array, got one written as a text: parse the column "
                       "before the file is written (json.loads, or ast.literal_eval)",
                       file, key);
    if (!json_is_array(value)) return bl_json_fail(file, key, "an array", value);
    *out = value;
    return BL_OK;
}

bl_status bl_json_get_object(const char *file, const json_t *object, const char *key,
                             bl_json_need need, const json_t **out)
{
    const json_t *value;

    BL_TRY(find_value(file, object, key, need, "an object", &value));
    if (!value) return BL_OK;
    if (!json_is_object(value)) return bl_json_fail(file, key, "an object", value);
    *out = value;
    return BL_OK;
}
