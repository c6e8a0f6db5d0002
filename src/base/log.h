/* SPDX-License-Identifier: Apache-2.0 */
/* log.h -- a run's messages to its user, on stderr; one whole line per call, safe from any
 * thread. */
#ifndef BALLAST_BASE_LOG_H
#define BALLAST_BASE_LOG_H

#include <stdbool.h>

#include "base/status.h"

/* On a terminal, lines are broken between words, except those that begin with BL_LOG_VERBATIM:
 * commands, for copying. */
#define BL_LOG_VERBATIM "    "
void bl_log_info(const char *format, ...) BL_PRINTF(1, 2);
void bl_log_warning(const char *format, ...) BL_PRINTF(1, 2); /* "warning: " before it */

/* From now on, each line that this thread logs by these two begins with "LABEL: ", after the
 * warning's word; the thread's progress is not drawn. Borrowed until the next call; NULL: no label,
 * as at the start. */
void bl_log_set_label(const char *label);

/* Columns of the terminal on stderr whose line bl_log_progress rewrites, as wide as it is now; 0:
 * there is none, nor under mpirun. */
int bl_log_columns(void);

/* Rewrites one line of a terminal in place, cut to its width; "" clears it. Elsewhere nothing is
 * written. The next log line takes its place; the next progress is drawn below that. */
void bl_log_progress(const char *format, ...) BL_PRINTF(1, 2);
/* For work that takes minutes, called repeatedly: rewrites one line five times per second on a
 * terminal, and logs a line every five seconds elsewhere. *told_s is the caller's: bl_now_s()
 * when the work began, then when something was said last. False: nothing was. */
bool bl_log_advance(double *told_s, const char *format, ...) BL_PRINTF(2, 3);
/* Ctrl-C: the terminal shows ^C where the line ended; signal handlers may call it. */
void bl_log_note_echo(void);
/* Takes the line away; nothing without a line. */
void bl_log_finish_progress(void);

/* The one line that a failure prints: "ballast: error: " and the text, whatever bytes it
 * contains. */
void bl_log_error(const char *text);
/* One of several failures that are known at once, before the line of bl_log_error; nothing where
 * only errors are logged, since another process of the job prints it. */
void bl_log_problem(const char *text);
/* What a run that was stopped on request prints in its place: "ballast: " and the text. */
void bl_log_stopped(const char *text);
/* The same from a signal handler. */
void bl_log_stopped_at_exit(const char *text);

/* Whether nothing but errors is logged from now on: in all processes of a job but the first. */
void bl_log_set_silent(bool is_silent);

/* From now on the byte at `shared`, 0 at first, says whether a line of progress is on the terminal:
 * of processes that write to one terminal and map that byte, each knows of the others' line. Before
 * there are threads. The caller's; mapped while anything is logged. */
void bl_log_share_line(void *shared);

#endif
