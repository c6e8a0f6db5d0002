/* SPDX-License-Identifier: Apache-2.0 */
/* hf_internal.h -- what hf_model.c (files, names) and hf_weight.c (FP8, scales) share. */
#ifndef BALLAST_STORE_HF_INTERNAL_H
#define BALLAST_STORE_HF_INTERNAL_H

#include "base/json.h"
#include "store/hf_model.h"
#include "store/problems_internal.h"

struct bl_hf_model {
    char *dir;
    bl_safetensors **files;
    size_t n_files;
    const bl_stored_tensor **tensors; /* of all files, sorted by name */
    size_t n_tensors;
    /* The granularity that quantization_config promises; BL_SCALE_NONE when it says nothing. */
    bl_scale_kind promised_scale;
};

/* Reads quantization_config of a config.json's root. `file` names it in errors. */
bl_status bl_hf_parse_quantization(const char *file, const json_t *config, bl_scale_kind *promised);

#endif
