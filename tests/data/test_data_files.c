/* SPDX-License-Identifier: Apache-2.0 */
/* Kinds of files: each gives the samples of the same rows in a plain file of JSON lines. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cmocka.h>
#include <zlib.h>
#include <zstd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "data/dataset.h"

static char folder[64], path[192];
static bl_tokenizer *tokenizer;

static int set_up(void **state)
{
    (void)state;
    strcpy(folder, "/tmp/ballast-files-XXXXXX");
    if (!mkdtemp(folder)) return -1;
    return bl_tokenizer_load("tests/tokenizer/fixtures/chat.json", &tokenizer) == BL_OK ? 0 : -1;
}

static int tear_down(void **state)
{
    (void)state;
    bl_tokenizer_destroy(tokenizer);
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

static const char *write_file(const char *name, const void *bytes, size_t n)
{
    snprintf(path, sizeof path, "%s/%s", folder, name);
    assert_int_equal(bl_file_write_atomic(path, bytes, n), BL_OK);
    return path;
}

static bl_dataset_options options_for(const char *name)
{
    bl_dataset_options options = bl_dataset_default_options(name);
    options.eos_id = 0;
    options.n_threads = 1;
    return options;
}

static bl_dataset *open_options(const bl_dataset_options *options)
{
    bl_dataset *dataset;
    if (bl_dataset_open(options, tokenizer, &dataset) != BL_OK) fail_msg("%s", bl_error_text());
    return dataset;
}

static bl_dataset *open_bytes(const char *name, const void *bytes, size_t n)
{
    bl_dataset_options options = options_for(write_file(name, bytes, n));
    return open_options(&options);
}

/* Sample `i` of a is sample `k` of b. */
static void check_same(const bl_dataset *a, int64_t i, const bl_dataset *b, int64_t k)
{
    bl_sample x, y;

    if (bl_dataset_get(a, i, &x) != BL_OK) fail_msg("%s", bl_error_text());
    if (bl_dataset_get(b, k, &y) != BL_OK) fail_msg("%s", bl_error_text());
    assert_int_equal(x.n_tokens, y.n_tokens);
    assert_memory_equal(x.ids, y.ids, (size_t)x.n_tokens * sizeof *x.ids);
    assert_memory_equal(x.labels, y.labels, (size_t)x.n_tokens * sizeof *x.labels);
    bl_sample_free(&x);
    bl_sample_free(&y);
}

static void check_all_same(bl_dataset *a, bl_dataset *b)
{
    assert_int_equal(bl_dataset_count(a), bl_dataset_count(b));
    for (int64_t i = 0; i < bl_dataset_count(a); i++) check_same(a, i, b, i);
}

#define ROWS                                                                                       \
    "{\"prompt\":\"ab\",\"completion\":\"c\"}\n{\"prompt\":\"b, "                                  \
    "\\\"c\\\"\\nd\",\"completion\":\"e\"}\n"                                                      \
    "{\"prompt\":\"\\\\\",\"completion\":\"a\"}\n"

static size_t compress_gzip(const char *text, size_t n, unsigned char *out, size_t capacity)
{
    enum { LEVEL = 6, WINDOW = 15 + 16, MEMORY = 8 };
    z_stream z = {.next_in = (unsigned char *)text,
                  .avail_in = (uInt)n,
                  .next_out = out,
                  .avail_out = (uInt)capacity};

    assert_int_equal(deflateInit2(&z, LEVEL, Z_DEFLATED, WINDOW, MEMORY, Z_DEFAULT_STRATEGY), Z_OK);
    assert_int_equal(deflate(&z, Z_FINISH), Z_STREAM_END);
    deflateEnd(&z);
    return capacity - z.avail_out;
}

static size_t compress_zstd(const char *text, size_t n, unsigned char *out, size_t capacity)
{
    size_t n_out = ZSTD_compress(out, capacity, text, n, 3);
    assert_false(ZSTD_isError(n_out));
    return n_out;
}

typedef size_t (*compressor)(const char *text, size_t n, unsigned char *out, size_t capacity);
static const compressor compressors[] = {compress_gzip, compress_zstd};

/* Also as two members or frames, one of them cut inside a row; the fingerprint is the plain
 * file's, by which a run is resumed from either. */
static void test_compressed(void **state)
{
    static const char rows[] = ROWS;
    unsigned char packed[2048];
    bl_dataset *plain = open_bytes("rows.jsonl", rows, sizeof rows - 1);

    (void)state;
    for (size_t c = 0; c < BL_COUNT(compressors); c++)
        for (size_t cut = 0; cut < sizeof rows - 1; cut += 20) {
            size_t n = cut ? compressors[c](rows, cut, packed, sizeof packed) : 0;
            n += compressors[c](rows + cut, sizeof rows - 1 - cut, packed + n, sizeof packed - n);
            bl_dataset *dataset = open_bytes("rows.packed", packed, n);
            check_all_same(dataset, plain);
            assert_int_equal(bl_dataset_fingerprint(dataset), bl_dataset_fingerprint(plain));
            bl_dataset_close(dataset);
        }
    bl_dataset_close(plain);
}

static void check_refused(const char *name, const void *bytes, size_t n, const char *says)
{
    bl_dataset *dataset;
    bl_dataset_options options = options_for(write_file(name, bytes, n));
    bl_status st = bl_dataset_open(&options, tokenizer, &dataset);

    if (st != BL_EINPUT || !strstr(bl_error_text(), says))
        fail_msg("%s: status %d: \"%s\" does not say \"%s\"", name, (int)st, bl_error_text(), says);
}

/* Cut short anywhere, with text behind, or with a byte changed in the middle. */
static void test_damaged(void **state)
{
    static const char rows[] = ROWS;
    unsigned char packed[2048];

    (void)state;
    for (size_t c = 0; c < BL_COUNT(compressors); c++) {
        size_t n = compressors[c](rows, sizeof rows - 1, packed, sizeof packed);
        for (size_t cut = 5; cut < n; cut++) check_refused("cut", packed, cut, "damaged");
        packed[n] = 'x';
        check_refused("behind", packed, n + 1, "damaged");
        packed[n / 2] ^= 0x55;
        bl_dataset *dataset;
        bl_dataset_options options = options_for(write_file("changed", packed, n));
        assert_int_equal(bl_dataset_open(&options, tokenizer, &dataset), BL_EINPUT);
    }
}

static void test_csv(void **state)
{
    static const char *const same[] = {
        "prompt,completion\nab,c\n\"b, \"\"c\"\"\nd\",e\n\\,a\n",
        "\"prompt\",\"completion\"\r\n\"ab\",\"c\"\r\n\"b, \"\"c\"\"\nd\",e\r\n\\,a",
        "\xef\xbb\xbfid,prompt,completion\n\n1,ab,c\n,\"b, \"\"c\"\"\nd\",e\n3,\\,a\n\n",
    };
    static const char rows[] = ROWS;
    static const char tabs[] = "prompt\tcompletion\nab\tc\n\"b, \"\"c\"\"\nd\"\te\n\\\ta\n";
    bl_dataset *plain = open_bytes("rows.jsonl", rows, sizeof rows - 1);
    unsigned char packed[2048];

    (void)state;
    for (size_t i = 0; i < BL_COUNT(same); i++) {
        bl_dataset *dataset = open_bytes("rows.csv", same[i], strlen(same[i]));
        check_all_same(dataset, plain);
        bl_dataset_close(dataset);
    }
    bl_dataset *dataset = open_bytes("rows.TSV", tabs, sizeof tabs - 1);
    check_all_same(dataset, plain);
    bl_dataset_close(dataset);
    size_t n = compress_gzip(same[0], strlen(same[0]), packed, sizeof packed);
    dataset = open_bytes("rows.csv.gz", packed, n);
    check_all_same(dataset, plain);
    bl_dataset_close(dataset);
    bl_dataset_close(plain);
}

static void test_bad_csv(void **state)
{
    static const struct {
        const char *text, *says;
    } bad[] = {
        {"prompt,completion\na,b\na\n", "rows.csv:3: fewer fields than the header, which has 2"},
        {"prompt,completion\n\"a\nb\",b\na,b,c\n", "rows.csv:4: more fields than the header"},
        {"prompt,completion\na,\"b\n", "rows.csv:2: the file ends inside this quoted field"},
        {"prompt,completion\n\"a\"b,c\n", "rows.csv:2: text behind the end of a quoted field"},
        {"prompt,completion\na,b\n\xff,b\n", "rows.csv:3:"},
        {"prompt,prompt\na,b\n", "duplicate"},
        {"\nprompt;completion\na;b\n",
         "rows.csv:2: the header has one column, prompt;completion: fields are separated by commas "
         "in .csv, by tabs in .tsv, not by semicolons"},
        {"prompt\tcompletion\na\tb\n", "not by tabs"},
        {"prompt|completion\na|b\n", "not by bars"},
        {"sep=,\nprompt,completion\na,b\n", "rows.csv:1: sep= is a line for Excel"},
        {"sep=;\nprompt;completion\na;b\n", "sep= is a line for Excel"},
        {"prompt,completion\na,\n", "rows.csv:2: the answer is empty"},
        {"prompt,completion\nna\xefve,b\n", "rows.csv:2: byte 0xef is not UTF-8"},
        {"prompt,completion\n", "no usable rows"},
        {"", "no usable rows"},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(bad); i++)
        check_refused("rows.csv", bad[i].text, strlen(bad[i].text), bad[i].says);
}

/* Data sets that are not on this machine. */
static void test_remote_data(void **state)
{
    static const struct {
        const char *path, *says;
    } remote[] = {
        {"no-such-owner/alpaca",
         "no-such-owner/alpaca: no such file or directory; to download a data "
         "set from the Hugging Face Hub: hf download no-such-owner/alpaca "
         "--repo-type dataset --local-dir alpaca, then give"},
        {"https://huggingface.co/datasets/o/n",
         "hf download o/n --repo-type dataset --local-dir n,"},
        {"https://huggingface.co/datasets/o/n/resolve/main/train.jsonl",
         "hf download o/n --repo-type dataset --local-dir n,"},
        {"https://huggingface.co/datasets/imdb",
         "hf download imdb --repo-type dataset --local-dir imdb,"},
        {"hf://datasets/o/n@main/a.json", "hf download o/n --repo-type dataset --local-dir n,"},
        {"s3://bucket/rows.jsonl", "s3://bucket/rows.jsonl: is not a local file: download it"},
        {"no-such-folder/rows.jsonl", "No such file or directory"},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(remote); i++) {
        bl_dataset *dataset;
        bl_dataset_options options = options_for(remote[i].path);
        assert_int_equal(bl_dataset_open(&options, tokenizer, &dataset), BL_EINPUT);
        if (!strstr(bl_error_text(), remote[i].says))
            fail_msg("\"%s\" does not say \"%s\"", bl_error_text(), remote[i].says);
    }
}

/* ---- several files ---- */

/* The files of a directory in the order of their names, whatever else is there. */
static void test_directory(void **state)
{
    static const char whole[] = "{\"text\":\"a\"}\n{\"text\":\"b\"}\n{\"text\":\"c\"}\n";
    char dir[128];

    (void)state;
    snprintf(dir, sizeof dir, "%s/rows.d", folder);
    assert_int_equal(mkdir(dir, 0700), 0);
    bl_dataset_options options = options_for(dir);
    bl_dataset *dataset;
    assert_int_equal(bl_dataset_open(&options, tokenizer, &dataset), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "a directory without data files"));
    write_file("rows.d/2.csv", "text\nb\n", 7);
    write_file("rows.d/1.jsonl", whole, 13);
    write_file("rows.d/3.json", whole + 26, 13);
    write_file("rows.d/README.md", "x", 1);
    write_file("rows.d/.hidden.json", "x", 1);
    bl_dataset *plain = open_bytes("rows.jsonl", whole, sizeof whole - 1);
    dataset = open_options(&options);
    check_all_same(dataset, plain);
    bl_dataset_close(dataset);
    bl_dataset_close(plain);
    write_file("rows.d/4.json", "{\"text\":3}", 10);
    assert_int_equal(bl_dataset_open(&options, tokenizer, &dataset), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "rows.d/4.json:1: key text"));
    write_file("rows.d/5.parquet", "PAR1", 4);
    assert_int_equal(bl_dataset_open(&options, tokenizer, &dataset), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "has 5.parquet, which cannot be read"));
}

/* Row i of a file with share s is used floor((i + 1) s) - floor(i s) times. */
static void test_shares(void **state)
{
    static const char rows[] =
        "{\"text\":\"a\"}\n{\"text\":\"b\"}\n{\"text\":\"c\"}\n{\"text\":\"d\"}\n";
    static const struct {
        double shares[2];
        const char *order;
    } cases[] = {
        {{1, 1}, "abcdabcd"}, {{0.5, 2}, "bdaabbccdd"}, {{1.5, 0.25}, "abbcddd"}, {{0, 1}, "abcd"}};
    char first[192];

    (void)state;
    strcpy(first, write_file("rows.jsonl", rows, sizeof rows - 1));
    const char *second[] = {write_file("more.jsonl", rows, sizeof rows - 1)};
    bl_dataset_options options = options_for(first);
    bl_dataset *plain = open_options(&options);
    options.more_paths = second;
    options.n_more_paths = 1;
    for (size_t c = 0; c < BL_COUNT(cases); c++) {
        bl_dataset_stats stats;
        int64_t n_tokens = 0;
        options.shares = cases[c].shares;
        bl_dataset *dataset = open_options(&options);
        assert_int_equal(bl_dataset_count(dataset), strlen(cases[c].order));
        for (int64_t i = 0; cases[c].order[i]; i++) {
            check_same(dataset, i, plain, cases[c].order[i] - 'a');
            n_tokens += bl_dataset_n_tokens(dataset, i);
        }
        bl_dataset_get_stats(dataset, &stats);
        assert_int_equal(stats.n_tokens, n_tokens);
        bl_dataset_close(dataset);
    }
    bl_dataset_close(plain);
}

static void test_stdin(void **state)
{
    static const char rows[] = "{\"text\":\"a\"}\n{\"text\":\"b\"}\n";
    bl_dataset *plain = open_bytes("rows.jsonl", rows, sizeof rows - 1);
    bl_dataset_options options = options_for("-");
    int saved = dup(STDIN_FILENO), ends[2];

    (void)state;
    assert_int_equal(pipe(ends), 0);
    assert_int_equal(write(ends[1], rows, sizeof rows - 1), sizeof rows - 1);
    close(ends[1]);
    assert_true(dup2(ends[0], STDIN_FILENO) >= 0);
    close(ends[0]);
    bl_dataset *dataset = open_options(&options);
    check_all_same(dataset, plain);
    assert_true(dup2(saved, STDIN_FILENO) >= 0);
    close(saved);
    bl_dataset_close(dataset);
    bl_dataset_close(plain);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_compressed),  cmocka_unit_test(test_damaged),
        cmocka_unit_test(test_csv),         cmocka_unit_test(test_bad_csv),
        cmocka_unit_test(test_remote_data), cmocka_unit_test(test_directory),
        cmocka_unit_test(test_shares),      cmocka_unit_test(test_stdin),
    };
    return cmocka_run_group_tests(tests, set_up, tear_down);
}
