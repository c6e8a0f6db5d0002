/* SPDX-License-Identifier: Apache-2.0 */
/* clock.h -- the one clock that durations and deadlines are measured with. */
#ifndef BALLAST_BASE_CLOCK_H
#define BALLAST_BASE_CLOCK_H

double bl_now_s(void); /* CLOCK_MONOTONIC, seconds from an arbitrary start */
/* Seconds of the processor that this process has used so far, all its threads together. */
double bl_processor_s(void);

enum { BL_CLOCK_TEXT_BYTES = 24 };
/* A duration: 1:23, or 2:01:23 from an hour on; below zero, 0:00. */
void bl_clock_text(double seconds, char text[BL_CLOCK_TEXT_BYTES]);

#endif
