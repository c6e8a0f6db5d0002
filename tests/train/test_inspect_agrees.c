/* SPDX-License-Identifier: Apache-2.0 */
/* `ballast inspect` rejects a model or an adapter for the reason for which `ballast train` does, in
 * the same words, after it has listed the contents. */
#include "runs.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"

enum { EXIT_INPUT = 3 };

static const double SOON_S = 60;

/* The last line of stderr, after the exit code is checked. The caller frees it. */
static char *run(const char *command, const golden_args *args, int code)
{
    runs_child child = {0};

    runs_start(&child, command, args);
    int found = runs_wait(&child, SOON_S);
    char *log = runs_read(child.log, NULL), *line = log;
    if (found != code) fail_msg("%s: exit code %d: %s", command, found, log);
    for (char *at = log; (at = strchr(at, '\n')) != NULL && at[1];) line = ++at;
    char *copy = strdup(line);
    free(log);
    return copy;
}

/* inspect's exit code and last line of error. */
static char *run_inspect(const char *dir, int code)
{
    golden_args args = {.n = 1};

    args.text[0] = (char *)dir;
    return run("inspect", &args, code);
}

/* Sets a key of dir/NAME, a value in JSON; NULL takes it out. */
static void edit(const char *dir, const char *name, const char *key, const char *value)
{
    char *path;
    json_t *root, *new_value;

    assert_int_equal(bl_path_join(dir, name, &path), BL_OK);
    assert_int_equal(bl_json_load(path, 1 << 20, &root), BL_OK);
    if (value) {
        assert_int_equal(bl_json_parse("value", 1, value, strlen(value), &new_value), BL_OK);
        assert_int_equal(json_object_set_new(root, key, new_value), 0);
    } else {
        assert_int_equal(json_object_del(root, key), 0);
    }
    char *text = json_dumps(root, JSON_INDENT(1));
    runs_write(path, text);
    free(text);
    json_decref(root);
    free(path);
}

/* Both must end with 3 and the same line, which contains `reason`. */
static void check_both(const char *dir, const char *train_key, const char *reason)
{
    golden_args args = {0};

    runs_standard(&args, runs_path("refused"), 1);
    runs_set(&args, train_key, "%s", dir);
    char *of_train = run("train", &args, EXIT_INPUT), *of_inspect = run_inspect(dir, EXIT_INPUT);
    if (bl_file_exists(runs_path("refused")))
        assert_int_equal(bl_tree_remove(runs_path("refused")), BL_OK);
    assert_string_equal(of_inspect, of_train);
    if (!strstr(of_train, reason)) fail_msg("\"%s\" does not say \"%s\"", of_train, reason);
    free(of_train);
    free(of_inspect);
    golden_args_free(&args);
}

static void test_models(void **state)
{
    static const struct {
        const char *key, *value, *reason;
    } cases[] = {
        {"model_type", "\"gpt2\"", "key model_type: expected \"llama\" or "},
        {"model_type", "\"qwen3\"", "key architectures: expected [\"Qwen3ForCausalLM\"]"},
        {"model_type", "\"gpt_oss\"", "key architectures: expected [\"GptOssForCausalLM\"]"},
        {"architectures", "[\"MixtralForCausalLM\"]", "key architectures"},
        {"hidden_act", "\"gelu\"", "key hidden_act: expected \"silu\", got \"gelu\""},
        {"rope_scaling", "{\"rope_type\":\"axial\",\"factor\":4.0}", "got \"axial\""},
        {"attention_bias", "true", "missing model.layers.0.self_attn.q_proj.bias"},
        {"qkv_bias", "true", "key qkv_bias"},
        {"max_position_embeddings", "1000000000000000019884624838656", "got 1e30"},
        {"hidden_size", NULL, "key hidden_size: missing"},
        {"num_hidden_layers", "3", "missing model.layers.2."},
        {"intermediate_size", "7", "has shape"},
        {"quantization_config", "{\"quant_method\":\"gptq\"}", "key quant_method"},
    };
    const char *dir = runs_path("model");

    (void)state;
    runs_copy(GOLDEN_DIR "/models/tiny-gqa", dir);
    free(run_inspect(dir, 0));
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        dir = runs_path("model"); /* valid for so many further calls only */
        runs_copy(GOLDEN_DIR "/models/tiny-gqa", dir);
        edit(dir, "config.json", cases[i].key, cases[i].value);
        check_both(dir, "model_name_or_path", cases[i].reason);
    }
    runs_copy(GOLDEN_DIR "/models/tiny-gqa", dir);
    assert_int_equal(remove(runs_path("model/config.json")), 0);
    check_both(dir, "model_name_or_path", "config.json: No such file");
}

static void test_adapters(void **state)
{
    static const struct {
        const char *key, *value, *reason;
    } cases[] = {
        {"r", "2147483647", "key r: expected an integer in [1, 65536], got 2147483647"},
        {"r", "1", "has shape"},
        {"use_dora", "true", "key use_dora"},
        {"peft_type", "\"IA3\"", "key peft_type"},
        {"target_modules", "[\"lm\"]", "got \"lm\""},
        {"target_modules", "[\"lm_head\"]", "key target_modules: expected at least one projection"},
        {"target_modules", "[\"model.layers.0.self_attn.q_proj\"]",
         "q_proj is named in 1 of 2 layers"},
        {"target_modules", "[\"q_proj\",\"k_proj\"]",
         "missing base_model.model.model.layers.0.self_attn.k_proj"},
        {"target_modules", "[\"v_proj\"]",
         "unexpected base_model.model.model.layers.0.self_attn.q_proj"},
        {"lora_alpha", "-1", "key lora_alpha"},
    };
    const char *dir = runs_path("adapter");

    (void)state;
    runs_copy(GOLDEN_DIR "/adapters/tiny-gqa-q_proj", dir);
    free(run_inspect(dir, 0));
    runs_copy(GOLDEN_DIR "/adapters/tiny-gqa-all-linear", dir);
    edit(dir, "adapter_config.json", "target_modules", "\"all-linear\"");
    free(run_inspect(dir, 0));
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        runs_copy(GOLDEN_DIR "/adapters/tiny-gqa-q_proj", dir);
        edit(dir, "adapter_config.json", cases[i].key, cases[i].value);
        check_both(dir, "init_adapter", cases[i].reason);
    }
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_models),
        cmocka_unit_test(test_adapters),
    };
    return cmocka_run_group_tests(tests, runs_set_up, runs_tear_down);
}
