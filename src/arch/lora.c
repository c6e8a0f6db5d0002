/* SPDX-License-Identifier: Apache-2.0 */
/* lora.c -- the places of LoRA weights in the flat vector of a layer, and their initial values. */
#include "arch/lora.h"

#include <math.h>
#include <string.h>

#include "base/sizes.h"

int64_t bl_lora_factor_floats(const bl_lora_layout *layout, int p, bl_peft_factor factor)
{
    return layout->r[p] *
           (factor == BL_PEFT_A ? layout->n_experts[p] * layout->a_cols[p] : layout->b_rows[p]);
}

int64_t bl_lora_largest_r(const bl_lora_layout *layout)
{
    int64_t r = layout->options.r;

    for (int p = 0; p < BL_MAX_PROJECTIONS; p++) r = bl_max_i64(r, layout->r[p]);
    return r;
}

bool bl_lora_has_experts(const bl_lora_layout *layout)
{
    for (int p = 0; p < layout->arch->n_projections; p++)
        if (layout->a_offset[p] >= 0 && bl_arch_is_routed(layout->arch, p)) return true;
    return false;
}

int64_t bl_lora_n_weights(const bl_lora_layout *layout, int64_t n_layers)
{
    return bl_lora_floats_before(layout, n_layers) + layout->n_table_floats;
}

int64_t bl_lora_layer_floats(const bl_lora_layout *layout, int64_t layer)
{
    return layout->kind_floats[bl_layer_kind_of(&layout->kinds, layer)];
}

int64_t bl_lora_floats_before(const bl_lora_layout *layout, int64_t layer)
{
    return bl_lora_chunks_before(layout, layer, 1);
}

int64_t bl_lora_chunk(const bl_lora_layout *layout, int64_t layer, int n_ranks)
{
    return bl_ceil_div(bl_lora_layer_floats(layout, layer), n_ranks);
}

int64_t bl_lora_chunks_before(const bl_lora_layout *layout, int64_t layer, int n_ranks)
{
    int64_t n = 0;

    for (int k = 0; k < BL_LAYER_KINDS; k++)
        n += bl_layers_of_kind(&layout->kinds, (bl_layer_kind)k, layer) *
             bl_ceil_div(layout->kind_floats[k], n_ranks);
    return n;
}

bool bl_lora_has(const bl_lora_layout *layout, int64_t layer, int projection)
{
    return layout->a_offset[projection] >= 0 &&
           bl_arch_has(layout->arch, bl_layer_kind_of(&layout->kinds, layer), projection);
}

double bl_lora_table_flops(const bl_lora_layout *layout, double n_tokens, double n_labels)
{
    double r = (double)layout->options.r, of_hidden = 6.0 * r * (double)layout->hidden * n_tokens;
    double flops = 0;

    if (layout->options.table[BL_TABLE_EMBEDDING]) flops += of_hidden;
    if (layout->options.table[BL_TABLE_HEAD])
        flops += of_hidden + 6.0 * r * (double)layout->vocab * n_labels;
    return flops;
}

int64_t bl_lora_table_floats(const bl_lora_layout *layout, bl_model_table table,
                             bl_peft_factor factor)
{
    bool is_vocab = (table == BL_TABLE_EMBEDDING) == (factor == BL_PEFT_A);
    return layout->options.r * (is_vocab ? layout->vocab : layout->hidden);
}

static void place_tables(const bl_model_config *config, bl_lora_layout *layout)
{
    layout->vocab = config->vocab_size;
    layout->hidden = config->hidden_size;
    for (int t = 0; t < BL_MODEL_TABLES; t++) {
        if (!layout->options.table[t]) continue;
        layout->table_a[t] = layout->n_table_floats;
        layout->n_table_floats += bl_lora_table_floats(layout, (bl_model_table)t, BL_PEFT_A);
        layout->table_b[t] = layout->n_table_floats;
        layout->n_table_floats += bl_lora_table_floats(layout, (bl_model_table)t, BL_PEFT_B);
    }
}

double bl_lora_scale(double alpha, int64_t r, bool use_rslora)
{
    return alpha / (use_rslora ? sqrt((double)r) : (double)r);
}

static void measure_projection(const bl_model_config *config, int p, bl_lora_layout *layout)
{
    const bl_lora_options *o = &layout->options;
    double alpha = o->own_alpha[p] > 0 ? o->own_alpha[p] : o->alpha;

    bl_projection_shape(config, p, &layout->b_rows[p], &layout->a_cols[p]);
    layout->row_begin[p] = bl_projection_row(config, p);
    layout->n_experts[p] = bl_arch_is_routed(config->arch, p) ? config->n_experts : 1;
    layout->r[p] = o->own_r[p] > 0 ? o->own_r[p] : o->r;
    layout->scale_of[p] = (float)bl_lora_scale(alpha, layout->r[p], o->use_rslora);
}

void bl_lora_layout_init(const bl_model_config *config, const bl_lora_options *options,
                         bl_lora_layout *out)
{
    *out = (bl_lora_layout){.arch = config->arch, .kinds = bl_model_kinds(config)};
    for (int p = 0; p < BL_MAX_PROJECTIONS; p++) out->a_offset[p] = out->b_offset[p] = -1;
    for (int t = 0; t < BL_MODEL_TABLES; t++) out->table_a[t] = out->table_b[t] = -1;
    for (int f = 0; f < 2; f++) {
        for (int p = 0; p < BL_MAX_PROJECTIONS; p++) out->rate[p][f] = 1;
        for (int t = 0; t < BL_MODEL_TABLES; t++) out->table_rate[t][f] = 1;
    }
    if (!options) return;

    out->options = *options;
    out->scale = (float)bl_lora_scale(options->alpha, options->r, options->use_rslora);
    for (int p = 0; p < config->arch->n_projections; p++) {
        out->options.target[p] &= bl_model_has_somewhere(config, p);
        if (out->options.target[p]) measure_projection(config, p, out);
    }
    for (int k = 0; k < BL_LAYER_KINDS; k++)
        out->has_kind[k] = bl_model_layers_of(config, (bl_layer_kind)k) > 0;
    bl_lora_layout_stack(out, false);
    place_tables(config, out);
}

/* The place of n floats of projection p: behind those of all kinds that have it. */
static int64_t place_factor(bl_lora_layout *layout, int p, int64_t n)
{
    int64_t at = 0;

    for (int k = 0; k < BL_LAYER_KINDS; k++)
        if (bl_arch_has(layout->arch, (bl_layer_kind)k, p) && layout->has_kind[k])
            at = bl_max_i64(at, layout->kind_floats[k]);
    for (int k = 0; k < BL_LAYER_KINDS; k++)
        if (bl_arch_has(layout->arch, (bl_layer_kind)k, p) && layout->has_kind[k])
            layout->kind_floats[k] = at + n;
    layout->n_floats = bl_max_i64(layout->n_floats, at + n);
    return at;
}

/* The factors of projections [first, end): all A's, then all B's. */
static void place_factors(bl_lora_layout *layout, int first, int end)
{
    const bl_lora_options *o = &layout->options;

    for (int p = first; p < end; p++)
        if (o->target[p])
            layout->a_offset[p] =
                place_factor(layout, p, bl_lora_factor_floats(layout, p, BL_PEFT_A));
    for (int p = first; p < end; p++)
        if (o->target[p])
            layout->b_offset[p] =
                place_factor(layout, p, bl_lora_factor_floats(layout, p, BL_PEFT_B));
}

void bl_lora_layout_stack(bl_lora_layout *layout, bool is_stacked)
{
    const bl_projection *list = layout->arch->projections;
    int n = layout->arch->n_projections;

    layout->is_stacked = is_stacked;
    layout->n_floats = 0;
    memset(layout->kind_floats, 0, sizeof layout->kind_floats);
    for (int p = 0, end; p < n; p = end) { /* a matrix's projections are neighbors */
        end = p + 1;
        while (is_stacked && end < n && list[end].matrix == list[p].matrix) end++;
        place_factors(layout, p, end);
    }
}

void bl_lora_layout_bind(const bl_lora_layout *layout, bl_layer_kind kind, bl_layer_matrix matrix,
                         bl_tensor weights, float *gradients, bl_lora_linear *linear)
{
    linear->n_parts = 0;
    linear->is_stacked = layout->is_stacked;
    for (int p = 0; p < layout->arch->n_projections; p++) {
        if (layout->a_offset[p] < 0 || layout->arch->projections[p].matrix != matrix ||
            !bl_arch_has(layout->arch, kind, p))
            continue;
        linear->part[linear->n_parts++] = (bl_lora_part){
            .r = layout->r[p],
            .row_begin = layout->row_begin[p],
            .rows = layout->b_rows[p],
            .scale = layout->scale_of[p],
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
        if (!bl_lora_has(layout, layer, p)) continue;
        int64_t a_begin = layout->a_offset[p],
                a_end = a_begin + bl_lora_factor_floats(layout, p, BL_PEFT_A);
        int64_t first = begin > a_begin ? begin : a_begin,
                last = begin + count < a_end ? begin + count : a_end;
        if (first < last)
            bl_lora_initialize(seed, layer, p, layout->a_cols[p], first - a_begin, last - first,
                               out + (first - begin));
    }
}

/* The part of a factor of n floats at `offset` that is in [begin, begin + count). */
typedef struct overlap {
    int64_t first, n; /* of the vector; n 0: none */
} overlap;

static overlap overlap_of(int64_t offset, int64_t n, int64_t begin, int64_t count)
{
    int64_t first = begin > offset ? begin : offset,
            last = begin + count < offset + n ? begin + count : offset + n;
    return (overlap){first, last > first ? last - first : 0};
}

void bl_lora_layout_initialize_tables(const bl_lora_layout *layout, uint64_t seed, int64_t begin,
                                      int64_t count, float *out)
{
    enum { NO_LAYER = -1 };
    int64_t b = layout->table_b[BL_TABLE_EMBEDDING], a = layout->table_a[BL_TABLE_HEAD];

    for (int64_t i = 0; i < count; i++) out[i] = 0.0f;
    if (b >= 0) {
        overlap o = overlap_of(b, bl_lora_table_floats(layout, BL_TABLE_EMBEDDING, BL_PEFT_B),
                               begin, count);
        bl_lora_initialize_normal(seed, NO_LAYER, BL_TABLE_EMBEDDING, o.first - b, o.n,
                                  out + (o.first - begin));
    }
    if (a >= 0) {
        overlap o =
            overlap_of(a, bl_lora_table_floats(layout, BL_TABLE_HEAD, BL_PEFT_A), begin, count);
        bl_lora_initialize(seed, NO_LAYER, BL_TABLE_HEAD, layout->hidden, o.first - a, o.n,
                           out + (o.first - begin));
    }
}
