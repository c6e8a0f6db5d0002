/* SPDX-License-Identifier: Apache-2.0 */
/* The text of an answer while it grows: pieces are whole characters, whose sequence is the text;
 * stop texts are in no piece, however tokens cut them. Tokens are single bytes, the worst case. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "cli/generate_internal.h"
#include "tokenizer/text.h"

enum { MAX_BYTES = 4096 };

static bl_tokenizer *tokenizer, *by_alphabet, *by_fallback;

/* A token per byte: of the byte alphabet, or a letter or a byte token. */
static void encode_bytes(const char *text, bl_ids *ids)
{
    ids->n = 0;
    for (const char *at = text; *at; at++) {
        bl_bytes name = {0};
        char byte_token[8];
        snprintf(byte_token, sizeof byte_token, "<0x%02X>", (unsigned)(unsigned char)*at);
        if (tokenizer == by_fallback && !(*at >= 'a' && *at <= 'z'))
            assert_int_equal(bl_bytes_append(&name, byte_token, strlen(byte_token)), BL_OK);
        else
            assert_int_equal(bl_bytes_append_to_alphabet(&name, at, 1), BL_OK);
        assert_int_equal(bl_bytes_append(&name, "", 1), BL_OK);
        int32_t id = bl_tokenizer_token_to_id(tokenizer, name.data);
        assert_true(id >= 0);
        assert_int_equal(bl_ids_push(ids, id), BL_OK);
        bl_bytes_free(&name);
    }
}

/* What the pieces give, token by token; every piece is UTF-8 without a replaced character. */
static const char *play(const char *text, size_t begin, const char *stop, const char **stopped)
{
    static char whole[MAX_BYTES];
    bl_stop_texts stops;
    bl_ids ids = {0};
    size_t used = 0;

    assert_int_equal(bl_stop_texts_read(stop, &stops), BL_OK);
    encode_bytes(text, &ids);
    bl_answer_text answer = {
        .tokenizer = tokenizer, .stops = &stops, .begin = begin, .shown = begin};
    for (size_t n = begin; n <= ids.n + 1; n++) {
        bool is_last = n > ids.n;
        char *piece;
        size_t n_bytes;
        assert_int_equal(
            bl_answer_text_next(&answer, ids.id, is_last ? ids.n : n, is_last, &piece, &n_bytes),
            BL_OK);
        assert_int_equal(bl_utf8_valid_prefix(piece, n_bytes), n_bytes);
        if (!is_last) assert_null(strstr(piece, "\xEF\xBF\xBD"));
        assert_true(used + n_bytes < sizeof whole);
        memcpy(whole + used, piece, n_bytes);
        used += n_bytes;
        free(piece);
    }
    whole[used] = '\0';
    if (stopped) {
        *stopped = NULL; /* the session's text ends with it */
        for (size_t i = 0; i < stops.n; i++)
            if (answer.stop == stops.text[i]) *stopped = strstr(stop, answer.stop);
    }
    bl_stop_texts_free(&stops);
    bl_ids_free(&ids);
    return whole;
}

static void test_whole_characters(void **state)
{
    static const char *const texts[] = {"plain", "na\xC3\xAFve",
                                        "\xF0\x9F\x9A\xA2 and \xE2\x82\xAC",
                                        "\xE6\x97\xA5\xE6\x9C\xAC\xE8\xAA\x9E"};

    (void)state;
    for (size_t i = 0; i < BL_COUNT(texts); i++)
        assert_string_equal(play(texts[i], 0, NULL, NULL), texts[i]);
    /* Bytes that never become a character are shown at the end, replaced. */
    assert_string_equal(play("a\xF0\x9F", 0, NULL, NULL), "a\xEF\xBF\xBD");
}

static void test_stop_texts(void **state)
{
    static const struct {
        const char *text;
        size_t begin;
        const char *stop, *shown, *stopped;
    } cases[] = {
        {"one two three", 0, "two", "one ", "two"},
        {"one two three", 0, "four", "one two three", NULL},
        {"one twone two", 0, "two", "one ", "two"},
        {"aaab", 0, "aab", "a", "aab"},            /* begins inside a false beginning */
        {"one tw", 0, "two", "one tw", NULL},      /* held back, then shown at the end */
        {"two: two one", 4, "two", " ", "two"},    /* not in the prompt */
        {"a b c", 0, "[\"c\", \"b\"]", "a ", "b"}, /* the first in the text */
        {"abc", 0, "[\"ab\", \"abc\"]", "", "ab"}, /* as soon as one is there */
        {"\xE2\x82\xAC 5", 0, "\xE2\x82\xAC", "", "\xE2\x82\xAC"},
        {"x\xE2\x82\xAC 5", 0, " ", "x\xE2\x82\xAC", " "},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        const char *stopped;
        assert_string_equal(play(cases[i].text, cases[i].begin, cases[i].stop, &stopped),
                            cases[i].shown);
        if (!cases[i].stopped) assert_null(stopped);
        if (cases[i].stopped)
            assert_true(stopped && !strncmp(stopped, cases[i].stopped, strlen(cases[i].stopped)));
    }
}

/* Byte tokens next to each other decode together: one that is not UTF-8 changes the text of those
 * before it, which is not shown before the next other token. */
static void test_byte_tokens(void **state)
{
    const char *stopped;

    (void)state;
    tokenizer = by_fallback;
    assert_string_equal(play("a\nb", 0, NULL, NULL), "a\nb");
    assert_string_equal(play("na\xC3\xAFve\n", 0, NULL, NULL), "na\xC3\xAFve\n");
    assert_string_equal(play("a\n\xE0", 0, NULL, NULL), "a\xEF\xBF\xBD\xEF\xBF\xBD");
    assert_string_equal(play("a\n\xE0", 2, NULL, NULL), "\xEF\xBF\xBD");
    assert_string_equal(play("ab\n\nc", 1, "\n\n", &stopped), "b");
    assert_string_equal(stopped, "\n\n");
    assert_string_equal(play("ab\nc", 0, "[\"b\\nd\"]", NULL), "ab\nc");
    tokenizer = by_alphabet;
}

static void test_stop_option(void **state)
{
    bl_stop_texts stops;

    (void)state;
    assert_int_equal(bl_stop_texts_read("[\"\\n\\n\", \"User:\"]", &stops), BL_OK);
    assert_int_equal(stops.n, 2);
    assert_string_equal(stops.text[0], "\n\n");
    bl_stop_texts_free(&stops);
    assert_int_equal(bl_stop_texts_read("[", &stops), BL_OK); /* a text */
    assert_string_equal(stops.text[0], "[");
    bl_stop_texts_free(&stops);
    static const char *const wrong[] = {"[a, \"b]", "[\"a\", \"\"]", "[\"a\", [\"b\"]]",
                                        "[{a: b}]"};
    for (size_t i = 0; i < BL_COUNT(wrong); i++) {
        assert_int_equal(bl_stop_texts_read(wrong[i], &stops), BL_EUSAGE);
        bl_stop_texts_free(&stops);
    }
}

static char folder[] = "/tmp/ballast-test-text.XXXXXX";

/* tokenizer.json: 256 byte tokens and 26 letters. */
static bl_status write_byte_tokenizer(void)
{
    char *path = NULL, *text = NULL;
    size_t n_bytes;
    FILE *out = open_memstream(&text, &n_bytes);

    fputs("{\"version\": \"1.0\", \"added_tokens\": [], \"normalizer\": null, "
          "\"pre_tokenizer\": null, \"post_processor\": null, \"decoder\": {\"type\": "
          "\"Sequence\", \"decoders\": [{\"type\": \"ByteFallback\"}, {\"type\": \"Fuse\"}]}, "
          "\"model\": {\"type\": \"BPE\", \"byte_fallback\": true, \"merges\": [], \"vocab\": {",
          out);
    for (int i = 0; i < 256; i++) fprintf(out, "\"<0x%02X>\": %d, ", (unsigned)i, i);
    for (int i = 0; i < 26; i++) fprintf(out, "%s\"%c\": %d", i ? ", " : "", 'a' + i, 256 + i);
    fputs("}}}", out);
    if (fclose(out) != 0) return BL_EIO;
    BL_TRY(bl_path_join(folder, "tokenizer.json", &path));
    bl_status st = bl_file_write_atomic(path, text, n_bytes);
    free(path);
    free(text);
    return st;
}

static int set_up(void **state)
{
    (void)state;
    if (!mkdtemp(folder) || write_byte_tokenizer() != BL_OK ||
        bl_tokenizer_load(folder, &by_fallback) != BL_OK ||
        bl_tokenizer_load("demo/base", &by_alphabet) != BL_OK) {
        fprintf(stderr, "%s\n", bl_error_text());
        return -1;
    }
    tokenizer = by_alphabet;
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    bl_tokenizer_destroy(by_alphabet);
    bl_tokenizer_destroy(by_fallback);
    return bl_tree_remove(folder) != BL_OK;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_whole_characters),
        cmocka_unit_test(test_stop_texts),
        cmocka_unit_test(test_byte_tokens),
        cmocka_unit_test(test_stop_option),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
