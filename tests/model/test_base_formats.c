/* SPDX-License-Identifier: Apache-2.0 */
/* What is said of the formats of a base: of one format, of a mixture, of more than fits. Whole
 * models: tests/train/test_train_base_format. */
#include <setjmp.h>
#include <stdarg.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#include <cmocka.h>

#include "base/sizes.h"
#include "model/weights.h"

static void check_one(bl_dtype dtype, bl_scale_kind kind, bl_format held, const char *expected,
                      bool is_quantized)
{
    bl_base_formats f = {0};
    char text[BL_BASE_FORMATS_TEXT_BYTES];

    for (int i = 0; i < 3; i++) bl_base_formats_count(&f, kind, dtype, held);
    bl_base_formats_describe(&f, "memory", text);
    assert_string_equal(text, expected);
    assert_int_equal(bl_model_base_is_quantized(&f), is_quantized);
}

static void test_one_format(void **state)
{
    (void)state;
    check_one(BL_F32, BL_SCALE_NONE, BL_FORMAT_FP8_ROW, "f32 in the checkpoint, fp8_row in memory",
              true);
    check_one(BL_BF16, BL_SCALE_NONE, BL_FORMAT_FP8_BLOCK,
              "bf16 in the checkpoint, fp8_block in memory", true);
    check_one(BL_F16, BL_SCALE_NONE, BL_FORMAT_F16, "f16 in the checkpoint, f16 in memory", false);
    check_one(BL_F8_E4M3, BL_SCALE_TENSOR, BL_FORMAT_FP8_ROW,
              "fp8_tensor in the checkpoint, fp8_row in memory", false);
    check_one(BL_F8_E4M3, BL_SCALE_ROW, BL_FORMAT_FP8_ROW,
              "fp8_row in the checkpoint, fp8_row in memory", false);
    check_one(BL_F8_E4M3, BL_SCALE_BLOCK, BL_FORMAT_FP8_BLOCK,
              "fp8_block in the checkpoint, fp8_block in memory", false);
    check_one(BL_F8_E4M3, BL_SCALE_MX, BL_FORMAT_BF16, "mxfp8 in the checkpoint, bf16 in memory",
              false);
    check_one(BL_F8_E4M3, BL_SCALE_GRID, BL_FORMAT_FP8_ROW,
              "fp8_grid in the checkpoint, fp8_row in memory", true);
}

/* A mixture is counted by matrix; too much text is cut, not written past its end. */
static void test_mixture(void **state)
{
    struct {
        char text[BL_BASE_FORMATS_TEXT_BYTES], after;
    } out = {.after = 'x'};
    bl_base_formats f = {0};

    (void)state;
    for (int i = 0; i < 12; i++)
        bl_base_formats_count(&f, BL_SCALE_BLOCK, BL_F8_E4M3, BL_FORMAT_FP8_BLOCK);
    assert_false(bl_model_base_is_quantized(&f));
    for (int i = 0; i < 2; i++)
        bl_base_formats_count(&f, BL_SCALE_NONE, BL_BF16, BL_FORMAT_FP8_ROW);
    assert_true(bl_model_base_is_quantized(&f));
    bl_base_formats_describe(&f, "training", out.text);
    assert_string_equal(out.text,
                        "2 of 14 matrices bf16 in the checkpoint, fp8_row in training; "
                        "12 of 14 matrices fp8_block in the checkpoint, fp8_block in training");
    bl_base_formats_list_held(&f, out.text);
    assert_string_equal(out.text, "2 fp8_row, 12 fp8_block");
    bl_base_formats_list_stored(&f, out.text);
    assert_string_equal(out.text, "2 bf16, 12 fp8_block");
    for (int held = 0; held < BL_FORMAT_COUNT; held++) {
        bl_base_formats_count(&f, BL_SCALE_NONE, BL_BF16, (bl_format)held);
        bl_base_formats_count(&f, BL_SCALE_NONE, BL_F32, (bl_format)held);
        bl_base_formats_count(&f, BL_SCALE_BLOCK, BL_F8_E4M3, (bl_format)held);
    }
    bl_base_formats_describe(&f, "training", out.text);
    assert_int_equal(strlen(out.text), BL_BASE_FORMATS_TEXT_BYTES - 1);
    assert_int_equal(out.after, 'x');
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_one_format),
        cmocka_unit_test(test_mixture),
    };
    return cmocka_run_group_tests(tests, NULL, NULL);
}
