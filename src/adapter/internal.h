/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- the state of state.h, for the files that make it up. */
#ifndef BALLAST_ADAPTER_INTERNAL_H
#define BALLAST_ADAPTER_INTERNAL_H

#include "adapter/full.h"
#include "adapter/modules_internal.h"
#include "adapter/terms_internal.h"
#include "adapter/units_internal.h"
#include "device/staging.h"
#include "ops/optimizer.h"
#include "store/safetensors.h"

/* The state of full fine-tuning (full.c): `units` has the optimizer's state of the rank's trained
 * rows; w, m, v and grad of the state are NULL. Every rank holds all norms and biases, and makes
 * the same update of them. */
typedef struct adapter_full {
    const bl_model_config *config;
    const bl_model_weights *weights;
    const bl_base_layout *base_layout;
    bl_base *base;
    bl_adapter_full_bytes bytes;
    const bl_trained_set *set;
    adapter_spans spans;
    int64_t n_vectors;            /* all; NULL arrays: none is trained */
    float *vectors, *vector_grad; /* [n_vectors]; vectors are the pass's */
    float *vector_m, *vector_v;   /* of the trained ones, range by range */
    adapter_units *units;
    float *rows; /* of the unit whose gradients are open */
    bl_event *opened;
    bool reduces; /* several ranks */
    float *whole; /* a whole unit's gradients; two layers'; NULL: no matrix is trained */
    bl_weight_sink sink;
    bl_weight_updates updates;
    /* The checkpoint file that is being written: full_shards.c. */
    struct {
        bl_safetensors_writer *writer; /* NULL: no file, or complete */
        size_t spec[6];                /* of the file's tensors; of rows and of vectors */
        bl_status (*then)(void *user);
        void *user;
    } writing;
} adapter_full;

struct bl_adapter_state {
    adapter_full *trained; /* NULL: LoRA weights are */
    const bl_lora_layout *layout;
    bl_device *device;
    bl_comm *world;
    bl_stream *compute, *communication;
    int64_t n_layers, chunk; /* chunk: floats of a layer on this rank */
    bl_adapter_bytes bytes;  /* allocated */
    int64_t n_floats;        /* n_layers * chunk */
    float *w, *m, *v, *grad; /* [n_floats]; device memory */
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
    adapter_modules *modules; /* trained whole beside LoRA, terms among them; NULL: none */
    bl_adapter_terms *terms;  /* of the embedding and the head; NULL: none */
};

/* state.c: what both kinds of state have: events, sums, staging of BL_STAGING_BYTES. */
bl_status adapter_allocate_sums(bl_adapter_state *state);
/* shards.c: device memory to a file, and bytes [offset, offset + n_bytes) of a stored tensor to
 * device memory, through `staging`. */
bl_status adapter_append_bytes(bl_safetensors_writer *writer, bl_staging *staging,
                               const void *memory, size_t n_bytes);
bl_status adapter_load_bytes(bl_staging *staging, const bl_stored_tensor *tensor, int64_t offset,
                             size_t n_bytes, void *memory);
/* full_shards.c: bl_adapter_state_write_shard and read_shards of such a state. */
bl_status adapter_full_write_shard(bl_adapter_state *state, const char *path);
bl_status adapter_full_read_shards(bl_adapter_state *state, const char *dir, int n_ranks);
/* full_shards.c: the place of a tensor with rows in a layout of bl_model_layout_trained: its unit,
 * matrix, and the row of its part with which it begins. */
void adapter_full_place(const bl_model_config *config, const bl_arch_tensor *tensor, int64_t *unit,
                        int *matrix, int64_t *row);
/* full_gradients.c: bl_adapter_state_write_gradients of one, under the model's tensor names. */
bl_status adapter_full_write_gradients(bl_adapter_state *state, const char *path);
/* full.c */
void adapter_full_free(bl_adapter_state *state);
bl_status adapter_full_join(bl_adapter_state *state); /* on compute */
/* On communication: adds the rank's squares to *sum. */
bl_status adapter_full_reduce(bl_adapter_state *state, double *sum);
/* On compute: the update's kernels, on zeros where a layer's gradients are; args: as below. The
 * gradients, zero already, are cleared. */
bl_status adapter_full_warm_up(bl_adapter_state *state, bl_adamw_args args);
/* On compute: rounds all rows into the copy that layers compute with. */
bl_status adapter_full_round(bl_adapter_state *state);
/* On compute; args: as of bl_adamw, without its arrays. Gradients are zero after it. */
bl_status adapter_full_update(bl_adapter_state *state, const bl_adamw_args *args);

/* state.c: queues the compute copies of w and of a trained head on `compute`; later gathers see
 * them. After every change of these weights. */
bl_status bl_adapter_state_publish(bl_adapter_state *state);

#endif
