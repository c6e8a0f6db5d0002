/* SPDX-License-Identifier: Apache-2.0 */
/* modules.h -- PEFT's modules_to_save: norms, embedding and head that an adapter contains whole.
 * They replace those of the model. */
#ifndef BALLAST_TRAINED_MODULES_H
#define BALLAST_TRAINED_MODULES_H

#include "arch/trained.h"
#include "model/weights.h"
#include "store/peft.h"

/* The names in adapter_config.json, and the tensors that they select. Zeros: none. */
typedef struct bl_saved_modules {
    bl_peft_saved_names names;
    bl_trained_set set;
} bl_saved_modules;
void bl_saved_modules_free(bl_saved_modules *modules); /* zeros are fine */

/* Whether they include the embedding or the head. */
bool bl_saved_modules_have_table(const bl_saved_modules *modules);

/* From an adapter's configuration. BL_EINPUT: a name that selects an unsupported module. */
bl_status bl_saved_modules_of_peft(const bl_peft_config *peft, const bl_model_config *config,
                                   const char *dir, bl_saved_modules *out);

/* Gives the tables of the set separate memory in the weights, with the model's values. Call it
 * before a pass over the weights is created. */
bl_status bl_adapter_modules_prepare(bl_model_weights *weights, const bl_trained_set *set);
/* Then reads the values from the adapter in `dir`, which has these modules. A GPU's copy of the
 * head is made on `stream`. BL_EINPUT. */
bl_status bl_adapter_modules_read(bl_model_weights *weights, const bl_trained_set *set,
                                  const char *dir, bl_stream *stream);
/* Both, for an adapter that is not trained. *has: whether the adapter has such modules; without
 * them nothing is done. */
bl_status bl_adapter_modules_use(bl_model_weights *weights, const char *dir, bl_stream *stream,
                                 bool *has);

#endif
