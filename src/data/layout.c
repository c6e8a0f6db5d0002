/* SPDX-License-Identifier: Apache-2.0 */
/* layout.c -- explains a first row that cannot be used: a table by columns, rows inside an object,
 * misspelled or unknown keys. The errors name what is there and the remedy. */
#include <stdio.h>
#include <string.h>

#include "base/nearest.h"
#include "base/sizes.h"
#include "data/internal.h"

/* ---- tables ---- */

static bool is_number(const char *key)
{
    return *key && !key[strspn(key, "0123456789")];
}

static const char *first_key(const json_t *object)
{
    void *iterator = json_object_iter((json_t *)object);
    return iterator ? json_object_iter_key(iterator) : "";
}

typedef struct value_kinds {
    size_t n, n_objects, n_numbered, n_number_keys, n_lists_of_text;
} value_kinds;

static value_kinds count_kinds(const json_t *row)
{
    value_kinds k = {0};
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)row, key, value)
    {
        k.n++;
        k.n_objects += json_is_object(value);
        k.n_numbered += json_is_object(value) && is_number(first_key(value));
        k.n_number_keys += is_number(key);
        k.n_lists_of_text += json_is_string(json_array_get(value, 0));
    }
    return k;
}

/* The key of a list of objects, where no other key has one; NULL: there is none. */
static const char *find_rows(const json_t *row)
{
    const char *key, *found = NULL;
    json_t *value;

    json_object_foreach((json_t *)row, key, value)
    {
        if (json_is_object(json_array_get(value, 0))) found = key;
    }
    return found;
}

bl_status bl_row_check_layout(const char *place, const json_t *row)
{
    value_kinds k = count_kinds(row);
    bool is_split = json_is_array(json_object_get(row, "columns")) &&
                    json_is_array(json_object_get(row, "data")),
         is_table = json_is_object(json_object_get(row, "schema")) &&
                    json_is_array(json_object_get(row, "data")),
         is_indexed = k.n_objects == k.n && k.n_number_keys == k.n,
         is_columns = k.n_numbered == k.n || k.n_lists_of_text == k.n;

    if (k.n == 0 || (!is_split && !is_table && !is_indexed && !is_columns)) return BL_OK;
    return BL_FAIL(
        BL_EINPUT,
        "%s: a whole table in one object, as pandas' to_json writes it by default: write "
        "an object per row, with to_json(FILE, orient=\"records\", lines=True)",
        place);
}

/* ---- unknown keys ---- */

static void list_keys(const json_t *row, char *text, size_t n_bytes)
{
    enum { SHOWN_BYTES = 40 };
    const char *key;
    json_t *value;
    size_t used = 0;

    *text = '\0';
    json_object_foreach((json_t *)row, key, value)
    {
        if (used + SHOWN_BYTES + sizeof ", ..." >= n_bytes) {
            snprintf(text + used, n_bytes - used, ", ...");
            break;
        }
        used += (size_t)snprintf(text + used, n_bytes - used, "%s%.*s", used ? ", " : "",
                                 SHOWN_BYTES, key);
    }
    bl_text_hide_controls(text);
}

bl_status bl_row_fail_unknown(const char *place, bl_data_format format, const char *text_key,
                              const json_t *row)
{
    char keys[384], known[512], hint[160] = "";
    const char *names[BL_SHAPE_KEYS_MAX], *key, *rows = find_rows(row);
    json_t *value;
    size_t n = bl_row_shape_keys(format, text_key, names, known, sizeof known);

    list_keys(row, keys, sizeof keys);
    if (rows)
        snprintf(hint, sizeof hint,
                 "; if %.40s is the list of rows, write the list alone, [{...}, ...]", rows);
    json_object_foreach((json_t *)row, key, value)
    {
        const char *nearest = bl_text_nearest(key, names, n);
        if (nearest && strcmp(nearest, key) != 0)
            snprintf(hint, sizeof hint, "; did you mean %s for %.40s?", nearest, key);
    }
    if (!*hint) snprintf(hint, sizeof hint, "; known are ");
    bool is_listed = !strcmp(hint, "; known are ");
    return BL_FAIL(BL_EINPUT, "%s: no known data format%s%s has the keys of this row: %s%s%s",
                   place, format == BL_DATA_AUTO ? "" : " of the name ",
                   format == BL_DATA_AUTO ? "" : bl_data_format_name(format), keys, hint,
                   is_listed ? known : "");
}

bl_status bl_row_fail_missing(const char *place, const char *key, const json_t *row)
{
    char keys[384];

    list_keys(row, keys, sizeof keys);
    return BL_FAIL(BL_EINPUT, "%s: key %s: missing; this row has %s", place, key,
                   *keys ? keys : "no keys");
}

/* ---- lists as texts ---- */

bl_status bl_row_check_text(const char *place, const char *what, const char *text)
{
    static const char *const keys[] = {"role", "content", "from", "value"};

    if (text[0] != '[' || text[1] != '{' || (text[2] != '"' && text[2] != '\'')) return BL_OK;
    for (size_t i = 0; i < BL_COUNT(keys); i++)
        if (!strncmp(text + 3, keys[i], strlen(keys[i])) && text[3 + strlen(keys[i])] == text[2])
            return BL_FAIL(BL_EINPUT,
                           "%s: %s: a list of messages that is written as a text: parse the column "
                           "before the file is written (json.loads, or ast.literal_eval)",
                           place, what);
    return BL_OK;
}
