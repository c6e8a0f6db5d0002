/* SPDX-License-Identifier: Apache-2.0 */
/* ladder_report.h -- the memory of classical strategies: as a table, as JSON, as a picture. */
#ifndef BALLAST_PLAN_LADDER_REPORT_H
#define BALLAST_PLAN_LADDER_REPORT_H

#include <jansson.h>
#include <stdio.h>

#include "plan/case.h"
#include "plan/ladder.h"

/* All borrowed. Of each device one sequence at a time. */
typedef struct bl_ladder_case {
    const bl_hardware *hardware;
    const char *model_name;
    const bl_model_config *model;
    int64_t length, lora_r;
    const char *model_path;  /* as bl_plan_model_open takes it */
    bl_plan_machine machine; /* what `hardware` was opened from */
} bl_ladder_case;

/* A rung's keys for `ballast train` and `ballast plan`: one sequence per GPU, all activations
 * recomputed. */
enum { BL_LADDER_KEYS_BYTES = 512 };
typedef struct bl_ladder_run {
    char keys[BL_LADDER_KEYS_BYTES]; /* "--key value --key value"; "": not supported */
    char reason[256];                /* why not; "": supported */
    /* Planned with these keys: per GPU, per host. */
    int64_t device_bytes, host_bytes;
    bool fits; /* by the rule of search.h */
} bl_ladder_run;

/* ladder_run.c: the plan of one rung; a BL_EUSAGE of its keys is the reason. BL_ENOMEM; errors of
 * bl_plan_case_open_on and bl_plan_search. */
bl_status bl_ladder_plan(const bl_ladder_case *c, size_t rung, bl_ladder_run *out);

/* Every rung for one model: GB of a device by kind, and whether it fits; then bl_ladder_plan's keys
 * and memory of each. At most 100 columns. Errors as bl_ladder_plan's. */
bl_status bl_ladder_print(const bl_ladder_case *c, FILE *out);
/* {"ladder": [{"strategy", "weights_bytes", ..., "fits", "ballast": {"keys", "device_bytes",
 * "host_bytes", "fits"}}, ...], "room_bytes"}; "ballast": {"unsupported"} where it has no such run.
 * The caller's to json_decref; errors as bl_ladder_plan's. */
bl_status bl_ladder_describe(const bl_ladder_case *c, json_t **out);
/* An SVG: a bar per rung on a logarithmic scale, next to a device's memory. Errors as
 * bl_file_write_atomic's. */
bl_status bl_ladder_draw(const bl_ladder_case *c, const char *path);

/* For models (names of bl_plan_model_open) and lengths in tokens: bl_strategy_choose's, a line a
 * model. BL_EUSAGE: a model's name. */
bl_status bl_family_print(const bl_hardware *hardware, const char *const *models, size_t n_models,
                          const int64_t *lengths, size_t n_lengths, int64_t lora_r, FILE *out);

#endif
