/* SPDX-License-Identifier: Apache-2.0 */
/* made_weights.h -- a model of any shape without a checkpoint: random weights of the size that real
 * ones have, made in memory. */
#ifndef BALLAST_BENCH_COMMAND_MADE_WEIGHTS_H
#define BALLAST_BENCH_COMMAND_MADE_WEIGHTS_H

#include "model/weights.h"

/* Embedding and head in bf16; the table in memory that repeats every few MiB, so that it takes no
 * more. Close with bl_made_model_close. n_positions: of the RoPE tables. format: fp8_row, fp8_block
 * or stored (bf16). */
bl_status bl_made_model_open(const bl_model_config *config, bl_base_format format,
                             int64_t n_positions, bl_model **out);
void bl_made_model_close(bl_model *model); /* NULL is fine */

/* Shard `shard` of n_shards, as bl_model_weights_load would place it; device and host tier. `model`
 * is borrowed. */
bl_status bl_made_weights_create(const bl_model *model, bl_device *device, int shard, int n_shards,
                                 const bl_placement *placement, bl_model_weights **out);

/* Norms for all layers of the model, all of them one; device memory, the caller's to free. */
bl_status bl_made_vectors_create(const bl_model *model, bl_device *device, float **out);

#endif
