/* SPDX-License-Identifier: Apache-2.0 */
/* UTF-8, the character classes that added tokens ask about, and GPT-2's byte alphabet. */
#include <stdlib.h>
#include <string.h>

#include <utf8proc.h>

#include "base/sizes.h"
#include "tokenizer/internal.h"

uint32_t bl_utf8_decode(const char *text, size_t n_bytes, size_t *length)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t want = p[0] < 0x80 ? 1 : p[0] < 0xe0 ? 2 : p[0] < 0xf0 ? 3 : 4;
    if (want > n_bytes) want = n_bytes; /* only for input that is not UTF-8 */
    uint32_t code = want == 1 ? p[0] : p[0] & (0x7fu >> want);
    for (size_t i = 1; i < want; i++) code = code << 6 | (p[i] & 0x3fu);
    *length = want;
    return code;
}

uint32_t bl_utf8_decode_last(const char *text, size_t n_bytes, size_t *length)
{
    size_t start = n_bytes - 1;
    while (start > 0 && ((unsigned char)text[start] & 0xc0) == 0x80) start--;
    return bl_utf8_decode(text + start, n_bytes - start, length);
}

/* The length of the well-formed character at p[0..n), or 0; *n_good gets the bytes that could begin
 * one (Unicode 3.9, table 3-7). */
static size_t char_length(const unsigned char *p, size_t n, size_t *n_good)
{
    unsigned char low = 0x80, high = 0xbf;
    size_t want;

    *n_good = 1;
    if (p[0] < 0x80) return 1;
    if (p[0] >= 0xc2 && p[0] <= 0xdf)
        want = 2;
    else if (p[0] >= 0xe0 && p[0] <= 0xef)
        want = 3;
    else if (p[0] >= 0xf0 && p[0] <= 0xf4)
        want = 4;
    else
        return 0;
    if (p[0] == 0xe0) low = 0xa0;
    if (p[0] == 0xed) high = 0x9f;
    if (p[0] == 0xf0) low = 0x90;
    if (p[0] == 0xf4) high = 0x8f;
    for (size_t i = 1; i < want; i++) {
        if (i >= n || p[i] < low || p[i] > high) return 0;
        *n_good = i + 1;
        low = 0x80;
        high = 0xbf;
    }
    return want;
}

size_t bl_utf8_valid_prefix(const char *text, size_t n_bytes)
{
    const unsigned char *p = (const unsigned char *)text;
    size_t i = 0, n_good;

    while (i < n_bytes) {
        uint64_t eight;
        if (n_bytes - i >= sizeof eight) {
            memcpy(&eight, p + i, sizeof eight);
            if (!(eight & 0x8080808080808080u)) {
                i += sizeof eight;
                continue;
            }
        }
        size_t length = char_length(p + i, n_bytes - i, &n_good);
        if (!length) return i;
        i += length;
    }
    return i;
}

size_t bl_utf8_bad_run(const char *text, size_t n_bytes)
{
    size_t n_good;
    char_length((const unsigned char *)text, n_bytes, &n_good);
    return n_good;
}

bool bl_unicode_is_space(uint32_t code)
{
    if (code < 0x80) return code == ' ' || (code >= 9 && code <= 13);
    return code == 0x85 || code == 0xa0 || code == 0x1680 || (code >= 0x2000 && code <= 0x200a) ||
           code == 0x2028 || code == 0x2029 || code == 0x202f || code == 0x205f || code == 0x3000;
}

/* Ranges in ascending order. */
static bool is_in(const bl_unicode_range *range, size_t n_ranges, uint32_t code)
{
    size_t low = 0, end = n_ranges;

    while (low < end) {
        size_t middle = low + (end - low) / 2;
        if (range[middle].last < code)
            low = middle + 1;
        else
            end = middle;
    }
    return low < n_ranges && range[low].first <= code;
}

bool bl_unicode_is_unnormalized(uint32_t code)
{
    return code >= bl_unicode_unnormalized[0].first &&
           is_in(bl_unicode_unnormalized, bl_n_unicode_unnormalized, code);
}

bool bl_unicode_is_numeric(uint32_t code)
{
    if (code < 0x80) return code >= '0' && code <= '9';
    return is_in(bl_unicode_numeric.range, bl_unicode_numeric.n, code);
}

bool bl_unicode_is_punctuation(uint32_t code)
{
    return is_in(bl_unicode_punctuation.range, bl_unicode_punctuation.n, code);
}

bool bl_unicode_is_accent(uint32_t code)
{
    return code >= 0x300 && is_in(bl_unicode_accents.range, bl_unicode_accents.n, code);
}

uint32_t bl_unicode_lower(uint32_t code)
{
    if (code < 0x80) return code >= 'A' && code <= 'Z' ? code + 32 : code;
    if (code == 0x130) return code;
    for (size_t i = 0; i < bl_n_unicode_lowerings; i++) {
        const bl_unicode_lowering *l = &bl_unicode_lowerings[i];
        if (code >= l->first && code <= l->last) return (uint32_t)((int32_t)code + l->offset);
    }
    return (uint32_t)utf8proc_tolower((utf8proc_int32_t)code);
}

/* Of the categories that bl_unicode_is_word takes. */
static bool is_new_word(uint32_t code)
{
    static const char *const kinds[] = {"L", "M", "Nd", "Nl", "Pc"};

    for (size_t i = 0; i < bl_n_unicode_additions; i++) {
        const bl_unicode_addition *a = &bl_unicode_additions[i];
        for (size_t k = 0; k < BL_COUNT(kinds); k++)
            if (!strncmp(a->category, kinds[k], strlen(kinds[k])) &&
                is_in(a->added, a->n_added, code))
                return true;
    }
    return false;
}

/* Alphabetic, Mark, Decimal_Number, Connector_Punctuation, Join_Control. Alphabetic beyond the
 * letters, Nl and marks is Other_Alphabetic's circled and squared Latin letters. */
bool bl_unicode_is_word(uint32_t code)
{
    switch (utf8proc_category((utf8proc_int32_t)code)) {
    case UTF8PROC_CATEGORY_LU:
    case UTF8PROC_CATEGORY_LL:
    case UTF8PROC_CATEGORY_LT:
    case UTF8PROC_CATEGORY_LM:
    case UTF8PROC_CATEGORY_LO:
    case UTF8PROC_CATEGORY_MN:
    case UTF8PROC_CATEGORY_MC:
    case UTF8PROC_CATEGORY_ME:
    case UTF8PROC_CATEGORY_ND:
    case UTF8PROC_CATEGORY_NL:
    case UTF8PROC_CATEGORY_PC:
        return true;
    default:
        break;
    }
    return code == 0x200c || code == 0x200d || (code >= 0x24b6 && code <= 0x24e9) ||
           (code >= 0x1f130 && code <= 0x1f149) || (code >= 0x1f150 && code <= 0x1f169) ||
           (code >= 0x1f170 && code <= 0x1f189) || is_new_word(code);
}

/* Printable Latin-1 encodes itself; the 68 other bytes, in order, are U+0100 onwards. */
static bool stands_for_itself(uint32_t code)
{
    return (code >= '!' && code <= '~') || (code >= 0xa1 && code <= 0xff && code != 0xad);
}

/* GPT-2's bytes_to_unicode, inverted; -1: not in it. */
static int char_to_byte(uint32_t code)
{
    if (stands_for_itself(code)) return (int)code;
    if (code < 0x100 || code > 0x100 + 67) return -1;
    uint32_t index = code - 0x100;
    if (index <= 32) return (int)index;
    return index == 67 ? 0xad : (int)(index - 33 + 0x7f);
}

const char *bl_text_find(const char *text, size_t n_bytes, const char *part, size_t n_part)
{
    enum { LONG_BYTES = 64 }; /* compared at each place, it could take the square of the time */

    if (n_part > LONG_BYTES) return memmem(text, n_bytes, part, n_part);
    for (const char *end = text + n_bytes;
         text < end && (text = memchr(text, part[0], (size_t)(end - text))); text++)
        if ((size_t)(end - text) >= n_part && !memcmp(text, part, n_part)) return text;
    return NULL;
}

bl_status bl_bytes_append(bl_bytes *bytes, const char *text, size_t n_bytes)
{
    size_t need;

    if (bl_add_overflows(bytes->n, n_bytes, &need))
        return BL_FAIL(BL_ENOMEM, "tokenizer: text buffer");
    if (bytes->limit && need > bytes->limit)
        return BL_FAIL(BL_EINPUT, "a step of the tokenizer makes more than %zu bytes of a text",
                       bytes->limit);
    if (need > bytes->capacity) {
        size_t capacity = need < SIZE_MAX / 2 ? need + need / 2 + 64 : need;
        char *grown = realloc(bytes->data, capacity);
        if (!grown) return BL_FAIL(BL_ENOMEM, "tokenizer: text buffer of %zu bytes", capacity);
        bytes->data = grown;
        bytes->capacity = capacity;
    }
    if (n_bytes) memcpy(bytes->data + bytes->n, text, n_bytes);
    bytes->n = need;
    return BL_OK;
}

void bl_bytes_free(bl_bytes *bytes)
{
    free(bytes->data);
    *bytes = (bl_bytes){0};
}

bl_status bl_bytes_append_from_alphabet(bl_bytes *bytes, const char *text, size_t n_bytes,
                                        bool *in_alphabet)
{
    size_t old_n = bytes->n, length;

    *in_alphabet = true;
    for (size_t i = 0; i < n_bytes; i += length) {
        int byte = char_to_byte(bl_utf8_decode(text + i, n_bytes - i, &length));
        if (byte < 0) {
            bytes->n = old_n;
            *in_alphabet = false;
            return BL_OK;
        }
        char raw = (char)byte;
        BL_TRY(bl_bytes_append(bytes, &raw, 1));
    }
    return BL_OK;
}

bl_status bl_bytes_append_to_alphabet(bl_bytes *bytes, const char *text, size_t n_bytes)
{
    for (size_t i = 0; i < n_bytes; i++) {
        uint32_t byte = (unsigned char)text[i];
        uint32_t code = stands_for_itself(byte) ? byte
                        : byte <= ' '           ? 0x100 + byte
                        : byte == 0xad          ? 0x100 + 67
                                                : 0x100 + 33 + (byte - 0x7f);
        char utf8[2] = {(char)(0xc0 | code >> 6), (char)(0x80 | (code & 0x3f))};
        if (code < 0x80) utf8[0] = (char)code;
        BL_TRY(bl_bytes_append(bytes, utf8, code < 0x80 ? 1 : 2));
    }
    return BL_OK;
}
