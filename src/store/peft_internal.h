/* SPDX-License-Identifier: Apache-2.0 */
/* peft_internal.h -- what peft.c (tensors), peft_config.c (adapter_config.json) and peft_targets.c
 * share. */
#ifndef BALLAST_STORE_PEFT_INTERNAL_H
#define BALLAST_STORE_PEFT_INTERNAL_H

#include "store/peft.h"

#define BL_PEFT_MODEL_NAME "adapter_model.safetensors"
enum { BL_PEFT_MAX_RANK = 1 << 16 };

/* PEFT's lora_alpha is an int, or a float with a fraction. */
json_t *store_peft_json_real(double value);

/* The path of the embedding, a sibling of the layers, or of the head; "": unknown. */
void bl_peft_table_path(const bl_peft_modules *modules, int module, char path[BL_PEFT_NAME_BYTES]);

/* Whether layer `layer` has the module. */
bool bl_peft_layer_has(const bl_peft_modules *modules, int64_t layer, int module);

/* Whether the path `module` of n_module bytes ends in one of the names. */
bool bl_peft_is_saved(const bl_peft_saved_names *names, const char *module, size_t n_module);

/* Writes dir/adapter_config.json as PEFT does. */
bl_status bl_peft_write_config(const char *dir, const bl_peft_modules *modules,
                               const bl_peft_config *config, const char *base_name);

#endif
