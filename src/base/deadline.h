/* SPDX-License-Identifier: Apache-2.0 */
/* deadline.h -- the time that a thread may spend on one text or conversation of a row, or on
 * reading one tokenizer or template. Interpreters and matchers count their work; this bounds the
 * cost of what they count too low.
 *
 * It is over when the limit has passed on CLOCK_MONOTONIC and the thread was computing for a fifth
 * of it: a stopped process or a busy machine ends no run. Rows of published templates and
 * tokenizers need a thousandth of it, so that no result depends on the clock. */
#ifndef BALLAST_BASE_DEADLINE_H
#define BALLAST_BASE_DEADLINE_H

#include <stdbool.h>
#include <stddef.h>

enum { BL_DEADLINE_S = 10 }; /* for up to 1 MiB of input, and for each further MiB */

/* Begins a deadline for n_bytes of input. False: this thread has one already, which counts. */
bool bl_deadline_begin(size_t n_bytes);
/* Ends it; `begun` is what bl_deadline_begin returned. */
void bl_deadline_end(bool begun);
/* Whether it is over, and its limit in seconds. False without a deadline. */
bool bl_deadline_is_over(double *limit_s);

#endif
