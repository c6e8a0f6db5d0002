/* SPDX-License-Identifier: Apache-2.0 */
/* spans.h -- the spans of a run's trace and those that a plan simulates, as lists of lines that
 * must be the same. Times are not compared. */
#ifndef BALLAST_TESTS_TRAIN_SPANS_H
#define BALLAST_TESTS_TRAIN_SPANS_H

#include "device/timeline.h"

enum { SPANS_MOST = 8192, SPANS_BYTES = 80 };

typedef struct spans {
    int n;
    char text[SPANS_MOST][SPANS_BYTES];
} spans;

/* Adds the spans of rank 0 of a trace file, which lists them in the order in which they were
 * queued. */
void spans_read_trace(const char *path, spans *out);

/* bl_span_sink; user: spans. */
void spans_add_foreseen(void *user, const bl_span *span);

/* Fails at the first difference, or if there are fewer than `least`. */
void spans_assert_same(const spans *done, const spans *foreseen, int least);

#endif
