/* SPDX-License-Identifier: Apache-2.0 */
/* data.h -- the rows of a run: its tokenizer, its data sets, and which of their rows are trained on
 * and evaluated. */
#ifndef BALLAST_TRAIN_DATA_H
#define BALLAST_TRAIN_DATA_H

#include "config/config.h"
#include "data/dataset.h"
#include "arch/config.h"
#include "plan/input.h"

/* Rows [first, first + n) of a data set; packed ones, if the run packs. */
typedef struct bl_rows {
    bl_dataset *set; /* NULL: there are none */
    int64_t first, n;
    int64_t longest;        /* tokens of the longest of them */
    double document_tokens; /* sum of squares of the samples' lengths / sum of lengths */
} bl_rows;

typedef struct bl_run_data {
    bl_tokenizer *tokenizer;   /* NULL: there is none, or none that can be read */
    bl_error tokenizer_error;  /* why not; rows of tokens need none */
    bl_rows train, validation; /* validation.set may be train.set: a split */
    /* Anonymous memory that opening left in the process besides the indices: the tokenizer's, and
     * memory that the allocator keeps after reading it. */
    int64_t tokenizer_bytes;
} bl_run_data;

/* Opens what `config` names for a training, or for an evaluation: without training rows. `model` is
 * borrowed for the call, `host` (NULL: none) until the close: its ranks open the data together, and
 * those of this process are n_here. BL_EUSAGE, BL_EINPUT; close after a failure, too. */
bl_status bl_run_data_open_training(const bl_train_config *config, const bl_model_config *model,
                                    bl_host_memory *host, int n_here, bl_run_data *data);
bl_status bl_run_data_open_evaluation(const bl_train_config *config, const bl_model_config *model,
                                      bl_host_memory *host, int n_here, bl_run_data *data);
/* Tokens of the longest sequence of a pass: of a row, or with kto of a prompt with the answer of
 * another row. 0: there are no rows. */
int64_t bl_run_data_positions(const bl_train_config *config, const bl_run_data *data);
/* Bytes of the indices: of this process, or of the host whose ranks share them. */
int64_t bl_run_data_bytes(const bl_run_data *data);
/* The micro-batches that a run of this configuration makes of its training rows, in their order. */
bl_plan_rows bl_run_data_measure(const bl_train_config *config, const bl_run_data *data);
void bl_run_data_close(bl_run_data *data); /* one that is all zero is fine */

#endif
