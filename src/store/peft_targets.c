/* SPDX-License-Identifier: Apache-2.0 */
/* peft_targets.c -- modules by name, and which of them target_modules selects: as huggingface/peft
 * tuners/tuners_utils.py check_target_module_exists reads a list of names and a regular
 * expression. */
#include <inttypes.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "store/pattern.h"
#include "store/peft_internal.h"

/* ---- modules ---- */

const char *bl_peft_last_name(const char *path)
{
    const char *point = strrchr(path, '.');
    return point ? point + 1 : path;
}

uint32_t bl_peft_all(const bl_peft_modules *modules)
{
    return ((UINT32_C(1) << modules->n) - 1) & ~modules->absent;
}

bool bl_peft_layer_has(const bl_peft_modules *modules, int64_t layer, int module)
{
    return !modules->has || modules->has(modules->user, layer, module);
}

/* "q_proj, k_proj, ..." */
static void list_names(const bl_peft_modules *modules, char *text, size_t n_bytes)
{
    uint32_t all = bl_peft_all(modules);
    size_t used = 0;

    *text = '\0';
    if (modules->n_routed > 0) used = (size_t)snprintf(text, n_bytes, "experts");
    for (int m = 0; m < modules->n && used < n_bytes; m++) {
        bool is_again = false;
        for (int i = 0; i < m; i++)
            is_again |= all >> i & 1 && !strcmp(bl_peft_last_name(modules->path[i]),
                                                bl_peft_last_name(modules->path[m]));
        if (!(all >> m & 1) || is_again) continue;
        used += (size_t)snprintf(text + used, n_bytes - used, "%s%s", used ? ", " : "",
                                 bl_peft_last_name(modules->path[m]));
    }
}

/* ---- a list of names ---- */

/* "3" as it is written without a sign or leading zeros. */
static bool parse_number(const char *text, size_t n, int64_t *number)
{
    char canonical[24];

    *number = strtoll(text, NULL, 10);
    int length = snprintf(canonical, sizeof canonical, "%" PRId64, *number);
    return *number >= 0 && n == (size_t)length && !strncmp(text, canonical, n);
}

bool bl_peft_layer_parse(const char *layers, const char *name, size_t n, int64_t *layer)
{
    const char *const heads[] = {layers, bl_peft_last_name(layers)};

    for (size_t i = 0; i < BL_COUNT(heads); i++) {
        size_t n_head = strlen(heads[i]);
        if (n > n_head && !strncmp(name, heads[i], n_head) && name[n_head] == '.')
            return parse_number(name + n_head + 1, n - n_head - 1, layer);
    }
    return false;
}

/* Whether `path` is `name`, or ends in "." and it. */
static bool ends_in(const char *path, const char *name)
{
    size_t n = strlen(name), n_path = strlen(path);

    if (n > n_path || strcmp(path + n_path - n, name) != 0) return false;
    return n == n_path || path[n_path - n - 1] == '.';
}

uint32_t bl_peft_target_parse(const bl_peft_modules *modules, const char *name, int64_t *layer)
{
    uint32_t found = 0;
    size_t n = strlen(name);

    *layer = -1;
    for (int m = 0; m < modules->n; m++)
        if (n > 0 && ends_in(modules->path[m], name)) found |= UINT32_C(1) << m;
    for (int m = 0; m < modules->n && !found; m++) {
        size_t n_path = strlen(modules->path[m]);
        if (n < n_path + 2 || !ends_in(name, modules->path[m])) continue;
        size_t n_prefix = n - n_path - 1; /* "N", "layers.N" or "model.layers.N" */
        if (bl_peft_layer_parse(modules->layers, name, n_prefix, layer) ||
            parse_number(name, n_prefix, layer))
            return UINT32_C(1) << m & ~modules->absent;
    }
    return found & ~modules->absent;
}

/* ---- the embedding and the head ---- */

void bl_peft_table_path(const bl_peft_modules *modules, int module, char path[BL_PEFT_NAME_BYTES])
{
    int n_prefix = (int)(bl_peft_last_name(modules->layers) - modules->layers);

    path[0] = '\0';
    if (module == BL_PEFT_HEAD)
        snprintf(path, BL_PEFT_NAME_BYTES, "%s", modules->head ? modules->head : "");
    else if (modules->embedding)
        snprintf(path, BL_PEFT_NAME_BYTES, "%.*s%s", n_prefix, modules->layers, modules->embedding);
}

void bl_peft_except_saved(const bl_peft_saved_names *names, bl_peft_modules *modules)
{
    char path[BL_PEFT_NAME_BYTES];

    bl_peft_table_path(modules, BL_PEFT_EMBEDDING, path);
    modules->saves_embedding = bl_peft_is_saved(names, path, strlen(path));
    bl_peft_table_path(modules, BL_PEFT_HEAD, path);
    modules->saves_head = bl_peft_is_saved(names, path, strlen(path));
}

/* The table whose path equals the name or ends in ".name"; -1: neither does. */
static int find_table(const bl_peft_modules *modules, const char *name)
{
    char path[BL_PEFT_NAME_BYTES];
    size_t n = strlen(name);

    for (int table = BL_PEFT_EMBEDDING; table <= BL_PEFT_HEAD; table++) {
        bl_peft_table_path(modules, table, path);
        size_t n_path = strlen(path);
        if (n == 0 || n > n_path || strcmp(path + n_path - n, name) != 0) continue;
        if (n == n_path || path[n_path - n - 1] == '.') return table;
    }
    return -1;
}

/* Makes a selected table a target, unless it is in modules_to_save. */
static bl_status add_table(const bl_peft_modules *modules, int table, bl_status refusal,
                           const char *where, const char *text, uint32_t *targets)
{
    if (table == BL_PEFT_EMBEDDING ? modules->saves_embedding : modules->saves_head) return BL_OK;
    if (modules->is_part) {
        char path[BL_PEFT_NAME_BYTES];
        bl_peft_table_path(modules, table, path);
        return BL_FAIL(refusal,
                       "%s: \"%.100s\" selects %s: LoRA terms of the embedding and the head are "
                       "not supported for a model that is part of a larger one",
                       where, text, path);
    }
    *targets |= UINT32_C(1) << table;
    return BL_OK;
}

/* A name that is not a projection: that of a table. */
static bl_status match_table_name(const bl_peft_modules *modules, bl_status refusal,
                                  const char *where, const char *name, int64_t n_layers,
                                  uint32_t *targets)
{
    int table = find_table(modules, name);
    char known[256];

    if (table >= 0) return add_table(modules, table, refusal, where, name, targets);
    list_names(modules, known, sizeof known);
    return BL_FAIL(
        refusal, "%s: expected names among %s, or their paths in %" PRId64 " layers, got \"%.80s\"",
        where, known, n_layers, name);
}

/* ---- names in every layer ---- */

/* Each module must be named in every layer or in none. */
static bl_status check_every_layer(const bl_peft_modules *modules, bl_status refusal,
                                   const char *where, uint32_t everywhere, const uint32_t *named,
                                   int64_t n_layers, uint32_t *targets)
{
    for (int m = 0; m < modules->n; m++) {
        int64_t n_named = 0, n_there = 0, first_without = -1;
        for (int64_t layer = 0; layer < n_layers; layer++) {
            bool is_named = (everywhere | named[layer]) >> m & 1;
            if (!bl_peft_layer_has(modules, layer, m)) continue;
            n_there++;
            n_named += is_named;
            if (!is_named && first_without < 0) first_without = layer;
        }
        if (n_named > 0 && first_without >= 0)
            return BL_FAIL(
                refusal,
                "%s: %s is named in %" PRId64 " of %" PRId64 " layers, not in layer %" PRId64
                "; targets that differ by layer are not supported",
                where, bl_peft_last_name(modules->path[m]), n_named, n_there, first_without);
        if (n_named > 0) *targets |= UINT32_C(1) << m;
    }
    return BL_OK;
}

/* Names of routed experts among `names`: to *targets. Gate and up are one parameter, as in PEFT:
 * both are named, or none. */
static bl_status match_experts(const bl_peft_modules *modules, bl_status refusal, const char *where,
                               const char *const *names, size_t n_names, uint32_t *targets)
{
    const char *named[BL_PEFT_MAX_ROUTED][BL_PEFT_MAX_PIECES] = {{NULL}};

    for (size_t i = 0; i < n_names; i++) {
        int module, piece;
        if (!bl_peft_expert_parse(modules, names[i], &module, &piece)) continue;
        *targets |= module < 0 ? bl_peft_all_routed(modules) : UINT32_C(1) << module;
        if (piece >= 0) named[module - modules->n][piece] = names[i];
    }
    for (int i = 0; i < modules->n_routed; i++) {
        const char *first = named[i][0], *second = named[i][1];
        if (!first == !second) continue;
        return BL_FAIL(refusal,
                       "%s: \"%.80s\" without \"%s\": in routed experts both are one parameter, "
                       "%s, which is trained as a whole: name both",
                       where, first ? first : second, modules->routed[i].piece[first ? 1 : 0],
                       modules->routed[i].parameter);
    }
    return BL_OK;
}

bl_status bl_peft_match_names(const bl_peft_modules *modules, bl_status refusal, const char *where,
                              const char *const *names, size_t n_names, int64_t n_layers,
                              uint32_t *targets)
{
    bl_status st = BL_OK;
    uint32_t everywhere = 0;
    uint32_t *named =
        calloc((size_t)n_layers + 1, sizeof *named); /* bit m: module m of that layer */

    *targets = 0;
    if (!named) return BL_FAIL(BL_ENOMEM, "%s: %" PRId64 " layers", where, n_layers);
    for (size_t i = 0; i < n_names; i++) {
        int module, piece;
        int64_t layer;
        if (bl_peft_expert_parse(modules, names[i], &module, &piece)) continue;
        uint32_t found = bl_peft_target_parse(modules, names[i], &layer);
        if (!found || layer >= n_layers) {
            BL_TRY_GOTO(st, done,
                        match_table_name(modules, refusal, where, names[i], n_layers, targets));
            continue;
        }
        *(layer < 0 ? &everywhere : &named[layer]) |= found;
    }
    BL_TRY_GOTO(st, done, match_experts(modules, refusal, where, names, n_names, targets));
    st = check_every_layer(modules, refusal, where, everywhere, named, n_layers, targets);
done:
    free(named);
    return st;
}

/* ---- a regular expression ---- */

/* The modules of one layer that the pattern matches whole; *there: those that it has. */
static bl_status match_layer(const bl_peft_modules *modules, const bl_name_pattern *pattern,
                             int64_t layer, uint32_t *targets, uint32_t *there)
{
    char path[BL_PEFT_NAME_BYTES];

    *targets = *there = 0;
    for (int m = 0; m < modules->n; m++) {
        bool matches;
        if (!bl_peft_layer_has(modules, layer, m)) continue;
        snprintf(path, sizeof path, "%s.%" PRId64 ".%s", modules->layers, layer, modules->path[m]);
        BL_TRY(bl_name_pattern_match(pattern, path, &matches));
        *there |= UINT32_C(1) << m;
        if (matches) *targets |= UINT32_C(1) << m;
    }
    return BL_OK;
}

static bl_status match_tables(const bl_peft_modules *modules, const bl_name_pattern *pattern,
                              bl_status refusal, const char *where, const char *text,
                              uint32_t *targets)
{
    char path[BL_PEFT_NAME_BYTES];
    bool matches;

    for (int table = BL_PEFT_EMBEDDING; table <= BL_PEFT_HEAD; table++) {
        bl_peft_table_path(modules, table, path);
        if (!path[0]) continue;
        BL_TRY(bl_name_pattern_match(pattern, path, &matches));
        if (matches) BL_TRY(add_table(modules, table, refusal, where, text, targets));
    }
    return BL_OK;
}

bl_status bl_peft_match_pattern(const bl_peft_modules *modules, bl_status refusal,
                                const char *where, const char *text, int64_t n_layers,
                                uint32_t *targets)
{
    bl_name_pattern *pattern;
    bl_status st = BL_OK;
    uint32_t tables = 0, seen = 0;

    *targets = 0;
    BL_TRY(bl_name_pattern_create(text, BL_PATTERN_WHOLE, refusal, where, &pattern));
    BL_TRY_GOTO(st, done, match_tables(modules, pattern, refusal, where, text, &tables));
    for (int64_t layer = 0; layer < n_layers; layer++) {
        uint32_t of_layer, there;
        BL_TRY_GOTO(st, done, match_layer(modules, pattern, layer, &of_layer, &there));
        if ((of_layer ^ *targets) & seen & there) {
            st = BL_FAIL(refusal,
                         "%s: \"%.100s\" selects other modules in layer %" PRId64
                         " than in layers before, which is not supported",
                         where, text, layer);
            goto done;
        }
        *targets |= of_layer;
        seen |= there;
    }
    *targets |= tables;
done:
    bl_name_pattern_destroy(pattern);
    return st;
}
