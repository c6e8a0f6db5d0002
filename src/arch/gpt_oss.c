/* SPDX-License-Identifier: Apache-2.0 */
/* gpt_oss.c -- gpt-oss: experts in every layer, stacked with input channels first, gate and up in
 * turns; biases; a sink per head; a window in every second layer. In MXFP4 the experts are stored
 * with output channels first (store/hf_model.h). */
#include <string.h>

#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "arch/llama.h"
#include "base/json.h"
#include "base/sizes.h"

static const double THETA = 150000;

static const bl_projection projections[] = {
    BL_LLAMA_ATTENTION,
    {"mlp.experts.gate_up_proj", BL_EXPERTS_GATE_UP, BL_EXTENT_EXPERTS_GATE_UP, BL_EXTENT_HIDDEN},
    {"mlp.experts.down_proj", BL_EXPERTS_DOWN, BL_EXTENT_EXPERTS_HIDDEN, BL_EXTENT_EXPERT},
};

static const char *const keys[] = {BL_DECODER_KEYS,
                                   "num_experts",
                                   "num_local_experts",
                                   "num_experts_per_tok",
                                   "experts_per_token",
                                   "output_router_logits",
                                   "sliding_window",
                                   "layer_types",
                                   "attention_bias",
                                   "swiglu_alpha",
                                   "swiglu_limit",
                                   "initial_context_length",
                                   NULL};

/* A second spelling of a key, in published files: the same value. */
static bl_status check_same(const char *file, const json_t *root, const char *key, int64_t value)
{
    enum { MAX = 1 << 30 };
    int64_t other = value;

    BL_TRY(bl_json_get_int(file, root, key, BL_JSON_OPTIONAL, 1, MAX, &other));
    if (other == value) return BL_OK;
    return bl_json_fail(file, key,
                        strcmp(key, "experts_per_token") == 0
                            ? "the value of num_experts_per_tok"
                            : "the value of original_max_position_embeddings",
                        json_object_get(root, key));
}

static bool has_theta(const json_t *root)
{
    const json_t *old = json_object_get(root, "rope_scaling"),
                 *rope = json_object_get(root, "rope_parameters");

    return json_object_get(root, "rope_theta") || json_object_get(old, "rope_theta") ||
           json_object_get(rope, "rope_theta");
}

static bl_status read_config(const char *file, const json_t *root, bl_model_config *c)
{
    BL_TRY(arch_read_decoder(file, root, c));
    BL_TRY(bl_json_get_real(file, root, "swiglu_alpha", BL_JSON_OPTIONAL, 1e-6, 1e6,
                            &c->swiglu_alpha));
    BL_TRY(bl_json_get_real(file, root, "swiglu_limit", BL_JSON_OPTIONAL, 1e-6, 1e6,
                            &c->swiglu_limit));
    BL_TRY(check_same(file, root, "experts_per_token", c->top_k));
    if (c->rope_kind == BL_ROPE_YARN)
        BL_TRY(check_same(file, root, "initial_context_length", c->rope_original_max_positions));
    if (!has_theta(root)) c->rope_theta = THETA;
    for (int64_t l = 1; !json_is_array(json_object_get(root, "layer_types")) && l < c->n_layers;
         l += 2)
        if (l < BL_MODEL_MASK_LAYERS) c->windows.layers[l / 64] &= ~((uint64_t)1 << l % 64);
    return BL_OK;
}

static json_t *describe_config(const bl_model_config *c)
{
    json_t *out = arch_describe_decoder(c);

    if (out)
        json_object_update_new(out, json_pack("{s:f, s:f}", "swiglu_alpha", c->swiglu_alpha,
                                              "swiglu_limit", c->swiglu_limit));
    return out;
}

#define YARN                                                                                       \
    .rope_theta = 150000, .rope_kind = BL_ROPE_YARN, .rope_factor = 32,                            \
    .rope_original_max_positions = 4096, .rope_beta_fast = 32, .rope_beta_slow = 1,                \
    .rope_is_exact = true, .rope_attention_factor = 1.3465735902799727 /* 0.1 ln 32 + 1 */
#define LAYER                                                                                      \
    .head_dim = 64, .n_kv_heads = 8, .max_position_embeddings = 131072, .rms_norm_eps = 1e-5,      \
    .top_k = 4, .is_top_k_normed = true, .activation = BL_SWIGLU_CLAMPED, .swiglu_alpha = 1.702,   \
    .swiglu_limit = 7, .biases = BL_ATTENTION_BIASES | BL_EXPERT_BIASES, YARN
#define EVEN_LAYERS 0x5555555555555555u

#define GPT_OSS(n, experts)                                                                        \
    {                                                                                              \
        .vocab_size = 201088, .hidden_size = 2880, .intermediate_size = 2880, .n_layers = n,       \
        .n_heads = 64, .bos_token_id = -1, .eos_token_ids = {200002}, .n_eos_token_ids = 1,        \
        .n_experts = experts, .expert_size = 2880,                                                 \
        .windows = {.tokens = 128, .layers = {EVEN_LAYERS & (((uint64_t)1 << (n)) - 1)}}, LAYER    \
    }

static const bl_preset presets[] = {
    {"gpt-oss-20b", GPT_OSS(24, 32)},
    {"gpt-oss-120b", GPT_OSS(36, 128)},
};

const bl_arch bl_arch_gpt_oss = {
    .model_type = "gpt_oss",
    .class_name = "GptOssForCausalLM",
    .title = "gpt-oss",
    BL_DECODER_NAMES,
    .keys = keys,
    .read = read_config,
    .describe = describe_config,
    .presets = presets,
    .n_presets = BL_COUNT(presets),
    .defaults = {.n_experts = 128, .windows = {.tokens = 128}, LAYER},
    .projections = projections,
    .n_projections = BL_COUNT(projections),
    .n_routed = 2,
    .is_transposed = true,
    .vectors = {BL_DECODER_NORMS, [BL_ROUTER] = {"mlp.router.weight", BL_EXTENT_EXPERTS_HIDDEN},
                [BL_ROUTER_BIAS] = {"mlp.router.bias", BL_EXTENT_EXPERTS},
                [BL_SINKS] = {"self_attn.sinks", BL_EXTENT_HEADS}}};
