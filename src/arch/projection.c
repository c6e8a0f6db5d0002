/* SPDX-License-Identifier: Apache-2.0 */
#include "arch/projection.h"

static const bl_projection_info projections[BL_PROJECTIONS] = {
    [BL_Q] = {"q_proj", "self_attn.q_proj", BL_QKV, 0},
    [BL_K] = {"k_proj", "self_attn.k_proj", BL_QKV, 1},
    [BL_V] = {"v_proj", "self_attn.v_proj", BL_QKV, 2},
    [BL_O] = {"o_proj", "self_attn.o_proj", BL_OUT, 0},
    [BL_GATE] = {"gate_proj", "mlp.gate_proj", BL_GATE_UP, 0},
    [BL_UP] = {"up_proj", "mlp.up_proj", BL_GATE_UP, 1},
    [BL_DOWN] = {"down_proj", "mlp.down_proj", BL_MLP_DOWN, 0},
};

const bl_projection_info *bl_projection_get(bl_projection projection)
{
    return &projections[projection];
}

void bl_projection_shape(const bl_model_config *config, bl_projection projection, int64_t *rows,
                         int64_t *cols)
{
    int64_t q = config->n_heads * config->head_dim, kv = config->n_kv_heads * config->head_dim;
    int64_t hidden = config->hidden_size, inter = config->intermediate_size;

    switch (projections[projection].matrix) {
    case BL_QKV:
        *rows = projection == BL_Q ? q : kv;
        *cols = hidden;
        break;
    case BL_OUT:
        *rows = hidden;
        *cols = q;
        break;
    case BL_GATE_UP:
        *rows = inter;
        *cols = hidden;
        break;
    case BL_MLP_DOWN:
    default:
        *rows = hidden;
        *cols = inter;
        break;
    }
}

int64_t bl_projection_row(const bl_model_config *config, bl_projection projection)
{
    int64_t row = 0, rows, cols;
    for (int p = 0; p < (int)projection; p++) {
        if (projections[p].matrix != projections[projection].matrix) continue;
        bl_projection_shape(config, (bl_projection)p, &rows, &cols);
        row += rows;
    }
    return row;
}
