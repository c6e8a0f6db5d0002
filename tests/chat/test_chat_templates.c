/* SPDX-License-Identifier: Apache-2.0 */
/* The chat template of a tokenizer, template files, and rejections of both. */
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
#include "skip.h"

enum { M = BL_LABEL_MASKED };

static const char *data_folder;

static int n_warnings;
static char warning[1000]; /* the last */

void __wrap_bl_log_warning(const char *format, ...);
void __wrap_bl_log_warning(const char *format, ...)
{
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(warning, sizeof warning, format, arguments);
    va_end(arguments);
    n_warnings++;
}

/* ---- which template ---- */

/* The fixture in a new directory, with a tokenizer_config.json. */
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
        "the model's own");
    check_recognized(FIXTURE, "{{ 'Cutting Knowledge Date: May 2024' }}{{ " MESSAGE3 " }}",
                     "the model's own");
    check_recognized(FIXTURE, "{{ '<|im_start|>' + message['role'] }}", "the model's own");
    check_recognized(FIXTURE, NULL, NULL); /* headers of both Llama 3 and ChatML */
    check_recognized(SPM_FIXTURE, SYSTEM2 MESSAGE2, "llama2");
    check_recognized(SPM_FIXTURE,
                     "{% set system_message = messages[0]['content'] | trim %}" MESSAGE2,
                     "the model's own");
    check_recognized(SPM_FIXTURE, SYSTEM2 MESSAGE2 "{{ 'You are' }}", "the model's own");
    check_recognized(SPM_FIXTURE, NULL, NULL);
    bl_tokenizer *tokenizer = with_config(
        SPM_FIXTURE, "{\"chat_template\":[{\"name\":\"tool_use\",\"template\":\"a\"},{\"name\":"
                     "\"default\",\"template\":\"b\"}]}");
    assert_string_equal(bl_tokenizer_chat_template(tokenizer, "default"), "b");
    assert_string_equal(bl_tokenizer_chat_template(tokenizer, "tool_use"), "a");
    assert_null(bl_tokenizer_chat_template(tokenizer, "rag"));
    bl_tokenizer_destroy(tokenizer);
    write_file("chat_template.jinja", "c");
    tokenizer = with_config(SPM_FIXTURE, "{\"chat_template\":\"b\"}");
    assert_string_equal(bl_tokenizer_chat_template(tokenizer, "default"), "c");
    bl_tokenizer_destroy(tokenizer);
    assert_int_equal(bl_tree_remove(in_folder("chat_template.jinja")), BL_OK);
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

/* The template writes this for a message and these tools; NULL: none are given. */
static void check_written(const char *name, const bl_tokenizer *tokenizer, const char *tools,
                          const char *expected)
{
    const bl_chat_message message = {.role = BL_CHAT_USER, .content = "h"};
    bl_chat_template *chat = load(name, NULL, tokenizer);
    json_t *context = json_object();
    bl_ids ids = {0};
    char *text;

    if (tools) json_object_set_new(context, "tools", json_loads(tools, JSON_DECODE_ANY, NULL));
    if (bl_chat_template_encode_prompt(chat, &message, 1, context, &ids) != BL_OK)
        fail_msg("%s", bl_error_text());
    assert_int_equal(bl_tokenizer_decode(tokenizer, ids.id, ids.n, false, &text, NULL), BL_OK);
    if (strcmp(text, expected))
        fail_msg("%s, tools %s: %s, expected %s", name ? name : "its own", tools ? tools : "absent",
                 text, expected);
    free(text);
    bl_ids_free(&ids);
    json_decref(context);
    bl_chat_template_destroy(chat);
}

static uint64_t hash_of(const char *config)
{
    bl_tokenizer *tokenizer = with_config(FIXTURE, config);
    bl_chat_template *chat = load(NULL, NULL, tokenizer);
    uint64_t hash = bl_chat_template_hash(chat);
    bl_chat_template_destroy(chat);
    bl_tokenizer_destroy(tokenizer);
    return hash;
}

#define NAMED(name, text)                                                                          \
    "{\"name\":\"" name "\",\"template\":\"" text "{{ messages[0].content }}\"}"
#define LIST(entries) "{\"chat_template\":[" entries "]}"

/* The rule of transformers 5.24, PreTrainedTokenizerBase.get_chat_template and _from_pretrained. */
static void test_several_templates(void **state)
{
    (void)state;
    bl_tokenizer *tokenizer = with_config(
        FIXTURE, LIST(NAMED("default", "d") "," NAMED("rag", "r") "," NAMED("tool_use", "t")));
    check_written(NULL, tokenizer, NULL, "dh");
    check_written(NULL, tokenizer, "null", "dh");
    check_written(NULL, tokenizer, "[]", "th");
    check_written(NULL, tokenizer, "[{\"name\": \"f\"}]", "th");
    check_written("rag", tokenizer, "[]", "rh");
    check_written("default", tokenizer, "[]", "dh");
    check_written("{{ 'x' }}", tokenizer, "[]", "x");
    bl_tokenizer_destroy(tokenizer);
    tokenizer = with_config(FIXTURE, LIST(NAMED("rag", "r") "," NAMED("tool_use", "t")));
    check_load_fails(NULL, NULL, tokenizer, "no default; give the name of one: rag, tool_use");
    check_written("tool_use", tokenizer, NULL, "th");
    bl_tokenizer_destroy(tokenizer);
    assert_true(hash_of(LIST(NAMED("default", "d") "," NAMED("tool_use", "t"))) !=
                hash_of(LIST(NAMED("default", "d") "," NAMED("tool_use", "u"))));
    /* Files come before the list as a whole. */
    write_file("chat_template.jinja", "f{{ messages[0].content }}");
    tokenizer = with_config(FIXTURE, LIST(NAMED("tool_use", "t")));
    check_written(NULL, tokenizer, "[]", "fh");
    bl_tokenizer_destroy(tokenizer);
    assert_int_equal(bl_dir_create(in_folder("additional_chat_templates")), BL_OK);
    write_file("additional_chat_templates/tool_use.jinja", "a{{ messages[0].content }}");
    write_file("additional_chat_templates/notes.txt", "{{");
    tokenizer = with_config(FIXTURE, LIST(NAMED("rag", "r")));
    check_written(NULL, tokenizer, "[]", "ah");
    check_written(NULL, tokenizer, NULL, "fh");
    assert_null(bl_tokenizer_chat_template(tokenizer, "rag"));
    bl_tokenizer_destroy(tokenizer);
    assert_int_equal(bl_tree_remove(in_folder("chat_template.jinja")), BL_OK);
    assert_int_equal(bl_tree_remove(in_folder("additional_chat_templates")), BL_OK);
}

/* A jinja text in place of a name is the template, as its file is. */
static void test_text_given(void **state)
{
    static const char text[] = "{% for m in messages %}{{ m.role }}: {{ m.content }}{% endfor %}";
    (void)state;
    bl_chat_template *given = load(text, NULL, chat_tokenizer),
                     *file = load(write_file("t.jinja", text), NULL, chat_tokenizer);
    assert_string_equal(bl_chat_template_name(given), "the configuration's");
    assert_false(bl_chat_template_was_recognized(given));
    assert_int_equal(bl_chat_template_hash(given), bl_chat_template_hash(file));
    bl_chat_template_destroy(given);
    bl_chat_template_destroy(file);
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
    assert_true(bl_chat_template_hash(a) == bl_chat_template_hash(b)); /* they write the same */
    assert_true(bl_chat_template_hash(a) != bl_chat_template_hash(c));
    bl_chat_template_destroy(a);
    bl_chat_template_destroy(b);
    bl_chat_template_destroy(c);
}

/* ---- markers that are not tokens ---- */

/* names: what the warning lists; NULL: there is none. */
static void check_markers(const char *template, const bl_tokenizer *tokenizer, const char *names)
{
    char expected[400];

    n_warnings = 0;
    bl_chat_template_destroy(load(template, NULL, tokenizer));
    if (n_warnings != (names != NULL)) fail_msg("%s: %d warnings", template, n_warnings);
    snprintf(expected, sizeof expected, "not a token of the tokenizer: %s; it is", names);
    if (names && !strstr(warning, expected)) fail_msg("%s: %s", template, warning);
}

static void test_markers(void **state)
{
    static const char *const texts[][2] = {
        {"{{ '<|im_start|>' }}{{ messages[0].content }}<|eot_id|>", NULL},
        {"{% for m in messages %}<|{{ m.role }}|>\n{{ m.content }}<|im_end|>{% endfor %}"
         "{% if add_generation_prompt %}<|assistant|>{% endif %}",
         "<|user|>, <|assistant|>, <|system|>, <|tool|>"},
        {"{% if messages[0].role != 'user' %}{{ raise_exception('x') }}{% endif %}<|end|><|end|>",
         "<|end|>"},
        {"{% if tools %}<|tools|>{% endif %}{{ messages | tojson }}", "<|tools|>"},
        {"{% if messages[-1].tool_calls or messages[-1].role == 'tool' %}<|call|>{% endif %}",
         "<|call|>"},
        {"{{ '<|no one|>' }}a <| b |> c <||> <|d <|im_end|>|>{{ messages[0].content }}", NULL},
        {"{% if '<|x|>' in messages[0].content %}<|x|>{% endif %}{{ messages[0].content }}", NULL},
        {"{{ '<|' + 'a' * 500 + '|>' }}", NULL},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(texts); i++)
        check_markers(texts[i][0], chat_tokenizer, texts[i][1]);
    check_markers("<|im_start|>{{ 'a' }}", spm_tokenizer, "<|im_start|>");
}

/* Of published templates with their tokenizers, only what these lack. */
static void test_markers_of_real_texts(void **state)
{
    static const char *const pairs[][3] = {
        {"llama3", "meta-llama-Llama-3.2-3B-Instruct", NULL},
        {"llama3", "chujie-chatml", "<|im_start|>, <|im_end|>"},
        {"llama2-tf5", "chujie-zephyr", "<|user|>, <|assistant|>, <|system|>"},
        {"phi3", "trl-phi3_training", NULL},
        {"phi3", "microsoft-Phi-3.5-mini-instruct", NULL},
        {"qwen3", "Qwen-Qwen3-0.6B", NULL},
        {"qwen3", "trl-qwen2_5_training", NULL},
        {"deepseek-v4", "deepseek-ai-DeepSeek-V4", NULL},
    };
    char path[2][256];
    (void)state;
    TEST_SKIP_WITHOUT_DATA(data_folder);
    for (size_t i = 0; i < BL_COUNT(pairs); i++) {
        bl_tokenizer *tokenizer;
        snprintf(path[0], sizeof path[0], "%s/tokenizers/%s", data_folder, pairs[i][0]);
        snprintf(path[1], sizeof path[1], "%s/templates/%s.jinja", data_folder, pairs[i][1]);
        assert_int_equal(bl_tokenizer_load(path[0], &tokenizer), BL_OK);
        check_markers(path[1], tokenizer, pairs[i][2]);
        bl_tokenizer_destroy(tokenizer);
    }
}

/* ---- template files ---- */

static void test_template_files(void **state)
{
    static const bl_chat_message messages[] = {{.role = BL_CHAT_USER, .content = " h"},
                                               {.role = BL_CHAT_ASSISTANT, .content = "e "}};
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
        assert_int_equal(bl_chat_template_encode(chat, messages, 2, NULL, false, &ids, &labels),
                         BL_OK);
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

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_recognition),
        cmocka_unit_test(test_several_templates),
        cmocka_unit_test(test_text_given),
        cmocka_unit_test(test_recognition_of_real_texts),
        cmocka_unit_test(test_templates_that_do_not_fit),
        cmocka_unit_test(test_markers),
        cmocka_unit_test(test_markers_of_real_texts),
        cmocka_unit_test(test_template_files),
        cmocka_unit_test(test_bad_template_files),
    };
    data_folder = getenv("BALLAST_TEST_DATA");
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
