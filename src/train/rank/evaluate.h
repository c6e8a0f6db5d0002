/* SPDX-License-Identifier: Apache-2.0 */
/* evaluate.h -- the mean loss over the validation rows of a run, on one rank: rank r of n takes the
 * rows (k n + r) b ... of micro-batch k, b = per_device_eval_batch_size. All ranks have equally
 * many micro-batches; those of a rank without rows left have no tokens.
 *
 * Its micro-batches have separate passes, or are in the passes of a training's steps
 * (eval_overlap): the same work in the same order, so the same bits. */
#ifndef BALLAST_TRAIN_RANK_EVALUATE_H
#define BALLAST_TRAIN_RANK_EVALUATE_H

#include "train/rank.h"
#include "train/rank/group.h"

typedef struct bl_evaluation {
    bl_rank *rank;
    /* Of two passes in turn: of the one before, the last visits still run. mismatched: kto's, or
     * NULL. */
    bl_batches *batches[2], *mismatched[2];
    bl_twin *sums; /* [2] doubles: loss and labels, exact in a double */
    int turn;
    /* Micro-batches in a pass of a step, as companions; 0: each has a separate pass. */
    int n_overlapped;
    int64_t next, n_micro; /* of those under way: the next one to join a pass, all */
    double n_labels;       /* so far, of this rank */
} bl_evaluation;

/* Of rank->job's validation rows. Borrows the rank, which has its loss. */
bl_status bl_evaluation_create(bl_rank *rank, bl_evaluation **out);
void bl_evaluation_destroy(bl_evaluation *evaluation); /* NULL is fine */

void bl_evaluation_begin(bl_evaluation *evaluation);
/* The most micro-batches of the evaluation in one pass: at least 1. It can decrease when a run
 * joins and the pass is replaced (job->plan). */
int bl_evaluation_capacity(const bl_evaluation *evaluation);
/* Micro-batches that have not been in a pass; 0 before begin. */
int64_t bl_evaluation_left(const bl_evaluation *evaluation);
/* Adds the next n micro-batches, at most bl_evaluation_capacity and bl_evaluation_left, to a group,
 * once per pass. Errors of the rows; BL_EINTERNAL: no room. */
bl_status bl_evaluation_join(bl_evaluation *evaluation, int n, bl_group *group);
/* Runs the remaining micro-batches in separate passes. Collective. */
bl_status bl_evaluation_run(bl_evaluation *evaluation);
/* After begin and all passes: runs the remaining micro-batches. Collective, with the same result on
 * every rank. BL_ENUMERIC: the loss is not finite; BL_EINPUT: no label carries loss. */
bl_status bl_evaluation_end(bl_evaluation *evaluation, bl_eval_result *out);

#endif
