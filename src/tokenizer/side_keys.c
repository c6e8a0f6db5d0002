/* SPDX-License-Identifier: Apache-2.0 */
/* side_keys.c -- the keys of tokenizer_config.json and special_tokens_map.json (transformers 5.24,
 * and 4). A warning names those that contradict tokenizer.json or the other file. */
#include <string.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "tokenizer/internal.h"

static const char *const used_keys[] = {"added_tokens_decoder", "additional_special_tokens",
                                        "extra_special_tokens", "model_specific_special_tokens",
                                        "chat_template",        NULL};

static const bl_known_key config_keys[] = {{"split_special_tokens", BL_KEY_REJECTED, "[false]",
                                            "special tokens of a chat template would become text"}};

static const char no_effect[] =
    /* transformers drops them where there is a tokenizer.json */
    "add_bos_token add_eos_token vocab_file merges_file tokenizer_file special_tokens_map_file "
    "vocab_size use_fast from_slow legacy response_schema "
    /* which code reads the files: tokenizer.json states the steps */
    "tokenizer_class processor_class auto_map backend name_or_path is_local local_files_only "
    /* offsets are not computed */
    "trim_offsets "
    /* of tokenizers without a tokenizer.json: decoding, and templates before transformers 4.44 */
    "errors spaces_between_special_tokens use_default_system_prompt "
    /* of calls that cut or pad texts: max_seq_length and overlong do so here */
    "max_length model_max_length stride truncation_side truncation_strategy padding_side "
    "pad_to_multiple_of pad_token_type_id model_input_names";

/* ---- what tokenizer.json states ---- */

static bool has_normalizer(const bl_tokenizer *t, bl_normalizer_kind kind)
{
    for (size_t i = 0; i < t->steps.n_normalizers; i++)
        if (t->steps.normalizer[i].kind == kind) return true;
    return false;
}

static bool adds_space(const bl_tokenizer *t)
{
    for (size_t i = 0; i < t->steps.n_splits; i++) {
        const bl_split *split = &t->steps.split[i];
        if (split->add_prefix_space || (split->metaspace && split->scheme != BL_PREPEND_NEVER))
            return true;
    }
    return has_normalizer(t, BL_NORM_PREPEND);
}

/* Whether tokenizer.json decides what `key` states; *differs: otherwise than its value. */
static bool is_decided(const bl_tokenizer *t, const char *key, const json_t *value, bool *differs)
{
    bool is_on = json_is_true(value), is_set = value && !json_is_null(value), on;

    if (!strcmp(key, "add_prefix_space"))
        on = adds_space(t);
    else if (!strcmp(key, "do_lower_case"))
        on = has_normalizer(t, BL_NORM_LOWERCASE);
    else if (!strcmp(key, "strip_accents"))
        on = has_normalizer(t, BL_NORM_STRIP_ACCENTS);
    else if (!strcmp(key, "clean_up_tokenization_spaces")) /* of BPE, transformers ignores it */
        on = is_on && t->model.kind == BL_MODEL_BPE;
    else
        return false;
    *differs = is_set && (!json_is_boolean(value) || is_on != on);
    return true;
}

static void warn_ignored(const char *path, const char *counts, const bl_key_names *names)
{
    if (names->n > 0) bl_log_warning("%s: ignored, as %s counts: %s", path, counts, names->text);
}

/* Whether `key` names a token; its text in *content. */
static bool names_token(const char *key, const json_t *value, const char **content)
{
    *content = bl_tokenizer_content(value);
    return *content && bl_text_ends_with(key, "_token");
}

/* Whether the name `key` has another token than `content`, or none. content NULL: false. */
static bool is_other(const bl_tokenizer *tokenizer, const char *key, const char *content)
{
    const char *used = json_string_value(json_object_get(tokenizer->named, key));
    return content && (!used || strcmp(used, content) != 0);
}

static bl_status check_config(const bl_side_files *side, const bl_tokenizer *tokenizer)
{
    static const bl_key_table table = {config_keys, BL_COUNT(config_keys), used_keys, no_effect};
    bl_key_names unknown = {0}, decided = {0}, other = {0};
    const char *key, *content;
    json_t *value;
    bool differs;

    json_object_foreach(side->config, key, value)
    {
        if (names_token(key, value, &content)) {
            if (is_other(tokenizer, key, content)) bl_key_names_add(&other, key);
        } else if (is_decided(tokenizer, key, value, &differs)) {
            if (differs) bl_key_names_add(&decided, key);
        } else {
            BL_TRY(bl_key_check(&table, side->config_path, key, value, &unknown));
        }
    }
    bl_tokenizer_warn_unknown(side->config_path, &unknown);
    warn_ignored(side->config_path, "tokenizer.json", &decided);
    warn_ignored(side->config_path, "special_tokens_map.json", &other);
    return BL_OK;
}

/* ---- special_tokens_map.json ---- */

/* Whether a token of the list, or of the object of named ones, is not used. */
static bool has_other(const bl_tokenizer *tokenizer, const json_t *tokens)
{
    const char *key;
    json_t *value;
    size_t i;

    json_object_foreach(
        (json_t *)tokens, key,
        value) if (is_other(tokenizer, key, bl_tokenizer_content(value))) return true;
    json_array_foreach((json_t *)tokens, i, value)
    {
        const char *content = bl_tokenizer_content(value);
        int32_t id = content ? bl_tokenizer_token_to_id(tokenizer, content) : -1;
        size_t a = 0;
        while (a < tokenizer->n_added && tokenizer->added[a].id != id) a++;
        if (id < 0 || a == tokenizer->n_added) return true;
    }
    return false;
}

static bl_status check_map(const bl_side_files *side, const bl_tokenizer *tokenizer)
{
    static const bl_key_table table = {0};
    bl_key_names unknown = {0}, other = {0};
    const char *key, *content;
    json_t *value;

    json_object_foreach(side->map, key, value)
    {
        bool is_list = bl_text_ends_with(key, "_special_tokens") &&
                       (json_is_array(value) || json_is_object(value));
        if (is_list ? has_other(tokenizer, value)
                    : names_token(key, value, &content) && is_other(tokenizer, key, content))
            bl_key_names_add(&other, key);
        else if (!is_list && !names_token(key, value, &content))
            BL_TRY(bl_key_check(&table, side->map_path, key, value, &unknown));
    }
    bl_tokenizer_warn_unknown(side->map_path, &unknown);
    warn_ignored(side->map_path, "tokenizer_config.json", &other);
    return BL_OK;
}

bl_status bl_side_files_check(const bl_side_files *side, const bl_tokenizer *tokenizer)
{
    BL_TRY(check_config(side, tokenizer));
    return check_map(side, tokenizer);
}
