/* SPDX-License-Identifier: Apache-2.0 */
/* adapter_state.h -- the trainable state of one rank: its shard of every layer's LoRA weights, AdamW moments
 * and gradients.
 *
 * Rank i of n holds floats [i c, (i+1) c) of each layer's flat vector (llama/lora.h), c = ceil(n_floats / n).
 * Gradients arrive per layer and micro-batch, are reduce-scattered on the communication stream while backward
 * goes on, and are added to the shard in the order of micro-batches: the same bits for any grouping. Weights
 * are gathered layer by layer through a ring, as the base is. */
#ifndef BALLAST_TRAIN_ADAPTER_STATE_H
#define BALLAST_TRAIN_ADAPTER_STATE_H

#include "comm/comm.h"
#include "device/staging.h"
#include "comm/gather_ring.h"
#include "llama/lora.h"
#include "model/pass.h"

typedef struct bl_adapter_state {
    const bl_lora_layout *layout;
    bl_device *device;
    bl_comm *world;
    bl_stream *compute, *communication;
    int64_t n_layers, chunk;  /* chunk: floats of a layer on this rank */
    float *w, *m, *v, *grad;  /* [n_layers * chunk]; device memory */
    float *full[2], *partial; /* a layer's whole gradient, twice; this rank's part of its sum */
    bl_event *written[2], *reduced[2]; /* full[i] complete / free again */
    bl_event *joined;
    int turn;
    double *
        sums; /* device memory: loss sum, sum of squared gradients; then what the ranks report of their lanes */
    bl_twin *sums_twin;  /* of sums */
    double *clip;        /* [2], device memory: norm, clipping scale */
    bl_staging *staging; /* for what is read into the shards and written from them */
    bl_timeline *timeline;
    bl_gather_ring *ring;
    bl_gradient_sink sink;
} bl_adapter_state;

/* Everything zero; bl_plan_adapter_bytes says how much. layout, comm, streams and timeline (may be NULL; BL_LANE_LORA) are borrowed. */
bl_status bl_adapter_state_create(bl_device *device, bl_comm *world, bl_stream *compute,
                                  bl_stream *communication, bl_timeline *timeline,
                                  const bl_lora_layout *layout, int64_t n_layers, int ring_depth,
                                  bl_adapter_state **out);
/* After both streams are idle; NULL is fine. */
void bl_adapter_state_destroy(bl_adapter_state *state);

/* A fresh adapter (A random, B zero), or one read from a PEFT folder. Synchronous; each rank fills its own
 * shard. */
bl_status bl_adapter_state_initialise(bl_adapter_state *state, uint64_t seed);
bl_status bl_adapter_state_read_peft(bl_adapter_state *state, const bl_llama_config *config,
                                     const char *dir);

/* Returns when what is queued of the step has run, its gradients are summed and its spans can be collected. */
bl_status bl_adapter_state_join(bl_adapter_state *state);

/* After join: sums[0..1] = loss sum and squared gradient norm over all ranks, which are returned, too. lanes[BL_N_LANES], of this rank,
 * become those of all: stall_s the longest, n_bytes the sum; busy_s stays. One collective. */
bl_status bl_adapter_state_reduce(bl_adapter_state *state, double *loss_sum, double *grad_norm,
                                  bl_lane_totals *lanes);

/* Queues clipping, AdamW with step number `step` (from 1) and clearing the gradients and the loss sum for the
 * next step. */
bl_status bl_adapter_state_update(bl_adapter_state *state, int64_t step, double lr, double beta1,
                                  double beta2, double eps, double weight_decay,
                                  double max_grad_norm);

/* Collective; a layer at a time is gathered, and only rank 0 writes. The adapter goes into the folder `dir`; the summed gradients of
 * the step under way go, under the adapter's tensor names, into the safetensors file `path`. */
bl_status bl_adapter_state_write_peft(bl_adapter_state *state, const bl_llama_config *config,
                                      const char *dir, const char *base_model, bool bf16);
bl_status bl_adapter_state_write_gradients(bl_adapter_state *state, const char *path);

#endif
