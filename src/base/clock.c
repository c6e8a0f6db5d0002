/* SPDX-License-Identifier: Apache-2.0 */
/* clock.c -- CLOCK_MONOTONIC and the processor time of the process, in seconds. */
#include "base/clock.h"

#include <time.h>

double bl_now_s(void)
{
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + 1e-9 * (double)now.tv_nsec;
}

double bl_processor_s(void)
{
    struct timespec used;
    clock_gettime(CLOCK_PROCESS_CPUTIME_ID, &used);
    return (double)used.tv_sec + 1e-9 * (double)used.tv_nsec;
}
