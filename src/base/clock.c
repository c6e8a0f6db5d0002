/* SPDX-License-Identifier: Apache-2.0 */
/* clock.c -- CLOCK_MONOTONIC and the processor time of the process, in seconds; durations as
 * text. */
#include "base/clock.h"

#include <stdio.h>
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

void bl_clock_text(double seconds, char text[BL_CLOCK_TEXT_BYTES])
{
    long long s = seconds < 0 ? 0 : (long long)(seconds + 0.5), hours = s / 3600;
    if (hours > 0)
        snprintf(text, BL_CLOCK_TEXT_BYTES, "%lld:%02lld:%02lld", hours, s / 60 % 60, s % 60);
    else
        snprintf(text, BL_CLOCK_TEXT_BYTES, "%lld:%02lld", s / 60, s % 60);
}
