/* SPDX-License-Identifier: Apache-2.0 */
/* feed_internal.h -- micro-batches as a device's layers take them. For pass.c and generate.c.
 *
 * A CPU takes them as they are, and reads the embedding table where it is, in host memory.
 *
 * A device with bf16 activations gets tokens in steps of whole tiles (bl_block_rows): products then
 * have few shapes. A separate document fills the last step: its rows are zero, have weight 0
 * and stay zero in every layer: norms, products, attention and their gradients of zeros are zeros.
 * So it adds nothing to the loss and exact zeros to gradients. Its first layer's inputs are
 * gathered on the host, rounded to bf16 there, and copied from pinned memory, all of a group's side
 * by side: while the device still has the visits of the group before. Where the embedding is
 * trained, or an adapter's, the device has its table and gathers them. */
#ifndef BALLAST_MODEL_FEED_INTERNAL_H
#define BALLAST_MODEL_FEED_INTERNAL_H

#include "arch/block.h"
#include "model/weights.h"

typedef struct bl_feed bl_feed;

typedef struct bl_feed_size {
    int64_t device_bytes, host_bytes; /* both 0 on a CPU */
} bl_feed_size;

/* Of a device that pads, micro-batches have at most so many different numbers of tokens in the
 * layers: all of their products can then run before the first step. */
enum { BL_FEED_BUCKETS = 12 };

/* For groups of max_group micro-batches of T_max tokens; has_table: the device has the embedding's
 * table. */
bl_feed_size bl_feed_measure(const bl_block_dims *dims, bool has_table, int64_t T_max,
                             int max_group);

/* memory: device_bytes of device memory, 256-byte aligned, borrowed as device and weights are.
 * Takes the host memory itself. */
bl_status bl_feed_create(bl_device *device, const bl_model_weights *weights, int64_t T_max,
                         int max_group, void *memory, bl_feed **out);
void bl_feed_destroy(bl_feed *feed); /* after the stream is idle; NULL is fine */

/* Equal steps of whole tiles that lead to T_max, to which tokens are padded. 0: no padding. */
int64_t bl_feed_token_step(const bl_feed *feed);

/* Rows of a group's tensors that a micro-batch of T tokens takes. */
int64_t bl_feed_rows(const bl_feed *feed, int64_t T);

/* The embedding table from now on, (vocab, hidden), borrowed, in memory of the device; at first it
 * is the model's. */
void bl_feed_set_table(bl_feed *feed, const void *rows, bl_dtype dtype);

/* A new group begins. Waits until the host memory of the last one has been read. */
bl_status bl_feed_begin(bl_feed *feed);

/* *out: micro-batch `index` of the group, padded to bl_feed_rows tokens on a GPU, for tasks queued
 * on `stream` from now on until the next group's. */
bl_status bl_feed_pad(bl_feed *feed, bl_stream *stream, int index, const bl_micro_batch *batch,
                      bl_micro_batch *out);

/* y (tokens of bl_feed_pad's result, H) = the embeddings of the batch's ids, then zeros. first_row:
 * of y in its group, whose micro-batches do not overlap. BL_EINTERNAL: no host_ids on a device that
 * needs them. */
bl_status bl_feed_embed(bl_feed *feed, bl_stream *stream, const bl_micro_batch *batch,
                        int64_t first_row, bl_tensor y);

#endif
