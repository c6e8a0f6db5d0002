/* SPDX-License-Identifier: Apache-2.0 */
/* input.h -- the inputs of a plan: the configuration, the model's sizes, the ranks, the rows. No
 * checkpoint needs to be open, and nothing is read or written. */
#ifndef BALLAST_PLAN_INPUT_H
#define BALLAST_PLAN_INPUT_H

#include "config/config.h"
#include "arch/lora.h"
#include "arch/trained.h"
#include "plan/hardware.h"
#include "plan/topology.h"

/* The micro-batches that the data and the order of its rows give the ranks in a run; all 0: not
 * known, each is taken to be full. */
typedef struct bl_plan_rows {
    int64_t n_micro;         /* micro-batches that were counted, of all ranks */
    int64_t largest;         /* tokens of the largest of them */
    double mean;             /* tokens of one */
    double document_tokens;  /* sum of squares of documents' lengths / sum of lengths */
    double label_part;       /* of the tokens that carry loss: 0..1 */
    int64_t n_steps, n_used; /* of the run, and the rows that they take, repeated ones again */
    int64_t n_rows;          /* of an epoch */
    /* That the keys give, without those of load_best_model_at_end and reduction_factor. */
    int64_t n_evaluations, n_checkpoints;
} bl_plan_rows;

/* Another training over the same base, in the same visits. The members are as bl_plan_input's. */
typedef struct bl_plan_run {
    const bl_train_config *config;
    const bl_lora_layout *lora;
    int64_t longest_train_row, longest_validation_row, n_validation_rows;
    int64_t data_bytes, tokenizer_bytes; /* its own, as is rows */
    bl_plan_rows rows;
} bl_plan_run;

/* Borrowed: the pointers' targets outlive the input and the plan. */
typedef struct bl_plan_input {
    const bl_train_config *config; /* resolved and valid */

    const bl_model_config *model;
    const bl_format *formats; /* [layer * n_projections + projection]: as held in memory */
    /* compute_bf16_modules by layer (bl_train_config_bf16_matrices), for times; NULL: none. */
    const uint8_t *bf16_matrices;
    bl_dtype embedding_dtype, head_dtype;
    int64_t n_positions; /* of the RoPE tables */
    /* Taken by a rank while it loads, besides the loaded data (bl_model_load_bytes). */
    int64_t load_bytes;
    const bl_lora_layout *lora;    /* n_floats 0: no adapter */
    const bl_trained_set *trained; /* with finetuning_type full; else NULL */
    const bl_trained_set *modules; /* modules_to_save; NULL: none */

    bl_topology topology;
    bool is_training; /* false: an evaluation, forward only, with one micro-batch at a time */
    int64_t longest_train_row, longest_validation_row; /* tokens; 0: no such rows */
    int64_t n_validation_rows;
    int64_t data_bytes; /* of the data sets' index; 0: not known */
    /* Of a training: its other runs. rows.largest, data_bytes and tokenizer_bytes are of all
     * (bl_plan_add_run). */
    const bl_plan_run *others;
    int n_others;
    int64_t tokenizer_bytes; /* of a process, with what reading the data left there; 0: none */
    bl_plan_rows rows;

    /* Memory of the host that the plan is for, bytes; -1: not known. 0: this host's available
     * memory, read when a choice depends on it. */
    int64_t available_bytes;
    /* Of the GPU that the ranks of a process share, likewise; ignored without one. */
    int64_t gpu_available_bytes;
    /* The rates by which a GPU's choices are weighed; NULL: those of this machine. */
    const bl_hardware *hardware;
    /* Of a rank's operations, measured on this processor, before those of `hardware`; NULL: not
     * measured. */
    const struct bl_rates *measured;
} bl_plan_input;

/* Training i of all over the base, from 0, the input's own, to n_others. Of training 0,
 * rows.largest is that of all. */
bl_plan_run bl_plan_run_at(const bl_plan_input *input, int i);
/* others[n_others] becomes `run`: the array, which the input borrows, has room for it. */
void bl_plan_add_run(bl_plan_input *input, bl_plan_run *others, const bl_plan_run *run);
/* The input as if training i were alone over the base. */
bl_plan_input bl_plan_alone(const bl_plan_input *input, int i);
/* Of a configuration that was validated: without an error. */
bl_losses bl_plan_losses_of(const bl_train_config *config);

#endif
