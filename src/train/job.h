/* SPDX-License-Identifier: Apache-2.0 */
/* job.h -- between the files of train/: a job (what the ranks of this process share) and a rank. */
#ifndef BALLAST_TRAIN_JOB_H
#define BALLAST_TRAIN_JOB_H

#include <jansson.h>
#include <pthread.h>
#include <stdatomic.h>
#include <stdio.h>

#include "base/files.h"
#include "comm/launch.h"
#include "linear/base.h"
#include "model/pass.h"
#include "ops/gemm.h"
#include "store/checkpoint.h"
#include "plan/plan.h"
#include "train/adapter_state.h"
#include "train/batch.h"
#include "train/data.h"
#include "train/metrics.h"
#include "train/sampler.h"
#include "train/trace.h"
#include "train/train.h"

typedef struct bl_rank bl_rank;

/* Where a run starts: at its beginning, or after the last step of a checkpoint. */
typedef struct bl_start {
    int64_t step;           /* steps that are done */
    int64_t metrics_bytes;  /* of the log that are kept */
    int64_t evaluated_step; /* the newest evaluation in that part; -1: none */
    bool is_saved;          /* this run's newest checkpoint is that of `step` */
    char *dir;              /* of the checkpoint; NULL: from the beginning */
    int n_ranks;            /* of the run that made it */
    /* bl_llama_weights.checksum of that run, if it says so. */
    bool has_weights;
    uint64_t weights;
} bl_start;

/* Fingerprints of what results depend on; 0: no such data. */
typedef struct bl_identity {
    uint64_t model, train, validation;
} bl_identity;

/* What a run was worth. */
typedef struct bl_outcome {
    double first_loss, last_loss; /* of training */
    bl_eval_result base, trained; /* before the first step; newest */
    bl_eval_result stored;        /* of the adapter on the base as stored; rows 0: not measured */
} bl_outcome;

/* What rank 0 alone writes, and its process before and after. */
typedef struct bl_output {
    bl_dir_lock *lock; /* of output_dir; NULL in other processes and without an output */
    /* The checkpoint under construction: all ranks add to it between two barriers. */
    bl_checkpoint *saving;
    bl_metrics *metrics;
    bl_outcome outcome;
} bl_output;

/* Between the threads of a process, while the ranks run. */
typedef struct bl_control {
    atomic_int stop;    /* a signal came: end after the step */
    atomic_int abandon; /* the grace is over: end inside the step */
    atomic_int n_running;
} bl_control;

/* Read-only while the ranks run, but for the atomics and what is said to belong to rank 0. */
typedef struct bl_job {
    const bl_train_config *config;
    bl_llama_host *host;
    bl_llama_base_formats base_formats; /* of the base that is trained on */
    bl_run_data data;
    bl_lora_layout lora;
    bool evaluate_only;
    bl_plan plan;
    bl_launch *launch; /* NULL: all ranks are this process's */
    /* Of the one rank of this process, until that rank has it; NULL without launch. */
    bl_comm *world;
    bl_topology topology;
    bl_rank *ranks; /* [n_here] */

    int64_t total_steps;
    bl_start start;
    char *checkpoint_dir; /* output_dir/checkpoints */
    bl_identity identity;
    bl_trace *trace; /* NULL: none; ranks write to it as they please */
    bl_control control;
    bl_output output;
} bl_job;

struct bl_rank {
    bl_job *job;
    int index;
    pthread_t thread;
    bool started;
    bool is_at_fault; /* the loss is not finite, and the reason is among this rank's samples */
    bl_status status;
    bl_error error;

    bl_comm *world,
        *shards; /* of all ranks, on `communication`; of this rank's shard group, on `gather` */
    bl_device *device;
    bl_stream *compute, *copy, *activations; /* the last: NULL unless activations are offloaded */
    bl_stream *communication;                /* LoRA's weights, gradients, sums */
    bl_stream *gather;                       /* the base */
    bl_timeline *timeline;
    bl_timeline_totals counted; /* the part of the timeline's that metrics have had */
    bl_trace_rank trace_lane;
    bl_llama_weights *weights;
    bl_base *base;
    bl_adapter_state *state;
    bl_llama_pass *pass;
    bl_pass_adapter adapter; /* of every micro-batch where state is not NULL */
    bl_pass_micro *micro;    /* [plan.pass.max_group]: of the pass under way */
    bl_batches *batches[2];  /* the step under way and the next one */
    bl_batches *evaluation;  /* one micro-batch; NULL without validation data */
    bl_twin *counts;         /* int64_t [4]: labels, tokens, stop requests; sums of an evaluation */
    bl_twin *files;     /* bl_checkpoint_file [n_ranks]: what they have written into a checkpoint */
    bool start_differs; /* from the checkpoint that was resumed: in its weights */
    int64_t steps_done; /* optimizer steps in `state` */
    int64_t saved_step; /* of the newest checkpoint of this run; -1: none */
    int64_t evaluated_step; /* of the newest evaluation; -1: none */
    double peak_flops;
};

/* open.c. Close after any failure, too. */

/* Which ranks there are, and which of them are this process's. */
bl_status bl_job_place_ranks(bl_job *job);
/* Model, tokenizer, data and LoRA's layout, by job->config. */
bl_status bl_job_open(bl_job *job);
/* job->plan is chosen from this. */
bl_plan_input bl_job_plan_input(const bl_job *job);
/* After bl_job_open; makes offload_dir for the disk tier. BL_EUSAGE: it is not a directory. */
bl_status bl_job_choose_plan(bl_job *job);
void bl_job_close(bl_job *job);

/* ranks.c: runs the ranks of this process to their end and returns the failure that came first. While they run, signals stop a training.
 * *peak_bytes: the largest RssAnon seen. */
bl_status bl_job_run_ranks(bl_job *job, int64_t *peak_bytes);

/* rank_setup.c: everything a rank needs, and its end. Free after the thread has ended. */
bl_status bl_rank_setup(bl_rank *rank);
void bl_rank_free(bl_rank *rank);

/* rank_train.c */
bl_status bl_rank_train(bl_rank *rank);

/* evaluate.c: the mean loss over the job's validation rows; collective, the same result on every rank. */
bl_status bl_rank_evaluate(bl_rank *rank, bl_eval_result *out);

/* identity.c: what a result depends on beside the run's own keys. */

/* The fingerprints of model and data. */
bl_status bl_job_identify(bl_job *job);
/* Adds them, the model's configuration and the checksum of its weights to a checkpoint's state; for rank 0, after its weights were read. */
bl_status bl_job_describe_identity(const bl_job *job, json_t *state);
/* Prints what differs from a checkpoint's state to `out`, each with "; " after it, and keeps what its weights were. */
bl_status bl_job_list_identity(bl_job *job, const json_t *state, FILE *out);
/* After the weights were read; collective over the job. BL_EUSAGE: ranks have read different ones. BL_ECHECKPOINT: the checkpoint that is
 * resumed was made with others, and allow_resume_mismatch is off; else a warning. */
bl_status bl_rank_check_weights(bl_rank *rank);

/* resume.c: training checkpoints. */

/* Chooses job->resume_dir, start_step, ... by config->resume_from_checkpoint; refuses an output_dir that holds a run, a checkpoint
 * of another configuration, data set or model, and a disk that could not take the first checkpoint. */
bl_status bl_job_prepare_resume(bl_job *job);
/* Writes checkpoint step-`step`; collective over the ranks of the job. */
bl_status bl_rank_save(bl_rank *rank, int64_t step);
/* The same by one thread for all ranks, after their threads have ended, without communication. */
bl_status bl_job_save_all(bl_job *job, int64_t step);

/* processes.c: what a job of several processes, with a rank each, agrees on before its ranks start. Collective over the processes. */

/* Whether all see the same output_dir (a shared file system; not for an evaluation), model, data and configuration. Of the model each host
 * reads all, if it is small, or some blocks everywhere (bl_llama_fingerprint): ranks of one shard group read each row but once. */
bl_status bl_job_check_processes(bl_job *job);
/* Gives the other processes what rank 0's has chosen: resume_dir, start_step and what goes with them. */
bl_status bl_job_share_start(bl_job *job);

/* Warns of ranks whose products may round differently from rank 0's. */
bl_status bl_job_compare_machines(const bl_job *job);

/* machine.c: what else bits depend on, in a checkpoint's state; another one when it is resumed is a warning. */
bl_status bl_job_record_machine(json_t *state);
bl_status bl_job_compare_machine(const bl_job *job, const json_t *state);

/* paths.c: BL_EUSAGE when a path that the job writes is one that it reads, another one of its own, or not what can be written:
 * before anything is. */
bl_status bl_job_check_paths(const bl_job *job);

/* run.c: BL_EIO when output_dir, removed or made again, is no longer this run's. Before each write into it. */
bl_status bl_job_check_lock(const bl_job *job);
/* Ends a checkpoint that does not come about; in a folder of another run's nothing is removed. */
void bl_job_abort_saving(bl_job *job);
bl_status bl_job_trace_path(const bl_job *job,
                            char **path); /* of this process; config->trace is set */

/* output.c: README.md beside the adapter. */
bl_status bl_job_write_readme(const bl_job *job, const char *dir);

#endif
