/* SPDX-License-Identifier: Apache-2.0 */
/* The normalizer's steps (huggingface/tokenizers normalizers/). */
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "tokenizer/internal.h"

/* Replacements and compatibility forms (the longest: 11 times) may lengthen a text. Byte positions
 * stay within int32_t, and no file makes a short text fill the memory. */
enum { MAX_NORMALIZED_BYTES = 1 << 30, MAX_GROWTH = 64, SHORT_BYTES = 1 << 16 };

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

static bl_status lowercase(const char *text, size_t n_bytes, bl_bytes *out)
{
    size_t length;

    for (size_t i = 0; i < n_bytes; i += length) {
        uint32_t code = bl_utf8_decode(text + i, n_bytes - i, &length);
        if (code == 0x130) { /* the one whose lower case is two characters */
            BL_TRY(bl_bytes_append(out, "i\xcc\x87", 3));
            continue;
        }
        utf8proc_uint8_t lower[4];
        utf8proc_ssize_t n = utf8proc_encode_char((utf8proc_int32_t)bl_unicode_lower(code), lower);
        BL_TRY(bl_bytes_append(out, (const char *)lower, (size_t)n));
    }
    return BL_OK;
}

static bl_status strip_accents(const char *text, size_t n_bytes, bl_bytes *out)
{
    size_t length;

    for (size_t i = 0; i < n_bytes; i += length)
        if (!bl_unicode_is_accent(bl_utf8_decode(text + i, n_bytes - i, &length)))
            BL_TRY(bl_bytes_append(out, text + i, length));
    return BL_OK;
}

static bl_status strip(const bl_normalizer_step *step, bool continuation, const char *text,
                       size_t n_bytes, bl_bytes *out)
{
    size_t start = 0, length;

    while (step->at_start && !continuation && start < n_bytes &&
           bl_unicode_is_space(bl_utf8_decode(text + start, n_bytes - start, &length)))
        start += length;
    while (step->at_end && n_bytes > start &&
           bl_unicode_is_space(bl_utf8_decode_last(text + start, n_bytes - start, &length)))
        n_bytes -= length;
    return bl_bytes_append(out, text + start, n_bytes - start);
}

static bl_status apply(const bl_normalizer_step *step, bool continuation, bl_matcher *matcher,
                       const char *text, size_t n_bytes, bl_bytes *out)
{
    switch (step->kind) {
    case BL_NORM_PREPEND:
        if (!continuation) BL_TRY(bl_bytes_append(out, step->content, strlen(step->content)));
        return bl_bytes_append(out, text, n_bytes);
    case BL_NORM_REPLACE:
        if (continuation && bl_pattern_is_at_start(&step->pattern))
            return bl_bytes_append(out, text, n_bytes);
        return bl_pattern_replace(&step->pattern, matcher, step->content, text, n_bytes, out);
    case BL_NORM_UNICODE:
        return unicode_form(step, text, n_bytes, out);
    case BL_NORM_LOWERCASE:
        return lowercase(text, n_bytes, out);
    case BL_NORM_STRIP:
        return strip(step, continuation, text, n_bytes, out);
    case BL_NORM_STRIP_ACCENTS:
        return strip_accents(text, n_bytes, out);
    case BL_NORM_BYTE_LEVEL:
        return bl_bytes_append_to_alphabet(out, text, n_bytes);
    }
    return BL_FAIL(BL_EINTERNAL, "normalizer step %d", (int)step->kind);
}

bl_status bl_normalize(const bl_steps *steps, bool continuation, bl_bytes buffers[2],
                       bl_matcher *matcher, const char **text, size_t *n_bytes)
{
    size_t n_long = MAX_GROWTH * *n_bytes + SHORT_BYTES;

    if (n_long > MAX_NORMALIZED_BYTES) n_long = MAX_NORMALIZED_BYTES;
    for (size_t i = 0; i < steps->n_normalizers; i++) {
        if (*n_bytes == 0) break;
        bl_bytes *out = &buffers[i % 2];
        out->n = 0;
        out->limit = n_long;
        BL_TRY(apply(&steps->normalizer[i], continuation, matcher, *text, *n_bytes, out));
        *text = out->data;
        *n_bytes = out->n;
    }
    return BL_OK;
}
