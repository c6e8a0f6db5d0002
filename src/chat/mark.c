/* SPDX-License-Identifier: Apache-2.0 */
/* Marks the special tokens that texts and keys of a row spell, before a template sees them: a mark
 * inside each, so that the rendered text has no such token. A text that ends as one begins, or
 * begins as one ends, gets a mark, too: the template, or the row's next text, may write the
 * rest. */
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "chat/internal.h"
#include "tokenizer/text.h"

#define MARK BL_JINJA_MARK

enum { PART_BYTES = 2 }; /* of a token at the border of a text, to be taken for one */

bl_status bl_chat_list_special(bl_chat_template *chat)
{
    int32_t n_ids = bl_tokenizer_vocab_size(chat->tokenizer);
    size_t n = 0;

    for (int32_t id = 0; id < n_ids; id++) n += bl_tokenizer_is_special(chat->tokenizer, id);
    if (!(chat->special = calloc(n + 1, sizeof *chat->special)))
        return BL_FAIL(BL_ENOMEM, "chat template: special tokens");
    for (int32_t id = 0; id < n_ids; id++)
        if (bl_tokenizer_is_special(chat->tokenizer, id))
            chat->special[chat->n_special++] = bl_tokenizer_id_to_token(chat->tokenizer, id);
    return BL_OK;
}

static size_t character_bytes(const char *text, size_t n_bytes)
{
    size_t n = 1;

    while (n < n_bytes && ((unsigned char)text[n] & 0xc0) == 0x80) n++;
    return n;
}

/* Bytes at the end of the text that are the beginning of the token. */
static size_t part_at_end(const char *text, size_t n_bytes, const char *token)
{
    for (size_t n = PART_BYTES; n < strlen(token) && n <= n_bytes; n++)
        if (text[n_bytes - 1] == token[n - 1] && !memcmp(text + n_bytes - n, token, n)) return n;
    return 0;
}

static bool is_part_at_start(const char *text, size_t n_bytes, const char *token)
{
    size_t n_token = strlen(token);

    for (size_t n = PART_BYTES; n < n_token && n <= n_bytes; n++)
        if (text[0] == token[n_token - n] && !memcmp(text, token + n_token - n, n)) return true;
    return n_bytes > PART_BYTES && n_token == n_bytes + 2 && !memcmp(text, token + 1, n_bytes);
}

/* Places for a mark in parts of tokens at the borders of the text, white space apart; SIZE_MAX:
 * none. */
static void find_parts(const bl_chat_template *chat, const char *text, size_t n_bytes,
                       size_t place[2])
{
    static const char blanks[] = " \t\r\n";
    size_t start = 0;

    place[0] = place[1] = SIZE_MAX;
    while (start < n_bytes && text[start] && strchr(blanks, text[start])) start++;
    while (n_bytes > start && text[n_bytes - 1] && strchr(blanks, text[n_bytes - 1])) n_bytes--;
    for (size_t i = 0; i < chat->n_special && n_bytes > start; i++) {
        size_t n = part_at_end(text + start, n_bytes - start, chat->special[i]);
        if (n) place[1] = n_bytes - n + character_bytes(text + n_bytes - n, n);
        if (is_part_at_start(text + start, n_bytes - start, chat->special[i]))
            place[0] = start + character_bytes(text + start, n_bytes - start);
    }
}

/* Appends text[from..to) with a mark at each place in it. */
static bl_status append_range(const size_t place[2], const char *text, size_t from, size_t to,
                              bl_bytes *out)
{
    for (int i = 0; i < 2; i++) {
        if (place[i] < from || place[i] >= to) continue;
        BL_TRY(bl_bytes_append(out, text + from, place[i] - from));
        BL_TRY(bl_bytes_append(out, MARK, strlen(MARK)));
        from = place[i];
    }
    return bl_bytes_append(out, text + from, to - from);
}

static bl_status mark_bytes(const bl_chat_template *chat, const char *text, size_t n_bytes,
                            bl_bytes *out)
{
    bl_special_match match;
    size_t cursor = 0, done = 0, place[2];

    if (bl_text_find(text, n_bytes, MARK, strlen(MARK)))
        return BL_FAIL(BL_EINPUT, "a text has U+E100, which Ballast uses itself");
    find_parts(chat, text, n_bytes, place);
    while (bl_tokenizer_next_special(chat->tokenizer, text, n_bytes, &cursor, done, &match)) {
        size_t at = match.start; /* white space that the token strips is not a part of its name */
        while (at + 1 < match.end && strchr(" \t\r\n", text[at])) at++;
        at += character_bytes(text + at, match.end - at);
        BL_TRY(append_range(place, text, done, at, out));
        BL_TRY(bl_bytes_append(out, MARK, strlen(MARK)));
        done = at;
    }
    return append_range(place, text, done, n_bytes, out);
}

static bl_status mark_text(const bl_chat_template *chat, const char *text, size_t n_bytes,
                           json_t **out)
{
    bl_bytes marked = {0};

    bl_status st = mark_bytes(chat, text, n_bytes, &marked);
    if (st == BL_OK && !(*out = json_stringn_nocheck(marked.n ? marked.data : "", marked.n)))
        st = BL_FAIL(BL_ENOMEM, "chat template: a message");
    bl_bytes_free(&marked);
    return st;
}

/* Gives `value`, which it takes over, to the marked key. */
static bl_status set_marked(const bl_chat_template *chat, json_t *object, const char *key,
                            json_t *value)
{
    bl_bytes marked = {0};

    bl_status st = mark_bytes(chat, key, strlen(key), &marked);
    if (st != BL_OK)
        json_decref(value);
    else if (json_object_setn_new_nocheck(object, marked.n ? marked.data : "", marked.n, value))
        st = BL_FAIL(BL_ENOMEM, "chat template: a message");
    bl_bytes_free(&marked);
    return st;
}

bl_status bl_chat_mark(const bl_chat_template *chat, const json_t *value, json_t **out)
{
    const char *key;
    json_t *child, *copy;
    size_t i;

    *out = NULL;
    if (json_is_string(value))
        return mark_text(chat, json_string_value(value), json_string_length(value), out);
    if (!json_is_object(value) && !json_is_array(value)) {
        *out = json_incref((json_t *)value);
        return BL_OK;
    }
    json_t *whole = json_is_object(value) ? json_object() : json_array();
    bl_status st = whole ? BL_OK : BL_FAIL(BL_ENOMEM, "chat template: a message");
    if (json_is_object(value)) json_object_foreach((json_t *)value, key, child)
        {
            BL_TRY_GOTO(st, done, bl_chat_mark(chat, child, &copy));
            BL_TRY_GOTO(st, done, set_marked(chat, whole, key, copy));
        }
    else
        json_array_foreach((json_t *)value, i, child)
        {
            BL_TRY_GOTO(st, done, bl_chat_mark(chat, child, &copy));
            if (json_array_append_new(whole, copy))
                st = BL_FAIL(BL_ENOMEM, "chat template: a message");
        }
done:
    if (st != BL_OK) json_decref(whole);
    *out = st == BL_OK ? whole : NULL;
    return st;
}
