/* SPDX-License-Identifier: Apache-2.0 */
/* peft_experts_internal.h -- routed experts in an adapter, for peft.c and peft_config.c:
 * peft_experts.c has their tensors, peft_experts_config.c what adapter_config.json says of them. */
#ifndef BALLAST_STORE_PEFT_EXPERTS_INTERNAL_H
#define BALLAST_STORE_PEFT_EXPERTS_INTERNAL_H

#include "store/peft_internal.h"
#include "store/safetensors.h"

#define PEFT_PREFIX "base_model.model."

/* A tensor of the file: a factor of a layer's experts, or with PER_EXPERT a piece of one. */
typedef struct peft_expert_tensor {
    int64_t layer;
    int module;
    bl_peft_factor factor;
    int64_t expert; /* -1: of all */
    int piece;
} peft_expert_tensor;

/* A factor of the adapter, or a tensor of modules_to_save. The file must hold exactly those in the
 * list. */
typedef struct peft_factor_id {
    int64_t layer;
    int module;
    bl_peft_factor factor;
    bool is_saved;
    peft_expert_tensor expert; /* of a routed module */
} peft_factor_id;

typedef struct peft_factors {
    size_t n;
    peft_factor_id *ids;
    bl_stored_tensor_spec *specs;
    char (*names)[BL_PEFT_NAME_BYTES];
} peft_factors;

/* ---- peft.c ---- */

/* base->modules is nested for config's targets. The caller frees *list, after an error, too. */
bl_status store_peft_list_factors(const char *dir, const bl_peft_config *config,
                                  const bl_peft_base *base, bl_dtype dtype, peft_factors *list);
void store_peft_factors_free(peft_factors *list);

/* ---- peft_experts.c ---- */

int store_peft_count_pieces(const bl_peft_modules *modules, int module);
/* Tensors of both factors of a module in one layer. */
size_t store_peft_count_tensors(const bl_peft_config *config, const bl_peft_base *base, int module);
/* The k-th of them. */
peft_expert_tensor store_peft_expert_tensor_at(const bl_peft_config *config,
                                               const bl_peft_base *base, int64_t layer, int module,
                                               size_t k);
void store_peft_expert_tensor_name(const bl_peft_modules *modules, const peft_expert_tensor *t,
                                   char name[BL_PEFT_NAME_BYTES]);
void store_peft_expert_tensor_shape(const bl_peft_config *config, const bl_peft_base *base,
                                    const peft_expert_tensor *t, int64_t shape[2]);
/* Values of a factor of all experts, as bl_peft_read returns it. */
int64_t store_peft_expert_values(const bl_peft_config *config, const bl_peft_base *base, int module,
                                 bl_peft_factor factor);
/* bl_peft_read of a routed module. */
bl_status store_peft_read_experts(const bl_safetensors *file, const bl_peft_config *config,
                                  const bl_peft_base *base, int64_t layer, int module,
                                  bl_peft_factor factor, float *dst);
/* The values of a tensor of STACKED or PER_EXPERT in a factor of all experts; scratch: as large as
 * the factor. */
const float *store_peft_pick_expert(const bl_peft_config *config, const bl_peft_base *base,
                                    const peft_expert_tensor *t, const float *factor,
                                    float *scratch);
/* STACKED or FIRST_AXIS, from the shapes in the file; of square matrices it stays. */
void store_peft_choose_axis(const bl_safetensors *file, const bl_peft_base *base,
                            bl_peft_config *config);
/* The tensor, of the first layer that has it, which becomes t's; NULL: none. */
const bl_stored_tensor *store_peft_find_experts(const bl_safetensors *file,
                                                const bl_peft_modules *modules, int64_t n_layers,
                                                peft_expert_tensor *t);
/* Whether the file has factors of a routed module in a layer; the modules are nested. */
bool store_peft_has_experts(const bl_safetensors *file, const bl_peft_modules *modules,
                            int64_t layer, int module);
/* The base's experts and their sizes, from the tensors of the first layer that has some. */
void store_peft_measure_experts(const bl_safetensors *file, const bl_peft_config *config,
                                bl_peft_base *base);

/* ---- peft_experts_config.c ---- */

/* Routed experts in `root`, to config, of which r and the targets that target_modules names are
 * set. BL_EINPUT: ranks, alphas or parameters of other modules. */
bl_status store_peft_read_experts_config(const char *dir, const char *file, const json_t *root,
                                         const bl_peft_modules *modules, int64_t n_layers,
                                         bl_peft_config *config);
/* target_parameters, or null; names of experts one by one are added to target_modules. */
json_t *store_peft_json_parameters(const bl_peft_modules *modules, const bl_peft_config *config,
                                   json_t *target_modules);
/* rank_pattern or alpha_pattern. */
json_t *store_peft_json_pattern(const bl_peft_modules *modules, const bl_peft_config *config,
                                bool is_alpha);

#endif
