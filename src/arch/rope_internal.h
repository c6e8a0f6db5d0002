/* SPDX-License-Identifier: Apache-2.0 */
/* rope_internal.h -- RoPE's part of a decoder's configuration, for decoder.c. */
#ifndef BALLAST_ARCH_ROPE_INTERNAL_H
#define BALLAST_ARCH_ROPE_INTERNAL_H

#include "arch/arch.h"

/* Reads rope_theta, rope_scaling and rope_parameters; the sizes have been read. */
bl_status arch_read_rope(const char *file, const json_t *root, bl_model_config *config);
json_t *arch_describe_rope(const bl_model_config *config);

#endif
