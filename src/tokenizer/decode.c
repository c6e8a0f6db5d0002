/* SPDX-License-Identifier: Apache-2.0 */
/* Ids to text: the tokens' strings go as a list through the decoder's steps (huggingface/tokenizers
 * decoders/). */
#include <stdlib.h>
#include <string.h>

#include "base/deadline.h"
#include "base/sizes.h"
#include "tokenizer/internal.h"

/* A list of strings, end to end. */
typedef struct string_list {
    bl_bytes bytes;
    size_t *end; /* of each string, in bytes */
    size_t n, capacity;
} string_list;

/* Ends the string that was appended to list->bytes. */
static bl_status end_string(string_list *list)
{
    if (list->n == list->capacity) {
        size_t capacity = 2 * list->capacity + 64, n_bytes;
        size_t *grown = bl_mul_overflows(capacity, sizeof *grown, &n_bytes)
                            ? NULL
                            : realloc(list->end, n_bytes);
        if (!grown) return BL_FAIL(BL_ENOMEM, "decoding %zu tokens", capacity);
        list->end = grown;
        list->capacity = capacity;
    }
    list->end[list->n++] = list->bytes.n;
    return BL_OK;
}

static bl_status add_string(string_list *list, const char *text, size_t n_bytes)
{
    BL_TRY(bl_bytes_append(&list->bytes, text, n_bytes));
    return end_string(list);
}

static void free_list(string_list *list)
{
    bl_bytes_free(&list->bytes);
    free(list->end);
}

/* Appends raw bytes as UTF-8, a U+FFFD for each maximal part of a bad sequence (Rust's
 * from_utf8_lossy). */
static bl_status append_lossy(bl_bytes *out, const char *text, size_t n_bytes)
{
    while (n_bytes) {
        size_t n_good = bl_utf8_valid_prefix(text, n_bytes);
        BL_TRY(bl_bytes_append(out, text, n_good));
        text += n_good;
        n_bytes -= n_good;
        if (!n_bytes) break;
        size_t n_bad = bl_utf8_bad_run(text, n_bytes);
        BL_TRY(bl_bytes_append(out, "\xef\xbf\xbd", 3));
        text += n_bad;
        n_bytes -= n_bad;
    }
    return BL_OK;
}

/* ---- steps: each reads one list and writes another ---- */

static bl_status decode_byte_level(const string_list *in, string_list *out)
{
    bl_bytes raw = {0};
    bl_status st = BL_OK;
    bool in_alphabet;

    for (size_t i = 0, start = 0; i < in->n; start = in->end[i++]) {
        const char *text = in->bytes.data + start;
        size_t n_bytes = in->end[i] - start;
        BL_TRY_GOTO(st, done, bl_bytes_append_from_alphabet(&raw, text, n_bytes, &in_alphabet));
        if (!in_alphabet) BL_TRY_GOTO(st, done, bl_bytes_append(&raw, text, n_bytes));
    }
    BL_TRY_GOTO(st, done, append_lossy(&out->bytes, raw.data, raw.n));
    st = end_string(out);
done:
    bl_bytes_free(&raw);
    return st;
}

static bl_status decode_replace(const bl_decoder_step *step, const string_list *in,
                                string_list *out)
{
    bl_matcher match = {0};
    bl_status st = BL_OK;

    for (size_t i = 0, start = 0; i < in->n && st == BL_OK; start = in->end[i++]) {
        st = bl_pattern_replace(&step->pattern, &match, step->content, in->bytes.data + start,
                                in->end[i] - start, &out->bytes);
        if (st == BL_OK) st = end_string(out);
    }
    bl_matcher_free(&match);
    return st;
}

/* The suffix ends a word: a space, but not behind the last token. */
static bl_status decode_bpe(const bl_decoder_step *step, const string_list *in, string_list *out)
{
    for (size_t i = 0, start = 0; i < in->n; start = in->end[i++]) {
        BL_TRY(bl_pattern_replace(&step->pattern, NULL, i + 1 == in->n ? "" : " ",
                                  in->bytes.data + start, in->end[i] - start, &out->bytes));
        BL_TRY(end_string(out));
    }
    return BL_OK;
}

static int hex_digit(char c)
{
    return c >= '0' && c <= '9'   ? c - '0'
           : c >= 'A' && c <= 'F' ? c - 'A' + 10
           : c >= 'a' && c <= 'f' ? c - 'a' + 10
                                  : -1;
}

/* The byte that "<0xXX>" encodes, or -1. */
static int byte_token_value(const char *text, size_t n_bytes)
{
    if (n_bytes != 6 || memcmp(text, "<0x", 3) || text[5] != '>') return -1;
    int high = hex_digit(text[3]), low = hex_digit(text[4]);
    return high < 0 || low < 0 ? -1 : 16 * high + low;
}

/* A run of byte tokens becomes its text, or, when the run as a whole is not UTF-8, a U+FFFD a
 * byte. */
static bl_status end_byte_run(bl_bytes *run, string_list *out)
{
    bl_status st = BL_OK;

    if (!run->n) return BL_OK;
    if (bl_utf8_valid_prefix(run->data, run->n) == run->n)
        st = add_string(out, run->data, run->n);
    else
        for (size_t i = 0; i < run->n && st == BL_OK; i++) st = add_string(out, "\xef\xbf\xbd", 3);
    run->n = 0;
    return st;
}

static bl_status decode_byte_fallback(const string_list *in, string_list *out)
{
    bl_bytes run = {0};
    bl_status st = BL_OK;

    for (size_t i = 0, start = 0; i < in->n; start = in->end[i++]) {
        const char *text = in->bytes.data + start;
        size_t n_bytes = in->end[i] - start;
        int value = byte_token_value(text, n_bytes);
        if (value >= 0) {
            char byte = (char)value;
            BL_TRY_GOTO(st, done, bl_bytes_append(&run, &byte, 1));
            continue;
        }
        BL_TRY_GOTO(st, done, end_byte_run(&run, out));
        BL_TRY_GOTO(st, done, add_string(out, text, n_bytes));
    }
    st = end_byte_run(&run, out);
done:
    bl_bytes_free(&run);
    return st;
}

/* Takes up to n_start times the character `content` off the front of each string, and up to n_stop
 * times off its end. */
static bl_status decode_strip(const bl_decoder_step *step, const string_list *in, string_list *out)
{
    size_t n_content = strlen(step->content);

    for (size_t i = 0, start = 0; i < in->n; start = in->end[i++]) {
        const char *text = in->bytes.data + start;
        size_t n_bytes = in->end[i] - start;
        for (int64_t k = 0;
             k < step->n_start && n_bytes >= n_content && !memcmp(text, step->content, n_content);
             k++) {
            text += n_content;
            n_bytes -= n_content;
        }
        for (int64_t k = 0; k < step->n_stop && n_bytes >= n_content; k++) {
            if (memcmp(text + n_bytes - n_content, step->content, n_content)) break;
            n_bytes -= n_content;
        }
        BL_TRY(add_string(out, text, n_bytes));
    }
    return BL_OK;
}

/* Each replacement becomes a space again, except those of the first token, which are dropped: all
 * of them, as in HF, though encoding put only one before the text. */
static bl_status decode_metaspace(const bl_decoder_step *step, const string_list *in,
                                  string_list *out)
{
    size_t n_content = strlen(step->content);

    for (size_t i = 0, start = 0; i < in->n; start = in->end[i++]) {
        const char *text = in->bytes.data + start, *end = in->bytes.data + in->end[i], *found;
        while ((found = bl_text_find(text, (size_t)(end - text), step->content, n_content)) !=
               NULL) {
            BL_TRY(bl_bytes_append(&out->bytes, text, (size_t)(found - text)));
            BL_TRY(bl_bytes_append(&out->bytes, " ", i > 0 || !step->drops_first));
            text = found + n_content;
        }
        BL_TRY(add_string(out, text, (size_t)(end - text)));
    }
    return BL_OK;
}

static bl_status apply_step(const bl_decoder_step *step, const string_list *in, string_list *out)
{
    switch (step->kind) {
    case BL_DECODE_BYTE_LEVEL:
        return decode_byte_level(in, out);
    case BL_DECODE_REPLACE:
        return decode_replace(step, in, out);
    case BL_DECODE_BYTE_FALLBACK:
        return decode_byte_fallback(in, out);
    case BL_DECODE_FUSE:
        return add_string(out, in->bytes.data, in->bytes.n);
    case BL_DECODE_STRIP:
        return decode_strip(step, in, out);
    case BL_DECODE_METASPACE:
        return decode_metaspace(step, in, out);
    case BL_DECODE_BPE:
        return decode_bpe(step, in, out);
    }
    return BL_FAIL(BL_EINTERNAL, "decoder step %d", (int)step->kind);
}

bl_status bl_tokenizer_decode(const bl_tokenizer *tokenizer, const int32_t *ids, size_t n,
                              bool skip_special, char **out, size_t *n_bytes)
{
    enum { MAX_GROWTH = 64, SHORT_BYTES = 1 << 16 };
    string_list list[2] = {0};
    bool begun = bl_deadline_begin(n);
    size_t now = 0;
    bl_status st = BL_OK;

    *out = NULL;
    for (size_t i = 0; i < 2; i++) { /* a list of empty strings has bytes to point at too */
        BL_TRY_GOTO(st, done, bl_bytes_append(&list[i].bytes, "", 1));
        list[i].bytes.n = 0;
    }
    for (size_t i = 0; i < n; i++) {
        size_t n_token = 0;
        const char *token = bl_strings_get(&tokenizer->model.text, ids[i], &n_token);
        if (!token || (skip_special && tokenizer->model.is_special[ids[i]])) continue;
        if (tokenizer->decoded && tokenizer->decoded[ids[i]]) {
            token = tokenizer->decoded[ids[i]];
            n_token = strlen(token);
        }
        if (!tokenizer->has_decoder && list[0].n)
            BL_TRY_GOTO(st, done, bl_bytes_append(&list[0].bytes, " ", 1));
        BL_TRY_GOTO(st, done, add_string(&list[0], token, n_token));
    }
    for (size_t i = 0; i < 2; i++) list[i].bytes.limit = MAX_GROWTH * list[0].bytes.n + SHORT_BYTES;
    for (size_t i = 0; i < tokenizer->n_decoders; i++, now = 1 - now) {
        list[1 - now].bytes.n = list[1 - now].n = 0;
        BL_TRY_GOTO(st, done, apply_step(&tokenizer->decoder[i], &list[now], &list[1 - now]));
    }
    if (n_bytes) *n_bytes = list[now].bytes.n;
    BL_TRY_GOTO(st, done, bl_bytes_append(&list[now].bytes, "", 1));
    *out = list[now].bytes.data;
    list[now].bytes = (bl_bytes){0};
done:
    free_list(&list[0]);
    free_list(&list[1]);
    bl_deadline_end(begun);
    return st;
}

size_t bl_tokenizer_settled(const bl_tokenizer *tokenizer, const int32_t *ids, size_t n)
{
    bool joins_bytes = false;
    size_t settled = n;

    for (size_t i = 0; i < tokenizer->n_decoders; i++)
        joins_bytes = joins_bytes || tokenizer->decoder[i].kind == BL_DECODE_BYTE_FALLBACK;
    for (size_t i = n; joins_bytes && i-- > 0;) {
        size_t n_token;
        const char *token = bl_strings_get(&tokenizer->model.text, ids[i], &n_token);
        if (!token || tokenizer->model.is_special[ids[i]]) continue;
        if (byte_token_value(token, n_token) < 0) break;
        settled = i;
    }
    return settled;
}
