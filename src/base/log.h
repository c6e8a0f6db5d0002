/* SPDX-License-Identifier: Apache-2.0 */
/* log.h -- what a run tells the person who watches it, on stderr; one whole line a call, safe from any
 * thread. */
#ifndef BALLAST_BASE_LOG_H
#define BALLAST_BASE_LOG_H

#include "base/status.h"

void bl_log_info(const char *format, ...) BL_PRINTF(1, 2);
void bl_log_warning(const char *format, ...) BL_PRINTF(1, 2); /* "warning: " before it */

/* Rewrites one line of a terminal in place; "" takes it away. Elsewhere, and under mpirun, nothing is
 * written. */
void bl_log_progress(const char *format, ...) BL_PRINTF(1, 2);

/* The one line that a failure prints: "ballast: error: " and the text, whatever bytes it contains. */
void bl_log_error(const char *text);

/* From now on nothing but errors is logged: in all processes of a job but the first. Set once, before there
 * are threads. */
void bl_log_set_silent(void);

#endif
