/* SPDX-License-Identifier: Apache-2.0 */
/* mistral.c -- Mistral: Llama's layer with a window in every layer, or in none. Ministral 3: the
 * same, with YaRN, and queries that may be scaled by their position. */
#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "arch/llama.h"
#include "base/sizes.h"

/* ---- Mistral ---- */

static const bl_preset presets[] = {
    {"mistral-7b-v0.3",
     {.vocab_size = 32768,
      .hidden_size = 4096,
      .intermediate_size = 14336,
      .n_layers = 32,
      .n_heads = 32,
      .n_kv_heads = 8,
      .head_dim = 128,
      .max_position_embeddings = 32768,
      .rms_norm_eps = 1e-5,
      .rope_theta = 1e6,
      .bos_token_id = 1,
      .eos_token_ids = {2},
      .n_eos_token_ids = 1}},
    {"mistral-large-123b",
     {.vocab_size = 32768,
      .hidden_size = 12288,
      .intermediate_size = 28672,
      .n_layers = 88,
      .n_heads = 96,
      .n_kv_heads = 8,
      .head_dim = 128,
      .max_position_embeddings = 131072,
      .rms_norm_eps = 1e-5,
      .rope_theta = 1e6,
      .bos_token_id = 1,
      .eos_token_ids = {2},
      .n_eos_token_ids = 1}},
};

static const char *const keys[] = {BL_DECODER_KEYS, "sliding_window", NULL};

const bl_arch bl_arch_mistral = {
    .model_type = "mistral",
    .class_name = "MistralForCausalLM",
    .title = "Mistral",
    .keys = keys,
    .defaults = {.n_kv_heads = 8,
                 .max_position_embeddings = 131072,
                 .rms_norm_eps = 1e-6,
                 .rope_theta = 1e4,
                 .windows = {.tokens = 4096}},
    BL_DECODER_MEMBERS,
    .presets = presets,
    .n_presets = BL_COUNT(presets),
    .vectors = {BL_DECODER_NORMS},
};

/* ---- Ministral 3 ---- */

static const bl_preset ministral3_presets[] = {
    {"devstral-2-123b",
     {.vocab_size = 131072,
      .hidden_size = 12288,
      .intermediate_size = 28672,
      .n_layers = 88,
      .n_heads = 96,
      .n_kv_heads = 8,
      .head_dim = 128,
      .max_position_embeddings = 262144,
      .rms_norm_eps = 1e-5,
      .rope_theta = 1e6,
      .rope_kind = BL_ROPE_YARN,
      .rope_factor = 64,
      .rope_original_max_positions = 4096,
      .rope_beta_fast = 4,
      .rope_beta_slow = 1,
      .rope_attention_factor = 1.4158883083359672, /* 0.1 log(64) + 1 */
      .bos_token_id = 1,
      .eos_token_ids = {2},
      .n_eos_token_ids = 1}},
};

const bl_arch bl_arch_ministral3 = {
    .model_type = "ministral3",
    .class_name = "Ministral3ForCausalLM",
    .title = "Ministral 3",
    .keys = keys,
    .defaults = {.n_kv_heads = 8,
                 .head_dim = 128,
                 .max_position_embeddings = 262144,
                 .rms_norm_eps = 1e-5,
                 /* of a file without RoPE's keys */
                 .rope_theta = 1e6,
                 .rope_kind = BL_ROPE_YARN,
                 .rope_factor = 16,
                 .rope_original_max_positions = 16384,
                 .rope_beta_fast = 32,
                 .rope_beta_slow = 1,
                 .rope_attention_factor = 1,
                 .query_beta = 0.1},
    BL_DECODER_MEMBERS,
    .presets = ministral3_presets,
    .n_presets = BL_COUNT(ministral3_presets),
    .has_query_scaling = true,
    .vectors = {BL_DECODER_NORMS},
};
