/* SPDX-License-Identifier: Apache-2.0 */
/* terms_internal.h -- LoRA terms of the embedding and the head, for the trained state. All
 * terms are one range of trained_replicated (replicated_internal.h), which has their moments, sums
 * and updates. */
#ifndef BALLAST_TRAINED_TERMS_INTERNAL_H
#define BALLAST_TRAINED_TERMS_INTERNAL_H

#include "trained/terms.h"
#include "store/peft.h"

struct bl_adapter_terms {
    bl_device *device;
    const bl_lora_layout *layout;
    float *w, *grad; /* [layout->n_table_floats]; grad NULL: not trained */
    bl_tensor copy;  /* of w, in the dtype of activations; w itself where that is fp32 */
    bl_table_term term[BL_MODEL_TABLES];
};

/* Allocates the gradients, zeros. */
bl_status trained_terms_train(bl_adapter_terms *terms);
/* A table's gradients, as of bl_gradient_sink. */
void trained_terms_place(const bl_adapter_terms *terms, bl_model_table table,
                         bl_unit_gradients *out);
/* Sets the initial values; queues no copy. */
bl_status trained_terms_initialize(bl_adapter_terms *terms, uint64_t seed, bl_staging *staging);
/* Queues the copy, after every change of w. */
bl_status trained_terms_publish(const bl_adapter_terms *terms, bl_stream *stream);

static inline bool trained_is_table(int module)
{
    return module >= BL_PEFT_EMBEDDING;
}

/* Floats of a factor. */
int64_t trained_term_floats(const bl_lora_layout *layout, int module, bl_peft_factor factor);

/* Reads floats [begin, begin + n) of the tables' vector to host memory. */
typedef bl_status (*trained_term_read_fn)(void *user, int64_t begin, int64_t n, float *dst);
/* A factor in PEFT's order, dst, through `piece` of n_piece floats, at least r. */
bl_status trained_term_to_peft(const bl_lora_layout *layout, int module, bl_peft_factor factor,
                               trained_term_read_fn read, void *user, float *piece, int64_t n_piece,
                               float *dst);
/* A factor of the tables' vector `vector` (device memory) in PEFT's order. */
bl_status trained_terms_download(const bl_adapter_terms *terms, const float *vector, int module,
                                 bl_peft_factor factor, bl_staging *staging, float *dst);

#endif
