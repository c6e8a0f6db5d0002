/* SPDX-License-Identifier: Apache-2.0 */
/* ballast tokenize: JSON lines with a text in, JSON lines with its token ids out; or a data set, as
 * a training run sees it. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "cli/tokenize_data_internal.h"
#include "tokenizer/tokenizer.h"

typedef struct tokenize_options {
    char *tokenizer;
    bool add_special_tokens, parse_special_tokens;
    char *data, *dataset_text_field, *chat_template, *template_date;
    bl_data_format data_format;
    bl_packing packing;
    int64_t max_seq_length;
    bl_overlong overlong;
    bool train_on_inputs, skip_bad, json;
    int64_t rows;
} tokenize_options;

#define STREAM "A stream of texts"
#define DATA   "A data set"
#define KEY(name, kind)                                                                            \
    .key = #name, .offset = offsetof(tokenize_options, name), .type = BL_OPTION_##kind,            \
    .commands = BL_CLI_ANY

static const bl_option table[] = {
    {KEY(tokenizer, PATH), .group = "Options", .is_model = true, .required_by = BL_CLI_ANY,
     .help = "tokenizer.json, or a directory that has one"},
    {KEY(add_special_tokens, BOOL), .group = STREAM, .default_text = "true",
     .help = "put the model's special tokens (its BOS) around each text"},
    {KEY(parse_special_tokens, BOOL), .group = STREAM, .default_text = "false",
     .help =
         "a special token spelled out in a text becomes that token; otherwise it is plain text"},
    {KEY(data, PATH), .group = DATA,
     .help = "training data, JSON or JSON lines, to show instead of reading stdin"},
    {KEY(data_format, ENUM), .group = DATA, .default_text = "auto",
     .names = "auto|tokens|text|alpaca|prompt_completion|messages|sharegpt",
     .help = "format of the rows; auto detects it from the first row"},
    {KEY(dataset_text_field, STRING), .group = DATA, .default_text = "text",
     .help = "key of the text in rows of format text"},
    {KEY(chat_template, STRING), .group = DATA,
     .help = "llama2, llama3, llama3.1, llama3.2, or a file; null: the model's own"},
    {KEY(template_date, STRING), .group = DATA,
     .help = "date written by templates that write one; default 26 Jul 2024"},
    {KEY(packing, ENUM), .group = DATA, .names = "none|pack|concatenate", .default_text = "none",
     .help = "samples per sequence: one, several kept apart, or one stream"},
    {KEY(max_seq_length, INT), .group = DATA, .min = 0, .max = 1048576, .default_text = "0",
     .help = "maximum tokens per sequence; 0: no limit"},
    {KEY(overlong, ENUM), .group = DATA, .names = "truncate|skip|error", .default_text = "truncate",
     .help = "policy for samples longer than max_seq_length"},
    {KEY(train_on_inputs, BOOL), .group = DATA, .default_text = "false",
     .help = "compute the loss on prompts as well as answers"},
    {KEY(skip_bad, BOOL), .group = DATA, .default_text = "false",
     .help = "skip and count unreadable rows"},
    {KEY(rows, INT), .group = DATA, .min = 1, .max = 9007199254740992.0, .has_auto = true,
     .default_text = "auto", .help = "rows to show; auto: 3, with --json all"},
    {KEY(json, BOOL), .group = DATA, .default_text = "false",
     .help = "JSON lines of input_ids, labels, document_ids and weights, which data_format tokens "
             "reads back"},
};

static void print_options(FILE *out, bl_options_style style)
{
    bl_cli_print_table(table, BL_COUNT(table), out, style);
}

/* `ids` is reused from line to line. */
static bl_status tokenize_line(const bl_tokenizer *tokenizer, unsigned flags, int64_t line,
                               const char *bytes, size_t n_bytes, bl_ids *ids)
{
    bl_status st;
    json_t *row;
    const char *text;
    char where[48];

    snprintf(where, sizeof where, "stdin:%lld", (long long)line);
    BL_TRY(bl_json_parse("stdin", line, bytes, n_bytes, &row));
    BL_TRY_GOTO(st, done, bl_json_check_object(where, row));
    BL_TRY_GOTO(st, done, bl_json_get_string(where, row, "text", BL_JSON_REQUIRED, &text));
    ids->n = 0;
    st = bl_tokenizer_encode(tokenizer, text, strlen(text), flags, ids);
    if (st != BL_OK) {
        bl_error_prefix(st, "%s", where);
        goto done;
    }
    fputs("{\"input_ids\": [", stdout);
    for (size_t i = 0; i < ids->n; i++) printf("%s%d", i ? ", " : "", ids->id[i]);
    if (fputs("]}\n", stdout) == EOF) st = bl_fail_errno(BL_EIO, "writing to the standard output");
done:
    json_decref(row);
    return st;
}

static bl_status tokenize_stream(const bl_tokenizer *tokenizer, unsigned flags)
{
    bl_status st = BL_OK;
    char *line = NULL;
    size_t capacity = 0;
    ssize_t n_bytes;
    bl_ids ids = {0};

    setvbuf(stdout, NULL, _IOLBF, 0); /* a program at the other end may wait for each answer */
    for (int64_t number = 1; st == BL_OK && (n_bytes = getline(&line, &capacity, stdin)) >= 0;
         number++) {
        size_t n_text = (size_t)n_bytes - (line[n_bytes - 1] == '\n');
        st = tokenize_line(tokenizer, flags, number, line, n_text, &ids);
    }
    if (st == BL_OK && !feof(stdin)) st = bl_fail_errno(BL_EIO, "reading the standard input");
    bl_ids_free(&ids);
    free(line);
    return st;
}

/* Options of one use are not ignored in the other. */
static bl_status check_group(const bl_options *options, const tokenize_options *values)
{
    for (size_t i = 0; i < BL_COUNT(table); i++) {
        bool is_data = !strcmp(table[i].group, DATA), is_stream = !strcmp(table[i].group, STREAM);
        if (!(values->data ? is_stream : is_data) ||
            bl_options_origin(options, table[i].key) == BL_FROM_DEFAULT)
            continue;
        return BL_FAIL(BL_EUSAGE, "--%s: %s --data", table[i].key,
                       values->data ? "not with" : "only with");
    }
    return BL_OK;
}

static bl_status show_data(const bl_tokenizer *tokenizer, const tokenize_options *values)
{
    bl_dataset_options options = bl_dataset_default_options(values->data);
    int64_t n_rows = values->rows != BL_OPTION_AUTO ? values->rows : values->json ? -1 : 3;

    options.format = values->data_format;
    options.max_seq_length = values->max_seq_length;
    options.overlong = values->overlong;
    options.train_on_inputs = values->train_on_inputs;
    options.skip_bad = values->skip_bad;
    options.text_key = values->dataset_text_field;
    options.chat_template = values->chat_template;
    options.template_date = values->template_date;
    return bl_cli_show_data(tokenizer, &options, values->packing, n_rows, values->json);
}

static bl_status run(int argc, char *const *argv)
{
    bl_status st;
    tokenize_options values;
    uint8_t origins[BL_COUNT(table)];
    int n_words;
    bl_tokenizer *tokenizer = NULL;
    const bl_options options = BL_CLI_OPTIONS(table, &values, origins);

    BL_TRY_GOTO(st, done, bl_cli_read(&options, argc, argv, 0, NULL, &n_words));
    BL_TRY_GOTO(st, done, check_group(&options, &values));
    BL_TRY_GOTO(st, done, bl_tokenizer_load(values.tokenizer, &tokenizer));
    if (values.data) {
        st = show_data(tokenizer, &values);
        goto done;
    }
    unsigned flags = (values.add_special_tokens ? BL_ADD_SPECIAL : 0u) |
                     (values.parse_special_tokens ? BL_PARSE_SPECIAL : 0u);
    st = tokenize_stream(tokenizer, flags);
done:
    bl_tokenizer_destroy(tokenizer);
    bl_options_clear(&options);
    return st;
}

const bl_command bl_command_tokenize = {
    .name = "tokenize",
    .arguments = "--tokenizer DIR|FILE [--data FILE] [--key value ...]",
    .summary = "turn text into token ids, or show what a data set trains",
    .details =
        "Without --data, reads JSON lines {\"text\": \"...\"} from stdin and writes JSON lines "
        "{\"input_ids\": [...]} "
        "to stdout,\n"
        "one for one. A line that cannot be read ends it with exit code 3 and the line's number.\n"
        "With --data, shows the rows of a data set as `ballast train` sees them, each token next "
        "to "
        "its label:\n"
        "trained tokens are marked (*), on a terminal in color.\n",
    .print_options = print_options,
    .run = run,
};
