/* SPDX-License-Identifier: Apache-2.0 */
/* run.c -- the two kinds of run, training and evaluation, from their configuration to their end. */
#include "train/train.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/log.h"
#include "plan/lora.h"
#include "train/job.h"

static void print_model(const bl_job *job)
{
    const bl_train_config *c = job->config;
    char products[BL_CPU_GEMM_TEXT_BYTES];

    bl_cpu_gemm_describe(products);
    bl_log_info("products: %s", products);
    bl_log_info("model: %.1f M parameters, %lld layers; LoRA r %lld, %.2f M trainable; %d ranks x "
                "%lld threads, shards of %lld",
                (double)bl_llama_config_n_params(&job->host->config) * 1e-6,
                (long long)job->host->config.n_layers, (long long)job->lora.options.r,
                (double)(job->lora.n_floats * job->host->config.n_layers) * 1e-6,
                job->topology.n_ranks, (long long)c->threads, (long long)c->shard_size);
}

static bl_status prepare_output(bl_job *job)
{
    const bl_train_config *c = job->config;
    char *path = NULL;
    bl_status st = BL_OK;

    BL_TRY(bl_job_prepare_resume(job));
    job->total_steps = bl_train_total_steps(c, job->data.train.n);
    if (job->topology.first_here > 0) return BL_OK;
    BL_TRY(bl_path_join(c->output_dir, "config.resolved.yaml", &path));
    st = bl_train_config_write_resolved(c, path);
    free(path);
    if (st != BL_OK) return st;
    BL_TRY(bl_path_join(c->output_dir, "metrics.jsonl", &path));
    st = bl_metrics_open(path, job->start.metrics_bytes, c->logging_steps, &job->output.metrics);
    free(path);
    return st;
}

/* Processes of one job write a file each. */
bl_status bl_job_trace_path(const bl_job *job, char **path)
{
    if (!job->launch) return bl_text_format(path, "%s", job->config->trace);
    return bl_text_format(path, "%s.rank%d", job->config->trace, job->topology.first_here);
}

static bl_status open_trace(bl_job *job)
{
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

/* Evaluates the adapter that was written, on the formats that job->host now has, if that takes no more than training has taken. */
static bl_status evaluate_written(bl_job *job, bl_eval_result *out)
{
    bl_train_config config = *job->config;
    config.base_format = BL_BASE_STORED;
    config.init_adapter = config.output_dir;
    config.offload_ratio = 0.0; /* a measurement writes no page files */
    config.offload_tier = BL_OFFLOAD_HOST;
    config.offload_dir = NULL;
    bl_job stored = {.config = &config,
                     .host = job->host,
                     .data.validation = job->data.validation,
                     .evaluate_only = true,
                     .topology = job->topology};
    int64_t peak_bytes;

    BL_TRY(bl_plan_choose_lora(&config, &job->host->config, false, &stored.lora));
    BL_TRY(bl_job_choose_plan(&stored));
    if (stored.plan.memory.total > job->plan.memory.total) {
        bl_log_info("the adapter was not evaluated on the base as stored, which needs more memory "
                    "than training did; "
                    "ballast eval --base_format stored does it");
        return BL_OK;
    }
    bl_log_info("evaluating the adapter on the base as stored, too (eval_stored_base)");
    BL_TRY(bl_job_run_ranks(&stored, &peak_bytes));
    *out = stored.output.outcome.trained;
    bl_log_info("validation loss with the adapter: %.4f as trained, %.4f on the base as stored",
                job->output.outcome.trained.loss, out->loss);
    return BL_OK;
}

/* What PEFT and vLLM would get from the checkpoint itself, for the README. Processes have spent their communicator. */
static bl_status evaluate_stored_base(bl_job *job)
{
    if (!job->config->eval_stored_base || !job->data.validation.set || job->launch ||
        !bl_llama_base_is_quantized(&job->base_formats))
        return BL_OK;
    bl_status st = bl_llama_host_set_format(job->host, BL_BASE_STORED);
    if (st == BL_OK) st = evaluate_written(job, &job->output.outcome.stored);
    if (st == BL_OK && job->output.outcome.stored.rows > 0)
        st = bl_job_write_readme(job, job->config->output_dir);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "the adapter is written; eval_stored_base");
}

static bl_status announce_plan(const bl_job *job)
{
    bl_plan_input input = bl_job_plan_input(job);
    bl_plan_print(&input, &job->plan);
    return bl_plan_check(&input, &job->plan);
}

static bl_status train_locked(bl_job *job)
{
    int64_t peak_bytes = 0;

    BL_TRY(bl_job_open(job));
    BL_TRY(prepare_output(job));
    BL_TRY(open_trace(job));
    BL_TRY(bl_job_choose_plan(job));
    print_model(job);
    BL_TRY(announce_plan(job));
    bl_status st = bl_job_run_ranks(job, &peak_bytes);
    bl_log_info("memory measured: peak %.1f MiB anonymous, predicted %.1f MiB",
                (double)peak_bytes / (1 << 20), (double)job->plan.memory.total / (1 << 20));
    if (st == BL_OK) st = close_trace(job);
    if (st != BL_OK || job->topology.first_here > 0) return st;
    BL_TRY(bl_job_check_lock(job));
    BL_TRY(bl_job_write_readme(job, job->config->output_dir));
    bl_log_info("adapter written to %s", job->config->output_dir);
    return evaluate_stored_base(job);
}

/* output_dir is the business of rank 0's process, which holds its lock for all. */
static bl_status take_output_dir(bl_job *job)
{
    if (job->topology.first_here > 0) return BL_OK;
    bl_status st = bl_dir_create(job->config->output_dir);
    if (st != BL_OK) return bl_error_prefix(st == BL_EINPUT ? BL_EUSAGE : st, "output_dir");
    return bl_dir_lock_acquire(job->config->output_dir, &job->output.lock);
}

bl_status bl_train_run(const bl_train_config *config, bl_launch *launch)
{
    bl_job job = {.config = config, .launch = launch};

    bl_status st = bl_cpu_gemm_prepare();
    if (st == BL_OK) st = bl_job_place_ranks(&job);
    if (st == BL_OK) st = bl_job_check_paths(&job);
    if (st == BL_OK) st = take_output_dir(&job);
    if (st == BL_OK) st = train_locked(&job);
    bl_error error;
    bl_error_save(&error, st);
    bl_job_close(&job);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}

bl_status bl_eval_run(const bl_train_config *config, bl_launch *launch, bl_eval_result *out)
{
    bl_job job = {.config = config, .launch = launch, .evaluate_only = true};
    int64_t peak_bytes;

    bl_status st = bl_cpu_gemm_prepare();
    if (st == BL_OK) st = bl_job_place_ranks(&job);
    if (st == BL_OK) st = bl_job_open(&job);
    if (st == BL_OK && !job.data.validation.set)
        st = BL_FAIL(BL_EUSAGE, "eval needs validation_file");
    if (st == BL_OK) st = bl_job_identify(&job);
    if (st == BL_OK && job.launch) st = bl_job_check_processes(&job);
    if (st == BL_OK) st = bl_job_choose_plan(&job);
    if (st == BL_OK) st = announce_plan(&job);
    if (st == BL_OK) st = bl_job_run_ranks(&job, &peak_bytes);
    *out = job.output.outcome.trained;
    out->base = job.base_formats;
    bl_error error;
    bl_error_save(&error, st);
    bl_job_close(&job);
    return st == BL_OK ? BL_OK : bl_error_restore(&error);
}
