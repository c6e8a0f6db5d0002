/* SPDX-License-Identifier: Apache-2.0 */
/* One row to one sample: one function per format, then the code for all formats. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/file_kind.h"
#include "data/internal.h"

/* ---- parsing ---- */

/* "path:line" or "path:line: row N", for errors about a value. */
static void name_place(const char *path, const bl_row *row, char place[BL_PLACE_BYTES])
{
    int n = snprintf(place, BL_PLACE_BYTES, "%s:%" PRId64, path, row->line);

    if (row->element && n < BL_PLACE_BYTES)
        snprintf(place + n, (size_t)(BL_PLACE_BYTES - n), ": row %" PRId64, row->element);
}

/* What a row that is not JSON is instead; BL_OK: nothing that is known. */
static bl_status name_mistake(const char *path, const bl_row *row)
{
    char place[BL_PLACE_BYTES];
    size_t n = row->n_bytes, n_valid = bl_utf8_valid_prefix(row->text, n);

    name_place(path, row, place);
    if (n_valid < n)
        return BL_FAIL(BL_EINPUT,
                       "%s: byte 0x%02x is not UTF-8: the text has another encoding, "
                       "such as Latin-1 or Windows-1252; convert it: iconv -f LATIN1 -t UTF-8",
                       place, (unsigned char)row->text[n_valid]);
    if (row->line == 1 && bl_file_kind_is_table(path, row->text, n))
        return BL_FAIL(
            BL_EINPUT,
            "%s:1: is not JSON and looks like CSV: convert it to JSON lines, an object per row",
            path);
    while (n && strchr(" \t\r", row->text[n - 1])) n--;
    if (n > 1 && row->text[0] == '{' && row->text[1] == '\'')
        return BL_FAIL(BL_EINPUT,
                       "%s: a dict in Python's notation, not JSON: write it with "
                       "json.dumps",
                       place);
    if (!row->element && n > 1 && row->text[0] == '{' && !memcmp(row->text + n - 2, "},", 2))
        return BL_FAIL(BL_EINPUT,
                       "%s: a comma behind the object: write lines without commas, or "
                       "an array with brackets, [{...}, {...}]",
                       place);
    if (row->line == 1 && n && row->text[0] != '{')
        return BL_FAIL(BL_EINPUT,
                       "%s:1: is not JSON: write an object per line, of plain text {\"text\": "
                       "\"...\"}",
                       path);
    if (!row->element && n && row->text[0] == '{' && strchr("{[,:", row->text[n - 1]))
        return BL_FAIL(BL_EINPUT,
                       "%s: this object does not end on its line: write an object per "
                       "line, or one array of objects, [{...}, {...}], over any number of lines",
                       place);
    return BL_OK;
}

/* Parses an element inside a line after as many blanks as bytes precede it, for the column of the
 * error. */
static bl_status parse_at_column(const char *path, const bl_row *row, json_t **out)
{
    size_t n_before = (size_t)row->column - 1;
    char *padded = malloc(n_before + row->n_bytes);

    if (!padded) return BL_FAIL(BL_ENOMEM, "%s: a row of %zu bytes", path, row->n_bytes);
    memset(padded, ' ', n_before);
    memcpy(padded + n_before, row->text, row->n_bytes);
    bl_status st = bl_json_parse(path, row->line, padded, n_before + row->n_bytes, out);
    free(padded);
    return st;
}

/* Errors: "path:line:column: reason". */
static bl_status parse_row(const char *path, const bl_row *row, json_t **out)
{
    bl_status st = bl_json_parse(path, row->line, row->text, row->n_bytes, out);
    bl_error error;

    if (st != BL_EINPUT) return st;
    bl_error_save(&error, st);
    BL_TRY(name_mistake(path, row));
    if (row->column > 1) {
        if ((st = parse_at_column(path, row, out)) != BL_EINPUT) return st;
        bl_error_save(&error, st);
    }
    if (!row->element) return bl_error_restore(&error);
    return BL_FAIL(BL_EINPUT, "%s (row %" PRId64 ")", error.text, row->element);
}

const bl_row_shape *bl_sample_rules_shape(const bl_sample_rules *rules)
{
    return rules->shape ? rules->shape : bl_row_shape_of(rules->options.format);
}

static bl_status find_shape(const bl_sample_rules *rules, const char *place, const json_t *row,
                            const bl_row_shape **out)
{
    const bl_dataset_options *options = &rules->options;

    *out = NULL;
    BL_TRY(bl_json_check_object(place, row));
    BL_TRY(bl_row_check_layout(place, row));
    const bl_row_shape *shape = bl_row_shape_find(row, options->format, rules->text_key);
    if (!shape) return bl_row_fail_unknown(place, options->format, rules->text_key, row);
    const json_t *list;
    if (shape->format == BL_DATA_MESSAGES || shape->format == BL_DATA_SHAREGPT)
        BL_TRY(bl_json_get_array(place, row, shape->first, BL_JSON_REQUIRED, &list));
    *out = shape;
    return BL_OK;
}

bl_status bl_row_settle(const char *path, const bl_row *row, bl_sample_rules *rules)
{
    bl_data_format *format = &rules->options.format;
    json_t *object;
    char place[BL_PLACE_BYTES];

    BL_TRY(parse_row(path, row, &object));
    name_place(path, row, place);
    bl_status st = find_shape(rules, place, object, &rules->shape);
    if (st == BL_OK && *format == BL_DATA_AUTO) *format = bl_row_shape_format(rules->shape, object);
    rules->side = *format;
    if (st == BL_OK && bl_data_format_is_preference(*format))
        st = bl_preference_settle(place, object, *format, &rules->side);
    json_decref(object);
    return st;
}

/* ---- texts ---- */

/* text, answer or instruction. */
static bl_status fail_empty(const char *place, const char *what)
{
    return BL_FAIL(BL_EINPUT, "%s: the %s is empty; skip_bad: true leaves such rows out", place,
                   what);
}

/* A sample under construction. */
typedef struct sample_draft {
    bl_ids ids, labels;
} sample_draft;

/* Labels the ids behind the last labeled one: with themselves, or masked. */
static bl_status label_rest(sample_draft *draft, bool learn)
{
    size_t n_more = draft->ids.n - draft->labels.n;

    if (n_more) BL_TRY(bl_ids_reserve(&draft->labels, n_more));
    for (; draft->labels.n < draft->ids.n; draft->labels.n++)
        draft->labels.id[draft->labels.n] =
            learn ? draft->ids.id[draft->labels.n] : BL_LABEL_MASKED;
    return BL_OK;
}

static bl_status add_ids(sample_draft *draft, const int32_t *id, size_t n)
{
    for (size_t i = 0; i < n; i++) BL_TRY(bl_ids_push(&draft->ids, id[i]));
    return BL_OK;
}

static bl_status begin_text(const bl_sample_rules *rules, sample_draft *draft)
{
    size_t n;
    const int32_t *prefix = bl_tokenizer_prefix(rules->tokenizer, &n);
    return add_ids(draft, prefix, n);
}

static bl_status add_text(const bl_sample_rules *rules, const char *text, unsigned flags,
                          sample_draft *draft)
{
    return bl_tokenizer_encode(rules->tokenizer, text, strlen(text), flags, &draft->ids);
}

/* What the post-processor puts after a text, and EOS unless that was it. */
static bl_status end_text(const bl_sample_rules *rules, sample_draft *draft)
{
    size_t n;
    const int32_t *suffix = bl_tokenizer_suffix(rules->tokenizer, &n);
    int32_t eos = rules->options.eos_id;

    BL_TRY(add_ids(draft, suffix, n));
    if (!rules->options.add_eos || (n && suffix[n - 1] == eos)) return BL_OK;
    return bl_ids_push(&draft->ids, eos);
}

static bl_status add_prompt_completion(const bl_sample_rules *rules, const char *place,
                                       const char *prompt, const char *completion,
                                       sample_draft *draft)
{
    if (bl_chat_is_blank(completion)) return fail_empty(place, "answer");
    BL_TRY(bl_row_check_text(place, "the prompt", prompt));
    BL_TRY(bl_row_check_text(place, "the answer", completion));
    BL_TRY(begin_text(rules, draft));
    BL_TRY(add_text(rules, prompt, 0, draft));
    BL_TRY(label_rest(draft, rules->options.train_on_inputs));
    BL_TRY(add_text(rules, completion, *prompt ? BL_CONTINUATION : 0u, draft));
    BL_TRY(end_text(rules, draft));
    return label_rest(draft, true);
}

static bl_status draft_text(const bl_sample_rules *rules, const char *place, const json_t *row,
                            sample_draft *draft)
{
    const char *text = "";

    BL_TRY(bl_json_get_string(place, row, rules->text_key, BL_JSON_REQUIRED, &text));
    if (bl_chat_is_blank(text)) return fail_empty(place, "text");
    BL_TRY(begin_text(rules, draft));
    BL_TRY(add_text(rules, text, 0, draft));
    BL_TRY(end_text(rules, draft));
    return label_rest(draft, true);
}

static bl_status draft_prompt_completion(const bl_sample_rules *rules, const char *place,
                                         const json_t *row, sample_draft *draft)
{
    const bl_row_shape *shape = bl_sample_rules_shape(rules);
    const char *prompt = "", *completion = "";

    BL_TRY(bl_json_get_string(place, row, shape->first, BL_JSON_REQUIRED, &prompt));
    BL_TRY(bl_json_get_string(place, row, shape->second, BL_JSON_REQUIRED, &completion));
    return add_prompt_completion(rules, place, prompt, completion, draft);
}

/* The prompts of tatsu-lab/stanford_alpaca train.py, PROMPT_DICT. */
#define ALPACA_HEAD "Below is an instruction that describes a task"
#define ALPACA_TAIL                                                                                \
    "Write a response that appropriately completes the request.\n\n### Instruction:\n"

static bl_status draft_alpaca(const bl_sample_rules *rules, const char *place, const json_t *row,
                              sample_draft *draft)
{
    static const char with_input[] =
        ALPACA_HEAD ", paired with an input that provides further context. " ALPACA_TAIL
                    "%s\n\n### Input:\n%s\n\n### Response:";
    static const char without_input[] = ALPACA_HEAD ". " ALPACA_TAIL "%s\n\n### Response:";
    const bl_row_shape *shape = bl_sample_rules_shape(rules);
    const char *instruction = "", *input = "", *output = "";
    char *prompt = NULL;

    BL_TRY(bl_json_get_string(place, row, shape->first, BL_JSON_REQUIRED, &instruction));
    BL_TRY(bl_json_get_string(place, row, shape->input, BL_JSON_OPTIONAL, &input));
    BL_TRY(bl_json_get_string(place, row, shape->second, BL_JSON_REQUIRED, &output));
    if (bl_chat_is_blank(instruction) && bl_chat_is_blank(input))
        return fail_empty(place, "instruction");
    int n = *input ? asprintf(&prompt, with_input, instruction, input)
                   : asprintf(&prompt, without_input, instruction);
    if (n < 0) return BL_FAIL(BL_ENOMEM, "%s: prompt", place);
    bl_status st = add_prompt_completion(rules, place, prompt, output, draft);
    free(prompt);
    return st;
}

static bl_status build_text(const bl_sample_rules *rules, const char *place, const json_t *row,
                            bl_sample *out)
{
    sample_draft draft = {0};
    bl_status st;

    switch (rules->options.format) {
    case BL_DATA_TEXT:
        st = draft_text(rules, place, row, &draft);
        break;
    case BL_DATA_ALPACA:
        st = draft_alpaca(rules, place, row, &draft);
        break;
    case BL_DATA_PROMPT_COMPLETION:
        st = draft_prompt_completion(rules, place, row, &draft);
        break;
    case BL_DATA_MESSAGES:
    case BL_DATA_SHAREGPT:
        st = bl_chat_row_encode(rules, place, row, &draft.ids, &draft.labels);
        break;
    default:
        st = BL_FAIL(BL_EINTERNAL, "%s: data format %d", place, (int)rules->options.format);
    }
    if (st != BL_OK) {
        bl_ids_free(&draft.ids);
        bl_ids_free(&draft.labels);
        return st;
    }
    *out = (bl_sample){
        .n_tokens = (int64_t)draft.ids.n, .ids = draft.ids.id, .labels = draft.labels.id};
    return BL_OK;
}

/* ---- tokens ---- */

/* row[key] as *n integers of [min, max], or `also`; *n < 0 takes any length. The caller frees
 * *out. */
static bl_status read_integers(const char *place, const json_t *row, const char *key, int64_t min,
                               int64_t max, int64_t also, int64_t *n, int32_t **out)
{
    const json_t *list = NULL, *value;
    size_t i;

    BL_TRY(bl_json_get_array(place, row, key, BL_JSON_REQUIRED, &list));
    if (*n >= 0 && json_array_size(list) != (size_t)*n)
        return BL_FAIL(BL_EINPUT, "%s: %s has %zu elements, input_ids %" PRId64, place, key,
                       json_array_size(list), *n);
    *n = (int64_t)json_array_size(list);
    if (!(*out = malloc((size_t)*n * sizeof **out + 1)))
        return BL_FAIL(BL_ENOMEM, "%s: %" PRId64 " tokens", place, *n);
    json_array_foreach((json_t *)list, i, value)
    {
        json_int_t number = json_integer_value(value);
        if (!json_is_integer(value) || ((number < min || number > max) && number != also))
            return BL_FAIL(BL_EINPUT,
                           "%s: %s[%zu]: expected an integer in [%" PRId64 ", %" PRId64 "]%s",
                           place, key, i, min, max, also == BL_LABEL_MASKED ? " or -100" : "");
        (*out)[i] = (int32_t)number;
    }
    return BL_OK;
}

static bl_status read_weights(const char *place, const json_t *row, bl_sample *sample)
{
    const json_t *list = NULL, *value;
    size_t i;

    BL_TRY(bl_json_get_array(place, row, "weights", BL_JSON_OPTIONAL, &list));
    if (!list) return BL_OK;
    if (json_array_size(list) != (size_t)sample->n_tokens)
        return BL_FAIL(BL_EINPUT, "%s: weights has %zu elements, input_ids %" PRId64, place,
                       json_array_size(list), sample->n_tokens);
    if (!(sample->weights = malloc((size_t)sample->n_tokens * sizeof *sample->weights + 1)))
        return BL_FAIL(BL_ENOMEM, "%s: weights", place);
    json_array_foreach((json_t *)list, i, value)
    {
        sample->weights[i] = (float)json_number_value(value);
        if (!json_is_number(value) || !isfinite(sample->weights[i]) || sample->weights[i] < 0)
            return BL_FAIL(BL_EINPUT,
                           "%s: weights[%zu]: expected a number of at least 0 that a float holds",
                           place, i);
    }
    return BL_OK;
}

static bl_status read_documents(const char *place, const json_t *row, bl_sample *sample)
{
    const json_t *list = json_object_get(row, "document_ids");

    if (!list || json_is_null(list)) return BL_OK;
    BL_TRY(read_integers(place, row, "document_ids", 0, INT32_MAX, 0, &sample->n_tokens,
                         &sample->document_ids));
    for (int64_t i = 1; i < sample->n_tokens; i++)
        if (sample->document_ids[i] < sample->document_ids[i - 1])
            return BL_FAIL(BL_EINPUT, "%s: document_ids[%" PRId64 "]: smaller than the one before",
                           place, i);
    return BL_OK;
}

static bl_status build_tokens(const bl_sample_rules *rules, const char *place, const json_t *row,
                              bl_sample *out)
{
    int64_t max_id = rules->options.vocab_size - 1, n = -1;
    const json_t *labels = json_object_get(row, "labels"), *value;
    const char *key;

    json_object_foreach((json_t *)row, key, value)
    {
        if (strcmp(key, "input_ids") && strcmp(key, "labels") && strcmp(key, "document_ids") &&
            strcmp(key, "weights"))
            return BL_FAIL(BL_EINPUT,
                           "%s: key %.80s: not one of input_ids, labels, document_ids, weights",
                           place, key);
    }
    BL_TRY(read_integers(place, row, "input_ids", 0, max_id, 0, &n, &out->ids));
    out->n_tokens = n;
    if (labels && !json_is_null(labels)) {
        BL_TRY(read_integers(place, row, "labels", 0, max_id, BL_LABEL_MASKED, &n, &out->labels));
    } else {
        if (!(out->labels = malloc((size_t)n * sizeof *out->labels + 1)))
            return BL_FAIL(BL_ENOMEM, "%s: labels", place);
        memcpy(out->labels, out->ids, (size_t)n * sizeof *out->labels);
    }
    BL_TRY(read_documents(place, row, out));
    return read_weights(place, row, out);
}

bl_status bl_sample_build_object(const bl_sample_rules *rules, const char *place, const json_t *row,
                                 bl_sample *out)
{
    return rules->options.format == BL_DATA_TOKENS ? build_tokens(rules, place, row, out)
                                                   : build_text(rules, place, row, out);
}

/* ---- all formats ---- */

int64_t bl_sample_count_labels(const bl_sample *sample)
{
    int64_t n = 0;

    for (int64_t t = 1; t < sample->n_tokens; t++)
        n += sample->labels[t] != BL_LABEL_MASKED && (!sample->weights || sample->weights[t] != 0);
    return n;
}

/* A tokenizer may know more tokens than the model has embeddings. */
static bl_status check_ids(const bl_sample_rules *rules, const char *place, const bl_sample *sample)
{
    int32_t vocab_size = rules->options.vocab_size;

    for (int64_t t = 0; vocab_size > 0 && t < sample->n_tokens; t++) {
        if (sample->ids[t] < vocab_size) continue;
        const char *token =
            rules->tokenizer ? bl_tokenizer_id_to_token(rules->tokenizer, sample->ids[t]) : NULL;
        return BL_FAIL(BL_EINPUT,
                       "%s: token %.80s has id %" PRId32
                       ", the model's vocabulary ends at %" PRId32,
                       place, token ? token : "", sample->ids[t], vocab_size - 1);
    }
    return BL_OK;
}

static bl_status apply_limits(const bl_sample_rules *rules, const char *place, bl_sample *sample,
                              bl_row_verdict *verdict, int64_t *n_lost)
{
    int64_t limit = rules->options.max_seq_length, n_tokens = sample->n_tokens;

    if (!bl_sample_count_labels(sample))
        return BL_FAIL(BL_EINPUT, "%s: nothing to learn from: no trainable label after token 0",
                       place);
    if (limit == 0 || n_tokens <= limit) return BL_OK;
    if (rules->options.overlong == BL_OVERLONG_ERROR)
        return BL_FAIL(BL_EINPUT, "%s: %" PRId64 " tokens, max_seq_length is %" PRId64, place,
                       n_tokens, limit);
    sample->n_tokens = limit;
    *n_lost = n_tokens - limit;
    if (rules->options.overlong == BL_OVERLONG_SKIP)
        *verdict = BL_ROW_TOO_LONG;
    else if (!bl_sample_count_labels(sample))
        *verdict = BL_ROW_CUT_AWAY;
    if (*verdict == BL_ROW_USED) return BL_OK;
    *n_lost = n_tokens;
    bl_sample_free(sample);
    return BL_OK;
}

/* The row as its format has it, before max_seq_length unless it has preferences. */
static bl_status build_object(const bl_sample_rules *rules, const char *place, const json_t *row,
                              bl_sample *out, bl_row_verdict *verdict, int64_t *n_lost)
{
    const bl_row_shape *shape;

    BL_TRY(bl_json_check_object(place, row));
    BL_TRY(rules->shape ? bl_row_shape_check(place, rules->shape, row, rules->text_key)
                        : find_shape(rules, place, row, &shape));
    if (rules->unused) BL_TRY(bl_row_check_keys(rules, place, row));
    return bl_data_format_is_preference(rules->options.format)
               ? bl_preference_build(rules, place, row, out, verdict, n_lost)
               : bl_sample_build_object(rules, place, row, out);
}

bl_status bl_sample_build(const bl_sample_rules *rules, const char *path, const bl_row *row,
                          bl_key_names *unused, bl_sample *out, bl_row_verdict *verdict,
                          int64_t *n_lost)
{
    bl_sample_rules of_row = *rules;
    char place[BL_PLACE_BYTES];
    json_t *object;

    of_row.unused = unused;
    *out = (bl_sample){0};
    *verdict = BL_ROW_USED;
    *n_lost = 0;
    BL_TRY(parse_row(path, row, &object));
    name_place(path, row, place);
    bl_status st = build_object(&of_row, place, object, out, verdict, n_lost);
    if (st == BL_OK) st = check_ids(rules, place, out);
    if (st == BL_OK && !bl_data_format_is_preference(rules->options.format))
        st = apply_limits(rules, place, out, verdict, n_lost);
    if (st != BL_OK) bl_sample_free(out);
    json_decref(object);
    return st;
}

void bl_sample_free(bl_sample *sample)
{
    free(sample->ids);
    free(sample->labels);
    free(sample->document_ids);
    free(sample->weights);
    *sample = (bl_sample){0};
}
