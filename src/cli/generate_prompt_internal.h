/* SPDX-License-Identifier: Apache-2.0 */
/* generate_prompt_internal.h -- what `ballast generate` continues: a text, a file, messages or
 * ids. */
#ifndef BALLAST_CLI_GENERATE_PROMPT_INTERNAL_H
#define BALLAST_CLI_GENERATE_PROMPT_INTERNAL_H

#include <jansson.h>

#include "base/present.h"
#include "chat/template.h"
#include "tokenizer/tokenizer.h"

/* Exactly one of the first four is not NULL; of a chat, none, or messages. */
typedef struct bl_generate_prompt {
    const char *prompt, *prompt_file;
    const char *messages; /* JSON, or the path of a file of it */
    const char *input_ids;
    const char *chat_template, *template_date; /* of messages: chat/template.h */
    bool parse_special_tokens;                 /* of prompt and prompt_file */
    bool chat;                                 /* messages are read from stdin */
} bl_generate_prompt;

/* BL_EUSAGE unless exactly one is given, with the options that belong to it. */
bl_status bl_generate_prompt_check(const bl_generate_prompt *prompt);

/* Appends the ids. *end: the token that ends an answer to messages; -1: none but the model's. The
 * tokenizer may be NULL with input_ids. BL_EUSAGE, BL_EINPUT, BL_EIO, BL_ENOMEM. */
bl_status bl_generate_prompt_read(const bl_generate_prompt *prompt, const bl_tokenizer *tokenizer,
                                  bl_ids *ids, int32_t *end);

/* {"messages": [...]} of --messages: JSON, or a file of it, where a list may be alone; *out is the
 * caller's. BL_EINPUT, BL_EIO, BL_ENOMEM. */
bl_status bl_generate_messages_load(const char *text, json_t **out);
/* Appends the prompt for an answer to the last message of such an object; *end is the token that
 * ends the answer, as of bl_chat_template_end. One warning names keys that are not used and not in
 * *named, which gets them. As bl_chat_template_encode_prompt. */
bl_status bl_generate_messages_encode(const bl_chat_template *chat, const json_t *object,
                                      bl_key_names *named, bl_ids *ids, int32_t *end);

#endif
