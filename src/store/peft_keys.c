/* SPDX-License-Identifier: Apache-2.0 */
/* peft_keys.c -- the keys of adapter_config.json that are read, those without effect, and the rest,
 * which is rejected. */
#include "store/peft_keys.h"

#include <stdlib.h>

#include "base/files.h"
#include "base/hub.h"
#include "base/present.h"
#include "base/sizes.h"
#include "store/peft.h"
#include "store/peft_keys_internal.h"

enum { MAX_CONFIG_BYTES = 16 << 20 };

/* The keys of PEFT 0.21.2's LoraConfig and PeftConfig, and of older releases and ms-swift. */
static const char not_supported[] = "not supported";
static const char same_everywhere[] = "all layers have the same targets, rank and alpha here";
static const char other_base[] = "it also changes the base weights, which the adapter lacks";

static const bl_known_key known_keys[] = {
    {"peft_type", BL_KEY_REJECTED, "[\"LORA\"]", NULL},
    {"r", BL_KEY_USED, NULL, NULL},
    {"lora_alpha", BL_KEY_USED, NULL, NULL},
    {"lora_dropout", BL_KEY_USED, NULL, NULL},
    {"use_rslora", BL_KEY_USED, NULL, NULL},
    {"target_modules", BL_KEY_USED, NULL, NULL},
    {"modules_to_save", BL_KEY_USED, NULL, NULL},
    /* of the model around the layers: bl_peft_check_model_keys */
    {"task_type", BL_KEY_USED, NULL, NULL},
    {"exclude_modules", BL_KEY_USED, NULL, NULL},
    {"layers_pattern", BL_KEY_USED, NULL, NULL},
    {"layers_to_transform", BL_KEY_USED, NULL, NULL},
    /* other results */
    {"bias", BL_KEY_REJECTED, "[\"none\"]", "trained biases are not supported"},
    {"fan_in_fan_out", BL_KEY_REJECTED, NULL, "transposed weights are not supported"},
    {"alpha_pattern", BL_KEY_REJECTED, NULL, same_everywhere},
    {"rank_pattern", BL_KEY_REJECTED, NULL, same_everywhere},
    {"layer_replication", BL_KEY_REJECTED, NULL, not_supported},
    {"megatron_config", BL_KEY_REJECTED, NULL, "Megatron's layers are not supported"},
    {"lora_bias", BL_KEY_REJECTED, NULL, not_supported},
    {"ensure_weight_tying", BL_KEY_REJECTED, NULL, not_supported},
    {"target_parameters", BL_KEY_REJECTED, NULL, not_supported},
    {"trainable_token_indices", BL_KEY_REJECTED, NULL, not_supported},
    {"alora_invocation_tokens", BL_KEY_REJECTED, "[]",
     "aLoRA acts from its invocation tokens on, not on every token; it is not supported"},
    {"use_dora", BL_KEY_REJECTED, NULL, "DoRA is not supported"},
    {"use_qalora", BL_KEY_REJECTED, NULL, "QALoRA is not supported"},
    {"use_bdlora", BL_KEY_REJECTED, NULL, "BD-LoRA is not supported"},
    {"kasa_config", BL_KEY_REJECTED, NULL, "KaSA is not supported"},
    {"velora_config", BL_KEY_REJECTED, NULL, "VeLoRA is not supported"},
    {"monteclora_config", BL_KEY_REJECTED, NULL, "MonteCLoRA is not supported"},
    {"arrow_config", BL_KEY_REJECTED, NULL, "Arrow's routing is not supported"},
    {"loftq_config", BL_KEY_REJECTED, NULL, other_base},
    {"corda_config", BL_KEY_REJECTED, NULL, other_base},
    {"lora_ga_config", BL_KEY_REJECTED, NULL, other_base},
    {"init_lora_weights", BL_KEY_REJECTED, "[true, false, \"gaussian\", \"eva\", \"orthogonal\"]",
     other_base},
};

static const char no_effect[] =
    /* names, versions, settings of other programs' training; runtime_config: PEFT ignores it */
    "base_model_name_or_path revision peft_version auto_mapping inference_mode runtime_config "
    "eva_config lora_dtype lorap_lr_ratio lorap_emb_lr "
    /* without megatron_config and use_qalora */
    "megatron_core qalora_group_size";

static const bl_known_key model_keys[] = {
    {"task_type", BL_KEY_REJECTED, "[\"CAUSAL_LM\", \"\"]", "the model has no head for it"},
    {"exclude_modules", BL_KEY_REJECTED, NULL, same_everywhere},
    {"layers_pattern", BL_KEY_REJECTED, NULL, same_everywhere},
    {"layers_to_transform", BL_KEY_REJECTED, NULL, same_everywhere},
};

bl_status bl_peft_check_model_keys(const char *file, const json_t *root)
{
    static const bl_key_table table = {.keys = model_keys, .n_keys = BL_COUNT(model_keys)};

    for (size_t i = 0; i < BL_COUNT(model_keys); i++) {
        const json_t *value = json_object_get(root, model_keys[i].name);
        if (value) BL_TRY(bl_key_check(&table, file, model_keys[i].name, value, NULL));
    }
    return BL_OK;
}

static bl_status check_keys(const char *file, const json_t *root)
{
    static const bl_key_table table = {known_keys, BL_COUNT(known_keys), NULL, no_effect};
    const char *type;

    BL_TRY(bl_json_get_string(file, root, "peft_type", BL_JSON_REQUIRED, &type));
    /* Other types have other keys: the type is checked first. */
    BL_TRY(bl_key_check(&table, file, "peft_type", json_object_get(root, "peft_type"), NULL));
    return bl_keys_check(&table, file, root, NULL);
}

/* The keys, except those of `unchecked`, a NULL-terminated list. */
static bl_status check_other_keys(const char *file, const json_t *root,
                                  const char *const *unchecked)
{
    json_t *others = json_copy((json_t *)root);

    if (!others) return BL_FAIL(BL_ENOMEM, "the keys of %s", file);
    for (; *unchecked; unchecked++) json_object_del(others, *unchecked);
    bl_status st = check_keys(file, others);
    json_decref(others);
    return st;
}

static bl_status load_keys(const char *dir, const char *const *unchecked, char **file,
                           json_t **root)
{
    *file = NULL;
    *root = NULL;
    BL_TRY(bl_hub_check_dir(dir));
    BL_TRY(bl_path_join(dir, BL_PEFT_CONFIG_NAME, file));
    bl_status st = bl_json_load(*file, MAX_CONFIG_BYTES, root);
    if (st == BL_OK) st = bl_json_check_object(*file, *root);
    if (st == BL_OK) st = check_other_keys(*file, *root, unchecked);
    if (st == BL_OK) return BL_OK;
    json_decref(*root);
    free(*file);
    *root = NULL;
    *file = NULL;
    return st;
}

bl_status bl_peft_load_keys(const char *dir, bool has_experts, char **file, json_t **root)
{
    static const char *const none[] = {NULL}, *const experts[] = {"rank_pattern", "alpha_pattern",
                                                                  "target_parameters", NULL};
    return load_keys(dir, has_experts ? experts : none, file, root);
}

bl_status bl_peft_load_any_keys(const char *dir, char **file, json_t **root)
{
    static const char *const by_module[] = {"rank_pattern", "alpha_pattern", "fan_in_fan_out",
                                            "target_parameters", NULL};
    return load_keys(dir, by_module, file, root);
}

bl_status bl_peft_check_keys(const char *dir)
{
    char *file;
    json_t *root;

    BL_TRY(bl_peft_load_keys(dir, false, &file, &root));
    json_decref(root);
    free(file);
    return BL_OK;
}
