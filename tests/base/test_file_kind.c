/* SPDX-License-Identifier: Apache-2.0 */
/* Files given by mistake are named; JSON, safetensors files and plain text are not. The
 * bytes are the first ones of files that the formats' own programs wrote. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include <cmocka.h>

#include "base/file_kind.h"
#include "base/sizes.h"

#define BYTES(text) text, sizeof(text) - 1

static const struct {
    const char *bytes;
    size_t n;
    const char *says; /* NULL: unknown */
} cases[] = {
    {BYTES("\x1f\x8b\x08\0\0\0\0\0\0\x03"),
     "f: is gzip data, not JSON: decompress it first (gunzip)"},
    {BYTES("\x28\xb5\x2f\xfd\x04\x58"), "Zstandard"},
    {BYTES("\xfd"
           "7zXZ\0\0\x04"),
     "xz data"},
    {BYTES("BZh91AY&SY"), "bzip2"},
    {BYTES("\x04\x22\x4d\x18\x64\x40"), "LZ4"},
    {BYTES("PK\3\4\x14\0\0\0\x08\0a.jsonl"), "a zip archive, not JSON: unpack"},
    {BYTES("PK\3\4\0\0\x08\x08\0\0archive/data.pkl"),
     "a PyTorch file, not JSON: convert the weights to safetensors"},
    {BYTES("PK\3\4\x14\0\6\0\x08\0[Content_Types].xml"), "Excel"},
    {BYTES("\xd0\xcf\x11\xe0\xa1\xb1\x1a\xe1\0"), "old Excel"},
    {BYTES("PAR1\x15\x04\x15\x10"), "a Parquet file, not JSON: convert it to JSON lines"},
    {BYTES("ARROW1\0\0\xff\xff\xff\xff"), "Arrow or Feather"},
    {BYTES("\xff\xff\xff\xff\x70\0\0\0\x10\0"), "an Arrow stream"},
    {BYTES("ORC\x03"), "ORC"},
    {BYTES("%PDF-1.7\n"), "a PDF document"},
    {BYTES("{\0\"\0a\0"), "UTF-16 text, not JSON: save it as UTF-8"},
    {BYTES("\0[\0{"), "UTF-16"},
    {BYTES("\x80\x02}q\0"), "a Python pickle"},
    {BYTES("GGUF\x03\0\0\0"), "a GGUF model"},
    {BYTES("\x89HDF\r\n\x1a\n"), "HDF5"},
    {BYTES("SQLite format 3\0\x10"), "SQLite"},
    {BYTES("version https://git-lfs.github.com/spec/v1\n"),
     "a Git LFS pointer, not JSON: run git lfs pull"},
    {BYTES("  \n<!DocType html>"), "an HTML page"},
    {BYTES("<HTML><body>"), "an HTML page"},
    {BYTES("{\"text\":\"PK\3\4 %PDF-\"}"), NULL},
    {BYTES("[{\"a\":1}]"), NULL},
    {BYTES("\xef\xbb\xbf{\"a\":1}"), NULL},
    {BYTES("  \n {}"), NULL},
    {BYTES("\"BZh\""), NULL},
    {BYTES("hello"), NULL},
    {BYTES("\x1f"), NULL},
    {BYTES("\xff\xfd"), NULL},
    {BYTES(""), NULL},
};

static void test_kinds(void **state)
{
    char tar[512] = "rows.jsonl";
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_status st = bl_file_kind_refuse("f", cases[i].bytes, cases[i].n, "JSON");
        if (st != (cases[i].says ? BL_EINPUT : BL_OK)) fail_msg("case %zu: status %d", i, (int)st);
        if (cases[i].says && !strstr(bl_error_text(), cases[i].says))
            fail_msg("\"%s\" does not say \"%s\"", bl_error_text(), cases[i].says);
    }
    memcpy(tar + 257, "ustar", 5);
    assert_int_equal(bl_file_kind_refuse("f", tar, sizeof tar, "JSON"), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "tar archive"));
    assert_int_equal(bl_file_kind_refuse("f", tar, 260, "JSON"), BL_OK);
}

/* Every beginning of a known file, byte by byte: nothing behind n_bytes is looked at
 * (AddressSanitizer). */
static void test_short_files(void **state)
{
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        for (size_t n = 0; n < cases[i].n; n++) {
            char *copy = test_malloc(n + 1);
            memcpy(copy + 1, cases[i].bytes, n);
            bl_file_kind_refuse("f", copy + 1, n, "JSON");
            test_free(copy);
        }
}

static void test_tables(void **state)
{
    static const struct {
        const char *path, *line;
        bool is_table;
    } lines[] = {
        {"a.csv", "anything at all", true},
        {"a.TSV", "x", true},
        {"a.csv", "{\"text\": 1", false},
        {"a.csv", "[", false},
        {"a.csv", "", false},
        {"a.jsonl", "prompt,completion", true},
        {"a.jsonl", "\"Instruction\",\"input\",\"output\"\r", true},
        {"a.jsonl", ",text,label", true}, /* as pandas writes its index */
        {"a.jsonl", "id\ttext", true},
        {"a.jsonl", "question;answer", true},
        {"a.jsonl", "text", false},
        {"a.jsonl", "apples,pears", false},
        {"a.jsonl", "Once upon a time, there was a text.", false},
        {"a.jsonl", "Write a prompt, he said: \"text\"", false},
        {"a.jsonl", "'text': 'a', 'b': 1", false},
        {"a.jsonl", "1,2,text", false},
        {"a.jsonl", ",,", false},
        {"a/b.c/rows", "hello, world", false},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(lines); i++)
        if (bl_file_kind_is_table(lines[i].path, lines[i].line, strlen(lines[i].line)) !=
            lines[i].is_table)
            fail_msg("%s: %s", lines[i].path, lines[i].line);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_kinds),
        cmocka_unit_test(test_short_files),
        cmocka_unit_test(test_tables),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
