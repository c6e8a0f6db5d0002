/* SPDX-License-Identifier: Apache-2.0 */
/* round_internal.h -- the rounds of a thread that checks several times per second whether a rank is
 * late: the wire's thread and the threads that wait for it, the watch of a communicator of GPUs, a
 * rank's guard.
 *
 * A round that begins much later than it should means that the process was stopped (Ctrl-Z) and
 * continues. It has not waited for other ranks meanwhile, so its clocks restart. The caller passes
 * the time, so tests pass theirs. */
#ifndef BALLAST_COMM_ROUND_INTERNAL_H
#define BALLAST_COMM_ROUND_INTERNAL_H

#include <stdbool.h>

/* A sleep of some tenths of a second that takes so long. */
#define COMM_ABSENCE_S 2.0

typedef struct comm_round {
    double at_s; /* when the latest one began */
} comm_round;

static inline bool comm_was_absent(double from_s, double to_s)
{
    return to_s - from_s > COMM_ABSENCE_S;
}

/* Whether the process was absent before this round. */
static inline bool comm_round_begin(comm_round *round, double now_s)
{
    bool was_absent = comm_was_absent(round->at_s, now_s);
    round->at_s = now_s;
    return was_absent;
}

#endif
