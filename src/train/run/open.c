/* SPDX-License-Identifier: Apache-2.0 */
/* open.c -- the work of both kinds of run before their ranks start: ranks, model, plan; and their
 * end. */
#include <stdlib.h>

#include "base/files.h"
#include "base/log.h"
#include "base/memory.h"
#include "base/sizes.h"
#include "trained/choose.h"
#include "train/job.h"
#include "train/host_comm.h"

/* The ranks of a host are numbered one after the other. All processes of the job split, whatever is
 * shared where. */
static bl_status open_host_memory(bl_job *job)
{
    bl_topology *t = &job->topology;

    BL_TRY(bl_comm_split(job->host_world, t->first_here - t->first_on_host, &job->host_ranks));
    BL_TRY(bl_host_memory_open(bl_launch_host_memory_fd(job->launch), job->host_ranks,
                               &job->host_memory));
    t->shares_memory = job->host_memory != NULL;
    return BL_OK;
}

/* Compares sum_block first: comparing the other keys already gathers by blocks. */
static bl_status set_blocks(const bl_job *job)
{
    int n_ranks = job->topology.n_ranks, other = 1;
    int64_t *all = calloc((size_t)n_ranks, sizeof *all);
    bl_host_comm t;

    if (!all) return BL_FAIL(BL_ENOMEM, "%d processes", n_ranks);
    bl_status st = bl_host_comm_open(job->host_world, NULL, &t);
    if (st == BL_OK) {
        all[job->topology.first_here] = job->config->sum_block;
        st = bl_host_comm_gather(&t, all, sizeof *all);
        bl_host_comm_close(&t);
    }
    while (other < n_ranks && all[other] == all[0]) other++;
    if (st == BL_OK && other < n_ranks)
        st = BL_FAIL(BL_EUSAGE, "sum_block is not the same on rank 0 and on rank %d", other);
    free(all);
    return st == BL_OK ? bl_comm_set_sum_block(job->host_world, (int)job->config->sum_block) : st;
}

/* A block with ranks on several hosts is summed over the network: logs it. */
static void note_blocks(const bl_train_config *c, const bl_topology *t)
{
    bool spans = t->n_on_host < t->n_ranks && t->n_on_host % c->sum_block != 0;
    if (spans && t->first_here == 0)
        bl_log_info("sum_block %lld: sums over ranks need fewer bytes between hosts with the ranks "
                    "per host, %d, or a divisor of them",
                    (long long)c->sum_block, t->n_on_host);
}

bl_status bl_job_place_ranks(bl_job *job)
{
    const bl_train_config *c = job->config;
    int n_processes = bl_launch_size(job->launch);
    bl_topology *t = &job->topology;
    bl_launch_info info;

    if (bl_train_config_starts_ranks(c) > 0)
        return BL_FAIL(BL_EUSAGE,
                       "rank_processes true: `ballast train` and `ballast eval` start processes; "
                       "here ranks are threads: use false");
    t->n_ranks = t->n_here = t->n_on_host = (int)c->ranks;
    if (c->device == BL_CONFIG_DEVICE_CUDA) BL_TRY(bl_config_find_gpu(&job->gpu, &t->gpu));
    if (!job->launch) return BL_OK;
    if (c->ranks != n_processes)
        return BL_FAIL(
            BL_EUSAGE,
            "ranks: %lld, but %d processes were started, and each is a rank: leave the key out",
            (long long)c->ranks, n_processes);
    t->n_here = 1;
    t->first_here = bl_launch_rank(job->launch);
    bl_launch_read(&info);
    t->first_on_host = info.local_rank;
    t->n_on_host = info.n_local;
    BL_TRY(bl_launch_create_comm(job->launch, c->step_deadline_s, &job->host_world));
    BL_TRY(set_blocks(job));
    note_blocks(c, t);
    return open_host_memory(job);
}

void bl_job_borrow(bl_job *job, const bl_job *lead)
{
    job->lead = lead;
    job->hooks = lead->hooks;
    job->launch = lead->launch;
    job->topology = lead->topology;
    job->gpu = lead->gpu;
    job->host_world = lead->host_world;
    job->host_ranks = lead->host_ranks;
    job->host_memory = lead->host_memory;
    job->model = lead->model;
    job->base_formats = lead->base_formats;
    job->plan = lead->plan;
    job->expected = lead->expected;
    job->bf16_matrices = lead->bf16_matrices;
    job->trace = lead->trace;
}

static bl_status choose_trained(bl_job *job)
{
    bl_trained_set set;

    if (!job->model->is_trained) return BL_OK;
    BL_TRY(bl_adapter_choose_trained(job->config, &job->model->config, &set));
    bl_model_set_trained(job->model, &set);
    return BL_OK;
}

/* The key is read where the format is made here and has a choice of scales. */
static void warn_of_scales(const bl_train_config *c, bl_base_format format)
{
    bool has_choice =
        format == BL_BASE_MXFP4 || format == BL_BASE_INT4_G32 || format == BL_BASE_INT4_G128;

    if (c->base_format_scales == BL_SCALES_LARGEST && !has_choice)
        bl_log_warning("base_format_scales largest has no effect with base_format %s",
                       bl_base_format_name(c->base_format));
}

bl_status bl_job_open_model(bl_job *job)
{
    const bl_train_config *c = job->config;
    int n_shards = bl_plan_n_shards(c, &job->topology),
        n_replicas = (int)bl_ceil_div(job->topology.n_on_host, n_shards);

    bl_base_format format = bl_train_config_is_full(c) ? BL_BASE_TRAINED : c->base_format;

    BL_TRY(bl_model_open_shared(c->model_name_or_path, format, c->max_seq_length, job->host_memory,
                                n_replicas, &job->model));
    warn_of_scales(c, format);
    BL_TRY(bl_arch_set_expert_group(&job->model->config, c->expert_group));
    job->model->io_engine = c->io_engine;
    job->model->largest_scales = c->base_format_scales == BL_SCALES_LARGEST;
    job->base_formats = job->model->base_formats;
    BL_TRY(bl_base_formats_check_device(&job->base_formats, bl_train_config_device_kind(c)));
    BL_TRY(choose_trained(job));
    if (c->max_seq_length > job->model->config.max_position_embeddings)
        bl_log_warning("max_seq_length %lld is beyond the model's %lld positions",
                       (long long)c->max_seq_length,
                       (long long)job->model->config.max_position_embeddings);
    return BL_OK;
}

void bl_job_measure_rows(bl_job *job)
{
    job->model->n_positions = bl_max_i64(job->lead ? job->model->n_positions : 1,
                                         bl_run_data_positions(job->config, &job->data));
}

void bl_job_print_base_formats(const bl_job *job, const char *where)
{
    char text[BL_BASE_FORMATS_TEXT_BYTES];
    bl_base_formats_describe(&job->base_formats, where, text);
    if (bl_train_config_is_full(job->config))
        bl_log_info("finetuning_type full: %s", text);
    else
        bl_log_info("base_format %s: %s", bl_base_format_name(job->config->base_format), text);
}

bl_plan_input bl_job_plan_input(const bl_job *job)
{
    const bl_model *model = job->model;
    bl_model_stored_size stored = bl_model_measure_stored(model);
    return (bl_plan_input){
        .config = job->config,
        .model = &model->config,
        .formats = model->formats,
        .embedding_dtype = model->embedding_dtype,
        .head_dtype = model->head_dtype,
        .n_positions = model->n_positions,
        .load_bytes = bl_model_load_bytes(&stored, bl_plan_n_shards(job->config, &job->topology)),
        .lora = &job->lora,
        .modules = job->modules.set.n_tensors > 0 ? &job->modules.set : NULL,
        .trained = model->is_trained ? &model->trained : NULL,
        .topology = job->topology,
        .data_bytes = bl_run_data_bytes(&job->data),
        .tokenizer_bytes = job->data.tokenizer_bytes,
        .longest_train_row = job->data.train.longest,
        .longest_validation_row = job->data.validation.longest,
        .n_validation_rows = job->data.validation.n};
}

/* As output_dir, it is made with its parents. */
static bl_status make_offload_dir(const bl_train_config *c)
{
    if (!c->offload_dir) return BL_OK;
    if (c->offload_tier != BL_OFFLOAD_DISK && c->optimizer_tier != BL_OPTIMIZER_DISK) {
        bl_log_info("offload_dir %s is not used: offload_tier is host", c->offload_dir);
        return BL_OK;
    }
    bl_status st = bl_dir_create_private(c->offload_dir);
    if (st == BL_OK) st = bl_path_check_private(c->offload_dir);
    return st == BL_OK ? BL_OK : bl_error_prefix(st == BL_EINPUT ? BL_EUSAGE : st, "offload_dir");
}

static bl_status choose_bf16_matrices(bl_job *job)
{
    int64_t n_layers = job->model->config.n_layers;

    job->bf16_matrices = calloc((size_t)n_layers, sizeof *job->bf16_matrices);
    if (!job->bf16_matrices)
        return BL_FAIL(BL_ENOMEM, "exceptions of %lld layers", (long long)n_layers);
    return bl_train_config_bf16_matrices(job->config, n_layers, job->bf16_matrices);
}

bl_status bl_job_choose_plan(bl_job *job, const bl_plan_input *input)
{
    BL_TRY(choose_bf16_matrices(job));
    BL_TRY(make_offload_dir(job->config));
    return bl_job_choose_pass(job, input);
}

bl_status bl_job_place_base(bl_job *job, bl_plan_input *input)
{
    const bl_train_config *c = job->config;

    BL_TRY(bl_adapter_choose_lora(c, &job->model->config, true, &job->lora));
    *input = bl_job_plan_input(job);
    input->is_training = true;
    input->longest_train_row = input->longest_validation_row = c->max_seq_length;
    input->available_bytes = bl_memory_available_bytes();
    if (job->gpu.n_gpus > 0) input->gpu_available_bytes = bl_plan_gpu_available_bytes(input);
    BL_TRY(bl_job_choose_plan(job, input));
    job->expected = job->plan.memory;
    return BL_OK;
}

bl_status bl_job_choose_pass(bl_job *job, const bl_plan_input *input)
{
    bl_plan_input of_all = *input;
    of_all.bf16_matrices = job->bf16_matrices;
    if (job->launch) BL_TRY(bl_job_share_memory(job, &of_all));
    BL_TRY(bl_plan_choose(&of_all, &job->plan));
    job->plan.pass.bf16_matrices = job->bf16_matrices;
    job->plan.n_overlapped = bl_plan_count_overlapped(&of_all, &job->plan.pass);
    return job->launch ? bl_job_compare_plans(job) : BL_OK;
}

void bl_job_close(bl_job *job)
{
    bl_run_data_close(&job->data);
    bl_saved_modules_free(&job->modules);
    if (job->lead) return;
    bl_host_memory_close(job->host_memory);
    bl_comm_destroy(job->host_ranks);
    bl_comm_destroy(job->host_world);
    (void)bl_trace_close(job->trace);
    bl_model_close(job->model);
    free(job->bf16_matrices);
}
