/* SPDX-License-Identifier: Apache-2.0 */
/* Reads a chat template file: YAML, or JSON, which is read as YAML.
 *
 *   begin: "<s>"            put before the first message             (default: nothing)
 *   trim: false             strip white space around each content    (default: false)
 *   roles:                  user and assistant; system if there may be one
 *     user: {prefix: "...", suffix: "..."}
 *   end_token: "<|im_end|>" what ends an assistant's turn, always learned: its suffix begins with
 *     it
 *   train_suffix: false     whether the rest of that suffix is learned too; without end_token, all
 *                           of it */
#include <stdlib.h>
#include <string.h>

#include <yaml.h>

#include "base/files.h"
#include "base/nearest.h"
#include "options/options.h"
#include "chat/internal.h"

enum { MAX_FILE_BYTES = 1 << 20, PLACE_BYTES = 512 };

typedef struct reader {
    bl_chat_template *chat;
    yaml_document_t document;
} reader;

static bl_status fail_at(const reader *r, const yaml_node_t *node, const char *key,
                         const char *reason)
{
    return BL_FAIL(BL_EUSAGE, "%s:%zu: %.80s: %s", r->chat->name, node->start_mark.line + 1, key,
                   reason);
}

static const char *text_of(const yaml_node_t *node)
{
    return (const char *)node->data.scalar.value;
}

static bl_status check_scalar(const reader *r, const yaml_node_t *node, const char *key)
{
    if (node->type != YAML_SCALAR_NODE) return fail_at(r, node, key, "expected a text");
    if (strlen(text_of(node)) != node->data.scalar.length)
        return fail_at(r, node, key, "expected a text without NUL");
    return BL_OK;
}

static bl_status read_text(const reader *r, const yaml_node_t *node, const char *key,
                           bl_chat_text *out)
{
    char place[PLACE_BYTES];

    BL_TRY(check_scalar(r, node, key));
    snprintf(place, sizeof place, "%s:%zu: %.80s", r->chat->name, node->start_mark.line + 1, key);
    return bl_chat_text_split(r->chat->tokenizer, place, text_of(node), out);
}

static bl_status read_bool(const reader *r, const yaml_node_t *node, const char *key, bool *out)
{
    BL_TRY(check_scalar(r, node, key));
    return bl_text_parse_bool(text_of(node), out) ? BL_OK
                                                  : fail_at(r, node, key, "expected true or false");
}

/* The values of a mapping by its keys: value[i] is that of names[i], NULL where absent. */
static bl_status read_mapping(reader *r, const yaml_node_t *node, const char *what,
                              const char *const *names, size_t n_names, yaml_node_t **value)
{
    if (node->type != YAML_MAPPING_NODE) return fail_at(r, node, what, "expected keys with values");
    memset(value, 0, n_names * sizeof *value);
    for (yaml_node_pair_t *pair = node->data.mapping.pairs.start;
         pair < node->data.mapping.pairs.top; pair++) {
        const yaml_node_t *key = yaml_document_get_node(&r->document, pair->key);
        size_t i = 0;
        BL_TRY(check_scalar(r, key, what));
        while (i < n_names && strcmp(names[i], text_of(key))) i++;
        if (i == n_names) {
            const char *nearest = bl_text_nearest(text_of(key), names, n_names);
            return BL_FAIL(BL_EUSAGE, "%s:%zu: %.80s: unknown key of %s%s%s", r->chat->name,
                           key->start_mark.line + 1, text_of(key), what,
                           nearest ? "; did you mean " : "", nearest ? nearest : "");
        }
        if (value[i]) return fail_at(r, key, names[i], "given twice");
        value[i] = yaml_document_get_node(&r->document, pair->value);
    }
    return BL_OK;
}

/* Takes the end token off the assistant's suffix. */
static bl_status split_answer_end(reader *r, const yaml_node_t *node)
{
    bl_chat_template *chat = r->chat;
    bl_chat_text *suffix = &chat->suffix[BL_CHAT_ASSISTANT];

    BL_TRY(read_text(r, node, "end_token", &chat->answer_end));
    if (chat->answer_end.n != 1 || chat->answer_end.piece[0].id < 0)
        return fail_at(r, node, "end_token", "expected one special token of the tokenizer");
    if (!suffix->n || suffix->piece[0].id != chat->answer_end.piece[0].id)
        return fail_at(r, node, "end_token", "the assistant's suffix must begin with it");
    free(suffix->piece[0].text);
    memmove(suffix->piece, suffix->piece + 1, --suffix->n * sizeof *suffix->piece);
    return BL_OK;
}

static bl_status read_role(reader *r, const yaml_node_t *node, int role)
{
    static const char *const names[] = {"prefix", "suffix"};
    yaml_node_t *value[2];

    r->chat->has_role[role] = true;
    BL_TRY(read_mapping(r, node, bl_chat_role_names[role], names, 2, value));
    if (value[0]) BL_TRY(read_text(r, value[0], "prefix", &r->chat->prefix[role]));
    return value[1] ? read_text(r, value[1], "suffix", &r->chat->suffix[role]) : BL_OK;
}

static bl_status read_root(reader *r, const yaml_node_t *root)
{
    enum { BEGIN, TRIM, ROLES, END_TOKEN, TRAIN_SUFFIX, N_KEYS };
    static const char *const names[N_KEYS] = {"begin", "trim", "roles", "end_token",
                                              "train_suffix"};
    yaml_node_t *value[N_KEYS], *role[BL_CHAT_N_ROLES];
    bl_chat_template *chat = r->chat;

    BL_TRY(read_mapping(r, root, "the template", names, N_KEYS, value));
    if (!value[ROLES]) return fail_at(r, root, "roles", "missing");
    BL_TRY(read_mapping(r, value[ROLES], "roles", bl_chat_role_names, BL_CHAT_N_ROLES, role));
    for (int i = 0; i < BL_CHAT_N_ROLES; i++)
        if (role[i]) BL_TRY(read_role(r, role[i], i));
    if (!role[BL_CHAT_USER] || !role[BL_CHAT_ASSISTANT])
        return fail_at(r, value[ROLES], "roles", "expected user and assistant");
    if (value[BEGIN]) BL_TRY(read_text(r, value[BEGIN], "begin", &chat->begin));
    if (value[TRIM]) BL_TRY(read_bool(r, value[TRIM], "trim", &chat->trims));
    if (value[TRAIN_SUFFIX])
        BL_TRY(read_bool(r, value[TRAIN_SUFFIX], "train_suffix", &chat->learns_suffix));
    if (value[END_TOKEN]) return split_answer_end(r, value[END_TOKEN]);
    return value[TRAIN_SUFFIX]
               ? BL_OK
               : fail_at(r, root, "end_token",
                         "missing: what ends an answer? (or say train_suffix: true or false)");
}

bl_status bl_chat_file_read(bl_chat_template *chat)
{
    reader r = {.chat = chat};
    yaml_parser_t parser;
    void *bytes;
    const char *text;
    size_t n_bytes;

    BL_TRY(bl_file_read_all(chat->name, MAX_FILE_BYTES, &bytes, &n_bytes));
    text = bytes;
    if (bl_text_skip_mark(chat->name, &text, &n_bytes) != BL_OK) {
        free(bytes);
        return BL_EUSAGE;
    }
    if (!yaml_parser_initialize(&parser)) {
        free(bytes);
        return BL_FAIL(BL_ENOMEM, "%s", chat->name);
    }
    yaml_parser_set_encoding(&parser, YAML_UTF8_ENCODING);
    yaml_parser_set_input_string(&parser, (const unsigned char *)text, n_bytes);
    bl_status st = BL_OK;
    if (!yaml_parser_load(&parser, &r.document)) {
        st = parser.error == YAML_MEMORY_ERROR
                 ? BL_FAIL(BL_ENOMEM, "%s", chat->name)
                 : BL_FAIL(BL_EUSAGE, "%s:%zu: %s", chat->name, parser.problem_mark.line + 1,
                           parser.problem ? parser.problem : "not YAML");
    } else {
        const yaml_node_t *root = yaml_document_get_root_node(&r.document);
        st = root ? read_root(&r, root) : BL_FAIL(BL_EUSAGE, "%s: no template in it", chat->name);
        yaml_document_delete(&r.document);
    }
    yaml_parser_delete(&parser);
    free(bytes);
    return st;
}
