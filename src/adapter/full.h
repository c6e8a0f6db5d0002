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
 * The state is a bl_adapter_state: its step, sums, update and checkpoints are those of state.h. */
#ifndef BALLAST_ADAPTER_FULL_H
#define BALLAST_ADAPTER_FULL_H

#include "adapter/state.h"
#include "config/config.h"
#include "model/pass.h"
#include "model/weights.h"

/* Where moments and gradients are: `ratio` of their bytes, in whole units, in `tier`, the rest in
 * device memory. `moments`: the dtype of both moments of the
 * rank's rows, BL_F32 or BL_BF16; those of norms and biases are fp32. */
typedef struct bl_optimizer_placement {
    bl_device_kind kind;
    bl_dtype moments;
    uint64_t seed;         /* of the rounding of bf16 moments */
    double embedding_rate; /* learning rate of embedding and head, relative to the others' */
    double ratio;          /* 0..1 */
    bl_tier tier;          /* on a CPU not BL_TIER_HOST, which is its device memory */
    const char *dir;       /* with BL_TIER_DISK: must exist */
    bool places_copy;      /* as in bl_placement */
    bl_io_engine io_engine;
    const struct bl_pager_hooks *hooks; /* its `io` is of all transfers, for tests; may be NULL */
} bl_optimizer_placement;

/* From the keys optimizer_*, offload_compute_copy (auto: all in device memory), seed,
 * embedding_learning_rate, offload_dir and device. Borrows dir from config. */
bl_optimizer_placement bl_adapter_full_placement(const bl_train_config *config);

/* Bytes of one rank: moments and gradients in device memory, in pinned host memory, and on disk. If
 * some are outside of device memory: frames for gradients during a visit (on a GPU in device
 * memory, and with the disk tier also in host memory), and pieces during an update, with the
 * buffers of requests. behind: for a checkpoint that is written behind the steps. dtype: of the
 * moments. */
typedef struct bl_adapter_units_bytes {
    bl_dtype dtype;
    int64_t moments, gradients; /* device memory */
    int64_t host_moments, host_gradients;
    int64_t disk;
    int64_t device_frames, host_frames;
    int64_t pieces; /* host memory */
    int64_t behind; /* host memory */
} bl_adapter_units_bytes;

/* Bytes of one rank's part, in fp32, moments of rows in their dtype: moments and gradients of its
 * trained rows (the weights themselves are the base's); one moment of trained norms and biases, and
 * gradients of all of them, if any is trained; of several ranks a unit's whole gradient, or two
 * layers', and the largest part of a matrix's sum. Staging is host memory. */
typedef struct bl_adapter_full_bytes {
    bl_adapter_units_bytes units;
    int64_t vector_moment, vector_gradients, whole, part, staging;
} bl_adapter_full_bytes;
/* layout: bl_model_layout_trained's, of n_shards = the ranks; set: of the model; weights: the tiers
 * of its parts. BL_ENOMEM. */
bl_status bl_adapter_full_measure(const bl_model_config *config, const bl_base_layout *layout,
                                  const bl_trained_set *set, const bl_tier *weights,
                                  const bl_optimizer_placement *placement,
                                  bl_adapter_full_bytes *out);

/* Of weights and base of a model that was opened as BL_BASE_TRAINED, and of its bl_model.trained;
 * they, placement, comm (of all
 * ranks: the shards'), streams and timeline (may be NULL; BL_LANE_LORA) are borrowed. BL_ELIMIT,
 * BL_EIO: the disk of placement->dir. */
bl_status bl_adapter_full_create(bl_model_weights *weights, bl_base *base,
                                 const bl_optimizer_placement *placement, bl_comm *world,
                                 bl_stream *compute, bl_stream *communication,
                                 bl_timeline *timeline, bl_adapter_state **out);
/* Updates that wait for their unit's next visit are done when it returns. Of LoRA's state:
 * BL_OK. */
bl_status bl_adapter_full_flush(bl_adapter_state *state);
/* A pass calls this before it loads a unit. NULL: no update ever waits. */
const bl_weight_updates *bl_adapter_full_updates(const bl_adapter_state *state);

/* Where a pass puts the gradients of a micro-batch, in place of bl_adapter_state_sink; NULL: the
 * state is LoRA's. */
const bl_weight_sink *bl_adapter_full_sink(const bl_adapter_state *state);

/* ---- full_shards.c: checkpoints ---- */

/* As bl_adapter_checkpoint_bytes: trained weights and both moments of n_ranks ranks. BL_ENOMEM. */
bl_status bl_adapter_full_checkpoint_bytes(const bl_model_config *config, const bl_trained_set *set,
                                           int n_ranks, bl_dtype moments, int64_t *n_bytes);

/* With compute idle: begins to write the rank's checkpoint file, with the state after the last
 * update, and returns. The next steps run meanwhile; each unit's next update waits until the unit
 * is written. When the file is complete and durable, `then` runs on another thread; its failure
 * counts as one of the file. One file at a time. BL_EIO, BL_ELIMIT: the file cannot be created. */
bl_status bl_adapter_full_begin_shard(bl_adapter_state *state, const char *path,
                                      bl_status (*then)(void *user), void *user);
/* Whether `then` has run, or something has failed. */
bool bl_adapter_full_shard_is_done(const bl_adapter_state *state);
/* Progress of the file. has_waiting: some units can be written only after an update that is due in
 * their next visit. left_s: estimated time until all units are written, by the rate so far; 0: all
 * are. writing_s: from the beginning to the newest write; idle_s: since then. */
typedef struct bl_adapter_shard_progress {
    bool has_waiting;
    double left_s, writing_s, idle_s;
} bl_adapter_shard_progress;
bl_adapter_shard_progress bl_adapter_full_shard_progress(const bl_adapter_state *state);
/* Makes the pending updates of the checkpoint's step, waits for the file and `then`, and returns
 * their first failure. BL_OK if no file was begun. */
bl_status bl_adapter_full_end_shard(bl_adapter_state *state);
/* In place of end_shard after a failure of the run: stops writing. The file may be incomplete. */
void bl_adapter_full_drop_shard(bl_adapter_state *state);
/* The host stream that writes the file: later calls on the stream run after `then`. */
bl_stream *bl_adapter_full_behind(const bl_adapter_state *state);

/* The weights in the files that n_ranks ranks have written into `dir`. */
typedef struct bl_adapter_full_reader bl_adapter_full_reader;
/* BL_ECHECKPOINT: one of them is not such a file, or of another choice of tensors. config and set
 * are borrowed. */
bl_status bl_adapter_full_open(const bl_model_config *config, const bl_trained_set *set,
                               const char *dir, int n_ranks, bl_adapter_full_reader **out);
void bl_adapter_full_close(bl_adapter_full_reader *reader); /* NULL is fine */
/* Rows [begin, end) of a trained tensor, of a vector: its elements, to dst (host memory).
 * BL_ECHECKPOINT. */
bl_status bl_adapter_full_read(bl_adapter_full_reader *reader, const bl_arch_tensor *tensor,
                               int64_t begin, int64_t end, float *dst);

#endif
