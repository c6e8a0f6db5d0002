/* SPDX-License-Identifier: Apache-2.0 */
/* trainer.h -- one rank of a training. */
#ifndef BALLAST_TRAIN_RANK_TRAINER_H
#define BALLAST_TRAIN_RANK_TRAINER_H

#include <stdatomic.h>

#include "train/rank.h"
#include "train/data/sampler.h"
#include "train/training_internal.h"

/* The requests of the process to its trainers. */
typedef struct bl_control {
    atomic_int stop;    /* a signal came: end after the step */
    atomic_int abandon; /* the grace is over: end inside the step */
} bl_control;

/* The rows of a step on their way into its micro-batches. */
typedef struct bl_fill {
    int64_t step, n_rows,
        n_filled;   /* rows of this rank; n_filled = n_rows: nothing is left to do */
    bl_error error; /* of the row that could not be filled in */
} bl_fill;

/* Its own thread's, while that runs. */
typedef struct bl_trainer {
    const bl_training *training;
    const bl_job *job;             /* the training's */
    const bl_train_config *config; /* the job's */
    const bl_control *control;
    bl_output *output;       /* rank 0's; NULL on the others */
    const bl_output *folder; /* the same, or this process's view of it; all check its lock */
    bl_rank *rank;

    double peak_flops;          /* of a plain GEMM; 0: unknown */
    bl_timeline_totals counted; /* the part of the timeline's that metrics have had */
    int64_t counted_fallbacks;  /* the same of products in bf16 instead of FP8 */
    bl_pass_micro *micro;       /* [plan.pass.max_group]: of the pass under way */
    bl_batches *batches[2];     /* the step under way and the next one */
    bl_fill fill;               /* of the next one */
    bl_checkpoint_file *files;  /* [n_ranks]: the files that they wrote into a checkpoint */
    bool start_differs;         /* from the checkpoint that was resumed: in its weights */
    int64_t steps_done;         /* optimizer steps in the adapter's state */
    int64_t saved_step;         /* of the newest checkpoint of this run; -1: none */
    int64_t evaluated_step;     /* of the newest evaluation; -1: none */
    bl_best best;               /* of the evaluations so far; the same on all ranks */
    atomic_bool is_set_up;      /* as all ranks of the job are before one counts its first step */
    /* all ranks have come to a save, or agreed to stop, and begin no step: abandon waits */
    atomic_bool is_saving;
} bl_trainer;

/* trainer.c: everything that the rank needs, and its end, before that of the rank. */
bl_status bl_trainer_setup(bl_trainer *trainer);
void bl_trainer_free(bl_trainer *trainer);

/* warm_up.c: after setup. As bl_rank_warm_up, of all that a step runs; the adapter's state and what
 * is counted are as before. BL_ESTOPPED: the grace after a signal is over. */
bl_status bl_trainer_warm_up(bl_trainer *trainer);

/* rank_train.c: resets the counts of lanes and products; those so far belong to no step. */
bl_status bl_trainer_forget_counts(bl_trainer *trainer);

/* rank_train.c: the steps from the start on, evaluations and checkpoints when they are due, and at
 * the end the adapter. After setup; collective over the ranks of the job. BL_ESTOPPED: a signal; a
 * checkpoint is saved. BL_ENUMERIC: a loss that is not finite. BL_EINPUT: rows that changed or
 * cannot be used. Else the error of a device, a file or another rank. */
bl_status bl_trainer_run(bl_trainer *trainer);

/* best.c */

/* Takes the loss of the evaluation after `step` steps into trainer->best; whether it is the
 * lowest. */
bool bl_trainer_note_loss(bl_trainer *trainer, int64_t step, double loss);
/* Whether early_stopping_patience ends the run. */
bool bl_trainer_stops_early(const bl_trainer *trainer);
/* The adapter of the last step, or of the best one with load_best_model_at_end, into output_dir;
 * collective over the ranks of the job. BL_ECHECKPOINT: the best step's checkpoint was damaged. */
bl_status bl_trainer_write_adapter(bl_trainer *trainer);

/* check_weights.c: after the weights were read. BL_ECHECKPOINT: the checkpoint that is resumed was
 * made with others, and allow_resume_mismatch is off; else a warning. */
bl_status bl_trainer_check_weights(bl_trainer *trainer);

/* save.c */

/* Writes checkpoint step-`step`; collective over the ranks of the job. */
bl_status bl_trainer_save(bl_trainer *trainer, int64_t step);
/* The same by one thread for all ranks, after their threads have ended, without communication.
 * trainers[n_ranks]. */
bl_status bl_trainers_save(bl_trainer *trainers, int64_t step);

#endif
