/* SPDX-License-Identifier: Apache-2.0 */
/* output.c -- output_dir: its lock, the list of files that runs wrote there, and the files in it
 * that are incomplete. */
#include <stdlib.h>

#include "base/sizes.h"
#include "train/report/events.h"
#include "train/report/report.h"
#include "train/training_internal.h"

static const char *const names[] = {BL_OUTPUT_ADAPTER,  BL_OUTPUT_ADAPTER_CONFIG, BL_OUTPUT_README,
                                    BL_OUTPUT_METRICS,  BL_OUTPUT_CONFIG,         BL_OUTPUT_REPORT,
                                    BL_OUTPUT_REFERENCE};

const char *bl_output_name(size_t index)
{
    return index < BL_COUNT(names) ? names[index] : NULL;
}

static bl_status check_names(const char *dir, const bl_file_list *files)
{
    for (size_t i = 0; i < BL_COUNT(names); i++) {
        char *path;
        BL_TRY(bl_path_join(dir, names[i], &path));
        bl_status st = bl_file_list_check(files, path);
        free(path);
        BL_TRY(st);
    }
    return BL_OK;
}

static bl_status open_list(const char *dir, bl_output *output)
{
    BL_TRY(bl_file_list_open(dir, &output->files));
    if (!bl_file_list_was_there(output->files)) BL_TRY(bl_output_adopt(dir, output->files));
    return check_names(dir, output->files);
}

bl_status bl_output_open(const char *dir, bl_output *output)
{
    bl_status st = bl_dir_create(dir);
    if (st != BL_OK) return bl_error_prefix(st == BL_EINPUT ? BL_EUSAGE : st, "output_dir");
    BL_TRY(bl_dir_lock_acquire(dir, &output->lock));
    st = open_list(dir, output);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "output_dir");
}

bl_status bl_output_list(const char *dir, bl_output *output, const char *const *added, size_t n)
{
    char *paths[BL_COUNT(names)] = {NULL};
    bl_status st = BL_OK;

    for (size_t i = 0; i < n && st == BL_OK; i++) st = bl_path_join(dir, added[i], &paths[i]);
    if (st == BL_OK) st = bl_file_list_add(output->files, (const char *const *)paths, n);
    for (size_t i = 0; i < n; i++) free(paths[i]);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "output_dir");
}

bl_status bl_output_open_events(const bl_train_config *config, bl_output *output,
                                int64_t first_step, bl_events **events)
{
    char *dir = NULL, *path = NULL;
    bl_status st;

    *events = NULL;
    if (!bl_train_config_reports_to_tensorboard(config)) return BL_OK;
    BL_TRY(config->logging_dir ? bl_text_format(&dir, "%s", config->logging_dir)
                               : bl_path_join(config->output_dir, BL_OUTPUT_RUNS, &dir));
    BL_TRY_GOTO(st, done, bl_dir_create(dir));
    BL_TRY_GOTO(st, done, bl_events_path(dir, &path));
    if (!config->logging_dir) /* others are never deleted */
        BL_TRY_GOTO(st, done, bl_file_list_add(output->files, (const char *const[]){path}, 1));
    BL_TRY_GOTO(st, done, bl_events_open(path, first_step, bl_wall_s(), events));
done:
    if (st == BL_EINPUT) st = BL_EUSAGE; /* not a directory */
    if (st != BL_OK) bl_error_prefix(st, config->logging_dir ? "logging_dir" : "output_dir");
    free(path);
    free(dir);
    return st;
}

bl_status bl_output_reserve_report(const char *dir, bl_output *output)
{
    char *path;

    BL_TRY(bl_path_join(dir, BL_OUTPUT_REPORT, &path));
    bl_status st = bl_file_list_reserve(output->files, path);
    free(path);
    return st;
}

bl_status bl_training_write_report(const bl_training *training, const bl_output *output,
                                   bool *is_written)
{
    const bl_train_config *c = training->config;
    const bl_report report = {.model = c->model_name_or_path, .total_steps = training->total_steps};
    char *log = NULL, *path = NULL;
    bl_status st;

    *is_written = false;
    BL_TRY(bl_output_check_lock(output));
    BL_TRY_GOTO(st, done, bl_path_join(c->output_dir, BL_OUTPUT_METRICS, &log));
    BL_TRY_GOTO(st, done, bl_path_join(c->output_dir, BL_OUTPUT_REPORT, &path));
    st = bl_report_write(log, bl_metrics_bytes(output->metrics), &report, path, is_written);
done:
    free(path);
    free(log);
    return bl_output_failure(output, st);
}

bl_status bl_output_check_lock(const bl_output *output)
{
    if (!output->lock) return BL_OK;
    bl_status st = bl_dir_lock_check(output->lock);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "output_dir");
}

bl_status bl_output_failure(const bl_output *output, bl_status st)
{
    bl_error error;

    if (st == BL_OK) return BL_OK;
    bl_error_save(&error, st);
    bl_status lost = bl_output_check_lock(output);
    return lost == BL_OK ? bl_error_restore(&error) : lost;
}

void bl_output_abort_saving(bl_output *output)
{
    if (bl_output_check_lock(output) == BL_OK)
        bl_checkpoint_abort(output->saving);
    else
        bl_checkpoint_leave(output->saving);
    output->saving = NULL;
}

void bl_output_close(bl_output *output)
{
    bl_metrics_close(output->metrics);
    bl_output_abort_saving(output);
    bl_file_list_close(output->files);
    bl_dir_lock_release(output->lock);
}
