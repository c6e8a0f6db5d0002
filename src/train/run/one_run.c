/* SPDX-License-Identifier: Apache-2.0 */
/* one_run.c -- the steps of each run of a training: its rows, its output_dir, its end. */
#include <stdlib.h>

#include "trained/rates.h"
#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "trained/choose.h"
#include "train/data/sampler.h"
#include "train/report/events.h"
#include "train/run/runs.h"

bl_status bl_job_open_rows(bl_job *job, bl_host_memory *host)
{
    const bl_train_config *c = job->config;

    BL_TRY(
        bl_run_data_open_training(c, &job->model->config, host, job->topology.n_here, &job->data));
    bl_job_measure_rows(job);
    if (job->model->is_trained) return BL_OK;
    BL_TRY(bl_adapter_choose_lora(c, &job->model->config, true, &job->lora));
    BL_TRY(bl_adapter_choose_modules(c, &job->model->config, true, &job->modules));
    bl_trained_set *set = job->modules.names.n > 0 ? &job->modules.set : NULL;
    BL_TRY(bl_adapter_choose_rates(c, &job->model->config, set, &job->lora));
    if (job->modules.names.n == 0 || !job->lead) return BL_OK;
    return BL_FAIL(BL_EUSAGE,
                   "%s: modules_to_save replaces modules of the base, which several runs share: "
                   "start them one after the other",
                   c->output_dir);
}

bl_status bl_job_compare_processes(bl_job *job, const bl_output *output)
{
    BL_TRY(bl_job_identify(job));
    if (!job->launch) return BL_OK;
    BL_TRY(bl_output_check_lock(output));
    BL_TRY(bl_output_failure(output, bl_job_check_processes(job, job->config->output_dir)));
    return bl_job_compare_products(job);
}

/* A resumed run keeps its earlier event files: TensorBoard drops their later steps. */
static bl_status open_events(const bl_training *training, bl_output *output)
{
    const bl_start *start = &training->start;
    bl_events *events;

    BL_TRY(bl_output_open_events(training->config, output, start->step > 0 ? start->step + 1 : 0,
                                 &events));
    bl_metrics_report_to(output->metrics, events);
    return BL_OK;
}

static bl_status begin_output(bl_training *training, bl_output *output)
{
    const bl_job *job = &training->job;
    const bl_train_config *c = job->config;
    char *path = NULL;

    /* The last one only for a run that writes a model. */
    static const char *const added[] = {BL_OUTPUT_CONFIG, BL_OUTPUT_METRICS, BL_OUTPUT_REPORT,
                                        BL_OUTPUT_MODEL};

    BL_TRY(bl_training_start_over(training, output));
    BL_TRY(bl_output_reserve_report(c->output_dir, output));
    BL_TRY(bl_output_list(c->output_dir, output, added,
                          BL_COUNT(added) - (job->model->is_trained ? 0 : 1)));
    BL_TRY(bl_path_join(c->output_dir, BL_OUTPUT_CONFIG, &path));
    bl_status st = bl_train_config_write_resolved(c, path);
    free(path);
    if (st != BL_OK) return st;
    BL_TRY(bl_path_join(c->output_dir, BL_OUTPUT_METRICS, &path));
    st = bl_metrics_open(path, training->start.metrics_bytes, c->logging_steps, &output->metrics);
    free(path);
    return st == BL_OK ? open_events(training, output) : st;
}

/* For epochs whose last step is shorter. */
static void print_short_steps(const bl_training *training)
{
    const bl_train_config *c = training->config;
    int64_t n = training->job.data.train.n, batch = bl_train_batch_rows(c),
            n_steps = bl_ceil_div(n, batch);

    if (c->epoch_end != BL_EPOCH_SHORT_STEP || n % batch == 0 || training->total_steps < n_steps)
        return;
    bl_log_info("steps per epoch: %lld of %lld rows and a last one of %lld (epoch_end short_step)",
                (long long)(n_steps - 1), (long long)batch, (long long)(n % batch));
}

bl_status bl_training_begin(bl_training *training, bl_output *output)
{
    bl_job *job = &training->job;

    if (job->launch) BL_TRY(bl_job_share_start(job, &training->start));
    training->total_steps = bl_train_total_steps(job->config, job->data.train.n);
    if (job->topology.first_here == 0) print_short_steps(training);
    /* After this barrier no rank can reject the run: an overwritten run may be removed. */
    if (job->launch) BL_TRY(bl_job_meet(job));
    if (job->topology.first_here > 0)
        return bl_dir_lock_look(job->config->output_dir, &output->lock);
    BL_TRY(bl_output_check_lock(output));
    return bl_output_failure(output, begin_output(training, output));
}

bl_status bl_training_finish(bl_training *training, bl_output *output)
{
    const char *dir = training->config->output_dir;
    bool is_written;

    BL_TRY(bl_output_check_lock(output));
    BL_TRY(bl_output_failure(output, bl_training_write_readme(training, &output->outcome, dir)));
    BL_TRY(bl_training_write_report(training, output, &is_written));
    bl_metrics_print_end(output->metrics);
    bool is_model = training->job.model->is_trained;
    const char *what = is_model ? "model" : "adapter", *below = is_model ? "/" BL_OUTPUT_MODEL : "";
    if (output->outcome.adapter_step < output->outcome.n_steps)
        bl_log_info("%s of step %lld, which had the lowest validation loss, written to %s%s", what,
                    (long long)output->outcome.adapter_step, dir, below);
    else
        bl_log_info("%s written to %s%s", what, dir, below);
    return BL_OK;
}

void bl_train_run_close(bl_train_run_state *run)
{
    bl_job_close(&run->training.job);
    bl_output_close(&run->output); /* the lock last */
    free(run->training.start.dir);
    free(run->training.checkpoint_dir);
    *run = (bl_train_run_state){.status = BL_OK};
}
