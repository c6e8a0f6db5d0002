/* SPDX-License-Identifier: Apache-2.0 */
/* Messages as transformers' apply_chat_template hands them to a template. */
#include "base/json.h"
#include "base/sizes.h"
#include "jinja/jinja.h"

/* A message's reasoning goes by three names; templates read the first or the second. */
static const char *const reasoning_names[] = {"reasoning_content", "thinking", "reasoning"};

static json_t *find_reasoning(const json_t *message)
{
    for (size_t i = 0; i < BL_COUNT(reasoning_names); i++) {
        json_t *value = json_object_get(message, reasoning_names[i]);
        if (value && !json_is_null(value)) return value;
    }
    return NULL;
}

static json_t *prepare(const json_t *message)
{
    json_t *reasoning = find_reasoning(message), *out = json_object(), *value;
    const char *key;

    if (reasoning) json_object_set(out, reasoning_names[1], reasoning);
    json_object_foreach((json_t *)message, key, value) if (!json_is_null(value))
        json_object_set(out, key, value);
    if (reasoning) json_object_set(out, reasoning_names[0], reasoning);
    return out;
}

bl_status bl_jinja_prepare_messages(const json_t *messages, json_t **out)
{
    const json_t *message;
    size_t i;

    bl_json_watch_memory();
    *out = json_array();
    json_array_foreach((json_t *)messages, i, message)
        json_array_append_new(*out, prepare(message));
    if (!bl_json_ran_out()) return BL_OK;
    json_decref(*out);
    *out = NULL;
    return BL_FAIL(BL_ENOMEM, "chat template: messages");
}
