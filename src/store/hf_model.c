/* SPDX-License-Identifier: Apache-2.0 */
/* hf_model.c -- one sorted table over the tensors of all shards; all differences between the index
 * and the shards are reported together. */
#include "store/hf_model.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/hub.h"
#include "base/log.h"
#include "base/sizes.h"
#include "store/hf_internal.h"

enum { MAX_CONFIG_BYTES = 16 << 20, MAX_INDEX_BYTES = 256 << 20 };

/* ---- opening ---- */

/* A shard is a plain name in the model's directory, whatever the index has. */
static bool is_plain_name(const char *name)
{
    if (!*name || !strcmp(name, ".") || !strcmp(name, "..")) return false;
    return !strpbrk(name, "/\\") && !bl_has_controls(name);
}

static int compare_texts(const void *a, const void *b)
{
    return strcmp(*(const char *const *)a, *(const char *const *)b);
}

/* The distinct shard names of the weight_map, sorted and borrowed from it; *names is freed by the
 * caller. */
static bl_status list_shards(const char *index_path, const json_t *map, const char ***names,
                             size_t *n_names, bl_problems *problems)
{
    const char *tensor;
    json_t *value;
    const char **list = calloc(json_object_size(map) + 1, sizeof *list);
    size_t n = 0, n_distinct = 0;

    if (!list) return BL_FAIL(BL_ENOMEM, "%s: %zu names", index_path, json_object_size(map));
    json_object_foreach((json_t *)map, tensor, value)
    {
        const char *name = bl_json_text(value);
        if (bl_has_controls(tensor))
            bl_problems_add(problems, "a tensor name has a control character");
        else if (!name || !is_plain_name(name))
            bl_problems_add(
                problems,
                "tensor %s: file name \"%.64s\" is not a plain name in the model's folder", tensor,
                !json_is_string(value)  ? "(not a string)"
                : !name                 ? "(a NUL in it)"
                : bl_has_controls(name) ? "(control characters)"
                                        : name);
        else
            list[n++] = name;
    }
    qsort(list, n, sizeof *list, compare_texts);
    for (size_t i = 0; i < n; i++)
        if (i == 0 || strcmp(list[i], list[n_distinct - 1]) != 0) list[n_distinct++] = list[i];
    *names = list;
    *n_names = n_distinct;
    return BL_OK;
}

/* Opens the named files; a file that cannot be used is a problem, a system that fails ends the
 * search. */
static bl_status open_files(bl_hf_model *model, const char *const *names, size_t n_names,
                            bl_problems *problems)
{
    bl_status st = BL_OK;

    model->files = calloc(n_names + 1, sizeof(bl_safetensors *));
    if (!model->files) return BL_FAIL(BL_ENOMEM, "%s: %zu files", model->dir, n_names);
    for (size_t i = 0; i < n_names && st == BL_OK; i++) {
        char *path = NULL;
        BL_TRY(bl_path_join(model->dir, names[i], &path));
        st = bl_safetensors_open(path, &model->files[model->n_files]);
        free(path);
        if (st == BL_OK) {
            model->n_files++;
        } else if (st == BL_EINPUT) {
            bl_problems_add(problems, "%s", bl_error_text());
            st = BL_OK;
        }
    }
    return st;
}

static bl_status find_packed(bl_hf_model *model)
{
    bl_problems problems = {0};

    BL_TRY(bl_hf_find_packed(model, &problems));
    return bl_problems_report(&problems, model->dir);
}

static int compare_tensors(const void *a, const void *b)
{
    return strcmp((*(const bl_stored_tensor *const *)a)->name,
                  (*(const bl_stored_tensor *const *)b)->name);
}

static const char *base_name(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash ? slash + 1 : path;
}

/* One table over all files. */
static bl_status merge_tensors(bl_hf_model *model, bl_problems *problems)
{
    size_t n = 0;

    for (size_t f = 0; f < model->n_files; f++) n += bl_safetensors_count(model->files[f]);
    model->tensors = calloc(n + 1, sizeof(bl_stored_tensor *));
    if (!model->tensors) return BL_FAIL(BL_ENOMEM, "%s: %zu tensors", model->dir, n);
    for (size_t f = 0; f < model->n_files; f++)
        for (size_t i = 0; i < bl_safetensors_count(model->files[f]); i++)
            model->tensors[model->n_tensors++] = bl_safetensors_at(model->files[f], i);
    qsort(model->tensors, n, sizeof(bl_stored_tensor *), compare_tensors);
    for (size_t i = 1; i < n; i++)
        if (!strcmp(model->tensors[i]->name, model->tensors[i - 1]->name))
            bl_problems_add(problems, "tensor %s is in %s and in %s", model->tensors[i]->name,
                            base_name(bl_safetensors_path(model->tensors[i - 1]->file)),
                            base_name(bl_safetensors_path(model->tensors[i]->file)));
    return BL_OK;
}

/* Each tensor must be in the file that the index names. Unopened files were reported already. */
static void check_weight_map(const bl_hf_model *model, const json_t *map, bl_problems *problems)
{
    const char *name;
    json_t *value;

    json_object_foreach((json_t *)map, name, value)
    {
        const bl_stored_tensor *tensor = bl_hf_find(model, name);
        const char *shard = bl_json_text(value);
        bool is_open = false;
        for (size_t f = 0; shard && f < model->n_files && !is_open; f++)
            is_open = !strcmp(base_name(bl_safetensors_path(model->files[f])), shard);
        if (!is_open || bl_has_controls(name)) continue;
        if (!tensor)
            bl_problems_add(problems, "tensor %s is not in %s", name, shard);
        else if (strcmp(base_name(bl_safetensors_path(tensor->file)), shard) != 0)
            bl_problems_add(problems, "tensor %s is in %s, the index says %s", name,
                            base_name(bl_safetensors_path(tensor->file)), shard);
    }
}

static bl_status open_sharded(bl_hf_model *model, const char *index_path)
{
    bl_status st = BL_OK;
    bl_problems problems = {0};
    json_t *index = NULL;
    const json_t *map = NULL;
    const char **names = NULL;
    size_t n_names = 0;

    BL_TRY(bl_json_load(index_path, MAX_INDEX_BYTES, &index));
    BL_TRY_GOTO(st, done, bl_json_check_object(index_path, index));
    BL_TRY_GOTO(st, done,
                bl_json_get_object(index_path, index, "weight_map", BL_JSON_REQUIRED, &map));
    if (json_object_size(map) == 0) {
        st = BL_FAIL(BL_EINPUT, "%s: key weight_map: names no tensor", index_path);
        goto done;
    }
    BL_TRY_GOTO(st, done, list_shards(index_path, map, &names, &n_names, &problems));
    BL_TRY_GOTO(st, done, open_files(model, names, n_names, &problems));
    BL_TRY_GOTO(st, done, merge_tensors(model, &problems));
    check_weight_map(model, map, &problems);
    st = bl_problems_report(&problems, index_path);
done:
    free(names);
    json_decref(index);
    return st;
}

/* The file `name` of the model's directory, where it exists. */
static bl_status read_quantization(bl_hf_model *model, const char *name,
                                   bl_status (*parse)(const char *file, const json_t *root,
                                                      bl_declared *declared))
{
    bl_status st = BL_OK;
    char *path = NULL;
    json_t *root = NULL;
    bool exists;

    BL_TRY(bl_path_join(model->dir, name, &path));
    BL_TRY_GOTO(st, done, bl_path_exists(path, &exists));
    if (exists) {
        BL_TRY_GOTO(st, done, bl_json_load(path, MAX_CONFIG_BYTES, &root));
        BL_TRY_GOTO(st, done, bl_json_check_object(path, root));
        BL_TRY_GOTO(st, done, parse(path, root, &model->declared));
    }
done:
    json_decref(root);
    free(path);
    return st;
}

/* Also names a PyTorch file found instead. */
static bl_status fail_no_weights(const char *dir)
{
    static const char *const others[] = {"pytorch_model.bin", "pytorch_model.bin.index.json",
                                         "consolidated.00.pth"};
    const char *found = NULL;

    for (size_t i = 0; i < BL_COUNT(others) && !found; i++) {
        char *path;
        BL_TRY(bl_path_join(dir, others[i], &path));
        if (bl_file_exists(path)) found = others[i];
        free(path);
    }
    return BL_FAIL(BL_EINPUT,
                   "%s: has neither model.safetensors nor model.safetensors.index.json%s%s%s", dir,
                   found ? "; " : "", found ? found : "",
                   found ? " is a PyTorch file: convert the weights to safetensors" : "");
}

bl_status bl_hf_open(const char *dir, bl_hf_model **out)
{
    static const char *const single_name = "model.safetensors";
    bl_status st = BL_OK;
    char *single_path = NULL, *index_path = NULL;
    bool is_single, is_sharded = false;
    bl_hf_model *model = calloc(1, sizeof *model);

    *out = NULL;
    if (!model) return BL_FAIL(BL_ENOMEM, "%s: opening the model", dir);
    BL_TRY_GOTO(st, done, bl_hub_check_dir(dir));
    BL_TRY_GOTO(st, done, bl_text_format(&model->dir, "%s", dir));
    BL_TRY_GOTO(st, done, bl_path_join(dir, single_name, &single_path));
    BL_TRY_GOTO(st, done, bl_path_join(dir, "model.safetensors.index.json", &index_path));
    BL_TRY_GOTO(st, done, read_quantization(model, "config.json", bl_hf_parse_quantization));
    BL_TRY_GOTO(st, done, read_quantization(model, "hf_quant_config.json", bl_hf_parse_modelopt));
    BL_TRY_GOTO(st, done, bl_path_exists(single_path, &is_single));
    if (!is_single) BL_TRY_GOTO(st, done, bl_path_exists(index_path, &is_sharded));
    if (is_single) {
        bl_problems problems = {0};
        BL_TRY_GOTO(st, done, open_files(model, &single_name, 1, &problems));
        if (problems.n) { /* the one file's own words, which name it */
            st = BL_EINPUT;
            goto done;
        }
        BL_TRY_GOTO(st, done, merge_tensors(model, &problems));
    } else if (is_sharded) {
        BL_TRY_GOTO(st, done, open_sharded(model, index_path));
    } else {
        st = fail_no_weights(dir);
        goto done;
    }
    BL_TRY_GOTO(st, done, find_packed(model));
    *out = model;
    model = NULL;
done:
    bl_hf_close(model);
    free(single_path);
    free(index_path);
    return st;
}

void bl_hf_close(bl_hf_model *model)
{
    if (!model) return;
    for (size_t i = 0; i < model->n_files; i++) bl_safetensors_close(model->files[i]);
    free(model->files);
    bl_hf_free_packed(model);
    free(model->tensors);
    json_decref(model->declared.excluded);
    free(model->dir);
    free(model);
}

/* ---- looking ---- */

size_t bl_hf_file_count(const bl_hf_model *model)
{
    return model->n_files;
}

const bl_safetensors *bl_hf_file(const bl_hf_model *model, size_t index)
{
    return model->files[index];
}

size_t bl_hf_count(const bl_hf_model *model)
{
    return model->n_tensors;
}

const bl_stored_tensor *bl_hf_at(const bl_hf_model *model, size_t index)
{
    return model->tensors[index];
}

const bl_stored_tensor *bl_hf_find(const bl_hf_model *model, const char *name)
{
    const bl_stored_tensor wanted = {.name = name}, *key = &wanted;
    const bl_stored_tensor **found = bsearch(&key, model->tensors, model->n_tensors,
                                             sizeof(bl_stored_tensor *), compare_tensors);
    return found ? *found : NULL;
}

/* ---- the whole list ---- */

/* X of "X_scale", "X_scale_inv" or "X_zero_point", a weight's name, is one that is FP8. */
static bool is_of_codes(const bl_hf_model *model, const char *name)
{
    static const char *const ends[] = {"_scale", "_scale_inv", "_zero_point"};
    char weight[256];

    for (size_t i = 0; i < BL_COUNT(ends); i++) {
        if (!bl_text_ends_with(name, ends[i])) continue;
        int n =
            snprintf(weight, sizeof weight, "%.*s", (int)(strlen(name) - strlen(ends[i])), name);
        if (n < 0 || n >= (int)sizeof weight || !bl_text_ends_with(weight, ".weight")) continue;
        const bl_stored_tensor *codes = bl_hf_find(model, weight);
        if (codes && codes->dtype == BL_F8_E4M3) return true;
    }
    return false;
}

/* Scales of quantized caches, queries and outputs, which are not quantized here. */
static bool is_of_caches(const char *name)
{
    static const char *const ends[] = {".k_scale", ".v_scale", ".q_scale", ".output_scale"};

    for (size_t i = 0; i < BL_COUNT(ends); i++)
        if (bl_text_ends_with(name, ends[i])) return true;
    return false;
}

/* Also scales of the inputs of FP8 products, and RoPE's tables, which are computed. */
static bool is_ignored(const bl_hf_model *model, const bl_stored_tensor *tensor)
{
    const char *name = tensor->name;
    static const char *const ends[] = {".input_scale", ".activation_scale", ".input_scale_ub",
                                       ".input_global_scale", "rotary_emb.inv_freq"};
    for (size_t i = 0; i < BL_COUNT(ends); i++)
        if (bl_text_ends_with(name, ends[i])) return true;
    return is_of_caches(name) || is_of_codes(model, name) || bl_hf_packed_of(model, tensor);
}

static bool is_skipped(const char *name, const char *const *skipped)
{
    for (; skipped && *skipped; skipped++)
        if (strncmp(name, *skipped, strlen(*skipped)) == 0) return true;
    return false;
}

size_t bl_hf_count_skipped(const bl_hf_model *model, const char *const *skipped, int64_t *n_bytes)
{
    size_t n = 0;

    *n_bytes = 0;
    for (size_t i = 0; i < model->n_tensors; i++) {
        if (!is_skipped(model->tensors[i]->name, skipped)) continue;
        *n_bytes += model->tensors[i]->n_bytes;
        n++;
    }
    return n;
}

/* A quantized weight whose module the checkpoint leaves unquantized: other programs read its codes
 * without the scale. */
static bl_status check_excluded(const bl_hf_model *model, const char *name)
{
    bool is_fp8 = !bl_hf_packed_weight(model, name);
    const char *excluded;
    char *module = NULL;

    size_t end = bl_text_ends_with(name, ".weight") ? strlen(".weight") : 0;

    BL_TRY(bl_text_format(&module, "%.*s", (int)(strlen(name) - end), name));
    bl_status st = bl_hf_find_excluded(&model->declared, module, &excluded);
    if (st == BL_OK && excluded)
        st = BL_FAIL(BL_EINPUT, "%s is %s, but the quantization's %s has \"%.80s\"", name,
                     is_fp8 ? "F8_E4M3" : "in 4 bits", model->declared.excluded_key, excluded);
    free(module);
    return st;
}

static void check_one(const bl_hf_model *model, const bl_hf_expected *expected,
                      bl_problems *problems)
{
    char has[BL_SHAPE_TEXT_BYTES], wants[BL_SHAPE_TEXT_BYTES];
    const bl_stored_tensor *tensor = bl_hf_find_weight(model, expected->name);
    const uint32_t fp8 = BL_DTYPE_BIT(BL_F8_E4M3);
    bl_hf_weight weight;

    if (!tensor) {
        if (!expected->optional) bl_problems_add(problems, "missing %s", expected->name);
        return;
    }
    if (tensor->n_dims != expected->n_dims ||
        memcmp(tensor->shape, expected->shape, (size_t)tensor->n_dims * sizeof tensor->shape[0]) !=
            0)
        bl_problems_add(problems, "%s has shape %s, expected %s", tensor->name,
                        bl_shape_text(tensor->n_dims, tensor->shape, has),
                        bl_shape_text(expected->n_dims, expected->shape, wants));
    else if (!(expected->dtypes &
               (bl_hf_packed_weight(model, tensor->name) ? fp8 : BL_DTYPE_BIT(tensor->dtype))))
        bl_problems_add(problems, "%s has dtype %s, which is not read here", tensor->name,
                        bl_dtype_name(tensor->dtype));
    else if ((tensor->dtype == BL_F8_E4M3 || tensor->dtype == BL_U8) &&
             (bl_hf_get_weight(model, tensor->name, &weight) != BL_OK ||
              check_excluded(model, tensor->name) != BL_OK))
        bl_problems_add(problems, "%s", bl_error_text());
}

static int compare_expected(const void *a, const void *b)
{
    return strcmp((*(const bl_hf_expected *const *)a)->name,
                  (*(const bl_hf_expected *const *)b)->name);
}

bl_status bl_hf_check(const bl_hf_model *model, const bl_hf_expected *expected, size_t n_expected,
                      const char *const *skipped)
{
    bl_problems problems = {0};
    const char *cache = NULL;
    const bl_hf_expected **by_name = calloc(n_expected + 1, sizeof *by_name);

    if (!by_name) return BL_FAIL(BL_ENOMEM, "%s: %zu names", model->dir, n_expected);
    for (size_t i = 0; i < n_expected; i++) {
        by_name[i] = &expected[i];
        check_one(model, &expected[i], &problems);
    }
    qsort(by_name, n_expected, sizeof *by_name, compare_expected);
    for (size_t i = 0; i < model->n_tensors; i++) {
        const bl_hf_expected wanted = {.name = model->tensors[i]->name}, *key = &wanted;
        if (!cache && is_of_caches(wanted.name)) cache = wanted.name;
        if (!is_ignored(model, model->tensors[i]) && !is_skipped(wanted.name, skipped) &&
            !bsearch(&key, by_name, n_expected, sizeof *by_name, compare_expected))
            bl_problems_add(&problems, "unexpected %s", wanted.name);
    }
    free(by_name);
    if (cache)
        bl_log_warning("%s: ignored, as caches and outputs are not quantized here: %s", model->dir,
                       cache);
    return bl_problems_report(&problems, model->dir);
}
