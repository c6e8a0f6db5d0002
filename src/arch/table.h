/* SPDX-License-Identifier: Apache-2.0 */
/* table.h -- all architectures, and searches in all of them for keys read before the model. */
#ifndef BALLAST_ARCH_TABLE_H
#define BALLAST_ARCH_TABLE_H

#include "arch/arch.h"

/* The i-th entry; NULL: there are no more. The first is that of a config.json without
 * model_type. */
const bl_arch *bl_arch_at(size_t i);

/* For keys that are read before the model: what `name` selects in some architecture, as
 * bl_peft_target_parse and bl_peft_layer_parse do; NULL and false: nothing in any. */
const bl_projection *bl_arch_find_target(const char *name, int64_t *layer);
bool bl_arch_find_layer(const char *name, int64_t *layer);
/* Whether the last name of a path is an architecture's embedding or head: "lm_head". */
bool bl_arch_is_table(const char *name);
/* The names of all architectures' projections, each once; returns how many, at most n_max. */
size_t bl_arch_target_names(const char **names, size_t n_max);

#endif
