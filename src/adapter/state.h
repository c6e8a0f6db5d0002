/* SPDX-License-Identifier: Apache-2.0 */
/* state.h -- the trainable state of one rank: its shard of every layer's LoRA weights,
 * AdamW moments and gradients, all fp32.
 *
 * Rank i of n holds floats [i c, (i+1) c) of each layer's flat vector (arch/lora.h), c =
 * ceil(n_floats / n). Gradients arrive per layer and micro-batch, are reduce-scattered on the
 * communication stream while backward goes on, and are added to the shard in the order of
 * micro-batches: the same bits for any grouping. Weights are gathered layer by layer through a
 * ring, as the base is, in the dtype of activations: where that is not fp32, the shard has a copy
 * that is made anew whenever the weights have changed. */
#ifndef BALLAST_ADAPTER_STATE_H
#define BALLAST_ADAPTER_STATE_H

#include "comm/comm.h"
#include "device/device.h"
#include "ring/gather_ring.h"
#include "arch/lora.h"
#include "model/pass.h"
#include "adapter/modules.h"
#include "adapter/terms.h"

typedef struct bl_adapter_state bl_adapter_state;

/* Bytes of one rank's part of an adapter: in fp32 its weights, each of AdamW's moments and its
 * summed gradients (shard), the part of a layer's (part) and a whole layer's, of which there are
 * two (whole); in the dtype of activations a copy of the shard (0 where that is fp32) and the ring
 * of gathered layers; staging in host memory, the rest in device memory. */
typedef struct bl_adapter_bytes {
    int64_t shard, part, whole, copy, ring, staging;
} bl_adapter_bytes;
bl_adapter_bytes bl_adapter_state_measure(bl_dtype act, const bl_lora_layout *layout,
                                          int64_t n_layers, int n_ranks, int ring_depth);

/* Everything zero; bl_adapter_state_measure returns the sizes. device, layout, comm, streams and
 * timeline (may be NULL; BL_LANE_LORA) are borrowed. */
bl_status bl_adapter_state_create(bl_device *device, bl_comm *world, bl_stream *compute,
                                  bl_stream *communication, bl_timeline *timeline,
                                  const bl_lora_layout *layout, int64_t n_layers, int ring_depth,
                                  bl_adapter_state **out);
/* As create, of an adapter that is not trained: it has weights alone. bl_adapter_state_adapter,
 * initialize and read_peft work on it, as destroy does; no other function. bl_adapter_bytes: shard
 * (once), copy, ring and staging. */
bl_status bl_adapter_state_create_frozen(bl_device *device, bl_comm *world, bl_stream *compute,
                                         bl_stream *communication, bl_timeline *timeline,
                                         const bl_lora_layout *layout, int64_t n_layers,
                                         int ring_depth, bl_adapter_state **out);
/* Adds tensors that are trained whole on every rank to gradients, sums, updates and checkpoints:
 * modules (set NULL: none) and the layout's terms of the embedding and the head. At least one.
 * Borrowed: set, and weights, after bl_adapter_modules_prepare. */
bl_status bl_adapter_state_add_modules(bl_adapter_state *state, bl_model_weights *weights,
                                       const bl_trained_set *set);
/* After both streams are idle; NULL is fine. */
void bl_adapter_state_destroy(bl_adapter_state *state);

/* A fresh adapter (A random, B zero), or one read from a PEFT folder. Synchronous; each rank fills
 * its own shard. */
bl_status bl_adapter_state_initialize(bl_adapter_state *state, uint64_t seed);
bl_status bl_adapter_state_read_peft(bl_adapter_state *state, const bl_model_config *config,
                                     const char *dir);

/* What a pass takes micro-batches through; dropout is left zero. Where it puts their gradients, and
 * the sum of their losses (one double, device memory): until update. All live as long as the
 * state. */
bl_pass_adapter bl_adapter_state_adapter(const bl_adapter_state *state);
const bl_gradient_sink *bl_adapter_state_sink(const bl_adapter_state *state);
double *bl_adapter_state_loss_sum(const bl_adapter_state *state);

/* Returns when the queued work of the step has run, its gradients are summed and its spans can be
 * collected. */
bl_status bl_adapter_state_join(bl_adapter_state *state);

/* After join: sums[0..1] = loss sum and squared gradient norm over all ranks, which are returned,
 * too. lanes[BL_N_LANES], of this rank, become those of all: stall_s the longest, n_bytes the sum;
 * busy_s stays. One collective. */
bl_status bl_adapter_state_reduce(bl_adapter_state *state, double *loss_sum, double *grad_norm,
                                  bl_lane_totals *lanes);

/* After join, with gradients that are all zero: runs what reduce and update run, to no effect.
 * Gradients, sums and the buffers of a layer's gradients are zero after it. One collective. */
bl_status bl_adapter_state_warm_up(bl_adapter_state *state);

/* Queues clipping, AdamW with step number `step` (from 1) and clearing the gradients and the loss
 * sum for the next step. */
bl_status bl_adapter_state_update(bl_adapter_state *state, int64_t step, double lr, double beta1,
                                  double beta2, double eps, double weight_decay,
                                  double max_grad_norm);

/* In the metadata of a file of gradients: only such a file is replaced by another one. */
#define BL_GRADIENTS_MARK "ballast-gradients"

/* Collective; a layer at a time is gathered, and only rank 0 writes: the summed gradients of the
 * step under way, under the adapter's tensor names, into the safetensors file `path`. */
bl_status bl_adapter_state_write_gradients(bl_adapter_state *state, const char *path);

/* shards.c: the state as a checkpoint keeps it, a file for each rank, without
 * communication. */

/* Upper bound of a checkpoint's bytes, without the files' headers: LoRA weights and both of AdamW's
 * moments of all ranks, those of modules_to_save and of terms of the embedding and the head once,
 * and the adapter, all in fp32. modules may be NULL. */
int64_t bl_adapter_checkpoint_bytes(const bl_lora_layout *layout, const bl_model_config *config,
                                    const bl_trained_set *modules);

enum { BL_SHARD_NAME_BYTES = 64 };
/* "state-00000-of-00002.safetensors" */
void bl_adapter_shard_name(int rank, int n_ranks, char name[BL_SHARD_NAME_BYTES]);
/* Weights and moments of this rank into `path`; after compute is idle. */
bl_status bl_adapter_state_write_shard(bl_adapter_state *state, const char *path);
/* This rank's part of the files that n_ranks ranks have written into `dir`. BL_ECHECKPOINT: one of
 * them is not such a file. */
bl_status bl_adapter_state_read_shards(bl_adapter_state *state, const char *dir, int n_ranks);
/* Writes the weights in the files that n_ranks ranks have written into `shards` as a PEFT adapter
 * into `dir`, without communication. Errors: as read_shards, and those of bl_peft_write. */
bl_status bl_adapter_export_shards(const bl_lora_layout *layout, const bl_saved_modules *modules,
                                   const bl_model_config *config, const char *shards, int n_ranks,
                                   const char *dir, const char *base_model, bool bf16);

#endif
