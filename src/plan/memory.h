/* SPDX-License-Identifier: Apache-2.0 */
/* memory.h -- the memory that a run will take, added up from the functions whose sizes it is
 * allocated with; docs/memory.md explains the rows. */
#ifndef BALLAST_PLAN_MEMORY_H
#define BALLAST_PLAN_MEMORY_H

#include "model/pass.h"
#include "plan/input.h"

/* Bytes, of a rank unless it says otherwise. */
typedef struct bl_memory_ledger {
    int64_t frozen, ring, adapter, activations, batches, scratch;
    int64_t embedding, other; /* of a process */
    int64_t total;            /* of a process with all its ranks, at its peak */
    int64_t host;             /* of frozen: what is stored in the host tier */
    int64_t disk;             /* page files; not in total */
} bl_memory_ledger;

/* With the base placed and activations saved (bl_save) as given. BL_ENOMEM. */
bl_status bl_plan_predict_memory(const bl_plan_input *input, const bl_llama_placement *placement,
                                 unsigned save, bl_memory_ledger *out);

/* The sizes of the pass. activations and timeline are a rank's own: NULL here. */
bl_pass_options bl_plan_pass_options(const bl_plan_input *input, unsigned save);

/* Ranks of a shard group. */
int bl_plan_n_shards(const bl_train_config *config, const bl_topology *topology);

/* What train/batch.c and train/adapter_state.c allocate, bytes: a micro-batch of T_max tokens (in
 * device memory, and the same in host memory), and one rank's part of an adapter with its AdamW state, gradients and ring. */
int64_t bl_plan_micro_batch_bytes(int64_t T_max);
int64_t bl_plan_adapter_bytes(bl_device_kind kind, const bl_lora_layout *layout, int64_t n_layers,
                              int n_ranks, int ring_depth);

#endif
