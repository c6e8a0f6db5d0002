/* SPDX-License-Identifier: Apache-2.0 */
/* run.c -- a training, from its configuration to its end. */
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

static bl_status print_model(const bl_job *job)
{
    const bl_train_config *c = job->config;
    char products[BL_CUDA_GEMM_TEXT_BYTES];

    BL_TRY(bl_products_describe(job, products));
    bl_log_info("products: %s", products);
    bl_log_info("model: %.1f M parameters, %lld layers; LoRA r %lld, %.2f M trainable; %d rank%s x "
                "%lld thread%s, shards of %lld",
                (double)bl_model_config_n_params(&job->model->config) * 1e-6,
                (long long)job->model->config.n_layers, (long long)job->lora.options.r,
                (double)(job->lora.n_floats * job->model->config.n_layers) * 1e-6,
                job->topology.n_ranks, job->topology.n_ranks == 1 ? "" : "s", (long long)c->threads,
                c->threads == 1 ? "" : "s", (long long)c->shard_size);
    return BL_OK;
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

    static const char *const added[] = {BL_OUTPUT_CONFIG, BL_OUTPUT_METRICS};

    BL_TRY(bl_training_start_over(training, output));
    BL_TRY(bl_output_list(c->output_dir, output, added, BL_COUNT(added)));
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
    BL_TRY(open_trace(training));
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

/* The losses of the adapter on the checkpoint as stored, as PEFT and vLLM use it, for the README.
 * Processes have spent their communicator. */
static bl_status evaluate_stored_base(bl_training *training, bl_output *output)
{
    bl_job *job = &training->job;
    bl_outcome *outcome = &output->outcome;

    if (!job->config->eval_stored_base || !job->data.validation.set || job->launch ||
        !bl_model_base_is_quantized(&job->base_formats))
        return BL_OK;
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

static bl_status open_job(bl_job *job)
{
    const bl_train_config *c = job->config;

    BL_TRY(bl_job_open_model(job));
    BL_TRY(bl_run_data_open_training(c, &job->model->config, job->host_memory, job->topology.n_here,
                                     &job->data));
    bl_job_measure_rows(job);
    BL_TRY(bl_adapter_choose_lora(c, &job->model->config, true, &job->lora));
    bl_job_print_base_formats(job, "training");
    return BL_OK;
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

static bl_status plan(bl_job *job)
{
    bl_plan_input input = bl_job_plan_input(job);

    input.is_training = true;
    input.rows = bl_run_data_measure(job->config, &job->data);
    BL_TRY(bl_job_choose_plan(job, &input));
    BL_TRY(bl_plan_expect_memory(&input, &job->plan.placement, &job->plan.pass, &job->expected));
    BL_TRY(print_model(job));
    bl_plan_print(&input, &job->plan);
    print_expected(job, &input.rows);
    return bl_plan_check(&input, &job->plan);
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

static bl_status train(bl_training *training, bl_output *output)
{
    bl_job *job = &training->job;
    const char *dir = job->config->output_dir;
    bl_peak_memory peak = {0};

    BL_TRY(bl_cpu_gemm_prepare());
    BL_TRY(bl_job_place_ranks(job));
    BL_TRY(bl_job_check_paths(job));
    if (job->topology.first_here == 0) BL_TRY(bl_output_open(dir, output));
    BL_TRY(open_job(job));
    BL_TRY(compare_processes(job, output));
    BL_TRY(plan(job));
    BL_TRY(prepare_output(training, output));
    bl_status st = bl_training_run_ranks(training, output, &peak);
    print_memory(job, &peak);
    if (st == BL_OK) st = close_trace(job);
    if (st != BL_OK || job->topology.first_here > 0) return st;
    BL_TRY(bl_output_check_lock(output));
    BL_TRY(bl_output_failure(output, bl_training_write_readme(training, &output->outcome, dir)));
    bl_metrics_print_end(output->metrics);
    if (output->outcome.adapter_step < output->outcome.n_steps)
        bl_log_info("adapter of step %lld, which had the lowest validation loss, written to %s",
                    (long long)output->outcome.adapter_step, dir);
    else
        bl_log_info("adapter written to %s", dir);
    BL_TRY(evaluate_stored_base(training, output));
    return print_next(job);
}

bl_status bl_train_run(const bl_train_config *config, bl_launch *launch,
                       const struct bl_pager_hooks *hooks)
{
    bl_training training = {.config = config,
                            .job = {.config = config, .launch = launch, .hooks = hooks}};
    bl_output output = {0};

    bl_status st = train(&training, &output);
    bl_error error;
    bl_error_save(&error, st);
    bl_job_close(&training.job);
    bl_output_close(&output); /* the lock last */
    free(training.start.dir);
    free(training.checkpoint_dir);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}
