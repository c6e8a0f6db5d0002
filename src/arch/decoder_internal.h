/* SPDX-License-Identifier: Apache-2.0 */
/* decoder_internal.h -- `read` and `describe` of pre-norm decoders, for entries of the table: an
 * entry uses them, or calls them and adds its own keys. Of the keys that only some families have,
 * they read those that the entry lists. */
#ifndef BALLAST_ARCH_DECODER_INTERNAL_H
#define BALLAST_ARCH_DECODER_INTERNAL_H

#include "arch/arch.h"
#include "arch/rope_internal.h"

/* The keys that arch_read_common_sizes and arch_read_rest read of every family, and those that
 * arch_read_decoder reads. */
#define BL_COMMON_KEYS                                                                             \
    "vocab_size", "hidden_size", "num_hidden_layers", "num_attention_heads",                       \
        "max_position_embeddings", "tie_word_embeddings", "bos_token_id", "eos_token_id",          \
        "rope_theta", "rope_scaling", "rope_parameters"
#define BL_DECODER_KEYS                                                                            \
    BL_COMMON_KEYS, "intermediate_size", "num_key_value_heads", "head_dim", "rms_norm_eps"
/* Keys that it reads where an entry lists them:
 *
 *   attention_bias       biases of q, k, v and o; of q, k and v where attention_out_bias is listed
 *   attention_out_bias   bias of o
 *   mlp_bias             biases of gate, up and down
 *   bias                 biases of all projections
 *   sliding_window       tokens; absent: as in `defaults`; null: none
 *   use_sliding_window, max_window_layers, layer_types   whether, and in which layers: those from
 *                        number max_window_layers on, or those of type "sliding_attention"
 *   num_experts, num_local_experts, num_experts_per_tok, moe_intermediate_size, norm_topk_prob
 *                        experts, and with output_router_logits and router_jitter_noise what must
 *                        be off
 *   decoder_sparse_step, mlp_only_layers, first_k_dense_replace   layers of a mixture that have one
 *                        MLP
 *   n_routed_experts, n_shared_experts, n_group, topk_group, routed_scaling_factor,
 *   num_nextn_predict_layers, num_mtp_layers   DeepSeek-V3's
 *   use_qk_norm          of entries with `plain`
 *   embedding_multiplier, residual_multiplier, attention_multiplier, logits_scaling   Granite's
 */
#define BL_WINDOW_KEYS "sliding_window", "use_sliding_window", "max_window_layers", "layer_types"
bl_status arch_read_common_sizes(const char *file, const json_t *root, bl_model_config *config);
bl_status arch_read_rest(const char *file, const json_t *root, bl_model_config *config);
/* Both, and between them the other sizes, by Llama's names. */
bl_status arch_read_decoder(const char *file, const json_t *root, bl_model_config *config);
json_t *arch_describe_decoder(const bl_model_config *config);

/* Members of an entry whose tensors are named as Llama's (arch/llama.h): of the whole model, and
 * in a layer. */
#define BL_DECODER_MEMBERS BL_DECODER_NAMES, BL_DECODER_LAYER
#define BL_DECODER_NAMES                                                                           \
    .layers = "model.layers", .final_norm = "model.norm", .embedding = "model.embed_tokens",       \
    .head = "lm_head"
#define BL_DECODER_LAYER                                                                           \
    .read = arch_read_decoder, .describe = arch_describe_decoder,                                  \
    .projections = bl_llama_projections, .n_projections = BL_PROJECTIONS
#define BL_DECODER_NORMS                                                                           \
    [BL_ATTENTION_NORM] = {"input_layernorm.weight", BL_EXTENT_HIDDEN},                            \
    [BL_MLP_NORM] = {"post_attention_layernorm.weight", BL_EXTENT_HIDDEN}

enum {
    BL_MODEL_MAX_WIDTH = 1 << 20,
    BL_ATTENTION_BIASES = 1 << BL_QKV | 1 << BL_OUT,
    BL_MLP_BIASES = 1 << BL_GATE_UP | 1 << BL_MLP_DOWN,
    BL_EXPERT_BIASES = 1 << BL_EXPERTS_GATE_UP | 1 << BL_EXPERTS_DOWN
};

#endif
