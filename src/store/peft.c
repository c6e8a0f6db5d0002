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

enum { ROUND_PIECE = 1 << 14 };

static const char MODEL_NAME[] = "adapter_model.safetensors";

/* One factor of the adapter; the file must hold exactly the list of all factors. */
typedef struct factor_id {
    int64_t layer;
    int module;
    bl_peft_factor factor;
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
    snprintf(name, BL_PEFT_NAME_BYTES, "base_model.model.%s.%" PRId64 ".%s.lora_%c.weight",
             modules->layers, layer, modules->path[module], factor == BL_PEFT_A ? 'A' : 'B');
}

static void list_free(factor_list *list)
{
    free(list->ids);
    free(list->specs);
    free(list->names);
}

static bl_status list_factors(const char *dir, const bl_peft_config *config,
                              const bl_peft_base *base, bl_dtype dtype, factor_list *list)
{
    size_t n = (size_t)base->n_layers * 2 * (size_t)__builtin_popcount(config->targets);

    list->ids = calloc(n + 1, sizeof *list->ids);
    list->specs = calloc(n + 1, sizeof *list->specs);
    list->names = calloc(n + 1, sizeof *list->names);
    if (!list->ids || !list->specs || !list->names)
        return BL_FAIL(BL_ENOMEM, "%s: %zu tensors", dir, n);
    for (int64_t layer = 0; layer < base->n_layers; layer++) {
        for (int m = 0; m < base->modules.n; m++) {
            for (bl_peft_factor f = BL_PEFT_A; f <= BL_PEFT_B && (config->targets >> m & 1); f++) {
                factor_id id = {layer, m, f};
                bl_peft_tensor_name(&base->modules, layer, m, f, list->names[list->n]);
                list->ids[list->n] = id;
                list->specs[list->n] = (bl_stored_tensor_spec){
                    .name = list->names[list->n],
                    .dtype = dtype,
                    .n_dims = 2,
                    .shape = {f == BL_PEFT_A ? config->r : base->out_features[m],
                              f == BL_PEFT_A ? base->in_features[m] : config->r},
                };
                list->n++;
            }
        }
    }
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
    else if (tensor->n_dims != 2 || tensor->shape[0] != spec->shape[0] ||
             tensor->shape[1] != spec->shape[1])
        bl_problems_add(problems, "%s has shape %s, expected %s", spec->name,
                        bl_shape_text(tensor->n_dims, tensor->shape, has),
                        bl_shape_text(2, spec->shape, wants));
    else if (!is_float(tensor->dtype))
        bl_problems_add(problems, "%s has dtype %s, expected F32, F16 or BF16", spec->name,
                        bl_dtype_name(tensor->dtype));
}

static int compare_specs(const void *a, const void *b)
{
    return strcmp(((const bl_stored_tensor_spec *)a)->name,
                  ((const bl_stored_tensor_spec *)b)->name);
}

/* Leaves the specs sorted by name. */
static bl_status check_tensors(const bl_safetensors *file, factor_list *list)
{
    bl_problems problems = {0};

    for (size_t i = 0; i < list->n; i++) check_factor(file, &list->specs[i], &problems);
    qsort(list->specs, list->n, sizeof *list->specs, compare_specs);
    for (size_t i = 0; i < bl_safetensors_count(file); i++) {
        const bl_stored_tensor_spec wanted = {.name = bl_safetensors_at(file, i)->name};
        if (!bsearch(&wanted, list->specs, list->n, sizeof *list->specs, compare_specs))
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
    BL_TRY_GOTO(st, done, check_tensors(adapter->file, &list));
    *out = adapter;
    adapter = NULL;
done:
    list_free(&list);
    free(path);
    bl_peft_close(adapter);
    return st;
}

/* Adds the base's sizes that follow from the tensor's name and shape. */
static void add_to_base(const bl_stored_tensor *tensor, bl_peft_base *base)
{
    char name[BL_PEFT_NAME_BYTES];
    factor_id id;
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

static bl_status write_tensors(bl_safetensors_writer *writer, const factor_list *list,
                               bl_dtype dtype, bl_peft_fill_fn fill, void *arg)
{
    bl_status st = BL_OK;
    const size_t *order = bl_safetensors_writer_order(writer);
    size_t max_values = 1;

    for (size_t i = 0; i < list->n; i++) {
        size_t n_values = (size_t)(list->specs[i].shape[0] * list->specs[i].shape[1]);
        if (n_values > max_values) max_values = n_values;
    }
    float *values = calloc(max_values, sizeof *values);
    if (!values) return BL_FAIL(BL_ENOMEM, "an adapter's factor of %zu values", max_values);
    for (size_t i = 0; i < list->n; i++) {
        const factor_id *id = &list->ids[order[i]];
        const bl_stored_tensor_spec *spec = &list->specs[order[i]];
        BL_TRY_GOTO(st, done, fill(arg, id->layer, id->module, id->factor, values));
        BL_TRY_GOTO(st, done,
                    write_factor(writer, dtype, values, (size_t)(spec->shape[0] * spec->shape[1])));
    }
done:
    free(values);
    return st;
}

bl_status bl_peft_write(const char *dir, const bl_peft_config *config, const bl_peft_base *base,
                        const char *base_name, bl_dtype dtype, bl_peft_fill_fn fill, void *arg)
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
    BL_TRY_GOTO(st, done, write_tensors(writer, &list, dtype, fill, arg));
    st = bl_safetensors_writer_commit(writer);
    writer = NULL;
    if (st == BL_OK) st = bl_peft_write_config(dir, &base->modules, config, base_name);
done:
    bl_safetensors_writer_abort(writer);
    list_free(&list);
    free(path);
    return st;
}
