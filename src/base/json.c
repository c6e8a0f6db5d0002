/* SPDX-License-Identifier: Apache-2.0 */
#include "base/json.h"

#include <inttypes.h>
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"

enum { SHOWN_VALUE_BYTES = 64 };

/* ---- memory ---- */

static _Thread_local bool ran_out;

static void *watched_malloc(size_t n_bytes)
{
    void *memory = malloc(n_bytes);
    if (!memory) ran_out = true;
    return memory;
}

static void set_allocator(void)
{
    json_set_alloc_funcs(watched_malloc, free);
}

void bl_json_watch_memory(void)
{
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    pthread_once(&once, set_allocator);
    ran_out = false;
}

bool bl_json_ran_out(void)
{
    return ran_out;
}

/* ---- parsing ---- */

/* Control characters of a hostile file must not reach the terminal, nor break the one-line rule. */
static void replace_controls(char *text)
{
    for (; *text; text++)
        if ((unsigned char)*text < 0x20 || *text == 0x7f) *text = '?';
}

/* jansson takes a NUL byte for the end of its buffer and would accept whatever follows. */
static bl_status refuse_nul(const char *file, int64_t first_line, const char *text, size_t n_bytes)
{
    const char *nul = memchr(text, '\0', n_bytes);
    const char *line_start = text;
    int64_t line = first_line;

    if (!nul) return BL_OK;
    for (const char *end; (end = memchr(line_start, '\n', (size_t)(nul - line_start))) != NULL; line++)
        line_start = end + 1;
    return BL_FAIL(BL_EINPUT, "%s:%" PRId64 ":%td: NUL byte", file, line, nul - line_start + 1);
}

bl_status bl_json_parse(const char *file, int64_t first_line, const void *text, size_t n_bytes, json_t **out)
{
    json_error_t error;

    *out = NULL;
    BL_TRY(refuse_nul(file, first_line, text, n_bytes));
    bl_json_watch_memory();
    *out = json_loadb(text, n_bytes, JSON_REJECT_DUPLICATES | JSON_DECODE_ANY | JSON_ALLOW_NUL, &error);
    if (bl_json_ran_out()) {
        json_decref(*out);
        *out = NULL;
        return BL_FAIL(BL_ENOMEM, "%s: parsing JSON", file);
    }
    if (*out) return BL_OK;
    replace_controls(error.text);
    int64_t line = first_line + (error.line > 0 ? error.line - 1 : 0);
    return BL_FAIL(BL_EINPUT, "%s:%" PRId64 ":%d: %s", file, line, error.column > 0 ? error.column : 0,
                   error.text);
}

bl_status bl_json_load(const char *path, size_t max_bytes, json_t **out)
{
    char *text = NULL;
    size_t n_bytes = 0;

    *out = NULL;
    BL_TRY(bl_file_read_all(path, max_bytes, (void **)&text, &n_bytes));
    bl_status st = bl_json_parse(path, 1, text, n_bytes, out);
    free(text);
    return st;
}

/* ---- values ---- */

/* A value as an error shows it: short, one line. */
static void show_value(const json_t *value, char shown[SHOWN_VALUE_BYTES])
{
    if (!value) {
        snprintf(shown, SHOWN_VALUE_BYTES, "nothing");
        return;
    }
    size_t length = json_dumpb(value, shown, SHOWN_VALUE_BYTES - 1, JSON_ENCODE_ANY | JSON_COMPACT);
    if (length == 0 || length > SHOWN_VALUE_BYTES - 1) {
        snprintf(shown, SHOWN_VALUE_BYTES, "%s",
                 json_is_object(value)  ? "an object"
                 : json_is_array(value) ? "an array"
                                        : "a long value");
        return;
    }
    shown[length] = '\0';
    replace_controls(shown);
}

bl_status bl_json_fail(const char *file, const char *key, const char *expected, const json_t *value)
{
    char shown[SHOWN_VALUE_BYTES];

    show_value(value, shown);
    return BL_FAIL(BL_EINPUT, "%s: key %s: expected %s, got %s", file, key, expected, shown);
}

bl_status bl_json_check_object(const char *file, const json_t *value)
{
    char shown[SHOWN_VALUE_BYTES];

    if (json_is_object(value)) return BL_OK;
    show_value(value, shown);
    return BL_FAIL(BL_EINPUT, "%s: expected a JSON object, got %s", file, shown);
}

/* The value to convert, or NULL when the key is absent and may be. */
static bl_status find_value(const char *file, const json_t *object, const char *key, bl_json_need need,
                            const char *expected, const json_t **value)
{
    *value = json_object_get(object, key);
    if (need == BL_JSON_OPTIONAL && (!*value || json_is_null(*value))) {
        *value = NULL;
        return BL_OK;
    }
    if (!*value) return BL_FAIL(BL_EINPUT, "%s: key %s: missing; expected %s", file, key, expected);
    return BL_OK;
}

bl_status bl_json_get_int(const char *file, const json_t *object, const char *key, bl_json_need need,
                          int64_t min, int64_t max, int64_t *out)
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

bl_status bl_json_get_real(const char *file, const json_t *object, const char *key, bl_json_need need,
                           double min, double max, double *out)
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

bl_status bl_json_get_bool(const char *file, const json_t *object, const char *key, bl_json_need need,
                           bool *out)
{
    const json_t *value;

    BL_TRY(find_value(file, object, key, need, "true or false", &value));
    if (!value) return BL_OK;
    if (!json_is_boolean(value)) return bl_json_fail(file, key, "true or false", value);
    *out = json_is_true(value);
    return BL_OK;
}

bl_status bl_json_get_string(const char *file, const json_t *object, const char *key, bl_json_need need,
                             const char **out)
{
    const json_t *value;

    BL_TRY(find_value(file, object, key, need, "a string", &value));
    if (!value) return BL_OK;
    if (!json_is_string(value)) return bl_json_fail(file, key, "a string", value);
    const char *text = json_string_value(value);
    if (strlen(text) != json_string_length(value))
        return bl_json_fail(file, key, "a string without NUL", value);
    *out = text;
    return BL_OK;
}

bl_status bl_json_get_array(const char *file, const json_t *object, const char *key, bl_json_need need,
                            const json_t **out)
{
    const json_t *value;

    BL_TRY(find_value(file, object, key, need, "an array", &value));
    if (!value) return BL_OK;
    if (!json_is_array(value)) return bl_json_fail(file, key, "an array", value);
    *out = value;
    return BL_OK;
}

bl_status bl_json_get_object(const char *file, const json_t *object, const char *key, bl_json_need need,
                             const json_t **out)
{
    const json_t *value;

    BL_TRY(find_value(file, object, key, need, "an object", &value));
    if (!value) return BL_OK;
    if (!json_is_object(value)) return bl_json_fail(file, key, "an object", value);
    *out = value;
    return BL_OK;
}
