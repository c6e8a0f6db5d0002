/* SPDX-License-Identifier: Apache-2.0 */
/* Writes a conversation as ids and labels.
 *
 * Text gathers until a special token or a border between learned and masked ends it, and is then
 * tokenized as one: the same ids as tokenizing the whole rendered text, wherever no token of the
 * vocabulary reaches across a border. */
#include "chat/internal.h"

#include <string.h>

#include "base/deadline.h"
#include "tokenizer/text.h"

typedef struct writer {
    const bl_chat_template *chat;
    bool train_on_inputs;
    bl_ids *ids, *labels;
    bl_bytes text;   /* gathered */
    bool after_text; /* the last output is text */
    bool begun;      /* something was written */
} writer;

static bl_status add_bytes(writer *w, const char *text, size_t n_bytes)
{
    return bl_bytes_append(&w->text, text, n_bytes);
}

static bl_status flush(writer *w)
{
    if (!w->text.n) return BL_OK;
    BL_TRY(bl_tokenizer_encode(w->chat->tokenizer, w->text.data, w->text.n,
                               w->after_text ? BL_CONTINUATION
                               : w->begun    ? BL_AFTER_TOKEN
                                             : 0u,
                               w->ids));
    w->text.n = 0;
    w->after_text = w->begun = true;
    return BL_OK;
}

/* Ends the learned or masked span that began at the last border. */
static bl_status set_border(writer *w, bool learn)
{
    BL_TRY(flush(w));
    BL_TRY(bl_ids_reserve(w->labels, w->ids->n - w->labels->n));
    for (; w->labels->n < w->ids->n; w->labels->n++)
        w->labels->id[w->labels->n] =
            learn || w->train_on_inputs ? w->ids->id[w->labels->n] : BL_LABEL_MASKED;
    return BL_OK;
}

static bl_status add_text(writer *w, const bl_chat_text *text)
{
    for (size_t i = 0; i < text->n; i++) {
        if (text->piece[i].id < 0) {
            BL_TRY(add_bytes(w, text->piece[i].text, strlen(text->piece[i].text)));
            continue;
        }
        BL_TRY(flush(w));
        BL_TRY(bl_ids_push(w->ids, text->piece[i].id));
        w->after_text = false;
        w->begun = true;
    }
    return BL_OK;
}

/* Python's str.isspace: White_Space and the four separators. */
static bool is_blank(uint32_t code)
{
    return bl_unicode_is_space(code) || (code >= 0x1c && code <= 0x1f);
}

static void trim(const char **text, size_t *n_bytes)
{
    size_t length;

    while (*n_bytes && is_blank(bl_utf8_decode(*text, *n_bytes, &length))) {
        *text += length;
        *n_bytes -= length;
    }
    while (*n_bytes) {
        size_t start = *n_bytes - 1;
        while (start > 0 && ((unsigned char)(*text)[start] & 0xc0) == 0x80) start--;
        if (!is_blank(bl_utf8_decode(*text + start, *n_bytes - start, &length))) break;
        *n_bytes = start;
    }
}

bool bl_chat_is_blank(const char *text)
{
    size_t n_bytes = strlen(text);

    trim(&text, &n_bytes);
    return n_bytes == 0;
}

static bl_status add_content(writer *w, const char *text, size_t n_bytes)
{
    if (w->chat->trims) trim(&text, &n_bytes);
    return add_bytes(w, text, n_bytes);
}

static bl_status append_plain(bl_bytes *bytes, const bl_chat_text *text)
{
    for (size_t i = 0; i < text->n; i++)
        BL_TRY(bl_bytes_append(bytes, text->piece[i].text, strlen(text->piece[i].text)));
    return BL_OK;
}

/* Llama 2: the system message is the beginning of the first user's content, and both are stripped
 * as one. */
static bl_status add_nested(writer *w, const char *system, const char *content)
{
    bl_bytes whole = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, append_plain(&whole, &w->chat->prefix[BL_CHAT_SYSTEM]));
    BL_TRY_GOTO(st, done, bl_bytes_append(&whole, system, strlen(system)));
    BL_TRY_GOTO(st, done, append_plain(&whole, &w->chat->suffix[BL_CHAT_SYSTEM]));
    BL_TRY_GOTO(st, done, bl_bytes_append(&whole, content, strlen(content)));
    st = add_content(w, whole.data, whole.n);
done:
    bl_bytes_free(&whole);
    return st;
}

/* `lead`, which may be NULL, is masked text before the content. */
static bl_status add_listened(writer *w, const bl_chat_message *message, const char *lead)
{
    const bl_chat_template *chat = w->chat;

    BL_TRY(add_text(w, &chat->prefix[message->role]));
    if (lead) BL_TRY(add_bytes(w, lead, strlen(lead)));
    BL_TRY(add_content(w, message->content, strlen(message->content)));
    return add_text(w, &chat->suffix[message->role]);
}

static bl_status add_learned(writer *w, const bl_chat_message *message)
{
    const bl_chat_template *chat = w->chat;

    BL_TRY(add_text(w, &chat->prefix[BL_CHAT_ASSISTANT]));
    BL_TRY(set_border(w, false));
    BL_TRY(add_text(w, &chat->answer_start));
    BL_TRY(add_content(w, message->content, strlen(message->content)));
    BL_TRY(add_text(w, &chat->answer_end));
    BL_TRY(set_border(w, !message->is_masked)); /* a border, masked or not: the same ids */
    BL_TRY(add_text(w, &chat->suffix[BL_CHAT_ASSISTANT]));
    return chat->learns_suffix ? set_border(w, !message->is_masked) : BL_OK;
}

/* What a template makes of a system message at the start, or of its absence; *n gets the messages
 * that it took. */
static bl_status add_start(writer *w, const bl_chat_message *messages, size_t *n)
{
    static const bl_chat_message no_system = {.role = BL_CHAT_SYSTEM, .content = ""};
    const bl_chat_template *chat = w->chat;
    bool given = messages[0].role == BL_CHAT_SYSTEM;

    *n = 0;
    BL_TRY(add_text(w, &chat->begin));
    if (chat->system_head) { /* a later system message is an ordinary one */
        *n = given;
        return add_listened(w, given ? &messages[0] : &no_system, chat->system_head);
    }
    if (!chat->nests_system || !given) return BL_OK;
    *n = 2; /* check_all has seen the user's turn */
    BL_TRY(add_text(w, &chat->prefix[BL_CHAT_USER]));
    BL_TRY(add_nested(w, messages[0].content, messages[1].content));
    return add_text(w, &chat->suffix[BL_CHAT_USER]);
}

/* ---- rejected input ---- */

static bl_status check_turn(const bl_chat_message *message, size_t i)
{
    bool speaks = message->role == BL_CHAT_USER || message->role == BL_CHAT_ASSISTANT;

    if (!speaks || !bl_chat_is_blank(message->content)) return BL_OK;
    if (json_array_size(json_object_get(message->object, "tool_calls"))) return BL_OK;
    return BL_FAIL(BL_EINPUT, "message %zu: an empty %s turn", i,
                   bl_chat_role_names[message->role]);
}

static bl_status check_message(const bl_chat_template *chat, const bl_chat_message *messages,
                               size_t i)
{
    bl_chat_role role = messages[i].role;
    const char *text = messages[i].content;
    size_t n_bytes = strlen(text), n_system = i > 0 && messages[0].role == BL_CHAT_SYSTEM;

    size_t n_valid = bl_utf8_valid_prefix(text, n_bytes);
    if (n_valid < n_bytes)
        return BL_FAIL(BL_EINPUT, "message %zu: byte %zu is not UTF-8", i, n_valid);
    if (role == BL_CHAT_TOOL || !chat->has_role[role])
        return BL_FAIL(BL_EINPUT, "message %zu: chat template %s has no role %s", i, chat->name,
                       bl_chat_role_names[role]);
    BL_TRY(check_turn(&messages[i], i));
    if (!chat->alternates) return BL_OK;
    bl_chat_role expected = (i - n_system) % 2 ? BL_CHAT_ASSISTANT : BL_CHAT_USER;
    if (role == expected || (i == 0 && role == BL_CHAT_SYSTEM)) return BL_OK;
    return BL_FAIL(
        BL_EINPUT,
        "message %zu: %s; chat template %s wants %s there (roles alternate, user first, one "
        "system message before)",
        i, bl_chat_role_names[role], chat->name, bl_chat_role_names[expected]);
}

static bl_status check_all(const bl_chat_template *chat, const bl_chat_message *messages, size_t n)
{
    bool has_system = n && messages[0].role == BL_CHAT_SYSTEM;

    if (n == (size_t)has_system) return BL_FAIL(BL_EINPUT, "a conversation without a turn");
    for (size_t i = 0; i < n; i++) BL_TRY(check_message(chat, messages, i));
    return BL_OK;
}

static bl_status add_messages(writer *w, const bl_chat_message *messages, size_t n_messages)
{
    size_t first;

    BL_TRY(check_all(w->chat, messages, n_messages));
    BL_TRY(add_start(w, messages, &first));
    for (size_t i = first; i < n_messages; i++) {
        bool learned = messages[i].role == BL_CHAT_ASSISTANT;
        BL_TRY(learned ? add_learned(w, &messages[i]) : add_listened(w, &messages[i], NULL));
    }
    return BL_OK;
}

static size_t count_bytes(const bl_chat_message *messages, size_t n)
{
    size_t n_bytes = 0;

    for (size_t i = 0; i < n; i++) n_bytes += messages[i].content ? strlen(messages[i].content) : 0;
    return n_bytes;
}

bool bl_chat_template_takes_objects(const bl_chat_template *chat)
{
    return chat->jinja != NULL; /* prefixes and suffixes have no place for them */
}

bl_status bl_chat_template_encode(const bl_chat_template *chat, const bl_chat_message *messages,
                                  size_t n_messages, const json_t *context, bool train_on_inputs,
                                  bl_ids *ids, bl_ids *labels)
{
    chat = bl_chat_template_for(chat, context);
    for (size_t i = 0; chat->jinja && i < n_messages; i++) BL_TRY(check_turn(&messages[i], i));
    writer w = {.chat = chat, .train_on_inputs = train_on_inputs, .ids = ids, .labels = labels};
    bool begun = bl_deadline_begin(count_bytes(messages, n_messages));
    bl_status st;

    if (chat->jinja) {
        st = bl_chat_rendered_encode(chat, messages, n_messages, context, train_on_inputs, ids,
                                     labels);
    } else {
        st = add_messages(&w, messages, n_messages);
        if (st == BL_OK) st = set_border(&w, false);
    }
    bl_bytes_free(&w.text);
    bl_deadline_end(begun);
    return st;
}

bl_status bl_chat_template_encode_prompt(const bl_chat_template *chat,
                                         const bl_chat_message *messages, size_t n_messages,
                                         const json_t *context, bl_ids *ids)
{
    bl_ids labels = {0};
    chat = bl_chat_template_for(chat, context);
    writer w = {.chat = chat, .ids = ids, .labels = &labels};

    bl_chat_role last = n_messages > 0 ? messages[n_messages - 1].role : BL_CHAT_USER;
    if (last != BL_CHAT_USER && (!chat->jinja || last != BL_CHAT_TOOL))
        return BL_FAIL(BL_EINPUT, "message %zu: the last message must be the user's, not the %s's",
                       n_messages - 1, bl_chat_role_names[last]);
    bool begun = bl_deadline_begin(count_bytes(messages, n_messages));
    bl_status st;
    if (chat->jinja) {
        st = bl_chat_rendered_encode_prompt(chat, messages, n_messages, context, ids);
    } else {
        st = add_messages(&w, messages, n_messages);
        if (st == BL_OK) st = add_text(&w, &chat->prefix[BL_CHAT_ASSISTANT]);
        if (st == BL_OK) st = flush(&w);
    }
    bl_bytes_free(&w.text);
    bl_ids_free(&labels);
    bl_deadline_end(begun);
    return st;
}

int32_t bl_chat_template_end(const bl_chat_template *chat)
{
    if (chat->jinja) return chat->end;
    for (size_t i = 0; i < chat->answer_end.n; i++)
        if (chat->answer_end.piece[i].id >= 0) return chat->answer_end.piece[i].id;
    return -1;
}
