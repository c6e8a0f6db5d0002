/* SPDX-License-Identifier: Apache-2.0 */
/* nccl_ranks.h -- a job of processes with a GPU each, for tests of the communicator of GPUs: the
 * test program starts itself as the ranks, joined by sockets, each to run a case and to end as
 * Ballast does, with the job's status as exit code and one line of error from one of them. */
#ifndef BALLAST_TESTS_NCCL_RANKS_H
#define BALLAST_TESTS_NCCL_RANKS_H

#include <stdatomic.h>
#include <stdbool.h>
#include <sys/types.h>

#include "comm/nccl/nccl.h"
#include "device/device.h"
#include "test_ranks.h"

enum { NCCL_RANKS_MAX = 8, NCCL_TEXT_BYTES = 8192, NCCL_MARKS = 4 };

/* Shared by the ranks and the test. */
typedef struct nccl_board {
    atomic_int marks[NCCL_MARKS];
    /* when a rank's case ended with an error, CLOCK_MONOTONIC; 0: it did not */
    _Atomic(double) failed_s[NCCL_RANKS_MAX];
} nccl_board;

typedef struct nccl_self {
    int rank, n_ranks;
    nccl_board *board;
    bl_comm *host, *comm; /* of all ranks */
    bl_host_memory *host_memory;
    bl_device *device;
    bl_stream *stream;
} nccl_self;

typedef struct nccl_case {
    const char *name;
    bl_status (*body)(nccl_self *self);
    double deadline_s;
    bool trusts_order, copy_engines;
    size_t sum_bytes;
    double first_deadline_s; /* above 0: nothing is compared either */
} nccl_case;

typedef struct nccl_job {
    int n_ranks;
    pid_t pids[NCCL_RANKS_MAX];
    int text_fds[NCCL_RANKS_MAX];
    nccl_board *board;
    bool is_over[NCCL_RANKS_MAX],
        is_killed[NCCL_RANKS_MAX];              /* killed: by the test, or by a fault */
    int codes[NCCL_RANKS_MAX];                  /* exit codes; minus a signal */
    char text[NCCL_RANKS_MAX][NCCL_TEXT_BYTES]; /* stderr */
} nccl_job;

/* settings: "NAME=VALUE"... for the ranks' environment, NULL at the end. */
void nccl_start(nccl_job *job, const char *name, int n_ranks, const char *const *settings);
void nccl_wait(nccl_job *job);
void nccl_wait_but(nccl_job *job, int rank); /* for all others; nccl_wait comes after it */
void nccl_await(const nccl_job *job, int mark, int n); /* until it has been made n times */
void nccl_await_failure(const nccl_job *job, int rank);

/* Fails unless all ranks ended with 0. */
void nccl_assert_fine(const nccl_job *job);
void nccl_kill(nccl_job *job, int rank);
/* Whether every rank ended with `code`, those that were killed aside, and one line of error was
 * printed, with `text` in it. Prints the difference. */
bool nccl_has_failed(const nccl_job *job, int code, const char *text);

/* In main, first: runs a rank's case and ends, where the process was started as one. */
void nccl_become(int argc, char **argv, const nccl_case *cases);

void nccl_mark(const nccl_self *self, int mark);
void nccl_await_mark(const nccl_self *self, int mark, int n);

#endif
