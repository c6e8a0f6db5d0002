/* SPDX-License-Identifier: Apache-2.0 */
/* Byte-pair encoding of one piece of text (Sennrich et al. 2016, arXiv:1508.07909, as
 * huggingface/tokenizers models/bpe does it).
 *
 * The piece starts as one symbol per character, or per byte. A min-heap on (rank, position)
 * holds the pairs that may merge; a popped pair is stale, and dropped, when its left symbol is gone
 * or the pair there now merges to another token. A merge pushes the two pairs it creates. O(n log
 * n) in the piece's symbols, which matters where a whole document is one piece. */
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "tokenizer/internal.h"

static bl_status reserve(bl_model_scratch *scratch, size_t n_symbols)
{
    if (n_symbols > scratch->symbol_capacity) {
        size_t capacity = n_symbols + n_symbols / 2 + 64;
        bl_symbol *grown = realloc(scratch->symbol, capacity * sizeof *grown);
        if (!grown) return BL_FAIL(BL_ENOMEM, "tokenizer: %zu symbols", capacity);
        scratch->symbol = grown;
        scratch->symbol_capacity = capacity;
    }
    /* n - 1 pairs at first; each of at most n - 1 merges pops one and pushes two. */
    if (2 * n_symbols > scratch->heap_capacity) {
        size_t capacity = 2 * scratch->symbol_capacity;
        bl_candidate *grown = realloc(scratch->heap, capacity * sizeof *grown);
        if (!grown) return BL_FAIL(BL_ENOMEM, "tokenizer: %zu merge candidates", capacity);
        scratch->heap = grown;
        scratch->heap_capacity = capacity;
    }
    return BL_OK;
}

/* ---- the heap ---- */

static bool before(const bl_candidate *a, const bl_candidate *b)
{
    return a->rank != b->rank ? a->rank < b->rank : a->position < b->position;
}

static void heap_push(bl_model_scratch *scratch, bl_candidate candidate)
{
    bl_candidate *heap = scratch->heap;
    size_t i = scratch->n_heap++;

    for (; i > 0 && before(&candidate, &heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = candidate;
}

static bl_candidate heap_pop(bl_model_scratch *scratch)
{
    bl_candidate *heap = scratch->heap, top = heap[0], last = heap[--scratch->n_heap];
    size_t i = 0, child;

    for (; (child = 2 * i + 1) < scratch->n_heap; i = child) {
        if (child + 1 < scratch->n_heap && before(&heap[child + 1], &heap[child])) child++;
        if (!before(&heap[child], &last)) break;
        heap[i] = heap[child];
    }
    heap[i] = last;
    return top;
}

/* ---- symbols ---- */

static void add_symbol(bl_model_scratch *scratch, size_t *n, int32_t id)
{
    int32_t i = (int32_t)(*n)++;
    scratch->symbol[i] = (bl_symbol){.id = id, .prev = i - 1, .next = i + 1};
}

/* Adds the byte tokens of a character, all or none. */
static bool add_byte_tokens(const bl_model *bpe, bl_model_scratch *scratch, size_t *n,
                            const char *text, size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (bpe->byte_token[(unsigned char)text[i]] < 0) return false;
    for (size_t i = 0; i < length; i++)
        add_symbol(scratch, n, bpe->byte_token[(unsigned char)text[i]]);
    return true;
}

/* Bounds the first symbols of a piece: a symbol per byte, those of prefixes and suffix included. */
static bl_status most_symbols(const bl_model *bpe, size_t n_bytes, size_t *out)
{
    size_t n_prefix = bpe->prefix && bpe->byte_fallback ? strlen(bpe->prefix) : 0,
           n_suffix = bpe->suffix && bpe->byte_fallback ? strlen(bpe->suffix) : 0;

    if (bl_mul_overflows(n_bytes, 1 + n_prefix, out) || bl_add_overflows(*out, n_suffix, out) ||
        *out > INT32_MAX)
        return BL_FAIL(BL_EINPUT, "a piece of %zu bytes is too long for the tokenizer", n_bytes);
    return BL_OK;
}

/* What the vocabulary holds for the character at (*text)[0..*n_bytes): the character, with the
 * prefix unless it begins the piece, with the suffix where it ends the piece. */
static bl_status add_affixes(const bl_model *bpe, bl_bytes *key, bool is_first, bool is_last,
                             const char **text, size_t *n_bytes)
{
    key->n = 0;
    if (bpe->prefix && !is_first) BL_TRY(bl_bytes_append(key, bpe->prefix, strlen(bpe->prefix)));
    BL_TRY(bl_bytes_append(key, *text, *n_bytes));
    if (bpe->suffix && is_last) BL_TRY(bl_bytes_append(key, bpe->suffix, strlen(bpe->suffix)));
    *text = key->data;
    *n_bytes = key->n;
    return BL_OK;
}

static int32_t find_symbol(const bl_model *bpe, const char *text, size_t n_bytes)
{
    unsigned char first = (unsigned char)text[0];

    if (n_bytes == 1 && (bpe->byte_level || first < 0x80)) return bpe->byte_symbol[first];
    return bl_strings_find(&bpe->piece, text, n_bytes);
}

/* The first symbols of a piece. A character outside the vocabulary becomes its byte tokens, else
 * unk, else nothing. A held-back unk comes out before the next known character, and so after byte
 * tokens: HF's order. */
static bl_status split_symbols(const bl_model *bpe, bl_model_scratch *scratch, const char *text,
                               size_t n_bytes, size_t *out_n)
{
    size_t n = 0, length;
    bool unk_pending = false, has_affixes = bpe->prefix || bpe->suffix;

    for (size_t i = 0; i < n_bytes; i += length) {
        const char *key = text + i;
        length = 1;
        if (!bpe->byte_level) bl_utf8_decode(key, n_bytes - i, &length);
        size_t n_key = length;
        if (has_affixes)
            BL_TRY(add_affixes(bpe, &scratch->key, !i, i + length == n_bytes, &key, &n_key));
        int32_t id = find_symbol(bpe, key, n_key);
        if (id >= 0) {
            if (unk_pending) add_symbol(scratch, &n, bpe->unk);
            unk_pending = false;
            add_symbol(scratch, &n, id);
        } else if (!bpe->byte_fallback || !add_byte_tokens(bpe, scratch, &n, key, n_key)) {
            if (unk_pending && !bpe->fuse_unk) add_symbol(scratch, &n, bpe->unk);
            unk_pending = bpe->unk >= 0;
        }
    }
    if (unk_pending) add_symbol(scratch, &n, bpe->unk);
    if (n) scratch->symbol[n - 1].next = -1;
    *out_n = n;
    return BL_OK;
}

static void push_pair(const bl_model *bpe, bl_model_scratch *scratch, int32_t left, int32_t right)
{
    const bl_merge *merge =
        bl_merges_find(&bpe->merges, scratch->symbol[left].id, scratch->symbol[right].id);
    if (merge)
        heap_push(scratch, (bl_candidate){.rank = merge->rank, .position = left, .id = merge->id});
}

static void merge_symbols(const bl_model *bpe, bl_model_scratch *scratch, size_t n)
{
    bl_symbol *symbol = scratch->symbol;

    scratch->n_heap = 0;
    for (size_t i = 0; i + 1 < n; i++) push_pair(bpe, scratch, (int32_t)i, (int32_t)i + 1);
    while (scratch->n_heap) {
        bl_candidate top = heap_pop(scratch);
        bl_symbol *left = &symbol[top.position];
        if (left->id < 0 || left->next < 0) continue;
        bl_symbol *right = &symbol[left->next];
        const bl_merge *merge = bl_merges_find(&bpe->merges, left->id, right->id);
        if (!merge || merge->id != top.id) continue;

        left->id = top.id;
        left->next = right->next;
        right->id = -1;
        if (left->next >= 0) symbol[left->next].prev = top.position;
        if (left->prev >= 0) push_pair(bpe, scratch, left->prev, top.position);
        if (left->next >= 0) push_pair(bpe, scratch, top.position, left->next);
    }
}

bl_status bl_bpe_encode(const bl_model *bpe, bl_model_scratch *scratch, const char *text,
                        size_t n_bytes, bl_ids *out)
{
    int32_t whole = bpe->ignore_merges ? bl_strings_find(&bpe->piece, text, n_bytes) : -1;
    size_t n_symbols;

    /* A special token's text must not become the token here: added tokens alone decide that. */
    if (whole >= 0 && !bpe->is_special[whole]) return bl_ids_push(out, whole);
    BL_TRY(most_symbols(bpe, n_bytes, &n_symbols));
    BL_TRY(reserve(scratch, n_symbols));
    size_t n = 0;
    BL_TRY(split_symbols(bpe, scratch, text, n_bytes, &n));
    BL_TRY(bl_ids_reserve(out, n));
    merge_symbols(bpe, scratch, n);
    for (int32_t i = n ? 0 : -1; i >= 0; i = scratch->symbol[i].next)
        out->id[out->n++] = scratch->symbol[i].id;
    return BL_OK;
}
