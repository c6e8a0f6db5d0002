/* SPDX-License-Identifier: Apache-2.0 */
/* quantization_config: every key is used, without effect or named; blocks of several groups; zero
 * points. */
#include "tmp_dir.h"

#include <math.h>
#include <stdarg.h>
#include <stdio.h>
#include <string.h>

#include "base/sizes.h"
#include "store/hf_model.h"

#define GROUP(name, weights) "\"" name "\":{\"targets\":[\"Linear\"],\"weights\":{" weights "}}"
#define COMPRESSED(groups, rest)                                                                   \
    "{\"quantization_config\":{\"quant_method\":\"compressed-tensors\",\"config_groups\":{" groups \
    "}" rest "}}"
#define ONE(weights, rest) COMPRESSED(GROUP("group_0", weights), rest)
#define BLOCK(size)        "\"type\":\"float\",\"strategy\":\"block\",\"block_structure\":" size
#define TWO(a, b)          COMPRESSED(GROUP("group_0", BLOCK(a)) "," GROUP("group_1", BLOCK(b)), "")
#define FP8(rest)          "{\"quantization_config\":{\"quant_method\":\"fp8\"" rest "}}"
#define MODELOPT(rest)                                                                             \
    "{\"quantization_config\":{\"quant_method\":\"modelopt\",\"quant_algo\":\"FP8\"" rest "}}"
#define QUARK(weight, rest)                                                                        \
    "{\"quantization_config\":{\"quant_method\":\"quark\",\"global_quant_config\":{\"weight\":{"   \
    "\"dtype\":\"fp8_e4m3\"" weight "}}" rest "}}"

static char warnings[1024];

void __wrap_bl_log_warning(const char *format, ...);
void __wrap_bl_log_warning(const char *format, ...)
{
    size_t used = strlen(warnings);
    va_list args;
    va_start(args, format);
    vsnprintf(warnings + used, sizeof warnings - used, format, args);
    va_end(args);
}

/* m/: w.weight [rows, cols] in E4M3, its scales of `shape`, and a zero point of n_zero bytes: put's
 * bytes are 0, 1, 2, ... from the first on. */
static bl_hf_model *open_model(const char *config, int64_t rows, int64_t cols, const char *shape,
                               int64_t n_scales, int n_zero)
{
    char header[512];
    int64_t scales = n_zero + 4 * n_scales, all = scales + rows * cols;
    bl_hf_model *model;

    tmp_subdir("m");
    put_text("m/config.json", config);
    snprintf(header, sizeof header,
             "{\"w.weight_zero_point\":{\"dtype\":\"I8\",\"shape\":[%d],\"data_offsets\":[0,%d]},"
             "\"w.weight_scale\":{\"dtype\":\"F32\",\"shape\":%s,\"data_offsets\":[%d,%lld]},"
             "\"w.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[%lld,%lld],\"data_offsets\":[%lld,"
             "%lld]}}",
             n_zero, n_zero, shape, n_zero, (long long)scales, (long long)rows, (long long)cols,
             (long long)scales, (long long)all);
    put_safetensors("m/model.safetensors", header, (size_t)all);
    if (bl_hf_open(tmp_path("m"), &model) != BL_OK) fail_msg("%s", bl_error_text());
    return model;
}

static void test_every_key_is_used_without_effect_or_named(void **state)
{
    static const struct {
        const char *config, *says;
    } refused[] = {
        {FP8(",\"rotation\":\"hadamard\""), "key rotation: unknown, with the value \"hadamard\""},
        {FP8(",\"weight_block_sise\":[128,128]"), "did you mean weight_block_size?"},
        {FP8(",\"expert_dtype\":\"fp4\""), "key expert_dtype: expected \"fp8\", got \"fp4\""},
        {FP8(",\"scale_fmt\":\"int8\""), "key scale_fmt: expected \"float\" or \"ue8m0\""},
        {"{\"quantization_config\":{\"quant_method\":\"fbgemm_fp8\",\"clip\":3}}", "key clip: "},
        {ONE("\"symmetric\":false", ""), "key symmetric: expected true, got false"},
        {ONE("\"zero_point\":2", ""), "key zero_point: unknown, with the value 2"},
        {ONE("\"dynamic\":true", ""), "key dynamic: expected false, got true"},
        {ONE("\"actorder\":\"group\"", ""), "key actorder: expected false"},
        {ONE("", ",\"transform_config\":{\"config_groups\":{\"R1\":{\"type\":\"hadamard\"}}}"),
         "key transform_config: expected null, got {\"config_groups\""},
        {ONE("", ",\"sparsity_config\":{\"format\":\"sparse-24-bitmask\"}"),
         "key format: expected \"dense\", got \"sparse-24-bitmask\""},
        {ONE("", ",\"moe_sparsity_config\":{\"a\":1}"), "key moe_sparsity_config: "},
        {ONE("", ",\"later\":[0]"), "key later: unknown, with the value [0]"},
        {COMPRESSED("\"group_0\":{\"weights\":{},\"format\":\"int-quantized\"}", ""),
         "weights in \"int-quantized\""},
        {COMPRESSED("\"group_0\":{\"weights\":{},\"codebook\":\"e8\"}", ""), "key codebook: "},
        {MODELOPT(",\"group_size\":-1"), "key group_size: expected an integer in [0"},
        {MODELOPT(
             ",\"config_groups\":{\"group_0\":{\"weights\":{\"type\":\"int\",\"num_bits\":8}}}"),
         "key num_bits: expected an integer in [4, 4], got 8"},
        {QUARK(",\"symmetric\":false", ""), "key symmetric: expected true, got false"},
        {QUARK(",\"later\":1", ""), "key later: unknown"},
        {QUARK("", ",\"algo_config\":[{\"name\":\"rotation\"}]"), "key algo_config: expected null"},
        {TWO("[128,128]", "\"128x128x128\""), "key block_structure: expected two positive"},
        {TWO("[128,128]", "\"128x\""), "key block_structure: expected two positive"},
        {TWO("[128,128]", "[128,128,1]"), "key block_structure: expected two positive"},
        {TWO("[128,128]", "null"), "key block_structure: expected two positive"},
    };
    /* As the programs write them. */
    static const char *const accepted[] = {
        FP8(",\"activation_scheme\":\"dynamic\",\"fmt\":\"e4m3\",\"scale_fmt\":\"ue8m0\","
            "\"weight_block_size\":[128,128],\"modules_to_not_convert\":[\"lm_head\"]"),
        FP8(",\"ignored_layers\":[\"lm_head\"],\"kv_cache_scheme\":\"static\",\"_note\":1,"
            "\"later\":null,\"another\":[]"),
        ONE("\"actorder\":null,\"block_structure\":null,\"dynamic\":false,\"group_size\":null,"
            "\"num_bits\":8,\"observer\":\"minmax\",\"observer_kwargs\":{},\"strategy\":"
            "\"channel\",\"symmetric\":true,\"type\":\"float\"",
            ",\"format\":\"float-quantized\",\"global_compression_ratio\":1.5,\"ignore\":["
            "\"lm_head\"],\"kv_cache_scheme\":{\"num_bits\":8},\"quantization_status\":"
            "\"compressed\",\"sparsity_config\":{\"format\":\"dense\",\"global_sparsity\":0.1},"
            "\"transform_config\":{},\"version\":\"0.20.1\""),
        MODELOPT(",\"producer\":{\"name\":\"modelopt\",\"version\":\"0.33\"},\"ignore\":["
                 "\"lm_head\"],\"kv_cache_scheme\":{\"num_bits\":8},\"config_groups\":{"
                 "\"group_0\":{\"input_activations\":{\"dynamic\":false,\"num_bits\":8},"
                 "\"weights\":{\"dynamic\":false,\"num_bits\":8,\"type\":\"float\"},"
                 "\"targets\":[\"Linear\"]}}"),
        QUARK(",\"qscheme\":\"per_tensor\",\"ch_axis\":null,\"is_dynamic\":false,\"symmetric\":"
              "null,\"group_size\":null,\"observer_cls\":\"PerTensorMinMaxObserver\"",
              ",\"algo_config\":null,\"exclude\":[\"lm_head\"],\"export\":{\"pack_method\":"
              "\"reorder\"},\"layer_quant_config\":{\"*k_proj\":{}},\"quant_mode\":"
              "\"eager_mode\",\"version\":\"0.6\""),
    };
    bl_hf_model *model;

    (void)state;
    bl_hf_close(open_model("{}", 2, 2, "[1]", 1, 0));
    for (size_t i = 0; i < BL_COUNT(refused); i++) {
        put_text("m/config.json", refused[i].config);
        if (bl_hf_open(tmp_path("m"), &model) != BL_EINPUT)
            fail_msg("accepted: %s", refused[i].config);
        assert_error_has(refused[i].says);
        assert_error_has("m/config.json: ");
    }
    for (size_t i = 0; i < BL_COUNT(accepted); i++) {
        put_text("m/config.json", accepted[i]);
        if (bl_hf_open(tmp_path("m"), &model) != BL_OK) fail_msg("%s", bl_error_text());
        bl_hf_close(model);
    }
}

/* Whose products have unquantized activations and caches here. */
static void test_activations_and_caches_are_named(void **state)
{
    static const char *const named[] = {
        FP8(",\"kv_cache_scheme\":\"static\""),
        FP8(",\"kv_cache_quant_method\":\"fp8\""),
        ONE("", ",\"kv_cache_scheme\":{\"num_bits\":8}"),
        COMPRESSED("\"g\":{\"weights\":{},\"output_activations\":{\"num_bits\":8}}", ""),
        MODELOPT(",\"kv_cache_quant_algo\":\"FP8\""),
        QUARK("", ",\"kv_cache_quant_config\":{\"*k_proj\":{\"a\":1}}"),
        QUARK("", ",\"softmax_quant_spec\":{\"dtype\":\"fp8_e4m3\"}"),
    };
    bl_hf_model *model;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(named); i++) {
        char key[32], says[96];
        const char *at = strstr(named[i], i == 3 ? "output" : i == 6 ? "softmax" : "kv_cache");
        sscanf(at, "%31[a-z_]", key);
        snprintf(says, sizeof says, "m/config.json: key %s is ignored: activations", key);
        *warnings = '\0';
        bl_hf_close(open_model(named[i], 2, 2, "[1]", 1, 0));
        if (!strstr(warnings, says)) fail_msg("%s: \"%s\"", says, warnings);
    }
    tmp_subdir("m");
    put_safetensors("m/model.safetensors",
                    "{\"a.weight\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[0,4]},"
                    "\"a.v_scale\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
                    8);
    *warnings = '\0';
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    assert_int_equal(bl_hf_check(model,
                                 &(bl_hf_expected){"a.weight", 2, {1, 1}, BL_DTYPE_BIT(BL_F32), 0},
                                 1, NULL),
                     BL_OK);
    assert_non_null(strstr(warnings, "a.v_scale"));
    bl_hf_close(model);
}

/* Modules that a checkpoint leaves unquantized, whose weight w.a.weight is FP8 all the same. */
static void test_excluded_modules(void **state)
{
#define HF(list)  FP8(",\"modules_to_not_convert\":[" list "]")
#define CT(list)  ONE("", ",\"ignore\":[" list "]")
#define NV(list)  MODELOPT(",\"exclude_modules\":[" list "]")
#define AMD(list) QUARK("", ",\"exclude\":[" list "]")
    static const struct {
        const char *config, *name; /* NULL: not excluded */
    } cases[] = {
        /* As transformers' should_convert_module. */
        {HF("\"w\""), "w"},
        {HF("\"w.a\""), "w.a"},
        {HF("\"a\""), "a"},
        {HF("\"w.\""), "w."},
        {HF("\"b\",\"w.*\""), "w.*"},
        {HF("\"[vw]\""), "[vw]"},
        {HF("\"w.a.weight\",\"w.b\",\"w.a[0-9]\",\".b\""), NULL},
        {FP8(",\"ignored_layers\":[\"w\"]"), NULL},
        {FP8(",\"ignored_layers\":[\"w.a\"]"), "w.a"},
        {"{\"quantization_config\":{\"quant_method\":\"fbgemm_fp8\",\"modules_to_not_convert\":"
         "[\"lm_head\",\"a\"]}}",
         "a"},
        {CT("\"lm_head\",\"re:.*a\""), "re:.*a"},
        {CT("\"re:w\""), "re:w"},
        {CT("\"Linear\""), "Linear"},
        {CT("\"w\",\"a\",\"re:a\",\"w.*\""), NULL},
        {NV("\"lm_head\",\"w*\""), "w*"},
        {NV("\"a\",\"*b\""), NULL},
        {AMD("\"re:w\\\\.[ab]\""), "re:w\\.[ab]"},
    };
    bl_hf_expected expected = {"w.a.weight", 2, {2, 2}, BL_DTYPE_BIT(BL_F8_E4M3), false};
    char says[128];
    bl_hf_model *model;

    (void)state;
    tmp_subdir("m");
    put_safetensors("m/model.safetensors",
                    "{\"w.a.weight_scale\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[0,"
                    "4]},\"w.a.weight\":{\"dtype\":\"F8_E4M3\",\"shape\":[2,2],\"data_offsets\":["
                    "4,8]}}",
                    8);
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        put_text("m/config.json", cases[i].config);
        if (bl_hf_open(tmp_path("m"), &model) != BL_OK) fail_msg("%s", bl_error_text());
        bl_status st = bl_hf_check(model, &expected, 1, NULL);
        if (st != (cases[i].name ? BL_EINPUT : BL_OK))
            fail_msg("%s: %d: %s", cases[i].config, (int)st, bl_error_text());
        snprintf(says, sizeof says, " has \"%s\"", cases[i].name ? cases[i].name : "");
        if (cases[i].name) assert_error_has(says);
        bl_hf_close(model);
    }
    put_text("m/config.json", HF("3"));
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_EINPUT);
    assert_error_has("key modules_to_not_convert: expected a list of modules' names, got [3]");
    put_text("m/config.json", CT("\"re:(\""));
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    assert_int_equal(bl_hf_check(model, &expected, 1, NULL), BL_EINPUT);
    assert_error_has("is not a regular expression");
    bl_hf_close(model);
}

/* Model Optimizer's own file, with or without quantization_config. */
static void test_hf_quant_config(void **state)
{
    static const bl_hf_expected expected = {"w.weight", 2, {2, 2}, BL_DTYPE_BIT(BL_F8_E4M3), false};
    static const char *const says[] = {"key quant_algo: weights in \"W4A8_AWQ\" are not supported",
                                       "key later: unknown", "key quantization: missing"};
    static const char *const texts[] = {
        "{\"producer\":{\"name\":\"modelopt\"},\"quantization\":{\"quant_algo\":\"W4A8_AWQ\"}}",
        "{\"quantization\":{\"quant_algo\":\"FP8\",\"later\":1}}", "{}"};
    bl_hf_model *model;

    (void)state;
    bl_hf_close(open_model("{}", 2, 2, "[1]", 1, 0));
    for (size_t i = 0; i < BL_COUNT(texts); i++) {
        put_text("m/hf_quant_config.json", texts[i]);
        assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_EINPUT);
        assert_error_has(says[i]);
        assert_error_has("m/hf_quant_config.json: ");
    }
    put_text("m/hf_quant_config.json",
             "{\"quantization\":{\"quant_algo\":null,\"kv_cache_quant_algo\":\"FP8\"}}");
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK); /* the weights are as stored */
    assert_int_equal(bl_hf_check(model, &expected, 1, NULL), BL_OK);
    bl_hf_close(model);
    put_text("m/hf_quant_config.json",
             "{\"quantization\":{\"quant_algo\":\"FP8\","
             "\"kv_cache_quant_algo\":null,\"exclude_modules\":[\"w\"]}}");
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    assert_int_equal(bl_hf_check(model, &expected, 1, NULL), BL_EINPUT);
    assert_error_has("w.weight is F8_E4M3, but the quantization's exclude_modules has \"w\"");
    bl_hf_close(model);
}

/* The size of a weight's blocks is one that is declared, whichever group has it. */
static void test_blocks_of_several_groups(void **state)
{
    static const struct {
        const char *config;
        int64_t rows, cols;
        const char *shape;
        int64_t n_scales, block_rows, block_cols; /* block_rows 0: an error */
        const char *says;
    } cases[] = {
        {TWO("[100,64]", "[100,64]"), 176, 128, "[2,2]", 4, 100, 64, NULL},
        {TWO("[96,32]", "[32,32]"), 176, 64, "[2,2]", 4, 96, 32, NULL},
        {TWO("[96,32]", "[32,32]"), 176, 64, "[6,2]", 12, 32, 32, NULL},
        {TWO("[96,32]", "\"100x48\""), 190, 96, "[2,2]", 4, 100, 48, NULL},
        {ONE(BLOCK("\"96x32\""), ""), 176, 64, "[2,2]", 4, 96, 32, NULL},
        {ONE("\"strategy\":\"tensor\"", ""), 4, 2, "[1]", 1, 4, 2, NULL},
        {ONE("\"strategy\":\"channel\"", ""), 4, 2, "[4,1]", 4, 1, 2, NULL},
        {ONE("", ""), 4, 2, "[4,1]", 4, 1, 2, NULL},
        {ONE("\"strategy\":\"tensor\"", ""), 4, 2, "[4,1]", 4, 0, 0,
         "tensor w.weight_scale has shape [4, 1], but strategy \"tensor\" of config.json's"},
        {ONE("\"strategy\":\"channel\"", ""), 4, 2, "[1]", 1, 0, 0, "has one scale per row"},
        /* Both fit, and divide it alike. */
        {TWO("[96,32]", "[128,32]"), 80, 64, "[1,2]", 2, 80, 32, NULL},
        {TWO("[96,32]", "[100,32]"), 176, 64, "[2,2]", 4, 0, 0,
         "its scale fits blocks of 96 x 32 and of 100 x 32; which group has it is not read"},
        {TWO("[96,32]", "[64,32]"), 176, 64, "[1,2]", 2, 0, 0, "its other groups do not fit"},
        {TWO("[96,32]", "[64,32]"), 176, 64, "[176,1]", 176, 1, 64, NULL},
        {COMPRESSED(GROUP("a", "\"strategy\":\"channel\"") "," GROUP("b", BLOCK("[100,64]")), ""),
         176, 128, "[2,2]", 4, 100, 64, NULL},
        {COMPRESSED(GROUP("a", "\"strategy\":\"group\",\"group_size\":48") "," GROUP(
                        "b", BLOCK("[96,64]")),
                    ""),
         4, 96, "[4,2]", 8, 1, 48, NULL},
        {QUARK(",\"qscheme\":\"per_group\",\"group_size\":48", ""), 4, 96, "[4,2]", 8, 1, 48, NULL},
        {"{\"quantization_config\":{\"quant_method\":\"mxfp8\",\"weight_block_size\":[1,48]}}", 4,
         96, "[4,2]", 8, 1, 48, NULL},
    };
    bl_hf_weight weight;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_hf_model *model = open_model(cases[i].config, cases[i].rows, cases[i].cols,
                                        cases[i].shape, cases[i].n_scales, 0);
        bl_status st = bl_hf_get_weight(model, "w.weight", &weight);
        if (cases[i].block_rows == 0) {
            assert_int_equal(st, BL_EINPUT);
            assert_error_has(cases[i].says);
        } else if (st != BL_OK || weight.block_rows != cases[i].block_rows ||
                   weight.block_cols != cases[i].block_cols) {
            fail_msg("case %zu: %lld x %lld, %s", i, (long long)weight.block_rows,
                     (long long)weight.block_cols, bl_error_text());
        }
        bl_hf_close(model);
    }
}

static void test_zero_points(void **state)
{
    float scales[1];
    bl_hf_weight weight;
    bl_hf_model *model = open_model("{}", 2, 2, "[1]", 1, 2); /* bytes 0, 1 */

    (void)state;
    assert_int_equal(bl_hf_get_weight(model, "w.weight", &weight), BL_OK);
    assert_int_equal(bl_hf_read_scales(&weight, scales), BL_EINPUT);
    assert_error_has("tensor w.weight_zero_point: byte 1 is not 0: zero points are not supported");
    bl_hf_close(model);
    model = open_model("{}", 2, 2, "[1]", 1, 1); /* byte 0; the scale's are 1, 2, 3, 4 */
    assert_int_equal(bl_hf_get_weight(model, "w.weight", &weight), BL_OK);
    assert_int_equal(bl_hf_read_scales(&weight, scales), BL_OK);
    bl_hf_close(model);
}

/* A scale or zero point of a weight that is not FP8 is a tensor that nothing reads. */
static void test_scales_without_codes(void **state)
{
    static const bl_hf_expected expected[] = {{"a.weight", 2, {1, 1}, BL_DTYPE_BIT(BL_F32), false}};
    static const char *const names[] = {"a.weight_scale", "a.weight_scale_inv",
                                        "a.weight_zero_point", "b.weight_scale"};
    bl_hf_model *model;
    char header[256], says[64];

    (void)state;
    for (size_t i = 0; i < BL_COUNT(names); i++) {
        tmp_subdir("m");
        snprintf(header, sizeof header,
                 "{\"a.weight\":{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[0,4]},"
                 "\"%s\":{\"dtype\":\"F32\",\"shape\":[1],\"data_offsets\":[4,8]}}",
                 names[i]);
        put_safetensors("m/model.safetensors", header, 8);
        assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
        assert_int_equal(bl_hf_check(model, expected, 1, NULL), BL_EINPUT);
        snprintf(says, sizeof says, "unexpected %s", names[i]);
        assert_error_has(says);
        bl_hf_close(model);
    }
}

#define PART(name, dtype, shape, begin, end)                                                       \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":" shape ",\"data_offsets\":[" begin "," end   \
    "]}"

/* gpt-oss' stacks in MXFP4, and stacks whose matrices are stored transposed. */
static void test_stacks(void **state)
{
    static const struct {
        const char *header;
        int64_t n_bytes;
        const char *says;
    } bad[] = {
        {"{" PART("x_blocks", "U8", "[2,3,1,8]", "0", "48") "}", 48,
         "tensor x_blocks has shape [2, 3, 1, 8], expected [matrices, rows, groups, 16]"},
        {"{" PART("x_blocks", "U8", "[2,3,16]", "0", "96") "}", 96, "expected [matrices, rows,"},
        {"{" PART("x_blocks", "U8", "[2,3,1,16]", "0", "96") "}", 96,
         "tensor x has 4 bits and no x_scales"},
        {"{" PART("x_blocks", "U8", "[2,3,1,16]", "0", "96") "," PART("x_scales", "U8", "[3,2,1]",
                                                                      "96", "102") "}",
         102, "tensor x_scales has shape [3, 2, 1], expected the first three dimensions"},
        {"{" PART("x_blocks", "U8", "[2,3,1,16]", "0", "96") "," PART("x_scales", "I8", "[2,3,1]",
                                                                      "96", "102") "}",
         102, "tensor x_scales has dtype I8"},
        {"{" PART("x_blocks", "U8", "[2,3,1,16]", "0", "96") "," PART("x", "U8", "[6]", "96",
                                                                      "102") "}",
         102, "tensor x is stored twice, also as x_blocks"},
    };
    bl_hf_model *model;
    bl_hf_weight w;
    float scales[6];
    (void)state;

    tmp_subdir("m");
    put_safetensors("m/model.safetensors",
                    "{" PART("x_blocks", "U8", "[2,3,1,16]", "0", "96") "," PART(
                        "x_scales", "U8", "[2,3,1]", "96", "102") "," PART("y", "F32", "[2,3,4]",
                                                                           "102", "198") "}",
                    198);
    assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_OK);
    const bl_stored_tensor *blocks = bl_hf_find(model, "x_blocks"),
                           *stored_scales = bl_hf_find(model, "x_scales");
    assert_int_equal(bl_hf_get_weight(model, "x", &w), BL_OK);
    bl_hf_transpose(&w); /* nothing: its rows are stored as rows */
    assert_true(w.n_transposed == 0 && w.scale_kind == BL_SCALE_MXFP4);
    assert_true(w.rows == 6 && w.cols == 32 && w.scale_rows == 6 && w.scale_cols == 1);
    assert_true(w.block_rows == 1 && w.block_cols == 32);
    assert_true(w.codes->n_dims == 3 && w.codes->shape[1] == 3 && w.codes->shape[2] == 32);
    assert_ptr_equal(bl_hf_resolve(model, blocks), w.codes);
    assert_null(bl_hf_resolve(model, stored_scales));
    assert_ptr_equal(bl_hf_weight_of_part(model, stored_scales), w.codes);
    assert_null(bl_hf_weight_of_part(model, bl_hf_find(model, "y")));
    assert_int_equal(bl_hf_read_scales(&w, scales), BL_OK);
    for (int i = 0; i < 6; i++) assert_true(scales[i] == ldexpf(1, 96 + i - 127));
    assert_int_equal(bl_hf_get_weight(model, "y", &w), BL_OK);
    assert_true(w.rows == 6 && w.cols == 4 && w.n_transposed == 0);
    bl_hf_transpose(&w);
    assert_true(w.rows == 8 && w.cols == 3 && w.n_transposed == 2);
    bl_hf_close(model);
    for (size_t i = 0; i < BL_COUNT(bad); i++) {
        put_safetensors("m/model.safetensors", bad[i].header, (size_t)bad[i].n_bytes);
        assert_int_equal(bl_hf_open(tmp_path("m"), &model), BL_EINPUT);
        assert_error_has(bad[i].says);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_stacks),
        cmocka_unit_test(test_every_key_is_used_without_effect_or_named),
        cmocka_unit_test(test_activations_and_caches_are_named),
        cmocka_unit_test(test_excluded_modules),
        cmocka_unit_test(test_hf_quant_config),
        cmocka_unit_test(test_blocks_of_several_groups),
        cmocka_unit_test(test_zero_points),
        cmocka_unit_test(test_scales_without_codes),
    };
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
