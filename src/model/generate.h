/* SPDX-License-Identifier: Apache-2.0 */
/* generate.h -- continuing a prompt, one token after the other, with a key/value cache. */
#ifndef BALLAST_MODEL_GENERATE_H
#define BALLAST_MODEL_GENERATE_H

#include "linear/base.h"
#include "arch/lora.h"
#include "model/pass.h"
#include "model/weights.h"

typedef struct bl_generator bl_generator;

/* A cache for `capacity` tokens; long prompts go through the layers in pieces. lora_weights: all
 * layers' flat vectors one after the other (bl_lora_floats_before; device memory;
 * bl_lora_read_all),
 * none when the layout has no adapter. All arguments are borrowed. BL_EUSAGE when the model was
 * opened for fewer positions. */
bl_status bl_generator_create(bl_device *device, bl_stream *stream, const bl_model_weights *weights,
                              bl_base *base, const bl_lora_layout *lora, bl_tensor lora_weights,
                              int64_t capacity, bl_generator **out);
/* From now on with LoRA terms of the embedding and the head, on a CPU: [BL_MODEL_TABLES], borrowed,
 * of the adapter of create. Before the first token. */
bl_status bl_generator_use_terms(bl_generator *generator, const bl_table_term *terms);
void bl_generator_destroy(bl_generator *generator); /* NULL is fine */

/* Appends n tokens to the sequence; logits (vocab, host memory) of the token that follows the last
 * one, valid until the next call. BL_EUSAGE when the capacity is exceeded, BL_EINPUT for an id
 * outside the vocabulary: nothing is appended then. BL_ENUMERIC when a logit is not finite.
 * Synchronous. */
bl_status bl_generator_extend(bl_generator *generator, const int32_t *ids, int64_t n,
                              const float **logits);

/* Forgets all but the first n tokens of the sequence: the next extend continues those. n of more
 * than it has: nothing. */
void bl_generator_shorten(bl_generator *generator, int64_t n);

#endif
