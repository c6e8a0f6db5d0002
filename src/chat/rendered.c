/* SPDX-License-Identifier: Apache-2.0 */
/* Writes a conversation with a jinja template: the model's own text, or a file.
 *
 * The learned text is the inside of {% generation %}, where the template has it. Else two texts are
 * rendered, the messages before an answer, with the generation prompt, and those including it; the
 * text that the second adds is learned: up to the last special token, where only white space
 * follows. Each of these renderings must be the beginning of the whole one; of the second, special
 * tokens at its end may be missing there, with which a template ends every conversation.
 *
 * Texts of the row have marks inside special tokens (mark.c); they are removed before
 * tokenizing. */
#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/deadline.h"
#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "chat/internal.h"
#include "tokenizer/text.h"

#define MARK BL_JINJA_MARK

typedef struct conversation {
    const bl_chat_template *chat;
    const bl_chat_message *message;
    size_t n;
    json_t *variables; /* owned; with the messages under "messages" */
    json_t *messages;  /* owned: all of them, as the template takes them */
} conversation;

/* Bytes [begin, end) of the rendered text. */
typedef struct part {
    size_t begin, end;
    bool learned;
} part;

/* ---- the template's input ---- */

static bl_status add_variable(conversation *c, const char *name, json_t *value)
{
    return value && !json_object_set_new(c->variables, name, value)
               ? BL_OK
               : BL_FAIL(BL_ENOMEM, "chat template: %s", name);
}

static bl_status add_special_tokens(conversation *c)
{
    const bl_tokenizer *tokenizer = c->chat->tokenizer;
    size_t n_eos;
    const char *name;
    json_t *text;
    const int32_t *eos = bl_tokenizer_eos(tokenizer, &n_eos);
    const char *bos = bl_tokenizer_id_to_token(tokenizer, bl_tokenizer_bos(tokenizer));
    const char *end = n_eos ? bl_tokenizer_id_to_token(tokenizer, eos[0]) : NULL;

    json_object_foreach((json_t *)bl_tokenizer_named_tokens(tokenizer), name, text)
        BL_TRY(add_variable(c, name, json_string(json_string_value(text))));
    if (bos) BL_TRY(add_variable(c, "bos_token", json_string(bos)));
    return end ? add_variable(c, "eos_token", json_string(end)) : BL_OK;
}

static bl_status add_context(conversation *c, const json_t *context)
{
    static const char *const names[] = {"tools", "documents"};
    json_t *value, *copy;
    bl_status st = BL_OK;

    for (size_t i = 0; i < BL_COUNT(names); i++) {
        value = json_object_get(context, names[i]);
        copy = json_null();
        if (value) BL_TRY(bl_chat_mark(c->chat, value, &copy));
        BL_TRY(add_variable(c, names[i], copy));
    }
    value = json_object_get(context, "chat_template_kwargs");
    if (!value) return BL_OK;
    BL_TRY(bl_chat_mark(c->chat, value, &copy));
    if (json_object_update(c->variables, copy))
        st = BL_FAIL(BL_ENOMEM, "chat template: chat_template_kwargs");
    json_decref(copy);
    return st;
}

static bl_status add_messages(conversation *c)
{
    json_t *all = json_array(), *one;
    bl_status st = all ? BL_OK : BL_FAIL(BL_ENOMEM, "chat template: messages");

    for (size_t i = 0; i < c->n && st == BL_OK; i++) {
        const bl_chat_message *m = &c->message[i];
        json_t *object = m->object ? json_incref((json_t *)m->object)
                                   : json_pack("{s:s, s:s}", "role", bl_chat_role_names[m->role],
                                               "content", m->content);
        st = object ? bl_chat_mark(c->chat, object, &one)
                    : BL_FAIL(BL_EINPUT, "message %zu: not UTF-8", i);
        /* one of four words, which may be the inside of a token that the template writes */
        if (st == BL_OK && json_object_set(one, "role", json_object_get(object, "role")))
            st = BL_FAIL(BL_ENOMEM, "chat template: messages");
        if (st == BL_OK && json_array_append_new(all, one))
            st = BL_FAIL(BL_ENOMEM, "chat template: messages");
        json_decref(object);
    }
    if (st == BL_OK) st = bl_jinja_prepare_messages(all, &c->messages);
    json_decref(all);
    return st;
}

static bl_status open_conversation(const bl_chat_template *chat, const bl_chat_message *messages,
                                   size_t n, const json_t *context, conversation *c)
{
    *c = (conversation){.chat = chat, .message = messages, .n = n, .variables = json_object()};
    if (!n) return BL_FAIL(BL_EINPUT, "a conversation without a turn");
    if (!c->variables) return BL_FAIL(BL_ENOMEM, "chat template");
    BL_TRY(add_special_tokens(c));
    BL_TRY(add_context(c, context));
    return add_messages(c);
}

static void close_conversation(conversation *c)
{
    json_decref(c->variables);
    json_decref(c->messages);
}

/* Renders the first n messages. */
static bl_status render(conversation *c, size_t n, bool prompt, bl_jinja_output *out)
{
    json_t *messages = json_array();

    *out = (bl_jinja_output){0};
    for (size_t i = 0; i < n; i++)
        if (json_array_append(messages, json_array_get(c->messages, i))) {
            json_decref(messages);
            return BL_FAIL(BL_ENOMEM, "chat template: messages");
        }
    BL_TRY(add_variable(c, "messages", messages));
    BL_TRY(add_variable(c, "add_generation_prompt", json_boolean(prompt)));
    return bl_jinja_render(c->chat->jinja, c->variables, &c->chat->now, out);
}

/* ---- ids ---- */

/* Text between special tokens, without its marks. */
static bl_status encode_text(const bl_tokenizer *tokenizer, const char *text, size_t n_bytes,
                             unsigned flags, bl_ids *ids)
{
    bl_bytes plain = {0};
    bl_status st = BL_OK;

    for (size_t at = 0; at < n_bytes && st == BL_OK;) {
        const char *mark = bl_text_find(text + at, n_bytes - at, MARK, strlen(MARK));
        size_t n = mark ? (size_t)(mark - text) - at : n_bytes - at;
        st = bl_bytes_append(&plain, text + at, n);
        at += n + (mark ? strlen(MARK) : 0);
    }
    if (st == BL_OK && plain.n)
        st = bl_tokenizer_encode(tokenizer, plain.data, plain.n, flags, ids);
    bl_bytes_free(&plain);
    return st;
}

/* Appends the ids of bytes [begin, end). *flags: of the text before them; updated for the next. */
static bl_status encode_part(const bl_tokenizer *tokenizer, const char *text, size_t begin,
                             size_t end, unsigned *flags, bl_ids *ids)
{
    size_t n_bytes = end - begin, cursor = 0, done = 0;
    bl_special_match match;

    text += begin;
    while (bl_tokenizer_next_special(tokenizer, text, n_bytes, &cursor, done, &match)) {
        BL_TRY(encode_text(tokenizer, text + done, match.start - done, *flags, ids));
        BL_TRY(bl_ids_push(ids, match.id));
        *flags = BL_AFTER_TOKEN;
        done = match.end;
    }
    if (done == n_bytes) return BL_OK;
    BL_TRY(encode_text(tokenizer, text + done, n_bytes - done, *flags, ids));
    *flags = BL_CONTINUATION;
    return BL_OK;
}

static bl_status encode_parts(const bl_chat_template *chat, const bl_jinja_output *out,
                              const part *parts, size_t n, bool all, bl_ids *ids, bl_ids *labels)
{
    unsigned flags = 0;

    for (size_t i = 0; i < n; i++) {
        BL_TRY(encode_part(chat->tokenizer, out->text, parts[i].begin, parts[i].end, &flags, ids));
        BL_TRY(bl_ids_reserve(labels, ids->n - labels->n));
        for (; labels->n < ids->n; labels->n++)
            labels->id[labels->n] = all || parts[i].learned ? ids->id[labels->n] : BL_LABEL_MASKED;
    }
    return BL_OK;
}

/* ---- learned text ---- */

static bool is_space(char c)
{
    return c && strchr(" \t\r\n", c);
}

/* Where the learned text that begins at `begin` ends: behind its last special token if only white
 * space follows, else at `end`. *id gets the token; -1: none. */
static size_t find_end(const bl_tokenizer *tokenizer, const char *text, size_t begin, size_t end,
                       int32_t *id)
{
    size_t cursor = begin, last = begin, at;
    bl_special_match match;

    *id = -1;
    while (bl_tokenizer_next_special(tokenizer, text, end, &cursor, last, &match)) {
        last = match.end;
        *id = match.id;
    }
    for (at = last; at < end && is_space(text[at]);) at++;
    if (*id >= 0 && at == end) return last;
    *id = -1;
    return end;
}

static bool is_of_name(char c)
{
    return isalnum((unsigned char)c) || c == '_';
}

bool bl_chat_template_reads(const bl_chat_template *chat, const char *name)
{
    size_t n_bytes = strlen(name);

    for (const char *at = chat->source; n_bytes && at && (at = strstr(at, name)); at++)
        if ((at == chat->source || !is_of_name(at[-1])) && !is_of_name(at[n_bytes])) return true;
    return chat->with_tools && bl_chat_template_reads(chat->with_tools, name);
}

/* Whether the name at source[at..end) is .name, or 'name' without "==" or "!=" before it. */
static bool is_key_at(const char *source, size_t at, size_t end)
{
    bool is_quoted = at > 0 && (source[at - 1] == '\'' || source[at - 1] == '"') &&
                     source[end] == source[at - 1];
    size_t before = is_quoted ? at - 1 : at;

    while (before > 0 && is_space(source[before - 1])) before--;
    if (!is_quoted) return before > 0 && source[before - 1] == '.' && !is_of_name(source[end]);
    return before < 2 || source[before - 1] != '=' || !strchr("=!", source[before - 2]);
}

bool bl_chat_template_reads_key(const bl_chat_template *chat, const char *name)
{
    size_t n_bytes = strlen(name);

    for (const char *at = chat->source; n_bytes && at && (at = strstr(at, name)); at++) {
        size_t begin = (size_t)(at - chat->source);
        if (is_key_at(chat->source, begin, begin + n_bytes)) return true;
    }
    return chat->with_tools && bl_chat_template_reads_key(chat->with_tools, name);
}

static bl_status fail_prefix(const conversation *c, size_t i, const char *what)
{
    const bl_chat_template *chat = c->chat;
    size_t n_answers = 0;

    for (size_t k = 0; k < c->n; k++) n_answers += c->message[k].role == BL_CHAT_ASSISTANT;
    if (n_answers == 1)
        return BL_FAIL(
            BL_EINPUT,
            "message %zu: chat template (%s) writes %s in another way when the rest of "
            "the conversation follows, so that the answer's place is not certain; give a "
            "chat_template with {%% generation %%} around answers",
            i, chat->name, what);
    return BL_FAIL(BL_EINPUT,
                   "message %zu: chat template (%s) writes %s in another way when more messages "
                   "follow, so that the answer's place is not certain; give a chat_template with "
                   "{%% generation %%} around answers, or rows with one answer",
                   i, chat->name, what);
}

static bool begins_with(const bl_jinja_output *whole, const bl_jinja_output *start)
{
    return start->n_bytes <= whole->n_bytes && !memcmp(whole->text, start->text, start->n_bytes);
}

/* Bytes of `start` that are the beginning of `whole`, where only special tokens and white space may
 * follow them in `start`; -1: something else follows. A special token is in both or in none. */
static int64_t shared_bytes(const bl_tokenizer *tokenizer, const bl_jinja_output *whole,
                            const bl_jinja_output *start)
{
    size_t n = 0, shared, cursor = 0, done = 0;
    bl_special_match match;

    while (n < start->n_bytes && n < whole->n_bytes && start->text[n] == whole->text[n]) n++;
    if (n == start->n_bytes) return (int64_t)n;
    for (shared = n;
         bl_tokenizer_next_special(tokenizer, start->text, start->n_bytes, &cursor, done, &match);
         done = match.end) {
        if (match.end <= n) continue;
        if (match.start < n) shared = match.start;
        for (size_t at = done > shared ? done : shared; at < match.start; at++)
            if (!is_space(start->text[at])) return -1;
    }
    for (size_t at = done > shared ? done : shared; at < start->n_bytes; at++)
        if (!is_space(start->text[at])) return -1;
    return (int64_t)shared;
}

/* The place of the answer that is message i. */
static bl_status find_answer(conversation *c, const bl_jinja_output *whole, size_t i, part *out)
{
    bl_jinja_output before = {0}, with = {0};
    int32_t id;
    bl_status st;

    BL_TRY_GOTO(st, done, render(c, i, true, &before));
    if (!begins_with(whole, &before)) {
        st = fail_prefix(c, i, "what precedes an answer");
        goto done;
    }
    out->begin = before.n_bytes;
    out->end = whole->n_bytes;
    if (i + 1 < c->n) {
        BL_TRY_GOTO(st, done, render(c, i + 1, false, &with));
        int64_t end = shared_bytes(c->chat->tokenizer, whole, &with);
        if (end < (int64_t)before.n_bytes) {
            st = fail_prefix(c, i, "an answer");
            goto done;
        }
        out->end = (size_t)end;
    }
    out->end = find_end(c->chat->tokenizer, whole->text, out->begin, out->end, &id);
    out->learned = true;
done:
    bl_jinja_output_free(&before);
    bl_jinja_output_free(&with);
    return st;
}

/* A place per answer that is learned, in order. */
static bl_status find_answers(conversation *c, const bl_jinja_output *whole, part *out, size_t *n)
{
    size_t n_answers = 0, n_masked = 0, at = 0;

    *n = 0;
    for (size_t i = 0; i < c->n; i++) {
        n_answers += c->message[i].role == BL_CHAT_ASSISTANT;
        n_masked += c->message[i].role == BL_CHAT_ASSISTANT && c->message[i].is_masked;
    }
    bool has_spans = bl_jinja_has_generation(c->chat->jinja);
    if (has_spans && n_masked && whole->n_spans != n_answers)
        return BL_FAIL(BL_EINPUT,
                       "%zu answers in %zu places: which of them carries no loss is not certain",
                       n_answers, whole->n_spans);
    for (size_t i = 0; has_spans && !n_masked && i < whole->n_spans; i++)
        out[(*n)++] = (part){whole->span[i].begin, whole->span[i].end, true};
    for (size_t i = 0; (!has_spans || n_masked) && i < c->n; i++) {
        if (c->message[i].role != BL_CHAT_ASSISTANT) continue;
        part answer = {0};
        if (has_spans)
            answer = (part){whole->span[at].begin, whole->span[at].end, true};
        else if (!c->message[i].is_masked)
            BL_TRY(find_answer(c, whole, i, &answer));
        at++;
        if (c->message[i].is_masked) continue;
        if (*n && answer.begin < out[*n - 1].end) return fail_prefix(c, i, "an answer");
        out[(*n)++] = answer;
    }
    return BL_OK;
}

static bl_status encode_learned(conversation *c, const bl_jinja_output *whole, bool all,
                                bl_ids *ids, bl_ids *labels)
{
    size_t most = c->n + whole->n_spans, n, n_parts = 0, at = 0;
    part *answer = calloc(most, sizeof *answer), *parts = calloc(2 * most + 1, sizeof *parts);
    bl_status st = answer && parts ? BL_OK : BL_FAIL(BL_ENOMEM, "chat template: answers");

    if (st == BL_OK) st = find_answers(c, whole, answer, &n);
    for (size_t i = 0; st == BL_OK && i < n; i++) {
        parts[n_parts++] = (part){at, answer[i].begin, false};
        parts[n_parts++] = answer[i];
        at = answer[i].end;
    }
    if (st == BL_OK) {
        parts[n_parts++] = (part){at, whole->n_bytes, false};
        st = encode_parts(c->chat, whole, parts, n_parts, all, ids, labels);
    }
    free(answer);
    free(parts);
    return st;
}

bl_status bl_chat_rendered_encode(const bl_chat_template *chat, const bl_chat_message *messages,
                                  size_t n, const json_t *context, bool train_on_inputs,
                                  bl_ids *ids, bl_ids *labels)
{
    bl_jinja_output whole = {0};
    conversation c;

    bl_status st = open_conversation(chat, messages, n, context, &c);
    if (st == BL_OK) st = render(&c, n, false, &whole);
    if (st == BL_OK) st = encode_learned(&c, &whole, train_on_inputs, ids, labels);
    bl_jinja_output_free(&whole);
    close_conversation(&c);
    return st;
}

bl_status bl_chat_rendered_encode_prompt(const bl_chat_template *chat,
                                         const bl_chat_message *messages, size_t n,
                                         const json_t *context, bl_ids *ids)
{
    bl_jinja_output out = {0};
    unsigned flags = 0;
    conversation c;

    bl_status st = open_conversation(chat, messages, n, context, &c);
    if (st == BL_OK) st = render(&c, n, true, &out);
    if (st == BL_OK) st = encode_part(chat->tokenizer, out.text, 0, out.n_bytes, &flags, ids);
    bl_jinja_output_free(&out);
    close_conversation(&c);
    return st;
}

/* ---- loading ---- */

/* Short conversations, to see what the template writes. */
static const char probe_text[] =
    "[{\"role\":\"system\",\"content\":\"a\"},{\"role\":\"user\",\"content\":\"b\"},"
    "{\"role\":\"assistant\",\"content\":\"c\"},{\"role\":\"user\",\"content\":\"d\"},"
    "{\"role\":\"assistant\",\"content\":\"\",\"tool_calls\":[{\"type\":\"function\",\"id\":"
    "\"call00000\",\"function\":{\"name\":\"f\",\"arguments\":{\"x\":1}}}]},"
    "{\"role\":\"tool\",\"name\":\"f\",\"tool_call_id\":\"call00000\",\"content\":\"e\"}]";
static const char probe_context[] =
    "{\"tools\":[{\"type\":\"function\",\"function\":{\"name\":\"f\",\"description\":\"g\","
    "\"parameters\":{\"type\":\"object\",\"properties\":{\"x\":{\"type\":\"integer\","
    "\"description\":\"h\"}}}}}]}";
enum { PROBE_MESSAGES = 6 };

/* Renders messages [first, first + n) of the probe, with tools if a call is among them. False: the
 * template does not write such a conversation; *out is empty. */
static bool write_probe(const bl_chat_template *chat, size_t first, size_t n, bool prompt,
                        bl_jinja_output *out)
{
    static const bl_chat_role roles[PROBE_MESSAGES] = {BL_CHAT_SYSTEM,    BL_CHAT_USER,
                                                       BL_CHAT_ASSISTANT, BL_CHAT_USER,
                                                       BL_CHAT_ASSISTANT, BL_CHAT_TOOL};
    bl_chat_message message[PROBE_MESSAGES];
    json_t *all = json_loads(probe_text, 0, NULL), *context = json_loads(probe_context, 0, NULL);
    conversation c = {0};

    *out = (bl_jinja_output){0};
    for (size_t i = 0; i < n; i++)
        message[i] =
            (bl_chat_message){.role = roles[first + i], .object = json_array_get(all, first + i)};
    bool written = all && context &&
                   open_conversation(chat, message, n, first + n == PROBE_MESSAGES ? context : NULL,
                                     &c) == BL_OK &&
                   render(&c, n, prompt, out) == BL_OK;
    close_conversation(&c);
    json_decref(all);
    json_decref(context);
    return written;
}

/* The token that ends an answer; -1 where the template writes none, or does not write that
 * conversation. */
static int32_t find_end_token(const bl_chat_template *chat)
{
    bl_jinja_output whole;
    int32_t id = -1;

    if (write_probe(chat, 1, 2, false, &whole))
        find_end(chat->tokenizer, whole.text, 0, whole.n_bytes, &id);
    bl_jinja_output_free(&whole);
    return id;
}

/* Names of markers, each once, with commas between them. */
typedef struct marker_names {
    char text[400];
    size_t n;
} marker_names;

/* Adds each <|name|> in the text that is not a token. */
static void find_markers(const bl_tokenizer *tokenizer, const bl_jinja_output *out,
                         marker_names *names)
{
    enum { MOST_BYTES = 80 };
    char marker[MOST_BYTES];

    for (const char *at = strstr(out->text, "<|"); at; at = strstr(at, "<|")) {
        const char *open = at;
        at += 2;
        size_t n = strcspn(at, "<|> \t\r\n"), n_marker = n + 4;
        if (!n || n_marker >= sizeof marker || strncmp(at + n, "|>", 2)) continue;
        memcpy(marker, open, n_marker);
        marker[n_marker] = '\0';
        if (bl_tokenizer_token_to_id(tokenizer, marker) >= 0 || strstr(names->text, marker))
            continue;
        if (names->n + n_marker + 3 > sizeof names->text) return;
        names->n += (size_t)snprintf(names->text + names->n, sizeof names->text - names->n, "%s%s",
                                     names->n ? ", " : "", marker);
    }
}

/* Warns of turn markers that would be learned letter by letter. Some models are trained so (Zephyr,
 * Tulu), thus it is not an error. */
static void warn_of_markers(const bl_chat_template *chat, const char *place)
{
    static const struct {
        size_t first, n;
        bool prompt;
    } probe[] = {{1, 1, true}, {1, 2, false}, {0, 3, false}, {3, 3, true}};
    marker_names names = {0};

    for (size_t i = 0; i < BL_COUNT(probe); i++) {
        bl_jinja_output out;
        if (write_probe(chat, probe[i].first, probe[i].n, probe[i].prompt, &out))
            find_markers(chat->tokenizer, &out, &names);
        bl_jinja_output_free(&out);
    }
    if (!names.n) return;
    bl_log_warning("chat template (%s) writes text that is not a token of the tokenizer: %s; it is "
                   "encoded in pieces, as transformers does; if the model has such tokens, declare "
                   "them in tokenizer.json, else check that the template is this model's",
                   place, names.text);
}

bl_status bl_chat_rendered_load(bl_chat_template *chat, const char *place, const char *text,
                                size_t n_bytes, const char *date)
{
    double limit_s;

    if (!strptime(date, "%d %b %Y", &chat->now))
        return BL_FAIL(BL_EUSAGE, "template_date: expected a date such as 26 Jul 2024, got %.80s",
                       date);
    if (!(chat->source = strndup(text, n_bytes))) return BL_FAIL(BL_ENOMEM, "chat template");
    chat->jinja_hash = XXH3_64bits_withSeed(text, n_bytes, XXH3_64bits(date, strlen(date)));
    BL_TRY(bl_chat_list_special(chat));
    bool begun = bl_deadline_begin(n_bytes);
    bl_status st = bl_jinja_parse(place, text, n_bytes, &chat->jinja);
    if (st == BL_OK) {
        chat->end = find_end_token(chat);
        warn_of_markers(chat, place);
    }
    if (st == BL_OK && bl_deadline_is_over(&limit_s))
        st = BL_FAIL(BL_EINPUT, "%s: more than %.0f s for a conversation of two words", place,
                     limit_s);
    else if (st == BL_EINPUT)
        st = BL_EUSAGE;
    bl_deadline_end(begun);
    return st == BL_OK ? st : bl_error_prefix(st, "chat_template");
}
