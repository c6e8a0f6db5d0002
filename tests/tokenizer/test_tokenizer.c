/* SPDX-License-Identifier: Apache-2.0 */
/* Small tokenizers of every supported kind against what Hugging Face's `tokenizers` makes of the
 * same texts (fixtures/golden.json, made by tools/golden/text/make_fixtures.py); use from several
 * threads. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <pthread.h>
#include <unistd.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "chat/template.h"
#include "small_models.h"
#include "tokenizer/tokenizer.h"

static char warning[512];

void __wrap_bl_log_warning(const char *format, ...);
void __wrap_bl_log_warning(const char *format, ...)
{
    va_list args;
    va_start(args, format);
    vsnprintf(warning, sizeof warning, format, args);
    va_end(args);
}

#define FIXTURES "tests/tokenizer/fixtures/"

static bl_tokenizer *load(const char *path)
{
    bl_tokenizer *tokenizer;
    if (bl_tokenizer_load(path, &tokenizer) != BL_OK) fail_msg("%s", bl_error_text());
    return tokenizer;
}

static bl_tokenizer *load_fixture(const char *name)
{
    char path[128];
    snprintf(path, sizeof path, FIXTURES "%s.json", name);
    return load(path);
}

static void encode(const bl_tokenizer *tokenizer, const char *text, size_t n_bytes, unsigned flags,
                   bl_ids *ids)
{
    if (bl_tokenizer_encode(tokenizer, text, n_bytes, flags, ids) != BL_OK)
        fail_msg("%s", bl_error_text());
}

/* ---- golden fixtures ---- */

static void check_case(const bl_tokenizer *tokenizer, const char *name, const json_t *text,
                       const json_t *golden, bool parse)
{
    const json_t *list = json_object_get(golden, "ids"), *decoded = json_object_get(golden, "text");
    const char *bytes = json_string_value(text);
    bl_ids ids = {0};
    char *out;
    size_t n_out;

    encode(tokenizer, bytes, json_string_length(text),
           parse ? BL_PARSE_SPECIAL | BL_ADD_SPECIAL : 0u, &ids);
    if (ids.n != json_array_size(list))
        fail_msg("%s: \"%s\": %zu ids, expected %zu", name, bytes, ids.n, json_array_size(list));
    for (size_t i = 0; i < ids.n; i++)
        if (ids.id[i] != json_integer_value(json_array_get(list, i)))
            fail_msg("%s: \"%s\": id %zu is %d", name, bytes, i, ids.id[i]);
    assert_int_equal(bl_tokenizer_decode(tokenizer, ids.id, ids.n, parse, &out, &n_out), BL_OK);
    if (n_out != json_string_length(decoded) || memcmp(out, json_string_value(decoded), n_out))
        fail_msg("%s: \"%s\" decodes to \"%s\", expected \"%s\"", name, bytes, out,
                 json_string_value(decoded));
    free(out);
    bl_ids_free(&ids);
}

static void test_fixtures_give_reference_ids(void **state)
{
    json_t *golden;
    const char *name;
    const json_t *cases;
    size_t n_fixtures = 0;

    (void)state;
    if (bl_json_load(FIXTURES "golden.json", 1 << 22, &golden) != BL_OK)
        fail_msg("%s", bl_error_text());
    const json_t *texts = json_object_get(golden, "texts");
    size_t n_texts = json_array_size(texts);
    json_object_foreach(json_object_get(golden, "fixtures"), name, cases)
    {
        bl_tokenizer *tokenizer = load_fixture(name);
        assert_int_equal(json_array_size(cases), 2 * n_texts);
        /* Twice: the second time words come from the cache. */
        for (size_t i = 0; i < 4 * n_texts; i++)
            check_case(tokenizer, name, json_array_get(texts, i % n_texts),
                       json_array_get(cases, i % (2 * n_texts)), i % (2 * n_texts) >= n_texts);
        bl_tokenizer_destroy(tokenizer);
        n_fixtures++;
    }
    assert_int_equal(n_fixtures, 35);
    json_decref(golden);
}

/* ---- beyond what Hugging Face's library has ---- */

static void test_continuation_adds_no_space(void **state)
{
    static const char *const names[] = {"fallback", "byte_level", "fallback_across", "metaspace",
                                        "metaspace_always_split"};
    static const char first[] = "hello abc", second[] = "hello ab";

    (void)state;
    for (size_t i = 0; i < BL_COUNT(names); i++) {
        bl_tokenizer *tokenizer = load_fixture(names[i]);
        bl_ids ids = {0};
        char *text;
        encode(tokenizer, first, strlen(first), 0, &ids);
        encode(tokenizer, second, strlen(second), BL_CONTINUATION, &ids);
        assert_int_equal(bl_tokenizer_decode(tokenizer, ids.id, ids.n, false, &text, NULL), BL_OK);
        assert_string_equal(text + (*text == ' '),
                            "hello abchello ab"); /* byte_level keeps the space it put first */
        free(text);

        /* Only the beginning is a continuation, not what follows an added token. */
        bl_ids again = {0};
        ids.n = 0;
        encode(tokenizer, "<mask>ab", 8, 0, &ids);
        encode(tokenizer, "<mask>ab", 8, BL_CONTINUATION, &again);
        assert_int_equal(again.n, ids.n);
        assert_memory_equal(again.id, ids.id, ids.n * sizeof *ids.id);
        bl_ids_free(&again);
        bl_ids_free(&ids);
        bl_tokenizer_destroy(tokenizer);
    }
}

static void test_special_text_is_plain_unless_asked(void **state)
{
    bl_tokenizer *tokenizer = load_fixture("byte_level_split");
    int32_t end = bl_tokenizer_token_to_id(tokenizer, "<|end|>");
    bl_ids ids = {0};

    (void)state;
    assert_true(bl_tokenizer_is_special(tokenizer, end));
    encode(tokenizer, "<|end|>", 7, BL_PARSE_SPECIAL, &ids);
    assert_int_equal(ids.n, 1);
    assert_int_equal(ids.id[0], end);
    ids.n = 0;
    encode(tokenizer, "a<|end|>b", 9, 0, &ids);
    assert_true(ids.n > 3);
    for (size_t i = 0; i < ids.n; i++) assert_false(bl_tokenizer_is_special(tokenizer, ids.id[i]));
    bl_ids_free(&ids);
    bl_tokenizer_destroy(tokenizer);
}

/* Text behind a special token that the caller wrote is encoded as if the token stood in the
 * text. */
static void test_after_token_is_no_beginning(void **state)
{
    static const char *const names[] = {
        "metaspace",       "metaspace_always", "metaspace_never_split",
        "metaspace_steps", "fallback",         "byte_level"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(names); i++) {
        bl_tokenizer *tokenizer = load_fixture(names[i]);
        bl_ids whole = {0}, parts = {0};
        encode(tokenizer, "<|end|>hello abc", 16, BL_PARSE_SPECIAL, &whole);
        assert_int_equal(bl_ids_push(&parts, bl_tokenizer_token_to_id(tokenizer, "<|end|>")),
                         BL_OK);
        encode(tokenizer, "hello abc", 9, BL_AFTER_TOKEN, &parts);
        if (parts.n != whole.n || memcmp(parts.id, whole.id, whole.n * sizeof *whole.id))
            fail_msg("%s", names[i]);
        bl_ids_free(&whole);
        bl_ids_free(&parts);
        bl_tokenizer_destroy(tokenizer);
    }
}

static void test_bad_text_is_refused(void **state)
{
    static const char *const bad[] = {"ab\xff",           "\xc0\x80",         "\xe0\x9f\xbf",
                                      "\xf0\x8f\xbf\xbf", "\xf5\x80\x80\x80", "\xed\xa0\x80",
                                      "\xf4\x90\x80\x80", "abcdefgh\xe4\xbd", "\x80"};
    bl_tokenizer *tokenizer = load_fixture("fallback");
    bl_ids ids = {0};

    (void)state;
    encode(tokenizer, "ab", 2, 0, &ids);
    size_t n = ids.n;
    for (size_t i = 0; i < BL_COUNT(bad); i++)
        assert_int_equal(
            bl_tokenizer_encode(tokenizer, bad[i], strlen(bad[i]), BL_ADD_SPECIAL, &ids),
            BL_EINPUT);
    assert_int_equal(ids.n, n);
    bl_ids_free(&ids);
    bl_tokenizer_destroy(tokenizer);
}

/* A long piece without a place to cut: the heap must keep it n log n, and 2 M symbols must not
 * overflow anything. */
static void test_long_piece(void **state)
{
    enum { N = 1 << 20 };
    bl_tokenizer *tokenizer = load_fixture("fallback_across");
    char *text = malloc(2 * N), *decoded;
    bl_ids ids = {0};

    (void)state;
    for (size_t i = 0; i < N; i++) memcpy(text + 2 * i, "ab", 2);
    encode(tokenizer, text, 2 * N, 0, &ids);
    assert_int_equal(ids.n, N); /* "_ab", then "ab" */
    assert_int_equal(ids.id[1], bl_tokenizer_token_to_id(tokenizer, "ab"));
    assert_int_equal(bl_tokenizer_decode(tokenizer, ids.id, ids.n, false, &decoded, NULL), BL_OK);
    assert_int_equal(strlen(decoded), 2 * N);
    free(decoded);
    free(text);
    bl_ids_free(&ids);
    bl_tokenizer_destroy(tokenizer);
}

static void test_decode_skips_what_has_no_token(void **state)
{
    bl_tokenizer *tokenizer = load_fixture("fallback");
    const int32_t ids[] = {-5, 1 << 20, bl_tokenizer_token_to_id(tokenizer, "ab"), INT32_MIN,
                           INT32_MAX};
    char *text;

    (void)state;
    assert_int_equal(bl_tokenizer_decode(tokenizer, ids, BL_COUNT(ids), false, &text, NULL), BL_OK);
    assert_string_equal(text, "ab");
    free(text);
    assert_int_equal(bl_tokenizer_decode(tokenizer, NULL, 0, false, &text, NULL), BL_OK);
    assert_string_equal(text, "");
    free(text);
    assert_null(bl_tokenizer_id_to_token(tokenizer, -1));
    assert_null(bl_tokenizer_id_to_token(tokenizer, 1 << 20));
    assert_int_equal(bl_tokenizer_token_to_id(tokenizer, "no such token"), -1);
    assert_string_equal(bl_tokenizer_id_to_token(tokenizer, ids[2]), "ab");
    bl_tokenizer_destroy(tokenizer);
}

/* ---- threads ---- */

typedef struct encode_job {
    const bl_tokenizer *tokenizer;
    const bl_ids *expected;
    bool same;
} encode_job;

static const char thread_text[] =
    "hello hello abc <mask> abcab hello you'll 1234 \xc3\xa9t\xc3\xa9 <|end|> done";

static void *encode_often(void *arg)
{
    encode_job *job = arg;
    job->same = true;
    for (int i = 0; i < 2000; i++) {
        bl_ids ids = {0};
        bl_status st = bl_tokenizer_encode(job->tokenizer, thread_text, strlen(thread_text),
                                           BL_PARSE_SPECIAL, &ids);
        job->same &= st == BL_OK && ids.n == job->expected->n &&
                     !memcmp(ids.id, job->expected->id, ids.n * sizeof *ids.id);
        bl_ids_free(&ids);
    }
    return NULL;
}

static void test_threads_share_a_tokenizer(void **state)
{
    enum { N_THREADS = 4 };
    bl_tokenizer *tokenizer = load_fixture("byte_level_split");
    bl_ids expected = {0};
    pthread_t thread[N_THREADS];
    encode_job jobs[N_THREADS];

    (void)state;
    encode(tokenizer, thread_text, strlen(thread_text), BL_PARSE_SPECIAL, &expected);
    for (int i = 0; i < N_THREADS; i++) {
        jobs[i] = (encode_job){.tokenizer = tokenizer, .expected = &expected};
        assert_int_equal(pthread_create(&thread[i], NULL, encode_often, &jobs[i]), 0);
    }
    for (int i = 0; i < N_THREADS; i++) {
        pthread_join(thread[i], NULL);
        assert_true(jobs[i].same);
    }
    bl_ids_free(&expected);
    bl_tokenizer_destroy(tokenizer);
}

/* ---- a folder with configurations ---- */

static char folder[64];

static void write_file(const char *name, const char *text)
{
    char path[128];
    snprintf(path, sizeof path, "%s/%s", folder, name);
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    fputs(text, file);
    assert_int_equal(fclose(file), 0);
}

static int make_folder(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ballast-tokenizer-XXXXXX");
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

static void test_configurations_name_bos_and_eos(void **state)
{
    size_t n;

    (void)state;
    write_file("tokenizer.json",
               "{\"added_tokens\":[" TOKEN("3", "</s>") "," TOKEN("4", "<s>") "]," GOOD_MODEL "}");
    bl_tokenizer *tokenizer = load(folder);
    assert_int_equal(bl_tokenizer_bos(tokenizer), -1);
    bl_tokenizer_eos(tokenizer, &n);
    assert_int_equal(n, 0);
    assert_int_equal(bl_tokenizer_vocab_size(tokenizer), 5);
    bl_tokenizer_destroy(tokenizer);

    write_file("config.json", "{\"bos_token_id\":7,\"eos_token_id\":2}");
    tokenizer = load(folder);
    assert_int_equal(bl_tokenizer_bos(tokenizer), 7);
    assert_int_equal(bl_tokenizer_eos(tokenizer, &n)[0], 2);
    bl_tokenizer_destroy(tokenizer);

    /* Without a limit transformers writes int(1e30). */
    write_file("tokenizer_config.json",
               "{\"model_max_length\":1000000000000000019884624838656,\"bos_token\":\"<s>\","
               "\"eos_token\":{\"content\":\"</s>\"}}");
    write_file("generation_config.json", "{\"bos_token_id\":7,\"eos_token_id\":[1,3,0]}");
    tokenizer = load(folder);
    assert_int_equal(bl_tokenizer_bos(tokenizer), 4);
    const int32_t *eos = bl_tokenizer_eos(tokenizer, &n);
    assert_int_equal(n, 3); /* the tokenizer's own first, none twice, config.json not asked */
    assert_int_equal(eos[0], 3);
    assert_int_equal(eos[1], 1);
    assert_int_equal(eos[2], 0);
    bl_tokenizer_destroy(tokenizer);
    assert_non_null(strstr(warning, "/config.json: ignored, as tokenizer_config.json and "
                                    "generation_config.json count: bos_token_id, eos_token_id"));

    /* Of generation_config.json, what is neither read nor a default of sampling is named. */
    write_file("config.json", "{\"bos_token_id\":4}");
    write_file("generation_config.json",
               "{\"eos_token_id\":2,\"temperature\":0.7,\"stop_strings\":[\"x\"],\"_c\":1,"
               "\"transformers_version\":\"5\",\"later\":null}");
    warning[0] = '\0';
    bl_tokenizer_destroy(load(folder));
    assert_string_equal(warning, "");
    write_file("generation_config.json", "{\"eos_token_ids\":2,\"think_end\":[7]}");
    bl_tokenizer_destroy(load(folder));
    assert_non_null(strstr(warning, "generation_config.json: ignored, as no such keys are known: "
                                    "eos_token_ids, think_end"));

    write_file("tokenizer_config.json", "{\"eos_token\":\"<nowhere>\"}");
    tokenizer = load(folder); /* as in transformers: the next id */
    eos = bl_tokenizer_eos(tokenizer, &n);
    assert_int_equal(eos[0], bl_tokenizer_token_to_id(tokenizer, "<nowhere>"));
    assert_int_equal(eos[0], bl_tokenizer_vocab_size(tokenizer) - 1);
    assert_true(bl_tokenizer_is_special(tokenizer, eos[0]));
    bl_tokenizer_destroy(tokenizer);
    write_file("tokenizer_config.json", "{\"eos_token\":7}");
    assert_int_equal(bl_tokenizer_load(folder, &tokenizer), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "tokenizer_config.json: key eos_token"));

    write_file("tokenizer_config.json", "{\"chat_template\":\"{{ x }}\\u0000\"}");
    assert_int_equal(bl_tokenizer_load(folder, &tokenizer), BL_EINPUT);
    assert_non_null(strstr(
        bl_error_text(), "tokenizer_config.json: key chat_template: expected a text without NUL"));
    write_file("tokenizer_config.json", "{}");
    write_file("generation_config.json", "{\"eos_token_id\":[1,1000000000000000019884624838656]}");
    assert_int_equal(bl_tokenizer_load(folder, &tokenizer), BL_EINPUT);
    assert_non_null(
        strstr(bl_error_text(),
               "generation_config.json: key eos_token_id: expected a token id, got 1e30"));
}

/* Metaspace with prepend_scheme first: text behind a special token of the template is not a
 * beginning, as where the whole conversation is tokenized as one text. */
static void test_chat_text_behind_a_token(void **state)
{
    static const bl_chat_message messages[] = {{.role = BL_CHAT_USER, .content = "ab"},
                                               {.role = BL_CHAT_ASSISTANT, .content = "a b"}};
    static const char whole[] = "<s>[INST] ab [/INST] a b </s>";
    bl_ids ids = {0}, labels = {0}, expected = {0};
    char *text, path[128];
    bl_chat_template *chat;
    json_t *file;

    (void)state;
    assert_int_equal(bl_json_load("tests/tokenizer/fixtures/chat_spm.json", 1 << 20, &file), BL_OK);
    json_object_set_new(file, "normalizer", json_null());
    json_object_set_new(file, "pre_tokenizer",
                        json_pack("{s:s, s:s, s:s, s:b}", "type", "Metaspace", "replacement",
                                  "\u2581", "prepend_scheme", "first", "split", 0));
    text = json_dumps(file, 0);
    write_file("metaspace.json", text);
    snprintf(path, sizeof path, "%s/metaspace.json", folder);
    bl_tokenizer *tokenizer = load(path);
    assert_int_equal(bl_chat_template_load("llama2", NULL, tokenizer, &chat), BL_OK);
    assert_int_equal(bl_chat_template_encode(chat, messages, 2, NULL, true, &ids, &labels), BL_OK);
    assert_int_equal(
        bl_tokenizer_encode(tokenizer, whole, strlen(whole), BL_PARSE_SPECIAL, &expected), BL_OK);
    /* The template's border before the answer splits no token here. */
    assert_int_equal(ids.n, expected.n);
    assert_memory_equal(ids.id, expected.id, ids.n * sizeof *ids.id);
    bl_ids_free(&ids);
    bl_ids_free(&labels);
    bl_ids_free(&expected);
    bl_chat_template_destroy(chat);
    bl_tokenizer_destroy(tokenizer);
    free(text);
    json_decref(file);
}

/* ignore_merges looks whole pieces up in the vocabulary, which may list special tokens too. */
static void test_a_whole_piece_is_never_special(void **state)
{
    bl_ids ids = {0};

    (void)state;
    write_file("tokenizer.json", "{\"added_tokens\":[" TOKEN("2", "ab") "]," MODEL(
                                     VOCAB, "[]", ",\"ignore_merges\":true") "}");
    bl_tokenizer *tokenizer = load(folder);
    encode(tokenizer, "ab", 2, 0, &ids);
    assert_int_equal(ids.n, 2);
    ids.n = 0;
    encode(tokenizer, "ab", 2, BL_PARSE_SPECIAL, &ids);
    assert_int_equal(ids.n, 1);
    assert_int_equal(ids.id[0], 2);
    bl_ids_free(&ids);
    bl_tokenizer_destroy(tokenizer);
}

static void test_strip_takes_off_both_ends(void **state)
{
    const int32_t ids[] = {0, 0, 2, 1, 0, 0};
    char *text;

    (void)state;
    write_file("tokenizer.json",
               "{\"decoder\":{\"type\":\"Sequence\",\"decoders\":[{\"type\":\"Fuse\"},"
               "{\"type\":\"Strip\",\"content\":\"a\",\"start\":2,\"stop\":1}]}," GOOD_MODEL "}");
    bl_tokenizer *tokenizer = load(folder);
    assert_int_equal(bl_tokenizer_decode(tokenizer, ids, 6, false, &text, NULL), BL_OK);
    assert_string_equal(text, "abba"); /* of "aa" "ab" "b" "aa", two before and one behind */
    free(text);
    for (size_t n = 0; n <= 1; n++) {
        assert_int_equal(bl_tokenizer_decode(tokenizer, ids, n, false, &text, NULL), BL_OK);
        assert_string_equal(text, "");
        free(text);
    }
    bl_tokenizer_destroy(tokenizer);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fixtures_give_reference_ids),
        cmocka_unit_test(test_continuation_adds_no_space),
        cmocka_unit_test(test_special_text_is_plain_unless_asked),
        cmocka_unit_test(test_after_token_is_no_beginning),
        cmocka_unit_test(test_bad_text_is_refused),
        cmocka_unit_test(test_long_piece),
        cmocka_unit_test(test_decode_skips_what_has_no_token),
        cmocka_unit_test(test_threads_share_a_tokenizer),
        cmocka_unit_test_setup_teardown(test_configurations_name_bos_and_eos, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(test_a_whole_piece_is_never_special, make_folder,
                                        remove_folder),
        cmocka_unit_test_setup_teardown(test_strip_takes_off_both_ends, make_folder, remove_folder),
        cmocka_unit_test_setup_teardown(test_chat_text_behind_a_token, make_folder, remove_folder),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
