/* SPDX-License-Identifier: Apache-2.0 */
/* keys.c -- keys of rows and messages that their format does not read (base/present.h): those whose
 * absence changes what is learned are errors, unless they repeat a text that is read; the others
 * are named once per file.
 *
 * Origin of the names: LLaMA-Factory's alpaca and sharegpt formats (system, history, tools, images,
 * kto_tag), TRL's preferences (chosen, rejected, label), OpenAI's messages (tool_calls, weight,
 * refusal), axolotl's (train, train_detail), ms-swift's (loss, rejected_response, query),
 * torchtune's (masked) and published data sets (context, passage, choices, ...). */
#include <stdio.h>
#include <string.h>

#include "base/sizes.h"
#include "data/internal.h"

enum { N_USED = 16 };

static const char content[] = "it would not be learned: write it into the row's texts or messages, "
                              "or take it out (data_format messages has system and history)";
static const char media[] = "only text is trained";
static const char other_answer[] =
    "only rows of preferences (prompt, chosen, rejected) have answers to avoid";
static const char marked_bad[] = "an answer marked as bad would be learned; take the row out";
static const char weighed[] =
    "rows have no flags or weights of loss: take the row out, or use data_format tokens with "
    "labels or weights";
static const char no_tools[] = "tool calls are not supported by this format or chat template";
static const char no_reasoning[] = "this chat template does not read reasoning beside the content";
static const char no_part[] =
    "weights and masks of parts of messages are not supported; use data_format tokens";

#define CONTENT(name)                                                                              \
    {                                                                                              \
        name, BL_KEY_REJECTED, NULL, content                                                       \
    }
#define MEDIA(name)                                                                                \
    {                                                                                              \
        name, BL_KEY_REJECTED, NULL, media                                                         \
    }
#define FLAG(name)                                                                                 \
    {                                                                                              \
        name, BL_KEY_REJECTED, "[true, 1]", weighed                                                \
    }
#define TOOLS(name)                                                                                \
    {                                                                                              \
        name, BL_KEY_REJECTED, NULL, no_tools                                                      \
    }
#define OTHER(name)                                                                                \
    {                                                                                              \
        name, BL_KEY_REJECTED, NULL, other_answer                                                  \
    }

/* Of any format. */
static const bl_known_key any_keys[] = {FLAG("weight"),
                                        FLAG("weights"),
                                        FLAG("sample_weight"),
                                        FLAG("loss_weight"),
                                        FLAG("loss_scale"),
                                        FLAG("loss_mask"),
                                        FLAG("loss"),
                                        FLAG("train"),
                                        FLAG("training"),
                                        FLAG("trainable"),
                                        {"mask", BL_KEY_REJECTED, NULL, weighed},
                                        {"masked", BL_KEY_REJECTED, NULL, weighed},
                                        MEDIA("image"),
                                        MEDIA("images"),
                                        MEDIA("video"),
                                        MEDIA("videos"),
                                        MEDIA("audio"),
                                        MEDIA("audios"),
                                        MEDIA("image_url"),
                                        MEDIA("media"),
                                        TOOLS("tools"),
                                        TOOLS("functions")};

/* Of all but text, which is one whole. The last two are copies beside messages and ids. */
static const bl_known_key content_keys[] = {CONTENT("system"),
                                            CONTENT("system_prompt"),
                                            CONTENT("system_message"),
                                            CONTENT("sys_prompt"),
                                            CONTENT("history"),
                                            CONTENT("chat_history"),
                                            CONTENT("question"),
                                            CONTENT("query"),
                                            CONTENT("input"),
                                            CONTENT("inputs"),
                                            CONTENT("context"),
                                            CONTENT("contexts"),
                                            CONTENT("documents"),
                                            CONTENT("document"),
                                            CONTENT("passage"),
                                            CONTENT("passages"),
                                            CONTENT("article"),
                                            CONTENT("background"),
                                            CONTENT("knowledge"),
                                            CONTENT("choices"),
                                            CONTENT("options"),
                                            CONTENT("prefix"),
                                            CONTENT("suffix"),
                                            CONTENT("chat_template_kwargs"),
                                            OTHER("chosen"),
                                            OTHER("rejected"),
                                            OTHER("rejected_response"),
                                            OTHER("rejected_messages"),
                                            OTHER("rejected_answer"),
                                            OTHER("negative_messages"),
                                            {"kto_tag", BL_KEY_REJECTED, "[true]", marked_bad},
                                            CONTENT("instruction"),
                                            CONTENT("prompt")};
enum { N_COPIES = 2 };

static const bl_known_key message_keys[] = {
    TOOLS("tool_calls"),
    TOOLS("function_call"),
    TOOLS("tools"),
    TOOLS("functions"),
    {"reasoning_content", BL_KEY_REJECTED, NULL, no_reasoning},
    {"reasoning", BL_KEY_REJECTED, NULL, no_reasoning},
    {"thinking", BL_KEY_REJECTED, NULL, no_reasoning},
    {"thinking_content", BL_KEY_REJECTED, NULL, no_reasoning},
    {"thought", BL_KEY_REJECTED, NULL, no_reasoning},
    {"refusal", BL_KEY_REJECTED, NULL, "it would not be learned: write it as the content"},
    {"train_detail", BL_KEY_REJECTED, NULL, no_part},
    {"weights", BL_KEY_REJECTED, NULL, no_part},
    {"loss_weight", BL_KEY_REJECTED, "[1]", no_part},
    {"loss_scale", BL_KEY_REJECTED, "[1]", no_part},
    {"loss_mask", BL_KEY_REJECTED, NULL, no_part},
    CONTENT("context"),
    CONTENT("documents"),
    MEDIA("image"),
    MEDIA("images"),
    MEDIA("video"),
    MEDIA("videos"),
    MEDIA("audio"),
    MEDIA("audios")};

/* Whether a message is learned; masked, of torchtune, says the reverse. */
static const char *const loss_keys[] = {"train", "training", "trainable",
                                        "loss",  "weight",   "masked"};
enum { MASKED = 5 };

/* ---- keys that are read ---- */

typedef struct used_keys {
    const char *name[N_USED + 1];
    size_t n;
} used_keys;

static void add(used_keys *used, const char *name)
{
    if (name && used->n < N_USED) used->name[used->n++] = name;
}

static void add_of_conversation(const bl_sample_rules *rules, used_keys *used)
{
    add(used, "system");
    add(used, "system_prompt");
    if (!bl_chat_template_takes_objects(rules->chat)) return;
    add(used, "chat_template_kwargs");
    if (bl_chat_template_reads(rules->chat, "documents")) add(used, "documents");
    if (!bl_chat_template_reads(rules->chat, "tools")) return;
    add(used, "tools");
    add(used, "functions");
}

static void list_used(const bl_sample_rules *rules, const json_t *row, used_keys *used)
{
    const bl_row_shape *shape = bl_sample_rules_shape(rules);
    bool is_preference = bl_data_format_is_preference(rules->options.format),
         is_chat = rules->side == BL_DATA_MESSAGES || rules->side == BL_DATA_SHAREGPT;

    if (rules->options.format == BL_DATA_TEXT) {
        add(used, rules->text_key);
        return;
    }
    add(used, shape->first);
    add(used, shape->second);
    if (!is_preference) add(used, shape->input);
    if (is_preference) {
        const bl_prompt_keys *prompt =
            rules->side == BL_DATA_TOKENS ? NULL : bl_preference_prompt_keys(row);
        add(used, prompt ? prompt->key : NULL);
        add(used, prompt ? prompt->input : NULL);
        if (rules->options.format == BL_DATA_UNPAIRED_PREFERENCE && rules->side == BL_DATA_TOKENS)
            add(used, "labels");
    }
    if (!is_chat) return;
    add_of_conversation(rules, used);
    if (!is_preference && shape->second && !json_is_array(json_object_get(row, shape->first)))
        add(used, "history");
}

/* Whether a text repeats one of those that are read: it is a whole one, or a long part. */
static bool repeats(const json_t *value, const char *text)
{
    enum { LONG_BYTES = 32 };
    const char *whole = json_string_value(value), *key;
    json_t *child;
    size_t i;

    if (whole && !strcmp(whole, text)) return true;
    if (whole) return strlen(text) >= LONG_BYTES && strstr(whole, text);
    json_array_foreach((json_t *)value, i, child)
    {
        if (repeats(child, text)) return true;
    }
    json_object_foreach((json_t *)value, key, child)
    {
        if (repeats(child, text)) return true;
    }
    return false;
}

static bool is_copy(const json_t *row, const used_keys *used, const json_t *value)
{
    const char *text = bl_json_text(value);

    for (size_t i = 0; text && i < used->n; i++)
        if (repeats(json_object_get(row, used->name[i]), text)) return true;
    return false;
}

/* ---- rows ---- */

static const bl_key_table no_keys = {0};

/* A list that is written as a text, and empty. */
static bool is_empty_list(const json_t *value)
{
    const char *text = json_string_value(value);
    return text && (!strcmp(text, "[]") || !strcmp(text, "{}"));
}

static bool has_key(const bl_key_table *table, const char *key)
{
    for (size_t i = 0; i < table->n_keys; i++)
        if (!strcmp(table->keys[i].name, key)) return true;
    return false;
}

static bool is_used(const used_keys *used, const char *key)
{
    for (size_t i = 0; i < used->n; i++)
        if (!strcmp(used->name[i], key)) return true;
    return false;
}

/* TRL's and ms-swift's flag of an answer; other labels are categories. */
static bl_status check_label(const char *place, const json_t *value)
{
    return json_is_false(value) ? BL_FAIL(BL_EINPUT, "%s: key label: false: %s", place, marked_bad)
                                : BL_OK;
}

/* Variables of the template that it does not read. */
static bl_status check_variables(const bl_sample_rules *rules, const char *place, const json_t *row)
{
    const char *key;
    json_t *value;

    json_object_foreach(json_object_get(row, "chat_template_kwargs"), key, value)
    {
        char name[96];
        snprintf(name, sizeof name, "chat_template_kwargs.%s", key);
        if (!bl_chat_template_reads(rules->chat, key))
            BL_TRY(bl_key_check(&no_keys, place, name, value, rules->unused));
    }
    return BL_OK;
}

bl_status bl_row_check_keys(const bl_sample_rules *rules, const char *place, const json_t *row)
{
    bool is_text = rules->options.format == BL_DATA_TEXT,
         is_chat = rules->side == BL_DATA_MESSAGES || rules->side == BL_DATA_SHAREGPT,
         has_copies = rules->side == BL_DATA_TOKENS ||
                      (is_chat && !bl_data_format_is_preference(rules->options.format));
    const bl_key_table any = {any_keys, BL_COUNT(any_keys), NULL, NULL},
                       contents = {content_keys,
                                   is_text ? 0
                                           : BL_COUNT(content_keys) - (has_copies ? N_COPIES : 0),
                                   NULL, NULL};
    used_keys used = {.n = 0};
    const char *key;
    json_t *value;

    if (rules->options.format == BL_DATA_TOKENS) return BL_OK; /* build_tokens is stricter */
    list_used(rules, row, &used);
    json_object_foreach((json_t *)row, key, value)
    {
        if (is_used(&used, key) || is_empty_list(value)) continue;
        bool is_flag = has_key(&any, key), is_content = has_key(&contents, key);
        if (!is_text && !strcmp(key, "label")) BL_TRY(check_label(place, value));
        if (is_content && is_copy(row, &used, value)) is_content = false;
        BL_TRY(bl_key_check(is_flag      ? &any
                            : is_content ? &contents
                                         : &no_keys,
                            place, key, value, rules->unused));
    }
    return is_chat && bl_chat_template_takes_objects(rules->chat)
               ? check_variables(rules, place, row)
               : BL_OK;
}

/* ---- messages ---- */

static bl_status check_loss(const char *place, const json_t *message, bool has_loss,
                            bool *is_masked)
{
    for (size_t k = 0; k < BL_COUNT(loss_keys); k++) {
        const json_t *value = json_object_get(message, loss_keys[k]);
        double number = json_number_value(value);
        bool on = json_is_true(value) || (json_is_number(value) && number == 1),
             off = json_is_false(value) || (json_is_number(value) && number == 0);

        if (!value || json_is_null(value)) continue;
        if (!on && !off) {
            return bl_json_fail(place, loss_keys[k],
                                "true, false, 0 or 1 (for other weights use data_format tokens "
                                "with weights)",
                                value);
        }
        bool is_learned = k == MASKED ? off : on;
        if (!is_learned && is_masked) *is_masked = true;
        if (is_masked || is_learned == has_loss || (k == MASKED && off)) continue;
        return BL_FAIL(
            BL_EINPUT,
            "%s: key %s: this message %s loss; to choose by message use data_format tokens", place,
            loss_keys[k], has_loss ? "has" : "has no");
    }
    return BL_OK;
}

/* from and value are those of messages without a role (chat.c). */
static bool is_read(const bl_chat_template *chat, const json_t *message, const char *key)
{
    static const char *const names[2][2] = {{"from", "value"}, {"role", "content"}};
    bool has_role = json_object_get(message, "role");

    if (!strcmp(key, names[has_role][0]) || !strcmp(key, names[has_role][1])) return true;
    for (size_t i = 0; i < BL_COUNT(loss_keys); i++)
        if (!strcmp(key, loss_keys[i])) return true;
    return bl_chat_template_takes_objects(chat) && bl_chat_template_reads_key(chat, key);
}

bl_status bl_message_check_keys(const char *place, const bl_chat_template *chat,
                                const json_t *message, bool has_loss, bool *is_masked,
                                bl_key_names *unused)
{
    static const bl_key_table table = {message_keys, BL_COUNT(message_keys), NULL, "tool_call_id"};
    const char *key;
    json_t *value;

    json_object_foreach((json_t *)message, key, value)
    {
        if (!is_read(chat, message, key) && !is_empty_list(value))
            BL_TRY(bl_key_check(&table, place, key, value, unused));
    }
    return check_loss(place, message, has_loss, is_masked);
}
