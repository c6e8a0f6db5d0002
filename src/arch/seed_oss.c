/* SPDX-License-Identifier: Apache-2.0 */
/* seed_oss.c -- Seed-OSS: Llama's layer with biases of q, k and v. */
#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "arch/llama.h"
#include "base/sizes.h"

static const bl_preset presets[] = {
    {"seed-oss-36b",
     {.vocab_size = 155136,
      .hidden_size = 5120,
      .intermediate_size = 27648,
      .n_layers = 64,
      .n_heads = 80,
      .n_kv_heads = 8,
      .head_dim = 128,
      .max_position_embeddings = 524288,
      .rms_norm_eps = 1e-6,
      .rope_theta = 1e7,
      .bos_token_id = 0,
      .eos_token_ids = {2},
      .n_eos_token_ids = 1,
      .biases = 1u << BL_QKV}},
};

/* The published files have dropouts of 0.1, which act in training only: LoRA's input dropout is the
 * one that Ballast has (lora_dropout). */
static const char *const keys[] = {BL_DECODER_KEYS,
                                   "attention_bias",
                                   "attention_out_bias",
                                   "mlp_bias",
                                   "attention_dropout",
                                   "residual_dropout",
                                   NULL};

const bl_arch bl_arch_seed_oss = {
    .model_type = "seed_oss",
    .class_name = "SeedOssForCausalLM",
    .title = "Seed-OSS",
    .keys = keys,
    .defaults = {.n_kv_heads = 8,
                 .head_dim = 128,
                 .max_position_embeddings = 524288,
                 .rms_norm_eps = 1e-6,
                 .rope_theta = 1e4,
                 .biases = 1u << BL_QKV},
    BL_DECODER_MEMBERS,
    .presets = presets,
    .n_presets = BL_COUNT(presets),
    .vectors = {BL_DECODER_NORMS},
};
