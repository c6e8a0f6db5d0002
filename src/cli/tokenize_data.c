/* SPDX-License-Identifier: Apache-2.0 */
/* tokenize_data.c -- prints rows of a data set as JSON or as a table of tokens and labels. */
#include "cli/tokenize_data_internal.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "base/sizes.h"

/* ---- JSON ---- */

static void print_integers(const char *key, const int32_t *values, int64_t n)
{
    printf("\"%s\": [", key);
    for (int64_t t = 0; t < n; t++) printf("%s%d", t ? ", " : "", values[t]);
    putchar(']');
}

static void print_json(const bl_sample *row)
{
    putchar('{');
    print_integers("input_ids", row->ids, row->n_tokens);
    fputs(", ", stdout);
    print_integers("labels", row->labels, row->n_tokens);
    if (row->document_ids) {
        fputs(", ", stdout);
        print_integers("document_ids", row->document_ids, row->n_tokens);
    }
    if (row->weights) {
        fputs(", \"weights\": [", stdout);
        for (int64_t t = 0; t < row->n_tokens; t++)
            printf("%s%.9g", t ? ", " : "", (double)row->weights[t]);
        putchar(']');
    }
    fputs("}\n", stdout);
}

/* ---- a table ---- */

/* The text that `id` adds after other text, quoted: with the space that a decoder strips from the
 * beginning of a text. */
static bl_status print_token(const bl_tokenizer *tokenizer, int32_t id)
{
    const int32_t pair[] = {bl_tokenizer_token_to_id(tokenizer, "a"), id};
    const char *as_written = bl_tokenizer_id_to_token(tokenizer, id);
    char *text = NULL;
    size_t skip = 0;

    if (pair[0] >= 0 && !bl_tokenizer_is_special(tokenizer, id)) {
        BL_TRY(bl_tokenizer_decode(tokenizer, pair, 2, false, &text, NULL));
        skip = text[0] == 'a';
        if (!skip || !text[1] ||
            strstr(text,
                   "\xef\xbf\xbd")) { /* part of a character: only its name tells it from others */
            free(text);
            text = NULL;
        }
    }
    putchar('"');
    for (const char *c = text ? text + skip : as_written ? as_written : ""; *c; c++) {
        unsigned char byte = (unsigned char)*c;
        if (byte == '\n')
            fputs("\\n", stdout);
        else if (byte == '\t')
            fputs("\\t", stdout);
        else if (byte == '"' || byte == '\\')
            printf("\\%c", byte);
        else if (byte < 0x20 || byte == 0x7f)
            printf("\\x%02x", byte);
        else
            putchar(byte);
    }
    putchar('"');
    free(text);
    return BL_OK;
}

static bool is_learned(const bl_sample *row, int64_t t)
{
    return t > 0 && row->labels[t] != BL_LABEL_MASKED && (!row->weights || row->weights[t] != 0);
}

static bl_status print_table(const bl_tokenizer *tokenizer, const bl_sample *row, int64_t index,
                             bool in_color)
{
    int64_t n_learned = 0;

    for (int64_t t = 0; t < row->n_tokens; t++) n_learned += is_learned(row, t);
    printf("%srow %" PRId64 ": %" PRId64 " tokens, %" PRId64 " learned (*)\n", index ? "\n" : "",
           index, row->n_tokens, n_learned);
    printf("  position%s       id    label  token\n", row->document_ids ? "  document" : "");
    for (int64_t t = 0; t < row->n_tokens; t++) {
        bool learned = is_learned(row, t);
        printf("%s%c %8" PRId64, in_color ? learned ? "\033[32m" : "\033[2m" : "",
               learned ? '*' : ' ', t);
        if (row->document_ids) printf("  %8d", row->document_ids[t]);
        printf(" %8d %8d  ", row->ids[t], row->labels[t]);
        BL_TRY(print_token(tokenizer, row->ids[t]));
        puts(in_color ? "\033[0m" : "");
    }
    return BL_OK;
}

/* ---- both ---- */

static bool wants_color(void)
{
    const char *terminal = getenv("TERM");
    return isatty(STDOUT_FILENO) && !getenv("NO_COLOR") && terminal && strcmp(terminal, "dumb");
}

bl_status bl_cli_show_data(const bl_tokenizer *tokenizer, const bl_dataset_options *options,
                           bl_packing packing, int64_t n_rows, bool as_json)
{
    bl_dataset *samples = NULL, *packed = NULL;
    bool in_color = wants_color();
    bl_status st;

    BL_TRY_GOTO(st, done, bl_dataset_open(options, tokenizer, &samples));
    const bl_dataset *rows = samples;
    if (packing != BL_PACKING_NONE) {
        BL_TRY_GOTO(st, done,
                    bl_dataset_pack(samples, packing, options->max_seq_length, 0,
                                    bl_dataset_count(samples), &packed));
        rows = packed;
    }
    int64_t n = bl_dataset_count(rows);
    if (n_rows >= 0) n = bl_min_i64(n, n_rows);
    for (int64_t i = 0; i < n && !ferror(stdout); i++) {
        bl_sample row;
        BL_TRY_GOTO(st, done, bl_dataset_get(rows, i, &row));
        if (as_json)
            print_json(&row);
        else
            st = print_table(tokenizer, &row, i, in_color);
        bl_sample_free(&row);
        if (st != BL_OK) goto done;
    }
    if (!as_json && n < bl_dataset_count(rows))
        printf("\n%" PRId64 " more rows; --rows N shows more, --json all\n",
               bl_dataset_count(rows) - n);
done:
    bl_dataset_close(packed);
    bl_dataset_close(samples);
    return st;
}
