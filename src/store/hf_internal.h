/* SPDX-License-Identifier: Apache-2.0 */
/* hf_internal.h -- what hf_model.c (files, names) and hf_weight.c (FP8, scales) share. */
#ifndef BALLAST_STORE_HF_INTERNAL_H
#define BALLAST_STORE_HF_INTERNAL_H

#include "base/json.h"
#include "store/hf_model.h"
#include "store/problems_internal.h"

/* The blocks that share a scale, as quantization_config declares them; 0, 0: it does not. */
typedef struct bl_scale_blocks {
    int64_t rows, cols;
} bl_scale_blocks;

struct bl_hf_model {
    char *dir;
    bl_safetensors **files;
    size_t n_files;
    const bl_stored_tensor **tensors; /* of all files, sorted by name */
    size_t n_tensors;
    bl_scale_blocks declared_blocks;
};

/* Reads quantization_config of a config.json's root. `file` names it in errors. */
bl_status bl_hf_parse_quantization(const char *file, const json_t *config,
                                   bl_scale_blocks *declared);

#endif
