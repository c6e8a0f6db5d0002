/* SPDX-License-Identifier: Apache-2.0 */
/* ballast tokenize: JSON lines with a text in, JSON lines with its token ids out. */
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/sizes.h"
#include "cli/cli.h"
#include "text/tokenizer.h"

typedef struct tokenize_options {
    char *tokenizer;
    bool add_special_tokens, parse_special_tokens;
} tokenize_options;

static const bl_option table[] = {
    {.key = "tokenizer",
     .group = "Options",
     .type = BL_OPTION_PATH,
     .offset = offsetof(tokenize_options, tokenizer),
     .commands = BL_CLI_ANY,
     .required_by = BL_CLI_ANY,
     .help = "a tokenizer.json, or a folder that holds one"},
    {.key = "add_special_tokens",
     .group = "Options",
     .type = BL_OPTION_BOOL,
     .offset = offsetof(tokenize_options, add_special_tokens),
     .commands = BL_CLI_ANY,
     .default_text = "true",
     .help = "put the model's special tokens (its BOS) around each text"},
    {.key = "parse_special_tokens",
     .group = "Options",
     .type = BL_OPTION_BOOL,
     .offset = offsetof(tokenize_options, parse_special_tokens),
     .commands = BL_CLI_ANY,
     .default_text = "false",
     .help = "a special token spelled out in a text becomes that token; otherwise it is plain text"},
};

static void print_options(FILE *out, bool as_markdown)
{
    bl_cli_print_table(table, BL_COUNT(table), out, as_markdown);
}

/* `ids` is reused from line to line. */
static bl_status tokenize_line(const bl_tokenizer *tokenizer, unsigned flags, int64_t line, const char *bytes,
                               size_t n_bytes, bl_ids *ids)
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
    for (int64_t number = 1; st == BL_OK && (n_bytes = getline(&line, &capacity, stdin)) >= 0; number++) {
        size_t n_text = (size_t)n_bytes - (line[n_bytes - 1] == '\n');
        st = tokenize_line(tokenizer, flags, number, line, n_text, &ids);
    }
    if (st == BL_OK && !feof(stdin)) st = bl_fail_errno(BL_EIO, "reading the standard input");
    bl_ids_free(&ids);
    free(line);
    return st;
}

static bl_status run(int argc, char *const *argv)
{
    bl_status st;
    tokenize_options values;
    uint8_t origins[BL_COUNT(table)];
    int n_words;
    bl_tokenizer *tokenizer = NULL;
    const bl_options options = {.table = table,
                                .n_options = BL_COUNT(table),
                                .command = BL_CLI_ANY,
                                .values = &values,
                                .origins = origins};

    BL_TRY_GOTO(st, done, bl_options_init(&options));
    BL_TRY_GOTO(st, done, bl_options_read_line(&options, argc, argv, 0, NULL, &n_words));
    BL_TRY_GOTO(st, done, bl_options_check_required(&options));
    BL_TRY_GOTO(st, done, bl_tokenizer_load(values.tokenizer, &tokenizer));
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
    .arguments = "--tokenizer DIR|FILE [--add_special_tokens true|false]",
    .summary = "turn text into token ids",
    .details = "Reads JSON lines {\"text\": \"...\"} from stdin and writes JSON lines {\"input_ids\": [...]} "
               "to stdout,\n"
               "one for one. A line that cannot be read ends it with exit code 3 and the line's number.\n",
    .print_options = print_options,
    .run = run,
};
