/* SPDX-License-Identifier: Apache-2.0 */
/* config.json in its spellings, each refusal, the presets, and the rotary frequencies. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "arch/config.h"
#include "arch/rope.h"
#include "arch/decoder_internal.h"
#include "skip.h"

static char folder[] = "/tmp/ballast-config-XXXXXX";
static char config_path[64];

static int create_folder(void **state)
{
    (void)state;
    if (!mkdtemp(folder)) return -1;
    snprintf(config_path, sizeof config_path, "%s/config.json", folder);
    return 0;
}

static int remove_folder(void **state)
{
    (void)state;
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

#define SIZES                                                                                      \
    "\"vocab_size\":100,\"hidden_size\":32,\"intermediate_size\":50,\"num_hidden_layers\":3,"      \
    "\"num_"                                                                                       \
    "attention_heads\":4"
#define LLAMA3_FIELDS                                                                              \
    "\"factor\":8.0,\"low_freq_factor\":1.0,\"high_freq_factor\":4.0,\"original_max_position_"     \
    "embeddings\":"                                                                                \
    "8192"

/* config.json = {the sizes above, then `rest`}, loaded. */
static bl_status load_text(const char *text, bl_model_config *config)
{
    assert_int_equal(bl_file_write_atomic(config_path, text, strlen(text)), BL_OK);
    return bl_model_config_load(folder, config);
}

static bl_status load(const char *rest, bl_model_config *config)
{
    char text[2048];
    snprintf(text, sizeof text, "{" SIZES "%s%s}", *rest ? "," : "", rest);
    return load_text(text, config);
}

static void test_big_integers(void **state)
{
    bl_model_config c;

    (void)state;
    assert_int_equal(
        load("\"unrelated\":[18446744073709551616,-1000000000000000019884624838656]", &c), BL_OK);
    assert_int_equal(c.hidden_size, 32);
    assert_int_equal(load("\"max_position_embeddings\":1000000000000000019884624838656", &c),
                     BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "config.json: key max_position_embeddings: expected an "
                                            "integer in [1, 1073741824], got 1e30"));
    assert_int_equal(load("\"eos_token_id\":[18446744073709551616]", &c), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "key eos_token_id: expected ids below vocab_size"));
    assert_int_equal(load("\"architectures\":[\"LlamaForCausalLM\\u0000x\"]", &c), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "key architectures: expected"));
    assert_int_equal(load("\"hidden_act\":\"silu\\u0000x\"", &c), BL_EINPUT);
}

static void test_defaults(void **state)
{
    bl_model_config c;

    (void)state;
    assert_int_equal(load("", &c), BL_OK);
    assert_int_equal(c.n_kv_heads, 4);
    assert_int_equal(c.head_dim, 8);
    assert_true(c.rope_theta == 10000 && c.rms_norm_eps == 1e-6);
    assert_false(c.tie_word_embeddings);
    assert_int_equal(c.rope_kind, BL_ROPE_DEFAULT);
    assert_int_equal(c.bos_token_id, -1);
    assert_int_equal(c.n_eos_token_ids, 0);
    assert_int_equal(c.max_position_embeddings, 2048);
    assert_int_equal(bl_model_config_load(config_path, &c), BL_OK); /* the file itself */
}

static void test_spellings(void **state)
{
    static const char *const llama31[] = {
        "\"rope_theta\":500000.0,\"rope_scaling\":{\"rope_type\":\"llama3\"," LLAMA3_FIELDS "}",
        "\"rope_theta\":500000.0,\"rope_scaling\":{\"type\":\"llama3\"," LLAMA3_FIELDS "}",
        "\"dtype\":\"bfloat16\",\"rope_parameters\":{\"rope_theta\":500000.0,\"rope_type\":"
        "\"llama3\"," LLAMA3_FIELDS "}",
        "\"rope_theta\":500000,\"rope_parameters\":{\"rope_theta\":500000.0,\"rope_type\":"
        "\"llama3\"," LLAMA3_FIELDS "}",
    };
    bl_model_config c;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(llama31); i++) {
        if (load(llama31[i], &c) != BL_OK) fail_msg("%s", bl_error_text());
        assert_int_equal(c.rope_kind, BL_ROPE_LLAMA3);
        assert_true(c.rope_theta == 5e5 && c.rope_factor == 8);
        assert_true(c.rope_low_freq_factor == 1 && c.rope_high_freq_factor == 4);
        assert_int_equal(c.rope_original_max_positions, 8192);
    }
    assert_int_equal(
        load("\"rope_scaling\":null,\"bos_token_id\":1,\"eos_token_id\":2,\"head_dim\":16,"
             "\"num_key_value_heads\":2,\"tie_word_embeddings\":true,\"rms_norm_eps\":1e-05,"
             "\"max_position_embeddings\":4096,\"architectures\":[\"LlamaForCausalLM\"],"
             "\"model_type\":\"llama\",\"hidden_act\":\"silu\",\"attention_bias\":false,\"mlp_"
             "bias\":null",
             &c),
        BL_OK);
    assert_int_equal(c.head_dim, 16);
    assert_int_equal(c.n_kv_heads, 2);
    assert_true(c.tie_word_embeddings && c.rms_norm_eps == 1e-5);
    assert_int_equal(c.max_position_embeddings, 4096);
    assert_int_equal(c.bos_token_id, 1);
    assert_int_equal(c.n_eos_token_ids, 1);
    assert_int_equal(c.eos_token_ids[0], 2);
    assert_int_equal(load("\"eos_token_id\":[7,8,9]", &c), BL_OK);
    assert_int_equal(c.n_eos_token_ids, 3);
    assert_int_equal(c.eos_token_ids[2], 9);
    assert_int_equal(load("\"rope_scaling\":{\"type\":\"linear\",\"factor\":2}", &c), BL_OK);
    assert_int_equal(c.rope_kind, BL_ROPE_LINEAR);
    assert_true(c.rope_factor == 2);
    assert_int_equal(load("\"rope_parameters\":{\"rope_type\":\"default\",\"rope_theta\":77}", &c),
                     BL_OK);
    assert_int_equal(c.rope_kind, BL_ROPE_DEFAULT);
    assert_true(c.rope_theta == 77);
}

static void test_refusals(void **state)
{
    static const struct {
        const char *rest, *error;
    } cases[] = {
        {"\"attention_bias\":1", "key attention_bias: expected true or false, got 1"},
        {"\"bias\":true", "key bias: expected false, got true"},
        {"\"hidden_act\":\"gelu\"", "key hidden_act: expected \"silu\", got \"gelu\""},
        {"\"model_type\":\"bert\"", "key model_type: expected \"llama\" or \"mistral\" or "},
        {"\"model_type\":\"mistral\",\"num_key_value_heads\":4,\"sliding_window\":0",
         "key sliding_window: expected an integer in [1, 1073741824], got 0"},
        {"\"model_type\":\"mistral\",\"layer_types\":[\"full_attention\",\"sliding_attention\"]",
         "key layer_types: expected \"full_attention\" or []"},
        {"\"model_type\":\"qwen2\",\"num_key_value_heads\":4,\"layer_types\":[\"full_attention\"]",
         "key layer_types: expected a type for each of num_hidden_layers"},
        {"\"model_type\":\"qwen2\",\"num_key_value_heads\":4,\"layer_types\":[\"full_attention\","
         "\"sliding_attention\",\"full_attention\"]",
         "key layer_types: expected no sliding_attention without sliding_window"},
        {"\"model_type\":\"qwen2\",\"num_key_value_heads\":4,\"layer_types\":[\"full_attention\","
         "\"chunked_attention\",\"full_attention\"]",
         "key layer_types: expected \"full_attention\" or \"sliding_attention\" for each layer"},
        {"\"model_type\":\"qwen2\",\"attention_bias\":true", "key attention_bias: expected false"},
        {"\"architectures\":[\"Qwen2ForCausalLM\"]",
         "key architectures: expected [\"LlamaForCausalLM\"], got [\"Qwen2ForCausalLM\"]"},
        {"\"model_type\":\"falcon\",\"alibi\":true",
         "key alibi: expected false: ALiBi is not supported, got true"},
        {"\"model_type\":\"falcon\",\"activation\":\"relu\"",
         "key activation: expected \"gelu\", \"gelu_new\" or \"gelu_pytorch_tanh\", got \"relu\""},
        {"\"model_type\":\"falcon\",\"new_decoder_architecture\":true,\"parallel_attn\":false",
         "key parallel_attn: expected true beside new_decoder_architecture, got false"},
        {"\"model_type\":\"falcon\",\"num_ln_in_parallel_attn\":2",
         "key num_ln_in_parallel_attn: expected null or 1 without new_decoder_architecture, got 2"},
        {"\"model_type\":\"falcon\",\"new_decoder_architecture\":true,\"num_kv_heads\":3",
         "key num_kv_heads: expected a divisor of num_attention_heads, got 3"},
        {"\"parallel_attn\":true", "key parallel_attn: expected false, got true"},
        {"\"num_key_value_heads\":3",
         "key num_key_value_heads: expected a divisor of num_attention_heads, got 3"},
        {"\"num_key_value_heads\":8",
         "key num_key_value_heads: expected an integer in [1, 4], got 8"},
        {"\"head_dim\":7", "key head_dim: expected an even number in [2, 4096], got 7"},
        {"\"head_dim\":\"8\"", "key head_dim: expected an integer in [2, 4096], got \"8\""},
        {"\"rms_norm_eps\":0", "key rms_norm_eps: expected a number in [1e-12, 1], got 0"},
        {"\"rope_theta\":-1", "key rope_theta: expected a number in [1, 1e+12], got -1"},
        {"\"max_position_embeddings\":0", "key max_position_embeddings: expected an integer in"},
        {"\"bos_token_id\":100", "key bos_token_id: expected an integer in [0, 99], got 100"},
        {"\"eos_token_id\":[1,100]",
         "key eos_token_id: expected ids below vocab_size, got [1,100]"},
        {"\"eos_token_id\":[1,2,3,4,5,6,7,8,9]", "key eos_token_id: expected at most 8 ids"},
        {"\"partial_rotary_factor\":0.5", "key partial_rotary_factor: expected 1, got 0.5"},
        {"\"rope_scaling\":{\"rope_type\":\"proportional\",\"factor\":4}",
         "rope_scaling: key rope_type: expected \"default\", \"linear\", \"llama3\", \"dynamic\", "
         "\"yarn\" or \"longrope\", got \"proportional\""},
        {"\"rope_scaling\":{\"type\":\"dynamic\"}", "rope_scaling: key factor: missing"},
        {"\"rope_scaling\":{\"type\":\"linear\",\"factor\":2,\"mrope_section\":[1]}",
         "rope_scaling: key mrope_section: unknown, with the value"},
        {"\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2,\"beta_fast\":0.5}",
         "key beta_fast: expected at least beta_slow, got 0.5"},
        {"\"rope_parameters\":{\"rope_type\":\"longrope\"}",
         "rope_parameters: key short_factor: missing"},
        {"\"rope_parameters\":{\"rope_type\":\"longrope\",\"short_factor\":[1,1,1]}",
         "key short_factor: expected a factor for each pair of rotated channels of a head, at most "
         "128, got"},
        {"\"rope_parameters\":{\"rope_type\":\"longrope\",\"short_factor\":[1,1,1,0]}",
         "key short_factor: expected numbers in [1e-06, 1e+06], got 0"},
        {"\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":0.5}",
         "key partial_rotary_factor: expected a number in [1, 1], got 0.5"},
        {"\"rope_parameters\":{\"rope_type\":\"default\",\"llama_4_scaling_beta\":0.1}",
         "key llama_4_scaling_beta: expected a number in [0, 0], got 0.1"},
        {"\"model_type\":\"granite\",\"logits_scaling\":0",
         "key logits_scaling: expected a number"},
        {"\"rope_scaling\":{\"type\":\"linear\"}", "rope_scaling: key factor: missing"},
        {"\"rope_scaling\":{\"type\":\"linear\",\"factor\":0.5}",
         "key factor: expected a number in [1, 1e+06], got 0.5"},
        {"\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":4,\"high_freq_"
         "factor\":4,"
         "\"original_max_position_embeddings\":8192}",
         "key high_freq_factor: expected more than low_freq_factor, got 4"},
        {"\"rope_scaling\":{\"type\":\"llama3\",\"factor\":8,\"low_freq_factor\":1,\"high_freq_"
         "factor\":4}",
         "key original_max_position_embeddings: missing"},
        {"\"rope_theta\":1e4,\"rope_parameters\":{\"rope_theta\":5e5}",
         "rope_parameters: key rope_theta: expected the same as rope_theta outside, got 500000.0"},
        {"\"rope_scaling\":{\"type\":\"linear\",\"factor\":2},\"rope_parameters\":{\"rope_type\":"
         "\"default\"}",
         "key rope_scaling: expected nothing beside rope_parameters"},
    };
    bl_model_config c;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(load(cases[i].rest, &c), BL_EINPUT);
        if (!strstr(bl_error_text(), cases[i].error))
            fail_msg("\"%s\" lacks \"%s\"", bl_error_text(), cases[i].error);
        assert_non_null(strstr(bl_error_text(), "/config.json: "));
    }
    assert_int_equal(load_text("{\"vocab_size\":5}", &c), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "key hidden_size: missing"));
    assert_int_equal(
        load_text(
            "{\"vocab_size\":5,\"hidden_size\":30,\"intermediate_size\":5,\"num_hidden_layers\":1,"
            "\"num_attention_heads\":4}",
            &c),
        BL_EINPUT);
    assert_non_null(
        strstr(bl_error_text(), "key hidden_size: expected a multiple of num_attention_heads"));
    assert_int_equal(load_text("{\"vocab_size\":1e3}", &c), BL_EINPUT);
    assert_int_equal(load_text("7", &c), BL_EINPUT);
    assert_int_equal(bl_model_config_load("/nonexistent", &c), BL_EINPUT);
}

/* Files of other architectures whose model_type was edited. */
static void test_keys_that_change_the_model(void **state)
{
    static const struct {
        const char *changes, *neutral;
    } cases[] = {
        {"\"sliding_window\":8", "\"sliding_window\":null"},
        {"\"use_sliding_window\":true",
         "\"use_sliding_window\":false,\"sliding_window\":4096,\"max_window_layers\":28"},
        {"\"attention_multiplier\":0.4", "\"attention_multiplier\":null"},
        {"\"residual_multiplier\":0.7", "\"residual_multiplier\":1.0"},
        {"\"embedding_multiplier\":6.0", "\"embedding_multiplier\":1"},
        {"\"logits_scaling\":0.2", "\"logits_scaling\":1.0"},
        {"\"attn_logit_softcapping\":50.0", "\"attn_logit_softcapping\":null"},
        {"\"final_logit_softcapping\":30", "\"final_logit_softcapping\":null"},
        {"\"partial_rotary_factor\":0.5", "\"partial_rotary_factor\":1.0"},
        {"\"layer_types\":[\"full_attention\",\"sliding_attention\"]",
         "\"layer_types\":[\"full_attention\",\"full_attention\"]"},
        {"\"layer_types\":\"sliding_attention\"", "\"layer_types\":[]"},
        {"\"no_rope_layers\":[1,0]", "\"no_rope_layers\":[1,1]"},
        {"\"per_layer_config\":{\"0\":{\"hidden_size\":8}}", "\"per_layer_config\":{}"},
        {"\"pruned_heads\":{\"1\":[0]}", "\"pruned_heads\":{}"},
        {"\"use_qk_norm\":true", "\"use_qk_norm\":false"},
        {"\"clip_qkv\":8.0", "\"clip_qkv\":null"},
        {"\"attention_dropout\":0.1", "\"attention_dropout\":0.0"},
        {"\"attention_out_bias\":true", "\"attention_out_bias\":false"},
        {"\"num_local_experts\":8", "\"num_local_experts\":null"},
        {"\"hidden_act\":7", "\"hidden_act\":\"silu\",\"use_cache\":true,\"unknown_key\":3"},
    };
    bl_model_config c;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char key[64];
        if (load(cases[i].changes, &c) != BL_EINPUT) fail_msg("accepted: %s", cases[i].changes);
        snprintf(key, sizeof key, "key %.*s: expected ", (int)strcspn(cases[i].changes + 1, "\""),
                 cases[i].changes + 1);
        if (!strstr(bl_error_text(), key)) fail_msg("\"%s\" lacks \"%s\"", bl_error_text(), key);
        if (load(cases[i].neutral, &c) != BL_OK) fail_msg("%s", bl_error_text());
    }
}

/* Falcon's keys choose among three layers; the description tells them apart. */
static void test_falcon_layers(void **state)
{
    static const struct {
        const char *keys;
        bool is_parallel, has_mlp_norm;
    } cases[] = {
        {"\"parallel_attn\":true", true, false},
        {"\"new_decoder_architecture\":true", true, true},
        {"\"new_decoder_architecture\":true,\"num_ln_in_parallel_attn\":1", true, false},
        {"\"parallel_attn\":false", false, true},
    };
    json_t *descriptions[BL_COUNT(cases)];
    bl_model_config c;
    char text[256];

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        snprintf(text, sizeof text, "\"model_type\":\"falcon\",\"num_kv_heads\":1,%s",
                 cases[i].keys);
        assert_int_equal(load(text, &c), BL_OK);
        assert_true(c.arch->has_layer_norm && c.arch->is_grouped && c.tie_word_embeddings);
        assert_int_equal(c.arch->is_parallel, cases[i].is_parallel);
        assert_int_equal(c.arch->vectors[BL_MLP_NORM].name != NULL, cases[i].has_mlp_norm);
        assert_int_equal(c.intermediate_size, 4 * c.hidden_size);
        assert_true(c.activation == BL_GELU && c.rms_norm_eps == 1e-5);
        assert_int_equal(bl_model_config_describe(&c, &descriptions[i]), BL_OK);
    }
    assert_false(json_equal(descriptions[0], descriptions[1]));
    assert_false(json_equal(descriptions[1], descriptions[3]));
    assert_true(json_equal(descriptions[0], descriptions[2])); /* one key head: the same model */
    for (size_t i = 0; i < BL_COUNT(cases); i++) json_decref(descriptions[i]);
}

/* Keys that only some families have, and what their absence means. */
static void test_families(void **state)
{
    static const struct {
        const char *rest;
        unsigned biases;
        int64_t window, n_kv_heads, head_dim;
        const char *windowed; /* a digit per layer */
    } cases[] = {
        {"\"attention_bias\":true", BL_ATTENTION_BIASES, 0, 4, 8, "000"},
        {"\"mlp_bias\":true", BL_MLP_BIASES, 0, 4, 8, "000"},
        {"\"model_type\":\"mistral\",\"num_key_value_heads\":2", 0, 4096, 2, 8, "111"},
        {"\"model_type\":\"mistral\",\"num_key_value_heads\":null,\"sliding_window\":null,"
         "\"head_dim\":null",
         0, 0, 4, 8, "000"},
        {"\"model_type\":\"mistral\",\"num_key_value_heads\":2,\"sliding_window\":8", 0, 8, 2, 8,
         "111"},
        {"\"model_type\":\"qwen2\",\"num_key_value_heads\":2,\"sliding_window\":99", 1u << BL_QKV,
         0, 2, 8, "000"},
        {"\"model_type\":\"qwen2\",\"num_key_value_heads\":2,\"use_sliding_window\":true,"
         "\"max_window_layers\":1",
         1u << BL_QKV, 4096, 2, 8, "011"},
        {"\"model_type\":\"qwen2\",\"num_key_value_heads\":2,\"use_sliding_window\":true",
         1u << BL_QKV, 4096, 2, 8, "000"},
        {"\"model_type\":\"qwen3\",\"num_key_value_heads\":2,\"use_sliding_window\":true,"
         "\"sliding_window\":5,\"attention_bias\":true,\"layer_types\":[\"sliding_attention\","
         "\"full_attention\",\"sliding_attention\"]",
         BL_ATTENTION_BIASES, 5, 2, 128, "101"},
        {"\"model_type\":\"qwen3_moe\",\"num_key_value_heads\":2,\"use_sliding_window\":true,"
         "\"sliding_window\":5,\"max_window_layers\":1",
         0, 5, 2, 8, "111"},
        {"\"model_type\":\"qwen3_moe\",\"num_key_value_heads\":2,\"sliding_window\":5", 0, 0, 2, 8,
         "000"},
        {"\"model_type\":\"mixtral\",\"num_key_value_heads\":2,\"sliding_window\":5", 0, 5, 2, 8,
         "111"},
        {"\"model_type\":\"gpt_oss\",\"num_key_value_heads\":2", 51, 128, 2, 64, "101"},
        {"\"model_type\":\"seed_oss\",\"num_key_value_heads\":2,\"head_dim\":null", 1u << BL_QKV, 0,
         2, 8, "000"},
        {"\"model_type\":\"seed_oss\",\"num_key_value_heads\":2,\"attention_bias\":false,"
         "\"attention_out_bias\":true,\"mlp_bias\":true,\"attention_dropout\":0.1",
         1u << BL_OUT | BL_MLP_BIASES, 0, 2, 128, "000"},
        {"\"model_type\":\"falcon\",\"num_kv_heads\":4", 0, 0, 1, 8, "000"},
        {"\"model_type\":\"falcon\",\"num_kv_heads\":2,\"new_decoder_architecture\":true,"
         "\"bias\":true,\"multi_query\":true,\"hidden_dropout\":0.1",
         15, 0, 2, 8, "000"},
        {"\"model_type\":\"falcon\",\"multi_query\":false,\"parallel_attn\":false", 0, 0, 4, 8,
         "000"},
    };
    bl_model_config c;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        if (load(cases[i].rest, &c) != BL_OK) fail_msg("%s: %s", cases[i].rest, bl_error_text());
        assert_int_equal(c.biases, cases[i].biases);
        assert_int_equal(c.n_kv_heads, cases[i].n_kv_heads);
        assert_int_equal(c.head_dim, cases[i].head_dim);
        for (int64_t l = 0; l < 3; l++)
            assert_int_equal(bl_windows_of_layer(&c.windows, l),
                             cases[i].windowed[l] == '1' ? cases[i].window : 0);
    }
}

static json_t *described(const char *rest)
{
    bl_model_config c;
    json_t *out;

    assert_int_equal(load(rest, &c), BL_OK);
    assert_int_equal(bl_model_config_describe(&c, &out), BL_OK);
    return out;
}

/* What changes a result changes the description; what Llama lacks is not in Llama's. */
static void test_descriptions(void **state)
{
    static const char *const texts[] = {
        "",
        "\"attention_bias\":true",
        "\"mlp_bias\":true",
        "\"model_type\":\"mistral\",\"num_key_value_heads\":4,\"sliding_window\":null",
        "\"model_type\":\"mistral\",\"num_key_value_heads\":4,\"sliding_window\":8",
        ("\"model_type\":\"qwen2\",\"num_key_value_heads\":4,\"sliding_window\":8,"
         "\"use_sliding_window\":true,\"max_window_layers\":1")};
    (void)state;

    for (size_t i = 0; i < BL_COUNT(texts); i++)
        for (size_t k = 0; k <= i; k++) {
            json_t *a = described(texts[i]), *b = described(texts[k]);
            assert_int_equal(json_equal(a, b), i == k);
            json_decref(a), json_decref(b);
        }
    json_t *llama = described("");
    assert_int_equal(json_object_size(llama), 12);
    json_decref(llama);
}

static void test_presets(void **state)
{
    /* Parameter counts as their makers publish them. */
    static const struct {
        const char *name;
        int64_t n_params;
    } cases[] = {
        {"llama2-7b", 6738415616},
        {"llama2-13b", 13015864320},
        {"llama2-70b", 68976648192},
        {"llama3-8b", 8030261248},
        {"llama3.1-8b", 8030261248},
        {"llama3.1-70b", 70553706496},
        {"llama3-70b", 70553706496},
        {"llama3.1-405b", 405853388800},
        {"llama3.2-1b", 1235814400},
        {"llama3.2-3b", 3212749824},
        {"llama3.3-70b", 70553706496},
        {"mistral-7b-v0.3", 7248023552},
        {"mistral-large-123b", 122610069504},
        {"mistral-medium-3.5-128b", 125025988608}, /* without its vision tower */
        {"qwen2.5-7b", 7615616512},
        {"qwen2.5-32b", 32763876352},
        {"qwen2.5-72b", 72706203648},
        {"qwen3-8b", 8190735360},
        {"qwen3-14b", 14768307200},
        {"qwen3-32b", 32762123264},
        {"qwen3-30b-a3b", 30532122624},
        {"qwen3-235b-a22b", 235093634560},
        {"mixtral-8x7b", 46702792704},
        {"mixtral-8x22b", 140630071296},
        {"gpt-oss-20b", 20914757184},
        {"gpt-oss-120b", 116829156672},
        {"seed-oss-36b", 36151104512},
        {"falcon-7b", 6921720704},
        {"falcon-40b", 41303293952},
        {"falcon-180b", 178557088768},
        {"phi3-mini", 3821079552},
        {"phi3-medium", 13960238080},
        {"phi4", 14659507200},
        {"olmo2-7b", 7298617344},
        {"olmo2-13b", 13716198400},
        {"olmo2-32b", 32234279936},
    };
    bl_model_config c;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(bl_model_config_preset(cases[i].name, &c), BL_OK);
        assert_int_equal(bl_model_config_n_params(&c), cases[i].n_params);
        assert_int_equal(c.n_heads % c.n_kv_heads, 0);
    }
    assert_int_equal(bl_model_config_preset("llama3.1-405b", &c), BL_OK);
    assert_true(c.rope_kind == BL_ROPE_LLAMA3 && c.rope_factor == 8 && c.rope_theta == 5e5);
    assert_int_equal(c.head_dim, 128);
    assert_int_equal(bl_model_config_preset("llama3.2-1b", &c), BL_OK);
    assert_true(c.tie_word_embeddings && c.rope_factor == 32);
    assert_int_equal(bl_model_config_preset("llama-3.2-1b", &c), BL_OK);
    assert_true(c.tie_word_embeddings && c.rope_factor == 32);
    assert_int_equal(bl_model_config_preset("llama-9", &c), BL_EUSAGE);
    assert_int_equal(bl_model_config_preset("llama9", &c), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "llama3.1-405b, "));
}

/* The frequencies of transformers' _compute_llama3_parameters, evaluated in Python's doubles. Both
 * sides are a few correctly rounded operations and one pow of at most 1 ulp: 8 ulp, 1.8e-15
 * relative, covers them. */
static void test_rope_frequencies(void **state)
{
    static const struct {
        const char *preset;
        int pair;
        double inverse;
    } cases[] = {
        {"llama3.1-405b", 0, 1.0},
        {"llama3.1-405b", 1, 0.8146172338565447},
        {"llama3.1-405b", 28, 0.0032114459947525913},
        {"llama3.1-405b", 29, 0.002166570763503359},
        {"llama3.1-405b", 32, 0.0005248461609929547},
        {"llama3.1-405b", 34, 0.00017850781276799638},
        {"llama3.1-405b", 35, 9.556212353964683e-05},
        {"llama3.1-405b", 63, 3.068925988914511e-07},
        {"llama3.2-1b", 14, 0.0032114459947525913},
        {"llama3.2-1b", 15, 0.001290547928209264},
        {"llama3.2-1b", 17, 9.70828780262767e-05},
        {"llama3.2-1b", 18, 1.9461638184831125e-05},
        {"llama3.2-1b", 31, 9.418306725434909e-08},
        {"llama2-7b", 1, 0.8659643233600653},
    };
    double inverse[64];
    bl_model_config c;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(bl_model_config_preset(cases[i].preset, &c), BL_OK);
        bl_model_rope_inv_freq(&c, false, inverse);
        double error = fabs(inverse[cases[i].pair] / cases[i].inverse - 1);
        if (!(error <= 1.8e-15))
            fail_msg("%s pair %d: %.17g", cases[i].preset, cases[i].pair, inverse[cases[i].pair]);
    }
    assert_int_equal(load("\"rope_scaling\":{\"type\":\"linear\",\"factor\":4}", &c), BL_OK);
    bl_model_rope_inv_freq(&c, false, inverse);
    assert_true(inverse[0] == 0.25);
    assert_true(fabs(inverse[2] * 4 * 100 - 1) <= 1.8e-15); /* 10000^(-4/8) = 1/100 */
}

static void put_k_proj(int64_t rows, int64_t cols)
{
    bl_stored_tensor_spec spec = {"model.layers.0.self_attn.k_proj.weight", BL_U8, 2, {rows, cols}};
    bl_safetensors_writer *writer;
    char path[80], zeros[4096] = {0};

    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    assert_int_equal(bl_safetensors_create(path, &spec, 1, NULL, 0, &writer), BL_OK);
    assert_int_equal(bl_safetensors_writer_append(writer, zeros, (size_t)(rows * cols)), BL_OK);
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_OK);
}

static void test_kv_heads_follow_k_proj(void **state)
{
    static const struct {
        int64_t rows, n_kv_heads; /* 0: refused */
    } cases[] = {{16, 2}, {32, 4}, {8, 1}, {24, 0}, {12, 0}, {64, 0}, {0, 0}};
    bl_model_config c;
    bl_hf_model *model;

    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(load("\"num_key_value_heads\":4", &c), BL_OK);
        put_k_proj(cases[i].rows, 32);
        assert_int_equal(bl_hf_open(folder, &model), BL_OK);
        bl_status st = bl_model_config_fit(&c, model);
        assert_int_equal(st, cases[i].n_kv_heads ? BL_OK : BL_EINPUT);
        assert_int_equal(c.n_kv_heads, cases[i].n_kv_heads ? cases[i].n_kv_heads : 4);
        bl_hf_close(model);
    }
}

static void test_real_config(void **state)
{
    const char *data = getenv("BALLAST_TEST_DATA");
    bl_model_config c;
    char path[512];

    (void)state;
    TEST_SKIP_WITHOUT_DATA(data);
    snprintf(path, sizeof path, "%s/models/stories260K", data);
    assert_int_equal(bl_model_config_load(path, &c), BL_OK);
    assert_int_equal(c.n_layers, 5);
    assert_int_equal(c.n_kv_heads, 4);
    assert_int_equal(c.head_dim, 8);
    assert_true(c.tie_word_embeddings);
    assert_int_equal(bl_model_config_n_params(&c),
                     260032); /* its safetensors holds 1,040,128 bytes of F32 */
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_big_integers),
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_spellings),
        cmocka_unit_test(test_refusals),
        cmocka_unit_test(test_presets),
        cmocka_unit_test(test_rope_frequencies),
        cmocka_unit_test(test_kv_heads_follow_k_proj),
        cmocka_unit_test(test_families),
        cmocka_unit_test(test_falcon_layers),
        cmocka_unit_test(test_descriptions),
        cmocka_unit_test(test_real_config),
        cmocka_unit_test(test_keys_that_change_the_model),
    };
    return cmocka_run_group_tests(tests, create_folder, remove_folder);
}
