/* SPDX-License-Identifier: Apache-2.0 */
/* Byte-pair encoding of one piece of text (Sennrich et al. 2016, arXiv:1508.07909, as
 * huggingface/tokenizers models/bpe does it).
 *
 * The piece starts as one symbol a character (byte-level: a byte). A min-heap on (rank, position)
 * holds the pairs that may merge; a popped pair is stale, and dropped, when its left symbol is gone
 * or the pair there now merges to another token. A merge pushes the two pairs it creates. O(n log
 * n) in the piece's symbols, which matters where a whole document is one piece. */
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tokenizer/internal.h"

static bl_status reserve(bl_bpe_scratch *scratch, size_t n_symbols)
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

static void heap_push(bl_bpe_scratch *scratch, bl_candidate candidate)
{
    bl_candidate *heap = scratch->heap;
    size_t i = scratch->n_heap++;

    for (; i > 0 && before(&candidate, &heap[(i - 1) / 2]); i = (i - 1) / 2)
        heap[i] = heap[(i - 1) / 2];
    heap[i] = candidate;
}

static bl_candidate heap_pop(bl_bpe_scratch *scratch)
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

static void add_symbol(bl_bpe_scratch *scratch, size_t *n, int32_t id)
{
    int32_t i = (int32_t)(*n)++;
    scratch->symbol[i] = (bl_symbol){.id = id, .prev = i - 1, .next = i + 1};
}

/* Adds the byte tokens of a character, all or none. */
static bool add_byte_tokens(const bl_bpe *bpe, bl_bpe_scratch *scratch, size_t *n, const char *text,
                            size_t length)
{
    for (size_t i = 0; i < length; i++)
        if (bpe->byte_token[(unsigned char)text[i]] < 0) return false;
    for (size_t i = 0; i < length; i++)
        add_symbol(scratch, n, bpe->byte_token[(unsigned char)text[i]]);
    return true;
}

/* The first symbols of a piece; never more than its bytes. A character outside the vocabulary
 * becomes its byte tokens, else unk, else nothing. A held-back unk comes out before the next known
 * character, and so after byte tokens: HF's order. */
static size_t split_symbols(const bl_bpe *bpe, bl_bpe_scratch *scratch, const char *text,
                            size_t n_bytes)
{
    size_t n = 0, length;
    bool unk_pending = false;

    for (size_t i = 0; i < n_bytes; i += length) {
        unsigned char first = (unsigned char)text[i];
        int32_t id;
        length = 1;
        if (bpe->byte_level || first < 0x80) {
            id = bpe->byte_symbol[first];
        } else {
            bl_utf8_decode(text + i, n_bytes - i, &length);
            id = bl_strings_find(&bpe->piece, text + i, length);
        }
        if (id >= 0) {
            if (unk_pending) add_symbol(scratch, &n, bpe->unk);
            unk_pending = false;
            add_symbol(scratch, &n, id);
        } else if (!bpe->byte_fallback || !add_byte_tokens(bpe, scratch, &n, text + i, length)) {
            if (unk_pending && !bpe->fuse_unk) add_symbol(scratch, &n, bpe->unk);
            unk_pending = bpe->unk >= 0;
        }
    }
    if (unk_pending) add_symbol(scratch, &n, bpe->unk);
    if (n) scratch->symbol[n - 1].next = -1;
    return n;
}

static void push_pair(const bl_bpe *bpe, bl_bpe_scratch *scratch, int32_t left, int32_t right)
{
    const bl_merge *merge =
        bl_merges_find(&bpe->merges, scratch->symbol[left].id, scratch->symbol[right].id);
    if (merge)
        heap_push(scratch, (bl_candidate){.rank = merge->rank, .position = left, .id = merge->id});
}

static void merge_symbols(const bl_bpe *bpe, bl_bpe_scratch *scratch, size_t n)
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

/* ---- pieces ---- */

/* Every piece that may be cached has its one place; a newer piece takes an older one's. */
static bl_cached_piece *cache_slot(bl_bpe_scratch *scratch, const char *text, size_t n_bytes)
{
    if (n_bytes > BL_CACHE_KEY_BYTES || !scratch->cache) return NULL;
    return &scratch->cache[XXH3_64bits(text, n_bytes) & (BL_CACHE_SLOTS - 1)];
}

static void cache_store(bl_cached_piece *slot, const char *text, size_t n_bytes, const int32_t *id,
                        size_t n)
{
    if (!slot || n > BL_CACHE_IDS) return;
    slot->n_key_bytes = (unsigned char)n_bytes;
    slot->n_ids = (unsigned char)n;
    memcpy(slot->key, text, n_bytes);
    memcpy(slot->id, id, n * sizeof *id);
}

bl_status bl_bpe_encode_piece(const bl_bpe *bpe, bl_bpe_scratch *scratch, const char *text,
                              size_t n_bytes, bl_ids *out)
{
    if (n_bytes == 0) return BL_OK;
    bl_cached_piece *cached = cache_slot(scratch, text, n_bytes);
    if (cached && cached->n_key_bytes == n_bytes && !memcmp(cached->key, text, n_bytes)) {
        BL_TRY(bl_ids_reserve(out, BL_CACHE_IDS));
        memcpy(out->id + out->n, cached->id,
               BL_CACHE_IDS * sizeof *out->id); /* a fixed size: one or two moves */
        out->n += cached->n_ids;
        return BL_OK;
    }
    size_t old_n = out->n;
    int32_t whole = bpe->ignore_merges ? bl_strings_find(&bpe->piece, text, n_bytes) : -1;
    /* A special token's text must not become the token here: added tokens alone decide that. */
    if (whole >= 0 && !bpe->is_special[whole]) {
        BL_TRY(bl_ids_push(out, whole));
    } else {
        BL_TRY(reserve(scratch, n_bytes));
        size_t n = split_symbols(bpe, scratch, text, n_bytes);
        BL_TRY(bl_ids_reserve(out, n));
        merge_symbols(bpe, scratch, n);
        for (int32_t i = n ? 0 : -1; i >= 0; i = scratch->symbol[i].next)
            out->id[out->n++] = scratch->symbol[i].id;
    }
    cache_store(cached, text, n_bytes, out->id + old_n, out->n - old_n);
    return BL_OK;
}

void bl_bpe_free(bl_bpe *bpe)
{
    bl_strings_free(&bpe->text);
    bl_strings_free(&bpe->piece);
    bl_merges_free(&bpe->merges);
    free(bpe->is_special);
}
