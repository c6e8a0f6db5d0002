/* SPDX-License-Identifier: Apache-2.0 */
/* report.h -- report.svg: a run as one picture, drawn from its metrics log. Loss and validation
 * loss, learning rate, tokens per second, and where the time of steps went.
 *
 * Curves are in groups with data-x and data-y, the values at the edges of the panel (left, right;
 * bottom, top), and data-box, its left, top, width and height: positions can be read back as
 * values. Validation losses have their values as titles, which viewers show. */
#ifndef BALLAST_TRAIN_REPORT_REPORT_H
#define BALLAST_TRAIN_REPORT_REPORT_H

#include <stdbool.h>
#include <stdint.h>

#include "base/status.h"

typedef struct bl_report {
    const char *model;   /* a path; its last part is shown */
    int64_t total_steps; /* that the run is configured for */
} bl_report;

/* Draws the first log_bytes of the metrics log `log_path` into `path`, which is replaced as a
 * whole. *is_written: there is a step in them; else nothing is written. Any thread. BL_EUSAGE:
 * another kind of file is there; BL_EIO, BL_ELIMIT name the file; BL_ENOMEM. */
bl_status bl_report_write(const char *log_path, int64_t log_bytes, const bl_report *report,
                          const char *path, bool *is_written);

#endif
