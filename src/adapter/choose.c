/* SPDX-License-Identifier: Apache-2.0 */
/* choose.c -- reads which projections have LoRA terms from the configuration, or from the adapter
 * that the run starts from; and which tensors full fine-tuning trains. */
#include "adapter/choose.h"

#include <string.h>

#include "adapter/lora_io.h"

/* all-linear, names, or one regular expression. */
static bl_status targets_of_config(const bl_train_config *c, const bl_model_config *model,
                                   uint32_t *targets)
{
    static const char where[] = "lora_target_modules";
    const bl_string_list *list = &c->lora_target_modules;
    bl_peft_modules modules = bl_arch_peft_modules(model->arch);

    *targets = bl_peft_all(&modules);
    if (strcmp(list->items[0], "all-linear") == 0) return BL_OK;
    if (!bl_train_config_targets_by_pattern(c))
        return bl_peft_match_names(&modules, BL_EUSAGE, where, (const char *const *)list->items,
                                   (size_t)list->n_items, model->n_layers, targets);
    BL_TRY(bl_peft_match_pattern(&modules, BL_EUSAGE, where, list->items[0], model->n_layers,
                                 targets));
    return *targets
               ? BL_OK
               : BL_FAIL(BL_EUSAGE, "%s: \"%.100s\" matches no projection", where, list->items[0]);
}

static bl_status options_of_config(const bl_train_config *c, const bl_model_config *model,
                                   bl_lora_options *out)
{
    bl_peft_config peft = {.r = c->lora_r,
                           .alpha = c->lora_alpha,
                           .use_rslora = c->use_rslora,
                           .dropout = c->lora_dropout};

    BL_TRY(targets_of_config(c, model, &peft.targets));
    bl_lora_options_of_peft(&peft, out);
    return BL_OK;
}

/* init_adapter fixes r, alpha, rsLoRA and targets; keys with other values are rejected. */
static bl_status check_given(const bl_train_config *c, const bl_lora_options *asked,
                             const bl_lora_options *adapter)
{
    const char *key = NULL;
    if (bl_train_config_given(c, "lora_r") && asked->r != adapter->r) key = "lora_r";
    if (bl_train_config_given(c, "lora_alpha") && asked->alpha != adapter->alpha)
        key = "lora_alpha";
    if (bl_train_config_given(c, "use_rslora") && asked->use_rslora != adapter->use_rslora)
        key = "use_rslora";
    if (bl_train_config_given(c, "lora_target_modules") &&
        memcmp(asked->target, adapter->target, sizeof asked->target) != 0)
        key = "lora_target_modules";
    if (!key) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "%s: differs from that of init_adapter %s, which fixes it; leave the key out",
                   key, c->init_adapter);
}

bl_status bl_adapter_choose_lora(const bl_train_config *c, const bl_model_config *model,
                                 bool is_training, bl_lora_layout *out)
{
    bl_lora_options options;

    if (!c->init_adapter && !is_training) {
        bl_lora_layout_init(model, NULL, out);
        return BL_OK;
    }
    BL_TRY(options_of_config(c, model, &options));
    if (c->init_adapter) {
        bl_peft_config peft;
        bl_lora_options adapter;
        bl_peft_modules modules = bl_arch_peft_modules(model->arch);
        BL_TRY(bl_peft_load_config(c->init_adapter, &modules, model->n_layers, &peft));
        bl_lora_options_of_peft(&peft, &adapter);
        if (is_training) BL_TRY(check_given(c, &options, &adapter));
        adapter.dropout = c->lora_dropout; /* the run's, not the old run's */
        options = adapter;
    }
    bl_lora_layout_init(model, &options, out);
    bl_lora_layout_order_for(bl_train_config_act(c), out);
    return BL_OK;
}

/* An update reads and writes whole blocks of a page file; rows end anywhere in them. */
static bl_status check_partial(const bl_train_config *c, const bl_model_config *model,
                               const bl_trained_set *set)
{
    const char *name = bl_trained_partial(model, set);

    if (!name || c->offload_ratio == 0 || c->offload_tier != BL_OFFLOAD_DISK) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "trainable_modules: %s is trained and other projections of its fused matrix "
                   "(q|k|v, gate|up) are not, which offload_tier disk does not support: train all "
                   "of them or none, or set offload_ratio 0",
                   name);
}

static bl_status check_embedding_rate(const bl_train_config *c, const bl_trained_set *set)
{
    if (c->embedding_learning_rate == BL_OPTION_AUTO || bl_trained_has_embedding(set) ||
        bl_trained_has_matrices(&set->unit[set->n_layers]))
        return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "embedding_learning_rate %g: trainable_modules and freeze leave "
                   "neither embedding nor head to train; leave it out",
                   c->embedding_learning_rate);
}

bl_status bl_adapter_choose_trained(const bl_train_config *c, const bl_model_config *model,
                                    bl_trained_set *out)
{
    const bl_trained_patterns patterns = {.trainable =
                                              (const char *const *)c->trainable_modules.items,
                                          .n_trainable = c->trainable_modules.n_items,
                                          .freeze = (const char *const *)c->freeze.items,
                                          .n_freeze = c->freeze.n_items};

    BL_TRY(bl_trained_choose(model, &patterns, out));
    bl_status st = check_partial(c, model, out);
    if (st == BL_OK) st = check_embedding_rate(c, out);
    if (st != BL_OK) bl_trained_free(out);
    return st;
}
