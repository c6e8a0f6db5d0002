/* SPDX-License-Identifier: Apache-2.0 */
/* made_model.h -- a small model in a folder: its rows are groups of 32, but no block of 128 divides
 * its shapes. */
#ifndef BALLAST_TESTS_MODEL_MADE_MODEL_H
#define BALLAST_TESTS_MODEL_MADE_MODEL_H

#include "model/weights.h"

/* How a made model is stored. */
typedef struct made {
    bl_dtype dtype;       /* of everything but FP8 weights */
    bl_scale_kind scales; /* of the projections; NONE: they are `dtype` too */
    bool tied, has_embedding, has_head;
    const char *poisoned;   /* a tensor with a NaN, or NULL */
    int64_t poisoned_index; /* element */
} made;

enum { HIDDEN = 160, INTER = 288, HEADS = 4, KV_HEADS = 2, HEAD_DIM = 24, VOCAB = 50, LAYERS = 2 };

/* Writes the model into the folder of tmp_dir.h, in place of the one before; its folder. A value is
 * the same in every model, whatever its dtype. The tied table is one by either name. */
const char *make_model(const made *m);
/* For 16 positions. */
bl_model *open_host(const char *dir, bl_base_format format);

#endif
