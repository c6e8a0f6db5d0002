/* SPDX-License-Identifier: Apache-2.0 */
/* Files that are refused, each with its reason. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "small_models.h"
#include "tokenizer/tokenizer.h"

#define SPLIT(pattern)                                                                             \
    "{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"" pattern                     \
    "\"},\"behavior\":\"Isolated\",\"invert\":false}," GOOD_MODEL "}"

#define UNIGRAM(vocab) "{\"model\":{\"type\":\"Unigram\",\"vocab\":" vocab "}}"
#define BYTE_LEVEL     "{\"type\":\"ByteLevel\",\"add_prefix_space\":false}"
#define METASPACE(rest)                                                                            \
    "{\"pre_tokenizer\":{\"type\":\"Metaspace\",\"replacement\":" rest "}," GOOD_MODEL "}"

static const struct {
    const char *content, *reason;
} bad_files[] = {
    {"", ":1:"},
    {"[1,2]", "expected a JSON object"},
    {"{\"model\":{\"type\":\"BPE\"", ":1:"},
    {"{}", "model"},
    {"{\"model\":{\"type\":\"WordPiece\"}}", "type WordPiece is not supported"},
    {"{\"model\":{\"type\":\"Unigram\"}}", "model: key vocab: missing"},
    {UNIGRAM("[]"), "vocab has 0 tokens"},
    {UNIGRAM("[[\"a\",0],[\"b\"]]"), "vocab[1]: expected [\"token\", score]"},
    {UNIGRAM("[[\"a\",\"0\"]]"), "vocab[0]: expected [\"token\", score]"},
    {UNIGRAM("[[\"a\",0],[\"a\",1]]"), "vocab[1]: token a is listed twice"},
    {UNIGRAM("[[\"a\",0]],\"unk_id\":1"), "key unk_id: expected an integer in [0, 0]"},
    {UNIGRAM("[[\"a\",0]],\"nbest\":1"), "key nbest: unknown"},
    {"{\"surprise\":1," GOOD_MODEL "}", "key surprise: unknown"},
    {"{" MODEL(VOCAB, "[\"a b\"]", ",\"word_regex\":1") "}", "key word_regex: unknown"},
    {"{" MODEL(VOCAB, "[\"a b\"]", ",\"dropout\":0.1") "}", "dropout is not supported"},
    {"{" MODEL(VOCAB, "[\"a b\"]", ",\"continuing_subword_prefix\":\"##\"") "}",
     "merges[0]: a and b, or what they make, is not in the vocabulary"},
    {"{" MODEL(VOCAB, "[\"a b\"]", ",\"end_of_word_suffix\":7") "}", "key end_of_word_suffix"},
    {"{" MODEL(VOCAB, "[\"a b\"]", ",\"unk_token\":\"<unk>\"") "}",
     "unk_token <unk> is not in the vocabulary"},
    {"{" MODEL(VOCAB, "[\"a c\"]", "") "}", "merges[0]"},
    {"{" MODEL(VOCAB, "[\"b a\"]", "") "}", "merges[0]"},
    {"{" MODEL(VOCAB, "[\"a b\",\"a b c\"]", "") "}", "merges[1]"},
    {"{" MODEL(VOCAB, "[[\"a\",\"b\",\"c\"]]", "") "}", "merges[0]"},
    {"{" MODEL(VOCAB, "[7]", "") "}", "merges[0]"},
    {"{" MODEL("{\"a\":0,\"b\":0}", "[]", "") "}", "share id 0"},
    {"{" MODEL("{\"a\":-1}", "[]", "") "}", "token a: expected an id"},
    {"{" MODEL("{\"a\":4294967296}", "[]", "") "}", "token a: expected an id"},
    {"{" MODEL("{\"a\":1.5}", "[]", "") "}", "token a: expected an id"},
    {"{" MODEL("{\"a\":1000000000000000019884624838656}", "[]", "") "}",
     "model: key vocab, token a: expected an id in [0, 16777215], got 1e30"},
    {"{" MODEL("{\"a\":0,\"a\":1}", "[]", "") "}", "duplicate"},
    {"{" MODEL("[]", "[]", "") "}", "vocab"},
    {"{\"added_tokens\":[" TOKEN("9", "</s>") "]," GOOD_MODEL "}",
     "</s> has id 9, but the vocabulary makes it 3"},
    {"{\"added_tokens\":[" TOKEN("9", "new") "]," GOOD_MODEL "}",
     "new has id 9, but the vocabulary makes it 4"},
    {"{\"added_tokens\":[" TOKEN("4", "new") "," TOKEN("4", "new") "]," GOOD_MODEL "}", "twice"},
    {"{\"added_tokens\":[" TOKEN("4", "") "]," GOOD_MODEL "}", "content is empty"},
    {"{\"added_tokens\":[{\"id\":4,\"content\":\"x\"}]," GOOD_MODEL "}", "single_word"},
    {"{\"added_tokens\":{}," GOOD_MODEL "}", "added_tokens"},
    {"{\"normalizer\":{\"type\":\"BertNormalizer\"}," GOOD_MODEL "}",
     "normalizer: type BertNormalizer is not supported"},
    {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[{\"type\":\"Nmt\"}]}"
     "," GOOD_MODEL "}",
     "normalizer: type Nmt is not supported"},
    {"{\"normalizer\":{\"type\":\"Sequence\",\"normalizers\":[null]}," GOOD_MODEL "}",
     "expected a JSON object"},
    {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" "
     "\",\"String\":\" \"},\"content\":\"_\"}," GOOD_MODEL "}",
     "pattern must have one of String and Regex"},
    {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"Regex\":\" *"
     "\"},\"content\":\"_\"}," GOOD_MODEL "}",
     "may match nothing"},
    {"{\"normalizer\":{\"type\":\"Strip\",\"strip_left\":true}," GOOD_MODEL "}",
     "normalizer Strip: key strip_right"},
    {"{\"normalizer\":{\"type\":\"Replace\",\"pattern\":{\"String\":\"\"},\"content\":\"_\"}"
     "," GOOD_MODEL "}",
     "empty pattern"},
    {"{\"normalizer\":{\"type\":\"Prepend\",\"prepend\":3}," GOOD_MODEL "}", "key prepend"},
    {"{\"pre_tokenizer\":{\"type\":\"UnicodeScripts\"}," GOOD_MODEL "}",
     "pre_tokenizer: type UnicodeScripts is not supported"},
    {"{\"pre_tokenizer\":{\"type\":\"Split\",\"pattern\":{\"Regex\":\"a\"},\"behavior\":"
     "\"Merged\","
     "\"invert\":false}," GOOD_MODEL "}",
     "pre_tokenizer Split: behavior Merged is not supported"},
    {"{\"pre_tokenizer\":{\"type\":\"Digits\",\"individual_digits\":1}," GOOD_MODEL "}",
     "pre_tokenizer Digits: key individual_digits"},
    {"{\"pre_tokenizer\":{\"type\":\"CharDelimiterSplit\",\"delimiter\":\"ab\"}," GOOD_MODEL "}",
     "delimiter must be one character"},
    {"{\"normalizer\":{\"type\":\"StripAccents\"},\"pre_tokenizer\":{\"type\":\"Metaspace\","
     "\"replacement\":\"_\",\"prepend_scheme\":\"first\"}," GOOD_MODEL "}",
     "prepend_scheme first is not supported behind a normalizer that may shorten"},
    {"{\"pre_tokenizer\":{\"type\":\"Sequence\",\"pretokenizers\":[" BYTE_LEVEL "," BYTE_LEVEL
     "]}," GOOD_MODEL "}",
     "pre_tokenizer: ByteLevel twice is not supported"},
    {SPLIT("\\\\b"), "this escape"},
    {SPLIT("[\\\\W]"), "\\W in a class"},
    {SPLIT("(?i:\\\\w)"), "this escape where case is ignored"},
    {SPLIT("\\\\u12g4"), "this escape"},
    {SPLIT("\\\\p{Han}+"), "a property other than a general category"},
    {SPLIT("^"), "may match nothing"},
    {SPLIT("[a[b]]"), "a class in a class"},
    {SPLIT("[^\\\\S]"), "\\S in a class"},
    {SPLIT("(?i)a"), "this kind of group"},
    {SPLIT("a{,3}"), "this repetition"},
    {SPLIT("a*"), "may match nothing"},
    {SPLIT("(a"), "regex"},
    {"{\"post_processor\":{\"type\":\"BertProcessing\"}," GOOD_MODEL "}",
     "post_processor: type BertProcessing"},
    {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[],\"pair\":[],\"special_"
     "tokens\":{"
     "}}," GOOD_MODEL "}",
     "lacks Sequence A"},
    {"{\"post_processor\":{\"type\":\"TemplateProcessing\",\"single\":[{\"SpecialToken\":{\"id\":"
     "\"<s>\"}"
     "},{\"Sequence\":{\"id\":\"A\"}}],"
     "\"special_tokens\":{}}," GOOD_MODEL "}",
     "special_tokens lacks <s>"},
    {METASPACE("\"ab\""), "pre_tokenizer Metaspace: replacement must be one character"},
    {METASPACE("\"\""), "replacement must be one character"},
    {METASPACE("\"_\",\"prepend_scheme\":\"last\""), "prepend_scheme last is not supported"},
    {METASPACE("\"_\",\"add_prefix_space\":false"),
     "add_prefix_space false beside prepend_scheme always"},
    {METASPACE("\"_\",\"surprise\":1"), "key surprise: unknown"},
    {"{\"decoder\":{\"type\":\"Metaspace\"}," GOOD_MODEL "}",
     "decoder Metaspace: key replacement: missing"},
    {"{\"decoder\":{\"type\":\"BPEDecoder\",\"suffix\":\"\"}," GOOD_MODEL "}",
     "decoder BPEDecoder: suffix is empty"},
    {"{\"decoder\":{\"type\":\"WordPiece\"}," GOOD_MODEL "}",
     "decoder: type WordPiece is not supported"},
    {"{\"decoder\":{\"type\":\"Strip\",\"content\":\"ab\",\"start\":1,\"stop\":0}," GOOD_MODEL "}",
     "one character"},
};

static void test_bad_files_are_refused_with_reason(void **state)
{
    char folder[] = "/tmp/ballast-tokenizer-XXXXXX", path[64];

    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/bad.json", folder);
    for (size_t i = 0; i < BL_COUNT(bad_files); i++) {
        bl_tokenizer *tokenizer;
        assert_int_equal(
            bl_file_write_atomic(path, bad_files[i].content, strlen(bad_files[i].content)), BL_OK);
        if (bl_tokenizer_load(path, &tokenizer) != BL_EINPUT)
            fail_msg("not refused: %s", bad_files[i].content);
        assert_null(tokenizer);
        if (!strstr(bl_error_text(), bad_files[i].reason) ||
            strncmp(bl_error_text(), path, strlen(path)))
            fail_msg("%s: \"%s\" does not say \"%s\"", bad_files[i].content, bl_error_text(),
                     bad_files[i].reason);
    }
    assert_int_equal(bl_tree_remove(folder), BL_OK);
}

static void test_missing_file_is_an_input_error(void **state)
{
    bl_tokenizer *tokenizer;
    (void)state;
    assert_int_equal(bl_tokenizer_load("/nonexistent/tokenizer.json", &tokenizer), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "/nonexistent/tokenizer.json"));
    assert_null(tokenizer);
    bl_tokenizer_destroy(NULL);
}

static void test_sentencepiece_names_the_conversion(void **state)
{
    char folder[] = "/tmp/ballast-tokenizer-XXXXXX", path[64];
    bl_tokenizer *tokenizer;

    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/tokenizer.model", folder);
    assert_int_equal(bl_file_write_atomic(path, "x", 1), BL_OK);
    assert_int_equal(bl_tokenizer_load(folder, &tokenizer), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "tokenizer.model: is not read without"));
    assert_non_null(strstr(bl_error_text(), "AutoTokenizer.from_pretrained('/tmp/ballast-"));
    snprintf(path, sizeof path, "%s/tokenizer.json", folder);
    assert_int_equal(bl_file_write_atomic(path, "{" GOOD_MODEL "}", strlen("{" GOOD_MODEL "}")),
                     BL_OK);
    assert_int_equal(bl_tokenizer_load(folder, &tokenizer), BL_OK);
    bl_tokenizer_destroy(tokenizer);
    assert_int_equal(bl_tree_remove(folder), BL_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_bad_files_are_refused_with_reason),
        cmocka_unit_test(test_sentencepiece_names_the_conversion),
        cmocka_unit_test(test_missing_file_is_an_input_error),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
