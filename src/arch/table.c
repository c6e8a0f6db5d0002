/* SPDX-License-Identifier: Apache-2.0 */
/* table.c -- the table of architectures. */
#include "arch/table.h"

#include <string.h>

#include "arch/list_internal.h"
#include "base/sizes.h"

#define ADDRESS(name) &name,
static const bl_arch *const table[] = {ARCH_LIST(ADDRESS)};
#undef ADDRESS

const bl_arch *bl_arch_at(size_t i)
{
    return i < BL_COUNT(table) ? table[i] : NULL;
}

const bl_projection *bl_arch_find_target(const char *name, int64_t *layer)
{
    int module, piece;

    for (size_t i = 0; i < BL_COUNT(table); i++) {
        bl_peft_modules modules = bl_arch_peft_modules(table[i]);
        uint32_t found = bl_peft_target_parse(&modules, name, layer);
        if (found) return &table[i]->projections[__builtin_ctz(found)];
        if (bl_peft_expert_parse(&modules, name, &module, &piece))
            return &table[i]->projections[module < 0 ? modules.n : module];
    }
    return NULL;
}

bool bl_arch_find_layer(const char *name, int64_t *layer)
{
    for (size_t i = 0; i < BL_COUNT(table); i++)
        if (bl_peft_layer_parse(table[i]->layers, name, strlen(name), layer)) return true;
    return false;
}

bool bl_arch_is_table(const char *name)
{
    const char *last = bl_peft_last_name(name);

    for (size_t i = 0; i < BL_COUNT(table); i++)
        if (strcmp(last, bl_peft_last_name(table[i]->embedding)) == 0 ||
            strcmp(last, bl_peft_last_name(table[i]->head)) == 0)
            return true;
    return false;
}

size_t bl_arch_target_names(const char **names, size_t n_max)
{
    size_t n = 0;

    for (size_t i = 0; i < BL_COUNT(table); i++)
        for (int p = 0; p < bl_arch_peft_modules(table[i]).n && n < n_max; p++) {
            const char *name = bl_projection_name(&table[i]->projections[p]);
            size_t k = 0;
            while (k < n && strcmp(names[k], name) != 0) k++;
            if (k == n) names[n++] = name;
        }
    return n;
}
