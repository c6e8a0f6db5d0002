/* SPDX-License-Identifier: Apache-2.0 */
/* present.c -- classifies the keys of objects. Walks over values are as deep as their JSON, whose
 * depth json.h bounds. */
#include "base/present.h"

#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <string.h>

#include "base/json.h"
#include "base/log.h"
#include "base/nearest.h"

enum { MAX_KEYS = 512, SHOWN_KEY_BYTES = 65, MAX_WORDS_BYTES = 4096 };

/* ---- values ---- */

/* Whether the numbers, texts or other values are equal; 1 and 1.0 are. */
static bool is_equal(const json_t *a, const json_t *b)
{
    if (json_is_number(a) && json_is_number(b)) return json_number_value(a) == json_number_value(b);
    return json_equal(a, b);
}

static bool is_listed(const json_t *value, const json_t *neutral)
{
    bool found = json_is_null(value);

    for (size_t i = 0; i < json_array_size(neutral) && !found; i++)
        found = is_equal(value, json_array_get(neutral, i));
    return found;
}

static bool is_blank(const json_t *value)
{
    return !value || json_is_null(value) || json_is_false(value) ||
           (json_is_string(value) && json_string_length(value) == 0);
}

/* neutral NULL: is_blank decides. */
static bool is_neutral(const json_t *value, const json_t *neutral)
{
    const char *key;
    json_t *item;
    size_t i;

    if (neutral ? is_listed(value, neutral) : is_blank(value)) return true;
    if (!json_is_array(value) && !json_is_object(value)) return false;
    if (neutral && json_array_size(value) + json_object_size(value) == 0) return false;
    json_array_foreach(value, i, item)
    {
        if (!is_neutral(item, neutral)) return false;
    }
    json_object_foreach((json_t *)value, key, item)
    {
        if (!is_neutral(item, NULL)) return false;
    }
    return true;
}

/* ---- names ---- */

static void show_key(const char *key, char shown[SHOWN_KEY_BYTES])
{
    snprintf(shown, SHOWN_KEY_BYTES, "%s", key);
    bl_text_hide_controls(shown);
}

/* between: ", " or " ". */
static bool has_name(const char *list, const char *name, const char *between)
{
    size_t n_bytes = strlen(name), n_between = strlen(between);

    for (const char *at = list; (at = strstr(at, name)); at++) {
        bool begins = at == list || ((size_t)(at - list) >= n_between &&
                                     !memcmp(at - n_between, between, n_between));
        if (begins && (!at[n_bytes] || !strncmp(at + n_bytes, between, n_between))) return true;
    }
    return false;
}

void bl_key_names_add(bl_key_names *names, const char *name)
{
    static const char more[] = ", ...";
    char shown[SHOWN_KEY_BYTES];
    size_t used = strlen(names->text);

    show_key(name, shown);
    if (has_name(names->text, shown, ", ") || has_name(names->text, "...", ", ")) return;
    bool fits = used + 2 + strlen(shown) + sizeof more <= sizeof names->text;
    snprintf(names->text + used, sizeof names->text - used, "%s%s", used ? ", " : "",
             fits ? shown : "...");
    names->n++;
}

/* ---- keys ---- */

static const bl_known_key *find_key(const bl_key_table *table, const char *key)
{
    static const bl_known_key used = {.use = BL_KEY_USED};
    const bl_known_key *found = NULL;

    for (const char *const *u = table->used; u && *u; u++)
        if (!strcmp(*u, key)) return &used;
    for (size_t i = 0; i < table->n_keys && !found; i++)
        if (!strcmp(table->keys[i].name, key)) found = &table->keys[i];
    if (!found && *key && table->accepted && !strchr(key, ' ') &&
        has_name(table->accepted, key, " "))
        found = &used;
    return found;
}

/* NULL: none is near. The words of `accepted` are split in `words`, which the result may be of. */
static const char *nearest_key(const bl_key_table *table, const char *key,
                               char words[MAX_WORDS_BYTES])
{
    const char *names[MAX_KEYS];
    size_t n = 0;
    char *rest = words;

    for (const char *const *u = table->used; u && *u && n < MAX_KEYS; u++) names[n++] = *u;
    for (size_t i = 0; i < table->n_keys && n < MAX_KEYS; i++) names[n++] = table->keys[i].name;
    snprintf(words, MAX_WORDS_BYTES, "%s", table->accepted ? table->accepted : "");
    while (rest && *rest && n < MAX_KEYS) names[n++] = strsep(&rest, " ");
    return bl_text_nearest(key, names, n);
}

static bl_status fail_unknown(const bl_key_table *table, const char *place, const char *key,
                              const json_t *value)
{
    char shown_key[SHOWN_KEY_BYTES], shown[BL_JSON_SHOWN_BYTES], words[MAX_WORDS_BYTES];
    const char *nearest = nearest_key(table, key, words);

    show_key(key, shown_key);
    return BL_FAIL(BL_EINPUT, "%s: key %s: unknown, with the value %s; %s%s%s", place, shown_key,
                   bl_json_show(value, shown), nearest ? "did you mean " : "",
                   nearest ? nearest : "remove it if it does not change the result",
                   nearest ? "?" : "");
}

/* "\"silu\", 1 or 2". */
static void list_neutral(const json_t *neutral, char *text, size_t n_bytes)
{
    char shown[BL_JSON_SHOWN_BYTES];
    size_t used = 0, n = json_array_size(neutral);

    for (size_t i = 0; i < n && used < n_bytes; i++)
        used += (size_t)snprintf(text + used, n_bytes - used, "%s%s",
                                 i == 0      ? ""
                                 : i + 1 < n ? ", "
                                             : " or ",
                                 bl_json_show(json_array_get(neutral, i), shown));
}

/* Of a rejected or named key. */
static bl_status check_listed(const bl_known_key *known, const char *place, const json_t *value,
                              bl_key_names *names)
{
    json_t *neutral = NULL;
    char expected[256] = "null", shown[BL_JSON_SHOWN_BYTES];

    if (known->neutral)
        BL_TRY(bl_json_parse(known->name, 1, known->neutral, strlen(known->neutral), &neutral));
    bool accepted = is_neutral(value, neutral);
    if (json_array_size(neutral) > 0) list_neutral(neutral, expected, sizeof expected);
    json_decref(neutral);
    if (accepted) return BL_OK;
    if (known->use == BL_KEY_NAMED && names) bl_key_names_add(names, known->name);
    if (known->use == BL_KEY_NAMED && !names)
        bl_log_warning("%s: key %s is ignored: %s", place, known->name, known->reason);
    if (known->use == BL_KEY_NAMED) return BL_OK;
    return BL_FAIL(BL_EINPUT, "%s: key %s: expected %s, got %s%s%s", place, known->name, expected,
                   bl_json_show(value, shown), known->reason ? ": " : "",
                   known->reason ? known->reason : "");
}

bl_status bl_key_check(const bl_key_table *table, const char *place, const char *key,
                       const json_t *value, bl_key_names *unknown)
{
    const bl_known_key *known = find_key(table, key);

    if (known && known->use >= BL_KEY_REJECTED) return check_listed(known, place, value, unknown);
    if (known) return BL_OK;
    if (*key == '_' || is_neutral(value, NULL)) return BL_OK;
    if (!unknown) return fail_unknown(table, place, key, value);
    bl_key_names_add(unknown, key);
    return BL_OK;
}

bl_status bl_keys_check(const bl_key_table *table, const char *place, const json_t *object,
                        bl_key_names *unknown)
{
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)object, key, value)
    {
        BL_TRY(bl_key_check(table, place, key, value, unknown));
    }
    return BL_OK;
}
