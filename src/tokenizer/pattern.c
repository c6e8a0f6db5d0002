/* SPDX-License-Identifier: Apache-2.0 */
/* What normalizers, pre-tokenizers and decoders look for: a regex, a string, the characters of a
 * class, or words (huggingface/tokenizers tokenizer/pattern.rs). */
#include <stdlib.h>
#include <string.h>

#include "base/deadline.h"
#include "tokenizer/internal.h"

void bl_matcher_free(bl_matcher *matcher)
{
    pcre2_match_data_free(matcher->data);
    pcre2_match_context_free(matcher->context);
}

static bl_status prepare(bl_matcher *matcher)
{
    if (!matcher->data) matcher->data = pcre2_match_data_create(1, NULL);
    if (!matcher->context) matcher->context = pcre2_match_context_create(NULL);
    return matcher->data && matcher->context ? BL_OK
                                             : BL_FAIL(BL_ENOMEM, "tokenizer: regex match data");
}

static bl_status check_deadline(void)
{
    double limit_s;

    if (!bl_deadline_is_over(&limit_s)) return BL_OK;
    return BL_FAIL(BL_EINPUT, "tokenizer: more than %.0f s for a text", limit_s);
}

/* PCRE2's limit is of steps at one place where a match may begin. A run of white space of n bytes
 * takes 2 n in published regexes. A call tries PLACES, and the deadline is looked at in between. */
static bl_status next_of_regex(const pcre2_code *regex, bl_matcher *matcher, const char *text,
                               size_t n_bytes, size_t from, bl_match *out)
{
    enum { PLACES = 1024, LOOK_CALLS = 64, BYTE_STEPS = 4, MORE_STEPS = 10000 };
    int n = PCRE2_ERROR_NOMATCH;

    BL_TRY(prepare(matcher));
    pcre2_set_match_limit(matcher->context, (uint32_t)(BYTE_STEPS * n_bytes + MORE_STEPS));
    while (n == PCRE2_ERROR_NOMATCH) {
        size_t last = n_bytes - from > PLACES ? from + PLACES : n_bytes;
        pcre2_set_offset_limit(matcher->context, last);
        /* What pcre2_match calls in the end, without its checks; a library without JIT refuses
         * it, and a long group repeated needs more than JIT's stack. */
        n = pcre2_jit_match(regex, (PCRE2_SPTR)text, n_bytes, from, 0, matcher->data,
                            matcher->context);
        if (n == PCRE2_ERROR_JIT_BADOPTION || n == PCRE2_ERROR_JIT_STACKLIMIT)
            n = pcre2_match(regex, (PCRE2_SPTR)text, n_bytes, from,
                            PCRE2_NO_UTF_CHECK | PCRE2_NO_JIT, matcher->data, matcher->context);
        if (n == PCRE2_ERROR_NOMATCH && last == n_bytes) return BL_OK;
        for (from = last + 1; from < n_bytes && ((unsigned char)text[from] & 0xc0) == 0x80;) from++;
        if (n == PCRE2_ERROR_NOMATCH || ++matcher->n_calls % LOOK_CALLS == 0)
            BL_TRY(check_deadline());
        if (from > n_bytes) from = n_bytes;
    }
    if (n < 0)
        return BL_FAIL(BL_EINPUT,
                       "tokenizer: a regex of tokenizer.json takes too many steps or "
                       "too much memory for a text (PCRE2 error %d)",
                       n);
    const PCRE2_SIZE *found = pcre2_get_ovector_pointer(matcher->data);
    *out = (bl_match){found[0], found[1]};
    return BL_OK;
}

static void next_of_class(bool (*is_member)(uint32_t), const char *text, size_t n_bytes,
                          size_t from, bl_match *out)
{
    size_t length;

    for (size_t i = from; i < n_bytes; i += length) {
        if (!is_member(bl_utf8_decode(text + i, n_bytes - i, &length))) continue;
        *out = (bl_match){i, i + length};
        return;
    }
}

typedef enum word_kind { SPACE, WORD, OTHER } word_kind;

static word_kind kind_at(const char *text, size_t n_bytes, size_t *length)
{
    uint32_t code = bl_utf8_decode(text, n_bytes, length);
    return bl_unicode_is_space(code) ? SPACE : bl_unicode_is_word(code) ? WORD : OTHER;
}

static void next_of_words(const char *text, size_t n_bytes, size_t from, bl_match *out)
{
    size_t length;
    word_kind kind = SPACE;

    while (from < n_bytes && (kind = kind_at(text + from, n_bytes - from, &length)) == SPACE)
        from += length;
    if (from == n_bytes) return;
    size_t end = from;
    while (end < n_bytes && kind_at(text + end, n_bytes - end, &length) == kind) end += length;
    *out = (bl_match){from, end};
}

bl_status bl_pattern_next(const bl_pattern *pattern, bl_matcher *matcher, const char *text,
                          size_t n_bytes, size_t from, bl_match *out)
{
    const char *found;

    *out = (bl_match){n_bytes, n_bytes};
    switch (pattern->kind) {
    case BL_PATTERN_NONE:
        return BL_OK;
    case BL_PATTERN_REGEX:
        return next_of_regex(pattern->regex, matcher, text, n_bytes, from, out);
    case BL_PATTERN_STRING: {
        size_t n_string = strlen(pattern->string);
        found = bl_text_find(text + from, n_bytes - from, pattern->string, n_string);
        if (found) *out = (bl_match){(size_t)(found - text), (size_t)(found - text) + n_string};
        return BL_OK;
    }
    case BL_PATTERN_CLASS:
        next_of_class(pattern->is_member, text, n_bytes, from, out);
        return BL_OK;
    case BL_PATTERN_WORDS:
        next_of_words(text, n_bytes, from, out);
        return BL_OK;
    }
    return BL_FAIL(BL_EINTERNAL, "pattern %d", (int)pattern->kind);
}

bl_status bl_pattern_replace(const bl_pattern *pattern, bl_matcher *matcher, const char *content,
                             const char *text, size_t n_bytes, bl_bytes *out)
{
    size_t n_content = strlen(content), done = 0;
    bl_match match;

    for (;;) {
        BL_TRY(bl_pattern_next(pattern, matcher, text, n_bytes, done, &match));
        BL_TRY(bl_bytes_append(out, text + done, match.start - done));
        if (match.start == n_bytes) return BL_OK;
        BL_TRY(bl_bytes_append(out, content, n_content));
        done = match.end;
    }
}

bool bl_pattern_is_at_start(const bl_pattern *pattern)
{
    uint32_t options = 0;

    if (pattern->kind == BL_PATTERN_REGEX)
        pcre2_pattern_info(pattern->regex, PCRE2_INFO_ALLOPTIONS, &options);
    return options & PCRE2_ANCHORED;
}

void bl_pattern_free(bl_pattern *pattern)
{
    pcre2_code_free(pattern->regex);
    free(pattern->string);
}
