/* SPDX-License-Identifier: Apache-2.0 */
/* Layouts of routed experts: each of PEFT's files, converted, has the tensors of the others, byte
 * for byte; models-moe/ of BALLAST_TEST_DATA. */
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
#include "skip.h"
#include "store/safetensors.h"

enum { PATH_BYTES = 512 };

static const char *data;
static char output[64];

static bl_safetensors *open_adapter(const char *dir)
{
    char path[PATH_BYTES + 64];
    bl_safetensors *file;

    snprintf(path, sizeof path, "%s/adapter_model.safetensors", dir);
    if (bl_safetensors_open(path, &file) != BL_OK) fail_msg("%s", bl_error_text());
    return file;
}

static void check_same(const char *dir, const char *expected)
{
    bl_safetensors *a = open_adapter(dir), *b = open_adapter(expected);

    assert_int_equal(bl_safetensors_count(a), bl_safetensors_count(b));
    for (size_t i = 0; i < bl_safetensors_count(b); i++) {
        const bl_stored_tensor *want = bl_safetensors_at(b, i),
                               *got = bl_safetensors_find(a, want->name);
        if (!got) fail_msg("%s lacks %s", dir, want->name);
        assert_int_equal(got->n_bytes, want->n_bytes);
        assert_memory_equal(got->shape, want->shape, sizeof want->shape[0] * 2);
        char *bytes = malloc((size_t)(2 * want->n_bytes));
        assert_non_null(bytes);
        assert_int_equal(bl_stored_tensor_read(want, 0, (size_t)want->n_bytes, bytes), BL_OK);
        assert_int_equal(bl_stored_tensor_read(got, 0, (size_t)got->n_bytes, bytes + want->n_bytes),
                         BL_OK);
        if (memcmp(bytes, bytes + want->n_bytes, (size_t)want->n_bytes) != 0)
            fail_msg("%s: other values of %s", dir, want->name);
        free(bytes);
    }
    bl_safetensors_close(a);
    bl_safetensors_close(b);
}

static void convert(const char *model, const char *source, bl_peft_layout layout,
                    const char *expected)
{
    assert_int_equal(bl_tree_remove(output), BL_OK);
    if (bl_adapter_convert(source, output, model, layout) != BL_OK) fail_msg("%s", bl_error_text());
    check_same(output, expected);
}

static void test_layouts(void **state)
{
    static const char *const models[] = {"qwen3_moe", "mixtral"};
    static const char *const inits[] = {"adapter_init", "adapter_init_peft018",
                                        "adapter_init_perexpert"};
    char model[PATH_BYTES], init[BL_COUNT(inits)][PATH_BYTES], list[PATH_BYTES], apart[80];
    (void)state;

    TEST_SKIP_WITHOUT_DATA(data);
    snprintf(apart, sizeof apart, "%s.apart", output);
    for (size_t m = 0; m < BL_COUNT(models); m++) {
        snprintf(model, sizeof model, "%s/models-moe/%s", data, models[m]);
        for (size_t i = 0; i < BL_COUNT(inits); i++)
            snprintf(init[i], sizeof init[i], "%.300s/train/b-experts/%s", model, inits[i]);
        for (size_t i = 0; i < BL_COUNT(inits); i++) {
            convert(model, init[i], BL_PEFT_STACKED, init[0]);
            convert(model, init[i], BL_PEFT_PER_EXPERT, init[2]);
        }
        /* Gate and up with r 8: there and back. */
        snprintf(list, sizeof list, "%.300s/train/d-list/adapter_final", model);
        assert_int_equal(bl_tree_remove(apart), BL_OK);
        assert_int_equal(bl_adapter_convert(list, apart, model, BL_PEFT_PER_EXPERT), BL_OK);
        convert(model, apart, BL_PEFT_STACKED, list);
        assert_int_equal(bl_adapter_convert(list, apart, model, BL_PEFT_STACKED), BL_EUSAGE);
        assert_non_null(strstr(bl_error_text(), "has an adapter"));
    }
    assert_int_equal(bl_adapter_convert(init[0], apart, NULL, BL_PEFT_STACKED), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "--model"));
    assert_int_equal(bl_tree_remove(apart), BL_OK);
    assert_int_equal(bl_tree_remove(output), BL_OK);
}

int main(void)
{
    const struct CMUnitTest tests[] = {cmocka_unit_test(test_layouts)};

    data = getenv("BALLAST_TEST_DATA");
    snprintf(output, sizeof output, "/tmp/ballast-test-layouts-%d", (int)getpid());
    return cmocka_run_group_tests(tests, NULL, NULL);
}
