/* SPDX-License-Identifier: Apache-2.0 */
/* granite.c -- Granite 3 (dense): Llama's layer with four multipliers. */
#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "arch/llama.h"
#include "base/sizes.h"

#define GRANITE(hidden, inter, dim, residual, scaling)                                             \
    {                                                                                              \
        .vocab_size = 49155, .hidden_size = hidden, .intermediate_size = inter, .n_layers = 40,    \
        .n_heads = 32, .n_kv_heads = 8, .head_dim = dim, .max_position_embeddings = 131072,        \
        .rms_norm_eps = 1e-5, .tie_word_embeddings = true, .rope_theta = 1e7,                      \
        .embedding_multiplier = 12, .residual_multiplier = residual,                               \
        .attention_multiplier = 1.0 / (dim), .logits_scaling = scaling, .bos_token_id = 0,         \
        .eos_token_ids = {0}, .n_eos_token_ids = 1                                                 \
    }

static const bl_preset presets[] = {
    {"granite-3.1-2b", GRANITE(2048, 8192, 64, 0.22, 8)},
    {"granite-3.1-8b", GRANITE(4096, 12800, 128, 0.22, 16)},
};

static const char *const keys[] = {
    BL_DECODER_KEYS,       "attention_bias",       "mlp_bias",       "embedding_multiplier",
    "residual_multiplier", "attention_multiplier", "logits_scaling", NULL};

const bl_arch bl_arch_granite = {
    .model_type = "granite",
    .class_name = "GraniteForCausalLM",
    .title = "Granite",
    .keys = keys,
    .defaults = {.max_position_embeddings = 2048,
                 .rms_norm_eps = 1e-6,
                 .rope_theta = 1e4,
                 .attention_multiplier = 1},
    BL_DECODER_MEMBERS,
    .presets = presets,
    .n_presets = BL_COUNT(presets),
    .vectors = {BL_DECODER_NORMS},
};
