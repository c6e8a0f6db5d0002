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
} bl_ladder_case;

/* Every rung for one model: GB of a device by kind, and whether it fits. At most 100 columns. */
void bl_ladder_print(const bl_ladder_case *c, FILE *out);
/* {"ladder": [{"strategy", "weights_bytes", ..., "fits"}, ...], "room_bytes"}. The caller's to
 * json_decref; BL_ENOMEM. */
bl_status bl_ladder_describe(const bl_ladder_case *c, json_t **out);
/* An SVG: a bar per rung on a logarithmic scale, next to a device's memory. Errors as
 * bl_file_write_atomic's. */
bl_status bl_ladder_draw(const bl_ladder_case *c, const char *path);

/* For models (names of bl_plan_model_open) and lengths in tokens: bl_strategy_choose's, a line a
 * model. BL_EUSAGE: a model's name. */
bl_status bl_family_print(const bl_hardware *hardware, const char *const *models, size_t n_models,
                          const int64_t *lengths, size_t n_lengths, int64_t lora_r, FILE *out);

#endif
