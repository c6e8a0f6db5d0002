/* SPDX-License-Identifier: Apache-2.0 */
/* Reads the model of tokenizer.json: vocabulary and merges of BPE, vocabulary of Unigram. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "tokenizer/internal.h"

/* ---- vocabulary ---- */

static bl_status load_vocab(const json_t *vocab, bl_model *model)
{
    const char *token;
    const json_t *value;
    size_t n_bytes;
    bl_bytes raw = {0};
    bl_status st = BL_OK;
    bool in_alphabet = true;

    json_object_keylen_foreach((json_t *)vocab, token, n_bytes, value)
    {
        json_int_t id = json_integer_value(value);
        if (!json_is_integer(value) || id < 0 || id >= BL_VOCAB_MAX_IDS) {
            char key[96], expected[32];
            snprintf(key, sizeof key, "vocab, token %.80s", token);
            snprintf(expected, sizeof expected, "an id in [0, %d]", BL_VOCAB_MAX_IDS - 1);
            st = bl_json_fail("model", key, expected, value);
            goto done;
        }
        const char *taken = bl_strings_get(&model->text, (int32_t)id, NULL);
        if (taken) {
            st = BL_FAIL(BL_EINPUT,
                         "model: vocab: tokens %.80s and %.80s share id %" JSON_INTEGER_FORMAT,
                         taken, token, id);
            goto done;
        }
        BL_TRY_GOTO(st, done, bl_strings_set(&model->text, (int32_t)id, token, n_bytes));
        raw.n = 0;
        if (model->byte_level)
            BL_TRY_GOTO(st, done,
                        bl_bytes_append_from_alphabet(&raw, token, n_bytes, &in_alphabet));
        else
            BL_TRY_GOTO(st, done, bl_bytes_append(&raw, token, n_bytes));
        if (in_alphabet)
            BL_TRY_GOTO(
                st, done,
                bl_strings_set(&model->piece, (int32_t)id, raw.data ? raw.data : "", raw.n));
    }
done:
    bl_bytes_free(&raw);
    return st;
}

static void find_byte_tokens(bl_model *model)
{
    for (int byte = 0; byte < 256; byte++) {
        char name[8], self = (char)byte;
        snprintf(name, sizeof name, "<0x%02X>", (unsigned)byte);
        model->byte_token[byte] = bl_strings_find(&model->text, name, 6);
        model->byte_symbol[byte] =
            byte < 0x80 || model->byte_level ? bl_strings_find(&model->piece, &self, 1) : -1;
    }
}

/* ---- merges ---- */

/* The two halves of one entry, "a b" or ["a", "b"]. */
static bool merge_halves(const json_t *entry, const char *half[2], size_t n_bytes[2])
{
    if (json_is_string(entry)) {
        const char *text = json_string_value(entry),
                   *space = memchr(text, ' ', json_string_length(entry));
        if (!space) return false;
        half[0] = text;
        n_bytes[0] = (size_t)(space - text);
        half[1] = space + 1;
        n_bytes[1] = json_string_length(entry) - n_bytes[0] - 1;
        return !memchr(half[1], ' ', n_bytes[1]);
    }
    if (json_array_size(entry) != 2) return false;
    for (size_t i = 0; i < 2; i++) {
        const json_t *text = json_array_get(entry, i);
        if (!json_is_string(text)) return false;
        half[i] = json_string_value(text);
        n_bytes[i] = json_string_length(text);
    }
    return true;
}

static bl_status load_merges(const json_t *list, bl_model *model)
{
    bl_bytes joined = {0};
    bl_status st;
    size_t n_prefix = model->prefix ? strlen(model->prefix) : 0; /* the right half's, dropped */
    size_t i;
    uint32_t rank = 0;
    const json_t *entry;

    BL_TRY_GOTO(st, done, bl_merges_create(&model->merges, json_array_size(list)));
    json_array_foreach((json_t *)list, i, entry)
    {
        const char *half[2];
        size_t n_bytes[2];
        if (json_is_string(entry) && !strncmp(json_string_value(entry), "#version", 8)) continue;
        if (!merge_halves(entry, half, n_bytes)) {
            st = BL_FAIL(BL_EINPUT,
                         "model: merges[%zu]: expected \"left right\" or [\"left\", \"right\"]", i);
            goto done;
        }
        joined.n = 0;
        BL_TRY_GOTO(st, done, bl_bytes_append(&joined, half[0], n_bytes[0]));
        bool is_long = n_bytes[1] >= n_prefix;
        size_t n_right = is_long ? n_bytes[1] - n_prefix : 0;
        BL_TRY_GOTO(st, done, bl_bytes_append(&joined, half[1] + (n_bytes[1] - n_right), n_right));
        int32_t left = bl_strings_find(&model->text, half[0], n_bytes[0]);
        int32_t right = bl_strings_find(&model->text, half[1], n_bytes[1]);
        int32_t id = bl_strings_find(&model->text, joined.data, joined.n);
        if (!is_long || left < 0 || right < 0 || id < 0) {
            st = BL_FAIL(
                BL_EINPUT,
                "model: merges[%zu]: %.*s and %.*s, or what they make, is not in the vocabulary", i,
                (int)(n_bytes[0] < 80 ? n_bytes[0] : 80), half[0],
                (int)(n_bytes[1] < 80 ? n_bytes[1] : 80), half[1]);
            goto done;
        }
        bl_merges_set(&model->merges, left, right, rank++, id);
    }
done:
    bl_bytes_free(&joined);
    return st;
}

/* ---- BPE ---- */

/* An affix of symbols; NULL where it is null, absent or empty. */
static bl_status load_affix(const json_t *json, const char *key, char **out)
{
    enum { MAX_AFFIX_BYTES = 32 }; /* a piece may have a symbol for each, at each character */
    const char *text = "";

    BL_TRY(bl_json_get_string("model", json, key, BL_JSON_OPTIONAL, &text));
    if (!*text) return BL_OK;
    if (strlen(text) > MAX_AFFIX_BYTES)
        return BL_FAIL(BL_EINPUT, "model: key %s: more than %d bytes", key, MAX_AFFIX_BYTES);
    *out = strdup(text);
    return *out ? BL_OK : BL_FAIL(BL_ENOMEM, "out of memory: %s", key);
}

static const json_t *bpe_affix(const json_t *json, const char *key)
{
    const json_t *value = json_object_get(json, key);
    return json_is_string(value) && !json_string_length(value) ? NULL : value;
}

static bool is_set(const json_t *value)
{
    return value && !json_is_null(value) && !json_is_false(value);
}

bool bl_tokenizer_model_takes_bytes(const json_t *json)
{
    const char *type = bl_json_text(json_object_get(json, "type"));

    return (!type || !strcmp(type, "BPE")) &&
           !is_set(bpe_affix(json, "continuing_subword_prefix")) &&
           !is_set(bpe_affix(json, "end_of_word_suffix")) &&
           !is_set(json_object_get(json, "byte_fallback"));
}

static bl_status check_dropout(const json_t *json)
{
    const json_t *dropout = json_object_get(json, "dropout");

    if (!dropout || json_is_null(dropout) ||
        (json_is_number(dropout) && json_number_value(dropout) == 0))
        return BL_OK;
    return BL_FAIL(BL_EINPUT, "model: dropout is not supported");
}

static bl_status load_bpe(const json_t *json, bl_model *model)
{
    const char *unk = NULL;
    const json_t *vocab, *merges;

    BL_TRY(bl_tokenizer_check_keys(json, "model",
                                   "type dropout unk_token continuing_subword_prefix fuse_unk "
                                   "byte_fallback ignore_merges end_of_word_suffix vocab merges"));
    BL_TRY(check_dropout(json));
    BL_TRY(load_affix(json, "continuing_subword_prefix", &model->prefix));
    BL_TRY(load_affix(json, "end_of_word_suffix", &model->suffix));
    BL_TRY(bl_json_get_bool("model", json, "fuse_unk", BL_JSON_OPTIONAL, &model->fuse_unk));
    BL_TRY(
        bl_json_get_bool("model", json, "byte_fallback", BL_JSON_OPTIONAL, &model->byte_fallback));
    BL_TRY(
        bl_json_get_bool("model", json, "ignore_merges", BL_JSON_OPTIONAL, &model->ignore_merges));
    BL_TRY(bl_json_get_object("model", json, "vocab", BL_JSON_REQUIRED, &vocab));
    BL_TRY(bl_json_get_array("model", json, "merges", BL_JSON_REQUIRED, &merges));
    BL_TRY(load_vocab(vocab, model));
    find_byte_tokens(model);
    BL_TRY(load_merges(merges, model));

    BL_TRY(bl_json_get_string("model", json, "unk_token", BL_JSON_OPTIONAL, &unk));
    if (unk && (model->unk = bl_strings_find(&model->text, unk, strlen(unk))) < 0)
        return BL_FAIL(BL_EINPUT, "model: unk_token %.80s is not in the vocabulary", unk);
    return BL_OK;
}

/* ---- Unigram ---- */

/* The library's JSON reader turns 16 and 17 digits (all digits as one integer, rounded, divided by
 * a power of ten) into a double that may be one step from the nearest. Such a step in a sum of
 * scores can decide between segmentations, so it is reproduced here: for the shortest digits of the
 * nearest double, the digits in the files. */
static double as_the_reference_reads(double nearest)
{
    enum { EXACT_DIGITS = 15, MAX_DIGITS = 17 }; /* 10^15 < 2^53: both steps are exact */
    char text[32];
    double scale = 1; /* a power of ten up to 10^22: exact */

    for (int n_digits = EXACT_DIGITS; n_digits <= MAX_DIGITS; n_digits++) {
        snprintf(text, sizeof text, "%.*e", n_digits - 1, fabs(nearest));
        if (strtod(text, NULL) != fabs(nearest)) continue;
        char *exponent = strchr(text, 'e');
        int power = atoi(exponent + 1) - (n_digits - 1);
        if (n_digits == EXACT_DIGITS || power < -22 || power > 0) return nearest;
        *exponent = '\0';
        memmove(text + 1, text + 2, strlen(text + 2) + 1); /* the point */
        double read = (double)strtoull(text, NULL, 10);
        for (; power < 0; power++) scale *= 10;
        return copysign(read / scale, nearest);
    }
    return nearest;
}

/* [token, score] of `id`. */
static bl_status load_scored(const json_t *entry, int32_t id, bl_model *model)
{
    const json_t *token = json_array_get(entry, 0), *score = json_array_get(entry, 1);

    if (json_array_size(entry) != 2 || !json_is_string(token) || !json_is_number(score))
        return BL_FAIL(BL_EINPUT, "model: vocab[%d]: expected [\"token\", score]", (int)id);
    const char *text = json_string_value(token);
    size_t n_bytes = json_string_length(token);
    if (bl_strings_find(&model->text, text, n_bytes) >= 0)
        return BL_FAIL(BL_EINPUT, "model: vocab[%d]: token %.80s is listed twice", (int)id, text);
    model->score[id] = as_the_reference_reads(json_number_value(score));
    BL_TRY(bl_strings_set(&model->text, id, text, n_bytes));
    return n_bytes ? bl_trie_add(&model->trie, text, n_bytes, id) : BL_OK;
}

static bl_status load_unigram(const json_t *json, bl_model *model)
{
    enum { UNK_PENALTY = 10 };
    const json_t *vocab, *entry;
    int64_t unk = -1;
    double lowest = 0;
    size_t i;

    model->kind = BL_MODEL_UNIGRAM;
    BL_TRY(bl_tokenizer_check_keys(json, "model", "type unk_id vocab byte_fallback"));
    BL_TRY(
        bl_json_get_bool("model", json, "byte_fallback", BL_JSON_OPTIONAL, &model->byte_fallback));
    BL_TRY(bl_json_get_array("model", json, "vocab", BL_JSON_REQUIRED, &vocab));
    size_t n = json_array_size(vocab);
    if (!n || n > BL_VOCAB_MAX_IDS)
        return BL_FAIL(BL_EINPUT, "model: vocab has %zu tokens; expected 1 to %d", n,
                       BL_VOCAB_MAX_IDS);
    BL_TRY(bl_json_get_int("model", json, "unk_id", BL_JSON_OPTIONAL, 0, (int64_t)n - 1, &unk));
    model->unk = (int32_t)unk;
    if (!(model->score = malloc(n * sizeof *model->score)))
        return BL_FAIL(BL_ENOMEM, "out of memory: scores of %zu tokens", n);
    model->n_scores = n;
    json_array_foreach((json_t *)vocab, i, entry)
    {
        BL_TRY(load_scored(entry, (int32_t)i, model));
        if (i == 0 || model->score[i] < lowest) lowest = model->score[i];
    }
    model->unk_score = lowest - UNK_PENALTY;
    find_byte_tokens(model);
    return BL_OK;
}

bl_status bl_tokenizer_load_model(const json_t *json, bl_model *model)
{
    const char *type = "BPE";

    model->unk = -1;
    BL_TRY(bl_json_check_object("model", json));
    BL_TRY(bl_json_get_string("model", json, "type", BL_JSON_OPTIONAL, &type));
    if (!strcmp(type, "BPE")) return load_bpe(json, model);
    if (!strcmp(type, "Unigram")) return load_unigram(json, model);
    return BL_FAIL(BL_EINPUT, "model: type %.80s is not supported", type);
}
