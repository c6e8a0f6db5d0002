/* SPDX-License-Identifier: Apache-2.0 */
/* preference.h -- the metrics of preference losses, by TRL's names. */
#ifndef BALLAST_TRAIN_PREFERENCE_H
#define BALLAST_TRAIN_PREFERENCE_H

#include <stdbool.h>

enum { BL_PREFERENCE_N_METRICS = 7 };

typedef struct bl_preference_metrics {
    bool is_there; /* false: the run has no preferences; the rest is 0 */
    /* Of a step: the mean over its micro-batches; of an evaluation: the mean over its rows. */
    double step_loss, evaluation_loss;
    double value[BL_PREFERENCE_N_METRICS]; /* NaN: the losses, or these rows, do not have it */
} bl_preference_metrics;

/* "rewards/chosen", "rewards/rejected", "rewards/accuracies", "rewards/margins", "logps/chosen",
 * "logps/rejected", "kl"; the places of two of them. */
enum { BL_METRIC_ACCURACIES = 2, BL_METRIC_MARGINS = 3 };
const char *bl_preference_metric_name(int index);

#endif
