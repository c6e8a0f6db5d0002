/* SPDX-License-Identifier: Apache-2.0 */
/* config_internal.h -- what config.c has from config_keys.c. */
#ifndef BALLAST_ARCH_CONFIG_INTERNAL_H
#define BALLAST_ARCH_CONFIG_INTERNAL_H

#include <jansson.h>

#include "base/status.h"

/* BL_EINPUT names the first key with a value that Llama's forward pass lacks; keys that nobody knows are one
 * warning. */
bl_status bl_model_config_check_keys(const char *file, json_t *root);

#endif
