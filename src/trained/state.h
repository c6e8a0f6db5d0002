/* SPDX-License-Identifier: Apache-2.0 */
/* state.h -- the trainable state of one rank: its shard of every layer's LoRA weights,
 * AdamW moments and gradients, all fp32.
 *
 * Rank i of n holds floats [i c, (i+1) c) of each layer's flat vector (arch/lora.h), c = ceil(its
 * floats / n). Gradients arrive per layer and micro-batch, are reduce-scattered on the
 * communication stream while backward goes on, and are added to the shard in the order of
 * micro-batches: the same bits for any grouping. Weights are gathered layer by layer through a
 * ring, as the base is, in the dtype of activations: where that is not fp32, the shard has a copy
 * that is rewritten whenever the weights have changed. */
#ifndef BALLAST_TRAINED_STATE_H
#define BALLAST_TRAINED_STATE_H

#include "comm/comm.h"
#include "device/device.h"
#include "offload/gather_ring.h"
#include "arch/lora.h"
#include "model/pass.h"
#include "trained/modules.h"
#include "trained/terms.h"

typedef struct bl_trained_state bl_trained_state;

/* Bytes of one rank's part of an adapter: in fp32 its weights, each of AdamW's moments and its
 * summed gradients (shard), the part of the largest layer's (part) and the whole of it, of which
 * there are two (whole); in the dtype of activations a copy of the shard (0 where that is fp32) and
 * the ring of gathered layers; staging in host memory, the rest in device memory. */
typedef struct bl_adapter_bytes {
    int64_t shard, part, whole, copy, ring, staging;
} bl_adapter_bytes;
bl_adapter_bytes bl_trained_state_measure(bl_dtype act, const bl_lora_layout *layout,
                                          int64_t n_layers, int n_ranks, int ring_depth);

/* Bytes of one rank, device memory, of tensors that every rank trains whole: modules_to_save (set)
 * and LoRA terms of the embedding and the head (layout); NULL: none. weights: of tables and terms
 * in fp32, norms being the model's; the terms' copy where `act` is not fp32, and a GPU's bf16 copy
 * of a trained head. */
typedef struct bl_replicated_bytes {
    int64_t weights, moments, gradients;
} bl_replicated_bytes;
bl_replicated_bytes bl_trained_replicated_measure(const bl_model_config *config,
                                                  const bl_trained_set *set,
                                                  const bl_lora_layout *layout, bl_device_kind kind,
                                                  bl_dtype act);

/* What a state works with. All members are borrowed. */
typedef struct bl_trained_context {
    bl_device *device;
    bl_comm *world; /* of all ranks */
    bl_stream *compute, *communication;
    bl_timeline *timeline; /* BL_LANE_LORA; may be NULL */
} bl_trained_context;

/* Everything zero; bl_trained_state_measure returns the sizes. Borrows layout. */
bl_status bl_trained_state_create(const bl_trained_context *context, const bl_lora_layout *layout,
                                  int64_t n_layers, int ring_depth, bl_trained_state **out);
/* As create, of an adapter that is not trained: it has weights alone. bl_trained_state_adapter,
 * initialize and read_peft work on it, as destroy does; no other function. bl_adapter_bytes: shard
 * (once), copy, ring and staging. */
bl_status bl_trained_state_create_frozen(const bl_trained_context *context,
                                         const bl_lora_layout *layout, int64_t n_layers,
                                         int ring_depth, bl_trained_state **out);
/* Adds tensors that are trained whole on every rank to gradients, sums, updates and checkpoints:
 * modules (set NULL: none) and the layout's terms of the embedding and the head. At least one.
 * Borrowed: set, and weights, after bl_adapter_modules_prepare. */
bl_status bl_trained_state_add_modules(bl_trained_state *state, bl_model_weights *weights,
                                       const bl_trained_set *set);
/* After both streams are idle; NULL is fine. */
void bl_trained_state_destroy(bl_trained_state *state);

/* A fresh adapter (A random, B zero), or one read from a PEFT directory. Synchronous; each rank
 * fills its own shard. */
bl_status bl_trained_state_initialize(bl_trained_state *state, uint64_t seed);
bl_status bl_trained_state_read_peft(bl_trained_state *state, const bl_model_config *config,
                                     const char *dir);

/* The adapter for a pass; dropout is left zero. The sink of its gradients, and the sum of its
 * losses (one double, device memory), of the step until update. All are valid as long as the
 * state. */
bl_pass_adapter bl_trained_state_adapter(const bl_trained_state *state);
const bl_gradient_sink *bl_trained_state_sink(const bl_trained_state *state);
double *bl_trained_state_loss_sum(const bl_trained_state *state);

/* Returns when the queued work of the step has run, its gradients are summed and its spans can be
 * collected. */
bl_status bl_trained_state_join(bl_trained_state *state);

/* After join: sums[0..1] = loss sum and squared gradient norm over all ranks, which are returned,
 * too. lanes[BL_N_LANES], of this rank, become those of all: n_bytes the sum, stall_s those of the
 * rank that stalled longest, the first of several; busy_s stays. One collective. */
bl_status bl_trained_state_reduce(bl_trained_state *state, double *loss_sum, double *grad_norm,
                                  bl_lane_totals *lanes);

/* After join, with gradients that are all zero: runs what reduce and update run, to no effect.
 * Gradients, sums and the buffers of a layer's gradients are zero after it. One collective. */
bl_status bl_trained_state_warm_up(bl_trained_state *state);

/* Queues clipping, AdamW with step number `step` (from 1) and clearing the gradients and the loss
 * sum for the next step. */
bl_status bl_trained_state_update(bl_trained_state *state, int64_t step, double lr, double beta1,
                                  double beta2, double eps, double weight_decay,
                                  double max_grad_norm);

/* Queues: gradients, their sums and the loss sum of the current step are zero, as after update.
 * LoRA's state. */
bl_status bl_trained_state_clear(bl_trained_state *state);
/* The weights as passes compute with them: all layers' flat vectors one after the other, device
 * memory, the state's. LoRA's state of one rank. */
bl_tensor bl_trained_state_weights(const bl_trained_state *state);

/* In the metadata of a file of gradients: only such a file is replaced by another one. */
#define BL_GRADIENTS_MARK "ballast-gradients"

/* Collective; a layer at a time is gathered, and only rank 0 writes: the summed gradients of the
 * current step, under the adapter's tensor names, into the safetensors file `path`. */
bl_status bl_trained_state_write_gradients(bl_trained_state *state, const char *path);

/* ---- checkpoint.c: the state as a checkpoint keeps it, a file for each rank, without
 * communication ---- */

/* Upper bound of a checkpoint's bytes, without the files' headers: LoRA weights and both of AdamW's
 * moments of all ranks, those of modules_to_save and of terms of the embedding and the head once,
 * and the adapter, all in fp32. modules may be NULL. */
int64_t bl_adapter_checkpoint_bytes(const bl_lora_layout *layout, const bl_model_config *config,
                                    const bl_trained_set *modules);

enum { BL_SHARD_NAME_BYTES = 64 };
/* "state-00000-of-00002.safetensors" */
void bl_trained_shard_name(int rank, int n_ranks, char name[BL_SHARD_NAME_BYTES]);
/* With compute idle: begins to write the rank's checkpoint file, with the state after the last
 * update. In full fine-tuning it returns, and the next steps run meanwhile; each unit's next update
 * waits until the unit is written. LoRA's file is written when it returns. When the file is
 * complete and durable, `then` runs, in full fine-tuning on another thread; its failure counts as
 * one of the file. One file at a time. BL_EIO, BL_ELIMIT: the file cannot be created. */
bl_status bl_trained_state_begin_shard(bl_trained_state *state, const char *path,
                                       bl_status (*then)(void *user), void *user);
/* Whether `then` has run, or something has failed. */
bool bl_trained_state_shard_is_done(const bl_trained_state *state);
/* Progress of the file. has_waiting: some units can be written only after an update that is due in
 * their next visit. left_s: estimated time until all units are written, by the rate so far; 0: all
 * are. writing_s: from the beginning to the newest write; idle_s: since then. */
typedef struct bl_trained_shard_progress {
    bool has_waiting;
    double left_s, writing_s, idle_s;
} bl_trained_shard_progress;
bl_trained_shard_progress bl_trained_state_shard_progress(const bl_trained_state *state);
/* Makes the pending updates of the checkpoint's step, waits for the file and `then`, and returns
 * their first failure. BL_OK if no file was begun. */
bl_status bl_trained_state_end_shard(bl_trained_state *state);
/* In place of end_shard after a failure of the run: stops writing. The file may be incomplete. */
void bl_trained_state_drop_shard(bl_trained_state *state);
/* The host stream that writes the file: later calls on the stream run after `then`.
 * NULL: LoRA's state, which has none. */
bl_stream *bl_trained_state_behind(const bl_trained_state *state);

/* Weights and moments of this rank into `path`; after compute is idle. */
bl_status bl_trained_state_write_shard(bl_trained_state *state, const char *path);
/* This rank's part of the files that n_ranks ranks have written into `dir`. BL_ECHECKPOINT: one of
 * them is not such a file. */
bl_status bl_trained_state_read_shards(bl_trained_state *state, const char *dir, int n_ranks);
/* Writes the weights in the files that n_ranks ranks have written into `shards` as a PEFT adapter
 * into `dir`, without communication. Errors: as read_shards, and those of bl_peft_write. */
bl_status bl_adapter_export_shards(const bl_lora_layout *layout, const bl_saved_modules *modules,
                                   const bl_model_config *config, const char *shards, int n_ranks,
                                   const char *dir, const char *base_model, bool bf16);

#endif
