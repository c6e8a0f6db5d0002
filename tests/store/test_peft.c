/* SPDX-License-Identifier: Apache-2.0 */
/* PEFT adapters: the config's text, round trips, every rejection, and lists of mismatches with the
 * base. */
#include "tmp_dir.h"

#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/peft.h"
#include "store/peft_keys.h"
#include "store/safetensors.h"

enum { Q, K, V, O, GATE, UP, DOWN, ALL = 127 };
#define MODULES                                                                                    \
    {                                                                                              \
        .layers = "model.layers", .embedding = "embed_tokens", .head = "lm_head", .n = 7,          \
        .path = {                                                                                  \
            "self_attn.q_proj",                                                                    \
            "self_attn.k_proj",                                                                    \
            "self_attn.v_proj",                                                                    \
            "self_attn.o_proj",                                                                    \
            "mlp.gate_proj",                                                                       \
            "mlp.up_proj",                                                                         \
            "mlp.down_proj"                                                                        \
        }                                                                                          \
    }
static const bl_peft_modules modules = MODULES;

/* Eleven layers, so that the file's order (layers.10 before layers.2) is not the numerical one. */
static const bl_peft_base base = {.modules = MODULES,
                                  .n_layers = 11,
                                  .in_features = {6, 6, 6, 10, 6, 6, 14},
                                  .out_features = {10, 4, 4, 6, 14, 14, 6}};

static float value_of(int64_t layer, int module, bl_peft_factor factor, int64_t i)
{
    return (float)(layer * 1000 + module * 100 + factor * 50 + i) + 0.001f;
}

static int64_t n_elements(const bl_peft_config *config, int m, bl_peft_factor factor)
{
    return config->r * (factor == BL_PEFT_A ? base.in_features[m] : base.out_features[m]);
}

typedef struct fill_arg {
    const bl_peft_config *config;
    int n_calls, fail_at;
} fill_arg;

static bl_status fill(void *arg, int64_t layer, int module, bl_peft_factor factor, float *dst)
{
    fill_arg *a = arg;
    if (a->n_calls++ == a->fail_at) return BL_FAIL(BL_ENUMERIC, "the filler gave up");
    for (int64_t i = 0; i < n_elements(a->config, module, factor); i++)
        dst[i] = value_of(layer, module, factor, i);
    return BL_OK;
}

static const bl_peft_config qv = {.r = 3, .alpha = 16, .dropout = 0.05, .targets = 1 << Q | 1 << V};

static void write_adapter(const bl_peft_config *config, bl_dtype dtype)
{
    fill_arg arg = {config, 0, -1};
    if (bl_peft_write(tmp_subdir("a"), config, &base, "meta-llama/X", dtype, fill, NULL, &arg) !=
        BL_OK)
        fail_msg("%s", bl_error_text());
    assert_int_equal(arg.n_calls, 11 * 2 * __builtin_popcount(config->targets));
}

static void test_config_text(void **state)
{
    /* json.dumps(peft's dict, indent=2, sort_keys=True), without exclude_modules and lora_bias:
     * PEFT before 0.14 refuses them */
    static const char expected[] = "{\n"
                                   "  \"alpha_pattern\": {},\n"
                                   "  \"auto_mapping\": null,\n"
                                   "  \"base_model_name_or_path\": \"meta-llama/X\",\n"
                                   "  \"bias\": \"none\",\n"
                                   "  \"fan_in_fan_out\": false,\n"
                                   "  \"inference_mode\": true,\n"
                                   "  \"init_lora_weights\": true,\n"
                                   "  \"layer_replication\": null,\n"
                                   "  \"layers_pattern\": null,\n"
                                   "  \"layers_to_transform\": null,\n"
                                   "  \"loftq_config\": {},\n"
                                   "  \"lora_alpha\": 16,\n"
                                   "  \"lora_dropout\": 0.05,\n"
                                   "  \"megatron_config\": null,\n"
                                   "  \"megatron_core\": \"megatron.core\",\n"
                                   "  \"modules_to_save\": null,\n"
                                   "  \"peft_type\": \"LORA\",\n"
                                   "  \"r\": 3,\n"
                                   "  \"rank_pattern\": {},\n"
                                   "  \"revision\": null,\n"
                                   "  \"target_modules\": [\n"
                                   "    \"q_proj\",\n"
                                   "    \"v_proj\"\n"
                                   "  ],\n"
                                   "  \"task_type\": \"CAUSAL_LM\",\n"
                                   "  \"use_dora\": false,\n"
                                   "  \"use_rslora\": false\n"
                                   "}";
    char *text;
    size_t n_bytes;

    (void)state;
    write_adapter(&qv, BL_F32);
    assert_int_equal(
        bl_file_read_all(tmp_path("a/adapter_config.json"), 10000, (void **)&text, &n_bytes),
        BL_OK);
    assert_string_equal(text, expected);
    free(text);
}

/* Of a larger model, whose other modules have such names, too. */
static void test_targets_of_a_part(void **state)
{
    bl_peft_base part = base;
    bl_peft_config read;
    fill_arg arg = {&qv, 0, -1};
    char *text;
    size_t n_bytes;

    (void)state;
    part.modules.is_part = true;
    assert_int_equal(bl_peft_write(tmp_subdir("a"), &qv, &part, "X", BL_F32, fill, NULL, &arg),
                     BL_OK);
    assert_int_equal(
        bl_file_read_all(tmp_path("a/adapter_config.json"), 10000, (void **)&text, &n_bytes),
        BL_OK);
    assert_non_null(strstr(text, "\"target_modules\": "
                                 "\"model.layers.[0-9]+.(self_attn.q_proj|self_attn.v_proj)\""));
    free(text);
    assert_int_equal(bl_peft_load_config(tmp_path("a"), &part.modules, base.n_layers, &read),
                     BL_OK);
    assert_int_equal(read.targets, qv.targets);
}

static void round_trip(const bl_peft_config *config, bl_dtype dtype)
{
    bl_peft_adapter *adapter;
    float values[64];

    write_adapter(config, dtype);
    if (bl_peft_open(tmp_path("a"), &base, &adapter) != BL_OK) fail_msg("%s", bl_error_text());
    const bl_peft_config *read = bl_peft_get_config(adapter);
    assert_int_equal(read->r, config->r);
    assert_true(read->alpha == config->alpha && read->dropout == config->dropout);
    assert_int_equal(read->use_rslora, config->use_rslora);
    assert_int_equal(read->targets, config->targets);
    for (int64_t layer = 0; layer < base.n_layers; layer++)
        for (int m = 0; m < modules.n; m++)
            for (bl_peft_factor f = BL_PEFT_A; f <= BL_PEFT_B && (config->targets >> m & 1); f++) {
                assert_int_equal(bl_peft_read(adapter, layer, m, f, values), BL_OK);
                for (int64_t i = 0; i < n_elements(config, m, f); i++) {
                    float expected = value_of(layer, m, f, i);
                    if (dtype == BL_BF16) expected = bl_bf16_to_f32(bl_f32_to_bf16(expected));
                    assert_true(values[i] == expected);
                }
            }
    bl_peft_close(adapter);
}

static void test_round_trip(void **state)
{
    static const bl_peft_config odd = {
        .r = 4, .alpha = 12.5, .dropout = 0.1, .use_rslora = true, .targets = ALL};
    static const char FORMAT[] = "{\"__metadata__\":{\"format\":\"pt\"},";
    bl_safetensors *file;
    void *bytes;
    size_t n_bytes;

    (void)state;
    round_trip(&qv, BL_F32);
    round_trip(&odd, BL_BF16);
    assert_int_equal(bl_safetensors_open(tmp_path("a/adapter_model.safetensors"), &file), BL_OK);
    assert_int_equal(bl_file_read_all(bl_safetensors_path(file), 1 << 20, &bytes, &n_bytes), BL_OK);
    assert_non_null(memmem(bytes, n_bytes, FORMAT, sizeof FORMAT - 1));
    free(bytes);
    const bl_stored_tensor *tensor =
        bl_safetensors_find(file, "base_model.model.model.layers.10.mlp.down_proj.lora_A.weight");
    assert_non_null(tensor);
    assert_int_equal(tensor->dtype, BL_BF16);
    assert_int_equal(tensor->shape[0], 4);
    assert_int_equal(tensor->shape[1], 14);
    bl_safetensors_close(file);
}

static bl_status fill_count(void *arg, int64_t layer, int module, bl_peft_factor factor, float *dst)
{
    (void)layer, (void)module;
    for (int64_t i = 0; i < *(const int64_t *)arg * (factor == BL_PEFT_A); i++) dst[i] = (float)i;
    return BL_OK;
}

/* A factor larger than the pieces in which it is rounded and read. */
static void test_large_factor(void **state)
{
    enum { N_IN = 40000 };
    static const bl_peft_base wide = {
        .modules = MODULES, .n_layers = 1, .in_features = {N_IN}, .out_features = {1}};
    static const bl_peft_config one = {.r = 1, .alpha = 1, .targets = 1 << Q};
    static float values[N_IN];
    bl_peft_adapter *adapter;
    int64_t n_in = N_IN;

    (void)state;
    assert_int_equal(
        bl_peft_write(tmp_subdir("wide"), &one, &wide, NULL, BL_BF16, fill_count, NULL, &n_in),
        BL_OK);
    assert_int_equal(bl_peft_open(tmp_path("wide"), &wide, &adapter), BL_OK);
    assert_int_equal(bl_peft_read(adapter, 0, Q, BL_PEFT_A, values), BL_OK);
    for (int i = 0; i < N_IN; i++)
        assert_true(values[i] == bl_bf16_to_f32(bl_f32_to_bf16((float)i)));
    bl_peft_close(adapter);
}

static void test_writing_fails_cleanly(void **state)
{
    fill_arg arg = {&qv, 0, 5};
    const char *dir = tmp_subdir("w");

    (void)state;
    assert_int_equal(bl_peft_write(dir, &qv, &base, "x", BL_F32, fill, NULL, &arg), BL_ENUMERIC);
    assert_error_has("the filler gave up");
    assert_false(bl_file_exists(tmp_path("w/adapter_model.safetensors")));
    assert_false(bl_file_exists(tmp_path("w/adapter_model.safetensors.tmp")));
    assert_false(bl_file_exists(tmp_path("w/adapter_config.json")));
    arg = (fill_arg){&qv, 0, -1};
    assert_int_equal(bl_peft_write(dir, &qv, &base, "x", BL_F16, fill, NULL, &arg), BL_EINTERNAL);
    assert_int_equal(bl_peft_write(dir, &qv, &base, "bad \xff name", BL_F32, fill, NULL, &arg),
                     BL_EINPUT);
    assert_error_has("adapter_config.json: the base model's name is not UTF-8");
    arg.n_calls = 0;
    assert_int_equal(bl_peft_write(dir, &qv, &base, NULL, BL_F32, fill, NULL, &arg), BL_OK);
}

/* adapter_config.json = the required keys, with target_modules and the rest as given. */
static bl_status load_config(const char *targets, const char *rest, bl_peft_config *config)
{
    char text[1024];
    snprintf(text, sizeof text,
             "{\"peft_type\":\"LORA\",\"r\":8,\"lora_alpha\":16,\"target_modules\":%s%s%s}",
             targets, *rest ? "," : "", rest);
    tmp_subdir("c");
    put_text("c/adapter_config.json", text);
    return bl_peft_load_config(tmp_path("c"), &modules, 12, config);
}

/* v_proj of every layer by its path, in PEFT's three lengths, and down_proj by name and, for one
 * layer, by path too. */
static const char paths_of_all[] =
    "[\"model.layers.0.self_attn.v_proj\",\"layers.1.self_attn.v_proj\",\"2.self_attn.v_proj\","
    "\"model.layers.3.self_attn.v_proj\",\"model.layers.4.self_attn.v_proj\",\"model.layers.5.self_"
    "attn.v_"
    "proj\","
    "\"model.layers.6.self_attn.v_proj\",\"model.layers.7.self_attn.v_proj\",\"model.layers.8.self_"
    "attn.v_"
    "proj\","
    "\"model.layers.9.self_attn.v_proj\",\"model.layers.10.self_attn.v_proj\",\"model.layers.11."
    "self_attn.v_"
    "proj\",\"down_proj\","
    "\"model.layers.10.mlp.down_proj\"]";

static void test_target_modules(void **state)
{
    static const struct {
        const char *targets;
        uint32_t expected;
    } cases[] = {
        {"[\"v_proj\",\"q_proj\",\"q_proj\"]", 1 << Q | 1 << V},
        {"[\"self_attn.o_proj\",\"mlp.up_proj\"]", 1 << O | 1 << UP},
        {"\"all-linear\"", ALL},
        {"\".*\\\\.(gate|down)_proj\"", 1 << GATE | 1 << DOWN},
        {"\"model\\\\.layers\\\\.\\\\d+\\\\.self_attn\\\\.k_proj\"", 1 << K},
        {"\".*q|.*q_proj\"", 1 << Q}, /* fullmatch tries the second branch */
        {paths_of_all, 1 << V | 1 << DOWN},
        {"[\"q_proj\",\"lm_head\"]", 1 << Q | 1 << BL_PEFT_HEAD},
        {"[\"model.embed_tokens\",\"v_proj\"]", 1 << V | 1 << BL_PEFT_EMBEDDING},
        {"\".*(q_proj|lm_head)\"", 1 << Q | 1 << BL_PEFT_HEAD},
        {"\"model.*(q_proj|embed_tokens)\"", 1 << Q | 1 << BL_PEFT_EMBEDDING},
    };
    static const struct {
        const char *targets, *error;
    } refused[] = {
        {"[\"q_proj\",\"head\"]", "key target_modules: expected names among q_proj, k_proj"},
        {"[\"embed_tokens\",\"lm_head\"]", "key target_modules: expected at least one projection"},
        {"[\"q_proj\",\"tokens\"]", "key target_modules: expected names among q_proj, k_proj"},
        {"[\"model.layers.0.self_attn.q_proj\"]",
         "key target_modules: q_proj is named in 1 of 12 layers, not in layer 1; "
         "targets that differ by layer are not supported"},
        {"[\"q_proj\",\"layers.3.mlp.up_proj\"]",
         "up_proj is named in 1 of 12 layers, not in layer 0"},
        {"[\"model.layers.12.self_attn.q_proj\"]",
         "their paths in 12 layers, got \"model.layers.12.self_attn.q_proj\""},
        {"[\"model.layers.01.self_attn.q_proj\"]", "got \"model.layers.01.self_attn.q_proj\""},
        {"[\"model.layers.+1.self_attn.q_proj\"]", "got"},
        {"[\"model.layers.18446744073709551617.self_attn.q_proj\"]", "got"},
        {"[\"xlayers.1.self_attn.q_proj\"]", "got"},
        {"[\"model.layers.1.mlp.q_proj\"]", "got"},
        {"[\"q_proj\\u0000x\"]", "key target_modules: expected names, got \"q_proj\\u0000x\""},
        {"[7]", "got 7"},
        {"[]", "key target_modules: expected at least one projection, got []"},
        {"\"q_proj\"", "expected at least one projection, got \"q_proj\""}, /* no full match */
        {"\"model\\\\.layers\\\\.\\\\d+\\\\.self_attn\\\\.q\"", "expected at least one projection"},
        {"null", "key target_modules: expected a string, got null"},
        {"\"(\"",
         "key target_modules: \"(\" is not a regular expression: missing closing parenthesis"},
        {"\".*[0-4]\\\\.self_attn\\\\.q_proj\"",
         "selects other modules in layer 5 than in layers before"},
    };
    bl_peft_config config;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        if (load_config(cases[i].targets, "", &config) != BL_OK) fail_msg("%s", bl_error_text());
        assert_int_equal(config.targets, cases[i].expected);
    }
    for (size_t i = 0; i < BL_COUNT(refused); i++) {
        assert_int_equal(load_config(refused[i].targets, "", &config), BL_EINPUT);
        assert_error_has(refused[i].error);
        assert_error_has("/c/adapter_config.json: ");
    }
}

/* modules_to_save: names are endings of modules' paths. */
static void test_saved_modules(void **state)
{
    bl_peft_config config;

    (void)state;
    assert_int_equal(
        load_config("\"all-linear\"", "\"modules_to_save\":[\"lm_head\",\"norm\"]", &config),
        BL_OK);
    assert_int_equal(config.saved.n, 2);
    assert_string_equal(config.saved.name[1], "norm");
    /* A saved module is not a target. */
    assert_int_equal(load_config("\".*(q_proj|lm_head|embed_tokens)\"",
                                 "\"modules_to_save\":[\"head\",\"model.embed_tokens\"]", &config),
                     BL_OK);
    assert_int_equal(config.targets, 1 << Q);
    assert_int_equal(
        load_config("[\"q_proj\",\"lm_head\"]", "\"modules_to_save\":[\"lm_head\"]", &config),
        BL_OK);
    assert_int_equal(config.targets, 1 << Q);
    assert_int_equal(
        load_config("\".*(q_proj|lm_head)\"", "\"modules_to_save\":[\"embed_tokens\"]", &config),
        BL_OK);
    assert_int_equal(config.targets, 1 << Q | 1 << BL_PEFT_HEAD);
    assert_int_equal(load_config("\"all-linear\"", "\"modules_to_save\":[]", &config), BL_OK);
    assert_int_equal(config.saved.n, 0);
    assert_int_equal(load_config("\"all-linear\"", "\"modules_to_save\":null", &config), BL_OK);
    assert_int_equal(config.saved.n, 0);
}

static void test_unsupported_features(void **state)
{
    static const char *const refused[] = {
        "\"use_dora\":true",
        "\"bias\":\"all\"",
        "\"modules_to_save\":\"lm_head\"",
        "\"modules_to_save\":[\"\"]",
        "\"ensure_weight_tying\":true",
        "\"rank_pattern\":{\"q_proj\":4}",
        "\"alpha_pattern\":{\"q_proj\":4}",
        "\"layers_to_transform\":[0,1]",
        "\"layers_pattern\":\"layers\"",
        "\"exclude_modules\":[\"q_proj\"]",
        "\"fan_in_fan_out\":true",
        "\"lora_bias\":true",
        "\"layer_replication\":[[0,4]]",
        "\"init_lora_weights\":\"pissa\"",
        "\"init_lora_weights\":\"gaussian\\u0000\"",
        "\"init_lora_weights\":\"olora\"",
        "\"loftq_config\":{\"bits\":4}",
        "\"trainable_token_indices\":[1]",
        "\"use_qalora\":true",
        "\"target_parameters\":[\"x\"]",
        "\"lora_dropout\":1.5",
        "\"use_rslora\":1",
    };
    bl_peft_config config;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(refused); i++) {
        char key[64];
        assert_int_equal(load_config("\"all-linear\"", refused[i], &config), BL_EINPUT);
        snprintf(key, sizeof key, "key %.*s: expected", (int)strcspn(refused[i] + 1, "\""),
                 refused[i] + 1);
        assert_error_has(key);
    }
    assert_int_equal(
        load_config(
            "\"all-linear\"",
            "\"use_dora\":false,\"bias\":\"none\",\"modules_to_save\":null,\"rank_pattern\":{},"
            "\"layers_to_transform\":null,\"lora_dropout\":0.1,\"use_rslora\":true,"
            "\"init_lora_weights\":\"gaussian\",\"exclude_modules\":[],\"a_later_key\":null",
            &config),
        BL_OK);
    assert_true(config.use_rslora && config.dropout == 0.1 && config.alpha == 16);
    put_text("c/adapter_config.json", "{\"peft_type\":\"IA3\"}");
    assert_int_equal(bl_peft_load_config(tmp_path("c"), &modules, 1, &config), BL_EINPUT);
    assert_error_has("key peft_type: expected \"LORA\", got \"IA3\"");
    put_text("c/adapter_config.json", "{\"peft_type\":\"LORA\",\"r\":0}");
    assert_int_equal(bl_peft_load_config(tmp_path("c"), &modules, 1, &config), BL_EINPUT);
    assert_error_has("key r: expected an integer in [1, 65536], got 0");
}

/* Each key of PEFT 0.21.2's LoraConfig and PeftConfig with a value that is not its default, and
 * keys that it does not have: named in an error, or without effect here. */
static void test_every_key_is_used_without_effect_or_named(void **state)
{
    static const char *const refused[] = {
        "\"alora_invocation_tokens\":[49152]",
        "\"alora_invocation_tokens\":[]", /* PEFT: a sequence that is nowhere */
        "\"use_bdlora\":{\"nblocks\":1}",
        "\"kasa_config\":{\"beta\":0.0001}",
        "\"velora_config\":{\"num_groups\":64}",
        "\"monteclora_config\":{\"num_samples\":8}",
        "\"arrow_config\":{\"top_k\":3}",
        "\"lora_ga_config\":{\"direction\":\"ArB2r\"}",
        "\"corda_config\":{\"corda_method\":\"ipm\"}",
        "\"megatron_config\":{\"hidden_size\":64}",
        "\"task_type\":\"SEQ_CLS\"",
        "\"layers_to_transform\":0",
        "\"target_parameters\":[\"mlp.experts.gate_up_proj\"]",
        "\"trainable_token_indices\":{\"embed_tokens\":[0]}",
        "\"init_lora_weights\":\"lora_ga\"",
        "\"init_lora_weights\":[]",
        "\"a_later_key\":0",
        "\"a_later_key\":[null,\"x\"]",
        "\"enable_lora\":[true,false,true]", /* PEFT 0.2 */
        "\"rank_patern\":{\"q_proj\":4}",
    };
    static const char *const accepted[] = {
        "\"base_model_name_or_path\":\"x\",\"revision\":\"main\",\"peft_version\":\"0.21.2\"",
        "\"auto_mapping\":{\"base_model_class\":\"X\",\"unsloth_fixed\":true}",
        "\"inference_mode\":false,\"runtime_config\":{\"ephemeral_gpu_offload\":true}",
        "\"megatron_core\":\"megatron.core\",\"qalora_group_size\":32,\"task_type\":\"CAUSAL_LM\"",
        "\"eva_config\":{\"rho\":2.0},\"init_lora_weights\":\"eva\"",
        "\"merge_weights\":false,\"enable_lora\":null,\"lorap_emb_lr\":1e-06,\"lora_dtype\":null",
        "\"rank_pattern\":{},\"alora_invocation_tokens\":null,\"a_later_key\":{\"on\":false}",
        "\"_comment\":\"written by hand\"",
    };
    bl_peft_config config;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(refused); i++) {
        char key[64];
        assert_int_equal(load_config("\"all-linear\"", refused[i], &config), BL_EINPUT);
        snprintf(key, sizeof key,
                 "adapter_config.json: key %.*s: ", (int)strcspn(refused[i] + 1, "\""),
                 refused[i] + 1);
        assert_error_has(key);
    }
    assert_error_has("unknown, with the value {\"q_proj\":4}; did you mean rank_pattern?");
    for (size_t i = 0; i < BL_COUNT(accepted); i++)
        if (load_config("\"all-linear\"", accepted[i], &config) != BL_OK)
            fail_msg("%s", bl_error_text());
}

/* Plain LoRA of a model that is not read here: of other heads, or with LoRA in some layers. */
static void test_plain_lora_of_any_model(void **state)
{
    static const char *const keys[] = {"\"task_type\":\"FEATURE_EXTRACTION\"",
                                       "\"exclude_modules\":[\"k_proj\"]",
                                       "\"layers_to_transform\":[0,1]", "\"layers_pattern\":\"h\""};
    bl_peft_config config;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(keys); i++) {
        assert_int_equal(load_config("\"all-linear\"", keys[i], &config), BL_EINPUT);
        if (bl_peft_check_keys(tmp_path("c")) != BL_OK) fail_msg("%s", bl_error_text());
    }
    assert_int_equal(load_config("\"all-linear\"", "\"use_dora\":true", &config), BL_EINPUT);
    assert_int_equal(bl_peft_check_keys(tmp_path("c")), BL_EINPUT);
}

static void test_tensors_are_compared_with_the_base(void **state)
{
    static const bl_peft_base small = {
        .modules = MODULES, .n_layers = 1, .in_features = {2}, .out_features = {3}};
    bl_peft_adapter *adapter = (bl_peft_adapter *)&adapter;

    (void)state;
    tmp_subdir("t");
    put_text("t/adapter_config.json",
             "{\"peft_type\":\"LORA\",\"r\":1,\"lora_alpha\":1,\"target_modules\":[\"q_proj\"]}");
    put_safetensors("t/adapter_model.safetensors",
                    "{\"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight\":"
                    "{\"dtype\":\"F32\",\"shape\":[2,1],\"data_offsets\":[0,8]},"
                    "\"base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight\":"
                    "{\"dtype\":\"F32\",\"shape\":[1,2],\"data_offsets\":[8,16]}}",
                    16);
    /* Without a base, against themselves: the first A, [2, 1], says that there is one input. */
    assert_int_equal(bl_peft_check(tmp_path("t"), &modules), BL_EINPUT);
    assert_error_has("missing base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight");
    assert_error_has("layers.0.self_attn.q_proj.lora_A.weight has shape [2, 1], expected [1, 1]");
    tmp_subdir("far");
    put_text("far/adapter_config.json",
             "{\"peft_type\":\"LORA\",\"r\":1,\"lora_alpha\":1,\"target_modules\":[\"q_proj\"]}");
    put_safetensors(
        "far/adapter_model.safetensors",
        "{\"base_model.model.model.layers.9223372036854775807.self_attn.q_proj.lora_A.weight\":"
        "{\"dtype\":\"F32\",\"shape\":[1,1],\"data_offsets\":[0,4]}}",
        4);
    assert_int_equal(bl_peft_check(tmp_path("far"), &modules), BL_EINPUT);
    assert_error_has("unexpected base_model.model.model.layers.9223372036854775807.");
    assert_int_equal(bl_peft_open(tmp_path("t"), &small, &adapter), BL_EINPUT);
    assert_null(adapter);
    assert_error_has("q_proj.lora_A.weight has shape [2, 1], expected [1, 2]; ");
    assert_error_has("missing base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight; ");
    assert_error_has("unexpected base_model.model.model.layers.1.self_attn.q_proj.lora_A.weight");
    put_safetensors("t/adapter_model.safetensors",
                    "{\"base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight\":"
                    "{\"dtype\":\"I32\",\"shape\":[1,2],\"data_offsets\":[0,8]},"
                    "\"base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight\":"
                    "{\"dtype\":\"F32\",\"shape\":[3,1],\"data_offsets\":[8,20]}}",
                    20);
    assert_int_equal(bl_peft_open(tmp_path("t"), &small, &adapter), BL_EINPUT);
    assert_error_has("lora_A.weight has dtype I32, expected F32, F16 or BF16");
    assert_null(strstr(bl_error_text(), ";"));
}

static void test_module_names(void **state)
{
    (void)state;
    assert_string_equal(bl_peft_last_name(modules.path[Q]), "q_proj");
    assert_string_equal(bl_peft_last_name(modules.path[GATE]), "gate_proj");
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_config_text),
        cmocka_unit_test(test_round_trip),
        cmocka_unit_test(test_large_factor),
        cmocka_unit_test(test_writing_fails_cleanly),
        cmocka_unit_test(test_targets_of_a_part),
        cmocka_unit_test(test_target_modules),
        cmocka_unit_test(test_saved_modules),
        cmocka_unit_test(test_unsupported_features),
        cmocka_unit_test(test_every_key_is_used_without_effect_or_named),
        cmocka_unit_test(test_plain_lora_of_any_model),
        cmocka_unit_test(test_tensors_are_compared_with_the_base),
        cmocka_unit_test(test_module_names),
    };
    return cmocka_run_group_tests(tests, tmp_dir_create, tmp_dir_remove);
}
