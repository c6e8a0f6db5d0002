/* SPDX-License-Identifier: Apache-2.0 */
/* clock.h -- the one clock that durations and deadlines are measured with. */
#ifndef BALLAST_BASE_CLOCK_H
#define BALLAST_BASE_CLOCK_H

#include <math.h>

/* CLOCK_MONOTONIC, seconds from an arbitrary start: 0 and negative values are times like others. */
double bl_now_s(void);
/* The time of an event that has not happened: before every time, and infinitely long ago. */
#define BL_NEVER_S (-HUGE_VAL)
/* Seconds of the processor that this process has used so far, all its threads together. */
double bl_processor_s(void);
double bl_thread_processor_s(void); /* of the calling thread alone */

enum { BL_CLOCK_TEXT_BYTES = 24 };
/* A duration: 1:23, or 2:01:23 from an hour on; below zero, 0:00. */
void bl_clock_text(double seconds, char text[BL_CLOCK_TEXT_BYTES]);

#endif
