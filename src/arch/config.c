/* SPDX-License-Identifier: Apache-2.0 */
#include "arch/config.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/hub.h"
#include "base/json.h"
#include "base/sizes.h"
#include "arch/config_internal.h"

/* Far above any model and far below what could overflow a product of three of them. */
enum {
    MAX_CONFIG_BYTES = 16 << 20,
    MAX_VOCAB = 1 << 24,
    MAX_WIDTH = 1 << 20,
    MAX_LAYERS = 1 << 14,
    MAX_HEADS = 1 << 14,
    MAX_HEAD_DIM = 1 << 12,
    MAX_POSITIONS = 1 << 30
};

/* ---- what is refused ---- */

static bl_status check_architecture(const char *file, json_t *root)
{
    static const char wanted[] = "LlamaForCausalLM";
    const char *type = "llama";
    const json_t *architectures = NULL;
    bool found = false;

    BL_TRY(bl_json_get_string(file, root, "model_type", BL_JSON_OPTIONAL, &type));
    if (strcmp(type, "llama") != 0)
        return bl_json_fail(file, "model_type", "\"llama\"", json_object_get(root, "model_type"));
    BL_TRY(bl_json_get_array(file, root, "architectures", BL_JSON_OPTIONAL, &architectures));
    for (size_t i = 0; i < json_array_size(architectures) && !found; i++) {
        const char *name = bl_json_text(json_array_get(architectures, i));
        found = name && !strcmp(name, wanted);
    }
    if (architectures && !found)
        return bl_json_fail(file, "architectures", "[\"LlamaForCausalLM\"]", architectures);
    return bl_model_config_check_keys(file, root);
}

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
    c->n_kv_heads = c->n_heads;
    BL_TRY(bl_json_get_int(file, root, "num_key_value_heads", BL_JSON_OPTIONAL, 1, c->n_heads,
                           &c->n_kv_heads));
    if (c->n_heads % c->n_kv_heads)
        return bl_json_fail(file, "num_key_value_heads", "a divisor of num_attention_heads",
                            json_object_get(root, "num_key_value_heads"));
    bool has_head_dim = json_is_integer(json_object_get(root, "head_dim"));
    if (!has_head_dim && c->hidden_size % c->n_heads)
        return bl_json_fail(file, "hidden_size",
                            "a multiple of num_attention_heads where head_dim is absent",
                            json_object_get(root, "hidden_size"));
    c->head_dim = c->hidden_size / c->n_heads;
    BL_TRY(
        bl_json_get_int(file, root, "head_dim", BL_JSON_OPTIONAL, 2, MAX_HEAD_DIM, &c->head_dim));
    if (c->head_dim % 2 || c->head_dim < 2 || c->head_dim > MAX_HEAD_DIM)
        return BL_FAIL(BL_EINPUT,
                       "%s: key head_dim: expected an even number in [2, %d], got %" PRId64, file,
                       MAX_HEAD_DIM, c->head_dim);
    c->max_position_embeddings = 2048;
    BL_TRY(bl_json_get_int(file, root, "max_position_embeddings", BL_JSON_OPTIONAL, 1,
                           MAX_POSITIONS, &c->max_position_embeddings));
    c->rms_norm_eps = 1e-6;
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

    c->rope_theta = 10000;
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

void bl_model_config_rope_inv_freq(const bl_model_config *config, double *inverse)
{
    static const double two_pi = 6.283185307179586476925;
    double low = config->rope_low_freq_factor, high = config->rope_high_freq_factor;

    for (int64_t i = 0; i < config->head_dim / 2; i++) {
        double inv = pow(config->rope_theta, -2.0 * (double)i / (double)config->head_dim);
        if (config->rope_kind == BL_ROPE_LINEAR) {
            inv /= config->rope_factor;
        } else if (config->rope_kind == BL_ROPE_LLAMA3) {
            double turns =
                (double)config->rope_original_max_positions * inv / two_pi; /* L / wavelength */
            if (turns < low) {
                inv /= config->rope_factor;
            } else if (turns <= high) {
                double s = (turns - low) / (high - low);
                inv = (1 - s) * inv / config->rope_factor + s * inv;
            }
        }
        inverse[i] = inv;
    }
}

/* ---- loading ---- */

bl_status bl_model_config_load(const char *path, bl_model_config *out)
{
    bl_status st = BL_OK;
    bool is_folder;
    char *file = NULL;
    json_t *root = NULL;
    bl_model_config config = {0};

    BL_TRY(bl_hub_check_json(path, "config.json", &is_folder));
    if (is_folder)
        BL_TRY(bl_path_join(path, "config.json", &file));
    else
        BL_TRY(bl_text_format(&file, "%s", path));
    BL_TRY_GOTO(st, done, bl_json_load(file, MAX_CONFIG_BYTES, &root));
    BL_TRY_GOTO(st, done, bl_json_check_object(file, root));
    BL_TRY_GOTO(st, done, check_architecture(file, root));
    BL_TRY_GOTO(st, done, read_sizes(file, root, &config));
    BL_TRY_GOTO(st, done, read_token_ids(file, root, &config));
    BL_TRY_GOTO(st, done, read_rope(file, root, &config));
    *out = config;
done:
    json_decref(root);
    free(file);
    return st;
}

bl_status bl_model_config_fit_kv_heads(bl_model_config *config, const bl_hf_model *model)
{
    const bl_stored_tensor *k = bl_hf_find(model, "model.layers.0.self_attn.k_proj.weight");

    if (!k || k->n_dims != 2) return BL_OK;
    int64_t n_kv_heads = k->shape[0] / config->head_dim;
    if (n_kv_heads < 1 || k->shape[0] % config->head_dim || config->n_heads % n_kv_heads)
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has %" PRId64 " rows, which are no heads of %" PRId64
                       " that divide %" PRId64 " heads",
                       k->name, k->shape[0], config->head_dim, config->n_heads);
    config->n_kv_heads = n_kv_heads;
    return BL_OK;
}

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

bl_status bl_model_config_describe(const bl_model_config *c, json_t **out)
{
    bl_json_watch_memory();
    json_t *eos = json_array(), *rope = describe_rope(c);

    for (int i = 0; i < c->n_eos_token_ids; i++)
        json_array_append_new(eos, json_integer(c->eos_token_ids[i]));
    *out = json_pack("{s:I, s:I, s:I, s:I, s:I, s:I, s:I, s:f, s:b, s:I, s:o, s:o}", "vocab_size",
                     (json_int_t)c->vocab_size, "hidden_size", (json_int_t)c->hidden_size,
                     "intermediate_size", (json_int_t)c->intermediate_size, "num_hidden_layers",
                     (json_int_t)c->n_layers, "num_attention_heads", (json_int_t)c->n_heads,
                     "num_key_value_heads", (json_int_t)c->n_kv_heads, "head_dim",
                     (json_int_t)c->head_dim, "rms_norm_eps", c->rms_norm_eps,
                     "tie_word_embeddings", (int)c->tie_word_embeddings, "bos_token_id",
                     (json_int_t)c->bos_token_id, "eos_token_id", eos, "rope_parameters", rope);
    if (*out && !bl_json_ran_out()) return BL_OK;
    json_decref(*out);
    *out = NULL;
    return BL_FAIL(BL_ENOMEM, "the model's configuration");
}

int64_t bl_model_config_n_params(const bl_model_config *config)
{
    int64_t hidden = config->hidden_size;
    int64_t attention = 2 * (config->n_heads + config->n_kv_heads) * config->head_dim * hidden;
    int64_t mlp = 3 * config->intermediate_size * hidden;
    int64_t tables = (config->tie_word_embeddings ? 1 : 2) * config->vocab_size * hidden;
    return tables + hidden + config->n_layers * (attention + mlp + 2 * hidden);
}

/* ---- presets ---- */

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

static const struct {
    const char *name;
    bl_model_config config;
} presets[] = {
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

/* Both spellings are common: llama3.1-8b, llama-3.1-8b. */
static bool is_preset(const char *preset, const char *name)
{
    static const char family[] = "llama";
    size_t n_bytes = sizeof family - 1;

    if (strcmp(preset, name) == 0) return true;
    return strncmp(name, "llama-", n_bytes + 1) == 0 &&
           strcmp(preset + n_bytes, name + n_bytes + 1) == 0;
}

bl_status bl_model_config_preset(const char *name, bl_model_config *out)
{
    char known[512] = "";

    for (size_t i = 0; i < BL_COUNT(presets); i++) {
        if (is_preset(presets[i].name, name)) {
            *out = presets[i].config;
            return BL_OK;
        }
        size_t length = strlen(known);
        snprintf(known + length, sizeof known - length, "%s%s", i ? ", " : "", presets[i].name);
    }
    return BL_FAIL(BL_EUSAGE, "unknown model preset %.64s; one of %s", name, known);
}
