/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the vocabulary, the merges, the added tokens, and which ids begin and end a text. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "tokenizer/internal.h"

/* ---- vocabulary ---- */

static bl_status load_vocab(const json_t *vocab, bl_bpe *bpe)
{
    const char *token;
    const json_t *value;
    size_t n_bytes;
    bl_bytes raw = {0};
    bl_status st = BL_OK;
    bool in_alphabet = true;

    json_object_keylen_foreach((json_t *)vocab, token, n_bytes, value)
    {
        json_int_t id = json_integer_value(value);
        if (!json_is_integer(value) || id < 0 || id >= BL_VOCAB_MAX_IDS) {
            char key[96], expected[32];
            snprintf(key, sizeof key, "vocab, token %.80s", token);
            snprintf(expected, sizeof expected, "an id in [0, %d]", BL_VOCAB_MAX_IDS - 1);
            st = bl_json_fail("model", key, expected, value);
            goto done;
        }
        const char *taken = bl_strings_get(&bpe->text, (int32_t)id, NULL);
        if (taken) {
            st = BL_FAIL(BL_EINPUT,
                         "model: vocab: tokens %.80s and %.80s share id %" JSON_INTEGER_FORMAT,
                         taken, token, id);
            goto done;
        }
        BL_TRY_GOTO(st, done, bl_strings_set(&bpe->text, (int32_t)id, token, n_bytes));
        raw.n = 0;
        if (bpe->byte_level)
            BL_TRY_GOTO(st, done,
                        bl_bytes_append_from_alphabet(&raw, token, n_bytes, &in_alphabet));
        else
            BL_TRY_GOTO(st, done, bl_bytes_append(&raw, token, n_bytes));
        if (in_alphabet)
            BL_TRY_GOTO(st, done,
                        bl_strings_set(&bpe->piece, (int32_t)id, raw.data ? raw.data : "", raw.n));
    }
done:
    bl_bytes_free(&raw);
    return st;
}

static void find_byte_tokens(bl_bpe *bpe)
{
    for (int byte = 0; byte < 256; byte++) {
        char name[8], self = (char)byte;
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)byte);
        bpe->byte_token[byte] = bl_strings_find(&bpe->piece, name, 6);
        bpe->byte_symbol[byte] =
            byte < 0x80 || bpe->byte_level ? bl_strings_find(&bpe->piece, &self, 1) : -1;
    }
}

/* ---- merges ---- */

/* The two halves of one entry, "a b" or ["a", "b"]. */
static bool merge_halves(const json_t *entry, const char *half[2], size_t n_bytes[2])
{
    if (json_is_string(entry)) {
        const char *text = json_string_value(entry),
                   *space = memchr(text, ' ', json_string_length(entry));
        if (!space) return false;
        half[0] = text;
        n_bytes[0] = (size_t)(space - text);
        half[1] = space + 1;
        n_bytes[1] = json_string_length(entry) - n_bytes[0] - 1;
        return !memchr(half[1], ' ', n_bytes[1]);
    }
    if (json_array_size(entry) != 2) return false;
    for (size_t i = 0; i < 2; i++) {
        const json_t *text = json_array_get(entry, i);
        if (!json_is_string(text)) return false;
        half[i] = json_string_value(text);
        n_bytes[i] = json_string_length(text);
    }
    return true;
}

static bl_status load_merges(const json_t *list, bl_bpe *bpe)
{
    bl_bytes joined = {0};
    bl_status st;
    size_t i;
    uint32_t rank = 0;
    const json_t *entry;

    BL_TRY_GOTO(st, done, bl_merges_create(&bpe->merges, json_array_size(list)));
    json_array_foreach((json_t *)list, i, entry)
    {
        const char *half[2];
        size_t n_bytes[2];
        if (json_is_string(entry) && !strncmp(json_string_value(entry), "#version", 8)) continue;
        if (!merge_halves(entry, half, n_bytes)) {
            st = BL_FAIL(BL_EINPUT,
                         "model: merges[%zu]: expected \"left right\" or [\"left\", \"right\"]", i);
            goto done;
        }
        joined.n = 0;
        BL_TRY_GOTO(st, done, bl_bytes_append(&joined, half[0], n_bytes[0]));
        BL_TRY_GOTO(st, done, bl_bytes_append(&joined, half[1], n_bytes[1]));
        int32_t left = bl_strings_find(&bpe->text, half[0], n_bytes[0]);
        int32_t right = bl_strings_find(&bpe->text, half[1], n_bytes[1]);
        int32_t id = bl_strings_find(&bpe->text, joined.data, joined.n);
        if (left < 0 || right < 0 || id < 0) {
            st = BL_FAIL(
                BL_EINPUT,
                "model: merges[%zu]: %.*s and %.*s, or what they make, is not in the vocabulary", i,
                (int)(n_bytes[0] < 80 ? n_bytes[0] : 80), half[0],
                (int)(n_bytes[1] < 80 ? n_bytes[1] : 80), half[1]);
            goto done;
        }
        bl_merges_set(&bpe->merges, left, right, rank++, id);
    }
done:
    bl_bytes_free(&joined);
    return st;
}

/* ---- model ---- */

static bl_status check_unsupported(const json_t *model)
{
    static const char *const affixes[] = {"continuing_subword_prefix", "end_of_word_suffix"};

    for (size_t i = 0; i < 2; i++) {
        const char *text = "";
        BL_TRY(bl_json_get_string("model", model, affixes[i], BL_JSON_OPTIONAL, &text));
        if (*text)
            return BL_FAIL(BL_EINPUT, "model: %s \"%.40s\" is not supported", affixes[i], text);
    }
    const json_t *dropout = json_object_get(model, "dropout");
    if (dropout && !json_is_null(dropout) && json_number_value(dropout) != 0)
        return BL_FAIL(BL_EINPUT, "model: dropout is not supported");
    return BL_OK;
}

bl_status bl_tokenizer_load_model(const json_t *model, bl_bpe *bpe)
{
    static const char *const known[] = {"type",
                                        "dropout",
                                        "unk_token",
                                        "continuing_subword_prefix",
                                        "fuse_unk",
                                        "byte_fallback",
                                        "ignore_merges",
                                        "end_of_word_suffix",
                                        "vocab",
                                        "merges",
                                        NULL};
    const char *type = "BPE", *unk = NULL;
    const json_t *vocab, *merges;

    BL_TRY(bl_json_check_object("model", model));
    BL_TRY(bl_json_get_string("model", model, "type", BL_JSON_OPTIONAL, &type));
    if (strcmp(type, "BPE")) return BL_FAIL(BL_EINPUT, "model: type %.80s is not supported", type);
    BL_TRY(bl_tokenizer_check_keys(model, "model", known));
    BL_TRY(check_unsupported(model));
    BL_TRY(bl_json_get_bool("model", model, "fuse_unk", BL_JSON_OPTIONAL, &bpe->fuse_unk));
    BL_TRY(
        bl_json_get_bool("model", model, "byte_fallback", BL_JSON_OPTIONAL, &bpe->byte_fallback));
    BL_TRY(
        bl_json_get_bool("model", model, "ignore_merges", BL_JSON_OPTIONAL, &bpe->ignore_merges));
    BL_TRY(bl_json_get_object("model", model, "vocab", BL_JSON_REQUIRED, &vocab));
    BL_TRY(bl_json_get_array("model", model, "merges", BL_JSON_REQUIRED, &merges));
    BL_TRY(load_vocab(vocab, bpe));
    find_byte_tokens(bpe);
    BL_TRY(load_merges(merges, bpe));

    bpe->unk = -1;
    BL_TRY(bl_json_get_string("model", model, "unk_token", BL_JSON_OPTIONAL, &unk));
    if (unk && (bpe->unk = bl_strings_find(&bpe->text, unk, strlen(unk))) < 0)
        return BL_FAIL(BL_EINPUT, "model: unk_token %.80s is not in the vocabulary", unk);
    if (bpe->byte_level && bpe->byte_fallback)
        for (int byte = 0; byte < 256; byte++)
            if (bpe->byte_symbol[byte] < 0)
                return BL_FAIL(
                    BL_EINPUT,
                    "model: byte_fallback with a ByteLevel vocabulary that lacks byte 0x%02X",
                    (unsigned)byte);
    return BL_OK;
}

/* ---- added tokens ---- */

static bl_status read_added(const json_t *entry, const char *where, bl_added_token *token,
                            const char **content)
{
    static const char *const known[] = {"id",     "content",    "single_word", "lstrip",
                                        "rstrip", "normalized", "special",     NULL};
    int64_t id = 0;

    *token = (bl_added_token){0};
    BL_TRY(bl_tokenizer_check_keys(entry, where, known));
    BL_TRY(bl_json_get_int(where, entry, "id", BL_JSON_REQUIRED, 0, BL_VOCAB_MAX_IDS - 1, &id));
    BL_TRY(bl_json_get_string(where, entry, "content", BL_JSON_REQUIRED, content));
    BL_TRY(bl_json_get_bool(where, entry, "single_word", BL_JSON_REQUIRED, &token->single_word));
    BL_TRY(bl_json_get_bool(where, entry, "lstrip", BL_JSON_REQUIRED, &token->lstrip));
    BL_TRY(bl_json_get_bool(where, entry, "rstrip", BL_JSON_REQUIRED, &token->rstrip));
    BL_TRY(bl_json_get_bool(where, entry, "normalized", BL_JSON_REQUIRED, &token->normalized));
    BL_TRY(bl_json_get_bool(where, entry, "special", BL_JSON_REQUIRED, &token->special));
    token->id = (int32_t)id;
    return **content ? BL_OK : BL_FAIL(BL_EINPUT, "%s: content is empty", where);
}

/* HF gives a token its id in the vocabulary, or the next free one, whatever the file says; a file
 * that says otherwise is one whose ids cannot be trusted. */
static bl_status check_added_id(const bl_bpe *bpe, const bl_added_token *token, const char *content,
                                int32_t next_id)
{
    int32_t known = bl_strings_find(&bpe->text, content, strlen(content)),
            expected = known >= 0 ? known : next_id;

    if (token->id == expected) return BL_OK;
    return BL_FAIL(BL_EINPUT,
                   "added_tokens: %.80s has id %" PRId32 ", but the vocabulary makes it %" PRId32,
                   content, token->id, expected);
}

static bl_status add_to_trie(const char *content, int32_t index, bl_tokenizer *tokenizer)
{
    bl_bytes buffers[2] = {0};
    size_t n_bytes = strlen(content);
    bl_status st = BL_OK;

    if (tokenizer->added[index].normalized) {
        BL_TRY_GOTO(st, done, bl_normalize(&tokenizer->steps, false, buffers, &content, &n_bytes));
        if (n_bytes == 0)
            st = BL_FAIL(BL_EINPUT, "added_tokens: %.80s is empty when normalized", content);
        else
            st = bl_trie_add(&tokenizer->normalized_trie, content, n_bytes, index);
    } else {
        st = bl_trie_add(&tokenizer->raw_trie, content, n_bytes, index);
    }
done:
    bl_bytes_free(&buffers[0]);
    bl_bytes_free(&buffers[1]);
    return st;
}

static bl_status load_added(const json_t *list, const char **content, bl_tokenizer *tokenizer)
{
    bl_bpe *bpe = &tokenizer->bpe;
    int32_t n_vocab = (int32_t)bpe->text.n_used, next_id = n_vocab;
    size_t n = json_array_size(list);

    for (size_t i = 0; i < n; i++) {
        bl_added_token *token = &tokenizer->added[i];
        char where[48];
        snprintf(where, sizeof where, "added_tokens[%zu]", i);
        BL_TRY(read_added(json_array_get(list, i), where, token, &content[i]));
        BL_TRY(check_added_id(bpe, token, content[i], next_id));
        for (size_t k = 0; k < i; k++)
            if (tokenizer->added[k].id == token->id)
                return BL_FAIL(BL_EINPUT, "%s: %.80s stands there twice", where, content[i]);
        if (!bl_strings_get(&bpe->text, token->id, NULL))
            BL_TRY(bl_strings_set(&bpe->text, token->id, content[i], strlen(content[i])));
        if (token->id >= n_vocab && token->id >= next_id) next_id = token->id + 1;
    }
    tokenizer->n_added = n;
    if (!(bpe->is_special = calloc(bpe->text.n_ids ? bpe->text.n_ids : 1, sizeof *bpe->is_special)))
        return BL_FAIL(BL_ENOMEM, "vocabulary");
    for (size_t i = 0; i < n; i++)
        bpe->is_special[tokenizer->added[i].id] = tokenizer->added[i].special;
    /* Special ones first: where two normalize to one text, HF's automaton takes the one it was
     * given first. */
    for (int special = 1; special >= 0; special--)
        for (size_t i = 0; i < n; i++)
            if (tokenizer->added[i].special == special)
                BL_TRY(add_to_trie(content[i], (int32_t)i, tokenizer));
    return BL_OK;
}

bl_status bl_tokenizer_load_added(const json_t *list, bl_tokenizer *tokenizer)
{
    size_t n = json_array_size(list);

    if (list && !json_is_null(list) && !json_is_array(list))
        return bl_json_fail("tokenizer", "added_tokens", "an array", list);
    const char **content = calloc(n + 1, sizeof *content);
    tokenizer->added = calloc(n + 1, sizeof *tokenizer->added);
    bl_status st = content && tokenizer->added ? load_added(list, content, tokenizer)
                                               : BL_FAIL(BL_ENOMEM, "added tokens");
    free(content);
    return st;
}

/* ---- where a segment may be cut ---- */

/* What stands for a space in pieces that no pre-tokenizer has cut: the last normalizer's Replace,
 * or a lone Metaspace. */
static const char *space_mark(const bl_steps *steps)
{
    const bl_normalizer_step *last =
        steps->n_normalizers ? &steps->normalizer[steps->n_normalizers - 1] : NULL;

    if (steps->n_splits == 1 && !steps->split[0].at_metaspace) return steps->split[0].metaspace;
    if (steps->n_splits || !last || last->kind != BL_NORM_REPLACE || strcmp(last->pattern, " "))
        return NULL;
    return last->content;
}

/* A segment that is one piece may be cut before each run of the character C that stands for a
 * space, if C is in the vocabulary (so a held-back unk ends there too) and no merge makes a token
 * with C behind another character: then no merge ever joins the two sides, and each side's merges
 * depend on its own symbols only. True of Llama 2; checked, not assumed. */
void bl_tokenizer_find_cut(bl_tokenizer *tokenizer)
{
    const bl_bpe *bpe = &tokenizer->bpe;
    const char *mark = space_mark(&tokenizer->steps);
    size_t length = 0, n_bytes = 0;

    if (!mark || !*mark || bpe->byte_level || bpe->ignore_merges) return;
    bl_utf8_decode(mark, strlen(mark), &length);
    if (mark[length] || bl_strings_find(&bpe->piece, mark, length) < 0) return;
    for (size_t i = 0; i < bpe->merges.n_slots; i++) {
        const bl_merge *merge = &bpe->merges.slot[i];
        if (merge->pair == UINT64_MAX) continue;
        const char *token = bl_strings_get(&bpe->text, merge->id, &n_bytes);
        while (n_bytes >= length && !memcmp(token, mark, length)) {
            token += length;
            n_bytes -= length;
        }
        if (bl_text_find(token, n_bytes, mark, length)) return;
    }
    tokenizer->cut = mark;
}

/* ---- BOS and EOS ---- */

/* The id of "bos_token" or "eos_token", which is a text or {"content": text}; *id stays where it is
 * null or absent. */
static bl_status read_token_name(const char *file, const json_t *config, const char *key,
                                 const bl_tokenizer *tokenizer, int32_t *id)
{
    const json_t *value = json_object_get(config, key);

    if (json_is_object(value)) value = json_object_get(value, "content");
    if (!value || json_is_null(value)) return BL_OK;
    if (!json_is_string(value)) return bl_json_fail(file, key, "a token", value);
    *id =
        bl_strings_find(&tokenizer->bpe.text, json_string_value(value), json_string_length(value));
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

/* tokenizer_config.json's "chat_template": a text, or a list of {"name", "template"}. */
static bl_status read_chat_template(const char *file, const json_t *config, bl_tokenizer *tokenizer)
{
    const json_t *value = json_object_get(config, "chat_template"), *entry;
    size_t i;

    if (json_is_array(value)) {
        const json_t *list = value;
        value = NULL;
        json_array_foreach((json_t *)list, i, entry)
        {
            const char *name = bl_json_text(json_object_get(entry, "name"));
            if (name && !strcmp(name, "default")) value = json_object_get(entry, "template");
        }
    }
    if (!value || json_is_null(value) || tokenizer->chat_template) return BL_OK;
    const char *text = bl_json_text(value);
    if (!text) return bl_json_fail(file, "chat_template", "a text without NUL", value);
    tokenizer->chat_template = strdup(text);
    return tokenizer->chat_template ? BL_OK : BL_FAIL(BL_ENOMEM, "%s", file);
}

static bl_status read_jinja_file(const char *folder, bl_tokenizer *tokenizer)
{
    enum { MAX_JINJA_BYTES = 1 << 20 };
    char *path;
    void *bytes = NULL;
    size_t n_bytes;
    bool exists;

    BL_TRY(bl_path_join(folder, "chat_template.jinja", &path));
    bl_status st = bl_path_exists(path, &exists);
    if (st == BL_OK && exists) st = bl_file_read_all(path, MAX_JINJA_BYTES, &bytes, &n_bytes);
    tokenizer->chat_template = bytes;
    free(path);
    return st;
}

bl_status bl_tokenizer_load_special_ids(const char *folder, bl_tokenizer *tokenizer)
{
    static const char *const id_files[] = {"generation_config.json", "config.json"};
    char *path = NULL;
    json_t *config = NULL;
    int32_t eos = -1;
    bl_status st;

    BL_TRY_GOTO(st, done, read_jinja_file(folder, tokenizer));
    BL_TRY_GOTO(st, done, load_beside(folder, "tokenizer_config.json", &path, &config));
    if (config) {
        BL_TRY_GOTO(st, done, read_chat_template(path, config, tokenizer));
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
