/* SPDX-License-Identifier: Apache-2.0 */
/* deadline.c -- the deadline of the running thread. */
#include "base/deadline.h"

#include "base/clock.h"

enum { INPUT_BYTES = 1 << 20, PROCESSOR_PART = 5 };

static _Thread_local struct {
    bool runs;
    double begin_s, begin_processor_s, limit_s;
} deadline;

bool bl_deadline_begin(size_t n_bytes)
{
    if (deadline.runs) return false;
    deadline.runs = true;
    deadline.begin_s = bl_now_s();
    deadline.begin_processor_s = bl_thread_processor_s();
    deadline.limit_s = BL_DEADLINE_S * (1 + (double)(n_bytes / INPUT_BYTES));
    return true;
}

void bl_deadline_end(bool begun)
{
    if (begun) deadline.runs = false;
}

bool bl_deadline_is_over(double *limit_s)
{
    *limit_s = deadline.limit_s;
    return deadline.runs && bl_now_s() - deadline.begin_s > deadline.limit_s &&
           bl_thread_processor_s() - deadline.begin_processor_s > deadline.limit_s / PROCESSOR_PART;
}
