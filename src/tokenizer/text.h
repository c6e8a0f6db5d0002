/* SPDX-License-Identifier: Apache-2.0 */
/* text.h -- UTF-8, character classes, the byte alphabet of byte-level BPE, and growable text. */
#ifndef BALLAST_TOKENIZER_TEXT_H
#define BALLAST_TOKENIZER_TEXT_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"

/* The code point at text[0..n_bytes), valid UTF-8, n_bytes > 0; *length gets its bytes. */
uint32_t bl_utf8_decode(const char *text, size_t n_bytes, size_t *length);
/* The same of the last code point of text[0..n_bytes). */
uint32_t bl_utf8_decode_last(const char *text, size_t n_bytes, size_t *length);
size_t bl_utf8_valid_prefix(const char *text,
                            size_t n_bytes); /* bytes before the first that is not UTF-8 */
size_t bl_utf8_bad_run(const char *text,
                       size_t n_bytes);  /* invalid bytes that one U+FFFD replaces (W3C, Rust) */
bool bl_unicode_is_space(uint32_t code); /* White_Space */
bool bl_unicode_is_word(uint32_t code);  /* \w of UTS 18 */
bool bl_unicode_is_unnormalized(uint32_t code); /* newer than the reference's normalizer */

/* As Rust's char::is_numeric, and the library's punctuation and combining marks. */
bool bl_unicode_is_numeric(uint32_t code);
bool bl_unicode_is_punctuation(uint32_t code);
bool bl_unicode_is_accent(uint32_t code);
uint32_t bl_unicode_lower(uint32_t code); /* simple: U+0130 stays */

/* The first `part` in text[0..n_bytes), n_part > 0, or NULL. For short parts that are rare or found
 * soon: not memmem, whose sanitizer twin looks at all of the text in each call. */
const char *bl_text_find(const char *text, size_t n_bytes, const char *part, size_t n_part);

/* A growable byte buffer. */
typedef struct bl_bytes {
    char *data;
    size_t n, capacity;
    size_t limit; /* of n: BL_EINPUT beyond; 0: none */
} bl_bytes;

bl_status bl_bytes_append(bl_bytes *bytes, const char *text, size_t n_bytes);
void bl_bytes_free(bl_bytes *bytes);

/* Appends the raw bytes that `text` encodes in the byte alphabet. False: a character outside it
 * (nothing added). */
bl_status bl_bytes_append_from_alphabet(bl_bytes *bytes, const char *text, size_t n_bytes,
                                        bool *in_alphabet);
/* Appends raw bytes as characters of the byte alphabet. */
bl_status bl_bytes_append_to_alphabet(bl_bytes *bytes, const char *text, size_t n_bytes);

#endif
