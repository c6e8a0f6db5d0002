/* SPDX-License-Identifier: Apache-2.0 */
/* adapter_layout: what a run writes per expert has, converted, the tensors of the stacked adapter
 * of the same run, byte for byte; models-moe/ of BALLAST_TEST_DATA. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "convert/adapter.h"
#include "golden.h"
#include "skip.h"

static char output[64];

static void train(const char *data, const char *layout, const char *dir)
{
    static const char *const keys[][2] = {{"device", "cpu"},
                                          {"max_steps", "2"},
                                          {"save_steps", "0"},
                                          {"max_seq_length", "128"},
                                          {"base_format", "stored"},
                                          {"lora_r", "4"},
                                          {"lora_target_modules", "q_proj,w1,w2,w3"}};
    golden_args args = {0};

    assert_int_equal(bl_tree_remove(dir), BL_OK);
    for (size_t i = 0; i < BL_COUNT(keys); i++)
        golden_args_add(&args, keys[i][0], "%s", keys[i][1]);
    golden_args_add(&args, "model_name_or_path", "%s/models-moe/mixtral", data);
    golden_args_add(&args, "train_file", "%s/models-moe/mixtral/train/d-list/rows.jsonl", data);
    golden_args_add(&args, "output_dir", "%s", dir);
    golden_args_add(&args, "adapter_layout", "%s", layout);
    assert_int_equal(golden_train(&args), BL_OK);
    golden_args_free(&args);
}

static void *read_adapter(const char *dir, size_t *n_bytes)
{
    char path[128];
    void *bytes;

    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
    assert_int_equal(bl_file_read_all(path, 1 << 26, &bytes, n_bytes), BL_OK);
    return bytes;
}

static void test_layouts(void **state)
{
    const char *data = getenv("BALLAST_TEST_DATA");
    char apart[80];
    size_t n, n_expected, n_apart;
    (void)state;

    TEST_SKIP_WITHOUT_DATA(data);
    snprintf(apart, sizeof apart, "%s.apart", output);
    train(data, "per_expert", output);
    void *one_by_one = read_adapter(output, &n_apart);
    assert_int_equal(bl_tree_remove(apart), BL_OK);
    if (bl_adapter_convert(output, apart, NULL, BL_PEFT_STACKED) != BL_OK)
        fail_msg("%s", bl_error_text());
    void *got = read_adapter(apart, &n);
    train(data, "peft", output);
    void *expected = read_adapter(output, &n_expected);
    assert_int_equal(n, n_expected);
    assert_memory_equal(got, expected, n);
    assert_true(n_apart != n);
    free(one_by_one), free(got), free(expected);
    assert_int_equal(bl_tree_remove(apart), BL_OK);
    assert_int_equal(bl_tree_remove(output), BL_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_layouts)};

    snprintf(output, sizeof output, "/tmp/ballast-test-adapter-layout-%d", (int)getpid());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
