/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of conversations: rejected rows, ShareGPT's spelling, the options of rows. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "chat_case.h"
#include "data/dataset.h"

static bl_status open_rows(const char *rows, const bl_dataset_options *base,
                           const bl_tokenizer *tokenizer, bl_dataset **out)
{
    bl_dataset_options options = *base;
    options.path = write_file("rows.jsonl", rows);
    return bl_dataset_open(&options, tokenizer, out);
}

/* A jinja template: messages are objects. */
#define WRITTEN                                                                                    \
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}{% if m.tool_calls %}call{% endif %}\n"   \
    "{% endfor %}{% if add_generation_prompt %}[assistant]{% endif %}"

static void test_bad_rows(void **state)
{
#define TURN(role, text) "{\"role\":\"" role "\",\"content\":" text "}"
#define ROW(list)                                                                                  \
    "{\"messages\":[" TURN("user", "\"a\"") "," TURN("assistant",                                  \
                                                     "\"a\"") "]}\n{\"messages\":" list "}\n"
    static const struct {
        const char *rows, *reason;
        const char *chat_template; /* NULL: llama3 */
    } bad[] = {
        {ROW("[]"), ":2: a conversation without a turn", NULL},
        {ROW("3"), ":2: key messages: expected", NULL},
        {ROW("[3]"), ":2: message 0: expected a JSON object", NULL},
        {ROW("[" TURN("system", "\"a\"") "]"), ":2: a conversation without a turn", NULL},
        {ROW("[" TURN("user", "\" \\n\"") "]"), ":2: message 0: an empty user turn", NULL},
        {ROW("[" TURN("user", "\"a\"") "," TURN("assistant", "\"\"") "]"),
         ":2: message 1: an empty assistant turn", NULL},
        {ROW("[" TURN("user", "\"a\"") "]"), ":2: nothing to learn from", NULL},
        {ROW("[" TURN("human", "\"a\"") "]"),
         ":2: message 0: unknown role human; expected system, user or assistant", NULL},
        {ROW("[" TURN("tool", "\"a\"") "]"),
         ":2: message 0: role tool: tool calls are not supported", NULL},
        {ROW("[" TURN("user", "null") "]"), ":2: message 0: key content", NULL},
        {ROW("[" TURN("user", "[{\"type\":\"text\"}]") "]"),
         ":2: message 0: part 0 of the content: key text: missing", NULL},
        {ROW("[{\"content\":\"a\"}]"), ":2: message 0: key role: missing", NULL},
        {ROW("[{\"role\":\"assistant\",\"content\":\"a\",\"tool_calls\":[{\"id\":1}]}]"),
         ":2: message 0: key tool_calls: expected null, got [{\"id\":1}]: tool calls are not",
         NULL},
        {ROW("[{\"role\":\"assistant\",\"content\":\"a\",\"weight\":0.5}]"),
         "key weight: expected true, false, 0 or 1", NULL},
        {"{\"messages\":[],\"tools\":[{\"a\":1}]}\n", ":1: key tools: expected null, got", NULL},
        {ROW("[" TURN("assistant", "\"a\"") "]"),
         ":2: message 0: assistant; chat template llama2 wants user there", "llama2"},
        {ROW("[" TURN("user", "\"a\"") "," TURN("user", "\"a\"") "]"),
         ":2: message 1: user; chat template llama2 wants assistant", "llama2"},
        {ROW("[" TURN("user", "\"a\"") "," TURN("system", "\"a\"") "]"),
         ":2: message 1: system; chat template llama2 wants assistant", "llama2"},
        {ROW("[" TURN("system", "\"a\"") "," TURN("assistant", "\"a\"") "]"),
         ":2: message 1: assistant; chat template llama2 wants user", "llama2"},
        {"{\"conversations\":[{\"from\":\"function_call\",\"value\":\"a\"}]}",
         "role function_call: tool calls", NULL},
        {"{\"conversations\":[{\"from\":\"narrator\",\"value\":\"a\"}]}",
         "unknown role narrator; expected system, human or gpt", NULL},
        {ROW("[" TURN("user", "\"a\"") "," TURN("assistant", "\"\"") "]"),
         ":2: message 1: an empty assistant turn", WRITTEN},
        {ROW("[" TURN("user", "[]") "," TURN("assistant", "\"a\"") "]"),
         ":2: message 0: an empty user turn", WRITTEN},
        {ROW("[" TURN("user",
                      "\"a\"") ",{\"role\":\"assistant\",\"content\":\"\\t\",\"tool_calls\":[]}]"),
         ":2: message 1: an empty assistant turn", WRITTEN},
        {ROW("[" TURN("user", "\"a\"") ",{\"role\":\"assistant\",\"content\":null,\"tool_calls\":[{"
                                       "}]}," TURN("tool", "\"\"") "," TURN("assistant",
                                                                            "\"\"") "]"),
         ":2: message 3: an empty assistant turn", WRITTEN},
        {"{\"conversations\":[{\"from\":\"system\",\"value\":\"a\"}],\"system\":\"b\"}",
         "give one of them", NULL},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(bad); i++) {
        bl_dataset *dataset;
        bl_dataset_options options = bl_dataset_default_options(NULL);
        options.chat_template = bad[i].chat_template ? bad[i].chat_template : "llama3";
        bl_status st = open_rows(bad[i].rows, &options,
                                 bad[i].chat_template ? spm_tokenizer : chat_tokenizer, &dataset);
        if (st != BL_EINPUT) fail_msg("case %zu: status %d: %s", i, (int)st, bl_error_text());
        if (!strstr(bl_error_text(), bad[i].reason))
            fail_msg("case %zu: \"%s\" does not say \"%s\"", i, bl_error_text(), bad[i].reason);
    }
    bl_chat_template *chat =
        load(write_file("t.yaml", ROLES "end_token: <|eot_id|>\n"), NULL, chat_tokenizer);
    bl_ids none = {0};
    assert_int_equal(
        bl_chat_template_encode(chat,
                                (bl_chat_message[]){{.role = BL_CHAT_SYSTEM, .content = "a"},
                                                    {.role = BL_CHAT_USER, .content = "a"}},
                                2, NULL, false, &none, &none),
        BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "has no role system"));
    bl_chat_template_destroy(chat);
}

static void test_sharegpt_is_messages_spelled_otherwise(void **state)
{
    static const char *const rows[][2] = {
        {"{\"conversations\":[{\"from\":\"human\",\"value\":\"hello\"},{\"from\":\"gpt\",\"value\":"
         "\"a\"}]}",
         "{\"messages\":[" TURN("user", "\"hello\"") "," TURN("assistant", "\"a\"") "]}"},
        {"{\"conversations\":[{\"from\":\"user\",\"value\":\"hello\",\"weight\":null},{\"from\":"
         "\"chatgpt\","
         "\"value\":\"a\"}],\"system\":\"be\",\"tools\":[]}",
         "{\"messages\":[" TURN("system", "\"be\"") "," TURN("user", "\"hello\"") "," TURN(
             "assistant", "\"a\"") "]}"},
        {"{\"conversations\":[{\"from\":\"system\",\"value\":\"be\"},{\"from\":\"human\",\"value\":"
         "\"hello\"}"
         ",{\"from\":\"assistant\",\"value\":\"a\"}],"
         "\"system\":\"\"}",
         "{\"messages\":[" TURN("system", "\"be\"") "," TURN("user", "\"hello\"") "," TURN(
             "assistant", "\"a\"") "]}"}};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(rows); i++) {
        bl_sample sample[2];
        for (int k = 0; k < 2; k++) {
            bl_dataset *dataset;
            bl_dataset_options options = bl_dataset_default_options(NULL);
            options.chat_template = "llama3";
            if (open_rows(rows[i][k], &options, chat_tokenizer, &dataset) != BL_OK)
                fail_msg("%s", bl_error_text());
            assert_int_equal(bl_dataset_format(dataset), k ? BL_DATA_MESSAGES : BL_DATA_SHAREGPT);
            assert_int_equal(bl_dataset_get(dataset, 0, &sample[k]), BL_OK);
            bl_dataset_close(dataset);
        }
        assert_int_equal(sample[0].n_tokens, sample[1].n_tokens);
        assert_memory_equal(sample[0].ids, sample[1].ids, (size_t)sample[0].n_tokens * 4);
        assert_memory_equal(sample[0].labels, sample[1].labels, (size_t)sample[0].n_tokens * 4);
        for (int k = 0; k < 2; k++) bl_sample_free(&sample[k]);
    }
}

static uint64_t fingerprint(const char *chat_template, const char *date)
{
    bl_dataset *dataset;
    bl_dataset_options options = bl_dataset_default_options(NULL);
    options.chat_template = chat_template;
    options.template_date = date;
    if (open_rows(ROW("[" TURN("user", "\"a\"") "," TURN("assistant", "\"a b c\"") "]"), &options,
                  chat_tokenizer, &dataset) != BL_OK)
        fail_msg("%s", bl_error_text());
    uint64_t value = bl_dataset_fingerprint(dataset);
    bl_dataset_close(dataset);
    return value;
}

static void test_options_of_chat_rows(void **state)
{
    bl_dataset *dataset;
    bl_dataset_stats stats;
    bl_dataset_options options = bl_dataset_default_options(NULL);
    (void)state;
    assert_true(fingerprint("llama3.1", NULL) == fingerprint("llama3.1", NULL));
    assert_true(fingerprint("llama3.1", NULL) != fingerprint("llama3", NULL));
    assert_true(fingerprint("llama3.1", NULL) != fingerprint("llama3.1", "27 Jul 2024"));

    options.chat_template =
        "llama3"; /* the first row has 24 tokens or fewer: the last two are "a" and <|eot_id|> */
    options.overlong = BL_OVERLONG_SKIP;
    options.max_seq_length = 24;
    assert_int_equal(
        open_rows(ROW("[" TURN("user", "\"a\"") "," TURN("assistant", "\"a b c\"") "]"), &options,
                  chat_tokenizer, &dataset),
        BL_OK);
    bl_dataset_get_stats(dataset, &stats);
    assert_int_equal(stats.n_tokens, bl_dataset_n_tokens(dataset, 0));
    assert_int_equal(bl_dataset_count(dataset), 1);
    assert_int_equal(stats.n_overlong, 1);
    assert_int_equal(stats.n_label_tokens, 2);
    options.max_seq_length =
        bl_dataset_n_tokens(dataset, 0) - 2; /* truncation takes all that is learned */
    bl_dataset_close(dataset);
    options.overlong = BL_OVERLONG_TRUNCATE;
    assert_int_equal(open_rows(ROW("[" TURN("user", "\"a\"") "," TURN("assistant", "\"a\"") "]"),
                               &options, chat_tokenizer, &dataset),
                     BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "2 learn nothing within max_seq_length"));

    options = bl_dataset_default_options(NULL);
    options.chat_template = "llama3";
    options.vocab_size = bl_tokenizer_token_to_id(chat_tokenizer, "<|eot_id|>") + 1;
    assert_int_equal(open_rows(ROW("[" TURN("user", "\"a\"") "," TURN("assistant", "\"a\"") "]"),
                               &options, chat_tokenizer, &dataset),
                     BL_OK);
    bl_dataset_close(dataset);
    options.vocab_size--;
    assert_int_equal(open_rows(ROW("[]"), &options, chat_tokenizer, &dataset), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(),
                           ":1: token <|eot_id|> has id 271, the model's vocabulary ends at 270"));

    options = bl_dataset_default_options(NULL);
    options.chat_template = "llama3";
    assert_int_equal(open_rows("{\"text\":\"a\"}", &options, chat_tokenizer, &dataset), BL_EUSAGE);
    assert_non_null(
        strstr(bl_error_text(), "chat_template and template_date are for messages and sharegpt"));
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_rows),
        cmocka_unit_test(test_sharegpt_is_messages_spelled_otherwise),
        cmocka_unit_test(test_options_of_chat_rows),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
