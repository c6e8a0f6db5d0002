/* SPDX-License-Identifier: Apache-2.0 */
/* mixture.c -- mixtures of experts. Qwen3-MoE: Qwen3 with experts in all or some
 * layers. Mixtral: Mistral
 * with them. Each has two entries: published checkpoints have a tensor per expert, and transformers
 * 5 also writes all experts of a layer stacked. */
#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "arch/llama.h"
#include "base/sizes.h"

#define ROUTER(module) [BL_ROUTER] = {module ".weight", BL_EXTENT_EXPERTS_HIDDEN}
#define EXPERTS                                                                                    \
    {"mlp.experts.gate_up_proj", BL_EXPERTS_GATE_UP, BL_EXTENT_EXPERTS_GATE_UP, BL_EXTENT_HIDDEN}, \
    {                                                                                              \
        "mlp.experts.down_proj", BL_EXPERTS_DOWN, BL_EXTENT_EXPERTS_HIDDEN, BL_EXTENT_EXPERT       \
    }
#define MLP(path, inter)                                                                           \
    {path ".gate_proj", BL_GATE_UP, inter, BL_EXTENT_HIDDEN},                                      \
        {path ".up_proj", BL_GATE_UP, inter, BL_EXTENT_HIDDEN},                                    \
    {                                                                                              \
        path ".down_proj", BL_MLP_DOWN, BL_EXTENT_HIDDEN, inter                                    \
    }

/* Of families whose layers all have experts, and of those with dense layers among them. */
static const bl_projection projections[] = {BL_LLAMA_ATTENTION, EXPERTS};
static const bl_projection projections_with_dense[] = {BL_LLAMA_ATTENTION,
                                                       MLP("mlp", BL_EXTENT_INTER), EXPERTS};

#define EXPERT_LAYER(list)                                                                         \
    BL_DECODER_NAMES, .read = arch_read_decoder, .describe = arch_describe_decoder,                \
                      .projections = list, .n_projections = BL_COUNT(list), .n_routed = 2
#define EXPERT_KEYS                                                                                \
    "num_local_experts", "num_experts_per_tok", "output_router_logits", "router_jitter_noise"

/* ---- Qwen3-MoE ---- */

static const bl_expert_names qwen3_names[] = {{"mlp.experts", {"gate_proj", "up_proj"}},
                                              {"mlp.experts", {"down_proj"}}};

/* A window is of all layers: these models have no max_window_layers or layer_types. */
static const char *const qwen3_keys[] = {BL_DECODER_KEYS,
                                         EXPERT_KEYS,
                                         "sliding_window",
                                         "use_sliding_window",
                                         "attention_bias",
                                         "num_experts",
                                         "moe_intermediate_size",
                                         "norm_topk_prob",
                                         "decoder_sparse_step",
                                         "mlp_only_layers",
                                         NULL};

#define QWEN3(hidden, expert, layers, heads)                                                       \
    {                                                                                              \
        .vocab_size = 151936, .hidden_size = hidden, .intermediate_size = 3 * hidden,              \
        .n_layers = layers, .n_heads = heads, .n_kv_heads = 4, .head_dim = 128,                    \
        .max_position_embeddings = 40960, .rms_norm_eps = 1e-6, .rope_theta = 1e6,                 \
        .bos_token_id = -1, .eos_token_ids = {151645}, .n_eos_token_ids = 1, .n_experts = 128,     \
        .top_k = 8, .expert_size = expert, .is_top_k_normed = true                                 \
    }

static const bl_preset qwen3_presets[] = {
    {"qwen3-30b-a3b", QWEN3(2048, 768, 48, 32)},
    {"qwen3-235b-a22b", QWEN3(4096, 1536, 94, 64)},
};

#define QWEN3_MOE                                                                                  \
    .model_type = "qwen3_moe", .class_name = "Qwen3MoeForCausalLM", .title = "Qwen3-MoE",          \
    .adapters = qwen3_names, .keys = qwen3_keys, .presets = qwen3_presets,                         \
    .n_presets = BL_COUNT(qwen3_presets),                                                          \
    .defaults = {.n_kv_heads = 4,                                                                  \
                 .max_position_embeddings = 32768,                                                 \
                 .rms_norm_eps = 1e-6,                                                             \
                 .rope_theta = 1e4,                                                                \
                 .windows = {.tokens = 4096},                                                      \
                 .n_experts = 128,                                                                 \
                 .top_k = 8,                                                                       \
                 .expert_size = 768},                                                              \
    .vectors = {BL_DECODER_NORMS,                                                                  \
                ROUTER("mlp.gate"), [BL_Q_NORM] = {"self_attn.q_norm.weight", BL_EXTENT_HEAD},     \
                [BL_K_NORM] = {"self_attn.k_norm.weight", BL_EXTENT_HEAD}}

static const bl_arch qwen3_stacked = {QWEN3_MOE, EXPERT_LAYER(projections_with_dense),
                                      .n_dense = 3};
const bl_arch bl_arch_qwen3_moe = {QWEN3_MOE, EXPERT_LAYER(projections_with_dense), .n_dense = 3,
                                   .names = qwen3_names, .stacked = &qwen3_stacked};

/* ---- GLM-4.5 ---- */

static const bl_projection projections_with_shared[] = {
    BL_LLAMA_ATTENTION, MLP("mlp", BL_EXTENT_INTER), MLP("mlp.shared_experts", BL_EXTENT_SHARED),
    EXPERTS};

static const char *const glm4_keys[] = {BL_DECODER_KEYS,
                                        EXPERT_KEYS,
                                        "partial_rotary_factor",
                                        "attention_bias",
                                        "attention_out_bias",
                                        "use_qk_norm",
                                        "moe_intermediate_size",
                                        "norm_topk_prob",
                                        "n_routed_experts",
                                        "n_shared_experts",
                                        "first_k_dense_replace",
                                        "n_group",
                                        "topk_group",
                                        "routed_scaling_factor",
                                        "num_nextn_predict_layers",
                                        "num_mtp_layers",
                                        NULL};

#define GLM4(hidden, inter, expert, layers, experts, scale, dense, ...)                            \
    {                                                                                              \
        .vocab_size = 151552, .hidden_size = hidden, .intermediate_size = inter,                   \
        .n_layers = layers, .n_heads = 96, .n_kv_heads = 8, .head_dim = 128, .rotary_dim = 64,     \
        .max_position_embeddings = 131072, .rms_norm_eps = 1e-5, .rope_theta = 1e6,                \
        .bos_token_id = -1, .eos_token_ids = {151329, 151336, 151338}, .n_eos_token_ids = 3,       \
        .biases = 1u << BL_QKV, .n_experts = experts, .top_k = 8, .expert_size = expert,           \
        .shared_size = expert, .is_top_k_normed = true, .is_router_sigmoid = true,                 \
        .routed_scale = scale, .dense_layers = {dense}, .n_nextn = 1, __VA_ARGS__                  \
    }

static const bl_arch glm4_plain;
static const bl_preset glm4_presets[] = {
    {"glm4.5", GLM4(5120, 12288, 1536, 92, 160, 2.5, 7, .rope_kind = BL_ROPE_DEFAULT)},
    {"glm4.5-air", GLM4(4096, 10944, 1408, 46, 128, 0, 1, .arch = &glm4_plain)},
};

#define GLM4_NORMS                                                                                 \
    [BL_Q_NORM] = {"self_attn.q_norm.weight", BL_EXTENT_HEAD}, [BL_K_NORM] = {                     \
                                                                   "self_attn.k_norm.weight",      \
                                                                   BL_EXTENT_HEAD}
#define GLM4_MOE(...)                                                                              \
    .model_type = "glm4_moe", .class_name = "Glm4MoeForCausalLM", .title = "GLM-4.5",              \
    .adapters = qwen3_names, .keys = glm4_keys, .presets = glm4_presets,                           \
    .n_presets = BL_COUNT(glm4_presets),                                                           \
    .defaults = {.n_kv_heads = 8,                                                                  \
                 .rotary_part = 0.5,                                                               \
                 .max_position_embeddings = 131072,                                                \
                 .rms_norm_eps = 1e-5,                                                             \
                 .rope_theta = 1e4,                                                                \
                 .n_experts = 128,                                                                 \
                 .top_k = 8,                                                                       \
                 .expert_size = 1408,                                                              \
                 .is_top_k_normed = true,                                                          \
                 .is_router_sigmoid = true,                                                        \
                 .first_experts = 1},                                                              \
    .vectors = {BL_DECODER_NORMS, ROUTER("mlp.gate"),                                              \
                [BL_ROUTER_CORRECTION] = {"mlp.gate.e_score_correction_bias", BL_EXTENT_EXPERTS},  \
                __VA_ARGS__},                                                                      \
    EXPERT_LAYER(projections_with_shared), .n_dense = 3, .n_shared = 3

static const bl_arch glm4_stacked = {GLM4_MOE(GLM4_NORMS)};
static const bl_arch glm4_plain_stacked = {GLM4_MOE()};
static const bl_arch glm4_plain = {GLM4_MOE(), .names = qwen3_names,
                                   .stacked = &glm4_plain_stacked};
const bl_arch bl_arch_glm4_moe = {GLM4_MOE(GLM4_NORMS), .names = qwen3_names,
                                  .stacked = &glm4_stacked, .plain = &glm4_plain};

/* ---- Mixtral ---- */

static const bl_expert_names mixtral_names[] = {{"block_sparse_moe.experts", {"w1", "w3"}},
                                                {"block_sparse_moe.experts", {"w2"}}};

static const char *const mixtral_keys[] = {BL_DECODER_KEYS, EXPERT_KEYS, "sliding_window", NULL};

#define MIXTRAL(vocab, hidden, inter, layers, heads, positions)                                    \
    {                                                                                              \
        .vocab_size = vocab, .hidden_size = hidden, .intermediate_size = inter,                    \
        .n_layers = layers, .n_heads = heads, .n_kv_heads = 8, .head_dim = 128,                    \
        .max_position_embeddings = positions, .rms_norm_eps = 1e-5, .rope_theta = 1e6,             \
        .bos_token_id = 1, .eos_token_ids = {2}, .n_eos_token_ids = 1, .n_experts = 8, .top_k = 2, \
        .expert_size = inter, .is_top_k_normed = true                                              \
    }

static const bl_preset mixtral_presets[] = {
    {"mixtral-8x7b", MIXTRAL(32000, 4096, 14336, 32, 32, 32768)},
    {"mixtral-8x22b", MIXTRAL(32768, 6144, 16384, 56, 48, 65536)},
};

#define MIXTRAL_ENTRY(router)                                                                      \
    .model_type = "mixtral", .class_name = "MixtralForCausalLM", .title = "Mixtral",               \
    .adapters = mixtral_names, .keys = mixtral_keys, .presets = mixtral_presets,                   \
    .n_presets = BL_COUNT(mixtral_presets),                                                        \
    .defaults = {.n_kv_heads = 8,                                                                  \
                 .max_position_embeddings = 131072,                                                \
                 .rms_norm_eps = 1e-5,                                                             \
                 .rope_theta = 1e6,                                                                \
                 .n_experts = 8,                                                                   \
                 .top_k = 2,                                                                       \
                 .is_top_k_normed = true},                                                         \
    .vectors = {BL_DECODER_NORMS, ROUTER(router)}

static const bl_arch mixtral_stacked = {MIXTRAL_ENTRY("mlp.gate"), EXPERT_LAYER(projections)};
const bl_arch bl_arch_mixtral = {MIXTRAL_ENTRY("block_sparse_moe.gate"), EXPERT_LAYER(projections),
                                 .names = mixtral_names, .stacked = &mixtral_stacked};
