/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- the state of state.h, for the files that make it up. */
#ifndef BALLAST_ADAPTER_INTERNAL_H
#define BALLAST_ADAPTER_INTERNAL_H

#include "device/staging.h"
#include "adapter/state.h"

struct bl_adapter_state {
    const bl_lora_layout *layout;
    bl_device *device;
    bl_comm *world;
    bl_stream *compute, *communication;
    int64_t n_layers, chunk; /* chunk: floats of a layer on this rank */
    bl_adapter_bytes bytes;  /* allocated */
    float *w, *m, *v, *grad; /* [n_layers * chunk]; device memory */
    /* Gathered by the ring: w, rounded to the dtype of activations; w itself where that is fp32. */
    bl_tensor compute_copy;
    float *full[2], *partial; /* a layer's whole gradient, twice; this rank's part of its sum */
    bl_event *written[2], *reduced[2]; /* full[i] complete / free again */
    bl_event *joined;
    int turn;
    /* device memory: loss sum, sum of squared gradients; then the ranks' reports of their lanes */
    double *sums;
    bl_twin *sums_twin;  /* of sums */
    double *clip;        /* [2], device memory: norm, clipping scale */
    bl_staging *staging; /* for reads into the shards and writes from them */
    bl_timeline *timeline;
    bl_gather_ring *ring;
    bl_gradient_sink sink;
};

/* state.c: queues the compute copy of w on `compute`; later gathers see it. After every change of
 * w. */
bl_status bl_adapter_state_publish(bl_adapter_state *state);

#endif
