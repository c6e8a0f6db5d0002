/* SPDX-License-Identifier: Apache-2.0 */
/* Every code point, against Hugging Face's `tokenizers` (unicode_golden.json, made by
 * tools/golden/text/make_unicode.py, which builds the same tokenizers and texts): the general
 * categories in each form that a regex may have them, whole regexes, single_word, and the four
 * normalizations. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/json.h"
#include "base/sizes.h"
#include "tokenizer/tokenizer.h"

enum { N_CODES = 0x110000, BLOCK = 16384, ASSIGNED = 0x40000, ADDED = 256 };

static json_t *golden;
static char scratch[] = "/tmp/ballast-unicode-XXXXXX.json";
/* Of each code point, the index of its category in golden's "categories". */
static unsigned char category[N_CODES];

static bool is_surrogate(uint32_t code)
{
    return code >= 0xd800 && code < 0xe000;
}

static size_t put_char(char *out, uint32_t code)
{
    size_t n = code < 0x80 ? 1 : code < 0x800 ? 2 : code < 0x10000 ? 3 : 4;
    for (size_t i = n; i-- > 1; code >>= 6) out[i] = (char)(0x80 | (code & 0x3f));
    out[0] = (char)(n == 1 ? code : (0xf00u >> n & 0xf0) | code);
    return n;
}

/* Sanitizers are slow: a part of the blocks, and one normal form. */
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
enum { STRIDE = 16 };
#else
enum { STRIDE = 1 };
#endif

/* ---- tokenizers ---- */

/* GPT-2's bytes_to_unicode. */
static void make_alphabet(char alphabet[256][4])
{
    uint32_t next = 256;
    for (uint32_t b = 0; b < 256; b++) {
        bool is_own = (b >= 33 && b <= 126) || (b >= 161 && b != 173);
        alphabet[b][put_char(alphabet[b], is_own ? b : next++)] = '\0';
    }
}

static void add_merge(json_t *vocab, json_t *merges, const char *left, const char *right)
{
    char pair[4096], both[4096];
    snprintf(both, sizeof both, "%s%s", left, right);
    snprintf(pair, sizeof pair, "%s %s", left, right);
    json_object_set_new(vocab, both, json_integer((json_int_t)json_object_size(vocab)));
    json_array_append_new(merges, json_string(pair));
}

/* A token per byte; with merges (b, "a") of every byte b, and then (" ", b), ids show where a text
 * was split. */
static json_t *make_model(bool has_merges)
{
    char alphabet[256][4];
    json_t *vocab = json_object(), *merges = json_array();

    make_alphabet(alphabet);
    for (int b = 0; b < 256; b++) json_object_set_new(vocab, alphabet[b], json_integer(b));
    for (int b = 0; b < 256 && has_merges; b++) add_merge(vocab, merges, alphabet[b], "a");
    for (int b = 0; b < 256 && has_merges; b++)
        if (b != 'a') add_merge(vocab, merges, alphabet[' '], alphabet[b]);
    return json_pack("{s:s, s:o, s:o}", "type", "BPE", "vocab", vocab, "merges", merges);
}

/* Each may be NULL. */
static void write_tokenizer(const char *regex, const char *form, const char *word)
{
    json_t *steps = json_array(), *added = json_array();

    if (regex)
        json_array_append_new(steps,
                              json_pack("{s:s, s:{s:s}, s:s, s:b}", "type", "Split", "pattern",
                                        "Regex", regex, "behavior", "Isolated", "invert", 0));
    json_array_append_new(steps,
                          json_pack("{s:s, s:b, s:b, s:b}", "type", "ByteLevel", "add_prefix_space",
                                    0, "trim_offsets", 1, "use_regex", 0));
    if (word)
        json_array_append_new(added, json_pack("{s:i, s:s, s:b, s:b, s:b, s:b, s:b}", "id", ADDED,
                                               "content", word, "single_word", 1, "lstrip", 0,
                                               "rstrip", 0, "normalized", 0, "special", 0));
    json_t *root =
        json_pack("{s:o, s:{s:s, s:o}, s:o}", "added_tokens", added, "pre_tokenizer", "type",
                  "Sequence", "pretokenizers", steps, "model", make_model(regex != NULL));
    if (form) json_object_set_new(root, "normalizer", json_pack("{s:s}", "type", form));
    assert_int_equal(json_dump_file(root, scratch, 0), 0);
    json_decref(root);
}

static bl_tokenizer *make_tokenizer(const char *regex, const char *form, const char *word)
{
    bl_tokenizer *tokenizer;

    write_tokenizer(regex, form, word);
    if (bl_tokenizer_load(scratch, &tokenizer) != BL_OK) fail_msg("%s", bl_error_text());
    return tokenizer;
}

/* before, the code point, after, for each of [first, end) but the surrogates and `skip`. */
static bl_ids encode_codes(const bl_tokenizer *tokenizer, const char *before, const char *after,
                           uint32_t first, uint32_t end, uint32_t skip)
{
    static char text[BLOCK * 16];
    bl_ids ids = {0};
    size_t n = 0;

    for (uint32_t code = first; code < end; code++) {
        if (is_surrogate(code) || code == skip) continue;
        memcpy(text + n, before, strlen(before));
        n += strlen(before);
        n += put_char(text + n, code);
        memcpy(text + n, after, strlen(after));
        n += strlen(after);
    }
    if (n && bl_tokenizer_encode(tokenizer, text, n, BL_PARSE_SPECIAL, &ids) != BL_OK)
        fail_msg("%s", bl_error_text());
    return ids;
}

/* ---- general categories ---- */

static int n_categories, category_index[128][128];

static bool is_in_category(uint32_t code, const char *name)
{
    for (const char *minor = name[1] ? name + 1 : "abcdefghijklmnopqrstuvwxyz"; *minor; minor++)
        if (category_index[(int)name[0]][(int)*minor] == category[code]) return true;
    return false;
}

typedef struct form {
    const char *format; /* %s is the category */
    bool negated;
} form;

/* The piece is the code point alone if it is in the set and "a" comes behind it; else the last byte
 * joins "a". */
static void check_block(const bl_tokenizer *tokenizer, const char *name, const form *f,
                        uint32_t first, uint32_t end)
{
    bl_ids ids = encode_codes(tokenizer, "", "a", first, end, 'a');
    size_t at = 0;
    char bytes[4];

    for (uint32_t code = first; code < end; code++) {
        if (is_surrogate(code) || code == 'a') continue;
        size_t n = put_char(bytes, code);
        bool is_alone = ids.id[at + n - 1] == (unsigned char)bytes[n - 1];
        if (is_alone != (is_in_category(code, name) != f->negated))
            fail_msg("U+%04X is %s %s of %s", code, is_alone ? "in" : "not in", f->format, name);
        at += is_alone ? n + 1 : n;
    }
    assert_int_equal(at, ids.n);
    bl_ids_free(&ids);
}

static bool is_uniform(uint32_t first, uint32_t end)
{
    for (uint32_t code = first; code < end; code++)
        if (category[code] != category[first]) return false;
    return true;
}

/* Of blocks that are one category as a whole (ideographs, private use, nothing assigned), every
 * 16th. */
static void check_category(const char *name, const form *f)
{
    enum { SMALL = 1024 };
    char regex[64];

    snprintf(regex, sizeof regex, f->format, name);
    bl_tokenizer *tokenizer = make_tokenizer(regex, NULL, NULL);
    for (uint32_t first = 0; first < N_CODES; first += SMALL)
        if (first / SMALL % 16 == 0 ||
            (first / SMALL % STRIDE == 0 && !is_uniform(first, first + SMALL)))
            check_block(tokenizer, name, f, first, first + SMALL);
    bl_tokenizer_destroy(tokenizer);
}

static void test_categories(void **state)
{
    static const form forms[] = {{"\\p{%s}(?=a)", false},
                                 {"[^\\p{%s}](?=a)", true},
                                 {"\\P{%s}(?=a)", true},
                                 {"(?:[\\p{%s}]|\\p{Cs})(?=a)", false}};
    static const char *const major[] = {"L", "M", "N", "P", "S", "Z"};
    const char *name;
    json_t *ranges;
    size_t n = 0;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(major); i++)
        for (size_t k = i % 2; k < BL_COUNT(forms); k += 2) check_category(major[i], &forms[k]);
    json_object_foreach(json_object_get(golden, "categories"), name, ranges)
    {
        if (strcmp(name, "Cn") != 0) check_category(name, &forms[n++ % BL_COUNT(forms)]);
    }
    assert_int_equal(n, n_categories - 1);
}

/* Several beside each other in a class, as o200k's pattern has them. */
static void test_classes_of_categories(void **state)
{
    static const form digits = {"[\\d\\p{Nl}\\p{No}](?=a)%.0s", false},
                      letters = {"[\\p{Lu}\\p{Lo}\\p{Ll}\\p{Lt}\\p{Lm}](?=a)%.0s", false},
                      others = {"[^\\p{Mn}\\p{Me}\\p{Mc}](?=a)%.0s", true};
    (void)state;
    check_category("N", &digits);
    check_category("L", &letters);
    check_category("M", &others);
}

/* ---- whole regexes ---- */

static uint64_t hash_ids(uint64_t state, const int32_t *id, size_t n)
{
    for (size_t i = 0; i < n; i++) state = (state ^ (uint64_t)id[i]) * 0x100000001b3u;
    return state;
}

/* Each block of the planes that have no assigned characters with one of the regexes. */
static void test_regexes(void **state)
{
    const json_t *regexes = json_object_get(golden, "regexes");

    (void)state;
    assert_true(json_array_size(regexes) >= 8);
    for (size_t i = 0; i < json_array_size(regexes); i++) {
        const json_t *entry = json_array_get(regexes, i),
                     *hashes = json_object_get(entry, "hashes");
        bl_tokenizer *tokenizer =
            make_tokenizer(json_string_value(json_object_get(entry, "regex")), NULL, NULL);
        for (uint32_t k = 0; k < N_CODES / BLOCK; k++) {
            if (k * BLOCK >= ASSIGNED && k % json_array_size(regexes) != i) continue;
            if (k % STRIDE != 0) continue;
            char found[17];
            bl_ids ids =
                encode_codes(tokenizer, ". X", "a", k * BLOCK, (k + 1) * BLOCK, UINT32_MAX);
            snprintf(found, sizeof found, "%016llx",
                     (unsigned long long)hash_ids(0xcbf29ce484222325u, ids.id, ids.n));
            if (strcmp(found, json_string_value(json_array_get(hashes, k))) != 0)
                fail_msg("regex %s: other ids for U+%04X to U+%04X",
                         json_string_value(json_object_get(entry, "name")), k * BLOCK,
                         (k + 1) * BLOCK - 1);
            bl_ids_free(&ids);
        }
        bl_tokenizer_destroy(tokenizer);
    }
}

/* What the two engines read differently. */
static void test_refused_regexes(void **state)
{
    static const char *const cases[][2] = {
        {"(?i:\\p{Lu})", "a property where case is ignored"},
        {"(?i:[a\\p{Lu}])", "a property where case is ignored"},
        {"(?i:a|x(b))", "a group where case is ignored"},
        {"(?i:s{2})", "a counted repetition where case is ignored"},
        {"(?i:\xc3\xa9)", "a character beyond ASCII where case is ignored"},
        {"(?i:[\xc3\xa9])", "a character beyond ASCII where case is ignored"},
        {"(?i:paSs)", "a pair of letters that is one character"},
        {"(?i:'ST)", "a pair of letters that is one character"},
        {"(?i:oFfice)", "a pair of letters that is one character"},
        {"\\p{C}", "a category of unassigned characters"},
        {"[^\\p{Cn}]", "a category of unassigned characters"},
        {"[\\P{L}]", "a negated property in a class"},
        {"\\p{Letter}", "a property other than a general category"},
        {"\\D", "this escape"},
    };

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_tokenizer *tokenizer;
        write_tokenizer(cases[i][0], NULL, NULL);
        if (bl_tokenizer_load(scratch, &tokenizer) != BL_EINPUT)
            fail_msg("accepted: %s", cases[i][0]);
        if (!strstr(bl_error_text(), cases[i][1]))
            fail_msg("%s: \"%s\" lacks \"%s\"", cases[i][0], bl_error_text(), cases[i][1]);
    }
    bl_tokenizer_destroy(make_tokenizer("(?i:a)ss\\p{Lu}", NULL, NULL)); /* outside the group */
}

/* ---- single_word, normalization ---- */

static bool is_in_ranges(const json_t *ranges, uint32_t code, size_t *at)
{
    for (; *at < json_array_size(ranges); ++*at) {
        const json_t *range = json_array_get(ranges, *at);
        if (code <= json_integer_value(json_array_get(range, 1)))
            return code >= json_integer_value(json_array_get(range, 0));
    }
    return false;
}

static void test_single_word(void **state)
{
    bl_tokenizer *tokenizer = make_tokenizer(NULL, NULL, "TT");
    const json_t *words = json_object_get(golden, "words");
    size_t range = 0;

    (void)state;
    for (uint32_t first = 0; first < N_CODES; first += BLOCK) {
        bl_ids ids = encode_codes(tokenizer, "", "TT ", first, first + BLOCK, UINT32_MAX);
        size_t at = 0;
        for (uint32_t code = first; code < first + BLOCK; code++) {
            char bytes[4];
            if (is_surrogate(code)) continue;
            at += put_char(bytes, code);
            bool is_token = ids.id[at] == ADDED;
            if (is_token == is_in_ranges(words, code, &range))
                fail_msg("U+%04X is %s of a word", code, is_token ? "no part" : "part");
            at += is_token ? 2 : 3;
        }
        bl_ids_free(&ids);
    }
    bl_tokenizer_destroy(tokenizer);
}

static void test_normalizations(void **state)
{
    const char *name;
    json_t *expected;

    (void)state;
    json_object_foreach(json_object_get(golden, "normalized"), name, expected)
    {
        if (STRIDE > 1 && strcmp(name, "NFKC") != 0) continue;
        bl_tokenizer *tokenizer = make_tokenizer(NULL, name, NULL);
        uint64_t hash = 0xcbf29ce484222325u;
        char found[17];
        for (uint32_t first = 0; first < N_CODES; first += BLOCK) {
            bl_ids ids =
                encode_codes(tokenizer, "e", "\xcc\xa3\xcc\x81", first, first + BLOCK, UINT32_MAX);
            hash = hash_ids(hash, ids.id, ids.n);
            bl_ids_free(&ids);
        }
        snprintf(found, sizeof found, "%016llx", (unsigned long long)hash);
        if (strcmp(found, json_string_value(expected)) != 0) fail_msg("%s: other bytes", name);
        bl_tokenizer_destroy(tokenizer);
    }
}

static int read_golden(void **state)
{
    const char *name;
    json_t *ranges;

    (void)state;
    if (bl_json_load("tests/tokenizer/unicode_golden.json", 1 << 20, &golden) != BL_OK)
        fail_msg("%s", bl_error_text());
    assert_int_equal(json_integer_value(json_object_get(golden, "block")), BLOCK);
    json_object_foreach(json_object_get(golden, "categories"), name, ranges)
    {
        category_index[(int)name[0]][(int)name[1]] = ++n_categories;
        for (size_t i = 0; i < json_array_size(ranges); i++) {
            const json_t *range = json_array_get(ranges, i);
            for (json_int_t code = json_integer_value(json_array_get(range, 0));
                 code <= json_integer_value(json_array_get(range, 1)); code++)
                category[code] = (unsigned char)n_categories;
        }
    }
    int fd = mkstemps(scratch, (int)strlen(".json"));
    return fd < 0 ? -1 : close(fd);
}

static int free_golden(void **state)
{
    (void)state;
    json_decref(golden);
    return unlink(scratch);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_categories),     cmocka_unit_test(test_classes_of_categories),
        cmocka_unit_test(test_regexes),        cmocka_unit_test(test_single_word),
        cmocka_unit_test(test_normalizations), cmocka_unit_test(test_refused_regexes),
    };
    return cmocka_run_group_tests(tests, read_golden, free_golden);
}
