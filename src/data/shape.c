/* SPDX-License-Identifier: Apache-2.0 */
/* shape.c -- the keys that rows of data sets have, and which formats can use them. The first row
 * decides for its file; rows of another shape are rejected. */
#include <stdio.h>
#include <string.h>

#include "base/sizes.h"
#include "data/internal.h"

enum {
    TOKENS = 1 << BL_DATA_TOKENS,
    TEXT = 1 << BL_DATA_TEXT,
    ALPACA = 1 << BL_DATA_ALPACA,
    PAIR = 1 << BL_DATA_PROMPT_COMPLETION,
    MESSAGES = 1 << BL_DATA_MESSAGES,
    CHAT = MESSAGES | 1 << BL_DATA_SHAREGPT,
    PREFERENCE = 1 << BL_DATA_PREFERENCE,
    UNPAIRED = 1 << BL_DATA_UNPAIRED_PREFERENCE
};

/* In the order in which they are looked for: Stanford's Alpaca file has instruction, output and
 * text. */
static const bl_row_shape shapes[] = {
    {"chosen", "rejected", NULL, BL_DATA_PREFERENCE, PREFERENCE},
    {"input_ids", NULL, NULL, BL_DATA_TOKENS, TOKENS},
    {"messages", NULL, NULL, BL_DATA_MESSAGES, CHAT},
    {"conversations", NULL, NULL, BL_DATA_SHAREGPT, CHAT},
    {"instruction", "output", "input", BL_DATA_ALPACA, ALPACA | MESSAGES},
    {"prompt", "completion", NULL, BL_DATA_PROMPT_COMPLETION, PAIR | MESSAGES},
    {"text", NULL, NULL, BL_DATA_TEXT, TEXT},
    {"instruction", "response", "context", BL_DATA_ALPACA, ALPACA | MESSAGES}, /* Dolly's */
    {"prompt", "response", NULL, BL_DATA_PROMPT_COMPLETION, PAIR | MESSAGES},
    {"question", "answer", NULL, BL_DATA_PROMPT_COMPLETION, PAIR | MESSAGES},
    {"query", "response", NULL, BL_DATA_PROMPT_COMPLETION, PAIR | MESSAGES},
    {"question", "response", NULL, BL_DATA_PROMPT_COMPLETION, PAIR | MESSAGES}, /* OpenOrca's */
    {"problem", "solution", NULL, BL_DATA_PROMPT_COMPLETION, PAIR | MESSAGES},
    {"user", "assistant", NULL, BL_DATA_PROMPT_COMPLETION, PAIR | MESSAGES},
    {"inputs", "targets", NULL, BL_DATA_PROMPT_COMPLETION, PAIR | MESSAGES}, /* P3's, Flan's */
    {"input", "output", NULL, BL_DATA_PROMPT_COMPLETION, PAIR | MESSAGES},
    /* A label makes them preferences for data_format unpaired_preference alone: in other files the
     * key is a number or a category. */
    {"completion", "label", NULL, BL_DATA_UNPAIRED_PREFERENCE, UNPAIRED},
    {"input_ids", "label", NULL, BL_DATA_UNPAIRED_PREFERENCE, UNPAIRED},
};

const bl_row_shape *bl_row_shape_of(bl_data_format format)
{
    for (size_t i = 0; i < BL_COUNT(shapes); i++)
        if (shapes[i].format == format) return &shapes[i];
    return NULL;
}

int64_t bl_row_shape_index(const bl_row_shape *shape)
{
    return shape ? shape - shapes : -1;
}

const bl_row_shape *bl_row_shape_at(int64_t index)
{
    return index < 0 ? NULL : &shapes[index];
}

static const char *first_key(const bl_row_shape *shape, const char *text_key)
{
    return shape->format == BL_DATA_TEXT ? text_key : shape->first;
}

static bool has(const json_t *row, const bl_row_shape *shape, const char *text_key)
{
    return json_object_get(row, first_key(shape, text_key)) &&
           (!shape->second || json_object_get(row, shape->second));
}

const bl_row_shape *bl_row_shape_find(const json_t *row, bl_data_format format,
                                      const char *text_key)
{
    bool is_named = strcmp(text_key, "text") != 0 && json_object_get(row, text_key);

    if (is_named && (format == BL_DATA_AUTO || format == BL_DATA_TEXT))
        return bl_row_shape_of(BL_DATA_TEXT);
    for (size_t i = 0; i < BL_COUNT(shapes); i++)
        if ((format == BL_DATA_AUTO ? shapes[i].formats != UNPAIRED
                                    : shapes[i].formats >> format & 1) &&
            has(row, &shapes[i], text_key))
            return &shapes[i];
    return NULL;
}

bl_data_format bl_row_shape_format(const bl_row_shape *shape, const json_t *row)
{
    bool is_chat = shape->second && json_is_array(json_object_get(row, shape->first)) &&
                   json_is_array(json_object_get(row, shape->second));
    return is_chat && shape->formats & MESSAGES ? BL_DATA_MESSAGES : shape->format;
}

bl_status bl_row_shape_check(const char *place, const bl_row_shape *shape, const json_t *row,
                             const char *text_key)
{
    if (!shape || has(row, shape, text_key)) return BL_OK;
    const bl_row_shape *other = bl_row_shape_find(row, BL_DATA_AUTO, text_key);
    const char *first = first_key(shape, text_key);
    if (!other)
        return bl_row_fail_missing(place, json_object_get(row, first) ? shape->second : first, row);
    return BL_FAIL(BL_EINPUT,
                   "%s: this row has the keys %s%s%s, the rows before it %s%s%s: write all rows of "
                   "a data set with the same keys",
                   place, first_key(other, text_key), other->second ? ", " : "",
                   other->second ? other->second : "", first_key(shape, text_key),
                   shape->second ? ", " : "", shape->second ? shape->second : "");
}

static bool is_known(const char *const *names, size_t n, const char *name)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(names[i], name)) return true;
    return false;
}

size_t bl_row_shape_keys(bl_data_format format, const char *text_key,
                         const char *names[BL_SHAPE_KEYS_MAX], char *text, size_t n_bytes)
{
    size_t n = 0, used = 0;

    *text = '\0';
    for (size_t i = 0; i < BL_COUNT(shapes); i++) {
        if (format == BL_DATA_AUTO ? shapes[i].formats == UNPAIRED
                                   : !(shapes[i].formats >> format & 1))
            continue;
        const char *keys[] = {first_key(&shapes[i], text_key), shapes[i].second, shapes[i].input};
        for (size_t k = 0; k < BL_COUNT(keys); k++)
            if (keys[k] && n < BL_SHAPE_KEYS_MAX && !is_known(names, n, keys[k]))
                names[n++] = keys[k];
        if (used < n_bytes)
            used += (size_t)snprintf(text + used, n_bytes - used, "%s%s%s%s", used ? ", " : "",
                                     keys[0], keys[1] ? " and " : "", keys[1] ? keys[1] : "");
    }
    return n;
}
