/* SPDX-License-Identifier: Apache-2.0 */
/* Rows, files and options that are refused, with their place; rows that are too long. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "dataset_case.h"

typedef struct bad_row {
    const char *bytes;
    size_t n; /* 0: strlen */
    const char *reason;
} bad_row;

static const bad_row bad_files[] = {
    {"{\"input_ids\":[1,2]}\n{\"input_ids\":[1,}\n", 0, ":2:"},
    {"{\"input_ids\":[1,2]}\n{\"input_ids\":[1,2]\n", 0, ":2:"},
    {"{\"input_ids\":[1,2]} {\"input_ids\":[1,2]}\n", 0, ":1:21: "},
    {"{\"text\":\"a\"}\n{\"text\":\"a\xff\"}\n", 0, ":2:"},
    {"{\"text\":\"a\"}\n{\"text\":\"a\0b\"}\n", 29, ":2:11: NUL byte"},
    {"{\"text\":\"a\\u0000b\"}\n", 0, "without NUL"},
    {"{\"text\":\"a\\ud800\"}\n", 0, ":1:"},
    {"{\"text\":\"a\",\"text\":\"b\"}\n", 0, "duplicate"},
    {"{\"text\":\"a\"}\n{\"text\":3}\n", 0, ":2: key text: expected a string, got 3"},
    {"{\"text\":\"a\"}\n{\"words\":3}\n", 0, ":2: key text: missing"},
    {"{\"text\":\"a\"}\n\n\n\"text\"\n", 0, ":4: expected a JSON object"},
    {"{\"prompt\":\"a\",\"completion\":[]}\n", 0, ":1: key completion: expected a string"},
    {"{\"instruction\":\"a\",\"output\":null}\n", 0, ":1: key output"},
    {"{\"instruction\":\"a\",\"input\":4,\"output\":\"a\"}\n", 0,
     ":1: key input: expected a string, got 4"},
    {"{\"foo\":[]}\n", 0, ":1: no known data format"},
    {"hello\n", 0, ":1:"},
    {"", 0, "no usable rows"},
    {"\n\n", 0, "no usable rows"},
    {"[]", 0, "no usable rows"},
    {"[{\"input_ids\":[1,2]}", 0, ":1:21: expected ','"},
    {"[{\"input_ids\":[1,2]},", 0, "the file ends inside the array"},
    {"[{\"input_ids\":[1,2]},]", 0, ":1:22: expected an object"},
    {"[{\"input_ids\":[1,2]},3]", 0, ":1:22: expected an object"},
    {"[{\"input_ids\":[1,2]}\n{\"input_ids\":[1,2]}]", 0, ":2:1: expected ','"},
    {"[{\"input_ids\":[1,2]}]\n[", 0, ":2:1: text behind the end"},
    {"[{\"input_ids\":[1,2", 0, ":1:19: the file ends inside an element"},
    {"[{\"text\":\"\xc3\xa9\"},{\"text\":\"b\",}]", 0, ":1:27: "}, /* a column counts characters */
    {"[{\"text\":\"a\"},\n  {\"text\":\"b\"},{\"text\":1}]", 0, ":2: row 3: key text"},
    {"{\"input_ids\":[1,1000]}", 0, "input_ids[1]: expected an integer in [0, 999]"},
    {"{\"input_ids\":[1,-1]}", 0, "input_ids[1]"},
    {"{\"input_ids\":[1,-100]}", 0, "input_ids[1]"},
    {"{\"input_ids\":[1,2.0]}", 0, "input_ids[1]"},
    {"{\"input_ids\":[1,99999999999999999999]}", 0, ":1:"},
    {"{\"input_ids\":[1,4294967297]}", 0, "input_ids[1]"},
    {"{\"input_ids\":\"12\"}", 0, "key input_ids: expected an array"},
    {"{\"input_ids\":[1,2],\"labels\":[1]}", 0, "labels has 1 elements, input_ids 2"},
    {"{\"input_ids\":[1,2],\"labels\":[1,-99]}", 0,
     "labels[1]: expected an integer in [0, 999] or -100"},
    {"{\"input_ids\":[1,2],\"document_ids\":[1,0]}", 0, "document_ids[1]: smaller"},
    {"{\"input_ids\":[1,2],\"document_ids\":[1]}", 0, "document_ids has 1"},
    {"{\"input_ids\":[1,2],\"document_ids\":[-1,0]}", 0, "document_ids[0]"},
    {"{\"input_ids\":[1,2],\"weights\":[1]}", 0, "weights has 1"},
    {"{\"input_ids\":[1,2],\"weights\":[1,\"x\"]}", 0, "weights[1]"},
    {"{\"input_ids\":[1,2],\"weights\":[1,1e39]}", 0, "weights[1]"},
    {"{\"input_ids\":[1,2],\"weights\":[1,-0.5]}", 0,
     ":1: weights[1]: expected a number of at least 0"},
    {"{\"input_ids\":[1,2],\"weights\":[-1e-9,1]}", 0,
     ":1: weights[0]: expected a number of at least 0"},
    {"{\"input_ids\":[1,2],\"weights\":[1,NaN]}", 0, ":1:"},
    {"{\"input_ids\":[1,2],\"weights\":[1,-Infinity]}", 0, ":1:"},
    {"{\"input_ids\":[1,2],\"weights\":[1,1e999]}", 0, ":1:"},
    {"{\"input_ids\":[1,2],\"attention_mask\":[1,0]}", 0, "key attention_mask"},
    {"{\"input_ids\":[1,2],\"labels\":[1,-100]}", 0, ":1: nothing to learn from"},
    {"{\"input_ids\":[1,2],\"weights\":[1,0]}", 0, ":1: nothing to learn from"},
    {"{\"input_ids\":[1]}", 0, ":1: nothing to learn from"},
    {"{\"input_ids\":[]}", 0, ":1: nothing to learn from"},
    {"{\n  \"text\": \"a\"\n}\n", 0, ":1: this object does not end on its line"},
    {"{\"text\":\"a\"}\n{ \"text\":\n \"a\"}\n", 0, ":2: this object does not end on its line"},
    {"{\"text\": [\r\n 1]}\n", 0, ":1: this object does not end on its line"},
    {"{\"text\":\"a\"}\n{\"text\":\"caf\xe9\"}\n", 0,
     ":2: byte 0xe9 is not UTF-8: the text has another"},
    {"[{\"text\":\"a\"},{\"text\":\"\x93\"}]", 0, ":1: row 2: byte 0x93 is not UTF-8"},
    {"{\"input_ids\":\"[1, 2]\"}", 0,
     "key input_ids: expected an array, got one written as a text"},
    {"[{\"text\":\"a\"},{\"text\":3 4}]", 0, " (row 2)"},
    {"{'text': 'a'}\n", 0, ":1: a dict in Python's notation, not JSON"},
    {"[{\"text\":\"a\"},{'text': 'a'}]", 0, ":1: row 2: a dict in Python's notation, not JSON"},
    {"{\"text\":\"a\"},\n{\"text\":\"b\"},\n", 0, ":1: a comma behind the object"},
    {"Once upon a time\n", 0, ":1: is not JSON: write an object per line, of plain text"},
    {"{\"text\":NaN}\n", 0, ":1:"},
    {"[{\"text\":\"a\"} {\"text\":\"b\"}]", 0, "(row 1 is the last before it)"},
};

static void test_bad_files_are_refused_with_place(void **state)
{
    bl_dataset_options options = default_options();
    (void)state;
    for (size_t i = 0; i < BL_COUNT(bad_files); i++)
        check_refused(&options, bad_files[i].bytes,
                      bad_files[i].n ? bad_files[i].n : strlen(bad_files[i].bytes),
                      bad_files[i].reason);
}

static void test_bad_rows_can_be_skipped(void **state)
{
    bl_dataset_options options = default_options();
    bl_dataset_stats stats;

    (void)state;
    options.skip_bad = true;
    for (int array = 0; array < 2; array++) {
        bl_dataset *dataset = open_with(
            &options,
            array
                ? "[{\"foo\":1},{\"input_ids\":[1,2]},{\"input_ids\":[1,]}, {\"input_ids\":[3,4]}]"
                : "oops\n{\"input_ids\":[1,2]}\n{\"input_ids\":[1,}\n{\"input_ids\":[3,4]}\n");
        assert_int_equal(bl_dataset_count(dataset), 2);
        check_sample(dataset, 1, 2, (int32_t[]){3, 4}, (int32_t[]){3, 4});
        bl_dataset_get_stats(dataset, &stats);
        assert_int_equal(stats.n_bad, 2);
        assert_int_equal(stats.n_rows, 4);
        bl_dataset_close(dataset);
    }
    check_refused(&options, "oops\n", 5, "no usable rows (1 rows, 1 of them bad)");
}

static void test_options_are_checked(void **state)
{
    bl_dataset *dataset;
    bl_dataset_options options = default_options();

    (void)state;
    write_bytes("{\"text\":\"a\"}", 12);
    assert_int_equal(bl_dataset_open(&options, NULL, &dataset), BL_EUSAGE);
    options.max_seq_length = -1;
    assert_int_equal(bl_dataset_open(&options, tokenizer, &dataset), BL_EUSAGE);
    options.max_seq_length = 1;
    assert_int_equal(bl_dataset_open(&options, tokenizer, &dataset), BL_EUSAGE);
    options = default_options();
    options.format = BL_DATA_TOKENS;
    options.vocab_size = 0;
    assert_int_equal(bl_dataset_open(&options, NULL, &dataset), BL_EUSAGE);
    options.path = folder;
    assert_int_equal(bl_dataset_open(&options, tokenizer, &dataset), BL_EINPUT);
    options.path = "/nonexistent.jsonl";
    assert_int_equal(bl_dataset_open(&options, tokenizer, &dataset), BL_EINPUT);
    bl_dataset_close(NULL);
    assert_string_equal(bl_data_format_name(BL_DATA_SHAREGPT),
                        "sharegpt"); /* the last of its table */
}

/* ---- length limits ---- */

static void test_overlong_policies(void **state)
{
    static const char rows[] =
        "{\"input_ids\":[1,2,3,4,5],\"document_ids\":[0,0,0,1,1]}\n{\"input_ids\":[6,"
        "7,8]}\n{\"input_ids\":[1,2,3,4]}\n";
    bl_dataset_options options = default_options();
    bl_dataset_stats stats;

    (void)state;
    options.max_seq_length = 3;
    bl_dataset *dataset = open_with(&options, rows);
    assert_int_equal(bl_dataset_count(dataset), 3);
    check_sample(dataset, 0, 3, (int32_t[]){1, 2, 3}, (int32_t[]){1, 2, 3});
    bl_dataset_get_stats(dataset, &stats);
    assert_int_equal(stats.n_overlong, 2);
    assert_int_equal(stats.n_tokens_lost, 3);
    assert_int_equal(stats.n_tokens, 9);
    bl_dataset_close(dataset);

    options.overlong = BL_OVERLONG_SKIP;
    dataset = open_with(&options, rows);
    assert_int_equal(bl_dataset_count(dataset), 1);
    check_sample(dataset, 0, 3, (int32_t[]){6, 7, 8}, (int32_t[]){6, 7, 8});
    bl_dataset_get_stats(dataset, &stats);
    assert_int_equal(stats.n_overlong, 2);
    assert_int_equal(stats.n_tokens_lost, 9);
    assert_int_equal(stats.n_tokens, 3);
    bl_dataset_close(dataset);

    options.overlong = BL_OVERLONG_ERROR;
    check_refused(&options, rows, strlen(rows), ":1: 5 tokens, max_seq_length is 3");
}

/* Rows of which nothing is left to learn are left out and counted, as TRL does. */
static void test_rows_that_are_cut_away(void **state)
{
    static const char rows[] = "[{\"prompt\":\"ab\",\"completion\":\"ab\"},"
                               "{\"prompt\":\"a b c d e f\",\"completion\":\"ab\"},"
                               "{\"prompt\":\"a\",\"completion\":\"a b c d e f\"},"
                               "{\"prompt\":\"b\",\"completion\":\"b\"}]";
    bl_dataset_options options = default_options();
    bl_dataset_stats stats;
    bl_sample sample;

    (void)state;
    options.max_seq_length = 6;
    for (int n_threads = 1; n_threads < 4; n_threads++) {
        options.n_threads = n_threads;
        bl_dataset *dataset = open_with(&options, rows);
        assert_int_equal(bl_dataset_count(dataset), 3);
        bl_dataset_get_stats(dataset, &stats);
        assert_int_equal(stats.n_rows, 4);
        assert_int_equal(stats.n_cut_away, 1);
        assert_int_equal(stats.n_overlong, 2);
        assert_int_equal(bl_dataset_n_tokens(dataset, 1), 6);
        assert_int_equal(bl_dataset_get(dataset, 2, &sample), BL_OK);
        assert_true(sample.n_tokens < 6); /* the last row */
        bl_sample_free(&sample);
        bl_dataset_close(dataset);
    }
    static const char long_prompt[] = "{\"prompt\":\"ab ab ab\",\"completion\":\"ab\"}";
    options.max_seq_length = 3;
    check_refused(
        &options, long_prompt, strlen(long_prompt),
        "no usable rows (1 rows, 0 of them bad); 1 learn nothing within max_seq_length 3");
    /* A row that has nothing to learn at any length is an error. */
    static const char masked[] = "{\"input_ids\":[1,2,3,4],\"labels\":[-100,-100,-100,-100]}";
    check_refused(&options, masked, strlen(masked), ":1: nothing to learn from");
}

/* One rule for texts and answers of white space alone, in each format. */
static void test_empty_answers_are_refused(void **state)
{
    static const bad_row rows[] = {
        {"{\"text\":\"a\"}\n{\"text\":\"\"}", 0, ":2: the text is empty; skip_bad: true"},
        {"{\"prompt\":\"a\",\"completion\":\"\"}", 0, ":1: the answer is empty; skip_bad: true"},
        {"{\"prompt\":\"a\",\"completion\":\" \\n\\u2003\"}", 0, ":1: the answer is empty"},
        {"{\"question\":\"a\",\"answer\":\"\"}", 0, ":1: the answer is empty"},
        {"[{\"instruction\":\"a\",\"input\":\"\",\"output\":\"b\"},"
         "{\"instruction\":\"a\",\"input\":\"\",\"output\":\"\"}]",
         0, ":1: row 2: the answer is empty"},
        {"{\"instruction\":\"a\",\"context\":\"b\",\"response\":\"\"}", 0, "the answer is empty"},
        {"{\"instruction\":\" \",\"input\":\"\",\"output\":\"b\"}", 0, "the instruction is empty"},
        {"{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"\"}", 0,
         ":1: rejected: the answer is empty"},
    };
    bl_dataset_options options = default_options();

    (void)state;
    for (size_t i = 0; i < BL_COUNT(rows); i++)
        check_refused(&options, rows[i].bytes, strlen(rows[i].bytes), rows[i].reason);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_bad_files_are_refused_with_place, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_bad_rows_can_be_skipped, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_options_are_checked, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_overlong_policies, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_rows_that_are_cut_away, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_empty_answers_are_refused, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
