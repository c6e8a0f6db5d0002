/* SPDX-License-Identifier: Apache-2.0 */
/* modules_internal.h -- modules that are trained whole beside LoRA (PEFT's modules_to_save): norms,
 * the embedding, the head. Every rank has them whole, in fp32, with AdamW's moments and gradients,
 * and makes the same update. The pass reads the trained weights in place: vectors and tables of
 * bl_model_weights. LoRA terms of the embedding and the head (terms_internal.h) are the last part.
 *
 * Gradients are summed over the micro-batches of each rank, and once per step over the ranks. Norms
 * and their biases have no weight decay. */
#ifndef BALLAST_ADAPTER_MODULES_INTERNAL_H
#define BALLAST_ADAPTER_MODULES_INTERNAL_H

#include "adapter/terms.h"
#include "comm/comm.h"
#include "device/staging.h"
#include "model/pass.h"
#include "model/weights.h"
#include "ops/optimizer.h"
#include "store/safetensors.h"

typedef struct adapter_modules adapter_modules;

/* In the order of a checkpoint's tensors. */
typedef enum adapter_module_array {
    MODULES_M,
    MODULES_V,
    MODULES_W,
    MODULES_ARRAYS
} adapter_module_array;
extern const char *const adapter_module_names[MODULES_ARRAYS];

/* Moments and gradients begin as zeros. Borrowed: set and terms, of which one may be NULL, and
 * weights, whose tables must have been replaced (bl_adapter_modules_prepare). */
bl_status adapter_modules_create(bl_model_weights *weights, const bl_trained_set *set,
                                 bl_adapter_terms *terms, adapter_modules **out);
void adapter_modules_destroy(adapter_modules *modules); /* NULL is fine */

/* NULL without a set. */
const bl_module_gradients *adapter_modules_gradients(const adapter_modules *modules);

/* On `stream`, after a step's backward passes: sums over the ranks; on rank 0 *sum += squares. */
bl_status adapter_modules_reduce(adapter_modules *modules, bl_comm *world, bl_stream *stream,
                                 double *sum);
/* args: as for bl_adamw, without arrays. Then clears the gradients. */
bl_status adapter_modules_update(adapter_modules *modules, bl_stream *stream,
                                 const bl_adamw_args *args);
/* After every change of the weights: queues the copy of the head with which a GPU computes. */
bl_status adapter_modules_publish(const adapter_modules *modules, bl_stream *stream);

bool adapter_modules_have_table(const bl_trained_set *set, bl_model_table table);
/* Floats of each array before the terms: vectors in their order, then the embedding, then the head.
 * set: may be NULL or empty. */
int64_t adapter_modules_floats(const bl_model_config *config, const bl_trained_set *set);
int64_t adapter_modules_count(const adapter_modules *modules); /* with the terms */
/* The number of the model's tensors; the gradient of tensor i, NULL: tensor i is frozen. */
int64_t adapter_modules_tensors(const adapter_modules *modules);
const float *adapter_modules_gradient(const adapter_modules *modules, int64_t i,
                                      bl_arch_tensor *tensor);
/* Floats of an array before a trained tensor. */
int64_t adapter_modules_before(const bl_model_config *config, const bl_trained_set *set,
                               const bl_arch_tensor *tensor);
bl_status adapter_modules_append(const adapter_modules *modules, adapter_module_array array,
                                 bl_staging *staging, bl_safetensors_writer *writer);
bl_status adapter_modules_load(adapter_modules *modules, const bl_safetensors *file,
                               bl_staging *staging);

#endif
