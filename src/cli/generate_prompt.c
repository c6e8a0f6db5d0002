/* SPDX-License-Identifier: Apache-2.0 */
/* generate_prompt.c -- the prompt of `ballast generate` as token ids: text, file, chat messages or
 * ids. */
#include "cli/generate_prompt_internal.h"

#include <errno.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"
#include "data/dataset.h"

enum { MAX_PROMPT_BYTES = 1 << 28 /* the tokenizer's limit */ };

bl_status bl_generate_prompt_check(const bl_generate_prompt *p)
{
    const char *const given[] = {p->prompt, p->prompt_file, p->messages, p->input_ids};
    int n = 0;

    for (size_t i = 0; i < BL_COUNT(given); i++) n += given[i] != NULL;
    if (p->chat) {
        if (n > (p->messages != NULL) || p->parse_special_tokens)
            return BL_FAIL(BL_EUSAGE, "--chat: of prompts, only --messages goes with it");
        return BL_OK;
    }
    if (n == 0)
        return BL_FAIL(BL_EUSAGE,
                       "prompt is not given, nor prompt_file, messages, input_ids or chat");
    if (n > 1) return BL_FAIL(BL_EUSAGE, "give one of prompt, prompt_file, messages and input_ids");
    if (!p->messages && (p->chat_template || p->template_date))
        return BL_FAIL(BL_EUSAGE, "--%s: only with --messages or --chat",
                       p->chat_template ? "chat_template" : "template_date");
    if (p->parse_special_tokens && !p->prompt && !p->prompt_file)
        return BL_FAIL(BL_EUSAGE, "--parse_special_tokens: only with --prompt or --prompt_file");
    return BL_OK;
}

static bl_status encode_text(const bl_generate_prompt *p, const bl_tokenizer *tokenizer,
                             const char *text, size_t n_bytes, bl_ids *ids)
{
    unsigned flags = BL_ADD_SPECIAL | (p->parse_special_tokens ? BL_PARSE_SPECIAL : 0u);
    return bl_tokenizer_encode(tokenizer, text, n_bytes, flags, ids);
}

/* Without the newline that editors put at the end. */
static bl_status encode_file(const bl_generate_prompt *p, const bl_tokenizer *tokenizer,
                             bl_ids *ids)
{
    void *bytes;
    size_t n_bytes;

    BL_TRY(bl_file_read_all(p->prompt_file, MAX_PROMPT_BYTES, &bytes, &n_bytes));
    const char *text = bytes;
    bl_status st = bl_text_skip_mark(p->prompt_file, &text, &n_bytes);
    if (st == BL_OK) {
        if (n_bytes > 0 && text[n_bytes - 1] == '\n') n_bytes--;
        st = encode_text(p, tokenizer, text, n_bytes, ids);
        if (st != BL_OK) bl_error_prefix(st, "%s", p->prompt_file);
    }
    free(bytes);
    return st;
}

static const char MESSAGES[] = "--messages";

bl_status bl_generate_messages_load(const char *text, json_t **out)
{
    char first = text[strspn(text, " \t\r\n")];

    if (first == '[' || first == '{')
        BL_TRY(bl_json_parse(MESSAGES, 1, text, strlen(text), out));
    else
        BL_TRY(bl_json_load(text, MAX_PROMPT_BYTES, out));
    if (!json_is_array(*out)) return BL_OK;
    json_t *object = json_pack("{s:o}", "messages", *out);
    if (!object) json_decref(*out);
    *out = object;
    return object ? BL_OK : BL_FAIL(BL_ENOMEM, "messages");
}

bl_status bl_generate_messages_encode(const bl_chat_template *chat, const json_t *object,
                                      bl_key_names *named, bl_ids *ids, int32_t *end)
{
    size_t n_before = named->n;
    bl_conversation c = {0};

    BL_TRY(bl_conversation_read(MESSAGES, object, chat, named, &c));
    if (named->n > n_before)
        bl_log_warning("%s: keys that are not used: %s", MESSAGES, named->text);
    bl_status st = bl_chat_template_encode_prompt(chat, c.message, c.n, c.context, ids);
    if (st != BL_OK) bl_error_prefix(st, "%s", MESSAGES);
    *end = bl_chat_template_end(bl_chat_template_for(chat, c.context));
    bl_conversation_free(&c);
    return st;
}

static bl_status encode_messages(const bl_generate_prompt *p, const bl_tokenizer *tokenizer,
                                 bl_ids *ids, int32_t *end)
{
    bl_chat_template *chat = NULL;
    json_t *object = NULL;
    bl_key_names named = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, bl_generate_messages_load(p->messages, &object));
    BL_TRY_GOTO(st, done, bl_json_check_object(MESSAGES, object));
    BL_TRY_GOTO(st, done,
                bl_chat_template_load(p->chat_template, p->template_date, tokenizer, &chat));
    st = bl_generate_messages_encode(chat, object, &named, ids, end);
done:
    bl_chat_template_destroy(chat);
    json_decref(object);
    return st;
}

/* "1, 2, 3", "1 2 3" or "[1, 2, 3]". */
static bl_status read_ids(const char *text, bl_ids *ids)
{
    const char *at = text + strspn(text, " [");

    while (*at && *at != ']') {
        char *end;
        errno = 0;
        long id = strtol(at, &end, 10);
        if (end == at || errno || id < 0 || id > INT32_MAX || !strchr(", ]", *end))
            return BL_FAIL(BL_EUSAGE, "--input_ids: expected ids, as in 1,2,3, got \"%.40s\"", at);
        BL_TRY(bl_ids_push(ids, (int32_t)id));
        at = end + strspn(end, ", ");
    }
    if (at[strspn(at, "] ")])
        return BL_FAIL(BL_EUSAGE, "--input_ids: expected ids, as in 1,2,3, got \"%.40s\"", at);
    return BL_OK;
}

bl_status bl_generate_prompt_read(const bl_generate_prompt *p, const bl_tokenizer *tokenizer,
                                  bl_ids *ids, int32_t *end)
{
    *end = -1;
    if (p->prompt) return encode_text(p, tokenizer, p->prompt, strlen(p->prompt), ids);
    if (p->prompt_file) return encode_file(p, tokenizer, ids);
    if (p->messages) return encode_messages(p, tokenizer, ids, end);
    return read_ids(p->input_ids, ids);
}
