/* SPDX-License-Identifier: Apache-2.0 */
/* what_if.h -- plans a training again for each of several values of one thing: a key of the
 * configuration, a figure of the machine, the machine itself or the length of its rows. */
#ifndef BALLAST_PLAN_WHAT_IF_H
#define BALLAST_PLAN_WHAT_IF_H

#include <jansson.h>
#include <stdio.h>

#include "plan/case.h"
#include "plan/search.h"

enum { BL_WHAT_IF_VALUES = 32, BL_WHAT_IF_VALUE_BYTES = 64 };

/* Borrowed for the call. */
typedef struct bl_what_if_case {
    bl_plan_machine machine; /* as bl_plan_case_open_on takes them */
    int64_t row_tokens;
    bl_plan_objective objective; /* on GPUs */
    int argc;
    char *const *argv;
} bl_what_if_case;

typedef struct bl_what_if_row {
    char value[BL_WHAT_IF_VALUE_BYTES];
    bool fits;
    double device_bytes, host_bytes; /* of a rank; of a host */
    bl_time_estimate time;           /* zero where it does not fit */
} bl_what_if_row;

typedef struct bl_what_if {
    char key[BL_WHAT_IF_VALUE_BYTES];
    char title[2 * BL_WHAT_IF_VALUE_BYTES]; /* model and machine */
    int n_rows;
    bl_what_if_row rows[BL_WHAT_IF_VALUES];
} bl_what_if;

/* spec: "KEY=a,b,c"; KEY is hardware, tokens, a figure of bl_figures or a key of a training, which
 * takes the place of one in argv. For each value the open keys are chosen again (search.h); a CPU's
 * plan is that of a training. BL_EUSAGE names the mistake in the spec; errors of
 * bl_plan_case_open. */
bl_status bl_what_if_run(const bl_what_if_case *c, const char *spec, bl_what_if *out);

/* At most 100 columns. */
void bl_what_if_print(const bl_what_if *what_if, FILE *out);

/* The caller's to json_decref; BL_ENOMEM. */
bl_status bl_what_if_describe(const bl_what_if *what_if, json_t **out);

/* An SVG of tokens per second over the values. Errors as bl_file_write_atomic's. */
bl_status bl_what_if_draw(const bl_what_if *what_if, const char *path);

#endif
