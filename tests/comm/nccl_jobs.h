/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_jobs.h -- jobs for tests of the GPU communicator: jobs that succeed, jobs that fail as
 * expected, and logs of the fake NCCL (emulator/). */
#ifndef BALLAST_TESTS_NCCL_JOBS_H
#define BALLAST_TESTS_NCCL_JOBS_H

#include "nccl_cases.h"

#define SETTINGS(...) ((const char *const[]){__VA_ARGS__, NULL})

/* Runs a case; fails unless all ranks end with 0. */
void nccl_run_fine(const char *name, int n_ranks, const char *const *settings);

/* Returns whether the job failed as expected. */
typedef bool (*nccl_attempt)(const void *arg);

/* Repeats a failed attempt, and prints that it does: if a busy machine stops a rank for some
 * seconds, the job may correctly end in another way. A defect of the communicator fails in every
 * attempt. */
void nccl_try_again(const char *name, nccl_attempt attempt, const void *arg);

/* Runs a case that must end with `code` and one error line that contains `text`. */
void nccl_run_failing(const char *name, int n_ranks, const char *const *settings, int code,
                      const char *text);

/* A log of the fake NCCL, "FILE.RANK". */
typedef struct nccl_log {
    char file[32], setting[64];
} nccl_log;

void nccl_log_open(nccl_log *log);
const char *nccl_log_read(const nccl_log *log, int rank);             /* a static buffer */
void nccl_log_await(const nccl_log *log, int rank, const char *line); /* at most a minute */
void nccl_log_close(const nccl_log *log, int n_ranks);

#endif
