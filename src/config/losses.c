/* SPDX-License-Identifier: Apache-2.0 */
/* losses.c -- loss_type, loss_weights and the other keys of preference losses, checked. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "base/nearest.h"
#include "base/sizes.h"
#include "config/internal.h"

/* Losses of one group go together; sft goes with any but nll and kto. */
typedef enum loss_group { ALONE, WITH_REFERENCE, WITHOUT_REFERENCE } loss_group;

static const struct {
    const char *name;
    loss_group group;
} losses[BL_N_LOSSES] = {
    [BL_LOSS_NLL] = {"nll", ALONE},
    [BL_LOSS_SIGMOID] = {"sigmoid", WITH_REFERENCE},
    [BL_LOSS_HINGE] = {"hinge", WITH_REFERENCE},
    [BL_LOSS_IPO] = {"ipo", WITH_REFERENCE},
    [BL_LOSS_SIGMOID_NORM] = {"sigmoid_norm", WITH_REFERENCE},
    [BL_LOSS_ROBUST] = {"robust", WITH_REFERENCE},
    [BL_LOSS_APO_ZERO] = {"apo_zero", WITH_REFERENCE},
    [BL_LOSS_APO_DOWN] = {"apo_down", WITH_REFERENCE},
    [BL_LOSS_SFT] = {"sft", WITH_REFERENCE},
    [BL_LOSS_ORPO] = {"orpo", WITHOUT_REFERENCE},
    [BL_LOSS_SIMPO] = {"simpo", WITHOUT_REFERENCE},
    [BL_LOSS_KTO] = {"kto", ALONE},
};

const char *bl_loss_name(bl_loss loss)
{
    return losses[loss].name;
}

static bl_status find_loss(const char *name, bl_loss *out)
{
    const char *names[BL_N_LOSSES];

    for (int i = 0; i < BL_N_LOSSES; i++) {
        names[i] = losses[i].name;
        *out = (bl_loss)i;
        if (strcmp(name, names[i]) == 0) return BL_OK;
    }
    const char *nearest = bl_text_nearest(name, names, BL_N_LOSSES);
    return BL_FAIL(BL_EUSAGE,
                   "loss_type: '%s' is not one of nll, sigmoid, hinge, ipo, sigmoid_norm, robust, "
                   "apo_zero, apo_down, sft, orpo, simpo, kto%s%s%s",
                   name, nearest ? "; did you mean " : "", nearest ? nearest : "",
                   nearest ? "?" : "");
}

static bool has(const bl_losses *l, bl_loss loss)
{
    for (int i = 0; i < l->n_terms; i++)
        if (l->term[i].loss == loss) return true;
    return false;
}

static bool has_group(const bl_losses *l, loss_group group)
{
    for (int i = 0; i < l->n_terms; i++)
        if (losses[l->term[i].loss].group == group && l->term[i].loss != BL_LOSS_SFT) return true;
    return false;
}

static bl_status read_terms(const bl_train_config *config, bl_losses *out)
{
    const bl_string_list *names = &config->loss_type, *weights = &config->loss_weights;

    if (weights->n_items > 0 && weights->n_items != names->n_items)
        return BL_FAIL(BL_EUSAGE, "loss_weights: %lld numbers for %lld losses of loss_type",
                       (long long)weights->n_items, (long long)names->n_items);
    for (int64_t i = 0; i < names->n_items; i++) {
        bl_loss loss;
        double weight = 1;
        char *end = "";
        BL_TRY(find_loss(names->items[i], &loss));
        if (has(out, loss))
            return BL_FAIL(BL_EUSAGE, "loss_type: '%s' is named twice", names->items[i]);
        if (weights->n_items > 0) weight = strtod(weights->items[i], &end);
        if (*end || !isfinite(weight))
            return BL_FAIL(BL_EUSAGE, "loss_weights: expected numbers, got '%s'",
                           weights->items[i]);
        out->term[out->n_terms].loss = loss;
        out->term[out->n_terms++].weight = weight;
    }
    return BL_OK;
}

static bl_status check_terms(const bl_losses *l)
{
    if (l->n_terms > 1 && has_group(l, ALONE))
        return BL_FAIL(BL_EUSAGE,
                       "loss_type: %s cannot be combined with other losses; the likelihood of "
                       "chosen answers is sft",
                       has(l, BL_LOSS_NLL) ? "nll" : "kto");
    if (has_group(l, WITH_REFERENCE) && has_group(l, WITHOUT_REFERENCE))
        return BL_FAIL(BL_EUSAGE, "loss_type: orpo and simpo have no reference: they can be "
                                  "combined with sft and each other alone");
    if (has(l, BL_LOSS_ORPO) && has(l, BL_LOSS_SIMPO))
        return BL_FAIL(BL_EUSAGE, "loss_type: orpo and simpo cannot be combined");
    if (has(l, BL_LOSS_ROBUST) && !(l->label_smoothing < 0.5))
        return BL_FAIL(BL_EUSAGE, "label_smoothing %g: loss_type robust needs less than 0.5",
                       l->label_smoothing);
    return BL_OK;
}

/* Keys that would have no effect, or another one than elsewhere. */
static bl_status check_keys(const bl_train_config *c, const bl_losses *l)
{
    static const struct {
        const char *key;
        unsigned of; /* losses that have it, a bit each */
    } keys[] = {
        {"beta", ~(1u << BL_LOSS_NLL | 1u << BL_LOSS_SFT)},
        {"loss_weights", ~(1u << BL_LOSS_NLL)},
        {"label_smoothing", 1u << BL_LOSS_ROBUST | 1u << BL_LOSS_SIMPO},
        {"ld_alpha", ~(1u << BL_LOSS_NLL | 1u << BL_LOSS_SFT | 1u << BL_LOSS_ORPO |
                       1u << BL_LOSS_SIMPO | 1u << BL_LOSS_KTO)},
        {"simpo_gamma", 1u << BL_LOSS_SIMPO},
        {"desirable_weight", 1u << BL_LOSS_KTO},
        {"undesirable_weight", 1u << BL_LOSS_KTO},
    };
    unsigned given = 0;

    for (int i = 0; i < l->n_terms; i++) given |= 1u << l->term[i].loss;
    for (size_t i = 0; i < BL_COUNT(keys); i++)
        if (!(keys[i].of & given) && config_differs(c, keys[i].key))
            return BL_FAIL(BL_EUSAGE, "%s has no effect with loss_type %s: leave it out",
                           keys[i].key, bl_loss_name(l->term[0].loss));
    if (c->precompute_ref_log_probs && !l->has_reference)
        return BL_FAIL(BL_EUSAGE,
                       "precompute_ref_log_probs true: loss_type %s has no reference; leave it out",
                       bl_loss_name(l->term[0].loss));
    if (l->is_preference && c->packing != BL_PACKING_NONE)
        return BL_FAIL(BL_EUSAGE,
                       "packing %s is not of preferences: answers are documents of a micro-batch, "
                       "without padding, in any case; leave it out",
                       bl_packing_name(c->packing));
    if (l->is_unpaired && c->per_device_train_batch_size < 2)
        return BL_FAIL(
            BL_EUSAGE,
            "per_device_train_batch_size %lld: loss_type kto compares rows with others of "
            "their micro-batch: at least 2 rows",
            (long long)c->per_device_train_batch_size);
    if (l->is_preference && c->train_on_inputs)
        return BL_FAIL(BL_EUSAGE, "train_on_inputs true: preferences are of answers, not of "
                                  "prompts; leave it out");
    return BL_OK;
}

bl_status bl_train_config_losses(const bl_train_config *config, bl_losses *out)
{
    *out = (bl_losses){.beta = config->beta,
                       .label_smoothing = config->label_smoothing,
                       .ld_alpha = config->ld_alpha,
                       .simpo_gamma = config->simpo_gamma,
                       .desirable_weight = config->desirable_weight,
                       .undesirable_weight = config->undesirable_weight};
    BL_TRY(read_terms(config, out));
    BL_TRY(check_terms(out));
    out->is_preference = !has(out, BL_LOSS_NLL);
    out->is_unpaired = has(out, BL_LOSS_KTO);
    out->learns_prompt = has(out, BL_LOSS_ORPO);
    out->has_reference = out->is_preference && !has_group(out, WITHOUT_REFERENCE);
    return check_keys(config, out);
}

bl_data_format bl_losses_data_format(const bl_losses *l, bl_data_format given)
{
    if (given != BL_DATA_AUTO || !l->is_preference) return given;
    return l->is_unpaired ? BL_DATA_UNPAIRED_PREFERENCE : BL_DATA_PREFERENCE;
}
