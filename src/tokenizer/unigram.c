/* SPDX-License-Identifier: Apache-2.0 */
/* Unigram: the segmentation of a piece whose tokens' scores have the largest sum (Kudo 2018,
 * arXiv:1804.10959, as huggingface/tokenizers models/unigram does it: Viterbi from left to right,
 * the first of equal sums stays). A character without a token is unknown, at the lowest score of
 * the vocabulary less 10; a run of unknown characters is one unknown token. */
#include <stdlib.h>

#include "base/deadline.h"
#include "base/sizes.h"
#include "tokenizer/internal.h"

enum { NO_PATH = -1 };

static bl_status reserve(bl_model_scratch *scratch, size_t n_nodes)
{
    size_t capacity = n_nodes + n_nodes / 2 + 64, n_bytes;

    if (n_nodes <= scratch->path_capacity) return BL_OK;
    bl_path_node *grown = bl_mul_overflows(capacity, sizeof *grown, &n_bytes)
                              ? NULL
                              : realloc(scratch->path, n_bytes);
    if (!grown)
        return BL_FAIL(BL_ENOMEM, "out of memory: paths through a text of %zu bytes", n_nodes - 1);
    scratch->path = grown;
    scratch->path_capacity = capacity;
    return BL_OK;
}

static void offer(bl_path_node *node, double score, size_t start, int32_t id)
{
    if (node->start != NO_PATH && score <= node->score) return;
    node->score = score;
    node->start = (int32_t)start;
    node->id = id;
}

/* Offers each token that begins at `start` to the node where it ends. */
static void offer_tokens(const bl_model *model, bl_path_node *path, const char *text,
                         size_t n_bytes, size_t start, bool parse_special, bool *met_special)
{
    size_t length;
    bool has_character = false;
    double score = path[start].score;
    int32_t node = 0;

    bl_utf8_decode(text + start, n_bytes - start, &length);
    for (size_t end = start + 1; end <= n_bytes; end++) {
        node = bl_trie_child(&model->trie, node, (unsigned char)text[end - 1]);
        if (!node) break;
        int32_t id = model->trie.node[node].token;
        if (id < 0) continue;
        /* A special token's text becomes the token only where the caller asks for it. */
        if (model->is_special[id]) {
            *met_special = true;
            if (!parse_special) continue;
        }
        offer(&path[end], model->score[id] + score, start, id);
        has_character = has_character || end == start + length;
    }
    if (!has_character) offer(&path[start + length], model->unk_score + score, start, model->unk);
}

/* Links the nodes of the best path forward. False: it has an unknown token and the model none. */
static bool link_path(bl_path_node *path, size_t n_bytes)
{
    for (int32_t end = (int32_t)n_bytes; end > 0; end = path[end].start) {
        path[path[end].start].next = end;
        if (path[end].id < 0) return false;
    }
    return true;
}

/* A run of unknown characters: the token that it spells all the same, its bytes, or unk. */
static bl_status push_unknown(const bl_model *model, const char *text, size_t n_bytes,
                              bool parse_special, bl_ids *out)
{
    int32_t id = bl_strings_find(&model->text, text, n_bytes);
    bool has_bytes = model->byte_fallback;

    if (id >= 0 && (size_t)id < model->n_scores && (parse_special || !model->is_special[id]))
        return bl_ids_push(out, id);
    for (size_t i = 0; i < n_bytes && has_bytes; i++)
        has_bytes = model->byte_token[(unsigned char)text[i]] >= 0;
    if (!has_bytes) return bl_ids_push(out, model->unk);
    for (size_t i = 0; i < n_bytes; i++)
        BL_TRY(bl_ids_push(out, model->byte_token[(unsigned char)text[i]]));
    return BL_OK;
}

bl_status bl_unigram_encode(const bl_model *model, bl_model_scratch *scratch, const char *text,
                            size_t n_bytes, bool parse_special, bool *met_special, bl_ids *out)
{
    enum { LOOK_CHARACTERS = 1024 };
    size_t length;
    double limit_s;

    BL_TRY(reserve(scratch, n_bytes + 1));
    bl_path_node *path = scratch->path;
    for (size_t i = 0; i <= n_bytes; i++) path[i] = (bl_path_node){.start = i ? NO_PATH : 0};
    for (size_t i = 0, n = 0; i < n_bytes; i += length) {
        bl_utf8_decode(text + i, n_bytes - i, &length);
        if (++n % LOOK_CHARACTERS == 0 && bl_deadline_is_over(&limit_s))
            return BL_FAIL(BL_EINPUT, "tokenizer: more than %.0f s for a text", limit_s);
        offer_tokens(model, path, text, n_bytes, i, parse_special, met_special);
    }
    if (!link_path(path, n_bytes))
        return BL_FAIL(BL_EINPUT, "the tokenizer has no token for a character of the text, and no "
                                  "unk_id");
    for (int32_t start = 0, end; start < (int32_t)n_bytes; start = end) {
        end = path[start].next;
        if (path[end].id != model->unk) {
            BL_TRY(bl_ids_push(out, path[end].id));
            continue;
        }
        while (end < (int32_t)n_bytes && path[path[end].next].id == model->unk)
            end = path[end].next;
        BL_TRY(push_unknown(model, text + start, (size_t)(end - start), parse_special, out));
    }
    return BL_OK;
}
