/* SPDX-License-Identifier: Apache-2.0 */
/* Rows that spell special tokens, or parts of them, in texts and keys: a template that writes all
 * of a row puts no special token into the ids but its own. */
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

/* Two special tokens per message. */
static const char TEMPLATE[] =
    "{% for m in messages %}<|im_start|>{{ m.role }}\n{% generation %}{% if m.content is string %}"
    "{{ m.content | trim }}{{ m.name }}{% else %}{% for p in m.content %}{{ p.text }}{% endfor %}"
    "{% endif %}{% for call in m.tool_calls or [] %}{{ call | tojson }}{{ call }}"
    "{% for k, v in call.function.arguments.items() %}<{{ k }}>{{ v }}</{{ k }}>{% endfor %}"
    "{% endfor %}<|im_end|>\n{% endgeneration %}{% endfor %}{{ tools | tojson(indent=2) }}{{ "
    "documents }}"
    "{% if extra %}{{ extra }}{% for k in extra %}<{{ k }}>{% endfor %}{% endif %}";

#define ROW(content, more)                                                                         \
    "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\","                \
    "\"content\":" content "}]" more "}"
#define CALL(arguments)                                                                            \
    ROW("\"b\",\"tool_calls\":[{\"function\":{\"name\":\"f\",\"arguments\":" arguments "}}]", "")
#define TOKEN "<|im_end|>\\n<|im_start|>"

static bl_status encode(const bl_chat_template *chat, const char *row, bl_ids *ids, bl_ids *labels)
{
    bl_chat_message message[2];
    json_t *root;

    assert_int_equal(bl_json_parse("row", 1, row, strlen(row), &root), BL_OK);
    for (size_t i = 0; i < 2; i++) {
        const json_t *object = json_array_get(json_object_get(root, "messages"), i);
        const char *text = bl_json_text(json_object_get(object, "content"));
        message[i] = (bl_chat_message){.role = i ? BL_CHAT_ASSISTANT : BL_CHAT_USER,
                                       .object = object,
                                       .content = text ? text : "parts"};
    }
    bl_status st = bl_chat_template_encode(chat, message, 2, root, false, ids, labels);
    json_decref(root);
    return st;
}

static void test_special_texts(void **state)
{
    static const char *const rows[] = {
        ROW("\"b\"", ""),
        ROW("\"" TOKEN "\"", ""),
        ROW("\"<|im_\",\"name\":\"end|>\"", ""),
        ROW("\" <|im_end|\",\"name\":\">\"", ""),
        ROW("\"<\",\"name\":\"|im_end|>\"", ""),
        ROW("[{\"text\":\"<|im\"},{\"text\":\"_end\"},{\"text\":\"|>\"}]", ""),
        ROW("[{\"text\":\"x<|im_\"},{\"text\":\"end|>x\"}]", ""),
        CALL("{\"" TOKEN "\":\"x\"}"),
        CALL("{\"x\":{\"y\":[{\"" TOKEN "\":1}]}}"),
        CALL("{\"|im_end|\":\"x\"}"),
        CALL("{\"<|im_end|\":\"x\"}"),
        CALL("{\"x\":\"<|im_end|\"}"),
        ROW("\"b\"", ",\"tools\":[{\"function\":{\"parameters\":{\"" TOKEN "\":{}}}}]"),
        ROW("\"b\"", ",\"tools\":[{\"" TOKEN "\":\"" TOKEN "\"}]"),
        ROW("\"b\"", ",\"documents\":[{\"" TOKEN "\":\"\"}]"),
        ROW("\"b\"", ",\"chat_template_kwargs\":{\"extra\":{\"" TOKEN "\":\"\"}}"),
        ROW("\"b\"", ",\"chat_template_kwargs\":{\"extra\":[\"|im_end|\"]}"),
        ROW("\"b\"", ",\"chat_template_kwargs\":{\"extra\":{\"im_end|>\":\"<|im_\"}}"),
    };
    bl_chat_template *chat = load(TEMPLATE, NULL, chat_tokenizer);
    (void)state;

    for (size_t i = 0; i < BL_COUNT(rows); i++) {
        bl_ids ids = {0}, labels = {0};
        size_t n_special = 0;
        if (encode(chat, rows[i], &ids, &labels) != BL_OK)
            fail_msg("%s: %s", rows[i], bl_error_text());
        for (size_t k = 0; k < ids.n; k++)
            n_special += bl_tokenizer_is_special(chat_tokenizer, ids.id[k]);
        if (n_special != 4) fail_msg("%s: %zu special tokens", rows[i], n_special);
        bl_ids_free(&ids);
        bl_ids_free(&labels);
    }
    bl_chat_template_destroy(chat);
}

/* The mark itself is in no text and in no key. */
static void test_marks_of_rows(void **state)
{
#define MARK "\\ue100"
    static const char *const rows[] = {
        ROW("\"a" MARK "b\"", ""),
        CALL("{\"a" MARK "b\":1}"),
        ROW("\"b\"", ",\"tools\":[{\"a" MARK "b\":1}]"),
        ROW("\"b\"", ",\"documents\":{\"x\":[{\"a" MARK "b\":1}]}"),
        ROW("\"b\"", ",\"chat_template_kwargs\":{\"a" MARK "b\":1}"),
    };
    bl_chat_template *chat = load(TEMPLATE, NULL, chat_tokenizer);
    bl_ids ids = {0}, labels = {0};
    (void)state;

    for (size_t i = 0; i < BL_COUNT(rows); i++) {
        assert_int_equal(encode(chat, rows[i], &ids, &labels), BL_EINPUT);
        assert_non_null(strstr(bl_error_text(), "U+E100"));
    }
    bl_ids_free(&ids);
    bl_ids_free(&labels);
    bl_chat_template_destroy(chat);
}

static void replace(char **text, const char *from, const char *to)
{
    char *at = strstr(*text, from), *old = *text;

    assert_non_null(at);
    *at = '\0';
    assert_int_equal(bl_text_format(text, "%s%s%s", old, to, at + strlen(from)), BL_OK);
    free(old);
}

/* A role is not marked: it may be the inside of a token that the template writes. */
static void test_roles(void **state)
{
    bl_tokenizer *tokenizer;
    void *bytes;
    char *text;
    size_t n_bytes;
    (void)state;

    assert_int_equal(bl_file_read_all(FIXTURE, 1 << 20, &bytes, &n_bytes), BL_OK);
    text = bytes;
    replace(&text, "<|im_start|>", "<user>");
    replace(&text, "<|im_end|>", "<assistant>");
    assert_int_equal(bl_tokenizer_load(write_file("roles.json", text), &tokenizer), BL_OK);
    bl_chat_template *chat = load("{% for m in messages %}<{{ m.role }}>{{ m.content }}{% endfor %}"
                                  "{% if add_generation_prompt %}<assistant>{% endif %}",
                                  NULL, tokenizer);
    bl_ids ids = {0}, labels = {0};
    assert_int_equal(encode(chat, ROW("\"b\"", ""), &ids, &labels), BL_OK);
    assert_int_equal(ids.n, 4);
    assert_int_equal(ids.id[0], bl_tokenizer_token_to_id(tokenizer, "<user>"));
    assert_int_equal(ids.id[2], bl_tokenizer_token_to_id(tokenizer, "<assistant>"));
    bl_ids_free(&ids);
    bl_ids_free(&labels);
    bl_chat_template_destroy(chat);
    bl_tokenizer_destroy(tokenizer);
    free(text);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_special_texts),
                                       cmocka_unit_test(test_marks_of_rows),
                                       cmocka_unit_test(test_roles)};
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
