/* SPDX-License-Identifier: Apache-2.0 */
/* reports.c -- report_to and logging_dir. */
#include <string.h>

#include "base/log.h"
#include "base/sizes.h"
#include "config/internal.h"

/* Trackers of transformers whose files Ballast does not write, and what reads Ballast's. */
static const struct {
    const char *name, *instead;
} trackers[] = {
    {"wandb", "give tensorboard; `wandb sync --sync-tensorboard DIR` uploads its files"},
    {"mlflow", "log metrics.jsonl with mlflow.log_metrics, one call per line"},
};

static bl_status refuse_tracker(const char *name)
{
    for (size_t i = 0; i < BL_COUNT(trackers); i++)
        if (strcmp(trackers[i].name, name) == 0)
            return BL_FAIL(BL_EUSAGE, "report_to: %s is not supported: %s (docs/tutorial.md)", name,
                           trackers[i].instead);
    return BL_FAIL(
        BL_EUSAGE,
        "report_to: expected tensorboard, all or none, got '%s'; metrics.jsonl has every "
        "step for other trackers (docs/tutorial.md)",
        name);
}

bl_status config_check_reports(const bl_train_config *config)
{
    const bl_string_list *list = &config->report_to;

    for (int64_t i = 0; i < list->n_items; i++) {
        const char *name = list->items[i];
        bool is_alone = strcmp(name, "all") == 0 || strcmp(name, "none") == 0;
        if (is_alone && list->n_items > 1)
            return BL_FAIL(BL_EUSAGE, "report_to: %s cannot be combined with other names", name);
        if (!is_alone && strcmp(name, "tensorboard") != 0) return refuse_tracker(name);
    }
    if (config->logging_dir && !bl_train_config_reports_to_tensorboard(config))
        bl_log_warning("logging_dir has no effect without report_to: tensorboard");
    return BL_OK;
}

bool bl_train_config_reports_to_tensorboard(const bl_train_config *config)
{
    const bl_string_list *list = &config->report_to;
    return list->n_items > 0 && strcmp(list->items[0], "none") != 0;
}
