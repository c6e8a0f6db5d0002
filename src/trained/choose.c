/* SPDX-License-Identifier: Apache-2.0 */
/* choose.c -- reads which projections have LoRA terms from the configuration, or from the adapter
 * that the run starts from; and which tensors full fine-tuning trains. */
#include "trained/choose.h"

#include <string.h>

#include "trained/peft.h"
#include "trained/rates.h"

/* The key modules_to_save. */
static bl_status saved_names(const bl_train_config *c, bl_peft_saved_names *out)
{
    const bl_string_list *list = &c->modules_to_save;

    *out = (bl_peft_saved_names){.n = 0};
    for (int64_t i = 0; i < list->n_items; i++)
        if (!bl_peft_add_saved(out, list->items[i]))
            return BL_FAIL(BL_EUSAGE, "modules_to_save: at most %d names of less than %d bytes",
                           BL_PEFT_MAX_SAVED, BL_PEFT_SAVED_BYTES);
    return BL_OK;
}

/* all-linear, names, or one regular expression. The default has no routed experts. */
static bl_status targets_of_config(const bl_train_config *c, const bl_model_config *model,
                                   uint32_t *targets)
{
    static const char where[] = "lora_target_modules";
    const bl_string_list *list = &c->lora_target_modules;
    bl_peft_modules modules = bl_model_peft_modules(model);
    bl_peft_saved_names saved;

    BL_TRY(saved_names(c, &saved));
    bl_peft_except_saved(&saved, &modules);
    *targets = bl_peft_all(&modules);
    if (strcmp(list->items[0], "all-linear") == 0) {
        if (bl_train_config_given(c, where)) *targets |= bl_peft_all_routed(&modules);
        return BL_OK;
    }
    if (bl_train_config_targets_by_pattern(c))
        BL_TRY(bl_peft_match_pattern(&modules, BL_EUSAGE, where, list->items[0], model->n_layers,
                                     targets));
    else
        BL_TRY(bl_peft_match_names(&modules, BL_EUSAGE, where, (const char *const *)list->items,
                                   (size_t)list->n_items, model->n_layers, targets));
    if (*targets & (bl_peft_all(&modules) | bl_peft_all_routed(&modules))) return BL_OK;
    return BL_FAIL(BL_EUSAGE, "%s: \"%.100s\"%s no projection%s", where, list->items[0],
                   list->n_items > 1 ? " and the other names select" : " matches",
                   *targets ? "; LoRA terms of the embedding and the head alone are not supported: "
                              "add a projection"
                            : "");
}

/* Gate and up by these names are one parameter with the rank and alpha of both, as in PEFT 0.21. */
static void join_pieces(const bl_train_config *c, const bl_model_config *model,
                        bl_peft_config *peft)
{
    const bl_string_list *list = &c->lora_target_modules;
    bl_peft_modules modules = bl_arch_peft_modules(model->arch);

    for (int64_t i = 0; i < list->n_items; i++) {
        int module, piece;
        if (!bl_peft_expert_parse(&modules, list->items[i], &module, &piece) || piece < 0) continue;
        peft->own_r[module] = 2 * peft->r;
        peft->own_alpha[module] = 2 * peft->alpha;
    }
}

static bl_status options_of_config(const bl_train_config *c, const bl_model_config *model,
                                   bl_lora_options *out)
{
    bl_peft_config peft = {.r = c->lora_r,
                           .alpha = c->lora_alpha,
                           .use_rslora = c->use_rslora,
                           .dropout = c->lora_dropout};

    BL_TRY(targets_of_config(c, model, &peft.targets));
    join_pieces(c, model, &peft);
    bl_lora_options_of_peft(&peft, out);
    return BL_OK;
}

/* init_adapter fixes r, alpha, rsLoRA and targets; keys with other values are rejected. */
static bl_status check_given(const bl_train_config *c, const bl_lora_options *asked,
                             const bl_lora_options *adapter)
{
    const char *key = NULL;
    char values[64] = "";
    if (bl_train_config_given(c, "lora_r") && asked->r != adapter->r) {
        key = "lora_r";
        snprintf(values, sizeof values, " %lld", (long long)asked->r);
    }
    if (bl_train_config_given(c, "lora_alpha") && asked->alpha != adapter->alpha) {
        key = "lora_alpha";
        snprintf(values, sizeof values, " %g", asked->alpha);
    }
    if (bl_train_config_given(c, "use_rslora") && asked->use_rslora != adapter->use_rslora)
        key = "use_rslora";
    if (bl_train_config_given(c, "lora_target_modules") &&
        (memcmp(asked->target, adapter->target, sizeof asked->target) != 0 ||
         memcmp(asked->table, adapter->table, sizeof asked->table) != 0))
        key = "lora_target_modules";
    if (!key) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "%s%s: differs from that of init_adapter %s (lora_r %lld, lora_alpha %g), which "
                   "fixes it; leave the key out",
                   key, values, c->init_adapter, (long long)adapter->r, (double)adapter->alpha);
}

/* A GPU's loss head does not support such a term. */
static bl_status check_tables(const bl_train_config *c, const bl_lora_options *options)
{
    if (c->device != BL_CONFIG_DEVICE_CUDA ||
        !(options->table[BL_TABLE_EMBEDDING] || options->table[BL_TABLE_HEAD]))
        return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "%s%s: device cuda is not supported with LoRA terms of the embedding or the "
                   "head; use device cpu, or target projections alone",
                   c->init_adapter ? "init_adapter " : "lora_target_modules",
                   c->init_adapter ? c->init_adapter : "");
}

/* As in PEFT, whose parameters have no dropout. */
static bl_status check_experts(const bl_lora_layout *layout)
{
    if (!bl_lora_has_experts(layout) || layout->options.dropout == 0) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "lora_dropout %g: it is not supported with LoRA on routed experts; use 0",
                   layout->options.dropout);
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
        bl_peft_modules modules = bl_model_peft_modules(model);
        BL_TRY(bl_peft_load_config(c->init_adapter, &modules, model->n_layers, &peft));
        bl_lora_options_of_peft(&peft, &adapter);
        if (is_training) BL_TRY(check_given(c, &options, &adapter));
        adapter.dropout = c->lora_dropout; /* the run's, not the old run's */
        options = adapter;
    }
    BL_TRY(check_tables(c, &options));
    if (c->adapter_layout == BL_ADAPTER_PER_EXPERT) options.layout = BL_PEFT_PER_EXPERT;
    bl_lora_layout_init(model, &options, out);
    bl_lora_layout_order_for(bl_train_config_act(c), out);
    return is_training ? check_experts(out) : BL_OK;
}

static bl_status check_same_names(const bl_train_config *c, const bl_peft_saved_names *names)
{
    const bl_string_list *list = &c->modules_to_save;
    bool is_same = list->n_items == names->n;

    for (int i = 0; is_same && i < names->n; i++)
        is_same = strcmp(list->items[i], names->name[i]) == 0;
    if (is_same) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "modules_to_save: differs from that of init_adapter %s, which fixes it; leave "
                   "the key out",
                   c->init_adapter);
}

static bl_status modules_of_config(const bl_train_config *c, const bl_model_config *model,
                                   bl_saved_modules *out)
{
    const bl_string_list *list = &c->modules_to_save;

    *out = (bl_saved_modules){.names = {0}};
    if (list->n_items == 0) return BL_OK;
    BL_TRY(saved_names(c, &out->names));
    if (model->arch->peft_layers)
        return BL_FAIL(BL_EUSAGE, "modules_to_save is not supported for %s; leave it out",
                       model->arch->title);
    return bl_trained_choose_modules(model, (const char *const *)list->items, list->n_items,
                                     BL_EUSAGE, "modules_to_save", &out->set);
}

/* Loading divides the final norm by logits_scaling, so it cannot be trained as stored. */
static bl_status check_scaling(const bl_model_config *model, const bl_saved_modules *modules)
{
    if (modules->names.n == 0 || model->logits_scaling == 0 ||
        modules->set.unit[model->n_layers].vectors == 0)
        return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "modules_to_save: the final norm of a model with logits_scaling is not "
                   "supported; leave it out");
}

/* For modules of init_adapter: the check of the configuration sees the key alone. */
static bl_status check_run(const bl_train_config *c)
{
    bl_losses losses;

    BL_TRY(bl_train_config_losses(c, &losses));
    if (!losses.has_reference) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "init_adapter %s: loss_type %s compares with the frozen model, of which its "
                   "modules_to_save replace a part; merge the adapter first (ballast merge)",
                   c->init_adapter, bl_loss_name(losses.term[0].loss));
}

bl_status bl_adapter_choose_modules(const bl_train_config *c, const bl_model_config *model,
                                    bool is_training, bl_saved_modules *out)
{
    bl_peft_modules modules = bl_model_peft_modules(model);
    bl_peft_config peft = {.r = 0};
    bl_status st;

    if (c->init_adapter)
        BL_TRY(bl_peft_load_config(c->init_adapter, &modules, model->n_layers, &peft));
    if (!c->init_adapter && is_training)
        st = modules_of_config(c, model, out);
    else
        st = bl_saved_modules_of_peft(&peft, model, c->init_adapter, out);
    if (st == BL_OK) st = check_scaling(model, out);
    if (st == BL_OK && is_training && c->init_adapter && c->modules_to_save.n_items > 0)
        st = check_same_names(c, &peft.saved);
    if (st == BL_OK && peft.saved.n > 0) st = check_run(c);
    if (st != BL_OK) bl_saved_modules_free(out);
    return st;
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
    if (st == BL_OK) st = bl_adapter_choose_rates(c, model, out, NULL);
    if (st != BL_OK) bl_trained_free(out);
    return st;
}
