/* SPDX-License-Identifier: Apache-2.0 */
/* projection.h -- the seven frozen projections of a decoder layer, and how they are fused into four matrices. */
#ifndef BALLAST_ARCH_PROJECTION_H
#define BALLAST_ARCH_PROJECTION_H

#include <stdint.h>

#include "arch/config.h"

/* In the order of PEFT's modules, which is that of the LoRA weights. */
typedef enum bl_projection {
    BL_Q,
    BL_K,
    BL_V,
    BL_O,
    BL_GATE,
    BL_UP,
    BL_DOWN,
    BL_PROJECTIONS
} bl_projection;

/* The fused matrices of a layer: q|k|v, o, gate|up, down, stacked along the rows. The index of a matrix in a base unit. */
typedef enum bl_layer_matrix {
    BL_QKV,
    BL_OUT,
    BL_GATE_UP,
    BL_MLP_DOWN,
    BL_LAYER_MATRICES
} bl_layer_matrix;

typedef struct bl_projection_info {
    const char *name;       /* "q_proj" */
    const char *module;     /* "self_attn.q_proj" */
    bl_layer_matrix matrix; /* the fused matrix it is part of */
    int segment;            /* its place there */
} bl_projection_info;

const bl_projection_info *bl_projection_get(bl_projection projection);

/* Shape of the stored weight: rows = output channels, cols = input channels. */
void bl_projection_shape(const bl_model_config *config, bl_projection projection, int64_t *rows,
                         int64_t *cols);

/* The first row of the projection in its fused matrix. */
int64_t bl_projection_row(const bl_model_config *config, bl_projection projection);

#endif
