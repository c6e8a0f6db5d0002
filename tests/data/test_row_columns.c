/* SPDX-License-Identifier: Apache-2.0 */
/* Columns beside those of a format: each one changes the sample, is an error, or is named in a
 * warning. Then the shapes of rows that other trainers write. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "data/dataset.h"

static int rows_fd, log_fd; /* in memory: a test opens thousands */
static char path[64], logged[1 << 16];
static bl_tokenizer *tokenizer;

static int set_up(void **state)
{
    (void)state;
    rows_fd = memfd_create("rows", 0);
    log_fd = memfd_create("log", 0);
    if (rows_fd < 0 || log_fd < 0) return -1;
    snprintf(path, sizeof path, "/proc/self/fd/%d", rows_fd);
    return bl_tokenizer_load("tests/tokenizer/fixtures/chat.json", &tokenizer) == BL_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    bl_tokenizer_destroy(tokenizer);
    close(rows_fd);
    close(log_fd);
    return 0;
}

#define WRITTEN                                                                                    \
    "{% if tools %}{{ tools }}{% endif %}{% if documents %}{{ documents }}{% endif %}"             \
    "{% for m in messages %}[{{ m.role }}]{{ m.content }}\n{% endfor %}"                           \
    "{% if add_generation_prompt %}[assistant]{% endif %}"
#define TURNS                                                                                      \
    "[{\"role\":\"user\",\"content\":\"ask\"},{\"role\":\"assistant\",\"content\":\"tell\"}]"
#define SHARED "[{\"from\":\"human\",\"value\":\"ask\"},{\"from\":\"gpt\",\"value\":\"tell\"}]"
#define ASK    "[{\"role\":\"user\",\"content\":\"ask\"}]"
#define TELL   "[{\"role\":\"assistant\",\"content\":\"tell\"}]"
#define LIE    "[{\"role\":\"assistant\",\"content\":\"lie\"}]"

typedef struct row_case {
    bl_data_format format;
    const char *chat_template, *row; /* without the closing brace */
} row_case;

static const row_case formats[] = {
    {BL_DATA_AUTO, NULL, "{\"text\":\"tell\""},
    {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\",\"completion\":\"tell\""},
    {BL_DATA_AUTO, NULL, "{\"question\":\"ask\",\"answer\":\"tell\""},
    {BL_DATA_AUTO, NULL, "{\"query\":\"ask\",\"response\":\"tell\""},
    {BL_DATA_AUTO, NULL, "{\"input\":\"ask\",\"output\":\"tell\""},
    {BL_DATA_AUTO, NULL, "{\"instruction\":\"ask\",\"output\":\"tell\""},
    {BL_DATA_AUTO, NULL, "{\"instruction\":\"ask\",\"response\":\"tell\""},
    {BL_DATA_AUTO, "llama3", "{\"messages\":" TURNS},
    {BL_DATA_AUTO, WRITTEN, "{\"messages\":" TURNS},
    {BL_DATA_AUTO, "llama3", "{\"conversations\":" SHARED},
    {BL_DATA_AUTO, WRITTEN, "{\"conversations\":" SHARED},
    {BL_DATA_AUTO, "llama3", "{\"prompt\":" ASK ",\"completion\":" TELL},
    {BL_DATA_MESSAGES, "llama3", "{\"instruction\":\"ask\",\"output\":\"tell\""},
    {BL_DATA_MESSAGES, WRITTEN, "{\"question\":\"ask\",\"answer\":\"tell\""},
    {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\",\"chosen\":\"tell\",\"rejected\":\"lie\""},
    {BL_DATA_AUTO, NULL, "{\"chosen\":\"ask tell\",\"rejected\":\"ask lie\""},
    {BL_DATA_AUTO, "llama3", "{\"prompt\":" ASK ",\"chosen\":" TELL ",\"rejected\":" LIE},
    {BL_DATA_AUTO, WRITTEN, "{\"prompt\":\"ask\",\"chosen\":" TELL ",\"rejected\":" LIE},
    {BL_DATA_AUTO, NULL,
     "{\"chosen\":{\"input_ids\":[1,2,3]},\"rejected\":{\"input_ids\":[1,2,4]}"},
    {BL_DATA_UNPAIRED_PREFERENCE, NULL,
     "{\"prompt\":\"ask\",\"completion\":\"tell\",\"label\":true"},
    {BL_DATA_UNPAIRED_PREFERENCE, "llama3",
     "{\"prompt\":" ASK ",\"completion\":" TELL ",\"label\":false"},
    {BL_DATA_UNPAIRED_PREFERENCE, NULL, "{\"input_ids\":[1,2,3],\"label\":true"},
    {BL_DATA_AUTO, NULL, "{\"input_ids\":[1,2,3]"},
};

static const char *const columns[] = {"system",
                                      "system_prompt",
                                      "system_message",
                                      "sys_prompt",
                                      "history",
                                      "chat_history",
                                      "instruction",
                                      "input",
                                      "inputs",
                                      "output",
                                      "outputs",
                                      "prompt",
                                      "completion",
                                      "response",
                                      "question",
                                      "query",
                                      "answer",
                                      "answers",
                                      "context",
                                      "contexts",
                                      "documents",
                                      "document",
                                      "passage",
                                      "passages",
                                      "article",
                                      "background",
                                      "knowledge",
                                      "choices",
                                      "options",
                                      "prefix",
                                      "suffix",
                                      "tools",
                                      "functions",
                                      "chat_template_kwargs",
                                      "messages",
                                      "conversations",
                                      "text",
                                      "chosen",
                                      "rejected",
                                      "rejected_response",
                                      "rejected_messages",
                                      "label",
                                      "labels",
                                      "kto_tag",
                                      "weight",
                                      "weights",
                                      "sample_weight",
                                      "loss_weight",
                                      "loss",
                                      "loss_scale",
                                      "loss_mask",
                                      "train",
                                      "training",
                                      "trainable",
                                      "mask",
                                      "masked",
                                      "image",
                                      "images",
                                      "video",
                                      "videos",
                                      "audio",
                                      "audios",
                                      "input_ids",
                                      "attention_mask",
                                      "document_ids",
                                      "id",
                                      "idx",
                                      "uid",
                                      "source",
                                      "url",
                                      "score",
                                      "rating",
                                      "reward",
                                      "margin",
                                      "category",
                                      "topic",
                                      "title",
                                      "split",
                                      "lang",
                                      "model",
                                      "meta",
                                      "metadata",
                                      "tags",
                                      "reasoning",
                                      "rationale",
                                      "solution",
                                      "problem",
                                      "user",
                                      "assistant",
                                      "targets",
                                      "segments",
                                      "data",
                                      "Prompt",
                                      "TEXT",
                                      "prompt "};

static const char *const values[] = {
    "\"zebra\"", "[\"zebra\",\"yak\"]", "[{\"role\":\"zebra\"}]", "{\"zebra\":\"yak\"}", "7", "0.5",
    "true"};

/* Opens a row; *sample gets it. What is logged is in `logged`. */
static bl_status open_row(const row_case *c, const char *row, bl_sample *sample)
{
    bl_dataset_options options = bl_dataset_default_options(path);
    bl_dataset *dataset = NULL;
    int saved = dup(STDERR_FILENO);
    size_t n_bytes = strlen(row);

    assert_true(saved >= 0 && ftruncate(rows_fd, 0) == 0 && ftruncate(log_fd, 0) == 0);
    assert_int_equal(pwrite(rows_fd, row, n_bytes, 0), n_bytes);
    assert_int_equal(lseek(log_fd, 0, SEEK_SET), 0);
    options.format = c->format;
    options.chat_template = c->chat_template;
    options.eos_id = 0;
    options.n_threads = 1;
    dup2(log_fd, STDERR_FILENO);
    bl_status st = bl_dataset_open(&options, tokenizer, &dataset);
    dup2(saved, STDERR_FILENO);
    close(saved);
    ssize_t n = pread(log_fd, logged, sizeof logged - 1, 0);
    assert_true(n >= 0);
    logged[n] = '\0';
    *sample = (bl_sample){0};
    if (st != BL_OK) return st;
    assert_int_equal(bl_dataset_get(dataset, 0, sample), BL_OK);
    bl_dataset_close(dataset);
    return BL_OK;
}

static bool is_same(const bl_sample *a, const bl_sample *b)
{
    size_t n_bytes = (size_t)a->n_tokens * sizeof *a->ids;

    return a->n_tokens == b->n_tokens && !memcmp(a->ids, b->ids, n_bytes) &&
           !memcmp(a->labels, b->labels, n_bytes) && !a->weights == !b->weights &&
           a->is_desirable == b->is_desirable;
}

/* The sample of the row, which is valid and without a warning. */
static bl_sample plain_sample(const row_case *c, const char *row)
{
    bl_sample sample;

    if (open_row(c, row, &sample) != BL_OK) fail_msg("%s: %s", row, bl_error_text());
    if (strstr(logged, "warning")) fail_msg("%s: %s", row, logged);
    return sample;
}

/* Columns that make the row one of another format, whose error may name another key. */
static bool selects_format(const char *column)
{
    static const char *const keys[] = {"messages", "conversations", "instruction",
                                       "prompt",   "question",      "input_ids"};
    for (size_t i = 0; i < BL_COUNT(keys); i++)
        if (!strcmp(column, keys[i])) return true;
    return false;
}

static void test_every_column_is_used_or_named(void **state)
{
    size_t n_silent = 0;

    (void)state;
    for (size_t f = 0; f < BL_COUNT(formats); f++) {
        char row[1024];
        snprintf(row, sizeof row, "%s}", formats[f].row);
        bl_sample plain = plain_sample(&formats[f], row);
        for (size_t i = 0; i < BL_COUNT(columns) * BL_COUNT(values); i++) {
            const char *column = columns[i / BL_COUNT(values)];
            bl_sample sample;
            char key[64];
            snprintf(key, sizeof key, "\"%s\":", column);
            snprintf(row, sizeof row, "%s,%s%s}", formats[f].row, key,
                     values[i % BL_COUNT(values)]);
            /* True asks for what happens anyway. */
            bool asks = !strcmp(values[i % BL_COUNT(values)], "true") &&
                        (strstr(column, "train") || strstr(column, "weight") ||
                         strstr(column, "loss") || !strcmp(column, "kto_tag"));
            if (strstr(formats[f].row, key) || asks) continue;
            bl_status st = open_row(&formats[f], row, &sample);
            bool is_named = st == BL_OK ? strstr(logged, column) && strstr(logged, "not used: ")
                                        : strstr(bl_error_text(), column) || selects_format(column);
            if (!is_named && (st != BL_OK || is_same(&plain, &sample))) {
                print_error("%s: %s\n", row, st == BL_OK ? "silent" : bl_error_text());
                n_silent++;
            }
            bl_sample_free(&sample);
        }
        bl_sample_free(&plain);
    }
    assert_int_equal(n_silent, 0);
}

/* ---- rows that mean the same ---- */

static const struct {
    row_case row, same;
} twins[] = {
    /* LLaMA-Factory's preferences */
    {{BL_DATA_AUTO, NULL,
      "{\"instruction\":\"ask\",\"input\":\"it\",\"chosen\":\"tell\",\"rejected\":\"lie\"}"},
     {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\\nit\",\"chosen\":\"tell\",\"rejected\":\"lie\"}"}},
    {{BL_DATA_AUTO, NULL,
      "{\"instruction\":\"ask\",\"input\":\"\",\"chosen\":\"tell\",\"rejected\":\"lie\"}"},
     {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\",\"chosen\":\"tell\",\"rejected\":\"lie\"}"}},
    {{BL_DATA_AUTO, NULL, "{\"question\":\"ask\",\"chosen\":\"tell\",\"rejected\":\"lie\"}"},
     {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\",\"chosen\":\"tell\",\"rejected\":\"lie\"}"}},
    {{BL_DATA_AUTO, NULL, "{\"query\":\"ask\",\"chosen\":\"tell\",\"rejected\":\"lie\"}"},
     {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\",\"chosen\":\"tell\",\"rejected\":\"lie\"}"}},
    {{BL_DATA_AUTO, "llama3",
      "{\"conversations\":[{\"from\":\"human\",\"value\":\"ask\"}],\"chosen\":{\"from\":\"gpt\","
      "\"value\":\"tell\"},\"rejected\":{\"from\":\"gpt\",\"value\":\"lie\"}}"},
     {BL_DATA_AUTO, "llama3", "{\"prompt\":" ASK ",\"chosen\":" TELL ",\"rejected\":" LIE "}"}},
    /* a prompt that is a text beside messages */
    {{BL_DATA_AUTO, "llama3", "{\"prompt\":\"ask\",\"chosen\":" TELL ",\"rejected\":" LIE "}"},
     {BL_DATA_AUTO, "llama3", "{\"prompt\":" ASK ",\"chosen\":" TELL ",\"rejected\":" LIE "}"}},
    {{BL_DATA_AUTO, "llama3", "{\"question\":\"ask\",\"chosen\":" TELL ",\"rejected\":" LIE "}"},
     {BL_DATA_AUTO, "llama3", "{\"prompt\":" ASK ",\"chosen\":" TELL ",\"rejected\":" LIE "}"}},
    {{BL_DATA_UNPAIRED_PREFERENCE, NULL,
      "{\"instruction\":\"ask\",\"completion\":\"tell\",\"label\":false}"},
     {BL_DATA_UNPAIRED_PREFERENCE, NULL,
      "{\"prompt\":\"ask\",\"completion\":\"tell\",\"label\":false}"}},
    /* system_prompt, and questions of other names */
    {{BL_DATA_AUTO, "llama3", "{\"system_prompt\":\"be\",\"messages\":" TURNS "}"},
     {BL_DATA_AUTO, "llama3", "{\"system\":\"be\",\"messages\":" TURNS "}"}},
    {{BL_DATA_AUTO, WRITTEN, "{\"system_prompt\":\"be\",\"conversations\":" SHARED "}"},
     {BL_DATA_AUTO, WRITTEN, "{\"system\":\"be\",\"messages\":" TURNS "}"}},
    {{BL_DATA_MESSAGES, "llama3",
      "{\"system_prompt\":\"be\",\"question\":\"ask\",\"response\":\"tell\"}"},
     {BL_DATA_AUTO, "llama3", "{\"system\":\"be\",\"messages\":" TURNS "}"}},
    {{BL_DATA_AUTO, NULL, "{\"input\":\"ask\",\"output\":\"tell\"}"},
     {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\",\"completion\":\"tell\"}"}},
    {{BL_DATA_AUTO, NULL, "{\"question\":\"ask\",\"response\":\"tell\"}"},
     {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\",\"completion\":\"tell\"}"}},
    {{BL_DATA_AUTO, NULL, "{\"user\":\"ask\",\"assistant\":\"tell\"}"},
     {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\",\"completion\":\"tell\"}"}},
    {{BL_DATA_AUTO, NULL, "{\"problem\":\"ask\",\"solution\":\"tell\"}"},
     {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\",\"completion\":\"tell\"}"}},
    {{BL_DATA_AUTO, NULL, "{\"inputs\":\"ask\",\"targets\":\"tell\"}"},
     {BL_DATA_AUTO, NULL, "{\"prompt\":\"ask\",\"completion\":\"tell\"}"}},
    /* torchtune's flag */
    {{BL_DATA_AUTO, "llama3",
      "{\"messages\":[{\"role\":\"user\",\"content\":\"ask\",\"masked\":true},"
      "{\"role\":\"assistant\",\"content\":\"tell\",\"masked\":false}]}"},
     {BL_DATA_AUTO, "llama3", "{\"messages\":" TURNS "}"}},
};

static void test_rows_of_other_trainers(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(twins); i++) {
        bl_sample sample = plain_sample(&twins[i].row, twins[i].row.row),
                  same = plain_sample(&twins[i].same, twins[i].same.row);
        if (!is_same(&sample, &same)) fail_msg("%s is not %s", twins[i].row.row, twins[i].same.row);
        bl_sample_free(&sample);
        bl_sample_free(&same);
    }
}

/* ---- refusals and warnings ---- */

#define SAY(more)                                                                                  \
    "{\"messages\":[{\"role\":\"user\",\"content\":\"ask\"},{\"role\":\"assistant\",\"content\":"  \
    "\"tell\"" more "}]}"
#define FLAGGED(key)                                                                               \
    SAY(",\"" key "\":\"false\""), SAY(",\"" key "\":\"no\""), SAY(",\"" key "\":0.5"),            \
        SAY(",\"" key "\":2"), SAY(",\"" key "\":[]"), SAY(",\"" key "\":{}")

static void test_flags_of_other_types(void **state)
{
    static const char *const rows[] = {FLAGGED("train"), FLAGGED("training"), FLAGGED("trainable"),
                                       FLAGGED("loss"),  FLAGGED("weight"),   FLAGGED("masked")};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(rows); i++)
        for (int k = 0; k < 2; k++) {
            row_case c = {BL_DATA_AUTO, k ? WRITTEN : "llama3", rows[i]};
            bl_sample sample;
            if (open_row(&c, rows[i], &sample) != BL_EINPUT ||
                !strstr(bl_error_text(), ":1: message 1: key ") ||
                !strstr(bl_error_text(), "expected true, false, 0 or 1"))
                fail_msg("%s: %s", rows[i], bl_error_text());
        }
}

static const struct {
    row_case row;
    bl_status status;
    const char *says; /* in the error, or the log */
} spoken[] = {
    {{BL_DATA_AUTO, NULL, "{\"promt\":\"a\",\"completion\":\"b\"}"},
     BL_EINPUT,
     "has the keys of this row: promt, completion; did you mean prompt for promt?"},
    {{BL_DATA_AUTO, NULL, "{\"foo\":\"a\",\"bar\":\"b\"}"},
     BL_EINPUT,
     "has the keys of this row: foo, bar; known are chosen and rejected, input_ids, messages"},
    {{BL_DATA_AUTO, NULL, "{\"data\":[{\"text\":\"a\"}],\"version\":1}"},
     BL_EINPUT,
     "if data is the list of rows, write the list alone"},
    {{BL_DATA_TEXT, NULL, "{\"train\":[{\"text\":\"a\"}]}"},
     BL_EINPUT,
     "if train is the list of rows, write the list alone"},
    {{BL_DATA_PREFERENCE, NULL, "{\"prompt\":\"a\",\"completion\":\"b\"}"},
     BL_EINPUT,
     "no known data format of the name preference has the keys of this row: prompt, completion"},
    {{BL_DATA_AUTO, NULL, "{\"text\":\"a\"}\n{\"txt\":\"a\"}"},
     BL_EINPUT,
     ":2: key text: missing; this row has txt"},
    {{BL_DATA_AUTO, NULL,
      "{\"prompt\":{\"0\":\"a\",\"1\":\"b\"},\"completion\":{\"0\":\"c\",\"1\":\"d\"}}"},
     BL_EINPUT,
     "a whole table in one object"},
    {{BL_DATA_MESSAGES, "llama3", "{\"messages\":{\"0\":[],\"1\":[]}}"},
     BL_EINPUT,
     "a whole table in one object"},
    {{BL_DATA_AUTO, NULL, "{\"0\":{\"text\":\"a\"},\"1\":{\"text\":\"b\"}}"},
     BL_EINPUT,
     "a whole table in one object"},
    {{BL_DATA_AUTO, NULL, "{\"columns\":[\"text\"],\"index\":[0],\"data\":[[\"a\"]]}"},
     BL_EINPUT,
     "orient=\"records\", lines=True"},
    {{BL_DATA_AUTO, NULL, "{\"schema\":{},\"data\":[{\"text\":\"a\"}]}"},
     BL_EINPUT,
     "orient=\"records\", lines=True"},
    {{BL_DATA_AUTO, NULL, "{\"prompt\":[\"a\",\"b\"],\"completion\":[\"c\",\"d\"]}"},
     BL_EINPUT,
     "a whole table in one object"},
    {{BL_DATA_AUTO, NULL, "{\"messages\":\"[{'role': 'user'}]\"}"},
     BL_EINPUT,
     "key messages: expected an array, got one written as a text"},
    {{BL_DATA_AUTO, NULL,
      "{\"chosen\":\"[{'role': 'user', 'content': 'a'}]\",\"rejected\":\"[{'role': 'b'}]\"}"},
     BL_EINPUT,
     "a list of messages that is written as a text"},
    {{BL_DATA_AUTO, NULL, "{\"question\":\"a\",\"context\":\"b\",\"answer\":\"c\"}"},
     BL_EINPUT,
     ":1: key context: expected null, got \"b\": it would not be learned"},
    {{BL_DATA_AUTO, NULL, "{\"prompt\":\"a\",\"completion\":\"b\",\"label\":false}"},
     BL_EINPUT,
     "key label: false: an answer marked as bad"},
    {{BL_DATA_AUTO, "llama3", "{\"messages\":" TURNS ",\"rejected_response\":\"lie\"}"},
     BL_EINPUT,
     "key rejected_response: expected null, got \"lie\": only rows of preferences"},
    {{BL_DATA_AUTO, "llama3", "{\"prompt\":\"other\",\"chosen\":" TURNS ",\"rejected\":" TURNS "}"},
     BL_EINPUT,
     "the prompt is not in the messages of the answers"},
    {{BL_DATA_AUTO, "llama3", "{\"system\":\"a\",\"system_prompt\":\"b\",\"messages\":" TURNS "}"},
     BL_EINPUT,
     "keys system and system_prompt: give one of them"},
    {{BL_DATA_AUTO, WRITTEN, SAY(",\"reasoning_content\":\"hm\"")},
     BL_EINPUT,
     "message 1: key reasoning_content: expected null, got \"hm\": this chat template does not"},
    {{BL_DATA_AUTO, WRITTEN,
      "{\"messages\":[{\"role\":\"user\",\"content\":\"a\"},{\"role\":\"assistant\","
      "\"content\":null,\"tool_calls\":[{\"id\":\"x\"}]}]}"},
     BL_EINPUT,
     "message 1: key tool_calls: expected null, got [{\"id\":\"x\"}]: tool calls are not"},
    {{BL_DATA_AUTO,
      "{% for m in messages %}{{ m.role }}:{{ m.content }};{% endfor %}"
      "{% if add_generation_prompt %}model>{% endif %}",
      "{\"messages\":" TURNS "}"},
     BL_EINPUT,
     "give a chat_template with {% generation %} around answers"},
    /* flags that preferences do not have */
    {{BL_DATA_AUTO, "llama3",
      "{\"prompt\":" ASK ",\"chosen\":[{\"role\":\"assistant\",\"content\":\"a\",\"train\":false},"
      "{\"role\":\"assistant\",\"content\":\"b\"}],\"rejected\":" LIE "}"},
     BL_EINPUT,
     "message 0 of the answer: key train: this message has loss"},
    {{BL_DATA_AUTO, NULL, "{\"prompt\":\"a\",\"chosen\":\"b\",\"rejected\":\"c\",\"train\":false}"},
     BL_EINPUT,
     "key train: expected true or 1, got false: rows have no flags"},
    /* other trainers' rows */
    {{BL_DATA_AUTO, NULL, "{\"query\":\"a\",\"response\":\"b\",\"rejected_response\":\"c\"}"},
     BL_EINPUT,
     "key rejected_response: expected null, got \"c\": only rows of preferences"},
    {{BL_DATA_AUTO, NULL,
      "{\"instruction\":\"a\",\"chosen_response\":\"b\",\"rejected_response\":\"c\"}"},
     BL_EINPUT,
     "the keys of this row: instruction, chosen_response, rejected_response"},
    {{BL_DATA_AUTO, NULL, "{\"segments\":[{\"label\":true,\"text\":\"a\"}]}"},
     BL_EINPUT,
     "the keys of this row: segments"},
    {{BL_DATA_AUTO, NULL, "{\"prompt\":\"a\",\"suffix\":\"c\",\"completion\":\"b\"}"},
     BL_EINPUT,
     "key suffix: expected null, got \"c\": it would not be learned"},
    {{BL_DATA_AUTO, NULL, "{\"question\":\"a\",\"choices\":[\"b\",\"c\"],\"answer\":\"b\"}"},
     BL_EINPUT,
     "key choices: expected null, got [\"b\",\"c\"]: it would not be learned"},
    {{BL_DATA_UNPAIRED_PREFERENCE, NULL,
      "{\"instruction\":\"a\",\"output\":\"b\",\"kto_tag\":true}"},
     BL_EINPUT,
     "the keys of this row: instruction, output, kto_tag; known are completion and label"},
    {{BL_DATA_AUTO, "llama3", "{\"messages\":" TURNS ",\"label\":false}"},
     BL_EINPUT,
     "key label: false: an answer marked as bad"},
    {{BL_DATA_AUTO, "llama3", SAY(",\"loss_scale\":0.3")}, BL_EINPUT, "key loss_scale: expected 1"},
    {{BL_DATA_AUTO, "llama3", SAY(",\"refusal\":\"no\"")}, BL_EINPUT, "key refusal: expected null"},
    {{BL_DATA_AUTO, WRITTEN, SAY(",\"thinking\":\"hm\"")},
     BL_EINPUT,
     "key thinking: expected null"},
    {{BL_DATA_AUTO, WRITTEN, "{\"messages\":" TURNS ",\"chat_template_kwargs\":3}"},
     BL_EINPUT,
     "key chat_template_kwargs: expected an object, got 3"},
    {{BL_DATA_AUTO, WRITTEN, "{\"messages\":" TURNS ",\"functions\":[1],\"tools\":[1]}"},
     BL_EINPUT,
     "keys functions and tools: give one of them"},
    {{BL_DATA_AUTO, "llama3", SAY(",\"name\":\"bob\"")}, BL_OK, "keys that are not used: name\n"},
    {{BL_DATA_AUTO, "llama3",
      "{\"prompt\":\"ask\",\"prompt_id\":\"x\",\"chosen\":" TURNS ",\"rejected\":" TURNS
      ",\"messages\":" TURNS ",\"score_chosen\":1.5}"},
     BL_OK,
     "keys that are not used: prompt_id, messages, score_chosen\n"},
    /* copies, and columns without meaning */
    {{BL_DATA_AUTO, "llama3", "{\"messages\":" TURNS ",\"question\":\"ask\",\"id\":3}"},
     BL_OK,
     "keys that are not used: question, id\n"},
    {{BL_DATA_AUTO, "llama3",
      "{\"messages\":" TURNS ",\"prompt\":\"other\",\"_id\":3,\"meta\":{}}"},
     BL_OK,
     "keys that are not used: prompt\n"},
    {{BL_DATA_AUTO, NULL,
      "{\"text\":\"a\",\"b\":1}\n{\"text\":\"a\",\"c\":1,\"b\":2}\n{\"text\":\"a\",\"c\":\"\","
      "\"a\":0}"},
     BL_OK,
     "keys that are not used: b, c, a\n"},
};

static void test_what_is_said(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(spoken); i++) {
        bl_sample sample;
        bl_status st = open_row(&spoken[i].row, spoken[i].row.row, &sample);
        if (st != spoken[i].status || !strstr(st ? bl_error_text() : logged, spoken[i].says))
            fail_msg("%s: status %d: \"%s\" does not say \"%s\"", spoken[i].row.row, (int)st,
                     st ? bl_error_text() : logged, spoken[i].says);
        bl_sample_free(&sample);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_every_column_is_used_or_named),
        cmocka_unit_test(test_rows_of_other_trainers),
        cmocka_unit_test(test_flags_of_other_types),
        cmocka_unit_test(test_what_is_said),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
