/* SPDX-License-Identifier: Apache-2.0 */
/* programs.c -- sources, by version (config_trainers): axolotl's utils/schemas and core/builders
 * (base.py: warm-up, saving, evaluation; rl.py); LLaMA-Factory's hparams and its trainers of dpo
 * and kto; TRL's SFTConfig, DPOConfig, KTOConfig, ORPOConfig, CPOConfig and ModelConfig,
 * transformers' TrainingArguments and PEFT's target modules of Llama; torchtune's recipes, LoRA
 * builders and DPOLoss, and torch.optim.AdamW. */
#include "config/programs_internal.h"

#include "base/sizes.h"

const char *const config_programs[] = {"axolotl", "llamafactory", "trl", "torchtune"};
const size_t config_n_programs = BL_COUNT(config_programs);

const config_marker config_markers[] = {
    {"axolotl", "base_model"},
    {"axolotl", "sequence_len"},
    {"axolotl", "micro_batch_size"},
    {"axolotl", "num_epochs"},
    {"axolotl", "val_set_size"},
    {"axolotl", "adapter"},
    {"axolotl", "datasets.path"},
    {"axolotl", "lora_target_linear"},
    {"axolotl", "rl"},
    {"llamafactory", "stage"},
    {"llamafactory", "finetuning_type"},
    {"llamafactory", "template"},
    {"llamafactory", "cutoff_len"},
    {"llamafactory", "lora_target"},
    {"llamafactory", "lora_rank"},
    {"llamafactory", "val_size"},
    {"llamafactory", "pref_loss"},
    {"trl", "dataset_name"},
    {"trl", "use_peft"},
    {"trl", "max_length"},
    {"trl", "completion_only_loss"},
    {"trl", "assistant_only_loss"},
    {"trl", "packing_strategy"},
    {"trl", "attn_implementation"},
    {"trl", "disable_dropout"},
    {"torchtune", "model._component_"},
    {"torchtune", "tokenizer._component_"},
    {"torchtune", "checkpointer.*"},
    {"torchtune", "optimizer._component_"},
    {"torchtune", "dataset._component_"},
};
const size_t config_n_markers = BL_COUNT(config_markers);

#define AXOLOTL      "axolotl 0.19.0"
#define LLAMAFACTORY "LLaMA-Factory 0.9.5"
#define TRL          "TRL 1.16.0"
#define TORCHTUNE    "torchtune 0.6.1"

const config_trainer config_trainers[] = {
    {"axolotl-simpo", "simpo", AXOLOTL, "rl=simpo"},
    {"axolotl-rl", "preferences", AXOLOTL, "rl=dpo rl=ipo rl=kto rl=orpo"},
    {"axolotl-sft", "supervised", AXOLOTL, NULL},
    {"llamafactory-dpo", "dpo", LLAMAFACTORY, "stage=dpo"},
    {"llamafactory-kto", "kto", LLAMAFACTORY, "stage=kto"},
    {"llamafactory-sft", "sft", LLAMAFACTORY, NULL},
    {"trl-sft", "SFTConfig", TRL, "loss_type=nll loss_type=dft"},
    {"trl-kto", "KTOConfig", TRL, "loss_type=kto desirable_weight=* undesirable_weight=*"},
    {"trl-cpo", "CPOConfig", TRL, "loss_type=simpo cpo_alpha=* simpo_gamma=*"},
    {"trl-orpo", "ORPOConfig", TRL, "loss_type=orpo"},
    {"trl-dpo", "DPOConfig", TRL,
     "loss_type=* loss_weights=* beta=* label_smoothing=* ld_alpha=* disable_dropout=* "
     "precompute_ref_log_probs=* f_divergence_type=* sync_ref_model=* rpo_alpha=*"},
    {"trl-sft", "SFTConfig", TRL, NULL},
    {"torchtune-dpo", "dpo recipes", TORCHTUNE, "loss._component_=*DPOLoss"},
    {"torchtune-sft", "finetune recipes", TORCHTUNE, NULL},
};
const size_t config_n_trainers = BL_COUNT(config_trainers);

#define IS_LORA      "finetuning_type=lora"
#define NO_DROPOUT   "lora_dropout,-disable_dropout=false"
#define DROPOUT_WHY  "disable_dropout is true"
#define SIMPO_ALONE  "loss_type=[simpo],-cpo_alpha=0,-cpo_alpha=0.0,~cpo_alpha"
#define CPO_ALPHA    "cpo_alpha is 1"
#define ALSO(a, b)   a "," b
#define NOT_FEW_BITS "~load_in_4bit,~load_in_8bit"

#define DEFAULT(of_, key_, value_, when_)                                                          \
    {                                                                                              \
        .of = of_, .key = key_, .value = value_, .when = when_                                     \
    }
/* Also of a value that the file gives. */
#define REPLACED(of_, key_, value_, when_, why_)                                                   \
    {                                                                                              \
        .of = of_, .key = key_, .value = value_, .when = when_, .replaces = true, .why = why_      \
    }

const config_default config_defaults[] = {
    /* axolotl: all trainers, then each */
    DEFAULT("axolotl", "finetuning_type", "full", "~adapter"),
    DEFAULT("axolotl", "base_format", "stored", ALSO(IS_LORA, NOT_FEW_BITS)),
    DEFAULT("axolotl", "max_seq_length", "512", NULL),
    DEFAULT("axolotl", "overlong", "skip", NULL),
    DEFAULT("axolotl", "lr_scheduler_type", "cosine", NULL),
    DEFAULT("axolotl", "warmup_ratio", "0.03", "-warmup_steps=*,!lr_scheduler_type=constant"),
    DEFAULT("axolotl", "num_train_epochs", "1", NULL),
    DEFAULT("axolotl", "per_device_train_batch_size", "1", NULL),
    DEFAULT("axolotl", "per_device_eval_batch_size", "1*per_device_train_batch_size", NULL),
    DEFAULT("axolotl", "eval_strategy", "steps", "eval_steps"),
    DEFAULT("axolotl", "eval_strategy", "epoch", "validation_split_percentage"),
    DEFAULT("axolotl", "eval_strategy", "epoch", "validation_file"),
    DEFAULT("axolotl", "save_strategy", "steps", "save_steps"),
    DEFAULT("axolotl", "save_strategy", "epoch", NULL),
    DEFAULT("axolotl", "save_total_limit", "4", NULL),
    DEFAULT("axolotl-rl", "loss_type", "sigmoid", "~dpo_loss_type,+rl=dpo"),
    REPLACED("axolotl-rl", "lora_dropout", "0", "lora_dropout", DROPOUT_WHY),
    REPLACED("axolotl-simpo", "lora_dropout", "0", "lora_dropout", DROPOUT_WHY),
    REPLACED("axolotl-simpo", "loss_type", "simpo,sft", SIMPO_ALONE, CPO_ALPHA),

    /* LLaMA-Factory */
    DEFAULT("llamafactory", "lora_alpha", "2*lora_r", "!finetuning_type=full"),
    DEFAULT("llamafactory", "base_format", "stored", "!finetuning_type=full,~quantization_bit"),
    DEFAULT("llamafactory", "learning_rate", "5.0e-5", NULL),
    DEFAULT("llamafactory", "eval_steps", "1*logging_steps", "eval_strategy=steps,logging_steps"),
    DEFAULT("llamafactory-dpo", "loss_type", "sigmoid", "~pref_loss"),
    REPLACED("llamafactory-dpo", "lora_dropout", "0", "lora_dropout", DROPOUT_WHY),
    REPLACED("llamafactory-kto", "lora_dropout", "0", "lora_dropout", DROPOUT_WHY),

    /* TRL */
    DEFAULT("trl", "finetuning_type", "full", NULL),
    DEFAULT("trl-kto", "loss_type", "kto", "~loss_type"),
    DEFAULT("trl-kto", "learning_rate", "1.0e-6", NULL),
    DEFAULT("trl-kto", "shuffle", "false", NULL),
    REPLACED("trl-kto", "lora_dropout", "0", ALSO(IS_LORA, NO_DROPOUT), DROPOUT_WHY),
    DEFAULT("trl-kto", "lora_dropout", "0.05", IS_LORA ",+disable_dropout=false"),
    REPLACED("trl-cpo", "loss_type", "simpo,sft", SIMPO_ALONE, CPO_ALPHA),
    DEFAULT("trl-cpo", "learning_rate", "1.0e-6", NULL),
    REPLACED("trl-cpo", "lora_dropout", "0", ALSO(IS_LORA, NO_DROPOUT), DROPOUT_WHY),
    DEFAULT("trl-cpo", "lora_dropout", "0.05", IS_LORA ",+disable_dropout=false"),
    DEFAULT("trl-orpo", "loss_type", "orpo", "~loss_type"),
    DEFAULT("trl-orpo", "learning_rate", "1.0e-6", NULL),
    REPLACED("trl-orpo", "lora_dropout", "0", ALSO(IS_LORA, NO_DROPOUT), DROPOUT_WHY),
    DEFAULT("trl-orpo", "lora_dropout", "0.05", IS_LORA ",+disable_dropout=false"),
    DEFAULT("trl-dpo", "loss_type", "sigmoid", "~loss_type"),
    DEFAULT("trl-dpo", "learning_rate", "1.0e-6", NULL),
    REPLACED("trl-dpo", "lora_dropout", "0", ALSO(IS_LORA, NO_DROPOUT), DROPOUT_WHY),
    DEFAULT("trl-dpo", "lora_dropout", "0.05", IS_LORA ",+disable_dropout=false"),
    DEFAULT("trl-sft", "learning_rate", "2.0e-5", NULL),
    DEFAULT("trl-sft", "lora_dropout", "0.05", IS_LORA),
    DEFAULT("trl", "base_format", "stored", ALSO(IS_LORA, NOT_FEW_BITS)),
    DEFAULT("trl", "max_seq_length", "1024", "~max_length"),
    DEFAULT("trl", "eval_steps", "1*logging_steps", "eval_strategy=steps,logging_steps"),
    DEFAULT("trl", "eval_steps", "10", "eval_strategy=steps"),
    DEFAULT("trl", "lora_r", "16", IS_LORA),
    DEFAULT("trl", "lora_alpha", "32", IS_LORA),
    DEFAULT("trl", "lora_target_modules", "q_proj,v_proj", ALSO(IS_LORA, "~lora_target_modules")),

    /* torchtune */
    DEFAULT("torchtune", "lora_alpha", "16", IS_LORA),
    DEFAULT("torchtune", "base_format", "stored", IS_LORA ",~model.quantize_base"),
    DEFAULT("torchtune", "weight_decay", "0.01", NULL),
    DEFAULT("torchtune", "max_grad_norm", "0", NULL),
    DEFAULT("torchtune", "lr_scheduler_type", "constant", NULL),
    DEFAULT("torchtune", "train_on_inputs", "true", "data_format=alpaca"),
};
const size_t config_n_defaults = BL_COUNT(config_defaults);

const config_note config_notes[] = {
    {"axolotl", NULL, "axolotl holds out random rows, Ballast the first rows"},
    {"axolotl", "-warmup_steps=*,-warmup_ratio=*",
     "axolotl's default warm-up is min(int(0.03 x steps), 100): above 3,333 steps it is "
     "warmup_steps: 100"},
    {"llamafactory", NULL,
     "LLaMA-Factory writes alpaca rows with its template, Ballast with the Alpaca prompt: write "
     "them as messages (docs/data.md)"},
    {"llamafactory", NULL,
     "LLaMA-Factory's packed samples attend to each other unless neat_packing is true, Ballast's "
     "never do"},
    {"trl-sft", NULL,
     "TRL's loss covers all of a conversation unless assistant_only_loss is true, Ballast's the "
     "answers: train_on_inputs: true for all"},
    {"trl-dpo", "-loss_type=*",
     "the trainer is DPO by the keys; for another: --tool trl-sft, trl-kto, trl-orpo or trl-cpo"},
    {"trl-cpo", "-loss_type=*",
     "CPOConfig's default loss_type is sigmoid without a reference, which has no counterpart: "
     "loss_type: simpo"},
    {"torchtune", NULL,
     "torchtune fills each micro-batch from its own seed; the order of rows differs"},
};
const size_t config_n_notes = BL_COUNT(config_notes);
