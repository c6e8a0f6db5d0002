/* SPDX-License-Identifier: Apache-2.0 */
/* replicated_internal.h -- trained tensors that every rank has whole, in fp32, with AdamW's moments
 * and gradients: norms and biases of full fine-tuning; norms, embedding and head that are trained
 * together with LoRA (PEFT's modules_to_save); LoRA terms of the embedding and the head
 * (terms_internal.h). Every rank makes the same update. The pass reads the weights in place:
 * vectors and tables of bl_model_weights.
 *
 * Gradients are summed over the micro-batches of each rank, and once per step over the ranks. Norms
 * and biases have no weight decay, as in transformers' Trainer. */
#ifndef BALLAST_TRAINED_REPLICATED_INTERNAL_H
#define BALLAST_TRAINED_REPLICATED_INTERNAL_H

#include "trained/terms.h"
#include "comm/comm.h"
#include "device/staging.h"
#include "model/pass.h"
#include "model/weights.h"
#include "ops/optimizer.h"
#include "store/safetensors.h"

typedef struct trained_replicated trained_replicated;

/* In the order of a checkpoint's tensors. */
enum { REPLICATED_M, REPLICATED_V, REPLICATED_W, REPLICATED_ARRAYS };

typedef struct trained_replicated_options {
    bl_model_weights *weights;
    const bl_trained_set *set; /* NULL: none */
    /* Whether tables of the set are part of this object: bl_adapter_modules_prepare has replaced
     * them. false: they are rows of the base. */
    bool has_tables;
    bl_adapter_terms *terms; /* NULL: none */
    const char *label;       /* names the sums in errors */
} trained_replicated_options;

/* Moments and gradients begin as zeros. Borrows all that options point to. */
bl_status trained_replicated_create(const trained_replicated_options *options,
                                    trained_replicated **out);
void trained_replicated_destroy(trained_replicated *r); /* NULL is fine */

/* NULL is fine in the functions that follow: there are no such tensors. */

/* Sets the destinations of a unit's gradients, as bl_gradient_sink.begin. */
void trained_replicated_place(const trained_replicated *r, int64_t unit, bl_unit_gradients *out);
/* On `stream`, after a step's backward passes: sums over the ranks; on rank 0 *sum += squares. */
bl_status trained_replicated_reduce(trained_replicated *r, bl_comm *world, bl_stream *stream,
                                    double *sum);
/* args: as for bl_adamw, without arrays. Then clears the gradients. */
bl_status trained_replicated_update(trained_replicated *r, bl_stream *stream,
                                    const bl_adamw_args *args);
bl_status trained_replicated_clear(trained_replicated *r, bl_stream *stream);
/* After every change of the weights: queues the copy of the head with which a GPU computes. */
bl_status trained_replicated_publish(const trained_replicated *r, bl_stream *stream);
/* Floats of each array. */
int64_t trained_replicated_floats(const trained_replicated *r);

/* NULL without a set. */
const bl_model_config *trained_replicated_config(const trained_replicated *r);
const bl_trained_set *trained_replicated_set(const trained_replicated *r);
/* The gradient of a tensor of the set that is not stored as rows of the base. */
const float *trained_replicated_gradient(const trained_replicated *r, const bl_arch_tensor *tensor);
/* Puts array `array` into tensor specs[index] of a file, or reads it from a stored tensor of
 * trained_replicated_floats. */
bl_status trained_replicated_put(const trained_replicated *r, int array, bl_staging *staging,
                                 bl_safetensors_writer *writer, size_t index);
bl_status trained_replicated_load(trained_replicated *r, int array, bl_staging *staging,
                                  const bl_stored_tensor *tensor);

bool trained_set_has_table(const bl_trained_set *set, bl_model_table table);
/* Floats of the trained vectors of a set, which may be NULL or empty; and with the tables, vectors
 * in their order, then the embedding, then the head. */
int64_t trained_vector_floats(const bl_trained_set *set);
int64_t trained_modules_floats(const bl_model_config *config, const bl_trained_set *set);
/* Floats of an array before a trained tensor. */
int64_t trained_modules_before(const bl_model_config *config, const bl_trained_set *set,
                               const bl_arch_tensor *tensor);

#endif
