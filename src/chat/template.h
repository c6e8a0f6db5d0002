/* SPDX-License-Identifier: Apache-2.0 */
/* template.h -- a conversation as token ids, and which of them a model learns.
 *
 * Known by name, each with the ids that Hugging Face's apply_chat_template gives for the model's
 * own jinja text (no tools):
 * - llama2: <s>[INST] <<SYS>>\n{system}\n<</SYS>>\n\n{user} [/INST] {assistant} </s>; roles must
 *   alternate
 * - llama3: <|begin_of_text|>, then
 *   <|start_header_id|>{role}<|end_header_id|>\n\n{content}<|eot_id|> each
 * - llama3.1: as llama3, with a system message always, which begins with
 *   "Cutting Knowledge Date: December 2023\nToday Date: {date}\n\n"
 * - llama3.2: the same
 *
 * The date is template_date, default "26 Jul 2024": the fallback of both jinja texts. Llama 3.2's
 * text writes the current day where it can, but training data must not depend on the day of the
 * run.
 *
 * Anything else is the path of a file, docs/data.md: a jinja text (.jinja, .jinja2, .j2), or role
 * prefixes and suffixes. Without a name the model's own text decides (tokenizer/tokenizer.h): one
 * of the above if it is theirs, else rendered as it is (rendered.c). Without a text, special tokens
 * that only one of the families has decide; where that is not certain, the caller is asked to name
 * one.
 *
 * Masks are exact by construction: an assistant's content is tokenized apart from its header and
 * joined as ids. Learned are the content and the token that ends the turn, never a header. Text in
 * a message never becomes a special token. */
#ifndef BALLAST_CHAT_TEMPLATE_H
#define BALLAST_CHAT_TEMPLATE_H

#include <jansson.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "base/status.h"
#include "tokenizer/tokenizer.h"

enum {
    BL_LABEL_MASKED = -100
}; /* a label that carries no loss, as in Hugging Face's and PyTorch's code */

#define BL_CHAT_DEFAULT_DATE "26 Jul 2024"

typedef enum bl_chat_role {
    BL_CHAT_SYSTEM,
    BL_CHAT_USER,
    BL_CHAT_ASSISTANT,
    BL_CHAT_N_ROLES,
    BL_CHAT_TOOL = BL_CHAT_N_ROLES /* only for a template that takes objects */
} bl_chat_role;

/* Borrowed by the functions below. */
typedef struct bl_chat_message {
    bl_chat_role role;
    const char *content; /* UTF-8 */
    bool is_masked;      /* an assistant's message that carries no loss */
    /* The message for a template that takes objects: "role" (system, user, assistant or tool),
     * "content" (a string, or null) and the row's other keys, such as tool_calls. May be NULL where
     * the template takes none. */
    const json_t *object;
} bl_chat_message;

/* Never changes once loaded: any thread may use it. */
typedef struct bl_chat_template bl_chat_template;

/* name: NULL for the model's own, as transformers chooses among several: "tool_use" for a
 * conversation with tools, where there is one, else "default"; or the name of one of the model's; a
 * jinja text has "{{" or "{%". date: NULL, or "DD Mon YYYY" for a template that writes one.
 * `tokenizer` is borrowed until bl_chat_template_destroy. BL_EUSAGE: an unknown name, a date
 * without use, a template that this tokenizer lacks tokens for, no name and no certain choice, a
 * file that does not follow the format ("file:line: key: reason"); BL_EIO, BL_ENOMEM. */
bl_status bl_chat_template_load(const char *name, const char *date, const bl_tokenizer *tokenizer,
                                bl_chat_template **out);
void bl_chat_template_destroy(bl_chat_template *chat); /* NULL is fine */

/* The template that writes a conversation with this context: `chat`, or, with tools, the model's
 * own for them. Borrowed from `chat`. */
const bl_chat_template *bl_chat_template_for(const bl_chat_template *chat, const json_t *context);

/* "llama3.1", or the file's path. */
const char *bl_chat_template_name(const bl_chat_template *chat);
bool bl_chat_template_was_recognized(const bl_chat_template *chat); /* loaded without a name */

/* XXH3-64 of everything that decides the output of bl_chat_template_encode, which excludes a file's
 * path. */
uint64_t bl_chat_template_hash(const bl_chat_template *chat);

/* Whether the template reads messages as JSON objects, with tool calls, tools and the like. Another
 * one takes roles and contents only: the caller rejects all other keys. */
bool bl_chat_template_takes_objects(const bl_chat_template *chat);

/* Whether the text of a template that takes objects has the name: it may read a variable, or a
 * key, of this name. */
bool bl_chat_template_reads(const bl_chat_template *chat, const char *name);

/* Whether it may read a message's key of this name: .name, or 'name' that is not compared with a
 * value. */
bool bl_chat_template_reads_key(const bl_chat_template *chat, const char *name);

/* Whether a text has nothing but white space, as Python's str.isspace has it: an answer or a turn
 * that is rejected. */
bool bl_chat_is_blank(const char *text);

/* Appends the conversation to *ids and as many labels (an id, or -100) to *labels; train_on_inputs:
 * every id is its label. Content is stripped of white space at both ends where the template does
 * it. context: NULL, or, for a template that takes objects, the row's keys except the messages: an
 * object with some of "tools", "documents" and "chat_template_kwargs". BL_EINPUT: no messages, an
 * empty user's or assistant's message that calls no tools, a role that the template lacks or has no
 * place for there; BL_ENOMEM. Both lists may have grown after a failure. */
bl_status bl_chat_template_encode(const bl_chat_template *chat, const bl_chat_message *messages,
                                  size_t n_messages, const json_t *context, bool train_on_inputs,
                                  bl_ids *ids, bl_ids *labels);

/* Appends the prompt for an answer to the last message, a user's: the conversation, and the text
 * before an assistant's content. Errors as above; an assistant's message at the end is
 * BL_EINPUT. */
bl_status bl_chat_template_encode_prompt(const bl_chat_template *chat,
                                         const bl_chat_message *messages, size_t n_messages,
                                         const json_t *context, bl_ids *ids);

/* The special token that ends an assistant's turn; -1: it ends in text. */
int32_t bl_chat_template_end(const bl_chat_template *chat);

#endif
