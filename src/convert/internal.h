/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- between quantize.c, for directories, and quantize_shard.c, for one file. */
#ifndef BALLAST_CONVERT_INTERNAL_H
#define BALLAST_CONVERT_INTERNAL_H

#include "arch/arch.h"
#include "convert/quantize.h"
#include "store/hf_model.h"

/* The target of one shard of the source: two specs for a projection (its codes, its scales), one
 * for any other tensor. */
typedef struct bl_shard_plan {
    const bl_safetensors *source;
    bl_stored_tensor_spec *specs;
    char **scale_names; /* of the specs, NULL where the name is the source's */
    size_t n_specs;
    int64_t n_bytes; /* of the data */
} bl_shard_plan;

bl_status bl_shard_plan_make(const bl_arch *arch, const bl_safetensors *source, bl_format format,
                             bl_shard_plan *out);
void bl_shard_plan_free(bl_shard_plan *plan);

/* Writes the shard. `files` are the model's, opened for readers. */
bl_status bl_shard_quantize(const bl_quantize_options *options, const bl_hf_model *model,
                            bl_io_files *files, const bl_shard_plan *plan, const char *path);

#endif
