/* SPDX-License-Identifier: Apache-2.0 */
/* A file of 300 MB is opened, packed and read in a memory that does not grow with it. Prints the
 * speed. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include <cmocka.h>

#include "base/clock.h"
#include "base/files.h"
#include "data/dataset.h"

enum { FILE_BYTES = 300 << 20 };

static int64_t anonymous_bytes(void)
{
    char line[256];
    long long kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file) && sscanf(line, "RssAnon: %lld kB", &kib) != 1) {
    }
    fclose(file);
    return kib * 1024;
}

/* VmHWM, the peak; the file's pages are read, not mapped. */
static int64_t peak_bytes(void)
{
    char line[256];
    long long kib = 0;
    FILE *file = fopen("/proc/self/status", "r");
    assert_non_null(file);
    while (fgets(line, sizeof line, file) && sscanf(line, "VmHWM: %lld kB", &kib) != 1) {
    }
    fclose(file);
    return kib * 1024;
}

static int64_t write_rows(const char *path)
{
    static const char text[] = "Solve the problem step by step. She sold half as many clips in "
                               "May, which makes hello 24 of them. ";
    FILE *file = fopen(path, "w");
    int64_t n_rows = 0, n_bytes = 0;
    assert_non_null(file);
    for (; n_bytes < FILE_BYTES; n_rows++) {
        n_bytes += fprintf(file, "{\"messages\":[{\"role\":\"user\",\"content\":\"%lld ",
                           (long long)n_rows);
        for (int i = 0; i < 4 + n_rows % 9; i++) n_bytes += fprintf(file, "%s", text);
        n_bytes += fprintf(file, "\"},{\"role\":\"assistant\",\"content\":\"");
        for (int i = 0; i < 1 + n_rows % 5; i++) n_bytes += fprintf(file, "%s", text);
        n_bytes += fprintf(file, "\"}]}\n");
    }
    assert_int_equal(fclose(file), 0);
    return n_rows;
}

static void test_memory_is_bounded(void **state)
{
    char folder[] = "/tmp/ballast-large-XXXXXX", path[64];
    bl_tokenizer *tokenizer;
    bl_dataset *samples, *rows;
    bl_sample row;

    (void)state;
    assert_non_null(mkdtemp(folder));
    snprintf(path, sizeof path, "%s/rows.jsonl", folder);
    int64_t n_rows = write_rows(path);
    assert_int_equal(bl_tokenizer_load("tests/tokenizer/fixtures/chat.json", &tokenizer), BL_OK);
    bl_dataset_options options = bl_dataset_default_options(path);
    options.chat_template = "llama3";
    options.max_seq_length = 2048;
    options.n_threads = 2;
    int64_t before = peak_bytes();
    double start_s = bl_now_s();
    if (bl_dataset_open(&options, tokenizer, &samples) != BL_OK) fail_msg("%s", bl_error_text());
    double open_s = bl_now_s() - start_s;
    printf("%lld rows, %d MiB: %.1f s, %.1f MB/s\n", (long long)n_rows, FILE_BYTES >> 20, open_s,
           FILE_BYTES / open_s / 1e6);
    assert_int_equal(bl_dataset_count(samples), n_rows);
    /* While it is opened: the index (24 bytes per row, grown by half), the reader's buffer (4 MiB),
     * and for a batch of 1 MiB of text its JSON, ids and labels (at most 16 bytes per byte each
     * way), two workers' scratch of 8 MiB and word caches of 1 MiB. */
    int64_t bound = n_rows * 24 * 5 / 2 + (int64_t)(4 + 1 + 32 + 16 + 2) * (1 << 20);
    int64_t grown = peak_bytes() - before;
    printf("memory: grew by %.1f MiB, bound %.1f MiB\n", (double)grown / (1 << 20),
           (double)bound / (1 << 20));
    assert_true(grown < bound);

    int64_t open_bytes = anonymous_bytes();
    assert_int_equal(bl_dataset_pack(samples, BL_PACKING_PACK, 2048, 0, n_rows, &rows), BL_OK);
    assert_true(anonymous_bytes() - open_bytes <
                n_rows * 12 + (4 << 20)); /* order, start before it is cut, allocator */
    for (int64_t i = 0; i < bl_dataset_count(rows); i += bl_dataset_count(rows) / 100) {
        assert_int_equal(bl_dataset_get(rows, i, &row), BL_OK);
        bl_sample_free(&row);
    }
    assert_true(peak_bytes() - before < bound + n_rows * 12);
    bl_dataset_close(rows);
    bl_dataset_close(samples);
    bl_tokenizer_destroy(tokenizer);
    assert_int_equal(bl_tree_remove(folder), BL_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_memory_is_bounded)};
    return cmocka_run_group_tests(tests, NULL, NULL);
}
