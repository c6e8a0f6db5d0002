/* SPDX-License-Identifier: Apache-2.0 */
/* `ballast config --from`: the defaults of each trainer, keys and values without a counterpart, and
 * that `train` takes every result. foreign/fields.txt has the fields of other programs' classes, by
 * foreign_fields.py. */
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

/* Without waiting for the disk, as bl_file_write_atomic would. */
static bl_status write_file(const char *path, const char *text, size_t n_bytes)
{
    FILE *out = fopen(path, "w");
    size_t n_written = out ? fwrite(text, 1, n_bytes, out) : 0;
    return out && fclose(out) == 0 && n_written == n_bytes ? BL_OK : BL_EIO;
}

/* The result of `yaml`; the caller's. */
static char *convert(const char *tool, const char *yaml)
{
    char *text;
    size_t n_bytes;
    FILE *out = open_memstream(&text, &n_bytes);

    assert_int_equal(write_file("f.yaml", yaml, strlen(yaml)), BL_OK);
    if (bl_train_config_convert("f.yaml", tool, out) != BL_OK)
        fail_msg("%s: %s\n%s", tool, bl_error_text(), yaml);
    fclose(out);
    return text;
}

/* `train` takes the result, once what is under "To add" is there: on a machine with GPUs or on
 * one without. */
static void expect_accepted(const char *tool, const char *yaml, const char *text)
{
    char *argv[] = {
        "r.yaml", "--model_name_or_path", "m", "--train_file", "t", "--output_dir", "o", "", ""};
    int argc = 7;
    bl_status st = BL_EUSAGE;

    if (strstr(text, "# To add: eval_strategy")) {
        argv[argc++] = "--validation_file";
        argv[argc++] = "v";
    }
    assert_int_equal(write_file("r.yaml", text, strlen(text)), BL_OK);
    for (int has_gpus = 0; has_gpus < 2 && st != BL_OK; has_gpus++) {
        const bl_config_machine machine = {has_gpus, 1, 1, 1, "a GPU", 90, true};
        bl_train_configs configs;
        st = bl_train_configs_load_for(&machine, argc, argv, &configs);
        if (st == BL_OK) bl_train_configs_free(&configs);
    }
    if (st != BL_OK) fail_msg("%s: %s\nof:\n%s\nresult:\n%s", tool, bl_error_text(), yaml, text);
}

static bool is_listed(const char *text, const char *title, const char *key)
{
    char line[256];
    const char *begin = strstr(text, title), *end = begin ? strstr(begin, "\n\n") : NULL, *at;

    if (!begin) return false;
    snprintf(line, sizeof line, ": %s: ", key);
    at = strstr(begin, line);
    return at && (!end || at < end);
}

/* ---- defaults ---- */

#define TRL_LORA "model_name_or_path: m\noutput_dir: o\ntrain_file: t\nuse_peft: true\n"
#define AX_LORA                                                                                    \
    "base_model: m\noutput_dir: o\nadapter: lora\ndatasets:\n  - path: t.jsonl\n    type: "        \
    "alpaca\n"
#define LF_LORA "model_name_or_path: m\noutput_dir: o\ntrain_file: t\nfinetuning_type: lora\n"
#define TT_LORA                                                                                    \
    "checkpointer:\n  checkpoint_dir: m\noutput_dir: o\ntrain_file: t\nmodel:\n  _component_: "    \
    "torchtune.models.llama3_1.lora_llama3_1_8b\n"
#define SFT_NOTE "TRL's loss covers all of a conversation"

/* With `has` (lines, separated by |) and without `lacks`. */
static const struct {
    const char *tool, *yaml, *has, *lacks;
} cases[] = {
    /* each trainer of TRL */
    {"trl", TRL_LORA,
     "(SFTConfig; defaults of TRL 1.16.0)|learning_rate: 2.0e-05|lora_dropout: "
     "0.05  # default of trl|base_format: stored|" SFT_NOTE,
     "loss_type"},
    {"trl", TRL_LORA "loss_type: sigmoid\nbeta: 0.2\n",
     "(DPOConfig|learning_rate: 1.0e-06|beta: 0.2", "lora_dropout"},
    {"trl", TRL_LORA "beta: 0.2\n", "loss_type: [sigmoid]  # default|--tool trl-sft, trl-kto",
     "nll"},
    {"trl", TRL_LORA "lora_dropout: 0.1\nld_alpha: 0.5\n", "lora_dropout: 0  # disable", "0.1"},
    {"trl", TRL_LORA "lora_dropout: 0.1\nld_alpha: 0.5\ndisable_dropout: false\n",
     "lora_dropout: 0.1", "# disable"},
    {"trl", TRL_LORA "loss_type: kto\n", "(KTOConfig|learning_rate: 1.0e-06|shuffle: false", "nll"},
    {"trl", TRL_LORA "desirable_weight: 1.5\n", "loss_type: [kto]  # default", "nll"},
    {"trl", TRL_LORA "loss_type: orpo\n", "(ORPOConfig|learning_rate: 1.0e-06", "sigmoid"},
    {"trl-orpo", TRL_LORA "beta: 0.2\n", "loss_type: [orpo]  # default|beta: 0.2", "sigmoid"},
    {"trl", TRL_LORA "loss_type: simpo\n",
     "(CPOConfig|loss_type: [simpo, sft]  # cpo_alpha is 1 in trl|learning_rate: 1.0e-06", "nll"},
    {"trl", TRL_LORA "loss_type: simpo\ncpo_alpha: 0.0\n", "loss_type: [simpo]", "sft]"},
    {"trl", TRL_LORA "loss_type: sigmoid\ncpo_alpha: 1.0\n",
     "losses of CPOConfig other than simpo have no reference", "loss_type: [sigmoid]"},
    {"trl", TRL_LORA "loss_type: simpo\nalpha: 0.5\n", "AlphaPO", "lora_alpha: 0.5"},
    {"trl", TRL_LORA "load_in_4bit: true\n", "4-bit", "base_format: stored"},
    {"trl", TRL_LORA "eval_strategy: steps\nvalidation_file: v\n", "eval_steps: 10  #", "500"},
    {"trl", TRL_LORA "eval_strategy: steps\nlogging_steps: 25\n",
     "eval_steps: 25  #|# To add: eval_strategy steps needs validation_file", "500"},
    /* axolotl */
    {"axolotl", AX_LORA,
     "warmup_ratio: 0.03  # default|min(int(0.03 x steps), 100)|base_format: stored|overlong: skip|"
     "save_total_limit: 4",
     "loss_type"},
    {"axolotl", AX_LORA "warmup_steps: 0\n", "warmup_steps: 0", "warmup_ratio: "},
    {"axolotl", AX_LORA "warmup_ratio: 0.1\n", "warmup_ratio: 0.1\n", "min(int"},
    {"axolotl", AX_LORA "warmup_ratio:\nwarmup_steps:\n", "warmup_ratio: 0.03  #|min(int", "0\n#"},
    {"axolotl", AX_LORA "lr_scheduler: constant\n", "lr_scheduler_type: constant",
     "warmup_ratio: "},
    {"axolotl", AX_LORA "load_in_8bit: true\n", "8 bits per weight", "base_format: stored"},
    {"axolotl", AX_LORA "rl: dpo\nlora_dropout: 0.1\n",
     "loss_type: [sigmoid]  # default|lora_dropout: 0  # disable_dropout is true in axolotl",
     "0.1"},
    {"axolotl", AX_LORA "rl: dpo\ndpo_loss_type: [hinge]\n", "loss_type: [hinge]", "sigmoid"},
    {"axolotl", AX_LORA "rl: simpo\n", "loss_type: [simpo, sft]", "nll"},
    {"axolotl", "base_model: m\nadapter: qlora\n", "'qlora' is not supported", "\nbase_format"},
    {"axolotl", "base_model: m\n", "finetuning_type: full  # default of axolotl", "base_format"},
    /* LLaMA-Factory */
    {"llamafactory", LF_LORA, "learning_rate: 5.0e-05|lora_alpha: 16|base_format: stored", "loss_"},
    {"llamafactory", LF_LORA "stage: dpo\n", "(dpo|loss_type: [sigmoid]  # default", "stage: "},
    {"llamafactory", LF_LORA "stage: dpo\npref_loss: orpo\nlora_dropout: 0.1\n",
     "loss_type: [orpo]|lora_dropout: 0  # disable", "0.1"},
    {"llamafactory", LF_LORA "pref_loss: simpo\nstage: dpo\n", "loss_type: [simpo]", "sigmoid"},
    {"llamafactory", LF_LORA "stage: kto\n", "loss_type: [kto]", "sigmoid"},
    {"llamafactory", LF_LORA "quantization_bit: 4\n", "quantization_bit", "base_format: stored"},
    /* torchtune */
    {"torchtune", TT_LORA, "weight_decay: 0.01|max_grad_norm: 0|base_format: stored", "loss_type"},
    {"torchtune",
     TT_LORA "loss:\n  _component_: torchtune.rlhf.loss.DPOLoss\n  beta: 0.05\n"
             "  label_smoothing: 0\ndataset:\n"
             "  _component_: torchtune.datasets.stack_exchange_paired_dataset\n",
     "(dpo recipes|loss_type: [sigmoid]|beta: 0.05|data_format: preference", "# No counterpart"},

    /* values that do not exist here, or have no effect with another value */
    {"trl", TRL_LORA "loss_type: dft\n", "# No counterpart|'dft' is not one of",
     "\nloss_type: [dft]"},
    {"trl", TRL_LORA "loss_type: bco_pair\n", "'bco_pair' is not one of",
     "\nloss_type: [bco_pair]"},
    {"trl", TRL_LORA "loss_type: [sigmoid, aot]\n", "'aot' is not one of", "\nloss_type: [sig"},
    {"llamafactory", LF_LORA "stage: dpo\ndpo_label_smoothing: 0.1\n",
     "label_smoothing has no effect with loss_type sigmoid|loss_type: [sigmoid]",
     "\nlabel_smoothing: "},
    {"trl", TRL_LORA "loss_type: sigmoid\nld_alpha: 1.5\n", "ld_alpha: expected", "\nld_alpha"},
    {"trl", TRL_LORA "loss_type: sigmoid\nloss_weights: [1, 2]\n", "2 numbers for 1", "\nloss_w"},
    {"trl", TRL_LORA "loss_type: sigmoid\npacking: true\n", "packing pack is not", "\npacking:"},
    {"trl", TRL_LORA "loss_type: kto\nper_device_train_batch_size: 1\n", "at least 2 rows",
     "\nper_device_train"},
    {"trl", TRL_LORA "lora_target_modules: [c_attn]\n", "'c_attn' is not one of",
     "\nlora_target_modules: [c_attn"},
    {"trl", TRL_LORA "load_best_model_at_end: true\n", "compares evaluations", "\nload_best"},
    {"trl", TRL_LORA "greater_is_better: true\n", "is better when lower", "\ngreater"},
    {"trl", "model_name_or_path: m\nlora_r: 16\nlora_alpha: 32\n",
     "finetuning_type: full|lora_r is not supported|lora_alpha is not supported", "\nlora_r"},
    {"trl", "model_name_or_path: m\nloss_type: sigmoid\n", "loss_type: [sigmoid]|preference losses",
     "\nfinetuning_type"},
    {"trl", TRL_LORA "lr_scheduler_type: constant\nwarmup_steps: 10\n",
     "lr_scheduler_type: constant|has no warm-up", "\nwarmup_steps"},
    {"trl", TRL_LORA "modules_to_save: [lm_head]\nloss_type: ipo\n", "loss_type: [ipo]",
     "\nmodules_to_save"},

    /* null */
    {"trl", TRL_LORA "max_grad_norm: null\n", "max_grad_norm: 0\n", "No counterpart"},
    {"llamafactory", LF_LORA "max_grad_norm:\n", "max_grad_norm: 0\n", "No counterpart"},
    {"axolotl", AX_LORA "max_grad_norm:\n", "max_grad_norm: 1\n", "No counterpart"},
    {"torchtune", TT_LORA "clip_grad_norm: null\n", "max_grad_norm: 0\n", "No counterpart"},
    {"trl", TRL_LORA "max_length: null\n", "null is no limit; give max_seq", "\nmax_seq_length"},
    {"torchtune", TT_LORA "tokenizer:\n  max_seq_len: null\n", "null is no limit", "\nmax_seq"},
    {"trl", TRL_LORA "lora_target_modules: null\n", "[q_proj, v_proj]  # default", "counterpart"},
    {"llamafactory", LF_LORA "lora_alpha: null\n", "lora_alpha: 16  # default", "counterpart"},
    {"axolotl", AX_LORA "val_set_size:\nsave_total_limit: ~\n", "save_total_limit: 4", "valid"},
    {"trl", TRL_LORA "eval_strategy: steps\nvalidation_file: v\neval_steps: null\n",
     "eval_steps: 10  # default", "counterpart"},

    /* the behavior of other programs that is Ballast's */
    {"axolotl",
     "base_model: m\nadapter: lora\nplugins:\n  - axolotl.integrations.liger.LigerPlugin\n"
     "datasets:\n  - path: t.jsonl\n    type: chat_template\n    roles_to_train: [assistant]\n"
     "    train_on_eos: turn\n    message_property_mappings:\n      role: role\n"
     "      content: content\n    roles:\n      user: [user]\n      assistant: [assistant]\n",
     "# The same without a key|#   plugins|#   datasets.roles_to_train|#   datasets.train_on_eos|# "
     "  "
     "datasets.message_property_mappings.role|#   datasets.roles.assistant",
     "counterpart"},
    {"axolotl", AX_LORA "plugins:\n  - axolotl.integrations.spectrum.SpectrumPlugin\n",
     "cannot be loaded", "xx"},
    {"axolotl",
     "base_model: m\ndatasets:\n  - path: t.jsonl\n    roles_to_train: [user]\n"
     "    message_property_mappings:\n      role: from\n",
     "datasets.roles_to_train: 'user'|message_property_mappings.role: 'from'", "xx"},
};

static void test_cases(void **state)
{
    int n = 0;
    (void)state;

    for (size_t i = 0; i < BL_COUNT(cases); i++) {
        char *text = convert(cases[i].tool, cases[i].yaml), has[512];
        char *save, *line;
        snprintf(has, sizeof has, "%s", cases[i].has);
        for (line = strtok_r(has, "|", &save); line; line = strtok_r(NULL, "|", &save))
            if (!strstr(text, line)) print_error("%d: '%s' is not in:\n%s", ++n, line, text);
        const char *body = strchr(text, '\n');
        if (strstr(body, cases[i].lacks))
            print_error("%d: '%s' is in:\n%s", ++n, cases[i].lacks, text);
        expect_accepted(cases[i].tool, cases[i].yaml, text);
        free(text);
    }
    assert_int_equal(n, 0);
}

/* ---- every value with every other ---- */

static void test_grid(void **state)
{
    static const char *const losses[] = {
        "nll",    "dft", "sigmoid", "[sigmoid, sft]", "bco_pair",      "hinge",      "ipo",
        "robust", "kto", "orpo",    "simpo",          "[simpo, orpo]", "[kto, sft]", "discopop"};
    static const char *const keys[] = {"label_smoothing: 0.1",
                                       "label_smoothing: 0.7",
                                       "ld_alpha: 0.5",
                                       "beta: 0.3",
                                       "beta: -1",
                                       "packing: true",
                                       "loss_weights: [1, 0.5]",
                                       "train_on_inputs: true",
                                       "simpo_gamma: 1",
                                       "desirable_weight: 2",
                                       "precompute_ref_log_probs: true",
                                       "max_grad_norm: null",
                                       "dtype: float32",
                                       "fp8: true",
                                       "use_cpu: true",
                                       "bf16: true",
                                       "lora_target_modules: [wrong]",
                                       "lora_target_modules: [q_proj, q_proj]",
                                       "report_to: [wandb]",
                                       "report_to: [tensorboard, none]",
                                       "logging_dir: l",
                                       "eval_strategy: steps",
                                       "load_best_model_at_end: true",
                                       "early_stopping_patience: 3",
                                       "validation_split_percentage: 5",
                                       "lr_scheduler_type: constant",
                                       "warmup_ratio: 0.1",
                                       "per_device_train_batch_size: 1",
                                       "num_train_epochs: 0",
                                       "trainable_modules: [norm]",
                                       "overwrite_output_dir: true",
                                       "resume_from_checkpoint: true",
                                       "offload_tier: disk",
                                       "reduction_factor: 1",
                                       "modules_to_save: [lm_head]",
                                       "optimizer_tier: host",
                                       "embedding_lr: 1e-5",
                                       "compute_dtype: fp8",
                                       "train_file_shares: [1, 2]",
                                       "shard_size: 3",
                                       "allow_resume_mismatch: [colour]",
                                       "compute_bf16_modules: [wrong]"};
    (void)state;

    for (size_t l = 0; l < BL_COUNT(losses); l++)
        for (size_t full = 0; full < 2; full++)
            for (size_t k = 0; k < BL_COUNT(keys); k++) {
                char yaml[512];
                size_t other = (k * 7 + l * 5 + 3) % BL_COUNT(keys);
                snprintf(yaml, sizeof yaml,
                         "model_name_or_path: m\nuse_peft: %s\nloss_type: %s\n"
                         "%s\n%s\n",
                         full ? "false" : "true", losses[l], keys[k], keys[other]);
                char *text = convert("trl", yaml);
                expect_accepted("trl", yaml, text);
                free(text);
            }
}

/* ---- the fields of other programs' classes ---- */

/* Fields whose default is another behavior than Ballast's. */
static const char *const other_defaults[] = {
    "CPOConfig loss_type",        /* sigmoid without a reference */
    "TrainingArguments do_train", /* the Trainer that scripts call */
    "FreezeArguments freeze_trainable_layers",
    "FreezeArguments freeze_trainable_modules",
    "LISAConfig lisa_layers_attribute",
};

static const char *tool_of(const char *class, bool *is_axolotl, bool *is_llamafactory)
{
    static const char *const trl[] = {"SFT", "DPO", "KTO", "ORPO", "CPO"};
    static char tool[16];

    *is_axolotl |= strcmp(class, "AxolotlInputConfig") == 0;
    *is_llamafactory |= strcmp(class, "DataArguments") == 0;
    if (*is_llamafactory) return "llamafactory";
    if (*is_axolotl) return "axolotl";
    snprintf(tool, sizeof tool, "trl-sft");
    for (size_t i = 0; i < BL_COUNT(trl); i++)
        if (strncmp(class, trl[i], strlen(trl[i])) == 0)
            for (size_t c = 0; c <= strlen(trl[i]); c++)
                tool[4 + c] = (char)(trl[i][c] ? trl[i][c] | 0x20 : 0);
    return tool;
}

static char *convert_field(const char *tool, const char *class, const char *field,
                           const char *value, bool *is_base)
{
    static const char *const bases[][2] = {
        {"axolotl", AX_LORA}, {"llamafactory", LF_LORA}, {"trl", TRL_LORA}};
    char yaml[4096], key[160];
    const char *base = TRL_LORA;

    for (size_t i = 0; i < BL_COUNT(bases); i++)
        if (strcmp(tool, bases[i][0]) == 0) base = bases[i][1];
    snprintf(key, sizeof key, "%s: ", field);
    *is_base = strncmp(base, key, strlen(key)) == 0 || strcmp(field, "datasets") == 0;
    for (const char *at = base; (at = strchr(at, '\n')); at++)
        *is_base |= strncmp(at + 1, key, strlen(key)) == 0;
    bool is_nested = strcmp(class, "SFTDataset") == 0;
    *is_base |= is_nested && (strcmp(field, "path") == 0 || strcmp(field, "type") == 0);
    snprintf(yaml, sizeof yaml, "%s%s%s%s\n", base, is_nested ? "    " : "", value ? key : "",
             value ? value : "");
    char *text = convert(tool, yaml);
    expect_accepted(tool, yaml, text);
    return text;
}

/* Problems found: 0 or 1 each. */
static int check_field(const char *tool, const char *class, const char *field, const char *initial,
                       const char *other)
{
    char name[160];
    bool is_base, is_known = strcmp(initial, "-") == 0 || strcmp(initial, "null") == 0;
    char *plain = convert_field(tool, class, field, NULL, &is_base);
    if (is_base) {
        free(plain);
        return 0;
    }
    char *text = convert_field(tool, class, field, other, &is_base);
    int n = strcmp(text, plain) == 0;

    if (n) print_error("%s: %s %s: %s is dropped:\n%s", tool, class, field, other, text);
    free(text);
    free(plain);
    snprintf(name, sizeof name, "%s %s", class, field);
    for (size_t i = 0; i < BL_COUNT(other_defaults); i++)
        is_known |= strcmp(name, other_defaults[i]) == 0;
    if (is_known) return n;
    text = convert_field(tool, class, field, initial, &is_base);
    bool is_rejected = is_listed(text, "# No counterpart", field);
    if (is_rejected) print_error("%s: %s's default %s has no counterpart\n", tool, name, initial);
    free(text);
    return n + is_rejected;
}

/* A value that is not the default is converted or named; a default is accepted. */
static void test_fields(void **state)
{
    char line[4096];
    bool is_axolotl = false, is_llamafactory = false;
    FILE *in = fopen(FOREIGN_DIR "/fields.txt", "r");
    int n = 0, n_problems = 0;
    (void)state;

    assert_non_null(in);
    for (; fgets(line, sizeof line, in); n++) {
        char *save, *part[4];
        line[strcspn(line, "\n")] = '\0';
        for (int i = 0; i < 4; i++)
            assert_non_null(part[i] = strtok_r(i ? NULL : line, "\t", &save));
        n_problems += check_field(tool_of(part[0], &is_axolotl, &is_llamafactory), part[0], part[1],
                                  part[2], part[3]);
    }
    fclose(in);
    assert_true(n > 900);
    assert_int_equal(n_problems, 0);
}

static int enter_temporary_folder(void **state)
{
    static char folder[] = "/tmp/ballast-test-convert-XXXXXX";
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
        cmocka_unit_test(test_cases),
        cmocka_unit_test(test_grid),
        cmocka_unit_test(test_fields),
    };
    return cmocka_run_group_tests(tests, enter_temporary_folder, remove_temporary_folder);
}
