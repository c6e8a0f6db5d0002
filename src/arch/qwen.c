/* SPDX-License-Identifier: Apache-2.0 */
/* qwen.c -- Qwen2 and 2.5: biases of q, k and v, which no key names. Qwen3: norms of the heads of q
 * and k. Both may have windows in their last layers. */
#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "arch/llama.h"
#include "base/sizes.h"

#define SHAPE(vocab, hidden, inter, layers, heads, kv, positions, ...)                             \
    {                                                                                              \
        .vocab_size = vocab, .hidden_size = hidden, .intermediate_size = inter,                    \
        .n_layers = layers, .n_heads = heads, .n_kv_heads = kv, .head_dim = 128,                   \
        .max_position_embeddings = positions, .rms_norm_eps = 1e-6, .rope_theta = 1e6,             \
        .bos_token_id = -1, .eos_token_ids = {151645}, .n_eos_token_ids = 1, __VA_ARGS__           \
    }

/* ---- Qwen2 ---- */

#define QWEN2(hidden, inter, layers, heads, kv)                                                    \
    SHAPE(152064, hidden, inter, layers, heads, kv, 32768, .biases = 1u << BL_QKV)

static const bl_preset qwen2_presets[] = {
    {"qwen2.5-7b", QWEN2(3584, 18944, 28, 28, 4)},
    {"qwen2.5-32b", QWEN2(5120, 27648, 64, 40, 8)},
    {"qwen2.5-72b", QWEN2(8192, 29568, 80, 64, 8)},
};

static const char *const qwen2_keys[] = {BL_DECODER_KEYS, BL_WINDOW_KEYS, NULL};

const bl_arch bl_arch_qwen2 = {
    .model_type = "qwen2",
    .class_name = "Qwen2ForCausalLM",
    .title = "Qwen2",
    .keys = qwen2_keys,
    .defaults = {.n_kv_heads = 32,
                 .max_position_embeddings = 32768,
                 .rms_norm_eps = 1e-6,
                 .rope_theta = 1e4,
                 .windows = {.tokens = 4096},
                 .biases = 1u << BL_QKV},
    BL_DECODER_MEMBERS,
    .presets = qwen2_presets,
    .n_presets = BL_COUNT(qwen2_presets),
    .vectors = {BL_DECODER_NORMS},
};

/* ---- Qwen3 ---- */

#define QWEN3(hidden, inter, layers, heads)                                                        \
    SHAPE(151936, hidden, inter, layers, heads, 8, 40960, .biases = 0)

static const bl_preset qwen3_presets[] = {
    {"qwen3-8b", QWEN3(4096, 12288, 36, 32)},
    {"qwen3-14b", QWEN3(5120, 17408, 40, 40)},
    {"qwen3-32b", QWEN3(5120, 25600, 64, 64)},
};

static const char *const qwen3_keys[] = {BL_DECODER_KEYS, BL_WINDOW_KEYS, "attention_bias", NULL};

const bl_arch bl_arch_qwen3 = {
    .model_type = "qwen3",
    .class_name = "Qwen3ForCausalLM",
    .title = "Qwen3",
    .keys = qwen3_keys,
    .defaults = {.n_kv_heads = 32,
                 .head_dim = 128,
                 .max_position_embeddings = 32768,
                 .rms_norm_eps = 1e-6,
                 .rope_theta = 1e4,
                 .windows = {.tokens = 4096}},
    BL_DECODER_MEMBERS,
    .presets = qwen3_presets,
    .n_presets = BL_COUNT(qwen3_presets),
    .vectors = {BL_DECODER_NORMS, [BL_Q_NORM] = {"self_attn.q_norm.weight", BL_EXTENT_HEAD},
                [BL_K_NORM] = {"self_attn.k_norm.weight", BL_EXTENT_HEAD}},
};
