/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that hold a conversation: {"messages": [{"role", "content"}]} and ShareGPT's
 * {"conversations": [{"from", "value"}]}. */
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "data/internal.h"

/* How a format spells a conversation. */
typedef struct spelling {
    bl_data_format format;
    const char *list, *role, *content;
} spelling;

static const spelling messages_spelling = {BL_DATA_MESSAGES, "messages", "role", "content"};
static const spelling sharegpt_spelling = {BL_DATA_SHAREGPT, "conversations", "from", "value"};

static const struct {
    const char *name;
    bl_chat_role role;
    bool sharegpt_only;
} known_roles[] = {{"system", BL_CHAT_SYSTEM, false},       {"user", BL_CHAT_USER, false},
                   {"assistant", BL_CHAT_ASSISTANT, false}, {"human", BL_CHAT_USER, true},
                   {"gpt", BL_CHAT_ASSISTANT, true},        {"chatgpt", BL_CHAT_ASSISTANT, true}};

static const char *const tool_roles[] = {
    "tool", "tools", "function", "function_call", "function_response", "ipython", "observation"};

static bl_status find_role(const char *place, size_t i, const char *name, bool sharegpt,
                           bl_chat_role *out)
{
    for (size_t k = 0; k < BL_COUNT(known_roles); k++) {
        if (strcmp(name, known_roles[k].name) || (known_roles[k].sharegpt_only && !sharegpt))
            continue;
        *out = known_roles[k].role;
        return BL_OK;
    }
    for (size_t k = 0; k < BL_COUNT(tool_roles); k++)
        if (!strcmp(name, tool_roles[k]))
            return BL_FAIL(BL_EINPUT, "%s: message %zu: role %s: tool calls are not supported",
                           place, i, name);
    return BL_FAIL(BL_EINPUT, "%s: message %zu: unknown role %.80s; expected system, %s", place, i,
                   name, sharegpt ? "human or gpt" : "user or assistant");
}

/* all_learned: also what an assistant does not say carries loss. */
static bl_status read_message(const char *place, size_t i, const json_t *object,
                              const spelling *how, bool all_learned, bl_chat_message *out)
{
    char here[BL_PLACE_BYTES + 32];
    const char *role = "";

    snprintf(here, sizeof here, "%s: message %zu", place, i);
    BL_TRY(bl_json_check_object(here, object));
    BL_TRY(bl_json_get_string(here, object, how->role, BL_JSON_REQUIRED, &role));
    BL_TRY(find_role(place, i, role, how == &sharegpt_spelling, &out->role));
    BL_TRY(bl_message_check_keys(here, how->format, object,
                                 out->role == BL_CHAT_ASSISTANT || all_learned));
    return bl_json_get_string(here, object, how->content, BL_JSON_REQUIRED, &out->content);
}

static bl_status read_conversation(const char *place, const json_t *row, const spelling *how,
                                   bool all_learned, bl_chat_message *message, size_t *n)
{
    const json_t *list, *object;
    const char *system = NULL;
    size_t i;

    BL_TRY(bl_json_get_string(place, row, "system", BL_JSON_OPTIONAL, &system));
    if (system && *system) message[(*n)++] = (bl_chat_message){BL_CHAT_SYSTEM, system};
    list = json_object_get(row, how->list);
    json_array_foreach((json_t *)list, i, object)
        BL_TRY(read_message(place, i, object, how, all_learned, &message[(*n)++]));
    if (!system || !*system || *n < 2 || message[1].role != BL_CHAT_SYSTEM) return BL_OK;
    if (strcmp(system, message[1].content))
        return BL_FAIL(BL_EINPUT, "%s: key system and a system message: give one of them", place);
    memmove(message + 1, message + 2, (--*n - 1) * sizeof *message); /* said twice */
    return BL_OK;
}

static bl_status read_messages(const char *place, const json_t *row, const spelling *how,
                               bool all_learned, bl_chat_message **out, size_t *n)
{
    const json_t *list = NULL;

    *out = NULL;
    *n = 0;
    BL_TRY(bl_json_get_array(place, row, how->list, BL_JSON_REQUIRED, &list));
    bl_chat_message *message = calloc(json_array_size(list) + 1, sizeof *message);
    if (!message) return BL_FAIL(BL_ENOMEM, "%s: %zu messages", place, json_array_size(list));
    bl_status st = read_conversation(place, row, how, all_learned, message, n);
    if (st == BL_OK)
        *out = message;
    else
        free(message);
    return st;
}

bl_status bl_messages_read(const char *place, const json_t *object, bl_chat_message **out,
                           size_t *n)
{
    return read_messages(place, object, &messages_spelling, false, out, n);
}

bl_status bl_chat_row_encode(const bl_sample_rules *rules, const char *place, const json_t *row,
                             bl_ids *ids, bl_ids *labels)
{
    const spelling *how =
        rules->options.format == BL_DATA_SHAREGPT ? &sharegpt_spelling : &messages_spelling;
    bl_chat_message *message;
    size_t n;

    BL_TRY(read_messages(place, row, how, rules->options.train_on_inputs, &message, &n));
    bl_status st = bl_chat_template_encode(rules->chat, message, n, rules->options.train_on_inputs,
                                           ids, labels);
    if (st != BL_OK) bl_error_prefix(st, "%s", place);
    free(message);
    return st;
}
