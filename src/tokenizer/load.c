/* SPDX-License-Identifier: Apache-2.0 */
/* Reads tokenizer.json: every component but the model and the added tokens. What is not understood
 * is refused by name. */
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "base/files.h"
#include "base/hub.h"
#include "base/sizes.h"
#include "tokenizer/internal.h"

enum { MAX_FILE_BYTES = 512 << 20 };

bl_status bl_tokenizer_check_keys(const json_t *object, const char *where, const char *const *known)
{
    const char *key;
    const json_t *value;

    BL_TRY(bl_json_check_object(where, object));
    json_object_foreach((json_t *)object, key, value)
    {
        size_t i = 0;
        while (known[i] && strcmp(known[i], key)) i++;
        if (!known[i]) return BL_FAIL(BL_EINPUT, "%s: unknown key %.80s", where, key);
    }
    return BL_OK;
}

static bl_status duplicate(const char *text, char **out)
{
    *out = strdup(text);
    return *out ? BL_OK : BL_FAIL(BL_ENOMEM, "tokenizer");
}

static bl_status get_type(const json_t *component, const char *where, const char **type)
{
    BL_TRY(bl_json_check_object(where, component));
    return bl_json_get_string(where, component, "type", BL_JSON_REQUIRED, type);
}

/* A component is one step, or a Sequence of steps under `list_key`, or null. */
typedef bl_status load_step_fn(const json_t *step, const char *type, bl_tokenizer *tokenizer);

static bl_status load_sequence(const json_t *component, const char *where, const char *list_key,
                               load_step_fn *load, bl_tokenizer *tokenizer)
{
    const char *const known[] = {"type", list_key, NULL};
    const char *type;
    const json_t *list, *step;
    size_t i;

    if (!component || json_is_null(component)) return BL_OK;
    BL_TRY(get_type(component, where, &type));
    if (strcmp(type, "Sequence")) return load(component, type, tokenizer);
    BL_TRY(bl_tokenizer_check_keys(component, where, known));
    BL_TRY(bl_json_get_array(where, component, list_key, BL_JSON_REQUIRED, &list));
    json_array_foreach((json_t *)list, i, step)
    {
        BL_TRY(get_type(step, where, &type));
        BL_TRY(load(step, type, tokenizer));
    }
    return BL_OK;
}

/* {"pattern":{"String":S},"content":C}, for the normalizer and the decoder of that name. */
static bl_status load_replace(const json_t *step, const char *where, char **pattern, char **content)
{
    static const char *const known[] = {"type", "pattern", "content", NULL};
    static const char *const known_patterns[] = {"String", NULL};
    const json_t *holder;
    const char *text = "";

    BL_TRY(bl_tokenizer_check_keys(step, where, known));
    BL_TRY(bl_json_get_object(where, step, "pattern", BL_JSON_REQUIRED, &holder));
    BL_TRY(bl_tokenizer_check_keys(holder, where, known_patterns));
    BL_TRY(bl_json_get_string(where, holder, "String", BL_JSON_REQUIRED, &text));
    if (!*text) return BL_FAIL(BL_EINPUT, "%s: an empty pattern", where);
    BL_TRY(duplicate(text, pattern));
    BL_TRY(bl_json_get_string(where, step, "content", BL_JSON_REQUIRED, &text));
    return duplicate(text, content);
}

/* A string of one character. */
static bl_status load_character(const json_t *step, const char *where, const char *key, char **out)
{
    const char *text = "";
    size_t length = 0;

    BL_TRY(bl_json_get_string(where, step, key, BL_JSON_REQUIRED, &text));
    if (*text) bl_utf8_decode(text, strlen(text), &length);
    if (!*text || text[length])
        return BL_FAIL(BL_EINPUT, "%s: %s must be one character", where, key);
    return duplicate(text, out);
}

/* {"replacement":C,"prepend_scheme":P,"split":S}, for the pre-tokenizer and the decoder of that
 * name. Files of tokenizers before 0.15 say add_prefix_space, and str_rep once more. */
static bl_status load_metaspace(const json_t *step, const char *where, char **replacement,
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
    BL_TRY(load_character(step, where, "replacement", replacement));
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

static bl_status load_normalizer(const json_t *json, const char *type, bl_tokenizer *tokenizer)
{
    static const char *const known_prepend[] = {"type", "prepend", NULL};
    static const char *const known_form[] = {"type", NULL};
    static const struct {
        const char *name;
        int options;
    } forms[] = {{"NFC", UTF8PROC_STABLE | UTF8PROC_COMPOSE},
                 {"NFD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE},
                 {"NFKC", UTF8PROC_STABLE | UTF8PROC_COMPOSE | UTF8PROC_COMPAT},
                 {"NFKD", UTF8PROC_STABLE | UTF8PROC_DECOMPOSE | UTF8PROC_COMPAT}};
    bl_steps *steps = &tokenizer->steps;
    const char *text = "";

    if (steps->n_normalizers == BL_MAX_STEPS)
        return BL_FAIL(BL_EINPUT, "normalizer: more than %d steps", BL_MAX_STEPS);
    bl_normalizer_step *step = &steps->normalizer[steps->n_normalizers++];
    if (!strcmp(type, "Prepend")) {
        step->kind = BL_NORM_PREPEND;
        BL_TRY(bl_tokenizer_check_keys(json, "normalizer Prepend", known_prepend));
        BL_TRY(bl_json_get_string("normalizer Prepend", json, "prepend", BL_JSON_REQUIRED, &text));
        return duplicate(text, &step->content);
    }
    if (!strcmp(type, "Replace")) {
        step->kind = BL_NORM_REPLACE;
        return load_replace(json, "normalizer Replace", &step->pattern, &step->content);
    }
    for (size_t i = 0; i < BL_COUNT(forms); i++) {
        if (strcmp(type, forms[i].name)) continue;
        step->kind = BL_NORM_UNICODE;
        step->utf8proc_options = forms[i].options;
        return bl_tokenizer_check_keys(json, type, known_form);
    }
    return BL_FAIL(BL_EINPUT, "normalizer: type %.80s is not supported", type);
}

/* ---- pre-tokenizer ---- */

#define GPT2_REGEX                                                                                 \
    "'s|'t|'re|'ve|'m|'ll|'d| ?\\p{L}+| ?\\p{N}+| ?[^\\s\\p{L}\\p{N}]+|\\s+(?!\\S)|\\s+"

static bl_status load_split(const json_t *json, bl_split *split)
{
    static const char *const known[] = {"type", "pattern", "behavior", "invert", NULL};
    static const char *const known_patterns[] = {"Regex", NULL};
    static const char where[] = "pre_tokenizer Split";
    const json_t *holder;
    const char *text = "";
    bool invert = false;

    BL_TRY(bl_tokenizer_check_keys(json, where, known));
    BL_TRY(bl_json_get_string(where, json, "behavior", BL_JSON_REQUIRED, &text));
    BL_TRY(bl_json_get_bool(where, json, "invert", BL_JSON_OPTIONAL, &invert));
    if (strcmp(text, "Isolated"))
        return BL_FAIL(BL_EINPUT, "%s: behavior %.80s is not supported", where, text);
    if (invert) return BL_FAIL(BL_EINPUT, "%s: invert true is not supported", where);
    BL_TRY(bl_json_get_object(where, json, "pattern", BL_JSON_REQUIRED, &holder));
    BL_TRY(bl_tokenizer_check_keys(holder, where, known_patterns));
    BL_TRY(bl_json_get_string(where, holder, "Regex", BL_JSON_REQUIRED, &text));
    return bl_regex_compile(text, &split->regex);
}

static bl_status load_pre_tokenizer(const json_t *json, const char *type, bl_tokenizer *tokenizer)
{
    static const char *const known[] = {"type", "add_prefix_space", "trim_offsets", "use_regex",
                                        NULL};
    static const char where[] = "pre_tokenizer ByteLevel";
    bl_steps *steps = &tokenizer->steps;
    bool use_regex = true;

    if (tokenizer->bpe.byte_level)
        return BL_FAIL(BL_EINPUT, "pre_tokenizer: %.80s after ByteLevel", type);
    if (steps->n_splits == BL_MAX_STEPS)
        return BL_FAIL(BL_EINPUT, "pre_tokenizer: more than %d steps", BL_MAX_STEPS);
    bl_split *split = &steps->split[steps->n_splits++];
    if (!strcmp(type, "Split")) return load_split(json, split);
    if (!strcmp(type, "Metaspace"))
        return load_metaspace(json, "pre_tokenizer Metaspace", &split->metaspace, &split->scheme,
                              &split->at_metaspace);
    if (strcmp(type, "ByteLevel"))
        return BL_FAIL(BL_EINPUT, "pre_tokenizer: type %.80s is not supported", type);
    BL_TRY(bl_tokenizer_check_keys(json, where,
                                   known)); /* trim_offsets: offsets are not computed here */
    BL_TRY(bl_json_get_bool(where, json, "add_prefix_space", BL_JSON_REQUIRED,
                            &split->add_prefix_space));
    BL_TRY(bl_json_get_bool(where, json, "use_regex", BL_JSON_OPTIONAL, &use_regex));
    tokenizer->bpe.byte_level = true;
    return use_regex ? bl_regex_compile(GPT2_REGEX, &split->regex) : BL_OK;
}

/* ---- post-processor ---- */

/* Appends the ids of special_tokens[name] of a template. */
static bl_status push_template_ids(const json_t *specials, const char *name,
                                   bl_tokenizer *tokenizer, bl_ids *out)
{
    static const char where[] = "post_processor TemplateProcessing";
    const json_t *entry = json_object_get(specials, name), *ids = NULL, *id;
    size_t i;

    if (!json_is_object(entry))
        return BL_FAIL(BL_EINPUT, "%s: special_tokens lacks %.80s", where, name);
    BL_TRY(bl_json_get_array(where, entry, "ids", BL_JSON_REQUIRED, &ids));
    json_array_foreach((json_t *)ids, i, id)
    {
        json_int_t value = json_integer_value(id);
        if (!json_is_integer(id) || value < 0 || value >= BL_VOCAB_MAX_IDS ||
            !bl_tokenizer_id_to_token(tokenizer, (int32_t)value))
            return BL_FAIL(BL_EINPUT, "%s: special token %.80s has an id outside the vocabulary",
                           where, name);
        BL_TRY(bl_ids_push(out, (int32_t)value));
    }
    return BL_OK;
}

static bl_status load_post_processor(const json_t *json, const char *type, bl_tokenizer *tokenizer)
{
    static const char *const known[] = {"type", "single", "pair", "special_tokens", NULL};
    static const char where[] = "post_processor TemplateProcessing";
    const json_t *single, *specials, *item;
    bool seen_text = false;
    size_t i;

    if (!strcmp(type, "ByteLevel")) return BL_OK; /* trims offsets, which are not computed here */
    if (strcmp(type, "TemplateProcessing"))
        return BL_FAIL(BL_EINPUT, "post_processor: type %.80s is not supported", type);
    if (tokenizer->prefix.n || tokenizer->suffix.n)
        return BL_FAIL(BL_EINPUT, "post_processor: more than one template");
    BL_TRY(bl_tokenizer_check_keys(json, where, known));
    BL_TRY(bl_json_get_array(where, json, "single", BL_JSON_REQUIRED, &single));
    BL_TRY(bl_json_get_object(where, json, "special_tokens", BL_JSON_REQUIRED, &specials));
    json_array_foreach((json_t *)single, i, item)
    {
        const json_t *special = json_object_get(item, "SpecialToken"),
                     *sequence = json_object_get(item, "Sequence");
        const char *name = "";
        if (json_is_object(special)) {
            BL_TRY(bl_json_get_string(where, special, "id", BL_JSON_REQUIRED, &name));
            BL_TRY(push_template_ids(specials, name, tokenizer,
                                     seen_text ? &tokenizer->suffix : &tokenizer->prefix));
            continue;
        }
        if (!json_is_object(sequence))
            return BL_FAIL(BL_EINPUT, "%s: an item that is no SpecialToken or Sequence", where);
        BL_TRY(bl_json_get_string(where, sequence, "id", BL_JSON_REQUIRED, &name));
        if (seen_text || strcmp(name, "A"))
            return BL_FAIL(BL_EINPUT, "%s: \"single\" must hold Sequence A once", where);
        seen_text = true;
    }
    return seen_text ? BL_OK : BL_FAIL(BL_EINPUT, "%s: \"single\" lacks Sequence A", where);
}

/* ---- decoder ---- */

static bl_status load_strip(const json_t *json, bl_decoder_step *step)
{
    static const char *const known[] = {"type", "content", "start", "stop", NULL};
    static const char where[] = "decoder Strip";

    BL_TRY(bl_tokenizer_check_keys(json, where, known));
    BL_TRY(load_character(json, where, "content", &step->content));
    BL_TRY(bl_json_get_int(where, json, "start", BL_JSON_REQUIRED, 0, INT32_MAX, &step->n_start));
    return bl_json_get_int(where, json, "stop", BL_JSON_REQUIRED, 0, INT32_MAX, &step->n_stop);
}

static bl_status load_decoder(const json_t *json, const char *type, bl_tokenizer *tokenizer)
{
    static const char *const known_byte_level[] = {"type", "add_prefix_space", "trim_offsets",
                                                   "use_regex", NULL};
    static const char *const known_plain[] = {"type", NULL};

    if (tokenizer->n_decoders == BL_MAX_STEPS)
        return BL_FAIL(BL_EINPUT, "decoder: more than %d steps", BL_MAX_STEPS);
    bl_decoder_step *step = &tokenizer->decoder[tokenizer->n_decoders++];
    if (!strcmp(type, "ByteLevel")) {
        step->kind = BL_DECODE_BYTE_LEVEL;
        return bl_tokenizer_check_keys(json, "decoder ByteLevel", known_byte_level);
    }
    if (!strcmp(type, "Replace")) {
        step->kind = BL_DECODE_REPLACE;
        return load_replace(json, "decoder Replace", &step->pattern, &step->content);
    }
    if (!strcmp(type, "Strip")) {
        step->kind = BL_DECODE_STRIP;
        return load_strip(json, step);
    }
    if (!strcmp(type, "Metaspace")) {
        bl_prepend_scheme scheme = BL_PREPEND_ALWAYS;
        bool split;
        step->kind = BL_DECODE_METASPACE;
        BL_TRY(load_metaspace(json, "decoder Metaspace", &step->content, &scheme, &split));
        step->drops_first = scheme != BL_PREPEND_NEVER;
        return BL_OK;
    }
    if (!strcmp(type, "ByteFallback") || !strcmp(type, "Fuse")) {
        step->kind = *type == 'F' ? BL_DECODE_FUSE : BL_DECODE_BYTE_FALLBACK;
        return bl_tokenizer_check_keys(json, type, known_plain);
    }
    return BL_FAIL(BL_EINPUT, "decoder: type %.80s is not supported", type);
}

/* ---- the file ---- */

static bl_status load_components(const json_t *root, bl_tokenizer *tokenizer)
{
    static const char *const known[] = {
        "version",       "truncation",     "padding", "added_tokens", "normalizer",
        "pre_tokenizer", "post_processor", "decoder", "model",        NULL};
    const json_t *decoder = json_object_get(root, "decoder");

    BL_TRY(bl_tokenizer_check_keys(root, "tokenizer", known));
    BL_TRY(load_sequence(json_object_get(root, "normalizer"), "normalizer", "normalizers",
                         load_normalizer, tokenizer));
    BL_TRY(load_sequence(json_object_get(root, "pre_tokenizer"), "pre_tokenizer", "pretokenizers",
                         load_pre_tokenizer, tokenizer));
    BL_TRY(bl_tokenizer_load_model(json_object_get(root, "model"), &tokenizer->bpe));
    BL_TRY(bl_tokenizer_load_added(json_object_get(root, "added_tokens"), tokenizer));
    BL_TRY(load_sequence(json_object_get(root, "post_processor"), "post_processor", "processors",
                         load_post_processor, tokenizer));
    tokenizer->has_decoder = decoder && !json_is_null(decoder);
    BL_TRY(load_sequence(decoder, "decoder", "decoders", load_decoder, tokenizer));
    bl_tokenizer_find_cut(tokenizer);
    return BL_OK;
}

/* The tokenizer.json that `path` is or holds, and the folder it lies in. */
static bl_status find_files(const char *path, char **folder, char **file)
{
    bool is_folder;

    BL_TRY(bl_hub_check_json(path, "tokenizer.json", &is_folder));
    if (is_folder) {
        BL_TRY(duplicate(path, folder));
        return bl_path_join(path, "tokenizer.json", file);
    }
    BL_TRY(duplicate(path, file));
    BL_TRY(duplicate(path, folder));
    char *slash = strrchr(*folder, '/');
    if (!slash)
        strcpy(*folder, *path ? "." : "");
    else if (slash == *folder)
        slash[1] = '\0';
    else
        *slash = '\0';
    return BL_OK;
}

static bl_status create_pool(bl_context_pool **out)
{
    if (!(*out = calloc(1, sizeof **out)) || pthread_mutex_init(&(*out)->mutex, NULL)) {
        free(*out);
        *out = NULL;
        return BL_FAIL(BL_ENOMEM, "tokenizer");
    }
    return BL_OK;
}

bl_status bl_tokenizer_load(const char *path, bl_tokenizer **out)
{
    char *folder = NULL, *file = NULL;
    json_t *root = NULL;
    bl_status st = BL_OK;

    *out = NULL;
    bl_tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (!tokenizer) return BL_FAIL(BL_ENOMEM, "tokenizer");
    tokenizer->bos = -1;
    BL_TRY_GOTO(st, done, create_pool(&tokenizer->pool));
    BL_TRY_GOTO(st, done, find_files(path, &folder, &file));
    BL_TRY_GOTO(st, done, bl_json_load(file, MAX_FILE_BYTES, &root));
    if ((st = load_components(root, tokenizer)) != BL_OK) {
        bl_error_prefix(st, "%s", file);
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_tokenizer_load_special_ids(folder, tokenizer));
    *out = tokenizer;
    tokenizer = NULL;
done:
    json_decref(root);
    free(folder);
    free(file);
    bl_tokenizer_destroy(tokenizer);
    return st;
}
