/* SPDX-License-Identifier: Apache-2.0 */
#include "llama/lora.h"

#include <math.h>

void bl_lora_layout_init(const bl_llama_config *config, const bl_lora_options *options,
                         bl_lora_layout *out)
{
    *out = (bl_lora_layout){0};
    for (int p = 0; p < BL_PROJECTIONS; p++) out->a_offset[p] = out->b_offset[p] = -1;
    if (!options) return;

    out->options = *options;
    out->scale = (float)(options->alpha /
                         (options->use_rslora ? sqrt((double)options->r) : (double)options->r));
    for (int p = 0; p < BL_PROJECTIONS; p++) {
        if (!options->target[p]) continue;
        bl_projection_shape(config, (bl_projection)p, &out->b_rows[p], &out->a_cols[p]);
        out->row_begin[p] = bl_projection_row(config, (bl_projection)p);
        out->a_offset[p] = out->n_floats;
        out->b_offset[p] = out->a_offset[p] + options->r * out->a_cols[p];
        out->n_floats = out->b_offset[p] + options->r * out->b_rows[p];
    }
}

void bl_lora_layout_bind(const bl_lora_layout *layout, bl_llama_matrix matrix, bl_tensor weights,
                         float *gradients, bl_lora_linear *linear)
{
    linear->n_parts = 0;
    for (int p = 0; p < BL_PROJECTIONS; p++) {
        if (layout->a_offset[p] < 0 || bl_projection_get((bl_projection)p)->matrix != matrix)
            continue;
        linear->part[linear->n_parts++] = (bl_lora_part){
            .r = layout->options.r,
            .row_begin = layout->row_begin[p],
            .rows = layout->b_rows[p],
            .scale = layout->scale,
            .A = bl_tensor_at(weights, layout->a_offset[p]),
            .B = bl_tensor_at(weights, layout->b_offset[p]),
            .dA = gradients ? gradients + layout->a_offset[p] : NULL,
            .dB = gradients ? gradients + layout->b_offset[p] : NULL,
        };
    }
}

void bl_lora_layout_initialise(const bl_lora_layout *layout, uint64_t seed, int64_t layer,
                               int64_t begin, int64_t count, float *out)
{
    for (int64_t i = 0; i < count; i++) out[i] = 0.0f;
    for (int p = 0; p < BL_PROJECTIONS; p++) {
        if (layout->a_offset[p] < 0) continue;
        int64_t a_begin = layout->a_offset[p], a_end = layout->b_offset[p];
        int64_t first = begin > a_begin ? begin : a_begin,
                last = begin + count < a_end ? begin + count : a_end;
        if (first < last)
            bl_lora_initialize(seed, layer, p, layout->a_cols[p], first - a_begin, last - first,
                               out + (first - begin));
    }
}
