/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the added tokens, and finds out where a segment may be cut. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer/internal.h"

static bl_status read_added(const json_t *entry, const char *where, bl_added_token *token,
                            const char **content)
{
    int64_t id = 0;

    *token = (bl_added_token){0};
    BL_TRY(bl_tokenizer_check_keys(entry, where,
                                   "id content single_word lstrip rstrip normalized special"));
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
static bl_status check_added_id(const bl_model *model, const bl_added_token *token,
                                const char *content, int32_t next_id)
{
    int32_t known = bl_strings_find(&model->text, content, strlen(content)),
            expected = known >= 0 ? known : next_id;

    if (token->id == expected) return BL_OK;
    return BL_FAIL(BL_EINPUT,
                   "added_tokens: %.80s has id %" PRId32 ", but the vocabulary makes it %" PRId32,
                   content, token->id, expected);
}

static bl_status set_decoded(const char *normalized, size_t n_bytes, int32_t id,
                             bl_tokenizer *tokenizer)
{
    size_t n_written = 0;
    const char *written = bl_strings_get(&tokenizer->model.text, id, &n_written);

    if (n_written == n_bytes && !memcmp(written, normalized, n_bytes)) return BL_OK;
    if (!tokenizer->decoded)
        tokenizer->decoded = calloc(tokenizer->model.text.n_ids, sizeof *tokenizer->decoded);
    if (!tokenizer->decoded || !(tokenizer->decoded[id] = strndup(normalized, n_bytes)))
        return BL_FAIL(BL_ENOMEM, "out of memory: added tokens");
    return BL_OK;
}

static bl_status add_to_trie(const char *content, int32_t index, bl_tokenizer *tokenizer)
{
    bl_bytes buffers[2] = {0};
    bl_matcher match = {0};
    size_t n_bytes = strlen(content);
    bl_status st = BL_OK;

    if (tokenizer->added[index].normalized) {
        BL_TRY_GOTO(st, done,
                    bl_normalize(&tokenizer->steps, false, buffers, &match, &content, &n_bytes));
        if (n_bytes == 0)
            st = BL_FAIL(BL_EINPUT, "added_tokens: %.80s is empty when normalized", content);
        else
            st = bl_trie_add(&tokenizer->normalized_trie, content, n_bytes, index);
        if (st == BL_OK) st = set_decoded(content, n_bytes, tokenizer->added[index].id, tokenizer);
    } else {
        st = bl_trie_add(&tokenizer->raw_trie, content, n_bytes, index);
    }
done:
    bl_bytes_free(&buffers[0]);
    bl_bytes_free(&buffers[1]);
    bl_matcher_free(&match);
    return st;
}

/* content[n], seen by id: zeros. */
static bl_status load_added(const json_t *list, const char **content, bool *seen,
                            bl_tokenizer *tokenizer)
{
    bl_model *model = &tokenizer->model;
    int32_t n_vocab = (int32_t)model->text.n_used, next_id = n_vocab;
    size_t n = json_array_size(list);

    for (size_t i = 0; i < n; i++) {
        bl_added_token *token = &tokenizer->added[i];
        char where[48];
        snprintf(where, sizeof where, "added_tokens[%zu]", i);
        BL_TRY(read_added(json_array_get(list, i), where, token, &content[i]));
        BL_TRY(check_added_id(model, token, content[i], next_id));
        if (seen[token->id])
            return BL_FAIL(BL_EINPUT, "%s: %.80s is listed twice", where, content[i]);
        seen[token->id] = true;
        if (!bl_strings_get(&model->text, token->id, NULL))
            BL_TRY(bl_strings_set(&model->text, token->id, content[i], strlen(content[i])));
        if (token->id >= n_vocab && token->id >= next_id) next_id = token->id + 1;
    }
    tokenizer->n_added = n;
    if (!(model->is_special =
              calloc(model->text.n_ids ? model->text.n_ids : 1, sizeof *model->is_special)))
        return BL_FAIL(BL_ENOMEM, "vocabulary");
    for (size_t i = 0; i < n; i++)
        model->is_special[tokenizer->added[i].id] = tokenizer->added[i].special;
    /* Special ones first: where two normalize to one text, HF's automaton takes the earlier
     * one. */
    for (int special = 1; special >= 0; special--)
        for (size_t i = 0; i < n; i++)
            if (tokenizer->added[i].special == special)
                BL_TRY(add_to_trie(content[i], (int32_t)i, tokenizer));
    return BL_OK;
}

bl_status bl_tokenizer_load_added(const json_t *list, bl_tokenizer *tokenizer)
{
    size_t n = json_array_size(list);
    const char **content = calloc(n + 1, sizeof *content);
    tokenizer->added = calloc(n + 1, sizeof *tokenizer->added);
    /* An accepted id is the vocabulary's or the next free one: check_added_id. */
    const bl_strings *text = &tokenizer->model.text;
    bool *seen = calloc(text->n_ids + text->n_used + n + 1, sizeof *seen);
    bl_status st = content && seen && tokenizer->added ? load_added(list, content, seen, tokenizer)
                                                       : BL_FAIL(BL_ENOMEM, "added tokens");
    free(content);
    free(seen);
    return st;
}

/* ---- where a segment may be cut ---- */

/* Whether the pre-tokenizer leaves segments whole: it has no step, or, as Gemma's, one that splits
 * at a character which the last normalizer has replaced. */
static bool leaves_segments_whole(const bl_steps *steps, const bl_normalizer_step *last)
{
    const bl_split *split = &steps->split[0];

    if (!steps->n_splits) return true;
    return steps->n_splits == 1 && split->pattern.kind == BL_PATTERN_STRING &&
           !strcmp(split->pattern.string, last->pattern.string) && !strstr(last->content, " ") &&
           !split->invert;
}

/* The replacement of a space in pieces that no pre-tokenizer has cut: the last normalizer's
 * Replace, or a lone Metaspace. */
static const char *space_mark(const bl_steps *steps)
{
    const bl_normalizer_step *last =
        steps->n_normalizers ? &steps->normalizer[steps->n_normalizers - 1] : NULL;

    if (steps->n_splits == 1 && steps->split[0].metaspace && !steps->split[0].at_metaspace)
        return steps->split[0].metaspace;
    if (!last || last->kind != BL_NORM_REPLACE || last->pattern.kind != BL_PATTERN_STRING ||
        strcmp(last->pattern.string, " "))
        return NULL;
    return leaves_segments_whole(steps, last) ? last->content : NULL;
}

/* A segment that is one piece may be cut before each run of the character C that replaces a
 * space, if C is in the vocabulary (so a held-back unk ends there too) and no merge makes a token
 * with C behind another character: then no merge ever joins the two sides, and each side's merges
 * depend on its own symbols only. True of Llama 2; checked, not assumed. */
void bl_tokenizer_find_cut(bl_tokenizer *tokenizer)
{
    const bl_model *model = &tokenizer->model;
    const char *mark = space_mark(&tokenizer->steps);
    size_t length = 0, n_bytes = 0;

    if (!mark || !*mark || model->kind != BL_MODEL_BPE || model->byte_level ||
        model->ignore_merges || model->prefix || model->suffix)
        return;
    bl_utf8_decode(mark, strlen(mark), &length);
    if (mark[length] || bl_strings_find(&model->piece, mark, length) < 0) return;
    for (size_t i = 0; i < model->merges.n_slots; i++) {
        const bl_merge *merge = &model->merges.slot[i];
        if (merge->pair == UINT64_MAX) continue;
        const char *token = bl_strings_get(&model->text, merge->id, &n_bytes);
        while (n_bytes >= length && !memcmp(token, mark, length)) {
            token += length;
            n_bytes -= length;
        }
        if (bl_text_find(token, n_bytes, mark, length)) return;
    }
    tokenizer->cut = mark;
}
