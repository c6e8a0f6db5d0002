/* SPDX-License-Identifier: Apache-2.0 */
/* Hugging Face folders: sharding and its refusals, the four kinds of FP8 checkpoint, the list of
 * expected tensors. */
#include "tmp_dir.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/hf_model.h"
#include "skip.h"

#define U8_TENSOR(name) "{\"" name "\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[0,4]}}"

static void assert_open_fails(const char *dir, const char *part)
{
    bl_hf_model *model = (bl_hf_model *)&model;
    assert_int_equal(bl_hf_open(tmp_path(dir), &model), BL_EINPUT);
    assert_null(model);
    assert_error_has(part);
}

static void test_shards(void **state)
{
    bl_hf_model *model;
    unsigned char byte;

    (void)state;
    tmp_subdir("m");
    put_safetensors("m/model-1.safetensors", U8_TENSOR("b"), 4);
    put_safetensors("m/model-2.safetensors", U8_TENSOR("a"), 4);
    put_text("m/model.safetensors.index.json",
             "{\"metadata\":{\"total_size\":1},\"weight_map\":{\"a\":"
             "\"model-2.safetensors\",\"b\":\"model-1.safetensors\"}}");
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    assert_int_equal(bl_hf_count(model), 2);
    assert_int_equal(bl_hf_file_count(model), 2);
    assert_string_equal(bl_hf_at(model, 0)->name, "a");
    assert_null(bl_hf_find(model, "c"));
    assert_int_equal(bl_stored_tensor_read(bl_hf_find(model, "a"), 3, 1, &byte), BL_OK);
    assert_int_equal(byte, 3);
    bl_hf_close(model);
}

static void test_bad_indexes_list_everything(void **state)
{
    (void)state;
    tmp_subdir("m");
    assert_open_fails("m", "has neither model.safetensors nor model.safetensors.index.json");
    put_text("m/pytorch_model.bin", "PK");
    assert_open_fails("m",
                      "pytorch_model.bin is a PyTorch file: convert the weights to safetensors");
    assert_int_equal(remove(tmp_path("m/pytorch_model.bin")), 0);
    put_text("m/model.safetensors.index.json",
             "{\"weight_map\":{\"a\":\"../up.safetensors\",\"b\":\"/etc/passwd\","
             "\"c\":\"..\",\"d\":7,\"e\":\"\",\"f\":\"x\\\\y\",\"g\":\"gone\"}}");
    assert_open_fails(
        "m", "tensor a: file name \"../up.safetensors\" is not a plain name in the model's folder");
    assert_error_has("tensor b: file name \"/etc/passwd\" is not");
    assert_error_has("tensor c: file name \"..\" is not");
    assert_error_has("tensor d: file name \"(not a string)\" is not");
    assert_error_has("tensor e: file name \"\" is not");
    assert_error_has("tensor f: file name \"x\\y\" is not");
    assert_error_has("gone: No such file");
    put_text("m/model.safetensors.index.json",
             "{\"weight_map\":{\"a\\nb\":\"../x\",\"c\":\"x\\ny\"}}");
    assert_open_fails(
        "m",
        ": a tensor name has a control character; tensor c: file name \"(control characters)\" is");
    put_text("m/model.safetensors.index.json", "{\"weight_map\":{\"a\":\"s1\\u0000x\"}}");
    assert_open_fails("m", "tensor a: file name \"(a NUL in it)\" is not a plain name");
    put_text("m/model.safetensors.index.json",
             "{\"metadata\":{\"total_size\":18446744073709551616},\"weight_map\":{}}");
    assert_open_fails("m", "key weight_map: names no tensor");
    assert_open_fails("m", "key weight_map: names no tensor");
    put_text("m/model.safetensors.index.json", "{\"weight_map\":[]}");
    assert_open_fails("m", "key weight_map: expected an object, got []");
    put_text("m/model.safetensors.index.json", "[");
    assert_open_fails("m", "model.safetensors.index.json:1:1: ");

    put_safetensors("m/s1", U8_TENSOR("a"), 4);
    put_safetensors("m/s2", U8_TENSOR("a"), 4);
    put_safetensors("m/s3", U8_TENSOR("c"), 3);
    put_safetensors("m/s4", U8_TENSOR("d"), 4);
    put_text("m/model.safetensors.index.json", "{\"weight_map\":{\"a\":\"s1\",\"b\":\"s1\",\"x\":"
                                               "\"s2\",\"c\":\"s3\",\"d\":\"s2\",\"y\":\"s4\"}}");
    assert_open_fails("m", "tensor a is in s1 and in s2");
    assert_error_has("tensor b is not in s1");
    assert_error_has("tensor x is not in s2");
    assert_error_has("s3: the tensors take 4 bytes");
    assert_error_has("tensor d is in s4, the index says s2");
    assert_error_has("tensor y is not in s4");

    tmp_subdir("m");
    put_text("m/model.safetensors", "version https://git-lfs.github.com/spec/v1\n");
    assert_open_fails("m", "model.safetensors: is a Git LFS pointer");
}

static void test_long_lists_are_cut(void **state)
{
    static char index[8000] = "{\"weight_map\":{";
    (void)state;
    tmp_subdir("m");
    for (int i = 0; i < 100; i++)
        sprintf(index + strlen(index), "%s\"tensor.%d\":\"s\"", i ? "," : "", i);
    strcat(index, "}}");
    put_text("m/model.safetensors.index.json", index);
    put_safetensors("m/s", "{}", 0);
    assert_open_fails("m", "tensor tensor.0 is not in s; ");
    assert_error_has(" more)");
    /* 100 in all: those in the text and the count of the rest. */
    const char *text = bl_error_text();
    int n_shown = 0;
    for (const char *at = text; (at = strstr(at, "is not in s")); at++) n_shown++;
    int n_hidden = atoi(strstr(text, "(and ") + 5);
    assert_int_equal(n_shown + n_hidden, 100);
    assert_true(n_shown > 10);
}

/* ---- FP8 ---- */

/* A model of one weight "w.weight" F8_E4M3 [rows, cols] and its scale tensor. */
static void put_fp8_model(int64_t rows, int64_t cols, const char *scale_name, bl_dtype scale_dtype,
                          int n_dims, const int64_t *shape, const float *scales)
{
    bl_stored_tensor_spec specs[2] = {{"w.weight", BL_F8_E4M3, 2, {rows, cols}},
                                      {scale_name, scale_dtype, n_dims, {0}}};
    bl_safetensors_writer *writer;
    size_t n_scales = 1;

    for (int i = 0; i < n_dims; i++) n_scales *= (size_t)(specs[1].shape[i] = shape[i]);
    assert_int_equal(
        bl_safetensors_create(tmp_path("m/model.safetensors"), specs, 2, NULL, 0, &writer), BL_OK);
    for (size_t i = 0; i < n_scales; i++) { /* the wider scale comes first */
        uint16_t half =
            scale_dtype == BL_BF16 ? bl_f32_to_bf16(scales[i]) : bl_f32_to_f16(scales[i]);
        const void *bytes = scale_dtype == BL_F32 ? (const void *)&scales[i] : &half;
        assert_int_equal(bl_safetensors_writer_append(writer, bytes, bl_dtype_bytes(scale_dtype)),
                         BL_OK);
    }
    char *codes = calloc((size_t)(rows * cols), 1);
    assert_int_equal(bl_safetensors_writer_append(writer, codes, (size_t)(rows * cols)), BL_OK);
    free(codes);
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_OK);
}

static const float scales_given[] = {0.5f, 1.25f, 3, 4, 5, 6, 7, 8};

static const char config_fbgemm[] =
    "{\"quantization_config\":{\"quant_method\":\"fbgemm_fp8\",\"activation_scale_ub\":1200.0}}";
static const char config_deepseek[] =
    "{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[128,128]}}";
static const char config_autofp8[] =
    "{\"quantization_config\":{\"quant_method\":\"fp8\",\"activation_scheme\":\"static\"}}";
/* Devstral 2, Ministral 3 */
static const char config_static[] =
    "{\"quantization_config\":{\"quant_method\":\"fp8\",\"activation_scheme\":\"static\","
    "\"weight_block_size\":null,\"dequantize\":false,\"modules_to_not_convert\":[\"lm_head\"]}}";
static const char config_modelopt[] =
    "{\"quantization_config\":{\"quant_method\":\"modelopt\",\"quant_algo\":\"FP8\"}}";
static const char config_quark[] =
    "{\"quantization_config\":{\"quant_method\":\"quark\",\"global_quant_config\":"
    "{\"weight\":{\"dtype\":\"fp8_e4m3\",\"qscheme\":\"per_tensor\"}}}}";
#define COMPRESSED(format, weights)                                                                \
    "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"format\":\"" format       \
    "\",\"config_groups\":{\"group_0\":{\"targets\":[\"Linear\"],\"weights\":{" weights "}}}}}"

#define FP8_BLOCKS(size)                                                                           \
    "{\"quantization_config\":{\"quant_method\":\"fp8\",\"weight_block_size\":[" size "]}}"

static void test_fp8_kinds(void **state)
{
    static const struct {
        const char *config; /* NULL: none */
        const char *scale_name;
        bl_dtype dtype;
        int64_t rows, cols;
        int n_dims;
        int64_t shape[4];
        bl_scale_kind kind;
        int64_t scale_rows, scale_cols;
    } cases[] = {
        {config_fbgemm, "w.weight_scale", BL_F32, 5, 7, 2, {5, 1}, BL_SCALE_ROW, 5, 1},
        {config_deepseek, "w.weight_scale_inv", BL_F32, 129, 200, 2, {2, 2}, BL_SCALE_BLOCK, 2, 2},
        {config_deepseek, "w.weight_scale_inv", BL_F32, 8, 8, 2, {1, 1}, BL_SCALE_BLOCK, 1, 1},
        {config_autofp8, "w.weight_scale", BL_F32, 5, 7, 0, {0}, BL_SCALE_TENSOR, 1, 1},
        {config_autofp8, "w.weight_scale", BL_F32, 5, 7, 1, {1}, BL_SCALE_TENSOR, 1, 1},
        {COMPRESSED("naive-quantized", "\"type\":\"float\",\"num_bits\":8,\"strategy\":\"tensor\""),
         "w.weight_scale",
         BL_BF16,
         5,
         7,
         1,
         {1},
         BL_SCALE_TENSOR,
         1,
         1},
        {COMPRESSED("float-quantized",
                    "\"type\":\"float\",\"num_bits\":8,\"strategy\":\"channel\""),
         "w.weight_scale",
         BL_BF16,
         5,
         7,
         2,
         {5, 1},
         BL_SCALE_ROW,
         5,
         1},
        {COMPRESSED("float-quantized", "\"strategy\":\"block\",\"block_structure\":[128,128]"),
         "w.weight_scale",
         BL_F16,
         257,
         128,
         2,
         {3, 1},
         BL_SCALE_BLOCK,
         3,
         1},
        {NULL, "w.weight_scale", BL_F32, 5, 7, 2, {5, 1}, BL_SCALE_ROW, 5, 1},
        {NULL, "w.weight_scale", BL_F32, 300, 7, 2, {3, 1}, BL_SCALE_BLOCK, 3, 1},
        {"{}", "w.weight_scale", BL_F32, 5, 7, 2, {1, 1}, BL_SCALE_TENSOR, 1, 1},
        {config_static, "w.weight_scale_inv", BL_F32, 5, 7, 0, {0}, BL_SCALE_TENSOR, 1, 1},
        {config_modelopt, "w.weight_scale", BL_F32, 5, 7, 1, {5}, BL_SCALE_ROW, 5, 1},
        {config_modelopt,
         "w.weight_scale",
         BL_F32,
         129,
         200,
         4,
         {2, 1, 2, 1},
         BL_SCALE_BLOCK,
         2,
         2},
        {config_quark, "w.weight_scale", BL_F32, 5, 7, 0, {0}, BL_SCALE_TENSOR, 1, 1},
        /* one checkpoint may mix kinds */
        {config_deepseek, "w.weight_scale", BL_F32, 5, 7, 2, {5, 1}, BL_SCALE_ROW, 5, 1},
        {config_deepseek, "w.weight_scale", BL_F32, 200, 300, 0, {0}, BL_SCALE_TENSOR, 1, 1},
        {config_static, "w.weight_scale_inv", BL_F32, 129, 200, 2, {2, 2}, BL_SCALE_BLOCK, 2, 2},
        /* blocks of other sizes */
        {NULL, "w.weight_scale", BL_F32, 130, 64, 2, {3, 2}, BL_SCALE_GRID, 3, 2},
        {FP8_BLOCKS("48, 40"),
         "w.weight_scale_inv",
         BL_F32,
         90,
         120,
         2,
         {2, 3},
         BL_SCALE_GRID,
         2,
         3},
        {FP8_BLOCKS("256, 256"),
         "w.weight_scale_inv",
         BL_F32,
         300,
         600,
         2,
         {2, 3},
         BL_SCALE_BLOCK,
         2,
         3},
        {NULL, "w.weight_scale", BL_F32, 7, 600, 2, {1, 5}, BL_SCALE_BLOCK, 1, 5},
        {NULL, "w.weight_scale", BL_F32, 6, 7, 2, {3, 1}, BL_SCALE_ROW, 3, 1},
        {COMPRESSED("mixed-precision", "\"strategy\":\"group\",\"group_size\":16"),
         "w.weight_scale",
         BL_BF16,
         3,
         32,
         2,
         {3, 2},
         BL_SCALE_GRID,
         3,
         2},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_hf_model *model;
        bl_hf_weight weight;
        float scales[8];
        tmp_subdir("m");
        if (cases[i].config) put_text("m/config.json", cases[i].config);
        put_fp8_model(cases[i].rows, cases[i].cols, cases[i].scale_name, cases[i].dtype,
                      cases[i].n_dims, cases[i].shape, scales_given);
        assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
        if (bl_hf_get_weight(model, "w.weight", &weight) != BL_OK)
            fail_msg("case %zu: %s", i, bl_error_text());
        assert_int_equal(weight.scale_kind, cases[i].kind);
        assert_int_equal(weight.rows, cases[i].rows);
        assert_int_equal(weight.cols, cases[i].cols);
        assert_int_equal(weight.scale_rows, cases[i].scale_rows);
        assert_int_equal(weight.scale_cols, cases[i].scale_cols);
        assert_int_equal(bl_hf_read_scales(&weight, scales), BL_OK);
        assert_memory_equal(scales, scales_given,
                            (size_t)(weight.scale_rows * weight.scale_cols) * sizeof *scales);
        bl_hf_close(model);
    }
}

static void assert_weight_fails(const char *part)
{
    bl_hf_model *model;
    bl_hf_weight weight;
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    assert_int_equal(bl_hf_get_weight(model, "w.weight", &weight), BL_EINPUT);
    assert_error_has(part);
    bl_hf_close(model);
}

static void test_fp8_refusals(void **state)
{
    static const int64_t row[] = {5, 1}, wrong[] = {7, 1}, flat[] = {3}, some[] = {4, 1},
                         grid[] = {2, 4};
    static const float bad[][5] = {
        {1, 2, INFINITY, 4, 5}, {NAN, 1, 1, 1, 1}, {1, 0, 1, 1, 1}, {1, 1, 1, 1, -2}};
    static const char *const bad_texts[] = {
        "tensor w.weight_scale: element 2 is not finite",
        "tensor w.weight_scale: element 0 is not finite",
        "tensor w.weight_scale: element 1 is 0; scales are positive",
        "tensor w.weight_scale: element 4 is -2; scales are positive"};
    bl_hf_model *model;
    bl_hf_weight weight;
    float scales[5];

    (void)state;
    tmp_subdir("m");
    put_fp8_model(5, 7, "other.weight_scale", BL_F32, 2, row, scales_given);
    assert_weight_fails("tensor w.weight is F8_E4M3 and has no scale");
    put_fp8_model(5, 7, "w.weight_scale", BL_F32, 2, wrong, scales_given);
    assert_weight_fails(
        "tensor w.weight_scale has shape [7, 1], which is no scale for a weight of shape [5, 7]");
    put_fp8_model(5, 7, "w.weight_scale", BL_F32, 1, flat, scales_given);
    assert_weight_fails("tensor w.weight_scale has shape [3], which is no scale");
    put_fp8_model(5, 7, "w.weight_scale", BL_F32, 2, some, scales_given);
    assert_weight_fails("tensor w.weight_scale has shape [4, 1], which is no scale");
    put_safetensors("m/model.safetensors",
                    "{\"w.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[1,1],\"data_offsets\":[0,1]},"
                    "\"w.weight_scale\":{\"dtype\":\"I8\",\"shape\":[1],\"data_offsets\":[1,2]}}",
                    2);
    assert_weight_fails(
        "tensor w.weight_scale has dtype I8, expected F32, BF16, F16, F8_E8M0 or U8");
    put_safetensors(
        "m/model.safetensors",
        "{\"w.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[1,1],\"data_offsets\":[0,1]},"
        "\"w.weight_scale\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[1,5]},"
        "\"w.weight_scale_inv\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[5,9]}}",
        9);
    assert_weight_fails("tensor w.weight has both weight_scale and weight_scale_inv");
    put_safetensors("m/model.safetensors",
                    "{\"w.weight\":{\"dtype\":\"F8_E5M2\",\"shape\":[1,1],\"data_offsets\":[0,1]}}",
                    1);
    assert_weight_fails("tensor w.weight has dtype F8_E5M2, expected F32, F16, BF16 or F8_E4M3");
    put_safetensors("m/model.safetensors",
                    "{\"w.weight\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    assert_weight_fails("tensor w.weight has shape [1], expected a matrix");
    put_text("m/config.json", config_deepseek);
    put_fp8_model(256, 512, "w.weight_scale", BL_F32, 2, grid, scales_given);
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    assert_int_equal(bl_hf_get_weight(model, "w.weight", &weight), BL_OK);
    bl_hf_close(model);
    put_fp8_model(512, 256, "w.weight_scale", BL_F32, 2, grid, scales_given);
    assert_weight_fails("tensor w.weight_scale has shape [2, 4], but blocks of 128 x 128, as "
                        "config.json's quantization_config says, need [4, 2] for a weight of "
                        "shape [512, 256]");
    put_text("m/config.json", config_fbgemm);
    for (size_t i = 0; i < BL_COUNT(bad); i++) {
        put_fp8_model(5, 7, "w.weight_scale", BL_F32, 2, row, bad[i]);
        assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
        assert_int_equal(bl_hf_get_weight(model, "w.weight", &weight), BL_OK);
        assert_int_equal(bl_hf_read_scales(&weight, scales), BL_EINPUT);
        assert_error_has(bad_texts[i]);
        if (i + 1 < BL_COUNT(bad)) bl_hf_close(model);
    }
    assert_int_equal(bl_hf_get_weight(model, "v.weight", &weight), BL_EINPUT);
    assert_error_has("missing v.weight");
    bl_hf_close(model);
}

static void test_quantization_refusals(void **state)
{
    static const struct {
        const char *config, *part;
    } cases[] = {
        {"{\"quantization_config\":{\"quant_method\":\"gptq\"}}",
         "config.json: key quant_method: weights in \"gptq\" are not supported, only FP8 (E4M3), "
         "INT4 (pack-quantized), MXFP4, NVFP4 and NF4; use the unquantized checkpoint, or one in "
         "these"},
        {"{\"quantization_config\":{\"quant_method\":\"awq\"}}", "weights in \"awq\""},
        {"{\"quantization_config\":{\"quant_method\":\"bitsandbytes\",\"load_in_8bit\":true}}",
         "weights in \"bitsandbytes int8\""},
        {"{\"quantization_config\":{\"quant_method\":\"bitsandbytes\",\"load_in_4bit\":true}}",
         "key bnb_4bit_quant_type: weights in \"fp4\""},
        {"{\"quantization_config\":{\"quant_method\":\"mxfp4\",\"later\":1}}",
         "key later: unknown"},
        {COMPRESSED("int-quantized", "\"num_bits\":8"), "weights in \"int-quantized\""},
        {COMPRESSED("marlin-24", "\"num_bits\":4"), "weights in \"marlin-24\""},
        {"{\"quantization_config\":{\"quant_method\":\"modelopt\",\"quant_algo\":\"W4A16_AWQ\"}}",
         "weights in \"W4A16_AWQ\""},
        {"{\"quantization_config\":{\"quant_method\":\"quark\",\"global_quant_config\":{\"weight\":"
         "{\"dtype\":\"int4\"}}}}",
         "weights in \"int4\""},
        {"{\"quantization_config\":{}}", "key quant_method: missing"},
        {"{\"quantization_config\":3}", "key quantization_config: expected an object, got 3"},
        {FP8_BLOCKS("0, 128"),
         "key weight_block_size: expected two positive integers, as [128, 128], got [0,128]"},
        {FP8_BLOCKS("128"), "key weight_block_size: expected two positive integers"},
        {COMPRESSED("pack-quantized", "\"num_bits\":8,\"type\":\"int\""),
         "key num_bits: expected an integer in [4, 4], got 8"},
        {COMPRESSED("float-quantized", "\"num_bits\":6"), "key num_bits: expected 4 or 8, got 6"},
        {COMPRESSED("float-quantized", "\"type\":\"uint\""),
         "key type: expected \"float\" or \"int\", got \"uint\""},
        {COMPRESSED("float-quantized", "\"strategy\":\"token\""), "key strategy: expected"},
        {COMPRESSED("float-quantized", "\"strategy\":\"group\""), "key group_size: missing"},
        {COMPRESSED("float-quantized", "\"strategy\":\"channel\",\"group_size\":64"),
         "key group_size: expected null without strategy"},
        {COMPRESSED("float-quantized", "\"strategy\":\"channel\",\"block_structure\":[2,4]"),
         "key block_structure: expected null without strategy"},
        {COMPRESSED("float-quantized", "\"strategy\":\"block\",\"block_structure\":[-1,128]"),
         "key block_structure"},
        {COMPRESSED("float-quantized", "\"strategy\":\"block\""),
         "key block_structure: expected two positive integers, as [128, 128], got nothing"},
        {"[]", "expected a JSON object, got []"},
        {"{", "config.json:1:1: "},
    };
    (void)state;
    tmp_subdir("m");
    put_safetensors("m/model.safetensors", "{}", 0);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        put_text("m/config.json", cases[i].config);
        assert_open_fails("m", cases[i].part);
    }
}

/* ---- the expected list ---- */

static void test_check_lists_everything(void **state)
{
    static const uint32_t any_float = BL_DTYPE_BIT(BL_F32) | BL_DTYPE_BIT(BL_BF16);
    static const bl_hf_expected expected[] = {
        {"good", 1, {1}, any_float, false},
        {"shape", 2, {1, 1}, any_float, false},
        {"dtype", 1, {4}, any_float, false},
        {"absent", 1, {4}, any_float, false},
        {"maybe", 1, {4}, any_float, true},
        {"fp8.weight", 2, {1, 1}, any_float | BL_DTYPE_BIT(BL_F8_E4M3), false},
    };
    bl_hf_model *model;

    (void)state;
    tmp_subdir("m");
    put_safetensors(
        "m/model.safetensors",
        "{\"good\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
        "\"shape\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]},"
        "\"dtype\":{\"dtype\":\"U8\",\"shape\":[4],\"data_offsets\":[8,12]},"
        "\"fp8.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[1,1],\"data_offsets\":[12,13]},"
        "\"model.layers.0.self_attn.rotary_emb.inv_freq\":{\"dtype\":\"U8\",\"shape\":[1],\"data_"
        "offsets\":[13,14]},"
        "\"x.input_scale\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[14,15]},"
        "\"x.k_scale\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[15,15]},"
        "\"x.v_scale\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[15,15]},"
        "\"fp8.weight_zero_point\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[15,15]},"
        "\"x.weight_zero_point\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[15,15]},"
        "\"extra\":{\"dtype\":\"U8\",\"shape\":[0],\"data_offsets\":[15,15]}}",
        15);
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    assert_int_equal(bl_hf_check(model, expected, BL_COUNT(expected), NULL), BL_EINPUT);
    const char *list = strstr(bl_error_text(), ": ");
    assert_non_null(list);
    assert_string_equal(list,
                        ": shape has shape [1], expected [1, 1]; dtype has dtype U8, which is not "
                        "read here; missing "
                        "absent; tensor fp8.weight is F8_E4M3 and has no scale; unexpected extra; "
                        "unexpected x.weight_zero_point");
    bl_hf_close(model);
    put_safetensors("m/model.safetensors",
                    "{\"good\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]}}", 4);
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    assert_int_equal(bl_hf_check(model, expected, 1, NULL), BL_OK);
    bl_hf_close(model);
}

/* Of a model that is part of a larger one. */
static void test_skipped_tensors(void **state)
{
    static const bl_hf_expected expected = {"a.weight", 1, {1}, BL_DTYPE_BIT(BL_F32), false};
    static const char *const skipped[] = {"vision.", "audio.", NULL};
    bl_hf_model *model;
    int64_t n_bytes;

    (void)state;
    tmp_subdir("m");
    put_safetensors("m/model.safetensors",
                    "{\"a.weight\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,4]},"
                    "\"audio.w\":{\"dtype\":\"U8\",\"shape\":[3],\"data_offsets\":[4,7]},"
                    "\"vision.w\":{\"dtype\":\"F32\",\"shape\":[2],\"data_offsets\":[7,15]},"
                    "\"visions\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[15,16]}}",
                    16);
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    assert_int_equal(bl_hf_check(model, &expected, 1, skipped), BL_EINPUT);
    assert_string_equal(strstr(bl_error_text(), ": "), ": unexpected visions");
    assert_int_equal(bl_hf_count_skipped(model, skipped, &n_bytes), 2);
    assert_int_equal(n_bytes, 11);
    assert_int_equal(bl_hf_count_skipped(model, NULL, &n_bytes), 0);
    bl_hf_close(model);
}

/* A short problem after one that did not fit is counted, not shown: the list reads as a prefix of
 * the whole. */
static void test_a_cut_list_is_a_prefix(void **state)
{
    static char long_names[3][301];
    bl_hf_expected expected[4];
    bl_hf_model *model;

    (void)state;
    for (int i = 0; i < 3; i++) {
        memset(long_names[i], 'a' + i, 300);
        expected[i] = (bl_hf_expected){long_names[i], 1, {1}, BL_DTYPE_BIT(BL_F32), false};
    }
    expected[3] = (bl_hf_expected){"short", 1, {1}, BL_DTYPE_BIT(BL_F32), false};
    tmp_subdir("m");
    put_safetensors("m/model.safetensors", "{}", 0);
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    assert_int_equal(bl_hf_check(model, expected, 4, NULL), BL_EINPUT);
    assert_error_has("; missing bbbb");
    assert_error_has("bbb (and 2 more)");
    assert_null(strstr(bl_error_text(), "short"));
    bl_hf_close(model);
}

/* The sharded and the whole copy of one real model hold the same bytes. */
static void test_real_models(void **state)
{
    const char *data = getenv("BALLAST_TEST_DATA");
    bl_hf_model *whole, *sharded;
    char path[512];

    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    snprintf(path, sizeof path, "%s/models/stories260K-bf16", data);
    assert_int_equal(bl_hf_open(path, &whole), BL_OK);
    snprintf(path, sizeof path, "%s/models/stories260K-bf16-sharded", data);
    assert_int_equal(bl_hf_open(path, &sharded), BL_OK);
    assert_int_equal(bl_hf_file_count(sharded), 2);
    assert_int_equal(bl_hf_count(whole), 47);
    assert_int_equal(bl_hf_count(sharded), 47);
    for (size_t i = 0; i < bl_hf_count(whole); i++) {
        const bl_stored_tensor *a = bl_hf_at(whole, i), *b = bl_hf_find(sharded, a->name);
        assert_non_null(b);
        assert_int_equal(a->n_bytes, b->n_bytes);
        void *x = malloc((size_t)a->n_bytes), *y = malloc((size_t)a->n_bytes);
        assert_int_equal(bl_stored_tensor_read(a, 0, (size_t)a->n_bytes, x), BL_OK);
        assert_int_equal(bl_stored_tensor_read(b, 0, (size_t)a->n_bytes, y), BL_OK);
        assert_memory_equal(x, y, (size_t)a->n_bytes);
        free(x);
        free(y);
    }
    bl_hf_close(whole);
    bl_hf_close(sharded);
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_shards),
        cmocka_unit_test(test_bad_indexes_list_everything),
        cmocka_unit_test(test_long_lists_are_cut),
        cmocka_unit_test(test_fp8_kinds),
        cmocka_unit_test(test_fp8_refusals),
        cmocka_unit_test(test_quantization_refusals),
        cmocka_unit_test(test_check_lists_everything),
        cmocka_unit_test(test_skipped_tensors),
        cmocka_unit_test(test_a_cut_list_is_a_prefix),
        cmocka_unit_test(test_real_models),
    };
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
