/* SPDX-License-Identifier: Apache-2.0 */
/* runs.h -- the parts of a job of runs, in the order in which run.c, or a queue (queue.c), calls
 * them. */
#ifndef BALLAST_TRAIN_RUN_RUNS_H
#define BALLAST_TRAIN_RUN_RUNS_H

#include "train/training_internal.h"

/* ---- one_run.c: what a run has alone ---- */

/* Its rows and the sizes of its adapter. host: as bl_run_data_open_training. */
bl_status bl_job_open_rows(bl_job *job, bl_host_memory *host);
/* That the processes of a job are in the same run, before they plan together. Collective over the
 * processes. */
bl_status bl_job_compare_processes(bl_job *job, const bl_output *output);
/* Shares the start that bl_training_find_start has chosen, and begins the log. output_dir was
 * locked before the data were read: by now another run may have it, or no run. Collective over the
 * processes. */
bl_status bl_training_begin(bl_training *training, bl_output *output);
/* README.md and report.svg. In the process of rank 0, after the adapter was written. */
bl_status bl_training_finish(bl_training *training, bl_output *output);
void bl_train_run_close(bl_train_run_state *run);

/* ---- plan_runs.c ---- */

/* For runs that join a base which is placed already. */
typedef struct bl_plan_limits {
    const bl_train_config *config; /* in place of the first run's: its placement is the base's */
    int64_t available_bytes, gpu_available_bytes; /* as bl_plan_input's */
} bl_plan_limits;

/* Plans for all the runs: their job's placement and pass, and memory, which is logged. The first
 * one's job gives the model and the ranks. limits NULL: the base is not there yet. BL_ENOMEM: they
 * need more memory than there is. Collective over the processes. */
bl_status bl_trainings_plan(const bl_training *const *trainings, int n,
                            const bl_plan_limits *limits, bl_job *job);
/* Logs the products and the model. */
bl_status bl_job_print_model(const bl_job *job, bool has_adapter);

#endif
