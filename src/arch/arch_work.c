/* SPDX-License-Identifier: Apache-2.0 */
/* arch_work.c -- weights of layers, groups of experts and the FLOPs of a step, of an architecture
 * and a configuration. */
#include "arch/arch.h"
#include "base/sizes.h"

int64_t bl_arch_layer_weights(const bl_model_config *config, bl_layer_kind kind)
{
    int64_t weights = 0, rows, cols;

    for (int p = 0; p < config->arch->n_projections; p++) {
        if (!bl_arch_has(config->arch, kind, p)) continue;
        bl_projection_shape(config, p, &rows, &cols);
        weights += rows * cols;
    }
    return weights;
}

int64_t bl_arch_expert_group(const bl_model_config *c)
{
    int64_t weights[2] = {0, 0}; /* of the other matrices, of all experts */

    if (c->n_experts == 0) return 0;
    if (c->expert_group > 0) return bl_min_i64(c->expert_group, c->n_experts);
    for (int p = 0; p < c->arch->n_projections; p++) {
        int64_t rows, cols;
        if (!bl_arch_has(c->arch, BL_LAYER_EXPERTS, p)) continue;
        bl_projection_shape(c, p, &rows, &cols);
        weights[bl_arch_is_routed(c->arch, p)] += rows * cols;
    }
    int64_t n = weights[0] / bl_max_i64(1, weights[1] / c->n_experts);
    return bl_min_i64(bl_max_i64(n, 1), c->n_experts);
}

bl_status bl_arch_set_expert_group(bl_model_config *c, int64_t n)
{
    c->expert_group = bl_max_i64(n, 0);
    if (n < 0 || c->n_experts > 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "expert_group %lld: %s has no routed experts", (long long)n,
                   c->arch->title);
}

/* The part of a projection's rows that a token is multiplied with. */
static double active_part(const bl_model_config *config, int projection)
{
    if (!bl_arch_is_routed(config->arch, projection)) return 1;
    return (double)config->top_k / (double)config->n_experts;
}

double bl_arch_active_weights(const bl_model_config *config, bl_layer_kind kind)
{
    double weights = (double)bl_arch_vector_width(config, kind, BL_ROUTER);

    for (int p = 0; p < config->arch->n_projections; p++) {
        int64_t rows, cols;
        if (!bl_arch_has(config->arch, kind, p)) continue;
        bl_projection_shape(config, p, &rows, &cols);
        weights += (double)rows * (double)cols * active_part(config, p);
    }
    return weights;
}

int64_t bl_windows_of_layer(const bl_windows *windows, int64_t layer)
{
    if (layer >= BL_MODEL_MASK_LAYERS) return 0;
    return windows->layers[layer / 64] >> layer % 64 & 1 ? windows->tokens : 0;
}

/* Keys that a token of a layer sees, on average over n_tokens: half of them, or the window less the
 * half window that the first tokens lack. */
static double visible_tokens(const bl_model_config *c, int64_t layer, double n_tokens)
{
    double window = (double)bl_windows_of_layer(&c->windows, layer);

    if (window == 0 || window >= n_tokens) return n_tokens / 2;
    return window - window * window / (2 * n_tokens);
}

double bl_arch_step_flops(const bl_model_config *c, double n_lora_floats, int64_t first,
                          double n_tokens, double mean_tokens, double n_labels)
{
    double weights[BL_LAYER_KINDS], per_token = 6.0 * n_lora_floats, attention = 0;

    for (int k = 0; k < BL_LAYER_KINDS; k++)
        weights[k] = bl_arch_active_weights(c, (bl_layer_kind)k);
    /* QK^T and PV, forward and twice as much backward */
    for (int64_t l = 0; l < c->n_layers; l++) {
        per_token += (l < first ? 2.0 : 4.0) * weights[bl_model_kind(c, l)];
        attention += (l < first ? 2.0 : 2.0 + 4.0) * visible_tokens(c, l, mean_tokens);
    }
    per_token += 2.0 * (double)(c->n_heads * c->head_dim) * attention;
    return per_token * n_tokens + 4.0 * (double)c->vocab_size * (double)c->hidden_size * n_labels;
}

double bl_arch_gradient_flops(const bl_model_config *c, double n_tokens, double n_labels)
{
    double weights = 0;

    for (int k = 0; k < BL_LAYER_KINDS; k++)
        weights += (double)bl_model_layers_of(c, (bl_layer_kind)k) *
                   bl_arch_active_weights(c, (bl_layer_kind)k);
    return 2.0 * weights * n_tokens +
           2.0 * (double)c->vocab_size * (double)c->hidden_size * n_labels;
}
