/* SPDX-License-Identifier: Apache-2.0 */
/* `ballast inspect` of what only the library can write: FP8 models and checkpoints. argv[1] is the
 * program. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/json.h"
#include "store/checkpoint.h"
#include "store/safetensors.h"

enum { MAX_BYTES = 1 << 20 };

static const char *program;

/* Writes `specs` with every byte zero. */
static void write_tensors(const char *path, const bl_stored_tensor_spec *specs, size_t n_specs,
                          size_t n_bytes)
{
    static const unsigned char zeros[64];
    bl_safetensors_writer *writer;
    assert_true(n_bytes <= sizeof zeros);
    assert_int_equal(bl_safetensors_create(path, specs, n_specs, NULL, 0, &writer), BL_OK);
    assert_int_equal(bl_safetensors_writer_append(writer, zeros, n_bytes), BL_OK);
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_OK);
}

static int inspect(const char *arguments)
{
    char *command;
    assert_int_equal(bl_text_format(&command, "'%s' inspect %s >out 2>err", program, arguments),
                     BL_OK);
    int status = system(command);
    free(command);
    return WEXITSTATUS(status);
}

static json_int_t number(const json_t *report, const char *outer, const char *key)
{
    const json_t *object = outer ? json_object_get(report, outer) : report;
    return json_integer_value(json_object_get(object, key));
}

static void test_fp8_model(void **state)
{
    const bl_stored_tensor_spec specs[] = {
        {.name = "a.weight", .dtype = BL_F8_E4M3, .n_dims = 2, .shape = {2, 4}},
        {.name = "a.weight_scale", .dtype = BL_F32, .n_dims = 2, .shape = {2, 1}},
        {.name = "b.weight", .dtype = BL_F8_E4M3, .n_dims = 2, .shape = {2, 4}},
        {.name = "b.weight_scale", .dtype = BL_F32, .n_dims = 1, .shape = {1}},
        {.name = "norm.weight", .dtype = BL_BF16, .n_dims = 1, .shape = {4}},
    };
    json_t *report;
    (void)state;
    assert_int_equal(bl_dir_create("model"), BL_OK);
    assert_int_equal(bl_file_write_atomic("model/config.json", "{}", 2), BL_OK);
    write_tensors("model/model.safetensors", specs, 5, 8 + 8 + 8 + 4 + 8);

    assert_int_equal(inspect("model --json"), 3); /* a report of a model that is not a Llama */
    assert_int_equal(bl_json_load("out", MAX_BYTES, &report), BL_OK);
    assert_string_equal(json_string_value(json_object_get(report, "kind")), "model");
    assert_int_equal(number(report, "fp8", "row"), 1);
    assert_int_equal(number(report, "fp8", "tensor"), 1);
    assert_int_equal(number(report, NULL, "n_tensors"), 5);
    assert_int_equal(number(report, NULL, "n_elements"), 8 + 2 + 8 + 1 + 4);
    assert_int_equal(number(report, NULL, "n_bytes"), 8 + 8 + 8 + 4 + 8);
    assert_int_equal(number(json_object_get(report, "dtypes"), "BF16", "n_bytes"), 8);
    json_decref(report);

    /* FP8 codes without a scale cannot be read. */
    write_tensors("model/model.safetensors", specs, 1, 8);
    assert_int_equal(inspect("model"), 3);
}

static void test_checkpoint(void **state)
{
    const bl_stored_tensor_spec specs[] = {
        {.name = "w", .dtype = BL_F32, .n_dims = 1, .shape = {4}}};
    bl_checkpoint *checkpoint;
    char *path;
    json_t *report, *run_state = json_pack("{s:i}", "ranks", 2);
    (void)state;
    assert_int_equal(bl_checkpoint_begin("checkpoints", 7, 16, &checkpoint), BL_OK);
    for (int rank = 0; rank < 2; rank++) {
        char name[32];
        snprintf(name, sizeof name, "rank-%d.safetensors", rank);
        assert_int_equal(bl_path_join(bl_checkpoint_path(checkpoint), name, &path), BL_OK);
        write_tensors(path, specs, 1, 16);
        free(path);
        assert_int_equal(bl_checkpoint_add_file(checkpoint, name), BL_OK);
    }
    assert_int_equal(bl_checkpoint_commit(checkpoint, run_state), BL_OK);
    json_decref(run_state);

    assert_int_equal(inspect("checkpoints/step-7 --json"), 0);
    assert_int_equal(bl_json_load("out", MAX_BYTES, &report), BL_OK);
    assert_string_equal(json_string_value(json_object_get(report, "kind")), "checkpoint");
    assert_int_equal(number(report, NULL, "step"), 7);
    assert_int_equal(number(report, "state", "ranks"), 2);
    assert_int_equal(number(report, NULL, "n_tensors"), 2);
    assert_int_equal(number(report, NULL, "n_files"), 3);
    json_decref(report);

    /* One bit of one file. */
    FILE *file = fopen("checkpoints/step-7/rank-1.safetensors", "r+b");
    assert_non_null(file);
    assert_int_equal(fseek(file, -1, SEEK_END), 0);
    fputc(1, file);
    assert_int_equal(fclose(file), 0);
    assert_int_equal(inspect("checkpoints/step-7"), 5);
    void *text;
    size_t n_bytes;
    assert_int_equal(bl_file_read_all("err", MAX_BYTES, &text, &n_bytes), BL_OK);
    assert_non_null(strstr(text, "rank-1.safetensors"));
    free(text);
}

static int enter_temporary_folder(void **state)
{
    static char folder[] = "/tmp/ballast-test-inspect-XXXXXX";
    *state = folder;
    return mkdtemp(folder) ? chdir(folder) : -1;
}

static int remove_temporary_folder(void **state)
{
    return chdir("/") || bl_tree_remove(*state) != BL_OK;
}

int main(int argc, char **argv)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_fp8_model),
        cmocka_unit_test(test_checkpoint),
    };
    if (argc != 2) return 1;
    program = argv[1];
    return cmocka_run_group_tests(tests, enter_temporary_folder, remove_temporary_folder);
}
