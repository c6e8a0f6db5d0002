/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that are conversations: {"messages": [{"role", "content"}]}, ShareGPT's {"conversations":
 * [{"from", "value"}]}, TRL's prompt and completion as lists of messages, and, for data_format
 * messages, the columns of single questions and answers with system and history. */
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "data/internal.h"
#include "tokenizer/text.h" /* bl_bytes */

/* A row on its way into a conversation. */
typedef struct reading {
    const char *place;
    const json_t *row;
    bl_data_format format;
    const bl_chat_template *chat;
    bl_key_names *unused;
    bool takes_objects, all_learned; /* all_learned: text outside answers carries loss, too */
    size_t n_read;                   /* messages of the row's lists */
    bl_conversation *out;
} reading;

/* ---- roles ---- */

static const struct {
    const char *name;
    bl_chat_role role;
    bool sharegpt_only;
} known_roles[] = {{"system", BL_CHAT_SYSTEM, false},       {"developer", BL_CHAT_SYSTEM, false},
                   {"user", BL_CHAT_USER, false},           {"human", BL_CHAT_USER, true},
                   {"assistant", BL_CHAT_ASSISTANT, false}, {"bot", BL_CHAT_ASSISTANT, false},
                   {"model", BL_CHAT_ASSISTANT, false},     {"gpt", BL_CHAT_ASSISTANT, true},
                   {"chatgpt", BL_CHAT_ASSISTANT, true}};

/* Names of the results of a tool; a call is an assistant's message. */
static const char *const tool_roles[] = {"tool",    "tools",      "function", "function_response",
                                         "ipython", "observation"};
static const char *const call_roles[] = {"function_call", "tool_call"};

static const char *const role_texts[] = {"system", "user", "assistant", "tool"};

static bool is_one_of(const char *name, const char *const *names, size_t n)
{
    for (size_t i = 0; i < n; i++)
        if (!strcmp(name, names[i])) return true;
    return false;
}

static bl_status find_role(const reading *r, const char *here, const char *name, bool sharegpt,
                           bl_chat_role *out)
{
    bool is_result = is_one_of(name, tool_roles, BL_COUNT(tool_roles));

    for (size_t k = 0; k < BL_COUNT(known_roles); k++) {
        if (strcmp(name, known_roles[k].name) || (known_roles[k].sharegpt_only && !sharegpt))
            continue;
        *out = known_roles[k].role;
        return BL_OK;
    }
    *out = BL_CHAT_TOOL;
    if (is_result && r->takes_objects) return BL_OK;
    if (is_one_of(name, call_roles, BL_COUNT(call_roles)) && r->takes_objects)
        return BL_FAIL(BL_EINPUT, "%s: role %s: write it as tool_calls of an assistant's message",
                       here, name);
    if (is_result || is_one_of(name, call_roles, BL_COUNT(call_roles)))
        return BL_FAIL(BL_EINPUT, "%s: role %s: tool calls are not supported", here, name);
    return BL_FAIL(BL_EINPUT, "%s: unknown role %.80s; expected system, %s", here, name,
                   sharegpt ? "human or gpt" : "user or assistant");
}

/* ---- one message ---- */

/* Keeps a text that the row has not, for as long as the conversation. */
static bl_status keep_text(reading *r, const char *text, size_t n_bytes, const char **out)
{
    json_t *kept = json_stringn_nocheck(text, n_bytes);

    if (!kept || json_array_append_new(r->out->kept, kept))
        return BL_FAIL(BL_ENOMEM, "%s: a message", r->place);
    *out = json_string_value(kept);
    return BL_OK;
}

/* [{"type": "text", "text": "a"}, ...]: the texts one after the other. */
static bl_status join_parts(reading *r, const char *here, const json_t *parts, const char **out)
{
    char place[BL_PLACE_BYTES + 96];
    bl_bytes whole = {0};
    const json_t *part;
    size_t i;
    bl_status st = BL_OK;

    json_array_foreach((json_t *)parts, i, part)
    {
        const char *type = "", *text = "";
        snprintf(place, sizeof place, "%s: part %zu of the content", here, i);
        BL_TRY_GOTO(st, done, bl_json_check_object(place, part));
        BL_TRY_GOTO(st, done, bl_json_get_string(place, part, "type", BL_JSON_REQUIRED, &type));
        if (strcmp(type, "text")) {
            st = BL_FAIL(BL_EINPUT, "%s: type %.80s: only text is trained", place, type);
            goto done;
        }
        BL_TRY_GOTO(st, done, bl_json_get_string(place, part, "text", BL_JSON_REQUIRED, &text));
        BL_TRY_GOTO(st, done, bl_bytes_append(&whole, text, strlen(text)));
    }
    st = keep_text(r, whole.n ? whole.data : "", whole.n, out);
done:
    bl_bytes_free(&whole);
    return st;
}

/* An assistant that calls tools may say nothing. */
static bl_status read_content(reading *r, const char *here, const json_t *object, const char *key,
                              const char **out)
{
    const json_t *value = json_object_get(object, key);
    bool calls = r->takes_objects && json_array_size(json_object_get(object, "tool_calls"));

    *out = "";
    if (json_is_array(value)) return join_parts(r, here, value, out);
    if (calls && (!value || json_is_null(value))) return BL_OK;
    return bl_json_get_string(here, object, key, BL_JSON_REQUIRED, out);
}

/* The message as a template takes it: role and content by these names, then the row's own keys. */
static bl_status keep_object(reading *r, const json_t *object, bl_chat_message *message)
{
    json_t *kept = object ? json_copy((json_t *)object) : json_object();
    bool has_text = !object || *message->content;

    json_object_del(kept, "from");
    json_object_del(kept, "value");
    if (!kept || json_object_set_new(kept, "role", json_string(role_texts[message->role])) ||
        json_object_set_new(kept, "content",
                            has_text || !json_is_null(json_object_get(kept, "content"))
                                ? json_string(message->content)
                                : json_null()) ||
        json_array_append(r->out->kept, kept)) {
        json_decref(kept);
        return BL_FAIL(BL_ENOMEM, "%s: a message", r->place);
    }
    message->object = kept; /* of r->out->kept */
    json_decref(kept);
    return BL_OK;
}

static bl_status add_message(reading *r, const json_t *object, bl_chat_message message)
{
    if (r->takes_objects) BL_TRY(keep_object(r, object, &message));
    r->out->message[r->out->n++] = message;
    return BL_OK;
}

static bl_status add_text(reading *r, bl_chat_role role, const char *text)
{
    return add_message(r, NULL, (bl_chat_message){.role = role, .content = text});
}

static bl_status read_message(reading *r, const json_t *object, bool is_masked)
{
    char here[BL_PLACE_BYTES + 32];
    const char *role = "";
    bl_chat_message message = {.is_masked = is_masked};

    snprintf(here, sizeof here, "%s: message %zu", r->place, r->n_read++);
    BL_TRY(bl_json_check_object(here, object));
    bool has_from = json_object_get(object, "from"), has_role = json_object_get(object, "role");
    bool is_from = has_from || (!has_role && r->format == BL_DATA_SHAREGPT);
    if (has_role) is_from = false;
    BL_TRY(bl_json_get_string(here, object, is_from ? "from" : "role", BL_JSON_REQUIRED, &role));
    BL_TRY(find_role(r, here, role, is_from || r->format == BL_DATA_SHAREGPT, &message.role));
    bool is_answer = message.role == BL_CHAT_ASSISTANT;
    BL_TRY(bl_message_check_keys(here, r->chat, object, is_answer || r->all_learned,
                                 is_answer && !r->all_learned ? &message.is_masked : NULL,
                                 r->unused));
    BL_TRY(read_content(r, here, object, is_from ? "value" : "content", &message.content));
    return add_message(r, object, message);
}

/* ---- a row ---- */

static bl_status read_list(reading *r, const char *key, bool is_masked)
{
    const json_t *list = NULL, *object;
    size_t i;

    BL_TRY(bl_json_get_array(r->place, r->row, key, BL_JSON_REQUIRED, &list));
    json_array_foreach((json_t *)list, i, object) BL_TRY(read_message(r, object, is_masked));
    return BL_OK;
}

/* The text beside a list of messages; one that the list has, too, is written once. */
static bl_status merge_system(reading *r, const char *system)
{
    bl_chat_message *message = r->out->message;

    if (!*system || r->out->n < 2 || message[1].role != BL_CHAT_SYSTEM) return BL_OK;
    if (strcmp(system, message[1].content))
        return BL_FAIL(BL_EINPUT,
                       "%s: key system or system_prompt and a system message: give one of them",
                       r->place);
    memmove(message + 1, message + 2, (--r->out->n - 1) * sizeof *message);
    return BL_OK;
}

/* The text beside messages or columns, as the first message; "": none. */
static bl_status read_system(reading *r, const char **out)
{
    const char *system = "", *prompt = "";

    BL_TRY(bl_json_get_string(r->place, r->row, "system", BL_JSON_OPTIONAL, &system));
    BL_TRY(bl_json_get_string(r->place, r->row, "system_prompt", BL_JSON_OPTIONAL, &prompt));
    if (*system && *prompt && strcmp(system, prompt))
        return BL_FAIL(BL_EINPUT, "%s: keys system and system_prompt: give one of them", r->place);
    *out = *system ? system : prompt;
    return **out ? add_text(r, BL_CHAT_SYSTEM, *out) : BL_OK;
}

static bl_status read_lists(reading *r, const bl_row_shape *shape)
{
    const char *system = "";

    BL_TRY(read_system(r, &system));
    BL_TRY(read_list(r, shape->first, shape->second != NULL && !r->all_learned));
    if (shape->second) BL_TRY(read_list(r, shape->second, false));
    return merge_system(r, system);
}

/* [["question", "answer"], ...], of earlier turns. */
static bl_status read_history(reading *r)
{
    const json_t *list = NULL, *pair;
    size_t i;

    BL_TRY(bl_json_get_array(r->place, r->row, "history", BL_JSON_OPTIONAL, &list));
    json_array_foreach((json_t *)list, i, pair)
    {
        const char *said = bl_json_text(json_array_get(pair, 0));
        const char *answer = bl_json_text(json_array_get(pair, 1));
        if (!said || !answer || json_array_size(pair) != 2)
            return BL_FAIL(BL_EINPUT, "%s: history[%zu]: expected [question, answer]", r->place, i);
        BL_TRY(add_text(r, BL_CHAT_USER, said));
        BL_TRY(add_text(r, BL_CHAT_ASSISTANT, answer));
    }
    return BL_OK;
}

/* The question: an instruction and its input are two lines, as LLaMA-Factory writes them. */
static bl_status add_question(reading *r, const bl_row_shape *shape)
{
    const char *said = "", *input = "";
    char *whole = NULL;

    BL_TRY(bl_json_get_string(r->place, r->row, shape->first, BL_JSON_REQUIRED, &said));
    if (shape->input)
        BL_TRY(bl_json_get_string(r->place, r->row, shape->input, BL_JSON_OPTIONAL, &input));
    if (!*input) return add_text(r, BL_CHAT_USER, said);
    if (asprintf(&whole, "%s\n%s", said, input) < 0)
        return BL_FAIL(BL_ENOMEM, "%s: a message", r->place);
    bl_status st = keep_text(r, whole, strlen(whole), &said);
    free(whole);
    return st == BL_OK ? add_text(r, BL_CHAT_USER, said) : st;
}

static bl_status read_columns(reading *r, const bl_row_shape *shape)
{
    const char *answer = "", *system = "";

    BL_TRY(read_system(r, &system));
    BL_TRY(read_history(r));
    BL_TRY(add_question(r, shape));
    BL_TRY(bl_json_get_string(r->place, r->row, shape->second, BL_JSON_REQUIRED, &answer));
    return add_text(r, BL_CHAT_ASSISTANT, answer);
}

/* "tools" as a list, or as the text of one. */
static bl_status read_tools(reading *r, const char *key, json_t *context)
{
    const json_t *value = json_object_get(r->row, key);
    const char *text = bl_json_text(value);
    json_t *parsed = NULL;

    if (!value || json_is_null(value) || (text && !*text)) return BL_OK;
    if (text) {
        char place[BL_PLACE_BYTES + 32];
        snprintf(place, sizeof place, "%s: key %s", r->place, key);
        BL_TRY(bl_json_parse(place, 1, text, strlen(text), &parsed));
    }
    if (json_object_get(context, "tools")) {
        json_decref(parsed);
        return BL_FAIL(BL_EINPUT, "%s: keys functions and tools: give one of them", r->place);
    }
    bl_status st = json_is_array(text ? parsed : value)
                       ? BL_OK
                       : bl_json_fail(r->place, key, "an array of tools", value);
    if (st == BL_OK && json_object_set(context, "tools", text ? parsed : (json_t *)value))
        st = BL_FAIL(BL_ENOMEM, "%s: tools", r->place);
    json_decref(parsed);
    return st;
}

static bl_status read_context(reading *r)
{
    static const char *const kept[] = {"documents", "chat_template_kwargs"};
    json_t *context = r->out->context = json_object();
    const json_t *variables = NULL;

    if (!context) return BL_FAIL(BL_ENOMEM, "%s: a row", r->place);
    BL_TRY(
        bl_json_get_object(r->place, r->row, "chat_template_kwargs", BL_JSON_OPTIONAL, &variables));
    BL_TRY(read_tools(r, "functions", context));
    BL_TRY(read_tools(r, "tools", context));
    for (size_t i = 0; i < BL_COUNT(kept); i++) {
        json_t *value = json_object_get(r->row, kept[i]);
        if (!value || json_is_null(value)) continue;
        if (json_object_set(context, kept[i], value))
            return BL_FAIL(BL_ENOMEM, "%s: a row", r->place);
    }
    return BL_OK;
}

static size_t count_messages(const json_t *row, const bl_row_shape *shape)
{
    size_t n = 4 + json_array_size(json_object_get(row, shape->first)) +
               2 * json_array_size(json_object_get(row, "history"));
    return shape->second ? n + json_array_size(json_object_get(row, shape->second)) : n;
}

static bl_status read_conversation(reading *r, const bl_row_shape *shape)
{
    size_t n_most = count_messages(r->row, shape);
    bool is_columns = shape->second && !json_is_array(json_object_get(r->row, shape->first));

    *r->out =
        (bl_conversation){.message = calloc(n_most, sizeof *r->out->message), .kept = json_array()};
    if (!r->out->message || !r->out->kept)
        return BL_FAIL(BL_ENOMEM, "%s: %zu messages", r->place, n_most);
    BL_TRY(is_columns ? read_columns(r, shape) : read_lists(r, shape));
    return r->takes_objects ? read_context(r) : BL_OK;
}

static bl_status read_row(reading *r, const bl_row_shape *shape)
{
    bl_status st = read_conversation(r, shape);
    if (st != BL_OK) bl_conversation_free(r->out);
    return st;
}

bl_status bl_conversation_read(const char *place, const json_t *object,
                               const bl_chat_template *chat, bl_key_names *unused,
                               bl_conversation *out)
{
    const bl_sample_rules rules = {.options.format = BL_DATA_MESSAGES,
                                   .side = BL_DATA_MESSAGES,
                                   .chat = (bl_chat_template *)chat, /* read only */
                                   .unused = unused};
    reading r = {.place = place,
                 .row = object,
                 .format = BL_DATA_MESSAGES,
                 .chat = chat,
                 .unused = unused,
                 .takes_objects = bl_chat_template_takes_objects(chat),
                 .out = out};
    BL_TRY(bl_row_check_keys(&rules, place, object));
    return read_row(&r, bl_row_shape_of(BL_DATA_MESSAGES));
}

void bl_conversation_free(bl_conversation *conversation)
{
    free(conversation->message);
    json_decref(conversation->kept);
    json_decref(conversation->context);
    *conversation = (bl_conversation){0};
}

bl_status bl_chat_row_encode(const bl_sample_rules *rules, const char *place, const json_t *row,
                             bl_ids *ids, bl_ids *labels)
{
    bl_conversation c;
    bl_key_names known = {0};
    reading r = {.place = place,
                 .row = row,
                 .format = rules->options.format,
                 .chat = rules->chat,
                 .unused = rules->unused ? rules->unused : &known,
                 .takes_objects = bl_chat_template_takes_objects(rules->chat),
                 .all_learned = rules->options.train_on_inputs,
                 .out = &c};

    BL_TRY(read_row(&r, bl_sample_rules_shape(rules)));
    bl_status st = bl_chat_template_encode(rules->chat, c.message, c.n, c.context,
                                           rules->options.train_on_inputs, ids, labels);
    if (st != BL_OK) bl_error_prefix(st, "%s", place);
    bl_conversation_free(&c);
    return st;
}
