/* SPDX-License-Identifier: Apache-2.0 */
/* peft.c -- an adapter's tensors: the list of factors that a configuration implies is compared with
 * the file, read and written. */
#include "store/peft.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/sizes.h"
#include "store/peft_internal.h"
#include "store/problems_internal.h"
#include "store/safetensors.h"

enum { ROUND_PIECE = 1 << 14, SAVED_PIECE = 1 << 20 };

static const char MODEL_PREFIX[] = "base_model.model.";

static const char MODEL_NAME[] = "adapter_model.safetensors";

/* A factor of the adapter, or a tensor of modules_to_save. The file must hold exactly those in the
 * list. */
typedef struct factor_id {
    int64_t layer;
    int module;
    bl_peft_factor factor;
    bool is_saved;
} factor_id;

typedef struct factor_list {
    size_t n;
    factor_id *ids;
    bl_stored_tensor_spec *specs;
    char (*names)[BL_PEFT_NAME_BYTES];
} factor_list;

void bl_peft_tensor_name(const bl_peft_modules *modules, int64_t layer, int module,
                         bl_peft_factor factor, char name[BL_PEFT_NAME_BYTES])
{
    char path[BL_PEFT_NAME_BYTES], letter = factor == BL_PEFT_A ? 'A' : 'B';

    if (module < BL_PEFT_MAX_MODULES) {
        snprintf(name, BL_PEFT_NAME_BYTES, "%s%s.%" PRId64 ".%s.lora_%c.weight", MODEL_PREFIX,
                 modules->layers, layer, modules->path[module], letter);
        return;
    }
    bl_peft_table_path(modules, module, path);
    snprintf(name, BL_PEFT_NAME_BYTES, "%s%.80s.lora_%s%c%s", MODEL_PREFIX, path,
             module == BL_PEFT_EMBEDDING ? "embedding_" : "", letter,
             module == BL_PEFT_EMBEDDING ? "" : ".weight");
}

/* Room for a name that MODEL_PREFIX precedes. */
enum { TENSOR_NAME_BYTES = BL_PEFT_NAME_BYTES - sizeof MODEL_PREFIX };

/* "model.embed_tokens.base_layer.weight" */
static void name_base_weight(const bl_peft_modules *modules, int module,
                             char name[TENSOR_NAME_BYTES])
{
    char path[BL_PEFT_NAME_BYTES];

    bl_peft_table_path(modules, module, path);
    snprintf(name, TENSOR_NAME_BYTES, "%.80s.base_layer.weight", path);
}

static void list_free(factor_list *list)
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
                       factor_list *list)
{
    bl_peft_other other;

    for (int64_t i = 0; base->other && base->other(base->other_user, i, &other); i++) {
        if (!saves(config, &other)) continue;
        snprintf(list->names[list->n], BL_PEFT_NAME_BYTES, "%s%.*s", MODEL_PREFIX,
                 (int)(BL_PEFT_NAME_BYTES - sizeof MODEL_PREFIX), other.name);
        list->ids[list->n] = (factor_id){.is_saved = true};
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
                        int module, bl_dtype dtype, factor_list *list)
{
    for (bl_peft_factor f = BL_PEFT_A; f <= BL_PEFT_B && (config->targets >> module & 1); f++) {
        bool is_a = f == BL_PEFT_A;
        bl_peft_tensor_name(&base->modules, layer, module, f, list->names[list->n]);
        list->ids[list->n] = (factor_id){layer, module, f, false};
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

static bl_status list_factors(const char *dir, const bl_peft_config *config,
                              const bl_peft_base *base, bl_dtype dtype, factor_list *list)
{
    size_t n = ((size_t)base->n_layers * BL_PEFT_MAX_MODULES + 2) * 2 + count_saved(config, base);

    list->ids = calloc(n + 1, sizeof *list->ids);
    list->specs = calloc(n + 1, sizeof *list->specs);
    list->names = calloc(n + 1, sizeof *list->names);
    if (!list->ids || !list->specs || !list->names)
        return BL_FAIL(BL_ENOMEM, "%s: %zu tensors", dir, n);
    for (int64_t layer = 0; layer < base->n_layers; layer++)
        for (int m = 0; m < base->modules.n; m++) list_module(config, base, layer, m, dtype, list);
    for (int m = BL_PEFT_EMBEDDING; m <= BL_PEFT_HEAD; m++)
        list_module(config, base, 0, m, dtype, list);
    list_saved(config, base, dtype, list);
    return BL_OK;
}

/* ---- reading ---- */

struct bl_peft_adapter {
    bl_peft_modules modules;
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
    size_t n = sizeof MODEL_PREFIX - 1;
    return !base->other && strncmp(name, MODEL_PREFIX, n) == 0 &&
           is_saved(&config->saved, name + n);
}

/* The weight under a targeted embedding or head, of the base's shape. */
static bool is_base_weight(const bl_peft_base *base, const bl_peft_config *config,
                           const bl_stored_tensor *tensor)
{
    size_t n = sizeof MODEL_PREFIX - 1;
    char name[TENSOR_NAME_BYTES];

    for (int m = BL_PEFT_EMBEDDING; m <= BL_PEFT_HEAD; m++) {
        if (!(config->targets >> m & 1)) continue;
        name_base_weight(&base->modules, m, name);
        if (strncmp(tensor->name, MODEL_PREFIX, n) == 0 && strcmp(tensor->name + n, name) == 0)
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
                               const bl_peft_config *config, factor_list *list)
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
    factor_list list = {0};
    char *path = NULL;
    bl_peft_adapter *adapter = calloc(1, sizeof *adapter);

    *out = NULL;
    if (!adapter) return BL_FAIL(BL_ENOMEM, "%s: an adapter", dir);
    adapter->modules = base->modules;
    BL_TRY_GOTO(st, done,
                bl_peft_load_config(dir, &base->modules, base->n_layers, &adapter->config));
    BL_TRY_GOTO(st, done, bl_path_join(dir, MODEL_NAME, &path));
    BL_TRY_GOTO(st, done, bl_safetensors_open(path, &adapter->file));
    BL_TRY_GOTO(st, done, list_factors(dir, &adapter->config, base, BL_F32, &list));
    BL_TRY_GOTO(st, done, check_tensors(adapter->file, base, &adapter->config, &list));
    *out = adapter;
    adapter = NULL;
done:
    list_free(&list);
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
    factor_id id;

    add_tables_to_base(tensor, base);
    int prefix = snprintf(name, sizeof name, "base_model.model.%s.", base->modules.layers);

    if (strncmp(tensor->name, name, (size_t)prefix) != 0 ||
        sscanf(tensor->name + prefix, "%" SCNd64 ".", &id.layer) != 1 || id.layer < 0 ||
        id.layer == INT64_MAX)
        return;
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

bl_status bl_peft_check(const char *dir, const bl_peft_modules *modules)
{
    bl_peft_base base = {.modules = *modules, .n_layers = 1};
    bl_peft_adapter *adapter = NULL;
    bl_safetensors *file = NULL;
    char *path = NULL;

    BL_TRY(bl_path_join(dir, MODEL_NAME, &path));
    bl_status st = bl_safetensors_open(path, &file);
    if (st != BL_OK) goto done;
    size_t n = bl_safetensors_count(file);
    for (size_t i = 0; i < n; i++) add_to_base(bl_safetensors_at(file, i), &base);
    base.n_layers =
        bl_min_i64(base.n_layers,
                   (int64_t)n + 1); /* a lone high number must not fill memory with missing names */
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

    bl_peft_tensor_name(&adapter->modules, layer, module, factor, name);
    const bl_stored_tensor *tensor = bl_safetensors_find(adapter->file, name);
    if (!tensor) return BL_FAIL(BL_EINTERNAL, "%s is no factor of the adapter", name);
    return bl_stored_tensor_read_f32(tensor, dst);
}

bl_status bl_peft_read_saved(const bl_peft_adapter *adapter, const char *tensor, int64_t begin,
                             int64_t n, float *dst)
{
    char name[BL_PEFT_NAME_BYTES];

    snprintf(name, sizeof name, "%s%s", MODEL_PREFIX, tensor);
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
    name_base_weight(&adapter->modules, module, tensor);
    snprintf(name, sizeof name, "%s%s", MODEL_PREFIX, tensor);
    return bl_safetensors_find(adapter->file, name) != NULL;
}

bl_status bl_peft_read_base_weight(const bl_peft_adapter *adapter, int module, int64_t begin,
                                   int64_t n, float *dst)
{
    char tensor[TENSOR_NAME_BYTES];

    name_base_weight(&adapter->modules, module, tensor);
    return bl_peft_read_saved(adapter, tensor, begin, n, dst);
}

/* ---- writing ---- */

static bl_status write_factor(bl_safetensors_writer *writer, bl_dtype dtype, const float *values,
                              size_t n_values)
{
    uint16_t halves[ROUND_PIECE];

    if (dtype == BL_F32)
        return bl_safetensors_writer_append(writer, values, n_values * sizeof *values);
    while (n_values > 0) {
        size_t n = n_values < ROUND_PIECE ? n_values : ROUND_PIECE;
        for (size_t i = 0; i < n; i++) halves[i] = bl_f32_to_bf16(values[i]);
        BL_TRY(bl_safetensors_writer_append(writer, halves, n * sizeof *halves));
        values += n;
        n_values -= n;
    }
    return BL_OK;
}

/* The functions that provide the values of a file. */
typedef struct filler {
    bl_peft_fill_fn factor;
    bl_peft_fill_saved_fn saved;
    void *arg;
} filler;

static size_t count_values(const bl_stored_tensor_spec *spec)
{
    return (size_t)(spec->shape[0] * (spec->n_dims > 1 ? spec->shape[1] : 1));
}

/* Writes a tensor of modules_to_save, piece by piece. */
static bl_status write_saved(bl_safetensors_writer *writer, bl_dtype dtype,
                             const bl_stored_tensor_spec *spec, const filler *fill, float *values)
{
    int64_t n_values = (int64_t)count_values(spec);

    for (int64_t begin = 0, n; begin < n_values; begin += n) {
        n = bl_min_i64(SAVED_PIECE, n_values - begin);
        BL_TRY(fill->saved(fill->arg, spec->name + sizeof MODEL_PREFIX - 1, begin, n, values));
        BL_TRY(write_factor(writer, dtype, values, (size_t)n));
    }
    return BL_OK;
}

static bl_status write_tensors(bl_safetensors_writer *writer, const factor_list *list,
                               bl_dtype dtype, const filler *fill)
{
    bl_status st = BL_OK;
    const size_t *order = bl_safetensors_writer_order(writer);
    size_t max_values = 1;

    for (size_t i = 0; i < list->n; i++) {
        size_t n_values = count_values(&list->specs[i]);
        if (list->ids[i].is_saved && n_values > SAVED_PIECE) n_values = SAVED_PIECE;
        if (n_values > max_values) max_values = n_values;
    }
    float *values = calloc(max_values, sizeof *values);
    if (!values) return BL_FAIL(BL_ENOMEM, "an adapter's factor of %zu values", max_values);
    for (size_t i = 0; i < list->n; i++) {
        const factor_id *id = &list->ids[order[i]];
        const bl_stored_tensor_spec *spec = &list->specs[order[i]];
        if (id->is_saved) {
            BL_TRY_GOTO(st, done, write_saved(writer, dtype, spec, fill, values));
            continue;
        }
        BL_TRY_GOTO(st, done, fill->factor(fill->arg, id->layer, id->module, id->factor, values));
        BL_TRY_GOTO(st, done, write_factor(writer, dtype, values, count_values(spec)));
    }
done:
    free(values);
    return st;
}

bl_status bl_peft_write(const char *dir, const bl_peft_config *config, const bl_peft_base *base,
                        const char *base_name, bl_dtype dtype, bl_peft_fill_fn fill,
                        bl_peft_fill_saved_fn fill_saved, void *arg)
{
    static const char *const metadata[] = {"format", "pt"};
    bl_status st = BL_OK;
    factor_list list = {0};
    char *path = NULL;
    bl_safetensors_writer *writer = NULL;

    if (dtype != BL_F32 && dtype != BL_BF16)
        return BL_FAIL(BL_EINTERNAL, "an adapter of %s", bl_dtype_name(dtype));
    BL_TRY_GOTO(st, done, bl_path_join(dir, MODEL_NAME, &path));
    BL_TRY_GOTO(st, done, list_factors(dir, config, base, dtype, &list));
    BL_TRY_GOTO(st, done, bl_safetensors_create(path, list.specs, list.n, metadata, 1, &writer));
    BL_TRY_GOTO(st, done, write_tensors(writer, &list, dtype, &(filler){fill, fill_saved, arg}));
    st = bl_safetensors_writer_commit(writer);
    writer = NULL;
    if (st == BL_OK) st = bl_peft_write_config(dir, &base->modules, config, base_name);
done:
    bl_safetensors_writer_abort(writer);
    list_free(&list);
    free(path);
    return st;
}
