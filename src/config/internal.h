/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- what the files of config/ share; for them only. */
#ifndef BALLAST_CONFIG_INTERNAL_H
#define BALLAST_CONFIG_INTERNAL_H

#include "config/config.h"

/* device.c. BL_EUSAGE: an item that names no projection and no layer. */
bl_status config_check_modules(const bl_string_list *bf16_modules);

#endif
