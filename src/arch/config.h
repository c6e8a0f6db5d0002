/* SPDX-License-Identifier: Apache-2.0 */
/* config.h -- the configuration of a model (bl_model_config), from config.json or by name.
 *
 * Read is what transformers means (configuration_*.py, modeling_rope_utils.py), in its older
 * spelling (rope_theta, rope_scaling with `type`) and its newer one (rope_parameters). What Ballast
 * does not compute is rejected by key and value, never ignored. */
#ifndef BALLAST_ARCH_CONFIG_H
#define BALLAST_ARCH_CONFIG_H

#include <jansson.h>

#include "arch/arch.h"
#include "store/hf_model.h"

/* Reads `path`, a config.json or the folder that holds it. Absent keys take the defaults of its
 * model_type; the sizes of the model itself must be there. BL_EINPUT "file: key K: expected ...,
 * got V". */
bl_status bl_model_config_load(const char *path, bl_model_config *out);

/* A known model's shape, by the name of a preset of some architecture (llama3.1-8b), or with a
 * hyphen behind the family (llama-3.1-8b). BL_EUSAGE for another name, listing them. */
bl_status bl_model_config_preset(const char *name, bl_model_config *out);

/* What the tensors decide. arch: the entry with stacked experts, if they are. n_kv_heads: old
 * 405B files say num_key_value_heads 16 over weights of 8, or the reverse; it is set by the rows
 * of k_proj of layer 0. BL_EINPUT when they are no number of heads that divides n_heads. A model
 * without that tensor is left to the check of all tensors. tie_word_embeddings: false with
 * is_untied_by_head and a stored head, and where a stored head has other values than the
 * embedding (is_head_apart; a warning), which reads both up to the first difference. */
bl_status bl_model_config_fit(bl_model_config *config, const bl_hf_model *model);

/* All that config.json says and a result depends on, by its newest key:
 * {"rope_theta": 500000.0, ...}; two of them are json_equal when the configurations mean the same.
 * max_position_embeddings only leads to a warning and is not in it. The caller's to json_decref;
 * BL_ENOMEM. */
bl_status bl_model_config_describe(const bl_model_config *config, json_t **out);

/* Parameters of the whole model; a tied head counts once. */
int64_t bl_model_config_n_params(const bl_model_config *config);

#endif
