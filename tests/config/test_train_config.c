/* SPDX-License-Identifier: Apache-2.0 */
/* The configuration: YAML and command line, their errors, aliases, and config.resolved.yaml. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/sizes.h"
#include "config/config.h"
#include "config/table_internal.h"
#include "device/device.h"

#define REQUIRED "model_name_or_path: m\noutput_dir: o\ntrain_file: t\n"

enum { MAX_WORDS = 16 };

/* Loads `yaml` (NULL: no file) from "c.yaml" and the words of `line`, which blanks separate. */
static bl_status load(const char *yaml, const char *line, bl_train_config **out)
{
    char copy[512], *argv[MAX_WORDS];
    int argc = 0;

    snprintf(copy, sizeof copy, "%s", line);
    for (char *word = strtok(copy, " "); word; word = strtok(NULL, " ")) argv[argc++] = word;
    if (yaml) assert_int_equal(bl_file_write_atomic("c.yaml", yaml, strlen(yaml)), BL_OK);
    return bl_train_config_load(BL_CONFIG_TRAIN, yaml ? "c.yaml" : NULL, argc, argv, out);
}

static void expect_error(const char *yaml, const char *line, const char *error)
{
    bl_train_config *config;
    assert_int_equal(load(yaml, line, &config), BL_EUSAGE);
    assert_null(config);
    assert_string_equal(bl_error_text(), error);
}

static void test_defaults(void **state)
{
    bl_train_config *c;
    (void)state;
    assert_int_equal(load(REQUIRED, "", &c), BL_OK);
    assert_string_equal(c->model_name_or_path, "m");
    assert_true(c->learning_rate == 2e-4 && c->weight_decay == 0 && c->adam_beta1 == 0.9 &&
                c->adam_beta2 == 0.999);
    assert_true(c->adam_epsilon == 1e-8 && c->max_grad_norm == 1 && c->num_train_epochs == 3);
    assert_true(c->lr_scheduler_type == BL_LR_LINEAR && c->warmup_ratio == 0 &&
                c->warmup_steps == 0);
    assert_true(c->max_steps == -1 && c->seed == 42 && c->save_steps == 500 &&
                c->save_total_limit == 0);
    assert_true(c->lora_r == 8 && c->lora_alpha == 8 && c->lora_dropout == 0 &&
                c->logging_steps == 1);
    assert_int_equal(c->lora_target_modules.n_items, 1);
    assert_string_equal(c->lora_target_modules.items[0], "all-linear");
    assert_true(c->shuffle && !c->train_on_inputs && c->visit_tokens == BL_OPTION_AUTO);
    assert_null(c->validation_file);
    /* What depends on the machine is decided. */
    bl_gpu_info gpu;
    bool has_gpu = bl_device_find_cuda(0, &gpu) == BL_OK;
    assert_int_equal(c->device, has_gpu ? BL_CONFIG_DEVICE_CUDA : BL_CONFIG_DEVICE_CPU);
    assert_int_equal(c->compute_dtype, has_gpu ? BL_COMPUTE_BF16 : BL_COMPUTE_FP32);
    assert_true(c->ranks == 1 && c->shard_size == 1 && c->threads >= 1 &&
                c->offload_ratio == BL_OPTION_AUTO);
    assert_true(bl_train_config_given(c, "train_file") && !bl_train_config_given(c, "lora_r"));
    bl_train_config_free(c);
}

static void test_yaml_scalars(void **state)
{
    bl_train_config *c;
    (void)state;
    assert_int_equal(
        load("%YAML 1.1\n---\n" REQUIRED "# a comment\n"
             "learning_rate: 2e-5\nwarmup-steps: 10\nshuffle: no\ntrain_on_inputs: On\n"
             "eval_strategy: no\npacking: off\nactivation_checkpointing: false\n"
             "lora_target_modules:\n  - q_proj\n  - v_proj\nseed: null\nlora_dropout: ~\n"
             "lora_alpha:\nvalidation_file: \"null\"\nadam_epsilon: .5E-3\nvisit_tokens: 4096\n",
             "", &c),
        BL_OK);
    assert_true(c->learning_rate == 2e-5 && c->warmup_steps == 10 && !c->shuffle &&
                c->train_on_inputs);
    assert_true(c->eval_strategy == BL_EVAL_NO && c->packing == BL_PACKING_NONE);
    assert_true(c->activation_checkpointing == BL_RECOMPUTE_NONE);
    assert_int_equal(c->lora_target_modules.n_items, 2);
    assert_string_equal(c->lora_target_modules.items[1], "v_proj");
    assert_true(c->seed == 42 && c->lora_dropout == 0 && c->lora_alpha == 8 &&
                !bl_train_config_given(c, "seed"));
    assert_string_equal(c->validation_file, "null");
    assert_true(c->adam_epsilon == 5e-4 && c->visit_tokens == 4096);
    bl_train_config_free(c);
}

static void test_line_wins(void **state)
{
    bl_train_config *c;
    (void)state;
    assert_int_equal(
        load(REQUIRED "lora_r: 4\nseed: 7\nlearning_rate: 1\n",
             "--lora-r=32 --learning_rate 0.25 --seed null --lora_target_modules up_proj,down_proj "
             "--overwrite_output_dir --shuffle false",
             &c),
        BL_OK);
    assert_true(c->lora_r == 32 && c->learning_rate == 0.25 && c->seed == 42);
    assert_true(c->overwrite_output_dir && !c->shuffle);
    assert_int_equal(c->lora_target_modules.n_items, 2);
    assert_string_equal(c->lora_target_modules.items[0], "up_proj");
    bl_train_config_free(c);

    /* A file named among the options; a switch before it does not swallow it. */
    assert_int_equal(load(NULL, "--overwrite_output_dir c.yaml --seed 1", &c), BL_OK);
    assert_true(c->overwrite_output_dir && c->seed == 1 && c->lora_r == 4);
    bl_train_config_free(c);
}

/* As some editors save it: a byte order mark, lines that end in CR LF. */
static void test_byte_order_mark(void **state)
{
    bl_train_config *c;
    (void)state;
    assert_int_equal(load("\xef\xbb\xbfmodel_name_or_path: m\r\ntrain_file: t\r\noutput_dir: o\r\n"
                          "seed: 9007199254740992\r\n",
                          "", &c),
                     BL_OK);
    assert_true(c->seed == INT64_C(9007199254740992));
    assert_string_equal(c->output_dir, "o");
    bl_train_config_free(c);
}

static void test_file_errors(void **state)
{
    static const struct {
        const char *yaml, *error;
    } cases[] = {
        {"lora_r: 4\n\nlora_rnak: 4\n", "c.yaml:3: lora_rnak: unknown key; did you mean lora_r?"},
        {"learning_rat: 4\n", "c.yaml:1: learning_rat: unknown key; did you mean learning_rate?"},
        {"rnaks: 4\n", "c.yaml:1: rnaks: unknown key; did you mean ranks?"},
        {"lora_rnk: 4\n", "c.yaml:1: lora_rnk: unknown key; did you mean lora_r?"},
        {"qwertz: 4\n", "c.yaml:1: qwertz: unknown key"},
        {"seed: 1\nseed: 2\n", "c.yaml:2: seed: seed is already set in line 1"},
        {"lora_r: 2\nr: 2\n", "c.yaml:2: r: lora_r is already set in line 1"},
        {"lora_alpha: 1\nlora_r: 2\nlora_rank: 2\n",
         "c.yaml:3: lora_rank: lora_r is already set in line 2"},
        {"bf16: false\nseed: 1\nbf16: false\n", "c.yaml:3: bf16: bf16 is already set in line 1"},
        {"lora_r: 0\n", "c.yaml:1: lora_r: expected an integer in [1, 1024], got '0'"},
        {"lora_r: 1025\n", "c.yaml:1: lora_r: expected an integer in [1, 1024], got '1025'"},
        {"lora_r: 8.0\n", "c.yaml:1: lora_r: expected an integer in [1, 1024], got '8.0'"},
        {"lora_r: 010\n", "c.yaml:1: lora_r: expected an integer in [1, 1024], got '010'"},
        {"lora_r: auto\n", "c.yaml:1: lora_r: expected an integer in [1, 1024], got 'auto'"},
        {"seed: 99999999999999999999\n", "c.yaml:1: seed: expected an integer in [0, "
                                         "9007199254740992], got '99999999999999999999'"},
        {"seed: 9007199254740993\n",
         "c.yaml:1: seed: expected an integer in [0, 9007199254740992], got '9007199254740993'"},
        {"seed: +9007199254740994\n",
         "c.yaml:1: seed: expected an integer in [0, 9007199254740992], got '+9007199254740994'"},
        {"seed: -9223372036854775809\n",
         "c.yaml:1: seed: expected an integer of at least 0, got '-9223372036854775809'"},
        {"lora_r: 9007199254740993\n",
         "c.yaml:1: lora_r: expected an integer in [1, 1024], got '9007199254740993'"},
        {"ranks: 0\n", "c.yaml:1: ranks: expected an integer in [1, 4096] or auto, got '0'"},
        {"learning_rate: 0x1p-3\n",
         "c.yaml:1: learning_rate: expected a number in [0, 10], got '0x1p-3'"},
        {"learning_rate: .nan\n",
         "c.yaml:1: learning_rate: expected a number in [0, 10], got '.nan'"},
        {"learning_rate: 1e999\n",
         "c.yaml:1: learning_rate: expected a number in [0, 10], got '1e999'"},
        {"learning_rate: 1,5\n",
         "c.yaml:1: learning_rate: expected a number in [0, 10], got '1,5'"},
        {"learning_rate: 5e\n", "c.yaml:1: learning_rate: expected a number in [0, 10], got '5e'"},
        {"shuffle: 2\n", "c.yaml:1: shuffle: expected true or false, got '2'"},
        {"shuffle: [true]\n", "c.yaml:1: shuffle: expected true or false, got a sequence"},
        {"overlong: cut\n", "c.yaml:1: overlong: expected one of truncate, skip, error, got 'cut'"},
        {"output_dir: ''\n", "c.yaml:1: output_dir: is empty"},
        {"lora_target_modules: []\n", "c.yaml:1: lora_target_modules: is empty"},
        {"lora_target_modules: q_proj,,v_proj\n", "c.yaml:1: lora_target_modules: a name is empty"},
        {"lora_target_modules: [q_proj, ~]\n",
         "c.yaml:1: lora_target_modules: a null in a sequence"},
        {"lora:\n  r: 8\n",
         "c.yaml:1: lora: nested keys are not supported; write keys at the top level"},
        {"lora_target_modules: [[q_proj]]\n", "c.yaml:1: lora_target_modules: nested keys are not "
                                              "supported; write keys at the top level"},
        {"seed: &a 1\nlora_r: *a\n", "c.yaml:2: lora_r: YAML aliases are not supported"},
        {"seed: !!int 1\n", "c.yaml:1: seed: tags are not supported"},
        {"output_dir: \"a\\0b\"\n", "c.yaml:1: output_dir: a NUL in a text"},
        {"? [a]\n: 1\n", "c.yaml:1: expected a key"},
        {"- a\n", "c.yaml:1: expected lines of \"key: value\""},
        {"seed: 1\n---\nseed: 2\n", "c.yaml:2: a second document"},
        {"seed: 1\n\toops: [\n", "c.yaml:2: found a tab character that violates indentation"},
        {"seed: \xff\n", "c.yaml: byte 6: invalid leading UTF-8 octet"},
        {"\xef\xbb\xbflora_rnak: 4\n", "c.yaml:1: lora_rnak: unknown key; did you mean lora_r?"},
        {"\xff\xfes", "c.yaml: the text is UTF-16; save it as UTF-8"},
        {"\xfe\xff", "c.yaml: the text is UTF-16; save it as UTF-8"},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) expect_error(cases[i].yaml, "", cases[i].error);
    bl_train_config *config;
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, "no-such-file.yaml", 0, NULL, &config),
                     BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "no-such-file.yaml"));
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, ".", 0, NULL, &config), BL_EUSAGE);
    for (const char *empty = "# nothing\n"; empty; empty = *empty ? "" : NULL) {
        expect_error(empty, "", "model_name_or_path, output_dir and train_file are not given");
    }
}

static void test_line_errors(void **state)
{
    static const struct {
        const char *line, *error;
    } cases[] = {
        {"--lora-rnk 4", "--lora-rnk: unknown option; did you mean --lora_r?"},
        {"--lora_r x", "--lora_r: expected an integer in [1, 1024], got 'x'"},
        {"--lora_r", "--lora_r: a value is missing"},
        {"--lora_r --seed 1", "--lora_r: a value is missing"},
        {"--lora_r=", "--lora_r: expected an integer in [1, 1024], got ''"},
        {"-lora_r 4", "-lora_r: unknown option; options begin with two dashes"},
        {"--seed 1 more", "more: unexpected word"},
        {"-- --seed", "--seed: unexpected word"},
        {"--train_file a --train_file b", "--train_file: train_file is given twice"},
        {"--train_file=a --train-file a", "--train-file: train_file is given twice"},
        {"--seed null --seed 1", "--seed: seed is given twice"},
        {"--shuffle --shuffle false", "--shuffle: shuffle is given twice"},
        {"--lora_r 2 --r=2", "--r: lora_r is given twice, as --lora_r and as --r"},
        {"--model=a --base_model b",
         "--base_model: model_name_or_path is given twice, as --model and as --base_model"},
        {"--r 2 --r=2", "--r: lora_r is given twice"},
        {"--r 2 --lora_r=2", "--lora_r: lora_r is given twice, as --r and as --lora_r"},
        {"--lora_rank 16", "--lora_rank: give --lora_alpha, too: LLaMA-Factory's default is 2 x "
                           "lora_rank, Ballast's is 8"},
        {"--fp16 false --fp16 false", "--fp16: fp16 is given twice"},
        {"--lora_target_modules q_proj --lora_target_modules v_proj",
         "--lora_target_modules: lora_target_modules is given twice"},
        {"--output_dir \xff", "--output_dir: not valid UTF-8"},
        {"--max_steps -2", "--max_steps: expected an integer of at least -1, got '-2'"},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        expect_error(REQUIRED, cases[i].line, cases[i].error);
    expect_error(NULL, "--train_file t --output_dir o", "model_name_or_path is not given");
}

/* Features that this version lacks are rejected by name; neutral values pass. */
static void test_not_in_this_version(void **state)
{
    bl_train_config *c;
    (void)state;
    expect_error(REQUIRED, "--offload_host_part 0.5",
                 "offload_host_part 0.5: offload_tier host has all of it in host memory; give "
                 "offload_tier disk, or leave the key out");
    expect_error(REQUIRED, "--offload_tier disk",
                 "offload_tier disk needs offload_dir, a directory on a fast local disk");
    assert_int_equal(load(REQUIRED, "--offload_dir /x", &c), BL_OK); /* not used, and said so */
    bl_train_config_free(c);
    assert_int_equal(load(REQUIRED
                          "device: cpu\npacking: none\noffload_ratio: 0.0\noffload_dir: null\n"
                          "activation_offload: false\nio_engine: auto\ndata_format: tokens\n",
                          "", &c),
                     BL_OK);
    bl_train_config_free(c);
}

static void test_combinations(void **state)
{
    static const struct {
        const char *line, *error;
    } cases[] = {
        {"--warmup_steps 2 --warmup_ratio 0.1",
         "warmup_ratio 0.1 and warmup_steps 2: give one of them"},
        {"--lr_scheduler_type constant --warmup_steps 2",
         "lr_scheduler_type constant has no warm-up: use constant_with_warmup"},
        {"--num_train_epochs 0", "num_train_epochs 0 and no max_steps: nothing to train"},
        {"--eval_strategy steps",
         "eval_strategy steps needs validation_file or validation_split_percentage"},
        {"--validation_file v --validation_split_percentage 5",
         "validation_file and validation_split_percentage 5: give one of them"},
        {"--overwrite_output_dir --resume_from_checkpoint true",
         "overwrite_output_dir and resume_from_checkpoint: give one of them (to resume, "
         "overwrite_output_dir: false)"},
        {"--ranks 4 --shard_size 3", "shard_size 3 does not divide ranks 4"},
        {"--lora_target_modules q_proj,qproj",
         "lora_target_modules: 'qproj' is not one of q_proj, k_proj, "
         "v_proj, o_proj, gate_proj, up_proj, down_proj, query_key_value, dense, "
         "dense_h_to_4h, dense_4h_to_h, qkv_proj, gate_up_proj, all-linear; did you mean "
         "q_proj?"},
        {"--lora_target_modules model.layers.x.self_attn.q_proj",
         "lora_target_modules: 'model.layers.x.self_attn.q_proj' is not one of q_proj, k_proj, "
         "v_proj, o_proj, gate_proj, up_proj, down_proj, query_key_value, dense, "
         "dense_h_to_4h, dense_4h_to_h, qkv_proj, gate_up_proj, all-linear"},
        {"--lora_target_modules q_proj,all-linear",
         "lora_target_modules: all-linear cannot be combined with other names"},
        {"--lora_target_modules q_proj,q_proj", "lora_target_modules: 'q_proj' is named twice"},
    };
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++)
        expect_error(REQUIRED, cases[i].line, cases[i].error);
}

static void test_aliases(void **state)
{
    bl_train_config *c;
    (void)state;
    assert_int_equal(
        load("model_name: m\nout_dir: o\ndataset_path: t\nlora_rank: 4\nalpha: 8\nmax_seq_len: 64\n"
             "evaluation_strategy: \"no\"\ngradient_checkpointing: true\nlr: 0.001\nepochs: 2\n"
             "micro_batch_size: 3\ngas: 5\nbf16: false\nsave_strategy: no\nsample_packing: false\n"
             "optim: adamw_torch\nload_in_8bit: false\nlora_target_linear: true\nadapter: lora\n"
             "dataset_concatenation: null\ntorch_dtype: float32\ngrad_clip: 0.5\ndevice: cpu\n",
             "", &c),
        BL_OK);
    assert_string_equal(c->model_name_or_path, "m");
    assert_string_equal(c->output_dir, "o");
    assert_string_equal(c->train_file, "t");
    assert_true(c->lora_r == 4 && c->max_seq_length == 64 && c->learning_rate == 0.001 &&
                c->num_train_epochs == 2);
    assert_true(c->eval_strategy == BL_EVAL_NO && c->activation_checkpointing == BL_RECOMPUTE_FULL);
    assert_true(c->per_device_train_batch_size == 3 && c->gradient_accumulation_steps == 5 &&
                c->save_strategy == BL_SAVE_NO);
    assert_true(c->packing == BL_PACKING_NONE && c->max_grad_norm == 0.5);
    assert_null(c->init_adapter);
    bl_train_config_free(c);

    assert_int_equal(load(REQUIRED, "--gradient_checkpointing --adapter dir", &c), BL_OK);
    assert_int_equal(c->activation_checkpointing, BL_RECOMPUTE_FULL);
    assert_string_equal(c->init_adapter, "dir");
    bl_train_config_free(c);

    assert_int_equal(
        load(REQUIRED, "--lora_bias none --fp16 false --use_cpu --save_total_limit 1", &c), BL_OK);
    assert_int_equal(c->save_total_limit, 2);
    bl_train_config_free(c);

    expect_error(REQUIRED, "--fp16",
                 "--fp16: 'true' is not supported; use compute_dtype: bf16, or fp8 on a GPU");
    expect_error(REQUIRED "batch_size: 4\n", "",
                 "c.yaml:4: batch_size: not a key of Ballast; use per_device_train_batch_size and "
                 "gradient_accumulation_steps (a step takes their product x ranks sequences)");
    expect_error(
        REQUIRED, "--saves_per_epoch 2",
        "--saves_per_epoch: '2' is not supported; use save_strategy: steps and save_steps");
    expect_error(
        REQUIRED, "--load_in_4bit true",
        "--load_in_4bit: 'true' is not supported; use base_format nf4, mxfp4 or int4_g32 on CPUs; "
        "GPUs have no 4-bit products: fp8_row");
    expect_error(
        REQUIRED "deepspeed: ds.json\n", "",
        "c.yaml:4: deepspeed: 'ds.json' is not supported; use shard_size and offload_ratio");
}

/* Each alias must lead to a key that exists, and none may hide a key. */
static void test_tables_fit(void **state)
{
    bl_train_config config;
    const bl_options options = {.table = bl_train_options,
                                .n_options = bl_train_n_options,
                                .aliases = bl_train_aliases,
                                .n_aliases = bl_train_n_aliases,
                                .command = BL_CONFIG_TRAIN,
                                .values = &config,
                                .origins = config.source.origins};
    (void)state;
    for (size_t i = 0; i < bl_train_n_aliases; i++) {
        const bl_option_alias *alias = &bl_train_aliases[i];
        bool is_ignored = alias->values && strcmp(alias->values, "*=") == 0;
        assert_true(alias->tool || !bl_options_find(&options, alias->name));
        assert_true(!alias->key || bl_options_find(&options, alias->key));
        assert_true(!alias->needs || (alias->hint && bl_options_find(&options, alias->needs)));
        assert_true(alias->key || alias->hint || is_ignored);
        assert_false(alias->key && strchr(alias->name, '*'));
        for (size_t k = 0; k < i; k++) {
            const bl_option_alias *b = &bl_train_aliases[k];
            bool hides = b->tool ? alias->tool && strcmp(alias->tool, b->tool) == 0 : !alias->tool;
            assert_false(hides && strcmp(alias->name, b->name) == 0);
        }
    }
    for (size_t i = 0; i < bl_train_n_options; i++) {
        for (size_t k = 0; k < i; k++)
            assert_string_not_equal(bl_train_options[i].key, bl_train_options[k].key);
        assert_ptr_equal(bl_options_find(&options, bl_train_options[i].key), &bl_train_options[i]);
    }
}

/* The names of an enum are in the order of its constants. */
static void test_enums(void **state)
{
#define CASE(key, name, constant)                                                                  \
    {                                                                                              \
#key, name, offsetof(bl_train_config, key), constant                                       \
    }
    static const struct {
        const char *key, *name;
        size_t offset;
        int constant;
    } cases[] = {
        CASE(data_format, "auto", BL_DATA_AUTO),
        CASE(data_format, "alpaca", BL_DATA_ALPACA),
        CASE(data_format, "prompt_completion", BL_DATA_PROMPT_COMPLETION),
        CASE(data_format, "text", BL_DATA_TEXT),
        CASE(data_format, "tokens", BL_DATA_TOKENS),
        CASE(overlong, "truncate", BL_OVERLONG_TRUNCATE),
        CASE(overlong, "skip", BL_OVERLONG_SKIP),
        CASE(overlong, "error", BL_OVERLONG_ERROR),
        CASE(lr_scheduler_type, "linear", BL_LR_LINEAR),
        CASE(lr_scheduler_type, "Cosine", BL_LR_COSINE),
        CASE(lr_scheduler_type, "constant", BL_LR_CONSTANT),
        CASE(lr_scheduler_type, "constant_with_warmup", BL_LR_CONSTANT_WITH_WARMUP),
        CASE(base_format, "auto", BL_BASE_AUTO),
        CASE(base_format, "fp8_row", BL_BASE_FP8_ROW),
        CASE(base_format, "fp8_block", BL_BASE_FP8_BLOCK),
        CASE(base_format, "int4_g128", BL_BASE_INT4_G128),
        CASE(base_format, "nf4", BL_BASE_NF4),
        CASE(base_format, "stored", BL_BASE_STORED),
        CASE(base_format_scales, "largest", BL_SCALES_LARGEST),
        CASE(activation_checkpointing, "none", BL_RECOMPUTE_NONE),
        CASE(activation_checkpointing, "mlp", BL_RECOMPUTE_MLP),
        CASE(activation_checkpointing, "selective", BL_RECOMPUTE_SELECTIVE),
        CASE(activation_checkpointing, "full", BL_RECOMPUTE_FULL),
        CASE(activation_checkpointing, "auto", BL_RECOMPUTE_AUTO),
        CASE(adapter_dtype, "f32", BL_ADAPTER_F32),
        CASE(adapter_dtype, "bf16", BL_ADAPTER_BF16),
    };
#undef CASE
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_train_config *c;
        char line[128];
        int value;
        snprintf(line, sizeof line, "--%s %s", cases[i].key, cases[i].name);
        assert_int_equal(load(REQUIRED, line, &c), BL_OK);
        memcpy(&value, (char *)c + cases[i].offset, sizeof value);
        assert_int_equal(value, cases[i].constant);
        bl_train_config_free(c);
    }
}

static void test_resume(void **state)
{
    static const struct {
        const char *value;
        bl_resume resume;
    } cases[] = {{"false", BL_RESUME_NO},
                 {"True", BL_RESUME_NEWEST},
                 {"o/checkpoints/step-5", BL_RESUME_PATH}};
    (void)state;
    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        bl_train_config *c;
        char line[128];
        snprintf(line, sizeof line, "--resume_from_checkpoint %s", cases[i].value);
        assert_int_equal(load(REQUIRED, line, &c), BL_OK);
        assert_int_equal(bl_train_config_resume(c), cases[i].resume);
        bl_train_config_free(c);
    }
}

/* Every key survives writing and reading, above all values that YAML takes for another type. */
static void test_resolved_round_trip(void **state)
{
    static const char yaml[] =
        "model_name_or_path: \"a 'quoted' path: # with\\ttab \\\\ \\x7f and ü\"\n"
        "output_dir: \"no\"\ntrain_file: \"~\"\nvalidation_file: '007'\ndump_gradients: "
        "\"null\"\ninit_adapter: ' it''s '\n"
        "learning_rate: 3e-5\nadam_epsilon: 1e-8\nlora_dropout: 0.1\nlora_alpha: "
        "0.30000000000000004\n"
        "lora_target_modules: [q_proj, down_proj]\nseed: 9007199254740992\nmax_steps: -1\n"
        "lr_scheduler_type: cosine\nresume_from_checkpoint: yes\nranks: 2\nshuffle: false\n";
    bl_train_config *first, *second;
    char *text = NULL;
    uint64_t hashes[2];
    void *bytes;
    size_t n_bytes;
    (void)state;

    assert_int_equal(load(yaml, "", &first), BL_OK);
    assert_int_equal(bl_train_config_write_resolved(first, "resolved.yaml"), BL_OK);
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, "resolved.yaml", 0, NULL, &second),
                     BL_OK);
    assert_string_equal(second->model_name_or_path, "a 'quoted' path: # with\ttab \\ \x7f and ü");
    assert_string_equal(second->output_dir, "no");
    assert_string_equal(second->train_file, "~");
    assert_string_equal(second->init_adapter, " it's ");
    assert_string_equal(second->dump_gradients, "null");
    assert_true(second->shard_size == 2);
    assert_true(second->learning_rate == 3e-5 && second->lora_alpha == 0.30000000000000004 &&
                second->seed == 9007199254740992 && !second->shuffle);
    for (int effect = BL_EFFECT_NONE; effect <= BL_EFFECT_SOURCE; effect++) {
        assert_int_equal(bl_train_config_diff(first, second, (bl_option_effect)effect, &text),
                         BL_OK);
        assert_string_equal(text, "");
        free(text);
        assert_int_equal(bl_train_config_hash(first, (bl_option_effect)effect, &hashes[0]), BL_OK);
        assert_int_equal(bl_train_config_hash(second, (bl_option_effect)effect, &hashes[1]), BL_OK);
        assert_true(hashes[0] == hashes[1]);
    }
    /* Every key is written, and other YAML readers see numbers as numbers and words as words. */
    assert_int_equal(bl_file_read_all("resolved.yaml", 1 << 20, &bytes, &n_bytes), BL_OK);
    for (size_t i = 0; i < bl_train_n_options; i++) {
        char key[80];
        snprintf(key, sizeof key, "\n%s: ", bl_train_options[i].key);
        assert_non_null(strstr(bytes, key));
    }
    assert_non_null(strstr(bytes, "\nlearning_rate: 3.0e-05\n"));
    assert_non_null(strstr(bytes, "\neval_strategy: 'no'\n"));
    assert_non_null(strstr(bytes, "\noutput_dir: 'no'\n"));
    assert_non_null(strstr(bytes, "\nvalidation_file: '007'\n"));
    free(bytes);
    bl_train_config_free(first);
    bl_train_config_free(second);
}

static void test_differences_by_effect(void **state)
{
    bl_train_config *before, *now;
    char *text;
    uint64_t hashes[2];
    (void)state;

    assert_int_equal(load(REQUIRED, "--threads 1", &before), BL_OK);
    assert_int_equal(
        load(REQUIRED,
             "--threads 2 --visit_tokens 64 --lora_r 16 --learning_rate 1e-4 --train_file u "
             "--save_steps 5 --ring_depth 3 --logging_steps 9",
             &now),
        BL_OK);
    assert_int_equal(bl_train_config_diff(before, now, BL_EFFECT_RESULT, &text), BL_OK);
    assert_string_equal(text, "lora_r: 8 -> 16\nlearning_rate: 0.0002 -> 0.0001\n");
    free(text);
    assert_int_equal(bl_train_config_diff(before, now, BL_EFFECT_SOURCE, &text), BL_OK);
    assert_string_equal(text, "train_file: 't' -> 'u'\n");
    free(text);
    assert_int_equal(bl_train_config_hash(before, BL_EFFECT_RESULT, &hashes[0]), BL_OK);
    assert_int_equal(bl_train_config_hash(now, BL_EFFECT_RESULT, &hashes[1]), BL_OK);
    assert_true(hashes[0] != hashes[1]);
    bl_train_config_free(now);

    assert_int_equal(
        load(REQUIRED, "--threads 2 --visit_tokens 64 --save_steps 5 --ring_depth 3", &now), BL_OK);
    assert_int_equal(bl_train_config_hash(now, BL_EFFECT_RESULT, &hashes[1]), BL_OK);
    assert_true(hashes[0] == hashes[1]);
    bl_train_config_free(before);
    bl_train_config_free(now);
}

/* `eval` reads the file of a training run, and refuses training's options on its own line. */
static void test_eval_shares_the_file(void **state)
{
    bl_train_config *c;
    char *good[] = {"--model", "m2", "--validation_file", "v"};
    char *bad[] = {"--lora_r", "4"};
    char *unknown[] = {"--lora_rr", "4"};
    (void)state;
    assert_int_equal(load(REQUIRED "lora_r: 4\n", "", &c), BL_OK);
    bl_train_config_free(c);
    assert_int_equal(bl_train_config_load(BL_CONFIG_EVAL, "c.yaml", 4, good, &c), BL_OK);
    assert_string_equal(c->model_name_or_path, "m2");
    assert_int_equal(c->lora_r, 4);
    bl_train_config_free(c);
    assert_int_equal(bl_train_config_load(BL_CONFIG_EVAL, NULL, 4, good, &c), BL_OK);
    bl_train_config_free(c);
    assert_int_equal(bl_train_config_load(BL_CONFIG_EVAL, "c.yaml", 0, NULL, &c), BL_EUSAGE);
    assert_string_equal(bl_error_text(), "validation_file is not given");
    assert_int_equal(bl_train_config_load(BL_CONFIG_EVAL, "c.yaml", 2, bad, &c), BL_EUSAGE);
    assert_string_equal(bl_error_text(), "--lora_r: not an option of this command");
    assert_int_equal(bl_train_config_load(BL_CONFIG_EVAL, NULL, 2, unknown, &c), BL_EUSAGE);
}

static int enter_temporary_folder(void **state)
{
    static char folder[] = "/tmp/ballast-test-config-XXXXXX";
    *state = folder;
    return mkdtemp(folder) ? chdir(folder) : -1;
}

static int remove_temporary_folder(void **state)
{
    return chdir("/") || bl_tree_remove(*state) != BL_OK;
}

int main(void)
{
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_defaults),
        cmocka_unit_test(test_yaml_scalars),
        cmocka_unit_test(test_line_wins),
        cmocka_unit_test(test_byte_order_mark),
        cmocka_unit_test(test_file_errors),
        cmocka_unit_test(test_line_errors),
        cmocka_unit_test(test_not_in_this_version),
        cmocka_unit_test(test_combinations),
        cmocka_unit_test(test_aliases),
        cmocka_unit_test(test_tables_fit),
        cmocka_unit_test(test_enums),
        cmocka_unit_test(test_resume),
        cmocka_unit_test(test_resolved_round_trip),
        cmocka_unit_test(test_differences_by_effect),
        cmocka_unit_test(test_eval_shares_the_file),
    };
    return cmocka_run_group_tests(tests, enter_temporary_folder, remove_temporary_folder);
}
