/* SPDX-License-Identifier: Apache-2.0 */
/* run.c -- a training, from its configuration to its end. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "trained/choose.h"
#include "train/run/runs.h"

/* What follows in the log is of that run, if there are several. */
static bl_train_run_state *enter(bl_train_run_state *runs, int n, int i)
{
    bl_log_set_label(n > 1 && i >= 0 ? runs[i].training.name : NULL);
    return i >= 0 ? &runs[i] : NULL;
}

static bl_status close_trace(bl_job *job)
{
    bl_trace *trace = job->trace;
    job->trace = NULL;
    return bl_trace_close(trace);
}

/* Evaluates the adapter that was written by `stored`, if that takes no more than training by `job`
 * has taken. */
static bl_status evaluate_job(const bl_job *job, bl_job *stored, bl_outcome *outcome)
{
    const bl_memory_ledger *needed = &stored->plan.memory, *taken = &job->plan.memory;

    BL_TRY(bl_adapter_choose_lora(stored->config, &job->model->config, false, &stored->lora));
    BL_TRY(bl_adapter_choose_modules(stored->config, &job->model->config, false, &stored->modules));
    bl_plan_input input = bl_job_plan_input(stored);
    BL_TRY(bl_job_choose_plan(stored, &input));
    if (needed->total > taken->total || needed->device > taken->device) {
        bl_log_info("the adapter was not evaluated on the base as stored, which needs more memory "
                    "than training did; "
                    "ballast eval --base_format stored does it");
        return BL_OK;
    }
    bl_log_info("evaluating the adapter on the base as stored, too (eval_stored_base)");
    BL_TRY(bl_job_evaluate(stored, &outcome->stored));
    bl_log_info("validation loss with the adapter: %.4f as trained, %.4f on the base as stored",
                outcome->trained.loss, outcome->stored.loss);
    return BL_OK;
}

/* On the formats that job->model now has. */
static bl_status evaluate_written(const bl_job *job, bl_outcome *outcome)
{
    bl_train_config config = *job->config;
    config.base_format = BL_BASE_STORED;
    config.init_adapter = config.output_dir;
    config.offload_ratio = 0.0; /* a measurement writes no page files */
    config.offload_tier = BL_OFFLOAD_HOST;
    config.offload_dir = NULL;
    if (config.compute_dtype == BL_COMPUTE_FP8) config.compute_dtype = BL_COMPUTE_BF16;
    bl_job stored = {.config = &config,
                     .topology = job->topology,
                     .hooks = job->hooks,
                     .model = job->model,
                     .data.validation = job->data.validation};
    bl_status st = evaluate_job(job, &stored, outcome);
    free(stored.bf16_matrices);
    bl_saved_modules_free(&stored.modules);
    return st;
}

/* Whether preferences are relative to an adapter; evaluations compare with the base. */
static bool compares_with_adapter(const bl_train_config *c)
{
    bl_losses losses = {0};
    (void)bl_train_config_losses(c, &losses); /* the configuration is valid */
    return c->init_adapter && losses.has_reference;
}

/* The losses of the adapter on the checkpoint as stored, as PEFT and vLLM use it, for the README.
 * Processes have spent their communicator. */
static bl_status evaluate_stored_base(bl_training *training, bl_output *output)
{
    bl_job *job = &training->job;
    bl_outcome *outcome = &output->outcome;

    if (!job->config->eval_stored_base || !job->data.validation.set || job->launch ||
        !bl_model_base_is_quantized(&job->base_formats))
        return BL_OK;
    if (compares_with_adapter(job->config)) {
        bl_log_info("the adapter was not evaluated on the base as stored: its preferences are "
                    "relative to init_adapter");
        return BL_OK;
    }
    bl_status st = bl_model_set_format(job->model, BL_BASE_STORED);
    if (st == BL_OK) st = evaluate_written(job, outcome);
    if (st == BL_OK && outcome->stored.rows > 0) {
        BL_TRY(bl_output_check_lock(output));
        st = bl_training_write_readme(training, outcome, job->config->output_dir);
    }
    if (st == BL_OK) return BL_OK;
    /* The adapter that was read back went with the folder. */
    bl_error_prefix(st, "the adapter is written; eval_stored_base");
    return bl_output_failure(output, st);
}

static void print_memory(const bl_job *job, const bl_peak_memory *peak)
{
    const bl_memory_ledger *m = &job->expected;
    int64_t gpu = bl_memory_gpu_bytes(m, job->topology.n_here),
            shared = bl_host_memory_bytes(job->host_memory);

    bl_log_info("memory measured: peak %.4g GB anonymous, predicted %.4g GB", bl_gb(peak->host),
                bl_gb(bl_memory_own_bytes(m, &job->topology)));
    if (peak->on_host > 0)
        bl_log_info("memory measured, of the largest of %d processes; those of this host: %.4g GB "
                    "anonymous together",
                    job->topology.n_ranks, bl_gb(peak->on_host));
    if (shared > 0)
        bl_log_info("memory measured, shared by the %d processes of this host: %.4g GB, predicted "
                    "%.4g GB",
                    job->topology.n_on_host, bl_gb(shared), bl_gb(m->shared));
    if (gpu > 0)
        bl_log_info("GPU memory measured: peak %.6f GB, predicted %.6f GB", bl_gb(peak->gpu),
                    bl_gb(gpu));
}

static bl_status print_next(const bl_job *job)
{
    char *command;

    BL_TRY(bl_training_next_command(job, job->config->output_dir, &command));
    bl_log_info("next:");
    bl_log_info(BL_LOG_VERBATIM "%s", command);
    free(command);
    return BL_OK;
}

/* The model, and the rows and the adapter's sizes of each run. */
static bl_status open_runs(bl_train_run_state *runs, int n)
{
    bl_job *lead = &runs[0].training.job;

    BL_TRY(bl_job_place_ranks(lead));
    for (int i = 0; i < n; i++) {
        bl_job *job = &enter(runs, n, i)->training.job;
        if (i > 0) bl_job_borrow(job, lead);
        BL_TRY(bl_job_check_paths(job));
        if (job->topology.first_here == 0)
            BL_TRY(bl_output_open(job->config->output_dir, &runs[i].output));
    }
    enter(runs, n, -1);
    BL_TRY(bl_job_open_model(lead));
    for (int i = 0; i < n; i++) {
        bl_job *job = &enter(runs, n, i)->training.job;
        if (i > 0) bl_job_borrow(job, lead);
        BL_TRY(bl_job_open_rows(job, job->host_memory));
    }
    enter(runs, n, -1);
    bl_job_print_base_formats(lead, "training");
    return BL_OK;
}

static bl_status plan(bl_train_run_state *runs, int n)
{
    const bl_training **trainings = calloc((size_t)n, sizeof *trainings);

    if (!trainings) return BL_FAIL(BL_ENOMEM, "%d runs", n);
    for (int i = 0; i < n; i++) trainings[i] = &runs[i].training;
    bl_status st = bl_trainings_plan(trainings, n, NULL, &runs[0].training.job);
    free(trainings);
    return st;
}

static bl_status prepare_runs(bl_train_run_state *runs, int n)
{
    bl_job *lead = &runs[0].training.job;

    for (int i = 0; i < n; i++)
        BL_TRY(bl_job_compare_processes(&enter(runs, n, i)->training.job, &runs[i].output));
    enter(runs, n, -1);
    BL_TRY(plan(runs, n));
    BL_TRY(bl_job_open_trace(&runs[0].training.job));
    for (int i = 0; i < n; i++) {
        if (i > 0) bl_job_borrow(&runs[i].training.job, lead);
        bl_train_run_state *run = enter(runs, n, i);
        BL_TRY(bl_training_find_start(&run->training, &run->output));
        BL_TRY(bl_training_begin(&run->training, &run->output));
    }
    enter(runs, n, -1);
    return BL_OK;
}

/* "out/a   100 steps  loss 1.2345  validation 1.3456", the lowest validation loss, or else the
 * lowest training loss, marked. */
static void print_table(const bl_train_run_state *runs, int n)
{
    int best = -1, width = 0;
    double least = INFINITY;

    for (int i = 0; i < n; i++) {
        const bl_outcome *o = &runs[i].output.outcome;
        bool is_validated = runs[i].training.job.data.validation.set != NULL;
        double loss = is_validated ? o->trained.loss : o->last_loss;
        width = (int)bl_max_i64(width, (int64_t)strlen(runs[i].training.name));
        if (runs[i].status != BL_OK || !(loss < least)) continue;
        least = loss;
        best = i;
    }
    for (int i = 0; i < n; i++) {
        const bl_outcome *o = &runs[i].output.outcome;
        char validation[64] = "", rung[64] = "";
        if (o->rung > 0)
            snprintf(rung, sizeof rung, " of %lld, stopped at a rung",
                     (long long)runs[i].training.total_steps);
        if (runs[i].training.job.data.validation.set)
            snprintf(validation, sizeof validation, "  validation %.4f", o->trained.loss);
        if (runs[i].status != BL_OK)
            bl_log_info(BL_LOG_VERBATIM "%-*s  failed", width, runs[i].training.name);
        else
            bl_log_info(BL_LOG_VERBATIM "%-*s  %lld steps%s  loss %.4f%s%s", width,
                        runs[i].training.name, (long long)o->n_steps, rung, o->last_loss,
                        validation, i == best ? "  lowest" : "");
    }
}

static bl_status finish_runs(bl_train_run_state *runs, int n)
{
    for (int i = 0; i < n; i++) {
        if (runs[i].status != BL_OK) continue;
        BL_TRY(bl_training_finish(&enter(runs, n, i)->training, &runs[i].output));
        BL_TRY(evaluate_stored_base(&runs[i].training, &runs[i].output));
    }
    enter(runs, n, -1);
    if (n == 1) return print_next(&runs[0].training.job);
    print_table(runs, n);
    return BL_OK;
}

/* After a run of several has failed, the others have ended well. */
static bool has_results(const bl_train_run_state *runs, int n, bl_status st)
{
    bool has_failure = false;
    for (int i = 0; i < n; i++) has_failure |= runs[i].status != BL_OK;
    return st == BL_OK || (n > 1 && (st == BL_ENUMERIC || st == BL_EINPUT) && has_failure);
}

/* Of each run; returns the failure that this thread has. */
static bl_status report_stopped(bl_train_run_state *runs, int n)
{
    bl_error error;
    bool is_written;

    bl_error_save(&error, BL_ESTOPPED);
    for (int i = 0; i < n; i++)
        if (runs[i].output.metrics &&
            bl_training_write_report(&runs[i].training, &runs[i].output, &is_written) != BL_OK)
            bl_log_warning("no report: %s", bl_error_text());
    return bl_error_restore(&error);
}

static bl_status train(bl_train_run_state *runs, int n)
{
    bl_job *lead = &runs[0].training.job;
    bl_peak_memory peak = {0};
    bl_error error;

    BL_TRY(open_runs(runs, n));
    BL_TRY(prepare_runs(runs, n));
    bl_status st = bl_training_run_ranks(runs, n, NULL, &peak);
    print_memory(lead, &peak);
    if (st == BL_ESTOPPED) return report_stopped(runs, n);
    if (!has_results(runs, n, st)) return st;
    bl_error_save(&error, st);
    BL_TRY(close_trace(lead));
    if (lead->topology.first_here == 0) BL_TRY(finish_runs(runs, n));
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

bl_status bl_train_run_all(const bl_train_config *const *configs, int n, bl_launch *launch,
                           const struct bl_pager_hooks *hooks)
{
    bl_train_run_state *runs = calloc((size_t)n, sizeof *runs);
    bl_error error;

    if (!runs) return BL_FAIL(BL_ENOMEM, "%d runs", n);
    for (int i = 0; i < n; i++)
        runs[i].training =
            (bl_training){.config = configs[i],
                          .name = bl_train_config_name(configs, n, i),
                          .job = {.config = configs[i], .launch = launch, .hooks = hooks}};
    bl_status st = train(runs, n);
    bl_error_save(&error, st);
    bl_log_set_label(NULL);
    for (int i = n - 1; i >= 0; i--) bl_train_run_close(&runs[i]); /* the lead last */
    free(runs);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

bl_status bl_train_run(const bl_train_config *config, bl_launch *launch,
                       const struct bl_pager_hooks *hooks)
{
    return bl_train_run_all(&config, 1, launch, hooks);
}
