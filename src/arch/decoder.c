/* SPDX-License-Identifier: Apache-2.0 */
/* decoder.c -- what pre-norm decoders have in config.json: sizes, token ids, and of biases, windows
 * and multipliers those that the entry lists. rope.c reads RoPE. */
#include "arch/decoder_internal.h"

#include <inttypes.h>
#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "arch/config_internal.h"
#include "arch/config.h"
#include "arch/table.h"
#include "base/json.h"
#include "base/sizes.h"

/* Far above any model and far below what could overflow a product of three of them. */
enum {
    MAX_VOCAB = 1 << 24,
    MAX_WIDTH = BL_MODEL_MAX_WIDTH,
    MAX_LAYERS = 1 << 14,
    MAX_HEADS = 1 << 14,
    MAX_EXPERTS = 1 << 12,
    MAX_EXPERTS_OF_LAYERS = 1 << 18,
    MAX_HEAD_DIM = 1 << 12,
    MAX_POSITIONS = 1 << 30
};

/* ---- sizes ---- */

bl_status arch_read_common_sizes(const char *file, const json_t *root, bl_model_config *c)
{
    BL_TRY(
        bl_json_get_int(file, root, "vocab_size", BL_JSON_REQUIRED, 1, MAX_VOCAB, &c->vocab_size));
    BL_TRY(bl_json_get_int(file, root, "hidden_size", BL_JSON_REQUIRED, 1, MAX_WIDTH,
                           &c->hidden_size));
    BL_TRY(bl_json_get_int(file, root, "num_hidden_layers", BL_JSON_REQUIRED, 1, MAX_LAYERS,
                           &c->n_layers));
    BL_TRY(bl_json_get_int(file, root, "num_attention_heads", BL_JSON_REQUIRED, 1, MAX_HEADS,
                           &c->n_heads));
    BL_TRY(bl_json_get_int(file, root, "max_position_embeddings", BL_JSON_OPTIONAL, 1,
                           MAX_POSITIONS, &c->max_position_embeddings));
    return bl_json_get_bool(file, root, "tie_word_embeddings", BL_JSON_OPTIONAL,
                            &c->tie_word_embeddings);
}

static bl_status read_sizes(const char *file, const json_t *root, bl_model_config *c)
{
    BL_TRY(arch_read_common_sizes(file, root, c));
    BL_TRY(bl_json_get_int(file, root, "intermediate_size", BL_JSON_REQUIRED, 1, MAX_WIDTH,
                           &c->intermediate_size));
    if (c->n_kv_heads == 0 || json_is_null(json_object_get(root, "num_key_value_heads")))
        c->n_kv_heads = c->n_heads;
    BL_TRY(bl_json_get_int(file, root, "num_key_value_heads", BL_JSON_OPTIONAL, 1, c->n_heads,
                           &c->n_kv_heads));
    if (c->n_heads % c->n_kv_heads)
        return bl_json_fail(file, "num_key_value_heads", "a divisor of num_attention_heads",
                            json_object_get(root, "num_key_value_heads"));
    const json_t *head_dim = json_object_get(root, "head_dim");
    bool has_default = c->head_dim > 0 && !json_is_null(head_dim);
    bool has_head_dim = json_is_integer(head_dim) || has_default;
    if (!has_head_dim && c->hidden_size % c->n_heads)
        return bl_json_fail(file, "hidden_size",
                            "a multiple of num_attention_heads where head_dim is absent",
                            json_object_get(root, "hidden_size"));
    if (!has_default) c->head_dim = c->hidden_size / c->n_heads;
    BL_TRY(
        bl_json_get_int(file, root, "head_dim", BL_JSON_OPTIONAL, 2, MAX_HEAD_DIM, &c->head_dim));
    if (c->head_dim % 2 || c->head_dim < 2 || c->head_dim > MAX_HEAD_DIM)
        return BL_FAIL(BL_EINPUT,
                       "%s: key head_dim: expected an even number in [2, %d], got %" PRId64, file,
                       MAX_HEAD_DIM, c->head_dim);
    return bl_json_get_real(file, root, "rms_norm_eps", BL_JSON_OPTIONAL, 1e-12, 1,
                            &c->rms_norm_eps);
}

/* eos_token_id is one id or a list of them. */
static bl_status read_token_ids(const char *file, const json_t *root, bl_model_config *c)
{
    const json_t *eos = json_object_get(root, "eos_token_id");

    c->bos_token_id = -1;
    BL_TRY(bl_json_get_int(file, root, "bos_token_id", BL_JSON_OPTIONAL, 0, c->vocab_size - 1,
                           &c->bos_token_id));
    if (!json_is_array(eos)) {
        int64_t id = -1;
        BL_TRY(bl_json_get_int(file, root, "eos_token_id", BL_JSON_OPTIONAL, 0, c->vocab_size - 1,
                               &id));
        c->eos_token_ids[0] = id;
        c->n_eos_token_ids = id >= 0;
        return BL_OK;
    }
    if (json_array_size(eos) > BL_MODEL_MAX_EOS)
        return bl_json_fail(file, "eos_token_id", "at most 8 ids", eos);
    for (size_t i = 0; i < json_array_size(eos); i++) {
        const json_t *id = json_array_get(eos, i);
        if (!json_is_integer(id) || json_integer_value(id) < 0 ||
            json_integer_value(id) >= c->vocab_size)
            return bl_json_fail(file, "eos_token_id", "ids below vocab_size", eos);
        c->eos_token_ids[c->n_eos_token_ids++] = json_integer_value(id);
    }
    return BL_OK;
}

/* ---- biases ---- */

static bl_status read_bias(const char *file, const json_t *root, const char *key, unsigned matrices,
                           bl_model_config *c)
{
    bool there = c->biases & matrices;

    if (!arch_reads(c->arch, key)) return BL_OK;
    BL_TRY(bl_json_get_bool(file, root, key, BL_JSON_OPTIONAL, &there));
    c->biases = there ? c->biases | matrices : c->biases & ~matrices;
    return BL_OK;
}

static bl_status read_biases(const char *file, const json_t *root, bl_model_config *c)
{
    unsigned out = 1u << BL_OUT;
    bool is_apart = arch_reads(c->arch, "attention_out_bias");

    BL_TRY(read_bias(file, root, "attention_bias",
                     is_apart ? BL_ATTENTION_BIASES & ~out : BL_ATTENTION_BIASES, c));
    BL_TRY(read_bias(file, root, "attention_out_bias", out, c));
    BL_TRY(read_bias(file, root, "bias", BL_ATTENTION_BIASES | BL_MLP_BIASES, c));
    return read_bias(file, root, "mlp_bias", BL_MLP_BIASES, c);
}

/* ---- windows ---- */

static void set_windowed(bl_model_config *c, int64_t layer)
{
    c->windows.layers[layer / 64] |= (uint64_t)1 << layer % 64;
}

static bl_status read_layer_types(const char *file, const json_t *types, bl_model_config *c)
{
    if (json_array_size(types) != (size_t)c->n_layers)
        return bl_json_fail(file, "layer_types", "a type for each of num_hidden_layers", types);
    for (int64_t l = 0; l < c->n_layers; l++) {
        const char *type = bl_json_text(json_array_get(types, (size_t)l));
        bool slides = type && !strcmp(type, "sliding_attention");
        if (!slides && (!type || strcmp(type, "full_attention") != 0))
            return bl_json_fail(file, "layer_types",
                                "\"full_attention\" or \"sliding_attention\" for each layer",
                                json_array_get(types, (size_t)l));
        if (slides && c->windows.tokens == 0)
            return bl_json_fail(file, "layer_types", "no sliding_attention without sliding_window",
                                types);
        if (slides) set_windowed(c, l);
    }
    return BL_OK;
}

static bl_status read_windows(const char *file, const json_t *root, bl_model_config *c)
{
    enum { MAX_WINDOW = 1 << 30 };
    const json_t *width = json_object_get(root, "sliding_window"), *types = NULL;
    bool is_used = !arch_reads(c->arch, "use_sliding_window");
    int64_t first = arch_reads(c->arch, "max_window_layers") ? 28 : 0; /* transformers' default */

    if (!arch_reads(c->arch, "sliding_window")) return BL_OK;
    BL_TRY(bl_json_get_int(file, root, "sliding_window", BL_JSON_OPTIONAL, 1, MAX_WINDOW,
                           &c->windows.tokens));
    if (!is_used)
        BL_TRY(bl_json_get_bool(file, root, "use_sliding_window", BL_JSON_OPTIONAL, &is_used));
    if (json_is_null(width) || !is_used) c->windows.tokens = 0;
    if (arch_reads(c->arch, "layer_types"))
        BL_TRY(bl_json_get_array(file, root, "layer_types", BL_JSON_OPTIONAL, &types));
    if (c->windows.tokens > 0 && c->n_layers > BL_MODEL_MASK_LAYERS)
        return bl_json_fail(file, "sliding_window", "null in a model of more than 1024 layers",
                            width);
    if (types && c->n_layers <= BL_MODEL_MASK_LAYERS) return read_layer_types(file, types, c);
    if (arch_reads(c->arch, "max_window_layers"))
        BL_TRY(bl_json_get_int(file, root, "max_window_layers", BL_JSON_OPTIONAL, 0, MAX_LAYERS,
                               &first));
    for (int64_t l = first; c->windows.tokens > 0 && l < c->n_layers; l++) set_windowed(c, l);
    return BL_OK;
}

/* ---- multipliers ---- */

static const struct {
    const char *key;
    size_t offset; /* of a double in bl_model_config */
} multipliers[] = {
    {"embedding_multiplier", offsetof(bl_model_config, embedding_multiplier)},
    {"residual_multiplier", offsetof(bl_model_config, residual_multiplier)},
    {"attention_multiplier", offsetof(bl_model_config, attention_multiplier)},
    {"logits_scaling", offsetof(bl_model_config, logits_scaling)},
};

/* A multiplier of 1 counts as none, except attention's. */
static bl_status read_multipliers(const char *file, const json_t *root, bl_model_config *c)
{
    for (size_t i = 0; i < BL_COUNT(multipliers); i++) {
        double *value = (double *)(void *)((char *)c + multipliers[i].offset);
        if (!arch_reads(c->arch, multipliers[i].key)) continue;
        BL_TRY(
            bl_json_get_real(file, root, multipliers[i].key, BL_JSON_OPTIONAL, 1e-9, 1e9, value));
        if (*value == 1 && value != &c->attention_multiplier) *value = 0;
    }
    return BL_OK;
}

bl_status arch_read_rest(const char *file, const json_t *root, bl_model_config *config)
{
    BL_TRY(read_token_ids(file, root, config));
    BL_TRY(read_biases(file, root, config));
    BL_TRY(read_windows(file, root, config));
    BL_TRY(read_multipliers(file, root, config));
    return arch_read_rope(file, root, config);
}

/* ---- experts ---- */

/* The count has two spellings; transformers 5 writes the second. */
static bl_status read_expert_count(const char *file, const json_t *root, bl_model_config *c)
{
    static const char *const names[] = {"num_experts", "num_local_experts", "n_routed_experts"};
    int64_t before = 0;

    for (size_t i = 0; i < BL_COUNT(names); i++) {
        const json_t *value = json_object_get(root, names[i]);
        if (!arch_reads(c->arch, names[i]) || !value || json_is_null(value)) continue;
        BL_TRY(
            bl_json_get_int(file, root, names[i], BL_JSON_OPTIONAL, 1, MAX_EXPERTS, &c->n_experts));
        if (before > 0 && before != c->n_experts)
            return bl_json_fail(file, names[i], "the same number under each name", value);
        before = c->n_experts;
    }
    if (c->n_experts <= MAX_EXPERTS_OF_LAYERS / c->n_layers) return BL_OK;
    return BL_FAIL(BL_EINPUT,
                   "%s: key num_hidden_layers: %" PRId64 " layers of %" PRId64
                   " experts; expected at most %d experts in all",
                   file, c->n_layers, c->n_experts, MAX_EXPERTS_OF_LAYERS);
}

/* Keys of what is not computed. */
static bl_status check_expert_keys(const char *file, const json_t *root, const bl_model_config *c)
{
    static const struct {
        const char *key, *value, *expected;
    } only[] = {
        {"output_router_logits", "false", "false: the routers' auxiliary loss is not computed"},
        {"router_jitter_noise", "0.0", "0: noise in the router is not supported"},
    };

    for (size_t i = 0; i < BL_COUNT(only); i++) {
        const json_t *value = json_object_get(root, only[i].key);
        if (!arch_reads(c->arch, only[i].key) || !value || json_is_null(value)) continue;
        json_t *wanted = json_loads(only[i].value, JSON_DECODE_ANY, NULL);
        bool is_number = json_is_number(value) && json_is_number(wanted),
             is_equal = is_number ? json_number_value(value) == json_number_value(wanted)
                                  : json_equal(value, wanted);
        json_decref(wanted);
        if (!is_equal) return bl_json_fail(file, only[i].key, only[i].expected, value);
    }
    return BL_OK;
}

static bl_status set_dense(const char *file, const char *key, const json_t *value, int64_t layer,
                           bl_model_config *c)
{
    if (layer >= BL_MODEL_MASK_LAYERS)
        return bl_json_fail(file, key, "layers below 1024 without experts", value);
    bl_model_set_dense(c, layer);
    return BL_OK;
}

/* Layers that have one MLP: those of mlp_only_layers, and all whose number from 1 on
 * decoder_sparse_step does not divide. */
static bl_status read_dense_layers(const char *file, const json_t *root, bl_model_config *c)
{
    const json_t *list = NULL;
    int64_t step = 1;

    if (arch_reads(c->arch, "decoder_sparse_step"))
        BL_TRY(bl_json_get_int(file, root, "decoder_sparse_step", BL_JSON_OPTIONAL, 1, MAX_LAYERS,
                               &step));
    for (int64_t l = 0; step > 1 && l < c->n_layers; l++)
        if ((l + 1) % step)
            BL_TRY(set_dense(file, "decoder_sparse_step",
                             json_object_get(root, "decoder_sparse_step"), l, c));
    int64_t first = c->first_experts;
    if (arch_reads(c->arch, "first_k_dense_replace"))
        BL_TRY(bl_json_get_int(file, root, "first_k_dense_replace", BL_JSON_OPTIONAL, 0, MAX_LAYERS,
                               &first));
    for (int64_t l = 0; l < bl_min_i64(first, c->n_layers); l++)
        BL_TRY(set_dense(file, "first_k_dense_replace",
                         json_object_get(root, "first_k_dense_replace"), l, c));
    if (!arch_reads(c->arch, "mlp_only_layers")) return BL_OK;
    BL_TRY(bl_json_get_array(file, root, "mlp_only_layers", BL_JSON_OPTIONAL, &list));
    for (size_t i = 0; i < json_array_size(list); i++) {
        const json_t *number = json_array_get(list, i);
        if (!json_is_integer(number))
            return bl_json_fail(file, "mlp_only_layers", "numbers of layers", list);
        int64_t l =
            json_integer_value(number); /* past the last one: no layer, as in transformers */
        if (l >= 0 && l < c->n_layers) BL_TRY(set_dense(file, "mlp_only_layers", list, l, c));
    }
    return BL_OK;
}

/* DeepSeek-V3's. */
static bl_status read_router(const char *file, const json_t *root, bl_model_config *c)
{
    const bl_arch *arch = c->arch;

    if (arch_reads(arch, "n_group"))
        BL_TRY(bl_json_get_int(file, root, "n_group", BL_JSON_OPTIONAL, 1, c->n_experts,
                               &c->n_groups));
    if (arch_reads(arch, "topk_group"))
        BL_TRY(bl_json_get_int(file, root, "topk_group", BL_JSON_OPTIONAL, 1,
                               bl_max_i64(1, c->n_groups), &c->top_groups));
    if (arch_reads(arch, "routed_scaling_factor"))
        BL_TRY(bl_json_get_real(file, root, "routed_scaling_factor", BL_JSON_OPTIONAL, 1e-9, 1e9,
                                &c->routed_scale));
    if (c->routed_scale == 1) c->routed_scale = 0;
    if (c->n_groups <= 1 || c->top_groups == c->n_groups) c->n_groups = c->top_groups = 0;
    if (c->n_groups > 0 && c->n_experts % c->n_groups)
        return bl_json_fail(file, "n_group", "a divisor of the number of experts",
                            json_object_get(root, "n_group"));
    if (c->n_groups > 0 && c->top_k > c->top_groups * (c->n_experts / c->n_groups))
        return bl_json_fail(file, "num_experts_per_tok", "at most the experts of topk_group groups",
                            json_object_get(root, "num_experts_per_tok"));
    return BL_OK;
}

/* The MLP beside the experts, as wide as n_shared_experts of them; layers for the prediction of
 * tokens after the next. */
static bl_status read_shared(const char *file, const json_t *root, bl_model_config *c)
{
    static const char *const nextn[] = {"num_nextn_predict_layers", "num_mtp_layers"};
    int64_t n = 1;

    for (size_t i = 0; i < BL_COUNT(nextn); i++)
        if (arch_reads(c->arch, nextn[i]))
            BL_TRY(bl_json_get_int(file, root, nextn[i], BL_JSON_OPTIONAL, 0, BL_MODEL_MAX_NEXTN,
                                   &c->n_nextn));
    if (!arch_reads(c->arch, "n_shared_experts")) return BL_OK;
    BL_TRY(bl_json_get_int(file, root, "n_shared_experts", BL_JSON_OPTIONAL, 1, MAX_EXPERTS, &n));
    c->shared_size = n * c->expert_size;
    return BL_OK;
}

static bl_status read_experts(const char *file, const json_t *root, bl_model_config *c)
{
    if (!arch_reads(c->arch, "num_experts_per_tok")) return BL_OK;
    BL_TRY(check_expert_keys(file, root, c));
    BL_TRY(read_dense_layers(file, root, c));
    BL_TRY(read_expert_count(file, root, c));
    BL_TRY(bl_json_get_int(file, root, "num_experts_per_tok", BL_JSON_OPTIONAL, 1, c->n_experts,
                           &c->top_k));
    if (c->top_k > c->n_experts)
        return BL_FAIL(BL_EINPUT,
                       "%s: key num_experts_per_tok: expected at most the %" PRId64
                       " experts, got %" PRId64,
                       file, c->n_experts, c->top_k);
    if (arch_reads(c->arch, "norm_topk_prob"))
        BL_TRY(
            bl_json_get_bool(file, root, "norm_topk_prob", BL_JSON_OPTIONAL, &c->is_top_k_normed));
    if (!arch_reads(c->arch, "moe_intermediate_size"))
        c->expert_size = c->intermediate_size;
    else
        BL_TRY(bl_json_get_int(file, root, "moe_intermediate_size", BL_JSON_OPTIONAL, 1, MAX_WIDTH,
                               &c->expert_size));
    BL_TRY(read_router(file, root, c));
    return read_shared(file, root, c);
}

/* Norms of q and k, which a key may select. */
static bl_status read_qk_norm(const char *file, const json_t *root, bl_model_config *c)
{
    bool has_norms = false;

    if (!c->arch->plain) return BL_OK;
    BL_TRY(bl_json_get_bool(file, root, "use_qk_norm", BL_JSON_OPTIONAL, &has_norms));
    if (!has_norms) c->arch = c->arch->plain;
    return BL_OK;
}

bl_status arch_read_decoder(const char *file, const json_t *root, bl_model_config *config)
{
    BL_TRY(read_qk_norm(file, root, config));
    BL_TRY(read_sizes(file, root, config));
    BL_TRY(read_experts(file, root, config));
    return arch_read_rest(file, root, config);
}

/* ---- the description ---- */

static void describe_dense_layers(const bl_model_config *c, json_t *out)
{
    json_t *dense = json_array();

    for (int64_t l = 0; c->n_experts > 0 && l < c->n_layers; l++)
        if (bl_model_kind(c, l) == BL_LAYER_DENSE) json_array_append_new(dense, json_integer(l));
    if (json_array_size(dense) > 0) json_object_set(out, "dense_layers", dense);
    json_decref(dense);
}

/* What only some models have: nothing where a model has it not, so that descriptions of the others
 * stay as they are. */
static void describe_extras(const bl_model_config *c, json_t *out)
{
    json_t *windows = json_array();

    if (c->arch != bl_arch_at(0))
        json_object_set_new(out, "model_type", json_string(c->arch->model_type));
    if (c->n_experts > 0)
        json_object_update_new(
            out, json_pack("{s:I, s:I, s:I, s:b}", "num_experts", (json_int_t)c->n_experts,
                           "num_experts_per_tok", (json_int_t)c->top_k, "moe_intermediate_size",
                           (json_int_t)c->expert_size, "norm_topk_prob", (int)c->is_top_k_normed));
    describe_dense_layers(c, out);
    if (c->shared_size > 0)
        json_object_set_new(out, "shared_expert_size", json_integer(c->shared_size));
    if (c->is_router_sigmoid) json_object_set_new(out, "router", json_string("sigmoid"));
    if (c->routed_scale > 0)
        json_object_set_new(out, "routed_scaling_factor", json_real(c->routed_scale));
    if (c->n_groups > 0)
        json_object_update_new(out, json_pack("{s:I, s:I}", "n_group", (json_int_t)c->n_groups,
                                              "topk_group", (json_int_t)c->top_groups));
    if (c->biases) json_object_set_new(out, "biases", json_integer((json_int_t)c->biases));
    for (int64_t l = 0; l < c->n_layers; l++)
        if (bl_windows_of_layer(&c->windows, l) > 0)
            json_array_append_new(windows, json_integer((json_int_t)l));
    if (json_array_size(windows) > 0) {
        json_object_set_new(out, "sliding_window", json_integer((json_int_t)c->windows.tokens));
        json_object_set(out, "windowed_layers", windows);
    }
    json_decref(windows);
    for (size_t i = 0; i < BL_COUNT(multipliers); i++) {
        double value = *(const double *)(const void *)((const char *)c + multipliers[i].offset);
        if (value > 0) json_object_set_new(out, multipliers[i].key, json_real(value));
    }
}

json_t *arch_describe_decoder(const bl_model_config *c)
{
    json_t *eos = json_array(), *rope = arch_describe_rope(c);

    for (int i = 0; i < c->n_eos_token_ids; i++)
        json_array_append_new(eos, json_integer(c->eos_token_ids[i]));
    json_t *out = json_pack(
        "{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:b, s:I, s:o, s:o}", "vocab_size",
        (json_int_t)c->vocab_size, "hidden_size", (json_int_t)c->hidden_size, "intermediate_size",
        (json_int_t)c->intermediate_size, "num_hidden_layers", (json_int_t)c->n_layers,
        "num_attention_heads", (json_int_t)c->n_heads, "num_key_value_heads",
        (json_int_t)c->n_kv_heads, "head_dim", (json_int_t)c->head_dim, "rms_norm_eps",
        c->rms_norm_eps, "tie_word_embeddings", (int)c->tie_word_embeddings, "bos_token_id",
        (json_int_t)c->bos_token_id, "eos_token_id", eos, "rope_parameters", rope);
    if (out) describe_extras(c, out);
    return out;
}
