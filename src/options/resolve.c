/* SPDX-License-Identifier: Apache-2.0 */
/* Names of options: which row of the table a name means, what an alias makes of it, and what may have been
 * meant. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "options/options.h"
#include "options/internal.h"

void bl_option_normalise(const char *name, char dst[BL_OPTION_KEY_BYTES])
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

const bl_option_alias *bl_options_find_alias(const bl_options *options, const char *key)
{
    for (size_t i = 0; i < options->n_aliases; i++) {
        if (strcmp(options->aliases[i].name, key) == 0) return &options->aliases[i];
    }
    return NULL;
}

static size_t edit_distance(const char *a, const char *b)
{
    size_t row[BL_OPTION_KEY_BYTES];
    size_t n_b = strlen(b);

    if (n_b >= BL_OPTION_KEY_BYTES) return SIZE_MAX;
    for (size_t j = 0; j <= n_b; j++) row[j] = j;
    for (size_t i = 1; a[i - 1]; i++) {
        size_t diagonal = row[0];
        row[0] = i;
        for (size_t j = 1; j <= n_b; j++) {
            size_t best = diagonal + (a[i - 1] != b[j - 1]);
            if (row[j] + 1 < best) best = row[j] + 1;
            if (row[j - 1] + 1 < best) best = row[j - 1] + 1;
            diagonal = row[j];
            row[j] = best;
        }
    }
    return row[n_b];
}

const char *bl_text_nearest(const char *word, const char *const *names, size_t n_names)
{
    const char *nearest = NULL;
    size_t least = SIZE_MAX;

    for (size_t i = 0; i < n_names; i++) {
        size_t distance = edit_distance(word, names[i]);
        if (distance < least) {
            least = distance;
            nearest = names[i];
        }
    }
    size_t length = strlen(word);
    size_t limit = length < 4 ? 1 : length / 3 + 1;
    return least <= limit ? nearest : NULL;
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
            if (options->aliases[i].key) names[n_names++] = options->aliases[i].name;
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

/* "true=full false=none *": what `text` becomes in *out; false: not accepted. */
static bool translate(const char *values, const char *text, char out[BL_OPTION_KEY_BYTES],
                      bool *keep)
{
    bool truth_of_text = false, truth_of_word;
    bool text_is_bool = bl_text_parse_bool(text, &truth_of_text);

    *keep = false;
    while (*values) {
        size_t length = strcspn(values, " ");
        char word[BL_OPTION_KEY_BYTES];
        snprintf(word, sizeof word, "%.*s", (int)length, values);
        values += length + (values[length] == ' ');
        if (strcmp(word, "*") == 0) {
            *keep = true;
            return true;
        }
        char *equals = strchr(word, '=');
        *equals = '\0';
        bool same = strcasecmp(word, text) == 0;
        if (!same && text_is_bool && bl_text_parse_bool(word, &truth_of_word))
            same = truth_of_word == truth_of_text;
        if (same) {
            snprintf(out, BL_OPTION_KEY_BYTES, "%s", equals + 1);
            return true;
        }
    }
    return false;
}

static bl_status fail_alias(const char *where, const char *name, const bl_option_alias *alias,
                            const char *text)
{
    const char *hint = alias->hint ? alias->hint : alias->key;
    const char *use = hint[0] == '!' ? "unsupported: " : "use ";
    const char *why = hint + (hint[0] == '!');
    if (alias->values)
        return BL_FAIL(BL_EUSAGE, "%s%s: '%s' is not known here; %s%s", where, name, text, use,
                       why);
    return BL_FAIL(BL_EUSAGE, "%s%s: not a key of Ballast; %s%s", where, name, use, why);
}

bl_status bl_options_resolve(const bl_options *options, const char *where, const char *name,
                             bl_option_value *value, bl_option_translation *translation,
                             int64_t *index)
{
    char key[BL_OPTION_KEY_BYTES];
    bl_option_normalise(name, key);
    *index = BL_OPTION_NOTHING;

    const bl_option *option = bl_options_find(options, key);
    const bl_option_alias *alias = option ? NULL : bl_options_find_alias(options, key);
    if (!option && !alias) return fail_unknown(options, where, name, key);
    if (alias && value->is_null) return BL_OK;
    if (alias && alias->values) {
        bool keep;
        if (value->is_sequence || value->n_items != 1)
            return fail_alias(where, name, alias, "a sequence");
        if (!translate(alias->values, value->items[0], translation->text, &keep)) {
            return fail_alias(where, name, alias, value->items[0]);
        }
        if (!keep) {
            if (!translation->text[0]) return BL_OK;
            translation->item = translation->text;
            value->items = &translation->item;
        }
    }
    if (alias && !alias->key) return fail_alias(where, name, alias, "");
    if (alias) option = bl_options_find(options, alias->key);
    *index = option - options->table;
    return BL_OK;
}
