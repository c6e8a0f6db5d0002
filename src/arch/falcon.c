/* SPDX-License-Identifier: Apache-2.0 */
/* falcon.c -- Falcon: attention and MLP side by side after LayerNorms, GELU without a gate, one
 * matrix for queries, keys and values.
 *
 * Keys of config.json choose among three shapes of a layer, entries that differ in their norms: two
 * norms (40B, 180B), one (7B), or one after the other as in Llama. ALiBi is rejected. */
#include <stdlib.h>
#include <string.h>

#include "arch/config_internal.h"
#include "arch/decoder_internal.h"
#include "arch/list_internal.h"
#include "base/json.h"
#include "base/sizes.h"

static const bl_arch two_norms, one_norm, in_sequence;

/* ---- models by name ---- */

#define FALCON(shape, hidden, layers, heads, kv)                                                   \
    {                                                                                              \
        .arch = &(shape), .vocab_size = 65024, .hidden_size = hidden,                              \
        .intermediate_size = 4 * (hidden), .n_layers = layers, .n_heads = heads, .n_kv_heads = kv, \
        .head_dim = 64, .max_position_embeddings = 2048, .rms_norm_eps = 1e-5,                     \
        .tie_word_embeddings = true, .rope_theta = 1e4, .activation = BL_GELU, .bos_token_id = 11, \
        .eos_token_ids = {11}, .n_eos_token_ids = 1                                                \
    }

static const bl_preset presets[] = {
    {"falcon-7b", FALCON(one_norm, 4544, 32, 71, 1)},
    {"falcon-40b", FALCON(two_norms, 8192, 60, 128, 8)},
    {"falcon-180b", FALCON(two_norms, 14848, 80, 232, 8)},
};

/* ---- config.json ---- */

/* Dropouts act in training only: LoRA's input dropout is the one that Ballast has
 * (lora_dropout). */
static const char *const keys[] = {BL_COMMON_KEYS,
                                   "num_kv_heads",
                                   "ffn_hidden_size",
                                   "layer_norm_epsilon",
                                   "activation",
                                   "bias",
                                   "alibi",
                                   "new_decoder_architecture",
                                   "multi_query",
                                   "parallel_attn",
                                   "num_ln_in_parallel_attn",
                                   "attention_dropout",
                                   "hidden_dropout",
                                   NULL};

/* What the keys of the layer's shape say. */
typedef struct shape_keys {
    bool is_new, has_one_key, is_parallel;
    int64_t n_norms; /* 0: not given */
} shape_keys;

static bl_status read_shape_keys(const char *file, const json_t *root, shape_keys *s)
{
    bool alibi = false;

    *s = (shape_keys){.has_one_key = true, .is_parallel = true};
    BL_TRY(bl_json_get_bool(file, root, "alibi", BL_JSON_OPTIONAL, &alibi));
    if (alibi)
        return bl_json_fail(file, "alibi", "false: ALiBi is not supported",
                            json_object_get(root, "alibi"));
    BL_TRY(bl_json_get_bool(file, root, "new_decoder_architecture", BL_JSON_OPTIONAL, &s->is_new));
    BL_TRY(bl_json_get_bool(file, root, "multi_query", BL_JSON_OPTIONAL, &s->has_one_key));
    BL_TRY(bl_json_get_bool(file, root, "parallel_attn", BL_JSON_OPTIONAL, &s->is_parallel));
    BL_TRY(bl_json_get_int(file, root, "num_ln_in_parallel_attn", BL_JSON_OPTIONAL, 1, 2,
                           &s->n_norms));
    if (s->is_new && !s->is_parallel)
        return bl_json_fail(file, "parallel_attn", "true beside new_decoder_architecture",
                            json_object_get(root, "parallel_attn"));
    if (!s->is_new && s->n_norms == 2)
        return bl_json_fail(file, "num_ln_in_parallel_attn",
                            "null or 1 without new_decoder_architecture",
                            json_object_get(root, "num_ln_in_parallel_attn"));
    return BL_OK;
}

static const bl_arch *shape_of(const shape_keys *s)
{
    if (!s->is_parallel) return &in_sequence;
    return s->is_new && s->n_norms != 1 ? &two_norms : &one_norm;
}

/* num_kv_heads counts in the new architecture only: transformers writes it for every model. */
static bl_status read_heads(const char *file, const json_t *root, const shape_keys *s,
                            bl_model_config *c)
{
    c->n_kv_heads = c->n_heads;
    if (s->is_new)
        BL_TRY(bl_json_get_int(file, root, "num_kv_heads", BL_JSON_OPTIONAL, 1, c->n_heads,
                               &c->n_kv_heads));
    else if (s->has_one_key)
        c->n_kv_heads = 1;
    if (c->n_heads % c->n_kv_heads)
        return bl_json_fail(file, "num_kv_heads", "a divisor of num_attention_heads",
                            json_object_get(root, "num_kv_heads"));
    if (c->hidden_size % (2 * c->n_heads))
        return bl_json_fail(file, "hidden_size", "an even multiple of num_attention_heads",
                            json_object_get(root, "hidden_size"));
    c->head_dim = c->hidden_size / c->n_heads;
    return BL_OK;
}

static const char *const activations[] = {
    [BL_SWIGLU] = "", [BL_GELU] = "gelu", [BL_GELU_BY_TANH] = "gelu_pytorch_tanh"};

static bl_status read_activation(const char *file, const json_t *root, bl_model_config *c)
{
    const char *name = activations[BL_GELU];

    BL_TRY(bl_json_get_string(file, root, "activation", BL_JSON_OPTIONAL, &name));
    c->activation = strcmp(name, activations[BL_GELU]) == 0 ? BL_GELU : BL_GELU_BY_TANH;
    if (c->activation == BL_GELU || strcmp(name, "gelu_new") == 0 ||
        strcmp(name, activations[BL_GELU_BY_TANH]) == 0)
        return BL_OK;
    return bl_json_fail(file, "activation", "\"gelu\", \"gelu_new\" or \"gelu_pytorch_tanh\"",
                        json_object_get(root, "activation"));
}

static bl_status read_falcon(const char *file, const json_t *root, bl_model_config *c)
{
    shape_keys shape;

    BL_TRY(read_shape_keys(file, root, &shape));
    BL_TRY(arch_read_common_sizes(file, root, c));
    BL_TRY(read_heads(file, root, &shape, c));
    c->intermediate_size = 4 * c->hidden_size;
    BL_TRY(bl_json_get_int(file, root, "ffn_hidden_size", BL_JSON_OPTIONAL, 1, BL_MODEL_MAX_WIDTH,
                           &c->intermediate_size));
    BL_TRY(bl_json_get_real(file, root, "layer_norm_epsilon", BL_JSON_OPTIONAL, 1e-12, 1,
                            &c->rms_norm_eps));
    BL_TRY(read_activation(file, root, c));
    BL_TRY(arch_read_rest(file, root, c));
    c->arch = shape_of(&shape);
    return BL_OK;
}

static json_t *describe_falcon(const bl_model_config *c)
{
    json_t *out = arch_describe_decoder(c);

    json_object_set_new(out, "activation", json_string(activations[c->activation]));
    json_object_set_new(out, "parallel_attn", json_boolean(c->arch->is_parallel));
    json_object_set_new(out, "num_ln_in_parallel_attn",
                        json_integer(c->arch->vectors[BL_MLP_NORM].name ? 2 : 1));
    return out;
}

/* ---- the entries ---- */

static const bl_projection projections[] = {
    {"self_attention.query_key_value", BL_QKV, BL_EXTENT_QKV, BL_EXTENT_HIDDEN},
    {"self_attention.dense", BL_OUT, BL_EXTENT_HIDDEN, BL_EXTENT_Q},
    {"mlp.dense_h_to_4h", BL_GATE_UP, BL_EXTENT_INTER, BL_EXTENT_HIDDEN},
    {"mlp.dense_4h_to_h", BL_MLP_DOWN, BL_EXTENT_HIDDEN, BL_EXTENT_INTER},
};

#define NORM(vector, name)                                                                         \
    [vector] = {name ".weight", BL_EXTENT_HIDDEN},                                                 \
    [vector##_BIAS] = {name ".bias", BL_EXTENT_HIDDEN}

#define ENTRY(parallel, ...)                                                                       \
    {                                                                                              \
        .model_type = "falcon", .class_name = "FalconForCausalLM", .title = "Falcon",              \
        .keys = keys, .read = read_falcon, .describe = describe_falcon, .presets = presets,        \
        .n_presets = BL_COUNT(presets),                                                            \
        .defaults = {.max_position_embeddings = 2048,                                              \
                     .rms_norm_eps = 1e-5,                                                         \
                     .tie_word_embeddings = true,                                                  \
                     .rope_theta = 1e4},                                                           \
        .layers = "transformer.h", .final_norm = "transformer.ln_f",                               \
        .embedding = "transformer.word_embeddings", .head = "lm_head", .projections = projections, \
        .n_projections = BL_COUNT(projections), .has_layer_norm = true, .is_parallel = (parallel), \
        .is_grouped = true, .vectors = {__VA_ARGS__},                                              \
    }

static const bl_arch two_norms =
    ENTRY(true, NORM(BL_ATTENTION_NORM, "ln_attn"), NORM(BL_MLP_NORM, "ln_mlp"));
static const bl_arch one_norm = ENTRY(true, NORM(BL_ATTENTION_NORM, "input_layernorm"));
static const bl_arch in_sequence = ENTRY(false, NORM(BL_ATTENTION_NORM, "input_layernorm"),
                                         NORM(BL_MLP_NORM, "post_attention_layernorm"));
/* That of the table: `read` and presets choose among the three. */
const bl_arch bl_arch_falcon =
    ENTRY(true, NORM(BL_ATTENTION_NORM, "ln_attn"), NORM(BL_MLP_NORM, "ln_mlp"));
