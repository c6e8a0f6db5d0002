/* SPDX-License-Identifier: Apache-2.0 */
/* llama.c -- Llama 2 and 3, and the checkpoints that call themselves so. */
#include "arch/llama.h"

#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "base/sizes.h"

/* ---- models by name ---- */

#define LLAMA2(hidden, inter, layers, heads, kv)                                                   \
    {                                                                                              \
        .vocab_size = 32000, .hidden_size = hidden, .intermediate_size = inter,                    \
        .n_layers = layers, .n_heads = heads, .n_kv_heads = kv, .head_dim = 128,                   \
        .max_position_embeddings = 4096, .rms_norm_eps = 1e-5, .rope_theta = 1e4,                  \
        .bos_token_id = 1, .eos_token_ids = {2}, .n_eos_token_ids = 1                              \
    }

#define LLAMA3(hidden, inter, layers, heads, dim, positions, ...)                                  \
    {                                                                                              \
        .vocab_size = 128256, .hidden_size = hidden, .intermediate_size = inter,                   \
        .n_layers = layers, .n_heads = heads, .n_kv_heads = 8, .head_dim = dim,                    \
        .max_position_embeddings = positions, .rms_norm_eps = 1e-5, .rope_theta = 5e5,             \
        .bos_token_id = 128000, .eos_token_ids = {128001}, .n_eos_token_ids = 1, __VA_ARGS__       \
    }

#define LONG_ROPE(factor)                                                                          \
    .rope_kind = BL_ROPE_LLAMA3, .rope_factor = factor, .rope_low_freq_factor = 1,                 \
    .rope_high_freq_factor = 4, .rope_original_max_positions = 8192

static const bl_preset presets[] = {
    {"llama2-7b", LLAMA2(4096, 11008, 32, 32, 32)},
    {"llama2-13b", LLAMA2(5120, 13824, 40, 40, 40)},
    {"llama2-70b", LLAMA2(8192, 28672, 80, 64, 8)},
    {"llama3-8b", LLAMA3(4096, 14336, 32, 32, 128, 8192, .rope_kind = BL_ROPE_DEFAULT)},
    {"llama3-70b", LLAMA3(8192, 28672, 80, 64, 128, 8192, .rope_kind = BL_ROPE_DEFAULT)},
    {"llama3.1-8b", LLAMA3(4096, 14336, 32, 32, 128, 131072, LONG_ROPE(8))},
    {"llama3.1-70b", LLAMA3(8192, 28672, 80, 64, 128, 131072, LONG_ROPE(8))},
    {"llama3.1-405b", LLAMA3(16384, 53248, 126, 128, 128, 131072, LONG_ROPE(8))},
    {"llama3.2-1b",
     LLAMA3(2048, 8192, 16, 32, 64, 131072, LONG_ROPE(32), .tie_word_embeddings = true)},
    {"llama3.2-3b",
     LLAMA3(3072, 8192, 28, 24, 128, 131072, LONG_ROPE(32), .tie_word_embeddings = true)},
    {"llama3.3-70b", LLAMA3(8192, 28672, 80, 64, 128, 131072, LONG_ROPE(8))},
};

/* ---- the entry ---- */

static const char *const keys[] = {BL_DECODER_KEYS, "attention_bias", "mlp_bias", NULL};

const bl_projection bl_llama_projections[BL_PROJECTIONS] = {
    BL_LLAMA_ATTENTION,
    [BL_GATE] = {"mlp.gate_proj", BL_GATE_UP, BL_EXTENT_INTER, BL_EXTENT_HIDDEN},
    [BL_UP] = {"mlp.up_proj", BL_GATE_UP, BL_EXTENT_INTER, BL_EXTENT_HIDDEN},
    [BL_DOWN] = {"mlp.down_proj", BL_MLP_DOWN, BL_EXTENT_HIDDEN, BL_EXTENT_INTER},
};

const bl_arch bl_arch_llama = {
    .model_type = "llama",
    .class_name = "LlamaForCausalLM",
    .title = "Llama",
    .keys = keys,
    .defaults = {.max_position_embeddings = 2048, .rms_norm_eps = 1e-6, .rope_theta = 1e4},
    BL_DECODER_MEMBERS,
    .presets = presets,
    .n_presets = BL_COUNT(presets),
    .vectors = {BL_DECODER_NORMS},
};
