/* SPDX-License-Identifier: Apache-2.0 */
/* peft_config.c -- adapter_config.json: its values. */
#include "store/peft.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "store/peft_experts_internal.h"
#include "store/peft_internal.h"
#include "store/peft_keys_internal.h"

/* ---- target_modules ---- */

static bl_status parse_target_list(const char *file, const bl_peft_modules *modules,
                                   const json_t *list, int64_t n_layers, uint32_t *targets)
{
    size_t n = json_array_size(list);
    char *where = NULL;
    bl_status st = BL_OK;
    const char **names = calloc(n + 1, sizeof *names);

    if (!names) return BL_FAIL(BL_ENOMEM, "%s: %zu target_modules", file, n);
    for (size_t i = 0; i < n; i++) {
        if ((names[i] = bl_json_text(json_array_get(list, i)))) continue;
        st = bl_json_fail(file, "target_modules", "names", json_array_get(list, i));
        goto done;
    }
    BL_TRY_GOTO(st, done, bl_text_format(&where, "%s: key target_modules", file));
    st = bl_peft_match_names(modules, BL_EINPUT, where, names, n, n_layers, targets);
done:
    free(where);
    free(names);
    return st;
}

static bl_status parse_target_pattern(const char *file, const bl_peft_modules *modules,
                                      const char *text, int64_t n_layers, uint32_t *targets)
{
    char *where = NULL;

    BL_TRY(bl_text_format(&where, "%s: key target_modules", file));
    bl_status st = bl_peft_match_pattern(modules, BL_EINPUT, where, text, n_layers, targets);
    free(where);
    return st;
}

static bl_status parse_targets(const char *file, const bl_peft_modules *modules, const json_t *root,
                               int64_t n_layers, uint32_t *targets)
{
    const json_t *value = json_object_get(root, "target_modules");
    const char *text = NULL;

    *targets = 0;
    if (json_is_array(value)) {
        BL_TRY(parse_target_list(file, modules, value, n_layers, targets));
    } else {
        BL_TRY(bl_json_get_string(file, root, "target_modules", BL_JSON_REQUIRED, &text));
        if (!strcmp(text, "all-linear"))
            *targets = bl_peft_all(modules);
        else
            BL_TRY(parse_target_pattern(file, modules, text, n_layers, targets));
    }
    return BL_OK;
}

static bl_status check_targets(const char *file, const bl_peft_modules *modules, const json_t *root,
                               uint32_t targets)
{
    if (targets & (bl_peft_all(modules) | bl_peft_all_routed(modules))) return BL_OK;
    return bl_json_fail(file, "target_modules", "at least one projection",
                        json_object_get(root, "target_modules"));
}

/* ---- modules_to_save ---- */

static bl_status parse_saved(const char *file, const json_t *root, bl_peft_saved_names *out)
{
    const json_t *list = json_object_get(root, "modules_to_save");

    if (!list || json_is_null(list)) return BL_OK;
    if (!json_is_array(list)) return bl_json_fail(file, "modules_to_save", "a list of names", list);
    for (size_t i = 0; i < json_array_size(list); i++) {
        const char *name = bl_json_text(json_array_get(list, i));
        if (!name || !bl_peft_add_saved(out, name))
            return bl_json_fail(file, "modules_to_save", "at most 16 names of less than 64 bytes",
                                list);
    }
    return BL_OK;
}

static json_t *json_saved(const bl_peft_saved_names *names)
{
    json_t *list = names->n > 0 ? json_array() : json_null();

    for (int i = 0; i < names->n; i++) json_array_append_new(list, json_string(names->name[i]));
    return list;
}

/* ---- reading ---- */

bl_status bl_peft_load_config(const char *dir, const bl_peft_modules *modules, int64_t n_layers,
                              bl_peft_config *out)
{
    bl_status st = BL_OK;
    bl_peft_config config = {.dropout = 0};
    bl_peft_modules targets = *modules;
    char *file = NULL;
    json_t *root = NULL;

    BL_TRY(bl_peft_load_keys(dir, modules->n_routed > 0, &file, &root));
    BL_TRY_GOTO(st, done, bl_peft_check_model_keys(file, root));
    BL_TRY_GOTO(st, done,
                bl_json_get_int(file, root, "r", BL_JSON_REQUIRED, 1, BL_PEFT_MAX_RANK, &config.r));
    BL_TRY_GOTO(
        st, done,
        bl_json_get_real(file, root, "lora_alpha", BL_JSON_REQUIRED, 0, 1e9, &config.alpha));
    BL_TRY_GOTO(
        st, done,
        bl_json_get_real(file, root, "lora_dropout", BL_JSON_OPTIONAL, 0, 1, &config.dropout));
    BL_TRY_GOTO(st, done,
                bl_json_get_bool(file, root, "use_rslora", BL_JSON_OPTIONAL, &config.use_rslora));
    BL_TRY_GOTO(st, done, parse_saved(file, root, &config.saved));
    bl_peft_except_saved(&config.saved, &targets);
    BL_TRY_GOTO(st, done, parse_targets(file, &targets, root, n_layers, &config.targets));
    BL_TRY_GOTO(st, done,
                store_peft_read_experts_config(dir, file, root, modules, n_layers, &config));
    BL_TRY_GOTO(st, done, check_targets(file, modules, root, config.targets));
    *out = config;
done:
    json_decref(root);
    free(file);
    return st;
}

/* ---- writing ---- */

static const char STACKED_VERSION[] = "0.19.1"; /* the first that writes BL_PEFT_STACKED */

/* The fewest digits that read back as `value`, as Python's repr gives them. */
static int real_digits(double value)
{
    char text[40];

    for (int digits = 1; digits < 17; digits++) {
        snprintf(text, sizeof text, "%.*g", digits, value);
        if (strtod(text, NULL) == value) return digits;
    }
    return 17;
}

json_t *store_peft_json_real(double value)
{
    return value == floor(value) && fabs(value) < 1e15 ? json_integer((json_int_t)value)
                                                       : json_real(value);
}

/* The last names, or a pattern of whole paths: "model.layers.[0-9]+.(mlp.up_proj|...)". */
static json_t *json_targets(const bl_peft_modules *modules, const bl_peft_config *config)
{
    /* Weights of these are in target_parameters. */
    uint32_t apart = config->layout == BL_PEFT_PER_EXPERT ? 0 : modules->ambiguous,
             targets = config->targets & ~apart;
    json_t *list = json_array(), *pattern = NULL;
    char text[1024];
    size_t used = (size_t)snprintf(text, sizeof text, "%s.[0-9]+.(", modules->layers);
    const char *between = "";

    for (int m = 0; m < modules->n; m++) {
        if (!(targets >> m & 1)) continue;
        json_array_append_new(list, json_string(bl_peft_last_name(modules->path[m])));
        used +=
            (size_t)snprintf(text + used, sizeof text - used, "%s%s", between, modules->path[m]);
        between = "|";
    }
    snprintf(text + used, sizeof text - used, ")");
    if (targets >> BL_PEFT_EMBEDDING & 1)
        json_array_append_new(list, json_string(modules->embedding));
    if (targets >> BL_PEFT_HEAD & 1) json_array_append_new(list, json_string(modules->head));
    if (!modules->is_part) return list;
    pattern = json_string(text);
    json_decref(list);
    return pattern;
}

bl_status bl_peft_write_config(const char *dir, const bl_peft_modules *modules,
                               const bl_peft_config *config, const char *base_name)
{
    bl_status st = BL_OK;
    char *path = NULL, *text = NULL;

    bl_json_watch_memory();
    json_t *targets = json_targets(modules, config),
           *parameters = store_peft_json_parameters(modules, config, targets);
    /* Without exclude_modules and lora_bias, at which PEFT before 0.14 stops: absent means off. */
    json_t *root = json_pack(
        "{s:o, s:n, s:s?, s:s, s:b, s:b, s:b, s:n, s:n, s:n, s:{}, s:o, s:f, s:n, s:s, "
        "s:o, s:s, s:I, s:o, s:n, "
        "s:o, s:s, s:b, s:b}",
        "alpha_pattern", store_peft_json_pattern(modules, config, true), "auto_mapping",
        "base_model_name_or_path", base_name, "bias", "none", "fan_in_fan_out", 0, "inference_mode",
        1, "init_lora_weights", 1, "layer_replication", "layers_pattern", "layers_to_transform",
        "loftq_config", "lora_alpha", store_peft_json_real(config->alpha), "lora_dropout",
        config->dropout, "megatron_config", "megatron_core", "megatron.core", "modules_to_save",
        json_saved(&config->saved), "peft_type", "LORA", "r", (json_int_t)config->r, "rank_pattern",
        store_peft_json_pattern(modules, config, false), "revision", "target_modules", targets,
        "task_type", "CAUSAL_LM", "use_dora", 0, "use_rslora", (int)config->use_rslora);
    /* Square matrices do not say in which layout they are. */
    if (root && json_is_array(parameters))
        json_object_set_new(root, "peft_version", json_string(STACKED_VERSION));
    if (root && json_is_array(parameters)) json_object_set(root, "target_parameters", parameters);
    BL_TRY_GOTO(st, done, bl_path_join(dir, BL_PEFT_CONFIG_NAME, &path));
    if (!root && !bl_json_ran_out()) {
        st = BL_FAIL(BL_EINPUT, "%s: the base model's name is not UTF-8", path);
        goto done;
    }
    size_t digits = (size_t)bl_max_i64(real_digits(config->dropout), real_digits(config->alpha));
    text = json_dumps(root, JSON_INDENT(2) | JSON_SORT_KEYS | JSON_ENSURE_ASCII |
                                JSON_REAL_PRECISION(digits));
    if (!text || bl_json_ran_out()) {
        st = BL_FAIL(BL_ENOMEM, "%s: writing it", path);
        goto done;
    }
    st = bl_file_write_atomic(path, text, strlen(text));
done:
    json_decref(parameters);
    json_decref(root);
    free(text);
    free(path);
    return st;
}
