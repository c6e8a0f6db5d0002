/* SPDX-License-Identifier: Apache-2.0 */
/* terms.h -- LoRA terms of the embedding and the head: whole on every rank, in fp32, with a copy in
 * the dtype of activations if that is not fp32. */
#ifndef BALLAST_TRAINED_TERMS_H
#define BALLAST_TRAINED_TERMS_H

#include "arch/lora.h"
#include "device/staging.h"
#include "model/pass.h"
#include "store/hf_model.h"

typedef struct bl_adapter_terms bl_adapter_terms;

/* The layout must have such terms; the weights are zeros. Borrowed: device and layout. */
bl_status bl_adapter_terms_create(bl_device *device, const bl_lora_layout *layout,
                                  bl_adapter_terms **out);
void bl_adapter_terms_destroy(bl_adapter_terms *terms); /* NULL is fine */

/* [BL_MODEL_TABLES], for a pass or a generator; NULL of NULL. Lives as long as `terms`. */
const bl_table_term *bl_adapter_terms_list(const bl_adapter_terms *terms);

/* Reads the adapter in `dir` and queues the copy on `stream`. BL_EINPUT. */
bl_status bl_adapter_terms_read(bl_adapter_terms *terms, const bl_model_config *config,
                                const char *dir, bl_staging *staging, bl_stream *stream);

/* PEFT may also write the frozen weights of these modules (save_embedding_layers), and loads them
 * in place of the model's. BL_EINPUT if they differ from the model's by more than rounding to bf16.
 * An adapter without them is accepted. */
bl_status bl_adapter_terms_check_base(const bl_hf_model *files, const bl_model_config *config,
                                      const char *dir);

#endif
