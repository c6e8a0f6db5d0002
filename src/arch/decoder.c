/* SPDX-License-Identifier: Apache-2.0 */
/* decoder.c -- the part of config.json that pre-norm decoders have in common: sizes, token ids,
 * RoPE. */
#include "arch/decoder_internal.h"

#include <inttypes.h>
#include <stdlib.h>
#include <string.h>

#include "arch/config_internal.h"
#include "arch/config.h"
#include "arch/table.h"
#include "base/json.h"
#include "base/files.h"

/* Far above any model and far below what could overflow a product of three of them. */
enum {
    MAX_VOCAB = 1 << 24,
    MAX_WIDTH = 1 << 20,
    MAX_LAYERS = 1 << 14,
    MAX_HEADS = 1 << 14,
    MAX_HEAD_DIM = 1 << 12,
    MAX_POSITIONS = 1 << 30
};

/* ---- sizes ---- */

static bl_status read_sizes(const char *file, const json_t *root, bl_model_config *c)
{
    BL_TRY(
        bl_json_get_int(file, root, "vocab_size", BL_JSON_REQUIRED, 1, MAX_VOCAB, &c->vocab_size));
    BL_TRY(bl_json_get_int(file, root, "hidden_size", BL_JSON_REQUIRED, 1, MAX_WIDTH,
                           &c->hidden_size));
    BL_TRY(bl_json_get_int(file, root, "intermediate_size", BL_JSON_REQUIRED, 1, MAX_WIDTH,
                           &c->intermediate_size));
    BL_TRY(bl_json_get_int(file, root, "num_hidden_layers", BL_JSON_REQUIRED, 1, MAX_LAYERS,
                           &c->n_layers));
    BL_TRY(bl_json_get_int(file, root, "num_attention_heads", BL_JSON_REQUIRED, 1, MAX_HEADS,
                           &c->n_heads));
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
    BL_TRY(bl_json_get_int(file, root, "max_position_embeddings", BL_JSON_OPTIONAL, 1,
                           MAX_POSITIONS, &c->max_position_embeddings));
    BL_TRY(
        bl_json_get_real(file, root, "rms_norm_eps", BL_JSON_OPTIONAL, 1e-12, 1, &c->rms_norm_eps));
    return bl_json_get_bool(file, root, "tie_word_embeddings", BL_JSON_OPTIONAL,
                            &c->tie_word_embeddings);
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

/* ---- rotary embedding ---- */

/* The fields of rope_scaling or rope_parameters; `where` names it in errors. */
static bl_status read_rope_fields(const char *where, const json_t *rope, bl_model_config *c)
{
    const char *key = json_object_get(rope, "rope_type") ? "rope_type" : "type";
    const char *type = "default";
    double rotary = 1;

    BL_TRY(bl_json_get_string(where, rope, key, BL_JSON_OPTIONAL, &type));
    BL_TRY(bl_json_get_real(where, rope, "partial_rotary_factor", BL_JSON_OPTIONAL, 1, 1, &rotary));
    if (!strcmp(type, "default")) return BL_OK;
    bool is_llama3 = !strcmp(type, "llama3");
    if (!is_llama3 && strcmp(type, "linear") != 0)
        return bl_json_fail(where, key, "\"default\", \"linear\" or \"llama3\"",
                            json_object_get(rope, key));
    c->rope_kind = is_llama3 ? BL_ROPE_LLAMA3 : BL_ROPE_LINEAR;
    BL_TRY(bl_json_get_real(where, rope, "factor", BL_JSON_REQUIRED, 1, 1e6, &c->rope_factor));
    if (!is_llama3) return BL_OK;
    BL_TRY(bl_json_get_real(where, rope, "low_freq_factor", BL_JSON_REQUIRED, 1e-6, 1e6,
                            &c->rope_low_freq_factor));
    BL_TRY(bl_json_get_real(where, rope, "high_freq_factor", BL_JSON_REQUIRED, 1e-6, 1e6,
                            &c->rope_high_freq_factor));
    if (c->rope_high_freq_factor <= c->rope_low_freq_factor)
        return bl_json_fail(where, "high_freq_factor", "more than low_freq_factor",
                            json_object_get(rope, "high_freq_factor"));
    return bl_json_get_int(where, rope, "original_max_position_embeddings", BL_JSON_REQUIRED, 1,
                           MAX_POSITIONS, &c->rope_original_max_positions);
}

static bl_status read_rope(const char *file, const json_t *root, bl_model_config *c)
{
    static const double min_theta = 1, max_theta = 1e12;
    bl_status st = BL_OK;
    const json_t *scaling = NULL, *parameters = NULL;
    char *where = NULL;

    BL_TRY(bl_json_get_real(file, root, "rope_theta", BL_JSON_OPTIONAL, min_theta, max_theta,
                            &c->rope_theta));
    BL_TRY(bl_json_get_object(file, root, "rope_scaling", BL_JSON_OPTIONAL, &scaling));
    BL_TRY(bl_json_get_object(file, root, "rope_parameters", BL_JSON_OPTIONAL, &parameters));
    if (scaling && parameters && !json_equal(scaling, parameters))
        return bl_json_fail(file, "rope_scaling", "nothing beside rope_parameters", scaling);
    const json_t *rope = parameters ? parameters : scaling;
    if (!rope) return BL_OK;
    BL_TRY(bl_text_format(&where, "%s: %s", file, parameters ? "rope_parameters" : "rope_scaling"));
    double theta = c->rope_theta;
    BL_TRY_GOTO(st, done,
                bl_json_get_real(where, rope, "rope_theta", BL_JSON_OPTIONAL, min_theta, max_theta,
                                 &theta));
    if (theta != c->rope_theta && json_is_number(json_object_get(root, "rope_theta"))) {
        st = bl_json_fail(where, "rope_theta", "the same as rope_theta outside",
                          json_object_get(rope, "rope_theta"));
        goto done;
    }
    c->rope_theta = theta;
    BL_TRY_GOTO(st, done, read_rope_fields(where, rope, c));
done:
    free(where);
    return st;
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
    return read_bias(file, root, "mlp_bias", BL_MLP_BIASES, c);
}

/* ---- windows ---- */

static void set_windowed(bl_model_config *c, int64_t layer)
{
    c->windowed[layer / 64] |= (uint64_t)1 << layer % 64;
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
        if (slides && c->sliding_window == 0)
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
                           &c->sliding_window));
    if (!is_used)
        BL_TRY(bl_json_get_bool(file, root, "use_sliding_window", BL_JSON_OPTIONAL, &is_used));
    if (json_is_null(width) || !is_used) c->sliding_window = 0;
    if (arch_reads(c->arch, "layer_types"))
        BL_TRY(bl_json_get_array(file, root, "layer_types", BL_JSON_OPTIONAL, &types));
    if (c->sliding_window > 0 && c->n_layers > BL_MODEL_MASK_LAYERS)
        return bl_json_fail(file, "sliding_window", "null in a model of more than 1024 layers",
                            width);
    if (types && c->n_layers <= BL_MODEL_MASK_LAYERS) return read_layer_types(file, types, c);
    if (arch_reads(c->arch, "max_window_layers"))
        BL_TRY(bl_json_get_int(file, root, "max_window_layers", BL_JSON_OPTIONAL, 0, MAX_LAYERS,
                               &first));
    for (int64_t l = first; c->sliding_window > 0 && l < c->n_layers; l++) set_windowed(c, l);
    return BL_OK;
}

bl_status arch_read_decoder(const char *file, const json_t *root, bl_model_config *config)
{
    BL_TRY(read_sizes(file, root, config));
    BL_TRY(read_token_ids(file, root, config));
    BL_TRY(read_biases(file, root, config));
    BL_TRY(read_windows(file, root, config));
    return read_rope(file, root, config);
}

/* ---- the description ---- */

static json_t *describe_rope(const bl_model_config *c)
{
    if (c->rope_kind == BL_ROPE_DEFAULT)
        return json_pack("{s:s, s:f}", "rope_type", "default", "rope_theta", c->rope_theta);
    if (c->rope_kind == BL_ROPE_LINEAR)
        return json_pack("{s:s, s:f, s:f}", "rope_type", "linear", "rope_theta", c->rope_theta,
                         "factor", c->rope_factor);
    return json_pack("{s:s, s:f, s:f, s:f, s:f, s:I}", "rope_type", "llama3", "rope_theta",
                     c->rope_theta, "factor", c->rope_factor, "low_freq_factor",
                     c->rope_low_freq_factor, "high_freq_factor", c->rope_high_freq_factor,
                     "original_max_position_embeddings",
                     (json_int_t)c->rope_original_max_positions);
}

/* What only some models have: nothing where a model has it not, so that descriptions of the others
 * stay as they are. */
static void describe_extras(const bl_model_config *c, json_t *out)
{
    json_t *windows = json_array();

    if (c->arch != bl_arch_at(0))
        json_object_set_new(out, "model_type", json_string(c->arch->model_type));
    if (c->biases) json_object_set_new(out, "biases", json_integer((json_int_t)c->biases));
    for (int64_t l = 0; l < c->n_layers; l++)
        if (bl_model_config_window(c, l) > 0)
            json_array_append_new(windows, json_integer((json_int_t)l));
    if (json_array_size(windows) > 0) {
        json_object_set_new(out, "sliding_window", json_integer((json_int_t)c->sliding_window));
        json_object_set(out, "windowed_layers", windows);
    }
    json_decref(windows);
}

json_t *arch_describe_decoder(const bl_model_config *c)
{
    json_t *eos = json_array(), *rope = describe_rope(c);

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
