/* SPDX-License-Identifier: Apache-2.0 */
/* The ids and decoded texts of 100,000 random strings, against Hugging Face's `tokenizers`, by hash
 * (tokenizer_golden.json, made by tools/golden/text/make_tokenizer_golden.py, whose draw_string
 * this file repeats); llama.cpp's vectors; the ids in stories260K's golden.json; 300 texts with the
 * tokenizers of other families. All need BALLAST_TEST_DATA.
 *
 * test_tokenizer_golden FILE compares the strings of a file that make_tokenizer_golden.py wrote
 * with --out. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "tokenizer/tokenizer.h"

static const char *data_folder, *golden_file = "tests/tokenizer/tokenizer_golden.json";

static char *data_path(const char *relative)
{
    char *path;
    assert_int_equal(bl_path_join(data_folder, relative, &path), BL_OK);
    return path;
}

static bl_tokenizer *load(const char *relative)
{
    bl_tokenizer *tokenizer;
    char *path = data_path(relative);
    bl_status st = bl_tokenizer_load(path, &tokenizer);
    if (st != BL_OK) fail_msg("%s", bl_error_text());
    free(path);
    return tokenizer;
}

/* ---- random strings ---- */

typedef struct text_buffer {
    char bytes[1 << 20];
    size_t n;
} text_buffer;

static uint64_t next_random(uint64_t *state)
{
    uint64_t z = *state += 0x9e3779b97f4a7c15u;
    z = (z ^ z >> 30) * 0xbf58476d1ce4e5b9u;
    z = (z ^ z >> 27) * 0x94d049bb133111ebu;
    return z ^ z >> 31;
}

static uint32_t below(uint64_t *state, uint32_t n)
{
    return (uint32_t)(next_random(state) % n);
}

static void put_bytes(text_buffer *out, const char *bytes, size_t n)
{
    assert_true(out->n + n <= sizeof out->bytes);
    memcpy(out->bytes + out->n, bytes, n);
    out->n += n;
}

static void put_char(text_buffer *out, uint32_t code)
{
    char c[4];
    size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = n; i-- > 1; code >>= 6) c[i] = (char)(0x80 | (code & 0x3f));
    c[0] = (char)(n == 1 ? code : (0xf00u >> n & 0xf0) | code);
    put_bytes(out, c, n);
}

static void put_scalar(text_buffer *out, uint64_t *state, uint32_t end)
{
    uint32_t code = below(state, end - 0x800);
    put_char(out, code < 0xd800 ? code : code + 0x800);
}

static void put_piece(text_buffer *out, uint64_t *state, const json_t *pieces)
{
    uint32_t kind = below(state, 16), repeat = 1;

    if (kind < 10 || kind == 14) {
        const json_t *piece =
            json_array_get(pieces, below(state, (uint32_t)json_array_size(pieces)));
        if (kind == 14) repeat = 1 + below(state, 6);
        while (repeat--) put_bytes(out, json_string_value(piece), json_string_length(piece));
    } else if (kind == 10) {
        put_char(out, 0x20 + below(state, 0x5f));
    } else if (kind == 11 || kind == 12) {
        put_scalar(out, state, kind == 11 ? 0x10000 : 0x110000);
    } else if (kind == 13) {
        put_char(out, 0x61 + below(state, 26));
    } else {
        put_char(out, 0x80 + below(state, 0x780));
    }
}

/* Returns the flags to encode it with. */
static unsigned draw_string(text_buffer *out, uint64_t seed, uint64_t index, const json_t *pieces)
{
    uint64_t state = seed * 1000003 + index;
    uint32_t mode = below(&state, 4), most = below(&state, 100) == 0 ? 400 : 24;

    out->n = 0;
    for (uint32_t n = 1 + below(&state, most); n > 0; n--) put_piece(out, &state, pieces);
    return (mode & 1 ? BL_PARSE_SPECIAL : 0u) | (mode & 2 ? BL_ADD_SPECIAL : 0u);
}

static uint64_t fnv1a(uint64_t state, const void *bytes, size_t n)
{
    for (size_t i = 0; i < n; i++)
        state = (state ^ ((const unsigned char *)bytes)[i]) * 0x100000001b3u;
    return state;
}

static bool is_block_equal(const bl_tokenizer *tokenizer, const json_t *golden,
                           const json_t *pieces, size_t block, const char *expected)
{
    static text_buffer text;
    uint64_t seed = (uint64_t)json_integer_value(json_object_get(golden, "seed"));
    uint64_t ids_hash = 0xcbf29ce484222325u, text_hash = ids_hash;
    size_t n_block = (size_t)json_integer_value(json_object_get(golden, "block"));
    const int32_t end_mark = -1;
    char found[33];

    for (size_t i = block * n_block; i < (block + 1) * n_block; i++) {
        bl_ids ids = {0};
        char *decoded;
        size_t n_decoded;
        unsigned flags = draw_string(&text, seed, i, pieces);
        assert_int_equal(bl_tokenizer_encode(tokenizer, text.bytes, text.n, flags, &ids), BL_OK);
        ids_hash = fnv1a(ids_hash, ids.id, ids.n * sizeof *ids.id);
        ids_hash = fnv1a(ids_hash, &end_mark, sizeof end_mark);
        assert_int_equal(bl_tokenizer_decode(tokenizer, ids.id, ids.n, flags & BL_PARSE_SPECIAL,
                                             &decoded, &n_decoded),
                         BL_OK);
        text_hash = fnv1a(text_hash, decoded, n_decoded);
        text_hash = fnv1a(text_hash, "\xff", 1);
        free(decoded);
        bl_ids_free(&ids);
    }
    snprintf(found, sizeof found, "%016llx%016llx", (unsigned long long)ids_hash,
             (unsigned long long)text_hash);
    if (strcmp(found, expected))
        fprintf(stderr, "block %zu: ids and texts hash to %s, expected %s\n", block, found,
                expected);
    return !strcmp(found, expected);
}

static void check_first_ids(const bl_tokenizer *tokenizer, const json_t *golden,
                            const json_t *pieces, const json_t *lists)
{
    static text_buffer text;
    uint64_t seed = (uint64_t)json_integer_value(json_object_get(golden, "seed"));
    size_t i, k;
    const json_t *list, *id;

    json_array_foreach((json_t *)lists, i, list)
    {
        bl_ids ids = {0};
        unsigned flags = draw_string(&text, seed, i, pieces);
        assert_int_equal(bl_tokenizer_encode(tokenizer, text.bytes, text.n, flags, &ids), BL_OK);
        assert_int_equal(ids.n, json_array_size(list));
        json_array_foreach((json_t *)list, k, id)
            assert_int_equal(ids.id[k], json_integer_value(id));
        bl_ids_free(&ids);
    }
}

static void check_strings(const json_t *golden, const json_t *entry)
{
    const json_t *blocks = json_object_get(entry, "blocks"), *block,
                 *pieces = json_object_get(entry, "pieces");
    bl_tokenizer *tokenizer = load(json_string_value(json_object_get(entry, "path")));
    size_t n_strings = (size_t)json_integer_value(json_object_get(golden, "n_strings"));
    size_t n_block = (size_t)json_integer_value(json_object_get(golden, "block")), i, n_bad = 0;

    if (!pieces) pieces = json_object_get(golden, "pieces");
    assert_int_equal(json_array_size(blocks) * n_block, n_strings);
    check_first_ids(tokenizer, golden, pieces, json_object_get(entry, "first_ids"));
    json_array_foreach((json_t *)blocks, i, block) n_bad +=
        !is_block_equal(tokenizer, golden, pieces, i, json_string_value(block));
    if (n_bad)
        fail_msg("%s: %zu of %zu blocks differ", json_string_value(json_object_get(entry, "path")),
                 n_bad, json_array_size(blocks));
    bl_tokenizer_destroy(tokenizer);
}

static json_t *load_golden(void)
{
    json_t *golden;

    if (bl_json_load(golden_file, 1 << 26, &golden) != BL_OK) fail_msg("%s", bl_error_text());
    return golden;
}

static void check_tokenizer(const char *name)
{
    json_t *golden = load_golden();

    assert_true(json_integer_value(json_object_get(golden, "n_strings")) >= 100000);
    check_strings(golden, json_object_get(json_object_get(golden, "tokenizers"), name));
    json_decref(golden);
}

/* Every tokenizer of the file that the command line names. */
static void test_random_of_file(void **state)
{
    json_t *golden = load_golden(), *entry;
    const char *name;

    (void)state;
    json_object_foreach(json_object_get(golden, "tokenizers"), name, entry)
    {
        check_strings(golden, entry);
        printf("%s: %lld strings\n", name,
               (long long)json_integer_value(json_object_get(golden, "n_strings")));
    }
    json_decref(golden);
}

static void test_random_llama3(void **state)
{
    (void)state;
    check_tokenizer("llama3");
}
static void test_random_llama2(void **state)
{
    (void)state;
    check_tokenizer("llama2");
}
static void test_random_llama2_tf5(void **state) /* as transformers 5 saves it again: Metaspace */
{
    (void)state;
    check_tokenizer("llama2-tf5");
}
static void test_random_metaspace_always(void **state)
{
    (void)state;
    check_tokenizer("metaspace-always-shape");
}
static void test_random_stories(void **state)
{
    (void)state;
    check_tokenizer("stories260K");
}

/* ---- llama.cpp's vectors: texts between separator lines, a line of ids each ---- */

static void check_vectors(const char *tokenizer_path, const char *vectors)
{
    static const char separator[] = "\n__ggml_vocab_test__\n";
    bl_tokenizer *tokenizer = load(tokenizer_path);
    char relative[128], *path, *texts, *ids_text;
    size_t n_texts, n_checked = 0;

    snprintf(relative, sizeof relative, "suites/tokenizer-vectors/%s.gguf.inp", vectors);
    path = data_path(relative);
    assert_int_equal(bl_file_read_all(path, 1 << 20, (void **)&texts, &n_texts), BL_OK);
    free(path);
    snprintf(relative, sizeof relative, "suites/tokenizer-vectors/%s.gguf.out", vectors);
    path = data_path(relative);
    assert_int_equal(bl_file_read_all(path, 1 << 20, (void **)&ids_text, &n_texts), BL_OK);
    free(path);
    char *line = ids_text;
    for (char *text = texts, *end; (end = strstr(text, separator)) != NULL;
         text = end + strlen(separator)) {
        bl_ids ids = {0};
        assert_int_equal(
            bl_tokenizer_encode(tokenizer, text, (size_t)(end - text), BL_PARSE_SPECIAL, &ids),
            BL_OK);
        char *line_end = strchr(line, '\n'), *after;
        assert_non_null(line_end);
        for (size_t i = 0; i < ids.n; i++, line = after) {
            long expected = strtol(line, &after, 10);
            assert_ptr_not_equal(line, after);
            assert_true(after <= line_end);
            assert_int_equal(ids.id[i], expected);
        }
        assert_int_equal(strspn(line, " "), line_end - line);
        line = line_end + 1;
        n_checked++;
        bl_ids_free(&ids);
    }
    assert_true(n_checked > 40);
    free(texts);
    free(ids_text);
    bl_tokenizer_destroy(tokenizer);
}

static void test_vectors_llama3(void **state)
{
    (void)state;
    check_vectors("tokenizers/llama3/tokenizer.json", "ggml-vocab-llama-bpe");
}

static void test_vectors_llama2(void **state)
{
    (void)state;
    check_vectors("tokenizers/llama2/tokenizer.json", "ggml-vocab-llama-spm");
}

/* ---- other families: a line of JSON per text ---- */

static void check_ids(const bl_tokenizer *tokenizer, const json_t *one, unsigned flags,
                      const json_t *list)
{
    const json_t *text = json_object_get(one, "text"), *id,
                 *decoded = json_object_get(one, "decoded");
    bl_ids ids = {0};
    size_t k, n_out;
    char *out;

    assert_int_equal(bl_tokenizer_encode(tokenizer, json_string_value(text),
                                         json_string_length(text), BL_PARSE_SPECIAL | flags, &ids),
                     BL_OK);
    bool same = ids.n == json_array_size(list);
    json_array_foreach((json_t *)list, k, id) same = same && ids.id[k] == json_integer_value(id);
    if (!same)
        fail_msg("%s: ids of \"%s\"", json_string_value(json_object_get(one, "tokenizer")),
                 json_string_value(text));
    if (decoded && !flags) {
        assert_int_equal(bl_tokenizer_decode(tokenizer, ids.id, ids.n, false, &out, &n_out), BL_OK);
        if (n_out != json_string_length(decoded) || memcmp(out, json_string_value(decoded), n_out))
            fail_msg("%s: \"%s\" decodes to \"%s\"",
                     json_string_value(json_object_get(one, "tokenizer")), json_string_value(text),
                     out);
        free(out);
    }
    bl_ids_free(&ids);
}

static void test_families(void **state)
{
    char *path = data_path("suites/tokenizer-vectors-families.jsonl"), *lines, loaded[128] = "";
    bl_tokenizer *tokenizer = NULL;
    size_t n_bytes, n_checked = 0;

    (void)state;
    assert_int_equal(bl_file_read_all(path, 1 << 23, (void **)&lines, &n_bytes), BL_OK);
    free(path);
    for (char *line = lines, *end; (end = strchr(line, '\n')) != NULL; line = end + 1) {
        json_t *one;
        assert_int_equal(bl_json_parse("line", 1, line, (size_t)(end - line), &one), BL_OK);
        const char *name = json_string_value(json_object_get(one, "tokenizer"));
        const json_t *ids = json_object_get(one, "ids"),
                     *special = json_object_get(one, "ids_special");
        if (strcmp(name, loaded)) {
            bl_tokenizer_destroy(tokenizer);
            tokenizer = load(name);
            snprintf(loaded, sizeof loaded, "%s", name);
        }
        check_ids(tokenizer, one, 0, ids);
        check_ids(tokenizer, one, BL_ADD_SPECIAL, special ? special : ids);
        n_checked++;
        json_decref(one);
    }
    assert_true(n_checked >= 27 * 300);
    bl_tokenizer_destroy(tokenizer);
    free(lines);
}

/* ---- stories260K: a model's folder with configurations beside the tokenizer ---- */

static void check_golden_cases(const char *folder)
{
    char relative[128], *path;
    json_t *golden;
    size_t i, k, n_eos;
    const json_t *one, *id;
    bl_tokenizer *tokenizer = load(folder);

    assert_int_equal(bl_tokenizer_bos(tokenizer), 1);
    const int32_t *eos = bl_tokenizer_eos(tokenizer, &n_eos);
    assert_int_equal(n_eos, 1);
    assert_int_equal(eos[0], 2);
    assert_int_equal(bl_tokenizer_vocab_size(tokenizer), 512);
    snprintf(relative, sizeof relative, "%s/golden.json", folder);
    path = data_path(relative);
    assert_int_equal(bl_json_load(path, 1 << 20, &golden), BL_OK);
    const json_t *cases = json_object_get(golden, "cases");
    assert_true(json_array_size(cases) > 0);
    json_array_foreach((json_t *)cases, i, one)
    {
        const json_t *text = json_object_get(one, "text"), *list = json_object_get(one, "ids");
        bl_ids ids = {0};
        char *decoded;
        assert_int_equal(bl_tokenizer_encode(tokenizer, json_string_value(text),
                                             json_string_length(text), BL_ADD_SPECIAL, &ids),
                         BL_OK);
        assert_int_equal(ids.n, json_array_size(list));
        json_array_foreach((json_t *)list, k, id)
            assert_int_equal(ids.id[k], json_integer_value(id));
        assert_int_equal(bl_tokenizer_decode(tokenizer, ids.id, ids.n, true, &decoded, NULL),
                         BL_OK);
        assert_string_equal(decoded, json_string_value(text));
        free(decoded);
        bl_ids_free(&ids);
    }
    json_decref(golden);
    free(path);
    bl_tokenizer_destroy(tokenizer);
}

static void test_golden_cases(void **state)
{
    (void)state;
    check_golden_cases("models/stories260K");
    check_golden_cases("models/stories260K-bf16-sharded"); /* its merges are pairs */
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_golden_cases),      cmocka_unit_test(test_vectors_llama3),
        cmocka_unit_test(test_vectors_llama2),    cmocka_unit_test(test_random_stories),
        cmocka_unit_test(test_random_llama2),     cmocka_unit_test(test_random_llama3),
        cmocka_unit_test(test_random_llama2_tf5), cmocka_unit_test(test_random_metaspace_always),
        cmocka_unit_test(test_families),
    };
    if (!(data_folder = getenv("BALLAST_TEST_DATA"))) {
        puts("skip: BALLAST_TEST_DATA is not set: no real tokenizers to compare with");
        return 77;
    }
    if (argc > 1) {
        const struct CMUnitTest of_file[] = {cmocka_unit_test(test_random_of_file)};
        golden_file = argv[1];
        return cmocka_run_group_tests(of_file, NULL, NULL);
    }
    return cmocka_run_group_tests(tests, NULL, NULL);
}
