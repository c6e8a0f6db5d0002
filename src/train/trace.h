/* SPDX-License-Identifier: Apache-2.0 */
/* trace.h -- the work of the streams, as a file for Perfetto or chrome://tracing: the JSON object
 * format of Chrome's trace events. A process is a rank, a thread one of its lanes
 * (device/timeline.h), time is in microseconds of CLOCK_MONOTONIC. Waits of compute are in the
 * compute lane, inside the visit that waited. */
#ifndef BALLAST_TRAIN_TRACE_H
#define BALLAST_TRAIN_TRACE_H

#include "base/status.h"
#include "device/timeline.h"

/* How each trace begins: only such a file is replaced by another one. */
#define BL_TRACE_MARK "{\"displayTimeUnit\":\"ms\",\"traceEvents\":["

typedef struct bl_trace bl_trace;

/* Creates the file, in place of one that is there. The ranks first_rank .. first_rank + n_ranks - 1
 * will write into it. */
bl_status bl_trace_open(const char *path, int first_rank, int n_ranks, bl_trace **out);
/* Completes and closes the file. BL_EIO when something could not be written, now or before; NULL is
 * fine. */
bl_status bl_trace_close(bl_trace *trace);

/* A bl_span_sink: user is a bl_trace_rank. Any number of threads, each with its own. */
typedef struct bl_trace_rank {
    bl_trace *trace;
    int rank;
} bl_trace_rank;
void bl_trace_span(void *user, const bl_span *span);

#endif
