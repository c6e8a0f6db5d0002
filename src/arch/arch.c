/* SPDX-License-Identifier: Apache-2.0 */
/* arch.c -- what follows from an entry of the table of architectures and a configuration. */
#include "arch/arch.h"

#include <stdio.h>
#include <string.h>

static int64_t extent_of(const bl_model_config *c, bl_extent extent)
{
    switch (extent) {
    case BL_EXTENT_HIDDEN:
        return c->hidden_size;
    case BL_EXTENT_INTER:
        return c->intermediate_size;
    case BL_EXTENT_Q:
        return c->n_heads * c->head_dim;
    case BL_EXTENT_HEAD:
        return c->head_dim;
    case BL_EXTENT_KV:
        return c->n_kv_heads * c->head_dim;
    case BL_EXTENT_GATE_UP:
        return 2 * c->intermediate_size;
    case BL_EXTENT_QKV:
        break;
    }
    return (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
}

/* ---- projections ---- */

void bl_projection_shape(const bl_model_config *config, int projection, int64_t *rows,
                         int64_t *cols)
{
    const bl_projection *p = &config->arch->projections[projection];

    *rows = extent_of(config, p->rows);
    *cols = extent_of(config, p->cols);
}

int64_t bl_projection_row(const bl_model_config *config, int projection)
{
    const bl_projection *list = config->arch->projections;
    int64_t row = 0;

    for (int p = 0; p < projection; p++)
        if (list[p].matrix == list[projection].matrix) row += extent_of(config, list[p].rows);
    return row;
}

const char *bl_projection_name(const bl_projection *projection)
{
    return bl_peft_last_name(projection->module);
}

const bl_projection *bl_arch_segment(const bl_arch *arch, int matrix, int segment)
{
    for (int p = 0; p < arch->n_projections; p++)
        if ((int)arch->projections[p].matrix == matrix && segment-- == 0)
            return &arch->projections[p];
    return NULL;
}

bool bl_arch_is_projection(const bl_arch *arch, const char *tensor)
{
    size_t n_layers = strlen(arch->layers);
    int prefix = 0;

    if (strncmp(tensor, arch->layers, n_layers) != 0) return false;
    tensor += n_layers;
    if (sscanf(tensor, ".%*d.%n", &prefix) != 0 || prefix == 0) return false;
    for (int p = 0; p < arch->n_projections; p++) {
        const char *module = arch->projections[p].module;
        size_t length = strlen(module);
        if (strncmp(tensor + prefix, module, length) == 0 &&
            strcmp(tensor + prefix + length, ".weight") == 0)
            return true;
    }
    return false;
}

int64_t bl_arch_layer_weights(const bl_model_config *config)
{
    int64_t weights = 0, rows, cols;

    for (int p = 0; p < config->arch->n_projections; p++) {
        bl_projection_shape(config, p, &rows, &cols);
        weights += rows * cols;
    }
    return weights;
}

bl_peft_modules bl_arch_peft_modules(const bl_arch *arch)
{
    bl_peft_modules modules = {.layers = arch->peft_layers ? arch->peft_layers : arch->layers,
                               .is_part = arch->skipped != NULL,
                               .n = arch->n_projections,
                               .embedding = bl_peft_last_name(arch->embedding),
                               .head = bl_peft_last_name(arch->head)};

    for (int p = 0; p < arch->n_projections; p++) modules.path[p] = arch->projections[p].module;
    return modules;
}

/* ---- tensors ---- */

int64_t bl_arch_vector_width(const bl_model_config *config, bl_layer_vector vector)
{
    const bl_vector *v = &config->arch->vectors[vector];
    return v->name ? extent_of(config, v->extent) : 0;
}

int64_t bl_arch_vector_offset(const bl_model_config *config, bl_layer_vector vector)
{
    int64_t n = 0;

    for (int v = 0; v < (int)vector; v++) n += bl_arch_vector_width(config, (bl_layer_vector)v);
    return n;
}

static bool has_bias(const bl_model_config *c, int projection)
{
    return c->biases >> c->arch->projections[projection].matrix & 1u;
}

/* Of a projection's bias, behind all other vectors; of one past the last: floats of a layer. */
static int64_t bias_offset(const bl_model_config *c, int projection)
{
    int64_t n = bl_arch_vector_offset(c, BL_LAYER_VECTORS);

    for (int p = 0; p < projection; p++)
        if (has_bias(c, p)) n += extent_of(c, c->arch->projections[p].rows);
    return n;
}

int64_t bl_arch_bias_offset(const bl_model_config *config, bl_layer_matrix matrix)
{
    int p = 0;

    while (p < config->arch->n_projections && config->arch->projections[p].matrix != matrix) p++;
    if (p == config->arch->n_projections || !has_bias(config, p)) return -1;
    return bias_offset(config, p);
}

int64_t bl_arch_layer_floats(const bl_model_config *config)
{
    return bias_offset(config, config->arch->n_projections);
}

int64_t bl_arch_vector_floats(const bl_model_config *config)
{
    return config->n_layers * bl_arch_layer_floats(config) +
           config->hidden_size * (config->arch->has_layer_norm ? 2 : 1);
}

static int n_vectors(const bl_arch *arch)
{
    int n = 0;

    for (int v = 0; v < BL_LAYER_VECTORS; v++) n += arch->vectors[v].name != NULL;
    return n;
}

static int n_biases(const bl_model_config *c)
{
    int n = 0;

    for (int p = 0; p < c->arch->n_projections; p++) n += has_bias(c, p);
    return n;
}

static int tensors_per_layer(const bl_model_config *c)
{
    return c->arch->n_projections + n_vectors(c->arch) + n_biases(c);
}

enum { AROUND = 4 }; /* final norm, its bias, embedding, head */

int64_t bl_arch_tensor_count(const bl_model_config *config)
{
    return config->n_layers * tensors_per_layer(config) + AROUND - !config->arch->has_layer_norm;
}

void bl_arch_module_tensor(const char *module, char name[BL_TENSOR_NAME_BYTES])
{
    snprintf(name, BL_TENSOR_NAME_BYTES, "%s.weight", module);
}

void bl_arch_projection_tensor(const bl_arch *arch, int64_t layer, const bl_projection *projection,
                               char name[BL_TENSOR_NAME_BYTES])
{
    snprintf(name, BL_TENSOR_NAME_BYTES, "%s.%lld.%s.weight", arch->layers, (long long)layer,
             projection->module);
}

/* The k-th vector that the family has, of a layer. */
static bl_arch_tensor vector_tensor(const bl_model_config *c, int64_t layer, int k)
{
    const bl_arch *arch = c->arch;
    bl_arch_tensor t = {.role = BL_ROLE_VECTOR, .n_dims = 1};
    int v = 0;

    while (!arch->vectors[v].name || k-- > 0) v++;
    t.offset = layer * bl_arch_layer_floats(c) + bl_arch_vector_offset(c, (bl_layer_vector)v);
    t.shape[0] = extent_of(c, arch->vectors[v].extent);
    snprintf(t.name, sizeof t.name, "%s.%lld.%s", arch->layers, (long long)layer,
             arch->vectors[v].name);
    return t;
}

/* The k-th bias of a layer. */
static bl_arch_tensor bias_tensor(const bl_model_config *c, int64_t layer, int k)
{
    const bl_arch *arch = c->arch;
    bl_arch_tensor t = {.role = BL_ROLE_VECTOR, .n_dims = 1};
    int p = 0;

    while (!has_bias(c, p) || k-- > 0) p++;
    t.offset = layer * bl_arch_layer_floats(c) + bias_offset(c, p);
    t.shape[0] = extent_of(c, arch->projections[p].rows);
    snprintf(t.name, sizeof t.name, "%s.%lld.%s.bias", arch->layers, (long long)layer,
             arch->projections[p].module);
    return t;
}

bl_arch_tensor bl_arch_tensor_at(const bl_model_config *c, int64_t i)
{
    const bl_arch *arch = c->arch;
    int64_t per_layer = tensors_per_layer(c), layer = i / per_layer;
    int k = (int)(i % per_layer), first_bias = arch->n_projections + n_vectors(arch);
    bl_arch_tensor t = {.role = BL_ROLE_PROJECTION, .n_dims = 2};

    if (layer < c->n_layers && k >= first_bias) return bias_tensor(c, layer, k - first_bias);
    if (layer < c->n_layers && k >= arch->n_projections)
        return vector_tensor(c, layer, k - arch->n_projections);
    if (layer < c->n_layers) {
        t.layer = layer;
        t.projection = k;
        bl_projection_shape(c, k, &t.shape[0], &t.shape[1]);
        bl_arch_projection_tensor(arch, layer, &arch->projections[k], t.name);
        return t;
    }
    int64_t a = i - c->n_layers * per_layer, floats = c->n_layers * bl_arch_layer_floats(c);
    const bl_arch_tensor around[AROUND] = {
        {.role = BL_ROLE_VECTOR, .offset = floats, .n_dims = 1, .shape = {c->hidden_size}},
        {.role = BL_ROLE_VECTOR,
         .offset = floats + c->hidden_size,
         .n_dims = 1,
         .shape = {c->hidden_size}},
        {.role = BL_ROLE_EMBEDDING, .n_dims = 2, .shape = {c->vocab_size, c->hidden_size}},
        {.role = BL_ROLE_HEAD, .n_dims = 2, .shape = {c->vocab_size, c->hidden_size}},
    };
    const char *const modules[AROUND] = {arch->final_norm, arch->final_norm, arch->embedding,
                                         arch->head};
    if (a > 0 && !arch->has_layer_norm) a++;
    t = around[a];
    snprintf(t.name, sizeof t.name, "%s.%s", modules[a], a == 1 ? "bias" : "weight");
    return t;
}

bool bl_arch_is_bias(const bl_model_config *config, const bl_arch_tensor *tensor)
{
    int64_t per_layer = bl_arch_layer_floats(config);

    if (tensor->role != BL_ROLE_VECTOR || tensor->offset >= config->n_layers * per_layer)
        return false;
    return tensor->offset % per_layer >= bl_arch_vector_offset(config, BL_LAYER_VECTORS);
}

/* ---- work ---- */

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
    double weights = (double)bl_arch_layer_weights(c), n_layers = (double)c->n_layers;
    double per_token = (2.0 * n_layers + 2.0 * (n_layers - (double)first)) * weights +
                       6.0 * n_layers * n_lora_floats,
           attention = 0;

    /* QK^T and PV, forward and twice as much backward */
    for (int64_t l = 0; l < c->n_layers; l++)
        attention += (l < first ? 2.0 : 2.0 + 4.0) * visible_tokens(c, l, mean_tokens);
    per_token += 2.0 * (double)extent_of(c, BL_EXTENT_Q) * attention;
    return per_token * n_tokens + 4.0 * (double)c->vocab_size * (double)c->hidden_size * n_labels;
}

double bl_arch_gradient_flops(const bl_model_config *c, double n_tokens, double n_labels)
{
    return 2.0 * (double)c->n_layers * (double)bl_arch_layer_weights(c) * n_tokens +
           2.0 * (double)c->vocab_size * (double)c->hidden_size * n_labels;
}
