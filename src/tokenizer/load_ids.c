/* SPDX-License-Identifier: Apache-2.0 */
/* Reads which ids begin and end a text from the files beside tokenizer.json. */
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "tokenizer/internal.h"

/* The id of "bos_token" or "eos_token", which is a text or {"content": text}; *id stays where it is
 * null or absent. */
static bl_status read_token_name(const char *file, const json_t *config, const char *key,
                                 const bl_tokenizer *tokenizer, int32_t *id)
{
    const json_t *value = json_object_get(config, key);

    if (json_is_object(value)) value = json_object_get(value, "content");
    if (!value || json_is_null(value)) return BL_OK;
    if (!json_is_string(value)) return bl_json_fail(file, key, "a token", value);
    *id = bl_strings_find(&tokenizer->model.text, json_string_value(value),
                          json_string_length(value));
    return *id >= 0 ? BL_OK : bl_json_fail(file, key, "a token of the vocabulary", value);
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

/* The parsed file `name` of `folder`, or NULL where there is none. *path is the caller's to
 * free. */
static bl_status load_beside(const char *folder, const char *name, char **path, json_t **out)
{
    enum { MAX_CONFIG_BYTES = 64 << 20 };
    bool exists;

    BL_TRY(bl_path_join(folder, name, path));
    BL_TRY(bl_path_exists(*path, &exists));
    if (!exists) return BL_OK;
    BL_TRY(bl_json_load(*path, MAX_CONFIG_BYTES, out));
    return bl_json_check_object(*path, *out);
}

bl_status bl_tokenizer_load_special_ids(const char *folder, bl_tokenizer *tokenizer)
{
    static const char *const id_files[] = {"generation_config.json", "config.json"};
    char *path = NULL;
    json_t *config = NULL;
    int32_t eos = -1;
    bl_status st;

    BL_TRY_GOTO(st, done, bl_tokenizer_read_template_files(folder, tokenizer));
    BL_TRY_GOTO(st, done, load_beside(folder, "tokenizer_config.json", &path, &config));
    if (config) {
        BL_TRY_GOTO(st, done, bl_tokenizer_read_templates(path, config, tokenizer));
        BL_TRY_GOTO(st, done,
                    read_token_name(path, config, "bos_token", tokenizer, &tokenizer->bos));
        BL_TRY_GOTO(st, done, read_token_name(path, config, "eos_token", tokenizer, &eos));
        if (eos >= 0) BL_TRY_GOTO(st, done, push_eos(tokenizer, eos));
    }
    for (size_t i = 0, read = 0; i < 2 && !read; i++) {
        json_decref(config);
        free(path);
        config = NULL;
        path = NULL;
        BL_TRY_GOTO(st, done, load_beside(folder, id_files[i], &path, &config));
        if (config) BL_TRY_GOTO(st, done, read_token_ids(path, config, tokenizer));
        read = config != NULL;
    }
    if (tokenizer->bos < 0 && tokenizer->prefix.n == 1) tokenizer->bos = tokenizer->prefix.id[0];
done:
    json_decref(config);
    free(path);
    return st;
}
