/* SPDX-License-Identifier: Apache-2.0 */
/* summary.c -- sums over micro-batches and ranks as means. */
#include "train/preference/losses.h"

#include <math.h>

static const char *const names[BL_PREFERENCE_N_METRICS] = {"rewards/chosen",
                                                           "rewards/rejected",
                                                           "rewards/accuracies",
                                                           "rewards/margins",
                                                           "logps/chosen",
                                                           "logps/rejected",
                                                           "kl"};

const char *bl_preference_metric_name(int index)
{
    return names[index];
}

static double mean(double sum, double n)
{
    return n > 0 ? sum / n : NAN;
}

bl_preference_metrics bl_preference_summarize(const bl_losses *losses, const bl_preference_sums *s)
{
    double chosen = mean(s->rewards_chosen, s->n_chosen),
           rejected = mean(s->rewards_rejected, s->n_rejected),
           start = bl_preference_loss_at_start(losses);
    bool is_unpaired = losses->is_unpaired;

    return (bl_preference_metrics){.is_there = true,
                                   .step_loss = mean(s->loss_by_micro, s->n_micro) + start,
                                   .evaluation_loss = mean(s->loss_by_row, s->n_rows) + start,
                                   .value = {chosen, rejected,
                                             is_unpaired ? NAN : mean(s->n_accurate, s->n_rows),
                                             chosen - rejected, mean(s->logps_chosen, s->n_chosen),
                                             mean(s->logps_rejected, s->n_rejected),
                                             is_unpaired ? mean(s->kl, s->n_micro) : NAN}};
}
