/* SPDX-License-Identifier: Apache-2.0 */
/* Chat templates and the rows that use them, against what transformers makes of the same
 * conversations (chat_golden.json). */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "chat_case.h"
#include "data/dataset.h"
#include "skip.h"

enum { M = BL_LABEL_MASKED };

#define CHATML "recipes/templates/chatml.yaml"

static const char *data_folder;
static json_t *golden;
static int load_golden(void **state)
{
    if (set_up(state) != 0) return -1;
    return bl_json_load("tests/chat/chat_golden.json", 1 << 26, &golden) == BL_OK ? 0 : -1;
}

static int free_golden(void **state)
{
    json_decref(golden);
    return tear_down(state);
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

static size_t read_messages(const json_t *list, bl_chat_message *out, size_t max)
{
    size_t i;
    const json_t *value;
    assert_true(json_array_size(list) <= max);
    json_array_foreach((json_t *)list, i, value)
    {
        const char *role = get(value, "role");
        out[i] = (bl_chat_message){.role = !strcmp(role, "system") ? BL_CHAT_SYSTEM
                                           : !strcmp(role, "user") ? BL_CHAT_USER
                                                                   : BL_CHAT_ASSISTANT,
                                   .content = get(value, "content")};
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

/* The tokens before the last answer in training are the prompt in generation. */
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
    if (bl_chat_template_encode_prompt(chat, messages, n - 1, NULL, &ids) != BL_OK)
        fail_msg("case %zu: %s", number, bl_error_text());
    json_t *expected = json_array();
    for (size_t i = 0; i < begin; i++)
        json_array_append(expected, json_array_get(json_object_get(entry, "ids"), i));
    check_list(expected, ids.id, ids.n, "prompt", number);
    json_decref(expected);
    bl_ids_free(&ids);
    assert_int_equal(bl_chat_template_encode_prompt(chat, messages, n, NULL, &ids), BL_EINPUT);
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
            if (bl_chat_template_encode(chat, messages, n, NULL, all, &ids, &labels) != BL_OK)
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

/* ChatML as a jinja text gives the ids and labels that ChatML as prefixes and suffixes gives, also
 * where a message spells a special token. */
static void test_jinja_text(void **state)
{
    static const char text[] =
        "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + "
        "message['content'] + '<|im_end|>' + '\\n'}}{% endfor %}{% if add_generation_prompt %}"
        "{{ '<|im_start|>assistant\\n' }}{% endif %}";
    const char *path = write_file("chatml.jinja", text);
    size_t number, n_cases = 0;
    const json_t *entry;
    (void)state;

    json_array_foreach(json_object_get(golden, "cases"), number, entry)
    {
        if (strcmp(get(entry, "template"), "chatml")) continue;
        bl_chat_template *chat = load(path, NULL, chat_tokenizer);
        bl_chat_message messages[8];
        bl_ids ids = {0}, labels = {0};
        size_t n = read_messages(json_object_get(entry, "messages"), messages, 8);
        assert_true(bl_chat_template_takes_objects(chat));
        if (bl_chat_template_encode(chat, messages, n, NULL, false, &ids, &labels) != BL_OK)
            fail_msg("case %zu: %s", number, bl_error_text());
        check_list(json_object_get(entry, "ids"), ids.id, ids.n, "ids", number);
        check_list(json_object_get(entry, "labels"), labels.id, labels.n, "labels", number);
        check_prompt(chat, entry, messages, n, number);
        assert_int_equal(bl_chat_template_end(chat),
                         bl_tokenizer_token_to_id(chat_tokenizer, "<|im_end|>"));
        n_cases++;
        bl_ids_free(&ids);
        bl_ids_free(&labels);
        bl_chat_template_destroy(chat);
    }
    assert_true(n_cases > 10);
}

/* Encodes a conversation of user, assistant, user, assistant; *text receives the trained text. */
static bl_status learn(const char *jinja, bool masks_first, char **text)
{
    const bl_chat_message messages[] = {
        {.role = BL_CHAT_USER, .content = "ab"},
        {.role = BL_CHAT_ASSISTANT, .content = "cd", .is_masked = masks_first},
        {.role = BL_CHAT_USER, .content = "ef"},
        {.role = BL_CHAT_ASSISTANT, .content = "gh"}};
    bl_chat_template *chat = load(write_file("own.jinja", jinja), NULL, chat_tokenizer);
    bl_ids ids = {0}, labels = {0}, learned = {0};

    bl_status st = bl_chat_template_encode(chat, messages, 4, NULL, false, &ids, &labels);
    for (size_t i = 0; st == BL_OK && i < labels.n; i++)
        if (labels.id[i] != M) assert_int_equal(bl_ids_push(&learned, labels.id[i]), BL_OK);
    if (st == BL_OK)
        st = bl_tokenizer_decode(chat_tokenizer, learned.id, learned.n, false, text, NULL);
    bl_ids_free(&ids);
    bl_ids_free(&labels);
    bl_ids_free(&learned);
    bl_chat_template_destroy(chat);
    return st;
}

#define EACH(answer)                                                                               \
    "{% for m in messages %}{% if m.role == 'user' %}U{{ m.content }}\n{% else %}A" answer         \
    "{% endif %}{% endfor %}{% if add_generation_prompt %}A{% endif %}"

/* With a special token behind every conversation, as Phi-3.5 writes it; it may begin as the token
 * that follows otherwise. */
#define CLOSED(closing)                                                                            \
    "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>\n{% endfor %}"                   \
    "{% if add_generation_prompt %}<|im_start|>{% else %}" closing "{% endif %}"

static void test_learned_parts(void **state)
{
    static const struct {
        const char *jinja, *learned;
        bool masks_first;
    } cases[] = {
        {EACH("{{ m.content }}<|im_end|>\n"), "cd<|im_end|>gh<|im_end|>", false},
        {EACH("{{ m.content }}<|im_end|>\n"), "gh<|im_end|>", true},
        {EACH("{{ m.content }}!\n"), "cd!\ngh!", false}, /* the text's last newline is dropped */
        {CLOSED("<|eot_id|>"), "cd<|im_end|>gh<|im_end|>\n<|eot_id|>", false},
        {CLOSED("<|eot_id|>\n"), "gh<|im_end|>\n<|eot_id|>", true},
        {EACH("<t>{{ m.content }}<|im_end|>"), "<t>cd<|im_end|><t>gh<|im_end|>", false},
        {EACH("<t>{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"), "cdgh", false},
        {EACH("<t>{% generation %}{{ m.content }}{% endgeneration %}<|im_end|>"), "gh", true}};
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char *text = NULL;
        if (learn(cases[i].jinja, cases[i].masks_first, &text) != BL_OK)
            fail_msg("case %zu: %s", i, bl_error_text());
        if (strncmp(text, cases[i].learned, strlen(cases[i].learned)))
            fail_msg("case %zu: %s, expected %s", i, text, cases[i].learned);
        free(text);
    }
}

/* A template that writes an earlier answer otherwise than the last one. */
static void test_broken_prefixes(void **state)
{
    char *text;
    (void)state;

    assert_int_equal(
        learn(EACH("{% if loop.last %}<t>{% endif %}{{ m.content }}<|im_end|>"), false, &text),
        BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "message 1: chat template "));
    assert_non_null(strstr(bl_error_text(), "{% generation %} around answers"));
    assert_int_equal(learn(CLOSED("bye"), false, &text), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "message 1: chat template "));
    assert_int_equal(learn("{{ raise_exception('no ' ~ messages[0].content) }}", false, &text),
                     BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "own.jinja:1: no ab"));
}

/* A special token that a message spells stays text, also where Python would escape the mark inside
 * of it: in ASCII JSON and in repr(). */
static void test_marked_text(void **state)
{
    static const char *const cases[][2] = {
        {"{{ m.content | tojson(ensure_ascii=true) }}", "\"a<|eot_id|>\\u00e9\""},
        {"{{ m.content | tojson }}", "\"a<|eot_id|>\xC3\xA9\""},
        {"{{ [m.content] }}", "['a<|eot_id|>\xC3\xA9']"}};
    const bl_chat_message message = {.role = BL_CHAT_USER, .content = "a<|eot_id|>\xC3\xA9"};
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char jinja[200], *text;
        bl_ids ids = {0};
        snprintf(jinja, sizeof jinja, "{%% set m = messages[0] %%}%s", cases[i][0]);
        bl_chat_template *chat = load(write_file("own.jinja", jinja), NULL, chat_tokenizer);
        assert_int_equal(bl_chat_template_encode_prompt(chat, &message, 1, NULL, &ids), BL_OK);
        for (size_t t = 0; t < ids.n; t++)
            assert_false(bl_tokenizer_is_special(chat_tokenizer, ids.id[t]));
        assert_int_equal(bl_tokenizer_decode(chat_tokenizer, ids.id, ids.n, false, &text, NULL),
                         BL_OK);
        assert_string_equal(text, cases[i][1]);
        free(text);
        bl_ids_free(&ids);
        bl_chat_template_destroy(chat);
    }
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_handmade_conversations),
        cmocka_unit_test(test_jinja_text),
        cmocka_unit_test(test_learned_parts),
        cmocka_unit_test(test_broken_prefixes),
        cmocka_unit_test(test_marked_text),
        cmocka_unit_test(test_real_data_sets),
    };
    data_folder = getenv("BALLAST_TEST_DATA");
    return cmocka_run_group_tests(tests, load_golden, free_golden);
}
