/* SPDX-License-Identifier: Apache-2.0 */
/* modules.h -- PEFT's modules_to_save: norms, the embedding and the head that an adapter has whole,
 * in place of the model's. */
#ifndef BALLAST_ADAPTER_MODULES_H
#define BALLAST_ADAPTER_MODULES_H

#include "arch/trained.h"
#include "model/weights.h"
#include "store/peft.h"

/* The names as adapter_config.json has them, and the tensors that they choose. Zeros: none. */
typedef struct bl_saved_modules {
    bl_peft_saved_names names;
    bl_trained_set set;
} bl_saved_modules;
void bl_saved_modules_free(bl_saved_modules *modules); /* zeros are fine */

/* Whether the embedding or the head is one of them. */
bool bl_saved_modules_have_table(const bl_saved_modules *modules);

/* Of an adapter's configuration. BL_EINPUT: a module that cannot be one. */
bl_status bl_saved_modules_of_peft(const bl_peft_config *peft, const bl_model_config *config,
                                   const char *dir, bl_saved_modules *out);

/* Bytes of one rank: weights of tables (norms are the model's), both moments and gradients. */
typedef struct bl_saved_modules_bytes {
    int64_t weights, moments, gradients;
} bl_saved_modules_bytes;
bl_saved_modules_bytes bl_saved_modules_measure(const bl_model_config *config,
                                                const bl_trained_set *set);

/* The tables of the set get separate memory in the weights, with the model's values; before
 * there is a pass over them. */
bl_status bl_adapter_modules_prepare(bl_model_weights *weights, const bl_trained_set *set);
/* The values of the adapter in `dir`, which has these modules. BL_EINPUT. */
bl_status bl_adapter_modules_read(bl_model_weights *weights, const bl_trained_set *set,
                                  const char *dir);
/* Both, for an adapter that is used, not trained; nothing if it has no such modules. *has: whether
 * it has. */
bl_status bl_adapter_modules_use(bl_model_weights *weights, const char *dir, bool *has);

#endif
