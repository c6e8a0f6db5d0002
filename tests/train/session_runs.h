/* SPDX-License-Identifier: Apache-2.0 */
/* session_runs.h -- the standard run (runs.h) as a loop over a session, step by step as `ballast
 * train` makes it. */
#ifndef BALLAST_TESTS_TRAIN_SESSION_RUNS_H
#define BALLAST_TESTS_TRAIN_SESSION_RUNS_H

#include "runs.h"
#include "train/session.h"

enum { SESSION_MAX_ROWS = 64, SESSION_MAX_TOKENS = 64 };

/* The rows of a run's train_file, with shifted targets, and its keys. */
typedef struct session_run {
    bl_train_config *config; /* of `ballast train` */
    int64_t n_rows, total_steps;
    bl_session_row row[SESSION_MAX_ROWS];
    int32_t ids[SESSION_MAX_ROWS][SESSION_MAX_TOKENS],
        targets[SESSION_MAX_ROWS][SESSION_MAX_TOKENS];
    bl_session_adapter *adapter;
    int64_t step; /* that are done */
    double loss;  /* of the last */
} session_run;

/* From the arguments of `ballast train`; the caller frees it with session_run_free. */
session_run *session_run_open(const golden_args *args);
void session_run_free(session_run *run);
/* Opens a session by the run's keys of the base; more[n]: other keys. */
bl_session *session_open_for(const session_run *run, const char *const *more, int n);
/* Its fresh adapter. */
void session_run_create(bl_session *session, session_run *run);
/* One forward_backward and one optim_step; on several threads for different runs. */
bl_status session_run_step(session_run *run);
/* Fails unless the adapter is that of the run's checkpoint of its step. */
void session_run_assert_step(const session_run *run);

#endif
