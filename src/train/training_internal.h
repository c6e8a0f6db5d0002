/* SPDX-License-Identifier: Apache-2.0 */
/* training_internal.h -- the parts of a training besides its job: its start and its output. */
#ifndef BALLAST_TRAIN_TRAINING_INTERNAL_H
#define BALLAST_TRAIN_TRAINING_INTERNAL_H

#include <jansson.h>
#include <stdio.h>

#include "base/file_list.h"
#include "base/files.h"
#include "ops/gemm.h"
#include "store/checkpoint.h"
#include "train/job.h"
#include "train/metrics.h"

enum { BL_MAX_RUNGS = 32 };
/* A run's state of successive halving (rank/rungs.h). */
typedef struct bl_rungs {
    int n; /* rungs that the run has reached */
    double loss[BL_MAX_RUNGS];
    int64_t stopped_at; /* steps of the rung at which it was stopped; 0: none */
} bl_rungs;

/* Where a training starts: at its beginning, or after the last step of a checkpoint. */
typedef struct bl_start {
    int64_t step;           /* steps that are done */
    int64_t metrics_bytes;  /* of the log that are kept; rank 0's process */
    int64_t evaluated_step; /* the newest evaluation in that part; -1: none */
    bl_best best;           /* of the evaluations in that part */
    bl_rungs rungs;         /* in that part; stopped_at 0 */
    bool is_saved;          /* this run's newest checkpoint is that of `step` */
    /* the checkpoint's validation data were others: its losses are not this run's */
    bool other_validation;
    bool starts_over; /* output_dir has a run that goes; rank 0's process */
    char *dir;        /* of the checkpoint; NULL: from the beginning */
    int n_ranks;      /* of the run that made it */
    /* bl_model_weights.checksum of that run, if the checkpoint has it. */
    bool has_weights;
    uint64_t weights;
} bl_start;

/* Trainers have it const: nothing of it changes while the ranks run. */
typedef struct bl_training {
    const bl_train_config *config; /* the job's */
    const char *name;              /* among the runs of a job; borrowed */
    bl_job job;
    int64_t total_steps;
    bl_start start;
    char *checkpoint_dir; /* output_dir/checkpoints */
} bl_training;

/* Of the base in a checkpoint's state (JSON has no NaN): the validation data are not those of step
 * 0. */
#define BL_LOSS_UNKNOWN (-1.0)

/* The losses of a run. base.loss NaN: unknown. */
typedef struct bl_outcome {
    double first_loss, last_loss; /* of training */
    int64_t n_steps;              /* of the run, at its end */
    int64_t rung;                 /* bl_rungs.stopped_at */
    int64_t adapter_step;         /* the adapter's, at the end: n_steps, or the best one */
    bl_eval_result base, trained; /* before the first step; newest, at the end the adapter's */
    bl_eval_result stored;        /* of the adapter on the base as stored; rows 0: not measured */
} bl_outcome;

/* Names in output_dir. */
#define BL_OUTPUT_ADAPTER        "adapter_model.safetensors"
#define BL_OUTPUT_ADAPTER_CONFIG "adapter_config.json"
#define BL_OUTPUT_README         "README.md"
#define BL_OUTPUT_METRICS        "metrics.jsonl"
#define BL_OUTPUT_CONFIG         "config.resolved.yaml"
#define BL_OUTPUT_REPORT         "report.svg"
#define BL_OUTPUT_REFERENCE      "ref_log_probs.bin" /* preference/reference.h */
#define BL_OUTPUT_CHECKPOINTS    "checkpoints"
#define BL_OUTPUT_MODEL          "model" /* a directory, where all weights are trained */
#define BL_OUTPUT_RUNS           "runs"  /* event files, without logging_dir */

/* The output of a run, and its lock. Rank 0's alone while the ranks run, its process's before and
 * after; in other processes all zero except for the lock, which they only check. */
typedef struct bl_output {
    bl_dir_lock *lock;
    bl_file_list *files; /* those that runs wrote there */
    /* The incomplete checkpoint: all ranks add files to it between two barriers. */
    bl_checkpoint *saving;
    bl_metrics *metrics;
    bl_outcome outcome;
} bl_output;

/* output.c */

/* The files of a run in output_dir, without checkpoints, lock and list; NULL from the last on. */
const char *bl_output_name(size_t index);
/* Makes config->output_dir, locks it and reads the list of files that runs wrote there. BL_EUSAGE:
 * another run holds the lock, it is not a directory, or a file of bl_output_name is there that no
 * run wrote. */
bl_status bl_output_open(const char *dir, bl_output *output);
/* Lists names of bl_output_name before their files are written. BL_EUSAGE: one appeared since that
 * no run wrote. */
bl_status bl_output_list(const char *dir, bl_output *output, const char *const *added, size_t n);
/* Opens an event file for TensorBoard where report_to asks for one, and lists it; else *events is
 * NULL. first_step: as bl_events_open. */
bl_status bl_output_open_events(const bl_train_config *config, bl_output *output,
                                int64_t first_step, struct bl_events **events);
/* adopt.c: lists the files of runs that kept no list. */
bl_status bl_output_adopt(const char *dir, bl_file_list *files);
/* Once bl_output_list has listed report.svg, it stays listed: the thread that takes signals may
 * write it. BL_ENOMEM. */
bl_status bl_output_reserve_report(const char *dir, bl_output *output);
/* Draws report.svg from the metrics so far; *is_written false: there is no step yet. In rank 0's
 * process, any thread, while ranks run, too. BL_EUSAGE, BL_EIO, BL_ELIMIT, BL_ENOMEM. */
bl_status bl_training_write_report(const bl_training *training, const bl_output *output,
                                   bool *is_written);
/* BL_EIO when output_dir, removed or made again, does not belong to this run anymore. Before each
 * write into it. */
bl_status bl_output_check_lock(const bl_output *output);
/* The status of writing there, or of reading back this run's files: `st`, or, when the directory
 * was removed or replaced meanwhile, that error. */
bl_status bl_output_failure(const bl_output *output, bl_status st);
/* Removes an incomplete checkpoint, unless the directory belongs to another run by now. */
void bl_output_abort_saving(bl_output *output);
void bl_output_close(bl_output *output); /* one that is all zero is fine */

/* readme.c: the command that tries the adapter in `dir`; the caller's to free. */
bl_status bl_training_next_command(const bl_job *job, const char *dir, char **text);
/* readme.c: the text of README.md, of the adapter or of the model; the caller's to free. */
bl_status bl_training_readme(const bl_training *training, const bl_outcome *outcome,
                             const char *dir, char **text);
/* readme.c: README.md next to the adapter, in `dir`. */
bl_status bl_training_write_readme(const bl_training *training, const bl_outcome *outcome,
                                   const char *dir);

/* paths.c, before anything is written: BL_EUSAGE when an output of the training is also an input,
 * another output, or not a file that can be written. */
bl_status bl_job_check_paths(const bl_job *job);
/* paths.c: opens job->trace if config->trace is set. */
bl_status bl_job_open_trace(bl_job *job);

/* start.c: chooses training->start by config->resume_from_checkpoint, in rank 0's process, and
 * reads output->outcome from the checkpoint. Rejects an output_dir that holds a run, a checkpoint
 * of another configuration, data set or model, and a disk without space for the first checkpoint.
 * A run to be overwritten exists until bl_training_start_over. */
bl_status bl_training_find_start(bl_training *training, bl_output *output);
/* start.c: removes the run in output_dir where training->start.starts_over. In rank 0's process. */
bl_status bl_training_start_over(const bl_training *training, const bl_output *output);
/* save.c: bytes of one checkpoint, at most. */
int64_t bl_job_checkpoint_bytes(const bl_job *job);
/* save.c: adds the adapter to a checkpoint whose shards are complete; needs no rank. */
bl_status bl_job_add_adapter(const bl_job *job, bl_checkpoint *saving);
/* save.c: trained weights of a layer's projections, or over them: a checkpoint's must be as
 * many. */
int64_t bl_job_layer_floats(const bl_job *job);

/* processes.c: gives the other processes the choice of rank 0's. Collective over the processes. */
bl_status bl_job_share_start(const bl_job *job, bl_start *start);

/* identity.c: the inputs of a result besides the run's own keys, in a checkpoint's state. */

/* Adds job->identity, the model's configuration and the checksum of its weights. */
bl_status bl_job_describe_identity(const bl_job *job, uint64_t weights, json_t *state);
/* Differences between a run and the checkpoint that it resumes. */
typedef struct bl_differences {
    const bl_train_config *config;
    FILE *all, *refused; /* each with "; " after it; names that are not allowed, with ", " */
    bool is_refused;
} bl_differences;

/* The name of another model in allow_resume_mismatch. */
#define BL_DIFFERENCE_MODEL "model_name_or_path"

/* `name`: in allow_resume_mismatch. */
void bl_differences_add(bl_differences *d, const char *name, const char *format, ...)
    BL_PRINTF(3, 4);
/* Adds the differences from a checkpoint's state, and keeps the checksum of its weights. */
bl_status bl_job_list_identity(const bl_job *job, const json_t *state, bl_start *start,
                               bl_differences *d);

/* products.c: the kind of products or GPU, and the build; others when `checkpoint` is resumed are a
 * warning. Errors: those of bl_device_find_cuda. */
bl_status bl_products_describe(const bl_job *job, char text[BL_CUDA_GEMM_TEXT_BYTES]);
bl_status bl_products_record(const bl_job *job, json_t *state);
bl_status bl_products_compare(const bl_job *job, const char *checkpoint, const json_t *state);

/* Peak memory of the ranks of a process, bytes: host memory as the largest RssAnon seen; GPU memory
 * as the sum of their requests. After a training that ended well those of the process
 * that took the most, of all in the job, and, where it has several processes, the host memory of
 * all processes of this host; otherwise this process's, and on_host 0. */
typedef struct bl_peak_memory {
    int64_t host, gpu, on_host;
} bl_peak_memory;
/* A run of a job: of several, the first one's job is the lead (bl_job_borrow). */
typedef struct bl_train_run_state {
    bl_training training;
    bl_output output;
    /* After the ranks have ended: the failure of this run, if others continued. */
    bl_status status;
} bl_train_run_state;

struct bl_queue;
/* stop.c: trains runs[n] by the ranks of this process to their ends and returns the failure that
 * came first. While they run, signals stop the trainings. queue: NULL, or the source of runs
 * (run/queue.h), which join as runs[1 .. n - 1]; runs[0] is their base. */
bl_status bl_training_run_ranks(bl_train_run_state *runs, int n, struct bl_queue *queue,
                                bl_peak_memory *peak);

#endif
