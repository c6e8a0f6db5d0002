/* SPDX-License-Identifier: Apache-2.0 */
/* peft_experts_config.c -- routed experts in adapter_config.json: target_parameters, rank_pattern
 * and alpha_pattern; names of experts' matrices. */
#include <inttypes.h>
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/json.h"
#include "base/sizes.h"
#include "store/peft_experts_internal.h"
#include "store/peft_numbers.h"

/* ---- names ---- */

uint32_t bl_peft_all_routed(const bl_peft_modules *modules)
{
    return ((UINT32_C(1) << modules->n_routed) - 1) << modules->n;
}

/* Whether `name` is `path`, or what follows one of its points. */
static bool is_end(const char *path, const char *name)
{
    size_t n = strlen(name), n_path = strlen(path);

    if (n == 0 || n > n_path || strcmp(path + n_path - n, name) != 0) return false;
    return n == n_path || path[n_path - n - 1] == '.';
}

bool bl_peft_expert_parse(const bl_peft_modules *modules, const char *name, int *module, int *piece)
{
    *piece = -1;
    for (int i = 0; i < modules->n_routed; i++) {
        const bl_peft_routed *routed = &modules->routed[i];
        char path[BL_PEFT_NAME_BYTES];
        *module = modules->n + i;
        if (is_end(routed->parameter, name)) return true;
        for (int k = 0; k < BL_PEFT_MAX_PIECES && routed->piece[k]; k++) {
            if (strcmp(routed->piece[k], name) != 0) continue;
            if (routed->piece[1]) *piece = k;
            return true;
        }
        *module = -1;
        snprintf(path, sizeof path, "%.*s",
                 (int)(bl_peft_last_name(routed->parameter) - routed->parameter) - 1,
                 routed->parameter);
        if (is_end(path, name) || is_end(routed->experts, name)) return true;
    }
    return false;
}

/* ---- reading ---- */

/* The modules whose weight `name` is: "mlp.up_proj.weight". */
static uint32_t find_weight(const bl_peft_modules *modules, const char *name)
{
    static const char end[] = ".weight";
    char path[BL_PEFT_NAME_BYTES];
    int64_t layer;

    if (!bl_text_ends_with(name, end) || strlen(name) >= sizeof path) return 0;
    snprintf(path, sizeof path, "%.*s", (int)(strlen(name) - strlen(end)), name);
    uint32_t found = bl_peft_target_parse(modules, path, &layer);
    return layer < 0 ? found : 0;
}

static bl_status read_parameters(const char *file, const json_t *root,
                                 const bl_peft_modules *modules, bl_peft_config *config)
{
    const json_t *list = json_object_get(root, "target_parameters"), *item;
    size_t i;

    if (!list || json_is_null(list)) return BL_OK;
    json_array_foreach(list, i, item)
    {
        const char *name = bl_json_text(item);
        uint32_t found = 0;
        for (int m = 0; name && m < modules->n_routed; m++)
            if (is_end(modules->routed[m].parameter, name))
                found |= UINT32_C(1) << (modules->n + m);
        if (name && !found) found = find_weight(modules, name);
        if (!found)
            return bl_json_fail(file, "target_parameters",
                                "parameters of routed experts, or weights of projections", list);
        config->targets |= found;
    }
    return json_is_array(list) ? BL_OK : bl_json_fail(file, "target_parameters", "a list", list);
}

/* The path by which PEFT looks up a module's r and alpha. */
static void pattern_path(const bl_peft_modules *modules, int64_t layer, int module,
                         bl_peft_layout layout, char path[BL_PEFT_NAME_BYTES])
{
    const bl_peft_routed *routed = modules->routed;

    if (bl_peft_is_routed(modules, module)) routed += module - modules->n;
    if (!bl_peft_is_routed(modules, module))
        snprintf(path, BL_PEFT_NAME_BYTES, "%s.%" PRId64 ".%s", modules->layers, layer,
                 modules->path[module]);
    else if (layout == BL_PEFT_PER_EXPERT)
        snprintf(path, BL_PEFT_NAME_BYTES, "%s.%" PRId64 ".%s.0.%s", modules->layers, layer,
                 routed->experts, routed->piece[0]);
    else
        snprintf(path, BL_PEFT_NAME_BYTES, "%s.%" PRId64 ".%s", modules->layers, layer,
                 routed->parameter);
}

/* *value = the number of a module, that of all layers; it comes with that of the adapter. */
static bl_status read_number(const char *file, const char *key, const bl_peft_numbers *numbers,
                             const bl_peft_modules *modules, int64_t n_layers, int module,
                             bl_peft_layout layout, double *value)
{
    double common = *value, first = common;
    char path[BL_PEFT_NAME_BYTES];

    for (int64_t l = 0; l < n_layers; l++) {
        double own = common;
        pattern_path(modules, l, module, layout, path);
        BL_TRY(bl_peft_numbers_choose(numbers, path, &own));
        if (l == 0) first = own;
        if (own != first || (own != common && !bl_peft_is_routed(modules, module)))
            return BL_FAIL(BL_EINPUT,
                           "%s: key %s: %g of %s: only routed experts may differ from the "
                           "adapter's rank and alpha, in all layers",
                           file, key, own, path);
    }
    *value = first;
    return BL_OK;
}

static bl_status read_scales(const char *file, const json_t *root, const bl_peft_modules *modules,
                             int64_t n_layers, bl_peft_config *config)
{
    bl_peft_numbers ranks = {0}, alphas = {0};
    bl_status st;

    BL_TRY_GOTO(st, done, bl_peft_numbers_read(file, root, "rank_pattern", &ranks));
    BL_TRY_GOTO(st, done, bl_peft_numbers_read(file, root, "alpha_pattern", &alphas));
    for (int m = 0; m < modules->n + modules->n_routed; m++) {
        double r = (double)config->r, alpha = config->alpha;
        if (!(config->targets >> m & 1)) continue;
        BL_TRY_GOTO(
            st, done,
            read_number(file, "rank_pattern", &ranks, modules, n_layers, m, config->layout, &r));
        BL_TRY_GOTO(st, done,
                    read_number(file, "alpha_pattern", &alphas, modules, n_layers, m,
                                config->layout, &alpha));
        if (r < 1 || r > BL_PEFT_MAX_RANK || r != floor(r)) {
            st = BL_FAIL(BL_EINPUT, "%s: key rank_pattern: expected integers in [1, %d], got %g",
                         file, BL_PEFT_MAX_RANK, r);
            goto done;
        }
        if (!bl_peft_is_routed(modules, m)) continue;
        bool is_divided = config->is_divided && store_peft_count_pieces(modules, m) > 1;
        int64_t pieces = is_divided ? 2 : 1;
        if (is_divided) alpha *= config->use_rslora ? sqrt((double)pieces) : (double)pieces;
        config->own_r[m] = (int64_t)r * pieces;
        config->own_alpha[m] = alpha;
    }
done:
    bl_peft_numbers_free(&ranks);
    bl_peft_numbers_free(&alphas);
    return st;
}

/* Whether two tensors have the same values; false where one of them is missing. */
static bl_status is_same_values(const bl_stored_tensor *a, const bl_stored_tensor *b, bool *out)
{
    size_t n;

    *out = false;
    if (!a || !b || a->n_bytes != b->n_bytes || a->dtype != b->dtype) return BL_OK;
    n = (size_t)a->n_bytes;
    char *bytes = malloc(2 * n + 1);
    if (!bytes) return BL_FAIL(BL_ENOMEM, "%s: its values", a->name);
    bl_status st = bl_stored_tensor_read(a, 0, n, bytes);
    if (st == BL_OK) st = bl_stored_tensor_read(b, 0, n, bytes + n);
    *out = st == BL_OK && memcmp(bytes, bytes + n, n) == 0;
    free(bytes);
    return st;
}

/* Experts one by one in the file: which, in targets, and whether A of a piece is that of the
 * other. */
static bl_status look_at_experts(const bl_safetensors *file, const bl_peft_modules *modules,
                                 int64_t n_layers, uint32_t *found, bool *is_divided)
{
    *found = 0;
    for (int m = modules->n; m < modules->n + modules->n_routed; m++) {
        const bl_stored_tensor *a[BL_PEFT_MAX_PIECES] = {NULL};
        int n_pieces = store_peft_count_pieces(modules, m);
        bool is_same;
        for (int k = 0; k < n_pieces; k++) {
            peft_expert_tensor t = {0, m, BL_PEFT_A, 0, k};
            a[k] = store_peft_find_experts(file, modules, n_layers, &t);
        }
        if (a[0]) *found |= UINT32_C(1) << m;
        if (n_pieces == 1 || !a[0]) continue;
        BL_TRY(is_same_values(a[0], a[1], &is_same));
        *is_divided = !is_same;
    }
    return BL_OK;
}

/* Sets layout, is_divided, and the targets that an expression or "all-linear" selects. */
static bl_status look_at_tensors(const char *dir, const json_t *root,
                                 const bl_peft_modules *modules, int64_t n_layers,
                                 bl_peft_config *config)
{
    const char *text = bl_json_text(json_object_get(root, "target_modules"));
    bl_safetensors *file = NULL;
    uint32_t found = 0;
    char *path = NULL;
    int version[3];
    bool is_old = bl_peft_version(root, version) && version[0] == 0 &&
                  (version[1] < 19 || (version[1] == 19 && version[2] == 0));

    config->layout = is_old ? BL_PEFT_FIRST_AXIS : BL_PEFT_STACKED;
    BL_TRY(bl_path_join(dir, BL_PEFT_MODEL_NAME, &path));
    bl_status st = bl_file_exists(path) ? bl_safetensors_open(path, &file) : BL_OK;
    if (st == BL_OK && file)
        st = look_at_experts(file, modules, n_layers, &found, &config->is_divided);
    if (found) config->layout = BL_PEFT_PER_EXPERT;
    if (text) config->targets |= found;
    bl_safetensors_close(file);
    free(path);
    return st;
}

bl_status store_peft_read_experts_config(const char *dir, const char *file, const json_t *root,
                                         const bl_peft_modules *modules, int64_t n_layers,
                                         bl_peft_config *config)
{
    if (modules->n_routed == 0) return BL_OK;
    BL_TRY(read_parameters(file, root, modules, config));
    BL_TRY(look_at_tensors(dir, root, modules, n_layers, config));
    return read_scales(file, root, modules, n_layers, config);
}

/* ---- writing ---- */

json_t *store_peft_json_parameters(const bl_peft_modules *modules, const bl_peft_config *config,
                                   json_t *target_modules)
{
    bool is_apart = config->layout == BL_PEFT_PER_EXPERT;
    json_t *list = NULL;
    char text[BL_PEFT_NAME_BYTES];

    for (int m = 0; m < modules->n && !is_apart; m++) {
        if (!(config->targets & modules->ambiguous & UINT32_C(1) << m)) continue;
        if (!list) list = json_array();
        snprintf(text, sizeof text, "%s.weight", modules->path[m]);
        json_array_append_new(list, json_string(text));
    }
    for (int m = modules->n; m < modules->n + modules->n_routed; m++) {
        const bl_peft_routed *routed = &modules->routed[m - modules->n];
        if (!(config->targets >> m & 1)) continue;
        if (!is_apart && !list) list = json_array();
        if (!is_apart) json_array_append_new(list, json_string(routed->parameter));
        for (int k = 0; is_apart && k < store_peft_count_pieces(modules, m); k++)
            json_array_append_new(target_modules, json_string(routed->piece[k]));
    }
    return list ? list : json_null();
}

json_t *store_peft_json_pattern(const bl_peft_modules *modules, const bl_peft_config *config,
                                bool is_alpha)
{
    json_t *object = json_object();
    char key[BL_PEFT_NAME_BYTES];

    for (int m = modules->n; m < modules->n + modules->n_routed; m++) {
        const bl_peft_routed *routed = &modules->routed[m - modules->n];
        double alpha = config->own_alpha[m] > 0 ? config->own_alpha[m] : config->alpha;
        bool differs = is_alpha ? alpha != config->alpha : bl_peft_rank(config, m) != config->r;
        if (!(config->targets >> m & 1) || !differs) continue;
        if (config->layout != BL_PEFT_PER_EXPERT)
            snprintf(key, sizeof key, ".*\\.%s", bl_peft_last_name(routed->parameter));
        else if (routed->piece[1])
            snprintf(key, sizeof key, ".*\\.experts\\..*\\.(%s|%s)", routed->piece[0],
                     routed->piece[1]);
        else
            snprintf(key, sizeof key, ".*\\.experts\\..*\\.%s", routed->piece[0]);
        json_object_set_new(object, key,
                            is_alpha ? store_peft_json_real(alpha)
                                     : json_integer((json_int_t)bl_peft_rank(config, m)));
    }
    return object;
}
