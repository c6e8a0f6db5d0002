/* SPDX-License-Identifier: Apache-2.0 */
/* Packed data sets: concatenation against Hugging Face's examples (chat_golden.json), packing by
 * what must hold of it. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "data/dataset.h"

enum { M = BL_LABEL_MASKED, VOCAB = 1000 };

static char folder[64], path[128];

static int set_up(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ballast-packing-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    snprintf(path, sizeof path, "%s/rows.jsonl", folder);
    return 0;
}

static int tear_down(void **state)
{
    (void)state;
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

static bl_dataset *open_rows(void)
{
    bl_dataset *dataset;
    bl_dataset_options options = bl_dataset_default_options(path);
    options.vocab_size = VOCAB;
    if (bl_dataset_open(&options, NULL, &dataset) != BL_OK) fail_msg("%s", bl_error_text());
    return dataset;
}

static bl_dataset *open_text(const char *text)
{
    assert_int_equal(bl_file_write_atomic(path, text, strlen(text)), BL_OK);
    return open_rows();
}

static bl_dataset *pack(bl_dataset *samples, bl_packing packing, int64_t row_tokens, int64_t first,
                        int64_t n)
{
    bl_dataset *packed;
    if (bl_dataset_pack(samples, packing, row_tokens, first, n, &packed) != BL_OK)
        fail_msg("%s", bl_error_text());
    return packed;
}

static bl_sample get(const bl_dataset *dataset, int64_t index)
{
    bl_sample sample;
    if (bl_dataset_get(dataset, index, &sample) != BL_OK) fail_msg("%s", bl_error_text());
    assert_int_equal(sample.n_tokens, bl_dataset_n_tokens(dataset, index));
    return sample;
}

static void check_list(const json_t *row, const char *key, const int32_t *got, int64_t n)
{
    const json_t *list = json_object_get(row, key);
    assert_int_equal(json_array_size(list), n);
    for (int64_t t = 0; t < n; t++)
        assert_int_equal(got[t], json_integer_value(json_array_get(list, (size_t)t)));
}

static void test_concatenation_as_hugging_face(void **state)
{
    json_t *golden;
    const json_t *entry, *row;
    size_t i, k;
    (void)state;
    assert_int_equal(bl_json_load("tests/chat/chat_golden.json", 1 << 26, &golden), BL_OK);
    json_array_foreach(json_object_get(golden, "packing"), i, entry)
    {
        const json_t *rows = json_object_get(entry, "rows"),
                     *samples = json_object_get(entry, "samples");
        char *text = json_dumps(samples, 0);
        bl_dataset *plain = open_text(text);
        bl_dataset *joined =
            pack(plain, BL_PACKING_CONCATENATE,
                 json_integer_value(json_object_get(entry, "length")), 0, bl_dataset_count(plain));
        bl_dataset_close(plain); /* lives on with what was made of it */
        assert_int_equal(bl_dataset_count(joined), json_array_size(rows));
        json_array_foreach((json_t *)rows, k, row)
        {
            bl_sample sample = get(joined, (int64_t)k);
            check_list(row, "input_ids", sample.ids, sample.n_tokens);
            check_list(row, "labels", sample.labels, sample.n_tokens);
            assert_null(sample.document_ids);
            bl_sample_free(&sample);
        }
        bl_dataset_close(joined);
        free(text);
    }
    assert_int_equal(i, 3);
    json_decref(golden);
}

/* Writes n rows of random lengths in [2, max]; the first id of row i tells i: ids[0] * VOCAB +
 * ids[1]. */
static void write_random(int64_t n, int max, unsigned seed)
{
    FILE *file = fopen(path, "w");
    assert_non_null(file);
    srand(seed);
    for (int64_t i = 0; i < n; i++) {
        int length = 2 + rand() % (max - 1);
        fprintf(file, "{\"input_ids\":[%d,%d", (int)(i / VOCAB), (int)(i % VOCAB));
        for (int t = 2; t < length; t++) fprintf(file, ",%d", rand() % VOCAB);
        fputs("]}\n", file);
    }
    assert_int_equal(fclose(file), 0);
}

/* Every sample is in one row, whole, once; rows are in the order of their first samples; returns
 * the rows' fill, 0..1. */
static double check_packed(const bl_dataset *plain, const bl_dataset *packed, int64_t row_tokens,
                           int64_t first, int64_t n)
{
    char *seen = calloc((size_t)n, 1);
    int64_t n_seen = 0, n_tokens = 0, row_before = -1;
    for (int64_t row = 0; row < bl_dataset_count(packed); row++) {
        bl_sample whole = get(packed, row);
        int64_t before = -1;
        int32_t document = 0;
        assert_true(whole.n_tokens <= row_tokens);
        for (int64_t at = 0; at < whole.n_tokens;) {
            int64_t index = whole.ids[at] * VOCAB + whole.ids[at + 1];
            assert_in_range(index, first, first + n - 1);
            assert_false(seen[index - first]++);
            assert_true(index > before);
            bl_sample sample = get(plain, index);
            assert_memory_equal(whole.ids + at, sample.ids, (size_t)sample.n_tokens * 4);
            assert_int_equal(whole.labels[at], M);
            assert_memory_equal(whole.labels + at + 1, sample.labels + 1,
                                (size_t)(sample.n_tokens - 1) * 4);
            for (int64_t t = 0; t < sample.n_tokens; t++)
                assert_int_equal(whole.document_ids[at + t], document);
            if (at == 0) {
                assert_true(index > row_before || index / 8192 > row_before / 8192);
                row_before = index;
            }
            before = index;
            document++;
            at += sample.n_tokens;
            n_seen++;
            bl_sample_free(&sample);
        }
        n_tokens += whole.n_tokens;
        bl_sample_free(&whole);
    }
    assert_int_equal(n_seen, n);
    free(seen);
    return (double)n_tokens / ((double)bl_dataset_count(packed) * (double)row_tokens);
}

static void test_packing_keeps_samples_whole(void **state)
{
    (void)state;
    write_random(20000, 40, 1); /* three windows */
    bl_dataset *plain = open_rows(), *packed = pack(plain, BL_PACKING_PACK, 64, 0, 20000),
               *again = pack(plain, BL_PACKING_PACK, 64, 0, 20000);
    /* First-fit decreasing needs at most 11/9 of the best number of rows and one more a window
     * (Dosa 2007). */
    double fill = check_packed(plain, packed, 64, 0, 20000);
    assert_true(fill > 0.97);
    assert_int_equal(bl_dataset_count(packed), bl_dataset_count(again));
    assert_true(bl_dataset_fingerprint(packed) == bl_dataset_fingerprint(again));
    bl_dataset_close(again);
    bl_dataset_close(packed);
    packed = pack(plain, BL_PACKING_PACK, 40, 17, 9000); /* a part, as after a split */
    check_packed(plain, packed, 40, 17, 9000);
    bl_dataset_close(packed);
    bl_dataset_close(plain);
}

static void test_first_fit_decreasing(void **state)
{
    /* Lengths 3 7 2 6 2 4 in rows of 10. By length: 7 | 6 | 6 4 | 7 3 | 2 2 -> rows {0,1}, {2,4},
     * {3,5}, by first sample. */
    static const int64_t expected[] = {10, 4, 10};
    (void)state;
    bl_dataset *plain =
        open_text("[{\"input_ids\":[0,0,1]},{\"input_ids\":[0,1,1,1,1,1,1]},{\"input_ids\":[0,2]},"
                  "{\"input_ids\":[0,3,1,1,1,1]},{\"input_ids\":[0,4]},{\"input_ids\":[0,5,1,1]}]");
    bl_dataset *packed = pack(plain, BL_PACKING_PACK, 10, 0, 6);
    assert_int_equal(bl_dataset_count(packed), 3);
    for (int64_t row = 0; row < 3; row++)
        assert_int_equal(bl_dataset_n_tokens(packed, row), expected[row]);
    check_packed(plain, packed, 10, 0, 6);
    bl_dataset_close(packed);
    bl_dataset_close(plain);
}

static void test_documents_and_weights(void **state)
{
    static const float weights[] = {1, 1, 1, 1, 0.5f, 2, 3, 1, 1};
    (void)state;
    bl_dataset *plain =
        open_text("{\"input_ids\":[1,2,3]}\n"
                  "{\"input_ids\":[4,5,6,7],\"document_ids\":[3,3,8,8],\"weights\":[1,0.5,2,3]}\n"
                  "{\"input_ids\":[8,9],\"labels\":[8,7]}\n");
    bl_dataset *packed = pack(plain, BL_PACKING_PACK, 9, 0, 3);
    bl_sample row = get(packed, 0);
    assert_int_equal(row.n_tokens, 9);
    assert_memory_equal(row.document_ids, ((int32_t[]){0, 0, 0, 1, 1, 2, 2, 3, 3}), 36);
    assert_memory_equal(row.weights, weights, sizeof weights);
    assert_memory_equal(row.labels, ((int32_t[]){M, 2, 3, M, 5, 6, 7, M, 7}),
                        36); /* a sample's inner labels are its own affair */
    bl_sample_free(&row);
    bl_dataset_stats stats;
    bl_dataset_get_stats(packed, &stats);
    assert_int_equal(stats.n_rows, 3);
    assert_int_equal(bl_dataset_format(packed), BL_DATA_TOKENS);
    bl_dataset_close(packed);
    bl_dataset_close(plain);

    plain = open_text("{\"input_ids\":[1,2,3]}\n{\"input_ids\":[4,5,6],\"weights\":[1,0.5,2]}\n");
    packed = pack(plain, BL_PACKING_CONCATENATE, 4, 0, 2);
    assert_int_equal(bl_dataset_count(packed), 1);
    row = get(packed, 0);
    assert_memory_equal(row.ids, ((int32_t[]){1, 2, 3, 4}), 16);
    assert_memory_equal(row.labels, row.ids, 16);
    assert_memory_equal(row.weights, ((float[]){1, 1, 1, 1}), 16);
    bl_sample_free(&row);
    bl_dataset_close(packed);
    packed = pack(plain, BL_PACKING_CONCATENATE, 5, 0, 2);
    row = get(packed, 0);
    assert_memory_equal(row.weights, ((float[]){1, 1, 1, 1, 0.5f}), 20);
    bl_sample_free(&row);
    bl_dataset_close(packed);
    bl_dataset_close(plain);
}

static void test_refusals(void **state)
{
    bl_dataset *packed;
    (void)state;
    bl_dataset *plain = open_text("{\"input_ids\":[1,2,3]}\n{\"input_ids\":[4,5,6,7,8]}\n");
    assert_int_equal(bl_dataset_pack(plain, BL_PACKING_PACK, 4, 0, 2, &packed), BL_EUSAGE);
    assert_non_null(
        strstr(bl_error_text(), "sample 1 has 5 tokens, a packed row 4: give max_seq_length"));
    assert_null(packed);
    assert_int_equal(bl_dataset_pack(plain, BL_PACKING_CONCATENATE, 9, 0, 2, &packed), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "8 tokens do not fill one row of max_seq_length 9"));
    assert_int_equal(bl_dataset_pack(plain, BL_PACKING_PACK, 0, 0, 2, &packed), BL_EUSAGE);
    assert_int_equal(bl_dataset_pack(plain, BL_PACKING_PACK, 8, 1, 2, &packed), BL_EINTERNAL);
    bl_sample sample;
    packed = pack(plain, BL_PACKING_CONCATENATE, 4, 0, 2);
    assert_int_equal(bl_dataset_get(packed, 2, &sample), BL_EINTERNAL);
    bl_dataset_close(packed);
    bl_dataset_close(plain);
    plain =
        open_text("{\"input_ids\":[1,2,3]}\n{\"input_ids\":[4,5,6],\"document_ids\":[0,0,1]}\n");
    assert_int_equal(bl_dataset_pack(plain, BL_PACKING_CONCATENATE, 3, 0, 2, &packed), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "use packing pack"));
    bl_dataset_close(plain);
}

static void test_fingerprints_differ(void **state)
{
    (void)state;
    write_random(50, 8, 3);
    bl_dataset *plain = open_rows();
    const struct {
        bl_packing packing;
        int64_t row_tokens, first, n;
    } cases[] = {{BL_PACKING_PACK, 8, 0, 50},
                 {BL_PACKING_PACK, 9, 0, 50},
                 {BL_PACKING_PACK, 8, 1, 49},
                 {BL_PACKING_PACK, 8, 0, 49},
                 {BL_PACKING_CONCATENATE, 8, 0, 50}};
    uint64_t seen[BL_COUNT(cases) + 1] = {bl_dataset_fingerprint(plain)};
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_dataset *packed =
            pack(plain, cases[i].packing, cases[i].row_tokens, cases[i].first, cases[i].n);
        seen[i + 1] = bl_dataset_fingerprint(packed);
        for (size_t k = 0; k <= i; k++) assert_true(seen[k] != seen[i + 1]);
        bl_dataset_close(packed);
    }
    bl_dataset_close(plain);
}

static void test_names(void **state)
{
    (void)state;
    assert_string_equal(bl_packing_name(BL_PACKING_NONE), "none");
    assert_string_equal(bl_packing_name(BL_PACKING_PACK), "pack");
    assert_string_equal(bl_packing_name(BL_PACKING_CONCATENATE), "concatenate");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_concatenation_as_hugging_face),
        cmocka_unit_test(test_packing_keeps_samples_whole),
        cmocka_unit_test(test_first_fit_decreasing),
        cmocka_unit_test(test_documents_and_weights),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_fingerprints_differ),
        cmocka_unit_test(test_names),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
