/* SPDX-License-Identifier: Apache-2.0 */
/* preference.c -- rows of preferences: two answers to a prompt, of which one was chosen, or one
 * answer with a label. Each side is a row of tokens, prompt_completion or messages and is built as
 * such; everything behind the prompt is the answer.
 *
 * LLaMA-Factory's rows have their prompt in instruction and input, or in a list of messages before
 * single messages as answers.
 *
 * As TRL's DPOTrainer and KTOTrainer: an implicit prompt is the longest common beginning; a side is
 * cut at its end; a row whose prompt alone fills max_seq_length is left out. Unlike them, a text
 * prompt is tokenized apart from its answer, as everywhere in Ballast (dataset.h). */
#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "data/internal.h"

bool bl_data_format_is_preference(bl_data_format format)
{
    return format == BL_DATA_PREFERENCE || format == BL_DATA_UNPAIRED_PREFERENCE;
}

/* A single message in place of a list of them. */
static bool is_message(const json_t *answer)
{
    return json_object_get(answer, "role") || json_object_get(answer, "from");
}

bl_status bl_preference_settle(const char *place, const json_t *row, bl_data_format format,
                               bl_data_format *side)
{
    bool is_pair = format == BL_DATA_PREFERENCE;
    const char *key = is_pair ? "chosen" : "completion";
    const json_t *answer = json_object_get(row, key);

    if (is_message(answer))
        *side = BL_DATA_MESSAGES;
    else if (json_is_object(answer) || (!is_pair && json_object_get(row, "input_ids")))
        *side = BL_DATA_TOKENS;
    else if (json_is_array(answer))
        *side = BL_DATA_MESSAGES;
    else if (json_is_string(answer))
        *side = BL_DATA_PROMPT_COMPLETION;
    else
        return bl_json_fail(place, key, "a text, a list of messages or an object with input_ids",
                            answer);
    return BL_OK;
}

/* ---- the prompt ---- */

/* Of two texts, in bytes, at a character's beginning. A space before the first difference belongs
 * to the answers. Texts that are equal as far as the shorter one leave it a character. */
static size_t common_text(const char *a, const char *b)
{
    size_t n = 0;

    while (a[n] && a[n] == b[n]) n++;
    bool is_whole = (!a[n] || !b[n]) && n > 0;
    if (is_whole) n--;
    while (n > 0 && ((unsigned char)a[n] & 0xC0) == 0x80) n--;
    return n > 0 && !is_whole && a[n - 1] == ' ' ? n - 1 : n;
}

static size_t common_messages(const json_t *a, const json_t *b)
{
    size_t n = 0, most = json_array_size(a);

    if (json_array_size(b) < most) most = json_array_size(b);
    while (n < most && json_equal(json_array_get(a, n), json_array_get(b, n))) n++;
    return n == most && n > 0 ? n - 1 : n;
}

static json_t *slice(const json_t *list, size_t first, size_t end)
{
    json_t *out = json_array();

    for (size_t i = first; out && i < end; i++)
        if (json_array_append(out, json_array_get(list, i))) {
            json_decref(out);
            return NULL;
        }
    return out;
}

/* New references; NULL: out of memory. */
typedef struct two_parts {
    json_t *prompt, *answer;
} two_parts;

/* One side, whose prompt is what it has in common with the other one. */
static two_parts divide(const json_t *side, const json_t *other)
{
    if (json_is_array(side)) {
        size_t n = common_messages(side, other);
        return (two_parts){slice(side, 0, n), slice(side, n, json_array_size(side))};
    }
    const char *text = json_string_value(side);
    size_t n = common_text(text, json_string_value(other));
    return (two_parts){json_stringn_nocheck(text, n), json_string_nocheck(text + n)};
}

const bl_prompt_keys *bl_preference_prompt_keys(const json_t *row)
{
    static const bl_prompt_keys lists[] = {{"conversations", NULL}, {"messages", NULL}},
                                texts[] = {{"prompt", NULL},
                                           {"instruction", "input"},
                                           {"question", NULL},
                                           {"query", NULL}};

    for (size_t i = 0; i < BL_COUNT(lists); i++)
        if (is_message(json_object_get(row, "chosen")) &&
            json_is_array(json_object_get(row, lists[i].key)))
            return &lists[i];
    for (size_t i = 0; i < BL_COUNT(texts); i++) {
        const json_t *value = json_object_get(row, texts[i].key);
        if (value && !json_is_null(value)) return &texts[i];
    }
    return NULL;
}

/* The row's text, an instruction and its input as two lines, in *out; its list of messages; NULL:
 * the row has neither. A new reference. */
static bl_status read_prompt(const char *place, const json_t *row, json_t **out)
{
    const bl_prompt_keys *keys = bl_preference_prompt_keys(row);
    const char *text = "", *input = "";
    char *whole = NULL;

    *out = NULL;
    if (!keys) return BL_OK;
    json_t *value = json_object_get(row, keys->key);
    if (json_is_array(value)) {
        *out = json_incref(value);
        return BL_OK;
    }
    BL_TRY(bl_json_get_string(place, row, keys->key, BL_JSON_REQUIRED, &text));
    if (keys->input) BL_TRY(bl_json_get_string(place, row, keys->input, BL_JSON_OPTIONAL, &input));
    if (asprintf(&whole, "%s%s%s", text, *text && *input ? "\n" : "", input) < 0)
        return BL_FAIL(BL_ENOMEM, "%s: a prompt", place);
    *out = json_string_nocheck(whole);
    free(whole);
    return *out ? BL_OK : BL_FAIL(BL_ENOMEM, "%s: a prompt", place);
}

/* *prompt, a text beside lists of messages, becomes a user's message where the lists have none, and
 * NULL where it repeats one of them. */
static bl_status place_prompt(const char *place, const json_t *side, const json_t *other,
                              json_t **prompt)
{
    const char *text = json_string_value(*prompt);
    const json_t *lists[] = {side, other}, *message;
    bool has_user = false, has_text = !*text;
    size_t k;

    for (size_t i = 0; i < BL_COUNT(lists); i++) json_array_foreach((json_t *)lists[i], k, message)
        {
            const char *role = json_string_value(json_object_get(message, "role")), *content;
            if (!role) role = json_string_value(json_object_get(message, "from"));
            content = json_string_value(json_object_get(message, "content"));
            if (!content) content = json_string_value(json_object_get(message, "value"));
            has_user |= role && (!strcmp(role, "user") || !strcmp(role, "human"));
            has_text |= content && !strcmp(content, text);
        }
    if (has_user && !has_text)
        return BL_FAIL(
            BL_EINPUT,
            "%s: the prompt is not in the messages of the answers: write it as a list of "
            "messages",
            place);
    json_t *messages =
        has_text ? NULL : json_pack("[{s:s, s:O}]", "role", "user", "content", *prompt);
    if (!has_text && !messages) return BL_FAIL(BL_ENOMEM, "%s: a prompt", place);
    json_decref(*prompt);
    *prompt = messages;
    return BL_OK;
}

/* ---- one side ---- */

/* Behind the prompt everything is the answer: what a template writes between and after messages,
 * too, as TRL has it. Only rows of tokens say it token by token. */
static bl_status learn_the_rest(const char *place, bl_sample *side)
{
    int64_t t = 0;

    while (t < side->n_tokens && side->labels[t] == BL_LABEL_MASKED) t++;
    if (t == side->n_tokens) return BL_FAIL(BL_EINPUT, "%s: the answer is empty", place);
    for (; t < side->n_tokens; t++) side->labels[t] = side->ids[t];
    return BL_OK;
}

/* `row` is one of the side's format. */
static bl_status build_side(const bl_sample_rules *rules, const char *place, const json_t *row,
                            bl_sample *out)
{
    bl_sample_rules of_side = *rules;

    of_side.options.format = rules->side;
    of_side.options.train_on_inputs = false;
    of_side.shape =
        bl_row_shape_of(rules->side == BL_DATA_TOKENS ? BL_DATA_TOKENS : BL_DATA_PROMPT_COMPLETION);
    BL_TRY(bl_sample_build_object(&of_side, place, row, out));
    if (out->document_ids || out->weights)
        return BL_FAIL(BL_EINPUT, "%s: key %s: not of preferences", place,
                       out->weights ? "weights" : "document_ids");
    return rules->side == BL_DATA_TOKENS ? BL_OK : learn_the_rest(place, out);
}

/* All of an answer is learned: flags that say otherwise are rejected. */
static bl_status check_flags(const bl_sample_rules *rules, const char *place, const json_t *answer)
{
    bl_key_names unused = {0};
    char here[BL_PLACE_BYTES + 64];
    const json_t *message;
    size_t i;

    json_array_foreach((json_t *)answer, i, message)
    {
        snprintf(here, sizeof here, "%s: message %zu of the answer", place, i);
        BL_TRY(bl_message_check_keys(here, rules->chat, message, true, NULL, &unused));
    }
    return BL_OK;
}

/* The row's other keys (tools, system, ...) belong to both sides. Steals the parts. */
static bl_status build_parts(const bl_sample_rules *rules, const char *place, const json_t *row,
                             two_parts parts, bl_sample *out)
{
    json_t *side = json_copy((json_t *)row);
    bl_status st;

    json_object_del(side, "chosen");
    json_object_del(side, "rejected");
    json_object_del(side, "label");
    bool is_whole = side && parts.prompt && parts.answer &&
                    json_object_set(side, "prompt", parts.prompt) == 0 &&
                    json_object_set(side, "completion", parts.answer) == 0;
    st = is_whole ? build_side(rules, place, side, out) : BL_FAIL(BL_ENOMEM, "%s: a side", place);
    json_decref(side);
    json_decref(parts.prompt);
    json_decref(parts.answer);
    return st;
}

static bl_status check_kind(const char *place, const char *key, const json_t *answer,
                            bl_data_format side)
{
    bool fits = side == BL_DATA_TOKENS     ? json_is_object(answer)
                : side == BL_DATA_MESSAGES ? json_is_array(answer) || is_message(answer)
                                           : json_is_string(answer);
    if (fits) return BL_OK;
    return bl_json_fail(place, key,
                        side == BL_DATA_TOKENS     ? "an object, as in the rows before"
                        : side == BL_DATA_MESSAGES ? "a list of messages, as in the rows before"
                                                   : "a text, as in the rows before",
                        answer);
}

/* A new reference: an answer that is one message becomes a list. NULL: out of memory. */
static json_t *list_answer(json_t *answer)
{
    return is_message(answer) ? json_pack("[O]", answer) : json_incref(answer);
}

/* A side of texts or messages; `other` NULL: the row has one answer, and its prompt. */
static bl_status build_with_prompt(const bl_sample_rules *rules, const char *place,
                                   const json_t *row, const json_t *side, const json_t *other,
                                   bl_sample *out)
{
    two_parts parts = {NULL, list_answer((json_t *)side)};
    json_t *other_list = list_answer((json_t *)other);
    bool is_chat = rules->side == BL_DATA_MESSAGES;
    bl_status st = BL_OK;

    if (!parts.answer || (other && !other_list)) st = BL_FAIL(BL_ENOMEM, "%s: a side", place);
    if (st == BL_OK) st = read_prompt(place, row, &parts.prompt);
    if (st == BL_OK && is_chat && json_is_string(parts.prompt))
        st = place_prompt(place, parts.answer, other_list, &parts.prompt);
    if (st == BL_OK && parts.prompt && is_chat != json_is_array(parts.prompt))
        st = bl_json_fail(place, bl_preference_prompt_keys(row)->key,
                          is_chat ? "a list of messages" : "a text", parts.prompt);
    if (st == BL_OK && !parts.prompt && !other)
        st = BL_FAIL(BL_EINPUT, "%s: key prompt: missing", place);
    if (st == BL_OK && !parts.prompt) {
        two_parts divided = divide(parts.answer, other_list);
        json_decref(parts.answer);
        parts = divided;
    }
    json_decref(other_list);
    if (st == BL_OK) st = check_flags(rules, place, parts.answer);
    if (st == BL_OK) return build_parts(rules, place, row, parts, out);
    json_decref(parts.prompt);
    json_decref(parts.answer);
    return st;
}

/* Side `key` of a pair. */
static bl_status build_answer(const bl_sample_rules *rules, const char *place, const json_t *row,
                              const char *key, bl_sample *out)
{
    const char *other_key = strcmp(key, "chosen") ? "chosen" : "rejected";
    const json_t *side = json_object_get(row, key), *other = json_object_get(row, other_key);
    char here[BL_PLACE_BYTES + 16];

    snprintf(here, sizeof here, "%s: %s", place, key);
    BL_TRY(check_kind(place, key, side, rules->side));
    BL_TRY(check_kind(place, other_key, other, rules->side));
    return rules->side == BL_DATA_TOKENS ? build_side(rules, here, side, out)
                                         : build_with_prompt(rules, here, row, side, other, out);
}

/* ---- the row ---- */

static bool has_label(const bl_sample *side)
{
    return bl_sample_count_labels(side) > 0;
}

/* As sample.c does with samples of one document. */
static bl_status apply_limit(const bl_sample_rules *rules, const char *place, bl_sample *side,
                             size_t n_sides, bl_row_verdict *verdict, int64_t *n_lost)
{
    int64_t limit = rules->options.max_seq_length, n_tokens = 0;

    for (size_t i = 0; i < n_sides; i++) {
        int64_t n = side[i].n_tokens;
        n_tokens += n;
        if (!has_label(&side[i]))
            return BL_FAIL(BL_EINPUT, "%s: nothing to learn from: no token of %s after token 0",
                           place,
                           n_sides == 1 ? "the answer"
                           : i          ? "rejected"
                                        : "chosen");
        if (limit == 0 || n <= limit) continue;
        if (rules->options.overlong == BL_OVERLONG_ERROR)
            return BL_FAIL(BL_EINPUT, "%s: %" PRId64 " tokens, max_seq_length is %" PRId64, place,
                           n, limit);
        if (rules->options.overlong == BL_OVERLONG_SKIP) *verdict = BL_ROW_TOO_LONG;
        *n_lost += n - limit;
        side[i].n_tokens = limit;
        if (*verdict == BL_ROW_USED && !has_label(&side[i])) *verdict = BL_ROW_CUT_AWAY;
    }
    if (*verdict != BL_ROW_USED) *n_lost = n_tokens;
    return BL_OK;
}

static void *join_arrays(const int32_t *a, int64_t n_a, const int32_t *b, int64_t n_b)
{
    int32_t *out = malloc((size_t)(n_a + n_b) * sizeof *out);

    if (!out) return NULL;
    memcpy(out, a, (size_t)n_a * sizeof *a);
    memcpy(out + n_a, b, (size_t)n_b * sizeof *b);
    return out;
}

/* The first label of a document is no target: the trainer shifts. */
static bool take_first_label(bl_sample *side)
{
    bool is_learned = side->n_tokens > 0 && side->labels[0] != BL_LABEL_MASKED;

    if (is_learned) side->labels[0] = BL_LABEL_MASKED;
    return is_learned;
}

static bl_status join(const char *place, bl_sample side[2], bl_sample *out)
{
    int64_t n[2] = {side[0].n_tokens, side[1].n_tokens};

    for (int d = 0; d < 2; d++) out->begins_learned[d] = take_first_label(&side[d]);
    out->n_tokens = n[0] + n[1];
    out->ids = join_arrays(side[0].ids, n[0], side[1].ids, n[1]);
    out->labels = join_arrays(side[0].labels, n[0], side[1].labels, n[1]);
    out->document_ids = calloc((size_t)out->n_tokens, sizeof *out->document_ids);
    if (!out->ids || !out->labels || !out->document_ids)
        return BL_FAIL(BL_ENOMEM, "%s: %" PRId64 " tokens", place, out->n_tokens);
    for (int64_t t = n[0]; t < out->n_tokens; t++) out->document_ids[t] = 1;
    return BL_OK;
}

static bl_status build_pair(const bl_sample_rules *rules, const char *place, const json_t *row,
                            bl_sample *out, bl_row_verdict *verdict, int64_t *n_lost)
{
    bl_sample side[2] = {{0}, {0}};
    bl_status st;

    BL_TRY_GOTO(st, done, build_answer(rules, place, row, "chosen", &side[0]));
    BL_TRY_GOTO(st, done, build_answer(rules, place, row, "rejected", &side[1]));
    BL_TRY_GOTO(st, done, apply_limit(rules, place, side, 2, verdict, n_lost));
    if (*verdict == BL_ROW_USED) st = join(place, side, out);
done:
    bl_sample_free(&side[0]);
    bl_sample_free(&side[1]);
    return st;
}

static bl_status build_unpaired(const bl_sample_rules *rules, const char *place, const json_t *row,
                                bl_sample *out, bl_row_verdict *verdict, int64_t *n_lost)
{
    const json_t *answer = json_object_get(row, "completion");
    bool is_desirable = false;

    BL_TRY(bl_json_get_bool(place, row, "label", BL_JSON_REQUIRED, &is_desirable));
    if (rules->side == BL_DATA_TOKENS) {
        json_t *side = json_copy((json_t *)row);
        json_object_del(side, "label");
        bl_status st =
            side ? build_side(rules, place, side, out) : BL_FAIL(BL_ENOMEM, "%s: a row", place);
        json_decref(side);
        BL_TRY(st);
    } else {
        BL_TRY(check_kind(place, "completion", answer, rules->side));
        BL_TRY(build_with_prompt(rules, place, row, answer, NULL, out));
    }
    BL_TRY(apply_limit(rules, place, out, 1, verdict, n_lost));
    out->is_desirable = is_desirable;
    out->begins_learned[0] = take_first_label(out);
    if (*verdict != BL_ROW_USED) bl_sample_free(out);
    return BL_OK;
}

bl_status bl_preference_build(const bl_sample_rules *rules, const char *place, const json_t *row,
                              bl_sample *out, bl_row_verdict *verdict, int64_t *n_lost)
{
    return rules->options.format == BL_DATA_PREFERENCE
               ? build_pair(rules, place, row, out, verdict, n_lost)
               : build_unpaired(rules, place, row, out, verdict, n_lost);
}
