/* SPDX-License-Identifier: Apache-2.0 */
/* verify_loads.c -- which programs load all of an adapter, and what each would drop or scale
 * otherwise. The rules follow the source of PEFT 0.21.2 and the files that PEFT 0.17 to 0.19.1
 * wrote, and the sources of vLLM 0.33.0 (vllm/lora: peft_helper, lora_model, model_manager) and
 * SGLang 0.5.23 (srt/lora: lora, lora_manager, mem_pool, utils) with default options. */
#include <stdio.h>
#include <string.h>

#include "arch/lora.h"
#include "base/json.h"
#include "base/sizes.h"
#include "convert/verify_internal.h"

typedef enum program { PEFT_OLD, PEFT_NEW, VLLM, SGLANG, N_PROGRAMS } program;
static const char *const program_keys[N_PROGRAMS] = {"peft-0.17", "peft-0.19.1", "vllm", "sglang"};

/* What a program does with a part of an adapter. */
typedef enum effect { LOADS, REJECTS, DROPS, SCALES } effect;
static const char *const effect_keys[] = {"loads", "rejects", "drops", "scales"};

typedef struct finding {
    effect effect;
    const char *why;
} finding;

static bool is_layout(const bl_verify *v, const char *name)
{
    return v->adapter.layout && strcmp(v->adapter.layout, name) == 0;
}

static bool is_stacked(const bl_pair *p)
{
    return p->parameter && strcmp(p->parameter, "weight") != 0;
}

/* ---- PEFT ---- */

static finding in_peft(const bl_verify *v, const bl_pair *p, bool is_new)
{
    if (p->n_experts == 0) return (finding){DROPS, "the base has no such module"};
    if (!p->fits) return (finding){REJECTS, "names or shapes do not fit (see the faults)"};
    if (p->is_untargeted) return (finding){DROPS, "adapter_config.json does not select it"};
    if (!p->parameter || is_layout(v, "peft-any")) return (finding){LOADS, NULL};
    if (is_layout(v, is_new ? "peft-0.19.1" : "peft-0.17")) return (finding){LOADS, NULL};
    return p->is_ambiguous
               ? (finding){SCALES, "square experts of the other layout load, and are transposed"}
               : (finding){REJECTS, "experts of the other layout: shapes do not fit"};
}

/* ---- vLLM ---- */

enum { VLLM_MAX_RANK = 16 }; /* default of --max-lora-rank */

/* Mixtures whose experts vLLM takes stacked; of the others it takes them one by one. */
static bool stacks_experts(const bl_verify *v)
{
    const bl_verify_block *block = NULL;

    for (size_t i = 0; i < v->base.n && !block; i++)
        if (v->base.blocks[i].is_input_first) block = &v->base.blocks[i];
    return block && !v->base.is_llama4;
}

/* Whether the checkpoint has the module under the adapter's name: vLLM's experts have the names of
 * published checkpoints. */
static bool has_name_of_base(const bl_verify *v, const bl_pair *p)
{
    char key[BL_VERIFY_NAME_BYTES + 16];
    size_t n = strlen(p->module);

    snprintf(key, sizeof key, "%s.weight", p->key);
    const bl_verify_block *block = bl_verify_find(&v->base, key);
    return !block || block->slice.tensor->n_dims != 2 ||
           strncmp(block->slice.tensor->name, p->module, n) == 0;
}

static finding in_vllm(const bl_verify *v, const bl_pair *p)
{
    bool takes_stacked = stacks_experts(v);

    if (p->n_experts == 0 || !p->fits)
        return (finding){REJECTS, "names or shapes do not fit (see the faults)"};
    if (is_stacked(p) && !takes_stacked)
        return (finding){REJECTS, "stacked experts of a mixture whose experts it has one by one"};
    if (is_stacked(p) && !is_layout(v, "peft-0.19.1") && !is_layout(v, "peft-any"))
        return (finding){REJECTS, "stacked experts in the layout of PEFT before 0.19.1"};
    if (p->parameter && !is_stacked(p)) return (finding){REJECTS, "stacked experts of this name"};
    if (strstr(p->key, ".experts.") && takes_stacked)
        return (finding){REJECTS, "experts one by one of a mixture whose experts it has stacked"};
    if (strstr(p->key, ".experts.") && !has_name_of_base(v, p))
        return (finding){REJECTS, "names of experts that are not the published checkpoint's"};
    if (p->scale != bl_lora_scale(v->adapter.alpha, v->adapter.r, v->adapter.use_rslora))
        return (finding){SCALES, "it reads neither rank_pattern nor alpha_pattern"};
    if (p->r > VLLM_MAX_RANK) return (finding){REJECTS, "ranks above 16, without --max-lora-rank"};
    return (finding){LOADS, NULL};
}

/* ---- SGLang ---- */

static const char *last_name(const char *path)
{
    const char *point = strrchr(path, '.');
    return point ? point + 1 : path;
}

/* The modules of its LoRA buffers, by the names in adapters. */
static bool sglang_knows(const char *module)
{
    static const char *const names[] = {"q_proj",
                                        "k_proj",
                                        "v_proj",
                                        "qkv_proj",
                                        "o_proj",
                                        "gate_proj",
                                        "up_proj",
                                        "gate_up_proj",
                                        "down_proj",
                                        "q_a_proj",
                                        "kv_a_proj_with_mqa",
                                        "q_b_proj",
                                        "kv_b_proj",
                                        "embed_tokens",
                                        "lm_head",
                                        "out_proj",
                                        "in_proj",
                                        "in_proj_qkv",
                                        "w1",
                                        "w2",
                                        "w3"};
    const char *name = last_name(module);

    for (size_t i = 0; i < BL_COUNT(names); i++)
        if (strcmp(name, names[i]) == 0) return true;
    return false;
}

static bool has_sibling(const bl_verify *v, const bl_pair *p, const char *name)
{
    size_t n = (size_t)(last_name(p->module) - p->module);

    for (size_t i = 0; i < v->adapter.n_pairs; i++) {
        const char *other = v->adapter.pairs[i].module;
        if (strncmp(other, p->module, n) == 0 && strcmp(other + n, name) == 0) return true;
    }
    return false;
}

static finding in_sglang(const bl_verify *v, const bl_pair *p)
{
    const char *name = last_name(p->module);
    const bl_verify_adapter *a = &v->adapter;

    if (p->parameter)
        return (finding){DROPS, "stacked experts: it does not read target_parameters"};
    if (!sglang_knows(p->module)) return (finding){DROPS, "a module that it does not adapt"};
    if (p->n_experts == 0 || !p->fits)
        return (finding){REJECTS, "names or shapes do not fit (see the faults)"};
    if (strcmp(name, "q_proj") == 0 && !has_sibling(v, p, "v_proj"))
        return (finding){REJECTS, "q_proj without v_proj"};
    if ((strcmp(name, "k_proj") == 0 || strcmp(name, "v_proj") == 0) &&
        !has_sibling(v, p, "q_proj"))
        return (finding){DROPS, "k_proj or v_proj without q_proj"};
    if (p->r != a->r) return (finding){REJECTS, "rank_pattern: it reads r alone"};
    double served = bl_lora_scale(a->alpha, a->r, false);
    if (p->scale != served) return (finding){SCALES, "it uses lora_alpha / r alone"};
    return (finding){LOADS, NULL};
}

/* ---- the whole adapter ---- */

static bool has_list(const json_t *value)
{
    return json_is_array(value) && json_array_size(value) > 0;
}

static finding of_config(const bl_verify *v, program which)
{
    const json_t *config = v->adapter.config, *modules = json_object_get(config, "target_modules");
    const char *text = bl_json_text(modules);

    if (which == VLLM && has_list(json_object_get(config, "modules_to_save")))
        return (finding){REJECTS, "modules_to_save"};
    if (which == SGLANG && text && strcmp(text, "all-linear") != 0)
        return (finding){REJECTS, "target_modules is an expression"};
    return (finding){LOADS, NULL};
}

static finding of_pair(const bl_verify *v, program which, const bl_pair *p)
{
    if (which == VLLM) return in_vllm(v, p);
    if (which == SGLANG) return in_sglang(v, p);
    return in_peft(v, p, which == PEFT_NEW);
}

/* A finding of modules of one class: counted once, with one of them as the example. */
static void note(json_t *list, finding f, const char *tensor)
{
    char class[BL_VERIFY_NAME_BYTES];
    json_t *item;
    size_t i;

    bl_verify_class(tensor, class);
    json_array_foreach(list, i, item)
    {
        if (strcmp(json_string_value(json_object_get(item, "tensors")), class) != 0 ||
            strcmp(json_string_value(json_object_get(item, "reason")), f.why) != 0)
            continue;
        json_object_set_new(item, "count",
                            json_integer(json_integer_value(json_object_get(item, "count")) + 1));
        return;
    }
    json_array_append_new(list, json_pack("{s:s, s:s, s:i, s:s}", "effect", effect_keys[f.effect],
                                          "tensors", class, "count", 1, "reason", f.why));
}

static json_t *describe(const bl_verify *v, program which)
{
    json_t *list = json_array();
    finding f = of_config(v, which);
    char name[BL_VERIFY_NAME_BYTES];

    if (f.effect != LOADS) note(list, f, "adapter_config.json");
    for (size_t i = 0; i < v->adapter.n_pairs; i++) {
        f = of_pair(v, which, &v->adapter.pairs[i]);
        if (f.effect != LOADS) note(list, f, v->adapter.pairs[i].module);
    }
    for (size_t i = 0; i < v->adapter.n_others; i++) {
        bool is_frozen_copy = strstr(v->adapter.others[i]->name, ".base_layer.");
        bl_verify_other_name(v->adapter.others[i], name);
        if (which == SGLANG && !is_frozen_copy)
            note(list, (finding){DROPS, "modules_to_save"}, name);
    }
    return json_pack("{s:b, s:o}", "loads_all", json_array_size(list) == 0, "findings", list);
}

bl_status bl_verify_loads(bl_verify *v)
{
    json_t *loads = json_object();

    for (int i = 0; i < N_PROGRAMS; i++)
        json_object_set_new(loads, program_keys[i], describe(v, (program)i));
    json_object_set_new(v->report, "loads", loads);
    return bl_json_ran_out() ? BL_FAIL(BL_ENOMEM, "the report") : BL_OK;
}
