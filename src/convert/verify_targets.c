/* SPDX-License-Identifier: Apache-2.0 */
/* verify_targets.c -- adapter_config.json against the tensors: a module that it names and that has
 * no A and B, tensors that it does not name, and modules_to_save. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/json.h"
#include "base/sizes.h"
#include "convert/verify_internal.h"

/* Names of modules, or one expression. */
typedef struct name_list {
    const json_t *names;      /* NULL: an expression, or nothing */
    bl_name_pattern *pattern; /* NULL: none */
    bool is_all;              /* "all-linear" */
} name_list;

typedef struct targets {
    name_list modules, excluded;
    const json_t *parameters, *layers, *saved;
    char **classes; /* of the pairs, sorted */
    size_t n_classes;
    bool has_experts; /* one by one */
} targets;

static bl_status read_list(const bl_verify_adapter *a, const char *key, name_list *out)
{
    const json_t *value = json_object_get(a->config, key);
    const char *text = bl_json_text(value);

    if (json_is_array(value)) out->names = value;
    out->is_all = text && strcmp(text, "all-linear") == 0;
    if (!text || out->is_all) return BL_OK;
    return bl_name_pattern_create(text, BL_PATTERN_WHOLE, BL_EINPUT, a->config_path, &out->pattern);
}

/* Whether `path` is one of the names, or ends in "." and one. */
static bool ends_in_name(const json_t *names, const char *path)
{
    const json_t *item;
    size_t i, n = strlen(path);

    json_array_foreach(names, i, item)
    {
        const char *name = bl_json_text(item);
        size_t n_name = name ? strlen(name) : 0;
        if (n_name == 0 || n_name > n || strcmp(path + n - n_name, name) != 0) continue;
        if (n_name == n || path[n - n_name - 1] == '.') return true;
    }
    return false;
}

static bl_status is_listed(const name_list *list, const char *path, bool *out)
{
    *out = ends_in_name(list->names, path);
    return list->pattern ? bl_name_pattern_match(list->pattern, path, out) : BL_OK;
}

/* layers_to_transform: a number or a list; absent: all layers. */
static bool is_chosen_layer(const json_t *layers, const char *path)
{
    int64_t layer = bl_verify_layer(path);
    const json_t *item;
    size_t i;

    if (!layers || json_is_null(layers) || layer < 0) return true;
    if (json_is_integer(layers)) return json_integer_value(layers) == layer;
    json_array_foreach(layers, i, item) if (json_integer_value(item) == layer) return true;
    return false;
}

/* modules_to_save selects paths that end in a name, at a point or not. */
static bool is_saved(const targets *t, const char *path)
{
    const json_t *item;
    size_t i, n = strlen(path);

    json_array_foreach(t->saved, i, item)
    {
        const char *name = bl_json_text(item);
        if (name && strlen(name) <= n && strcmp(path + n - strlen(name), name) == 0) return true;
    }
    return false;
}

/* ---- modules without tensors ---- */

static int compare_texts(const void *a, const void *b)
{
    return strcmp(*(char *const *)a, *(char *const *)b);
}

static bl_status list_classes(const bl_verify *v, targets *t)
{
    char text[BL_VERIFY_NAME_BYTES];

    t->classes = calloc(v->adapter.n_pairs + 1, sizeof *t->classes);
    if (!t->classes) return BL_FAIL(BL_ENOMEM, "a list of %zu modules", v->adapter.n_pairs);
    for (size_t i = 0; i < v->adapter.n_pairs; i++) {
        const bl_pair *p = &v->adapter.pairs[i];
        bl_verify_class(p->key, text);
        if (!(t->classes[t->n_classes] = strdup(text)))
            return BL_FAIL(BL_ENOMEM, "the name %s", text);
        t->n_classes++;
        t->has_experts |= !p->parameter && strstr(p->key, ".experts.");
    }
    qsort(t->classes, t->n_classes, sizeof *t->classes, compare_texts);
    return BL_OK;
}

static bool has_class(const targets *t, const char *key)
{
    char text[BL_VERIFY_NAME_BYTES], *wanted = text;

    bl_verify_class(key, text);
    return bsearch(&wanted, t->classes, t->n_classes, sizeof *t->classes, compare_texts);
}

static int compare_keys(const void *a, const void *b)
{
    return strcmp(((const bl_pair *)a)->key, ((const bl_pair *)b)->key);
}

/* parameter NULL: a plain matrix. */
static bool has_pair(const bl_pair *sorted, size_t n, const char *key, const char *parameter)
{
    const bl_pair wanted = {.key = (char *)key};
    const bl_pair *p = bsearch(&wanted, sorted, n, sizeof *sorted, compare_keys);

    if (!p || !parameter) return p;
    while (p > sorted && strcmp(p[-1].key, key) == 0) p--;
    for (; p < sorted + n && strcmp(p->key, key) == 0; p++)
        if (p->parameter && strcmp(p->parameter, parameter) == 0) return true;
    return false;
}

/* A matrix of the base that target_modules selects, by the tensor's name and by its key, has a
 * pair. With "all-linear", and in experts, a class that has a pair in one layer has one in all. */
static bl_status check_block(bl_verify *v, const targets *t, const bl_pair *sorted,
                             const bl_verify_block *block)
{
    char path[BL_VERIFY_NAME_BYTES], key[BL_VERIFY_NAME_BYTES];
    const bl_stored_tensor *tensor = block->slice.tensor;
    size_t n = strlen(tensor->name), n_key = strlen(block->key), n_end = strlen(".weight");
    bool is_target, is_excluded;

    if (tensor->n_dims != 2 || n <= n_end || strcmp(tensor->name + n - n_end, ".weight") != 0 ||
        n_key <= n_end || (block->expert >= 0 && !t->has_experts))
        return BL_OK;
    snprintf(path, sizeof path, "%.*s", (int)(n - n_end), tensor->name);
    snprintf(key, sizeof key, "%.*s", (int)(n_key - n_end), block->key);
    if (bl_verify_layer(key) >= v->base.n_layers || !is_chosen_layer(t->layers, key)) return BL_OK;
    BL_TRY(is_listed(&t->modules, path, &is_target));
    BL_TRY(is_listed(&t->excluded, path, &is_excluded));
    if (t->modules.is_all) is_target = has_class(t, key);
    if (!is_target || is_excluded || is_saved(t, path)) return BL_OK;
    if (!has_pair(sorted, v->adapter.n_pairs, key, NULL))
        bl_verify_fault(v, "missing", path, "A and B: target_modules selects it", "neither");
    return BL_OK;
}

/* Experts whose parameters target_parameters selects. */
static void check_experts(bl_verify *v, const targets *t, const bl_pair *sorted,
                          const bl_verify_block *block)
{
    static const char *const parameters[] = {"gate_up_proj", "down_proj"};
    char key[BL_VERIFY_NAME_BYTES], path[BL_VERIFY_NAME_BYTES + 16];
    const char *at = strstr(block->key, ".experts.0.down_proj");

    if (!at || bl_verify_layer(block->key) >= v->base.n_layers) return;
    snprintf(key, sizeof key, "%.*s.experts", (int)(at - block->key), block->key);
    for (size_t i = 0; i < BL_COUNT(parameters); i++) {
        snprintf(path, sizeof path, "%s.%s", key, parameters[i]);
        if (ends_in_name(t->parameters, path) &&
            !has_pair(sorted, v->adapter.n_pairs, key, parameters[i]))
            bl_verify_fault(v, "missing", path, "A and B: target_parameters selects it", "neither");
    }
}

static bl_status check_missing(bl_verify *v, const targets *t)
{
    size_t n = v->adapter.n_pairs;
    bl_status st = BL_OK;
    bl_pair *sorted = calloc(n + 1, sizeof *sorted);

    if (!sorted) return BL_FAIL(BL_ENOMEM, "a list of %zu modules", n);
    if (n > 0) memcpy(sorted, v->adapter.pairs, n * sizeof *sorted);
    qsort(sorted, n, sizeof *sorted, compare_keys);
    for (size_t i = 0; i < v->base.n && st == BL_OK; i++) {
        st = check_block(v, t, sorted, &v->base.blocks[i]);
        check_experts(v, t, sorted, &v->base.blocks[i]);
    }
    free(sorted);
    return st;
}

/* ---- tensors that are not named ---- */

static bl_status check_pair(bl_verify *v, const targets *t, bl_pair *p)
{
    char path[BL_VERIFY_NAME_BYTES + 16], *end;
    const char *name = p->a ? p->a->name : p->b->name;
    bool is_target, is_excluded;

    snprintf(path, sizeof path, "%s", p->module);
    while ((end = strstr(path, ".base_layer"))) *end = '\0';
    BL_TRY(is_listed(&t->modules, path, &is_target));
    BL_TRY(is_listed(&t->excluded, path, &is_excluded));
    is_target = (is_target || t->modules.is_all) && !is_excluded;
    is_target = is_target && is_chosen_layer(t->layers, path);
    snprintf(path + strlen(path), sizeof path - strlen(path), ".%s",
             p->parameter ? p->parameter : "weight");
    is_target = (is_target && !p->parameter) || ends_in_name(t->parameters, path);
    p->is_untargeted = !is_target;
    if (!is_target)
        bl_verify_fault(v, "untargeted", name,
                        p->parameter ? "a name in target_parameters" : "a name in target_modules",
                        "none selects it: PEFT drops it");
    return BL_OK;
}

/* ---- modules_to_save ---- */

static void check_saved_tensor(bl_verify *v, const targets *t, const bl_stored_tensor *tensor)
{
    char name[BL_VERIFY_NAME_BYTES], has[BL_SHAPE_TEXT_BYTES], wants[BL_SHAPE_TEXT_BYTES];
    bool is_tied,
        is_table = strstr(tensor->name, "embed_tokens") || strstr(tensor->name, "lm_head");

    bl_verify_other_name(tensor, name);
    const bl_verify_block *block = bl_verify_find_other(v, name, &is_tied);
    if (!block) {
        bl_verify_fault(v, "no_module", tensor->name, "a tensor of the base", "no such tensor");
        return;
    }
    const bl_stored_tensor *of_base = block->slice.tensor;
    if (tensor->n_dims != of_base->n_dims ||
        memcmp(tensor->shape, of_base->shape, (size_t)tensor->n_dims * sizeof *tensor->shape) != 0)
        bl_verify_fault(v, "shape", tensor->name,
                        bl_shape_text(of_base->n_dims, of_base->shape, wants), "%s",
                        bl_shape_text(tensor->n_dims, tensor->shape, has));
    char *point = strrchr(name, '.');
    if (point) *point = '\0';
    if (!is_saved(t, name) && !is_table)
        bl_verify_fault(v, "untargeted", tensor->name, "a name in modules_to_save",
                        "none selects it: PEFT drops it");
}

static void check_saved(bl_verify *v, const targets *t)
{
    const json_t *item;
    size_t i;

    for (i = 0; i < v->adapter.n_others; i++) check_saved_tensor(v, t, v->adapter.others[i]);
    json_array_foreach(t->saved, i, item)
    {
        const char *name = bl_json_text(item);
        bool has_tensor = false;
        char path[BL_VERIFY_NAME_BYTES];
        for (size_t k = 0; name && k < v->adapter.n_others && !has_tensor; k++) {
            bl_verify_other_name(v->adapter.others[k], path);
            char *point = strrchr(path, '.');
            if (point) *point = '\0';
            size_t n = strlen(path), n_name = strlen(name);
            has_tensor = n >= n_name && strcmp(path + n - n_name, name) == 0;
        }
        if (name && !has_tensor)
            bl_verify_fault(v, "missing", name, "the module: modules_to_save names it",
                            "no tensor");
    }
}

bl_status bl_verify_targets(bl_verify *v)
{
    const json_t *config = v->adapter.config;
    targets t = {.parameters = json_object_get(config, "target_parameters"),
                 .layers = json_object_get(config, "layers_to_transform"),
                 .saved = json_object_get(config, "modules_to_save")};
    bl_status st;

    BL_TRY_GOTO(st, done, read_list(&v->adapter, "target_modules", &t.modules));
    BL_TRY_GOTO(st, done, read_list(&v->adapter, "exclude_modules", &t.excluded));
    BL_TRY_GOTO(st, done, list_classes(v, &t));
    BL_TRY_GOTO(st, done, check_missing(v, &t));
    for (size_t i = 0; i < v->adapter.n_pairs; i++)
        if (v->adapter.pairs[i].n_experts > 0)
            BL_TRY_GOTO(st, done, check_pair(v, &t, &v->adapter.pairs[i]));
    check_saved(v, &t);
done:
    bl_name_pattern_destroy(t.modules.pattern);
    bl_name_pattern_destroy(t.excluded.pattern);
    for (size_t i = 0; i < t.n_classes; i++) free(t.classes[i]);
    free(t.classes);
    return st;
}
