/* SPDX-License-Identifier: Apache-2.0 */
/* clock.c -- CLOCK_MONOTONIC and processor time, in seconds; durations as text. */
#include "base/clock.h"

#include <stdio.h>
#include <time.h>

static double read_s(clockid_t clock)
{
    struct timespec time;
    clock_gettime(clock, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

double bl_now_s(void)
{
    return read_s(CLOCK_MONOTONIC);
}

double bl_processor_s(void)
{
    return read_s(CLOCK_PROCESS_CPUTIME_ID);
}

double bl_thread_processor_s(void)
{
    return read_s(CLOCK_THREAD_CPUTIME_ID);
}

void bl_clock_text(double seconds, char text[BL_CLOCK_TEXT_BYTES])
{
    long long s = seconds < 0 ? 0 : (long long)(seconds + 0.5), hours = s / 3600;
    if (hours > 0)
        snprintf(text, BL_CLOCK_TEXT_BYTES, "%lld:%02lld:%02lld", hours, s / 60 % 60, s % 60);
    else
        snprintf(text, BL_CLOCK_TEXT_BYTES, "%lld:%02lld", s / 60, s % 60);
}
