/* SPDX-License-Identifier: Apache-2.0 */
/* Rows of preferences: each side is the sample of a row of its format; prompts that two answers
 * have in common; rows that are cut, left out or rejected. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "data/dataset.h"
#include "dataset_case.h"

/* A byte b is token b + 2 of fallback.json; B is <s>, S the space that begins a text. */
#define T(character) ((character) + 2)
enum { B = 1, S = 258 };

static bl_sample first_row(bl_data_format format, const char *row)
{
    bl_dataset_options options = default_options();
    bl_sample sample;

    options.format = format;
    bl_dataset *dataset = open_with(&options, row);
    assert_int_equal(bl_dataset_count(dataset), 1);
    assert_int_equal(bl_dataset_get(dataset, 0, &sample), BL_OK);
    bl_dataset_close(dataset);
    return sample;
}

/* ids and labels of both documents, whose first one ends at `border`. */
static void check_pair(bl_data_format format, const char *row, int64_t border, size_t n,
                       const int32_t *ids, const int32_t *labels)
{
    bl_sample s = first_row(format, row);

    if ((size_t)s.n_tokens != n) fail_msg("%s: %lld tokens", row, (long long)s.n_tokens);
    for (size_t t = 0; t < n; t++) {
        if (s.ids[t] != ids[t] || s.labels[t] != labels[t])
            fail_msg("%s: token %zu: id %d label %d", row, t, s.ids[t], s.labels[t]);
        assert_int_equal(s.document_ids[t], (int64_t)t >= border);
    }
    bl_sample_free(&s);
}

static const int32_t two_ids[] = {B, S, T('p'), S, T('u'), EOS, B, S, T('p'), S, T('w'), EOS};
/* The prompt is "p": the space belongs to the answers. */
static const int32_t two_labels[] = {M, M, M, S, T('u'), EOS, M, M, M, S, T('w'), EOS};

static void test_texts(void **state)
{
    (void)state;
    static const int32_t ids[] = {B, S, T('p'), T('u'), T('v'), EOS, B, S, T('p'), T('w'), EOS};
    static const int32_t labels[] = {M, M, M, T('u'), T('v'), EOS, M, M, M, T('w'), EOS};

    check_pair(BL_DATA_AUTO, "{\"prompt\":\"p\",\"chosen\":\"uv\",\"rejected\":\"w\",\"score\":3}",
               6, BL_COUNT(ids), ids, labels);
    check_pair(BL_DATA_PREFERENCE, "{\"chosen\":\"puv\",\"rejected\":\"pw\"}", 6, BL_COUNT(ids),
               ids, labels);
    check_pair(BL_DATA_PREFERENCE, "{\"prompt\":null,\"chosen\":\"p u\",\"rejected\":\"p w\"}", 6,
               BL_COUNT(two_ids), two_ids, two_labels);
}

/* "ß" and "Þ" begin with the same byte, and "u" is the beginning of "uv": one character is left. */
static void test_common_beginnings_end_between_characters(void **state)
{
    (void)state;
    static const int32_t accents[] = {B, S, T('p'), T(0xc3), T(0x9f), EOS,
                                      B, S, T('p'), T(0xc3), T(0x9e), EOS},
                         labels[] = {M, M, M, T(0xc3), T(0x9f), EOS,
                                     M, M, M, T(0xc3), T(0x9e), EOS},
                         longer[] = {B, S, T('u'), EOS, B, S, T('u'), T('v'), EOS},
                         longer_labels[] = {M, S, T('u'), EOS, M, S, T('u'), T('v'), EOS};

    check_pair(BL_DATA_AUTO, "{\"chosen\":\"p\xc3\x9f\",\"rejected\":\"p\xc3\x9e\"}", 6,
               BL_COUNT(accents), accents, labels);
    check_pair(BL_DATA_AUTO, "{\"chosen\":\"u\",\"rejected\":\"uv\"}", 4, BL_COUNT(longer), longer,
               longer_labels);
}

static void test_tokens(void **state)
{
    (void)state;
    static const int32_t ids[] = {7, 8, 9, 7, 8, 5, 6}, labels[] = {M, M, 9, M, M, 5, M},
                         learned[] = {4, 5, 6, 7}, behind[] = {M, 5, M, 7};
    bl_sample s;

    check_pair(BL_DATA_AUTO,
               "{\"chosen\":{\"input_ids\":[7,8,9],\"labels\":[-100,-100,9]},"
               "\"rejected\":{\"input_ids\":[7,8,5,6],\"labels\":[-100,-100,5,-100]}}",
               3, BL_COUNT(ids), ids, labels);
    /* No token predicts the first one of a document: it is counted alone. */
    check_pair(BL_DATA_AUTO,
               "{\"chosen\":{\"input_ids\":[4,5]},\"rejected\":{\"input_ids\":[6,7]}}", 2,
               BL_COUNT(learned), learned, behind);
    s = first_row(BL_DATA_AUTO, "{\"chosen\":{\"input_ids\":[4,5]},\"rejected\":{\"input_ids\":"
                                "[6,7],\"labels\":[-100,7]}}");
    assert_true(s.begins_learned[0] && !s.begins_learned[1]);
    bl_sample_free(&s);
}

static void test_unpaired(void **state)
{
    (void)state;
    static const struct {
        const char *row;
        bool is_desirable;
        int32_t ids[5], labels[5];
    } rows[] = {
        {"{\"prompt\":\"p\",\"completion\":\"u\",\"label\":true}",
         true,
         {B, S, T('p'), T('u'), EOS},
         {M, M, M, T('u'), EOS}},
        {"{\"prompt\":\"p\",\"completion\":\"u\",\"label\":false}",
         false,
         {B, S, T('p'), T('u'), EOS},
         {M, M, M, T('u'), EOS}},
        {"{\"input_ids\":[3,4,5,6,7],\"labels\":[-100,-100,-100,6,7],\"label\":false}",
         false,
         {3, 4, 5, 6, 7},
         {M, M, M, 6, 7}},
    };

    for (size_t i = 0; i < BL_COUNT(rows); i++) {
        bl_sample s = first_row(BL_DATA_UNPAIRED_PREFERENCE, rows[i].row);
        assert_int_equal(s.n_tokens, 5);
        assert_memory_equal(s.ids, rows[i].ids, sizeof rows[i].ids);
        assert_memory_equal(s.labels, rows[i].labels, sizeof rows[i].labels);
        assert_true(s.is_desirable == rows[i].is_desirable && !s.document_ids);
        bl_sample_free(&s);
    }
}

#define PAIR(prompt, chosen, rejected)                                                             \
    "{\"prompt\":\"" prompt "\",\"chosen\":\"" chosen "\",\"rejected\":\"" rejected "\"}\n"

/* Each side is cut at its end; a prompt that fills the limit leaves nothing to learn. */
static void test_limit(void **state)
{
    (void)state;
    static const int32_t ids[] = {B, S, T('p'), T('u'), T('v'), B, S, T('p'), T('w'), EOS},
                         labels[] = {M, M, M, T('u'), T('v'), M, M, M, T('w'), EOS};
    const char *rows = PAIR("p", "uv", "w") PAIR("pqr", "u", "v") PAIR("pq", "u", "v");
    bl_dataset_options options = default_options();
    bl_dataset_stats stats;

    options.max_seq_length = 5;
    bl_dataset *dataset = open_with(&options, rows);
    assert_int_equal(bl_dataset_count(dataset), 2);
    check_sample(dataset, 0, BL_COUNT(ids), ids, labels);
    bl_dataset_get_stats(dataset, &stats);
    assert_int_equal(stats.n_overlong, 3);
    assert_int_equal(stats.n_tokens_lost, 1 + 14 + 2);
    bl_dataset_close(dataset);
    options.overlong = BL_OVERLONG_SKIP;
    options.max_seq_length = 6;
    dataset = open_with(&options, rows);
    assert_int_equal(bl_dataset_count(dataset), 2); /* without the second one */
    bl_dataset_close(dataset);
    options.overlong = BL_OVERLONG_ERROR;
    check_refused(&options, rows, strlen(rows), ":2: 7 tokens, max_seq_length is 6");
}

static void test_refusals(void **state)
{
    (void)state;
    static const struct {
        bl_data_format format;
        const char *rows, *reason;
    } cases[] = {
        {BL_DATA_AUTO, "{\"chosen\":3,\"rejected\":\"a\"}", "key chosen: expected a text, a list"},
        {BL_DATA_AUTO, PAIR("p", "c", "r") "{\"chosen\":\"a\",\"rejected\":[]}",
         ":2: key rejected: expected a text"},
        {BL_DATA_AUTO, "{\"chosen\":{\"input_ids\":[1,2000]},\"rejected\":{\"input_ids\":[1,2]}}",
         ":1: chosen: input_ids[1]: expected an integer"},
        {BL_DATA_AUTO,
         "{\"chosen\":{\"input_ids\":[1,2]},\"rejected\":{\"input_ids\":[1,2],\"labels\":[1,-100]}"
         "}",
         ":1: nothing to learn from: no token of rejected"},
        {BL_DATA_AUTO,
         "{\"chosen\":{\"input_ids\":[1,2],\"weights\":[1,1]},\"rejected\":{\"input_ids\":[1,2]}}",
         "key weights: not of preferences"},
        {BL_DATA_PREFERENCE, "{\"prompt\":\"a\",\"completion\":\"b\"}", "no known data format"},
        {BL_DATA_UNPAIRED_PREFERENCE, "{\"prompt\":\"a\",\"completion\":\"b\",\"label\":1}",
         "key label: expected"},
        {BL_DATA_UNPAIRED_PREFERENCE, "{\"prompt\":\"a\",\"completion\":\"b\"}",
         "no known data format"},
    };

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_dataset_options options = default_options();
        options.format = cases[i].format;
        check_refused(&options, cases[i].rows, strlen(cases[i].rows), cases[i].reason);
    }
}

/* ---- conversations ---- */

#define USER(text)  "{\"role\":\"user\",\"content\":\"" text "\"}"
#define REPLY(text) "{\"role\":\"assistant\",\"content\":\"" text "\"}"

/* With the template of chatml, which writes a line feed behind a message: it belongs to the
 * answer. */
static bl_sample conversation(const char *row, bl_data_format format)
{
    static const char chatml[] =
        "{% for m in messages %}{{ '[' + m['role'] + ']' + m['content'] + '<s>' + '\\n' }}"
        "{% endfor %}{% if add_generation_prompt %}{{ '[assistant]' }}{% endif %}";
    bl_dataset_options options = default_options();
    bl_sample sample;

    options.format = format;
    options.chat_template = chatml;
    bl_dataset *dataset = open_with(&options, row);
    assert_int_equal(bl_dataset_get(dataset, 0, &sample), BL_OK);
    bl_dataset_close(dataset);
    return sample;
}

static void test_conversations(void **state)
{
    (void)state;
    static const char *const rows[] = {
        "{\"prompt\":[" USER("hi") "],\"chosen\":[" REPLY("yes") "],\"rejected\":[" REPLY(
            "no") "]}",
        "{\"chosen\":[" USER("hi") "," REPLY("yes") "],\"rejected\":[" USER("hi") "," REPLY(
            "no") "]}",
        "{\"prompt\":\"hi\",\"chosen\":[" USER("hi") "," REPLY("yes") "],\"rejected\":[" USER(
            "hi") "," REPLY("no") "]}"};
    bl_sample sides[2] = {
        conversation("{\"prompt\":[" USER("hi") "],\"completion\":[" REPLY("yes") "]}",
                     BL_DATA_MESSAGES),
        conversation("{\"prompt\":[" USER("hi") "],\"completion\":[" REPLY("no") "]}",
                     BL_DATA_MESSAGES)};

    for (size_t i = 0; i < BL_COUNT(rows); i++) {
        bl_sample pair = conversation(rows[i], BL_DATA_AUTO);
        assert_int_equal(pair.n_tokens, sides[0].n_tokens + sides[1].n_tokens);
        for (int64_t d = 0, at = 0; d < 2; at += sides[d++].n_tokens) {
            const bl_sample *side = &sides[d];
            bool is_answer = false;
            assert_memory_equal(pair.ids + at, side->ids, (size_t)side->n_tokens * sizeof(int32_t));
            for (int64_t t = 0; t < side->n_tokens; t++) {
                is_answer = is_answer || side->labels[t] != M;
                assert_int_equal(pair.labels[at + t], is_answer ? side->ids[t] : M);
            }
        }
        bl_sample_free(&pair);
    }
    assert_int_equal(sides[0].labels[sides[0].n_tokens - 1], M); /* the line feed, of messages */
    for (int d = 0; d < 2; d++) bl_sample_free(&sides[d]);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test_setup_teardown(test_texts, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_common_beginnings_end_between_characters, set_up,
                                        tear_down),
        cmocka_unit_test_setup_teardown(test_tokens, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_unpaired, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_limit, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_refusals, set_up, tear_down),
        cmocka_unit_test_setup_teardown(test_conversations, set_up, tear_down),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
