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

/* What is known of a token of a preference row, bits. Of the next token, its target: */
enum {
    BL_MARK_ANSWER = 1, /* it belongs to the answer */
    BL_MARK_PROMPT = 2, /* to the prompt of a chosen answer, and carries loss all the same */
    /* at the first token of a document: */
    BL_MARK_DESIRABLE = 4, /* bl_sample.is_desirable */
    BL_MARK_BEGINS = 8     /* that token belongs to the answer; no token predicts it */
};

/* The micro-batches of one rank, filled again and again. */
typedef struct bl_batches {
    int n_micro;
    int64_t T_max;         /* most tokens of a micro-batch */
    bl_micro_batch *micro; /* [n_micro], device memory behind it */
    bl_twin *twin;         /* of them all; filled on the host */
    uint8_t *marks;        /* [n_micro][T_max]: of preferences; NULL: none are kept */
    bool learns_prompt;    /* prompts of chosen answers carry loss; with marks */
    int64_t n_tokens,
        /* of what was filled in since bl_batches_clear; n_labels: labels with a weight other than
         * 0 */
        n_labels;
} bl_batches;

/* Bytes of a micro-batch of T_max tokens, in device memory and the same in host memory. */
int64_t bl_batches_micro_bytes(int64_t T_max);

bl_status bl_batches_create(bl_device *device, int n_micro, int64_t T_max, bl_batches **out);
void bl_batches_destroy(bl_batches *batches); /* NULL is fine */

/* Rows are preferences: their marks are kept. BL_ENOMEM. */
bl_status bl_batches_keep_marks(bl_batches *batches, bool learns_prompt);

/* A micro-batch as it was appended, host memory: what the pointers of its micro name. Valid until
 * the next clear. */
typedef struct bl_batch_view {
    const int32_t *ids, *ends; /* [T]; [n_documents + 1] */
    const uint8_t *marks;      /* [T] */
    const int64_t *samples;    /* [T]: the sample numbers of bl_batches_append */
} bl_batch_view;
bl_batch_view bl_batches_view(const bl_batches *batches, int index);

/* Clear, append rows, upload: then tasks queued on `stream` see them. What was uploaded last must
 * have arrived before the next clear. */
void bl_batches_clear(bl_batches *batches); /* all micro-batches get T = 0 */

/* Appends row `row` of the data set to micro-batch `index`, as sample number `sample` of the step.
 * BL_EINPUT: the row is bad; BL_EINTERNAL: no room. */
bl_status bl_batches_append(bl_batches *batches, int index, const bl_dataset *dataset, int64_t row,
                            int64_t sample);
/* A row whose targets are given: targets[t] is predicted by token t, or BL_LABEL_MASKED. All
 * borrowed, [n]. */
typedef struct bl_batch_row {
    int64_t n;
    const int32_t *ids, *targets;
    const float *weights; /* NULL: 1 each */
    bool is_marked;       /* weights other than 0 become 1 */
} bl_batch_row;
/* As append, of a row in memory: one document. BL_EINTERNAL: no room. */
bl_status bl_batches_append_row(bl_batches *batches, int index, const bl_batch_row *row,
                                int64_t sample);
/* Micro-batch `index` of `out` gets the documents of `from`'s, each with the answer of the one
 * before it, the first one with that of the last: the mismatched answers from which KTO estimates
 * its KL (TRL's KTOTrainer). A document has at most max_tokens. Answers follow their prompts; both
 * keep marks. */
void bl_batches_mismatch(const bl_batches *from, int index, int64_t max_tokens, bl_batches *out);
/* Fills micro-batch `index` with T <= T_max tokens 0, each with a target of weight 1, in documents
 * of at most longest (>= 1) tokens. */
void bl_batches_fill_zeros(bl_batches *batches, int index, int64_t T, int64_t longest);
/* Queues the copies of what was appended. */
bl_status bl_batches_upload(bl_batches *batches, bl_stream *stream);

#endif
