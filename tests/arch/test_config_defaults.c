/* SPDX-License-Identifier: Apache-2.0 */
/* Keys of config.json that are absent, or that act in training only. */
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
static bl_status load(const char *rest, bl_model_config *config)
{
    char text[2048], path[64];

    snprintf(path, sizeof path, "%s/config.json", folder);
    snprintf(text, sizeof text,
             "{\"vocab_size\":100,\"hidden_size\":32,\"intermediate_size\":50,"
             "\"num_hidden_layers\":3,\"num_attention_heads\":4,%s}",
             rest);
    assert_int_equal(bl_file_write_atomic(path, text, strlen(text)), BL_OK);
    return bl_model_config_load(folder, config);
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
        cmocka_unit_test(test_default_rope),
        cmocka_unit_test(test_partial_rotary),
    };
    return cmocka_run_group_tests(tests, create_folder, remove_folder);
}
