/* SPDX-License-Identifier: Apache-2.0 */
/* The public calls: encode, the contexts it works with, look-ups, destruction. */
#include <stdlib.h>
#include <string.h>

#include "base/deadline.h"
#include "base/sizes.h"
#include "tokenizer/internal.h"

enum {
    MAX_TEXT_BYTES = 1 << 28
}; /* normalized at most 3 bytes per byte: positions stay within int32_t */

/* ---- ids ---- */

bl_status bl_ids_reserve(bl_ids *ids, size_t n_more)
{
    size_t need, n_bytes;

    if (bl_add_overflows(ids->n, n_more, &need)) return BL_FAIL(BL_ENOMEM, "token ids");
    if (need <= ids->capacity) return BL_OK;
    size_t capacity = need + need / 2 + 16;
    if (bl_mul_overflows(capacity, sizeof *ids->id, &n_bytes))
        return BL_FAIL(BL_ENOMEM, "%zu token ids", need);
    int32_t *grown = realloc(ids->id, n_bytes);
    if (!grown) return BL_FAIL(BL_ENOMEM, "%zu token ids", capacity);
    ids->id = grown;
    ids->capacity = capacity;
    return BL_OK;
}

bl_status bl_ids_push(bl_ids *ids, int32_t id)
{
    BL_TRY(bl_ids_reserve(ids, 1));
    ids->id[ids->n++] = id;
    return BL_OK;
}

static bl_status push_all(bl_ids *ids, const bl_ids *more)
{
    if (!more->n) return BL_OK;
    BL_TRY(bl_ids_reserve(ids, more->n));
    memcpy(ids->id + ids->n, more->id, more->n * sizeof *ids->id);
    ids->n += more->n;
    return BL_OK;
}

void bl_ids_free(bl_ids *ids)
{
    free(ids->id);
    *ids = (bl_ids){0};
}

/* ---- contexts ---- */

static void free_context(bl_encode_context *context)
{
    bl_model_scratch_free(&context->model);
    for (size_t i = 0; i < BL_COUNT(context->normalized); i++)
        bl_bytes_free(&context->normalized[i]);
    for (size_t i = 0; i < BL_MAX_STEPS; i++) {
        bl_bytes_free(&context->prefixed[i]);
        bl_bytes_free(&context->mapped[i]);
    }
    bl_matcher_free(&context->match);
    free(context);
}

/* An idle context, its word cache warm from earlier calls, or a new one: as many exist as calls
 * ever ran at once. */
static bl_status take_context(bl_context_pool *pool, bl_encode_context **out)
{
    pthread_mutex_lock(&pool->mutex);
    bl_encode_context *context = pool->idle;
    if (context) pool->idle = context->next;
    pthread_mutex_unlock(&pool->mutex);
    if (!context) {
        if (!(context = calloc(1, sizeof *context))) return BL_FAIL(BL_ENOMEM, "tokenizer context");
        if (!(context->model.cache = calloc(BL_CACHE_SLOTS, sizeof *context->model.cache))) {
            free(context);
            return BL_FAIL(BL_ENOMEM, "tokenizer word cache");
        }
    }
    *out = context;
    return BL_OK;
}

static void return_context(bl_context_pool *pool, bl_encode_context *context)
{
    pthread_mutex_lock(&pool->mutex);
    context->next = pool->idle;
    pool->idle = context;
    pthread_mutex_unlock(&pool->mutex);
}

/* ---- encode ---- */

/* A stretch of text between added tokens, as one of the two stages sees it. */
typedef bl_status segment_fn(const bl_tokenizer *tokenizer, bl_encode_context *context,
                             const char *text, size_t n_bytes, unsigned flags, bl_ids *out);

static bl_status encode_plain(const bl_tokenizer *tokenizer, bl_encode_context *context,
                              const char *text, size_t n_bytes, unsigned flags, bl_ids *out)
{
    return bl_pretokenize(tokenizer, context, 0, flags, text, n_bytes, out);
}

/* Calls `gap` for each stretch without a token of `trie`, and emits the tokens between. */
static bl_status extract_added(const bl_tokenizer *tokenizer, bl_encode_context *context,
                               const bl_trie *trie, segment_fn *gap, const char *text,
                               size_t n_bytes, unsigned flags, bl_ids *out)
{
    size_t cursor = 0, done = 0;
    bl_added_match match;

    while (bl_added_next(trie, tokenizer->added, flags & BL_PARSE_SPECIAL, text, n_bytes, &cursor,
                         done, &match)) {
        if (match.start > done)
            BL_TRY(gap(tokenizer, context, text + done, match.start - done, flags, out));
        BL_TRY(bl_ids_push(out, match.token->id));
        done = match.end;
        flags = (flags & ~(unsigned)BL_CONTINUATION) |
                BL_AFTER_TOKEN; /* text after a token is not a continuation */
    }
    return done < n_bytes ? gap(tokenizer, context, text + done, n_bytes - done, flags, out)
                          : BL_OK;
}

static bl_status encode_normalized(const bl_tokenizer *tokenizer, bl_encode_context *context,
                                   const char *text, size_t n_bytes, unsigned flags, bl_ids *out)
{
    BL_TRY(bl_normalize(&tokenizer->steps, flags & BL_CONTINUATION, context->normalized,
                        &context->match, &text, &n_bytes));
    return extract_added(tokenizer, context, &tokenizer->normalized_trie, encode_plain, text,
                         n_bytes, flags, out);
}

bl_status bl_tokenizer_encode(const bl_tokenizer *tokenizer, const char *text, size_t n_bytes,
                              unsigned flags, bl_ids *out)
{
    bl_encode_context *context = NULL;
    size_t old_n = out->n;
    double limit_s;

    if (n_bytes > MAX_TEXT_BYTES)
        return BL_FAIL(BL_EINPUT, "a text of %zu bytes is longer than 256 MiB", n_bytes);
    size_t n_valid = bl_utf8_valid_prefix(text, n_bytes);
    if (n_valid < n_bytes) return BL_FAIL(BL_EINPUT, "byte %zu of the text is not UTF-8", n_valid);

    bl_status st = take_context(tokenizer->pool, &context);
    if (st != BL_OK) return st;
    bool begun = bl_deadline_begin(n_bytes);
    if (flags & BL_ADD_SPECIAL) BL_TRY_GOTO(st, done, push_all(out, &tokenizer->prefix));
    BL_TRY_GOTO(st, done,
                extract_added(tokenizer, context, &tokenizer->raw_trie, encode_normalized, text,
                              n_bytes, flags, out));
    if (flags & BL_ADD_SPECIAL) BL_TRY_GOTO(st, done, push_all(out, &tokenizer->suffix));
    if (bl_deadline_is_over(&limit_s)) /* bl_added_next may have given up */
        st = BL_FAIL(BL_EINPUT, "tokenizer: more than %.0f s for a text", limit_s);
done:
    bl_deadline_end(begun);
    if (st != BL_OK) out->n = old_n;
    return_context(tokenizer->pool, context);
    return st;
}

/* ---- look-ups ---- */

int32_t bl_tokenizer_token_to_id(const bl_tokenizer *tokenizer, const char *token)
{
    return bl_strings_find(&tokenizer->model.text, token, strlen(token));
}

const char *bl_tokenizer_id_to_token(const bl_tokenizer *tokenizer, int32_t id)
{
    return bl_strings_get(&tokenizer->model.text, id, NULL);
}

bool bl_tokenizer_is_special(const bl_tokenizer *tokenizer, int32_t id)
{
    return bl_tokenizer_id_to_token(tokenizer, id) && tokenizer->model.is_special[id];
}

int32_t bl_tokenizer_vocab_size(const bl_tokenizer *tokenizer)
{
    size_t n = tokenizer->model.text.n_ids;
    while (n > 0 && tokenizer->model.text.n_bytes[n - 1] < 0) n--;
    return (int32_t)n;
}

const json_t *bl_tokenizer_named_tokens(const bl_tokenizer *tokenizer)
{
    return tokenizer->named;
}

int32_t bl_tokenizer_bos(const bl_tokenizer *tokenizer)
{
    return tokenizer->bos;
}

const int32_t *bl_tokenizer_eos(const bl_tokenizer *tokenizer, size_t *n)
{
    *n = tokenizer->eos.n;
    return tokenizer->eos.id;
}

const int32_t *bl_tokenizer_prefix(const bl_tokenizer *tokenizer, size_t *n)
{
    *n = tokenizer->prefix.n;
    return tokenizer->prefix.id;
}

const int32_t *bl_tokenizer_suffix(const bl_tokenizer *tokenizer, size_t *n)
{
    *n = tokenizer->suffix.n;
    return tokenizer->suffix.id;
}

void bl_tokenizer_destroy(bl_tokenizer *tokenizer)
{
    if (!tokenizer) return;
    bl_steps_free(&tokenizer->steps);
    for (size_t i = 0; i < tokenizer->n_decoders; i++) {
        bl_pattern_free(&tokenizer->decoder[i].pattern);
        free(tokenizer->decoder[i].content);
    }
    for (size_t i = 0; tokenizer->decoded && i < tokenizer->model.text.n_ids; i++)
        free(tokenizer->decoded[i]);
    free(tokenizer->decoded);
    bl_model_free(&tokenizer->model);
    free(tokenizer->added);
    bl_tokenizer_free_templates(tokenizer);
    json_decref(tokenizer->named);
    bl_trie_free(&tokenizer->raw_trie);
    bl_trie_free(&tokenizer->normalized_trie);
    bl_ids_free(&tokenizer->prefix);
    bl_ids_free(&tokenizer->suffix);
    bl_ids_free(&tokenizer->eos);
    if (tokenizer->pool) {
        for (bl_encode_context *context = tokenizer->pool->idle, *next; context; context = next) {
            next = context->next;
            free_context(context);
        }
        pthread_mutex_destroy(&tokenizer->pool->mutex);
        free(tokenizer->pool);
    }
    free(tokenizer);
}
