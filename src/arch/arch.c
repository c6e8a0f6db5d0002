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
    case BL_EXTENT_KV:
        return c->n_kv_heads * c->head_dim;
    case BL_EXTENT_GATE_UP:
        return 2 * c->intermediate_size;
    case BL_EXTENT_EXPERT:
        return c->expert_size;
    case BL_EXTENT_SHARED:
        return c->shared_size;
    case BL_EXTENT_EXPERTS:
        return c->n_experts;
    case BL_EXTENT_EXPERTS_GATE_UP:
        return c->n_experts * 2 * c->expert_size;
    case BL_EXTENT_EXPERTS_HIDDEN:
        return c->n_experts * c->hidden_size;
    case BL_EXTENT_QKV:
        break;
    }
    return (c->n_heads + 2 * c->n_kv_heads) * c->head_dim;
}

/* ---- kinds of layers ---- */

bl_layer_kind bl_layer_kind_of(const bl_layer_kinds *kinds, int64_t layer)
{
    if (!kinds->has_experts) return BL_LAYER_DENSE;
    if (layer >= BL_MODEL_MASK_LAYERS) return BL_LAYER_EXPERTS;
    return kinds->dense[layer / 64] >> layer % 64 & 1 ? BL_LAYER_DENSE : BL_LAYER_EXPERTS;
}

int64_t bl_layers_of_kind(const bl_layer_kinds *kinds, bl_layer_kind kind, int64_t end)
{
    int64_t n_dense = kinds->has_experts ? 0 : end;

    for (int64_t l = 0; kinds->has_experts && l < end && l < BL_MODEL_MASK_LAYERS; l++)
        n_dense += bl_layer_kind_of(kinds, l) == BL_LAYER_DENSE;
    return kind == BL_LAYER_DENSE ? n_dense : end - n_dense;
}

bl_layer_kinds bl_model_kinds(const bl_model_config *c)
{
    bl_layer_kinds kinds = {.has_experts = c->n_experts > 0};

    memcpy(kinds.dense, c->dense_layers, sizeof kinds.dense);
    return kinds;
}

bl_layer_kind bl_model_kind(const bl_model_config *c, int64_t layer)
{
    bl_layer_kinds kinds = bl_model_kinds(c);
    return bl_layer_kind_of(&kinds, layer);
}

int64_t bl_model_layers_of(const bl_model_config *c, bl_layer_kind kind)
{
    bl_layer_kinds kinds = bl_model_kinds(c);
    return bl_layers_of_kind(&kinds, kind, c->n_layers);
}

void bl_model_set_dense(bl_model_config *c, int64_t layer)
{
    c->dense_layers[layer / 64] |= (uint64_t)1 << layer % 64;
}

/* ---- projections ---- */

void bl_projection_shape(const bl_model_config *config, int projection, int64_t *rows,
                         int64_t *cols)
{
    const bl_projection *p = &config->arch->projections[projection];

    *rows = extent_of(config, p->rows);
    *cols = extent_of(config, p->cols);
}

typedef enum layers_with { ALL_LAYERS, DENSE_LAYERS, EXPERT_LAYERS } layers_with;

static layers_with layers_of(const bl_arch *arch, int projection)
{
    int of_experts = arch->n_projections - arch->n_routed - arch->n_shared;

    if (projection >= of_experts) return EXPERT_LAYERS;
    return projection >= of_experts - arch->n_dense ? DENSE_LAYERS : ALL_LAYERS;
}

int64_t bl_projection_row(const bl_model_config *config, int projection)
{
    const bl_projection *list = config->arch->projections;
    layers_with layers = layers_of(config->arch, projection);
    int64_t row = 0;

    for (int p = 0; p < projection; p++)
        if (list[p].matrix == list[projection].matrix && layers_of(config->arch, p) == layers)
            row += extent_of(config, list[p].rows);
    return row;
}

bool bl_arch_has(const bl_arch *arch, bl_layer_kind kind, int projection)
{
    layers_with layers = layers_of(arch, projection);
    return layers == ALL_LAYERS || (layers == DENSE_LAYERS) == (kind == BL_LAYER_DENSE);
}

bool bl_model_has(const bl_model_config *c, int64_t layer, int projection)
{
    return bl_arch_has(c->arch, bl_model_kind(c, layer), projection);
}

bool bl_model_has_somewhere(const bl_model_config *c, int projection)
{
    for (int k = 0; k < BL_LAYER_KINDS; k++)
        if (bl_arch_has(c->arch, (bl_layer_kind)k, projection) &&
            bl_model_layers_of(c, (bl_layer_kind)k) > 0)
            return true;
    return false;
}

const char *bl_projection_name(const bl_projection *projection)
{
    return bl_peft_last_name(projection->module);
}

const bl_projection *bl_arch_segment(const bl_arch *arch, bl_layer_kind kind, int matrix,
                                     int segment)
{
    for (int p = 0; p < arch->n_projections; p++)
        if (bl_arch_has(arch, kind, p) && (int)arch->projections[p].matrix == matrix &&
            segment-- == 0)
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

bl_peft_modules bl_arch_peft_modules(const bl_arch *arch)
{
    bl_peft_modules modules = {.layers = arch->peft_layers ? arch->peft_layers : arch->layers,
                               .is_part = arch->skipped != NULL,
                               .embedding = bl_peft_last_name(arch->embedding),
                               .head = bl_peft_last_name(arch->head)};

    for (int p = 0; p < arch->n_projections - arch->n_routed; p++) {
        if (layers_of(arch, p) != ALL_LAYERS) modules.partial |= UINT32_C(1) << p;
        modules.path[modules.n++] = arch->projections[p].module;
    }
    for (int i = 0; arch->adapters && i < arch->n_routed; i++)
        modules.routed[modules.n_routed++] =
            (bl_peft_routed){.parameter = arch->projections[modules.n + i].module,
                             .experts = arch->adapters[i].experts,
                             .piece = {arch->adapters[i].piece[0], arch->adapters[i].piece[1]}};
    return modules;
}

/* bl_peft_modules.has */
static bool has_module(const void *user, int64_t layer, int module)
{
    return bl_model_has(user, layer, module);
}

bl_peft_modules bl_model_peft_modules(const bl_model_config *config)
{
    bl_peft_modules modules = bl_arch_peft_modules(config->arch);

    for (int p = 0; p < modules.n; p++)
        if (!bl_model_has_somewhere(config, p))
            modules.absent |= UINT32_C(1) << p;
        else if (config->n_experts > 0 && config->arch->projections[p].matrix >= BL_GATE_UP)
            modules.ambiguous |= UINT32_C(1) << p;
    modules.has = has_module;
    modules.user = config;
    return modules;
}

/* ---- tensors ---- */

static bool has_vector(const bl_model_config *c, bl_layer_kind kind, int vector)
{
    return c->arch->vectors[vector].name && (vector < BL_ROUTER || kind == BL_LAYER_EXPERTS);
}

int64_t bl_arch_vector_width(const bl_model_config *config, bl_layer_kind kind,
                             bl_layer_vector vector)
{
    if (!has_vector(config, kind, (int)vector)) return 0;
    return extent_of(config, config->arch->vectors[vector].extent);
}

int64_t bl_arch_vector_offset(const bl_model_config *config, bl_layer_kind kind,
                              bl_layer_vector vector)
{
    int64_t n = 0;

    for (int v = 0; v < (int)vector; v++)
        n += bl_arch_vector_width(config, kind, (bl_layer_vector)v);
    return n;
}

static bool has_bias(const bl_model_config *c, bl_layer_kind kind, int projection)
{
    return bl_arch_has(c->arch, kind, projection) &&
           c->biases >> c->arch->projections[projection].matrix & 1u;
}

/* Of a projection's bias, behind all other vectors; of one past the last: floats of a layer. */
static int64_t bias_offset(const bl_model_config *c, bl_layer_kind kind, int projection)
{
    int64_t n = bl_arch_vector_offset(c, kind, BL_LAYER_VECTORS);

    for (int p = 0; p < projection; p++)
        if (has_bias(c, kind, p)) n += extent_of(c, c->arch->projections[p].rows);
    return n;
}

int64_t bl_arch_bias_offset(const bl_model_config *config, bl_layer_kind kind,
                            bl_layer_matrix matrix)
{
    for (int p = 0; p < config->arch->n_projections; p++)
        if (config->arch->projections[p].matrix == matrix && has_bias(config, kind, p))
            return bias_offset(config, kind, p);
    return -1;
}

int64_t bl_arch_layer_floats(const bl_model_config *config, bl_layer_kind kind)
{
    return bias_offset(config, kind, config->arch->n_projections);
}

int64_t bl_arch_vectors_before(const bl_model_config *config, int64_t layer)
{
    bl_layer_kinds kinds = bl_model_kinds(config);
    int64_t n = 0;

    for (int k = 0; k < BL_LAYER_KINDS; k++)
        n += bl_layers_of_kind(&kinds, (bl_layer_kind)k, layer) *
             bl_arch_layer_floats(config, (bl_layer_kind)k);
    return n;
}

int64_t bl_arch_vector_floats(const bl_model_config *config)
{
    return bl_arch_vectors_before(config, config->n_layers) +
           config->hidden_size * (config->arch->has_layer_norm ? 2 : 1);
}

static int n_vectors(const bl_model_config *c, bl_layer_kind kind)
{
    int n = 0;

    for (int v = 0; v < BL_LAYER_VECTORS; v++) n += has_vector(c, kind, v);
    return n;
}

static int n_biases(const bl_model_config *c, bl_layer_kind kind)
{
    int n = 0;

    for (int p = 0; p < c->arch->n_projections; p++) n += has_bias(c, kind, p);
    return n;
}

/* Tensors that a projection is stored as. */
static int64_t count_stored(const bl_model_config *c, int projection)
{
    const bl_expert_names *names = names_of(c->arch, projection);

    if (!names) return 1;
    return c->n_experts * (names->piece[1] ? 2 : 1);
}

static int64_t n_matrices(const bl_model_config *c, bl_layer_kind kind)
{
    int64_t n = 0;

    for (int p = 0; p < c->arch->n_projections; p++)
        if (bl_arch_has(c->arch, kind, p)) n += count_stored(c, p);
    return n;
}

static int64_t tensors_per_layer(const bl_model_config *c, bl_layer_kind kind)
{
    return n_matrices(c, kind) + n_vectors(c, kind) + n_biases(c, kind);
}

enum { AROUND = 4 }; /* final norm, its bias, embedding, head */

static int64_t tensors_of_layers(const bl_model_config *c)
{
    int64_t n = 0;

    for (int k = 0; k < BL_LAYER_KINDS; k++)
        n += bl_model_layers_of(c, (bl_layer_kind)k) * tensors_per_layer(c, (bl_layer_kind)k);
    return n;
}

int64_t bl_arch_tensor_count(const bl_model_config *config)
{
    return tensors_of_layers(config) + AROUND - !config->arch->has_layer_norm;
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

/* The k-th vector of a layer. */
static bl_arch_tensor vector_tensor(const bl_model_config *c, int64_t layer, int k)
{
    const bl_arch *arch = c->arch;
    bl_arch_tensor t = {.role = BL_ROLE_VECTOR, .layer = layer, .n_dims = 1};
    bl_layer_kind kind = bl_model_kind(c, layer);
    int v = 0;

    while (!has_vector(c, kind, v) || k-- > 0) v++;
    t.offset =
        bl_arch_vectors_before(c, layer) + bl_arch_vector_offset(c, kind, (bl_layer_vector)v);
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
    bl_arch_tensor t = {.role = BL_ROLE_VECTOR, .layer = layer, .n_dims = 1};
    bl_layer_kind kind = bl_model_kind(c, layer);
    int p = 0;

    while (!has_bias(c, kind, p) || k-- > 0) p++;
    t.offset = bl_arch_vectors_before(c, layer) + bias_offset(c, kind, p);
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

/* The k-th tensor of a layer. */
static bl_arch_tensor layer_tensor(const bl_model_config *c, int64_t layer, int64_t k)
{
    bl_layer_kind kind = bl_model_kind(c, layer);

    for (int p = 0; p < c->arch->n_projections; p++) {
        int64_t n = bl_arch_has(c->arch, kind, p) ? count_stored(c, p) : 0;
        if (k < n) return stored_tensor(c, layer, p, k);
        k -= n;
    }
    if (k < n_vectors(c, kind)) return vector_tensor(c, layer, (int)k);
    return bias_tensor(c, layer, (int)k - n_vectors(c, kind));
}

/* The layer of tensor i; *k: its number there. */
static int64_t layer_of_tensor(const bl_model_config *c, int64_t i, int64_t *k)
{
    bl_layer_kinds kinds = bl_model_kinds(c);
    int64_t per_layer[BL_LAYER_KINDS], layer = 0, n;

    for (int kind = 0; kind < BL_LAYER_KINDS; kind++)
        per_layer[kind] = tensors_per_layer(c, (bl_layer_kind)kind);
    if (bl_layers_of_kind(&kinds, bl_layer_kind_of(&kinds, 0), c->n_layers) == c->n_layers) {
        n = per_layer[bl_layer_kind_of(&kinds, 0)];
        *k = i % n;
        return i / n;
    }
    for (; i >= (n = per_layer[bl_layer_kind_of(&kinds, layer)]); layer++) i -= n;
    *k = i;
    return layer;
}

bl_arch_tensor bl_arch_tensor_at(const bl_model_config *c, int64_t i)
{
    const bl_arch *arch = c->arch;
    int64_t a = i - tensors_of_layers(c), k, floats = bl_arch_vectors_before(c, c->n_layers);
    bl_arch_tensor t;

    if (a < 0) {
        int64_t layer = layer_of_tensor(c, i, &k);
        return layer_tensor(c, layer, k);
    }
    const bl_arch_tensor around[AROUND] = {
        {.role = BL_ROLE_VECTOR,
         .layer = c->n_layers,
         .offset = floats,
         .n_dims = 1,
         .shape = {c->hidden_size}},
        {.role = BL_ROLE_VECTOR,
         .layer = c->n_layers,
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
    int64_t end = bl_arch_vectors_before(config, config->n_layers);

    if (tensor->role != BL_ROLE_VECTOR || tensor->offset >= end) return false;
    return tensor->offset - bl_arch_vectors_before(config, tensor->layer) >=
           bl_arch_vector_offset(config, bl_model_kind(config, tensor->layer), BL_LAYER_VECTORS);
}
