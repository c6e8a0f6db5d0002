/* SPDX-License-Identifier: Apache-2.0 */
/* Shapes of rows: each gives the sample of another row that is written in the plainest shape. */
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
    strcpy(folder, "/tmp/ballast-rows-XXXXXX");
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

/* With llama3 where the rows are conversations. */
static bl_status open_rows(const char *rows, bl_data_format format, const char *text_key,
                           bool is_chat, bl_dataset **out)
{
    bl_dataset_options options = bl_dataset_default_options(path);

    options.format = format;
    options.text_key = text_key;
    options.eos_id = 0;
    options.n_threads = 1;
    options.chat_template = is_chat ? "llama3" : NULL;
    assert_int_equal(bl_file_write_atomic(path, rows, strlen(rows)), BL_OK);
    return bl_dataset_open(&options, tokenizer, out);
}

static bl_sample sample_of(const char *row, bl_data_format format, const char *text_key,
                           bool is_chat)
{
    bl_dataset *dataset;
    bl_sample sample;

    if (open_rows(row, format, text_key, is_chat, &dataset) != BL_OK)
        fail_msg("%s: %s", row, bl_error_text());
    assert_int_equal(bl_dataset_get(dataset, 0, &sample), BL_OK);
    bl_dataset_close(dataset);
    return sample;
}

static void check_same(const bl_sample *a, const bl_sample *b, const char *row)
{
    size_t n_bytes = (size_t)a->n_tokens * sizeof *a->ids;

    if (a->n_tokens != b->n_tokens || memcmp(a->ids, b->ids, n_bytes) ||
        memcmp(a->labels, b->labels, n_bytes))
        fail_msg("another sample: %s", row);
}

#define M(role, text)  "{\"role\":\"" role "\",\"content\":\"" text "\"}"
#define S(from, text)  "{\"from\":\"" from "\",\"value\":\"" text "\"}"
#define PLAIN(turns)   "{\"messages\":[" turns "]}"
#define ONE_TURN       M("user", "ab") "," M("assistant", "cd")
#define SYSTEM_TURN    M("system", "s") "," ONE_TURN
#define TWO_TURNS      M("user", "x") "," M("assistant", "y") "," ONE_TURN
#define MASKED(weight) M("user", "x") ",{\"role\":\"assistant\",\"content\":\"y\"," weight "},"
#define FIRST_MASKED   PLAIN(MASKED("\"weight\":0") ONE_TURN)

static const struct {
    const char *row, *same_as;
    bl_data_format format;
    const char *text_key;
} equal[] = {
    /* content as parts */
    {PLAIN(
         M("user", "ab") ",{\"role\":\"assistant\",\"content\":[{\"type\":\"text\",\"text\":\"c\"},"
                         "{\"type\":\"text\",\"text\":\"d\",\"index\":null}]}"),
     PLAIN(ONE_TURN), BL_DATA_AUTO, NULL},
    /* lists and roles by other names */
    {"{\"conversations\":[" ONE_TURN "]}", PLAIN(ONE_TURN), BL_DATA_AUTO, NULL},
    {"{\"conversations\":[" S("human", "ab") "," S("gpt", "cd") "]}", PLAIN(ONE_TURN), BL_DATA_AUTO,
     NULL},
    {"{\"conversations\":[" S("user", "ab") "," S("bot", "cd") "]}", PLAIN(ONE_TURN),
     BL_DATA_MESSAGES, NULL},
    {PLAIN(M("developer", "s") "," M("user", "ab") "," M("model", "cd")), PLAIN(SYSTEM_TURN),
     BL_DATA_AUTO, NULL},
    /* TRL: the prompt's own answers carry no loss */
    {"{\"prompt\":[" M("user", "ab") "],\"completion\":[" M("assistant", "cd") "]}",
     PLAIN(ONE_TURN), BL_DATA_AUTO, NULL},
    {"{\"prompt\":[" M("user", "x") "," M("assistant", "y") "," M(
         "user", "ab") "],"
                       "\"completion\":[" M("assistant", "cd") "]}",
     FIRST_MASKED, BL_DATA_AUTO, NULL},
    /* loss by message */
    {PLAIN(MASKED("\"train\":false") ONE_TURN), FIRST_MASKED, BL_DATA_AUTO, NULL},
    {PLAIN(MASKED("\"loss\":0,\"train\":true") ONE_TURN), FIRST_MASKED, BL_DATA_AUTO, NULL},
    {PLAIN(MASKED("\"weight\":1.0") ONE_TURN), PLAIN(TWO_TURNS), BL_DATA_AUTO, NULL},
    {PLAIN(MASKED("\"weight\":null") ONE_TURN), PLAIN(TWO_TURNS), BL_DATA_AUTO, NULL},
    /* columns as a conversation */
    {"{\"instruction\":\"ab\",\"output\":\"cd\",\"system\":\"s\"}", PLAIN(SYSTEM_TURN),
     BL_DATA_MESSAGES, NULL},
    {"{\"instruction\":\"a\",\"input\":\"b\",\"output\":\"cd\",\"history\":[[\"x\",\"y\"]]}",
     PLAIN(M("user", "x") "," M("assistant", "y") "," M("user", "a\\nb") "," M("assistant", "cd")),
     BL_DATA_MESSAGES, NULL},
    {"{\"question\":\"ab\",\"answer\":\"cd\",\"system_prompt\":\"s\"}", PLAIN(SYSTEM_TURN),
     BL_DATA_MESSAGES, NULL},
    {"{\"prompt\":\"ab\",\"completion\":\"cd\"}", PLAIN(ONE_TURN), BL_DATA_MESSAGES, NULL},
    /* columns as texts */
    {"{\"question\":\"ab\",\"answer\":\"cd\"}", "{\"prompt\":\"ab\",\"completion\":\"cd\"}",
     BL_DATA_AUTO, NULL},
    {"{\"prompt\":\"ab\",\"response\":\"cd\"}", "{\"prompt\":\"ab\",\"completion\":\"cd\"}",
     BL_DATA_PROMPT_COMPLETION, NULL},
    {"{\"query\":\"ab\",\"response\":\"cd\"}", "{\"prompt\":\"ab\",\"completion\":\"cd\"}",
     BL_DATA_AUTO, NULL},
    {"{\"instruction\":\"ab\",\"context\":\"s\",\"response\":\"cd\",\"category\":\"qa\"}",
     "{\"instruction\":\"ab\",\"input\":\"s\",\"output\":\"cd\"}", BL_DATA_AUTO, NULL},
    {"{\"body\":\"ab\",\"instruction\":\"x\",\"output\":\"y\"}", "{\"text\":\"ab\"}", BL_DATA_AUTO,
     "body"},
    {"{\"body\":\"ab\",\"text\":\"x\"}", "{\"text\":\"ab\"}", BL_DATA_TEXT, "body"},
};

static void test_shapes_give_the_same_sample(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(equal); i++) {
        bool is_chat = strstr(equal[i].same_as, "messages") != NULL;
        bl_sample expected = sample_of(equal[i].same_as, BL_DATA_AUTO, NULL, is_chat);
        bl_sample got = sample_of(equal[i].row, equal[i].format, equal[i].text_key, is_chat);
        check_same(&got, &expected, equal[i].row);
        bl_sample_free(&expected);
        bl_sample_free(&got);
    }
}

static int64_t count_labels(const bl_sample *sample)
{
    int64_t n = 0;
    for (int64_t t = 0; t < sample->n_tokens; t++) n += sample->labels[t] != BL_LABEL_MASKED;
    return n;
}

/* Masking an answer changes its labels and no id. */
static void test_weight_0_masks_one_answer(void **state)
{
    bl_sample all = sample_of(PLAIN(TWO_TURNS), BL_DATA_AUTO, NULL, true);
    bl_sample masked = sample_of(FIRST_MASKED, BL_DATA_AUTO, NULL, true);
    bl_sample last = sample_of(PLAIN(ONE_TURN), BL_DATA_AUTO, NULL, true);

    (void)state;
    assert_int_equal(all.n_tokens, masked.n_tokens);
    assert_memory_equal(all.ids, masked.ids, (size_t)all.n_tokens * sizeof *all.ids);
    assert_int_equal(count_labels(&masked), count_labels(&last));
    assert_true(count_labels(&all) > count_labels(&masked));
    bl_sample_free(&all);
    bl_sample_free(&masked);
    bl_sample_free(&last);
}

static const struct {
    const char *rows;
    bl_data_format format;
    bool is_chat;
    const char *says;
} refused[] = {
    {PLAIN("{\"role\":\"user\",\"content\":[{\"type\":\"image_url\",\"image_url\":{}}]}"),
     BL_DATA_AUTO, true, ":1: message 0: part 0 of the content: type image_url: only text is"},
    {PLAIN("{\"role\":\"user\",\"content\":[\"a\"]}"), BL_DATA_AUTO, true,
     ":1: message 0: part 0 of the content: expected a JSON object"},
    {PLAIN(M("function", "a")), BL_DATA_AUTO, true, "message 0: role function: tool calls are not"},
    {"{\"text\":\"a\"}\n{\"prompt\":\"a\",\"completion\":\"b\"}\n", BL_DATA_AUTO, false,
     ":2: this row has the keys prompt, completion, the rows before it text: write all rows"},
    {PLAIN(ONE_TURN) "\n{\"conversations\":[" ONE_TURN "]}\n", BL_DATA_MESSAGES, true,
     ":2: this row has the keys conversations, the rows before it messages"},
    {"{\"question\":\"a\",\"answer\":\"b\"}\n{\"prompt\":\"a\",\"response\":\"b\"}\n",
     BL_DATA_PROMPT_COMPLETION, false, ":2: this row has the keys prompt, response"},
    {"{\"prompt\":[" M("user", "a") "],\"completion\":\"b\"}", BL_DATA_AUTO, false,
     ":1: key prompt: expected a string"},
    {"{\"instruction\":\"a\",\"output\":\"b\",\"history\":[[\"a\"]]}", BL_DATA_MESSAGES, true,
     ":1: history[0]: expected [question, answer]"},
    {"{\"prompt\":\"a\",\"completion\":\"b\",\"system\":\"s\",\"system_prompt\":\"t\"}",
     BL_DATA_MESSAGES, true, "keys system and system_prompt: give one"},
};

static void test_refusals(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(refused); i++) {
        bl_dataset *dataset;
        bl_status st =
            open_rows(refused[i].rows, refused[i].format, NULL, refused[i].is_chat, &dataset);
        if (st != BL_EINPUT || !strstr(bl_error_text(), refused[i].says))
            fail_msg("%s: status %d: %s", refused[i].rows, (int)st, bl_error_text());
    }
}

/* The first row that can be read decides, also where bad ones before it are skipped. */
static void test_shape_of_the_first_good_row(void **state)
{
    static const char rows[] = "oops\n{\"question\":\"ab\",\"answer\":\"cd\"}\n{\"text\":\"x\"}\n";
    bl_dataset_options options = bl_dataset_default_options(path);
    bl_dataset *dataset;

    (void)state;
    assert_int_equal(bl_file_write_atomic(path, rows, sizeof rows - 1), BL_OK);
    options.skip_bad = true;
    options.eos_id = 0;
    for (int f = 0; f < 2; f++) {
        options.format = f ? BL_DATA_PROMPT_COMPLETION : BL_DATA_AUTO;
        assert_int_equal(bl_dataset_open(&options, tokenizer, &dataset), BL_OK);
        assert_int_equal(bl_dataset_count(dataset), 1);
        bl_dataset_close(dataset);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shapes_give_the_same_sample),
        cmocka_unit_test(test_weight_0_masks_one_answer),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_shape_of_the_first_good_row),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
