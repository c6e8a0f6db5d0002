/* SPDX-License-Identifier: Apache-2.0 */
/* Names of options: the table row of a name, the translation of an alias, and suggestions for a
 * misspelled name. */
#include <fnmatch.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "base/nearest.h"
#include "options/options.h"
#include "options/internal.h"

void bl_option_normalize(const char *name, char dst[BL_OPTION_KEY_BYTES])
{
    size_t i = 0;
    for (; name[i] && i < BL_OPTION_KEY_BYTES - 1; i++) dst[i] = name[i] == '-' ? '_' : name[i];
    dst[i] = '\0';
}

size_t bl_option_next_name(const char *at, const char **next)
{
    size_t length = strcspn(at, "|");
    *next = at[length] ? at + length + 1 : NULL;
    return length;
}

const bl_option *bl_options_find(const bl_options *options, const char *key)
{
    for (size_t i = 0; i < options->n_options; i++) {
        if (strcmp(options->table[i].key, key) == 0) return &options->table[i];
    }
    return NULL;
}

bl_option_origin bl_options_origin(const bl_options *options, const char *key)
{
    return (bl_option_origin)options->origins[bl_options_find(options, key) - options->table];
}

static bool has_star(const bl_option_alias *alias)
{
    return alias->name[strlen(alias->name) - 1] == '*';
}

static bool names(const bl_option_alias *alias, const char *key)
{
    size_t n_bytes = strlen(alias->name);

    if (has_star(alias)) return strncmp(alias->name, key, n_bytes - 1) == 0;
    return strcmp(alias->name, key) == 0;
}

/* "trl" is also that of its trainer "trl-dpo". */
static bool is_of_tool(const bl_option_alias *alias, const char *tool)
{
    size_t n_bytes = alias->tool && tool ? strlen(alias->tool) : 0;

    return n_bytes > 0 && strncmp(alias->tool, tool, n_bytes) == 0 &&
           (tool[n_bytes] == '\0' || tool[n_bytes] == '-');
}

const bl_option_alias *bl_options_find_alias(const bl_options *options, const char *key)
{
    const bl_option_alias *found = NULL;

    for (size_t i = 0; i < options->n_aliases; i++) {
        const bl_option_alias *alias = &options->aliases[i];
        if (!names(alias, key)) continue;
        if (is_of_tool(alias, options->tool)) return alias;
        if (!alias->tool && (!found || has_star(found) > has_star(alias))) found = alias;
    }
    return bl_options_find(options, key) ? NULL : found;
}

bool bl_options_has_children(const bl_options *options, const char *key)
{
    size_t n_bytes = strlen(key);

    for (size_t i = 0; i < options->n_aliases; i++) {
        const char *name = options->aliases[i].name;
        if (strncmp(name, key, n_bytes) == 0 && name[n_bytes] == '.') return true;
    }
    return false;
}

static bl_status fail_unknown(const bl_options *options, const char *where, const char *name,
                              const char *key)
{
    size_t n_names = 0;
    const char **names = malloc((options->n_options + options->n_aliases) * sizeof *names);
    const char *suggestion = NULL;

    if (names) {
        for (size_t i = 0; i < options->n_options; i++) {
            if (options->table[i].commands & options->command)
                names[n_names++] = options->table[i].key;
        }
        for (size_t i = 0; i < options->n_aliases; i++) {
            if (options->aliases[i].key && !options->aliases[i].tool)
                names[n_names++] = options->aliases[i].name;
        }
        suggestion = bl_text_nearest(key, names, n_names);
    }
    free(names);
    const bl_option_alias *alias = suggestion ? bl_options_find_alias(options, suggestion) : NULL;
    if (alias) suggestion = alias->key;
    bool is_line = strcmp(where, "--") == 0;
    const char *kind = is_line ? "option" : "key";
    if (suggestion) {
        return BL_FAIL(BL_EUSAGE, "%s%s: unknown %s; did you mean %s%s?", where, name, kind,
                       is_line ? where : "", suggestion);
    }
    return BL_FAIL(BL_EUSAGE, "%s%s: unknown %s", where, name, kind);
}

/* "0.05" as "5"; false: not in [0, 1). */
static bool to_percent(const char *text, char out[BL_OPTION_KEY_BYTES])
{
    double fraction;

    if (!bl_option_parse_real(text, &fraction) || fraction < 0 || fraction >= 1) return false;
    snprintf(out, BL_OPTION_KEY_BYTES, "%.12g", fraction * 100);
    return true;
}

static bool fits(const char *pattern, const char *text)
{
    bool truth, truth_of_pattern;

    if (fnmatch(pattern, text, FNM_CASEFOLD) == 0) return true;
    return bl_text_parse_bool(text, &truth) && bl_text_parse_bool(pattern, &truth_of_pattern) &&
           truth == truth_of_pattern;
}

/* What `text` becomes by the rules of an alias: *out, which is `text` or in `buffer`; "": nothing
 * to set. False: rejected. */
static bool translate(const char *values, const char *text, char buffer[BL_OPTION_KEY_BYTES],
                      const char **out)
{
    for (size_t length; *values; values += length + (values[length] == ' ')) {
        char rule[BL_OPTION_KEY_BYTES];
        length = strcspn(values, " ");
        snprintf(rule, sizeof rule, "%.*s", (int)length, values);
        char *equals = strchr(rule, '=');
        *out = equals ? buffer : text;
        if (rule[0] == '!') {
            if (fits(rule + 1, text)) return false;
            continue;
        }
        if (strcmp(rule, "x100") == 0) {
            *out = buffer;
            if (to_percent(text, buffer)) return true;
            continue;
        }
        if (equals) *equals = '\0';
        if (!fits(rule, text)) continue;
        if (equals) snprintf(buffer, BL_OPTION_KEY_BYTES, "%s", equals + 1);
        return true;
    }
    return false;
}

static bl_status fail_alias(const char *where, const char *name, const bl_option_alias *alias,
                            const char *text)
{
    const char *hint = alias->hint ? alias->hint : alias->key;
    bool is_why = hint[0] == '!';

    if (alias->values)
        return BL_FAIL(BL_EUSAGE, "%s%s: '%s' is not supported%s%s", where, name, text,
                       is_why ? ": " : "; use ", hint + is_why);
    return BL_FAIL(BL_EUSAGE, "%s%s: %s%s", where, name,
                   is_why ? "not supported: " : "not a key of Ballast; use ", hint + is_why);
}

/* Replaces the items of the value; drops those that set nothing. */
static bl_status apply_rules(const char *where, const char *name, bl_option_value *value,
                             bl_option_meaning *meaning)
{
    const bl_option_alias *alias = meaning->alias;
    size_t n = 0;

    if (alias->key && value->is_nested)
        return BL_FAIL(BL_EUSAGE, "%s%s: nested keys are not supported; %s is one value", where,
                       name, alias->key);
    if (!alias->values) return BL_OK;
    if (strcmp(alias->values, "*=") == 0) {
        value->n_items = 0;
        return BL_OK;
    }
    if (value->is_nested) return fail_alias(where, name, alias, "a nested value");
    if (value->n_items > BL_OPTION_MAX_TRANSLATED)
        return BL_FAIL(BL_EUSAGE, "%s%s: more than %d items", where, name,
                       BL_OPTION_MAX_TRANSLATED);
    for (size_t i = 0; i < value->n_items; i++) {
        if (!translate(alias->values, value->items[i], meaning->texts[i], &meaning->items[n]))
            return fail_alias(where, name, alias, value->items[i]);
        n += meaning->items[n][0] != '\0';
    }
    value->items = meaning->items;
    value->n_items = n;
    return BL_OK;
}

/* 0.03 for a number of steps is the part of all steps in other programs. */
static bool is_fraction(const bl_option *option, const bl_option_value *value)
{
    double number;

    return option->fraction_key && !value->is_sequence && value->n_items == 1 &&
           bl_option_parse_real(value->items[0], &number) && number > 0 && number < 1;
}

/* Null, false, an empty text, or an empty list. */
static bool is_absent(const bl_option_value *value)
{
    bool truth;

    if (value->is_null) return true;
    if (value->is_nested || value->n_items > 1) return false;
    return value->n_items == 0 || !value->items[0][0] ||
           (bl_text_parse_bool(value->items[0], &truth) && !truth);
}

/* Nothing, or a name that changes nothing with any value. */
static bool asks_nothing(const bl_option_alias *alias, const bl_option_value *value)
{
    return is_absent(value) || (alias->values && strcmp(alias->values, "*=") == 0);
}

/* Replaces a null by the value that it means, which borrows *meaning. */
static bl_status apply_null(const char *where, const char *name, const char *null_text,
                            bl_option_value *value, bl_option_meaning *meaning)
{
    if (!value->is_null || !null_text) return BL_OK;
    if (null_text[0] == '!') return BL_FAIL(BL_EUSAGE, "%s%s: %s", where, name, null_text + 1);
    meaning->items[0] = null_text;
    *value = (bl_option_value){.items = meaning->items, .n_items = 1};
    return BL_OK;
}

bl_status bl_options_resolve(const bl_options *options, const char *where, const char *name,
                             bl_option_value *value, bl_option_meaning *meaning)
{
    char key[BL_OPTION_KEY_BYTES];
    bl_option_normalize(name, key);

    const bl_option_alias *alias = bl_options_find_alias(options, key);
    const bl_option *option = bl_options_find(options, alias && alias->key ? alias->key : key);
    meaning->alias = alias;
    meaning->index = BL_OPTION_NOTHING;
    meaning->is_ignored = alias && !alias->key && asks_nothing(alias, value);
    if (!alias && value->is_nested)
        return BL_FAIL(BL_EUSAGE,
                       "%s%s: nested keys are not supported; write keys at the top level", where,
                       name);
    meaning->is_ignored |= !option && !alias && options->tool && is_absent(value);
    if (meaning->is_ignored && !alias) return BL_OK;
    if (!option && !alias) return fail_unknown(options, where, name, key);
    BL_TRY(apply_null(where, name,
                      alias && alias->null_text ? alias->null_text
                      : option                  ? option->null_text
                                                : NULL,
                      value, meaning));
    bool is_empty = value->n_items == 0 && !value->is_nested;
    if (alias && (value->is_null || (is_empty && !alias->key))) return BL_OK;
    if (alias) BL_TRY(apply_rules(where, name, value, meaning));
    if (alias && alias->values && value->n_items == 0) return BL_OK;
    if (alias && !alias->key) return fail_alias(where, name, alias, "");
    value->joins = alias && alias->joins;
    if (is_fraction(option, value)) option = bl_options_find(options, option->fraction_key);
    meaning->index = option - options->table;
    return BL_OK;
}
