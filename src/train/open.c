/* SPDX-License-Identifier: Apache-2.0 */
/* open.c -- what a job holds while it runs, opened and closed: ranks, model, tokenizer, data, LoRA. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/files.h"
#include "base/log.h"
#include "base/sizes.h"
#include "plan/lora.h"
#include "train/job.h"

static bl_status open_dataset(const bl_job *job, const char *path, bl_dataset **out)
{
    const bl_train_config *c = job->config;
    bl_dataset_options options = bl_dataset_default_options(path);
    bl_dataset_stats stats;

    options.format = c->data_format;
    options.max_seq_length = c->max_seq_length;
    options.overlong = c->overlong;
    options.train_on_inputs = c->train_on_inputs;
    options.skip_bad = c->skip_bad;
    options.vocab_size = (int32_t)job->host->config.vocab_size;
    options.chat_template = c->chat_template;
    options.template_date = c->template_date;
    options.no_tokenizer = job->tokenizer_error.status == BL_OK ? NULL : &job->tokenizer_error;
    options.n_threads = (int)(c->threads * job->topology.n_ranks);
    BL_TRY(bl_dataset_open(&options, job->tokenizer, out));
    bl_dataset_get_stats(*out, &stats);
    bl_log_info("%s: %lld samples, %lld tokens, %lld of them labels", path,
                (long long)bl_dataset_count(*out), (long long)stats.n_tokens,
                (long long)stats.n_label_tokens);
    return BL_OK;
}

/* Whether a tokenizer is needed is known once a data set's format is; one that cannot be used stops nothing
 * before. */
static bl_status open_tokenizer(bl_job *job)
{
    const bl_train_config *c = job->config;
    char *path = NULL;
    bool present;

    BL_TRY(bl_path_join(c->model_name_or_path, "tokenizer.json", &path));
    bl_status st = bl_path_exists(path, &present);
    free(path);
    if (st != BL_OK) return st;
    if (!present && (c->data_format == BL_DATA_TOKENS || c->data_format == BL_DATA_AUTO))
        return BL_OK;
    st = bl_tokenizer_load(c->model_name_or_path, &job->tokenizer);
    if (st == BL_EINPUT) {
        bl_error_save(&job->tokenizer_error, st);
        return BL_OK;
    }
    BL_TRY(st);
    int64_t tokens = bl_tokenizer_vocab_size(job->tokenizer);
    if (tokens > job->host->config.vocab_size && c->data_format != BL_DATA_TOKENS)
        bl_log_warning("the tokenizer has %lld tokens, the model's embedding %lld rows",
                       (long long)tokens, (long long)job->host->config.vocab_size);
    return BL_OK;
}

/* From here on the rows of both data sets are packed ones. A split is made before, of samples. */
static bl_status pack_data(bl_job *job)
{
    const bl_train_config *c = job->config;
    bl_dataset *rows;

    if (job->validation) {
        BL_TRY(bl_dataset_pack(job->validation, c->packing, c->max_seq_length, 0,
                               job->n_validation_rows, &rows));
        if (job->validation != job->train) bl_dataset_close(job->validation);
        job->validation = rows;
        job->n_validation_rows = bl_dataset_count(rows);
    }
    if (job->train) {
        BL_TRY(bl_dataset_pack(job->train, c->packing, c->max_seq_length, job->first_train_row,
                               job->n_train_rows, &rows));
        bl_dataset_close(job->train);
        job->train = rows;
        job->first_train_row = 0;
        job->n_train_rows = bl_dataset_count(rows);
    }
    return BL_OK;
}

static int64_t longest_row(const bl_dataset *rows, int64_t first, int64_t n)
{
    int64_t longest = 0;
    for (int64_t row = first; rows && row < first + n; row++)
        longest = bl_max_i64(longest, bl_dataset_n_tokens(rows, row));
    return longest;
}

/* What buffers are sized by: max_seq_length may be far above what the data have. */
static void measure_rows(bl_job *job)
{
    job->longest_train_row = longest_row(job->train, job->first_train_row, job->n_train_rows);
    job->longest_validation_row = longest_row(job->validation, 0, job->n_validation_rows);
    job->host->n_positions =
        bl_max_i64(1, bl_max_i64(job->longest_train_row, job->longest_validation_row));
}

static bl_status open_data(bl_job *job)
{
    const bl_train_config *c = job->config;

    BL_TRY(open_tokenizer(job));
    if (c->train_file && !job->evaluate_only) {
        BL_TRY(open_dataset(job, c->train_file, &job->train));
        job->n_train_rows = bl_dataset_count(job->train);
    }
    if (c->validation_file) {
        BL_TRY(open_dataset(job, c->validation_file, &job->validation));
        job->n_validation_rows = bl_dataset_count(job->validation);
    } else if (job->train && c->validation_split_percentage > 0) {
        BL_TRY(bl_dataset_split(job->n_train_rows, c->validation_split_percentage,
                                &job->n_validation_rows));
        job->validation = job->train;
        job->first_train_row = job->n_validation_rows;
        job->n_train_rows -= job->n_validation_rows;
    }
    if (job->tokenizer_error.status != BL_OK)
        bl_log_warning("%s; rows of tokens need no tokenizer", job->tokenizer_error.text);
    if (c->packing != BL_PACKING_NONE) BL_TRY(pack_data(job));
    measure_rows(job);
    return BL_OK;
}

/* Which ranks there are, and which of them are this process's. */
bl_status bl_job_place_ranks(bl_job *job)
{
    const bl_train_config *c = job->config;
    int n_processes = bl_launch_size(job->launch);
    bl_topology *t = &job->topology;
    bl_launch_info info;

    t->n_ranks = t->n_here = t->n_on_host = (int)c->ranks;
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
    return bl_launch_create_comm(job->launch, c->step_deadline_s, &job->world);
}

static void print_base_formats(const bl_job *job)
{
    char text[BL_BASE_FORMATS_TEXT_BYTES];
    bl_llama_base_formats_describe(&job->base_formats, job->evaluate_only ? "memory" : "training",
                                   text);
    bl_log_info("base_format %s: %s", bl_base_format_name(job->config->base_format), text);
}

bl_status bl_job_open(bl_job *job)
{
    const bl_train_config *c = job->config;

    BL_TRY(
        bl_llama_host_open(c->model_name_or_path, c->base_format, c->max_seq_length, &job->host));
    job->host->io_engine = c->io_engine;
    job->base_formats = job->host->base_formats;
    if (c->max_seq_length > job->host->config.max_position_embeddings)
        bl_log_warning("max_seq_length %lld is beyond the model's %lld positions",
                       (long long)c->max_seq_length,
                       (long long)job->host->config.max_position_embeddings);
    BL_TRY(open_data(job));
    BL_TRY(bl_plan_choose_lora(c, &job->host->config, !job->evaluate_only, &job->lora));
    print_base_formats(job);
    return BL_OK;
}

bl_plan_input bl_job_plan_input(const bl_job *job)
{
    const bl_llama_host *host = job->host;
    return (bl_plan_input){
        .config = job->config,
        .model = &host->config,
        .formats = host->formats,
        .embedding_dtype = host->embedding_dtype,
        .head_dtype = host->head_dtype,
        .n_positions = host->n_positions,
        .load_bytes = bl_llama_load_bytes(host, bl_plan_n_shards(job->config, &job->topology)),
        .lora = &job->lora,
        .topology = job->topology,
        .is_training = !job->evaluate_only,
        .longest_train_row = job->longest_train_row,
        .longest_validation_row = job->longest_validation_row};
}

/* As output_dir, it is made with its parents. */
static bl_status make_offload_dir(const bl_train_config *c)
{
    if (!c->offload_dir) return BL_OK;
    if (c->offload_tier != BL_OFFLOAD_DISK) {
        bl_log_info("offload_dir %s is not used: offload_tier is host", c->offload_dir);
        return BL_OK;
    }
    bl_status st = bl_dir_create(c->offload_dir);
    return st == BL_OK ? BL_OK : bl_error_prefix(st == BL_EINPUT ? BL_EUSAGE : st, "offload_dir");
}

bl_status bl_job_choose_plan(bl_job *job)
{
    BL_TRY(make_offload_dir(job->config));
    bl_plan_input input = bl_job_plan_input(job);
    return bl_plan_choose(&input, &job->plan);
}

bl_status bl_job_check_lock(const bl_job *job)
{
    if (!job->lock) return BL_OK;
    bl_status st = bl_dir_lock_check(job->lock);
    return st == BL_OK ? BL_OK : bl_error_prefix(st, "output_dir");
}

void bl_job_abort_saving(bl_job *job)
{
    if (bl_job_check_lock(job) == BL_OK)
        bl_checkpoint_abort(job->saving);
    else
        bl_checkpoint_leave(job->saving);
    job->saving = NULL;
}

void bl_job_close(bl_job *job)
{
    bl_comm_destroy(job->world);
    bl_metrics_close(job->metrics);
    (void)bl_trace_close(job->trace);
    bl_job_abort_saving(job);
    if (job->validation != job->train) bl_dataset_close(job->validation);
    bl_dataset_close(job->train);
    bl_tokenizer_destroy(job->tokenizer);
    bl_llama_host_close(job->host);
    free(job->resume_dir);
    free(job->checkpoint_dir);
    bl_dir_lock_release(job->lock);
}
