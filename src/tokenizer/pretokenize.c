/* SPDX-License-Identifier: Apache-2.0 */
/* Normalizer steps, and the pre-tokenizer's regexes, which are Oniguruma's in tokenizer.json and PCRE2's
 * here. */
#include <ctype.h>
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "tokenizer/internal.h"
#include "tokenizer/unicode_additions.h"

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

static bl_status unicode_form(const bl_normalizer_step *step, const char *text, size_t n_bytes,
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

/* ---- regex translation ----
 *
 * Only syntax that both engines read alike is let through, with these rewrites: Oniguruma's \s is
 * White_Space, PCRE2's \s lacks U+0085; \d is \p{Nd}; the major categories get the characters that a newer
 * Unicode version added. Refused: \w, \b (other character sets), scripts (PCRE2 takes script extensions), ^
 * and $ (line ends in Oniguruma's Ruby syntax), nested classes, free-standing options, {,n} and }+. */

#define SPACE_SET "\\x{9}-\\x{d}\\x{85}\\p{Z}"

typedef struct translation {
    const char *at; /* what is still to read */
    bl_bytes out;
    bool in_class;
} translation;

static bl_status refuse(const translation *t, const char *what)
{
    return BL_FAIL(BL_EINPUT, "regex: %s is not supported (at \"%.20s\")", what, t->at);
}

static bl_status emit(translation *t, const char *text, size_t n_read)
{
    t->at += n_read;
    return bl_bytes_append(&t->out, text, strlen(text));
}

static bl_status copy(translation *t, size_t n_bytes)
{
    bl_status st = bl_bytes_append(&t->out, t->at, n_bytes);
    t->at += n_bytes;
    return st;
}

/* What the engines' Unicode versions differ by in a major category. */
static const char *additions_to(char category)
{
    switch (category) {
    case 'L':
        return BL_UNICODE_ADDITIONS_L;
    case 'N':
        return BL_UNICODE_ADDITIONS_N;
    case 'M':
        return BL_UNICODE_ADDITIONS_M;
    case 'P':
        return BL_UNICODE_ADDITIONS_P;
    case 'S':
        return BL_UNICODE_ADDITIONS_S;
    default:
        return "";
    }
}

/* \p{L} and its like become [\p{L} and the additions]; a subcategory such as \p{Lu} is PCRE2's own. */
static bl_status translate_property(translation *t)
{
    const char *name = t->at + 3;

    if (t->at[2] != '{' || !name[0] || !strchr("LMNPSZC", name[0]))
        return refuse(t, "a property other than a general category");
    if (islower((unsigned char)name[1]) && name[2] == '}') return copy(t, 6);
    if (name[1] != '}') return refuse(t, "a property other than a general category");
    const char property[] = {'\\', 'p', '{', name[0], '}', '\0'}, *more = additions_to(name[0]);
    bool negated = t->at[1] == 'P';
    if (t->in_class) {
        if (negated) return *more ? refuse(t, "a negated property in a class") : copy(t, 5);
        BL_TRY(emit(t, property, 5));
        return emit(t, more, 0);
    }
    BL_TRY(emit(t, negated ? "[^" : "[", 0));
    BL_TRY(emit(t, property, 5));
    BL_TRY(emit(t, more, 0));
    return emit(t, "]", 0);
}

static bl_status translate_escape(translation *t)
{
    char c = t->at[1];

    switch (c) {
    case 's':
        return emit(t, t->in_class ? SPACE_SET : "[" SPACE_SET "]", 2);
    case 'S':
        return t->in_class ? refuse(t, "\\S in a class") : emit(t, "[^" SPACE_SET "]", 2);
    case 'd':
        return emit(t, "\\p{Nd}", 2);
    case 'p':
    case 'P':
        return translate_property(t);
    case 'r':
    case 'n':
    case 't':
        return copy(t, 2);
    default:
        return ispunct((unsigned char)c) ? copy(t, 2) : refuse(t, "this escape");
    }
}

static bl_status translate_in_class(translation *t)
{
    if (t->at[0] == ']') t->in_class = false;
    if (t->at[0] == '[' || !strncmp(t->at, "&&", 2)) return refuse(t, "a class in a class");
    return copy(t, 1);
}

static bl_status translate_group(translation *t)
{
    static const char *const known[] = {"(?:", "(?i:", "(?!", "(?=", "(?<!", "(?<=", "(?>"};

    if (t->at[1] != '?') return copy(t, 1);
    for (size_t i = 0; i < sizeof known / sizeof known[0]; i++)
        if (!strncmp(t->at, known[i], strlen(known[i]))) return copy(t, strlen(known[i]));
    return refuse(t, "this kind of group");
}

static bl_status translate(translation *t)
{
    while (*t->at) {
        if (t->at[0] == '\\') {
            BL_TRY(translate_escape(t));
        } else if (t->in_class) {
            BL_TRY(translate_in_class(t));
        } else if (t->at[0] == '[') {
            t->in_class = true;
            BL_TRY(copy(t, t->at[1] == '^' ? 2 : 1));
            if (t->at[0] == ']') return refuse(t, "']' first in a class");
        } else if (t->at[0] == '(') {
            BL_TRY(translate_group(t));
        } else if (t->at[0] == '^' || t->at[0] == '$') {
            return refuse(t, "an anchor");
        } else if (!strncmp(t->at, "{,", 2) || !strncmp(t->at, "}+", 2)) {
            return refuse(t, "this repetition");
        } else {
            BL_TRY(copy(t, 1));
        }
    }
    return bl_bytes_append(&t->out, "", 1);
}

bl_status bl_regex_compile(const char *pattern, pcre2_code **out)
{
    translation t = {.at = pattern};
    PCRE2_UCHAR reason[128];
    PCRE2_SIZE offset;
    uint32_t may_be_empty = 0;
    int code;

    *out = NULL;
    bl_status st = translate(&t);
    if (st != BL_OK) goto done;
    *out = pcre2_compile((PCRE2_SPTR)t.out.data, t.out.n - 1, PCRE2_UTF | PCRE2_UCP, &code, &offset,
                         NULL);
    if (!*out) {
        pcre2_get_error_message(code, reason, sizeof reason);
        st = BL_FAIL(BL_EINPUT, "regex \"%.80s\": %s", pattern, (const char *)reason);
        goto done;
    }
    pcre2_pattern_info(*out, PCRE2_INFO_MATCHEMPTY, &may_be_empty);
    if (may_be_empty) {
        st = BL_FAIL(BL_EINPUT, "regex \"%.80s\" may match nothing", pattern);
        pcre2_code_free(*out);
        *out = NULL;
        goto done;
    }
    /* Without a JIT in the library matching is only slower. */
    pcre2_jit_compile(*out, PCRE2_JIT_COMPLETE);
done:
    bl_bytes_free(&t.out);
    return st;
}

/* ---- pre-tokenizer ---- */

/* A piece may be a whole segment; where the vocabulary allows, it is cut into a word each, which the cache
 * then knows: runs of the cut string with what follows them. */
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

/* huggingface/tokenizers pre_tokenizers/metaspace.rs: spaces become the replacement, one is put before, and
 * each begins a piece. */
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
