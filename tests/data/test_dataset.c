/* SPDX-License-Identifier: Apache-2.0 */
/* Data sets: each format's ids and labels, files of every shape, real ones. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "dataset_case.h"
#include "skip.h"

static int32_t id_of(const char *token)
{
    int32_t id = bl_tokenizer_token_to_id(tokenizer, token);
    assert_true(id >= 0);
    return id;
}

/* ---- formats ---- */

static void test_tokens(void **state)
{
    bl_sample sample;
    (void)state;
    bl_dataset *dataset = open_text(
        "{\"input_ids\":[1,2,3]}\n"
        "{\"input_ids\":[4,5,999,0],\"labels\":[-100,-100,7,0],\"document_ids\":[0,0,2,2],"
        "\"weights\":[1,0.5,2,3]}\n");
    assert_int_equal(bl_dataset_format(dataset), BL_DATA_TOKENS);
    assert_int_equal(bl_dataset_count(dataset), 2);
    check_sample(dataset, 0, 3, (int32_t[]){1, 2, 3}, (int32_t[]){1, 2, 3});
    check_sample(dataset, 1, 4, (int32_t[]){4, 5, 999, 0}, (int32_t[]){M, M, 7, 0});
    assert_int_equal(bl_dataset_get(dataset, 0, &sample), BL_OK);
    assert_null(sample.document_ids);
    assert_null(sample.weights);
    bl_sample_free(&sample);
    assert_int_equal(bl_dataset_get(dataset, 1, &sample), BL_OK);
    assert_memory_equal(sample.document_ids, ((int32_t[]){0, 0, 2, 2}), 16);
    assert_memory_equal(sample.weights, ((float[]){1, 0.5f, 2, 3}), 16);
    bl_sample_free(&sample);
    bl_sample_free(&sample);
    bl_dataset_stats stats;
    bl_dataset_get_stats(dataset, &stats);
    assert_int_equal(stats.n_rows, 2);
    assert_int_equal(stats.n_tokens, 7);
    assert_int_equal(stats.n_label_tokens,
                     4); /* [2, 3] and [7, 0]: a first label has nothing before it */
    assert_int_equal(bl_dataset_get(dataset, 2, &sample), BL_EINTERNAL);
    assert_int_equal(bl_dataset_get(dataset, -1, &sample), BL_EINTERNAL);
    bl_dataset_close(dataset);
}

static void test_text(void **state)
{
    (void)state;
    bl_dataset *dataset = open_text("{\"text\":\"ab hello\",\"id\":3}\n");
    assert_int_equal(bl_dataset_format(dataset), BL_DATA_TEXT);
    int32_t ids[] = {1, id_of("\u2581ab"), id_of("\u2581hello"), EOS};
    check_sample(dataset, 0, 4, ids, ids);
    bl_dataset_close(dataset);

    bl_dataset_options options = default_options();
    options.add_eos = false;
    dataset = open_with(&options, "{\"text\":\"ab hello\"}");
    check_sample(dataset, 0, 3, ids, ids);
    bl_dataset_close(dataset);

    /* An unused key may hold an integer of any size. */
    dataset = open_text("{\"id\":340282366920938463463374607431768211456,\"text\":\"ab hello\"}\n");
    check_sample(dataset, 0, 4, ids, ids);
    bl_dataset_close(dataset);
}

static void test_prompt_completion(void **state)
{
    static const char row[] = "{\"prompt\":\"ab\",\"completion\":\"ab<s>\"}";
    /* The completion goes on without a space, and a special token's text in it is characters. */
    int32_t ids[] = {1, id_of("\u2581ab"), id_of("ab"), id_of("<"), 2 + 's', id_of(">"), EOS};
    int32_t masked[BL_COUNT(ids)];
    bl_dataset_options options = default_options();

    (void)state;
    memcpy(masked, ids, sizeof ids);
    masked[0] = masked[1] = M;
    bl_dataset *dataset = open_with(&options, row);
    assert_int_equal(bl_dataset_format(dataset), BL_DATA_PROMPT_COMPLETION);
    check_sample(dataset, 0, BL_COUNT(ids), ids, masked);
    bl_dataset_close(dataset);
    options.train_on_inputs = true;
    dataset = open_with(&options, row);
    check_sample(dataset, 0, BL_COUNT(ids), ids, ids);
    bl_dataset_close(dataset);

    /* Without a prompt the completion is the text's beginning. */
    dataset = open_text("{\"prompt\":\"\",\"completion\":\"ab\"}");
    check_sample(dataset, 0, 3, (int32_t[]){1, id_of("\u2581ab"), EOS},
                 (int32_t[]){M, id_of("\u2581ab"), EOS});
    bl_dataset_close(dataset);
}

/* Checks that a sample is BOS, `prompt` masked, `completion` and EOS in the loss. */
static void check_joined(const bl_dataset *dataset, const bl_tokenizer *with, int64_t index,
                         const char *prompt, const char *completion, int32_t eos)
{
    bl_sample sample;
    size_t n_prefix, n_text;
    char *text;
    bl_ids ids = {0};

    bl_tokenizer_prefix(with, &n_prefix);
    assert_int_equal(bl_dataset_get(dataset, index, &sample), BL_OK);
    assert_int_equal(sample.ids[sample.n_tokens - 1], eos);
    assert_int_equal(bl_tokenizer_decode(with, sample.ids + n_prefix,
                                         (size_t)sample.n_tokens - n_prefix - 1, false, &text,
                                         &n_text),
                     BL_OK);
    if (strncmp(text, prompt, strlen(prompt)) || strcmp(text + strlen(prompt), completion))
        fail_msg("row %d: got \"%s\", expected \"%s\" \"%s\"", (int)index, text, prompt,
                 completion);
    free(text);
    assert_int_equal(bl_tokenizer_encode(with, prompt, strlen(prompt), BL_ADD_SPECIAL, &ids),
                     BL_OK);
    for (size_t t = 0; t < (size_t)sample.n_tokens; t++)
        assert_int_equal(sample.labels[t], t < ids.n ? M : sample.ids[t]);
    assert_memory_equal(sample.ids, ids.id, ids.n * sizeof *ids.id);
    bl_ids_free(&ids);
    bl_sample_free(&sample);
}

#define PREAMBLE "Below is an instruction that describes a task"
#define REQUEST  "Write a response that appropriately completes the request.\n\n### Instruction:\n"

static void test_alpaca(void **state)
{
    (void)state;
    bl_dataset *dataset = open_text(
        "{\"instruction\":\"Say hello.\",\"input\":\"\",\"output\":\"hello\",\"text\":\"whole\"}\n"
        "{\"instruction\":\"Add.\",\"input\":\"1 2\",\"output\":\"3\"}\n"
        "{\"instruction\":\"Do %s.\",\"input\":null,\"output\":\"x\"}\n");
    assert_int_equal(bl_dataset_format(dataset), BL_DATA_ALPACA);
    check_joined(dataset, tokenizer, 0,
                 PREAMBLE ". " REQUEST "Say hello.\n\n### Response:", "hello", EOS);
    check_joined(dataset, tokenizer, 1,
                 PREAMBLE ", paired with an input that provides further context. " REQUEST
                          "Add.\n\n### Input:\n1 2\n\n### Response:",
                 "3", EOS);
    check_joined(dataset, tokenizer, 2, PREAMBLE ". " REQUEST "Do %s.\n\n### Response:", "x", EOS);
    bl_dataset_close(dataset);
}

static void test_template_that_ends_texts(void **state)
{
    bl_tokenizer *split;
    bl_dataset *dataset;
    bl_sample sample;
    bl_dataset_options options = default_options();

    (void)state;
    assert_int_equal(bl_tokenizer_load("tests/tokenizer/fixtures/byte_level_split.json", &split),
                     BL_OK);
    int32_t begin = bl_tokenizer_token_to_id(split, "<|begin|>"),
            end = bl_tokenizer_token_to_id(split, "<|end|>");
    write_bytes("{\"text\":\"ab\"}", 13);
    for (int other = 0; other < 2; other++) {
        options.eos_id = other ? EOS : end; /* the template's own end is not doubled */
        assert_int_equal(bl_dataset_open(&options, split, &dataset), BL_OK);
        assert_int_equal(bl_dataset_get(dataset, 0, &sample), BL_OK);
        assert_int_equal(sample.n_tokens, 3 + other);
        assert_int_equal(sample.ids[0], begin);
        assert_int_equal(sample.ids[2], end);
        bl_sample_free(&sample);
        bl_dataset_close(dataset);
    }
    options.eos_id = -1; /* this tokenizer has no configuration that names one */
    assert_int_equal(bl_dataset_open(&options, split, &dataset), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "EOS"));
    bl_tokenizer_destroy(split);
}

/* ---- shapes of files ---- */

static void test_file_shapes_give_the_same_rows(void **state)
{
    static const char *const shapes[] = {
        "{\"input_ids\":[1,2]}\n{\"input_ids\":[3,4,5]}\n",
        "{\"input_ids\":[1,2]}\n{\"input_ids\":[3,4,5]}",
        "\xef\xbb\xbf{\"input_ids\":[1,2]}\r\n{\"input_ids\":[3,4,5]}\r\n",
        "\n\n  {\"input_ids\":[1,2]}  \n\r\n\t{\"input_ids\":[3,4,5]}\n\n\n",
        "[{\"input_ids\":[1,2]},{\"input_ids\":[3,4,5]}]",
        "\xef\xbb\xbf \n[\n {\n  \"input_ids\": [\n1,\n2]\n }\r\n,\n{\"input_ids\":[3,4,5]}\n]\n\n",
        "[{\"input_ids\":[1,2],\"labels\":null},{\"input_ids\":[3,4,5]} ]",
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(shapes); i++) {
        bl_dataset *dataset = open_text(shapes[i]);
        assert_int_equal(bl_dataset_count(dataset), 2);
        check_sample(dataset, 0, 2, (int32_t[]){1, 2}, (int32_t[]){1, 2});
        check_sample(dataset, 1, 3, (int32_t[]){3, 4, 5}, (int32_t[]){3, 4, 5});
        bl_dataset_close(dataset);
    }
    /* Braces, brackets, quotes and backslashes in strings are no borders. */
    bl_dataset *dataset =
        open_text("[{\"text\":\"}]\\\"{\\\\\",\"x\":[{},\"]\"]},{\"text\":\"ab\"}]");
    assert_int_equal(bl_dataset_count(dataset), 2);
    check_sample(dataset, 1, 3, (int32_t[]){1, id_of("\u2581ab"), EOS},
                 (int32_t[]){1, id_of("\u2581ab"), EOS});
    bl_dataset_close(dataset);
}

/* Rows larger than the reader's buffer, then a small one; as lines and as an array. */
static void test_huge_rows(void **state)
{
    enum { N = 9 << 20 };
    char *text = malloc(N + 200);
    bl_dataset *dataset;
    bl_dataset_options options = default_options();

    (void)state;
    for (int array = 0; array < 2; array++) {
        size_t n = (size_t)sprintf(text, "%s{\"text\":\"hello\"}%s\n{\"text\":\"", array ? "[" : "",
                                   array ? "," : "");
        for (size_t i = 0; i < N / 3; i++, n += 3) memcpy(text + n, "ab ", 3);
        n += (size_t)sprintf(text + n, "\"}%s\n{\"text\":\"ab\"}%s", array ? "," : "",
                             array ? "]" : "");
        write_bytes(text, n);
        if (bl_dataset_open(&options, tokenizer, &dataset) != BL_OK)
            fail_msg("%s", bl_error_text());
        assert_int_equal(bl_dataset_count(dataset), 3);
        assert_int_equal(bl_dataset_n_tokens(dataset, 1),
                         N / 3 + 3); /* BOS, the words, a lone space, EOS */
        check_sample(dataset, 2, 3, (int32_t[]){1, id_of("\u2581ab"), EOS},
                     (int32_t[]){1, id_of("\u2581ab"), EOS});
        bl_dataset_close(dataset);
    }
    free(text);
}

/* ---- real data ---- */

static const char *data_folder;

static bl_tokenizer *load_real(const char *relative)
{
    char *full;
    bl_tokenizer *real;
    assert_int_equal(bl_path_join(data_folder, relative, &full), BL_OK);
    if (bl_tokenizer_load(full, &real) != BL_OK) fail_msg("%s", bl_error_text());
    free(full);
    return real;
}

static void check_alpaca_row(const bl_dataset *dataset, const bl_tokenizer *real, size_t index,
                             const json_t *row, int32_t eos)
{
    const char *input = json_string_value(json_object_get(row, "input"));
    char *prompt;
    assert_true(asprintf(&prompt, PREAMBLE "%s. " REQUEST "%s%s%s\n\n### Response:",
                         *input ? ", paired with an input that provides further context" : "",
                         json_string_value(json_object_get(row, "instruction")),
                         *input ? "\n\n### Input:\n" : "", input) > 0);
    check_joined(dataset, real, (int64_t)index, prompt,
                 json_string_value(json_object_get(row, "output")), eos);
    free(prompt);
}

static void test_real_alpaca(void **state)
{
    static const char *const tokenizers[] = {"tokenizers/llama3", "tokenizers/llama2"};
    char *file;
    json_t *rows;
    size_t i;
    const json_t *row;

    (void)state;
    TEST_SKIP_WITHOUT_DATA(data_folder);
    assert_int_equal(bl_path_join(data_folder, "datasets/alpaca_5000.json", &file), BL_OK);
    assert_int_equal(bl_json_load(file, 1 << 24, &rows), BL_OK);
    for (int k = 0; k < 2; k++) {
        bl_tokenizer *real = load_real(tokenizers[k]);
        bl_dataset_options options = bl_dataset_default_options(file);
        bl_dataset *dataset;
        size_t n_used = 0;
        options.skip_bad = true; /* two answers are empty */
        options.eos_id = bl_tokenizer_token_to_id(real, k ? "</s>" : "<|end_of_text|>");
        if (bl_dataset_open(&options, real, &dataset) != BL_OK) fail_msg("%s", bl_error_text());
        assert_int_equal(bl_dataset_count(dataset), 4998);
        json_array_foreach(rows, i, row)
        {
            if (!*json_string_value(json_object_get(row, "output"))) continue;
            check_alpaca_row(dataset, real, n_used++, row, options.eos_id);
        }
        bl_dataset_close(dataset);
        bl_tokenizer_destroy(real);
    }
    json_decref(rows);
    free(file);
}

static void test_real_files_open(void **state)
{
    static const struct {
        const char *file;
        bl_data_format format;
        int64_t n;
    } files[] = {{"gsm8k_alpaca_1000.json", BL_DATA_ALPACA, 1000},
                 {"gsm8k_prompt_completion_1000.jsonl", BL_DATA_PROMPT_COMPLETION, 1000},
                 {"stories_lowercase_text_1000.jsonl", BL_DATA_TEXT, 1000},
                 {"stories_lowercase_text_valid_200.jsonl", BL_DATA_TEXT, 200},
                 {"gsm8k_messages_1000.jsonl", BL_DATA_MESSAGES, 1000},
                 {"rasbt_messages_1100.jsonl", BL_DATA_MESSAGES, 1100}};
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data_folder);
    bl_tokenizer *real = load_real("models/stories260K");
    for (size_t i = 0; i < BL_COUNT(files); i++) {
        char relative[128], *file;
        bl_dataset *dataset;
        snprintf(relative, sizeof relative, "datasets/%s", files[i].file);
        assert_int_equal(bl_path_join(data_folder, relative, &file), BL_OK);
        bl_dataset_options options = bl_dataset_default_options(file);
        if (files[i].format == BL_DATA_MESSAGES) options.chat_template = "llama2";
        if (bl_dataset_open(&options, real, &dataset) != BL_OK) fail_msg("%s", bl_error_text());
        assert_int_equal(bl_dataset_format(dataset), files[i].format);
        assert_int_equal(bl_dataset_count(dataset), files[i].n);
        bl_dataset_close(dataset);
        free(file);
    }
    bl_tokenizer_destroy(real);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_tokens, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_text, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_prompt_completion, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_alpaca, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_template_that_ends_texts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_file_shapes_give_the_same_rows, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_huge_rows, set_up, tear_down),
        cmocka_unit_test(test_real_alpaca),
        cmocka_unit_test(test_real_files_open),
    };
    data_folder = getenv("BALLAST_TEST_DATA");
    return cmocka_run_group_tests(tests, NULL, NULL);
}
