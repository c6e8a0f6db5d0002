/* SPDX-License-Identifier: Apache-2.0 */
/* A tokenizer and a text for it: the text, tokenizer.json, tokenizer_config.json,
 * generation_config.json. A tokenizer.json that is a single letter a..p selects a fixture, so
 * that small inputs reach encoding. */
#include <stdlib.h>
#include <string.h>

#include "fuzz.h"
#include "tokenizer/tokenizer.h"

static const char *const fixtures[] = {"byte_level",   "byte_level_split",
                                       "fallback",     "fallback_across",
                                       "nfd",          "nfkc",
                                       "unk",          "unk_fused",
                                       "unigram",      "unigram_fallback",
                                       "affixes",      "affixes_fallback",
                                       "punctuation",  "lowercase",
                                       "split_invert", "whitespace"};

enum { N_FIXTURES = sizeof fixtures / sizeof fixtures[0] };

static bl_tokenizer *fixture(size_t index)
{
    static bl_tokenizer *loaded[N_FIXTURES];
    char path[64] = "tests/tokenizer/fixtures/";

    strcat(strcat(path, fixtures[index]), ".json");
    if (!loaded[index] && bl_tokenizer_load(path, &loaded[index]) != BL_OK) abort();
    return loaded[index];
}

static void encode(const bl_tokenizer *tokenizer, fuzz_part text, unsigned flags)
{
    bl_ids ids = {0};
    char *decoded;

    bl_status st =
        bl_tokenizer_encode(tokenizer, (const char *)text.bytes, text.n_bytes, flags, &ids);
    fuzz_check(st);
    for (size_t i = 0; i < ids.n; i++)
        if (ids.id[i] < 0 || ids.id[i] >= bl_tokenizer_vocab_size(tokenizer)) abort();
    if (bl_tokenizer_decode(tokenizer, ids.id, ids.n, flags & BL_PARSE_SPECIAL, &decoded, NULL) !=
        BL_OK)
        abort();
    free(decoded);
    bl_ids_free(&ids);
}

int LLVMFuzzerTestOneInput(const uint8_t *bytes, size_t n_bytes)
{
    fuzz_input input = {.bytes = bytes, .n_bytes = n_bytes};
    bl_tokenizer *own = NULL;

    fuzz_part text = fuzz_next(&input), json = fuzz_next(&input);
    bool is_fixture = json.n_bytes == 1 && json.bytes[0] >= 'a' && json.bytes[0] < 'a' + N_FIXTURES;
    if (!is_fixture) {
        fuzz_write("tokenizer.json", json.bytes ? json : (fuzz_part){(const uint8_t *)"", 0});
        fuzz_write("tokenizer_config.json", fuzz_next(&input));
        fuzz_write("generation_config.json", fuzz_next(&input));
        fuzz_check(bl_tokenizer_load(fuzz_folder(), &own));
    }
    const bl_tokenizer *tokenizer = is_fixture ? fixture((size_t)(json.bytes[0] - 'a')) : own;
    for (unsigned flags = 0; tokenizer && text.bytes && flags < 8; flags++)
        encode(tokenizer, text, flags);
    bl_tokenizer_destroy(own);
    return 0;
}
