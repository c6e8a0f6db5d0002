/* SPDX-License-Identifier: Apache-2.0 */
/* Traps of data files: a file that changes while it is used, holds keys that a format would drop,
 * or is of another kind. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "data/dataset.h"

static char folder[64], path[128];
static bl_tokenizer *tokenizer;

static int set_up(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ballast-input-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/rows.jsonl", folder);
    return bl_tokenizer_load("tests/tokenizer/fixtures/chat.json", &tokenizer) == BL_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    bl_tokenizer_destroy(tokenizer);
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

/* Into the file that is there: an open data set sees it. */
static void write_bytes(const void *bytes, size_t n)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    assert_int_equal(fwrite(bytes, 1, n, file), n);
    assert_int_equal(fclose(file), 0);
}

static bl_status try_open(bl_data_format format, bool skip_bad, bl_dataset **out)
{
    bool chat = format == BL_DATA_MESSAGES || format == BL_DATA_SHAREGPT;
    bl_dataset_options options = bl_dataset_default_options(path);

    options.format = format;
    options.skip_bad = skip_bad;
    options.eos_id = 0;
    options.n_threads = 2;
    options.chat_template = chat ? "llama3" : NULL;
    return bl_dataset_open(&options, tokenizer, out);
}

static bl_dataset *open_rows(bl_data_format format)
{
    bl_dataset *dataset;
    if (try_open(format, false, &dataset) != BL_OK) fail_msg("%s", bl_error_text());
    return dataset;
}

/* ---- data that change ---- */

/* A row of each format, and another of as many bytes and tokens. */
static const struct {
    bl_data_format format;
    const char *row, *other;
} twins[] = {
    {BL_DATA_TOKENS, "{\"input_ids\":[5,6,7]}", "{\"input_ids\":[5,6,8]}"},
    {BL_DATA_TOKENS, "{\"input_ids\":[5,6,7],\"weights\":[1,2,1]}",
     "{\"input_ids\":[5,6,7],\"weights\":[1,3,1]}"},
    {BL_DATA_TEXT, "{\"text\":\"xyzw\"}", "{\"text\":\"xyzv\"}"},
    {BL_DATA_ALPACA, "{\"instruction\":\"xyzw\",\"output\":\"a\"}",
     "{\"instruction\":\"xyzv\",\"output\":\"a\"}"},
    {BL_DATA_PROMPT_COMPLETION, "{\"prompt\":\"xyzw\",\"completion\":\"a\"}",
     "{\"prompt\":\"xyzv\",\"completion\":\"a\"}"},
    {BL_DATA_MESSAGES,
     "{\"messages\":[{\"role\":\"user\",\"content\":\"xyzw\"},{\"role\":\"assistant\",\"content\":"
     "\"a\"}]}",
     "{\"messages\":[{\"role\":\"user\",\"content\":\"xyzv\"},{\"role\":\"assistant\",\"content\":"
     "\"a\"}]}"},
    {BL_DATA_SHAREGPT,
     "{\"conversations\":[{\"from\":\"human\",\"value\":\"xyzw\"},{\"from\":\"gpt\",\"value\":"
     "\"a\"}]}",
     "{\"conversations\":[{\"from\":\"human\",\"value\":\"xyzv\"},{\"from\":\"gpt\",\"value\":"
     "\"a\"}]}"},
};

/* Three rows, lines or one array; the second is `middle`. */
static void write_three(const char *row, const char *middle, bool array)
{
    char text[1024];
    int n =
        snprintf(text, sizeof text, array ? "[%s,\n%s,\n%s]" : "%s\n%s\n%s\n", row, middle, row);
    write_bytes(text, (size_t)n);
}

static void check_changed(const bl_dataset *dataset, int64_t index, const char *place)
{
    bl_sample sample;

    assert_int_equal(bl_dataset_get(dataset, index, &sample), BL_EINPUT);
    assert_null(sample.ids);
    if (strncmp(bl_error_text(), path, strlen(path)) || !strstr(bl_error_text(), place) ||
        !strstr(bl_error_text(), "changed since the file was scanned"))
        fail_msg("%s", bl_error_text());
}

static void check_good(const bl_dataset *dataset, int64_t index)
{
    bl_sample sample;

    if (bl_dataset_get(dataset, index, &sample) != BL_OK) fail_msg("%s", bl_error_text());
    bl_sample_free(&sample);
}

static void test_a_row_of_the_same_length_is_noticed(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(twins); i++)
        for (int array = 0; array < 2; array++) {
            write_three(twins[i].row, twins[i].row, array);
            bl_dataset *dataset = open_rows(twins[i].format);
            int64_t n_tokens = bl_dataset_n_tokens(dataset, 1);
            check_good(dataset, 1);
            write_three(twins[i].row, twins[i].other, array);
            check_changed(dataset, 1, ":2: sample 1 (from 0) has");
            check_good(dataset, 0);
            check_good(dataset, 2);
            bl_dataset_close(dataset);
            dataset = open_rows(twins[i].format); /* the count of tokens is the same */
            assert_int_equal(bl_dataset_n_tokens(dataset, 1), n_tokens);
            bl_dataset_close(dataset);
        }
}

/* A packed row needs each of its samples. */
static void test_packed_rows_notice_it(void **state)
{
    (void)state;
    for (bl_packing packing = BL_PACKING_PACK; packing <= BL_PACKING_CONCATENATE; packing++) {
        bl_dataset *rows;
        write_three(twins[0].row, twins[0].row, false);
        bl_dataset *samples = open_rows(BL_DATA_TOKENS);
        assert_int_equal(bl_dataset_pack(samples, packing, 9, 0, 3, &rows), BL_OK);
        assert_int_equal(bl_dataset_count(rows), 1);
        check_good(rows, 0);
        write_three(twins[0].row, twins[0].other, false);
        check_changed(rows, 0, ":2: sample 1 (from 0) has");
        bl_dataset_close(rows);
        bl_dataset_close(samples);
    }
}

/* A line more at the top moves all others. */
static void test_rows_that_moved_are_noticed(void **state)
{
    (void)state;
    write_three(twins[2].row, twins[2].row, false);
    bl_dataset *dataset = open_rows(BL_DATA_TEXT);
    write_bytes("\n{\"text\":\"xyzw\"}\n{\"text\":\"xyzw\"}\n{\"text\":\"xyzw\"}\n", 49);
    check_changed(dataset, 0, ":1: sample 0");
    check_changed(dataset, 1, ":2: sample 1");
    bl_dataset_close(dataset);
}

/* ---- keys that a format would drop ---- */

#define TURNS      "{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\",\"content\":\"a\""
#define SHARED     "{\"from\":\"human\",\"value\":\"a\"},{\"from\":\"gpt\",\"value\":\"a\""
#define ALPACA_ROW "{\"instruction\":\"a\",\"output\":\"a\""
#define PAIR       "{\"prompt\":\"a\",\"completion\":\"a\""
#define LOST       ": it would not be learned"

static const struct {
    const char *row, *error; /* NULL: fine */
} keyed[] = {
    {ALPACA_ROW ",\"system\":\"be brief\"}", "key system: expected null, got \"be brief\"" LOST},
    {ALPACA_ROW ",\"system\":3}", "key system: expected null, got "},
    {ALPACA_ROW ",\"system_prompt\":\"be brief\"}", "key system_prompt: expected null, got "},
    {ALPACA_ROW ",\"history\":[[\"a\",\"b\"]]}", "key history: expected null, got "},
    {ALPACA_ROW ",\"history\":\"b\"}", "key history: expected null, got "},
    {ALPACA_ROW ",\"tools\":\"[{}]\"}",
     "key tools: expected null, got \"[{}]\": tool calls are not"},
    {ALPACA_ROW ",\"images\":[\"a.png\"]}",
     "key images: expected null, got [\"a.png\"]: only text is trained"},
    {ALPACA_ROW ",\"kto_tag\":false}",
     "key kto_tag: expected true, got false: an answer marked as bad"},
    {ALPACA_ROW ",\"system\":\"\",\"history\":[],\"tools\":null,\"images\":[],\"kto_tag\":true}",
     NULL},
    {ALPACA_ROW ",\"system\":null,\"history\":null,\"id\":3,\"source\":{\"a\":[1]},\"label\":0}",
     NULL},
    {PAIR ",\"system\":\"be brief\"}", "key system: expected null, got "},
    {PAIR ",\"history\":[\"a\"]}", "key history: expected null, got "},
    {PAIR ",\"functions\":[{\"a\":1}]}",
     "key functions: expected null, got [{\"a\":1}]: tool calls"},
    {PAIR ",\"label\":false}", "key label: false: an answer marked as bad"},
    {PAIR ",\"label\":true,\"system\":\"\",\"id\":\"x\",\"image\":null}", NULL},
    {PAIR ",\"image\":\"a.png\"}", "key image: expected null, got \"a.png\": only text"},
    {PAIR ",\"label\":\"no\"}", NULL},
    {"{\"text\":\"a\",\"system\":\"x\",\"history\":[1],\"label\":false}",
     NULL}, /* all of it is in the text */
    {"{\"messages\":[" TURNS ",\"tool_calls\":[{\"a\":1}]}]}",
     "message 1: key tool_calls: expected null, got [{\"a\":1}]: tool calls"},
    {"{\"messages\":[" TURNS ",\"weight\":0.5}]}",
     "message 1: key weight: expected true, false, 0 or 1"},
    {"{\"messages\":[" TURNS ",\"train\":false}]}", "nothing to learn from"},
    {"{\"messages\":[" TURNS ",\"loss\":0}]}", "nothing to learn from"},
    {"{\"messages\":[{\"role\":\"system\",\"content\":\"a\",\"trainable\":true}," TURNS "}]}",
     "message 0: key trainable: this message has no loss"},
    {"{\"messages\":[" TURNS ",\"train_detail\":[{\"a\":1}]}]}",
     "key train_detail: expected null, got [{\"a\":1}]: weights and masks"},
    {"{\"messages\":[" TURNS ",\"reasoning_content\":\"hm\"}]}",
     "key reasoning_content: expected null, got \"hm\": this chat template does not read"},
    {"{\"messages\":[" TURNS "}],\"tools\":[{\"a\":1}]}",
     "key tools: expected null, got [{\"a\":1}]: tool calls"},
    {"{\"messages\":[" TURNS "}],\"images\":[\"a\"]}",
     "key images: expected null, got [\"a\"]: only text"},
    {"{\"messages\":[" TURNS "}],\"system\":[{}]}", "key system: expected a string"},
    {"{\"messages\":[{\"role\":\"system\",\"content\":\"a\"}," TURNS "}],\"system\":\"b\"}",
     "key system or system_prompt and a system message: give one of them"},
    {"{\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"train\":false},{\"role\":\"assistant\","
     "\"content\":"
     "\"a\",\"train\":true,\"loss\":1,\"training\":null,\"name\":\"x\",\"tool_calls\":[],"
     "\"thinking\":"
     "\"\"}],"
     "\"id\":1,\"tools\":\"[]\",\"label\":\"no\"}",
     NULL},
    {"{\"conversations\":[" SHARED ",\"train\":false}]}", "nothing to learn from"},
    {"{\"conversations\":[" SHARED "}],\"image\":\"a.png\"}",
     "key image: expected null, got \"a.png\": only text"},
    {"{\"conversations\":[" SHARED "}],\"system_prompt\":null,\"tools\":\"\",\"id\":\"x\"}", NULL},
};

static void test_keys_that_would_be_lost(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(keyed); i++) {
        bl_dataset *dataset;
        bool chat = strstr(keyed[i].row, "messages\"") || strstr(keyed[i].row, "conversations\"");
        write_bytes(keyed[i].row, strlen(keyed[i].row));
        bl_dataset_options options = bl_dataset_default_options(path);
        options.eos_id = 0;
        options.chat_template = chat ? "llama3" : NULL;
        bl_status st = bl_dataset_open(&options, tokenizer, &dataset);
        if (st != (keyed[i].error ? BL_EINPUT : BL_OK))
            fail_msg("%s: status %d", keyed[i].row, (int)st);
        if (keyed[i].error && (!strstr(bl_error_text(), keyed[i].error) ||
                               !strstr(bl_error_text(), "rows.jsonl:1: ")))
            fail_msg("\"%s\" does not say \"%s\"", bl_error_text(), keyed[i].error);
        bl_dataset_close(dataset);
    }
}

static void test_such_rows_can_be_skipped(void **state)
{
    static const char rows[] =
        ALPACA_ROW "}\n" ALPACA_ROW ",\"system\":\"x\"}\n" ALPACA_ROW ",\"history\":[[1,2]]}\n";
    bl_dataset *dataset;
    bl_dataset_stats stats;

    (void)state;
    write_bytes(rows, sizeof rows - 1);
    assert_int_equal(try_open(BL_DATA_ALPACA, true, &dataset), BL_OK);
    bl_dataset_get_stats(dataset, &stats);
    assert_int_equal(stats.n_bad, 2);
    assert_int_equal(bl_dataset_count(dataset), 1);
    bl_dataset_close(dataset);
}

/* With train_on_inputs every message has loss: the flag of a user's message must agree with
 * that. */
static void test_flags_follow_train_on_inputs(void **state)
{
    static const char *const rows[] = {
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"train\":true},{"
        "\"role\":\"assistant\",\"content\":\"a\"}]}",
        "{\"messages\":[{\"role\":\"user\",\"content\":\"a\",\"train\":false},"
        "{\"role\":\"assistant\",\"content\":\"a\"}]}"};
    (void)state;
    for (int flag = 0; flag < 2; flag++)
        for (int on_inputs = 0; on_inputs < 2; on_inputs++) {
            bl_dataset *dataset;
            bl_dataset_options options = bl_dataset_default_options(path);
            options.chat_template = "llama3";
            options.train_on_inputs = on_inputs;
            write_bytes(rows[flag], strlen(rows[flag]));
            bl_status st = bl_dataset_open(&options, tokenizer, &dataset);
            assert_int_equal(st, (flag == 0) == (on_inputs == 1) ? BL_OK : BL_EINPUT);
            bl_dataset_close(dataset);
        }
}

/* A system text beside the messages is the first message; written in both places it is said
 * once. */
static void test_system_beside_messages(void **state)
{
    static const char *const rows[] = {
        "{\"messages\":[{\"role\":\"system\",\"content\":\"be\"}," TURNS "}]}",
        "{\"messages\":[" TURNS "}],\"system\":\"be\"}",
        "{\"messages\":[{\"role\":\"system\",\"content\":\"be\"}," TURNS "}],\"system\":\"be\"}",
        "{\"conversations\":[{\"from\":\"system\",\"value\":\"be\"}," SHARED
        "}],\"system\":\"be\"}"};
    bl_sample first = {0}, sample;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(rows); i++) {
        write_bytes(rows[i], strlen(rows[i]));
        bl_dataset *dataset = open_rows(i < 3 ? BL_DATA_MESSAGES : BL_DATA_SHAREGPT);
        assert_int_equal(bl_dataset_get(dataset, 0, i ? &sample : &first), BL_OK);
        bl_dataset_close(dataset);
        if (!i) continue;
        assert_int_equal(sample.n_tokens, first.n_tokens);
        assert_memory_equal(sample.ids, first.ids, (size_t)first.n_tokens * sizeof *first.ids);
        assert_memory_equal(sample.labels, first.labels,
                            (size_t)first.n_tokens * sizeof *first.labels);
        bl_sample_free(&sample);
    }
    bl_sample_free(&first);
}

/* ---- files of other kinds ---- */

#define BYTES(text) text, sizeof(text) - 1

static const struct {
    const char *bytes;
    size_t n;
    const char *says;
    bool per_row; /* a bad row, that skip_bad would skip; else the file itself */
} others[] = {
    {BYTES("\x1f\x8b\x08\0\0\0\0\0\0\x03"), ": damaged gzip data: it ends early", false},
    {BYTES("\x28\xb5\x2f\xfd\x04"), ": damaged Zstandard data: it ends early", false},
    {BYTES("BZh91AY"), ": is bzip2 data, not JSON", false},
    {BYTES("ARROW1\0\0"), ": is an Arrow or Feather file", false},
    {BYTES("PAR1\x15\x04\x15\x10"), ": is a Parquet file, not JSON or JSON lines: convert", false},
    {BYTES("\xff\xfe{\0\"\0"), ": the text is UTF-16; save it as UTF-8", false},
    {BYTES("p\0r\0o\0m\0p\0t\0,\0"), ": is UTF-16 text, not JSON", false},
    {BYTES("\0p\0r\0o\0m\0p\0t\0,"), ": is UTF-16 text, not JSON", false},
    {BYTES("PK\3\4\x14\0\0\0\x08\0"), ": is a zip archive", false},
    {BYTES("version https://git-lfs.github.com/spec/v1\n"), ": is a Git LFS pointer", false},
    {BYTES("prompt,completion\na,b\n"),
     ":1: is not JSON and looks like CSV: convert it to JSON lines", true},
    {BYTES("\xef\xbb\xbftext\tid\r\na\t1\r\n"), ":1: is not JSON and looks like CSV", true},
    {BYTES("{\"text\":\"a\"}\nprompt,completion\n"), ":2:", true},
    {BYTES("Once upon a time, there was a text.\n"), ":1:", true},
};

static void test_other_kinds_of_files(void **state)
{
    static const bl_data_format formats[] = {BL_DATA_AUTO, BL_DATA_TEXT, BL_DATA_MESSAGES};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(others); i++)
        for (size_t f = 0; f < BL_COUNT(formats); f++)
            for (int skip_bad = 0; skip_bad < (others[i].per_row ? 1 : 2); skip_bad++) {
                bl_dataset *dataset;
                if (formats[f] == BL_DATA_MESSAGES && strstr(others[i].bytes, "{\"text")) continue;
                write_bytes(others[i].bytes, others[i].n);
                assert_int_equal(try_open(formats[f], skip_bad, &dataset), BL_EINPUT);
                if (!strstr(bl_error_text(), others[i].says) ||
                    strncmp(bl_error_text(), path, strlen(path)))
                    fail_msg("\"%s\" does not say \"%s\"", bl_error_text(), others[i].says);
            }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_a_row_of_the_same_length_is_noticed),
        cmocka_unit_test(test_packed_rows_notice_it),
        cmocka_unit_test(test_rows_that_moved_are_noticed),
        cmocka_unit_test(test_keys_that_would_be_lost),
        cmocka_unit_test(test_such_rows_can_be_skipped),
        cmocka_unit_test(test_flags_follow_train_on_inputs),
        cmocka_unit_test(test_system_beside_messages),
        cmocka_unit_test(test_other_kinds_of_files),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
