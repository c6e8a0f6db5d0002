/* SPDX-License-Identifier: Apache-2.0 */
/* hf_quantization.c -- quantization_config of config.json in the formats of FP8 and 4-bit
 * checkpoints (compressed-tensors, DeepSeek, Mistral, Meta, Model Optimizer, Quark, bitsandbytes,
 * gpt-oss). Which weights are quantized, and with how many scales, the stored tensors say; the size
 * of blocks is read here. Names are those of transformers 5.24, compressed-tensors 0.20.1,
 * bitsandbytes 0.50.2, vLLM, Model Optimizer and Quark; an unknown key with a value is an error. */
#include <fnmatch.h>
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/present.h"
#include "base/sizes.h"
#include "store/hf_internal.h"
#include "store/pattern.h"

#define USED(name)                                                                                 \
    {                                                                                              \
        name, BL_KEY_USED, NULL, NULL                                                              \
    }
#define MUST_BE(name, values)                                                                      \
    {                                                                                              \
        name, BL_KEY_REJECTED, values, NULL                                                        \
    }
#define CHECK(keys, no_effect, place, object)                                                      \
    bl_keys_check(&(bl_key_table){keys, BL_COUNT(keys), NULL, no_effect}, place, object, NULL)

#define NAMED(name)                                                                                \
    {                                                                                              \
        name, BL_KEY_NAMED, NULL, "activations and caches are not quantized here"                  \
    }

/* GPTQ, AWQ, integers of 8 bits, code books and others. */
static bl_status refuse(const char *file, const char *key, const char *name)
{
    return BL_FAIL(BL_EINPUT,
                   "%s: key %s: weights in \"%s\" are not supported, only FP8 (E4M3), INT4 "
                   "(pack-quantized), MXFP4, NVFP4 and NF4; use the unquantized checkpoint, or one "
                   "in these",
                   file, key, name);
}

static bl_status declare(const char *file, bl_scale_blocks blocks, bl_declared *declared)
{
    for (int i = 0; i < declared->n; i++)
        if (declared->size[i].rows == blocks.rows && declared->size[i].cols == blocks.cols)
            return BL_OK;
    if (declared->n == BL_MAX_SCALE_BLOCKS)
        return BL_FAIL(BL_EINPUT, "%s: quantization_config has more than %d sizes of blocks", file,
                       BL_MAX_SCALE_BLOCKS);
    declared->size[declared->n++] = blocks;
    return BL_OK;
}

/* [rows, cols] of a block, both positive; also as text, "128x128". */
static bl_status read_block_size(const char *file, const char *key, const json_t *size,
                                 bl_declared *declared)
{
    const char *text = bl_json_text(size);
    int64_t rows = json_integer_value(json_array_get(size, 0)),
            cols = json_integer_value(json_array_get(size, 1));
    int n_read = 0;

    if (text && sscanf(text, "%9" SCNd64 "x%9" SCNd64 "%n", &rows, &cols, &n_read) == 2)
        rows = text[n_read] ? 0 : rows;
    else if (json_array_size(size) != 2)
        rows = 0;
    if (rows <= 0 || cols <= 0 || rows > INT32_MAX || cols > INT32_MAX)
        return bl_json_fail(file, key, "two positive integers, as [128, 128]", size);
    return declare(file, (bl_scale_blocks){rows, cols}, declared);
}

/* ---- modules that are left unquantized ---- */

static bl_status set_excluded(const char *file, const json_t *object, const char *key,
                              bl_exclude_rule rule, bl_declared *declared)
{
    const json_t *list = json_object_get(object, key);

    if (!list || json_is_null(list)) return BL_OK;
    for (size_t i = 0; i < json_array_size(list) || !json_is_array(list); i++)
        if (!bl_json_text(json_array_get(list, i)))
            return bl_json_fail(file, key, "a list of modules' names", list);
    if (json_array_size(list) == 0) return BL_OK;
    if (!declared->excluded) declared->excluded = json_array();
    declared->excluded_key = key;
    declared->rule = rule;
    return declared->excluded && !json_array_extend(declared->excluded, (json_t *)list)
               ? BL_OK
               : BL_FAIL(BL_ENOMEM, "out of memory: %s", file);
}

/* Whether a name without special characters is whole components at the beginning of a module's
 * name, or its end. */
static bool is_part(const char *name, const char *module)
{
    size_t n = strlen(name);
    bool begins = n > 0 && !strncmp(module, name, n);

    return (begins && (!module[n] || module[n] == '.' || name[n - 1] == '.')) ||
           bl_text_ends_with(module, name);
}

static bl_status match_regex(const char *key, const char *expression, const char *end,
                             const char *module, bool *matches)
{
    bl_name_pattern *pattern = NULL;
    char *text = NULL;

    BL_TRY(bl_text_format(&text, "(?:%s)%s", expression, end));
    bl_status st = bl_name_pattern_create(text, BL_PATTERN_WHOLE, BL_EINPUT, key, &pattern);
    if (st == BL_OK) st = bl_name_pattern_match(pattern, module, matches);
    bl_name_pattern_destroy(pattern);
    free(text);
    return st;
}

bl_status bl_hf_find_excluded(const bl_declared *declared, const char *module, const char **name)
{
    static const char special[] = "*+?[](){}|^$\\";
    const char *key = declared->excluded_key;
    bool found = false;
    size_t i;
    json_t *value;

    *name = NULL;
    json_array_foreach(declared->excluded, i, value)
    {
        const char *text = json_string_value(value);
        bool is_names = declared->rule == BL_EXCLUDE_NAMES;
        if (declared->rule == BL_EXCLUDE_MODULES && strpbrk(text, special))
            BL_TRY(match_regex(key, text, "(?:\\..*)?", module, &found));
        else if (declared->rule == BL_EXCLUDE_MODULES)
            found = is_part(text, module);
        else if (!strncmp(text, "re:", 3))
            BL_TRY(match_regex(key, text + 3, ".*", module, &found));
        else
            found = is_names ? !strcmp(text, module) || !strcmp(text, "Linear")
                             : !fnmatch(text, module, 0);
        if (!found) continue;
        *name = text;
        break;
    }
    return BL_OK;
}

/* ---- the formats ---- */

/* DeepSeek writes weight_block_size; Mistral has null, AutoFP8 nothing. */
static bl_status parse_fp8(const char *file, const json_t *quantization, bl_declared *declared)
{
    static const bl_known_key keys[] = {USED("quant_method"),
                                        USED("fmt"),
                                        USED("weight_block_size"),
                                        USED("modules_to_not_convert"),
                                        USED("ignored_layers"),
                                        MUST_BE("expert_dtype", "[\"fp8\"]"),
                                        MUST_BE("scale_fmt", "[\"float\", \"ue8m0\"]"),
                                        NAMED("kv_cache_scheme"),
                                        NAMED("kv_cache_quant_method"),
                                        NAMED("kv_cache_quant_targets")};
    /* of activations, which are not quantized; and of the stored dtypes */
    static const char no_effect[] =
        "activation_scheme activation_scale_ub dequantize modules_to_convert";
    const json_t *block = json_object_get(quantization, "weight_block_size");
    const char *fmt = "e4m3";

    BL_TRY(CHECK(keys, no_effect, file, quantization));
    BL_TRY(
        set_excluded(file, quantization, "modules_to_not_convert", BL_EXCLUDE_MODULES, declared));
    BL_TRY(set_excluded(file, quantization, "ignored_layers", BL_EXCLUDE_NAMES, declared));
    BL_TRY(bl_json_get_string(file, quantization, "fmt", BL_JSON_OPTIONAL, &fmt));
    if (strncmp(fmt, "e4m3", 4) != 0) return refuse(file, "fmt", fmt);
    return block && !json_is_null(block)
               ? read_block_size(file, "weight_block_size", block, declared)
               : BL_OK;
}

/* As compressed-tensors: sizes of blocks and groups only with their strategies. Model Optimizer's
 * groups state none. */
static bl_status check_sizes(const char *file, const json_t *weights, const char *strategy)
{
    const json_t *block = json_object_get(weights, "block_structure"),
                 *group = json_object_get(weights, "group_size");

    if (!bl_json_text(json_object_get(weights, "strategy"))) return BL_OK;
    if (block && !json_is_null(block) && strcmp(strategy, "block") != 0)
        return bl_json_fail(file, "block_structure", "null without strategy \"block\"", block);
    if (json_integer_value(group) > 0 && !strstr(strategy, "group"))
        return bl_json_fail(file, "group_size", "null without strategy \"group\"", group);
    return BL_OK;
}

/* Floats of 8 or 4 bits, integers of 4. Only integers have zero points. */
static bl_status parse_type(const char *file, const json_t *weights, bl_declared *declared)
{
    const char *type = "float";
    int64_t bits = 8;
    bool is_symmetric = true;

    BL_TRY(bl_json_get_string(file, weights, "type", BL_JSON_OPTIONAL, &type));
    BL_TRY(bl_json_get_bool(file, weights, "symmetric", BL_JSON_OPTIONAL, &is_symmetric));
    bool is_int = !strcmp(type, "int");
    if (!is_int && strcmp(type, "float") != 0)
        return bl_json_fail(file, "type", "\"float\" or \"int\"", json_object_get(weights, "type"));
    if (!is_int && !is_symmetric)
        return bl_json_fail(file, "symmetric", "true", json_object_get(weights, "symmetric"));
    BL_TRY(bl_json_get_int(file, weights, "num_bits", BL_JSON_OPTIONAL, 4, is_int ? 4 : 8, &bits));
    if (!is_int && bits != 4 && bits != 8)
        return bl_json_fail(file, "num_bits", "4 or 8", json_object_get(weights, "num_bits"));
    declared->has_symmetric |= is_int && is_symmetric;
    declared->has_asymmetric |= !is_symmetric;
    return BL_OK;
}

/* The weights of one group of compressed-tensors' config_groups. */
static bl_status parse_weights(const char *file, const json_t *weights, bl_declared *declared)
{
    static const bl_known_key keys[] = {USED("type"),
                                        USED("num_bits"),
                                        USED("strategy"),
                                        USED("block_structure"),
                                        USED("group_size"),
                                        USED("symmetric"),
                                        MUST_BE("dynamic", "[false]"),
                                        MUST_BE("actorder", "[false, \"weight\", \"static\"]")};
    /* the tensors have dtypes, and were observed */
    static const char no_effect[] = "scale_dtype zp_dtype observer observer_kwargs";
    const char *strategy = "tensor";
    int64_t group_size = 0;

    BL_TRY(parse_type(file, weights, declared));
    BL_TRY(CHECK(keys, no_effect, file, weights));
    BL_TRY(bl_json_get_string(file, weights, "strategy", BL_JSON_OPTIONAL, &strategy));
    BL_TRY(check_sizes(file, weights, strategy));
    declared->strategies |= !bl_json_text(json_object_get(weights, "strategy")) ? BL_STRATEGY_OTHER
                            : !strcmp(strategy, "tensor")                       ? BL_STRATEGY_TENSOR
                            : !strcmp(strategy, "channel") ? BL_STRATEGY_CHANNEL
                                                           : BL_STRATEGY_OTHER;
    if (!strcmp(strategy, "tensor") || !strcmp(strategy, "channel")) return BL_OK;
    if (!strcmp(strategy, "block"))
        return read_block_size(file, "block_structure", json_object_get(weights, "block_structure"),
                               declared);
    if (!strcmp(strategy, "group") || !strcmp(strategy, "tensor_group")) {
        BL_TRY(bl_json_get_int(file, weights, "group_size", BL_JSON_REQUIRED, 1, INT32_MAX,
                               &group_size));
        return declare(file, (bl_scale_blocks){1, group_size}, declared);
    }
    return bl_json_fail(file, "strategy",
                        "\"tensor\", \"channel\", \"block\", \"group\" or \"tensor_group\"",
                        json_object_get(weights, "strategy"));
}

static bl_status check_format(const char *file, const json_t *object)
{
    static const char *const formats[] = {
        "float-quantized", "naive-quantized",      "mxfp8-quantized",     "mixed-precision",
        "pack-quantized",  "nvfp4-pack-quantized", "mxfp4-pack-quantized"};
    const char *format = formats[0];

    BL_TRY(bl_json_get_string(file, object, "format", BL_JSON_OPTIONAL, &format));
    for (size_t i = 0; i < BL_COUNT(formats); i++)
        if (strcmp(format, formats[i]) == 0) return BL_OK;
    return refuse(file, "format", format);
}

/* Also Model Optimizer's, which vLLM reads in the same way. */
static bl_status parse_groups(const char *file, const json_t *quantization, bl_declared *declared)
{
    static const bl_known_key keys[] = {USED("weights"), USED("format"),
                                        MUST_BE("symmetric", "[true]"),
                                        NAMED("output_activations")};
    /* the stored dtypes show which weights; activations are not quantized */
    static const char no_effect[] = "targets input_activations";
    const json_t *groups = NULL, *weights;
    const char *name;
    json_t *group;

    BL_TRY(bl_json_get_object(file, quantization, "config_groups", BL_JSON_OPTIONAL, &groups));
    json_object_foreach((json_t *)groups, name, group)
    {
        weights = NULL;
        BL_TRY(bl_json_check_object(file, group));
        BL_TRY(check_format(file, group));
        BL_TRY(CHECK(keys, no_effect, file, group));
        BL_TRY(bl_json_get_object(file, group, "weights", BL_JSON_REQUIRED, &weights));
        BL_TRY(parse_weights(file, weights, declared));
    }
    return BL_OK;
}

static bl_status parse_compressed_tensors(const char *file, const json_t *quantization,
                                          bl_declared *declared)
{
    static const bl_known_key keys[] = {
        USED("quant_method"),
        USED("format"),
        USED("config_groups"),
        USED("sparsity_config"),
        USED("ignore"),
        MUST_BE("symmetric", "[true]"),
        {"transform_config", BL_KEY_REJECTED, NULL, "it rotates activations; not supported"},
        {"moe_sparsity_config", BL_KEY_REJECTED, NULL, "experts are not supported"},
        NAMED("kv_cache_scheme")};
    static const bl_known_key sparsity_keys[] = {MUST_BE("format", "[\"dense\"]")};
    static const char no_effect[] =
        "quantization_status global_compression_ratio run_compressed version";
    /* of dense weights */
    static const char no_sparsity[] =
        "ignore targets global_sparsity sparsity_structure registry_requires_subclass";
    const json_t *sparsity = NULL;

    BL_TRY(check_format(file, quantization));
    BL_TRY(CHECK(keys, no_effect, file, quantization));
    BL_TRY(set_excluded(file, quantization, "ignore", BL_EXCLUDE_NAMES, declared));
    BL_TRY(bl_json_get_object(file, quantization, "sparsity_config", BL_JSON_OPTIONAL, &sparsity));
    BL_TRY(CHECK(sparsity_keys, no_sparsity, file, sparsity));
    return parse_groups(file, quantization, declared);
}

/* NVIDIA's Model Optimizer. */
static bl_status parse_modelopt(const char *file, const json_t *quantization, bl_declared *declared)
{
    static const bl_known_key keys[] = {USED("quant_method"),         USED("quant_algo"),
                                        USED("config_groups"),        USED("exclude_modules"),
                                        USED("group_size"),           USED("ignore"),
                                        NAMED("kv_cache_quant_algo"), NAMED("kv_cache_scheme")};
    static const char *const algorithms[] = {
        "FP8", "FP8_PER_CHANNEL_PER_TOKEN", "FP8_PB_WO", "FP8_PB_REAL", "MXFP8", "NVFP4"};
    const char *algorithm;
    int64_t group_size = 0;
    bool is_known = false;

    if (json_is_null(json_object_get(quantization, "quant_algo"))) /* of caches alone */
        return CHECK(keys, "producer", file, quantization);
    BL_TRY(bl_json_get_string(file, quantization, "quant_algo", BL_JSON_REQUIRED, &algorithm));
    for (size_t i = 0; i < BL_COUNT(algorithms); i++)
        is_known = is_known || strcmp(algorithm, algorithms[i]) == 0;
    if (!is_known) return refuse(file, "quant_algo", algorithm);
    BL_TRY(CHECK(keys, "producer", file, quantization));
    BL_TRY(set_excluded(file, quantization, "exclude_modules", BL_EXCLUDE_WILDCARDS, declared));
    BL_TRY(set_excluded(file, quantization, "ignore", BL_EXCLUDE_WILDCARDS, declared));
    BL_TRY(bl_json_get_int(file, quantization, "group_size", BL_JSON_OPTIONAL, 0, INT32_MAX,
                           &group_size));
    if (group_size > 0) BL_TRY(declare(file, (bl_scale_blocks){1, group_size}, declared));
    return parse_groups(file, quantization, declared);
}

/* The weights of AMD's Quark. */
static bl_status parse_quark_weights(const char *file, const json_t *weight, bl_declared *declared)
{
    static const bl_known_key keys[] = {USED("dtype"),
                                        USED("qscheme"),
                                        USED("group_size"),
                                        MUST_BE("symmetric", "[true]"),
                                        MUST_BE("is_dynamic", "[false]"),
                                        MUST_BE("is_scale_quant", "[false]")};
    /* the scales have shapes and dtypes, and were computed */
    static const char no_effect[] = "ch_axis observer_cls round_method scale_type scale_format "
                                    "scale_calculation_mode qat_spec zero_point_type";
    const char *dtype, *scheme = "per_tensor";
    int64_t group_size = 0;

    BL_TRY(bl_json_get_string(file, weight, "dtype", BL_JSON_REQUIRED, &dtype));
    if (strcmp(dtype, "fp8_e4m3") != 0) return refuse(file, "dtype", dtype);
    BL_TRY(CHECK(keys, no_effect, file, weight));
    BL_TRY(bl_json_get_string(file, weight, "qscheme", BL_JSON_OPTIONAL, &scheme));
    if (strcmp(scheme, "per_group") != 0) return BL_OK;
    BL_TRY(
        bl_json_get_int(file, weight, "group_size", BL_JSON_REQUIRED, 1, INT32_MAX, &group_size));
    return declare(file, (bl_scale_blocks){1, group_size}, declared);
}

static bl_status parse_quark(const char *file, const json_t *quantization, bl_declared *declared)
{
    static const bl_known_key keys[] = {
        USED("quant_method"),
        USED("global_quant_config"),
        {"algo_config", BL_KEY_REJECTED, NULL, "it may rotate activations; not supported"},
        USED("exclude"),
        NAMED("kv_cache_quant_config"),
        NAMED("kv_cache_post_rope"),
        NAMED("softmax_quant_spec")};
    /* of single layers, whose tensors have dtypes and scales; of activations */
    static const char no_effect[] =
        "layer_quant_config layer_type_quant_config quant_mode export version";
    static const bl_known_key global_keys[] = {
        USED("weight"),
        {"bias", BL_KEY_REJECTED, NULL, "quantized biases are not supported"},
        NAMED("output_tensors")};
    const json_t *global = NULL, *weight = NULL;

    BL_TRY(CHECK(keys, no_effect, file, quantization));
    BL_TRY(set_excluded(file, quantization, "exclude", BL_EXCLUDE_WILDCARDS, declared));
    BL_TRY(
        bl_json_get_object(file, quantization, "global_quant_config", BL_JSON_REQUIRED, &global));
    BL_TRY(CHECK(global_keys, "input_tensors target_device", file, global));
    BL_TRY(bl_json_get_object(file, global, "weight", BL_JSON_REQUIRED, &weight));
    return parse_quark_weights(file, weight, declared);
}

/* NF4: quant_state has blocks and levels of scales. int8 and FP4 are other weights. */
static bl_status parse_bitsandbytes(const char *file, const json_t *quantization,
                                    bl_declared *declared)
{
    static const bl_known_key keys[] = {USED("quant_method"), USED("load_in_4bit"),
                                        USED("load_in_8bit"), USED("bnb_4bit_quant_type"),
                                        USED("llm_int8_skip_modules")};
    /* of products, of int8, and of the stored dtypes */
    static const char no_effect[] =
        "bnb_4bit_compute_dtype bnb_4bit_quant_storage bnb_4bit_use_double_quant "
        "llm_int8_enable_fp32_cpu_offload llm_int8_has_fp16_weight llm_int8_threshold";
    const char *type = "fp4"; /* as in transformers */
    bool is_4bit = false, is_8bit = false;

    BL_TRY(CHECK(keys, no_effect, file, quantization));
    BL_TRY(bl_json_get_bool(file, quantization, "load_in_4bit", BL_JSON_OPTIONAL, &is_4bit));
    BL_TRY(bl_json_get_bool(file, quantization, "load_in_8bit", BL_JSON_OPTIONAL, &is_8bit));
    BL_TRY(bl_json_get_string(file, quantization, "bnb_4bit_quant_type", BL_JSON_OPTIONAL, &type));
    if (is_8bit || !is_4bit) return refuse(file, "load_in_8bit", "bitsandbytes int8");
    if (strcmp(type, "nf4") != 0) return refuse(file, "bnb_4bit_quant_type", type);
    return set_excluded(file, quantization, "llm_int8_skip_modules", BL_EXCLUDE_MODULES, declared);
}

/* gpt-oss: experts alone. */
static bl_status parse_mxfp4(const char *file, const json_t *quantization, bl_declared *declared)
{
    static const bl_known_key keys[] = {USED("quant_method"), USED("modules_to_not_convert")};

    BL_TRY(CHECK(keys, "dequantize", file, quantization));
    return set_excluded(file, quantization, "modules_to_not_convert", BL_EXCLUDE_MODULES, declared);
}

bl_status bl_hf_parse_quantization(const char *file, const json_t *config, bl_declared *declared)
{
    static const bl_known_key fbgemm_keys[] = {USED("quant_method"),
                                               USED("modules_to_not_convert")};
    const json_t *quantization = NULL;
    const char *method;

    BL_TRY(
        bl_json_get_object(file, config, "quantization_config", BL_JSON_OPTIONAL, &quantization));
    if (!quantization) return BL_OK;
    BL_TRY(bl_json_get_string(file, quantization, "quant_method", BL_JSON_REQUIRED, &method));
    if (!strcmp(method, "fp8") || !strcmp(method, "mxfp8"))
        return parse_fp8(file, quantization, declared);
    if (!strcmp(method, "compressed-tensors"))
        return parse_compressed_tensors(file, quantization, declared);
    if (!strcmp(method, "modelopt")) return parse_modelopt(file, quantization, declared);
    if (!strcmp(method, "quark")) return parse_quark(file, quantization, declared);
    if (!strcmp(method, "bitsandbytes")) return parse_bitsandbytes(file, quantization, declared);
    if (!strcmp(method, "mxfp4")) return parse_mxfp4(file, quantization, declared);
    if (strcmp(method, "fbgemm_fp8")) return refuse(file, "quant_method", method);
    BL_TRY(CHECK(fbgemm_keys, "activation_scale_ub", file, quantization));
    return set_excluded(file, quantization, "modules_to_not_convert", BL_EXCLUDE_MODULES, declared);
}

bl_status bl_hf_parse_modelopt(const char *file, const json_t *root, bl_declared *declared)
{
    static const bl_known_key keys[] = {USED("quantization")};
    const json_t *quantization = NULL;

    BL_TRY(CHECK(keys, "producer", file, root));
    BL_TRY(bl_json_get_object(file, root, "quantization", BL_JSON_REQUIRED, &quantization));
    return parse_modelopt(file, quantization, declared);
}
