/* SPDX-License-Identifier: Apache-2.0 */
/* config.h -- a run's configuration: one struct, filled from a YAML file and a command line
 * (options/options.h).
 *
 * Fields are named as their keys; docs/options.md has the meaning, range and default of each.
 * Names and defaults are Hugging Face's where it has them (TrainingArguments; PEFT's LoraConfig for
 * lora_*). */
#ifndef BALLAST_CONFIG_CONFIG_H
#define BALLAST_CONFIG_CONFIG_H

#include <stdbool.h>
#include <stdint.h>

#include "options/options.h"
#include "base/status.h"
#include "device/device.h"
#include "model/weights.h" /* bl_base_format */
#include "data/dataset.h"  /* bl_data_format, bl_overlong, bl_packing */

/* The commands that share the table; bits. A file may hold the keys of both. */
typedef enum bl_config_command {
    BL_CONFIG_TRAIN = 1,
    BL_CONFIG_EVAL = 2,
    BL_CONFIG_SESSION = 4, /* of a session's base */
    BL_CONFIG_ADAPTER = 8  /* of an adapter in a session */
} bl_config_command;

typedef enum bl_lr_scheduler_type {
    BL_LR_LINEAR,
    BL_LR_COSINE,
    BL_LR_CONSTANT,
    BL_LR_CONSTANT_WITH_WARMUP
} bl_lr_scheduler_type;
typedef enum bl_epoch_end { BL_EPOCH_SHORT_STEP, BL_EPOCH_CONTINUE } bl_epoch_end;
typedef enum bl_eval_strategy { BL_EVAL_NO, BL_EVAL_STEPS, BL_EVAL_EPOCH } bl_eval_strategy;
typedef enum bl_save_strategy {
    BL_SAVE_NO,
    BL_SAVE_STEPS,
    BL_SAVE_EPOCH,
    BL_SAVE_BEST
} bl_save_strategy;
/* Both are the validation loss. */
typedef enum bl_best_metric { BL_METRIC_LOSS, BL_METRIC_EVAL_LOSS } bl_best_metric;
typedef enum bl_config_device {
    BL_CONFIG_DEVICE_AUTO,
    BL_CONFIG_DEVICE_CPU,
    BL_CONFIG_DEVICE_CUDA
} bl_config_device;
typedef enum bl_compute_dtype {
    BL_COMPUTE_AUTO,
    BL_COMPUTE_FP32,
    BL_COMPUTE_BF16,
    BL_COMPUTE_FP8
} bl_compute_dtype;
/* In the order of bl_matmul_sums. */
typedef enum bl_fast_accumulation {
    BL_FAST_ACCUMULATION_NONE,
    BL_FAST_ACCUMULATION_FORWARD,
    BL_FAST_ACCUMULATION_ALL
} bl_fast_accumulation;
typedef enum bl_base_scales { BL_SCALES_LEAST_SQUARES, BL_SCALES_LARGEST } bl_base_scales;
typedef enum bl_rank_processes {
    BL_RANK_PROCESSES_AUTO,
    BL_RANK_PROCESSES_TRUE,
    BL_RANK_PROCESSES_FALSE
} bl_rank_processes;
typedef enum bl_offload_tier { BL_OFFLOAD_HOST, BL_OFFLOAD_DISK } bl_offload_tier;
typedef enum bl_compute_copy { BL_COPY_AUTO, BL_COPY_OFFLOADED, BL_COPY_ON_DEVICE } bl_compute_copy;
typedef enum bl_optimizer_tier {
    BL_OPTIMIZER_AUTO,
    BL_OPTIMIZER_DEVICE,
    BL_OPTIMIZER_HOST,
    BL_OPTIMIZER_DISK
} bl_optimizer_tier;
typedef enum bl_optimizer_state_dtype {
    BL_OPTIMIZER_STATE_FP32,
    BL_OPTIMIZER_STATE_BF16
} bl_optimizer_state_dtype;
typedef enum bl_verify_base { BL_VERIFY_FIRST, BL_VERIFY_SAVE, BL_VERIFY_ALWAYS } bl_verify_base;
typedef enum bl_activation_checkpointing {
    BL_RECOMPUTE_NONE,
    BL_RECOMPUTE_MLP,
    BL_RECOMPUTE_SELECTIVE,
    BL_RECOMPUTE_FULL,
    BL_RECOMPUTE_AUTO
} bl_activation_checkpointing;
typedef enum bl_finetuning_type { BL_FINETUNING_LORA, BL_FINETUNING_FULL } bl_finetuning_type;
typedef enum bl_model_dtype { BL_MODEL_STORED, BL_MODEL_F32 } bl_model_dtype;
typedef enum bl_adapter_layout { BL_ADAPTER_PEFT, BL_ADAPTER_PER_EXPERT } bl_adapter_layout;
typedef enum bl_adapter_dtype { BL_ADAPTER_F32, BL_ADAPTER_BF16 } bl_adapter_dtype;

enum { BL_TRAIN_CONFIG_MAX_KEYS = 112 };

/* Where the values come from. */
typedef struct bl_config_source {
    char *file;                                /* YAML; NULL: none was read */
    uint8_t origins[BL_TRAIN_CONFIG_MAX_KEYS]; /* bl_option_origin of each key */
} bl_config_source;

typedef struct bl_train_config {
    /* model and output */
    char *model_name_or_path;
    char *init_adapter; /* NULL: a fresh adapter */
    char *output_dir;
    bool overwrite_output_dir;
    /* "false", "true" (the newest valid one) or a path: bl_train_config_resume. */
    char *resume_from_checkpoint;
    bl_string_list allow_resume_mismatch; /* bl_train_config_allows */
    bl_adapter_dtype adapter_dtype;
    bl_adapter_layout adapter_layout;
    char *queue; /* NULL: a run; else the base of this queue's jobs */

    /* data */
    char *train_file;
    bl_string_list more_train_files, train_file_shares; /* bl_train_config_share */
    char *validation_file;                              /* NULL: none */
    double validation_split_percentage;                 /* 0: none */
    bl_data_format data_format;
    bl_packing packing;
    int64_t max_seq_length; /* tokens */
    bl_overlong overlong;
    bool shuffle, train_on_inputs, skip_bad;
    char *dataset_text_field;
    char *chat_template, *template_date; /* NULL: the model's own */

    /* the loss; bl_train_config_losses */
    bl_string_list loss_type, loss_weights;
    double beta, label_smoothing, ld_alpha, simpo_gamma, desirable_weight, undesirable_weight;
    bool precompute_ref_log_probs; /* true: the losses have a reference */

    bl_finetuning_type finetuning_type;
    bl_string_list trainable_modules, freeze; /* bl_trained_patterns */
    bl_model_dtype model_dtype;

    /* LoRA */
    int64_t lora_r;
    double lora_alpha, lora_dropout;
    bl_string_list lora_target_modules; /* projection names, or "all-linear" alone */
    bl_string_list modules_to_save;     /* bl_trained_choose_modules */
    bool use_rslora;

    /* optimization */
    double learning_rate, weight_decay, adam_beta1, adam_beta2, adam_epsilon;
    double embedding_learning_rate; /* BL_OPTION_AUTO: learning_rate */
    bl_string_list learning_rates;  /* PATTERN=RATE (trained/rates.h) */
    bl_optimizer_state_dtype optimizer_state_dtype;
    double max_grad_norm; /* 0: off */
    bl_lr_scheduler_type lr_scheduler_type;
    double warmup_ratio;
    int64_t warmup_steps;
    double num_train_epochs;
    int64_t max_steps; /* > 0 replaces num_train_epochs */
    bl_epoch_end epoch_end;
    int64_t per_device_train_batch_size,
        per_device_eval_batch_size; /* sequences a rank in one micro-batch */
    int64_t gradient_accumulation_steps;
    int64_t seed;

    /* reports and checkpoints */
    int64_t logging_steps;
    bl_save_strategy save_strategy;
    int64_t save_steps, save_total_limit; /* 0: only at the end; 0: keep all */
    bl_eval_strategy eval_strategy;
    int64_t eval_steps;
    bool eval_overlap;
    bool load_best_model_at_end;
    bl_best_metric metric_for_best_model;
    bool greater_is_better;
    int64_t early_stopping_patience; /* evaluations; 0: off */
    double early_stopping_threshold;
    int64_t reduction_factor, grace_period; /* rank/rungs.h; 0: off; steps */
    bool eval_stored_base;
    bl_string_list report_to; /* bl_train_config_reports_to_tensorboard */
    char *logging_dir;        /* NULL: output_dir/runs */
    char *trace;              /* NULL: no */
    char *dump_gradients;     /* NULL: no */

    /* execution; device, compute_dtype, ranks, rank_processes, threads and shard_size are resolved
     * by bl_train_config_load */
    bl_config_device device;
    bl_compute_dtype compute_dtype;
    bl_string_list compute_bf16_modules; /* empty: none; bl_train_config_bf16_matrices */
    bl_fast_accumulation fp8_fast_accumulation;
    bl_base_format base_format;
    bl_base_scales base_format_scales;
    int64_t ranks, threads /* a rank */, shard_size;
    int64_t sum_block;                /* bl_comm_set_sum_block */
    bl_rank_processes rank_processes; /* TRUE: a rank is a process */
    double offload_ratio;             /* BL_OPTION_AUTO or 0..1 */
    bl_offload_tier offload_tier;
    double offload_host_part; /* with BL_OFFLOAD_DISK */
    /* This key and optimizer_*: full fine-tuning only. On GPUs the plan chooses keys that are auto
     * (plan/search.h); on CPUs they are already resolved. */
    bl_compute_copy offload_compute_copy;
    char *offload_dir;
    bl_optimizer_tier optimizer_tier;
    double optimizer_ratio; /* BL_OPTION_AUTO or 0..1 */
    bl_verify_base verify_base;
    int64_t ring_depth;
    int64_t expert_group; /* BL_OPTION_AUTO or experts of a sub-unit of the base */
    bl_io_engine io_engine;
    bl_activation_checkpointing activation_checkpointing;
    /* BL_OPTION_AUTO, or the layers that it applies to; others save everything. */
    int64_t activation_checkpointing_layers;
    bool activation_offload;
    int64_t visit_tokens;            /* BL_OPTION_AUTO or tokens of one visit of a layer, a rank */
    double grace_s, step_deadline_s; /* step_deadline_s 0: no timeout */
    bool gather_by_hosts, compare_collectives;

    bl_config_source source; /* the one member that is not a key */
} bl_train_config;

/* Replaces auto by the values for this build and this machine, logs which device that is and why,
 * and checks that both fit. *gpu is a GPU of *device cuda: this process's, if it is a child of
 * bl_launch_run_ranks; another process may be about to start such children, so the first one's
 * answer comes by bl_device_probe_cuda, before there are threads. BL_EUSAGE: they do not fit;
 * BL_ELIMIT: device cuda without a usable GPU (bl_device_find_cuda), or without one that has FP8;
 * device auto where the search ends with BL_GPU_BROKEN. */
bl_status bl_config_choose_device(bl_config_device *device, bl_compute_dtype *dtype,
                                  bl_gpu_info *gpu);

/* The GPU that this process's ranks compute on, and CUDA's number of it: 0 in a job of one process,
 * and where the process is shown one GPU only (CUDA_VISIBLE_DEVICES); else each process of a host
 * has the GPU of its place among them (bl_launch_info.local_rank). BL_ELIMIT: as
 * bl_device_find_cuda, or there are more processes than GPUs. */
bl_status bl_config_find_gpu(bl_gpu_info *gpu, int *index);

/* Reads, resolves (bl_config_choose_device) and validates. yaml_path may be NULL; argv holds "--key
 * value" and, when yaml_path is NULL, at most one other word, the YAML file. argc may be 0. Free
 * *out with bl_train_config_free; NULL after a failure. BL_EUSAGE names the file, line and key. */
bl_status bl_train_config_load(bl_config_command command, const char *yaml_path, int argc,
                               char *const *argv, bl_train_config **out);

/* The runs of one `ballast train`: a file each, in the order of argv, and of a file in which keys
 * have sequences of values (bl_options_sweep) one for each combination of them, the last key's
 * values changing first. Such a run's output_dir is below the file's, named after its values:
 * "learning_rate-1e-4_lora_r-8". The line's keys hold for all. BL_EUSAGE also: runs that do not fit
 * together over one base (model_name_or_path, max_seq_length, trace and the keys of execution are
 * the same for all), or write to the same place. */
typedef struct bl_train_configs {
    bl_train_config **run; /* [n] */
    int n;
} bl_train_configs;
bl_status bl_train_configs_load(int argc, char *const *argv, bl_train_configs *out);
void bl_train_configs_free(bl_train_configs *configs); /* zeros are fine */
/* The name of run i of n: the last part of output_dir, or all of it if two runs have the same last
 * part. Borrowed from the configuration. */
const char *bl_train_config_name(const bl_train_config *const *runs, int n, int i);

/* jobs.c: the configuration of a job of base->queue: the file's keys, and the base's values of
 * other keys, except output_dir and similar keys of one run. Nothing is resolved for this machine:
 * keys that are common to all runs over a base have the base's values. BL_EUSAGE: the file has
 * another value of a common key, or bl_train_config_load would reject it. The caller frees *out. */
bl_status bl_train_config_load_job(const bl_train_config *base, const char *yaml_path,
                                   bl_train_config **out);
/* runs.c. BL_EUSAGE: both write to the same directory, or one starts from the other's adapter. */
bl_status bl_train_config_check_apart(const bl_train_config *one, const bl_train_config *two);

/* session.c: the configuration of a session's base, and of an adapter in it, which has the base's
 * values of the session's keys, from keys[n], "key=value". Resolved and validated; the caller frees
 * *out. gradient_accumulation_steps: micro-batches of a visit, by visit_tokens. BL_EUSAGE also: a
 * key that a session or an adapter does not have. */
enum { BL_SESSION_VISIT_MICRO = 4 }; /* of visit_tokens auto */
bl_status bl_train_config_load_session(const char *const *keys, int n, bl_train_config **out);
bl_status bl_train_config_load_adapter(const bl_train_config *session, const char *const *keys,
                                       int n, bl_train_config **out);
/* Prints "key: before -> now; " for each of a session's keys that changes results and differs from
 * the file's (bl_train_config_write_resolved). */
bl_status bl_train_config_compare_session(const bl_train_config *session, const char *yaml_path,
                                          FILE *out, bool *differs);
/* As load_adapter, with seed and lora_dropout of the file, and the other keys of LoRA those of the
 * PEFT adapter in `dir`. */
bl_status bl_train_config_continue_adapter(const bl_train_config *session, const char *yaml_path,
                                           const char *dir, bl_train_config **out);

/* A machine to plan for, which need not be this one. */
typedef struct bl_config_machine {
    bool has_gpus;
    int64_t n_ranks;         /* of ranks auto */
    int64_t n_cores;         /* of a host */
    int64_t n_ranks_on_host; /* of n_ranks */
    const char *gpu;         /* its name, borrowed for the call */
    int capability;          /* its compute capability, 10 x major + minor */
    bool cpu_bf16;           /* its CPU multiplies bf16 */
} bl_config_machine;
/* As bl_train_configs_load for trainings on that machine, but of one run no key is required, and
 * this machine is not looked at: device, compute_dtype, ranks, threads and shard_size are resolved
 * for that one. */
bl_status bl_train_configs_load_for(const bl_config_machine *machine, int argc, char *const *argv,
                                    bl_train_configs *out);
/* What bl_train_config_write_resolved has written, of a run that may have had another machine: this
 * one is not looked at, and the keys' values are taken as they are. */
bl_status bl_train_config_read_back(const char *yaml_path, bl_train_config **out);
void bl_train_config_free(bl_train_config *config); /* NULL is fine */

/* Ranks that this process starts as processes (bl_launch_run_ranks); 0: it is a rank, or has them
 * as threads. Of a configuration that bl_train_config_load has resolved here. */
int bl_train_config_starts_ranks(const bl_train_config *config);

/* Whether all weights are trained, not LoRA's. */
bool bl_train_config_is_full(const bl_train_config *config);

/* ---- losses.c: loss_type and the keys next to it as one value; docs/preference.md ---- */

/* TRL's names in DPOConfig, ORPOConfig, CPOConfig and KTOConfig; nll: cross entropy. */
typedef enum bl_loss {
    BL_LOSS_NLL,
    BL_LOSS_SIGMOID,
    BL_LOSS_HINGE,
    BL_LOSS_IPO,
    BL_LOSS_SIGMOID_NORM,
    BL_LOSS_ROBUST,
    BL_LOSS_APO_ZERO,
    BL_LOSS_APO_DOWN,
    BL_LOSS_SFT,
    BL_LOSS_ORPO,
    BL_LOSS_SIMPO,
    BL_LOSS_KTO,
    BL_N_LOSSES
} bl_loss;

const char *bl_loss_name(bl_loss loss);

typedef struct bl_losses {
    int n_terms; /* the loss is the sum of weight x loss */
    struct {
        bl_loss loss;
        double weight;
    } term[BL_N_LOSSES];
    double beta, label_smoothing, ld_alpha, simpo_gamma, desirable_weight, undesirable_weight;
    bool is_preference; /* false: nll alone */
    bool is_unpaired;   /* kto: rows are an answer and a label */
    bool has_reference; /* it depends on the log-probabilities of a reference */
    bool learns_prompt; /* orpo: of the chosen answer's tokens all carry loss, the prompt's too */
} bl_losses;

/* BL_EUSAGE: an unknown loss, losses that do not go together, a number of weights that is not that
 * of the losses, or a key that such a loss does not have. */
bl_status bl_train_config_losses(const bl_train_config *config, bl_losses *out);

/* data_format of the rows that the losses take; auto where nll takes any but preferences. */
bl_data_format bl_losses_data_format(const bl_losses *losses, bl_data_format given);

/* Whether the user set the key (in the file or on the line), be it to the default. */
bool bl_train_config_given(const bl_train_config *config, const char *key);

/* The share of train_file (file 0) and of each of more_train_files; 1 where none are given. */
double bl_train_config_share(const bl_train_config *config, int64_t file);

/* Whether lora_target_modules is a regular expression, not names. */
bool bl_train_config_targets_by_pattern(const bl_train_config *config);

/* Whether report_to names tensorboard, or all. */
bool bl_train_config_reports_to_tensorboard(const bl_train_config *config);

/* Which fused matrices compute_bf16_modules names: bit m of masks[layer < n_layers] is
 * bl_layer_matrix m. BL_EUSAGE: a layer that the model does not have. */
bl_status bl_train_config_bf16_matrices(const bl_train_config *config, int64_t n_layers,
                                        uint8_t *masks);

/* Whether allow_resume_mismatch has the name (a key that differs from the checkpoint's), or
 * true. */
bool bl_train_config_allows(const bl_train_config *config, const char *name);

typedef enum bl_resume { BL_RESUME_NO, BL_RESUME_NEWEST, BL_RESUME_PATH } bl_resume;
/* PATH: config->resume_from_checkpoint. */
bl_resume bl_train_config_resume(const bl_train_config *config);

/* The comment that the file begins with. */
#define BL_RESOLVED_COMMENT "Every key of this run; `ballast train` reads it back."

/* Of a resolved configuration. */
bl_device_kind bl_train_config_device_kind(const bl_train_config *config);
/* The dtype of activations. compute_dtype is resolved. */
bl_dtype bl_train_config_act(const bl_train_config *config);
/* The dtype of AdamW's moments: of optimizer_state_dtype. */
bl_dtype bl_train_config_moments(const bl_train_config *config);

/* Every key with its value as YAML, atomically; bl_train_config_load reads it back. */
bl_status bl_train_config_write_resolved(const bl_train_config *config, const char *path);

/* A number (FNV-1a, 64 bits) over the keys of one effect and their values; equal configurations
 * have equal numbers. */
bl_status bl_train_config_hash(const bl_train_config *config, bl_option_effect effect,
                               uint64_t *hash);

/* "lora_r: 8 -> 16" a line for each key of that effect in which `now` differs from `before`; ""
 * when none does. The caller frees *text. */
bl_status bl_train_config_diff(const bl_train_config *before, const bl_train_config *now,
                               bl_option_effect effect, char **text);

/* Writes the configuration of another program as Ballast's YAML: keys with a counterpart, that
 * program's defaults where they differ, and comments on other keys; those that change training are
 * also logged as warnings. `tool`: axolotl, llamafactory, trl, torchtune, or a trainer of one, as
 * trl-orpo; NULL: detected by the keys. What `train` would reject is among the comments. BL_EUSAGE:
 * it cannot be, or the file is not YAML. */
bl_status bl_train_config_convert(const char *path, const char *tool, FILE *out);

/* The options of one command, or of several. */
void bl_train_config_print(bl_config_command command, bl_options_style style, FILE *out);

#endif
