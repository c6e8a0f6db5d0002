/* SPDX-License-Identifier: Apache-2.0 */
/* config.h -- the shape of a Llama model, from config.json or by name.
 *
 * Read is what transformers' LlamaConfig means (configuration_llama.py, modeling_rope_utils.py), in its older
 * spelling (rope_theta, rope_scaling with `type`) and its newer one (rope_parameters). What Ballast does not
 * compute is refused by key and value, never ignored. */
#ifndef BALLAST_ARCH_CONFIG_H
#define BALLAST_ARCH_CONFIG_H

#include <jansson.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"
#include "store/hf_model.h"

typedef enum bl_rope_kind { BL_ROPE_DEFAULT, BL_ROPE_LINEAR, BL_ROPE_LLAMA3 } bl_rope_kind;

enum { BL_MODEL_MAX_EOS = 8 };

typedef struct bl_model_config {
    int64_t vocab_size, hidden_size, intermediate_size;
    int64_t n_layers, n_heads, n_kv_heads; /* n_kv_heads divides n_heads */
    int64_t head_dim;                      /* even; n_heads * head_dim need not be hidden_size */
    int64_t max_position_embeddings;
    double rms_norm_eps;
    bool tie_word_embeddings;

    double rope_theta;
    bl_rope_kind rope_kind;
    double rope_factor;                                 /* linear, llama3 */
    double rope_low_freq_factor, rope_high_freq_factor; /* llama3; low < high */
    int64_t rope_original_max_positions;                /* llama3 */

    int64_t bos_token_id; /* -1: none */
    int64_t eos_token_ids[BL_MODEL_MAX_EOS];
    int n_eos_token_ids;
} bl_model_config;

/* Reads `path`, a config.json or the folder that holds it. Absent keys take LlamaConfig's defaults; the sizes
 * of the model itself must be there. BL_EINPUT "file: key K: expected ..., got V". */
bl_status bl_model_config_load(const char *path, bl_model_config *out);

/* A known model's shape: llama2-7b, -13b, -70b; llama3-8b, -70b; llama3.1-8b, -70b, -405b; llama3.2-1b, -3b;
 * llama3.3-70b; or llama-3.1-8b. BL_EUSAGE for another name, listing them. */
bl_status bl_model_config_preset(const char *name, bl_model_config *out);

/* Old 405B files say num_key_value_heads 16 over weights of 8, or the reverse: k_proj of layer 0 decides.
 * Sets n_kv_heads by its rows. BL_EINPUT when they are no number of heads that divides n_heads. A model
 * without that tensor is left to the check of all tensors. */
bl_status bl_model_config_fit_kv_heads(bl_model_config *config, const bl_hf_model *model);

/* All that config.json says and a result depends on, by its newest key: {"rope_theta": 500000.0, ...}; two of them are json_equal when the
 * configurations mean the same. max_position_embeddings only leads to a warning and is not in it. The caller's to json_decref; BL_ENOMEM. */
bl_status bl_model_config_describe(const bl_model_config *config, json_t **out);

/* Parameters of the whole model; a tied head counts once. */
int64_t bl_model_config_n_params(const bl_model_config *config);

/* inverse[i], i < head_dim/2: the angle of pair (i, i + head_dim/2) is position * inverse[i]. With theta =
 * rope_theta, default  inv = theta^(-2i/head_dim) linear   inv / factor llama3   wavelength 2 pi/inv > L/low
 * -> inv/factor; < L/high -> inv; between, s = (L/wavelength - low)/(high - low), (1-s) inv/factor + s inv; L
 * = rope_original_max_positions The attention factor is 1 in each. */
void bl_model_config_rope_inv_freq(const bl_model_config *config, double *inverse);

#endif
