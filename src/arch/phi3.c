/* SPDX-License-Identifier: Apache-2.0 */
/* phi3.c -- Phi-3, Phi-3.5 (mini), Phi-4: Llama's layer with one matrix for queries, keys and
 * values and one for gate and up, and RoPE on a part of each head. */

#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "base/json.h"
#include "base/sizes.h"

#define PHI(vocab, hidden, inter, layers, heads, kv, dim, positions, theta, bos, eos)              \
    {                                                                                              \
        .vocab_size = vocab, .hidden_size = hidden, .intermediate_size = inter,                    \
        .n_layers = layers, .n_heads = heads, .n_kv_heads = kv, .head_dim = dim,                   \
        .max_position_embeddings = positions, .rms_norm_eps = 1e-5, .rope_theta = theta,           \
        .bos_token_id = bos, .eos_token_ids = {eos}, .n_eos_token_ids = 1                          \
    }

static const bl_preset presets[] = {
    {"phi3-mini", PHI(32064, 3072, 8192, 32, 32, 32, 96, 4096, 1e4, 1, 32000)},
    {"phi3-medium", PHI(32064, 5120, 17920, 40, 40, 10, 128, 4096, 1e4, 1, 32000)},
    {"phi4", PHI(100352, 5120, 17920, 40, 40, 10, 128, 16384, 2.5e5, 100257, 100265)},
};

/* Dropouts act in training only: LoRA's input dropout is the one that Ballast has. */
static const char *const keys[] = {BL_DECODER_KEYS,
                                   "sliding_window",
                                   "partial_rotary_factor",
                                   "original_max_position_embeddings",
                                   "attention_dropout",
                                   "resid_pdrop",
                                   "embd_pdrop",
                                   NULL};

/* transformers computes "longrope" for files that say "yarn". */
static bl_status read_phi3(const char *file, const json_t *root, bl_model_config *c)
{
    BL_TRY(arch_read_decoder(file, root, c));
    if (c->rope_kind == BL_ROPE_DEFAULT || c->rope_kind == BL_ROPE_LONGROPE) return BL_OK;
    const char *key = json_object_get(root, "rope_parameters") ? "rope_parameters" : "rope_scaling";
    return bl_json_fail(file, key, "the type \"default\" or \"longrope\"",
                        json_object_get(root, key));
}

static const bl_projection projections[] = {
    {"self_attn.qkv_proj", BL_QKV, BL_EXTENT_QKV, BL_EXTENT_HIDDEN},
    {"self_attn.o_proj", BL_OUT, BL_EXTENT_HIDDEN, BL_EXTENT_Q},
    {"mlp.gate_up_proj", BL_GATE_UP, BL_EXTENT_GATE_UP, BL_EXTENT_HIDDEN},
    {"mlp.down_proj", BL_MLP_DOWN, BL_EXTENT_HIDDEN, BL_EXTENT_INTER},
};

const bl_arch bl_arch_phi3 = {
    .model_type = "phi3",
    .class_name = "Phi3ForCausalLM",
    .title = "Phi-3",
    .keys = keys,
    .defaults = {.max_position_embeddings = 4096, .rms_norm_eps = 1e-5, .rope_theta = 1e4},
    BL_DECODER_NAMES,
    .read = read_phi3,
    .describe = arch_describe_decoder,
    .presets = presets,
    .n_presets = BL_COUNT(presets),
    .projections = projections,
    .n_projections = BL_COUNT(projections),
    .vectors = {BL_DECODER_NORMS},
};
