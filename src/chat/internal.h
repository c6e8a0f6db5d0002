/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- the parts of a chat template: template.c has those known by name, file.c reads
 * others, encode.c writes conversations with them. */
#ifndef BALLAST_CHAT_INTERNAL_H
#define BALLAST_CHAT_INTERNAL_H

#include "chat/template.h"
#include "jinja/jinja.h"

/* A template's own text, cut at its special tokens. */
typedef struct bl_chat_piece {
    int32_t id; /* of a special token; -1: text */
    char *text;
} bl_chat_piece;

typedef struct bl_chat_text {
    bl_chat_piece *piece;
    size_t n;
} bl_chat_text;

/* A conversation is `begin`, then prefix, content and suffix of each message. An assistant's is
 *   prefix | answer_start content answer_end | suffix
 * with loss between the bars, and behind the second one if learns_suffix. */
struct bl_chat_template {
    const bl_tokenizer *tokenizer;
    char *name;
    bool recognized;
    bool trims;        /* white space around a content, as Python's str.strip does */
    bool alternates;   /* user, assistant, user, ...; one system message, at the start */
    bool nests_system; /* Llama 2: a system message begins the first user's content */
    bool learns_suffix;
    bool has_role[BL_CHAT_N_ROLES];
    bl_chat_text begin, prefix[BL_CHAT_N_ROLES], suffix[BL_CHAT_N_ROLES], answer_start, answer_end;
    bl_jinja *jinja; /* NULL, or a jinja text, which writes all (rendered.c) */
    char *source;    /* its text */
    uint64_t jinja_hash;
    const char **special; /* [n_special] of the jinja text's tokenizer, borrowed from it */
    size_t n_special;
    struct tm now;     /* output of strftime_now */
    int32_t end;       /* bl_chat_template_end of it */
    char *system_head; /* NULL, or the beginning of every conversation's system message */
    bl_chat_template *with_tools; /* NULL, or the model's own for conversations with tools */
};

extern const char *const bl_chat_role_names[BL_CHAT_N_ROLES + 1]; /* the last: tool */

/* BL_EUSAGE "place: ...": the text spells <|a token|> that the tokenizer does not have. */
bl_status bl_chat_text_split(const bl_tokenizer *tokenizer, const char *place, const char *text,
                             bl_chat_text *out);

/* Fills an empty template from a jinja text; `place` begins its errors. BL_EUSAGE, BL_ENOMEM. */
bl_status bl_chat_rendered_load(bl_chat_template *chat, const char *place, const char *text,
                                size_t n_bytes, const char *date);
/* Sets chat->special; BL_ENOMEM. */
bl_status bl_chat_list_special(bl_chat_template *chat);
/* *out: the caller's copy of a value of a row, with marks where its texts and keys spell special
 * tokens, or parts of them that others may complete. BL_EINPUT: U+E100 in one; BL_ENOMEM. */
bl_status bl_chat_mark(const bl_chat_template *chat, const json_t *value, json_t **out);
/* bl_chat_template_encode and bl_chat_template_encode_prompt of it. */
bl_status bl_chat_rendered_encode(const bl_chat_template *chat, const bl_chat_message *messages,
                                  size_t n, const json_t *context, bool train_on_inputs,
                                  bl_ids *ids, bl_ids *labels);
bl_status bl_chat_rendered_encode_prompt(const bl_chat_template *chat,
                                         const bl_chat_message *messages, size_t n,
                                         const json_t *context, bl_ids *ids);

/* Fills an empty template from the file chat->name. */
bl_status bl_chat_file_read(bl_chat_template *chat);

#endif
