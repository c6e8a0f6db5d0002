/* SPDX-License-Identifier: Apache-2.0 */
/* config.json of a text model inside a larger one: Mistral 3. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "arch/config.h"
#include "base/files.h"
#include "base/sizes.h"

static char folder[] = "/tmp/ballast-config-XXXXXX";

/* config.json = {text_config: {sizes, then `text`}, then `rest`}, loaded. */
static bl_status load(const char *text, const char *rest, bl_model_config *config)
{
    char json[2048], path[64];

    snprintf(path, sizeof path, "%s/config.json", folder);
    snprintf(json, sizeof json,
             "{\"model_type\":\"mistral3\",\"image_token_index\":10,\"vision_config\":{},"
             "\"text_config\":{\"vocab_size\":8,\"hidden_size\":4,\"intermediate_size\":6,"
             "\"num_hidden_layers\":1,\"num_attention_heads\":2,\"num_key_value_heads\":1,"
             "\"head_dim\":2%s}%s}",
             text, rest);
    assert_int_equal(bl_file_write_atomic(path, json, strlen(json)), BL_OK);
    return bl_model_config_load(folder, config);
}

static void test_text_models(void **state)
{
    bl_model_config c;
    (void)state;

    assert_int_equal(load(",\"model_type\":\"ministral3\"", "", &c), BL_OK);
    assert_true(c.query_beta == 0.1 && c.windows.tokens == 0);
    assert_string_equal(c.arch->layers, "language_model.model.layers");
    assert_string_equal(bl_arch_peft_modules(c.arch).layers, "model.language_model.layers");
    assert_int_equal(load("", "", &c), BL_OK); /* transformers' default is Mistral */
    assert_true(c.query_beta == 0 && c.windows.tokens == 4096);
    assert_string_equal(c.arch->head, "language_model.lm_head");
}

static void test_rejections(void **state)
{
    static const struct {
        const char *text, *rest, *error;
    } cases[] = {
        {",\"model_type\":\"llama\"", "",
         "/config.json: text_config: key model_type: expected \"mistral\" or \"ministral3\", got"},
        {",\"final_logit_softcapping\":30", "",
         "/config.json: text_config: key final_logit_softcapping: expected null, got 30"},
        {",\"rope_parameters\":{\"rope_type\":\"default\",\"llama_4_scaling_beta\":0.1}", "",
         "text_config: rope_parameters: key llama_4_scaling_beta: expected a number in [0, 0]"},
        {"", ",\"tie_word_embeddings\":7", "/config.json: key tie_word_embeddings: expected"},
        {"", ",\"num_experts\":8", "/config.json: key num_experts: expected null, got 8"},
    };
    bl_model_config c;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(load(cases[i].text, cases[i].rest, &c), BL_EINPUT);
        if (!strstr(bl_error_text(), cases[i].error))
            fail_msg("\"%s\" lacks \"%s\"", bl_error_text(), cases[i].error);
    }
}

static void put_tensors(bool has_head)
{
    const bl_stored_tensor_spec specs[] = {
        {"language_model.model.embed_tokens.weight", BL_F32, 2, {8, 4}},
        {"language_model.lm_head.weight", BL_F32, 2, {8, 4}},
    };
    const float zeros[64] = {0};
    size_t n = has_head ? 2 : 1;
    bl_safetensors_writer *writer;
    char path[80];

    snprintf(path, sizeof path, "%s/model.safetensors", folder);
    assert_int_equal(bl_safetensors_create(path, specs, n, NULL, 0, &writer), BL_OK);
    assert_int_equal(bl_safetensors_writer_append(writer, zeros, n * 32 * sizeof *zeros), BL_OK);
    assert_int_equal(bl_safetensors_writer_commit(writer), BL_OK);
}

/* The key of the whole model counts, not the text model's. Without it (transformers 4 wrote none) a
 * stored head is not tied, an absent one is. */
static void test_tied_heads(void **state)
{
    static const struct {
        const char *text, *rest;
        bool has_head, is_tied;
    } cases[] = {
        {"", "", true, false},
        {"", "", false, true},
        {",\"tie_word_embeddings\":false", "", false, true},
        {",\"tie_word_embeddings\":true", "", true, false},
        {"", ",\"tie_word_embeddings\":true", true, true},
        {",\"tie_word_embeddings\":true", ",\"tie_word_embeddings\":false", true, false},
    };
    bl_model_config c;
    bl_hf_model *model;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        assert_int_equal(load(cases[i].text, cases[i].rest, &c), BL_OK);
        put_tensors(cases[i].has_head);
        assert_int_equal(bl_hf_open(folder, &model), BL_OK);
        assert_int_equal(bl_model_config_fit(&c, model), BL_OK);
        if (c.tie_word_embeddings != cases[i].is_tied) fail_msg("case %zu", i);
        bl_hf_close(model);
    }
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
        cmocka_unit_test(test_text_models),
        cmocka_unit_test(test_rejections),
        cmocka_unit_test(test_tied_heads),
    };
    return cmocka_run_group_tests(tests, create_folder, remove_folder);
}
