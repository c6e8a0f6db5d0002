/* SPDX-License-Identifier: Apache-2.0 */
/* Files of tokenizers made to stall or to fill the memory: each ends by a limit, with a reason. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/clock.h"
#include "base/files.h"
#include "base/sizes.h"
#include "small_models.h"
#include "tokenizer/tokenizer.h"

/* Seconds that the clocks show, and that each look at them adds. */
static double time_s, look_s;

double __wrap_bl_now_s(void);
double __wrap_bl_thread_processor_s(void);

double __wrap_bl_now_s(void)
{
    return time_s += look_s;
}

double __wrap_bl_thread_processor_s(void)
{
    return time_s;
}

static char folder[] = "/tmp/ballast-hostile-XXXXXX";

static bl_status load(const char *before, const char *repeated, size_t n, const char *after,
                      bl_tokenizer **out)
{
    char path[64], *text = malloc(strlen(before) + n * strlen(repeated) + strlen(after) + 1), *end;

    assert_non_null(text);
    end = stpcpy(text, before);
    for (size_t i = 0; i < n; i++) end = stpcpy(end, repeated);
    strcpy(end, after);
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    assert_int_equal(bl_file_write_atomic(path, text, strlen(text)), BL_OK);
    free(text);
    return bl_tokenizer_load(path, out);
}

#define NORMALIZER(before) "{\"normalizer\":{\"type\":" before
#define REGEX(pattern)                                                                             \
    "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" pattern                     \
    "\"},\"behavior\":\"Isolated\",\"invert\":false}," GOOD_MODEL "}"
#define ADDED(before)                                                                              \
    "{\"added_tokens\":[{\"id\":4,\"single_word\":false,\"lstrip\":false,\"rstrip\":false,"        \
    "\"normalized\":false,\"special\":true,\"content\":\"" before

static void test_files(void **state)
{
    static const struct {
        const char *before, *repeated, *after, *reason;
        size_t n;
    } files[] = {
        {ADDED(""), "a", "\"}]," GOOD_MODEL "}", "has 1025 bytes, more than 1024", 1025},
        {"{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"", "a", "\",0]]}}", "more than 1024",
         1025},
        {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"", "a",
         "\"},\"behavior\":\"Isolated\",\"invert\":false}," GOOD_MODEL "}",
         "regex: more than 4096 bytes", 4097},
        {REGEX("(*LIMIT_MATCH=4000000000)a"), "", "", "a verb is not supported", 0},
        {REGEX("a|(*COMMIT)b"), "", "", "a verb is not supported", 0},
        {"{" MODEL(VOCAB, "[]", ",\"continuing_subword_prefix\":\""), "#", "\"}}",
         "more than 32 bytes", 33},
        {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[",
         "{\"SpecialToken\":"
         "{\"id\":\"x\"}},",
         "{\"Sequence\":{\"id\":\"A\"}}],\"special_tokens\":{\"x\":{\"ids\":"
         "[0,0,0,0,0,0,0,0]}}}," GOOD_MODEL "}",
         "more than 4096 ids around a text", 513},
    };
    bl_tokenizer *tokenizer;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(files); i++) {
        if (load(files[i].before, files[i].repeated, files[i].n, files[i].after, &tokenizer) !=
                BL_EINPUT ||
            !strstr(bl_error_text(), files[i].reason))
            fail_msg("%s: %s", files[i].before, bl_error_text());
    }
}

/* Text of n letters a: BL_EINPUT for `reason`, or, NULL, BL_OK. */
static void check_text(bl_tokenizer *tokenizer, size_t n, const char *reason)
{
    char *text = malloc(n + 1);
    bl_ids ids = {0};

    assert_non_null(text);
    memset(text, 'a', n);
    bl_status st = bl_tokenizer_encode(tokenizer, text, n, 0, &ids);
    if (st != (reason ? BL_EINPUT : BL_OK) || (reason && !strstr(bl_error_text(), reason)))
        fail_msg("%zu letters: status %d: %s", n, (int)st, bl_error_text());
    bl_ids_free(&ids);
    free(text);
}

/* No step makes more than 64 bytes of each: the bytes behind the limit are never written. */
static void test_normalizers(void **state)
{
    static const char *const files[] = {
        NORMALIZER("\"Replace\",\"pattern\":{\"String\":\"a\"},\"content\":\""),
        NORMALIZER("\"Replace\",\"pattern\":{\"Regex\":\"a\"},\"content\":\""),
        NORMALIZER("\"Prepend\",\"prepend\":\""),
    };
    bl_tokenizer *tokenizer;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(files); i++) {
        assert_int_equal(load(files[i], "b", 1 << 20, "\"}," GOOD_MODEL "}", &tokenizer), BL_OK);
        check_text(tokenizer, 5000, "makes more than 385536 bytes");
        bl_tokenizer_destroy(tokenizer);
    }
}

static void test_regexes(void **state)
{
    static const char *const patterns[] = {REGEX("(?:a{0,200}){0,3}b|x"), REGEX("(?:a|a|aa)+b|x"),
                                           REGEX("a*a*a*a*b|x")};
    bl_tokenizer *tokenizer;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(patterns); i++) {
        assert_int_equal(load(patterns[i], "", 0, "", &tokenizer), BL_OK);
        check_text(tokenizer, 5000, "takes too many steps");
        bl_tokenizer_destroy(tokenizer);
    }
    assert_int_equal(load(REGEX("(?:a|b)+|\\\\s+"), "", 0, "", &tokenizer), BL_OK);
    check_text(tokenizer, 100000, NULL); /* long, and no backtracking */
    bl_tokenizer_destroy(tokenizer);
    assert_int_equal(load(REGEX("b|x"), "", 0, "", &tokenizer), BL_OK);
    check_text(tokenizer, 100000, NULL);
    look_s = 1;
    check_text(tokenizer, 100000, "more than 10 s for a text"); /* 98 looks without a match */
    check_text(tokenizer, 1000, NULL);
    look_s = 0;
    bl_tokenizer_destroy(tokenizer);
}

static void test_slow_tries(void **state)
{
    bl_tokenizer *tokenizer;
    (void)state;

    assert_int_equal(load(ADDED(""), "a", 1000, "b\"}]," GOOD_MODEL "}", &tokenizer), BL_OK);
    check_text(tokenizer, 20000, NULL);
    look_s = 1;
    check_text(tokenizer, 20000, "more than 10 s for a text");
    look_s = 0;
    bl_tokenizer_destroy(tokenizer);
    assert_int_equal(load("{\"model\":{\"type\":\"Unigram\",\"vocab\":[[\"a\",0],[\"", "a", 1000,
                          "b\",0]]}}", &tokenizer),
                     BL_OK);
    check_text(tokenizer, 20000, NULL);
    look_s = 1;
    check_text(tokenizer, 20000, "more than 10 s for a text");
    look_s = 0;
    bl_tokenizer_destroy(tokenizer);
}

/* A piece without ids, the first of a call. */
static void test_no_ids(void **state)
{
    bl_tokenizer *tokenizer;
    bl_ids ids = {0};
    (void)state;

    assert_int_equal(load("{" GOOD_MODEL "}", "", 0, "", &tokenizer), BL_OK);
    for (int i = 0; i < 2; i++)
        assert_int_equal(bl_tokenizer_encode(tokenizer, "z", 1, 0, &ids), BL_OK);
    assert_int_equal(ids.n, 0);
    bl_ids_free(&ids);
    bl_tokenizer_destroy(tokenizer);
}

static int make_folder(void **state)
{
    (void)state;
    return !mkdtemp(folder);
}

static int remove_folder(void **state)
{
    (void)state;
    return bl_tree_remove(folder) != BL_OK;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_files), cmocka_unit_test(test_normalizers),
        cmocka_unit_test(test_regexes), cmocka_unit_test(test_slow_tries),
        cmocka_unit_test(test_no_ids)};
    return cmocka_run_group_tests(tests, make_folder, remove_folder);
}
