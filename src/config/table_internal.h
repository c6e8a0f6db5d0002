/* SPDX-License-Identifier: Apache-2.0 */
/* table_internal.h -- the two constant tables of config/config.h. */
#ifndef BALLAST_CONFIG_TABLE_INTERNAL_H
#define BALLAST_CONFIG_TABLE_INTERNAL_H

#include <stddef.h>

#include "options/options.h"

extern const bl_option bl_train_options[];
extern const size_t bl_train_n_options;

extern const bl_option_alias bl_train_aliases[];
extern const size_t bl_train_n_aliases;

#endif
