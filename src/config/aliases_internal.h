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
        IGNORED("cudnn_deterministic_mode"), IGNORED("save_last_epoch_only"), IGNORED("galore_*"), \
        IGNORED("apollo_*"), IGNORED("badam_*"), IGNORED("oft_*"), IGNORED("module_dropout"),      \
        IGNORED("pissa_iter"), IGNORED("pissa_convert"), IGNORED("loraplus_lr_embedding"),         \
        IGNORED("relora_*"), IGNORED("ppo_*"), IGNORED("reward_model_*"), IGNORED("vllm_*"),       \
        IGNORED("sglang_*"), IGNORED("export_*"), IGNORED("infer_*"), IGNORED("kt_*"),             \
        IGNORED("qgalore_*"), IGNORED("dion_*"), IGNORED("generate_samples"),                      \
        IGNORED("num_generation_samples"), IGNORED("generation_*"),                                \
        IGNORED("generate_during_eval"), IGNORED("profiler_*"), IGNORED("profile_*"),              \
        IGNORED("use_otel_metrics"), IGNORED("otel_*"), IGNORED("ref_model_mixup_alpha"),          \
        IGNORED("ref_model_sync_steps"), IGNORED("f_alpha_divergence_coef"),                       \
        IGNORED("discopop_tau"), IGNORED("eaft_*"), IGNORED("asft_alpha"), IGNORED("tiled_mlp*"),  \
        IGNORED("streaming_multipack_buffer_size"), IGNORED("pretrain_multipack_attn"),            \
        IGNORED("merge_method"), IGNORED("tokenizer_save_jinja_files"),                            \
        IGNORED("init_special_tokens"), IGNORED("offload_folder"), IGNORED("print_param_status"),  \
        IGNORED("use_v1_kernels"), IGNORED("resources_per_worker"), IGNORED("dpo_padding_free"),   \
        IGNORED("jagged_restart_warmup_steps"), IGNORED("jagged_restart_anneal_steps"),            \
        VALUES_OF("llamafactory", "stage", "loss_type", "sft= dpo= kto", "loss_type"),             \
        VALUES("test_datasets.path", "validation_file", JSON_FILES,                                \
               "validation_file, a local file"),                                                   \
        VALUES("test_datasets.data_files", "validation_file", JSON_FILES,                          \
               "validation_file, a local file"),                                                   \
        REJECTED("test_datasets", "validation_file, a local file"), IGNORED("test_datasets.type"), \
        IGNORED("test_datasets.ds_type"), IGNORED("test_datasets.split"),                          \
        REJECTED("test_datasets.*", "validation_file with rows in a format of docs/data.md"),      \
        VALUES_OF("trl-cpo", "loss_type", "loss_type", "simpo",                                    \
                  "!losses of CPOConfig other than simpo have no reference"),                      \
        {.name = "cpo_alpha",                                                                      \
         .values = "0= 0.0= 1= 1.0=",                                                              \
         .hint = "loss_type: [simpo, sft], and loss_weights: [1, cpo_alpha]",                      \
         .tool = "trl-cpo"},                                                                       \
        {.name = "cpo_alpha",                                                                      \
         .values = "0= 0.0= 1= 1.0=",                                                              \
         .hint = "loss_type: [simpo, sft], and loss_weights: [1, cpo_alpha]",                      \
         .tool = "axolotl-simpo"},                                                                 \
        {.name = "alpha",                                                                          \
         .values = "0= 0.0=",                                                                      \
         .hint = "!AlphaPO; simpo is supported",                                                   \
         .tool = "trl-cpo"},                                                                       \
        ACCEPTED("disable_dropout", "true= false=", "lora_dropout"),                               \
        VALUES_OF("axolotl", "rl", "loss_type", "false= dpo= ipo orpo simpo kto", "loss_type"),    \
        READ("dpo_loss_type", "loss_type"), READ("dpo_loss_weights", "loss_weights"),              \
        ACCEPTED("datasets.roles_to_train",                                                        \
                 "assistant= gpt=", "train_on_inputs, or weight of a message (docs/data.md)"),     \
        ACCEPTED("datasets.train_on_eos",                                                          \
                 "turn=", "!the loss covers the token that ends an answer"),                       \
        ACCEPTED("datasets.message_property_mappings.role", "role=", FORMATS_HINT),                \
        ACCEPTED("datasets.message_property_mappings.content", "content=", FORMATS_HINT),          \
        ACCEPTED("datasets.roles.user", "user=", FORMATS_HINT),                                    \
        ACCEPTED("datasets.roles.assistant", "assistant=", FORMATS_HINT),                          \
        ACCEPTED("datasets.roles.system", "system=", FORMATS_HINT),                                \
        ACCEPTED("datasets.roles.tool", "tool=", FORMATS_HINT),                                    \
        VALUES("pref_loss", "loss_type", "sigmoid hinge ipo orpo simpo", "loss_type"),             \
        VALUES("rl", "loss_type", "false= dpo=sigmoid ipo orpo simpo kto", "loss_type"),           \
        READ("pref_beta", "beta"), READ("rl_beta", "beta"),                                        \
        READ("dpo_label_smoothing", "label_smoothing"),                                            \
        READ("kto_chosen_weight", "desirable_weight"),                                             \
        READ("kto_rejected_weight", "undesirable_weight"),                                         \
        READ("kto_desirable_weight", "desirable_weight"),                                          \
        READ("kto_undesirable_weight", "undesirable_weight"),                                      \
        OFF("pref_ftx", "loss_type with sft, and loss_weights"),                                   \
        OFF("rpo_alpha", "loss_type with sft, and loss_weights"),                                  \
        OFF("cpo_alpha", "loss_type: [simpo, sft], and loss_weights: [1, cpo_alpha]"),             \
        REJECTED("ref_model", "!the reference is the base, or init_adapter as it began"),          \
        REJECTED("ref_model_name_or_path",                                                         \
                 "!the reference is the base, or init_adapter as it began"),                       \
        ACCEPTED("f_divergence_type", "reverse_kl=", "!only reverse_kl"),                          \
        OFF("use_weighting", "!pairs of answers have equal weights"),                              \
        IGNORED("precompute_ref_batch_size"),                                                      \
        OFF("sync_ref_model", "!the reference stays as it was"),                                   \
        READ("base_model_name_or_path", "model_name_or_path"),                                     \
        READ("batch_size_val", "per_device_eval_batch_size"),                                      \
        READ("keep_last_n_checkpoints", "save_total_limit"),                                       \
        READ("run_val_every_n_steps", "eval_steps"),                                               \
        ACCEPTED("peft_type", "LORA=", "!LoRA is the only kind of adapter"),                       \
        ACCEPTED("revision", "main=", "model_name_or_path, the directory of that revision"),       \
        ACCEPTED("train_on_eos", "turn=", "!the loss covers the token that ends an answer"),       \
        ACCEPTED("roles_to_train",                                                                 \
                 "assistant= gpt=", "train_on_inputs, or weight of a message (docs/data.md)"),     \
        ACCEPTED("sequence_parallel_size", "1=", "!a sequence is on one rank"),                    \
        ACCEPTED("tensor_parallel_dim", "1=", "shard_size"),                                       \
        ACCEPTED("data_parallel_shard_dim", "1= -1=", "shard_size"),                               \
        ACCEPTED("data_parallel_replicate_dim", "1=", "shard_size"),                               \
        ACCEPTED("dataset_val", "false=", "validation_file, a local file"),                        \
        REJECTED("exclude_modules", "lora_target_modules: other modules are frozen"),              \
        REJECTED("layers_pattern", "lora_target_modules: other modules are frozen"),               \
        REJECTED("target_parameters", "lora_target_modules: other modules are frozen"),            \
        REJECTED("trainable_token_indices", "lora_target_modules: other modules are frozen"),      \
        REJECTED("layer_replication", "lora_target_modules: other modules are frozen"),            \
        REJECTED("freeze_trainable_layers", TRAINABLE_HINT),                                       \
        REJECTED("freeze_trainable_modules", TRAINABLE_HINT),                                      \
        REJECTED("freeze_extra_modules", TRAINABLE_HINT),                                          \
        REJECTED("lora_layers_to_transform", "lora_target_modules with paths (layers.0.mlp...)"),  \
        REJECTED("rank_pattern", "!every projection has the same rank and alpha"),                 \
        REJECTED("alpha_pattern", "!every projection has the same rank and alpha"),                \
        REJECTED("loftq_config", "!A is Kaiming-uniform and B is 0, PEFT's default"),              \
        REJECTED("eva_config", "!A is Kaiming-uniform and B is 0, PEFT's default"),                \
        REJECTED("corda_config", "!A is Kaiming-uniform and B is 0, PEFT's default"),              \
        REJECTED("lora_ga_config", "!A is Kaiming-uniform and B is 0, PEFT's default"),            \
        REJECTED("velora_config", "!LoRA and use_rslora are the methods that are supported"),      \
        REJECTED("alora_invocation_tokens",                                                        \
                 "!LoRA and use_rslora are the methods that are supported"),                       \
        REJECTED("monteclora_config", "!LoRA and use_rslora are the methods that are supported"),  \
        REJECTED("arrow_config", "!LoRA and use_rslora are the methods that are supported"),       \
        REJECTED("kasa_config", "!LoRA and use_rslora are the methods that are supported"),        \
        IGNORED("qalora_group_size"), IGNORED("fp8_backend"), OFF("pref_bco_weight", "loss_type"), \
        OFF("use_qalora", "!LoRA and use_rslora are the methods that are supported"),              \
        OFF("use_bdlora", "!LoRA and use_rslora are the methods that are supported"),              \
        OFF("ensure_weight_tying", "!modules_to_save trains the tensors that it names"),           \
        OFF("fan_in_fan_out", "!Llama's weights are not transposed"),                              \
        OFF("router_aux_loss_coef", "!routers are frozen, without an auxiliary loss"),             \
        OFF("moe_aux_loss_coef", "!routers are frozen, without an auxiliary loss"),                \
        REJECTED("trl", "!models are not trained on their own answers"),                           \
        OFF("gptq", "base_format fp8_row, 8 bits per weight"),                                     \
        REJECTED("torchao", "base_format fp8_row, 8 bits per weight"),                             \
        OFF("float16", "compute_dtype: bf16, or fp8 on a GPU"),                                    \
        VALUES("bfloat16", "compute_dtype", "true=bf16 false=", "compute_dtype"),                  \
        REJECTED("chat_template_kwargs", "train_file with chat_template_kwargs in each row"),      \
        REJECTED("ring_attn_func", "!a sequence is on one rank"),                                  \
        REJECTED("overrides_of_model_config", "!the model is read as its config.json says"),       \
        REJECTED("rope_factor", "!the model is read as its config.json says"),                     \
        OFF("reserved_label_len", "max_seq_length and overlong"),                                  \
        OFF("use_dft_loss", "!the loss is cross entropy"),                                         \
        OFF("use_8bit_optim", "!the optimizer is AdamW"),                                          \
        OFF("fsdp_cpu_offload", "offload_ratio"), REJECTED("tensor_parallel_plan", "shard_size")

#endif
