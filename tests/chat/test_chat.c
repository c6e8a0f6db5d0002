/* SPDX-License-Identifier: Apache-2.0 */
/* Chat templates and the rows that use them, against what transformers makes of the same
 * conversations (chat_golden.json). It is longer than 600 lines for its table of templates that are
 * refused. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "chat/template.h"
#include "data/dataset.h"
#include "skip.h"

enum { M = BL_LABEL_MASKED };

#define CHATML "recipes/templates/chatml.yaml"

static const char *data_folder;
static json_t *golden;
static char folder[64];
static bl_tokenizer *chat_tokenizer, *spm_tokenizer;

static int set_up(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ballast-chat-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    if (bl_tokenizer_load("tests/tokenizer/fixtures/chat.json", &chat_tokenizer) != BL_OK)
        return -1;
    if (bl_tokenizer_load("tests/tokenizer/fixtures/chat_spm.json", &spm_tokenizer) != BL_OK)
        return -1;
    return bl_json_load("tests/chat/chat_golden.json", 1 << 26, &golden) == BL_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    json_decref(golden);
    bl_tokenizer_destroy(chat_tokenizer);
    bl_tokenizer_destroy(spm_tokenizer);
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

static const char *in_folder(const char *name)
{
    static char path[4][160];
    static int turn;
    turn = (turn + 1) % 4;
    snprintf(path[turn], sizeof path[turn], "%s/%s", folder, name);
    return path[turn];
}

static const char *write_file(const char *name, const char *text)
{
    const char *path = in_folder(name);
    assert_int_equal(bl_file_write_atomic(path, text, strlen(text)), BL_OK);
    return path;
}

static const char *get(const json_t *object, const char *key)
{
    return json_string_value(json_object_get(object, key));
}

static const char *template_name(const json_t *entry)
{
    const char *name = get(entry, "template");
    return strcmp(name, "chatml") ? name : CHATML;
}

static bl_chat_template *load(const char *name, const char *date, const bl_tokenizer *tokenizer)
{
    bl_chat_template *chat;
    if (bl_chat_template_load(name, date, tokenizer, &chat) != BL_OK)
        fail_msg("%s", bl_error_text());
    return chat;
}

/* ---- golden ---- */

static size_t read_messages(const json_t *list, bl_chat_message *out, size_t max)
{
    size_t i;
    const json_t *value;
    assert_true(json_array_size(list) <= max);
    json_array_foreach((json_t *)list, i, value)
    {
        const char *role = get(value, "role");
        out[i].role = !strcmp(role, "system") ? BL_CHAT_SYSTEM
                      : !strcmp(role, "user") ? BL_CHAT_USER
                                              : BL_CHAT_ASSISTANT;
        out[i].content = get(value, "content");
    }
    return json_array_size(list);
}

static void check_list(const json_t *expected, const int32_t *got, size_t n, const char *what,
                       size_t number)
{
    assert_int_equal(n, json_array_size(expected));
    for (size_t i = 0; i < n; i++) {
        int64_t want = json_integer_value(json_array_get(expected, i));
        if (got[i] != want)
            fail_msg("case %zu: %s[%zu] is %d, expected %d", number, what, i, (int)got[i],
                     (int)want);
    }
}

/* What precedes the last answer in training is what a model is given to answer. */
static bool check_prompt(const bl_chat_template *chat, const json_t *entry,
                         const bl_chat_message *messages, size_t n, size_t number)
{
    const json_t *labels = json_object_get(entry, "labels");
    size_t begin = json_array_size(labels);
    bl_ids ids = {0};

    if (n < 2 || messages[n - 1].role != BL_CHAT_ASSISTANT || messages[n - 2].role != BL_CHAT_USER)
        return false;
    while (json_integer_value(json_array_get(labels, begin - 1)) == M) begin--;
    while (json_integer_value(json_array_get(labels, begin - 1)) != M) begin--;
    if (bl_chat_template_encode_prompt(chat, messages, n - 1, &ids) != BL_OK)
        fail_msg("case %zu: %s", number, bl_error_text());
    json_t *expected = json_array();
    for (size_t i = 0; i < begin; i++)
        json_array_append(expected, json_array_get(json_object_get(entry, "ids"), i));
    check_list(expected, ids.id, ids.n, "prompt", number);
    json_decref(expected);
    bl_ids_free(&ids);
    assert_int_equal(bl_chat_template_encode_prompt(chat, messages, n, &ids), BL_EINPUT);
    return bl_chat_template_end(chat) >= 0;
}

static void test_handmade_conversations(void **state)
{
    size_t n_prompts = 0;
    size_t number;
    const json_t *entry;
    (void)state;
    json_array_foreach(json_object_get(golden, "cases"), number, entry)
    {
        const bl_tokenizer *tokenizer =
            strcmp(get(entry, "tokenizer"), "chat") ? spm_tokenizer : chat_tokenizer;
        bl_chat_template *chat = load(template_name(entry), get(entry, "date"), tokenizer);
        bl_chat_message messages[8];
        size_t n = read_messages(json_object_get(entry, "messages"), messages, 8);
        for (int all = 0; all < 2; all++) {
            bl_ids ids = {0}, labels = {0};
            if (bl_chat_template_encode(chat, messages, n, all, &ids, &labels) != BL_OK)
                fail_msg("case %zu: %s", number, bl_error_text());
            check_list(json_object_get(entry, "ids"), ids.id, ids.n, "ids", number);
            check_list(json_object_get(entry, all ? "ids" : "labels"), labels.id, labels.n,
                       "labels", number);
            bl_ids_free(&ids);
            bl_ids_free(&labels);
        }
        n_prompts += check_prompt(chat, entry, messages, n, number);
        bl_chat_template_destroy(chat);
    }
    assert_true(number > 60 && n_prompts > 30);
}

static uint64_t fnv1a(const int32_t *values, int64_t n, uint64_t hash)
{
    for (int64_t i = 0; i < n; i++)
        for (int shift = 0; shift < 32; shift += 8)
            hash = (hash ^ (((uint32_t)values[i] >> shift) & 0xff)) * 0x100000001b3u;
    return hash;
}

/* `blocks` holds a hash of the counts, ids and labels of block_rows rows each. */
static void check_blocks(const bl_dataset *dataset, const json_t *blocks, int64_t block_rows,
                         const char *what)
{
    for (size_t b = 0; b < json_array_size(blocks); b++) {
        uint64_t hash = 0xcbf29ce484222325u;
        int64_t end = bl_min_i64((int64_t)(b + 1) * block_rows, bl_dataset_count(dataset));
        for (int64_t i = (int64_t)b * block_rows; i < end; i++) {
            bl_sample sample;
            assert_int_equal(bl_dataset_get(dataset, i, &sample), BL_OK);
            int32_t n = (int32_t)sample.n_tokens;
            hash = fnv1a(sample.labels, n, fnv1a(sample.ids, n, fnv1a(&n, 1, hash)));
            bl_sample_free(&sample);
        }
        char text[20];
        snprintf(text, sizeof text, "%016llx", (unsigned long long)hash);
        if (strcmp(text, json_string_value(json_array_get(blocks, b))))
            fail_msg("%s: rows from %zu on differ", what, b * (size_t)block_rows);
    }
}

static void test_real_data_sets(void **state)
{
    size_t i;
    const json_t *entry;
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data_folder);
    json_array_foreach(json_object_get(golden, "files"), i, entry)
    {
        char tokenizer_path[256], path[256], what[600];
        bl_tokenizer *tokenizer;
        bl_dataset *dataset;
        snprintf(tokenizer_path, sizeof tokenizer_path, "%s/%s", data_folder,
                 get(entry, "tokenizer"));
        snprintf(path, sizeof path, "%s/datasets/%s", data_folder, get(entry, "data"));
        snprintf(what, sizeof what, "%s, %s", path, get(entry, "template"));
        assert_int_equal(bl_tokenizer_load(tokenizer_path, &tokenizer), BL_OK);
        bl_dataset_options options = bl_dataset_default_options(path);
        options.chat_template = template_name(entry);
        options.template_date = get(entry, "date");
        if (bl_dataset_open(&options, tokenizer, &dataset) != BL_OK)
            fail_msg("%s: %s", what, bl_error_text());
        assert_int_equal(bl_dataset_format(dataset), BL_DATA_MESSAGES);
        assert_int_equal(bl_dataset_count(dataset),
                         json_integer_value(json_object_get(entry, "rows")));
        check_blocks(dataset, json_object_get(entry, "blocks"),
                     json_integer_value(json_object_get(golden, "block_rows")), what);
        bl_dataset_close(dataset);
        bl_tokenizer_destroy(tokenizer);
    }
}

/* ---- which template ---- */

/* The fixture in a folder of its own, beside a tokenizer_config.json. */
static bl_tokenizer *with_config(const char *fixture, const char *config)
{
    bl_tokenizer *tokenizer;
    void *bytes;
    size_t n;
    assert_int_equal(bl_file_read_all(fixture, 1 << 20, &bytes, &n), BL_OK);
    assert_int_equal(bl_file_write_atomic(in_folder("tokenizer.json"), bytes, n), BL_OK);
    free(bytes);
    write_file("tokenizer_config.json", config);
    if (bl_tokenizer_load(folder, &tokenizer) != BL_OK) fail_msg("%s", bl_error_text());
    return tokenizer;
}

static void check_recognized(const char *fixture, const char *jinja, const char *name)
{
    bl_chat_template *chat;
    json_t *config = json_object();
    if (jinja) json_object_set_new(config, "chat_template", json_string(jinja));
    char *text = json_dumps(config, 0);
    bl_tokenizer *tokenizer = with_config(fixture, text);
    bl_status st = bl_chat_template_load(NULL, NULL, tokenizer, &chat);
    if (name) {
        if (st != BL_OK) fail_msg("%s", bl_error_text());
        assert_string_equal(bl_chat_template_name(chat), name);
        assert_true(bl_chat_template_was_recognized(chat));
    } else {
        assert_int_equal(st, BL_EUSAGE);
        assert_non_null(strstr(bl_error_text(), "give llama2, llama3"));
        assert_null(chat);
    }
    bl_chat_template_destroy(chat);
    bl_tokenizer_destroy(tokenizer);
    json_decref(config);
    free(text);
}

#define FIXTURE     "tests/tokenizer/fixtures/chat.json"
#define SPM_FIXTURE "tests/tokenizer/fixtures/chat_spm.json"
#define MESSAGE3                                                                                   \
    "'<|start_header_id|>' + message['role'] + '<|end_header_id|>\\n\\n'+ message['content'] | "   \
    "trim + "                                                                                      \
    "'<|eot_id|>'"
#define SYSTEM2 "{% set system_message = messages[0]['content'] %}"
#define MESSAGE2                                                                                   \
    "{% set content = '<<SYS>>\\n' + system_message + '\\n<</SYS>>\\n\\n' + message['content'] %}" \
    "{{ bos_token + '[INST] ' + content.strip() + ' [/INST]' }}{{ ' '  + content.strip() + ' ' + " \
    "eos_token "                                                                                   \
    "}}"

static void test_recognition(void **state)
{
    (void)state;
    check_recognized(FIXTURE, "{% for message in messages %}{{ " MESSAGE3 " }}{% endfor %}",
                     "llama3");
    check_recognized(
        FIXTURE, "{% for message in messages %}{{ 'You are kind' }}{{ " MESSAGE3 " }}{% endfor %}",
        NULL);
    check_recognized(FIXTURE, "{{ 'Cutting Knowledge Date: May 2024' }}{{ " MESSAGE3 " }}", NULL);
    check_recognized(FIXTURE, "{{ '<|im_start|>' + message['role'] }}", NULL);
    check_recognized(FIXTURE, NULL, NULL); /* headers of both Llama 3 and ChatML */
    check_recognized(SPM_FIXTURE, SYSTEM2 MESSAGE2, "llama2");
    check_recognized(SPM_FIXTURE,
                     "{% set system_message = messages[0]['content'] | trim %}" MESSAGE2, NULL);
    check_recognized(SPM_FIXTURE, SYSTEM2 MESSAGE2 "{{ 'You are' }}", NULL);
    check_recognized(SPM_FIXTURE, NULL, NULL);
    bl_tokenizer *tokenizer = with_config(
        SPM_FIXTURE, "{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"a\"},{\"name\":"
                     "\"default\",\"template\":\"b\"}]}");
    assert_string_equal(bl_tokenizer_chat_template(tokenizer), "b");
    bl_tokenizer_destroy(tokenizer);
    write_file("chat_template.jinja", "c");
    tokenizer = with_config(SPM_FIXTURE, "{\"chat_template\":\"b\"}");
    assert_string_equal(bl_tokenizer_chat_template(tokenizer), "c");
    bl_tokenizer_destroy(tokenizer);
    assert_int_equal(bl_tree_remove(in_folder("chat_template.jinja")), BL_OK);
}

static void test_recognition_of_real_texts(void **state)
{
    static const char *const files[][2] = {{"3.1-8B", "llama3.1"}, {"3.2-3B", "llama3.2"}};
    bl_tokenizer *tokenizer;
    char path[256];
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data_folder);
    for (size_t i = 0; i < BL_COUNT(files); i++) {
        void *bytes;
        size_t n;
        snprintf(path, sizeof path, "%s/suites/chat-templates/meta-llama-Llama-%s-Instruct.jinja",
                 data_folder, files[i][0]);
        assert_int_equal(bl_file_read_all(path, 1 << 20, &bytes, &n), BL_OK);
        check_recognized(FIXTURE, bytes, files[i][1]);
        free(bytes);
    }
    snprintf(path, sizeof path, "%s/tokenizers/llama3",
             data_folder); /* no configuration beside it: by its tokens */
    assert_int_equal(bl_tokenizer_load(path, &tokenizer), BL_OK);
    bl_chat_template *chat = load(NULL, NULL, tokenizer);
    assert_string_equal(bl_chat_template_name(chat), "llama3.1");
    bl_chat_template_destroy(chat);
    bl_tokenizer_destroy(tokenizer);
}

static void check_load_fails(const char *name, const char *date, const bl_tokenizer *tokenizer,
                             const char *reason)
{
    bl_chat_template *chat;
    assert_int_equal(bl_chat_template_load(name, date, tokenizer, &chat), BL_EUSAGE);
    assert_null(chat);
    if (!strstr(bl_error_text(), reason))
        fail_msg("\"%s\" does not say \"%s\"", bl_error_text(), reason);
}

static void test_templates_that_do_not_fit(void **state)
{
    static const char *const bad_dates[] = {
        "2024-07-26", "26 jul 2024",  "6 Jul 2024", "32 Jul 2024", "26 Anf 2024",
        "26 Jul 24",  "26 Jul 2024 ", "",           "00 Jul 2024"};
    (void)state;
    check_load_fails("llama4", NULL, chat_tokenizer,
                     "chat_template llama4: no such file; expected llama2, ");
    check_load_fails("llama3.1", NULL, spm_tokenizer, "<|begin_of_text|> is not a special token");
    check_load_fails("llama2", NULL, chat_tokenizer, "no special token </s>");
    check_load_fails("llama3", "26 Jul 2024", chat_tokenizer, "llama3 writes no date");
    for (size_t i = 0; i < BL_COUNT(bad_dates); i++)
        check_load_fails("llama3.2", bad_dates[i], chat_tokenizer, "such as 26 Jul 2024");
    bl_chat_template *a = load("llama3.1", NULL, chat_tokenizer),
                     *b = load("llama3.2", "26 Jul 2024", chat_tokenizer),
                     *c = load("llama3.2", "27 Jul 2024", chat_tokenizer);
    assert_true(bl_chat_template_hash(a) ==
                bl_chat_template_hash(b)); /* what they write is the same */
    assert_true(bl_chat_template_hash(a) != bl_chat_template_hash(c));
    bl_chat_template_destroy(a);
    bl_chat_template_destroy(b);
    bl_chat_template_destroy(c);
}

/* ---- template files ---- */

#define ROLES "roles: {user: {prefix: 'U '}, assistant: {prefix: 'A', suffix: '<|eot_id|>!'}}\n"

static void test_template_files(void **state)
{
    static const bl_chat_message messages[] = {{BL_CHAT_USER, " h"}, {BL_CHAT_ASSISTANT, "e "}};
    static const struct {
        const char *text;
        int n_learned; /* of: e, blank, <|eot_id|>, ! */
    } files[] = {{ROLES "end_token: <|eot_id|>\n", 3},
                 {ROLES "end_token: <|eot_id|>\ntrain_suffix: true\n", 4},
                 {ROLES "train_suffix: true\n", 4},
                 {ROLES "train_suffix: false\n", 2},
                 {ROLES "end_token: <|eot_id|>\ntrim: true\n", 2},
                 {"{\"roles\": {\"user\": {\"prefix\": \"U \"}, \"assistant\": {\"prefix\": \"A\", "
                  "\"suffix\": \"<|eot_id|>\\u0021\"}},\n"
                  "\"end_token\": \"<|eot_id|>\", \"begin\": \"<|begin_of_text|>\"}",
                  3}};
    uint64_t hashes[BL_COUNT(files)];
    (void)state;
    for (size_t i = 0; i < BL_COUNT(files); i++) {
        bl_chat_template *chat = load(write_file("t.yaml", files[i].text), NULL, chat_tokenizer);
        bl_ids ids = {0}, labels = {0};
        int n_learned = 0;
        char *text;
        assert_int_equal(bl_chat_template_encode(chat, messages, 2, false, &ids, &labels), BL_OK);
        for (size_t t = 0; t < labels.n; t++) n_learned += labels.id[t] != M;
        assert_int_equal(n_learned, files[i].n_learned);
        assert_int_equal(bl_tokenizer_decode(chat_tokenizer, ids.id, ids.n, false, &text, NULL),
                         BL_OK);
        assert_string_equal(text, i == 5   ? "<|begin_of_text|>U  hAe <|eot_id|>!"
                                  : i == 4 ? "U hAe<|eot_id|>!"
                                           : "U  hAe <|eot_id|>!");
        hashes[i] = bl_chat_template_hash(chat);
        for (size_t k = 0; k < i; k++) assert_true(hashes[k] != hashes[i] || (k == 1 && i == 2));
        free(text);
        bl_ids_free(&ids);
        bl_ids_free(&labels);
        bl_chat_template_destroy(chat);
    }
}

static void test_bad_template_files(void **state)
{
    static const char *const files[][2] = {
        {"", "no template in it"},
        {"- a\n", ":1: the template: expected keys"},
        {"rols: 3\n", ":1: rols: unknown key of the template; did you mean roles"},
        {"trim: true\n", "roles: missing"},
        {"roles: {user: {}}\nend_token: a\n", ":1: roles: expected user and assistant"},
        {"roles: {user: {}, assistant: {}, tool: {}}\n", "tool: unknown key of roles"},
        {"roles: {user: {}, user: {}}\n", "user: given twice"},
        {"roles: {user: {prefix: [1]}, assistant: {}}\n", ":1: prefix: expected a text"},
        {"roles:\n  user: {prefix: '<|foo|>'}\n  assistant: {}\n",
         ":2: prefix: <|foo|> is not a special token"},
        {ROLES, "end_token: missing"},
        {ROLES "end_token: eot\n", ":2: end_token: expected one special token"},
        {ROLES "end_token: <|im_end|>\n",
         ":2: end_token: the assistant's suffix must begin with it"},
        {ROLES "train_suffix: maybe\n", ":2: train_suffix: expected true or false"},
        {ROLES "\ttrain_suffix: {\n", ":2: "},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(files); i++)
        check_load_fails(write_file("t.yaml", files[i][0]), NULL, chat_tokenizer, files[i][1]);
}

/* ---- rows ---- */

static bl_status open_rows(const char *rows, const bl_dataset_options *base,
                           const bl_tokenizer *tokenizer, bl_dataset **out)
{
    bl_dataset_options options = *base;
    options.path = write_file("rows.jsonl", rows);
    return bl_dataset_open(&options, tokenizer, out);
}

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
         ":2: message 0: key content: expected a string", NULL},
        {ROW("[{\"content\":\"a\"}]"), ":2: message 0: key role: missing", NULL},
        {ROW("[{\"role\":\"assistant\",\"content\":\"a\",\"tool_calls\":[{}]}]"),
         ":2: message 0: key tool_calls: tool calls are not", NULL},
        {ROW("[{\"role\":\"assistant\",\"content\":\"a\",\"weight\":0}]"),
         "key weight: weights of messages", NULL},
        {"{\"messages\":[],\"tools\":[{}]}\n", ":1: key tools: tool calls are not supported", NULL},
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
        {"{\"conversations\":[{\"from\":\"bot\",\"value\":\"a\"}]}",
         "unknown role bot; expected system, human or gpt", NULL},
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
    assert_int_equal(bl_chat_template_encode(
                         chat, (bl_chat_message[]){{BL_CHAT_SYSTEM, "a"}, {BL_CHAT_USER, "a"}}, 2,
                         false, &none, &none),
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
    assert_int_equal(open_rows(ROW("[]"), &options, chat_tokenizer, &dataset), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), ":1: nothing to learn from"));

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
        cmocka_unit_test(test_handmade_conversations),
        cmocka_unit_test(test_real_data_sets),
        cmocka_unit_test(test_recognition),
        cmocka_unit_test(test_recognition_of_real_texts),
        cmocka_unit_test(test_templates_that_do_not_fit),
        cmocka_unit_test(test_template_files),
        cmocka_unit_test(test_bad_template_files),
        cmocka_unit_test(test_bad_rows),
        cmocka_unit_test(test_sharegpt_is_messages_spelled_otherwise),
        cmocka_unit_test(test_options_of_chat_rows),
    };
    data_folder = getenv("BALLAST_TEST_DATA");
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
