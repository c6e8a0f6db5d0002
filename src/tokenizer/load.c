/* SPDX-License-Identifier: Apache-2.0 */
/* Reads tokenizer.json: the file, its post-processor and decoder. Unsupported parts are rejected by
 * name. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/hub.h"
#include "base/sizes.h"
#include "tokenizer/internal.h"

enum { MAX_FILE_BYTES = 512 << 20 };

bl_status bl_tokenizer_check_keys(const json_t *object, const char *where, const char *keys)
{
    BL_TRY(bl_json_check_object(where, object));
    return bl_keys_check(&(bl_key_table){.accepted = keys}, where, object, NULL);
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

/* A component is one step, or a Sequence of components under `list_key`, or null. */
typedef bl_status load_step_fn(const json_t *step, const char *type, bl_tokenizer *tokenizer);

static bl_status load_sequence(const json_t *component, const char *where, const char *list_key,
                               load_step_fn *load, bl_tokenizer *tokenizer)
{
    char keys[64];
    const char *type;
    const json_t *list, *step;
    size_t i;

    if (!component || json_is_null(component)) return BL_OK;
    BL_TRY(get_type(component, where, &type));
    if (strcmp(type, "Sequence")) return load(component, type, tokenizer);
    snprintf(keys, sizeof keys, "type %s", list_key);
    BL_TRY(bl_tokenizer_check_keys(component, where, keys));
    BL_TRY(bl_json_get_array(where, component, list_key, BL_JSON_REQUIRED, &list));
    json_array_foreach((json_t *)list, i, step)
    {
        BL_TRY(bl_json_check_object(where, step));
        BL_TRY(load_sequence(step, where, list_key, load, tokenizer));
    }
    return BL_OK;
}

/* ---- post-processor ---- */

/* Appends the ids of special_tokens[name] of a template. */
static bl_status push_template_ids(const json_t *specials, const char *name,
                                   bl_tokenizer *tokenizer, bl_ids *out)
{
    enum { MAX_IDS = 4096 };
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
        if (out->n == MAX_IDS)
            return BL_FAIL(BL_EINPUT, "%s: more than %d ids around a text", where, MAX_IDS);
        BL_TRY(bl_ids_push(out, (int32_t)value));
    }
    return BL_OK;
}

static bl_status load_post_processor(const json_t *json, const char *type, bl_tokenizer *tokenizer)
{
    static const char where[] = "post_processor TemplateProcessing";
    const json_t *single, *specials, *item;
    bool seen_text = false;
    size_t i;

    if (!strcmp(type, "ByteLevel")) return BL_OK; /* trims offsets, which are not computed here */
    if (strcmp(type, "TemplateProcessing"))
        return BL_FAIL(BL_EINPUT, "post_processor: type %.80s is not supported", type);
    if (tokenizer->prefix.n || tokenizer->suffix.n)
        return BL_FAIL(BL_EINPUT, "post_processor: more than one template");
    BL_TRY(bl_tokenizer_check_keys(json, where, "type single pair special_tokens"));
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

static bl_status load_decoder_settings(const json_t *json, const char *where, bl_decoder_step *step)
{
    bl_prepend_scheme scheme = BL_PREPEND_ALWAYS;
    bool split;

    switch (step->kind) {
    case BL_DECODE_REPLACE:
        BL_TRY(bl_tokenizer_load_pattern(json, where, &step->pattern));
        return bl_tokenizer_load_string(json, where, "content", &step->content);
    case BL_DECODE_STRIP:
        BL_TRY(bl_tokenizer_load_character(json, where, "content", &step->content));
        BL_TRY(
            bl_json_get_int(where, json, "start", BL_JSON_REQUIRED, 0, INT32_MAX, &step->n_start));
        return bl_json_get_int(where, json, "stop", BL_JSON_REQUIRED, 0, INT32_MAX, &step->n_stop);
    case BL_DECODE_METASPACE:
        BL_TRY(bl_tokenizer_load_metaspace(json, where, &step->content, &scheme, &split));
        step->drops_first = scheme != BL_PREPEND_NEVER;
        return BL_OK;
    case BL_DECODE_BPE:
        step->pattern.kind = BL_PATTERN_STRING;
        BL_TRY(bl_tokenizer_load_string(json, where, "suffix", &step->pattern.string));
        return *step->pattern.string ? BL_OK : BL_FAIL(BL_EINPUT, "%s: suffix is empty", where);
    default:
        return BL_OK;
    }
}

static bl_status load_decoder(const json_t *json, const char *type, bl_tokenizer *tokenizer)
{
    static const struct {
        const char *name, *keys;
        bl_decoder_kind kind;
    } types[] = {
        {"ByteLevel", "type add_prefix_space trim_offsets use_regex", BL_DECODE_BYTE_LEVEL},
        {"Replace", "type pattern content", BL_DECODE_REPLACE},
        {"Strip", "type content start stop", BL_DECODE_STRIP},
        {"Metaspace", BL_METASPACE_KEYS, BL_DECODE_METASPACE},
        {"BPEDecoder", "type suffix", BL_DECODE_BPE},
        {"ByteFallback", "type", BL_DECODE_BYTE_FALLBACK},
        {"Fuse", "type", BL_DECODE_FUSE},
    };
    char where[64];

    if (tokenizer->n_decoders == BL_MAX_STEPS)
        return BL_FAIL(BL_EINPUT, "decoder: more than %d steps", BL_MAX_STEPS);
    bl_decoder_step *step = &tokenizer->decoder[tokenizer->n_decoders++];
    for (size_t i = 0; i < BL_COUNT(types); i++) {
        if (strcmp(type, types[i].name)) continue;
        step->kind = types[i].kind;
        snprintf(where, sizeof where, "decoder %s", type);
        BL_TRY(bl_tokenizer_check_keys(json, where, types[i].keys));
        return load_decoder_settings(json, where, step);
    }
    return BL_FAIL(BL_EINPUT, "decoder: type %.80s is not supported", type);
}

/* ---- the file ---- */

/* A last ByteLevel need not write the byte alphabet: the model may take the bytes. */
static void plan_byte_level(const json_t *model, bl_tokenizer *tokenizer)
{
    bl_steps *steps = &tokenizer->steps;

    for (size_t i = 0; i < steps->n_splits; i++)
        steps->split[i].maps = steps->split[i].is_byte_level;
    if (!steps->n_splits || !bl_tokenizer_model_takes_bytes(model)) return;
    bl_split *last = &steps->split[steps->n_splits - 1];
    tokenizer->model.byte_level = last->is_byte_level;
    last->maps = false;
}

static bl_status load_tokens(const json_t *list, const bl_side_files *side, bl_tokenizer *tokenizer)
{
    json_t *all = NULL;

    if (list && !json_is_null(list) && !json_is_array(list))
        return bl_json_fail("tokenizer", "added_tokens", "an array", list);
    if (json_is_null(list)) list = NULL;
    BL_TRY(bl_tokenizer_declare(side, list, tokenizer, &all));
    bl_status st = bl_tokenizer_load_added(all, tokenizer);
    json_decref(all);
    return st;
}

static bl_status load_components(const json_t *root, const bl_side_files *side,
                                 bl_tokenizer *tokenizer)
{
    static const char *const used[] = {"version",    "padding",       "added_tokens",
                                       "normalizer", "pre_tokenizer", "post_processor",
                                       "decoder",    "model",         NULL};
    /* transformers sets it again at each call; of padding, it keeps pad_token */
    static const char no_effect[] = "truncation";
    static const bl_key_table table = {.used = used, .accepted = no_effect};
    const json_t *decoder = json_object_get(root, "decoder");

    BL_TRY(bl_json_check_object("tokenizer", root));
    BL_TRY(bl_keys_check(&table, "tokenizer", root, NULL));
    BL_TRY(load_sequence(json_object_get(root, "normalizer"), "normalizer", "normalizers",
                         bl_tokenizer_load_normalizer, tokenizer));
    BL_TRY(load_sequence(json_object_get(root, "pre_tokenizer"), "pre_tokenizer", "pretokenizers",
                         bl_tokenizer_load_split, tokenizer));
    BL_TRY(bl_tokenizer_check_steps(&tokenizer->steps));
    plan_byte_level(json_object_get(root, "model"), tokenizer);
    BL_TRY(bl_tokenizer_load_model(json_object_get(root, "model"), &tokenizer->model));
    BL_TRY(load_tokens(json_object_get(root, "added_tokens"), side, tokenizer));
    BL_TRY(load_sequence(json_object_get(root, "post_processor"), "post_processor", "processors",
                         load_post_processor, tokenizer));
    tokenizer->has_decoder = decoder && !json_is_null(decoder);
    BL_TRY(load_sequence(decoder, "decoder", "decoders", load_decoder, tokenizer));
    bl_tokenizer_find_cut(tokenizer);
    return BL_OK;
}

/* `folder` lacks tokenizer.json: names the conversion where it has sentencepiece's file. */
static bl_status check_not_sentencepiece(const char *folder, const char *file)
{
    char *model = NULL;
    bool has_json = true, has_model = false;

    bl_status st = bl_path_join(folder, "tokenizer.model", &model);
    if (st == BL_OK) st = bl_path_exists(file, &has_json);
    if (st == BL_OK && !has_json) st = bl_path_exists(model, &has_model);
    if (st == BL_OK && has_model)
        st = BL_FAIL(BL_EINPUT,
                     "%s: is not read without a tokenizer.json beside it; to write one: python3 -c "
                     "\"from transformers import AutoTokenizer; "
                     "AutoTokenizer.from_pretrained('%s').save_pretrained('%s')\"",
                     model, folder, folder);
    free(model);
    return st;
}

/* The tokenizer.json that `path` is or holds, and its directory. */
static bl_status find_files(const char *path, char **folder, char **file)
{
    bool is_folder;

    BL_TRY(bl_hub_check_json(path, "tokenizer.json", &is_folder));
    if (is_folder) {
        BL_TRY(duplicate(path, folder));
        BL_TRY(bl_path_join(path, "tokenizer.json", file));
        return check_not_sentencepiece(*folder, *file);
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
    bl_side_files side = {0};
    bl_status st = BL_OK;

    *out = NULL;
    bl_tokenizer *tokenizer = calloc(1, sizeof *tokenizer);
    if (!tokenizer) return BL_FAIL(BL_ENOMEM, "tokenizer");
    tokenizer->bos = -1;
    BL_TRY_GOTO(st, done, create_pool(&tokenizer->pool));
    BL_TRY_GOTO(st, done, find_files(path, &folder, &file));
    BL_TRY_GOTO(st, done, bl_json_load(file, MAX_FILE_BYTES, &root));
    BL_TRY_GOTO(st, done, bl_side_files_load(folder, root, &side));
    if ((st = load_components(root, &side, tokenizer)) != BL_OK) {
        bl_error_prefix(st, "%s", file);
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_tokenizer_load_special_ids(folder, &side, tokenizer));
    BL_TRY_GOTO(st, done, bl_side_files_check(&side, tokenizer));
    *out = tokenizer;
    tokenizer = NULL;
done:
    json_decref(root);
    bl_side_files_free(&side);
    free(folder);
    free(file);
    bl_tokenizer_destroy(tokenizer);
    return st;
}
