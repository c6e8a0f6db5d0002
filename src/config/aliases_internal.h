/* SPDX-License-Identifier: Apache-2.0 */
/* aliases_internal.h -- rows of the table in aliases.c, in its macros: rarer keys of SFTConfig,
 * LoraConfig, axolotl, LLaMA-Factory and torchtune. */
#ifndef BALLAST_CONFIG_ALIASES_INTERNAL_H
#define BALLAST_CONFIG_ALIASES_INTERNAL_H

#define TRAINABLE_HINT                                                                             \
    "finetuning_type full with trainable_modules, such as model.layers.(30|31) for the last two "  \
    "of 32 layers"

#define BL_RARE_ALIASES                                                                            \
    IGNORED("eval_do_concat_batches"), IGNORED("eval_use_gather_object"),                          \
        IGNORED("enable_jit_checkpoint"), IGNORED("restore_callback_states_from_checkpoint"),      \
        IGNORED("label_names"), IGNORED("length_column_name"), IGNORED("ignore_bias_buffers"),     \
        IGNORED("auto_mapping"), IGNORED("peft_version"), IGNORED("inference_mode"),               \
        IGNORED("megatron_config"), IGNORED("megatron_core"), IGNORED("runtime_config"),           \
        IGNORED("tokenizer_config"), IGNORED("dataset_shard_num"), IGNORED("hf_use_auth_token"),   \
        IGNORED("bnb_config_kwargs"), IGNORED("device_map"), IGNORED("max_memory"),                \
        IGNORED("total_num_tokens"), IGNORED("axolotl_config_path"),                               \
        IGNORED("experimental_skip_move_to_device"), IGNORED("is_mistral_derived_model"),          \
        IGNORED("is_qwen_derived_model"), IGNORED("is_falcon_derived_model"),                      \
        IGNORED("dataset_keep_in_memory"), IGNORED("push_dataset_to_hub"),                         \
        IGNORED("tokenizer_legacy"), IGNORED("fp32_norms"), IGNORED("booster"),                    \
        IGNORED("infer_backend"), IGNORED("export_dir"), IGNORED("data_shared_file_system"),       \
        IGNORED("custom_sharded_layers"), IGNORED("fsdp_reshard_after_forward"),                   \
        IGNORED("cudnn_deterministic_mode"), IGNORED("save_last_epoch_only"),                      \
        {.name = "pref_loss",                                                                      \
         .key = "loss_type",                                                                       \
         .values = "sigmoid hinge ipo orpo simpo",                                                 \
         .hint = "loss_type"},                                                                     \
        {.name = "rl",                                                                             \
         .key = "loss_type",                                                                       \
         .values = "false= dpo=sigmoid ipo orpo simpo kto",                                        \
         .hint = "loss_type"},                                                                     \
        {.name = "pref_beta", .key = "beta"}, {.name = "rl_beta", .key = "beta"},                  \
        {.name = "dpo_label_smoothing", .key = "label_smoothing"},                                 \
        {.name = "kto_chosen_weight", .key = "desirable_weight"},                                  \
        {.name = "kto_rejected_weight", .key = "undesirable_weight"},                              \
        {.name = "kto_desirable_weight", .key = "desirable_weight"},                               \
        {.name = "kto_undesirable_weight", .key = "undesirable_weight"},                           \
        OFF("pref_ftx", "loss_type with sft, and loss_weights"),                                   \
        OFF("rpo_alpha", "loss_type with sft, and loss_weights"),                                  \
        OFF("cpo_alpha", "loss_type: [simpo, sft], and loss_weights: [1, cpo_alpha]"),             \
        {.name = "ref_model", .hint = "!the reference is the base, or init_adapter as it began"},  \
        {.name = "ref_model_name_or_path",                                                         \
         .hint = "!the reference is the base, or init_adapter as it began"},                       \
        {.name = "f_divergence_type", .values = "reverse_kl=", .hint = "!only reverse_kl"},        \
        OFF("use_weighting", "!pairs of answers have equal weights"),                              \
        IGNORED("precompute_ref_batch_size"),                                                      \
        OFF("sync_ref_model", "!the reference stays as it was"),                                   \
        {.name = "base_model_name_or_path", .key = "model_name_or_path"},                          \
        {.name = "batch_size_val", .key = "per_device_eval_batch_size"},                           \
        {.name = "keep_last_n_checkpoints", .key = "save_total_limit"},                            \
        {.name = "run_val_every_n_steps", .key = "eval_steps"},                                    \
        {.name = "peft_type", .values = "LORA=", .hint = "!LoRA is the only kind of adapter"},     \
        {.name = "revision",                                                                       \
         .values = "main=",                                                                        \
         .hint = "model_name_or_path, the directory of that revision"},                            \
        {.name = "train_on_eos",                                                                   \
         .values = "turn=",                                                                        \
         .hint = "!the loss covers the token that ends an answer"},                                \
        {.name = "roles_to_train",                                                                 \
         .values = "assistant= gpt=",                                                              \
         .hint = "train_on_inputs, or weight of a message (docs/data.md)"},                        \
        {.name = "sequence_parallel_size", .values = "1=", .hint = "!a sequence is on one rank"},  \
        {.name = "tensor_parallel_dim", .values = "1=", .hint = "shard_size"},                     \
        {.name = "data_parallel_shard_dim", .values = "1= -1=", .hint = "shard_size"},             \
        {.name = "data_parallel_replicate_dim", .values = "1=", .hint = "shard_size"},             \
        {.name = "dataset_val", .values = "false=", .hint = "validation_file, a local file"},      \
        {.name = "exclude_modules", .hint = "lora_target_modules: other modules are frozen"},      \
        {.name = "layers_pattern", .hint = "lora_target_modules: other modules are frozen"},       \
        {.name = "target_parameters", .hint = "lora_target_modules: other modules are frozen"},    \
        {.name = "trainable_token_indices",                                                        \
         .hint = "lora_target_modules: other modules are frozen"},                                 \
        {.name = "layer_replication", .hint = "lora_target_modules: other modules are frozen"},    \
        {.name = "freeze_trainable_layers", .hint = TRAINABLE_HINT},                               \
        {.name = "freeze_trainable_modules", .hint = TRAINABLE_HINT},                              \
        {.name = "freeze_extra_modules", .hint = TRAINABLE_HINT},                                  \
        {.name = "lora_layers_to_transform",                                                       \
         .hint = "lora_target_modules with paths (layers.0.mlp...)"},                              \
        {.name = "rank_pattern", .hint = "!every projection has the same rank and alpha"},         \
        {.name = "alpha_pattern", .hint = "!every projection has the same rank and alpha"},        \
        {.name = "loftq_config", .hint = "!A is Kaiming-uniform and B is 0, PEFT's default"},      \
        {.name = "eva_config", .hint = "!A is Kaiming-uniform and B is 0, PEFT's default"},        \
        {.name = "corda_config", .hint = "!A is Kaiming-uniform and B is 0, PEFT's default"},      \
        {.name = "lora_ga_config", .hint = "!A is Kaiming-uniform and B is 0, PEFT's default"},    \
        {.name = "velora_config",                                                                  \
         .hint = "!LoRA and use_rslora are the methods that are supported"},                       \
        {.name = "alora_invocation_tokens",                                                        \
         .hint = "!LoRA and use_rslora are the methods that are supported"},                       \
        {.name = "monteclora_config",                                                              \
         .hint = "!LoRA and use_rslora are the methods that are supported"},                       \
        {.name = "arrow_config",                                                                   \
         .hint = "!LoRA and use_rslora are the methods that are supported"},                       \
        {.name = "kasa_config",                                                                    \
         .hint = "!LoRA and use_rslora are the methods that are supported"},                       \
        {.name = "qalora_group_size",                                                              \
         .hint = "!LoRA and use_rslora are the methods that are supported"},                       \
        OFF("use_qalora", "!LoRA and use_rslora are the methods that are supported"),              \
        OFF("use_bdlora", "!LoRA and use_rslora are the methods that are supported"),              \
        OFF("ensure_weight_tying", "!embeddings are frozen"),                                      \
        OFF("fan_in_fan_out", "!Llama's weights are not transposed"),                              \
        OFF("router_aux_loss_coef", "!models with experts cannot be trained"),                     \
        OFF("moe_aux_loss_coef", "!models with experts cannot be trained"),                        \
        {.name = "trl", .hint = "!supervised fine-tuning is the only stage"},                      \
        OFF("gptq", "base_format fp8_row, 8 bits per weight"),                                     \
        {.name = "torchao", .hint = "base_format fp8_row, 8 bits per weight"},                     \
        OFF("float16", "compute_dtype: bf16, or fp8 on a GPU"),                                    \
        {.name = "bfloat16",                                                                       \
         .key = "compute_dtype",                                                                   \
         .values = "true=bf16 false=",                                                             \
         .hint = "compute_dtype"},                                                                 \
        {.name = "chat_template_kwargs",                                                           \
         .hint = "train_file with chat_template_kwargs in each row"},                              \
        {.name = "ring_attn_func", .hint = "!a sequence is on one rank"},                          \
        {.name = "overrides_of_model_config",                                                      \
         .hint = "!the model is read as its config.json says"},                                    \
        {.name = "rope_factor", .hint = "!the model is read as its config.json says"},             \
        OFF("reserved_label_len", "max_seq_length and overlong"),                                  \
        OFF("use_dft_loss", "!the loss is cross entropy"),                                         \
        OFF("use_8bit_optim", "!the optimizer is AdamW in fp32"),                                  \
        OFF("fsdp_cpu_offload", "offload_ratio"),                                                  \
    {                                                                                              \
        .name = "tensor_parallel_plan", .hint = "shard_size"                                       \
    }

#endif
