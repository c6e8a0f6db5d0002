/* SPDX-License-Identifier: Apache-2.0 */
/* pass_size_internal.h -- the buffers of a pass and their sizes. For pass.c alone. */
#ifndef BALLAST_MODEL_PASS_SIZE_INTERNAL_H
#define BALLAST_MODEL_PASS_SIZE_INTERNAL_H

#include "model/feed_internal.h"
#include "model/pass.h"

/* The slots of a stack (offload/spill.h) in device memory, and its entries in host memory. */
typedef struct model_stack_size {
    int64_t n_entries, n_slots, n_host, entry_bytes;
} model_stack_size;

typedef struct model_pass_size {
    model_stack_size inputs, saved;
    bl_feed_size feed;
    int64_t d, logits, block, workspace; /* bytes; workspace: block's, then prepared weights */
} model_pass_size;

/* Of a layer, with the options' mode; without the tables. */
bl_block_dims model_pass_dims(const bl_model_config *config, const bl_pass_options *options);
model_pass_size model_pass_measure(const bl_model_config *config, const bl_pass_options *options);

/* In device memory, and in host memory. */
int64_t model_stack_bytes(const model_stack_size *size);
int64_t model_stack_host_bytes(const model_stack_size *size);

/* All device memory; the host memory of both stacks. */
int64_t model_pass_device_bytes(const model_pass_size *size);
int64_t model_pass_stacks_host_bytes(const model_pass_size *size);

#endif
