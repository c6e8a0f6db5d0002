/* SPDX-License-Identifier: Apache-2.0 */
/* peft_keys_internal.h -- what peft_keys.c and peft_config.c share. */
#ifndef BALLAST_STORE_PEFT_KEYS_INTERNAL_H
#define BALLAST_STORE_PEFT_KEYS_INTERNAL_H

#include "base/json.h"

#define BL_PEFT_CONFIG_NAME "adapter_config.json"

/* dir/adapter_config.json, an object whose keys bl_peft_check_keys accepts; with has_experts
 * rank_pattern, alpha_pattern and target_parameters are not checked. *file is its path. The
 * caller frees both; after an error both are NULL. */
bl_status bl_peft_load_keys(const char *dir, bool has_experts, char **file, json_t **root);
/* Keys of the model that the adapter was made for: its head, and LoRA in some layers alone.
 * BL_EINPUT: not those of a causal language model with LoRA in all layers. BL_ENOMEM. */
bl_status bl_peft_check_model_keys(const char *file, const json_t *root);

#endif
