/* SPDX-License-Identifier: Apache-2.0 */
/* The pre-tokenizer's steps (huggingface/tokenizers pre_tokenizers/, tokenizer/normalizer.rs
 * split). */
#include <stdlib.h>
#include <string.h>

#include "tokenizer/internal.h"

/* A piece may be a whole segment; where the vocabulary allows, it is cut into a word each, which
 * the cache then knows: runs of the cut string with what follows them. */
static bl_status encode_words(const bl_tokenizer *tokenizer, bl_encode_context *context,
                              const char *text, size_t n_bytes, unsigned flags, bl_ids *out)
{
    size_t n_cut = strlen(tokenizer->cut), start = 0, end;

    for (; start < n_bytes; start = end) {
        size_t word = start;
        while (n_bytes - word >= n_cut && !memcmp(text + word, tokenizer->cut, n_cut))
            word += n_cut;
        const char *next = bl_text_find(text + word, n_bytes - word, tokenizer->cut, n_cut);
        end = next ? (size_t)(next - text) : n_bytes;
        BL_TRY(bl_model_encode_piece(&tokenizer->model, &context->model, text + start, end - start,
                                     flags, out));
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
    const bl_pattern spaces = {.kind = BL_PATTERN_STRING, .string = (char[]){" "}};
    bl_bytes *replaced = &context->prefixed[step];
    size_t length = strlen(split->metaspace), end;
    bool has_one = text[0] == ' ' || (n_bytes >= length && !memcmp(text, split->metaspace, length));
    bool begins = split->scheme == BL_PREPEND_ALWAYS ||
                  (split->scheme == BL_PREPEND_FIRST && !(flags & BL_AFTER_TOKEN));

    replaced->n = 0;
    if (begins && !has_one && !(flags & BL_CONTINUATION))
        BL_TRY(bl_bytes_append(replaced, split->metaspace, length));
    BL_TRY(bl_pattern_replace(&spaces, NULL, split->metaspace, text, n_bytes, replaced));
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

/* ---- split at matches ---- */

/* text[start..end) is the piece that the next part of the text may still join. */
typedef struct splitter {
    const bl_tokenizer *tokenizer;
    bl_encode_context *context;
    size_t step;
    unsigned flags;
    const char *text;
    bl_ids *out;
    size_t start, end;
    bool was_match;
} splitter;

/* text[start..end) goes to the next step, or to the model. */
static bl_status pass_on(const splitter *s, size_t start, size_t end)
{
    const bl_tokenizer *tokenizer = s->tokenizer;
    const char *text = s->text + start;
    size_t n_bytes = end - start;
    unsigned flags = piece_flags(s->flags, start);

    if (!n_bytes) return BL_OK;
    if (tokenizer->steps.split[s->step].maps) {
        bl_bytes *mapped = &s->context->mapped[s->step];
        mapped->n = 0;
        BL_TRY(bl_bytes_append_to_alphabet(mapped, text, n_bytes));
        text = mapped->data;
        n_bytes = mapped->n;
    }
    if (s->step + 1 == tokenizer->steps.n_splits && !tokenizer->cut)
        return bl_model_encode_piece(&tokenizer->model, &s->context->model, text, n_bytes, flags,
                                     s->out);
    return bl_pretokenize(tokenizer, s->context, s->step + 1, flags, text, n_bytes, s->out);
}

static bool joins(bl_split_behavior behavior, bool was_match, bool is_match)
{
    switch (behavior) {
    case BL_SPLIT_REMOVED:
    case BL_SPLIT_ISOLATED:
        return false;
    case BL_SPLIT_MERGED_WITH_PREVIOUS:
        return is_match && !was_match;
    case BL_SPLIT_MERGED_WITH_NEXT:
        return !is_match && was_match;
    case BL_SPLIT_CONTIGUOUS:
        return is_match == was_match;
    }
    return false;
}

/* Takes the next part of the text, a match or the text between two. */
static bl_status take_part(splitter *s, size_t start, size_t end, bool matches)
{
    const bl_split *split = &s->tokenizer->steps.split[s->step];
    bool is_match = matches != split->invert;

    if (start == end) return BL_OK;
    if (s->end == s->start || !joins(split->behavior, s->was_match, is_match)) {
        BL_TRY(pass_on(s, s->start, s->end));
        s->start = start;
    }
    s->end = end;
    if (split->behavior == BL_SPLIT_REMOVED && is_match) s->start = end;
    s->was_match = is_match;
    return BL_OK;
}

static bl_status split_at_matches(splitter *s, size_t n_bytes)
{
    const bl_pattern *pattern = &s->tokenizer->steps.split[s->step].pattern;
    bool isolated = s->tokenizer->steps.split[s->step].behavior == BL_SPLIT_ISOLATED;
    bl_match match;

    for (size_t done = 0; done < n_bytes; done = match.end) {
        BL_TRY(bl_pattern_next(pattern, &s->context->match, s->text, n_bytes, done, &match));
        if (isolated) { /* no part joins another: most files, the short way */
            BL_TRY(pass_on(s, done, match.start));
            BL_TRY(pass_on(s, match.start, match.end));
            continue;
        }
        BL_TRY(take_part(s, done, match.start, false));
        BL_TRY(take_part(s, match.start, match.end, true));
    }
    return pass_on(s, s->start, s->end);
}

bl_status bl_pretokenize(const bl_tokenizer *tokenizer, bl_encode_context *context, size_t step,
                         unsigned flags, const char *text, size_t n_bytes, bl_ids *out)
{
    if (step == tokenizer->steps.n_splits) {
        if (tokenizer->cut) return encode_words(tokenizer, context, text, n_bytes, flags, out);
        return bl_model_encode_piece(&tokenizer->model, &context->model, text, n_bytes, flags, out);
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
    if (split->pattern.kind == BL_PATTERN_NONE && !split->maps)
        return bl_pretokenize(tokenizer, context, step + 1, flags, text, n_bytes, out);
    splitter s = {tokenizer, context, step, flags, text, out, 0, 0, false};
    return split_at_matches(&s, n_bytes);
}

void bl_steps_free(bl_steps *steps)
{
    for (size_t i = 0; i < steps->n_normalizers; i++) {
        bl_pattern_free(&steps->normalizer[i].pattern);
        free(steps->normalizer[i].content);
    }
    for (size_t i = 0; i < steps->n_splits; i++) {
        bl_pattern_free(&steps->split[i].pattern);
        free(steps->split[i].metaspace);
    }
}
