/* SPDX-License-Identifier: Apache-2.0 */
/* run.c -- a training, from its configuration to its end. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "adapter/choose.h"
#include "ops/gemm.h"
#include "train/data/sampler.h"
#include "train/report/events.h"
#include "train/training_internal.h"

static double trainable_m(const bl_job *job)
{
    return (double)(job->lora.n_floats * job->model->config.n_layers) * 1e-6;
}

static bl_status print_model(const bl_job *job)
{
    const bl_train_config *c = job->config;
    char products[BL_CUDA_GEMM_TEXT_BYTES], trained[64] = "all trainable";

    BL_TRY(bl_products_describe(job, products));
    bl_log_info("products: %s", products);
    if (c->device == BL_CONFIG_DEVICE_CPU && !bl_train_config_given(c, "compute_dtype") &&
        bl_cpu_gemm_has_bf16())
        bl_log_info("products are in fp32; this processor has AVX512-BF16: compute_dtype bf16 "
                    "is faster and rounds more");
    if (!job->model->is_trained)
        snprintf(trained, sizeof trained, "LoRA r %lld, %.2f M trainable",
                 (long long)job->lora.options.r, trainable_m(job));
    bl_log_info("model: %.1f M parameters, %lld layers; %s; %d rank%s x %lld thread%s, shards of "
                "%lld",
                (double)bl_model_config_n_params(&job->model->config) * 1e-6,
                (long long)job->model->config.n_layers, trained, job->topology.n_ranks,
                job->topology.n_ranks == 1 ? "" : "s", (long long)c->threads,
                c->threads == 1 ? "" : "s", (long long)c->shard_size);
    return BL_OK;
}

/* What follows in the log is of that run, if there are several. */
static bl_train_run_state *enter(bl_train_run_state *runs, int n, int i)
{
    bl_log_set_label(n > 1 && i >= 0 ? runs[i].training.name : NULL);
    return i >= 0 ? &runs[i] : NULL;
}

/* The event files of a run that is resumed stay: TensorBoard drops their later steps. */
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

    /* The last one in a run that writes a model. */
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

/* That the processes of a job are in the same one, before they plan together. */
static bl_status compare_processes(bl_job *job, const bl_output *output)
{
    BL_TRY(bl_job_identify(job));
    if (!job->launch) return BL_OK;
    BL_TRY(bl_output_check_lock(output));
    BL_TRY(bl_output_failure(output, bl_job_check_processes(job, job->config->output_dir)));
    return bl_job_compare_products(job);
}

static bl_status open_trace(bl_training *training)
{
    bl_job *job = &training->job;
    char *path = NULL;

    if (!job->config->trace) return BL_OK;
    BL_TRY(bl_job_trace_path(job, &path));
    bl_status st = bl_trace_open(path, job->topology.first_here, job->topology.n_here, &job->trace);
    free(path);
    return st;
}

static bl_status close_trace(bl_job *job)
{
    bl_trace *trace = job->trace;
    job->trace = NULL;
    return bl_trace_close(trace);
}

/* Where steps end with an epoch, and are not all of the same size. */
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

/* output_dir was locked before the data were read: by now another run may have it, or no run. */
static bl_status prepare_output(bl_training *training, bl_output *output)
{
    bl_job *job = &training->job;

    BL_TRY(bl_output_check_lock(output));
    BL_TRY(bl_output_failure(output, bl_training_prepare_resume(training, output)));
    training->total_steps = bl_train_total_steps(job->config, job->data.train.n);
    if (job->topology.first_here == 0) print_short_steps(training);
    /* After this meeting no rank can reject the run: an overwritten run may be removed. */
    if (job->launch) BL_TRY(bl_job_meet(job));
    if (job->topology.first_here > 0)
        return bl_dir_lock_look(job->config->output_dir, &output->lock);
    BL_TRY(bl_output_check_lock(output));
    return bl_output_failure(output, begin_output(training, output));
}

/* Evaluates the adapter that was written by `stored`, if that takes no more than training by `job`
 * has taken. */
static bl_status evaluate_job(const bl_job *job, bl_job *stored, bl_outcome *outcome)
{
    const bl_memory_ledger *needed = &stored->plan.memory, *taken = &job->plan.memory;

    BL_TRY(bl_adapter_choose_lora(stored->config, &job->model->config, false, &stored->lora));
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

static bl_status open_rows(bl_job *job)
{
    const bl_train_config *c = job->config;

    BL_TRY(bl_run_data_open_training(c, &job->model->config, job->host_memory, job->topology.n_here,
                                     &job->data));
    bl_job_measure_rows(job);
    if (job->model->is_trained) return BL_OK;
    return bl_adapter_choose_lora(c, &job->model->config, true, &job->lora);
}

/* The plan has room for micro-batches as long as the longest row allows. */
static void print_expected(const bl_job *job, const bl_plan_rows *rows)
{
    int64_t bound = job->plan.memory.total, expected = job->expected.total;

    if (rows->n_micro > 0 && expected < bound / 100 * 99)
        bl_log_info("memory expected with these rows: %.4g GB; micro-batches have %.0f tokens on "
                    "average, %lld at most, of %lld",
                    bl_gb(expected), rows->mean, (long long)rows->largest,
                    (long long)job->plan.pass.T_max);
}

static bl_plan_run plan_run(const bl_job *job)
{
    return (bl_plan_run){.config = job->config,
                         .lora = &job->lora,
                         .longest_train_row = job->data.train.longest,
                         .longest_validation_row = job->data.validation.longest,
                         .n_validation_rows = job->data.validation.n};
}

/* others[n_others], borrowed by the input. */
static bl_plan_input training_input(const bl_job *job, const bl_plan_run *others, int n_others)
{
    bl_plan_input input = bl_job_plan_input(job);

    input.is_training = true;
    input.rows = bl_run_data_measure(job->config, &job->data);
    input.others = others;
    input.n_others = n_others;
    return input;
}

/* The base is placed, and the pass sized, for all runs. */
static bl_status plan_runs(bl_train_run_state *runs, int n, bl_plan_run *others)
{
    bl_job *job = &runs[0].training.job;

    for (int i = 1; i < n; i++) others[i - 1] = plan_run(&runs[i].training.job);
    bl_plan_input input = training_input(job, others, n - 1);
    for (int i = 1; i < n; i++) {
        const bl_job *other = &runs[i].training.job;
        bl_plan_rows rows = bl_run_data_measure(other->config, &other->data);
        input.rows.largest = rows.largest == 0 || input.rows.largest == 0
                                 ? 0
                                 : bl_max_i64(input.rows.largest, rows.largest);
        input.data_bytes += bl_run_data_bytes(&other->data);
        input.tokenizer_bytes += other->data.tokenizer_bytes;
    }
    BL_TRY(bl_job_choose_plan(job, &input));
    BL_TRY(bl_plan_expect_memory(&input, &job->plan.placement, &job->plan.pass, &job->expected));
    BL_TRY(print_model(job));
    for (int i = 1; i < n; i++)
        bl_log_info("%s: LoRA r %lld, %.2f M trainable", runs[i].training.name,
                    (long long)runs[i].training.job.lora.options.r,
                    trainable_m(&runs[i].training.job));
    bl_plan_print(&input, &job->plan);
    print_expected(job, &input.rows);
    return bl_plan_check(&input, &job->plan);
}

static bl_status plan(bl_train_run_state *runs, int n)
{
    bl_plan_run *others = calloc((size_t)n, sizeof *others);

    if (!others) return BL_FAIL(BL_ENOMEM, "%d runs", n);
    bl_status st = plan_runs(runs, n, others);
    free(others);
    return st;
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
        BL_TRY(open_rows(job));
    }
    enter(runs, n, -1);
    bl_job_print_base_formats(lead, "training");
    return BL_OK;
}

static bl_status prepare_runs(bl_train_run_state *runs, int n)
{
    bl_job *lead = &runs[0].training.job;

    for (int i = 0; i < n; i++)
        BL_TRY(compare_processes(&enter(runs, n, i)->training.job, &runs[i].output));
    enter(runs, n, -1);
    BL_TRY(plan(runs, n));
    BL_TRY(open_trace(&runs[0].training));
    for (int i = 0; i < n; i++) {
        if (i > 0) bl_job_borrow(&runs[i].training.job, lead);
        BL_TRY(prepare_output(&enter(runs, n, i)->training, &runs[i].output));
    }
    enter(runs, n, -1);
    return BL_OK;
}

/* In the process of rank 0, after the ranks have ended. */
static bl_status finish_run(bl_training *training, bl_output *output)
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
        char validation[64] = "";
        if (runs[i].training.job.data.validation.set)
            snprintf(validation, sizeof validation, "  validation %.4f", o->trained.loss);
        if (runs[i].status != BL_OK)
            bl_log_info(BL_LOG_VERBATIM "%-*s  failed", width, runs[i].training.name);
        else
            bl_log_info(BL_LOG_VERBATIM "%-*s  %lld steps  loss %.4f%s%s", width,
                        runs[i].training.name, (long long)o->n_steps, o->last_loss, validation,
                        i == best ? "  lowest" : "");
    }
}

static bl_status finish_runs(bl_train_run_state *runs, int n)
{
    for (int i = 0; i < n; i++) {
        if (runs[i].status != BL_OK) continue;
        BL_TRY(finish_run(&enter(runs, n, i)->training, &runs[i].output));
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
    return st == BL_OK || (n > 1 && st == BL_ENUMERIC && has_failure);
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

    BL_TRY(bl_cpu_gemm_prepare());
    BL_TRY(open_runs(runs, n));
    BL_TRY(prepare_runs(runs, n));
    bl_status st = bl_training_run_ranks(runs, n, &peak);
    print_memory(lead, &peak);
    if (st == BL_ESTOPPED) return report_stopped(runs, n);
    if (!has_results(runs, n, st)) return st;
    bl_error_save(&error, st);
    BL_TRY(close_trace(lead));
    if (lead->topology.first_here == 0) BL_TRY(finish_runs(runs, n));
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

static void close_run(bl_train_run_state *run)
{
    bl_job_close(&run->training.job);
    bl_output_close(&run->output); /* the lock last */
    free(run->training.start.dir);
    free(run->training.checkpoint_dir);
}

static const char *last_part(const char *path)
{
    const char *slash = strrchr(path, '/');
    return slash && slash[1] ? slash + 1 : path;
}

/* The last part of each output_dir, if no two are the same. */
static void name_runs(bl_train_run_state *runs, int n)
{
    bool are_distinct = true;

    for (int i = 0; i < n; i++) {
        runs[i].training.name = last_part(runs[i].training.config->output_dir);
        for (int k = 0; k < i; k++)
            are_distinct &= strcmp(runs[i].training.name, runs[k].training.name) != 0;
    }
    for (int i = 0; i < n && !are_distinct; i++)
        runs[i].training.name = runs[i].training.config->output_dir;
}

bl_status bl_train_run_all(const bl_train_config *const *configs, int n, bl_launch *launch,
                           const struct bl_pager_hooks *hooks)
{
    bl_train_run_state *runs = calloc((size_t)n, sizeof *runs);
    bl_error error;

    if (!runs) return BL_FAIL(BL_ENOMEM, "%d runs", n);
    for (int i = 0; i < n; i++)
        runs[i].training = (bl_training){
            .config = configs[i], .job = {.config = configs[i], .launch = launch, .hooks = hooks}};
    name_runs(runs, n);
    bl_status st = train(runs, n);
    bl_error_save(&error, st);
    bl_log_set_label(NULL);
    for (int i = n - 1; i >= 0; i--) close_run(&runs[i]); /* the lead last */
    free(runs);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

bl_status bl_train_run(const bl_train_config *config, bl_launch *launch,
                       const struct bl_pager_hooks *hooks)
{
    return bl_train_run_all(&config, 1, launch, hooks);
}
