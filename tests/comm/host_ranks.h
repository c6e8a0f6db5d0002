/* SPDX-License-Identifier: Apache-2.0 */
/* host_ranks.h -- runs a function as N ranks of one host that are processes: forked, connected by
 * sockets. */
#ifndef BALLAST_TESTS_HOST_RANKS_H
#define BALLAST_TESTS_HOST_RANKS_H

#include <stdbool.h>

#include "test_ranks.h"

enum { HOST_RANKS_MAX = 8, HOST_RANKS_VALUES = 4 };

/* How a rank's process ended. */
typedef struct host_rank_end {
    bl_error error;    /* the function's result; of a process that was killed, nothing */
    bl_error reported; /* what it tells the user; BL_OK: nothing */
    int signal_number; /* that killed it; 0: none */
    int64_t values[HOST_RANKS_VALUES]; /* set by host_rank_say */
} host_rank_end;

/* As test_ranks_run: a rank that fails aborts the job. The caller has no threads; files that it has
 * open, the ranks have, too. Returns when all processes have ended; where one has not after five
 * minutes, all are killed and the test's process aborts. */
void host_ranks_run(int n_ranks, double deadline_s, test_rank_fn fn, void *arg,
                    host_rank_end *ends);

/* In a rank's process: gives the test values[idx]. */
void host_rank_say(const test_rank *self, int idx, int64_t value);

#endif
