/* SPDX-License-Identifier: Apache-2.0 */
/* batch.h -- rows of a data set made into micro-batches: flat token streams with targets and
 * weights.
 *
 * Each row is a separate sample (positions and attention start anew), and so is each document
 * inside it. The target of token t is the label of token t + 1 of the same row, with that label's
 * weight; -100 and the end of a row have weight 0. */
#ifndef BALLAST_MODEL_BATCH_H
#define BALLAST_MODEL_BATCH_H

#include "device/staging.h"
#include "arch/block.h"
#include "data/dataset.h"

/* The micro-batches of one rank, filled again and again. */
typedef struct bl_batches {
    int n_micro;
    int64_t T_max;         /* most tokens of a micro-batch */
    bl_micro_batch *micro; /* [n_micro], device memory behind it */
    bl_twin *twin;         /* of them all; filled on the host */
    int64_t n_tokens,
        /* of what was filled in since bl_batches_clear; n_labels: labels with a weight other than
         * 0 */
        n_labels;
} bl_batches;

/* Bytes of a micro-batch of T_max tokens, in device memory and the same in host memory. */
int64_t bl_batches_micro_bytes(int64_t T_max);

bl_status bl_batches_create(bl_device *device, int n_micro, int64_t T_max, bl_batches **out);
void bl_batches_destroy(bl_batches *batches); /* NULL is fine */

/* Clear, append rows, upload: then tasks queued on `stream` see them. What was uploaded last must
 * have arrived before the next clear. */
void bl_batches_clear(bl_batches *batches); /* all micro-batches get T = 0 */

/* Appends row `row` of the data set to micro-batch `index`, as sample number `sample` of the step.
 * BL_EINPUT: the row is bad; BL_EINTERNAL: no room. */
bl_status bl_batches_append(bl_batches *batches, int index, const bl_dataset *dataset, int64_t row,
                            int64_t sample);
/* Fills micro-batch `index` with T <= T_max tokens 0, each with a target of weight 1, in documents
 * of at most longest (>= 1) tokens. */
void bl_batches_fill_zeros(bl_batches *batches, int index, int64_t T, int64_t longest);
/* Queues the copies of what was appended. */
bl_status bl_batches_upload(bl_batches *batches, bl_stream *stream);

#endif
