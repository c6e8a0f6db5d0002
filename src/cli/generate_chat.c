/* SPDX-License-Identifier: Apache-2.0 */
/* generate_chat.c -- a conversation: lines of stdin are messages or commands. At a terminal a line
 * that cannot be used gives a warning; from a pipe or file, it is the end, and an error. */
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "cli/generate_internal.h"
#include "data/dataset.h"
#include "tokenizer/text.h"

typedef struct chat {
    bl_generate_session *session;
    bl_chat_template *template;
    json_t *object;   /* {"messages": [...]}, and keys that --messages has besides */
    json_t *messages; /* borrowed from it */
    size_t n_given;   /* of --messages; /reset keeps them */
    bool is_terminal, is_over;
    bl_key_names named; /* keys of the first messages that are not used */
} chat;

static json_t *last_message(const chat *c)
{
    size_t n = json_array_size(c->messages);
    return n > 0 ? json_array_get(c->messages, n - 1) : NULL;
}

static bool waits_for_answer(const chat *c)
{
    const char *role = json_string_value(json_object_get(last_message(c), "role"));
    return role && strcmp(role, "user") == 0;
}

static bl_status add_message(chat *c, const char *role, const char *text, size_t n_bytes)
{
    json_t *message = json_pack("{s:s, s:s%}", "role", role, "content", text, n_bytes);

    if (!message || json_array_append_new(c->messages, message) != 0)
        return BL_FAIL(BL_ENOMEM, "a message");
    return BL_OK;
}

static void drop_messages(chat *c, size_t n_kept)
{
    while (json_array_size(c->messages) > n_kept)
        json_array_remove(c->messages, json_array_size(c->messages) - 1);
}

/* ---- answers ---- */

/* The answer's text, as the next turn's prompt repeats it: without the stop text. */
static bl_status keep_answer(chat *c, const bl_generate_outcome *outcome)
{
    bl_generate_session *s = c->session;
    char *prompt, *whole;
    size_t n_prompt, n_whole;

    BL_TRY(bl_tokenizer_decode(s->tokenizer, s->ids.id, s->n_prompt, true, &prompt, &n_prompt));
    free(prompt);
    BL_TRY(bl_tokenizer_decode(s->tokenizer, s->ids.id, s->ids.n, true, &whole, &n_whole));
    const char *text = whole + (n_prompt < n_whole ? n_prompt : n_whole);
    size_t n = n_whole - (size_t)(text - whole);
    const char *stop = outcome->stop ? memmem(text, n, outcome->stop, strlen(outcome->stop)) : NULL;
    bl_status st = add_message(c, "assistant", text, stop ? (size_t)(stop - text) : n);
    free(whole);
    return st;
}

/* To the last message, the user's. One that has no room is taken back. */
static bl_status answer(chat *c)
{
    bl_generate_session *s = c->session;
    int64_t most = bl_generate_max_new_tokens(s->options);
    bl_generate_outcome outcome;

    s->ids.n = 0;
    BL_TRY(bl_generate_messages_encode(c->template, c->object, &c->named, &s->ids, &s->end));
    s->n_prompt = s->ids.n;
    if ((int64_t)s->ids.n >= s->capacity)
        return BL_FAIL(
            BL_EUSAGE,
            "the conversation has %zu tokens, --context is %lld: /reset, or start with a "
            "larger one",
            s->ids.n, (long long)s->capacity);
    most = bl_min_i64(most, s->capacity - (int64_t)s->ids.n);
    BL_TRY(bl_generate_session_answer(s, most, &outcome));
    if (outcome.stop_id < 0 && !outcome.stop)
        bl_log_info("(the answer ends after %lld tokens: %s)", (long long)most,
                    most == bl_generate_max_new_tokens(s->options) ? "max_new_tokens" : "context");
    return keep_answer(c, &outcome);
}

/* Of a conversation that could not be answered, the user's message is taken back. */
static bl_status answer_or_drop(chat *c)
{
    bl_status st = answer(c);
    if (st != BL_OK) drop_messages(c, json_array_size(c->messages) - 1);
    return st;
}

/* ---- commands ---- */

static void list_adapters(const chat *c)
{
    const bl_generate_session *s = c->session;

    for (size_t i = 0; i <= s->n_adapters; i++)
        bl_log_info("%s %s%s%s", i == s->adapter ? "*" : " ", s->adapters[i].name,
                    s->adapters[i].dir ? "  " : "  the base alone",
                    s->adapters[i].dir ? s->adapters[i].dir : "");
}

static void print_help(void)
{
    bl_log_info("/exit            ends the conversation, as the end of the input does\n"
                "/reset           begins a new one\n"
                "/adapter         lists the adapters\n"
                "/adapter NAME    answers with that adapter from now on; none: with the base\n"
                "//TEXT           a message that begins with /");
}

static bl_status run_command(chat *c, const char *line)
{
    static const char ADAPTER[] = "/adapter ";

    if (strcmp(line, "/exit") == 0)
        c->is_over = true;
    else if (strcmp(line, "/reset") == 0)
        drop_messages(c, c->n_given);
    else if (strcmp(line, "/help") == 0)
        print_help();
    else if (strcmp(line, "/adapter") == 0)
        list_adapters(c);
    else if (strncmp(line, ADAPTER, strlen(ADAPTER)) == 0)
        return bl_generate_session_use(c->session, line + strlen(ADAPTER));
    else
        return BL_FAIL(BL_EUSAGE, "%s: is not a command: /help lists them", line);
    return BL_OK;
}

/* ---- lines ---- */

static bl_status take_line(chat *c, const char *line, size_t n_bytes)
{
    if (n_bytes == 0) return BL_OK;
    if (bl_utf8_valid_prefix(line, n_bytes) < n_bytes || memchr(line, '\0', n_bytes))
        return BL_FAIL(BL_EINPUT, "stdin: a line is not UTF-8 text");
    if (line[0] == '/' && line[1] != '/') return run_command(c, line);
    size_t escape = line[0] == '/';
    BL_TRY(add_message(c, "user", line + escape, n_bytes - escape));
    return answer_or_drop(c);
}

static bl_status read_lines(chat *c)
{
    char *line = NULL;
    size_t capacity = 0;
    bl_status st = BL_OK;

    while (st == BL_OK && !c->is_over) {
        if (c->is_terminal) fputs("> ", stdout);
        fflush(stdout);
        ssize_t n = getline(&line, &capacity, stdin);
        if (n < 0) {
            if (c->is_terminal) putchar('\n');
            break;
        }
        while (n > 0 && (line[n - 1] == '\n' || line[n - 1] == '\r')) line[--n] = '\0';
        st = take_line(c, line, (size_t)n);
        if (st == BL_OK || !c->is_terminal || (st != BL_EUSAGE && st != BL_EINPUT)) continue;
        bl_log_warning("%s", bl_error_text());
        st = BL_OK;
    }
    if (st == BL_OK && ferror(stdin)) st = bl_fail_errno(BL_EIO, "read stdin");
    free(line);
    return st;
}

static bl_status begin(chat *c)
{
    const bl_generate_options *o = c->session->options;

    if (o->messages)
        BL_TRY(bl_generate_messages_load(o->messages, &c->object));
    else if (!(c->object = json_pack("{s:[]}", "messages")))
        return BL_FAIL(BL_ENOMEM, "messages");
    BL_TRY(bl_json_check_object("--messages", c->object));
    c->messages = json_object_get(c->object, "messages");
    if (!json_is_array(c->messages))
        return BL_FAIL(BL_EINPUT, "--messages: key messages: expected a list");
    BL_TRY(bl_chat_template_load(o->chat_template, o->template_date, c->session->tokenizer,
                                 &c->template));
    c->session->end = bl_chat_template_end(c->template);
    c->n_given = json_array_size(c->messages);
    return BL_OK;
}

bl_status bl_generate_chat(bl_generate_session *s)
{
    chat c = {.session = s, .is_terminal = isatty(STDIN_FILENO) && isatty(STDOUT_FILENO)};

    bl_status st = begin(&c);
    if (st == BL_OK) st = bl_generate_session_open(s, s->options->context);
    if (st == BL_OK && c.is_terminal) bl_log_info("/help lists the commands; /exit or Ctrl-D ends");
    if (st == BL_OK && waits_for_answer(&c)) {
        st = answer(&c);
        c.n_given = json_array_size(c.messages); /* its answer, too, is kept by /reset */
    }
    if (st == BL_OK) st = read_lines(&c);
    bl_chat_template_destroy(c.template);
    json_decref(c.object);
    return st;
}
