/* SPDX-License-Identifier: Apache-2.0 */
/* report.h -- a plan in a dozen lines, as JSON, as a picture. */
#ifndef BALLAST_PLAN_REPORT_H
#define BALLAST_PLAN_REPORT_H

#include <jansson.h>
#include <stdio.h>

#include "plan/case.h"
#include "plan/expect.h"
#include "plan/search.h"
#include "plan/together.h"

/* All borrowed. */
typedef struct bl_plan_report {
    const bl_plan_case *c;
    const bl_train_config *config; /* as chosen */
    const bl_plan *plan;
    const bl_time_estimate *time;
    const bl_plan_choice *choice; /* NULL: nothing was chosen by time (a CPU) */
    /* Of several trainings, whose memory and time plan and time have; NULL: there is one. */
    const bl_plan_together *together;
    const bl_plan_expectation *expected; /* of the run whose time is given; NULL: total_tokens */
    double total_tokens;   /* of the training whose time, energy and price are given */
    double price_per_hour; /* of all hosts together; 0: none */
} bl_plan_report;

/* Seconds and joules of the run, or of total_tokens; energy 0: the machine's power is not known. */
double bl_plan_report_seconds(const bl_plan_report *report);
double bl_plan_report_joules(const bl_plan_report *report);
/* Before the first step, at least: the checkpoint at the disk's rate, then the host's memory
 * pinned. */
double bl_plan_report_load_seconds(const bl_plan_report *report);

/* Of loading and training; 0: no price per hour was given. */
double bl_plan_report_price(const bl_plan_report *report);
/* Of which peak time->mfu is a part: "bf16". */
const char *bl_plan_report_peak(const bl_plan_report *report);

/* A dozen lines; with details a screen. At most 100 columns. BL_ENOMEM. */
bl_status bl_plan_report_print(const bl_plan_report *report, bool has_details, FILE *out);

/* docs/internals/plan.md lists the keys. The caller's to json_decref; BL_ENOMEM. */
bl_status bl_plan_report_describe(const bl_plan_report *report, json_t **out);

/* An SVG of where memory is taken: bars of a rank's device memory, a host's memory and its disk, to
 * the scale of what there is. Errors as bl_file_write_atomic's. */
bl_status bl_plan_draw_memory(const bl_plan_report *report, const char *path);

/* An SVG of the streams of a rank during a layer's visits (time.h: bl_time_draw). */
bl_status bl_plan_draw_streams(const bl_plan_report *report, const char *path);

#endif
