/* SPDX-License-Identifier: Apache-2.0 */
/* full.c -- finetuning_type full: the keys that it does not support, or that have no effect with
 * it. */
#include <stdio.h>

#include "base/log.h"
#include "base/sizes.h"
#include "config/internal.h"

bool bl_train_config_is_full(const bl_train_config *config)
{
    return config->finetuning_type == BL_FINETUNING_FULL;
}

bl_dtype bl_train_config_moments(const bl_train_config *config)
{
    return config->optimizer_state_dtype == BL_OPTIMIZER_STATE_BF16 ? BL_BF16 : BL_F32;
}

/* On a CPU trained weights and state leave memory only when asked to: they are written back in
 * every step. On GPUs a plan chooses the tier, and the ratio with it. */
void config_resolve_full(bl_train_config *c)
{
    bool is_gpu = c->device == BL_CONFIG_DEVICE_CUDA;

    if (!bl_train_config_is_full(c)) return;
    if (!is_gpu && c->optimizer_tier == BL_OPTIMIZER_AUTO) c->optimizer_tier = BL_OPTIMIZER_DEVICE;
    if (c->optimizer_tier != BL_OPTIMIZER_AUTO && c->optimizer_ratio == BL_OPTION_AUTO)
        c->optimizer_ratio = 1;
    if (is_gpu) return;
    if (c->offload_compute_copy == BL_COPY_AUTO) c->offload_compute_copy = BL_COPY_ON_DEVICE;
    if (c->offload_ratio == BL_OPTION_AUTO) c->offload_ratio = 0;
}

/* Keys that must have their defaults, and why. */
static const struct {
    const char *key, *why;
} unsupported[] = {
    {"init_adapter", "it is LoRA's; merge the adapter first (ballast merge)"},
    {"adapter_dtype", "a model is written (model_dtype)"},
    {"adapter_layout", "a model is written"},
    {"lora_r", "it is LoRA's"},
    {"lora_alpha", "it is LoRA's"},
    {"lora_dropout", "it is LoRA's"},
    {"lora_target_modules", "it is LoRA's"},
    {"use_rslora", "it is LoRA's"},
    {"modules_to_save", "it is LoRA's (trainable_modules)"},
    {"base_format", "the weights are trained in fp32"},
    {"compute_bf16_modules", "no product is in fp8"},
    {"fp8_fast_accumulation", "no product is in fp8"},
    {"verify_base", "the weights change in every step"},
};

static bl_status check_lora(const bl_train_config *c)
{
    static const char *const lists[] = {"trainable_modules", "freeze"};
    const struct {
        const char *key;
        bool is_set;
    } keys[] = {{"optimizer_tier", c->optimizer_tier > BL_OPTIMIZER_DEVICE},
                {"optimizer_ratio", c->optimizer_ratio != BL_OPTION_AUTO && c->optimizer_ratio < 1},
                {"optimizer_state_dtype", config_differs(c, "optimizer_state_dtype")}};

    for (size_t i = 0; i < BL_COUNT(lists); i++)
        if (config_differs(c, lists[i]))
            return BL_FAIL(BL_EUSAGE,
                           "%s: finetuning_type lora trains LoRA terms over a frozen model "
                           "(lora_target_modules); use finetuning_type full, or leave it out",
                           lists[i]);
    if (config_differs(c, "model_dtype"))
        return BL_FAIL(BL_EUSAGE, "model_dtype f32: finetuning_type lora writes an adapter "
                                  "(adapter_dtype); leave it out");
    for (size_t i = 0; i < BL_COUNT(keys); i++)
        if (keys[i].is_set)
            return BL_FAIL(BL_EUSAGE,
                           "%s: LoRA's optimizer state is small and stays in memory, in fp32; it "
                           "is for finetuning_type full, leave it out",
                           keys[i].key);
    if (c->offload_compute_copy == BL_COPY_OFFLOADED)
        return BL_FAIL(BL_EUSAGE, "offload_compute_copy: finetuning_type lora has no copy of the "
                                  "weights; leave it out");
    if (config_differs(c, "embedding_learning_rate"))
        return BL_FAIL(BL_EUSAGE,
                       "embedding_learning_rate: finetuning_type lora has learning_rates, "
                       "such as embed_tokens=1e-5; use it, or finetuning_type full");
    return BL_OK;
}

/* modules_to_save replaces modules of the frozen base, which is the reference of a preference loss
 * and the base of other runs. */
static bl_status check_saved(const bl_train_config *c)
{
    bl_losses losses;

    if (c->modules_to_save.n_items == 0) return BL_OK;
    BL_TRY(bl_train_config_losses(c, &losses));
    if (losses.has_reference)
        return BL_FAIL(BL_EUSAGE,
                       "modules_to_save: loss_type %s compares with the frozen model, of which "
                       "modules_to_save replaces a part; leave it out, or use a loss without "
                       "reference",
                       bl_loss_name(losses.term[0].loss));
    return BL_OK;
}

/* The keys of the bf16 copy of the weights. */
static bl_status check_copy(const bl_train_config *c)
{
    if (c->offload_compute_copy != BL_COPY_OFFLOADED) return BL_OK;
    if (bl_train_config_act(c) == BL_F32)
        return BL_FAIL(BL_EUSAGE, "offload_compute_copy: products in fp32 take the weights "
                                  "themselves; leave it out, or use compute_dtype bf16");
    if (c->offload_ratio == 0)
        return BL_FAIL(BL_EUSAGE, "offload_compute_copy: no weights are outside of device memory; "
                                  "set offload_ratio, 1 for all of them, or leave it out");
    return BL_OK;
}

bl_status config_check_full(const bl_train_config *c)
{
    bl_losses losses;

    if (c->learning_rates.n_items > 0 && c->learning_rate == 0)
        return BL_FAIL(BL_EUSAGE, "learning_rates with learning_rate 0: all follow one schedule, "
                                  "relative to learning_rate; give a positive one");
    if (!bl_train_config_is_full(c)) {
        BL_TRY(check_saved(c));
        return check_lora(c);
    }
    if (c->compute_dtype == BL_COMPUTE_FP8)
        return BL_FAIL(BL_EUSAGE,
                       "finetuning_type full: compute_dtype fp8 is not supported: trained "
                       "weights are multiplied in bf16; use bf16");
    for (size_t i = 0; i < BL_COUNT(unsupported); i++)
        if (config_differs(c, unsupported[i].key))
            return BL_FAIL(BL_EUSAGE, "finetuning_type full: %s is not supported: %s; leave it out",
                           unsupported[i].key, unsupported[i].why);
    if (c->shard_size != c->ranks)
        return BL_FAIL(BL_EUSAGE,
                       "finetuning_type full: shard_size %lld is not supported: the weights are "
                       "sharded over all %lld ranks; leave it out",
                       (long long)c->shard_size, (long long)c->ranks);
    if (c->embedding_learning_rate != BL_OPTION_AUTO && c->learning_rate == 0)
        return BL_FAIL(BL_EUSAGE,
                       "embedding_learning_rate %g with learning_rate 0: both follow one schedule, "
                       "relative to learning_rate; give a positive one",
                       c->embedding_learning_rate);
    BL_TRY(check_copy(c));
    BL_TRY(bl_train_config_losses(c, &losses));
    if (losses.is_preference)
        return BL_FAIL(BL_EUSAGE,
                       "finetuning_type full: loss_type %s is not supported: preference "
                       "losses train LoRA adapters; use nll",
                       bl_loss_name(losses.term[0].loss));
    if (!bl_train_config_given(c, "learning_rate"))
        bl_log_warning(
            "learning_rate %g is a default for LoRA: full fine-tuning usually takes 1e-5 "
            "to 5e-5",
            c->learning_rate);
    return BL_OK;
}
