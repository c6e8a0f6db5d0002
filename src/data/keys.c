/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of a row that change the text or the loss, and that its format does not support: they are
 * rejected, since ignoring them would change the training. Other keys outside the row's format are
 * ignored (ids, sources, scores). Origin of the keys: LLaMA-Factory's alpaca and sharegpt formats
 * (system, history, tools, images, kto_tag), TRL's unpaired preferences (label), OpenAI's messages
 * (tool_calls, weight), axolotl's (train, train_detail) and ms-swift's (loss). */
#include <string.h>

#include "base/sizes.h"
#include "data/internal.h"

enum {
    ALPACA = 1 << BL_DATA_ALPACA,
    PROMPT_COMPLETION = 1 << BL_DATA_PROMPT_COMPLETION,
    CHAT = 1 << BL_DATA_MESSAGES | 1 << BL_DATA_SHAREGPT,
    SINGLE = ALPACA | PROMPT_COMPLETION /* one question, one answer */
};

static const char no_place[] =
    "has no place in such a row; use data_format messages, or take it out";
static const char no_tools[] = "tool calls are not supported";
static const char no_media[] = "only text is trained";
static const char no_reasoning[] = "reasoning beside the content is not supported";
static const char no_bad_answers[] = "an answer marked as bad would be learned; take the row out";

typedef struct refused_key {
    const char *key, *reason;
    unsigned formats;
    bool if_false; /* only the value false says something */
} refused_key;

static const refused_key row_keys[] = {
    {"system", no_place, SINGLE, false},
    {"system_prompt", no_place, SINGLE, false},
    {"history", no_place, SINGLE, false},
    {"tools", no_tools, SINGLE | CHAT, false},
    {"functions", no_tools, SINGLE | CHAT, false},
    {"image", no_media, ALPACA | CHAT, false},
    {"images", no_media, ALPACA | CHAT, false},
    {"videos", no_media, ALPACA | CHAT, false},
    {"audios", no_media, ALPACA | CHAT, false},
    {"kto_tag", no_bad_answers, SINGLE | CHAT, true},
    {"label", no_bad_answers, PROMPT_COMPLETION, true},
};

static const refused_key message_keys[] = {
    {"tool_calls", no_tools, CHAT, false},
    {"tool_call_id", no_tools, CHAT, false},
    {"function_call", no_tools, CHAT, false},
    {"train_detail", "weights of parts of messages are not supported", CHAT, false},
    {"reasoning_content", no_reasoning, CHAT, false},
    {"thinking", no_reasoning, CHAT, false},
    {"images", no_media, CHAT, false},
};

/* Whether a message is learned; a value that changes nothing is fine. */
static const char *const loss_keys[] = {"train", "training", "trainable", "loss", "weight"};

/* Absent, null and empty values say nothing; nor does a list of tools that is written as text and
 * empty. */
static bool is_silent(const json_t *value)
{
    const char *text = json_string_value(value);

    return !value || json_is_null(value) || (json_is_array(value) && !json_array_size(value)) ||
           (json_is_object(value) && !json_object_size(value)) ||
           (text && (!*text || !strcmp(text, "[]")));
}

static bl_status refuse(const char *place, const json_t *object, const refused_key *keys,
                        size_t n_keys, bl_data_format format, bool takes_objects)
{
    for (size_t k = 0; k < n_keys; k++) {
        const json_t *value = json_object_get(object, keys[k].key);
        bool is_read = keys[k].reason == no_tools || keys[k].reason == no_reasoning;
        if (takes_objects && is_read && strcmp(keys[k].key, "function_call")) continue;
        if (!(keys[k].formats >> format & 1)) continue;
        if (keys[k].if_false ? !json_is_false(value) : is_silent(value)) continue;
        return BL_FAIL(BL_EINPUT, "%s: key %s: %s", place, keys[k].key, keys[k].reason);
    }
    return BL_OK;
}

bl_status bl_row_check_keys(const char *place, bl_data_format format, const json_t *row,
                            bool takes_objects)
{
    return refuse(place, row, row_keys, BL_COUNT(row_keys), format, takes_objects);
}

bl_status bl_message_check_keys(const char *place, bl_data_format format, const json_t *message,
                                bool takes_objects, bool has_loss, bool *is_masked)
{
    BL_TRY(refuse(place, message, message_keys, BL_COUNT(message_keys), format, takes_objects));
    for (size_t k = 0; k < BL_COUNT(loss_keys); k++) {
        const json_t *value = json_object_get(message, loss_keys[k]);
        bool on = json_is_true(value) || (json_is_number(value) && json_number_value(value) == 1);
        bool off = json_is_false(value) || (json_is_number(value) && json_number_value(value) == 0);
        if (!on && !off && !strcmp(loss_keys[k], "weight") && value && !json_is_null(value))
            return BL_FAIL(BL_EINPUT,
                           "%s: key weight: expected 0 or 1; for other weights use data_format "
                           "tokens with weights",
                           place);
        if (off && is_masked) *is_masked = true;
        if (is_masked || (has_loss ? !off : !on)) continue;
        return BL_FAIL(
            BL_EINPUT,
            "%s: key %s: this message %s loss; to choose by message use data_format tokens", place,
            loss_keys[k], has_loss ? "has" : "has no");
    }
    return BL_OK;
}
