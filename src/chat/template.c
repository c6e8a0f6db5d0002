/* SPDX-License-Identifier: Apache-2.0 */
/* Selects the template of a conversation: by name, by file, or by the model's own files and
 * tokens. */
#include "chat/template.h"

#include <ctype.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define XXH_INLINE_ALL
#include <xxhash.h>

#include "base/files.h"
#include "base/sizes.h"
#include "chat/internal.h"
#include "tokenizer/text.h"

const char *const bl_chat_role_names[BL_CHAT_N_ROLES + 1] = {"system", "user", "assistant", "tool"};

#define NAMES "llama2, llama3, llama3.1, llama3.2 or the path of a template file"

/* Names of jinja texts: a text of no known family, and one that was given in place of a name. */
static const char own_name[] = "the model's own", text_name[] = "the configuration's";

/* transformers' name of the template for conversations with tools. */
static const char tool_use[] = "tool_use";

/* ---- texts ---- */

static bl_status add_piece(int32_t id, const char *text, size_t n_bytes, bl_chat_text *out)
{
    bl_chat_piece *grown = realloc(out->piece, (out->n + 1) * sizeof *grown);
    if (!grown) return BL_FAIL(BL_ENOMEM, "chat template");
    out->piece = grown;
    grown[out->n] = (bl_chat_piece){.id = id, .text = strndup(text, n_bytes)};
    if (!grown[out->n].text) return BL_FAIL(BL_ENOMEM, "chat template");
    out->n++;
    return BL_OK;
}

/* Rejects text that looks like a special token and is not one: it would be learned as letters,
 * without a warning. */
static bl_status add_plain(const char *place, const char *text, size_t n_bytes, bl_chat_text *out)
{
    const char *open = bl_text_find(text, n_bytes, "<|", 2);
    const char *close = open ? bl_text_find(open, n_bytes - (size_t)(open - text), "|>", 2) : NULL;

    if (close)
        return BL_FAIL(BL_EUSAGE, "%s: %.*s is not a special token of this model's tokenizer",
                       place, (int)bl_min_i64(close + 2 - open, 80), open);
    return n_bytes ? add_piece(-1, text, n_bytes, out) : BL_OK;
}

bl_status bl_chat_text_split(const bl_tokenizer *tokenizer, const char *place, const char *text,
                             bl_chat_text *out)
{
    size_t n_bytes = strlen(text), cursor = 0, done = 0;
    bl_special_match match;

    while (bl_tokenizer_next_special(tokenizer, text, n_bytes, &cursor, done, &match)) {
        BL_TRY(add_plain(place, text + done, match.start - done, out));
        BL_TRY(add_piece(match.id, text + match.start, match.end - match.start, out));
        done = match.end;
    }
    return add_plain(place, text + done, n_bytes - done, out);
}

static void free_text(bl_chat_text *text)
{
    for (size_t i = 0; i < text->n; i++) free(text->piece[i].text);
    free(text->piece);
}

void bl_chat_template_destroy(bl_chat_template *chat)
{
    if (!chat) return;
    for (int role = 0; role < BL_CHAT_N_ROLES; role++) {
        free_text(&chat->prefix[role]);
        free_text(&chat->suffix[role]);
    }
    free_text(&chat->begin);
    free_text(&chat->answer_start);
    free_text(&chat->answer_end);
    bl_jinja_destroy(chat->jinja);
    free(chat->special);
    free(chat->source);
    bl_chat_template_destroy(chat->with_tools);
    free(chat->system_head);
    free(chat->name);
    free(chat);
}

/* ---- the Llama family ---- */

static bl_status set_text(bl_chat_template *chat, const char *text, bl_chat_text *out)
{
    return bl_chat_text_split(chat->tokenizer, "chat_template", text, out);
}

static bl_status build_llama3(bl_chat_template *chat)
{
    chat->trims = true;
    BL_TRY(set_text(chat, "<|begin_of_text|>", &chat->begin));
    for (int role = 0; role < BL_CHAT_N_ROLES; role++) {
        char prefix[80];
        snprintf(prefix, sizeof prefix, "<|start_header_id|>%s<|end_header_id|>\n\n",
                 bl_chat_role_names[role]);
        chat->has_role[role] = true;
        BL_TRY(set_text(chat, prefix, &chat->prefix[role]));
        BL_TRY(set_text(chat, "<|eot_id|>",
                        role == BL_CHAT_ASSISTANT ? &chat->answer_end : &chat->suffix[role]));
    }
    return BL_OK;
}

static bl_status build_llama3_1(bl_chat_template *chat, const char *date)
{
    BL_TRY(build_llama3(chat));
    return bl_text_format(&chat->system_head,
                          "Cutting Knowledge Date: December 2023\nToday Date: %s\n\n",
                          date ? date : BL_CHAT_DEFAULT_DATE);
}

/* A special token, with `after` behind it or `before` before it. */
static bl_status set_around(bl_chat_template *chat, const char *before, const char *token,
                            const char *after, bl_chat_text *out)
{
    char *text;

    BL_TRY(bl_text_format(&text, "%s%s%s", before, token, after));
    bl_status st = set_text(chat, text, out);
    free(text);
    if (st != BL_OK) return st;
    for (size_t i = 0; i < out->n; i++)
        if (out->piece[i].id >= 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "chat_template llama2: the tokenizer has no special token %s", token);
}

static bl_status build_llama2(bl_chat_template *chat)
{
    size_t n_eos;
    const int32_t *eos = bl_tokenizer_eos(chat->tokenizer, &n_eos);
    const char *begin =
        bl_tokenizer_id_to_token(chat->tokenizer, bl_tokenizer_bos(chat->tokenizer));
    const char *end = n_eos ? bl_tokenizer_id_to_token(chat->tokenizer, eos[0]) : NULL;

    chat->trims = chat->alternates = chat->nests_system = true;
    for (int role = 0; role < BL_CHAT_N_ROLES; role++) chat->has_role[role] = true;
    BL_TRY(set_text(chat, "<<SYS>>\n", &chat->prefix[BL_CHAT_SYSTEM]));
    BL_TRY(set_text(chat, "\n<</SYS>>\n\n", &chat->suffix[BL_CHAT_SYSTEM]));
    BL_TRY(set_around(chat, "", begin ? begin : "<s>", "[INST] ", &chat->prefix[BL_CHAT_USER]));
    BL_TRY(set_text(chat, " [/INST]", &chat->suffix[BL_CHAT_USER]));
    BL_TRY(set_text(chat, " ", &chat->answer_start));
    return set_around(chat, " ", end ? end : "</s>", "", &chat->answer_end);
}

/* ---- choice ---- */

typedef enum family {
    FAMILY_FILE,
    FAMILY_LLAMA2,
    FAMILY_LLAMA3,
    FAMILY_LLAMA3_1,
    FAMILY_LLAMA3_2
} family;

static const char *const family_names[] = {"", "llama2", "llama3", "llama3.1", "llama3.2"};

static family find_family(const char *name)
{
    for (size_t i = 1; i < BL_COUNT(family_names); i++)
        if (!strcmp(name, family_names[i])) return (family)i;
    return FAMILY_FILE;
}

static bool has_special(const bl_tokenizer *tokenizer, const char *token)
{
    return bl_tokenizer_is_special(tokenizer, bl_tokenizer_token_to_id(tokenizer, token));
}

/* The family whose jinja text this is, without its blanks, by the lines that write its messages;
 * FAMILY_FILE: none. A default system message makes it another template. */
static family find_family_of(const char *text)
{
    static const char llama3_message[] =
        "'<|start_header_id|>'+message['role']+'<|end_header_id|>\\n\\n'+"
        "message['content']|trim+'<|eot_id|>'";
    static const char *const llama2[] = {
        "{%setsystem_message=messages[0]['content']%}", /* not stripped by itself */
        "'<<SYS>>\\n'+system_message+'\\n<</SYS>>\\n\\n'+message['content']",
        "bos_token+'[INST]'+content.strip()+'[/INST]'", "''+content.strip()+''+eos_token"};

    if (strstr(text, "Youare")) return FAMILY_FILE;
    if (strstr(text, llama3_message)) {
        if (strstr(text, "CuttingKnowledgeDate:December2023\\n") &&
            strstr(text, "\"TodayDate:\"+date_string+\"\\n\\n\""))
            return strstr(text, "strftime_now") ? FAMILY_LLAMA3_2 : FAMILY_LLAMA3_1;
        return strstr(text, "CuttingKnowledge") || strstr(text, "date_string") ? FAMILY_FILE
                                                                               : FAMILY_LLAMA3;
    }
    for (size_t i = 0; i < BL_COUNT(llama2); i++)
        if (!strstr(text, llama2[i])) return FAMILY_FILE;
    return FAMILY_LLAMA2;
}

static bl_status recognize_text(const char *jinja, family *found)
{
    char *text = malloc(strlen(jinja) + 1), *end = text;

    if (!text) return BL_FAIL(BL_ENOMEM, "chat template");
    for (const char *c = jinja; *c; c++)
        if (!isspace((unsigned char)*c)) *end++ = *c;
    *end = '\0';
    *found = find_family_of(text);
    free(text);
    return BL_OK;
}

/* The model has templates, and none of them is "default". */
static bl_status fail_choice(const bl_named_template *templates, size_t n)
{
    char names[400];
    size_t used = 0;

    for (size_t i = 0; i < n && used < sizeof names; i++)
        used += (size_t)snprintf(names + used, sizeof names - used, "%s%s", i ? ", " : "",
                                 templates[i].name);
    return BL_FAIL(BL_EUSAGE,
                   "chat_template: the model has several templates and no default; give the name "
                   "of one: %s",
                   names);
}

static bl_status recognize(const bl_tokenizer *tokenizer, family *found)
{
    size_t n;
    const bl_named_template *own = bl_tokenizer_chat_templates(tokenizer, &n);
    const char *jinja = bl_tokenizer_chat_template(tokenizer, BL_TOKENIZER_DEFAULT_TEMPLATE);

    *found = FAMILY_FILE;
    if (n && !jinja) return fail_choice(own, n);
    if (jinja && bl_tokenizer_chat_template(tokenizer, tool_use))
        return BL_OK; /* tools go with messages that a template by name does not read */
    if (jinja) return recognize_text(jinja, found);
    /* A base model: its special tokens decide. Those of Llama 3.1 and 3.2 are the same, and so is
     * the output of their templates. */
    bool llama3 = has_special(tokenizer, "<|begin_of_text|>") &&
                  has_special(tokenizer, "<|start_header_id|>") &&
                  has_special(tokenizer, "<|end_header_id|>") &&
                  has_special(tokenizer, "<|eot_id|>");
    if (!llama3 || has_special(tokenizer, "<|im_start|>"))
        return BL_FAIL(BL_EUSAGE,
                       "chat_template: the model has no chat template of its own; give " NAMES);
    *found = has_special(tokenizer, "<|eom_id|>") ? FAMILY_LLAMA3_1 : FAMILY_LLAMA3;
    return BL_OK;
}

/* "26 Jul 2024", as the template's own default. */
static bool is_date(const char *text)
{
    static const char months[] = "JanFebMarAprMayJunJulAugSepOctNovDec";
    int day, year, n = 0;
    char month[4];

    if (sscanf(text, "%2d %3s %4d%n", &day, month, &year, &n) != 3 || n != 11 || text[11])
        return false;
    const char *at = strstr(months, month);
    return at && (at - months) % 3 == 0 && day >= 1 && day <= 31 && text[2] == ' ' &&
           text[6] == ' ' && year >= 1000;
}

static bool is_jinja_file(const char *path)
{
    static const char *const endings[] = {".jinja", ".jinja2", ".j2"};
    size_t n = strlen(path);

    for (size_t i = 0; i < BL_COUNT(endings); i++)
        if (n > strlen(endings[i]) && !strcmp(path + n - strlen(endings[i]), endings[i]))
            return true;
    return false;
}

static bl_status read_jinja_file(bl_chat_template *chat, const char *date)
{
    void *bytes;
    size_t n_bytes;

    BL_TRY(bl_file_read_all(chat->name, BL_JINJA_MAX_TEMPLATE_BYTES, &bytes, &n_bytes));
    bl_status st = bl_chat_rendered_load(chat, chat->name, bytes, n_bytes, date);
    free(bytes);
    return st;
}

/* A jinja text, where others have a name. */
static bool is_jinja_text(const char *name)
{
    return strstr(name, "{{") || strstr(name, "{%");
}

/* text: the template itself; NULL: chat->name is a family's, or a file's. */
static bl_status build(bl_chat_template *chat, family which, const char *text, const char *date)
{
    bool rendered = which == FAMILY_FILE && (text || is_jinja_file(chat->name));
    bool dated = rendered || which == FAMILY_LLAMA3_1 || which == FAMILY_LLAMA3_2;

    if (date && !dated)
        return BL_FAIL(BL_EUSAGE, "template_date: chat_template %s writes no date", chat->name);
    if (date && !is_date(date))
        return BL_FAIL(BL_EUSAGE, "template_date: expected a date such as 26 Jul 2024, got %.80s",
                       date);
    switch (which) {
    case FAMILY_LLAMA2:
        return build_llama2(chat);
    case FAMILY_LLAMA3:
        return build_llama3(chat);
    case FAMILY_LLAMA3_1:
    case FAMILY_LLAMA3_2:
        return build_llama3_1(chat, date);
    case FAMILY_FILE:
        break;
    }
    if (!date) date = BL_CHAT_DEFAULT_DATE;
    if (text) return bl_chat_rendered_load(chat, chat->name, text, strlen(text), date);
    if (!bl_file_exists(chat->name))
        return BL_FAIL(BL_EUSAGE, "chat_template %s: no such file; expected " NAMES, chat->name);
    return rendered ? read_jinja_file(chat, date) : bl_chat_file_read(chat);
}

bl_status bl_chat_template_load(const char *name, const char *date, const bl_tokenizer *tokenizer,
                                bl_chat_template **out)
{
    family which = FAMILY_FILE;
    const char *title = own_name, *text = name ? bl_tokenizer_chat_template(tokenizer, name) : NULL;

    *out = NULL;
    if (!name) {
        BL_TRY(recognize(tokenizer, &which));
        text = which == FAMILY_FILE
                   ? bl_tokenizer_chat_template(tokenizer, BL_TOKENIZER_DEFAULT_TEMPLATE)
                   : NULL;
        if (which != FAMILY_FILE) title = family_names[which];
    } else if (!text && is_jinja_text(name)) {
        title = text_name;
        text = name;
    } else {
        title = name;
        if (!text) which = find_family(name);
    }
    bl_chat_template *chat = calloc(1, sizeof *chat);
    if (!chat || !(chat->name = strdup(title))) {
        free(chat);
        return BL_FAIL(BL_ENOMEM, "chat template");
    }
    chat->tokenizer = tokenizer;
    chat->recognized = !name;
    bl_status st = build(chat, which, text, date);
    if (st == BL_OK && !name && bl_tokenizer_chat_template(tokenizer, tool_use))
        st = bl_chat_template_load(tool_use, date, tokenizer, &chat->with_tools);
    if (st != BL_OK) {
        bl_chat_template_destroy(chat);
        return st;
    }
    *out = chat;
    return BL_OK;
}

/* ---- look-ups ---- */

/* transformers: `tools is not None`, an empty list included. */
const bl_chat_template *bl_chat_template_for(const bl_chat_template *chat, const json_t *context)
{
    const json_t *tools = json_object_get(context, "tools");
    return chat->with_tools && tools && !json_is_null(tools) ? chat->with_tools : chat;
}

const char *bl_chat_template_name(const bl_chat_template *chat)
{
    return chat->name;
}

bool bl_chat_template_was_recognized(const bl_chat_template *chat)
{
    return chat->recognized;
}

static uint64_t hash_text(const bl_chat_text *text, uint64_t hash)
{
    hash = XXH3_64bits_withSeed(&text->n, sizeof text->n, hash);
    for (size_t i = 0; i < text->n; i++) {
        hash = XXH3_64bits_withSeed(&text->piece[i].id, sizeof text->piece[i].id, hash);
        hash = XXH3_64bits_withSeed(text->piece[i].text, strlen(text->piece[i].text), hash);
    }
    return hash;
}

uint64_t bl_chat_template_hash(const bl_chat_template *chat)
{
    const bool flags[] = {chat->trims, chat->alternates, chat->nests_system, chat->learns_suffix};
    uint64_t hash = XXH3_64bits_withSeed(flags, sizeof flags, 0);

    hash = XXH3_64bits_withSeed(chat->has_role, sizeof chat->has_role, hash);
    for (int role = 0; role < BL_CHAT_N_ROLES; role++)
        hash = hash_text(&chat->suffix[role], hash_text(&chat->prefix[role], hash));
    hash =
        hash_text(&chat->answer_end, hash_text(&chat->answer_start, hash_text(&chat->begin, hash)));
    hash = chat->jinja ? XXH3_64bits_withSeed(&chat->jinja_hash, sizeof hash, hash) : hash;
    const char *head = chat->system_head ? chat->system_head : "";
    hash = XXH3_64bits_withSeed(head, strlen(head), hash);
    if (!chat->with_tools) return hash;
    uint64_t with_tools = bl_chat_template_hash(chat->with_tools);
    return XXH3_64bits_withSeed(&with_tools, sizeof with_tools, hash);
}
