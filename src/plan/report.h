/* SPDX-License-Identifier: Apache-2.0 */
/* report.h -- a plan, said: on one screen, as JSON, as a picture. */
#ifndef BALLAST_PLAN_REPORT_H
#define BALLAST_PLAN_REPORT_H

#include <jansson.h>
#include <stdio.h>

#include "plan/case.h"
#include "plan/search.h"

/* All borrowed. */
typedef struct bl_plan_report {
    const bl_plan_case *c;
    const bl_train_config *config; /* as chosen */
    const bl_plan *plan;
    const bl_time_estimate *time;
    const bl_plan_choice *choice; /* NULL: nothing was chosen by time (a CPU) */
    double total_tokens;          /* of the training whose time and energy are told */
} bl_plan_report;

/* Seconds and joules of total_tokens; energy 0: the machine's power is not known. */
double bl_plan_report_seconds(const bl_plan_report *report);
double bl_plan_report_joules(const bl_plan_report *report);

/* Of which peak time->mfu is a part: "bf16". */
const char *bl_plan_report_peak(const bl_plan_report *report);

/* At most 100 columns. */
void bl_plan_report_print(const bl_plan_report *report, FILE *out);

/* docs/model.md lists the keys. The caller's to json_decref; BL_ENOMEM. */
bl_status bl_plan_report_describe(const bl_plan_report *report, json_t **out);

/* An SVG of what lies where: bars of a rank's device memory, a host's memory and its disk, to the scale of
 * what there is. Errors as bl_file_write_atomic's. */
bl_status bl_plan_draw_memory(const bl_plan_report *report, const char *path);

/* An SVG of the streams of a rank during a layer's visits (time.h: bl_time_draw). */
bl_status bl_plan_draw_streams(const bl_plan_report *report, const char *path);

#endif
