/* SPDX-License-Identifier: Apache-2.0 */
/* load_ids.c -- reads which ids begin and end a text (BOS, EOS) from the files next to
 * tokenizer.json. */
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/log.h"
#include "tokenizer/internal.h"

/* The id of "bos_token" or "eos_token"; *id stays where none is declared. */
static bl_status read_token_name(const char *folder, const char *key, const bl_tokenizer *tokenizer,
                                 int32_t *id)
{
    const json_t *value = json_object_get(tokenizer->named, key);

    if (!value) return BL_OK;
    *id = bl_strings_find(&tokenizer->model.text, json_string_value(value),
                          json_string_length(value));
    return *id >= 0 ? BL_OK : bl_json_fail(folder, key, "a token of the vocabulary", value);
}

static bl_status push_eos(bl_tokenizer *tokenizer, int32_t id)
{
    for (size_t i = 0; i < tokenizer->eos.n; i++)
        if (tokenizer->eos.id[i] == id) return BL_OK;
    return bl_ids_push(&tokenizer->eos, id);
}

static bl_status check_id(const char *file, const char *key, const json_t *value, int32_t *id)
{
    json_int_t number = json_integer_value(value);

    if (!json_is_integer(value) || number < 0 || number >= BL_VOCAB_MAX_IDS)
        return bl_json_fail(file, key, "a token id", value);
    *id = (int32_t)number;
    return BL_OK;
}

/* generation_config.json's or config.json's bos_token_id (int) and eos_token_id (int or list). */
static bl_status read_token_ids(const char *file, const json_t *config, bl_tokenizer *tokenizer)
{
    const json_t *bos = json_object_get(config, "bos_token_id"),
                 *eos = json_object_get(config, "eos_token_id");
    bool many = json_is_array(eos);
    int32_t id = 0;

    if (tokenizer->bos < 0 && bos && !json_is_null(bos))
        BL_TRY(check_id(file, "bos_token_id", bos, &tokenizer->bos));
    if (!eos || json_is_null(eos)) return BL_OK;
    for (size_t i = 0; i < (many ? json_array_size(eos) : 1); i++) {
        BL_TRY(check_id(file, "eos_token_id", many ? json_array_get(eos, i) : eos, &id));
        BL_TRY(push_eos(tokenizer, id));
    }
    return BL_OK;
}

bl_status bl_tokenizer_load_beside(const char *folder, const char *name, char **path, json_t **out)
{
    enum { MAX_CONFIG_BYTES = 64 << 20 };
    bool exists;

    BL_TRY(bl_path_join(folder, name, path));
    BL_TRY(bl_path_exists(*path, &exists));
    if (!exists) return BL_OK;
    BL_TRY(bl_json_load(*path, MAX_CONFIG_BYTES, out));
    return bl_json_check_object(*path, *out);
}

void bl_tokenizer_warn_unknown(const char *file, const bl_key_names *unknown)
{
    if (unknown->n > 0)
        bl_log_warning("%s: ignored, as no such keys are known: %s", file, unknown->text);
}

bl_status bl_side_files_load(const char *folder, const json_t *root, bl_side_files *out)
{
    const json_t *padding = json_object_get(root, "padding");

    BL_TRY(
        bl_tokenizer_load_beside(folder, "tokenizer_config.json", &out->config_path, &out->config));
    BL_TRY(bl_tokenizer_load_beside(folder, "special_tokens_map.json", &out->map_path, &out->map));
    BL_TRY(bl_tokenizer_load_beside(folder, "added_tokens.json", &out->added_path, &out->added));
    const json_t *decoder = json_object_get(out->config, "added_tokens_decoder");
    out->legacy = !decoder;
    if (bl_json_text(json_object_get(padding, "pad_token")))
        out->pad_token = json_object_get(padding, "pad_token");
    if (decoder && !json_is_object(decoder))
        return bl_json_fail(out->config_path, "added_tokens_decoder", "an object", decoder);
    return BL_OK;
}

void bl_side_files_free(bl_side_files *side)
{
    json_decref(side->config);
    json_decref(side->map);
    json_decref(side->added);
    free(side->config_path);
    free(side->map_path);
    free(side->added_path);
}

static bool is_eos(const bl_tokenizer *tokenizer, const json_t *value)
{
    size_t i = 0;

    while (i < tokenizer->eos.n && tokenizer->eos.id[i] != json_integer_value(value)) i++;
    return !json_is_integer(value) || i < tokenizer->eos.n;
}

/* Warns of ids in `config` that are not used: tokenizer_config.json has another BOS, or
 * generation_config.json other EOS. */
static void name_other_ids(const char *file, const json_t *config, const bl_tokenizer *tokenizer)
{
    const json_t *bos = json_object_get(config, "bos_token_id"),
                 *eos = json_object_get(config, "eos_token_id"), *value;
    bl_key_names names = {0};
    size_t i;

    if (json_is_integer(bos) && json_integer_value(bos) != tokenizer->bos)
        bl_key_names_add(&names, "bos_token_id");
    bool is_used = is_eos(tokenizer, eos);
    json_array_foreach((json_t *)eos, i, value) is_used = is_used && is_eos(tokenizer, value);
    if (!is_used) bl_key_names_add(&names, "eos_token_id");
    if (names.n > 0)
        bl_log_warning("%s: ignored, as tokenizer_config.json and generation_config.json count: %s",
                       file, names.text);
}

bl_status bl_tokenizer_load_special_ids(const char *folder, const bl_side_files *side,
                                        bl_tokenizer *tokenizer)
{
    static const char *const id_files[] = {"generation_config.json", "config.json"};
    char *path = NULL;
    json_t *config = NULL;
    int32_t eos = -1;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_tokenizer_read_template_files(folder, tokenizer));
    if (side->config)
        BL_TRY_GOTO(st, done,
                    bl_tokenizer_read_templates(side->config_path, side->config, tokenizer));
    BL_TRY_GOTO(st, done, read_token_name(folder, "bos_token", tokenizer, &tokenizer->bos));
    BL_TRY_GOTO(st, done, read_token_name(folder, "eos_token", tokenizer, &eos));
    if (eos >= 0) BL_TRY_GOTO(st, done, push_eos(tokenizer, eos));
    for (size_t i = 0, read = 0; i < 2; i++) {
        json_decref(config);
        free(path);
        config = NULL;
        path = NULL;
        BL_TRY_GOTO(st, done, bl_tokenizer_load_beside(folder, id_files[i], &path, &config));
        if (!config) continue;
        if (!read) BL_TRY_GOTO(st, done, read_token_ids(path, config, tokenizer));
        if (i == 0) BL_TRY_GOTO(st, done, bl_generation_config_check(path, config));
        name_other_ids(path, config, tokenizer);
        read = true;
    }
    if (tokenizer->bos < 0 && tokenizer->prefix.n == 1) tokenizer->bos = tokenizer->prefix.id[0];
done:
    json_decref(config);
    free(path);
    return st;
}
