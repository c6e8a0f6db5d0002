/* SPDX-License-Identifier: Apache-2.0 */
/* deadlines.c -- detects lateness, by the times that watch.c and guard.c have read. */
#include "comm/nccl/deadlines.h"

#include <math.h>

#include "base/clock.h"

bool comm_nccl_is_overdue(double since_s, double deadline_s, double now_s)
{
    return deadline_s > 0 && now_s - since_s >= deadline_s;
}

bool comm_nccl_watch_pardons(double round_s, double looked_s, double now_s, bool *was_slow)
{
    bool is_slow = comm_was_absent(round_s, looked_s);
    bool pardons = comm_was_absent(looked_s, now_s) || (is_slow && !*was_slow);

    *was_slow = is_slow;
    return pardons;
}

void comm_nccl_guard_begin_round(comm_nccl_guard_clock *clock, double now_s)
{
    if (comm_round_begin(&clock->round, now_s)) clock->back_s = now_s;
}

comm_nccl_lateness comm_nccl_guard_judge(comm_nccl_guard_clock *clock, double round_s,
                                         bool has_failed, double deadline_s, double now_s)
{
    double since_s = fmax(round_s, clock->back_s);

    if (round_s == BL_NEVER_S) return COMM_NCCL_IN_TIME;
    if (has_failed) {
        if (clock->failed_s == BL_NEVER_S) clock->failed_s = now_s;
        return now_s - fmax(since_s, clock->failed_s) > COMM_NCCL_HARD_S ? COMM_NCCL_LATE
                                                                         : COMM_NCCL_IN_TIME;
    }
    if (deadline_s <= 0) return COMM_NCCL_IN_TIME;
    return comm_nccl_is_overdue(since_s, fmax(deadline_s, COMM_NCCL_HARD_S), now_s)
               ? COMM_NCCL_HANGS
               : COMM_NCCL_IN_TIME;
}
