/* SPDX-License-Identifier: Apache-2.0 */
/* olmo2.c -- OLMo 2: Llama's matrices; norms of the sub-layers' outputs, and of all of q and k. */
#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "arch/llama.h"
#include "base/sizes.h"

#define OLMO(hidden, inter, layers, heads, kv)                                                     \
    {                                                                                              \
        .vocab_size = 100352, .hidden_size = hidden, .intermediate_size = inter,                   \
        .n_layers = layers, .n_heads = heads, .n_kv_heads = kv, .head_dim = 128,                   \
        .max_position_embeddings = 4096, .rms_norm_eps = 1e-6, .rope_theta = 5e5,                  \
        .bos_token_id = -1, .eos_token_ids = {100257}, .n_eos_token_ids = 1                        \
    }

static const bl_preset presets[] = {
    {"olmo2-7b", OLMO(4096, 11008, 32, 32, 32)},
    {"olmo2-13b", OLMO(5120, 13824, 40, 40, 40)},
    {"olmo2-32b", OLMO(5120, 27648, 64, 40, 8)},
};

static const char *const keys[] = {BL_DECODER_KEYS, "attention_bias", NULL};

const bl_arch bl_arch_olmo2 = {
    .model_type = "olmo2",
    .class_name = "Olmo2ForCausalLM",
    .title = "OLMo 2",
    .keys = keys,
    .defaults = {.max_position_embeddings = 2048, .rms_norm_eps = 1e-5, .rope_theta = 1e4},
    BL_DECODER_MEMBERS,
    .presets = presets,
    .n_presets = BL_COUNT(presets),
    .vectors = {[BL_ATTENTION_NORM] = {"post_attention_layernorm.weight", BL_EXTENT_HIDDEN},
                [BL_MLP_NORM] = {"post_feedforward_layernorm.weight", BL_EXTENT_HIDDEN},
                [BL_Q_NORM] = {"self_attn.q_norm.weight", BL_EXTENT_Q},
                [BL_K_NORM] = {"self_attn.k_norm.weight", BL_EXTENT_KV}},
    .has_post_norms = true,
};
