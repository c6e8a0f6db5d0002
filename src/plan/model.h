/* SPDX-License-Identifier: Apache-2.0 */
/* model.h -- the model that a plan is for: by name, without a checkpoint, or from a directory's
 * config.json and the headers of its tensors' files. */
#ifndef BALLAST_PLAN_MODEL_H
#define BALLAST_PLAN_MODEL_H

#include "model/weights.h"

enum { BL_PLAN_MODEL_NAME_BYTES = 128 };

typedef struct bl_plan_model {
    char name[BL_PLAN_MODEL_NAME_BYTES];
    bl_model_config config;
    bl_format *formats; /* [layer * n_projections + projection]: as held in memory */
    bl_base_formats base_formats;
    bl_dtype embedding_dtype, head_dtype;
    bl_model_stored_size stored;
} bl_plan_model;

/* `name`: "llama-3.1-405b" and so on (hyphens and case do not count), or a Hugging Face directory,
 * of which no weight is read. Formats are those of bl_model_open for that `format`. BL_EUSAGE lists
 * the names; the errors of bl_model_open_headers. */
bl_status bl_plan_model_open(const char *name, bl_base_format format, bl_plan_model *out);
void bl_plan_model_close(bl_plan_model *model);

/* i from 0; NULL: no more. */
const char *bl_plan_model_name(size_t i);

#endif
