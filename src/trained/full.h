/* SPDX-License-Identifier: Apache-2.0 */
/* full.h -- the trainable state of a run that trains weights of the model itself, every one or
 * those that were chosen (arch/trained.h).
 *
 * The trained weights are the base's rows, fp32, in the rank's pages: AdamW updates the pages that
 * the base's ring gathers. The rank also has moments and gradients of its trained rows, in memory
 * or on disk. Every rank holds all norms and biases, with moments of the trained ones and
 * gradients, and makes the same update of them.
 *
 * One rank: backward adds gradients to the rank's rows themselves. Several: backward fills a unit's
 * whole gradient, which is reduce-scattered in the order of comm.h and added to the shard,
 * micro-batch by micro-batch, as LoRA's is: the grouping of micro-batches changes no bit. Norms'
 * and biases' are summed over the micro-batches of each rank and once per step over the ranks. A
 * tied embedding's is summed apart from the head's, and added to it at the step's end.
 *
 * The state is a bl_trained_state: its step, sums, update and checkpoints are those of state.h. */
#ifndef BALLAST_TRAINED_FULL_H
#define BALLAST_TRAINED_FULL_H

#include "trained/state.h"
#include "config/config.h"
#include "model/pass.h"
#include "model/weights.h"

/* Where moments and gradients are stored: `ratio` of their bytes, in whole units, in `tier`, the
 * rest in device memory. `moments`: the dtype of both moments of the rank's rows, BL_F32 or
 * BL_BF16; those of norms and biases are fp32. */
typedef struct bl_optimizer_placement {
    bl_device_kind kind;
    bl_dtype moments;
    uint64_t seed;    /* of the rounding of bf16 moments */
    double ratio;     /* 0..1 */
    bl_tier tier;     /* on a CPU not BL_TIER_HOST, which is its device memory */
    const char *dir;  /* with BL_TIER_DISK: must exist */
    bool places_copy; /* as in bl_placement */
    bl_io_engine io_engine;
    const struct bl_pager_hooks *hooks; /* its `io` is of all transfers, for tests; may be NULL */
} bl_optimizer_placement;

/* From the keys optimizer_*, offload_compute_copy (auto: all in device memory), seed,
 * offload_dir and device. Borrows dir from config. */
bl_optimizer_placement bl_trained_full_placement(const bl_train_config *config);

/* Bytes of one rank: moments and gradients in device memory, in pinned host memory, and on disk. If
 * some are outside of device memory, also frames for gradients during a visit (on a GPU in device
 * memory, and with the disk tier also in host memory), and pieces during an update, with the
 * buffers of requests. behind: for a checkpoint that is written behind the steps. dtype: of the
 * moments. */
typedef struct bl_trained_units_bytes {
    bl_dtype dtype;
    int64_t moments, gradients; /* device memory */
    int64_t host_moments, host_gradients;
    int64_t disk;
    int64_t device_frames, host_frames;
    int64_t pieces; /* host memory */
    int64_t behind; /* host memory */
} bl_trained_units_bytes;

/* Bytes of one rank's part, in fp32, moments of rows in their dtype: moments and gradients of its
 * trained rows (the weights themselves are the base's); one moment of trained norms and biases, and
 * gradients of all of them, if any is trained; of several ranks a unit's whole gradient, or two
 * layers', and the largest part of a matrix's sum. Staging is host memory. */
typedef struct bl_trained_full_bytes {
    bl_trained_units_bytes units;
    int64_t vector_moment, vector_gradients, whole, part, staging;
} bl_trained_full_bytes;
/* layout: bl_model_layout_trained's, of n_shards = the ranks; set: of the model; weights: the tiers
 * of its parts. BL_ENOMEM. */
bl_status bl_trained_full_measure(const bl_model_config *config, const bl_base_layout *layout,
                                  const bl_trained_set *set, const bl_tier *weights,
                                  const bl_optimizer_placement *placement,
                                  bl_trained_full_bytes *out);

/* Of weights and base of a model that was opened as BL_BASE_TRAINED, on the context's device, and
 * of its bl_model.trained. The shards are those of all ranks. Borrows weights, base and
 * placement->dir. BL_ELIMIT, BL_EIO: the disk of placement->dir. */
bl_status bl_trained_full_create(const bl_trained_context *context, bl_model_weights *weights,
                                 bl_base *base, const bl_optimizer_placement *placement,
                                 bl_trained_state **out);
/* Updates that wait for their unit's next visit are done when it returns. Of LoRA's state:
 * BL_OK. */
bl_status bl_trained_full_flush(bl_trained_state *state);
/* The updates that a pass makes before it loads a unit. NULL: no update is ever pending. */
const bl_weight_updates *bl_trained_full_updates(const bl_trained_state *state);

/* ---- full_shards.c: checkpoints ---- */

/* As bl_adapter_checkpoint_bytes: trained weights and both moments of n_ranks ranks. BL_ENOMEM. */
bl_status bl_trained_full_checkpoint_bytes(const bl_model_config *config, const bl_trained_set *set,
                                           int n_ranks, bl_dtype moments, int64_t *n_bytes);

/* The weights in the files that n_ranks ranks have written into `dir`. */
typedef struct bl_trained_full_reader bl_trained_full_reader;
/* BL_ECHECKPOINT: one of them is not such a file, or of another choice of tensors. config and set
 * are borrowed. */
bl_status bl_trained_full_open(const bl_model_config *config, const bl_trained_set *set,
                               const char *dir, int n_ranks, bl_trained_full_reader **out);
void bl_trained_full_close(bl_trained_full_reader *reader); /* NULL is fine */
/* Rows [begin, end) of a trained tensor, of a vector: its elements, to dst (host memory).
 * BL_ECHECKPOINT. */
bl_status bl_trained_full_read(bl_trained_full_reader *reader, const bl_arch_tensor *tensor,
                               int64_t begin, int64_t end, float *dst);

#endif
