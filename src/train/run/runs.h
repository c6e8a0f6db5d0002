/* SPDX-License-Identifier: Apache-2.0 */
/* runs.h -- the steps of a training of one or several runs, in the order in which run.c or
 * queue.c calls them. */
#ifndef BALLAST_TRAIN_RUN_RUNS_H
#define BALLAST_TRAIN_RUN_RUNS_H

#include "train/training_internal.h"

/* ---- one_run.c: the steps of each run ---- */

/* Opens the run's rows and computes the sizes of its adapter. host: as for
 * bl_run_data_open_training. */
bl_status bl_job_open_rows(bl_job *job, bl_host_memory *host);
/* Compares the run over the processes, before they plan together. Collective over the
 * processes. */
bl_status bl_job_compare_processes(bl_job *job, const bl_output *output);
/* Shares the start that bl_training_find_start has chosen, and begins the log. Checks the lock of
 * output_dir, which was taken before the data were read. Collective over the processes. */
bl_status bl_training_begin(bl_training *training, bl_output *output);
/* Writes README.md and report.svg. In rank 0's process, after the adapter was written. */
bl_status bl_training_finish(bl_training *training, bl_output *output);
void bl_train_run_close(bl_train_run_state *run);

/* ---- plan_runs.c ---- */

/* For runs that join a loaded base. */
typedef struct bl_plan_limits {
    const bl_train_config *config; /* instead of the first run's; has the base's placement */
    int64_t available_bytes, gpu_available_bytes; /* as bl_plan_input's */
} bl_plan_limits;

/* Plans placement, pass and memory for all runs, and logs the memory. The first run's job has the
 * model and the ranks. limits NULL: the base is not loaded yet. BL_ENOMEM: the runs need more
 * memory than is available. Collective over the processes. */
bl_status bl_trainings_plan(const bl_training *const *trainings, int n,
                            const bl_plan_limits *limits, bl_job *job);
/* Logs the products and the model. */
bl_status bl_job_print_model(const bl_job *job, bool has_adapter);

#endif
