/* SPDX-License-Identifier: Apache-2.0 */
/* deadlines.h -- when a watch and the guard of GPUs' communicators declare a rank late. Functions
 * of times alone: watch.c and guard.c have the clock, tests have their own.
 *
 * A process that was stopped resets its deadlines when it goes on (round_internal.h). */
#ifndef BALLAST_COMM_NCCL_DEADLINES_H
#define BALLAST_COMM_NCCL_DEADLINES_H

#include "comm/round_internal.h"

/* For the rank's thread to come out of a call, for an abort to return, and for a watch to hear that
 * the job has failed. */
#define COMM_NCCL_HARD_S 2.5

/* deadline_s 0: there is none. */
bool comm_nccl_is_overdue(double since_s, double deadline_s, double now_s);

/* Whether a watch starts its clocks again: it began its last round at round_s, slept from looked_s
 * on, and wakes now. It does after an absence in its sleep; and after a slow look, but a look may
 * be slow by itself, each time: so only once in a row. */
bool comm_nccl_watch_pardons(double round_s, double looked_s, double now_s, bool *was_slow);

typedef struct comm_nccl_guard_clock {
    comm_round round;
    double back_s;   /* when the guard came back from its last absence, or BL_NEVER_S */
    double failed_s; /* when it saw that the job had failed, or BL_NEVER_S */
} comm_nccl_guard_clock;

typedef enum comm_nccl_lateness {
    COMM_NCCL_IN_TIME,
    COMM_NCCL_LATE, /* the job has failed; the watch does not know it yet, or hangs in its abort */
    COMM_NCCL_HANGS /* for the deadline, in a job that is well otherwise */
} comm_nccl_lateness;

void comm_nccl_guard_begin_round(comm_nccl_guard_clock *clock, double now_s);
/* Of a watch whose latest round began at round_s; BL_NEVER_S: it makes none. */
comm_nccl_lateness comm_nccl_guard_judge(comm_nccl_guard_clock *clock, double round_s,
                                         bool has_failed, double deadline_s, double now_s);

#endif
