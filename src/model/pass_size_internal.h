/* SPDX-License-Identifier: Apache-2.0 */
/* pass_size_internal.h -- the buffers of a pass and their sizes. For pass.c alone. */
#ifndef BALLAST_MODEL_PASS_SIZE_INTERNAL_H
#define BALLAST_MODEL_PASS_SIZE_INTERNAL_H

#include "model/feed_internal.h"
#include "model/pass.h"

/* Bytes per row of a layer's saved tensors: `light` of some layers, `all` of the others. */
typedef struct model_saved_rows {
    const bl_pass_options *options;
    int64_t n_layers;
    bl_layer_kinds kinds;
    size_t light[BL_LAYER_KINDS], all[BL_LAYER_KINDS];
} model_saved_rows;
model_saved_rows model_pass_saved_rows(const bl_model_config *config,
                                       const bl_pass_options *options);

/* The row_bytes of the stacks: user is the bytes of a row (size_t), or model_saved_rows. */
size_t model_input_row_bytes(const void *user, int64_t entry);
size_t model_saved_row_bytes(const void *user, int64_t layer);

/* The slots of a stack (offload/spill.h) in device memory, and its entries in host memory. */
typedef struct model_stack_size {
    int64_t n_entries, n_slots, n_host;
    int64_t slots_bytes, host_bytes;
} model_stack_size;

typedef struct model_pass_size {
    model_stack_size inputs, saved;
    int64_t rows; /* of a group */
    bl_feed_size feed;
    int64_t d, logits, block, workspace; /* bytes; workspace: block's, then prepared weights */
    int64_t visit;   /* of block, of each micro-batch but the first (bl_block_visit_bytes) */
    int64_t transit; /* one of two layer inputs of all companions */
    int64_t terms;   /* model_term_space */
    int64_t values;  /* a twin's: log-probabilities, then weights */
} model_pass_size;

/* Micro-batches of a group, companions among them. */
int model_pass_max_micro(const bl_pass_options *options);

/* Of the layers of a kind, with the options' mode; without the tables. */
bl_block_dims model_pass_dims(const bl_model_config *config, bl_layer_kind kind,
                              const bl_pass_options *options);
model_pass_size model_pass_measure(const bl_model_config *config, const bl_pass_options *options);

/* All device memory; the host memory of both stacks. */
int64_t model_pass_device_bytes(const model_pass_size *size);
int64_t model_pass_stacks_host_bytes(const model_pass_size *size);

#endif
