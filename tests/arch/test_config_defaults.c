/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of config.json that are absent, or that act in training only. */
#include <math.h>
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>
#include <jansson.h>

#include "arch/config.h"
#include "base/files.h"
#include "base/sizes.h"

static char folder[] = "/tmp/ballast-config-XXXXXX";

void __wrap_bl_log_warning(const char *format, ...);

static char warnings[1024]; /* one after the other */

void __wrap_bl_log_warning(const char *format, ...)
{
    size_t used = strlen(warnings);
    va_list args;

    va_start(args, format);
    vsnprintf(warnings + used, sizeof warnings - used, format, args);
    va_end(args);
}

/* config.json = {sizes, then `rest`}, loaded. */
static bl_status load_layers(int n_layers, const char *rest, bl_model_config *config)
{
    char text[2048], path[64];

    snprintf(path, sizeof path, "%s/config.json", folder);
    snprintf(text, sizeof text,
             "{\"vocab_size\":100,\"hidden_size\":32,\"intermediate_size\":50,"
             "\"num_hidden_layers\":%d,\"num_attention_heads\":4,%s}",
             n_layers, rest);
    assert_int_equal(bl_file_write_atomic(path, text, strlen(text)), BL_OK);
    return bl_model_config_load(folder, config);
}

static bl_status load(const char *rest, bl_model_config *config)
{
    return load_layers(3, rest, config);
}

static void test_dropouts_are_named(void **state)
{
    bl_model_config c;
    (void)state;

    warnings[0] = '\0';
    assert_int_equal(load("\"model_type\":\"seed_oss\",\"num_key_value_heads\":2,"
                          "\"attention_dropout\":0.1,\"residual_dropout\":0.2",
                          &c),
                     BL_OK);
    assert_non_null(strstr(warnings, "attention_dropout 0.1 is ignored: transformers applies it"));
    assert_non_null(strstr(warnings, "residual_dropout 0.2 is ignored"));
    warnings[0] = '\0';
    assert_int_equal(load("\"model_type\":\"seed_oss\",\"num_key_value_heads\":2,"
                          "\"attention_dropout\":0.0",
                          &c),
                     BL_OK);
    assert_string_equal(warnings, "");
}

/* Unknown keys: an error where the name tells of the forward pass, else one warning with all names;
 * silent with neutral values, and when they begin with '_'. */
static void test_unknown_keys(void **state)
{
    static const char *const refused[] = {"\"use_linear_attention\":true",
                                          "\"attn_gate\":1",
                                          "\"rope_percent\":0.5",
                                          "\"post_norm\":true",
                                          "\"logits_cap\":30.0",
                                          "\"value_scale\":2",
                                          "\"embedding_bias\":true",
                                          "\"expert_layers\":[1]",
                                          "\"act_fn\":\"gelu\"",
                                          "\"window_tokens\":128",
                                          "\"residual_in_fp64\":1",
                                          "\"moe_layers\":[0]",
                                          "\"block_type\":\"mamba2\"",
                                          "\"sinks\":true",
                                          "\"hidden_mult\":2",
                                          "\"vision_lora\":{\"r\":256}",
                                          "\"kv_lora_rank\":512",
                                          "\"is_causal\":false",
                                          "\"use_rope\":false",
                                          "\"full_attn_mod\":2",
                                          "\"mtp_gate\":\"on\"",
                                          "\"compression_config\":{\"a\":1}",
                                          "\"attention_chunks\":[0]"};
    static const char *const silent[] = {
        "\"use_linear_attention\":false,\"post_norm\":null,\"moe_layers\":[],\"act_fn\":\"\"",
        "\"_model_name_or_path\":\"x\",\"_sliding_window_pattern\":6",
        "\"is_causal\":true,\"use_rope\":true,\"full_attn_mod\":1,\"interpolate_factor\":1",
        "\"auto_map\":{\"AutoConfig\":\"a.B\"},\"use_flash_attention\":true,\"pad_token_id\":3"};
    bl_model_config c;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(refused); i++) {
        char key[64];
        if (load(refused[i], &c) != BL_EINPUT) fail_msg("accepted: %s", refused[i]);
        snprintf(key, sizeof key, "config.json: key %.*s: ", (int)strcspn(refused[i] + 1, "\""),
                 refused[i] + 1);
        if (!strstr(bl_error_text(), key)) fail_msg("\"%s\" lacks \"%s\"", bl_error_text(), key);
    }
    warnings[0] = '\0';
    for (size_t i = 0; i < BL_COUNT(silent); i++) assert_int_equal(load(silent[i], &c), BL_OK);
    assert_string_equal(warnings, "");
    assert_int_equal(load("\"surprise\":1,\"_b\":2,\"cache_dtype\":\"fp8\",\"ffn_dropout\":0.1,"
                          "\"attn_implementation_internal\":null,\"c\":0",
                          &c),
                     BL_OK);
    assert_non_null(
        strstr(warnings, "no such keys: surprise, cache_dtype, ffn_dropout, c; if one"));
}

/* Phi-3's, inside RoPE's keys or, as transformers 4 writes it, outside; inside goes first. */
static void test_partial_rotary(void **state)
{
#define PHI "\"model_type\":\"phi3\",\"head_dim\":16,"
    static const struct {
        const char *keys;
        int64_t rotary_dim;
    } cases[] = {
        {PHI "\"rope_theta\":1e4", 0},
        {PHI "\"partial_rotary_factor\":0.75", 12},
        {PHI "\"partial_rotary_factor\":0.8", 12}, /* 12.8 */
        {PHI "\"rope_scaling\":{\"rope_type\":\"default\"},\"partial_rotary_factor\":0.5", 8},
        {PHI "\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":0.5}", 8},
        {PHI "\"rope_parameters\":{\"rope_type\":\"default\",\"partial_rotary_factor\":1.0},"
             "\"partial_rotary_factor\":0.5",
         0},
    };
    static const struct {
        const char *keys, *error;
    } rejected[] = {
        {PHI "\"partial_rotary_factor\":0.6875",
         "key partial_rotary_factor: expected an even number of head_dim channels, got 0.6875"},
        {PHI "\"partial_rotary_factor\":1.5",
         "key partial_rotary_factor: expected a number in [0, 1], got 1.5"},
        {PHI "\"rope_parameters\":{\"rope_type\":\"longrope\",\"partial_rotary_factor\":0.5,"
             "\"short_factor\":[1,1,1,1,1,1,1,1],\"long_factor\":[1,1,1,1]}",
         "key short_factor: expected a factor for each pair of rotated channels of a head"},
        {PHI "\"rope_scaling\":{\"type\":\"yarn\",\"factor\":2}",
         "key rope_scaling: expected the type \"default\" or \"longrope\", got {"},
    };
    bl_model_config c;
    json_t *whole, *part;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(load(cases[i].keys, &c), BL_OK);
        if (c.rotary_dim != cases[i].rotary_dim) fail_msg("%s", cases[i].keys);
        if (i == 0) assert_int_equal(bl_model_config_describe(&c, &whole), BL_OK);
        if (i == 1) assert_int_equal(bl_model_config_describe(&c, &part), BL_OK);
    }
    assert_false(json_equal(whole, part));
    json_decref(whole), json_decref(part);
    for (size_t i = 0; i < BL_COUNT(rejected); i++) {
        assert_int_equal(load(rejected[i].keys, &c), BL_EINPUT);
        if (!strstr(bl_error_text(), rejected[i].error))
            fail_msg("\"%s\" lacks \"%s\"", bl_error_text(), rejected[i].error);
    }
#undef PHI
}

/* A Ministral 3 without RoPE's keys has transformers' default, and none of it beside such keys. */
static void test_default_rope(void **state)
{
    static const char *const full =
        "\"model_type\":\"ministral3\",\"num_key_value_heads\":2,\"rope_parameters\":{"
        "\"rope_type\":\"yarn\",\"rope_theta\":1e6,\"factor\":16,\"beta_fast\":32,\"beta_slow\":1,"
        "\"original_max_position_embeddings\":16384,\"mscale\":1,\"mscale_all_dim\":1,"
        "\"llama_4_scaling_beta\":0.1}";
    bl_model_config absent, given;
    json_t *a, *b;
    (void)state;

    assert_int_equal(load("\"model_type\":\"ministral3\",\"num_key_value_heads\":2", &absent),
                     BL_OK);
    assert_int_equal(load(full, &given), BL_OK);
    assert_int_equal(bl_model_config_describe(&absent, &a), BL_OK);
    assert_int_equal(bl_model_config_describe(&given, &b), BL_OK);
    assert_true(json_equal(a, b));
    json_decref(a);
    json_decref(b);
    assert_int_equal(
        load("\"model_type\":\"ministral3\",\"num_key_value_heads\":2,\"rope_scaling\":{"
             "\"rope_type\":\"linear\",\"factor\":2}",
             &given),
        BL_OK);
    assert_int_equal(given.rope_kind, BL_ROPE_LINEAR);
    assert_true(given.rope_theta == 1e4 && given.query_beta == 0);
    assert_true(given.rope_attention_factor == 0 && given.rope_beta_fast == 0);
    assert_int_equal(load("\"model_type\":\"ministral3\",\"num_key_value_heads\":2,"
                          "\"rope_theta\":1e4",
                          &given),
                     BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "key rope_theta: expected rope_parameters beside it"));
}

#define QWEN3_MOE "\"model_type\":\"qwen3_moe\",\"num_key_value_heads\":2"
#define MIXTRAL   "\"model_type\":\"mixtral\",\"num_key_value_heads\":2"
#define MOE_SIZES ",\"moe_intermediate_size\":20,\"num_experts_per_tok\":3"

#define GPT_OSS "\"model_type\":\"gpt_oss\",\"num_key_value_heads\":2"
#define YARN                                                                                       \
    ",\"rope_scaling\":{\"rope_type\":\"yarn\",\"factor\":8,\"truncate\":false,"                   \
    "\"original_max_position_embeddings\":64}"

/* Defaults, second spellings in published files, theta without RoPE's keys and beside them. */
static void test_gpt_oss(void **state)
{
    static const char *const rejected[][2] = {
        {",\"experts_per_token\":3", "key experts_per_token: expected the value of num_experts"},
        {YARN ",\"initial_context_length\":32", "key initial_context_length: expected the value"},
        {",\"swiglu_limit\":0", "key swiglu_limit"},
        {",\"swiglu_beta\":1.0", "swiglu_beta"},
        {",\"norm_topk_prob\":\"x\",\"router_jitter_noise\":0.1", "router_jitter_noise"}};
    bl_model_config c;
    (void)state;

    assert_int_equal(load(GPT_OSS, &c), BL_OK);
    assert_true(c.n_experts == 128 && c.top_k == 4 && c.expert_size == c.intermediate_size);
    assert_true(c.is_top_k_normed && c.activation == BL_SWIGLU_CLAMPED);
    assert_true(c.swiglu_alpha == 1.702 && c.swiglu_limit == 7);
    assert_true(c.rope_kind == BL_ROPE_YARN && c.rope_is_exact && c.rope_factor == 32);
    assert_true(c.rope_theta == 150000 && c.rope_original_max_positions == 4096);
    assert_true(fabs(c.rope_attention_factor - (0.1 * log(32) + 1)) < 1e-15);
    assert_int_equal(load(GPT_OSS YARN ",\"experts_per_token\":2,\"num_experts_per_tok\":2,"
                                       "\"initial_context_length\":64,\"swiglu_limit\":2.5",
                          &c),
                     BL_OK);
    assert_true(c.rope_theta == 150000 && c.rope_is_exact && c.rope_factor == 8);
    assert_true(c.top_k == 2 && c.swiglu_limit == 2.5);
    assert_int_equal(load(GPT_OSS YARN ",\"rope_theta\":5e5", &c), BL_OK);
    assert_true(c.rope_theta == 5e5);
    assert_int_equal(load(GPT_OSS ",\"attention_bias\":false,\"sliding_window\":5,\"layer_types\":["
                                  "\"full_attention\",\"sliding_attention\",\"full_attention\"]",
                          &c),
                     BL_OK);
    assert_int_equal(c.biases, 1 << BL_EXPERTS_GATE_UP | 1 << BL_EXPERTS_DOWN);
    for (int64_t l = 0; l < 3; l++)
        assert_int_equal(bl_windows_of_layer(&c.windows, l), l == 1 ? 5 : 0);
    for (size_t i = 0; i < BL_COUNT(rejected); i++) {
        char text[512];
        snprintf(text, sizeof text, GPT_OSS "%s", rejected[i][0]);
        assert_int_equal(load(text, &c), BL_EINPUT);
        if (!strstr(bl_error_text(), rejected[i][1])) fail_msg("%s: %s", text, bl_error_text());
    }
}

/* Layers of a mixture without experts, by number or by step. */
static void test_dense_layers(void **state)
{
    static const struct {
        const char *rest;
        unsigned dense; /* bit l: layer l of 4 */
    } cases[] = {
        {"", 0},
        {",\"mlp_only_layers\":[2,0,7]", 1 << 2 | 1 << 0},
        {",\"decoder_sparse_step\":2", 1 << 0 | 1 << 2},
        {",\"decoder_sparse_step\":3,\"mlp_only_layers\":[2]", 15},
    };
    char text[256];
    bl_model_config c;
    json_t *description;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        snprintf(text, sizeof text, QWEN3_MOE "%s", cases[i].rest);
        assert_int_equal(load_layers(4, text, &c), BL_OK);
        size_t n_dense = 0;
        for (int64_t l = 0; l < 4; l++) {
            bool is_dense = bl_model_kind(&c, l) == BL_LAYER_DENSE;
            assert_int_equal(is_dense, cases[i].dense >> l & 1);
            n_dense += is_dense;
        }
        assert_int_equal(bl_model_layers_of(&c, BL_LAYER_DENSE), n_dense);
        assert_int_equal(bl_model_config_describe(&c, &description), BL_OK);
        assert_int_equal(json_array_size(json_object_get(description, "dense_layers")), n_dense);
        json_decref(description);
    }
    assert_int_equal(load_layers(1025, QWEN3_MOE ",\"mlp_only_layers\":[1024]", &c), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "key mlp_only_layers: expected layers below 1024"));
}

/* Experts: both spellings of their number, defaults, and what is not computed. */
static void test_experts(void **state)
{
    static const struct {
        const char *rest;
        int64_t n_experts, top_k, expert_size;
        bool is_normed;
    } cases[] = {
        {QWEN3_MOE, 128, 8, 768, false},
        {QWEN3_MOE MOE_SIZES ",\"num_experts\":6,\"norm_topk_prob\":true", 6, 3, 20, true},
        {QWEN3_MOE MOE_SIZES ",\"num_local_experts\":6,\"num_experts\":6", 6, 3, 20, false},
        {QWEN3_MOE ",\"decoder_sparse_step\":1,\"mlp_only_layers\":[],\"router_aux_loss_coef\":0.1,"
                   "\"output_router_logits\":false",
         128, 8, 768, false},
        {MIXTRAL, 8, 2, 50, true},
        {MIXTRAL ",\"num_local_experts\":4,\"router_jitter_noise\":0.0", 4, 2, 50, true},
        {MIXTRAL ",\"moe_intermediate_size\":20", 8, 2, 50, true},
        {QWEN3_MOE MOE_SIZES ",\"num_experts\":null,\"num_local_experts\":6", 6, 3, 20, false},
    };
    static const struct {
        const char *rest, *text;
    } rejected[] = {
        {QWEN3_MOE ",\"decoder_sparse_step\":0", "key decoder_sparse_step"},
        {QWEN3_MOE ",\"mlp_only_layers\":[\"0\"]", "key mlp_only_layers: expected numbers"},
        {QWEN3_MOE ",\"output_router_logits\":true", "key output_router_logits: expected false"},
        {QWEN3_MOE ",\"num_experts\":6,\"num_local_experts\":7", "key num_local_experts"},
        {QWEN3_MOE ",\"num_experts\":6", "key num_experts_per_tok: expected at most the 6"},
        {QWEN3_MOE ",\"num_experts_per_tok\":0", "key num_experts_per_tok"},
        {QWEN3_MOE ",\"n_routed_experts\":6", "key n_routed_experts"},
        {QWEN3_MOE ",\"hidden_act\":\"gelu\"", "key hidden_act"},
        {MIXTRAL ",\"router_jitter_noise\":0.1", "key router_jitter_noise: expected 0: noise"},
        {MIXTRAL ",\"n_shared_experts\":1", "n_shared_experts"},
        {QWEN3_MOE ",\"layer_types\":[\"sliding_attention\"]", "key layer_types"},
    };
    bl_model_config c, other;
    json_t *a, *b;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        if (load(cases[i].rest, &c) != BL_OK) fail_msg("%s: %s", cases[i].rest, bl_error_text());
        assert_int_equal(c.n_experts, cases[i].n_experts);
        assert_int_equal(c.top_k, cases[i].top_k);
        assert_int_equal(c.expert_size, cases[i].expert_size);
        assert_int_equal(c.is_top_k_normed, cases[i].is_normed);
    }
    for (size_t i = 0; i < BL_COUNT(rejected); i++) {
        assert_int_equal(load(rejected[i].rest, &c), BL_EINPUT);
        if (!strstr(bl_error_text(), rejected[i].text))
            fail_msg("%s: %s", rejected[i].rest, bl_error_text());
    }
    assert_int_equal(load_layers(2048, QWEN3_MOE, &c), BL_OK);
    assert_int_equal(load_layers(2049, QWEN3_MOE, &c), BL_EINPUT);
    assert_non_null(strstr(bl_error_text(), "2049 layers of 128 experts; expected at most 262144"));
    assert_int_equal(load(QWEN3_MOE, &c), BL_OK);
    assert_int_equal(load(QWEN3_MOE ",\"norm_topk_prob\":true", &other), BL_OK);
    assert_int_equal(bl_model_config_describe(&c, &a), BL_OK);
    assert_int_equal(bl_model_config_describe(&other, &b), BL_OK);
    assert_int_equal(json_integer_value(json_object_get(a, "num_experts")), 128);
    assert_false(json_equal(a, b));
    json_decref(a);
    json_decref(b);
}

static int create_folder(void **state)
{
    (void)state;
    return mkdtemp(folder) ? 0 : -1;
}

static int remove_folder(void **state)
{
    (void)state;
    return bl_tree_remove(folder) == BL_OK ? 0 : -1;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_dropouts_are_named),
        cmocka_unit_test(test_unknown_keys),
        cmocka_unit_test(test_default_rope),
        cmocka_unit_test(test_partial_rotary),
        cmocka_unit_test(test_experts),
        cmocka_unit_test(test_gpt_oss),
        cmocka_unit_test(test_dense_layers),
    };
    return cmocka_run_group_tests(tests, create_folder, remove_folder);
}
