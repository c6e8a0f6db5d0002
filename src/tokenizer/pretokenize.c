/* SPDX-License-Identifier: Apache-2.0 */
/* Normalizer steps, and the pre-tokenizer's. */
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "tokenizer/internal.h"

/* ---- normalizer ---- */

static bl_status replace_all(const bl_normalizer_step *step, const char *text, size_t n_bytes,
                             bl_bytes *out)
{
    size_t n_pattern = strlen(step->pattern), n_content = strlen(step->content), done = 0;
    const char *found;

    while ((found = bl_text_find(text + done, n_bytes - done, step->pattern, n_pattern)) != NULL) {
        BL_TRY(bl_bytes_append(out, text + done, (size_t)(found - text) - done));
        BL_TRY(bl_bytes_append(out, step->content, n_content));
        done = (size_t)(found - text) + n_pattern;
    }
    return bl_bytes_append(out, text + done, n_bytes - done);
}

/* Characters that the reference's normalizer has no data of stay as they are, and nothing composes
 * or is reordered across them. */
static size_t before_unnormalized(const char *text, size_t n_bytes, size_t *n_char)
{
    size_t at = 0;

    *n_char = 0;
    while (at < n_bytes) {
        uint32_t code = bl_utf8_decode(text + at, n_bytes - at, n_char);
        if (bl_unicode_is_unnormalized(code)) return at;
        at += *n_char;
    }
    *n_char = 0;
    return at;
}

static bl_status map_form(const bl_normalizer_step *step, const char *text, size_t n_bytes,
                          bl_bytes *out)
{
    utf8proc_uint8_t *mapped = NULL;
    utf8proc_ssize_t n = utf8proc_map((const utf8proc_uint8_t *)text, (utf8proc_ssize_t)n_bytes,
                                      &mapped, (utf8proc_option_t)step->utf8proc_options);
    if (n < 0) return BL_FAIL(BL_ENOMEM, "Unicode normalization: %s", utf8proc_errmsg(n));
    bl_status st = bl_bytes_append(out, (const char *)mapped, (size_t)n);
    free(mapped);
    return st;
}

static bl_status unicode_form(const bl_normalizer_step *step, const char *text, size_t n_bytes,
                              bl_bytes *out)
{
    size_t n_char;

    for (size_t done = 0; done < n_bytes; done += n_char) {
        size_t n = before_unnormalized(text + done, n_bytes - done, &n_char);
        if (n > 0) BL_TRY(map_form(step, text + done, n, out));
        BL_TRY(bl_bytes_append(out, text + done + n, n_char));
        done += n;
    }
    return BL_OK;
}

bl_status bl_normalize(const bl_steps *steps, bool continuation, bl_bytes buffers[2],
                       const char **text, size_t *n_bytes)
{
    for (size_t i = 0; i < steps->n_normalizers; i++) {
        const bl_normalizer_step *step = &steps->normalizer[i];
        bl_bytes *out = &buffers[i % 2];
        out->n = 0;
        switch (step->kind) {
        case BL_NORM_PREPEND:
            if (continuation || *n_bytes == 0) continue;
            BL_TRY(bl_bytes_append(out, step->content, strlen(step->content)));
            BL_TRY(bl_bytes_append(out, *text, *n_bytes));
            break;
        case BL_NORM_REPLACE:
            BL_TRY(replace_all(step, *text, *n_bytes, out));
            break;
        case BL_NORM_UNICODE:
            BL_TRY(unicode_form(step, *text, *n_bytes, out));
            break;
        }
        *text = out->data;
        *n_bytes = out->n;
    }
    return BL_OK;
}

/* ---- pre-tokenizer ---- */

/* A piece may be a whole segment; where the vocabulary allows, it is cut into a word each, which
 * the cache then knows: runs of the cut string with what follows them. */
static bl_status encode_words(const bl_tokenizer *tokenizer, bl_encode_context *context,
                              const char *text, size_t n_bytes, bl_ids *out)
{
    size_t n_cut = strlen(tokenizer->cut), start = 0, end;

    for (; start < n_bytes; start = end) {
        size_t word = start;
        while (n_bytes - word >= n_cut && !memcmp(text + word, tokenizer->cut, n_cut))
            word += n_cut;
        const char *next = bl_text_find(text + word, n_bytes - word, tokenizer->cut, n_cut);
        end = next ? (size_t)(next - text) : n_bytes;
        BL_TRY(bl_bpe_encode_piece(&tokenizer->bpe, &context->bpe, text + start, end - start, out));
    }
    return BL_OK;
}

/* The flags of the piece at `offset` of one that has `flags`. */
static unsigned piece_flags(unsigned flags, size_t offset)
{
    return offset ? (flags & ~(unsigned)BL_CONTINUATION) | BL_AFTER_TOKEN : flags;
}

/* huggingface/tokenizers pre_tokenizers/metaspace.rs: spaces become the replacement, one is put
 * before, and each begins a piece. */
static bl_status apply_metaspace(const bl_tokenizer *tokenizer, bl_encode_context *context,
                                 size_t step, unsigned flags, const char *text, size_t n_bytes,
                                 bl_ids *out)
{
    const bl_split *split = &tokenizer->steps.split[step];
    const bl_normalizer_step spaces = {.pattern = (char[]){" "}, .content = split->metaspace};
    bl_bytes *replaced = &context->prefixed[step];
    size_t length = strlen(split->metaspace), end;
    bool has_one = text[0] == ' ' || (n_bytes >= length && !memcmp(text, split->metaspace, length));
    bool begins = split->scheme == BL_PREPEND_ALWAYS ||
                  (split->scheme == BL_PREPEND_FIRST && !(flags & BL_AFTER_TOKEN));

    replaced->n = 0;
    if (begins && !has_one && !(flags & BL_CONTINUATION))
        BL_TRY(bl_bytes_append(replaced, split->metaspace, length));
    BL_TRY(replace_all(&spaces, text, n_bytes, replaced));
    for (size_t start = 0; start < replaced->n; start = end) {
        size_t first = replaced->n - start < length ? replaced->n - start : length;
        const char *next = split->at_metaspace
                               ? bl_text_find(replaced->data + start + first,
                                              replaced->n - start - first, split->metaspace, length)
                               : NULL;
        end = next ? (size_t)(next - replaced->data) : replaced->n;
        BL_TRY(bl_pretokenize(tokenizer, context, step + 1, piece_flags(flags, start),
                              replaced->data + start, end - start, out));
    }
    return BL_OK;
}

static bl_status split_by_regex(const bl_tokenizer *tokenizer, bl_encode_context *context,
                                size_t step, unsigned flags, const char *text, size_t n_bytes,
                                bl_ids *out)
{
    const pcre2_code *regex = tokenizer->steps.split[step].regex;
    size_t done = 0;

    if (!context->match[step] && !(context->match[step] = pcre2_match_data_create(1, NULL)))
        return BL_FAIL(BL_ENOMEM, "tokenizer: regex match data");
    while (done < n_bytes) {
        int n = pcre2_match(regex, (PCRE2_SPTR)text, n_bytes, done, PCRE2_NO_UTF_CHECK,
                            context->match[step], NULL);
        size_t start = n_bytes, end = n_bytes;
        if (n >= 0) {
            const PCRE2_SIZE *found = pcre2_get_ovector_pointer(context->match[step]);
            start = found[0];
            end = found[1];
        } else if (n != PCRE2_ERROR_NOMATCH) {
            return BL_FAIL(BL_ELIMIT,
                           "tokenizer: the pre-tokenizer's regex failed with PCRE2 error %d", n);
        }
        if (start > done)
            BL_TRY(bl_pretokenize(tokenizer, context, step + 1, piece_flags(flags, done),
                                  text + done, start - done, out));
        if (end > start)
            BL_TRY(bl_pretokenize(tokenizer, context, step + 1, piece_flags(flags, start),
                                  text + start, end - start, out));
        done = end;
    }
    return BL_OK;
}

bl_status bl_pretokenize(const bl_tokenizer *tokenizer, bl_encode_context *context, size_t step,
                         unsigned flags, const char *text, size_t n_bytes, bl_ids *out)
{
    if (step == tokenizer->steps.n_splits) {
        if (tokenizer->cut) return encode_words(tokenizer, context, text, n_bytes, out);
        return bl_bpe_encode_piece(&tokenizer->bpe, &context->bpe, text, n_bytes, out);
    }
    const bl_split *split = &tokenizer->steps.split[step];
    if (split->metaspace)
        return apply_metaspace(tokenizer, context, step, flags, text, n_bytes, out);
    if (split->add_prefix_space && !(flags & BL_CONTINUATION) && text[0] != ' ') {
        bl_bytes *prefixed = &context->prefixed[step];
        prefixed->n = 0;
        BL_TRY(bl_bytes_append(prefixed, " ", 1));
        BL_TRY(bl_bytes_append(prefixed, text, n_bytes));
        text = prefixed->data;
        n_bytes = prefixed->n;
    }
    if (!split->regex)
        return bl_pretokenize(tokenizer, context, step + 1, flags, text, n_bytes, out);
    return split_by_regex(tokenizer, context, step, flags, text, n_bytes, out);
}

void bl_steps_free(bl_steps *steps)
{
    for (size_t i = 0; i < steps->n_normalizers; i++) {
        free(steps->normalizer[i].pattern);
        free(steps->normalizer[i].content);
    }
    for (size_t i = 0; i < steps->n_splits; i++) {
        pcre2_code_free(steps->split[i].regex);
        free(steps->split[i].metaspace);
    }
}
