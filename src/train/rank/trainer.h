/* SPDX-License-Identifier: Apache-2.0 */
/* trainer.h -- one rank of a training. */
#ifndef BALLAST_TRAIN_RANK_TRAINER_H
#define BALLAST_TRAIN_RANK_TRAINER_H

#include <stdatomic.h>

#include "base/file_progress.h"
#include "base/json.h"
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

/* A checkpoint that is written behind the steps. All ranks are in the same part of it. */
typedef struct bl_saving {
    bool is_active;
    int64_t step, best_step;
    bool is_described;         /* state and best_step are those of the step */
    bool commits;              /* all ranks' files are complete; rank 0 commits */
    char *path;                /* of the rank's file */
    json_t *state;             /* rank 0's, for the manifest */
    atomic_bool is_committed;  /* rank 0's; also after a failure */
    bl_file_progress progress; /* of the commit */
    bl_error error;            /* of the commit; read it after is_committed */
} bl_saving;

/* Its own thread's, while that runs. */
typedef struct bl_trainer {
    const bl_training *training;
    const bl_job *job;             /* the training's */
    const bl_train_config *config; /* the job's */
    const bl_control *control;
    bl_output *output;       /* rank 0's; NULL on the others */
    const bl_output *folder; /* the same, or this process's view of it; all check its lock */
    bl_rank *rank;

    double peak_flops; /* of a plain GEMM; 0: unknown */
    /* The lead's: the part of the timeline's that metrics have had, and the same of products in
     * bf16 instead of FP8. */
    bl_timeline_totals counted;
    int64_t counted_fallbacks;
    bl_pass_micro *micro;      /* the lead's: of a round of all runs */
    bl_batches *batches[2];    /* the step under way and the next one */
    bl_batches *mismatched[2]; /* the same of kto's mismatched answers; NULL: none */
    bl_fill fill;              /* of the next one */
    bl_checkpoint_file *files; /* [n_ranks]: the files that they wrote into a checkpoint */
    bool start_differs;        /* from the checkpoint that was resumed: in its weights */
    double started_s;          /* of the step under way */
    int64_t steps_done;        /* optimizer steps in the adapter's state */
    int64_t saved_step;        /* of the newest complete checkpoint of this run; -1: none */
    bl_saving save;
    int64_t evaluated_step; /* of the newest evaluation; -1: none */
    bool evaluates;         /* one has begun and has not ended */
    double evaluation_s;    /* time for it alone so far */
    bl_best best;           /* of the evaluations so far; the same on all ranks */
    bl_rungs rungs;         /* successive halving, rungs.h; the same on all ranks */
    int n_decided;          /* decided rungs of its job */
    bool has_ended;         /* its adapter is written */
    /* Of a run of several that has failed alone, the same on all ranks; BL_OK: it has not. */
    bl_status status;
    bl_error error;
    atomic_bool is_set_up; /* as all ranks of the job are before one counts its first step */
    /* all ranks have entered a save, or agreed to stop, and begin no step: abandon waits */
    atomic_bool is_saving;
} bl_trainer;

/* Collective: gives every rank the same result, its own or another's failure. NULL: each has its
 * own. */
typedef bl_status (*bl_agree_fn)(void *user, bl_status own);

/* trainer.c: everything that the rank needs, and its end, before that of the rank. n_micro: the
 * micro-batches of a round of all runs. beside: another run's trainer over the base of `lead`; the
 * ranks agree after each step of it, so that one that fails leaves none waiting in the next. */
bl_status bl_trainer_setup(bl_trainer *trainer, int64_t n_micro);
bl_status bl_trainer_setup_beside(bl_trainer *trainer, const bl_trainer *lead, bl_agree_fn agree,
                                  void *user);
/* A lead that trains nothing: the base of runs that are set up later. Its rank has no pass yet. */
bl_status bl_trainer_setup_base(bl_trainer *trainer);
/* Its rank's part too, if that is borrowed; then the trainer has no rank. */
void bl_trainer_free(bl_trainer *trainer);

/* warm_up.c: after setup, of runs of a rank; micro: room for a group of the pass. As
 * bl_rank_warm_up, of all that a step runs; the adapters' states and all counters are as before.
 * BL_ESTOPPED: the grace after a signal is over. */
bl_status bl_trainers_warm_up(bl_trainer **trainers, int n, bl_pass_micro *micro);

/* ---- rank_train.c: a run's part of a round (round.c), in this order; collective over the job ----
 */

/* Sums over the ranks, of a run's step. */
typedef struct bl_round_totals {
    int64_t n_labels, n_tokens, n_filled; /* n_filled: micro-batches with rows */
} bl_round_totals;

/* lanes and n_fallbacks are the round's. */
typedef struct bl_step_result {
    double loss, grad_norm;
    bl_lane_totals lanes[BL_N_LANES];
    int64_t n_fallbacks;
    bl_preference_metrics preference;
} bl_step_result;

/* From the run's start: its first evaluation, the rows of its first step. */
bl_status bl_trainer_start(bl_trainer *trainer);
/* Whether the run has steps to make, and has not failed or been stopped. */
bool bl_trainer_has_more(const bl_trainer *trainer);
/* Whether the run makes a step in the next round: it has more, and does not wait at a rung
 * (rungs.h). */
bool bl_trainer_goes_on(const bl_trainer *trainer);
/* The micro-batches of the step under way, or to come. */
bl_batches *bl_trainer_batches(const bl_trainer *trainer);
/* Lists the step's micro-batches in micro[gradient_accumulation_steps] and begins to fill the next
 * step's. BL_EINPUT: the step has no label. */
bl_status bl_trainer_begin_step(bl_trainer *trainer, const bl_round_totals *totals,
                                bl_pass_micro *micro);
/* While the passes run: at most n rows of the next step, of bl_trainer_rows_to_fill in all; errors
 * come at the end. */
void bl_trainer_fill(bl_trainer *trainer, int64_t n);
int64_t bl_trainer_rows_to_fill(const bl_trainer *trainer);
bl_status bl_trainer_end_fill(bl_trainer *trainer);
/* Begins to fill batches[step & 1]. */
void bl_trainer_begin_fill(bl_trainer *trainer, int64_t step);
/* After the state's join: sums, checks, update, metrics. result->lanes: this rank's, they become
 * all ranks'. BL_ENUMERIC: a loss that is not finite; last_group is still in the pass. */
bl_status bl_trainer_end_step(bl_trainer *trainer, const bl_round_totals *totals,
                              const bl_pass_input *last_group, bl_step_result *result);
/* The work due after a step, or at the start: evaluation, checkpoint. An overlapped evaluation
 * only begins, and the checkpoint is completed after it. */
bl_status bl_trainer_after_step(bl_trainer *trainer);
/* Adds the share of its micro-batches of one of n_passes passes to the group, at most *room, which
 * they reduce. */
bl_status bl_trainer_join_evaluation(bl_trainer *trainer, int64_t n_passes, struct bl_group *group,
                                     int *room);
/* After those passes and the state's join, before bl_trainer_end_step: the weights are still those
 * of the evaluation. Afterwards the run may be one that stops early. */
bl_status bl_trainer_end_evaluation(bl_trainer *trainer);
/* In place of a step: saves; BL_ESTOPPED. */
bl_status bl_trainer_stop(bl_trainer *trainer);
/* After the last step: the adapter. */
bl_status bl_trainer_end(bl_trainer *trainer);

/* Of the lead: this rank's lanes, and products in bf16 instead of FP8 (-1: the run is not in FP8),
 * since the last call. */
void bl_trainer_count_lanes(bl_trainer *trainer, bl_lane_totals lanes[BL_N_LANES]);
bl_status bl_trainer_count_fallbacks(bl_trainer *trainer, int64_t *n);
/* Those so far belong to no step. */
bl_status bl_trainer_forget_counts(bl_trainer *trainer);

/* precompute.c: with precompute_ref_log_probs, before the first step and the first evaluation:
 * gives rank->preference the reference's sums. Its passes end with BL_ESTOPPED once the grace after
 * a signal is over. Collective; BL_ENUMERIC on all ranks. */
bl_status bl_trainer_precompute(bl_trainer *trainer);

/* best.c */

/* Takes the loss of the evaluation after `step` steps into trainer->best; whether it is the
 * lowest. */
bool bl_trainer_note_loss(bl_trainer *trainer, int64_t step, double loss);
/* Whether early_stopping_patience ends the run. */
bool bl_trainer_is_out_of_patience(const bl_trainer *trainer);
/* Whether that or a rung ends the run. */
bool bl_trainer_stops_early(const bl_trainer *trainer);
/* The adapter of the last step, or of the best one with load_best_model_at_end, into output_dir;
 * collective over the ranks of the job. BL_ECHECKPOINT: the best step's checkpoint was damaged. */
bl_status bl_trainer_write_adapter(bl_trainer *trainer);

/* check_weights.c: after the weights were read. BL_ECHECKPOINT: the checkpoint that is resumed was
 * made with others, and allow_resume_mismatch is off; else a warning. */
bl_status bl_trainer_check_weights(bl_trainer *trainer);

/* save.c */

/* Writes checkpoint step-`step`, after the previous one has ended; collective over the ranks of the
 * job. In full fine-tuning only begins it: the checkpoint is written behind the steps, and
 * completed by advance_save or end_save. */
bl_status bl_trainer_save(bl_trainer *trainer, int64_t step);
/* The two parts of save in full fine-tuning. begin_save begins to write the weights and their
 * state. describe_save records the current state of the run for the manifest; the checkpoint is
 * completed after it. An evaluation of this step may end between them; a step may not. */
bl_status bl_trainer_begin_save(bl_trainer *trainer, int64_t step);
bl_status bl_trainer_describe_save(bl_trainer *trainer);
/* Waits for the checkpoint that is written behind the steps, if there is one; collective. */
bl_status bl_trainer_end_save(bl_trainer *trainer);
/* Call it before the work of a later step or of its evaluation: collectives of that work wait on
 * the device for updates that wait for a file. If a rank's file needs much longer, all ranks wait
 * here and exchange their progress. Collective. BL_EIO: this rank's file gets no data for longer
 * than step_deadline_s. */
bl_status bl_trainer_await_save(bl_trainer *trainer);
/* file_work.c: runs fn in a thread while all ranks meet, until no rank has work left: a rank whose
 * disk is slow is not missing. fn NULL: this rank has no work. Collective, also after a failure of
 * fn, which it then returns; with one rank, a plain call. BL_EIO: nothing was read or written for
 * longer than step_deadline_s. BL_ELIMIT: no thread. */
typedef bl_status (*bl_trainer_work_fn)(void *user);
bl_status bl_trainer_work_on_files(const bl_trainer *trainer, bl_trainer_work_fn fn, void *user);
/* That BL_EIO, of other work. */
bl_status bl_trainer_check_files(const bl_trainer *trainer, const bl_file_progress *progress);
/* Whether this rank has done its current part of a checkpoint behind the steps. When all ranks
 * have, each calls advance_save, which is collective: the first call makes rank 0 commit the
 * checkpoint, the second call completes it. */
bool bl_trainer_save_is_done(const bl_trainer *trainer);
bl_status bl_trainer_advance_save(bl_trainer *trainer);
/* save by one thread for all ranks, after their threads have ended, without communication.
 * trainers[n_ranks]. */
bl_status bl_trainers_save(bl_trainer *trainers, int64_t step);
/* Call it before bl_trainers_save: waits for a commit that has begun, and drops a checkpoint
 * without one. */
void bl_trainers_settle_save(bl_trainer *trainers);
/* After a failure of the run: stops writing, and waits for the writing thread. */
void bl_trainer_drop_save(bl_trainer *trainer);

#endif
