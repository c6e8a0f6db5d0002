/* SPDX-License-Identifier: Apache-2.0 */
/* generate_text.c -- the text of an answer while it grows, and the texts that end it. */
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "cli/generate_internal.h"

/* ---- stop texts ---- */

static bl_status add_stop(bl_stop_texts *stops, const char *text)
{
    if (!text[0]) return BL_FAIL(BL_EUSAGE, "--stop: a text is empty");
    BL_TRY(bl_text_format(&stops->text[stops->n], "%s", text));
    stops->n++;
    return BL_OK;
}

static bl_status read_list(const char *value, bl_stop_texts *out)
{
    bl_string_list list = {0};
    bl_status st = bl_options_read_list("stop", value, &list);

    if (st == BL_OK && !(out->text = calloc((size_t)list.n_items + 1, sizeof *out->text)))
        st = BL_FAIL(BL_ENOMEM, "stop texts");
    for (int64_t i = 0; i < list.n_items && st == BL_OK; i++) st = add_stop(out, list.items[i]);
    bl_string_list_clear(&list);
    return st;
}

bl_status bl_stop_texts_read(const char *value, bl_stop_texts *out)
{
    *out = (bl_stop_texts){.n = 0};
    if (!value) return BL_OK;
    size_t n_bytes = strlen(value);
    if (n_bytes > 1 && value[0] == '[' && value[n_bytes - 1] == ']') return read_list(value, out);
    if (!(out->text = calloc(1, sizeof *out->text))) return BL_FAIL(BL_ENOMEM, "stop texts");
    return add_stop(out, value);
}

void bl_stop_texts_free(bl_stop_texts *stops)
{
    for (size_t i = 0; i < stops->n; i++) free(stops->text[i]);
    free(stops->text);
    *stops = (bl_stop_texts){.n = 0};
}

/* ---- pieces ---- */

/* Where the first stop text in text[begin..n) begins; n: there is none. Of two that begin there,
 * the longer one. */
static size_t find_stop(const bl_stop_texts *stops, const char *text, size_t begin, size_t n,
                        const char **found)
{
    size_t at = n;

    for (size_t i = 0; i < stops->n; i++) {
        const char *stop = stops->text[i],
                   *place = memmem(text + begin, n - begin, stop, strlen(stop));
        if (!place || (size_t)(place - text) > at) continue;
        if ((size_t)(place - text) == at && *found && strlen(*found) >= strlen(stop)) continue;
        at = (size_t)(place - text);
        *found = stop;
    }
    return at;
}

/* Bytes at the end of text[begin..n) with which a stop text begins. */
static size_t begun_stop(const bl_stop_texts *stops, const char *text, size_t begin, size_t n)
{
    size_t most = 0;

    for (size_t i = 0; i < stops->n; i++) {
        size_t length = strlen(stops->text[i]) - 1;
        if (length > n - begin) length = n - begin;
        while (length > most && memcmp(text + n - length, stops->text[i], length) != 0) length--;
        if (length > most) most = length;
    }
    return most;
}

/* Bytes that are not UTF-8 are decoded as U+FFFD: at the end, those of a character whose other
 * bytes are not there yet. */
static size_t without_open_character(const char *text, size_t begin, size_t n)
{
    static const char replacement[] = "\xEF\xBF\xBD";
    while (n >= begin + 3 && memcmp(text + n - 3, replacement, 3) == 0) n -= 3;
    return n;
}

/* Bytes of the text of ids[0..n), which is `length` bytes long, that later ids do not change. */
static bl_status settled_bytes(const bl_tokenizer *tokenizer, const int32_t *ids, size_t n,
                               size_t length, size_t *out)
{
    size_t n_settled = bl_tokenizer_settled(tokenizer, ids, n);
    char *text;

    *out = length;
    if (n_settled == n) return BL_OK;
    BL_TRY(bl_tokenizer_decode(tokenizer, ids, n_settled, true, &text, out));
    free(text);
    return BL_OK;
}

/* A prompt's last bytes may become longer characters with the answer's first: a piece does not
 * begin inside of one. */
static size_t begin_of_character(const char *text, size_t at, size_t n)
{
    while (at < n && ((unsigned char)text[at] & 0xC0) == 0x80) at++;
    return at;
}

bl_status bl_answer_text_next(bl_answer_text *a, const int32_t *ids, size_t n, bool is_last,
                              char **piece, size_t *n_bytes)
{
    char *text;
    size_t length, settled;

    BL_TRY(bl_tokenizer_decode(a->tokenizer, ids, n, true, &text, &length));
    bl_status st = settled_bytes(a->tokenizer, ids, n, length, &settled);
    if (st != BL_OK) {
        free(text);
        return st;
    }
    /* A prompt that ends inside a character has a replacement there, which may be shorter. */
    size_t begin = a->begin < length ? a->begin : length, end = length;
    if (a->stop)
        end = a->shown;
    else if ((end = find_stop(a->stops, text, begin, length, &a->stop)) == length && !is_last) {
        end = without_open_character(text, begin, length);
        end -= begun_stop(a->stops, text, begin, end);
        if (end > settled) end = settled;
    }
    size_t shown = begin_of_character(text, a->shown < end ? a->shown : end, end);
    *n_bytes = end - shown;
    memmove(text, text + shown, *n_bytes);
    text[*n_bytes] = '\0';
    *piece = text;
    if (end > a->shown) a->shown = end;
    return BL_OK;
}
