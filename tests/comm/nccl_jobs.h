/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_jobs.h -- jobs of the tests of the GPU communicator: that end well, that fail as they
 * should, and the logs of the fake NCCL (emulator/). */
#ifndef BALLAST_TESTS_NCCL_JOBS_H
#define BALLAST_TESTS_NCCL_JOBS_H

#include "nccl_cases.h"

#define SETTINGS(...) ((const char *const[]){__VA_ARGS__, NULL})

/* Runs a case; fails unless all ranks end with 0. */
void nccl_run_fine(const char *name, int n_ranks, const char *const *settings);

/* Whether the job fails as it should. */
typedef bool (*nccl_attempt)(const void *arg);

/* A rank that the machine holds up for some seconds may end a job in another way, and rightly: it
 * is tried again, visibly. What is wrong with the communicator is wrong each time. */
void nccl_try_again(const char *name, nccl_attempt attempt, const void *arg);

/* Runs a case that ends with `code` and one line of error with `text` in it. */
void nccl_run_failing(const char *name, int n_ranks, const char *const *settings, int code,
                      const char *text);

/* A log of the fake NCCL, "FILE.RANK". */
typedef struct nccl_log {
    char file[32], setting[64];
} nccl_log;

void nccl_log_open(nccl_log *log);
const char *nccl_log_read(const nccl_log *log, int rank);             /* a static text */
void nccl_log_await(const nccl_log *log, int rank, const char *line); /* for a minute */
void nccl_log_close(const nccl_log *log, int n_ranks);

#endif
