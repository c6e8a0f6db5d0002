/* SPDX-License-Identifier: Apache-2.0 */
/* config_internal.h -- the check of config.json's keys (config_keys.c), for config.c. */
#ifndef BALLAST_ARCH_CONFIG_INTERNAL_H
#define BALLAST_ARCH_CONFIG_INTERNAL_H

#include "arch/arch.h"

/* Whether `key` is among those that the entry reads. */
bool arch_reads(const bl_arch *arch, const char *key);

/* BL_EINPUT names the first key with a value that the family's forward pass lacks; unknown keys are
 * one warning. */
bl_status arch_check_keys(const bl_arch *arch, const char *file, const json_t *root);

#endif
