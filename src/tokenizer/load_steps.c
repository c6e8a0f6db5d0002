/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the normalizer's and the pre-tokenizer's steps from tokenizer.json. What is not understood
 * is refused by name. */
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
    static const char *const known[] = {"String", "Regex", NULL};
    const json_t *holder;
    const char *text = "";

    BL_TRY(bl_json_get_object(where, step, "pattern", BL_JSON_REQUIRED, &holder));
    BL_TRY(bl_tokenizer_check_keys(holder, where, known));
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

/* Files of tokenizers before 0.15 say add_prefix_space, and str_rep once more. */
bl_status bl_tokenizer_load_metaspace(const json_t *step, const char *where, char **replacement,
                                      bl_prepend_scheme *scheme, bool *split)
{
    static const char *const known[] = {
        "type", "replacement", "str_rep", "add_prefix_space", "prepend_scheme", "split", NULL};
    static const char *const schemes[] = {"always", "first", "never"}; /* as in bl_prepend_scheme */
    const char *name = schemes[BL_PREPEND_ALWAYS];
    bool prefix = true;
    size_t i = 0;

    *split = true;
    BL_TRY(bl_tokenizer_check_keys(step, where, known));
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

static bl_status load_strip(const json_t *json, bl_normalizer_step *step)
{
    static const char *const known[] = {"type", "strip_left", "strip_right", NULL};
    static const char where[] = "normalizer Strip";

    BL_TRY(bl_tokenizer_check_keys(json, where, known));
    BL_TRY(bl_json_get_bool(where, json, "strip_left", BL_JSON_REQUIRED, &step->at_start));
    return bl_json_get_bool(where, json, "strip_right", BL_JSON_REQUIRED, &step->at_end);
}

/* The normalizers without settings. */
static const struct {
    const char *name;
    bl_normalizer_kind kind;
    int utf8proc_options;
} plain_normalizers[] = {
    {"NFC", BL_NORM_UNICODE, UTF8PROC_STABLE | UTF8PROC_COMPOSE},
    {"NFD", BL_NORM_UNICODE, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE},
    {"NFKC", BL_NORM_UNICODE, UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
    {"NFKD", BL_NORM_UNICODE, UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT},
    {"Lowercase", BL_NORM_LOWERCASE, 0},
    {"StripAccents", BL_NORM_STRIP_ACCENTS, 0},
    {"ByteLevel", BL_NORM_BYTE_LEVEL, 0},
};

bl_status bl_tokenizer_load_normalizer(const json_t *json, const char *type,
                                       bl_tokenizer *tokenizer)
{
    static const char *const known_prepend[] = {"type", "prepend", NULL};
    static const char *const known_replace[] = {"type", "pattern", "content", NULL};
    static const char *const known_plain[] = {"type", NULL};
    bl_steps *steps = &tokenizer->steps;

    if (steps->n_normalizers == BL_MAX_STEPS)
        return BL_FAIL(BL_EINPUT, "normalizer: more than %d steps", BL_MAX_STEPS);
    bl_normalizer_step *step = &steps->normalizer[steps->n_normalizers++];
    if (!strcmp(type, "Prepend")) {
        step->kind = BL_NORM_PREPEND;
        BL_TRY(bl_tokenizer_check_keys(json, "normalizer Prepend", known_prepend));
        return bl_tokenizer_load_string(json, "normalizer Prepend", "prepend", &step->content);
    }
    if (!strcmp(type, "Replace")) {
        step->kind = BL_NORM_REPLACE;
        BL_TRY(bl_tokenizer_check_keys(json, "normalizer Replace", known_replace));
        BL_TRY(bl_tokenizer_load_pattern(json, "normalizer Replace", &step->pattern));
        return bl_tokenizer_load_string(json, "normalizer Replace", "content", &step->content);
    }
    if (!strcmp(type, "Strip")) {
        step->kind = BL_NORM_STRIP;
        return load_strip(json, step);
    }
    for (size_t i = 0; i < BL_COUNT(plain_normalizers); i++) {
        if (strcmp(type, plain_normalizers[i].name)) continue;
        step->kind = plain_normalizers[i].kind;
        step->utf8proc_options = plain_normalizers[i].utf8proc_options;
        return bl_tokenizer_check_keys(json, type, known_plain);
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

static bl_status load_split(const json_t *json, bl_split *split)
{
    static const char *const known[] = {"type", "pattern", "behavior", "invert", NULL};
    static const char where[] = "pre_tokenizer Split";

    BL_TRY(bl_tokenizer_check_keys(json, where, known));
    BL_TRY(load_behavior(json, where, BL_JSON_REQUIRED, &split->behavior));
    BL_TRY(bl_json_get_bool(where, json, "invert", BL_JSON_OPTIONAL, &split->invert));
    return bl_tokenizer_load_pattern(json, where, &split->pattern);
}

static bl_status load_byte_level(const json_t *json, bl_split *split)
{
    static const char *const known[] = {"type", "add_prefix_space", "trim_offsets", "use_regex",
                                        NULL};
    static const char where[] = "pre_tokenizer ByteLevel";
    bool use_regex = true;

    split->is_byte_level = true;
    split->behavior = BL_SPLIT_ISOLATED;
    BL_TRY(bl_tokenizer_check_keys(json, where,
                                   known)); /* trim_offsets: offsets are not computed here */
    BL_TRY(bl_json_get_bool(where, json, "add_prefix_space", BL_JSON_REQUIRED,
                            &split->add_prefix_space));
    BL_TRY(bl_json_get_bool(where, json, "use_regex", BL_JSON_OPTIONAL, &use_regex));
    if (!use_regex) return BL_OK;
    split->pattern.kind = BL_PATTERN_REGEX;
    return bl_regex_compile(GPT2_REGEX, &split->pattern.regex);
}

static bl_status load_digits(const json_t *json, bl_split *split)
{
    static const char *const known[] = {"type", "individual_digits", NULL};
    static const char where[] = "pre_tokenizer Digits";
    bool individual = false;

    BL_TRY(bl_tokenizer_check_keys(json, where, known));
    BL_TRY(bl_json_get_bool(where, json, "individual_digits", BL_JSON_REQUIRED, &individual));
    split->pattern = (bl_pattern){BL_PATTERN_CLASS, .is_member = bl_unicode_is_numeric};
    split->behavior = individual ? BL_SPLIT_ISOLATED : BL_SPLIT_CONTIGUOUS;
    return BL_OK;
}

static bl_status load_punctuation(const json_t *json, bl_split *split)
{
    static const char *const known[] = {"type", "behavior", NULL};
    static const char where[] = "pre_tokenizer Punctuation";

    BL_TRY(bl_tokenizer_check_keys(json, where, known));
    split->pattern = (bl_pattern){BL_PATTERN_CLASS, .is_member = bl_unicode_is_punctuation};
    return load_behavior(json, where, BL_JSON_OPTIONAL, &split->behavior);
}

static bl_status load_delimiter(const json_t *json, bl_split *split)
{
    static const char *const known[] = {"type", "delimiter", NULL};
    static const char where[] = "pre_tokenizer CharDelimiterSplit";

    BL_TRY(bl_tokenizer_check_keys(json, where, known));
    split->pattern.kind = BL_PATTERN_STRING;
    split->behavior = BL_SPLIT_REMOVED;
    return bl_tokenizer_load_character(json, where, "delimiter", &split->pattern.string);
}

static bl_status load_whitespace_split(const json_t *json, bl_split *split)
{
    static const char *const known[] = {"type", NULL};

    split->pattern = (bl_pattern){BL_PATTERN_CLASS, .is_member = bl_unicode_is_space};
    split->behavior = BL_SPLIT_REMOVED;
    return bl_tokenizer_check_keys(json, "pre_tokenizer WhitespaceSplit", known);
}

/* Keeps the words: removes the text between them. */
static bl_status load_whitespace(const json_t *json, bl_split *split)
{
    static const char *const known[] = {"type", NULL};

    split->pattern.kind = BL_PATTERN_WORDS;
    split->behavior = BL_SPLIT_REMOVED;
    split->invert = true;
    return bl_tokenizer_check_keys(json, "pre_tokenizer Whitespace", known);
}

static bl_status load_metaspace(const json_t *json, bl_split *split)
{
    return bl_tokenizer_load_metaspace(json, "pre_tokenizer Metaspace", &split->metaspace,
                                       &split->scheme, &split->at_metaspace);
}

bl_status bl_tokenizer_load_split(const json_t *json, const char *type, bl_tokenizer *tokenizer)
{
    static const struct {
        const char *name;
        bl_status (*load)(const json_t *json, bl_split *split);
    } types[] = {
        {"Split", load_split},
        {"ByteLevel", load_byte_level},
        {"Metaspace", load_metaspace},
        {"Digits", load_digits},
        {"Punctuation", load_punctuation},
        {"Whitespace", load_whitespace},
        {"WhitespaceSplit", load_whitespace_split},
        {"CharDelimiterSplit", load_delimiter},
    };
    bl_steps *steps = &tokenizer->steps;

    if (steps->n_splits == BL_MAX_STEPS)
        return BL_FAIL(BL_EINPUT, "pre_tokenizer: more than %d steps", BL_MAX_STEPS);
    for (size_t i = 0; i < steps->n_splits && !strcmp(type, "ByteLevel"); i++)
        if (steps->split[i].is_byte_level)
            return BL_FAIL(BL_EINPUT, "pre_tokenizer: ByteLevel twice is not supported");
    bl_split *split = &steps->split[steps->n_splits++];
    for (size_t i = 0; i < BL_COUNT(types); i++)
        if (!strcmp(type, types[i].name)) return types[i].load(json, split);
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
