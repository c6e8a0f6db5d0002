/* SPDX-License-Identifier: Apache-2.0 */
/* peft.c -- an adapter's tensors: the list of factors that a configuration implies is compared with
 * the file, and read. */
#include "store/peft.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/peft_experts_internal.h"
#include "store/peft_internal.h"
#include "store/problems_internal.h"
#include "store/safetensors.h"

void bl_peft_tensor_name(const bl_peft_modules *modules, int64_t layer, int module,
                         bl_peft_factor factor, char name[BL_PEFT_NAME_BYTES])
{
    char path[BL_PEFT_NAME_BYTES], letter = factor == BL_PEFT_A ? 'A' : 'B';

    if (bl_peft_is_routed(modules, module)) {
        peft_expert_tensor t = {layer, module, factor, -1, 0};
        store_peft_expert_tensor_name(modules, &t, name);
        return;
    }
    if (module < BL_PEFT_MAX_MODULES) {
        snprintf(name, BL_PEFT_NAME_BYTES, "%s%s.%" PRId64 ".%s.lora_%c.weight", PEFT_PREFIX,
                 modules->layers, layer, modules->path[module], letter);
        return;
    }
    bl_peft_table_path(modules, module, path);
    snprintf(name, BL_PEFT_NAME_BYTES, "%s%.80s.lora_%s%c%s", PEFT_PREFIX, path,
             module == BL_PEFT_EMBEDDING ? "embedding_" : "", letter,
             module == BL_PEFT_EMBEDDING ? "" : ".weight");
}

/* Room for a name that PEFT_PREFIX precedes. */
enum { TENSOR_NAME_BYTES = BL_PEFT_NAME_BYTES - sizeof PEFT_PREFIX };

/* "model.embed_tokens.base_layer.weight" */
static void name_base_weight(const bl_peft_modules *modules, int module,
                             char name[TENSOR_NAME_BYTES])
{
    char path[BL_PEFT_NAME_BYTES];

    bl_peft_table_path(modules, module, path);
    snprintf(name, TENSOR_NAME_BYTES, "%.80s.base_layer.weight", path);
}

void store_peft_factors_free(peft_factors *list)
{
    free(list->ids);
    free(list->specs);
    free(list->names);
}

bool bl_peft_is_saved(const bl_peft_saved_names *names, const char *module, size_t n_module)
{
    for (int i = 0; i < names->n; i++) {
        size_t n = strlen(names->name[i]);
        if (n <= n_module && strncmp(module + n_module - n, names->name[i], n) == 0) return true;
    }
    return false;
}

static bool is_saved(const bl_peft_saved_names *names, const char *tensor)
{
    const char *point = strrchr(tensor, '.');
    return point && bl_peft_is_saved(names, tensor, (size_t)(point - tensor));
}

bool bl_peft_add_saved(bl_peft_saved_names *names, const char *name)
{
    size_t n = strlen(name);

    if (names->n == BL_PEFT_MAX_SAVED || n == 0 || n >= BL_PEFT_SAVED_BYTES) return false;
    memcpy(names->name[names->n++], name, n + 1);
    return true;
}

static bool saves(const bl_peft_config *config, const bl_peft_other *other)
{
    return other->name[0] && is_saved(&config->saved, other->name);
}

static void list_saved(const bl_peft_config *config, const bl_peft_base *base, bl_dtype dtype,
                       peft_factors *list)
{
    bl_peft_other other;

    for (int64_t i = 0; base->other && base->other(base->other_user, i, &other); i++) {
        if (!saves(config, &other)) continue;
        snprintf(list->names[list->n], BL_PEFT_NAME_BYTES, "%s%.*s", PEFT_PREFIX,
                 (int)(BL_PEFT_NAME_BYTES - sizeof PEFT_PREFIX), other.name);
        list->ids[list->n] = (peft_factor_id){.is_saved = true};
        list->specs[list->n] = (bl_stored_tensor_spec){
            list->names[list->n], dtype, other.n_dims, {other.shape[0], other.shape[1]}};
        list->n++;
    }
}

static size_t count_saved(const bl_peft_config *config, const bl_peft_base *base)
{
    bl_peft_other other;
    size_t n = 0;

    for (int64_t i = 0; base->other && base->other(base->other_user, i, &other); i++)
        n += saves(config, &other);
    return n;
}

/* Columns of A, rows of B. */
static int64_t in_features(const bl_peft_base *base, int module)
{
    if (module == BL_PEFT_EMBEDDING) return base->vocab;
    return module == BL_PEFT_HEAD ? base->hidden : base->in_features[module];
}

static int64_t out_features(const bl_peft_base *base, int module)
{
    if (module == BL_PEFT_EMBEDDING) return base->hidden;
    return module == BL_PEFT_HEAD ? base->vocab : base->out_features[module];
}

/* Both factors of a module, if it is a target. */
static void list_module(const bl_peft_config *config, const bl_peft_base *base, int64_t layer,
                        int module, bl_dtype dtype, peft_factors *list)
{
    if (module < base->modules.n && !bl_peft_layer_has(&base->modules, layer, module)) return;
    for (bl_peft_factor f = BL_PEFT_A; f <= BL_PEFT_B && (config->targets >> module & 1); f++) {
        bool is_a = f == BL_PEFT_A;
        bl_peft_tensor_name(&base->modules, layer, module, f, list->names[list->n]);
        list->ids[list->n] = (peft_factor_id){.layer = layer, .module = module, .factor = f};
        list->specs[list->n] = (bl_stored_tensor_spec){
            .name = list->names[list->n],
            .dtype = dtype,
            .n_dims = 2,
            .shape = {is_a ? config->r : out_features(base, module),
                      is_a ? in_features(base, module) : config->r},
        };
        list->n++;
    }
}

/* The tensors of a routed module, if it is a target. */
static void list_experts(const bl_peft_config *config, const bl_peft_base *base, int64_t layer,
                         int module, bl_dtype dtype, peft_factors *list)
{
    bool is_there =
        config->targets >> module & 1 && bl_peft_layer_has(&base->modules, layer, module);
    size_t n = is_there ? store_peft_count_tensors(config, base, module) : 0;

    for (size_t k = 0; k < n; k++, list->n++) {
        peft_expert_tensor t = store_peft_expert_tensor_at(config, base, layer, module, k);
        bl_stored_tensor_spec *spec = &list->specs[list->n];
        *spec = (bl_stored_tensor_spec){.name = list->names[list->n], .dtype = dtype, .n_dims = 2};
        store_peft_expert_tensor_shape(config, base, &t, spec->shape);
        store_peft_expert_tensor_name(&base->modules, &t, list->names[list->n]);
        list->ids[list->n] =
            (peft_factor_id){.layer = layer, .module = module, .factor = t.factor, .expert = t};
    }
}

bl_status store_peft_list_factors(const char *dir, const bl_peft_config *config,
                                  const bl_peft_base *base, bl_dtype dtype, peft_factors *list)
{
    const bl_peft_modules *modules = &base->modules;
    size_t n = ((size_t)base->n_layers * BL_PEFT_MAX_MODULES + 2) * 2 + count_saved(config, base);

    for (int m = modules->n; m < modules->n + modules->n_routed; m++)
        n += (size_t)base->n_layers * store_peft_count_tensors(config, base, m);

    list->ids = calloc(n + 1, sizeof *list->ids);
    list->specs = calloc(n + 1, sizeof *list->specs);
    list->names = calloc(n + 1, sizeof *list->names);
    if (!list->ids || !list->specs || !list->names)
        return BL_FAIL(BL_ENOMEM, "%s: %zu tensors", dir, n);
    for (int64_t layer = 0; layer < base->n_layers; layer++) {
        for (int m = 0; m < modules->n; m++) list_module(config, base, layer, m, dtype, list);
        for (int m = modules->n; m < modules->n + modules->n_routed; m++)
            list_experts(config, base, layer, m, dtype, list);
    }
    for (int m = BL_PEFT_EMBEDDING; m <= BL_PEFT_HEAD; m++)
        list_module(config, base, 0, m, dtype, list);
    list_saved(config, base, dtype, list);
    return BL_OK;
}

/* ---- reading ---- */

struct bl_peft_adapter {
    bl_peft_base base;
    bl_peft_config config;
    bl_safetensors *file;
};

static bool is_float(bl_dtype dtype)
{
    return dtype == BL_F32 || dtype == BL_F16 || dtype == BL_BF16;
}

static void check_factor(const bl_safetensors *file, const bl_stored_tensor_spec *spec,
                         bl_problems *problems)
{
    char has[BL_SHAPE_TEXT_BYTES], wants[BL_SHAPE_TEXT_BYTES];
    const bl_stored_tensor *tensor = bl_safetensors_find(file, spec->name);

    if (!tensor)
        bl_problems_add(problems, "missing %s", spec->name);
    else if (tensor->n_dims != spec->n_dims || tensor->shape[0] != spec->shape[0] ||
             (spec->n_dims > 1 && tensor->shape[1] != spec->shape[1]))
        bl_problems_add(problems, "%s has shape %s, expected %s", spec->name,
                        bl_shape_text(tensor->n_dims, tensor->shape, has),
                        bl_shape_text(spec->n_dims, spec->shape, wants));
    else if (!is_float(tensor->dtype))
        bl_problems_add(problems, "%s has dtype %s, expected F32, F16 or BF16", spec->name,
                        bl_dtype_name(tensor->dtype));
}

static int compare_specs(const void *a, const void *b)
{
    return strcmp(((const bl_stored_tensor_spec *)a)->name,
                  ((const bl_stored_tensor_spec *)b)->name);
}

/* For a base whose other tensors are unknown. */
static bool may_be_saved(const bl_peft_base *base, const bl_peft_config *config, const char *name)
{
    size_t n = sizeof PEFT_PREFIX - 1;
    return !base->other && strncmp(name, PEFT_PREFIX, n) == 0 && is_saved(&config->saved, name + n);
}

/* The weight under a targeted embedding or head, of the base's shape. */
static bool is_base_weight(const bl_peft_base *base, const bl_peft_config *config,
                           const bl_stored_tensor *tensor)
{
    size_t n = sizeof PEFT_PREFIX - 1;
    char name[TENSOR_NAME_BYTES];

    for (int m = BL_PEFT_EMBEDDING; m <= BL_PEFT_HEAD; m++) {
        if (!(config->targets >> m & 1)) continue;
        name_base_weight(&base->modules, m, name);
        if (strncmp(tensor->name, PEFT_PREFIX, n) == 0 && strcmp(tensor->name + n, name) == 0)
            return is_float(tensor->dtype) && tensor->n_dims == 2 &&
                   tensor->shape[0] == base->vocab && tensor->shape[1] == base->hidden;
    }
    return false;
}

static void add_to_base(const bl_stored_tensor *tensor, bl_peft_base *base);

/* Whether no projection has the inputs of the base's: one line, not one per tensor. */
static bl_status check_base(const bl_safetensors *file, const bl_peft_config *config,
                            const bl_peft_base *base)
{
    bl_peft_base own = {.modules = base->modules};
    int n = 0, other = -1;

    for (size_t i = 0; i < bl_safetensors_count(file); i++) {
        const bl_stored_tensor *tensor = bl_safetensors_at(file, i);
        bool is_a = strstr(tensor->name, ".lora_A.") && tensor->shape[0] == config->r;
        if (is_a) add_to_base(tensor, &own);
    }
    for (int m = 0; m < own.modules.n; m++) {
        if (own.in_features[m] == 0) continue;
        n += own.in_features[m] == base->in_features[m];
        if (own.in_features[m] != base->in_features[m] && other < 0) other = m;
    }
    if (n > 0 || other < 0) return BL_OK;
    return BL_FAIL(BL_EINPUT,
                   "%s: the adapter of another model: %s has %lld inputs there and %lld in this "
                   "model, in %lld and %lld layers",
                   bl_safetensors_path(file), bl_peft_last_name(own.modules.path[other]),
                   (long long)own.in_features[other], (long long)base->in_features[other],
                   (long long)own.n_layers, (long long)base->n_layers);
}

/* Leaves the specs sorted by name. */
static bl_status check_tensors(const bl_safetensors *file, const bl_peft_base *base,
                               const bl_peft_config *config, peft_factors *list)
{
    bl_problems problems = {0};

    if (base->other) BL_TRY(check_base(file, config, base)); /* a model, not the file's sizes */
    for (size_t i = 0; i < list->n; i++) check_factor(file, &list->specs[i], &problems);
    qsort(list->specs, list->n, sizeof *list->specs, compare_specs);
    for (size_t i = 0; i < bl_safetensors_count(file); i++) {
        const bl_stored_tensor_spec wanted = {.name = bl_safetensors_at(file, i)->name};
        if (!bsearch(&wanted, list->specs, list->n, sizeof *list->specs, compare_specs) &&
            !may_be_saved(base, config, wanted.name) &&
            !is_base_weight(base, config, bl_safetensors_at(file, i)))
            bl_problems_add(&problems, "unexpected %s", wanted.name);
    }
    return bl_problems_report(&problems, bl_safetensors_path(file));
}

bl_status bl_peft_open(const char *dir, const bl_peft_base *base, bl_peft_adapter **out)
{
    bl_status st = BL_OK;
    peft_factors list = {0};
    char *path = NULL;
    bl_peft_adapter *adapter = calloc(1, sizeof *adapter);

    *out = NULL;
    if (!adapter) return BL_FAIL(BL_ENOMEM, "%s: an adapter", dir);
    adapter->base = *base;
    BL_TRY_GOTO(st, done,
                bl_peft_load_config(dir, &base->modules, base->n_layers, &adapter->config));
    bl_peft_nest(&adapter->base.modules, adapter->config.targets);
    BL_TRY_GOTO(st, done, bl_path_join(dir, BL_PEFT_MODEL_NAME, &path));
    BL_TRY_GOTO(st, done, bl_safetensors_open(path, &adapter->file));
    if (adapter->config.layout != BL_PEFT_PER_EXPERT)
        store_peft_choose_axis(adapter->file, &adapter->base, &adapter->config);
    BL_TRY_GOTO(st, done,
                store_peft_list_factors(dir, &adapter->config, &adapter->base, BL_F32, &list));
    BL_TRY_GOTO(st, done, check_tensors(adapter->file, &adapter->base, &adapter->config, &list));
    *out = adapter;
    adapter = NULL;
done:
    store_peft_factors_free(&list);
    free(path);
    bl_peft_close(adapter);
    return st;
}

/* The sizes of embedding and head that follow from a factor of them. */
static void add_tables_to_base(const bl_stored_tensor *tensor, bl_peft_base *base)
{
    char name[BL_PEFT_NAME_BYTES];

    for (int m = BL_PEFT_EMBEDDING; m <= BL_PEFT_HEAD; m++)
        for (bl_peft_factor f = BL_PEFT_A; f <= BL_PEFT_B; f++) {
            bool is_vocab = (m == BL_PEFT_EMBEDDING) == (f == BL_PEFT_A);
            int64_t *size = is_vocab ? &base->vocab : &base->hidden;
            bl_peft_tensor_name(&base->modules, 0, m, f, name);
            if (strcmp(name, tensor->name) == 0 && tensor->n_dims == 2 && !*size)
                *size = tensor->shape[f == BL_PEFT_A];
        }
}

/* Adds the base's sizes that follow from the tensor's name and shape. */
static void add_to_base(const bl_stored_tensor *tensor, bl_peft_base *base)
{
    char name[BL_PEFT_NAME_BYTES];
    peft_factor_id id;

    add_tables_to_base(tensor, base);
    int prefix = snprintf(name, sizeof name, "base_model.model.%s.", base->modules.layers);

    if (strncmp(tensor->name, name, (size_t)prefix) != 0 ||
        sscanf(tensor->name + prefix, "%" SCNd64 ".", &id.layer) != 1 || id.layer < 0 ||
        id.layer == INT64_MAX)
        return;
    if (base->modules.n_routed > 0 && strstr(tensor->name, ".experts."))
        base->n_layers = bl_max_i64(base->n_layers, id.layer + 1);
    for (id.module = 0; id.module < base->modules.n; id.module++) {
        for (id.factor = BL_PEFT_A; id.factor <= BL_PEFT_B; id.factor++) {
            bool is_a = id.factor == BL_PEFT_A;
            int64_t *features =
                is_a ? &base->in_features[id.module] : &base->out_features[id.module];
            bl_peft_tensor_name(&base->modules, id.layer, id.module, id.factor, name);
            if (strcmp(name, tensor->name) != 0 || tensor->n_dims != 2) continue;
            base->n_layers = bl_max_i64(base->n_layers, id.layer + 1);
            if (!*features) *features = tensor->shape[is_a];
        }
    }
}

typedef struct own_modules {
    const bl_peft_modules *modules;
    const bl_safetensors *file;
} own_modules;

/* bl_peft_modules.has: modules that not all layers need have are those that the file has. */
static bool file_has(const void *user, int64_t layer, int module)
{
    const own_modules *own = user;
    char name[BL_PEFT_NAME_BYTES];

    if (bl_peft_is_routed(own->modules, module))
        return store_peft_has_experts(own->file, own->modules, layer, module);
    if (!(own->modules->partial >> module & 1)) return true;
    bl_peft_tensor_name(own->modules, layer, module, BL_PEFT_A, name);
    return bl_safetensors_find(own->file, name) != NULL;
}

bl_status bl_peft_check(const char *dir, const bl_peft_modules *modules)
{
    bl_peft_base base = {.modules = *modules, .n_layers = 1};
    own_modules own = {.modules = modules};
    bl_peft_adapter *adapter = NULL;
    bl_safetensors *file = NULL;
    char *path = NULL;

    BL_TRY(bl_path_join(dir, BL_PEFT_MODEL_NAME, &path));
    bl_status st = bl_safetensors_open(path, &file);
    if (st != BL_OK) goto done;
    own.file = file;
    base.modules.has = file_has;
    base.modules.user = &own;
    size_t n = bl_safetensors_count(file);
    for (size_t i = 0; i < n; i++) add_to_base(bl_safetensors_at(file, i), &base);
    base.n_layers =
        bl_min_i64(base.n_layers,
                   (int64_t)n + 1); /* a lone high number must not fill memory with missing names */
    bl_peft_config config;
    BL_TRY_GOTO(st, done, bl_peft_load_config(dir, modules, base.n_layers, &config));
    bl_peft_nest(&base.modules, config.targets);
    store_peft_measure_experts(file, &config, &base);
    st = bl_peft_open(dir, &base, &adapter);
done:
    bl_peft_close(adapter);
    bl_safetensors_close(file);
    free(path);
    return st;
}

void bl_peft_close(bl_peft_adapter *adapter)
{
    if (!adapter) return;
    bl_safetensors_close(adapter->file);
    free(adapter);
}

const bl_peft_config *bl_peft_get_config(const bl_peft_adapter *adapter)
{
    return &adapter->config;
}

bl_status bl_peft_read(const bl_peft_adapter *adapter, int64_t layer, int module,
                       bl_peft_factor factor, float *dst)
{
    char name[BL_PEFT_NAME_BYTES];

    if (bl_peft_is_routed(&adapter->base.modules, module))
        return store_peft_read_experts(adapter->file, &adapter->config, &adapter->base, layer,
                                       module, factor, dst);
    bl_peft_tensor_name(&adapter->base.modules, layer, module, factor, name);
    const bl_stored_tensor *tensor = bl_safetensors_find(adapter->file, name);
    if (!tensor) return BL_FAIL(BL_EINTERNAL, "%s is no factor of the adapter", name);
    return bl_stored_tensor_read_f32(tensor, dst);
}

bl_status bl_peft_read_saved(const bl_peft_adapter *adapter, const char *tensor, int64_t begin,
                             int64_t n, float *dst)
{
    char name[BL_PEFT_NAME_BYTES];

    snprintf(name, sizeof name, "%s%s", PEFT_PREFIX, tensor);
    const bl_stored_tensor *t = bl_safetensors_find(adapter->file, name);
    if (!t)
        return BL_FAIL(BL_EINPUT, "%s: it has no tensor %s", bl_safetensors_path(adapter->file),
                       name);
    return bl_stored_tensor_read_floats(t, begin, n, dst);
}

bool bl_peft_has_base_weight(const bl_peft_adapter *adapter, int module)
{
    char tensor[TENSOR_NAME_BYTES], name[BL_PEFT_NAME_BYTES];

    if (!(adapter->config.targets >> module & 1)) return false;
    name_base_weight(&adapter->base.modules, module, tensor);
    snprintf(name, sizeof name, "%s%s", PEFT_PREFIX, tensor);
    return bl_safetensors_find(adapter->file, name) != NULL;
}

bl_status bl_peft_read_base_weight(const bl_peft_adapter *adapter, int module, int64_t begin,
                                   int64_t n, float *dst)
{
    char tensor[TENSOR_NAME_BYTES];

    name_base_weight(&adapter->base.modules, module, tensor);
    return bl_peft_read_saved(adapter, tensor, begin, n, dst);
}
