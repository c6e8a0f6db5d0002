/* SPDX-License-Identifier: Apache-2.0 */
/* report_internal.h -- panels of report.svg: axes and curves. */
#ifndef BALLAST_TRAIN_REPORT_REPORT_INTERNAL_H
#define BALLAST_TRAIN_REPORT_REPORT_INTERNAL_H

#include <stdio.h>

#include "train/report/series.h"

/* A box of the picture, pixels, and the values at its edges: x0 < x1, y0 < y1. */
typedef struct report_panel {
    const char *id, *title;
    double left, top, width, height;
    double x0, x1, y0, y1;
} report_panel;

typedef double (*report_value_fn)(const bl_series_bin *bin);

/* Axes for values from `least` to `most` with a margin, not below `floor`; equal ones get a range
 * around them. */
void train_panel_fit(report_panel *panel, double least, double most, double floor);
double train_panel_x(const report_panel *panel, double x);
double train_panel_y(const report_panel *panel, double y);

/* Begins the group of a panel, with its frame, title, grid and numbers; train_panel_end ends it.
 * format: of the numbers at the left. */
void train_panel_begin(FILE *out, const report_panel *panel, const char *format);
void train_panel_end(FILE *out);
/* A line through value(bin), at the last step of each; a dot where there is one only. */
void train_panel_line(FILE *out, const report_panel *panel, const char *id, const char *style,
                      const bl_series *series, report_value_fn value);
/* The same line, each point a mean over `around` bins before and after it, fewer at the ends. */
void train_panel_smooth_line(FILE *out, const report_panel *panel, const char *id,
                             const char *style, const bl_series *series, report_value_fn value,
                             int64_t around);
/* The area between lower(bin) and upper(bin). */
void train_panel_area(FILE *out, const report_panel *panel, const char *id, const char *style,
                      const bl_series *series, const double *lower, const double *upper);

#endif
