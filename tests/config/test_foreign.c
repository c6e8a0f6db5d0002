/* SPDX-License-Identifier: Apache-2.0 */
/* Configurations of other programs: what `train` reports of a pasted one, and what `config --from`
 * converts it to. The files in foreign/ have the keys that such files usually have. */
#include <setjmp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include <cmocka.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "config/config.h"

void __wrap_bl_log_problem(const char *text);
void __wrap_bl_log_warning(const char *format, ...);

/* Whether the CPU computes in bf16, whatever this machine's does (config/device.c). */
static const char CPU_BF16[] = "BALLAST_CPU_BF16";

/* The log messages, a line each. */
static char problems[8192], warnings[8192];

static void add(char *log, size_t log_bytes, const char *line)
{
    size_t used = strlen(log);
    snprintf(log + used, log_bytes - used, "%s\n", line);
}

void __wrap_bl_log_problem(const char *text)
{
    add(problems, sizeof problems, text);
}

void __wrap_bl_log_warning(const char *format, ...)
{
    char line[2048];
    va_list args;

    va_start(args, format);
    vsnprintf(line, sizeof line, format, args);
    va_end(args);
    add(warnings, sizeof warnings, line);
}

static bl_status load(const char *yaml, bl_train_config **config)
{
    problems[0] = warnings[0] = '\0';
    assert_int_equal(bl_file_write_atomic("c.yaml", yaml, strlen(yaml)), BL_OK);
    return bl_train_config_load(BL_CONFIG_TRAIN, "c.yaml", 0, NULL, config);
}

#define REQUIRED "model_name_or_path: m\noutput_dir: o\ntrain_file: t\n"

static void test_all_problems_at_once(void **state)
{
    bl_train_config *c;
    (void)state;

    assert_int_equal(load("lora_rnak: 4\nlora_r: many\n\nseed: 1\nseed: 2\ndatasets:\n"
                          "  - path: tatsu-lab/alpaca\n    type: alpaca\n  - type: alpaca\n"
                          "mine:\n  deep: [1, {a: b}]\n? [key]\n: {x: [1]}\n!!str tagged: [1, 2]\n"
                          "overlong: cut\nrl: grpo\n",
                          &c),
                     BL_EUSAGE);
    assert_string_equal(bl_error_text(), "c.yaml: 10 problems, listed above");
    assert_string_equal(
        problems,
        "c.yaml:1: lora_rnak: unknown key; did you mean lora_r?\n"
        "c.yaml:2: lora_r: expected an integer in [1, 1024], got 'many'\n"
        "c.yaml:5: seed: seed is already set in line 4\n"
        "c.yaml:7: datasets.path: 'tatsu-lab/alpaca' is not supported; use train_file, a local "
        "JSON or JSON lines file\n"
        "c.yaml:9: datasets.type: data_format is already set in line 8\n"
        "c.yaml:10: mine: nested keys are not supported; write keys at the top level\n"
        "c.yaml:12: expected a key\n"
        "c.yaml:14: tags are not supported\n"
        "c.yaml:15: overlong: expected one of truncate, skip, error, got 'cut'\n"
        "c.yaml:16: rl: 'grpo' is not supported; use loss_type\n");
}

/* One problem is one line, and one too many ends the reading. */
static void test_one_and_too_many_problems(void **state)
{
    char many[4096] = "";
    bl_train_config *c;
    (void)state;

    assert_int_equal(load(REQUIRED "lora_rnak: 4\n", &c), BL_EUSAGE);
    assert_string_equal(bl_error_text(), "c.yaml:4: lora_rnak: unknown key; did you mean lora_r?");
    assert_string_equal(problems, "");
    for (int i = 0; i < 100; i++)
        snprintf(many + strlen(many), sizeof many - strlen(many), "qwertz%d: 1\n", i);
    assert_int_equal(load(many, &c), BL_EUSAGE);
    assert_non_null(
        strstr(problems, "c.yaml: more than 64 keys cannot be used; the rest is not read"));
    assert_null(strstr(problems, "qwertz80"));
    /* A syntax error ends the reading, too, and is reported with the rest. */
    assert_int_equal(load("lora_rnak: 4\nseed: [\n", &c), BL_EUSAGE);
    assert_non_null(strstr(problems, "c.yaml:1: lora_rnak"));
    assert_non_null(strstr(problems, "c.yaml:3: "));
}

static void test_no_effect_is_one_warning(void **state)
{
    bl_train_config *c;
    char *line[] = {"c.yaml", "--wandb_name", "x", "--flash_attention", "true"};
    (void)state;

    assert_int_equal(load(REQUIRED "wandb_project: mine\nflash_attention: true\nmodel_type: Llama\n"
                                   "s2_attention:\nsave_only_model: false\n"
                                   "optim: adamw_torch\nstage: sft\n"
                                   "metric_logger:\n  log_dir: x\n",
                          &c),
                     BL_OK);
    bl_train_config_free(c);
    assert_string_equal(warnings, "keys of other programs, no effect here: wandb_project, "
                                  "flash_attention, model_type, s2_attention, "
                                  "save_only_model, "
                                  "metric_logger.log_dir\n");
    assert_int_equal(load(REQUIRED, &c), BL_OK);
    bl_train_config_free(c);
    assert_string_equal(warnings, "");
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, NULL, 5, line, &c), BL_OK);
    bl_train_config_free(c);
    assert_string_equal(warnings,
                        "keys of other programs, no effect here: wandb_name, flash_attention\n");
}

/* Keys that would change training are rejected, with the reason. */
static void test_rejected_by_reason(void **state)
{
    static const struct {
        const char *yaml, *error;
    } cases[] = {
        {"s2_attention: true\n", "'true' is not supported: attention is full"},
        {"adapter: qlora\n", "'qlora' is not supported; use base_format nf4, mxfp4 or int4_g32"},
        {"load_in_8bit: true\n", "use base_format fp8_row, 8 bits per weight"},
        {"lr_groups: 1\n", "learning_rates"},
        {"embedding_lr_scale: 0.5\n", "embedding_learning_rate, times learning_rate"},
        {"optim: adamw_8bit\n", "not supported: the optimizer is AdamW"},
        {"stage: dpo\n", "'dpo' is not supported; use loss_type; for dpo: sigmoid"},
        {"cpo_alpha: 0.5\n", "use loss_type: [simpo, sft], and loss_weights"},
        {"finetuning_type: freeze\n", "finetuning_type: expected one of lora, full, got 'freeze'"},
        {"finetuning_type: full\nlora_r: 4\n", "finetuning_type full: lora_r is not supported"},
        {"use_llama_pro: true\n", "use finetuning_type: lora or full"},
        {"template: qwen\n", "use chat_template: llama2, llama3,"},
        {"val_set_size: 500\n", "validation_split_percentage, in percent"},
        {"packing_strategy: wrapped\n", "use packing: pack or concatenate"},
        {"neftune_noise_alpha: 5\n", "embeddings get no noise"},
        {"plugins: [axolotl.integrations.spectrum.SpectrumPlugin]\n", "plugins cannot be loaded"},
        {"special_tokens:\n  eos_token: x\n", "special_tokens.eos_token: not supported"},
        {"lora_rank: 16\n",
         "c.yaml:4: lora_rank: give lora_alpha, too: LLaMA-Factory's default is"},
        {"assistant_only_loss: false\ncompletion_only_loss: true\n", "already set in line 4"},
        {"rank_pattern: {q_proj: 4}\n", "every projection has the same rank"},
        {"exclude_modules: [k_proj]\n", "lora_target_modules: other modules are frozen"},
        {"train_on_eos: none\n", "the loss covers the token that ends an answer"},
        {"sequence_parallel_size: 4\n", "a sequence is on one rank"},
        {"fsdp_cpu_offload: true\n", "use offload_ratio"},
        {"use_dft_loss: true\n", "the loss is cross entropy"},
        {"interleave_probs: 0.5\n", "more_train_files and train_file_shares"},
    };
    bl_train_config *c;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char yaml[512];
        snprintf(yaml, sizeof yaml, REQUIRED "%s", cases[i].yaml);
        assert_int_equal(load(yaml, &c), BL_EUSAGE);
        if (!strstr(bl_error_text(), cases[i].error))
            fail_msg("'%s' is not in: %s", cases[i].error, bl_error_text());
    }
}

/* The keys of transformers that compare evaluations. */
static void test_best_model_keys(void **state)
{
    static const struct {
        const char *yaml, *error;
    } cases[] = {
        {"load_best_model_at_end: true\n",
         "load_best_model_at_end compares evaluations: needs eval_strategy steps or epoch"},
        {"early_stopping_patience: 2\n",
         "early_stopping_patience compares evaluations: needs eval_strategy steps or epoch"},
        {"save_strategy: best\n",
         "save_strategy best compares evaluations: needs eval_strategy steps or epoch"},
        {"early_stopping_threshold: 0.1\n",
         "early_stopping_threshold 0.1 needs early_stopping_patience"},
        {"metric_for_best_model: eval_accuracy\n",
         "c.yaml:4: metric_for_best_model: expected one of loss, eval_loss, got 'eval_accuracy'"},
        {"greater_is_better: true\n",
         "greater_is_better true: metric_for_best_model is a loss, which is better when lower; "
         "leave the key out"},
    };
    bl_train_config *c;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char yaml[512];
        snprintf(yaml, sizeof yaml, REQUIRED "%s", cases[i].yaml);
        assert_int_equal(load(yaml, &c), BL_EUSAGE);
        assert_string_equal(bl_error_text(), cases[i].error);
    }
    assert_int_equal(load(REQUIRED "validation_file: v\neval_strategy: epoch\n"
                                   "save_strategy: epoch\nload_best_model_at_end: true\n"
                                   "metric_for_best_model: eval_loss\ngreater_is_better: false\n"
                                   "early_stopping_steps: 3\nearly_stopping_threshold: 0.01\n",
                          &c),
                     BL_OK);
    assert_string_equal(warnings, "");
    assert_true(c->load_best_model_at_end && c->early_stopping_patience == 3 &&
                c->early_stopping_threshold == 0.01 && c->save_strategy == BL_SAVE_EPOCH);
    bl_train_config_free(c);
}

/* Words that are far from any key get no suggestion. */
static void test_suggestions_are_near(void **state)
{
    static const char *const words[] = {"tracks", "packing_policy", "local_alpha",   "value_split",
                                        "stride", "recall",         "soft_grad_norm"};
    bl_train_config *c;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(words); i++) {
        char yaml[64], error[96];
        snprintf(yaml, sizeof yaml, "%s: 1\n", words[i]);
        snprintf(error, sizeof error, "c.yaml:1: %s: unknown key", words[i]);
        assert_int_equal(load(yaml, &c), BL_EUSAGE);
        assert_string_equal(bl_error_text(), error);
    }
}

static void test_values_keep_their_meaning(void **state)
{
    bl_train_config *c;
    (void)state;

    assert_int_equal(load(REQUIRED
                          "warmup_steps: 0.03\npacking: true\nval_size: 0.07\n"
                          "activation_checkpointing: true\nlora_rank: 16\nlora_alpha: 32\n"
                          "enable_activation_offloading: true\nassistant_only_loss: false\n"
                          "evals_per_epoch: 1\ntemplate: llama3\nadapter: some/dir\n",
                          &c),
                     BL_OK);
    assert_true(c->warmup_ratio == 0.03 && c->warmup_steps == 0);
    assert_int_equal(c->packing, BL_PACKING_PACK);
    assert_true(c->validation_split_percentage == 7 && c->eval_strategy == BL_EVAL_EPOCH);
    assert_int_equal(c->activation_checkpointing, BL_RECOMPUTE_FULL);
    assert_true(c->activation_offload && c->train_on_inputs);
    assert_true(c->lora_r == 16 && c->lora_alpha == 32);
    assert_string_equal(c->chat_template, "llama3");
    assert_string_equal(c->init_adapter, "some/dir");
    bl_train_config_free(c);
    assert_int_equal(load(REQUIRED "warmup_steps: 3\n", &c), BL_OK);
    assert_true(c->warmup_steps == 3 && c->warmup_ratio == 0);
    bl_train_config_free(c);
    assert_int_equal(load(REQUIRED "warmup_steps: 0.1\nwarmup_ratio: 0.1\n", &c), BL_EUSAGE);
    assert_string_equal(bl_error_text(),
                        "c.yaml:5: warmup_ratio: warmup_ratio is already set in line 4");
    assert_int_equal(load(REQUIRED "warmup_steps: 1.5\n", &c), BL_EUSAGE);
}

/* At the values that published files have. */
static void test_rarer_keys(void **state)
{
    bl_train_config *c;
    (void)state;

    assert_int_equal(load(REQUIRED
                          "peft_type: LORA\nfan_in_fan_out: false\ngptq: false\n"
                          "roles_to_train: [assistant]\ntrain_on_eos: turn\nbfloat16: false\n"
                          "device_map: auto\nbatch_size_val: 3\nkeep_last_n_checkpoints: 4\n"
                          "run_val_every_n_steps: 7\ndata_parallel_shard_dim: -1\n"
                          "fsdp_cpu_offload: false\ndataset_text_field: body\n"
                          "torch_dtype: bfloat16\nbf16: true\nlora_target_modules:\n"
                          "lora_target_linear: true\n",
                          &c),
                     BL_OK);
    assert_true(c->per_device_eval_batch_size == 3 && c->save_total_limit == 4);
    assert_true(c->eval_steps == 7);
    assert_string_equal(c->dataset_text_field, "body");
    assert_int_equal(c->lora_target_modules.n_items, 1);
    bl_train_config_free(c);
    assert_string_equal(warnings, "keys of other programs, no effect here: fan_in_fan_out, gptq, "
                                  "device_map, fsdp_cpu_offload\n");
}

static void test_bf16_on_a_cpu(void **state)
{
    static const char *const keys[] = {"bf16: true", "compute_dtype: bf16",
                                       "torch_dtype: bfloat16"};
    bl_train_config *c;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(keys); i++) {
        char yaml[256];
        snprintf(yaml, sizeof yaml, REQUIRED "device: cpu\n%s\n", keys[i]);
        setenv(CPU_BF16, "emulated", 1);
        assert_int_equal(load(yaml, &c), BL_OK);
        assert_int_equal(c->compute_dtype, BL_COMPUTE_BF16);
        assert_int_equal(bl_train_config_act(c), BL_BF16);
        bl_train_config_free(c);
        assert_string_equal(warnings, "");
        setenv(CPU_BF16, "off", 1);
        assert_int_equal(load(yaml, &c), BL_EUSAGE);
        assert_string_equal(bl_error_text(), "compute_dtype bf16: this processor has no "
                                             "AVX512-BF16; use auto or fp32");
    }
    assert_int_equal(load(REQUIRED "device: cpu\nfp8: true\n", &c), BL_EUSAGE);
    setenv(CPU_BF16, "emulated", 1);
}

/* ---- config --from ---- */

/* The configuration that comes of a file in foreign/, as `train` reads it with the words of `line`;
 * *text is the caller's. */
static bl_train_config *convert(const char *name, const char *tool, int argc, char **argv,
                                char **text)
{
    bl_train_config *c;
    char path[512];
    size_t n_bytes;
    FILE *out = open_memstream(text, &n_bytes);

    snprintf(path, sizeof path, FOREIGN_DIR "/%s", name);
    problems[0] = warnings[0] = '\0';
    assert_int_equal(bl_train_config_convert(path, tool, out), BL_OK);
    fclose(out);
    assert_int_equal(bl_file_write_atomic("converted.yaml", *text, n_bytes), BL_OK);
    assert_int_equal(bl_train_config_load(BL_CONFIG_TRAIN, "converted.yaml", argc, argv, &c),
                     BL_OK);
    return c;
}

static void expect_lines(const char *text, const char *const *lines, size_t n_lines)
{
    for (size_t i = 0; i < n_lines; i++)
        if (!strstr(text, lines[i])) fail_msg("'%s' is not in:\n%s", lines[i], text);
}

static void test_preference_keys(void **state)
{
    bl_train_config *c;
    bl_losses losses;
    (void)state;

    assert_int_equal(load(REQUIRED "rl: dpo\nrl_beta: 0.3\n", &c), BL_OK);
    assert_int_equal(bl_train_config_losses(c, &losses), BL_OK);
    assert_true(losses.term[0].loss == BL_LOSS_SIGMOID && losses.beta == 0.3);
    bl_train_config_free(c);
    assert_int_equal(load(REQUIRED "stage: kto\npref_beta: 0.2\nkto_chosen_weight: 2\n", &c),
                     BL_OK);
    assert_int_equal(bl_train_config_losses(c, &losses), BL_OK);
    assert_true(losses.is_unpaired && losses.beta == 0.2 && losses.desirable_weight == 2);
    bl_train_config_free(c);
    assert_int_equal(load(REQUIRED "loss_type: sigmoid\nprecompute_ref_log_probs: true\n"
                                   "precompute_ref_batch_size: 8\n",
                          &c),
                     BL_OK);
    assert_true(c->precompute_ref_log_probs);
    assert_string_equal(warnings,
                        "keys of other programs, no effect here: precompute_ref_batch_size\n");
    bl_train_config_free(c);
    assert_int_equal(load(REQUIRED "loss_type: orpo\nprecompute_ref_log_probs: true\n", &c),
                     BL_EUSAGE);
}

static void test_from_axolotl(void **state)
{
    static const char *const lines[] = {
        "axolotl.yaml:44: optimizer: 'adamw_bnb_8bit' is not supported: the optimizer is AdamW",
        "evals_per_epoch: '4' is not supported; use eval_strategy: steps and eval_steps",
        "#   wandb_name\n",
        "#   flash_attention\n",
        "eval_strategy: epoch  # default of axolotl\n",
        "save_strategy: epoch\n"};
    char *text;
    bl_train_config *c = convert("axolotl.yaml", NULL, 0, NULL, &text);
    (void)state;

    expect_lines(text, lines, BL_COUNT(lines));
    assert_string_equal(c->model_name_or_path, "models/Llama-3.2-1B");
    assert_string_equal(c->train_file, "data/train.jsonl");
    assert_string_equal(c->output_dir, "runs/axolotl");
    assert_true(c->data_format == BL_DATA_MESSAGES && c->packing == BL_PACKING_PACK);
    assert_true(c->validation_split_percentage == 5 && c->max_seq_length == 4096);
    assert_true(c->lora_r == 32 && c->lora_alpha == 16 && c->lora_dropout == 0.05);
    assert_true(c->per_device_train_batch_size == 2 && c->gradient_accumulation_steps == 4);
    assert_true(c->num_train_epochs == 3 && c->learning_rate == 2e-4 && c->warmup_ratio == 0.1);
    assert_true(c->lr_scheduler_type == BL_LR_COSINE && c->eval_strategy == BL_EVAL_EPOCH);
    assert_string_equal(c->lora_target_modules.items[0], "all-linear");
    assert_int_equal(c->activation_checkpointing, BL_RECOMPUTE_FULL);
    assert_null(c->chat_template);
    bl_train_config_free(c);
    free(text);
}

static void test_from_llamafactory(void **state)
{
    static const char *const lines[] = {"lora_alpha: 32  # default of llamafactory\n",
                                        "# To add: train_file is not given\n",
                                        "use train_file: the file that dataset_info.json names\n"};
    char *line[] = {"--train_file", "t"}, *text;
    bl_train_config *c = convert("llamafactory.yaml", NULL, 2, line, &text);
    (void)state;

    expect_lines(text, lines, BL_COUNT(lines));
    assert_true(c->lora_r == 16 && c->lora_alpha == 32 && c->learning_rate == 5e-5);
    assert_true(c->max_seq_length == 1024 && c->packing == BL_PACKING_PACK);
    assert_true(c->warmup_ratio == 0.03 && c->warmup_steps == 0);
    assert_true(c->validation_split_percentage == 10 && c->eval_strategy == BL_EVAL_STEPS);
    assert_string_equal(c->chat_template, "llama3");
    bl_train_config_free(c);
    free(text);
}

static void test_from_trl(void **state)
{
    static const char *const lines[] = {"neftune_noise_alpha: '5' is not supported",
                                        "dataset_name: not a key of Ballast; use train_file",
                                        "#   attn_implementation\n"};
    char *line[] = {"--train_file", "t"}, *text;
    bl_train_config *c = convert("trl.yaml", NULL, 2, line, &text);
    (void)state;

    expect_lines(text, lines, BL_COUNT(lines));
    assert_true(c->lora_r == 32 && c->lora_alpha == 32 && c->lora_dropout == 0.05);
    assert_true(c->lora_target_modules.n_items == 4 && c->learning_rate == 2e-5);
    assert_true(!c->train_on_inputs && c->max_grad_norm == 0.5 && c->seed == 7);
    assert_true(c->warmup_ratio == 0.03 && c->packing == BL_PACKING_PACK);
    assert_int_equal(c->activation_checkpointing, BL_RECOMPUTE_FULL);
    bl_train_config_free(c);
    free(text);
}

static void test_from_torchtune(void **state)
{
    static const char *const modules[] = {"q_proj",  "v_proj",    "o_proj", "gate_proj",
                                          "up_proj", "down_proj", "lm_head"};
    char *text;
    bl_train_config *c = convert("torchtune.yaml", NULL, 0, NULL, &text);
    (void)state;

    assert_string_equal(warnings, "");
    assert_null(strstr(text, "No counterpart"));
    assert_string_equal(c->model_name_or_path, "models/Llama-3.1-8B");
    assert_string_equal(c->train_file, "data/alpaca.json");
    assert_true(c->data_format == BL_DATA_ALPACA && c->train_on_inputs);
    assert_int_equal(c->lora_target_modules.n_items, BL_COUNT(modules));
    for (size_t i = 0; i < BL_COUNT(modules); i++)
        assert_string_equal(c->lora_target_modules.items[i], modules[i]);
    assert_true(c->lora_r == 64 && c->lora_alpha == 128 && c->learning_rate == 3e-4);
    assert_true(c->weight_decay == 0.01 && c->max_grad_norm == 0 && c->warmup_steps == 100);
    assert_true(c->per_device_train_batch_size == 2 && c->gradient_accumulation_steps == 8);
    assert_true(c->lr_scheduler_type == BL_LR_COSINE && c->max_seq_length == 2048);
    bl_train_config_free(c);
    free(text);
}

/* Without keys that only one program has, the program must be named; the defaults depend on it. */
/* Programs whose file asks for an adapter, or else trains every weight. */
static void test_all_weights(void **state)
{
    static const struct {
        const char *tool, *yaml, *line;
    } cases[] = {
        {"axolotl", "adapter:\n", "finetuning_type: full  # default of axolotl\n"},
        {"axolotl", "adapter: lora\n", "finetuning_type: lora\n"},
        {"trl", "use_peft: false\n", "finetuning_type: full\n"},
        {"trl", "max_length: 64\n", "finetuning_type: full  # default of trl\n"},
        {"llamafactory", "finetuning_type: full\n", "finetuning_type: full\n"},
        {"torchtune", "model:\n  _component_: torchtune.models.llama3_1.llama3_1_8b\n",
         "finetuning_type: full\n"},
        {"torchtune", "model:\n  _component_: torchtune.models.llama3_1.lora_llama3_1_8b\n",
         "finetuning_type: lora\n"},
    };
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char *text;
        size_t n_bytes;
        FILE *out = open_memstream(&text, &n_bytes);
        bool is_full = strstr(cases[i].line, "full") != NULL;
        assert_int_equal(bl_file_write_atomic("foreign.yaml", cases[i].yaml, strlen(cases[i].yaml)),
                         BL_OK);
        assert_int_equal(bl_train_config_convert("foreign.yaml", cases[i].tool, out), BL_OK);
        fclose(out);
        if (!strstr(text, cases[i].line) || (is_full && strstr(text, "lora_")))
            fail_msg("%s: %s: %s", cases[i].tool, cases[i].yaml, text);
        free(text);
    }
}

static void test_from_unknown(void **state)
{
    static const char yaml[] = "learning_rate: 1\nlora_r: 4\n# a comment\n\"two\\nlines\": 1\n";
    char *text;
    size_t n_bytes;
    FILE *out = open_memstream(&text, &n_bytes);
    (void)state;

    assert_int_equal(bl_file_write_atomic("c.yaml", yaml, strlen(yaml)), BL_OK);
    assert_int_equal(bl_train_config_convert("c.yaml", NULL, out), BL_EUSAGE);
    assert_non_null(strstr(bl_error_text(), "give --tool axolotl, llamafactory, trl or torchtune"));
    assert_int_equal(bl_train_config_convert("absent.yaml", NULL, out), BL_EUSAGE);
    assert_int_equal(bl_train_config_convert("c.yaml", "axolotl", out), BL_OK);
    fclose(out);
    assert_non_null(strstr(text, "num_train_epochs: 1  # default of axolotl\n"));
    assert_non_null(strstr(text, "#   c.yaml:4: two?lines: unknown key\n"));
    free(text);
}

static int enter_temporary_folder(void **state)
{
    static char folder[] = "/tmp/ballast-test-foreign-XXXXXX";
    *state = folder;
    return mkdtemp(folder) ? chdir(folder) : -1;
}

static int remove_temporary_folder(void **state)
{
    return chdir("/") || bl_tree_remove(*state) != BL_OK;
}

int main(void)
{
    setenv(CPU_BF16, "emulated", 1);
    const struct CMUnitTest tests[] = {
        cmocka_unit_test(test_all_problems_at_once),
        cmocka_unit_test(test_one_and_too_many_problems),
        cmocka_unit_test(test_no_effect_is_one_warning),
        cmocka_unit_test(test_rejected_by_reason),
        cmocka_unit_test(test_best_model_keys),
        cmocka_unit_test(test_suggestions_are_near),
        cmocka_unit_test(test_values_keep_their_meaning),
        cmocka_unit_test(test_rarer_keys),
        cmocka_unit_test(test_bf16_on_a_cpu),
        cmocka_unit_test(test_preference_keys),
        cmocka_unit_test(test_from_axolotl),
        cmocka_unit_test(test_from_llamafactory),
        cmocka_unit_test(test_from_trl),
        cmocka_unit_test(test_from_torchtune),
        cmocka_unit_test(test_all_weights),
        cmocka_unit_test(test_from_unknown),
    };
    return cmocka_run_group_tests(tests, enter_temporary_folder, remove_temporary_folder);
}
