/* SPDX-License-Identifier: Apache-2.0 */
/* report_internal.h -- shared code of the files of a report; for them only. */
#ifndef BALLAST_PLAN_REPORT_INTERNAL_H
#define BALLAST_PLAN_REPORT_INTERNAL_H

#include "plan/report.h"

static const double PLAN_GB = 1e9;

enum { PLAN_NUMBER_BYTES = 32, PLAN_COLUMN_LAST = 96, PLAN_INDENT = 9 };

/* "1,425", "70.3", "0.35": three digits at least. */
const char *plan_gb(double n_bytes, char text[PLAN_NUMBER_BYTES]);

/* "2,700", "4.3", "0.036": two digits of a time, a speed or a cost, as predictions are up to 29 %
 * off. */
const char *plan_predicted(double number, char text[PLAN_NUMBER_BYTES]);

/* "device", "host", "disk": values of optimizer_tier. */
const char *plan_optimizer_tier_name(bl_tier tier);

/* A checkpoint's. BL_ENOMEM. */
bl_status plan_report_checkpoint_bytes(const bl_plan_report *report, int64_t *n_bytes);

/* report_details.c: memory by item, time by phase and by kind of op, rates. BL_ENOMEM. */
bl_status plan_report_print_details(const bl_plan_report *report, FILE *out);

#endif
