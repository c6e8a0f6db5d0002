/* SPDX-License-Identifier: Apache-2.0 */
/* arch.c -- what follows from an entry of the table of architectures and a configuration. */
#include "arch/arch.h"

#include <stdio.h>
#include <string.h>

#include "base/sizes.h"

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
    case BL_EXTENT_HEADS:
        return c->n_heads;
    case BL_EXTENT_EXPERTS:
        return c->n_experts;
    case BL_EXTENT_KV:
        return c->n_kv_heads * c->head_dim;
    case BL_EXTENT_GATE_UP:
        return 2 * c->intermediate_size;
    case BL_EXTENT_EXPERT:
        return c->expert_size;
    case BL_EXTENT_EXPERTS_GATE_UP:
        return c->n_experts * 2 * c->expert_size;
    case BL_EXTENT_EXPERTS_HIDDEN:
        return c->n_experts * c->hidden_size;
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

bool bl_arch_is_routed(const bl_arch *arch, int projection)
{
    return projection >= arch->n_projections - arch->n_routed;
}

/* NULL: the projection is one tensor. */
static const bl_expert_names *names_of(const bl_arch *arch, int projection)
{
    if (!arch->names || !bl_arch_is_routed(arch, projection)) return NULL;
    return &arch->names[projection - (arch->n_projections - arch->n_routed)];
}

/* Whether `name`, behind the layer's number, is of a tensor of the projection: *k, the k-th. */
static bool is_weight_of(const bl_arch *arch, int projection, const char *name, int64_t *k)
{
    const bl_expert_names *names = names_of(arch, projection);
    const char *module = names ? names->experts : arch->projections[projection].module;
    size_t n = strlen(module);
    long long expert;
    int number = 0;

    *k = 0;

    if (strncmp(name, module, n) != 0) return false;
    name += n;
    if (!names) return strcmp(name, bl_arch_is_routed(arch, projection) ? "" : ".weight") == 0;
    if (sscanf(name, ".%lld.%n", &expert, &number) != 1 || number == 0) return false;
    for (int i = 0; i < BL_EXPERT_PIECES && names->piece[i]; i++) {
        size_t n_piece = strlen(names->piece[i]);
        *k = expert * (names->piece[1] ? 2 : 1) + i;
        if (strncmp(name + number, names->piece[i], n_piece) == 0 &&
            strcmp(name + number + n_piece, ".weight") == 0)
            return true;
    }
    return false;
}

static int find_weight(const bl_arch *arch, const char *tensor, int64_t *layer, int64_t *k)
{
    size_t n_layers = strlen(arch->layers);
    int prefix = 0;
    long long number;

    if (strncmp(tensor, arch->layers, n_layers) != 0) return -1;
    tensor += n_layers;
    if (sscanf(tensor, ".%lld.%n", &number, &prefix) != 1 || prefix == 0) return -1;
    *layer = number;
    for (int p = 0; p < arch->n_projections; p++)
        if (is_weight_of(arch, p, tensor + prefix, k)) return p;
    return -1;
}

int bl_arch_find_projection(const bl_arch *arch, const char *tensor, int64_t *layer)
{
    int64_t k;
    return find_weight(arch, tensor, layer, &k);
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

int64_t bl_arch_expert_group(const bl_model_config *c)
{
    int64_t weights[2] = {0, 0}; /* of the other matrices, of all experts */

    if (c->n_experts == 0) return 0;
    if (c->expert_group > 0) return bl_min_i64(c->expert_group, c->n_experts);
    for (int p = 0; p < c->arch->n_projections; p++) {
        int64_t rows, cols;
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

double bl_arch_active_weights(const bl_model_config *config)
{
    double weights = (double)bl_arch_vector_width(config, BL_ROUTER);

    for (int p = 0; p < config->arch->n_projections; p++) {
        int64_t rows, cols;
        bl_projection_shape(config, p, &rows, &cols);
        weights += (double)rows * (double)cols * active_part(config, p);
    }
    return weights;
}

bl_peft_modules bl_arch_peft_modules(const bl_arch *arch)
{
    bl_peft_modules modules = {.layers = arch->peft_layers ? arch->peft_layers : arch->layers,
                               .is_part = arch->skipped != NULL,
                               .embedding = bl_peft_last_name(arch->embedding),
                               .head = bl_peft_last_name(arch->head)};

    for (int p = 0; p < arch->n_projections - arch->n_routed; p++)
        modules.path[modules.n++] = arch->projections[p].module;
    for (int i = 0; arch->adapters && i < arch->n_routed; i++)
        modules.routed[modules.n_routed++] =
            (bl_peft_routed){.parameter = arch->projections[modules.n + i].module,
                             .experts = arch->adapters[i].experts,
                             .piece = {arch->adapters[i].piece[0], arch->adapters[i].piece[1]}};
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

/* Tensors that a projection is stored as. */
static int64_t count_stored(const bl_model_config *c, int projection)
{
    const bl_expert_names *names = names_of(c->arch, projection);

    if (!names) return 1;
    return c->n_experts * (names->piece[1] ? 2 : 1);
}

static int64_t n_matrices(const bl_model_config *c)
{
    int64_t n = 0;

    for (int p = 0; p < c->arch->n_projections; p++) n += count_stored(c, p);
    return n;
}

static int64_t tensors_per_layer(const bl_model_config *c)
{
    return n_matrices(c) + n_vectors(c->arch) + n_biases(c);
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

int bl_arch_find_rows(const bl_model_config *c, const char *tensor, int64_t *layer, int64_t *row)
{
    int64_t k, rows, cols;
    int p = find_weight(c->arch, tensor, layer, &k);

    if (p < 0 || k < 0 || k >= count_stored(c, p)) return -1;
    bl_projection_shape(c, p, &rows, &cols);
    *row = k * (rows / count_stored(c, p));
    return p;
}

/* The k-th tensor of a projection. */
static bl_arch_tensor stored_tensor(const bl_model_config *c, int64_t layer, int projection,
                                    int64_t k)
{
    const bl_arch *arch = c->arch;
    const bl_projection *p = &arch->projections[projection];
    const bl_expert_names *names = names_of(arch, projection);
    bl_arch_tensor t = {
        .role = BL_ROLE_PROJECTION, .layer = layer, .projection = projection, .n_dims = 2};

    bl_projection_shape(c, projection, &t.shape[0], &t.shape[1]);
    if (names) {
        int64_t n_pieces = names->piece[1] ? 2 : 1;
        t.shape[0] /= count_stored(c, projection);
        t.row = k * t.shape[0];
        snprintf(t.name, sizeof t.name, "%s.%lld.%s.%lld.%s.weight", arch->layers, (long long)layer,
                 names->experts, (long long)(k / n_pieces), names->piece[k % n_pieces]);
    } else if (bl_arch_is_routed(arch, projection)) {
        int64_t rows = t.shape[0] / c->n_experts, cols = t.shape[1];
        t.n_dims = 3;
        t.shape[0] = c->n_experts;
        t.shape[1] = arch->is_transposed ? cols : rows;
        t.shape[2] = arch->is_transposed ? rows : cols;
        snprintf(t.name, sizeof t.name, "%s.%lld.%s", arch->layers, (long long)layer, p->module);
    } else {
        bl_arch_projection_tensor(arch, layer, p, t.name);
    }
    return t;
}

bl_arch_tensor bl_arch_stored_at(const bl_model_config *c, int64_t layer, int projection,
                                 int64_t row)
{
    int64_t rows, cols;

    bl_projection_shape(c, projection, &rows, &cols);
    return stored_tensor(c, layer, projection, row / (rows / count_stored(c, projection)));
}

int64_t bl_arch_tensor_elements(const bl_arch_tensor *tensor)
{
    int64_t n = 1;

    for (int d = 0; d < tensor->n_dims; d++) n *= tensor->shape[d];
    return n;
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
    if (v == BL_ROUTER) t.n_dims = 2, t.shape[0] = c->n_experts, t.shape[1] = c->hidden_size;
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
    if (bl_arch_is_routed(arch, p)) {
        t.n_dims = 2;
        t.shape[1] = t.shape[0] / c->n_experts;
        t.shape[0] = c->n_experts;
    }
    snprintf(t.name, sizeof t.name, "%s.%lld.%s%sbias", arch->layers, (long long)layer,
             arch->projections[p].module, t.n_dims == 2 ? "_" : ".");
    return t;
}

bl_arch_tensor bl_arch_tensor_at(const bl_model_config *c, int64_t i)
{
    const bl_arch *arch = c->arch;
    int64_t per_layer = tensors_per_layer(c), layer = i / per_layer, k = i % per_layer;
    bl_arch_tensor t;

    if (layer < c->n_layers) {
        for (int p = 0; p < arch->n_projections; p++) {
            int64_t n = count_stored(c, p);
            if (k < n) return stored_tensor(c, layer, p, k);
            k -= n;
        }
        if (k < n_vectors(arch)) return vector_tensor(c, layer, (int)k);
        return bias_tensor(c, layer, (int)k - n_vectors(arch));
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
    double weights = bl_arch_active_weights(c), n_layers = (double)c->n_layers;
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
    return 2.0 * (double)c->n_layers * bl_arch_active_weights(c) * n_tokens +
           2.0 * (double)c->vocab_size * (double)c->hidden_size * n_labels;
}
