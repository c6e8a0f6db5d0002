/* SPDX-License-Identifier: Apache-2.0 */
/* internal.h -- the state of state.h, for the files that make it up. */
#ifndef BALLAST_TRAINED_INTERNAL_H
#define BALLAST_TRAINED_INTERNAL_H

#include "trained/full.h"
#include "trained/replicated_internal.h"
#include "trained/terms_internal.h"
#include "trained/units_internal.h"
#include "device/staging.h"
#include "ops/optimizer.h"
#include "store/safetensors.h"

/* The state of full fine-tuning (full.c): `units` has the optimizer's state of the rank's trained
 * rows; w, m, v and grad of the state are NULL. Every rank holds all norms and biases, and makes
 * the same update of them. */
typedef struct trained_full {
    const bl_model_config *config;
    bl_model_weights *weights;
    const bl_base_layout *base_layout;
    bl_base *base;
    bl_trained_full_bytes bytes;
    const bl_trained_set *set;
    trained_spans spans;
    trained_units *units;
    bool reduces; /* several ranks */
    bl_weight_updates updates;
} trained_full;

/* Arrays of a checkpoint's file, in the order of trained_array, and behind them the replicated
 * ones; their names are in checkpoint.c. */
typedef enum trained_file_kind {
    TRAINED_FILE_LORA,
    TRAINED_FILE_STACKED, /* LoRA's in a stacked layout */
    TRAINED_FILE_FULL,
    TRAINED_FILE_KINDS
} trained_file_kind;
enum {
    TRAINED_FILE_REPLICATED = TRAINED_GRAD,
    TRAINED_FILE_ARRAYS = TRAINED_FILE_REPLICATED + REPLICATED_ARRAYS
};
extern const char *const trained_array_names[TRAINED_FILE_KINDS][TRAINED_FILE_ARRAYS];

/* Part of a unit's whole gradient: n_ranks * n floats from `offset` on, of which each rank sums n.
 * Pieces of the sum are added to the rank's rows; the rest is frozen. */
typedef struct trained_share {
    int64_t offset, n, first, n_pieces;
} trained_share;
typedef struct trained_piece {
    int64_t from, n, to; /* floats: of the sum, of the rows */
} trained_piece;
typedef struct trained_shares {
    int n;
    trained_share at[BL_LAYER_MATRICES];
} trained_shares;

struct bl_trained_state {
    trained_full *trained; /* NULL: LoRA weights are */
    const bl_lora_layout *layout;
    bl_device *device;
    bl_comm *world;
    bl_stream *compute, *communication;
    int64_t n_layers;
    bl_adapter_bytes bytes;  /* allocated */
    int64_t n_floats;        /* of all layers on this rank */
    float *w, *m, *v, *grad; /* [n_floats]; device memory */
    /* Gathered by the ring: w, rounded to the dtype of activations; w itself where that is fp32. */
    bl_tensor compute_copy;
    bl_event *joined;
    /* gradients.c. The sink's calls for this kind of state; open and close may be NULL; whole is
     * NULL where a unit has no shares. */
    bl_gradient_sink sink;
    bl_status (*open)(bl_trained_state *state, int64_t unit, bl_stream *stream);
    bl_status (*begin)(bl_trained_state *state, int64_t unit, bl_stream *stream, float *whole,
                       bl_unit_gradients *out);
    bl_status (*close)(bl_trained_state *state, int64_t unit, bl_stream *stream);
    const char *label;      /* names a unit's sums in errors */
    float *rows;            /* to which pieces are added */
    int64_t n_shared;       /* units with shares; 0: gradients are added to the rows themselves */
    trained_shares *shares; /* [n_shared] */
    int64_t n_pieces;
    trained_piece *pieces;
    float *whole[2], *partial; /* a layer's whole gradient, twice; this rank's part of its sum */
    int64_t whole_bytes;       /* of both */
    bl_event *opened, *written[2], *reduced[2]; /* whole[i] complete / free again */
    int turn;
    /* device memory: loss sum, sum of squared gradients; then the ranks' reports of their lanes */
    double *sums;
    bl_twin *sums_twin;  /* of sums */
    double *clip;        /* [2], device memory: norm, clipping scale */
    bl_staging *staging; /* for reads into the shards and writes from them */
    bl_timeline *timeline;
    bl_gather_ring *ring;
    trained_replicated *replicated; /* NULL: none */
    bl_adapter_terms *terms;        /* of the embedding and the head; NULL: none */
    /* The checkpoint's file that is being written: checkpoint.c. */
    struct {
        bl_safetensors_writer *writer;    /* NULL: no file, or complete */
        bool has[TRAINED_FILE_ARRAYS];    /* whether the file has the array */
        size_t spec[TRAINED_FILE_ARRAYS]; /* which of its tensors the array is */
        bl_status (*then)(void *user);
        void *user;
    } writing;
};

/* gradients.c: shares are added unit by unit, the pieces of a share after it. */
bl_status trained_create_shares(bl_trained_state *state, int64_t n_units, int64_t n_pieces);
void trained_add_share(bl_trained_state *state, int64_t unit, int64_t offset, int64_t n);
void trained_add_piece(bl_trained_state *state, int64_t unit, int64_t from, int64_t n, int64_t to);
/* whole_bytes: of both buffers, the second of which begins after second_bytes; 0: no shares. */
bl_status trained_create_sink(bl_trained_state *state, int64_t whole_bytes, int64_t second_bytes,
                              int64_t part_bytes);
void trained_free_sink(bl_trained_state *state);
/* Collective, with idle streams: n floats of each rank, one after the other, into whole[0]. */
bl_status trained_gather_share(bl_trained_state *state, int64_t unit, const float *rows, int64_t n);
static inline void trained_use_context(bl_trained_state *s, const bl_trained_context *context)
{
    s->device = context->device;
    s->world = context->world;
    s->compute = context->compute;
    s->communication = context->communication;
    s->timeline = context->timeline;
}

/* state.c: floats of a layer's LoRA weights on a rank, and of the layers before it. */
int64_t trained_chunk(const bl_trained_state *state, int64_t layer);
int64_t trained_chunks_before(const bl_trained_state *state, int64_t layer);
/* state.c: allocates what both kinds of state have: events, sums, staging of BL_STAGING_BYTES. */
bl_status trained_allocate_sums(bl_trained_state *state);
/* checkpoint.c: device memory to `offset` of tensor specs[index] of a file, and bytes [offset,
 * offset + n_bytes) of a stored tensor to device memory, through `staging`. */
bl_status trained_put_bytes(bl_safetensors_writer *writer, size_t index, int64_t offset,
                            bl_staging *staging, const void *memory, size_t n_bytes);
bl_status trained_load_bytes(bl_staging *staging, const bl_stored_tensor *tensor, int64_t offset,
                             size_t n_bytes, void *memory);
/* The caller closes *out. BL_EINPUT. */
bl_status trained_open_shard(const char *dir, int rank, int n_ranks, bl_safetensors **out);
/* BL_ECHECKPOINT unless the file's tensor `name` is of the dtype and [n], or [rows, n] with rows >
 * 0. n = 0: it may be missing. */
bl_status trained_check_array(const bl_safetensors *file, const char *name, bl_dtype dtype,
                              int64_t rows, int64_t n);
/* lora_shards.c: rows of a rank's arrays, one per layer; 0: layers differ, and there are none. */
int64_t trained_lora_rows(const bl_lora_layout *layout, int64_t n_layers);
/* lora_shards.c, full_shards.c: bl_trained_state_read_shards. */
bl_status trained_lora_read_shards(bl_trained_state *state, const char *dir, int n_ranks);
bl_status trained_full_read_shards(bl_trained_state *state, const char *dir, int n_ranks);
/* full_shards.c: the place of a tensor with rows in a layout of bl_model_layout_trained: its unit,
 * matrix, and the row of its part with which it begins. */
void trained_full_place(const bl_model_config *config, const bl_arch_tensor *tensor, int64_t *unit,
                        int *matrix, int64_t *row);
/* full.c */
void trained_full_free(bl_trained_state *state);

/* state.c: queues the compute copies of w and of a trained head on `compute`; later gathers see
 * them. After every change of these weights. */
bl_status bl_trained_state_publish(bl_trained_state *state);

#endif
