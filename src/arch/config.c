/* SPDX-License-Identifier: Apache-2.0 */
/* config.c -- config.json: which architecture it is of, then that one's reader; presets. */
#include "arch/config.h"

#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "arch/config_internal.h"
#include "arch/table.h"
#include "base/files.h"
#include "base/hub.h"
#include "base/json.h"
#include "base/log.h"
#include "base/sizes.h"

enum { MAX_CONFIG_BYTES = 16 << 20 };

/* ---- which architecture, and its unsupported parts ---- */

/* "\"llama\"", or "\"llama\" or \"mistral\"". */
static void list_types(char *text, size_t n_bytes)
{
    const bl_arch *arch;
    size_t used = 0;

    for (size_t i = 0; (arch = bl_arch_at(i)) && used < n_bytes; i++)
        used += (size_t)snprintf(text + used, n_bytes - used, "%s\"%s\"", i ? " or " : "",
                                 arch->model_type);
}

static bl_status find_architecture(const char *file, json_t *root, const bl_arch **out)
{
    const bl_arch *arch = bl_arch_at(0);
    const char *type = arch->model_type;
    const json_t *architectures = NULL;
    bool found = false;
    char expected[256];

    BL_TRY(bl_json_get_string(file, root, "model_type", BL_JSON_OPTIONAL, &type));
    for (size_t i = 1; arch && strcmp(type, arch->model_type) != 0; i++) arch = bl_arch_at(i);
    if (!arch) {
        list_types(expected, sizeof expected);
        return bl_json_fail(file, "model_type", expected, json_object_get(root, "model_type"));
    }
    BL_TRY(bl_json_get_array(file, root, "architectures", BL_JSON_OPTIONAL, &architectures));
    for (size_t i = 0; i < json_array_size(architectures) && !found; i++) {
        const char *name = bl_json_text(json_array_get(architectures, i));
        found = name && !strcmp(name, arch->class_name);
    }
    if (architectures && !found) {
        snprintf(expected, sizeof expected, "[\"%s\"]", arch->class_name);
        return bl_json_fail(file, "architectures", expected, architectures);
    }
    *out = arch;
    return arch_check_keys(arch, file, root);
}

/* ---- loading ---- */

bl_status bl_model_config_load(const char *path, bl_model_config *out)
{
    bl_status st = BL_OK;
    bool is_folder;
    char *file = NULL;
    json_t *root = NULL;
    const bl_arch *arch = NULL;

    BL_TRY(bl_hub_check_json(path, "config.json", &is_folder));
    if (is_folder)
        BL_TRY(bl_path_join(path, "config.json", &file));
    else
        BL_TRY(bl_text_format(&file, "%s", path));
    BL_TRY_GOTO(st, done, bl_json_load(file, MAX_CONFIG_BYTES, &root));
    BL_TRY_GOTO(st, done, bl_json_check_object(file, root));
    BL_TRY_GOTO(st, done, find_architecture(file, root, &arch));
    bl_model_config config = arch->defaults;
    config.arch = arch;
    BL_TRY_GOTO(st, done, arch->read(file, root, &config));
    *out = config;
done:
    json_decref(root);
    free(file);
    return st;
}

static bl_status fit_kv_heads(bl_model_config *config, const bl_hf_model *model)
{
    const bl_arch *arch = config->arch;
    char name[BL_TENSOR_NAME_BYTES];
    int p = 0;

    while (p < arch->n_projections && arch->projections[p].rows != BL_EXTENT_KV) p++;
    if (p == arch->n_projections) return BL_OK;
    bl_arch_projection_tensor(arch, 0, &arch->projections[p], name);
    const bl_stored_tensor *k = bl_hf_find_weight(model, name);
    if (!k || k->n_dims != 2) return BL_OK;
    int64_t n_kv_heads = k->shape[0] / config->head_dim;
    if (n_kv_heads < 1 || k->shape[0] % config->head_dim || config->n_heads % n_kv_heads)
        return BL_FAIL(BL_EINPUT,
                       "tensor %s has %" PRId64 " rows, which are no heads of %" PRId64
                       " that divide %" PRId64 " heads",
                       k->name, k->shape[0], config->head_dim, config->n_heads);
    config->n_kv_heads = n_kv_heads;
    return BL_OK;
}

static bool is_float(const bl_stored_tensor *t)
{
    return t->dtype == BL_F32 || t->dtype == BL_F16 || t->dtype == BL_BF16;
}

/* Whether two tensors have the same values; reads both up to the first difference. */
static bl_status compare_values(const bl_stored_tensor *a, const bl_stored_tensor *b,
                                int64_t n_elements, bool *are_equal)
{
    enum { PIECE = 1 << 20 };
    bl_status st = BL_OK;
    float *values = malloc(2 * PIECE * sizeof *values), *other = values ? values + PIECE : NULL;

    *are_equal = true;
    if (!values) return BL_FAIL(BL_ENOMEM, "comparing %s with %s", a->name, b->name);
    for (int64_t at = 0; at < n_elements && *are_equal; at += PIECE) {
        int64_t n = bl_min_i64(PIECE, n_elements - at);
        BL_TRY_GOTO(st, done, bl_stored_tensor_read_floats(a, at, n, values));
        BL_TRY_GOTO(st, done, bl_stored_tensor_read_floats(b, at, n, other));
        for (int64_t i = 0; i < n && *are_equal; i++) *are_equal = values[i] == other[i];
    }
done:
    free(values);
    return st;
}

/* A head that is stored beside the embedding, and differs from it, is not tied, whatever the file
 * says: as transformers does from release 5 on. Other shapes are left to the check of tensors. */
static bl_status untie_other_head(bl_model_config *config, const bl_hf_model *model)
{
    char head_name[BL_TENSOR_NAME_BYTES], name[BL_TENSOR_NAME_BYTES];
    bool are_equal;

    bl_arch_module_tensor(config->arch->head, head_name);
    bl_arch_module_tensor(config->arch->embedding, name);
    const bl_stored_tensor *head = bl_hf_find(model, head_name), *table = bl_hf_find(model, name);
    if (!config->tie_word_embeddings || !head) return BL_OK;
    if (config->is_untied_by_head) {
        config->tie_word_embeddings = false;
        return BL_OK;
    }
    if (!table || !is_float(head) || !is_float(table) || head->n_dims != 2 || table->n_dims != 2 ||
        memcmp(head->shape, table->shape, 2 * sizeof head->shape[0]) != 0)
        return BL_OK;
    BL_TRY(compare_values(head, table, head->shape[0] * head->shape[1], &are_equal));
    if (are_equal) return BL_OK;
    bl_log_warning("%s: %s is stored with other values than %s: it is used, and "
                   "tie_word_embeddings true of config.json is not",
                   bl_safetensors_path(head->file), head_name, name);
    config->tie_word_embeddings = false;
    config->is_head_apart = true;
    return BL_OK;
}

/* The names of the experts' tensors are those of the first. */
static void fit_experts(bl_model_config *config, const bl_hf_model *model)
{
    const bl_arch *stacked = config->arch->stacked;
    bl_model_config other = *config;

    if (!stacked) return;
    other.arch = stacked;
    for (int64_t l = 0; l < config->n_layers; l++)
        if (bl_hf_find(model, bl_arch_stored_at(&other, l, stacked->n_projections - 1, 0).name))
            config->arch = stacked;
}

bl_status bl_model_config_fit(bl_model_config *config, const bl_hf_model *model)
{
    fit_experts(config, model);
    BL_TRY(untie_other_head(config, model));
    return fit_kv_heads(config, model);
}

bl_status bl_model_config_describe(const bl_model_config *c, json_t **out)
{
    bl_json_watch_memory();
    *out = c->arch->describe(c);
    if (*out && !bl_json_ran_out()) return BL_OK;
    json_decref(*out);
    *out = NULL;
    return BL_FAIL(BL_ENOMEM, "the model's configuration");
}

int64_t bl_model_config_n_params(const bl_model_config *config)
{
    int64_t n = 0, n_tensors = bl_arch_tensor_count(config);

    for (int64_t i = 0; i < n_tensors; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(config, i);
        if (t.role == BL_ROLE_HEAD && config->tie_word_embeddings) continue;
        n += bl_arch_tensor_elements(&t);
    }
    return n;
}

/* ---- presets ---- */

/* Both spellings are common: llama3.1-8b, llama-3.1-8b. */
static bool is_preset(const bl_arch *arch, const char *preset, const char *name)
{
    size_t n_bytes = strlen(arch->model_type);

    if (strcmp(preset, name) == 0) return true;
    return strncmp(name, arch->model_type, n_bytes) == 0 && name[n_bytes] == '-' &&
           strcmp(preset + n_bytes, name + n_bytes + 1) == 0;
}

bl_status bl_model_config_preset(const char *name, bl_model_config *out)
{
    const bl_arch *arch;
    char known[2048] = "";

    for (size_t a = 0; (arch = bl_arch_at(a)); a++)
        for (size_t i = 0; i < arch->n_presets; i++) {
            const bl_preset *preset = &arch->presets[i];
            if (is_preset(arch, preset->name, name)) {
                *out = preset->config;
                if (!out->arch) out->arch = arch;
                return BL_OK;
            }
            size_t length = strlen(known);
            snprintf(known + length, sizeof known - length, "%s%s", length ? ", " : "",
                     preset->name);
        }
    return BL_FAIL(BL_EUSAGE, "unknown model preset %.64s; one of %s", name, known);
}
