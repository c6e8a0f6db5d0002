/* SPDX-License-Identifier: Apache-2.0 */
/* added.c -- finds added tokens in a text before the model sees it, leftmost-longest
 * (huggingface/tokenizers tokenizer/added_vocabulary.rs), with a trie. */
#include <stdlib.h>

#include "base/deadline.h"
#include "tokenizer/internal.h"

static bl_status new_node(bl_trie *trie, unsigned char byte, int32_t *out)
{
    if (trie->n == trie->capacity) {
        size_t capacity = trie->capacity ? 2 * trie->capacity : 64;
        bl_trie_node *grown = realloc(trie->node, capacity * sizeof *grown);
        if (!grown) return BL_FAIL(BL_ENOMEM, "added tokens: %zu nodes", capacity);
        trie->node = grown;
        trie->capacity = capacity;
    }
    *out = (int32_t)trie->n;
    trie->node[trie->n++] = (bl_trie_node){.token = -1, .byte = byte};
    return BL_OK;
}

int32_t bl_trie_child(const bl_trie *trie, int32_t node, unsigned char byte)
{
    if (node == 0) return trie->first[byte];
    int32_t child = trie->node[node].child;
    while (child && trie->node[child].byte != byte) child = trie->node[child].sibling;
    return child;
}

bl_status bl_trie_add(bl_trie *trie, const char *text, size_t n_bytes, int32_t token)
{
    int32_t node = 0;

    if (n_bytes > BL_TRIE_MAX_BYTES)
        return BL_FAIL(BL_EINPUT, "token %.40s... has %zu bytes, more than %d", text, n_bytes,
                       BL_TRIE_MAX_BYTES);
    if (!trie->n) BL_TRY(new_node(trie, 0, &node));
    for (size_t i = 0; i < n_bytes; i++) {
        int32_t child = bl_trie_child(trie, node, (unsigned char)text[i]);
        if (!child) {
            BL_TRY(new_node(trie, (unsigned char)text[i], &child));
            if (node == 0) {
                trie->first[(unsigned char)text[i]] = child;
            } else {
                trie->node[child].sibling = trie->node[node].child;
                trie->node[node].child = child;
            }
        }
        node = child;
    }
    if (trie->node[node].token < 0) trie->node[node].token = token;
    return BL_OK;
}

/* The longest token that text[0..n_bytes) begins with: its length, or 0. */
static size_t longest_match(const bl_trie *trie, const char *text, size_t n_bytes, int32_t *token)
{
    size_t length = 0;
    int32_t node = 0;

    for (size_t i = 0;
         i < n_bytes && (node = bl_trie_child(trie, node, (unsigned char)text[i])) != 0; i++) {
        if (trie->node[node].token < 0) continue;
        *token = trie->node[node].token;
        length = i + 1;
    }
    return length;
}

static bool stands_alone(const char *text, size_t n_bytes, size_t start, size_t end)
{
    size_t length;
    if (start > 0 && bl_unicode_is_word(bl_utf8_decode_last(text, start, &length))) return false;
    return end == n_bytes ||
           !bl_unicode_is_word(bl_utf8_decode(text + end, n_bytes - end, &length));
}

bool bl_added_next(const bl_trie *trie, const bl_added_token *tokens, bool parse_special,
                   const char *text, size_t n_bytes, size_t *cursor, size_t floor,
                   bl_added_match *out)
{
    enum { LOOK_MATCHES = 1024 };
    double limit_s;

    if (!trie->n) return false;
    for (size_t start = *cursor, looks = 0; start < n_bytes; start++) {
        int32_t index = 0;
        if (!trie->first[(unsigned char)text[start]]) continue;
        size_t found = longest_match(trie, text + start, n_bytes - start, &index), length;
        if (++looks % LOOK_MATCHES == 0 && bl_deadline_is_over(&limit_s)) return false;
        if (!found) continue;
        const bl_added_token *token = &tokens[index];
        size_t end = start + found;
        /* A match that a rule rejects still uses up its text: the search goes on behind it. */
        if ((token->special && !parse_special) ||
            (token->single_word && !stands_alone(text, n_bytes, start, end))) {
            start = end - 1;
            continue;
        }
        *cursor = end;
        if (token->lstrip) {
            while (start > floor && bl_unicode_is_space(bl_utf8_decode_last(text, start, &length)))
                start -= length;
        }
        if (token->rstrip)
            while (end < n_bytes &&
                   bl_unicode_is_space(bl_utf8_decode(text + end, n_bytes - end, &length)))
                end += length;
        *out = (bl_added_match){.start = start, .end = end, .token = token};
        return true;
    }
    return false;
}

void bl_trie_free(bl_trie *trie)
{
    free(trie->node);
    *trie = (bl_trie){0};
}

bool bl_tokenizer_next_special(const bl_tokenizer *tokenizer, const char *text, size_t n_bytes,
                               size_t *cursor, size_t floor, bl_special_match *out)
{
    bl_added_match match;

    while (bl_added_next(&tokenizer->raw_trie, tokenizer->added, true, text, n_bytes, cursor, floor,
                         &match)) {
        if (!match.token->special) continue;
        *out = (bl_special_match){match.start, match.end, match.token->id};
        *cursor = match.end;
        return true;
    }
    return false;
}
