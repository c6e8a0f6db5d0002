/* SPDX-License-Identifier: Apache-2.0 */
/* trained.c -- chooses trained tensors by their names, and derives the spans of the units. */
#include "arch/trained.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/sizes.h"
#include "store/pattern.h"

/* ---- the units of the chosen tensors ---- */

static void add_span(bl_trained_spans *spans, int64_t begin, int64_t n)
{
    bl_trained_span *last = spans->n > 0 ? &spans->at[spans->n - 1] : NULL;

    if (last && last->begin + last->n == begin)
        last->n += n;
    else
        spans->at[spans->n++] = (bl_trained_span){begin, n};
}

static void add_range(bl_trained_set *set, int64_t begin, int64_t n)
{
    bl_trained_span *last = set->n_ranges > 0 ? &set->range[set->n_ranges - 1] : NULL;

    if (last && last->begin + last->n == begin)
        last->n += n;
    else
        set->range[set->n_ranges++] = (bl_trained_span){begin, n};
}

/* The bias of a matrix that float `at` of a layer's vectors is in; *element: its place there. */
static bl_layer_matrix bias_at(const bl_model_config *c, bl_layer_kind kind, int64_t at,
                               int64_t *element)
{
    bl_layer_matrix found = BL_QKV;

    *element = 0;
    for (int m = 0; m < BL_LAYER_MATRICES; m++) {
        int64_t begin = bl_arch_bias_offset(c, kind, (bl_layer_matrix)m);
        if (begin < 0 || begin > at) continue;
        found = (bl_layer_matrix)m;
        *element = at - begin;
    }
    return found;
}

static void add_vector(const bl_model_config *c, const bl_arch_tensor *t, bl_trained_set *set)
{
    int64_t at = t->offset - bl_arch_vectors_before(c, t->layer), element;
    bl_layer_kind kind = bl_model_kind(c, t->layer);
    bl_trained_unit *unit = &set->unit[t->layer];

    add_range(set, t->offset, t->shape[0]);
    if (t->layer == c->n_layers) {
        unit->vectors |= 1u << (at == 0 ? BL_ATTENTION_NORM : BL_ATTENTION_NORM_BIAS);
        return;
    }
    for (int v = 0; v < BL_LAYER_VECTORS; v++) {
        if (bl_arch_vector_width(c, kind, (bl_layer_vector)v) == 0 ||
            bl_arch_vector_offset(c, kind, (bl_layer_vector)v) != at)
            continue;
        unit->vectors |= 1u << v;
        return;
    }
    bl_layer_matrix matrix = bias_at(c, kind, at, &element);
    add_span(&unit->bias[matrix], element, t->shape[0]);
}

static void add_tensor(const bl_model_config *c, const bl_arch_tensor *t, bl_trained_set *set)
{
    switch (t->role) {
    case BL_ROLE_PROJECTION:
        add_span(&set->unit[t->layer].matrix[c->arch->projections[t->projection].matrix],
                 bl_projection_row(c, t->projection), t->shape[0]);
        return;
    case BL_ROLE_VECTOR:
        add_vector(c, t, set);
        return;
    case BL_ROLE_HEAD:
        add_span(&set->unit[c->n_layers].matrix[0], 0, t->shape[0]);
        return;
    case BL_ROLE_EMBEDDING:
        add_span(&set->unit[c->n_layers + 1].matrix[0], 0, t->shape[0]);
        return;
    }
}

static bool has_any(const bl_trained_unit *unit)
{
    for (int m = 0; m < BL_LAYER_MATRICES; m++)
        if (unit->bias[m].n > 0) return true;
    return unit->vectors != 0 || bl_trained_has_matrices(unit);
}

/* Fills the other members from set->tensor. is_apart: a tied head is a separate weight. */
static void derive(const bl_model_config *c, bool is_apart, bl_trained_set *set)
{
    int64_t n = bl_arch_tensor_count(c);

    for (int64_t i = 0; i < n; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(c, i);
        bool is_alias = t.role == BL_ROLE_HEAD && c->tie_word_embeddings && !is_apart;
        set->n_all_tensors += !is_alias;
        set->n_all_weights += is_alias ? 0 : bl_arch_tensor_elements(&t);
        if (!set->tensor[i]) continue;
        set->n_tensors += !is_alias;
        set->n_weights += is_alias ? 0 : bl_arch_tensor_elements(&t);
        add_tensor(c, &t, set);
    }
    set->is_all = set->n_tensors == set->n_all_tensors;
    set->first = 0;
    while (set->first < c->n_layers && !has_any(&set->unit[set->first])) set->first++;
    if (bl_trained_has_embedding(set)) set->first = 0;
}

/* ---- by name ---- */

typedef struct choice {
    const bl_model_config *config;
    const char *key;
    uint8_t *tensor; /* receives `value` where a pattern matches */
    uint8_t value;
} choice;

/* Of a tied model the embedding and the head, whichever of the two is named. */
static void put(const choice *c, int64_t i, bl_tensor_role role)
{
    int64_t n = bl_arch_tensor_count(c->config);

    c->tensor[i] = c->value;
    if (!c->config->tie_word_embeddings) return;
    if (role == BL_ROLE_EMBEDDING || role == BL_ROLE_HEAD)
        c->tensor[n - 2] = c->tensor[n - 1] = c->value;
}

static bl_status apply_pattern(const choice *c, const char *text)
{
    int64_t n = bl_arch_tensor_count(c->config), n_found = 0;
    bl_name_pattern *pattern;
    bl_status st = BL_OK;

    BL_TRY(bl_name_pattern_create(text, BL_PATTERN_COMPONENTS, BL_EUSAGE, c->key, &pattern));
    for (int64_t i = 0; i < n && st == BL_OK; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(c->config, i);
        bool matches;
        st = bl_name_pattern_match(pattern, t.name, &matches);
        if (st != BL_OK || !matches) continue;
        put(c, i, t.role);
        n_found++;
    }
    bl_name_pattern_destroy(pattern);
    BL_TRY(st);
    if (n_found > 0) return BL_OK;
    bl_arch_tensor example = bl_arch_tensor_at(c->config, c->config->arch->n_projections);
    return BL_FAIL(BL_EUSAGE,
                   "%s: \"%.100s\" matches no tensor of the model; it must match one or several "
                   "parts between the dots of a name such as %s, each whole (a part's end: "
                   ".*norm)",
                   c->key, text, example.name);
}

static bl_status apply(const bl_model_config *config, const bl_trained_patterns *patterns,
                       uint8_t *tensor)
{
    choice c = {config, "trainable_modules", tensor, 1};

    if (patterns->n_trainable == 0) memset(tensor, 1, (size_t)bl_arch_tensor_count(config));
    for (int64_t i = 0; i < patterns->n_trainable; i++)
        BL_TRY(apply_pattern(&c, patterns->trainable[i]));
    c.key = "freeze";
    c.value = 0;
    for (int64_t i = 0; i < patterns->n_freeze; i++) BL_TRY(apply_pattern(&c, patterns->freeze[i]));
    return BL_OK;
}

static bl_status begin(const bl_model_config *config, bl_trained_set *out)
{
    size_t n_units = (size_t)config->n_layers + 2, n = (size_t)bl_arch_tensor_count(config);

    *out = (bl_trained_set){.n_layers = config->n_layers,
                            .unit = calloc(n_units, sizeof *out->unit),
                            .tensor = calloc(n, sizeof *out->tensor),
                            .range = calloc(n, sizeof *out->range)};
    return out->unit && out->tensor && out->range
               ? BL_OK
               : BL_FAIL(BL_ENOMEM, "the list of trained tensors");
}

bl_status bl_trained_choose(const bl_model_config *config, const bl_trained_patterns *patterns,
                            bl_trained_set *out)
{
    *out = (bl_trained_set){.unit = NULL};
    if (config->n_experts > 0)
        return BL_FAIL(BL_EUSAGE,
                       "finetuning_type full is not supported for %s: its experts are frozen; use "
                       "finetuning_type lora",
                       config->arch->title);
    bl_status st = begin(config, out);

    if (st == BL_OK) st = apply(config, patterns, out->tensor);
    if (st == BL_OK) derive(config, false, out);
    if (st == BL_OK && out->n_tensors == 0)
        st = BL_FAIL(BL_EUSAGE, "freeze: no tensor is left to train; leave a pattern out");
    if (st != BL_OK) bl_trained_free(out);
    return st;
}

/* Whether the path of the tensor's module, "model.norm", ends in the name. */
static bool is_of_module(const bl_arch_tensor *t, const char *name)
{
    size_t n = strlen(name), n_module = (size_t)(strrchr(t->name, '.') - t->name);

    return n > 0 && n <= n_module && strncmp(t->name + n_module - n, name, n) == 0;
}

static bl_status apply_module(const bl_model_config *config, const char *name, bl_status refusal,
                              const char *where, uint8_t *tensor)
{
    int64_t n = bl_arch_tensor_count(config), n_found = 0;

    for (int64_t i = 0; i < n; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(config, i);
        bool is_bias = bl_arch_is_bias(config, &t);
        if (!is_of_module(&t, name)) continue;
        if (t.role == BL_ROLE_VECTOR && t.n_dims > 1)
            return BL_FAIL(refusal, "%s: \"%.60s\" is a router (%s): these are frozen", where, name,
                           t.name);
        if (t.role == BL_ROLE_PROJECTION || is_bias)
            return BL_FAIL(refusal,
                           "%s: \"%.60s\" is a projection (%s): these have LoRA terms; train them "
                           "whole with finetuning_type full",
                           where, name, t.name);
        tensor[i] = 1;
        n_found++;
    }
    if (n_found > 0) return BL_OK;
    return BL_FAIL(refusal,
                   "%s: no norm, embedding or head ends in \"%.60s\"; other modules are not "
                   "supported",
                   where, name);
}

bl_status bl_trained_choose_modules(const bl_model_config *config, const char *const *names,
                                    int64_t n_names, bl_status refusal, const char *where,
                                    bl_trained_set *out)
{
    bl_status st = begin(config, out);

    for (int64_t i = 0; st == BL_OK && i < n_names; i++)
        st = apply_module(config, names[i], refusal, where, out->tensor);
    if (st == BL_OK) derive(config, true, out);
    out->first = 0; /* LoRA terms are in every layer */
    if (st != BL_OK) bl_trained_free(out);
    return st;
}

bl_status bl_trained_all(const bl_model_config *config, bl_trained_set *out)
{
    return bl_trained_choose(config, &(bl_trained_patterns){.trainable = NULL}, out);
}

void bl_trained_free(bl_trained_set *set)
{
    free(set->unit);
    free(set->tensor);
    free(set->range);
    free(set->rate);
    *set = (bl_trained_set){.unit = NULL};
}

/* ---- questions ---- */

bool bl_trained_has_matrices(const bl_trained_unit *unit)
{
    for (int m = 0; m < BL_LAYER_MATRICES; m++)
        if (unit->matrix[m].n > 0) return true;
    return false;
}

bool bl_trained_has_embedding(const bl_trained_set *set)
{
    return set->unit[set->n_layers + 1].matrix[0].n > 0;
}

bool bl_trained_has_attention(const bl_trained_unit *unit)
{
    unsigned of_mlp = 1u << BL_MLP_NORM | 1u << BL_MLP_NORM_BIAS;

    return unit->matrix[BL_QKV].n > 0 || unit->matrix[BL_OUT].n > 0 || unit->bias[BL_QKV].n > 0 ||
           unit->bias[BL_OUT].n > 0 || (unit->vectors & ~of_mlp) != 0;
}

const char *bl_trained_partial(const bl_model_config *config, const bl_trained_set *set)
{
    const bl_projection *list = config->arch->projections;
    int64_t n = bl_arch_tensor_count(config);

    for (int64_t i = 0; i < n; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(config, i);
        if (t.role != BL_ROLE_PROJECTION || !set->tensor[i]) continue;
        for (int p = 0; p < config->arch->n_projections; p++)
            if (list[p].matrix == list[t.projection].matrix && !set->tensor[i - t.projection + p])
                return bl_projection_name(&list[t.projection]);
    }
    return NULL;
}

bool bl_trained_find(const bl_model_config *config, const bl_trained_set *set, const char *name,
                     bl_arch_tensor *out)
{
    int64_t n = bl_arch_tensor_count(config);

    for (int64_t i = 0; i < n; i++) {
        *out = bl_arch_tensor_at(config, i);
        if (strcmp(out->name, name) == 0) return set->tensor[i];
    }
    return false;
}

double bl_trained_rate(const bl_model_config *config, const bl_trained_set *set, int64_t unit,
                       int matrix, int64_t row, int64_t *end)
{
    const bl_arch *arch = config->arch;
    int64_t n = bl_arch_tensor_count(config), found = 0,
            per_layer = (n - 3 - arch->has_layer_norm) / config->n_layers; /* the last: tables */

    *end = INT64_MAX;
    if (!set->rate) return 1;
    if (unit >= config->n_layers) return set->rate[unit == config->n_layers ? n - 1 : n - 2];
    for (int p = 0; p < arch->n_projections; p++) {
        if ((int)arch->projections[p].matrix != matrix) continue;
        int64_t begin = bl_projection_row(config, p);
        if (begin <= row)
            found = p;
        else
            *end = bl_min_i64(*end, begin);
    }
    return set->rate[unit * per_layer + found];
}

void bl_trained_describe(const bl_model_config *config, const bl_trained_set *set,
                         char text[BL_TRAINED_TEXT_BYTES])
{
    bool is_table = config->tie_word_embeddings && bl_trained_has_embedding(set);
    char backward[64] = "";

    if (set->first == set->n_layers)
        snprintf(backward, sizeof backward, "; no backward pass through layers");
    else if (set->first > 0)
        snprintf(backward, sizeof backward, "; backward ends at layer %lld", (long long)set->first);
    snprintf(text, BL_TRAINED_TEXT_BYTES,
             "%.4g M of %.4g M weights trained, %lld of %lld tensors%s%s",
             (double)set->n_weights * 1e-6, (double)set->n_all_weights * 1e-6,
             (long long)set->n_tensors, (long long)set->n_all_tensors, backward,
             is_table ? "; embedding and head are one weight" : "");
}

/* Forward of all; input gradients of the layers from `first` on, and of the head; gradients of the
 * trained matrices. */
double bl_trained_step_flops(const bl_model_config *config, const bl_trained_set *set,
                             double n_tokens, double mean_tokens, double n_labels)
{
    double flops = bl_arch_step_flops(config, 0, set->first, n_tokens, mean_tokens, n_labels);
    int64_t n = bl_arch_tensor_count(config);

    for (int64_t i = 0; i < n; i++) {
        bl_arch_tensor t = bl_arch_tensor_at(config, i);
        if (!set->tensor[i]) continue;
        if (t.role == BL_ROLE_PROJECTION)
            flops += 2.0 * (double)bl_arch_tensor_elements(&t) * n_tokens;
        if (t.role == BL_ROLE_HEAD) flops += 2.0 * (double)bl_arch_tensor_elements(&t) * n_labels;
    }
    return flops;
}
