/* SPDX-License-Identifier: Apache-2.0 */
/* lora.c -- the places of LoRA weights in the flat vector of a layer, and their initial values. */
#include "arch/lora.h"

#include <math.h>

void bl_lora_layout_init(const bl_model_config *config, const bl_lora_options *options,
                         bl_lora_layout *out)
{
    *out = (bl_lora_layout){.arch = config->arch};
    for (int p = 0; p < BL_MAX_PROJECTIONS; p++) out->a_offset[p] = out->b_offset[p] = -1;
    if (!options) return;

    out->options = *options;
    out->scale = (float)(options->alpha /
                         (options->use_rslora ? sqrt((double)options->r) : (double)options->r));
    for (int p = 0; p < config->arch->n_projections; p++) {
        if (!options->target[p]) continue;
        bl_projection_shape(config, p, &out->b_rows[p], &out->a_cols[p]);
        out->row_begin[p] = bl_projection_row(config, p);
    }
    bl_lora_layout_stack(out, false);
}

/* The factors of projections [first, end): all A's, then all B's. */
static void place_factors(bl_lora_layout *layout, int first, int end)
{
    const bl_lora_options *o = &layout->options;

    for (int p = first; p < end; p++) {
        if (!o->target[p]) continue;
        layout->a_offset[p] = layout->n_floats;
        layout->n_floats += o->r * layout->a_cols[p];
    }
    for (int p = first; p < end; p++) {
        if (!o->target[p]) continue;
        layout->b_offset[p] = layout->n_floats;
        layout->n_floats += o->r * layout->b_rows[p];
    }
}

void bl_lora_layout_stack(bl_lora_layout *layout, bool is_stacked)
{
    const bl_projection *list = layout->arch->projections;
    int n = layout->arch->n_projections;

    layout->is_stacked = is_stacked;
    layout->n_floats = 0;
    for (int p = 0, end; p < n; p = end) { /* a matrix's projections are neighbors */
        end = p + 1;
        while (is_stacked && end < n && list[end].matrix == list[p].matrix) end++;
        place_factors(layout, p, end);
    }
}

void bl_lora_layout_bind(const bl_lora_layout *layout, bl_layer_matrix matrix, bl_tensor weights,
                         float *gradients, bl_lora_linear *linear)
{
    linear->n_parts = 0;
    linear->is_stacked = layout->is_stacked;
    for (int p = 0; p < layout->arch->n_projections; p++) {
        if (layout->a_offset[p] < 0 || layout->arch->projections[p].matrix != matrix) continue;
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

void bl_lora_layout_initialize(const bl_lora_layout *layout, uint64_t seed, int64_t layer,
                               int64_t begin, int64_t count, float *out)
{
    for (int64_t i = 0; i < count; i++) out[i] = 0.0f;
    for (int p = 0; p < layout->arch->n_projections; p++) {
        if (layout->a_offset[p] < 0) continue;
        int64_t a_begin = layout->a_offset[p],
                a_end = a_begin + layout->options.r * layout->a_cols[p];
        int64_t first = begin > a_begin ? begin : a_begin,
                last = begin + count < a_end ? begin + count : a_end;
        if (first < last)
            bl_lora_initialize(seed, layer, p, layout->a_cols[p], first - a_begin, last - first,
                               out + (first - begin));
    }
}
