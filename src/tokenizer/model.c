/* SPDX-License-Identifier: Apache-2.0 */
/* One piece of text to ids: the cache of pieces met before, else the model. */
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "tokenizer/internal.h"

/* Every piece that may be cached has its one place; a newer piece takes an older one's. */
static bl_cached_piece *cache_slot(bl_model_scratch *scratch, const char *text, size_t n_bytes)
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
    if (n) memcpy(slot->id, id, n * sizeof *id);
}

bl_status bl_model_encode_piece(const bl_model *model, bl_model_scratch *scratch, const char *text,
                                size_t n_bytes, unsigned flags, bl_ids *out)
{
    bool met_special = false;

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
    if (model->kind == BL_MODEL_BPE)
        BL_TRY(bl_bpe_encode(model, scratch, text, n_bytes, out));
    else
        BL_TRY(bl_unigram_encode(model, scratch, text, n_bytes, flags & BL_PARSE_SPECIAL,
                                 &met_special, out));
    if (!met_special)
        cache_store(cached, text, n_bytes, out->id ? out->id + old_n : NULL, out->n - old_n);
    return BL_OK;
}

void bl_model_scratch_free(bl_model_scratch *scratch)
{
    free(scratch->symbol);
    free(scratch->heap);
    free(scratch->path);
    bl_bytes_free(&scratch->key);
    free(scratch->cache);
}

void bl_model_free(bl_model *model)
{
    bl_strings_free(&model->text);
    bl_strings_free(&model->piece);
    bl_merges_free(&model->merges);
    bl_trie_free(&model->trie);
    free(model->prefix);
    free(model->suffix);
    free(model->score);
    free(model->is_special);
}
