/* SPDX-License-Identifier: Apache-2.0 */
/* The keys of a run: their names, defaults, ranges and one-line meanings. docs/options.md is
 * generated from this table.
 *
 * A key of a feature that this version does not have is in the table all the same, with `available`
 * naming the values that work: another value is rejected, never ignored. */
#include "config/table_internal.h"

#include "base/sizes.h"
#include "config/config.h"

/* An option without an upper bound: integers are exact up to here. */
#define NO_MAX 9007199254740992.0

#define TRAIN BL_CONFIG_TRAIN
#define BOTH  (BL_CONFIG_TRAIN | BL_CONFIG_EVAL)
/* Keys of a session's base, and of an adapter in a session. */
#define BASE    BL_CONFIG_SESSION
#define ADAPTER BL_CONFIG_ADAPTER

#define KEY(name, kind)                                                                            \
    .key = #name, .offset = offsetof(bl_train_config, name), .type = BL_OPTION_##kind,             \
    .group = GROUP
#define RANGE(low, high) .min = (low), .max = (high)
#define RESULT           .effect = BL_EFFECT_RESULT
#define SOURCE           .effect = BL_EFFECT_SOURCE

const bl_option bl_train_options[] = {
#define GROUP "Model and output"
    {KEY(model_name_or_path, PATH), SOURCE, .is_model = true, .commands = BOTH | BASE,
     .required_by = BOTH | BASE,
     .help = "frozen base: a Hugging Face directory with config.json, safetensors and "
             "tokenizer, or owner/name of a model in the Hugging Face cache"},
    {KEY(init_adapter, PATH), SOURCE, .is_model = true, .commands = BOTH | ADAPTER,
     .help = "PEFT adapter to start from; it fixes lora_r, lora_alpha, lora_target_modules "
             "and use_rslora"},
    {KEY(output_dir, PATH), .commands = TRAIN, .required_by = TRAIN,
     .help = "directory for the adapter, metrics and checkpoints"},
    {KEY(overwrite_output_dir, BOOL), .commands = TRAIN, .default_text = "false",
     .help = "delete the run in output_dir, which its .ballast-files lists, and start over"},
    {KEY(resume_from_checkpoint, STRING), .commands = TRAIN, .default_text = "false",
     .help = "true: resume the newest valid checkpoint of output_dir, or start if there is "
             "neither a checkpoint nor an adapter; a path: resume that one"},
    {KEY(allow_resume_mismatch, LIST), .commands = TRAIN,
     .help = "keys that may differ from the checkpoint's, as the error of a resume lists them "
             "(train_file: the data, model_name_or_path: the model); not bit-identical. true: any"},
    {KEY(adapter_dtype, ENUM), .commands = TRAIN, .names = "f32|bf16", .default_text = "f32",
     .help = "dtype of the written adapter"},
    {KEY(adapter_layout, ENUM), .commands = TRAIN, .names = "peft|per_expert",
     .default_text = "peft",
     .help = "routed experts in the written adapter: stacked, as PEFT from 0.19.1 on has them, or "
             "a pair per expert, which vLLM and SGLang read"},
    {KEY(queue, PATH), .commands = TRAIN,
     .help = "directory of jobs: keep the base loaded and train each YAML file that is moved "
             "there; this file's other keys are the jobs' defaults (docs/several-runs.md)"},
#undef GROUP

#define GROUP "Data"
    {KEY(train_file, PATH), SOURCE, .commands = TRAIN, .required_by = TRAIN,
     .help = "training data: JSON, JSON lines or CSV, also compressed; a directory of such files; "
             "- for stdin"},
    {KEY(more_train_files, LIST), SOURCE, .commands = TRAIN,
     .help = "files or directories whose rows follow those of train_file"},
    {KEY(train_file_shares, LIST), SOURCE, .commands = TRAIN,
     .help = "for train_file and each of more_train_files, how often its rows are used in an "
             "epoch: 0.5 every second row, 2 each row twice"},
    {KEY(validation_file, PATH), .commands = BOTH, .required_by = BL_CONFIG_EVAL,
     .help = "held-out data, as train_file; eval needs it"},
    {KEY(validation_split_percentage, REAL), RANGE(0, 99), RESULT, .commands = TRAIN,
     .default_text = "0",
     .help = "hold out the first rows of train_file, that many percent (taken before shuffling)"},
    {KEY(data_format, ENUM), RESULT, .commands = BOTH, .default_text = "auto",
     .names = "auto|tokens|text|alpaca|prompt_completion|messages|sharegpt|preference|"
              "unpaired_preference",
     .help = "format of the rows; auto detects it from the first row; messages also takes the keys "
             "of alpaca and prompt_completion (docs/data.md)"},
    {KEY(dataset_text_field, STRING), SOURCE, .commands = BOTH, .default_text = "text",
     .help = "key of the text in rows of format text"},
    {KEY(packing, ENUM), RESULT, .commands = BOTH, .names = "none|pack|concatenate",
     .default_text = "none", .true_name = "pack",
     .help = "none: one sample per sequence; pack, or true: several samples per sequence, kept "
             "apart; "
             "concatenate: one stream, cut into sequences"},
    {KEY(max_seq_length, INT), RANGE(2, 1048576), RESULT, .commands = BOTH | BASE,
     .default_text = "2048", .help = "maximum tokens per sequence"},
    {KEY(overlong, ENUM), RESULT, .commands = BOTH, .names = "truncate|skip|error",
     .default_text = "truncate", .help = "policy for samples longer than max_seq_length"},
    {KEY(shuffle, BOOL), RESULT, .commands = TRAIN, .default_text = "true",
     .help = "new sample order every epoch, derived from seed"},
    {KEY(train_on_inputs, BOOL), RESULT, .commands = BOTH, .default_text = "false",
     .help = "compute the loss on prompts as well as answers"},
    {KEY(skip_bad, BOOL), RESULT, .commands = BOTH, .default_text = "false",
     .help = "skip and count unreadable rows instead of stopping at the first"},
    {KEY(chat_template, STRING), RESULT, .commands = BOTH,
     .help = "llama2, llama3, llama3.1, llama3.2, a file, a jinja text, or the name of one of the "
             "model's templates (docs/data.md); null: the model's own template"},
    {KEY(template_date, STRING), RESULT, .commands = BOTH,
     .help = "date written by templates that write one; default 26 Jul 2024"},
#undef GROUP

#define GROUP "Loss"
    {KEY(loss_type, LIST), RESULT, .commands = BOTH, .default_text = "nll",
     .help = "nll: cross entropy; preference losses with TRL's names, one or several: sigmoid "
             "(DPO), hinge, ipo, sigmoid_norm, robust, apo_zero, apo_down, sft, orpo, simpo, kto "
             "(docs/preference.md)"},
    {KEY(loss_weights, LIST), RESULT, .commands = BOTH,
     .help = "weight of each loss of loss_type; default: 1 each"},
    {KEY(beta, REAL), RANGE(1e-6, 1e6), RESULT, .commands = BOTH, .default_text = "0.1",
     .help = "of preference losses: how much a deviation from the reference counts; ipo: tau"},
    {KEY(label_smoothing, REAL), RANGE(0, 1), RESULT, .commands = BOTH, .default_text = "0",
     .help = "robust, simpo: probability that chosen and rejected were exchanged"},
    {KEY(ld_alpha, REAL), RANGE(0, 1), RESULT, .commands = BOTH, .default_text = "1",
     .help = "LD-DPO: weight of an answer's tokens beyond the length of the shorter answer"},
    {KEY(simpo_gamma, REAL), RANGE(0, 1e6), RESULT, .commands = BOTH, .default_text = "0.5",
     .help = "simpo: target margin of the rewards"},
    {KEY(desirable_weight, REAL), RANGE(0, 1e6), RESULT, .commands = BOTH, .default_text = "1",
     .help = "kto: weight of the losses of desirable answers"},
    {KEY(undesirable_weight, REAL), RANGE(0, 1e6), RESULT, .commands = BOTH, .default_text = "1",
     .help = "kto: weight of the losses of undesirable answers"},
    {KEY(precompute_ref_log_probs, BOOL), RESULT, .commands = TRAIN, .default_text = "false",
     .help = "compute the log-probabilities of the reference once, before the first step, and keep "
             "them in output_dir (docs/preference.md)"},
#undef GROUP

#define GROUP "Trained weights"
    {KEY(finetuning_type, ENUM), RESULT, .commands = TRAIN, .names = "lora|full",
     .default_text = "lora",
     .help = "lora: an adapter over the frozen base; full: the weights of the model, all or "
             "trainable_modules (docs/full-finetuning.md)"},
    {KEY(trainable_modules, LIST), RESULT, .commands = TRAIN,
     .help =
         "with finetuning_type full, the tensors to train: regular expressions that match whole "
         "dot-separated parts of their names, such as norm, model.layers.(2[4-9]|3[01]), "
         "lm_head; default: all"},
    {KEY(freeze, LIST), RESULT, .commands = TRAIN,
     .help =
         "with finetuning_type full, tensors to exclude from training: regular expressions, as in "
         "trainable_modules"},
    {KEY(model_dtype, ENUM), .commands = TRAIN, .names = "stored|f32", .default_text = "stored",
     .help = "with finetuning_type full, dtype of the written model: that of the checkpoint's "
             "tensors, to which the trained weights are rounded; or fp32"},
#undef GROUP

#define GROUP "LoRA"
    {KEY(lora_r, INT), RANGE(1, 1024), RESULT, .commands = TRAIN | ADAPTER, .default_text = "8",
     .help = "LoRA rank"},
    {KEY(lora_alpha, REAL), RANGE(0, 1e6), RESULT, .commands = TRAIN | ADAPTER, .default_text = "8",
     .help = "the LoRA term is scaled by lora_alpha / lora_r"},
    {KEY(lora_dropout, REAL), RANGE(0, 0.99), RESULT, .commands = TRAIN | ADAPTER,
     .default_text = "0", .help = "dropout probability of the LoRA input"},
    {KEY(lora_target_modules, LIST), RESULT, .commands = TRAIN | ADAPTER,
     .default_text = "all-linear",
     .help = "modules with a LoRA term: all-linear (all projections), some of q_proj, k_proj, "
             "v_proj, o_proj, gate_proj, up_proj, down_proj and, on CPUs, embed_tokens and "
             "lm_head, their paths in every layer, or a regular expression without comma"},
    {KEY(modules_to_save, LIST), RESULT, .commands = TRAIN,
     .help =
         "modules to train whole in addition to LoRA and to write into the adapter, as in PEFT: "
         "norms, embedding or head, named by the ends of their paths (norm, embed_tokens, "
         "lm_head)"},
    {KEY(use_rslora, BOOL), RESULT, .commands = TRAIN | ADAPTER, .default_text = "false",
     .help = "scale by lora_alpha / sqrt(lora_r) instead"},
#undef GROUP

#define GROUP "Optimization"
    {KEY(learning_rate, REAL), RANGE(0, 10), RESULT, .commands = TRAIN, .default_text = "2e-4",
     .help = "peak learning rate of AdamW; the default suits LoRA, not full fine-tuning"},
    {KEY(embedding_learning_rate, REAL), RANGE(0, 10), .has_auto = true, RESULT, .commands = TRAIN,
     .default_text = "auto",
     .help = "with finetuning_type full, peak learning rate of embedding and head; auto: "
             "learning_rate"},
    {KEY(learning_rates, LIST), RESULT, .commands = TRAIN,
     .help = "peak learning rates of some tensors, PATTERN=RATE each: regular expressions as in "
             "trainable_modules over the names of trained tensors and LoRA weights, such as "
             "embed_tokens=1e-5, lora_B=1e-3; the last that matches counts"},
    {KEY(weight_decay, REAL), RANGE(0, 10), RESULT, .commands = TRAIN, .default_text = "0",
     .help = "decoupled weight decay; with finetuning_type full not of norms and biases"},
    {KEY(adam_beta1, REAL), RANGE(0, 0.999999), RESULT, .commands = TRAIN, .default_text = "0.9",
     .help = "decay of AdamW's first moment"},
    {KEY(adam_beta2, REAL), RANGE(0, 0.999999), RESULT, .commands = TRAIN, .default_text = "0.999",
     .help = "decay of AdamW's second moment"},
    {KEY(adam_epsilon, REAL), RANGE(0, 1), RESULT, .commands = TRAIN, .default_text = "1e-8",
     .help = "AdamW's epsilon"},
    {KEY(optimizer_state_dtype, ENUM), RESULT, .commands = TRAIN, .names = "fp32|bf16",
     .default_text = "fp32",
     .help = "with finetuning_type full, dtype of AdamW's moments; bf16: rounded stochastically, "
             "12 bytes per weight in place of 16"},
    {KEY(max_grad_norm, REAL), RANGE(0, 1e9), RESULT, .commands = TRAIN, .default_text = "1",
     .null_text = "0", .help = "clip gradients to this norm; 0 or null: off"},
    {KEY(lr_scheduler_type, ENUM), RESULT, .commands = TRAIN,
     .names = "linear|cosine|constant|constant_with_warmup", .default_text = "linear",
     .help = "learning rate schedule after warm-up"},
    {KEY(warmup_ratio, REAL), RANGE(0, 1), RESULT, .commands = TRAIN, .default_text = "0",
     .help = "warm-up fraction of all steps, rounded up to whole steps"},
    {KEY(warmup_steps, INT), RANGE(0, NO_MAX), RESULT, .commands = TRAIN, .default_text = "0",
     .fraction_key = "warmup_ratio",
     .help = "warm-up steps; between 0 and 1, as in transformers 5: the warmup_ratio"},
    {KEY(num_train_epochs, REAL), RANGE(0, 1e6), RESULT, .commands = TRAIN, .default_text = "3",
     .help = "passes over the training data; steps per pass: epoch_end"},
    {KEY(max_steps, INT), RANGE(-1, NO_MAX), RESULT, .commands = TRAIN, .default_text = "-1",
     .help = "optimizer steps; above 0 it replaces num_train_epochs"},
    {KEY(epoch_end, ENUM), RESULT, .commands = TRAIN, .names = "short_step|continue",
     .default_text = "short_step",
     .help = "rows that do not fill the last step of an epoch: short_step trains on them alone, as "
             "transformers' Trainer; continue fills the step with rows of the next epoch"},
    {KEY(per_device_train_batch_size, INT), RANGE(1, 65536), RESULT, .commands = TRAIN | BASE,
     .default_text = "8", .help = "sequences per rank per micro-batch"},
    {KEY(per_device_eval_batch_size, INT), RANGE(1, 65536), .commands = BOTH, .default_text = "8",
     .help = "sequences per rank per evaluation micro-batch"},
    {KEY(gradient_accumulation_steps, INT), RANGE(1, 1048576), RESULT, .commands = TRAIN,
     .default_text = "1", .help = "micro-batches per rank per optimizer step"},
    {KEY(seed, INT), RANGE(0, NO_MAX), RESULT, .commands = TRAIN | ADAPTER, .default_text = "42",
     .help = "random seed: LoRA initialization, sample order, dropout"},
#undef GROUP

#define GROUP "Reports and checkpoints"
    {KEY(logging_steps, INT), RANGE(1, NO_MAX), .commands = TRAIN, .default_text = "1",
     .help = "steps between lines on the terminal (metrics.jsonl gets every step)"},
    {KEY(save_strategy, ENUM), .commands = TRAIN, .names = "no|steps|epoch|best",
     .default_text = "steps",
     .help = "when to write checkpoints: never, every save_steps, after each epoch, after an "
             "evaluation with the lowest loss so far; the last step always has one"},
    {KEY(save_steps, INT), RANGE(0, NO_MAX), .commands = TRAIN, .default_text = "500",
     .help = "steps between checkpoints with save_strategy steps; 0: only at the end"},
    {KEY(save_total_limit, INT), RANGE(0, NO_MAX), .commands = TRAIN, .default_text = "0",
     .help =
         "checkpoints to keep, at least two; 0: all; with load_best_model_at_end the best one is "
         "kept and counts"},
    {KEY(eval_strategy, ENUM), .commands = TRAIN, .names = "no|steps|epoch", .default_text = "no",
     .help = "when to evaluate the held-out data"},
    {KEY(eval_steps, INT), RANGE(1, NO_MAX), .commands = TRAIN, .default_text = "500",
     .help = "steps between evaluations with eval_strategy steps"},
    {KEY(eval_overlap, BOOL), .commands = TRAIN, .default_text = "false",
     .help = "evaluate in the visits of the next step, which bring each layer once for both; the "
             "results are the same"},
    {KEY(load_best_model_at_end, BOOL), .commands = TRAIN, .default_text = "false",
     .help = "write the adapter of the evaluation with the lowest loss, not that of the last step; "
             "an evaluation with the lowest loss so far is followed by a checkpoint; needs "
             "eval_strategy"},
    {KEY(metric_for_best_model, ENUM), .commands = TRAIN, .names = "loss|eval_loss",
     .default_text = "loss",
     .help = "metric of load_best_model_at_end and early stopping; both names are the validation "
             "loss, the only metric"},
    {KEY(greater_is_better, BOOL), .commands = TRAIN, .default_text = "false",
     .help = "only false: the metric is a loss"},
    {KEY(early_stopping_patience, INT), RANGE(0, NO_MAX), .commands = TRAIN, .default_text = "0",
     .help = "stop after this many evaluations in a row without a better loss; 0: off; needs "
             "eval_strategy"},
    {KEY(early_stopping_threshold, REAL), RANGE(0, 1e6), .commands = TRAIN, .default_text = "0",
     .help = "early stopping: a better loss is lower than the lowest so far by more than this"},
    {KEY(reduction_factor, INT), RANGE(0, 64), .commands = TRAIN, .default_text = "0",
     .help = "successive halving of several runs: at each rung one in this many runs continues, "
             "by lowest validation loss; needs validation data; 0: off"},
    {KEY(grace_period, INT), RANGE(1, 1000000000), .commands = TRAIN, .default_text = "1",
     .help = "with reduction_factor: steps of the first rung; each later rung has "
             "reduction_factor times as many"},
    {KEY(eval_stored_base, BOOL), .commands = TRAIN, .default_text = "true",
     .help = "after training on a quantized base, also evaluate the adapter on the stored "
             "base, if one process has all ranks and that needs no more memory than training"},
    {KEY(report_to, LIST), .commands = TRAIN,
     .help = "tensorboard: also write event files for TensorBoard; none; all: whatever Ballast "
             "writes, which is tensorboard (metrics.jsonl is always written)"},
    {KEY(logging_dir, PATH), .commands = TRAIN,
     .help = "directory for the event files of report_to tensorboard; default: output_dir/runs"},
    {KEY(trace, PATH), .commands = TRAIN,
     .help = "write the activity of every stream to this file, for Perfetto or "
             "chrome://tracing; of several processes to FILE.rank0, FILE.rank1, ..."},
    {KEY(dump_gradients, PATH), .commands = TRAIN,
     .help = "write the first step's gradients to this safetensors file"},
#undef GROUP

#define GROUP "Execution"
    {KEY(device, ENUM), RESULT, .commands = BOTH | BASE, .names = "auto|cpu|cuda",
     .default_text = "auto",
     .help = "device of the ranks; auto: the GPU, if this build and machine have one"},
    {KEY(compute_dtype, ENUM), RESULT, .commands = BOTH | BASE, .names = "auto|fp32|bf16|fp8",
     .default_text = "auto",
     .help = "arithmetic of products: fp32 or, with AVX512-BF16, bf16 on the CPU; bf16, or fp8 for "
             "products with the frozen projections, on a GPU; auto: fp32 or bf16"},
    {KEY(compute_bf16_modules, LIST), RESULT, .commands = BOTH,
     .help = "exceptions from compute_dtype fp8: projections (down_proj), layers (layers.0) or "
             "projections of a layer (layers.0.mlp.down_proj); those that share a fused matrix "
             "go together"},
    {KEY(fp8_fast_accumulation, ENUM), RESULT, .commands = BOTH, .names = "none|forward|all",
     .default_text = "none",
     .help = "with compute_dtype fp8: products that sum in Hopper's accumulator, which keeps about "
             "14 bits; forward: also recomputation, not gradients"},
    {KEY(base_format, ENUM), RESULT, .commands = BOTH | BASE,
     .names = "auto|" BL_FORMATS_MADE "|stored", .default_text = "auto",
     .help = "format of the frozen projections; auto keeps FP8 and quantizes others to "
             "fp8_row; 4-bit formats on CPUs only"},
    {KEY(base_format_scales, ENUM), RESULT, .commands = BOTH | BASE,
     .names = "least_squares|largest", .default_text = "least_squares",
     .help = "scales of mxfp4 and int4: those with the least squared error per group, or those of "
             "the largest weight"},
    {KEY(ranks, INT), RANGE(1, 4096), .has_auto = true, RESULT, .commands = BOTH | BASE,
     .default_text = "auto",
     .help =
         "number of ranks; auto: the visible GPUs of all hosts; on CPUs one, or one per process "
         "started by mpirun, srun or torchrun"},
    {KEY(rank_processes, ENUM), .commands = BOTH, .names = "auto|true|false",
     .default_text = "auto",
     .help = "start a process per rank; false: ranks are threads of one process; auto: processes "
             "if each rank has a separate GPU"},
    {KEY(threads, INT), RANGE(1, 4096), .has_auto = true, .commands = BOTH | BASE,
     .default_text = "auto",
     .help =
         "CPU threads per rank; auto: usable cores, within the CPU limit of a container, divided "
         "by the ranks of this host, unless each is bound to its own"},
    {KEY(shard_size, INT), RANGE(1, 4096), .has_auto = true, .commands = BOTH,
     .default_text = "auto",
     .help = "ranks that share one copy of the base; divides ranks; auto: all"},
    {KEY(sum_block, INT), RANGE(1, 4096), RESULT, .commands = BOTH, .default_text = "8",
     .help = "ranks per block of a sum over ranks: gradients are added in rank order within each "
             "block, then over the blocks; on several hosts use the number of ranks per host or a "
             "divisor of it"},
    {KEY(offload_ratio, REAL), RANGE(0, 1), .has_auto = true, .commands = BOTH | BASE,
     .default_text = "auto",
     .help = "fraction of the base outside device memory, prefetched before use; auto: in training "
             "on GPUs the fastest that fits; in full fine-tuning on CPUs 0; otherwise as little as "
             "memory requires"},
    {KEY(offload_tier, ENUM), .commands = BOTH | BASE, .names = "host|disk", .default_text = "host",
     .help = "tier of that fraction: pinned host memory, or page files in offload_dir"},
    {KEY(offload_host_part, REAL), RANGE(0, 1), .commands = BOTH | BASE, .default_text = "0",
     .help = "with offload_tier disk: the part of that fraction in pinned host memory; the rest is "
             "in page files"},
    {KEY(offload_compute_copy, ENUM), .commands = TRAIN, .names = "auto|true|false",
     .default_text = "auto", .true_name = "true",
     .help = "with finetuning_type full, bf16 products and offload_ratio above 0, store the bf16 "
             "copy of the weights in the tiers of the fp32 weights; false: in device memory; auto: "
             "on GPUs the faster choice that fits, on CPUs false"},
    {KEY(offload_dir, PATH), .commands = BOTH | BASE,
     .help = "directory of the disk tier, on a fast local disk; created if missing; page "
             "files of the same model are reused"},
    {KEY(optimizer_tier, ENUM), .commands = TRAIN, .names = "auto|device|host|disk",
     .default_text = "auto",
     .help = "with finetuning_type full, tier of AdamW's moments and the gradients: device memory, "
             "host memory (the same on CPUs), or a file in offload_dir; auto: device, on GPUs "
             "offload_tier for layers that do not fit"},
    {KEY(optimizer_ratio, REAL), RANGE(0, 1), .has_auto = true, .commands = TRAIN,
     .default_text = "auto",
     .help = "fraction of moments and gradients in optimizer_tier, in whole layers; the rest is in "
             "device memory; auto: offload_ratio if that is above 0 and optimizer_tier is auto, "
             "otherwise 1"},
    {KEY(verify_base, ENUM), .commands = BOTH | BASE, .names = "first|save|always",
     .default_text = "first",
     .help = "when to verify base checksums: at the first read of each page from disk; also "
             "all pages before each checkpoint; also every page at every read"},
    {KEY(ring_depth, INT), RANGE(1, 64), .commands = BOTH | BASE, .default_text = "2",
     .help = "gathered layers held, current one included; as many groups of experts"},
    {KEY(expert_group, INT), RANGE(1, NO_MAX), .has_auto = true, .commands = BOTH | BASE,
     .default_text = "auto",
     .help = "experts gathered together in a mixture; auto: as many as have the weights of the "
             "layer's other matrices, at least one"},
    {KEY(io_engine, ENUM), .commands = BOTH | BASE, .names = "auto|uring|pread",
     .default_text = "auto",
     .help = "engine for reading the model's files; auto: io_uring, or pread where it is "
             "refused"},
    {KEY(activation_checkpointing, ENUM), .commands = TRAIN | BASE,
     .names = "none|mlp|selective|full|auto", .default_text = "auto", .true_name = "full",
     .help = "what backward recomputes: nothing; gate and up projections; also q, k and v; also "
             "attention and o; true: full"},
    {KEY(activation_checkpointing_layers, INT), RANGE(0, NO_MAX), .has_auto = true,
     .commands = TRAIN | BASE, .default_text = "auto",
     .help = "layers that activation_checkpointing applies to, spread evenly; the others recompute "
             "nothing; auto: all, or chosen with activation_checkpointing auto"},
    {KEY(activation_offload, BOOL), .commands = TRAIN | BASE, .default_text = "false",
     .help = "keep saved activations in host memory"},
    {KEY(visit_tokens, INT), RANGE(1, NO_MAX), .has_auto = true, .commands = BOTH | BASE,
     .default_text = "auto",
     .help = "tokens per rank per gather of a layer; whole micro-batches, at least one"},
    {KEY(grace_s, REAL), RANGE(0, 86400), .commands = TRAIN, .default_text = "20",
     .help = "time in seconds for the current step after a stop request"},
    {KEY(step_deadline_s, REAL), RANGE(0, 1e6), .commands = BOTH, .default_text = "1800",
     .null_text = "0",
     .help = "timeout in seconds of a rank that waits for another; 0 or null: none"},
    {KEY(gather_by_hosts, BOOL), .commands = BOTH, .default_text = "false",
     .help =
         "in all-gathers between GPUs of several hosts, send each rank's part once to each host "
         "and distribute it there; false: NCCL's algorithm, usually a ring"},
    {KEY(compare_collectives, BOOL), .commands = BOTH, .default_text = "false",
     .help = "debugging: in the first step, compare the collectives of GPUs between ranks before "
             "each starts"},
#undef GROUP
};

const size_t bl_train_n_options = BL_COUNT(bl_train_options);
_Static_assert(BL_COUNT(bl_train_options) <= BL_TRAIN_CONFIG_MAX_KEYS,
               "bl_config_source.origins holds one byte a key");
