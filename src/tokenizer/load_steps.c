/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the normalizer's and the pre-tokenizer's steps from tokenizer.json. Unsupported parts are
 * rejected by name. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "base/sizes.h"
#include "tokenizer/internal.h"

/* ---- parts of steps ---- */

bl_status bl_tokenizer_load_string(const json_t *step, const char *where, const char *key,
                                   char **out)
{
    const char *text = "";

    BL_TRY(bl_json_get_string(where, step, key, BL_JSON_REQUIRED, &text));
    *out = strdup(text);
    return *out ? BL_OK : BL_FAIL(BL_ENOMEM, "out of memory: %s", where);
}

bl_status bl_tokenizer_load_character(const json_t *step, const char *where, const char *key,
                                      char **out)
{
    size_t length = 0;

    BL_TRY(bl_tokenizer_load_string(step, where, key, out));
    if (**out) bl_utf8_decode(*out, strlen(*out), &length);
    if (!**out || (*out)[length])
        return BL_FAIL(BL_EINPUT, "%s: %s must be one character", where, key);
    return BL_OK;
}

bl_status bl_tokenizer_load_pattern(const json_t *step, const char *where, bl_pattern *out)
{
    const json_t *holder;
    const char *text = "";

    BL_TRY(bl_json_get_object(where, step, "pattern", BL_JSON_REQUIRED, &holder));
    BL_TRY(bl_tokenizer_check_keys(holder, where, "String Regex"));
    if (json_object_size(holder) != 1)
        return BL_FAIL(BL_EINPUT, "%s: pattern must have one of String and Regex", where);
    if (json_object_get(holder, "Regex")) {
        out->kind = BL_PATTERN_REGEX;
        BL_TRY(bl_json_get_string(where, holder, "Regex", BL_JSON_REQUIRED, &text));
        return bl_regex_compile(text, &out->regex);
    }
    out->kind = BL_PATTERN_STRING;
    BL_TRY(bl_tokenizer_load_string(holder, where, "String", &out->string));
    return *out->string ? BL_OK : BL_FAIL(BL_EINPUT, "%s: an empty pattern", where);
}

/* Files of tokenizers before 0.15 have add_prefix_space, and str_rep as a second key. */
bl_status bl_tokenizer_load_metaspace(const json_t *step, const char *where, char **replacement,
                                      bl_prepend_scheme *scheme, bool *split)
{
    static const char *const schemes[] = {"always", "first", "never"}; /* as in bl_prepend_scheme */
    const char *name = schemes[BL_PREPEND_ALWAYS];
    bool prefix = true;
    size_t i = 0;

    *split = true;
    BL_TRY(bl_tokenizer_load_character(step, where, "replacement", replacement));
    BL_TRY(bl_json_get_bool(where, step, "add_prefix_space", BL_JSON_OPTIONAL, &prefix));
    BL_TRY(bl_json_get_string(where, step, "prepend_scheme", BL_JSON_OPTIONAL, &name));
    BL_TRY(bl_json_get_bool(where, step, "split", BL_JSON_OPTIONAL, split));
    while (i < BL_COUNT(schemes) && strcmp(name, schemes[i])) i++;
    if (i == BL_COUNT(schemes))
        return BL_FAIL(BL_EINPUT, "%s: prepend_scheme %.80s is not supported", where, name);
    *scheme = (bl_prepend_scheme)i;
    if (!prefix && *scheme != BL_PREPEND_NEVER)
        return BL_FAIL(BL_EINPUT, "%s: add_prefix_space false beside prepend_scheme %s", where,
                       name);
    return BL_OK;
}

/* ---- normalizer ---- */

static const struct {
    const char *name, *keys;
    bl_normalizer_kind kind;
    int utf8proc_options;
} normalizers[] = {
    {"Prepend", "type prepend", BL_NORM_PREPEND, 0},
    {"Replace", "type pattern content", BL_NORM_REPLACE, 0},
    {"Strip", "type strip_left strip_right", BL_NORM_STRIP, 0},
    {"NFC", "type", BL_NORM_UNICODE, UTF8PROC_STABLE | UTF8PROC_COMPOSE},
    {"NFD", "type", BL_NORM_UNICODE, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE},
    {"NFKC", "type", BL_NORM_UNICODE, UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
    {"NFKD", "type", BL_NORM_UNICODE, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT},
    {"Lowercase", "type", BL_NORM_LOWERCASE, 0},
    {"StripAccents", "type", BL_NORM_STRIP_ACCENTS, 0},
    {"ByteLevel", "type", BL_NORM_BYTE_LEVEL, 0},
};

static bl_status load_settings(const json_t *json, const char *where, bl_normalizer_step *step)
{
    switch (step->kind) {
    case BL_NORM_PREPEND:
        return bl_tokenizer_load_string(json, where, "prepend", &step->content);
    case BL_NORM_REPLACE:
        BL_TRY(bl_tokenizer_load_pattern(json, where, &step->pattern));
        return bl_tokenizer_load_string(json, where, "content", &step->content);
    case BL_NORM_STRIP:
        BL_TRY(bl_json_get_bool(where, json, "strip_left", BL_JSON_REQUIRED, &step->at_start));
        return bl_json_get_bool(where, json, "strip_right", BL_JSON_REQUIRED, &step->at_end);
    default:
        return BL_OK;
    }
}

bl_status bl_tokenizer_load_normalizer(const json_t *json, const char *type,
                                       bl_tokenizer *tokenizer)
{
    bl_steps *steps = &tokenizer->steps;
    char where[64];

    if (steps->n_normalizers == BL_MAX_STEPS)
        return BL_FAIL(BL_EINPUT, "normalizer: more than %d steps", BL_MAX_STEPS);
    bl_normalizer_step *step = &steps->normalizer[steps->n_normalizers++];
    for (size_t i = 0; i < BL_COUNT(normalizers); i++) {
        if (strcmp(type, normalizers[i].name)) continue;
        step->kind = normalizers[i].kind;
        step->utf8proc_options = normalizers[i].utf8proc_options;
        snprintf(where, sizeof where, "normalizer %s", type);
        BL_TRY(bl_tokenizer_check_keys(json, where, normalizers[i].keys));
        return load_settings(json, where, step);
    }
    return BL_FAIL(BL_EINPUT, "normalizer: type %.80s is not supported", type);
}

/* ---- pre-tokenizer ---- */

#define GPT2_REGEX                                                                                 \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

static bl_status load_behavior(const json_t *json, const char *where, bl_json_need need,
                               bl_split_behavior *out)
{
    /* As in bl_split_behavior. */
    static const char *const names[] = {"Removed", "Isolated", "MergedWithPrevious",
                                        "MergedWithNext", "Contiguous"};
    const char *name = names[BL_SPLIT_ISOLATED];
    size_t i = 0;

    BL_TRY(bl_json_get_string(where, json, "behavior", need, &name));
    while (i < BL_COUNT(names) && strcmp(name, names[i])) i++;
    if (i == BL_COUNT(names))
        return BL_FAIL(BL_EINPUT, "%s: behavior %.80s is not supported", where, name);
    *out = (bl_split_behavior)i;
    return BL_OK;
}

/* Those that set no behavior have 0: matches are removed. */
static bl_status load_split(const json_t *json, const char *where, bl_split *split)
{
    BL_TRY(load_behavior(json, where, BL_JSON_REQUIRED, &split->behavior));
    BL_TRY(bl_json_get_bool(where, json, "invert", BL_JSON_OPTIONAL, &split->invert));
    return bl_tokenizer_load_pattern(json, where, &split->pattern);
}

static bl_status load_byte_level(const json_t *json, const char *where, bl_split *split)
{
    bool use_regex = true;

    split->is_byte_level = true;
    split->behavior = BL_SPLIT_ISOLATED;
    BL_TRY(bl_json_get_bool(where, json, "add_prefix_space", BL_JSON_REQUIRED,
                            &split->add_prefix_space));
    BL_TRY(bl_json_get_bool(where, json, "use_regex", BL_JSON_OPTIONAL, &use_regex));
    if (!use_regex) return BL_OK;
    split->pattern.kind = BL_PATTERN_REGEX;
    return bl_regex_compile(GPT2_REGEX, &split->pattern.regex);
}

static bl_status load_digits(const json_t *json, const char *where, bl_split *split)
{
    bool individual = false;

    BL_TRY(bl_json_get_bool(where, json, "individual_digits", BL_JSON_REQUIRED, &individual));
    split->pattern = (bl_pattern){BL_PATTERN_CLASS, .is_member = bl_unicode_is_numeric};
    split->behavior = individual ? BL_SPLIT_ISOLATED : BL_SPLIT_CONTIGUOUS;
    return BL_OK;
}

static bl_status load_punctuation(const json_t *json, const char *where, bl_split *split)
{
    split->pattern = (bl_pattern){BL_PATTERN_CLASS, .is_member = bl_unicode_is_punctuation};
    return load_behavior(json, where, BL_JSON_OPTIONAL, &split->behavior);
}

static bl_status load_delimiter(const json_t *json, const char *where, bl_split *split)
{
    split->pattern.kind = BL_PATTERN_STRING;
    return bl_tokenizer_load_character(json, where, "delimiter", &split->pattern.string);
}

static bl_status load_whitespace_split(const json_t *json, const char *where, bl_split *split)
{
    (void)json, (void)where;
    split->pattern = (bl_pattern){BL_PATTERN_CLASS, .is_member = bl_unicode_is_space};
    return BL_OK;
}

/* Keeps the words: removes the text between them. */
static bl_status load_whitespace(const json_t *json, const char *where, bl_split *split)
{
    (void)json, (void)where;
    split->pattern.kind = BL_PATTERN_WORDS;
    split->invert = true;
    return BL_OK;
}

static bl_status load_metaspace(const json_t *json, const char *where, bl_split *split)
{
    return bl_tokenizer_load_metaspace(json, where, &split->metaspace, &split->scheme,
                                       &split->at_metaspace);
}

bl_status bl_tokenizer_load_split(const json_t *json, const char *type, bl_tokenizer *tokenizer)
{
    /* ByteLevel's trim_offsets is of offsets, which are not computed. */
    static const struct {
        const char *name, *keys;
        bl_status (*load)(const json_t *json, const char *where, bl_split *split);
    } types[] = {
        {"Split", "type pattern behavior invert", load_split},
        {"ByteLevel", "type add_prefix_space trim_offsets use_regex", load_byte_level},
        {"Metaspace", BL_METASPACE_KEYS, load_metaspace},
        {"Digits", "type individual_digits", load_digits},
        {"Punctuation", "type behavior", load_punctuation},
        {"Whitespace", "type", load_whitespace},
        {"WhitespaceSplit", "type", load_whitespace_split},
        {"CharDelimiterSplit", "type delimiter", load_delimiter},
    };
    char where[64];
    bl_steps *steps = &tokenizer->steps;

    if (steps->n_splits == BL_MAX_STEPS)
        return BL_FAIL(BL_EINPUT, "pre_tokenizer: more than %d steps", BL_MAX_STEPS);
    for (size_t i = 0; i < steps->n_splits && !strcmp(type, "ByteLevel"); i++)
        if (steps->split[i].is_byte_level)
            return BL_FAIL(BL_EINPUT, "pre_tokenizer: ByteLevel twice is not supported");
    bl_split *split = &steps->split[steps->n_splits++];
    for (size_t i = 0; i < BL_COUNT(types); i++) {
        if (strcmp(type, types[i].name)) continue;
        snprintf(where, sizeof where, "pre_tokenizer %s", type);
        BL_TRY(bl_tokenizer_check_keys(json, where, types[i].keys));
        return types[i].load(json, where, split);
    }
    return BL_FAIL(BL_EINPUT, "pre_tokenizer: type %.80s is not supported", type);
}

/* HF's Metaspace with prepend_scheme first asks for the offset of a piece in the text before
 * normalization. These normalizers change that of the first. */
static bool moves_the_beginning(const bl_normalizer_step *step)
{
    size_t length;

    switch (step->kind) {
    case BL_NORM_STRIP:
        return step->at_start;
    case BL_NORM_STRIP_ACCENTS:
        return true;
    case BL_NORM_REPLACE:
        if (step->pattern.kind == BL_PATTERN_REGEX) return true;
        bl_utf8_decode(step->pattern.string, strlen(step->pattern.string), &length);
        return step->pattern.string[length] || !*step->content;
    default:
        return false;
    }
}

bl_status bl_tokenizer_check_steps(const bl_steps *steps)
{
    bool asks = false;

    for (size_t i = 0; i < steps->n_splits; i++)
        asks = asks || (steps->split[i].metaspace && steps->split[i].scheme == BL_PREPEND_FIRST);
    for (size_t i = 0; i < steps->n_normalizers && asks; i++)
        if (moves_the_beginning(&steps->normalizer[i]))
            return BL_FAIL(BL_EINPUT,
                           "pre_tokenizer Metaspace: prepend_scheme first is not supported behind "
                           "a normalizer that may shorten the beginning of a text (Strip, "
                           "StripAccents, Replace of a regex or of several characters)");
    return BL_OK;
}
