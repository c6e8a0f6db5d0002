/* SPDX-License-Identifier: Apache-2.0 */
/* hf_internal.h -- what hf_model.c (files, names), hf_quantization.c (config.json), hf_packed.c (4
 * bits) and hf_weight.c (FP8, scales) share. */
#ifndef BALLAST_STORE_HF_INTERNAL_H
#define BALLAST_STORE_HF_INTERNAL_H

#include "base/json.h"
#include "store/hf_model.h"
#include "store/problems_internal.h"

/* The blocks that share a scale. */
typedef struct bl_scale_blocks {
    int64_t rows, cols;
} bl_scale_blocks;

/* How the listed names of unquantized modules match. The last two also take "re:" and a regular
 * expression for the beginning of a name. */
typedef enum bl_exclude_rule {
    BL_EXCLUDE_MODULES,  /* transformers: whole components at the beginning, as regular expressions,
                            or any end */
    BL_EXCLUDE_NAMES,    /* compressed-tensors, vLLM: whole names, or Linear */
    BL_EXCLUDE_WILDCARDS /* Model Optimizer, Quark: as file names in a shell */
} bl_exclude_rule;

/* What quantization_config declares. Zero-initialize it. */
enum { BL_MAX_SCALE_BLOCKS = 8 };
enum { BL_STRATEGY_TENSOR = 1, BL_STRATEGY_CHANNEL = 2, BL_STRATEGY_OTHER = 4 };
typedef struct bl_declared {
    bl_scale_blocks size[BL_MAX_SCALE_BLOCKS]; /* the different sizes */
    int n;
    unsigned strategies; /* of groups, BL_STRATEGY_... or-ed */
    json_t *excluded;    /* a list of texts; NULL: none; owned */
    const char *excluded_key;
    bl_exclude_rule rule;
    bool has_symmetric, has_asymmetric; /* groups of integers without, with zero points */
} bl_declared;

struct bl_hf_model {
    char *dir;
    bl_safetensors **files;
    size_t n_files;
    const bl_stored_tensor **tensors; /* of all files, sorted by name */
    size_t n_tensors;
    bl_hf_packed *packed; /* sorted by name; the names are owned */
    size_t n_packed;
    bl_declared declared;
};

/* Reads quantization_config of a config.json's root. `file` names it in errors. BL_EINPUT also for
 * unknown keys with a value (base/present.h). */
bl_status bl_hf_parse_quantization(const char *file, const json_t *config, bl_declared *declared);
/* The same for the root of hf_quant_config.json. */
bl_status bl_hf_parse_modelopt(const char *file, const json_t *root, bl_declared *declared);
/* The declared name that leaves `module` unquantized; NULL: none. BL_EINPUT: not a regular
 * expression. */
bl_status bl_hf_find_excluded(const bl_declared *declared, const char *module, const char **name);

/* Fills model->packed from the tensors; adds to `problems` the weights of 4 bits whose tensors do
 * not fit. BL_EIO, BL_ENOMEM. */
bl_status bl_hf_find_packed(bl_hf_model *model, bl_problems *problems);
void bl_hf_free_packed(bl_hf_model *model);
/* The packed weight `name`; NULL: none. */
const bl_hf_packed *bl_hf_packed_weight(const bl_hf_model *model, const char *name);
/* The packed weight of which the stored tensor is the codes or a part; NULL: none. */
const bl_hf_packed *bl_hf_packed_of(const bl_hf_model *model, const bl_stored_tensor *tensor);

#endif
