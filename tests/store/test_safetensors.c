/* SPDX-License-Identifier: Apache-2.0 */
/* safetensors: each refusal by a hand-made file, reading, and the writer's layout. */
#include "tmp_dir.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/safetensors.h"

static void assert_refused(const char *name, const char *part)
{
    bl_safetensors *file = (bl_safetensors *)&file;
    assert_int_equal(bl_safetensors_open(tmp_path(name), &file), BL_EINPUT);
    assert_null(file);
    assert_error_has(part);
    assert_error_has(name);
}

static void test_refuses_what_is_no_safetensors_file(void **state)
{
    static const unsigned char huge[] = {1, 0xe1, 0xf5, 5, 0, 0, 0, 0, '{', '}'}; /* 100,000,001 */
    static const unsigned char cap[] = {0, 0xe1, 0xf5, 5,   0,
                                        0, 0,    0,    '{', '}'}; /* 100,000,000: legal, but cut */
    (void)state;
    put_text("a", "");
    assert_refused("a", "too short");
    put_text("a", "1234567");
    assert_refused("a", "7 bytes, too short");
    put_bytes("a", huge, sizeof huge);
    assert_refused("a", "header length 100000001 is more than 100000000");
    put_bytes("a", cap, sizeof cap);
    assert_refused("a", "header of 100000000 bytes is cut short: the file has 10 bytes");
    put_bytes("a", "\3\0\0\0\0\0\0\0{}", 10);
    assert_refused("a", "cut short");
    put_text("a", "version https://git-lfs.github.com/spec/v1\noid sha256:0\nsize 9\n");
    assert_refused("a", "is a Git LFS pointer, not a safetensors file: run git lfs pull");
    put_text("a", "\x80\x02}q\x01.");
    assert_refused("a", "is a Python pickle, as PyTorch writes, not a safetensors file: convert");
    put_text("a", "PAR1\x15\x04\x15\x10");
    assert_refused("a", "is a Parquet file, not a safetensors file");
    put_text("a", "\n <!DOCTYPE html><html>");
    assert_refused("a", "is an HTML page");
    put_text("a", "<HTML>");
    assert_refused("a", "is an HTML page");
    assert_int_equal(mkfifo(tmp_path("fifo"), 0600), 0);
    assert_refused("fifo", "is a FIFO, not a regular file");
    tmp_subdir("folder");
    assert_refused("folder", "is a folder, not a regular file");
    assert_refused("absent", "No such file");
}

static void test_refuses_bad_headers(void **state)
{
    static const struct {
        const char *header;
        size_t n_data;
        const char *part;
    } cases[] = {
        {"", 0, "unexpected token near end of file"},
        {"[1]", 0, "expected a JSON object, got [1]"},
        {"{\"\xff\":1}", 0, "unable to decode byte 0xff"},
        {"{} x", 0, "end of file expected"},
        {"{\"a\":1}", 0, "tensor a: is not an object"},
        {"{\"__metadata__\":[1]}", 0, "key __metadata__: expected an object of strings, got [1]"},
        {"{\"__metadata__\":{\"a\":1}}", 0,
         "key __metadata__: expected an object of strings, got 1"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},"
         "\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}",
         1, "duplicate object key"},
        {"{\"a\\u000ab\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
         "control character"},
        {"{\"a\":{\"shape\":[1],\"data_offsets\":[0,1]}}", 1, "tensor a: has no dtype"},
        {"{\"a\":{\"dtype\":\"F7\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
         "tensor a: unknown dtype F7"},
        {"{\"a\":{\"dtype\":\"U8\",\"data_offsets\":[0,1]}}", 1, "shape is not an array"},
        {"{\"a\":{\"dtype\":\"F32\\u0000x\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4,
         "tensor a: key dtype: expected a string without NUL, got \"F32\\u0000x\""},
        {"{\"a\\u0000b\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}", 1,
         "NUL byte in object key"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[-1],\"data_offsets\":[0,1]}}", 1,
         "tensor a: key shape: expected sizes, got -1"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1.0],\"data_offsets\":[0,1]}}", 1,
         "tensor a: key shape: expected sizes, got 1.0"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[18446744073709551616],\"data_offsets\":[0,1]}}", 1,
         "tensor a: key shape: expected sizes, got 1.8446744073709552e19"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,9223372036854775808]}}", 1,
         "tensor a: key data_offsets: expected [begin, end], got [0,9.2233720368547758e18]"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1,1,1,1,1,1,1,1,1],\"data_offsets\":[0,1]}}", 1,
         "more than 8 dimensions"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1]}}", 1,
         "key data_offsets: expected [begin, end], got "},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1,2]}}", 1,
         "key data_offsets: expected [begin, end], got "},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[-1,0]}}", 1,
         "key data_offsets: expected [begin, end], got "},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[1,0]}}", 1,
         "ends before it begins"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[1,2]}}", 2,
         "tensor a: begins at data byte 1, the one before ends at 0 (hole)"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[0,2]},"
         "\"b\":{\"dtype\":\"U8\",\"shape\":[2],\"data_offsets\":[1,3]}}",
         3, "tensor b: begins at data byte 1, the one before ends at 2 (overlap)"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4294967296,4294967296],\"data_offsets\":[0,0]}}", 0,
         "shape [4294967296, 4294967296] overflows"},
        {"{\"a\":{\"dtype\":\"F64\",\"shape\":[2305843009213693952],\"data_offsets\":[0,0]}}", 0,
         "overflows"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[3],\"data_offsets\":[0,5]}}", 5,
         "tensor a: BF16 [3] is 6 bytes, data_offsets say 5"},
        {"{\"a\":{\"dtype\":\"BF16\",\"shape\":[2],\"data_offsets\":[0,5]}}", 5,
         "tensor a: BF16 [2] is 4 bytes, data_offsets say 5"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 3,
         "the tensors take 4 bytes, the file has 3 for them (truncated)"},
        {"{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 5,
         "the tensors take 4 bytes, the file has 5 for them (bytes after the last tensor)"},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        put_safetensors("bad", cases[i].header, cases[i].n_data);
        assert_refused("bad", cases[i].part);
    }
}

static void test_reads_legal_oddities(void **state)
{
    bl_safetensors *file;
    unsigned char bytes[4];

    (void)state;
    put_safetensors(
        "odd",
        " {\"__metadata__\":{\"format\":\"pt\"},"
        "\"z\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[0,3]},"
        "\"scalar\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[3,7]},"
        "\"empty\":{\"dtype\":\"F32\",\"shape\":[0,5],\"data_offsets\":[3,3],\"later\":1}}   ",
        7);
    assert_int_equal(bl_safetensors_open(tmp_path("odd"), &file), BL_OK);
    assert_int_equal(bl_safetensors_count(file), 3);
    assert_string_equal(bl_safetensors_at(file, 0)->name, "z");
    assert_string_equal(bl_safetensors_at(file, 1)->name, "empty");
    assert_null(bl_safetensors_find(file, "y"));
    assert_null(bl_safetensors_find(file, "__metadata__"));
    const bl_stored_tensor *scalar = bl_safetensors_find(file, "scalar");
    assert_int_equal(scalar->n_dims, 0);
    assert_int_equal(scalar->n_bytes, 4);
    assert_int_equal(bl_stored_tensor_read(scalar, 1, 3, bytes), BL_OK);
    assert_memory_equal(bytes, "\4\5\6", 3);
    assert_int_equal(bl_stored_tensor_read(scalar, 1, 4, bytes), BL_EINTERNAL);
    assert_int_equal(bl_stored_tensor_read(scalar, -1, 1, bytes), BL_EINTERNAL);
    bl_safetensors_close(file);
    put_safetensors("none", "{}", 0);
    assert_int_equal(bl_safetensors_open(tmp_path("none"), &file), BL_OK);
    assert_int_equal(bl_safetensors_count(file), 0);
    bl_safetensors_close(file);
}

static void test_a_file_cut_while_open(void **state)
{
    bl_safetensors *file;
    char bytes[4];

    (void)state;
    put_safetensors("cut", "{\"z\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4);
    assert_int_equal(bl_safetensors_open(tmp_path("cut"), &file), BL_OK);
    assert_int_equal(truncate(tmp_path("cut"), bl_safetensors_at(file, 0)->offset_bytes + 1), 0);
    assert_int_equal(bl_stored_tensor_read(bl_safetensors_at(file, 0), 0, 4, bytes), BL_EIO);
    assert_error_has("tensor z: /tmp/");
    assert_error_has("/cut: ends at offset ");
    bl_safetensors_close(file);
}

static const bl_stored_tensor_spec specs[] = {
    {"b.half", BL_F16, 1, {3}}, {"z.float", BL_F32, 2, {2, 2}}, {"a.float", BL_F32, 0, {0}},
    {"long", BL_I64, 1, {1}},   {"a\"quote", BL_U8, 1, {5}},    {"none", BL_BF16, 2, {0, 7}},
};
static const char *const metadata[] = {"format", "pt", "step", "7"};

static void test_writer_layout(void **state)
{
    static const char header[] =
        "{\"__metadata__\":{\"format\":\"pt\",\"step\":\"7\"},"
        "\"long\":{\"dtype\":\"I64\",\"shape\":[1],\"data_offsets\":[0,8]},"
        "\"a.float\":{\"dtype\":\"F32\",\"shape\":[],\"data_offsets\":[8,12]},"
        "\"z.float\":{\"dtype\":\"F32\",\"shape\":[2,2],\"data_offsets\":[12,28]},"
        "\"none\":{\"dtype\":\"BF16\",\"shape\":[0,7],\"data_offsets\":[28,28]},"
        "\"b.half\":{\"dtype\":\"F16\",\"shape\":[3],\"data_offsets\":[28,34]},"
        "\"a\\\"quote\":{\"dtype\":\"U8\",\"shape\":[5],\"data_offsets\":[34,39]}}";
    static const size_t order[] = {3, 2, 1, 5, 0, 4};
    bl_safetensors_writer *writer;
    bl_safetensors *file;
    unsigned char data[39];
    unsigned char *bytes;
    size_t n_bytes;

    (void)state;
    for (size_t i = 0; i < sizeof data; i++) data[i] = (unsigned char)(i * 7);
    const char *path = tmp_path("out.safetensors");
    assert_int_equal(bl_safetensors_create(path, specs, BL_COUNT(specs), metadata, 2, &writer),
                     BL_OK);
    assert_memory_equal(bl_safetensors_writer_order(writer), order, sizeof order);
    assert_int_equal(bl_safetensors_writer_append(writer, data, 11), BL_OK);
    assert_int_equal(bl_safetensors_writer_append(writer, data + 11, 28), BL_OK);
    assert_false(bl_file_exists(path));
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_OK);
    assert_false(bl_file_exists(tmp_path("out.safetensors.tmp")));

    assert_int_equal(bl_file_read_all(path, 1000, (void **)&bytes, &n_bytes), BL_OK);
    size_t padded = (sizeof header - 1 + 7) / 8 * 8;
    assert_int_equal(bytes[0] + 256 * bytes[1], padded);
    assert_int_equal(n_bytes, 8 + padded + sizeof data);
    assert_memory_equal(bytes + 8, header, sizeof header - 1);
    for (size_t i = sizeof header - 1; i < padded; i++) assert_int_equal(bytes[8 + i], ' ');
    assert_memory_equal(bytes + 8 + padded, data, sizeof data);
    free(bytes);

    assert_int_equal(bl_safetensors_open(path, &file), BL_OK);
    assert_int_equal(bl_safetensors_find(file, "a\"quote")->offset_bytes, 8 + (int64_t)padded + 34);
    bl_safetensors_close(file);
}

static void test_writer_refuses_wrong_use(void **state)
{
    static const bl_stored_tensor_spec twice[] = {{"a", BL_U8, 1, {1}}, {"a", BL_U8, 1, {1}}};
    static const bl_stored_tensor_spec huge[] = {
        {"a", BL_F32, 2, {INT64_C(1) << 40, INT64_C(1) << 40}}};
    static const bl_stored_tensor_spec negative[] = {{"a", BL_F32, 2, {-1, -1}}};
    bl_safetensors_writer *writer;
    const char *path = tmp_path("wrong.safetensors");

    (void)state;
    assert_int_equal(bl_safetensors_create(path, twice, 2, NULL, 0, &writer), BL_EINTERNAL);
    assert_int_equal(bl_safetensors_create(path, huge, 1, NULL, 0, &writer), BL_EINTERNAL);
    assert_int_equal(bl_safetensors_create(path, negative, 1, NULL, 0, &writer), BL_EINTERNAL);
    assert_int_equal(bl_safetensors_create(path, specs, 1, NULL, 0, &writer), BL_OK);
    assert_int_equal(bl_safetensors_writer_append(writer, "12345", 5), BL_OK);
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_EINTERNAL);
    assert_error_has("declared");
    assert_int_equal(bl_safetensors_create(path, specs, 1, NULL, 0, &writer), BL_OK);
    bl_safetensors_writer_abort(writer);
    assert_false(bl_file_exists(path));
    assert_false(bl_file_exists(tmp_path("wrong.safetensors.tmp")));
}

static void test_reads_as_float(void **state)
{
    enum { N = 40000 }; /* more than one conversion piece */
    static const bl_stored_tensor_spec spec = {"x", BL_BF16, 1, {N}};
    static uint16_t stored[N];
    static float values[N];
    bl_safetensors_writer *writer;
    bl_safetensors *file;

    (void)state;
    for (int i = 0; i < N; i++) stored[i] = bl_f32_to_bf16((float)(i % 255) - 100);
    assert_int_equal(bl_safetensors_create(tmp_path("bf16"), &spec, 1, NULL, 0, &writer), BL_OK);
    assert_int_equal(bl_safetensors_writer_append(writer, stored, sizeof stored), BL_OK);
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_OK);
    assert_int_equal(bl_safetensors_open(tmp_path("bf16"), &file), BL_OK);
    assert_int_equal(bl_stored_tensor_read_f32(bl_safetensors_at(file, 0), values), BL_OK);
    for (int i = 0; i < N; i++) assert_true(values[i] == (float)(i % 255) - 100);
    assert_int_equal(bl_stored_tensor_read_floats(bl_safetensors_at(file, 0), 7, N - 9, values),
                     BL_OK);
    for (int i = 0; i < N - 9; i++) assert_true(values[i] == (float)((i + 7) % 255) - 100);
    assert_true(values[N - 9] == (float)((N - 9) % 255) - 100); /* not written */
    assert_int_equal(bl_stored_tensor_read_floats(bl_safetensors_at(file, 0), N - 1, 2, values),
                     BL_EINTERNAL);
    bl_safetensors_close(file);
    put_safetensors("u8", "{\"a\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}", 4);
    assert_int_equal(bl_safetensors_open(tmp_path("u8"), &file), BL_OK);
    assert_int_equal(bl_stored_tensor_read_f32(bl_safetensors_at(file, 0), values), BL_EINPUT);
    assert_error_has("tensor a: U8 cannot be read as float");
    bl_safetensors_close(file);
}

static void test_reads_rows(void **state)
{
    enum { ROWS = 5, COLS = 3 };
    const bl_stored_tensor_spec tensors[] = {{"matrix", BL_BF16, 2, {ROWS, COLS}},
                                             {"vector", BL_BF16, 1, {COLS}}};
    uint16_t values[(ROWS + 1) * COLS], rows[ROWS * COLS];
    bl_safetensors_writer *writer;
    bl_safetensors *file;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(values); i++) values[i] = (uint16_t)(i + 1);
    assert_int_equal(
        bl_safetensors_create(tmp_path("rows"), tensors, BL_COUNT(tensors), NULL, 0, &writer),
        BL_OK);
    assert_int_equal(bl_safetensors_writer_append(writer, values, sizeof values), BL_OK);
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_OK);
    assert_int_equal(bl_safetensors_open(tmp_path("rows"), &file), BL_OK);
    void *matrix = (void *)bl_safetensors_find(file, "matrix");
    for (int begin = 0; begin <= ROWS; begin++)
        for (int end = begin; end <= ROWS; end++) {
            size_t n = (size_t)((end - begin) * COLS);
            memset(rows, 0, sizeof rows);
            assert_int_equal(bl_stored_tensor_read_rows(matrix, begin, end, rows), BL_OK);
            assert_memory_equal(rows, values + begin * COLS, n * sizeof *rows);
            for (size_t i = n; i < BL_COUNT(rows); i++) assert_int_equal(rows[i], 0);
        }
    assert_int_equal(bl_stored_tensor_read_rows(matrix, 0, ROWS + 1, rows), BL_EINTERNAL);
    assert_int_equal(bl_stored_tensor_read_rows(matrix, -1, 1, rows), BL_EINTERNAL);
    assert_int_equal(bl_stored_tensor_read_rows(matrix, 2, 1, rows), BL_EINTERNAL);
    void *vector = (void *)bl_safetensors_find(file, "vector");
    assert_int_equal(bl_stored_tensor_read_rows(vector, 0, 1, rows), BL_EINTERNAL);
    bl_safetensors_close(file);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_refuses_what_is_no_safetensors_file),
        cmocka_unit_test(test_refuses_bad_headers),
        cmocka_unit_test(test_reads_legal_oddities),
        cmocka_unit_test(test_a_file_cut_while_open),
        cmocka_unit_test(test_writer_layout),
        cmocka_unit_test(test_writer_refuses_wrong_use),
        cmocka_unit_test(test_reads_as_float),
        cmocka_unit_test(test_reads_rows),
    };
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
