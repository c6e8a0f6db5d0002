/* SPDX-License-Identifier: Apache-2.0 */
/* 75 published chat templates x 38 conversations, against what transformers writes
 * (BALLAST_TEST_DATA/templates: *.jinja and vectors.json). Prints equal, different and refused
 * cases per template. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/json.h"
#include "jinja/jinja.h"
#include "skip.h"

static json_t *vectors;
static const char *data_folder;

typedef struct counts {
    int equal, different, refused;
    int allowed; /* of the refused */
} counts;

static const char *get(const json_t *object, const char *key)
{
    return json_string_value(json_object_get(object, key));
}

/* continue_final_message: the rendering ends where the last message's content does. Transformers
 * marks that place with a tag. */
#define CONTINUE_TAG "CONTINUE_FINAL_MESSAGE_TAG"

static void tag_last(json_t *messages)
{
    json_t *last = json_array_get(messages, json_array_size(messages) - 1);
    json_t *content = json_object_get(last, "content");

    if (json_is_array(content)) {
        json_t *part = json_deep_copy(json_array_get(content, json_array_size(content) - 1));
        json_t *copy = json_copy(content);
        json_object_set_new(part, "text", json_sprintf("%s" CONTINUE_TAG " ", get(part, "text")));
        json_array_set_new(copy, json_array_size(copy) - 1, part);
        json_object_set_new(last, "content", copy);
    } else if (content) {
        json_object_set_new(last, "content",
                            json_sprintf("%s" CONTINUE_TAG " ", json_string_value(content)));
    }
}

static bl_status cut_at_tag(bl_jinja_output *out)
{
    char *tag = NULL;

    for (char *at = out->text; (at = strstr(at, CONTINUE_TAG)); at++) tag = at;
    if (!tag) return BL_FAIL(BL_EINPUT, "the last message is not in the text");
    out->n_bytes = (size_t)(tag - out->text);
    bool kept = !strncmp(tag, CONTINUE_TAG " ", strlen(CONTINUE_TAG " "));
    while (!kept && out->n_bytes && strchr(" \t\r\n", out->text[out->n_bytes - 1])) out->n_bytes--;
    out->text[out->n_bytes] = '\0';
    return BL_OK;
}

static json_t *make_variables(const json_t *template, const json_t *entry)
{
    const json_t *conversation =
        json_object_get(json_object_get(vectors, "conversations"), get(entry, "conversation"));
    const json_t *tools = json_object_get(conversation, "tools");
    json_t *variables = json_object(), *messages;

    assert_int_equal(
        bl_jinja_prepare_messages(json_object_get(conversation, "messages"), &messages), BL_OK);
    if (json_is_true(json_object_get(entry, "continue_final_message"))) tag_last(messages);
    json_object_set_new(variables, "messages", messages);
    json_object_set_new(variables, "tools", tools ? json_incref((json_t *)tools) : json_null());
    json_object_set_new(variables, "documents", json_null());
    json_object_set_new(
        variables, "add_generation_prompt",
        json_boolean(json_is_true(json_object_get(entry, "add_generation_prompt"))));
    for (int i = 0; i < 2; i++) { /* a token that the model lacks is not defined */
        json_t *token = json_object_get(template, i ? "eos_token" : "bos_token");
        if (json_is_string(token)) json_object_set(variables, i ? "eos_token" : "bos_token", token);
    }
    json_object_update(variables, json_object_get(entry, "kwargs"));
    return variables;
}

static size_t count_codes(const char *text, size_t n_bytes)
{
    size_t n = 0;
    for (size_t i = 0; i < n_bytes; i++) n += ((unsigned char)text[i] & 0xc0) != 0x80;
    return n;
}

static bool has_spans(const json_t *expected, const bl_jinja_output *out)
{
    if (!expected) return true;
    if (json_array_size(expected) != out->n_spans) return false;
    for (size_t i = 0; i < out->n_spans; i++) {
        const json_t *span = json_array_get(expected, i);
        if ((size_t)json_integer_value(json_array_get(span, 0)) !=
                count_codes(out->text, out->span[i].begin) ||
            (size_t)json_integer_value(json_array_get(span, 1)) !=
                count_codes(out->text, out->span[i].end))
            return false;
    }
    return true;
}

/* Whether the outcome is transformers': the text, or an error of the same kind. */
static bool is_equal(const json_t *entry, bl_status st, const bl_jinja_output *out)
{
    const json_t *rendered = json_object_get(entry, "rendered");
    const char *error = get(entry, "error");

    if (st == BL_OK && json_is_string(rendered))
        return out->n_bytes == json_string_length(rendered) &&
               !memcmp(out->text, json_string_value(rendered), out->n_bytes) &&
               has_spans(json_object_get(entry, "assistant_spans"), out);
    if (st == BL_OK || json_is_string(rendered)) return false;
    if (strcmp(get(entry, "error_kind"), "raise_exception")) return true;
    return out->raised && strlen(bl_error_text()) >= strlen(error) &&
           !strcmp(bl_error_text() + strlen(bl_error_text()) - strlen(error), error);
}

static void check_case(const bl_jinja *parsed, const json_t *template, const json_t *entry,
                       const struct tm *now, counts *n)
{
    json_t *variables = make_variables(template, entry);
    bl_jinja_output out;

    bl_status st = bl_jinja_render(parsed, variables, now, &out);
    if (st == BL_OK && json_is_true(json_object_get(entry, "continue_final_message")))
        st = cut_at_tag(&out);
    bool equal = is_equal(entry, st, &out);
    bool refused = !equal && st != BL_OK && json_object_get(entry, "rendered");
    /* one conversation has integers outside int64, which base/json.h reads as reals */
    bool allowed = refused && strstr(bl_error_text(), "2^63");
    if (!equal && !allowed)
        printf("  %s %s %s %s: %s\n", get(template, "file"), get(entry, "conversation"),
               json_is_true(json_object_get(entry, "add_generation_prompt")) ? "prompt" : "",
               refused ? "refused" : "differs", st == BL_OK ? "" : bl_error_text());
    if (!equal && getenv("BALLAST_SHOW"))
        printf("--- expected\n%s\n--- got\n%s\n---\n",
               get(entry, "rendered") ? get(entry, "rendered") : get(entry, "error"),
               out.text ? out.text : "");
    n->equal += equal;
    n->refused += refused;
    n->allowed += allowed;
    n->different += !equal && !refused;
    bl_jinja_output_free(&out);
    json_decref(variables);
}

static void check_template(const json_t *template, counts *total)
{
    static const struct tm now = {.tm_year = 126,
                                  .tm_mon = 6,
                                  .tm_mday = 4,
                                  .tm_hour = 9,
                                  .tm_min = 5,
                                  .tm_sec = 7,
                                  .tm_wday = 6,
                                  .tm_yday = 184};
    char path[512];
    const json_t *entry;
    counts n = {0};
    void *text;
    size_t n_bytes, i;
    bl_jinja *parsed;

    snprintf(path, sizeof path, "%s/templates/%s", data_folder, get(template, "file"));
    assert_int_equal(bl_file_read_all(path, 1 << 20, &text, &n_bytes), BL_OK);
    if (bl_jinja_parse(get(template, "file"), text, n_bytes, &parsed) == BL_OK) {
        json_array_foreach(json_object_get(template, "cases"), i, entry)
            check_case(parsed, template, entry, &now, &n);
        assert_int_equal(bl_jinja_has_generation(parsed),
                         json_is_true(json_object_get(template, "has_generation_tag")));
    } else {
        printf("  %s\n", bl_error_text());
        n.refused = (int)json_array_size(json_object_get(template, "cases"));
    }
    printf("%-60s %4d equal %4d different %4d refused\n", get(template, "file"), n.equal,
           n.different, n.refused);
    total->equal += n.equal;
    total->different += n.different;
    total->refused += n.refused;
    total->allowed += n.allowed;
    bl_jinja_destroy(parsed);
    free(text);
}

static void test_published_templates(void **state)
{
    char path[512];
    const json_t *template;
    counts total = {0};
    size_t i;

    (void)state;
    data_folder = getenv("BALLAST_TEST_DATA");
    TEST_SKIP_WITHOUT_DATA(data_folder);
    snprintf(path, sizeof path, "%s/templates/vectors.json", data_folder);
    if (!bl_file_exists(path)) TEST_SKIP("no templates in BALLAST_TEST_DATA");
    assert_int_equal(bl_json_load(path, 1 << 26, &vectors), BL_OK);
    json_array_foreach(json_object_get(vectors, "templates"), i, template)
        check_template(template, &total);
    printf("%zu templates: %d equal, %d different, %d refused, %d of them for integers outside "
           "int64\n",
           i, total.equal, total.different, total.refused, total.allowed);
    json_decref(vectors);
    assert_int_equal(total.different, 0);
    assert_int_equal(total.refused, total.allowed);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_published_templates)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
