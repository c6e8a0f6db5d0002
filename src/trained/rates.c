/* SPDX-License-Identifier: Apache-2.0 */
/* rates.c -- matches the patterns of learning_rates with the names of trained tensors and of LoRA
 * factors. */
#include "trained/rates.h"

#include <stdlib.h>
#include <string.h>

#include "store/pattern.h"

static const char KEY[] = "learning_rates";

typedef struct matcher {
    const bl_model_config *model;
    const char *text; /* of the pattern */
    bl_name_pattern *pattern;
    double rate; /* relative to learning_rate */
    int64_t n_matches;
} matcher;

static bl_status fill_rates(const bl_model_config *model, bl_trained_set *set)
{
    int64_t n = bl_arch_tensor_count(model);

    if (set->rate) return BL_OK;
    set->rate = calloc((size_t)n, sizeof *set->rate);
    if (!set->rate) return BL_FAIL(BL_ENOMEM, "%s: the tensors of the model", KEY);
    for (int64_t i = 0; i < n; i++) set->rate[i] = 1;
    return BL_OK;
}

static bool is_table(const bl_arch_tensor *tensor)
{
    return tensor->role == BL_ROLE_EMBEDDING || tensor->role == BL_ROLE_HEAD;
}

/* Of a tied model whose embedding and head are one weight, either name means it. */
static void put(const bl_model_config *model, bl_trained_set *set, int64_t i, bool is_tied,
                double rate)
{
    int64_t n = bl_arch_tensor_count(model);
    bl_arch_tensor tensor = bl_arch_tensor_at(model, i);

    set->rate[i] = rate;
    if (is_tied && is_table(&tensor)) set->rate[n - 2] = set->rate[n - 1] = rate;
}

static bl_status match_tensors(matcher *m, bool is_tied, bl_trained_set *set)
{
    int64_t n = bl_arch_tensor_count(m->model);

    for (int64_t i = 0; i < n; i++) {
        bl_arch_tensor tensor = bl_arch_tensor_at(m->model, i);
        bool matches;
        if (!set->tensor[i]) continue;
        BL_TRY(bl_name_pattern_match(m->pattern, tensor.name, &matches));
        if (!matches) continue;
        put(m->model, set, i, is_tied, m->rate);
        m->n_matches++;
    }
    return BL_OK;
}

/* By PEFT's name of the factor in an adapter's file. */
static bl_status match_factor(matcher *m, int module, bl_peft_factor factor, int64_t n_layers,
                              double *rate)
{
    bl_peft_modules modules = bl_model_peft_modules(m->model);
    char name[BL_PEFT_NAME_BYTES];
    int64_t n = 0, n_there = 0, first = 0;

    for (int64_t l = 0; l < n_layers; l++) {
        bool matches;
        if (module < BL_PEFT_EMBEDDING && !bl_model_has(m->model, l, module)) continue;
        n_there++;
        bl_peft_tensor_name(&modules, l, module, factor, name);
        BL_TRY(bl_name_pattern_match(m->pattern, name, &matches));
        if (matches && n++ == 0) first = l;
    }
    if (n == 0) return BL_OK;
    bl_peft_tensor_name(&modules, first, module, factor, name);
    if (n < n_there)
        return BL_FAIL(BL_EUSAGE,
                       "%s: \"%.100s\" matches %s, the weights of %lld of %lld layers: LoRA "
                       "weights of all layers have one learning rate; leave the layer out of the "
                       "pattern",
                       KEY, m->text, name, (long long)n, (long long)n_there);
    *rate = m->rate;
    m->n_matches++;
    return BL_OK;
}

static bl_status match_lora(matcher *m, bl_lora_layout *lora)
{
    lora->has_rates = true;
    for (int f = 0; f < 2; f++) {
        for (int p = 0; p < lora->arch->n_projections; p++)
            if (lora->options.target[p])
                BL_TRY(
                    match_factor(m, p, (bl_peft_factor)f, m->model->n_layers, &lora->rate[p][f]));
        for (int t = 0; t < BL_MODEL_TABLES; t++)
            if (lora->options.table[t])
                BL_TRY(match_factor(m, BL_PEFT_EMBEDDING + t, (bl_peft_factor)f, 1,
                                    &lora->table_rate[t][f]));
    }
    return BL_OK;
}

/* entry is changed: its pattern ends where "=RATE" begins. */
static bl_status apply_entry(const bl_train_config *config, const bl_model_config *model,
                             char *entry, bl_trained_set *set, bl_lora_layout *lora)
{
    char *equals = strrchr(entry, '='), *end = entry;
    matcher m = {.model = model, .text = entry};
    double rate = equals ? strtod(equals + 1, &end) : 0;

    if (!equals || equals == entry || end == equals + 1 || *end || !(rate >= 0 && rate <= 10))
        return BL_FAIL(BL_EUSAGE,
                       "%s: expected PATTERN=RATE with a rate from 0 to 10, such as lora_B=1e-3, "
                       "got '%s'",
                       KEY, entry);
    *equals = '\0';
    m.rate = rate / config->learning_rate;
    BL_TRY(bl_name_pattern_create(entry, BL_PATTERN_COMPONENTS, BL_EUSAGE, KEY, &m.pattern));
    bl_status st = set ? match_tensors(&m, !lora && model->tie_word_embeddings, set) : BL_OK;
    if (st == BL_OK && lora) st = match_lora(&m, lora);
    bl_name_pattern_destroy(m.pattern);
    if (st != BL_OK || m.n_matches > 0) return st;
    return BL_FAIL(BL_EUSAGE,
                   "%s: \"%.100s\" matches nothing that this run trains; it must match one or "
                   "several parts between the dots of a name such as %s, each whole",
                   KEY, entry,
                   lora ? "base_model.model.model.layers.0.self_attn.q_proj.lora_B.weight"
                        : "model.layers.0.self_attn.q_proj.weight");
}

static bl_status apply_embedding(const bl_train_config *config, const bl_model_config *model,
                                 bl_trained_set *set)
{
    int64_t n = bl_arch_tensor_count(model);

    if (config->embedding_learning_rate == BL_OPTION_AUTO || !set) return BL_OK;
    BL_TRY(fill_rates(model, set));
    for (int64_t i = 0; i < n; i++) {
        bl_arch_tensor tensor = bl_arch_tensor_at(model, i);
        if (is_table(&tensor))
            set->rate[i] = config->embedding_learning_rate / config->learning_rate;
    }
    return BL_OK;
}

bl_status bl_adapter_choose_rates(const bl_train_config *config, const bl_model_config *model,
                                  bl_trained_set *set, bl_lora_layout *lora)
{
    const bl_string_list *list = &config->learning_rates;
    bl_status st = apply_embedding(config, model, set);

    if (st == BL_OK && set && list->n_items > 0) st = fill_rates(model, set);
    for (int64_t i = 0; st == BL_OK && i < list->n_items; i++) {
        char *entry = strdup(list->items[i]);
        st = entry ? apply_entry(config, model, entry, set, lora)
                   : BL_FAIL(BL_ENOMEM, "%s: a pattern", KEY);
        free(entry);
    }
    return st;
}
